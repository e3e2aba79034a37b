"""AdamW equals PyTorch's, float32 masters lose nothing, and every parameter has a gradient and moments."""

import pytest
import torch
from torch import Tensor, nn

from penstock.parallel.shard import ParamShard
from penstock.train.adamw import is_decayed
from penstock.train.optimizer import MasterAdamW, clip_divisor
from tests.closeness import assert_close
from tests.train.small_model import SETTINGS, D, F, SmallModel, V, holdings_of, tokens

RATES = (0.004, 0.01, 0.007)


def _torch_adamw(parameters: dict[str, Tensor]) -> torch.optim.AdamW:
    """PyTorch's own over the same groups."""
    decayed = [tensor for name, tensor in parameters.items() if is_decayed(name, tensor)]
    others = [tensor for name, tensor in parameters.items() if not is_decayed(name, tensor)]
    groups = [{"params": decayed, "weight_decay": SETTINGS.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(SETTINGS.beta1, SETTINGS.beta2), eps=SETTINGS.epsilon, fused=True)


def _step(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def _held(weight: nn.Parameter) -> list[ParamShard]:
    """One parameter of this name."""
    module = nn.Module()
    module.register_parameter("weight", weight)
    return holdings_of(module)


def _saved(optimizer: MasterAdamW) -> dict[str, Tensor]:
    return {name: part.tensor for name, part in optimizer.parts().items()}


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = SmallModel()
    decayed = {name for name, parameter in model.named_parameters() if is_decayed(name, parameter)}
    assert decayed == {"embed.weight", "up.weight", "unused.weight", "down.weight", "router.weight"}


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blocks.0.experts.down_eDF", (4, 8, 16), True),
        ("blocks.0.attention.query_norm.weight_HN", (2, 8), False),
        ("blocks.0.experts.bias_eD", (4, 8), False),
        ("blocks.0.norm.weight_D", (8,), False),
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
    assert_close(parameter[0, 0], 0.99, tolerance=0.004)


def test_the_norm_is_that_of_all_gradients_together() -> None:
    model = SmallModel()
    optimizer = MasterAdamW(holdings_of(model), SETTINGS)
    model(tokens(0)).backward()
    whole = torch.cat([gradient.flatten() for _, gradient in optimizer.gradients()])
    assert_close(optimizer.gradient_norm(), whole.norm())


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


def test_a_frozen_parameter_is_left_alone() -> None:
    model = SmallModel()
    model.embed.weight.requires_grad_(False)
    optimizer = MasterAdamW(holdings_of(model), SETTINGS)
    before = model.embed.weight.clone()
    model(tokens(0)).backward()
    optimizer.step(0.1)
    assert torch.equal(model.embed.weight, before)
    assert "embed.weight" not in dict(optimizer.gradients())


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
    optimizer.gradient_of("embed.weight")[0, 0] = 5.0
    optimizer.gradient_of("router.weight")[0, 0] = 12.0
    norm = optimizer.gradient_norm()
    assert (norm.item(), norm.dtype, norm.shape) == (13.0, torch.float32, ())
    divisor = clip_divisor(norm.item(), limit)
    optimizer.step(0.01, divisor)
    assert_close(optimizer.gradient_norm(), expected)
    assert (divisor == 1.0) == (expected == 13.0), "a gradient within the limit is not touched"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_before_or_after_a_step_continues_bit_for_bit(dtype: torch.dtype) -> None:
    for done in (0, 2):
        first, second = SmallModel(dtype).eval(), SmallModel(dtype, seed=1).eval()
        optimizers = [MasterAdamW(holdings_of(model), SETTINGS) for model in (first, second)]
        _train(first, optimizers[0], range(done))
        for name, tensor in _saved(optimizers[1]).items():
            tensor.copy_(_saved(optimizers[0])[name])
        optimizers[1].loaded()
        for model, optimizer in zip((first, second), optimizers, strict=True):
            _train(model, optimizer, range(done, done + 2))
        for mine, other in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(mine, other)
        saved = _saved(optimizers[1])
        assert saved["step"].item() == done + 2
        for name, tensor in _saved(optimizers[0]).items():
            assert torch.equal(tensor, saved[name]), name


def test_loading_rounds_the_masters_into_their_parameters() -> None:
    model = SmallModel(torch.bfloat16)
    optimizer = MasterAdamW(holdings_of(model), SETTINGS)
    for tensor in _saved(optimizer).values():
        tensor.fill_(1.001)
    optimizer.loaded()
    assert (model.down.weight == torch.tensor(1.001).bfloat16()).all()
    assert (model.router.weight == 1.001).all()


def _train(model: SmallModel, optimizer: MasterAdamW, steps: range) -> None:
    for step in steps:
        optimizer.zero_gradients()
        model(tokens(step)).backward()
        optimizer.step(0.01)


def test_a_checkpoint_gets_masters_and_moments_whole_and_in_float32() -> None:
    parts = MasterAdamW(holdings_of(SmallModel(torch.bfloat16)), SETTINGS).parts()
    shapes = {name: part.shape for name, part in parts.items() if "router" in name or "down" in name}
    assert shapes == {
        "model.down.weight": (V, F),
        "moment1.down.weight": (V, F),
        "moment2.down.weight": (V, F),
        "model.router.weight": (F, D),
        "moment1.router.weight": (F, D),
        "moment2.router.weight": (F, D),
    }
    assert parts["step"].shape == ()
    assert all(part.writes and part.tensor.dtype == torch.float32 for part in parts.values())
    assert all([piece.sizes for piece in part.pieces] == [part.shape] for part in parts.values())


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


def test_on_one_rank_reducing_changes_nothing() -> None:
    model = SmallModel()
    optimizer = MasterAdamW(holdings_of(model), SETTINGS)
    model(tokens(0)).backward()
    before = {name: gradient.clone() for name, gradient in optimizer.gradients()}
    optimizer.reduce_gradients()
    assert all(torch.equal(gradient, before[name]) for name, gradient in optimizer.gradients())


def test_a_parameter_that_comes_twice_is_noticed() -> None:
    one = _held(nn.Parameter(torch.zeros(2)))
    with pytest.raises(AssertionError, match="twice"):
        MasterAdamW(one + one, SETTINGS)


def test_taking_the_gradient_buffer_away_is_noticed() -> None:
    model = SmallModel()
    optimizer = MasterAdamW(holdings_of(model), SETTINGS)
    model.zero_grad()
    with pytest.raises(AssertionError, match=r"gradient buffer of down\.weight"):
        optimizer.step(0.1)
