"""What quantization and its products promise, whichever kernels compute them: nearness, visibility, alignment."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels.float8.quantized import (
    ALIGNMENT,
    BLOCKWISE,
    BLOCKWISE_SQUARE,
    E4M3,
    E4M3_FNUZ,
    E5M2,
    E5M2_FNUZ,
    MXFP8,
    RECIPES,
    ROWWISE,
    TENSORWISE,
    Format,
    Recipe,
    format_on,
)
from penstock.kernels.float8.reference import (
    LEAST_SCALE,
    aligned_rows,
    dequantize,
    multiply,
    multiply_columns,
    multiply_groups,
    quantize,
    quantize_groups,
    quantize_rows,
    quantize_weight,
)
from tests.closeness import assert_close, decibels
from tests.examples import examples
from tests.kernels.float8.draw_quantized import aligned_starts

FORMS = [E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ]
EIGHT_BITS = [TENSORWISE, ROWWISE, BLOCKWISE, BLOCKWISE_SQUARE, MXFP8]
every_recipe = pytest.mark.parametrize("recipe", EIGHT_BITS, ids=lambda recipe: recipe.name)
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.dtype).removeprefix("torch."))


@every_form
@every_recipe
def test_signal_to_noise_is_what_the_format_has_bits_for(recipe: Recipe, form: Format) -> None:
    x_RD = torch.randn(200, 300)
    rows, columns = quantize_rows(x_RD, recipe, form, columns=recipe.columns)
    bar = 25 if form.name == "e4m3" else 20  # decibels; a bit of the mantissa is worth 6
    assert decibels(dequantize(rows), x_RD) > bar
    assert decibels(dequantize(columns).T, x_RD) > bar


@every_form
@every_recipe
def test_outliers_make_no_nan_and_zeros_have_the_least_scale(recipe: Recipe, form: Format) -> None:
    x_RD = torch.randn(20, 260)
    x_RD[3, 7], x_RD[3, 200], x_RD[11, 0] = 1e30, -1e20, 4e4
    found = dequantize(quantize_rows(x_RD, recipe, form).rows)
    assert found.isfinite().all()
    assert_close(found[3, 7], 1e30, tolerance=0.13)  # e5m2 has two bits behind the point
    if recipe is not TENSORWISE:
        untouched = [row for row in range(20) if row not in (3, 11)]
        assert decibels(found[untouched], x_RD[untouched]) > 20, "an outlier is a matter of its own row"
    zeros = quantize_rows(torch.zeros(3, 130), recipe, form).rows
    assert (zeros.values.float() == 0).all() and (zeros.scales.float() == LEAST_SCALE).all()


@every_form
@every_recipe
def test_nan_and_infinity_stay_visible_in_their_block(recipe: Recipe, form: Format) -> None:
    for value in (math.nan, math.inf, -math.inf):
        x_RD = torch.randn(4, 256)
        x_RD[2, 40] = value
        found = dequantize(quantize_rows(x_RD, recipe, form).rows)
        assert not found[2, 40].isfinite(), value
        if recipe is not TENSORWISE:
            assert found[[0, 1, 3]].isfinite().all(), value
        if recipe.rows[1] in (32, 128):  # the numbers of a block
            assert found[2, 128:].isfinite().all(), value


@pytest.mark.parametrize("size", [2.0**-149, 2.0**-130, 1e-37, 1e-20, 1e37])
@every_recipe
def test_tiny_and_huge_numbers_neither_overflow_nor_become_nan(recipe: Recipe, size: float) -> None:
    x_RD = torch.randn(4, 64).clamp(-8, 8) * size
    found = dequantize(quantize_rows(x_RD, recipe, E4M3).rows)
    assert found.isfinite().all()
    if size > 1e-30:
        assert decibels(found / size, x_RD / size) > 25


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40), st.sampled_from(FORMS))
def test_an_error_is_half_a_step_of_the_number_or_of_the_smallest(numbers: list[float], form: Format) -> None:
    x_RD = torch.tensor([numbers])
    found = quantize(x_RD, (1, 32), form, "power-of-two")
    scale_RD = found.scales.repeat_interleave(32, 1)[:, : len(numbers)]
    half_a_step = x_RD.abs() * (2.0**-4 if form.name == "e4m3" else 2.0**-3)
    smallest = torch.ones(1, dtype=torch.uint8).view(form.dtype).float()  # subnormal: only the last bit
    assert ((dequantize(found) - x_RD).abs() <= half_a_step.maximum(scale_RD * smallest / 2)).all()


@examples(30)
@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from(EIGHT_BITS))
def test_a_last_block_is_smaller_and_all_shapes_are_kept(outer: int, depth: int, recipe: Recipe) -> None:
    x_RD = torch.full((outer, depth), 3.0)
    found, columns = quantize_rows(x_RD, recipe, E4M3, columns=recipe.columns)
    for copy, sizes, block in ((found, (outer, depth), recipe.rows), (columns, (depth, outer), recipe.columns)):
        assert copy.values.shape == sizes and copy.block == block
        assert copy.scales.shape == tuple(-(-size // (side or size)) for size, side in zip(sizes, block, strict=True))
    assert_close(dequantize(found), x_RD, tolerance=0.07)
    assert torch.equal(dequantize(columns).T, dequantize(found)), "one number has one scale in either direction"


@every_form
@pytest.mark.parametrize("recipe", [BLOCKWISE, MXFP8], ids=lambda recipe: recipe.name)
def test_scales_that_are_powers_of_two_lose_nothing_twice(recipe: Recipe, form: Format) -> None:
    """So a matrix that travelled in 8 bits is quantized again along its columns with one rounding more at most."""
    once = dequantize(quantize_rows(torch.randn(40, 300), recipe, form).rows)
    again = quantize_rows(once, recipe, form).rows
    assert (again.scales.float().frexp().mantissa == 0.5).all()
    assert torch.equal(dequantize(again), once)


def test_a_power_of_two_is_the_least_that_keeps_the_largest_number_inside() -> None:
    for form in FORMS:
        largest = torch.tensor([form.largest, form.largest * 2.0**-30])
        x = torch.cat([largest, largest.nextafter(torch.zeros(())), largest.nextafter(torch.tensor(math.inf))])
        scales = quantize(x[:, None], (1, 32), form, "power-of-two").scales[:, 0]
        assert scales.tolist() == [1.0, 2.0**-30, 1.0, 2.0**-30, 2.0, 2.0**-29]


@pytest.mark.parametrize("shape", [(256, 384), (2, 130, 200)])
def test_a_weight_in_squares_has_one_set_of_numbers_for_both_directions(shape: tuple[int, ...]) -> None:
    forward, backward = quantize_weight(torch.randn(shape), BLOCKWISE, E4M3)
    assert torch.equal(forward.values.float().mT, backward.values.float())
    assert torch.equal(forward.scales.mT, backward.scales)


@every_recipe
def test_each_matrix_of_a_stack_has_scales_of_its_own(recipe: Recipe) -> None:
    w_eFD = torch.randn(3, 40, 160) * torch.tensor([1.0, 1e3, 1e-3])[:, None, None]
    stack = quantize_weight(w_eFD, recipe, E4M3)
    for expert, w_FD in enumerate(w_eFD):
        for alone, copy in zip(quantize_weight(w_FD, recipe, E4M3), stack, strict=True):
            assert torch.equal(dequantize(alone), dequantize(copy)[expert])


def test_chips_compute_with_their_own_forms() -> None:
    assert format_on("e4m3", "gfx942").largest == 240
    assert format_on("e5m2", "gfx942").dtype == torch.float8_e5m2fnuz
    assert format_on("e4m3", "gfx950") is E4M3 and format_on("e5m2", "sm_90") is E5M2


@given(st.lists(st.integers(0, 300), min_size=1, max_size=9))
def test_each_expert_begins_at_a_multiple_and_all_have_room(counts: list[int]) -> None:
    starts = aligned_starts(torch.tensor(counts)).tolist()
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert all(after - first >= count for first, after, count in zip(starts, starts[1:], counts, strict=False))
    assert starts[-1] <= aligned_rows(sum(counts), len(counts)) < starts[-1] + ALIGNMENT * (len(counts) + 1)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_places_between_experts_are_zero_and_blocks_hold_one_experts_rows(recipe: Recipe) -> None:
    counts = torch.tensor([5, 0, 130, 1])
    x_RD = torch.randn(150, 32)
    x_RD[136:] = math.nan
    found = dequantize(quantize_groups(x_RD, counts, recipe, E4M3)).T
    assert len(found) == aligned_rows(150, 4)
    rows = [(0, 0, 5), (128, 5, 130), (384, 135, 1)]  # place in the copy, first row, count
    used = torch.zeros(len(found), dtype=torch.bool)
    for place, first, count in rows:
        used[place : place + count] = True
        assert decibels(found[place : place + count], x_RD[first : first + count]) > 12
    assert (found[~used] == 0).all(), "and the tail, whatever the rows past the last expert's hold"


def test_gathered_rows_are_those_of_the_index() -> None:
    x_ND, index_R, counts = torch.randn(30, 40), torch.randint(0, 30, (60,)), torch.tensor([20, 40])
    gathered = quantize_groups(x_ND, counts, BLOCKWISE, E4M3, index_R)
    assert torch.equal(dequantize(gathered), dequantize(quantize_groups(x_ND[index_R], counts, BLOCKWISE, E4M3)))
    in_8_bits = quantize_rows(x_ND, BLOCKWISE, E4M3).rows
    assert decibels(dequantize(quantize_groups(in_8_bits, counts, BLOCKWISE, E4M3, index_R)), dequantize(gathered)) > 25


def test_squares_are_of_activations_along_the_rows_of_one_expert() -> None:
    x_RD, counts = torch.randn(300, 200), torch.tensor([100, 0, 200])
    found, plain = (
        quantize_rows(x_RD, recipe, E4M3, columns=recipe.columns, counts_e=counts)
        for recipe in (BLOCKWISE_SQUARE, BLOCKWISE)
    )
    assert torch.equal(dequantize(found.rows), dequantize(plain.rows))
    of_gradient = quantize_groups(x_RD, counts, BLOCKWISE_SQUARE, E4M3, block=BLOCKWISE_SQUARE.rows)
    assert torch.equal(dequantize(of_gradient), dequantize(plain.columns))
    assert found.columns.scales.shape == (2, plain.columns.scales.shape[1]), "and 200 of the others"
    x_RD[100:] *= 2.0**20
    again = quantize_groups(x_RD, counts, BLOCKWISE_SQUARE, E4M3).scales
    # Rows of the first expert have the scales that they had.
    assert torch.equal(again[:, 0], found.columns.scales[:, 0])
    assert torch.equal(again[:, 1:3], found.columns.scales[:, 1:3] * 2.0**20)


@every_recipe
def test_products_are_those_of_the_numbers(recipe: Recipe) -> None:
    """Within the rounding of both operands: 3 decibels below each."""
    counts = torch.tensor([10, 0, 25])
    x_RD, w_eFD, dy_RF = torch.randn(40, 96), torch.randn(3, 64, 96), torch.randn(40, 64)
    rows, w = quantize_rows(x_RD, recipe, E4M3).rows, quantize_weight(w_eFD, recipe, E4M3)
    pieces = x_RD[:35].split(counts.tolist())
    expected = torch.cat([piece @ w_FD.T for piece, w_FD in zip(pieces, w_eFD, strict=True)])
    found = multiply_groups(rows, w.forward, counts, dtype=torch.float32)
    assert decibels(found[:35], expected) > 24 and (found[35:] == 0).all()
    one = quantize_weight(w_eFD[0], recipe, E4M3).forward
    assert decibels(multiply(rows, one, torch.float32), x_RD @ w_eFD[0].T) > 24
    blocks = recipe.rows, recipe.columns
    columns = [
        quantize_groups(side, counts, recipe, E4M3, block=block)
        for side, block in zip((dy_RF, x_RD), blocks, strict=True)
    ]
    sums = torch.ones(3, 64, 96)
    found = multiply_columns(*columns, counts, dtype=torch.float32, accumulate_into=sums)
    expected = torch.stack([dy.T @ x for dy, x in zip(dy_RF[:35].split(counts.tolist()), pieces, strict=True)])
    assert found is sums and decibels(found - 1, expected) > 24
    assert (found[1] == 1).all(), "an expert without rows has no gradient"
