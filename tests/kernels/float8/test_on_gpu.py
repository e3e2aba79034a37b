"""Every kernel around the 8-bit products as a GPU's compiler makes it, at sizes of real models, against its definition.

The interpreter sees none of what compilers do: layouts, packing of bytes, instructions of their own for 8 bits. Sizes
are few, because each kernel is compiled anew for each form of its arguments, and that takes seconds.
"""

import math

import pytest
import torch
from torch import Tensor

from penstock.kernels.float8 import norm, operators, quantize, quantized, reference
from penstock.kernels.float8.quantize import quantize_groups, quantize_rows, quantize_weight, transpose_weight
from penstock.kernels.float8.quantized import Quantized, RowColQuantized
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, ROWWISE, TENSORWISE, Recipe, format_on
from penstock.kernels.float8.swiglu import swiglu, swiglu_backward
from penstock.kernels.reference import SWIGLU
from penstock.kernels.tuning import target_of
from tests.closeness import decibels
from tests.kernels.float8.draw_quantized import assert_same, without_tail

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEVICE = torch.device("cuda")
TARGET = target_of(DEVICE) if torch.cuda.is_available() else "cpu"
FORM, WIDE_FORM = format_on("e4m3", TARGET), format_on("e5m2", TARGET)
COUNTS = (300, 0, 1, 128, 70)
TAIL = 13
"""Rows behind the last expert's."""

BAR_DB = 35.0
"""Least signal to noise where exponentials and sums differ in their last places, which can turn a rounding."""

WEIGHTS = [
    *((recipe, shape) for recipe in (BLOCKWISE, TENSORWISE, ROWWISE) for shape in ((576, 2048), (3, 256, 576))),
    *((BLOCKWISE, shape) for shape in ((10944, 2048), (200, 136))),
]

with_squares = pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE], ids=lambda recipe: recipe.name)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows, and columns, of very different sizes."""
    sizes = torch.randn(*shape[:-1], 1, device=DEVICE).exp() * torch.randn(shape[-1], device=DEVICE).mul(2).exp()
    return (torch.randn(shape, device=DEVICE) * sizes).to(dtype)


def experts(width: int) -> tuple[Tensor, Tensor]:
    """Rows with NaN behind the last expert's, and their counts."""
    x_RD = normal(sum(COUNTS) + TAIL, width)
    x_RD[sum(COUNTS) :] = math.nan
    return x_RD, torch.tensor(COUNTS, device=DEVICE)


def assert_both_equal(found: RowColQuantized, expected: RowColQuantized) -> None:
    assert_same(found.rows, expected.rows)
    assert_same(found.columns, expected.columns)


def assert_near(found: Quantized | None, expected: Quantized | None, rows: int | None = None) -> None:
    assert found is not None and expected is not None
    found_db = decibels(*(reference.dequantize(one)[:rows] for one in (found, expected)))
    assert found_db > BAR_DB, f"{found_db:.1f} dB"


@with_squares
@pytest.mark.parametrize("shape", [(400, 576), (384, 576), (300, 136)])
def test_rows_and_columns_equal_the_definition(shape: tuple[int, int], recipe: Recipe) -> None:
    x_RD = normal(*shape)
    expected = reference.quantize_rows(x_RD, recipe, FORM, columns=recipe.columns)
    assert_both_equal(quantize_rows(x_RD, recipe, FORM, columns=recipe.columns), expected)


def test_rows_alone_equal_the_definition() -> None:
    x_RD = normal(400, 576)
    assert_same(quantize_rows(x_RD, BLOCKWISE, FORM).rows, reference.quantize_rows(x_RD, BLOCKWISE, FORM).rows)


def test_gradients_of_5_bits_of_exponent_equal_the_definition() -> None:
    x_RD = normal(400, 576)
    expected = reference.quantize_rows(x_RD, BLOCKWISE, WIDE_FORM, columns=BLOCKWISE.rows)
    assert_both_equal(quantize_rows(x_RD, BLOCKWISE, WIDE_FORM, columns=BLOCKWISE.rows), expected)


@with_squares
def test_rows_of_experts_equal_the_definition(recipe: Recipe) -> None:
    x_RD, counts_e = experts(576)
    both, expected = (
        make(x_RD, recipe, FORM, columns=recipe.columns, counts_e=counts_e)
        for make in (quantize_rows, reference.quantize_rows)
    )
    assert_same(both.rows, expected.rows, sum(COUNTS))
    assert_same(without_tail(both.columns, counts_e), without_tail(expected.columns, counts_e))


@with_squares
@pytest.mark.parametrize("in_8_bits", [False, True], ids=["of 16 bits", "of 8 bits"])
def test_gathered_rows_equal_the_definition(in_8_bits: bool, recipe: Recipe) -> None:
    counts_e, tokens = torch.tensor(COUNTS, device=DEVICE), normal(250, 576)
    index_R = torch.randint(0, len(tokens), (sum(COUNTS) + TAIL,), device=DEVICE)
    source = reference.quantize_rows(tokens, recipe, FORM).rows if in_8_bits else tokens
    found, expected = (
        make(source, counts_e, recipe, FORM, index_R) for make in (quantize_groups, reference.quantize_groups)
    )
    assert_same(without_tail(found, counts_e), without_tail(expected, counts_e))


@pytest.mark.parametrize(
    ("recipe", "shape"), WEIGHTS, ids=lambda one: one.name if isinstance(one, Recipe) else str(one)
)
def test_both_copies_of_a_weight_equal_the_definition(recipe: Recipe, shape: tuple[int, ...]) -> None:
    w_eFD = normal(*shape)
    found, expected = (make(w_eFD, recipe, FORM) for make in (quantize_weight, reference.quantize_weight))
    assert_same(found.forward, expected.forward)
    assert_same(found.backward, expected.backward)


def test_a_stack_of_32_bits_is_filled_in_place() -> None:
    w_eFD = normal(3, 256, 576, dtype=torch.float32)
    copies = quantize_weight(torch.zeros_like(w_eFD), BLOCKWISE, FORM)
    expected = reference.quantize_weight(w_eFD, BLOCKWISE, FORM)
    assert quantize_weight(w_eFD, BLOCKWISE, FORM, copies) is copies
    assert_same(copies.forward, expected.forward)
    assert_same(copies.backward, expected.backward)


@pytest.mark.parametrize("recipe", [TENSORWISE, ROWWISE], ids=lambda recipe: recipe.name)
def test_scales_that_reach_over_rows_equal_the_definition(recipe: Recipe) -> None:
    x_RD = normal(400, 576)
    expected = reference.quantize_rows(x_RD, recipe, FORM, columns=recipe.columns)
    assert_both_equal(quantize_rows(x_RD, recipe, FORM, columns=recipe.columns), expected)


def test_bytes_are_transposed() -> None:
    copies = reference.quantize_weight(normal(3, 256, 576), BLOCKWISE, FORM)
    into = Quantized(torch.zeros_like(copies.backward.values).contiguous(), copies.backward.scales, BLOCKWISE.weights)
    transpose_weight(Quantized(copies.forward.values.contiguous(), *copies.forward[1:]), into)
    assert_same(into, copies.backward)


@with_squares
def test_normed_rows_are_quantized_as_they_are(recipe: Recipe) -> None:
    x_TD, weight_D = normal(300, 2048), 1 + 0.1 * torch.randn(2048, device=DEVICE)
    normed_TD, sum_TD, found = norm.rms_norm(x_TD, x_TD.flip(0), weight_D, 1e-5, recipe, FORM, columns=True)
    expected_TD, expected_sum_TD, _ = operators.rms_norm(x_TD, x_TD.flip(0), weight_D, 1e-5, recipe, FORM, columns=True)
    assert min(decibels(sum_TD, expected_sum_TD), decibels(normed_TD, expected_TD)) > BAR_DB
    assert_both_equal(found, reference.quantize_rows(normed_TD, recipe, FORM, columns=recipe.columns))


@with_squares
def test_the_activation_is_near_its_definition(recipe: Recipe) -> None:
    gate_up_RF, counts_e = experts(2 * 704)
    weights_R = torch.rand(len(gate_up_RF), device=DEVICE)
    inputs = (gate_up_RF, weights_R, SWIGLU, recipe, FORM)
    found, expected = (make(*inputs, counts_e=counts_e) for make in (swiglu, operators.swiglu))
    assert_near(found.rows, expected.rows, sum(COUNTS))
    dense = (gate_up_RF[: sum(COUNTS)], None, SWIGLU, recipe, FORM)
    found, expected = (make(*dense, columns=True) for make in (swiglu, operators.swiglu))
    assert_near(found.rows, expected.rows)
    assert_near(found.columns, expected.columns)


@with_squares
def test_gradients_of_the_activation_are_near_their_definition(recipe: Recipe) -> None:
    gate_up_RF, counts_e = experts(2 * 704)
    used, weights_R = sum(COUNTS), torch.rand(len(gate_up_RF), device=DEVICE)
    inputs = (gate_up_RF, weights_R, normal(len(gate_up_RF), 704), counts_e, SWIGLU, recipe, FORM, FORM)
    found, expected = (make(*inputs) for make in (swiglu_backward, operators.swiglu_backward))
    assert_near(found.d_gate_up, expected.d_gate_up, used)
    for one, other in ((found.d_gate_up_columns, expected.d_gate_up_columns), (found.h_columns, expected.h_columns)):
        assert_near(without_tail(one, counts_e), without_tail(other, counts_e))
    assert found.dweights_R is not None and expected.dweights_R is not None
    assert decibels(found.dweights_R[:used], expected.dweights_R[:used]) > BAR_DB


def test_rows_are_packed_and_opened_as_the_definition_does() -> None:
    x_TD = normal(300, 2048)
    packed, expected = (module.pack_rows(x_TD, BLOCKWISE, FORM) for module in (quantize, reference))
    views = [quantized.as_quantized(one, 2048, BLOCKWISE, FORM) for one in (packed, expected)]
    assert_same(*views)
    opened = [one.unpack_rows(expected, 2048, BLOCKWISE, FORM, torch.bfloat16) for one in (quantize, reference)]
    assert torch.equal(*opened)
