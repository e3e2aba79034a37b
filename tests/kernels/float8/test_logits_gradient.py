"""The gradient of the loss' logits in 8 bits: what quantization makes of the one that is written in 16 bits."""

import math
import re
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.launches_tried import TRANSPOSING_LAUNCHES
from penstock.kernels.float8 import logits_gradient as module
from penstock.kernels.float8 import operators
from penstock.kernels.float8.logits_gradient import logits_gradient
from penstock.kernels.float8.quantize import FUSED, FUSED_DEFAULT
from penstock.kernels.float8.quantized import (
    BLOCKWISE,
    BLOCKWISE_SQUARE,
    E4M3,
    E5M2,
    MXFP8,
    Format,
    Quantized,
    Recipe,
    RowColQuantized,
    format_on,
)
from penstock.kernels.float8.reference import quantize_rows
from penstock.kernels.gluon.support import HAS_GLUON
from penstock.kernels.linear_cross_entropy import linear_cross_entropy_kernel
from penstock.kernels.reference import IGNORED_LABEL
from penstock.kernels.tuning import KernelLaunch, target_of
from tests.kernels.ahead_of_time import TARGETS, Compiled, compile_launches, on_meta
from tests.kernels.float8.draw_quantized import assert_all_same
from tests.kernels.gluon.gluon_in_torch import quantizing_in_torch

needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="no Gluon that the kernels know")
every_form = pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
GLUON = {name: one for name, one in TRANSPOSING_LAUNCHES.items() if one.engine == "gluon"}
SPILLED_BY_TRITON_3_9 = 24  # bytes, with 96 registers; runs take 128
Z_WEIGHT = 0.1


class Case(NamedTuple):
    """The second of two equal parts of a vocabulary, for labels of both."""

    logits_TV: Tensor
    labels_T: Tensor
    logsumexp_T: Tensor

    @property
    def place(self) -> dict[str, float]:
        return {"first_label": self.logits_TV.shape[1], "z_weight": Z_WEIGHT}


def case_of(tokens: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Case:
    """Rows 1 and 2 are not counted and have no numbers; row 3 has its label in the other part, row 4 the last one."""
    logits_TV = torch.randn(tokens, width, device=device).mul(3).to(dtype)
    labels_T = torch.randint(2 * width, (tokens,), device=device)
    labels_T[1:3], labels_T[3], labels_T[4] = IGNORED_LABEL, 0, 2 * width - 1
    logsumexp_T = logits_TV.float().logsumexp(-1) + 0.5  # with the other part
    logits_TV[1:3], logsumexp_T[2] = math.nan, math.nan
    return Case(logits_TV, labels_T, logsumexp_T)


def in_16_bits(case: Case) -> Tensor:
    """The gradient by the kernel of rows, in the dtype of the logits."""
    dlogits_TV, (tokens, width) = case.logits_TV.clone(), case.logits_TV.shape
    linear_cross_entropy_kernel[(tokens,)](
        dlogits_TV, case.labels_T, case.logsumexp_T, None, width, width, 2 * width, Z_WEIGHT,
        IGNORED=IGNORED_LABEL, STATISTICS=False, GRADIENT=True, BLOCK=64, STAGES=1,
    )  # fmt: skip
    return dlogits_TV


def share_of_equal(found: Quantized | None, expected: Quantized | None) -> float:
    """Of bytes, and of scales if that is less."""
    assert found is not None and expected is not None and found.block == expected.block
    is_same = found.values.view(torch.uint8) == expected.values.view(torch.uint8)
    has_same_scale = found.scales.float() == expected.scales.float()
    return min(one.float().mean().item() for one in (is_same, has_same_scale))


@pytest.mark.often("float32-mxfp8-e4m3", "bfloat16-blockwise-e5m2")
@every_form
@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE, MXFP8], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_copies_are_those_of_the_gradient_in_16_bits_bit_for_bit(
    dtype: torch.dtype, recipe: Recipe, form: Format, device: torch.device
) -> None:
    """Of rows and columns that do not fill tiles."""
    if device.type == "cuda":
        pytest.skip("a compiler may contract one of both kernels in another way")
    for tokens, width in ((150, 272), (21, 144)):
        case = case_of(tokens, width, dtype)
        found = logits_gradient(*case, recipe, form, **case.place)
        expected = quantize_rows(in_16_bits(case), recipe, form, columns=recipe.rows)
        assert_all_same(found, expected)
        assert not found.rows.values[1:3].float().any() and found.rows.values[3].float().any()


@pytest.mark.often("mxfp8", "blockwise")
@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE, MXFP8], ids=lambda recipe: recipe.name)
def test_the_copies_are_those_of_the_definition(recipe: Recipe, device: torch.device) -> None:
    """But for numbers beside a tie. In float32, because Triton's interpreter cuts bfloat16 off."""
    form = format_on("e4m3", target_of(device))
    case = case_of(150, 272, torch.float32, device)
    found = logits_gradient(*case, recipe, form, **case.place)
    expected = operators.logits_gradient(*case, recipe, form, **case.place)
    for mine, other in zip(found, expected, strict=True):
        assert share_of_equal(mine, other) > 0.9999


def test_no_rows_give_empty_copies(device: torch.device) -> None:
    case = case_of(5, 144, torch.float32, device)
    found = logits_gradient(*(one[:0] for one in case), BLOCKWISE, E4M3, **case.place)
    assert found.columns is not None
    assert (found.rows.values.shape, found.columns.values.shape) == ((0, 144), (144, 0))


# Hopper's own form


@needs_gluon
@every_form
def test_hoppers_kernel_gives_the_copies_of_the_definition(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that is taken for a Hopper, where torch runs its source."""
    launched = quantizing_in_torch(monkeypatch, module)
    case = case_of(128, 384, torch.bfloat16)
    found = logits_gradient(*case, BLOCKWISE_SQUARE, form, **case.place, launch=GLUON["gluon"])
    expected = operators.logits_gradient(*case, BLOCKWISE_SQUARE, form, **case.place)
    assert launched == [(3, 1)]  # tiles of 128 x 128
    for mine, other in zip(found, expected, strict=True):
        assert share_of_equal(mine, other) > 0.9999
    assert not found.rows.values[1:3].float().any()


@pytest.mark.slow
@needs_gluon
def test_triton_replaces_hoppers_kernel_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd number of rows, an odd width, 32 bits, another recipe."""
    launched = quantizing_in_torch(monkeypatch, module)
    for tokens, width, dtype, recipe in (
        (130, 128, torch.bfloat16, BLOCKWISE),
        (128, 144, torch.bfloat16, BLOCKWISE),
        (128, 128, torch.float32, BLOCKWISE),
        (128, 128, torch.bfloat16, MXFP8),
    ):
        case = case_of(tokens, width, dtype)
        found = logits_gradient(*case, recipe, E4M3, **case.place, launch=GLUON["gluon"])
        expected = quantize_rows(in_16_bits(case), recipe, E4M3, columns=recipe.rows)
        assert_all_same(found, expected)
    assert not launched


@pytest.mark.gpu
@pytest.mark.parametrize("launch", {"triton": FUSED, **GLUON}.values(), ids=["triton", *GLUON])
@pytest.mark.parametrize(("tokens", "width"), [(4096, 102_400), (2048, 201_088), (1000, 37_984)], ids=str)
def test_a_hopper_gives_the_copies_of_both_kernels_and_of_the_definition(
    tokens: int, width: int, launch: KernelLaunch, hopper: torch.device
) -> None:
    """The last shape has a Triton kernel only: its tiles are ragged."""
    case = case_of(tokens, width, torch.bfloat16, hopper)
    for form in (E4M3, E5M2):
        found = logits_gradient(*case, BLOCKWISE_SQUARE, form, **case.place, launch=launch)
        apart = quantize_rows(in_16_bits(case), BLOCKWISE, form, columns=BLOCKWISE.rows)
        defined = operators.logits_gradient(*case, BLOCKWISE_SQUARE, form, **case.place)
        for mine, of_kernels, of_definition in zip(found, apart, defined, strict=True):
            # Compilers may contract products and sums in other ways, and an exponential's last place decides now and
            # then how a number rounds.
            assert share_of_equal(mine, of_kernels) > 0.9999
            assert share_of_equal(mine, of_definition) > 0.999


def compiled(target: str, launch: KernelLaunch | None = None) -> Compiled:
    form, labels_T = format_on("e4m3", target), on_meta(4096, dtype=torch.int64)
    given = on_meta(4096, 102_400), labels_T, on_meta(4096, dtype=torch.float32), BLOCKWISE_SQUARE, form

    def call() -> RowColQuantized:
        return logits_gradient(*given, first_label=102_400, z_weight=Z_WEIGHT, launch=launch)

    (found,) = compile_launches(target, call)
    return found


@pytest.mark.often("gfx942")
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles_for_every_chip_without_spills(target: str) -> None:
    found = compiled(target, FUSED)
    assert found.spills == 0, found.summary
    if not target.startswith("gfx"):
        assert re.search(r"ld\.global(?:\.\w+)*\.v4\.b32", found.asm), "loads are 16 bytes wide"
        assert not re.search(r"st\.global(?:\.\w+)*\.b8", found.asm), "and stores more than a byte"


@pytest.mark.often("gluon")
@needs_gluon
@pytest.mark.parametrize("launch", GLUON.values(), ids=GLUON)
def test_hoppers_kernel_moves_tiles_in_wide_pieces_without_spills(launch: KernelLaunch) -> None:
    found = compiled("sm_90", launch)
    assert found.spills <= SPILLED_BY_TRITON_3_9 and found.registers <= launch.registers, found.summary
    assert found.spills == 0 or launch != FUSED_DEFAULT, found.summary
    assert not re.search(r"st\.global(?:\.\w+)*\.b8", found.asm), "rows"
    numbers = 128 * 128 // (32 * launch.warps)  # of one thread in a tile
    assert len(re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", found.asm)) >= numbers // 8
    stores = re.findall(r"st\.global(?:\.\w+)*\.v2\.b64|st\.global(?:\.\w+)*\.v4\.b32", found.asm)
    assert len(stores) >= numbers // 16, "of columns"
    assert found.shared_bytes == 32 * 1024, found.summary  # a tile in 16 bits
