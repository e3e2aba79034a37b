"""The fused activation in 8 bits equals its definition, and what it becomes on every chip.

Not bit for bit: an exponential differs in its last place, so here and there a number rounds to its other neighbour.
"""

import math

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.float8 import operators, reference
from penstock.kernels.float8.operators import SwigluForBackward
from penstock.kernels.float8.quantize import BACKWARD
from penstock.kernels.float8.quantized import (
    BLOCKWISE,
    BLOCKWISE_SQUARE,
    E4M3,
    E5M2,
    MXFP8,
    ROWWISE,
    TENSORWISE,
    Format,
    Quantized,
    Recipe,
    format_on,
)
from penstock.kernels.float8.reference import dequantize
from penstock.kernels.float8.swiglu import swiglu, swiglu_backward
from penstock.kernels.reference import SWIGLU, ExpertRule
from tests.closeness import assert_close, decibels
from tests.kernels.ahead_of_time import TARGETS, Compiled, compile_launches, on_meta
from tests.kernels.float8.draw_quantized import aligned_starts, draw_activation, transposed, without_tail

WEIGHTED_INPUTS = ExpertRule(weighs_input=True)
CLAMPED = ExpertRule(limit=0.7, alpha=1.702)
RULES = {"SwiGLU": SWIGLU, "weighted inputs": WEIGHTED_INPUTS, "clamped": CLAMPED}

WIDTH = 256
COUNTS = (3, 0, 130)

every_fused_recipe = pytest.mark.parametrize("recipe", [BLOCKWISE, MXFP8], ids=lambda recipe: recipe.name)


def assert_near(found: Quantized, expected: Quantized, rows: int | slice = slice(None), db: float = 45.0) -> None:
    """Signal to noise of the numbers; all but a few scales equal."""
    assert found.block == expected.block and found.values.dtype == expected.values.dtype
    assert found.values.shape == expected.values.shape and found.scales.shape == expected.scales.shape
    assert decibels(dequantize(found)[rows], dequantize(expected)[rows]) > db
    ratios = found.scales.float()[rows] / expected.scales.float()[rows]
    assert ((ratios - 1).abs() <= 1e-5).float().mean() > 0.97


def assert_transposed_near(
    found: SwigluForBackward, expected: SwigluForBackward, counts_e: Tensor, db: float = 45.0
) -> None:
    for mine, other in zip(transposed(found, counts_e), transposed(expected, counts_e), strict=True):
        assert_near(mine, other, db=db)


@every_fused_recipe
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rows_of_experts_equal_the_definition(rule: ExpertRule, recipe: Recipe, device: torch.device) -> None:
    gate_up_RF, weights_R, _, counts_e = draw_activation(COUNTS, WIDTH, device)
    used = sum(COUNTS)
    found = swiglu(gate_up_RF, weights_R, rule, recipe, E4M3, counts_e=counts_e)
    expected = operators.swiglu(gate_up_RF, weights_R, rule, recipe, E4M3, counts_e=counts_e)
    assert_near(found.rows, expected.rows, slice(used))
    assert found.columns is None


@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE, MXFP8], ids=lambda recipe: recipe.name)
def test_a_dense_network_gets_columns_too(recipe: Recipe, device: torch.device) -> None:
    gate_up_RF = torch.randn(150, 2 * 144, device=device)
    gate_up_RF[140:, 130:144] *= 9
    found = swiglu(gate_up_RF, None, SWIGLU, recipe, E4M3, columns=True)
    expected = operators.swiglu(gate_up_RF, None, SWIGLU, recipe, E4M3, columns=True)
    assert_near(found.rows, expected.rows)
    assert_near(found.columns, expected.columns)


@pytest.mark.often("squares")
@pytest.mark.parametrize(
    ("recipe", "rule", "gradient", "weighted"),
    [
        pytest.param(BLOCKWISE_SQUARE, SWIGLU, E4M3, True, id="squares"),
        pytest.param(BLOCKWISE, WEIGHTED_INPUTS, E5M2, True, id="weighted inputs"),
        pytest.param(BLOCKWISE_SQUARE, CLAMPED, E4M3, True, id="clamped"),
        pytest.param(MXFP8, SWIGLU, E5M2, True, id="mxfp8"),
        pytest.param(BLOCKWISE, SWIGLU, E4M3, False, id="without weights"),
    ],
)
def test_gradients_equal_the_definition(
    recipe: Recipe, rule: ExpertRule, gradient: Format, weighted: bool, device: torch.device
) -> None:
    gate_up_RF, weights_R, dh_RF, counts_e = draw_activation(COUNTS, WIDTH, device)
    used = sum(COUNTS)
    given = (gate_up_RF, weights_R if weighted else None, dh_RF, counts_e, rule, recipe, E4M3, gradient)
    found, expected = (
        make(*given, keep_plain=rule is CLAMPED) for make in (swiglu_backward, operators.swiglu_backward)
    )
    assert_near(found.d_gate_up, expected.d_gate_up, slice(used))
    assert_transposed_near(found, expected, counts_e)
    if weighted:
        assert_close(found.dweights_R[:used], expected.dweights_R[:used], tolerance=1e-4)
    assert (found.dweights_R is not None) == weighted and (found.plain_d_gate_up_RF is not None) == (rule is CLAMPED)
    if rule is CLAMPED:
        assert_close(found.plain_d_gate_up_RF[:used], expected.plain_d_gate_up_RF[:used])


def test_slots_without_rows_are_zero_in_transposed_copies(device: torch.device) -> None:
    gate_up_RF, weights_R, dh_RF, counts_e = draw_activation(COUNTS, WIDTH, device)
    found = swiglu_backward(gate_up_RF, weights_R, dh_RF, counts_e, SWIGLU, BLOCKWISE, E4M3, E4M3)
    starts = aligned_starts(counts_e).tolist()
    assert starts[-1] < found.h_columns.values.shape[1], "there is a tail"
    is_row_R = torch.zeros(starts[-1], dtype=torch.bool)
    for first, count in zip(starts, COUNTS, strict=False):
        is_row_R[first : first + count] = True
    for copy in transposed(found, counts_e):
        assert not copy.values.float().cpu()[:, ~is_row_R].any()
    assert not found.dweights_R[sum(COUNTS) :].any(), "these weights belong to no expert"


def test_one_number_that_is_none_is_seen_in_its_square(device: torch.device) -> None:
    gate_up_RF, weights_R, dh_RF, counts_e = draw_activation((3,), WIDTH, device)
    gate_up_RF[2, 200] = math.nan
    given = (gate_up_RF, weights_R, dh_RF, counts_e, SWIGLU, BLOCKWISE_SQUARE, E4M3, E4M3)
    found = without_tail(swiglu_backward(*given).h_columns, counts_e)
    expected = without_tail(operators.swiglu_backward(*given).h_columns, counts_e)
    assert found.scales.isnan().tolist() == expected.scales.isnan().tolist() == [[False], [True]]
    assert torch.equal(found.values.float().isnan(), expected.values.float().isnan())


def test_numbers_in_16_bits_are_rounded_before_they_are_quantized(device: torch.device) -> None:
    """The interpreter truncates instead, so the bar is low."""
    counts = (40,) if device.type == "cpu" else (300, 0, 1, 128, 70)
    gate_up_RF, weights_R, dh_RF, counts_e = draw_activation(counts, WIDTH, device, torch.bfloat16)
    used = slice(sum(counts))
    given = (gate_up_RF, weights_R, dh_RF, counts_e, SWIGLU, BLOCKWISE, E4M3, E4M3)
    found, expected = swiglu_backward(*given), operators.swiglu_backward(*given)
    assert_near(found.d_gate_up, expected.d_gate_up, used, db=33)
    assert_transposed_near(found, expected, counts_e, db=33)
    both = (make(gate_up_RF, weights_R, SWIGLU, BLOCKWISE, E4M3).rows for make in (swiglu, operators.swiglu))
    assert_near(*both, used, db=33)


@pytest.mark.parametrize("recipe", [ROWWISE, TENSORWISE], ids=lambda recipe: recipe.name)
def test_scales_over_whole_rows_take_passes_of_their_own(recipe: Recipe, device: torch.device) -> None:
    gate_up_RF, weights_R, dh_RF, counts_e = draw_activation((6, 0, 21), WIDTH, device)
    found = swiglu(gate_up_RF, weights_R, SWIGLU, recipe, E4M3, counts_e=counts_e)
    expected = operators.swiglu(gate_up_RF, weights_R, SWIGLU, recipe, E4M3, counts_e=counts_e)
    assert_near(found.rows, expected.rows, slice(27))
    given = (gate_up_RF, weights_R, dh_RF, counts_e, SWIGLU, recipe, E4M3, E4M3)
    assert_transposed_near(swiglu_backward(*given), operators.swiglu_backward(*given), counts_e)


def test_a_gate_that_ends_inside_a_block_takes_passes_of_its_own(device: torch.device) -> None:
    gate_up_RF, dh_RF = torch.randn(30, 2 * 80, device=device), torch.randn(30, 80, device=device)
    counts_e = torch.tensor([30], device=device)
    given = (gate_up_RF, None, dh_RF, counts_e, SWIGLU, BLOCKWISE, E4M3, E4M3)
    found, expected = swiglu_backward(*given), operators.swiglu_backward(*given)
    assert_near(found.d_gate_up, expected.d_gate_up)
    assert_near(without_tail(found.d_gate_up_columns, counts_e), without_tail(expected.d_gate_up_columns, counts_e))


def test_on_the_meta_device_shapes_are_those_of_a_gpu() -> None:
    gate_up_RF, weights_R = torch.empty(70, 2 * WIDTH, device="meta"), torch.empty(70, device="meta")
    dh_RF, counts_e = gate_up_RF[:, :WIDTH], torch.empty(3, dtype=torch.int32, device="meta")
    found = swiglu_backward(gate_up_RF, weights_R, dh_RF, counts_e, SWIGLU, BLOCKWISE, E4M3, E4M3)
    assert found.d_gate_up_columns.values.shape == (2 * WIDTH, reference.aligned_rows(70, 3))
    assert swiglu(gate_up_RF, weights_R, SWIGLU, BLOCKWISE, E4M3, counts_e=counts_e).rows.values.shape == (70, WIDTH)


@pytest.mark.parametrize(
    ("shape", "weights", "columns"), [((2, 7), None, False), ((2, 8), torch.zeros(3), False), ((2, 8), None, True)]
)
def test_misfits_are_refused(shape: tuple[int, int], weights: Tensor | None, columns: bool) -> None:
    options = {"columns": columns, "counts_e": torch.tensor([2])}
    with pytest.raises(KernelError, match="swiglu"):
        swiglu(torch.zeros(shape), weights, SWIGLU, BLOCKWISE, E4M3, **options)


def compiled(target: str, recipe: Recipe, rule: ExpertRule, which: str, *, is_kept: bool = False) -> Compiled:
    """`rows` of experts, `columns` of a dense network, or `backward` of experts; of rows that are kept if wanted."""
    form, counts_e = format_on("e4m3", target), on_meta(63, dtype=torch.int32)
    place = SavedRows(on_meta(99_999, 2816), on_meta(1, dtype=torch.int64), 8192)
    given = place if is_kept else on_meta(8192, 2816), on_meta(8192, dtype=torch.float32)
    if which == "backward":
        given += on_meta(8192, 1408), counts_e, rule, recipe, form, form
        return compile_launches(target, lambda: swiglu_backward(*given, launch=BACKWARD))[-1]
    options = {"columns": True} if which == "columns" else {"counts_e": counts_e}
    return compile_launches(target, lambda: swiglu(*given, rule, recipe, form, **options))[-1]


CASES = {
    **{
        f"{target}-{which}": (target, MXFP8 if target in ("sm_100", "gfx950") else BLOCKWISE, SWIGLU, which)
        for target in TARGETS
        for which in ("rows", "columns", "backward")
    },
    **{f"squares-{which}": ("sm_90", BLOCKWISE_SQUARE, SWIGLU, which) for which in ("columns", "backward")},
    "weighted-backward": ("sm_90", BLOCKWISE, WEIGHTED_INPUTS, "backward"),
}


@pytest.mark.often("gfx942-columns", "squares-backward", "weighted-*")
@pytest.mark.parametrize(("target", "recipe", "rule", "which"), CASES.values(), ids=CASES)
def test_the_kernels_compile_without_spills(target: str, recipe: Recipe, rule: ExpertRule, which: str) -> None:
    made = compiled(target, recipe, rule, which)
    assert made.spills == 0, made.summary
