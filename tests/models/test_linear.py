"""Matrices and embeddings of which ranks hold parts give what whole ones give."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.layout.grid import Grid
from penstock.layout.pieces import Cut
from penstock.models.ffn import FeedForward
from penstock.models.linear import Embedding, Linear, cut_over
from penstock.parallel.axes import ALONE, Axes, Axis, make_axes
from penstock.parallel.kit import Kit
from tests.distributed.pool import Pool

B, S, D, V = 2, 8, 6, 12
INPUTS, OUTPUTS = 8, 16


def _kit(rank: int, size: int) -> Kit:
    """A rank that is alone but believes that it is one of several: good for everything but talking."""
    axis = Axis(name="tensor", ranks=tuple(range(size)), rank=rank)
    return Kit(axes=replace(ALONE, tensor=axis))


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
        part = Linear(INPUTS, OUTPUTS, _kit(rank, size), split="outputs")
        assert part.cuts == {"weight": (Cut(0, rank, size),)}
        _fill(part.weight, whole.chunk(size)[rank])
        found.append(part(x))
    torch.testing.assert_close(torch.cat(found, dim=-1), F.linear(x, whole))


@pytest.mark.parametrize("size", [2, 4])
def test_parts_by_inputs_give_summands_of_the_output(size: int) -> None:
    whole, x = _whole(OUTPUTS, INPUTS), torch.randn(3, INPUTS)
    summands = []
    for rank in range(size):
        part = Linear(INPUTS, OUTPUTS, _kit(rank, size), split="inputs")
        assert part.cuts == {"weight": (Cut(1, rank, size),)}
        _fill(part.weight, whole.chunk(size, dim=1)[rank])
        summands.append(part(x.chunk(size, dim=1)[rank]))
    torch.testing.assert_close(torch.stack(summands).sum(0), F.linear(x, whole))


def test_blocks_of_the_output_are_divided_each_by_itself() -> None:
    part = Linear(INPUTS, OUTPUTS, _kit(1, 2), split="outputs", blocks=2)
    assert part.cuts == {"weight": (Cut(0, 1, 2, blocks=2),)}
    assert part.weight.shape == (OUTPUTS // 2, INPUTS)


@pytest.mark.parametrize("kit", [Kit(), _kit(1, 2)], ids=["alone", "among two"])
def test_a_matrix_that_nobody_divides_is_whole(kit: Kit) -> None:
    matrix = Linear(INPUTS, OUTPUTS, kit)
    assert matrix.cuts == {"weight": ()}
    assert matrix.weight.shape == (OUTPUTS, INPUTS)


def test_one_rank_cuts_nothing() -> None:
    assert Linear(INPUTS, OUTPUTS, Kit(), split="outputs").cuts == {"weight": ()}
    assert Embedding(V, D, Kit()).cuts == {"weight": ()}
    assert cut_over(Axis(name="tensor"), dim=0) == ()


def test_a_size_that_does_not_divide_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="is not divided by"):
        Linear(INPUTS, 9, _kit(0, 2), split="outputs")


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
    embed = Embedding(V, D, Kit(axes=axes))
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
    torch.testing.assert_close(torch.cat([x_BSD for x_BSD, _ in found], dim=1), expected_BSD.detach())
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found]), weight.grad)


def _fed_forward(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Our tokens' outputs, and gradients of them and of both matrices."""
    axes = _tensor_axes(size)
    network = FeedForward(D, OUTPUTS, Kit(axes=axes))
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
    torch.testing.assert_close(torch.cat(outputs), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(inputs), x_TD.grad, rtol=1e-4, atol=1e-4)
    both = zip(*(gradient.chunk(2) for gradient in gate_ups), strict=True)
    torch.testing.assert_close(torch.cat([part for half in both for part in half]), gate_up.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(downs, dim=1), down.grad, rtol=1e-4, atol=1e-4)
