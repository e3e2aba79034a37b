"""Products of 8-bit numbers against their definitions, on counts of every kind."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.float8 import reference
from penstock.kernels.float8.launches import ProductLaunch
from penstock.kernels.float8.products import _gather, multiply, multiply_columns, multiply_groups
from penstock.kernels.float8.quantized import Quantized, as_quantized, row_bytes, scale_dtype
from penstock.kernels.float8.recipes import BLOCKWISE, DEPTH, E4M3, MXFP8, ROWWISE, TENSORWISE, Recipe, format_on
from penstock.kernels.float8.reference import pack_rows
from penstock.kernels.grouped_gemm import GATHER_LIMIT
from penstock.kernels.tile_table import tile_table
from penstock.kernels.tuning import target_of
from tests.closeness import assert_close
from tests.kernels.float8.draw_quantized import (
    TAIL,
    draw_columns,
    draw_rows,
    draw_weight,
    form_on,
    lay_out,
    without_memory,
)

POINTERS = ProductLaunch(block_rows=64, block_columns=64, stages=2, group=2, descriptors=False)
DESCRIPTORS = replace(POINTERS, pieces=2, descriptors=True, ahead=True)
BOTH_WAYS = pytest.mark.parametrize("launch", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
EVERY_RECIPE = pytest.mark.parametrize(
    "recipe", [TENSORWISE, ROWWISE, BLOCKWISE, MXFP8], ids=lambda recipe: recipe.name
)
COUNTS = [70, 0, 1, 40]
"""Rows of each expert: some blocks are partly empty, one expert has none."""
CPU = torch.device("cpu")
DEPTH_ODD, WIDTH_ODD = 336, 72
"""No multiples of 128."""


def assert_equal_sums(got: Tensor, expected: Tensor) -> None:
    """Only the order of float32 sums may differ: 2**-24 of each of some hundred terms, so far above 110 decibels."""
    assert_close(got, expected, by="norm", tolerance=3e-6)


@BOTH_WAYS
@EVERY_RECIPE
def test_a_dense_product_equals_its_definition(recipe: Recipe, launch: ProductLaunch, device: torch.device) -> None:
    a = draw_rows(70, DEPTH_ODD, recipe, device)
    b = draw_weight(recipe, device, 136, DEPTH_ODD)
    expected = reference.multiply(a, b, torch.float32)
    assert_equal_sums(multiply(a, b, torch.float32, launch=launch), expected)


@BOTH_WAYS
@EVERY_RECIPE
def test_rows_are_multiplied_by_the_matrix_of_their_expert(
    recipe: Recipe, launch: ProductLaunch, device: torch.device
) -> None:
    counts_e = torch.tensor(COUNTS, device=device)
    x = draw_rows(sum(COUNTS) + TAIL, DEPTH_ODD, recipe, device)
    w = draw_weight(recipe, device, len(COUNTS), WIDTH_ODD, DEPTH_ODD)
    expected = reference.multiply_groups(x, w, counts_e, dtype=torch.float32)
    x.values.view(torch.uint8)[sum(COUNTS) :] = 0x7F
    if recipe.rows == BLOCKWISE.rows:
        x.scales[sum(COUNTS) :] = float("nan")
    got = multiply_groups(x, w, counts_e, dtype=torch.float32, launch=launch)
    assert_equal_sums(got, expected)
    assert not got[sum(COUNTS) :].any(), "rows of the tail must be zero"


@BOTH_WAYS
@EVERY_RECIPE
def test_gathered_rows_are_multiplied_where_they_lie(
    recipe: Recipe, launch: ProductLaunch, device: torch.device
) -> None:
    counts_e = torch.tensor(COUNTS, device=device)
    x = draw_rows(30, DEPTH_ODD, recipe, device)
    travelled = lay_out(x, apart=48)._replace(scales=x.scales.contiguous())
    w = draw_weight(recipe, device, len(COUNTS), WIDTH_ODD, DEPTH_ODD)
    index_R = torch.randint(30, (sum(COUNTS) + TAIL,), device=device)
    expected = reference.multiply_groups(x, w, counts_e, index_R, dtype=torch.float32)
    assert_equal_sums(multiply_groups(travelled, w, counts_e, index_R, dtype=torch.float32, launch=launch), expected)


@BOTH_WAYS
@pytest.mark.parametrize("recipe", [BLOCKWISE, MXFP8], ids=lambda recipe: recipe.name)
def test_rows_that_travelled_are_multiplied_in_their_order(
    recipe: Recipe, launch: ProductLaunch, device: torch.device
) -> None:
    counts_e, form = torch.tensor(COUNTS, device=device), form_on(device)
    packed = pack_rows(torch.randn(sum(COUNTS) + TAIL, DEPTH_ODD, device=device), recipe, form)
    w = draw_weight(recipe, device, len(COUNTS), WIDTH_ODD, DEPTH_ODD)
    x = as_quantized(packed, DEPTH_ODD, recipe, form)
    expected = reference.multiply_groups(x, w, counts_e, dtype=torch.float32)
    packed[sum(COUNTS) :] = 0xFF  # NaN, values and scales
    assert_equal_sums(multiply_groups(x, w, counts_e, dtype=torch.float32, launch=launch), expected)


@EVERY_RECIPE
def test_gathered_rows_may_be_copied_first(recipe: Recipe, device: torch.device) -> None:
    counts_e, index_R = torch.tensor([40, 0, 7], device=device), torch.randint(30, (40 + 7 + TAIL,), device=device)
    x, w = draw_rows(30, DEPTH_ODD, recipe, device), draw_weight(recipe, device, 3, 64, DEPTH_ODD)
    travelled = lay_out(x, apart=48)._replace(scales=x.scales.contiguous())
    expected = reference.multiply_groups(x, w, counts_e, index_R, dtype=torch.float32)
    launch = replace(POINTERS, copy_gathered=True)
    copy, _ = _gather(travelled, index_R, tile_table(counts_e, len(index_R)), launch)
    assert copy.values.stride(0) % 16 == 0, "copies of blocks take no others"
    assert_equal_sums(multiply_groups(travelled, w, counts_e, index_R, dtype=torch.float32, launch=launch), expected)


@BOTH_WAYS
@EVERY_RECIPE
def test_weight_gradients_are_contracted_over_their_experts_rows(
    recipe: Recipe, launch: ProductLaunch, device: torch.device
) -> None:
    counts = [*COUNTS, 130]
    counts_e = torch.tensor(counts, device=device)
    dy, x = (draw_columns(width, counts, recipe, device) for width in (40, WIDTH_ODD))
    got = multiply_columns(dy, x, counts_e, dtype=torch.float32, launch=launch)
    assert_equal_sums(got, reference.multiply_columns(dy, x, counts_e, dtype=torch.float32))
    assert not got[1].any(), "no rows, no gradient"


@pytest.mark.parametrize("recipe", [ROWWISE, BLOCKWISE], ids=lambda recipe: recipe.name)
def test_gradients_are_added_to_float32_sums(recipe: Recipe, device: torch.device) -> None:
    counts_e = torch.tensor(COUNTS, device=device)
    dy, x = (draw_columns(width, COUNTS, recipe, device) for width in (40, WIDTH_ODD))
    main_eMN = torch.randn(len(COUNTS), 40, WIDTH_ODD, device=device)
    expected = reference.multiply_columns(dy, x, counts_e, dtype=torch.float32, accumulate_into=main_eMN.clone())
    tiles = tile_table(counts_e, sum(COUNTS) + TAIL)
    got = multiply_columns(dy, x, counts_e, dtype=torch.bfloat16, accumulate_into=main_eMN, tiles=tiles)
    assert got is main_eMN, "the sums themselves must come back"
    assert_equal_sums(got, expected)

    a, b = (draw_rows(width, 300, recipe, device) for width in (40, WIDTH_ODD))
    main_MN = torch.randn(40, WIDTH_ODD, device=device)
    expected = reference.multiply(a, b, torch.float32, accumulate_into=main_MN.clone())
    assert multiply(a, b, torch.bfloat16, accumulate_into=main_MN) is main_MN
    assert_equal_sums(main_MN, expected)


def test_gradients_of_more_range_are_multiplied_with_activations_of_more_precision(device: torch.device) -> None:
    for recipe in (BLOCKWISE, MXFP8):
        dy = draw_rows(40, 256, recipe, device, format_on("e5m2", target_of(device)))
        w = draw_weight(recipe, device, 64, 256)
        assert_equal_sums(multiply(dy, w, torch.float32), reference.multiply(dy, w, torch.float32))


def test_a_result_is_rounded_to_its_dtype_and_written_where_it_is_asked_for(device: torch.device) -> None:
    a, b = draw_rows(20, 128, BLOCKWISE, device), draw_weight(BLOCKWISE, device, 64, 128)
    out = torch.empty(20, 64, device=device, dtype=torch.bfloat16)
    assert multiply(a, b, torch.bfloat16, out=out) is out
    expected = reference.multiply(a, b, torch.float32)
    # Triton's interpreter cuts a bfloat16 off, so it may be a whole step of 2**-7 below.
    assert ((out.float() - expected).abs() <= expected.abs() * 2.0**-7).all()


def test_a_scale_that_is_no_number_spoils_its_row_only(device: torch.device) -> None:
    a, b = draw_rows(20, 256, BLOCKWISE, device), draw_weight(BLOCKWISE, device, 64, 256)
    a.scales[3, 1] = float("nan")
    got = multiply(a, b, torch.float32)
    assert got[3].isnan().all() and got.isnan().sum() == 64


def test_a_buffer_without_rows_has_an_empty_output_and_zero_gradients(device: torch.device) -> None:
    counts_e = torch.zeros(2, dtype=torch.int32, device=device)
    x, w = draw_rows(0, 128, BLOCKWISE, device), draw_weight(BLOCKWISE, device, 2, 64, 128)
    assert multiply_groups(x, w, counts_e, dtype=torch.bfloat16).shape == (0, 64)
    dy = draw_columns(64, [0, 0], BLOCKWISE, device)
    assert not multiply_columns(dy, dy, counts_e, dtype=torch.bfloat16).any()


@pytest.mark.parametrize("recipe", [BLOCKWISE, MXFP8, TENSORWISE], ids=lambda recipe: recipe.name)
def test_nothing_is_launched_for_tensors_without_memory(recipe: Recipe) -> None:
    counts_e = torch.empty(4, dtype=torch.int32, device="meta")
    x, w = without_memory(draw_rows(129, 256, recipe, CPU)), without_memory(draw_weight(recipe, CPU, 4, 64, 256))
    assert multiply_groups(x, w, counts_e, dtype=torch.bfloat16).shape == (129, 64)
    index_R = torch.empty(50, dtype=torch.int64, device="meta")
    assert multiply_groups(x, w, counts_e, index_R, dtype=torch.bfloat16).shape == (50, 64)
    dy = without_memory(draw_columns(72, COUNTS, recipe, CPU))
    assert multiply_columns(dy, dy, counts_e, dtype=torch.float32).shape == (4, 72, 72)
    assert multiply(x, without_memory(draw_weight(recipe, CPU, 64, 256)), torch.bfloat16).shape == (129, 64)


def test_rows_are_copied_where_32_bits_cannot_count_what_they_are_gathered_from() -> None:
    index_R = torch.empty(2, dtype=torch.int64, device="meta")
    tiles = tile_table(torch.empty(1, dtype=torch.int32, device="meta"), 2)

    def source(rows: int) -> Quantized:
        values = torch.empty(rows, 2048, dtype=E4M3.dtype, device="meta")
        return Quantized(values, torch.empty(rows, 16, device="meta"), (1, DEPTH))

    assert _gather(source(GATHER_LIMIT // 2048 - 1), index_R, tiles, POINTERS)[1] is index_R
    copy, no_index = _gather(source(GATHER_LIMIT // 2048), index_R, tiles, POINTERS)
    assert copy.values.shape == (2, 2048) and copy.scales.shape == (2, 16) and no_index is None


@pytest.mark.parametrize("recipe", [BLOCKWISE, MXFP8], ids=lambda recipe: recipe.name)
def test_scales_behind_rows_are_copied_where_32_bits_cannot_count_them(recipe: Recipe) -> None:
    tiles, apart = tile_table(torch.empty(1, dtype=torch.int32, device="meta"), 2), row_bytes(2048, recipe)
    limit = GATHER_LIMIT // (apart // scale_dtype(recipe).itemsize)

    def scales_of(rows: int) -> Tensor:
        packed = torch.empty(rows, apart, dtype=torch.uint8, device="meta")
        return _gather(as_quantized(packed, 2048, recipe, E4M3), None, tiles, POINTERS)[0].scales

    assert scales_of(limit).stride(1) == 1
    found = scales_of(limit + 1)
    assert found.stride() == (1, limit + 1) and found.dtype == scale_dtype(recipe)


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    a, b = draw_rows(8, 128, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, 64, 128)
    for one, other, says in (
        (draw_rows(8, 128, ROWWISE, CPU), b, "blocks do not fit"),
        (draw_rows(8, 64, BLOCKWISE, CPU), b, "b does not fit"),
        (a, draw_weight(BLOCKWISE, CPU, 36, 128), "the result cannot be written"),
        (lay_out(a, apart=8), b, "a cannot be copied in blocks"),
    ):
        with pytest.raises(KernelError, match=says):
            multiply(one, other, torch.bfloat16)


def test_counts_and_sums_that_do_not_fit_are_refused() -> None:
    x, w = draw_rows(8, 128, BLOCKWISE, CPU), draw_weight(BLOCKWISE, CPU, 2, 64, 128)
    with pytest.raises(KernelError, match="counts_e"):
        multiply_groups(x, w, torch.zeros(3, dtype=torch.int32), dtype=torch.bfloat16)
    with pytest.raises(KernelError, match="the result does not fit"):
        multiply(x, x, torch.float32, accumulate_into=torch.zeros(8, 8, dtype=torch.bfloat16))
