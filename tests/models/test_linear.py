"""Matrices and embeddings of which ranks hold parts give what whole ones give."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.layout.grid import Grid
from penstock.layout.sharding import Cut
from penstock.models.ffn import FeedForward
from penstock.models.linear import Embedding, Linear, cut_over, look_up_into
from penstock.parallel.axes import ALONE, Axes, Axis, make_axes
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import recomputed
from penstock.parallel.weight_grad_store import WeightGradStore
from tests.closeness import assert_close
from tests.distributed.pool import Pool

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

B, S, D, V = 2, 8, 6, 12
INPUTS, OUTPUTS = 8, 16


def _layer_context(rank: int, size: int) -> LayerContext:
    """A rank that is alone but believes that it is one of several: good for everything but talking."""
    axis = Axis(name="tensor", ranks=tuple(range(size)), rank=rank)
    return LayerContext(axes=replace(ALONE, tensor=axis))


def _whole(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _fill(parameter: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


@pytest.mark.parametrize("size", [2, 4])
def test_parts_by_outputs_give_parts_of_the_output(size: int) -> None:
    whole, x = _whole(OUTPUTS, INPUTS), torch.randn(3, INPUTS)
    found = []
    for rank in range(size):
        part = Linear(INPUTS, OUTPUTS, _layer_context(rank, size), split="outputs")
        assert part.cuts == {"weight": (Cut(0, rank, size),)}
        _fill(part.weight, whole.chunk(size)[rank])
        found.append(part(x))
    assert_close(torch.cat(found, dim=-1), F.linear(x, whole))


@pytest.mark.parametrize("size", [2, 4])
def test_parts_by_inputs_give_summands_of_the_output(size: int) -> None:
    whole, x = _whole(OUTPUTS, INPUTS), torch.randn(3, INPUTS)
    summands = []
    for rank in range(size):
        part = Linear(INPUTS, OUTPUTS, _layer_context(rank, size), split="inputs")
        assert part.cuts == {"weight": (Cut(1, rank, size),)}
        _fill(part.weight, whole.chunk(size, dim=1)[rank])
        summands.append(part(x.chunk(size, dim=1)[rank]))
    assert_close(torch.stack(summands).sum(0), F.linear(x, whole))


def test_blocks_of_the_output_are_divided_each_by_itself() -> None:
    part = Linear(INPUTS, OUTPUTS, _layer_context(1, 2), split="outputs", blocks=2)
    assert part.cuts == {"weight": (Cut(0, 1, 2, blocks=2),)}
    assert part.weight.shape == (OUTPUTS // 2, INPUTS)


@pytest.mark.parametrize("layer_context", [LayerContext(), _layer_context(1, 2)], ids=["alone", "among two"])
def test_a_matrix_that_nobody_divides_is_whole(layer_context: LayerContext) -> None:
    matrix = Linear(INPUTS, OUTPUTS, layer_context)
    assert matrix.cuts == {"weight": ()}
    assert matrix.weight.shape == (OUTPUTS, INPUTS)


def test_one_rank_cuts_nothing() -> None:
    assert Linear(INPUTS, OUTPUTS, LayerContext(), split="outputs").cuts == {"weight": ()}
    assert Embedding(V, D, LayerContext()).cuts == {"weight": ()}
    assert cut_over(Axis(name="tensor"), dim=0) == ()


def test_a_size_that_does_not_divide_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="is not divided by"):
        Linear(INPUTS, 9, _layer_context(0, 2), split="outputs")


# Biases


@pytest.mark.parametrize("size", [1, 2])
def test_a_bias_is_added_once_whoever_shares_the_matrix(size: int) -> None:
    by_outputs, by_inputs = _whole(OUTPUTS, INPUTS), _whole(INPUTS, OUTPUTS)
    first_O, second_I, x = torch.randn(OUTPUTS), torch.randn(INPUTS), torch.randn(3, INPUTS)
    summands = []
    for rank in range(size):
        first = Linear(INPUTS, OUTPUTS, _layer_context(rank, size), split="outputs", bias=True)
        second = Linear(OUTPUTS, INPUTS, _layer_context(rank, size), split="inputs", bias=True)
        assert first.cuts["bias"] == first.cuts["weight"]
        assert second.cuts["bias"] == ()
        _fill(first.weight, by_outputs.chunk(size)[rank])
        _fill(second.weight, by_inputs.chunk(size, dim=1)[rank])
        _fill(first.bias, first_O.chunk(size)[rank])
        _fill(second.bias, second_I)
        summands.append(second(first(x)))
    found = second.shifted(torch.stack(summands).sum(0))
    assert_close(found, F.linear(F.linear(x, by_outputs, first_O), by_inputs, second_I))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_has_its_gradient_when_that_of_the_matrix_goes_into_a_sum(dtype: torch.dtype) -> None:
    matrix = Linear(INPUTS, OUTPUTS, LayerContext(), bias=True).to(dtype)
    _fill(matrix.weight, _whole(OUTPUTS, INPUTS))
    _fill(matrix.bias, torch.randn(OUTPUTS))
    x = torch.randn(2, 3, INPUTS).to(dtype)
    expected = *_passes(matrix, x, 1), matrix.bias.grad
    matrix.weight.grad = matrix.bias.grad = None
    matrix.main_grad = torch.zeros(OUTPUTS, INPUTS)
    found = *_passes(matrix, x, 1), matrix.bias.grad
    for mine, other in zip(found, expected, strict=True):
        assert_close(mine, other)
    assert matrix.weight.grad is None and matrix.main_grad.any()


def test_a_bias_has_its_gradient_when_that_of_the_matrix_comes_later() -> None:
    later = WeightGradStore()
    matrix = Linear(INPUTS, OUTPUTS, LayerContext(weight_grads=later), bias=True)
    _fill(matrix.weight, _whole(OUTPUTS, INPUTS))
    _fill(matrix.bias, torch.randn(OUTPUTS))
    x = torch.randn(2, 3, INPUTS)
    _passes(matrix, x, 1)
    expected = matrix.weight.grad, matrix.bias.grad
    matrix.weight.grad = matrix.bias.grad = None
    with later.collecting() as work:
        _passes(matrix, x, 1)
    for task in work:
        task()
    assert_close((matrix.weight.grad, matrix.bias.grad), expected)


# Into a sum


def _matrix_and_input(dtype: torch.dtype, later: WeightGradStore | None = None) -> tuple[Linear, Tensor]:
    matrix = Linear(INPUTS, OUTPUTS, LayerContext(weight_grads=later)).to(dtype)
    _fill(matrix.weight, _whole(OUTPUTS, INPUTS))
    return matrix, torch.randn(2, 3, INPUTS, generator=torch.Generator().manual_seed(5)).to(dtype)


def _passes(matrix: Linear, x: Tensor, count: int = 2) -> tuple[Tensor, Tensor]:
    """Output, and gradient of the input, of the last of some passes."""
    for _ in range(count):
        x = x.detach().requires_grad_()
        y = matrix(x)
        y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_goes_into_the_sum_and_nowhere_else(dtype: torch.dtype) -> None:
    matrix, x = _matrix_and_input(dtype)
    expected = _passes(matrix, x)
    matrix.weight.grad = None
    matrix.main_grad = torch.ones(OUTPUTS, INPUTS)
    found = _passes(matrix, x)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)
    assert matrix.weight.grad is None
    exact = 2 * (2 * found[0].double().flatten(0, 1).to(dtype)).double().T @ x.double().flatten(0, 1)
    assert_close(matrix.main_grad.double(), 1.0 + exact, tolerance=1e-6)


def test_a_sum_and_a_gradient_by_autograd_may_come_of_one_weight() -> None:
    """As where the embedding is the output projection, or a float32 parameter's gradient is the sum itself."""
    matrix, x = _matrix_and_input(torch.float32)
    matrix.weight.grad = matrix.main_grad = torch.zeros(OUTPUTS, INPUTS)
    (matrix(x).sum() + matrix.weight.square().sum()).backward()
    assert matrix.weight.grad is matrix.main_grad
    expected = torch.ones(OUTPUTS, 6) @ x.flatten(0, 1) + 2 * matrix.weight.detach()
    assert_close(matrix.main_grad, expected)


def test_without_gradients_a_matrix_with_a_sum_is_a_plain_product() -> None:
    matrix, x = _matrix_and_input(torch.float32)
    matrix.main_grad = torch.zeros(OUTPUTS, INPUTS)
    with torch.no_grad():
        y = matrix(x)
    assert torch.equal(y, F.linear(x, matrix.weight.detach()))
    assert matrix(x).requires_grad


def test_a_gradient_that_comes_later_goes_into_the_sum_when_it_comes() -> None:
    later = WeightGradStore()
    matrix, x = _matrix_and_input(torch.bfloat16, later)
    matrix.main_grad = torch.zeros(OUTPUTS, INPUTS)
    _, expected = _passes(matrix, x, 1)
    at_once = matrix.main_grad.clone()
    with later.collecting() as work:
        _, found = _passes(matrix, x, 1)
    assert torch.equal(found, expected)
    assert torch.equal(matrix.main_grad, at_once), "nothing yet"
    work.pop()()
    assert not work
    # Not bit for bit: some CPUs start the second product's sums from what stands there.
    assert_close(matrix.main_grad, 2 * at_once, tolerance=1e-6)
    assert matrix.weight.grad is None


def test_a_replay_of_a_network_makes_no_last_product_and_adds_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    network, products, real = FeedForward(D, OUTPUTS, LayerContext()), [0], torch.mm

    def counting(*operands: Tensor, **more: Tensor) -> Tensor:
        products[0] += 1
        return real(*operands, **more)

    monkeypatch.setattr(torch, "mm", counting)
    found = []
    for run in (network, partial(recomputed, network)):
        for matrix in (network.gate_up, network.down):
            matrix.main_grad = torch.zeros_like(matrix.weight)
        x_TD, products[0] = _direction().flatten(0, 1).requires_grad_(), 0
        run(x_TD).square().sum().backward()
        assert x_TD.grad is not None
        found.append((x_TD.grad, network.gate_up.main_grad, network.down.main_grad))
        assert products[0] == (2 if run is network else 3), "of forward, and of a replay the first alone"
    for plain, again in zip(*found, strict=True):
        assert plain is not None
        assert again is not None
        assert torch.equal(plain, again)


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


@pytest.mark.parametrize("device", DEVICES)
def test_a_look_up_adds_each_tokens_gradient_to_its_row(device: str) -> None:
    tokens_BS = torch.tensor([[3, 1, 3], [0, 3, V - 1]], device=device)
    weight_VD = _whole(V, D).bfloat16().to(device).requires_grad_()
    gradient_BSD = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(6)).bfloat16().to(device)
    total_VD = torch.ones(V, D, device=device)
    x_BSD = look_up_into(total_VD, tokens_BS, weight_VD)
    assert torch.equal(x_BSD, F.embedding(tokens_BS, weight_VD))
    x_BSD.backward(gradient_BSD)
    exact_VD = torch.ones(V, D, dtype=torch.float64, device=device)
    exact_VD.index_add_(0, tokens_BS.flatten(), gradient_BSD.double().flatten(0, 1))
    assert_close(total_VD.double(), exact_VD, tolerance=1e-6)
    assert weight_VD.grad is None


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_embedding_adds_to_its_sum_the_same_bits_each_time() -> None:
    embed = Embedding(V, D, LayerContext()).cuda()
    found = []
    for _ in range(2):
        embed.main_grad = torch.zeros(V, D, device="cuda")
        tokens_BS = torch.randint(V, (8, 512), generator=torch.Generator().manual_seed(7)).cuda()
        (embed(tokens_BS) * torch.linspace(-1, 1, 512, device="cuda")[:, None]).sum().backward()
        found.append(embed.main_grad)
    assert embed.weight.grad is None
    assert found[0].any()
    assert torch.equal(*found)


# Over ranks


def _tokens() -> Tensor:
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(2))


def _tensor_axes(size: int) -> Axes:
    return make_axes(Grid(world=size, tensor=size))


def _direction() -> Tensor:
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(3))


def _embedded(size: int) -> tuple[Tensor, Tensor]:
    """Our positions' embeddings, and the gradient of our range of the vocabulary."""
    axes = _tensor_axes(size)
    embed = Embedding(V, D, LayerContext(axes=axes))
    _fill(embed.weight, _whole(V, D).chunk(size)[axes.rank])
    x_BSD = embed(_tokens())
    (x_BSD * _direction().chunk(size, dim=1)[axes.rank]).sum().backward()
    assert embed.weight.grad is not None
    return x_BSD.detach(), embed.weight.grad


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_embedding_over_ranks_gives_each_its_positions_of_the_whole_one(size: int, ranks: Pool) -> None:
    weight = _whole(V, D).requires_grad_()
    expected_BSD = F.embedding(_tokens(), weight)
    (expected_BSD * _direction()).sum().backward()
    found = ranks.run(size, _embedded, size)
    assert_close(torch.cat([x_BSD for x_BSD, _ in found], dim=1), expected_BSD.detach())
    assert_close(torch.cat([gradient for _, gradient in found]), weight.grad)


def _fed_forward(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Our tokens' outputs, and gradients of them and of both matrices."""
    axes = _tensor_axes(size)
    network = FeedForward(D, OUTPUTS, LayerContext(axes=axes))
    gate, up = (half.chunk(size)[axes.rank] for half in _whole(2 * OUTPUTS, D).chunk(2))
    _fill(network.gate_up.weight, torch.cat((gate, up)))
    _fill(network.down.weight, _whole(D, OUTPUTS, seed=4).chunk(size, dim=1)[axes.rank])
    x_TD = _direction().flatten(0, 1).chunk(size)[axes.rank].requires_grad_()
    y_TD = network(x_TD)
    y_TD.square().sum().backward()
    gradients = (x_TD.grad, network.gate_up.weight.grad, network.down.weight.grad)
    assert all(gradient is not None for gradient in gradients)
    return y_TD.detach(), *gradients


def test_a_network_over_ranks_gives_each_its_tokens_of_the_whole_one(ranks: Pool) -> None:
    x_TD = _direction().flatten(0, 1).requires_grad_()
    gate_up = _whole(2 * OUTPUTS, D).requires_grad_()
    down = _whole(D, OUTPUTS, seed=4).requires_grad_()
    gate, up = F.linear(x_TD, gate_up).chunk(2, dim=-1)
    expected = F.linear(F.silu(gate) * up, down)
    expected.square().sum().backward()
    found = ranks.run(2, _fed_forward, 2)
    outputs, inputs, gate_ups, downs = zip(*found, strict=True)
    assert_close(torch.cat(outputs), expected.detach(), tolerance=1e-5)
    assert_close(torch.cat(inputs), x_TD.grad, tolerance=1e-4)
    both = zip(*(gradient.chunk(2) for gradient in gate_ups), strict=True)
    assert_close(torch.cat([part for half in both for part in half]), gate_up.grad, tolerance=1e-4)
    assert_close(torch.cat(downs, dim=1), down.grad, tolerance=1e-4)
