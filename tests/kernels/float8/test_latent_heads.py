"""Latent attention's heads whose gradients leave in 8 bits: bit for bit what quantization makes of those in 16 bits."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.launches_tried import TRANSPOSING_LAUNCHES
from penstock.kernels import reference, rope
from penstock.kernels.float8 import latent_heads
from penstock.kernels.float8.gradient_side_channel import (
    GradientSideChannel,
    LatentHeadChannels,
    carrier_of,
    latent_heads_obstacle,
)
from penstock.kernels.float8.launches import FUSED_DEFAULT, TRANSPOSING, TileLaunch
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, E4M3, E5M2, MXFP8, ROWWISE, Format, format_on
from penstock.kernels.float8.reference import quantize_rows
from penstock.kernels.gluon.support import HAS_GLUON
from penstock.kernels.tuning import target_of
from tests.kernels.ahead_of_time import TARGETS, Compiled, compile_launches, on_meta
from tests.kernels.float8.draw_quantized import assert_same
from tests.kernels.gluon.gluon_in_torch import quantizing_in_torch

needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="no Gluon that the kernels know")

SPILLED_BY_TRITON_3_9 = 24  # bytes, with 96 registers, of a tile that is rotated; runs take 128 for it
PLAIN, ROTARY, VALUE = 128, 64, 128  # widths of a head of DeepSeek-V3
GLUON = {name: one for name, one in TRANSPOSING_LAUNCHES.items() if one.engine == "gluon"}


class Case(NamedTuple):
    """Inputs of the heads, and gradients of their outputs."""

    inputs: tuple[Tensor, ...]
    angles: tuple[Tensor, Tensor]
    gradients: tuple[Tensor, ...]


class Found(NamedTuple):
    outputs: tuple[Tensor, ...]
    q: RowColQuantized
    kv: RowColQuantized
    dk_rope_BSP: Tensor


def case_of(
    batch: int = 1,
    positions: int = 128,
    heads: int = 2,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    *,
    heads_first: bool = False,
    rows_of_angles: int = 1,
) -> Case:
    """With `heads_first` gradients have the memory order of cuDNN."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def gradient(width: int) -> Tensor:
        magnitudes = torch.randn(batch, positions, heads, 1, device=device).mul(3).exp()
        drawn = (draw(batch, positions, heads, width) * magnitudes).to(dtype)
        return drawn.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else drawn

    angles_BSP = torch.rand(rows_of_angles, positions, ROTARY // 2, device=device) * 6
    inputs = tuple(draw(batch, positions, heads, width) for width in (PLAIN + ROTARY, PLAIN + VALUE))
    gradients = tuple(gradient(width) for width in (PLAIN + ROTARY, PLAIN + ROTARY, VALUE))
    return Case((*inputs, draw(batch, positions, ROTARY)), (angles_BSP.cos(), angles_BSP.sin()), gradients)


def handed_over(case: Case, form: Format = E4M3, launch: TileLaunch = TRANSPOSING) -> Found:
    inputs = [one.detach().requires_grad_() for one in case.inputs]
    channels = LatentHeadChannels(GradientSideChannel(), GradientSideChannel())
    outputs = latent_heads.mla_heads(*inputs, *case.angles, channels, form, launch=launch)
    dq, dkv, dk_rope = torch.autograd.grad(outputs, inputs, case.gradients)
    assert dq.untyped_storage().nbytes() == dkv.untyped_storage().nbytes() == dq.itemsize, "carriers"
    q, kv = channels.q.take(), channels.kv.take()
    assert q is not None and kv is not None and channels.q.take() is None, "they are taken once"
    return Found(tuple(one.detach() for one in outputs), q, kv, dk_rope)


def by_definition(case: Case, form: Format = E4M3, mla_heads: Callable[..., Any] = rope.mla_heads) -> Found:
    """The kernel in 16 bits, and quantization of what it gives."""
    inputs = [one.detach().requires_grad_() for one in case.inputs]
    outputs = mla_heads(*inputs, *case.angles)
    dq, dkv, dk_rope = torch.autograd.grad(outputs, inputs, case.gradients)
    both = (quantize_rows(one.flatten(2).flatten(0, 1), BLOCKWISE, form, columns=BLOCKWISE.rows) for one in (dq, dkv))
    return Found(tuple(one.detach() for one in outputs), *both, dk_rope)


def assert_all_same(found: Found, expected: Found) -> None:
    for one, other in zip((*found.outputs, found.dk_rope_BSP), (*expected.outputs, expected.dk_rope_BSP), strict=True):
        assert torch.equal(one, other)
    for mine, other in zip((*found.q, *found.kv), (*expected.q, *expected.kv), strict=True):
        assert_same(mine, other)


CASES = {
    "positions first": {},
    "heads first": {"heads_first": True},
    "tiles over rows": {"batch": 2, "positions": 40, "heads_first": True, "rows_of_angles": 2},
    "tiles over rows, float32": {"batch": 3, "positions": 50, "heads": 4, "dtype": torch.float32, "rows_of_angles": 3},
}


@pytest.mark.often("heads first-e4m3")
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_16_bits_quantized(name: str, form: Format) -> None:
    case = case_of(**CASES[name])
    assert_all_same(handed_over(case, form), by_definition(case, form))


def test_a_gradient_that_was_not_taken_is_replaced_by_the_next_and_its_carrier_holds_one_number() -> None:
    channel, first, second = GradientSideChannel(), *(RowColQuantized(None, None) for _ in range(2))
    channel.put(first)
    channel.put(second)
    assert channel.take() is second
    found = carrier_of((3, 4), torch.zeros(2, dtype=torch.bfloat16))
    assert (found.shape, found.dtype, found.untyped_storage().nbytes()) == ((3, 4), torch.bfloat16, 2)  # one number


def test_gradients_that_do_not_fill_tiles_stay_in_16_bits() -> None:
    for recipe in (BLOCKWISE, BLOCKWISE_SQUARE):
        assert latent_heads_obstacle(recipe, 16, 128, 64, 128) is None
    for recipe in (MXFP8, ROWWISE):
        assert recipe.name in str(latent_heads_obstacle(recipe, 16, 128, 64, 128))
    assert "3 heads" in str(latent_heads_obstacle(BLOCKWISE, 3, 128, 64, 128))
    # A tile of 128 columns would hold parts of several heads.
    assert "share a tile" in str(latent_heads_obstacle(BLOCKWISE, 16, 64, 64, 128))
    assert "share a tile" in str(latent_heads_obstacle(BLOCKWISE, 16, 128, 64, 96))


# Hopper's own form


@pytest.mark.often("positions first-e5m2")
@needs_gluon
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
@pytest.mark.parametrize("heads_first", [False, True], ids=["positions first", "heads first"])
def test_hoppers_kernel_gives_the_same(heads_first: bool, form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that is taken for a Hopper, where torch runs its source."""
    launched = quantizing_in_torch(monkeypatch, latent_heads)
    case = case_of(2, 128, 2, heads_first=heads_first, rows_of_angles=2)
    found = handed_over(case, form, GLUON["gluon"])
    assert launched == [(3, 2), (2, 2), (2, 2)], "dq, dk, dv"
    # Triton's interpreter cuts 32 bits off to 16 where chips round them.
    expected = by_definition(case, form, reference.mla_heads)
    assert_all_same(found, expected._replace(outputs=found.outputs, dk_rope_BSP=found.dk_rope_BSP))


@pytest.mark.slow
@needs_gluon
def test_triton_replaces_hoppers_kernel_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows of the batch that are no multiple of 128, and in float32."""
    monkeypatch.setattr(latent_heads, "target_of", lambda device: "sm_90")
    for case in (case_of(2, 64), case_of(1, 128, dtype=torch.float32)):
        assert_all_same(handed_over(case, launch=GLUON["gluon"]), by_definition(case))


@pytest.mark.gpu
@pytest.mark.parametrize("launch", {"triton": TRANSPOSING, **GLUON}.values(), ids=["triton", *GLUON])
@pytest.mark.parametrize("heads_first", [False, True], ids=["positions first", "heads first"])
def test_a_gpu_gives_the_gradients_of_16_bits_quantized(
    heads_first: bool, launch: TileLaunch, device: torch.device
) -> None:
    if launch.engine == "gluon" and target_of(device) != "sm_90":
        pytest.skip("the kernel is Hopper's")
    for case in (
        case_of(2, 512, 16, device, heads_first=heads_first),
        case_of(1, 1024, 128, device, heads_first=heads_first),
    ):
        found, expected = handed_over(case, launch=launch), by_definition(case)
        assert_all_same(found._replace(q=expected.q), expected)
        for mine, other in zip(found.q, expected.q, strict=True):
            # Compilers may contract products and sums of a rotation in other ways.
            for one, truth in (
                (mine.values.view(torch.uint8), other.values.view(torch.uint8)),
                (mine.scales, other.scales),
            ):
                assert (one != truth).float().mean() < 1e-3


def compiled(target: str, launch: TileLaunch | None = None) -> list[Compiled]:
    """Kernels for dq, dk and dv, the last two of which are alike but for their place, and for the shared key."""
    form, angles_BSP = format_on("e4m3", target), on_meta(1, 4096, ROTARY // 2, dtype=torch.float32)
    gradients = (on_meta(2, 4096, 16, width) for width in (PLAIN + ROTARY, PLAIN + ROTARY, VALUE))
    given = *gradients, angles_BSP, angles_BSP, form
    return compile_launches(target, lambda: latent_heads.mla_heads_backward(*given, launch=launch))


@pytest.mark.often("*gfx942*")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_for_every_chip(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_heads.float8_launches, "quantize_obstacle", lambda *given: "Triton's, on Hopper too")
    for found in compiled(target):
        assert found.spills == 0, found.summary
        if not target.startswith("gfx") and found.kernel == "latent_heads_backward_kernel":
            assert re.search(r"ld\.global(?:\.\w+)*\.v4\.b32", found.asm), "loads are 16 bytes wide"
            assert not re.search(r"st\.global(?:\.\w+)*\.b8", found.asm), "and stores more than a byte"


@pytest.mark.often("gluon", "gluon_8")
@needs_gluon
@pytest.mark.parametrize("launch", GLUON.values(), ids=GLUON)
def test_hoppers_kernel_moves_tiles_in_wide_pieces_without_spills(launch: TileLaunch) -> None:
    queries, keys, values, _ = compiled("sm_90", launch)
    for found, spilled in ((queries, SPILLED_BY_TRITON_3_9), (keys, 0), (values, 0)):
        assert found.spills <= spilled and found.registers <= launch.registers, found.summary
        assert found.spills == 0 or launch != FUSED_DEFAULT, found.summary
        assert not re.search(r"st\.global(?:\.\w+)*\.b8", found.asm), "rows"
        numbers = 128 * 128 // (32 * launch.warps)  # of one thread in a tile
        assert len(re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", found.asm)) >= numbers // 8
        stores = re.findall(r"st\.global(?:\.\w+)*\.v2\.b64|st\.global(?:\.\w+)*\.v4\.b32", found.asm)
        assert len(stores) >= numbers // 16, "of columns"
        assert found.shared_bytes == 32 * 1024, found.summary  # a tile in 16 bits
