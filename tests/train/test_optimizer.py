"""AdamW equals PyTorch's, float32 masters lose nothing, and every parameter has a gradient and moments."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.config.parallel import Offload
from penstock.config.run import Optimizer
from penstock.parallel.shard import ParamShard
from penstock.train.adamw import UNIT, FusedAdamW, StreamedAdamW, is_decayed
from penstock.train.optimizer import MasterAdamW, clip_divisor
from tests.closeness import assert_close, assert_equal
from tests.examples import examples
from tests.train.small_model import SETTINGS, SmallModel, holdings_of, tokens

RATES = (0.004, 0.01, 0.007)


def _torch_adamw(parameters: dict[str, Tensor]) -> torch.optim.AdamW:
    decayed = [tensor for name, tensor in parameters.items() if is_decayed(name, tensor)]
    others = [tensor for name, tensor in parameters.items() if not is_decayed(name, tensor)]
    groups = [{"params": decayed, "weight_decay": SETTINGS.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(SETTINGS.beta1, SETTINGS.beta2), eps=SETTINGS.epsilon, fused=True)


def _step(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def _held(weight: nn.Parameter) -> list[ParamShard]:
    module = nn.Module()
    module.register_parameter("weight", weight)
    return holdings_of(module)


def _saved(optimizer: MasterAdamW) -> dict[str, Tensor]:
    return {name: part.tensor for name, part in optimizer.parts().items()}


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blocks.0.experts.down_eDF", (4, 8, 16), True),
        ("blocks.0.attention.query_norm.weight_HN", (2, 8), False),
        ("blocks.0.experts.bias_eD", (4, 8), False),
        ("blocks.0.norm.weight_D", (8,), False),
        ("blocks.0.ffn_streams.weight", (8, 16), False),
        ("enormous_VD", (8, 8), True),
    ],
)
def test_decay_goes_by_shape_and_name(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_decayed(name, torch.zeros(shape)) is expected


def test_float32_equals_torch_adamw_bit_for_bit() -> None:
    ours, theirs = SmallModel().eval(), SmallModel().eval()
    optimizer = MasterAdamW(holdings_of(ours), SETTINGS)
    reference = _torch_adamw(dict(theirs.named_parameters()))
    for index, rate in enumerate(RATES):
        optimizer.zero_gradients()
        reference.zero_grad()
        for micro in range(2):
            ours(tokens(10 * index + micro)).backward()
            theirs(tokens(10 * index + micro)).backward()
        divisor = clip_divisor(optimizer.gradient_norm().item(), 0.3)
        assert divisor > 1.0
        for parameter in theirs.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        optimizer.step(rate, divisor)
        _step(reference, rate)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert "unused" in name or torch.equal(mine, other), name


def test_bfloat16_with_masters_equals_a_float32_run_of_the_same_gradients() -> None:
    model = SmallModel(torch.bfloat16)
    initial = {name: parameter.detach().clone().float() for name, parameter in model.named_parameters()}
    optimizer = MasterAdamW(holdings_of(model), SETTINGS)
    reference = _torch_adamw(initial)
    for index, rate in enumerate(RATES):
        optimizer.zero_gradients()
        model(tokens(index)).backward()
        for name, gradient in optimizer.gradients():
            assert gradient.dtype == torch.float32, name
            initial[name].grad = gradient.clone()
        optimizer.step(rate)
        _step(reference, rate)
    saved = _saved(optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(saved[f"model.{name}"], initial[name]), name
        assert torch.equal(parameter, initial[name].to(parameter.dtype)), name
    assert saved["model.router.weight"].data_ptr() == model.router.weight.data_ptr(), "float32 is its own master"


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW(_held(parameter), SETTINGS)
    for _ in range(1000):  # a bfloat16 sum of ones stops at 256
        parameter.sum().backward()
    assert optimizer.gradient_of("weight").tolist() == [1000.0] * 4
    assert parameter.grad is None


def test_updates_too_small_for_bfloat16_are_not_lost() -> None:
    parameter = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = MasterAdamW(_held(parameter), SETTINGS)
    for _ in range(100):
        optimizer.zero_gradients()
        parameter.sum().backward()
        optimizer.step(1e-4)
    assert_close(parameter[0, 0], 0.99, tolerance=0.004)  # bfloat16 below 1 has steps of 0.0039


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_gradient_decays_and_has_moments(dtype: torch.dtype) -> None:
    model = SmallModel(dtype)
    optimizer = MasterAdamW(holdings_of(model), SETTINGS)
    before = model.unused.weight.detach().clone().float()
    bias = model.unused.bias.detach().clone()
    model(tokens(0)).backward()
    optimizer.step(0.5)
    assert not optimizer.gradient_of("unused.weight").any()
    assert not _saved(optimizer)["moment1.unused.weight"].any()
    assert_close(model.unused.weight, (before * (1 - 0.5 * SETTINGS.weight_decay)).to(dtype))
    assert torch.equal(model.unused.bias, bias)


def test_a_kernel_may_add_to_the_gradient_buffer_itself() -> None:
    model = SmallModel(torch.bfloat16)
    optimizer = MasterAdamW(holdings_of(model), SETTINGS)
    buffer = optimizer.gradient_of("unused.weight")
    buffer += 1.0
    optimizer.step(0.01)
    moment1 = _saved(optimizer)["moment1.unused.weight"]
    assert_close(moment1, torch.full_like(moment1, 1 - SETTINGS.beta1))
    optimizer.zero_gradients()
    assert optimizer.gradient_of("unused.weight") is buffer
    assert not buffer.any()


@pytest.mark.parametrize(("limit", "expected"), [(1.0, 1.0), (100.0, 13.0), (0.0, 13.0)])
def test_clipping_scales_to_the_limit_and_never_up(limit: float, expected: float) -> None:
    model = SmallModel(torch.bfloat16)
    optimizer = MasterAdamW(holdings_of(model), SETTINGS)
    optimizer.gradient_of("embed.weight")[0, 0] = 5.0  # 5, 12 and 13 are a right triangle
    optimizer.gradient_of("router.weight")[0, 0] = 12.0
    norm = optimizer.gradient_norm()
    assert (norm.item(), norm.dtype, norm.shape) == (13.0, torch.float32, ())
    divisor = clip_divisor(norm.item(), limit)
    optimizer.step(0.01, divisor)
    assert not optimizer.gradient_norm(), "the update has set gradients to zero"
    moments = [tensor.flatten() for name, tensor in _saved(optimizer).items() if name.startswith("moment1")]
    assert_close(torch.cat(moments).norm() / (1 - SETTINGS.beta1), expected)
    assert (divisor == 1.0) == (expected == 13.0), "a gradient within the limit is not touched"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("places", [("device", "device"), ("device", "host"), ("host", "device")], ids="-".join)
def test_what_is_saved_before_or_after_a_step_continues_bit_for_bit_on_the_device_or_the_host(
    dtype: torch.dtype, places: tuple[str, str]
) -> None:
    for done in (0, 2):
        models = [SmallModel(dtype, seed).eval() for seed in (0, 1)]
        optimizers = [
            MasterAdamW(holdings_of(model), SETTINGS, offload=Offload(optimizer=place == "host"))
            for model, place in zip(models, places, strict=True)
        ]
        _train(models[0], optimizers[0], range(done))
        saved = _saved(optimizers[0])
        for name, tensor in _saved(optimizers[1]).items():
            tensor.copy_(saved[name])
        optimizers[1].loaded()
        assert_equal(list(models[1].parameters()), list(models[0].parameters()))
        for model, optimizer in zip(models, optimizers, strict=True):
            _train(model, optimizer, range(done, done + 2))
        assert_equal(list(models[1].parameters()), list(models[0].parameters()))
        assert_equal(_saved(optimizers[1]), _saved(optimizers[0]))
        assert _saved(optimizers[1])["step"].item() == done + 2


def _train(model: SmallModel, optimizer: MasterAdamW, steps: range) -> None:
    for step in steps:
        optimizer.zero_gradients()
        model(tokens(step)).backward()
        optimizer.step(0.01, clip_divisor(optimizer.gradient_norm().item(), 0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_gradient_that_is_computed_later_arrives_too(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(2, 3, dtype=dtype))
    optimizer = MasterAdamW(_held(weight), SETTINGS)
    buffer = optimizer.gradient_of("weight")
    for _ in range(2):
        weight.view_as(weight).backward(torch.full((2, 3), 1.5, dtype=dtype))
    assert optimizer.gradient_of("weight") is buffer
    assert buffer.tolist() == [[3.0] * 3] * 2
    optimizer.step(0.1)
    assert (weight < 0).all()


def test_taking_the_gradient_buffer_away_is_noticed() -> None:
    model = SmallModel()
    optimizer = MasterAdamW(holdings_of(model), SETTINGS)
    model.zero_grad()
    with pytest.raises(AssertionError, match=r"gradient buffer of down\.weight"):
        optimizer.step(0.1)
    with pytest.raises(AssertionError, match="twice"):
        MasterAdamW([*holdings_of(model), *holdings_of(model)], SETTINGS)


CPU = torch.device("cpu")
SHAPES = {
    "up.weight": (37, 29),
    "up.bias": (129,),
    "norm.weight": (UNIT,),
    "scale": (),
    "nothing.weight": (0, 4),
    "down.weight": (5, 7, 11),
    "router.weight": (13, 17),
}


def _values(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The router is always float32."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(device, torch.float32 if "router" in name else dtype)
        for name, shape in SHAPES.items()
    }


def _check_same_bits(
    device: torch.device, dtype: torch.dtype, chunk_bytes: int, settings: Optimizer = SETTINGS
) -> None:
    values, streamed_values = _values(device, dtype), _values(device, dtype)
    gradients = {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}
    starts = {name: 1000 * place for place, name in enumerate(SHAPES)}
    fused = FusedAdamW(values, gradients, settings, starts=starts)
    streamed = StreamedAdamW(streamed_values, gradients, settings, starts=starts, chunk_bytes=chunk_bytes)
    for number, rate in enumerate((0.01, 0.004, 0.02)):
        for optimizer in (fused, streamed):
            # The stream reads gradients in its own time, but before what is launched after it.
            generator = torch.Generator().manual_seed(1 + number)
            for gradient in gradients.values():
                gradient.copy_(torch.randn(gradient.shape, generator=generator))
            optimizer.update(rate)
            assert not any(gradient.any() for gradient in gradients.values())
    streamed.settle()
    assert streamed.step.item() == fused.step.item() == 3
    assert_equal(streamed_values, values)
    for name, one in streamed.tensors.items():
        assert one.state_fields == fused.tensors[name].state_fields
        assert_equal(one.state, fused.tensors[name].state, what=name)
        assert (one.master is None) == (one.value.dtype == torch.float32)
        assert all(tensor.device == CPU for tensor in one.state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(units=st.integers(0, 20))
@examples(12)
def test_updates_are_those_of_an_optimizer_on_the_device_to_the_bit(dtype: torch.dtype, units: int) -> None:
    _check_same_bits(CPU, dtype, units * UNIT * 12)


FORMATS = [
    SETTINGS.model_copy(update={"moment_dtype": moments, "store_param_remainders": splits})
    for moments in ("fp32", "bf16", "int8")
    for splits in (False, True)
]


@pytest.mark.parametrize("settings", FORMATS[1:], ids=lambda one: f"{one.moment_dtype}-{one.store_param_remainders}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_in_fewer_bits_passes_through_the_device_to_the_same_bits(
    dtype: torch.dtype, settings: Optimizer
) -> None:
    for chunk_bytes in (0, 2000, 1 << 20):
        _check_same_bits(CPU, dtype, chunk_bytes, settings)


@pytest.mark.parametrize(("dtype", "bytes_"), [(torch.bfloat16, 12), (torch.float32, 8)])
def test_what_is_its_own_master_stays_and_only_its_moments_go(dtype: torch.dtype, bytes_: int) -> None:
    weight = nn.Linear(64, 1024, bias=False, dtype=dtype)
    memory = MasterAdamW(holdings_of(weight), SETTINGS, offload=Offload(optimizer=True)).memory()
    assert memory.host == bytes_ * weight.weight.numel()
    assert memory.optimizer == 2 * memory.host, "all of it is one chunk"
    streamed = StreamedAdamW(
        {"weight": weight.weight.detach()}, {"weight": torch.zeros(1024, 64)}, SETTINGS, chunk_bytes=1 << 14
    )
    assert streamed.device_bytes <= 2 << 14  # two chunks


@pytest.mark.gpu
@pytest.mark.parametrize("settings", FORMATS, ids=lambda one: f"{one.moment_dtype}-{one.store_param_remainders}")
@pytest.mark.parametrize("chunk_bytes", [UNIT * 12, 5 * UNIT * 12, 1 << 26])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_on_a_gpu_are_those_of_an_optimizer_on_it_to_the_bit(
    dtype: torch.dtype, chunk_bytes: int, settings: Optimizer
) -> None:
    _check_same_bits(torch.device("cuda"), dtype, chunk_bytes, settings)


@pytest.mark.gpu
def test_a_step_waits_for_nothing_and_leaves_nothing_but_two_chunks_on_the_gpu() -> None:
    values = {f"weight{index}": torch.randn(1 << 12, 1 << 10, device="cuda").bfloat16() for index in range(8)}
    gradients = {name: torch.randn_like(value, dtype=torch.float32) for name, value in values.items()}
    before = torch.cuda.memory_allocated()
    streamed = StreamedAdamW(values, gradients, SETTINGS, chunk_bytes=1 << 24)
    assert all(tensor.is_pinned() for one in streamed.tensors.values() for tensor in one.state)
    torch.cuda.reset_peak_memory_stats()
    streamed.update(0.01)
    torch.cuda.set_sync_debug_mode("error")
    try:
        streamed.update(0.01)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    streamed.settle()
    most = torch.cuda.max_memory_allocated() - before
    assert streamed.device_bytes <= most <= streamed.device_bytes + (1 << 20)
