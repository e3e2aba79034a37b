"""An optimizer in host memory does what one on the device does, to the bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.config.parallel import Offload
from penstock.train.adamw import BYTES, UNIT, FusedAdamW, StreamedAdamW
from penstock.train.optimizer import MasterAdamW, clip_divisor
from tests.examples import examples
from tests.train.small_model import SETTINGS, SmallModel, holdings_of, tokens

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
HOST = Offload(optimizer=True)


def _values(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The router is always float32."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(device, torch.float32 if "router" in name else dtype)
        for name, shape in SHAPES.items()
    }


def _check_same_bits(device: torch.device, dtype: torch.dtype, chunk_bytes: int) -> None:
    values, streamed_values = _values(device, dtype), _values(device, dtype)
    gradients = {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}
    fused = FusedAdamW(values, gradients, SETTINGS)
    streamed = StreamedAdamW(streamed_values, gradients, SETTINGS, chunk_bytes=chunk_bytes)
    generator = torch.Generator().manual_seed(1)
    for rate in (0.01, 0.004, 0.02):
        for gradient in gradients.values():
            gradient.copy_(torch.randn(gradient.shape, generator=generator))
        for optimizer in (fused, streamed):
            optimizer.update(rate)
        # The stream reads gradients in its own time, but before what is launched after it.
        for gradient in gradients.values():
            gradient.zero_()
    streamed.settle()
    assert streamed.step.item() == fused.step.item() == 3
    for name, value in values.items():
        assert torch.equal(streamed_values[name], value), name
        for one, other in (
            (streamed.masters, fused.masters),
            (streamed.moments1, fused.moments1),
            (streamed.moments2, fused.moments2),
        ):
            assert torch.equal(one[name].cpu(), other[name].cpu()), name
        is_own = value.dtype == torch.float32
        assert (streamed.masters[name] is streamed_values[name]) == is_own
        assert streamed.moments1[name].device == CPU


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(units=st.integers(0, 20))
@examples(12)
def test_updates_are_those_of_an_optimizer_on_the_device_to_the_bit(dtype: torch.dtype, units: int) -> None:
    _check_same_bits(CPU, dtype, units * UNIT * BYTES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_run_is_the_same_to_the_bit_and_goes_on_from_a_checkpoint(dtype: torch.dtype) -> None:
    models = [SmallModel(dtype).eval() for _ in range(2)]
    optimizers = [
        MasterAdamW(holdings_of(model), SETTINGS, offload=offload)
        for model, offload in zip(models, (Offload(), HOST), strict=True)
    ]
    for step in range(4):
        if step == 2:  # each goes on as the other
            models = [SmallModel(dtype, seed=1).eval() for _ in range(2)]
            saved = [{name: part.tensor.clone() for name, part in one.parts().items()} for one in optimizers]
            optimizers = [
                MasterAdamW(holdings_of(model), SETTINGS, offload=offload)
                for model, offload in zip(models, (HOST, Offload()), strict=True)
            ]
            for optimizer, tensors in zip(optimizers, saved, strict=True):
                for name, part in optimizer.parts().items():
                    part.tensor.copy_(tensors[name])
                optimizer.loaded()
            for one, other in zip(*(model.parameters() for model in models), strict=True):
                assert torch.equal(one, other)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_gradients()
            model(tokens(step)).backward()
            optimizer.step(0.01, clip_divisor(optimizer.gradient_norm().item(), 0.3))
    parts = [optimizer.parts() for optimizer in optimizers]
    assert parts[0].keys() == parts[1].keys()
    for name, part in parts[0].items():
        assert torch.equal(part.tensor, parts[1][name].tensor), name
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("dtype", "bytes_"), [(torch.bfloat16, 12), (torch.float32, 8)])
def test_what_is_its_own_master_stays_and_only_its_moments_go(dtype: torch.dtype, bytes_: int) -> None:
    weight = nn.Linear(64, 1024, bias=False, dtype=dtype)
    memory = MasterAdamW(holdings_of(weight), SETTINGS, offload=HOST).memory()
    assert memory.host == bytes_ * weight.weight.numel()
    assert memory.optimizer == 2 * memory.host, "all of it is one chunk"
    streamed = StreamedAdamW(
        {"weight": weight.weight.detach()}, {"weight": torch.zeros(1024, 64)}, SETTINGS, chunk_bytes=1 << 14
    )
    assert streamed.device_bytes <= 2 << 14


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("chunk_bytes", [UNIT * BYTES, 5 * UNIT * BYTES, 1 << 26])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_on_a_gpu_are_those_of_an_optimizer_on_it_to_the_bit(dtype: torch.dtype, chunk_bytes: int) -> None:
    _check_same_bits(torch.device("cuda"), dtype, chunk_bytes)


@pytest.mark.gpu
@needs_gpu
def test_a_step_waits_for_nothing_and_leaves_nothing_but_two_chunks_on_the_gpu() -> None:
    values = {f"weight{index}": torch.randn(1 << 12, 1 << 10, device="cuda").bfloat16() for index in range(8)}
    gradients = {name: torch.randn_like(value, dtype=torch.float32) for name, value in values.items()}
    before = torch.cuda.memory_allocated()
    streamed = StreamedAdamW(values, gradients, SETTINGS, chunk_bytes=1 << 24)
    assert all(moment.is_pinned() for moment in streamed.moments1.values())
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
