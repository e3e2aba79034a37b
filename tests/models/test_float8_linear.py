"""Matrices in 8 bits: how near their products are, what they keep, and when their weights are quantized."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.float8 import quantized
from penstock.kernels.float8.operators import REFERENCE, Float8Rule
from penstock.kernels.float8.quantized import BLOCKWISE, BLOCKWISE_SQUARE, E4M3, E5M2, MXFP8, Format, Recipe
from penstock.kernels.float8.triton_operators import TRITON
from penstock.models.block import FeedForward
from penstock.models.linear import Linear
from penstock.models.norm import PreNorm
from penstock.parallel.async_transfer import WeightGradStore
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import discarding, recomputed, saving
from tests.closeness import assert_close, assert_equal, decibels

BARS = {"e4m3": 25.0, "e5m2": 20.0}
"""Least signal-to-noise ratio in decibels, by the format of the gradients."""

T, D, OUT = 192, 256, 144


def layer_context_of(
    recipe: Recipe = BLOCKWISE, gradient: Format = E4M3, weight_grads: WeightGradStore | None = None
) -> LayerContext:
    return LayerContext(float8=Float8Rule(dense=recipe, gradient=gradient), weight_grads=weight_grads)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix_of(layer_context: LayerContext, rows: int = OUT, columns: int = D, *, bias: bool = False) -> Linear:
    matrix = Linear(columns, rows, layer_context, bias=bias)
    with torch.no_grad():
        matrix.weight.copy_(random(rows, columns, seed=1) * 0.02)
        if bias:
            matrix.bias.copy_(random(rows, seed=2))
    return matrix


def passes(matrix: Linear, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and gradient of the input."""
    x = x.detach().requires_grad_()
    y = matrix(x)
    y.backward(dy)
    return y.detach(), x.grad


def run(work: list[Callable[[], None]]) -> None:
    for task in work:
        task()


@contextmanager
def counted_bytes(module: nn.Module) -> Iterator[list[int]]:
    """Bytes of each storage that is saved for backward, parameters aside."""
    parameters = {parameter.data_ptr() for parameter in module.parameters()}
    found, sizes = {}, []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saving(keep):
        yield sizes
    sizes.extend(found.values())


@pytest.mark.parametrize("gradient", [E4M3, E5M2], ids=lambda form: form.name)
@pytest.mark.parametrize("recipe", quantized.RECIPES.values(), ids=quantized.RECIPES)
def test_all_three_products_are_near_those_of_float32(recipe: Recipe, gradient: Format) -> None:
    matrix = matrix_of(layer_context_of(recipe, gradient))
    # Some columns are larger than others, as activations have them.
    x = random(2, T // 2, D, seed=3) * (1 + 7 * (torch.arange(D) % 64 == 0))
    dy = random(2, T // 2, OUT, seed=4) * 1e-3
    y, dx = passes(matrix, x, dy)
    weight = matrix.weight.detach()
    assert decibels(y, F.linear(x, weight)) > BARS["e4m3"]
    assert decibels(dx, dy @ weight) > BARS[gradient.name]
    assert decibels(matrix.weight.grad, dy.flatten(0, 1).T @ x.flatten(0, 1)) > BARS[gradient.name]


@pytest.mark.parametrize("recipe", quantized.RECIPES.values(), ids=quantized.RECIPES)
def test_outliers_and_zeros_give_no_nan(recipe: Recipe) -> None:
    matrix = matrix_of(layer_context_of(recipe))
    x, dy = random(T, D, seed=5), random(T, OUT, seed=6)
    x[7, 5], x[9], dy[3, 1], dy[8] = 3e38, 0, -1e30, 0
    assert all(found.isfinite().all() for found in passes(matrix, x, dy))
    matrix.weight.grad = None
    x[7, 5], dy[3, 1] = 1e5, -1e5
    passes(matrix, x, dy)
    assert matrix.weight.grad.isfinite().all()


@pytest.mark.parametrize(("larger", "is_lost"), [(1e3, False), (1e6, True)])
def test_a_channel_a_thousand_times_as_large_as_others_in_its_square_costs_them_nothing(
    larger: float, is_lost: bool
) -> None:
    x, dy = random(T, D, seed=3), random(T, OUT, seed=4)
    x[:, 7] *= larger
    matrices = [matrix_of(layer_context_of(recipe)) for recipe in (BLOCKWISE_SQUARE, BLOCKWISE)]
    for matrix in matrices:
        passes(matrix, x, dy)
    (square, plain), exact = (matrix.weight.grad for matrix in matrices), dy.T @ x
    beside = [column for column in range(D) if column != 7]
    assert (decibels(square[:, beside], exact[:, beside]) < 25) == is_lost
    assert decibels(plain[:, beside], exact[:, beside]) > 25
    assert all(decibels(one[:, 7], exact[:, 7]) > 25 for one in (square, plain))
    assert decibels(square[:, 128:], exact[:, 128:]) > 25, "outside of it nothing does"


@pytest.mark.parametrize("shape", [(OUT + 8, D), (OUT, D + 8)])
def test_widths_that_8_bit_products_do_not_take_stay_in_16_bits(shape: tuple[int, int]) -> None:
    matrix, plain = matrix_of(layer_context_of(), *shape), matrix_of(LayerContext(), *shape)
    x = random(T, shape[1], seed=7)
    assert matrix.float8 is None and matrix.quantize_input(x) is None
    assert torch.equal(matrix(x), plain(x))


@pytest.mark.parametrize("rows", [1, 130])
def test_any_number_of_rows_is_multiplied_and_a_nan_stays_in_its_row(rows: int) -> None:
    matrix = matrix_of(layer_context_of())
    x, dy = random(rows, D, seed=8), random(rows, OUT, seed=9)
    y, _ = passes(matrix, x, dy)
    assert decibels(y, F.linear(x, matrix.weight.detach())) > BARS["e4m3"]
    assert decibels(matrix.weight.grad, dy.T @ x) > BARS["e4m3"]
    x[0, 5] = torch.nan
    y, _ = passes(matrix, x, dy)
    assert y[0].isnan().all() and y[1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weights_gradient_is_the_same_by_autograd_in_a_sum_and_later(dtype: torch.dtype) -> None:
    x, dy = random(2, T // 2, D, seed=3).to(dtype), random(2, T // 2, OUT, seed=4).to(dtype)
    weight_grads = WeightGradStore()
    matrix = matrix_of(layer_context_of(weight_grads=weight_grads), bias=True).to(dtype)
    expected = passes(matrix, x, dy)
    by_autograd = matrix.weight.grad, matrix.bias.grad
    assert all(gradient.any() for gradient in by_autograd)

    matrix.weight.grad = matrix.bias.grad = None
    with weight_grads.collecting() as work:
        found = passes(matrix, x, dy)
        assert matrix.weight.grad is None
    run(work)
    assert_equal(found, expected)
    assert_equal((matrix.weight.grad, matrix.bias.grad), by_autograd)

    matrix.weight.grad = matrix.bias.grad = None
    matrix.main_grad = torch.ones(OUT, D)
    passes(matrix, x, dy)
    with weight_grads.collecting() as work:
        passes(matrix, x, dy)
    run(work)
    assert matrix.weight.grad is None
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert_close(matrix.main_grad, 1 + 2 * by_autograd[0].float(), tolerance=tolerance)
    assert matrix.main_grad.dtype == torch.float32


def test_without_gradients_nothing_is_kept_or_transposed() -> None:
    matrix = matrix_of(layer_context_of())
    x = random(T, D, seed=3)
    with torch.no_grad():
        assert matrix.quantize_input(x).columns is None
        y = matrix(x)
    assert torch.equal(y, matrix(x).detach())


def test_of_its_input_one_byte_a_number_is_kept() -> None:
    x = random(T, D, seed=3).bfloat16().requires_grad_()
    # In 8 bits there is a scale for 128 rows besides.
    for layer_context, kept in ((LayerContext(), 2 * T * D), (layer_context_of(), T * D + 4 * D * 2)):
        matrix = matrix_of(layer_context).bfloat16()
        matrix.refresh_float8()
        with counted_bytes(matrix) as sizes:
            matrix(x + 2)
        assert sum(sizes) == kept


def test_products_of_one_input_share_what_is_kept_of_it() -> None:
    layer_context = layer_context_of()
    one, other = matrix_of(layer_context), matrix_of(layer_context, rows=64)
    x = random(T, D, seed=3).requires_grad_()
    expected = one(x), other(x)
    with counted_bytes(nn.ModuleList((one, other))) as sizes:
        ready = one.quantize_input(x)
        found = one(x, ready), other(x, ready)
    assert sum(sizes) == T * D + 4 * D * 2
    assert_equal(found, expected)


def test_copies_without_a_refresh_are_stale_and_a_refresh_writes_the_same_memory() -> None:
    matrix = matrix_of(layer_context_of())
    x = random(T, D, seed=3)
    y = matrix(x).detach()
    matrix.refresh_float8()
    assert torch.equal(matrix(x), y)
    places = [tensor.data_ptr() for copy in matrix.copies for tensor in (copy.values, copy.scales)]
    with torch.no_grad():
        matrix.weight.mul_(-2)
    assert torch.equal(matrix(x), y), "a copy stays as it was"
    matrix.refresh_float8()
    assert torch.equal(matrix(x), -2 * y)
    assert places == [tensor.data_ptr() for copy in matrix.copies for tensor in (copy.values, copy.scales)]


def network_of(
    layer_context: LayerContext, sizes: tuple[int, int] = (D, OUT), *, std: float = 0.05, has_copies: bool = False
) -> FeedForward:
    network, (hidden, width) = FeedForward(*sizes, layer_context), sizes
    with torch.no_grad():
        network.gate_up.weight.copy_(random(2 * width, hidden, seed=1) * std)
        network.down.weight.copy_(random(hidden, width, seed=2) * std)
    if has_copies:
        network.gate_up.refresh_float8()
        network.down.refresh_float8()
    return network


def network_passes(
    network: FeedForward, x: Tensor, dy: Tensor, *, in_halves: bool = False, deferred: WeightGradStore | None = None
) -> list[Tensor]:
    x = x.detach().requires_grad_()
    with deferred.collecting() if deferred else nullcontext([]) as work:
        y = network.narrow(network.widen(x)) if in_halves else network(x)
        y.backward(dy)
    assert len(work) == (2 if deferred else 0)
    run(work)
    found = [y.detach(), x.grad, network.gate_up.weight.grad, network.down.weight.grad]
    assert all(one.any() for one in found)
    network.zero_grad()
    return found


@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("has_copies", [False, True], ids=["quantized in each pass", "with copies"])
def test_a_network_in_one_function_is_its_parts(has_copies: bool, recipe: Recipe) -> None:
    weight_grads = WeightGradStore()
    network = network_of(layer_context_of(recipe, weight_grads=weight_grads), has_copies=has_copies)
    x, dy = random(T, D, seed=3), random(T, D, seed=4)
    expected = network_passes(network, x, dy, in_halves=True)
    assert_equal(network_passes(network, x, dy), expected)
    assert_equal(network_passes(network, x, dy, deferred=weight_grads), expected)
    for found, exact in zip(expected, network_passes(network_of(LayerContext()), x, dy), strict=True):
        assert decibels(found, exact) > BARS["e4m3"] - 3, "two products stand behind each other"


def test_squares_change_the_gradients_of_a_networks_matrices_only() -> None:
    x, dy = random(T, D, seed=3), random(T, D, seed=4)
    # A column of x and one of h, so large that what shares their scales is lost.
    x[:, 7] *= 1e6
    found = []
    for recipe in (BLOCKWISE_SQUARE, BLOCKWISE):
        network = network_of(layer_context_of(recipe))
        with torch.no_grad():
            network.gate_up.weight[:, 7] *= 1e-6
            network.gate_up.weight[[5, 5 + OUT]] *= 1e3
        found.append(network_passes(network, x, dy))
    same = [torch.equal(*pair) for pair in zip(*found, strict=True)]
    assert same == [True, True, False, False], "output, x, gate and up, down"


def test_a_network_keeps_its_input_in_8_bits_and_gate_and_up() -> None:
    network = network_of(layer_context_of(), has_copies=True).bfloat16()
    x = random(T, D, seed=3).bfloat16().requires_grad_()
    with counted_bytes(network) as sizes:
        network(x + 2)
    assert sum(sizes) == T * D + 4 * D * 2 + 2 * T * 2 * OUT


@pytest.mark.parametrize("recipe", [BLOCKWISE_SQUARE, MXFP8], ids=lambda recipe: recipe.name)
def test_kernels_give_what_definitions_give(recipe: Recipe) -> None:
    found = []
    for operators, bar in ((REFERENCE, 0), (TRITON, 25)):
        layer_context = LayerContext(float8=Float8Rule(dense=recipe, operators=operators))
        network = network_of(layer_context, (144, 48), std=0.1, has_copies=True)
        network.gate_up.main_grad = torch.zeros(96, 144)
        norm = PreNorm(144, 1e-6, layer_context.operators, layer_context.float8, keep_plain=False)
        torch.nn.init.ones_(norm.weight_D)
        x = random(40, 144, seed=3).requires_grad_()
        y = network(*norm(x))
        y.backward(random(40, 144, seed=4))
        found.append((y.detach(), x.grad, network.gate_up.main_grad, network.down.weight.grad, norm.weight_D.grad))
        assert all(decibels(mine, other) > bar for mine, other in zip(found[-1], found[0], strict=True) if bar)


def test_a_network_that_runs_again_makes_its_last_product_once() -> None:
    network = network_of(layer_context_of())
    x, dy = random(T, D, seed=3), random(T, D, seed=4)
    expected = network_passes(network, x, dy)
    multiply, outputs = network.down.float8.operators.multiply, []

    def counting(*arguments: object, **options: object) -> Tensor:
        outputs.append(options.get("out") is not None)
        return multiply(*arguments, **options)

    for matrix in (network.gate_up, network.down):
        matrix.float8 = replace(matrix.float8, operators=replace(matrix.float8.operators, multiply=counting))
    x = x.requires_grad_()
    recomputed(network, x * 1).backward(dy)
    assert outputs.count(True) == 1, "only forward asks for it"
    assert len(outputs) == 2 + 1 + 4, "the first product runs again"
    assert_equal([x.grad, network.gate_up.weight.grad], expected[1:3])


def test_behind_a_norm_that_runs_again_no_copy_of_its_rows_is_kept() -> None:
    layer_context = layer_context_of()
    matrix = matrix_of(layer_context)
    matrix.refresh_float8()
    norm = PreNorm(D, 1e-6, layer_context.operators, layer_context.float8)
    torch.nn.init.ones_(norm.weight_D)
    x, dy = random(2, T // 2, D, seed=3).requires_grad_(), random(2, T // 2, OUT, seed=4)

    def through(x: Tensor, *kinds: str) -> Tensor:
        with discarding():
            rows, ready = LayerContext(recompute=frozenset(kinds)).run("norm", norm, x)
            return matrix(rows, ready)

    through(x).backward(dy)
    expected = x.grad, matrix.weight.grad, norm.weight_D.grad
    x.grad = matrix.weight.grad = norm.weight_D.grad = None
    with counted_bytes(norm) as sizes:
        y = through(x, "norm")
    assert sizes == [x.nbytes], "what the norm reads"
    y.backward(dy)
    assert_equal((x.grad, matrix.weight.grad, norm.weight_D.grad), expected)
