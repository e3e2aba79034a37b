"""Every collective against the math of one process that holds the tensors of all ranks, gradients too."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import DeviceError
from penstock.layout.grid import Grid
from penstock.parallel.axes import ALONE, Axis, make_axes
from penstock.parallel.collectives import (
    JsonGroup,
    all_gather,
    all_gather_json,
    all_reduce,
    all_to_all,
    exchange_rows,
    reduce_scatter,
)
from tests.closeness import assert_close
from tests.distributed.pool import Pool

Collective = Callable[[Tensor, Axis], Tensor]

SHAPE = (8, 4, 12)
"""Every dim is a multiple of 4 ranks."""


def _axis(size: int) -> Axis:
    return make_axes(Grid(world=size, tensor=size)).tensor


def _inputs(ranks: int, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    return _drawn(ranks, [shape] * ranks)


def _drawn(seed: int, shapes: Iterable[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _on_a_rank(collective: Collective, inputs: list[Tensor], directions: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Output and gradient, for a loss that is the sum of what the ranks compute each."""
    axis = _axis(len(inputs))
    x = inputs[axis.rank].requires_grad_()
    y = collective(x, axis)
    (gradient,) = torch.autograd.grad((y * directions[axis.rank]).sum(), x)
    return y.detach(), gradient


def _check(
    ranks: Pool, collective: Collective, inputs: list[Tensor], math: Callable[[list[Tensor]], list[Tensor]]
) -> None:
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = math(leaves)
    directions = _drawn(7, [y.shape for y in expected])  # random, so that no output's gradient is symmetric
    loss = torch.stack([(y * direction).sum() for y, direction in zip(expected, directions, strict=True)]).sum()
    gradients = torch.autograd.grad(loss, leaves)
    for rank, (y, gradient) in enumerate(ranks.run(len(inputs), _on_a_rank, collective, inputs, directions)):
        assert_close(y, expected[rank], what=f"output of rank {rank}")
        assert_close(gradient, gradients[rank], what=f"gradient of rank {rank}")


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("size", [2, 4])
def test_all_gather_joins_the_parts_of_all_ranks(ranks: Pool, size: int, dim: int) -> None:
    _check(ranks, partial(all_gather, dim=dim), _inputs(size), lambda parts: [torch.cat(parts, dim)] * size)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", [2, 4])
def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(ranks: Pool, size: int, dim: int) -> None:
    _check(ranks, partial(reduce_scatter, dim=dim), _inputs(size), lambda xs: list(sum(xs).chunk(size, dim)))


def _summed(inputs: list[Tensor]) -> Tensor:
    axis = _axis(len(inputs))
    return all_reduce(inputs[axis.rank], axis)


def test_all_reduce_gives_every_rank_the_sum_and_has_no_gradient(ranks: Pool) -> None:
    inputs = [x.transpose(0, 1) for x in _inputs(4)]
    for total in ranks.run(4, _summed, inputs):
        assert_close(total, sum(inputs))
    with pytest.raises(AssertionError, match="no gradient"):
        all_reduce(torch.ones(2, requires_grad=True), ALONE.tensor)


@pytest.mark.parametrize(("split", "join"), [(2, 1), (1, 2), (0, 1), (1, 0), (-1, -3)])
@pytest.mark.parametrize("size", [2, 4])
def test_swap_joins_one_dim_and_splits_the_other(ranks: Pool, size: int, split: int, join: int) -> None:
    def math(xs: list[Tensor]) -> list[Tensor]:
        return list(torch.cat(xs, join).chunk(size, split))

    _check(ranks, partial(all_to_all, split_dim=split, join_dim=join), _inputs(size), math)


# Row counts from each rank (row of the matrix) to each (column); ranks and pairs with nothing to send among them.
TRAFFIC = {2: [[3, 0], [2, 4]], 4: [[1, 2, 0, 3], [0, 0, 0, 0], [5, 0, 1, 0], [0, 0, 0, 2]]}


def _by_traffic(x: Tensor, axis: Axis, traffic: list[list[int]]) -> Tensor:
    return exchange_rows(x, axis, receive=[row[axis.rank] for row in traffic], send=traffic[axis.rank])


@pytest.mark.parametrize("size", [2, 4])
def test_rows_go_where_they_were_sent_whatever_their_number(ranks: Pool, size: int) -> None:
    traffic = TRAFFIC[size]
    inputs = [x[: sum(row)] for x, row in zip(_inputs(size, (8, 3)), traffic, strict=True)]

    def math(xs: list[Tensor]) -> list[Tensor]:
        pieces = [x.split(row) for x, row in zip(xs, traffic, strict=True)]
        return [torch.cat([piece[rank] for piece in pieces]) for rank in range(size)]

    _check(ranks, partial(_by_traffic, traffic=traffic), inputs, math)


def test_rows_without_counts_are_divided_evenly(ranks: Pool) -> None:
    def math(xs: list[Tensor]) -> list[Tensor]:
        return [torch.cat([x.chunk(2)[rank] for x in xs]) for rank in range(2)]

    _check(ranks, exchange_rows, _inputs(2), math)


ALL: tuple[Collective, ...] = (
    all_reduce, exchange_rows, partial(all_gather, dim=0), partial(reduce_scatter, dim=0),
    partial(all_to_all, split_dim=1, join_dim=0),
)  # fmt: skip


def _in_bfloat16(x: Tensor) -> list[Tensor]:
    return [collective(x, _axis(2)) for collective in ALL]


def test_every_collective_takes_bfloat16(ranks: Pool) -> None:
    x = torch.arange(8.0).view(4, 2).bfloat16()
    for got in ranks.run(2, _in_bfloat16, x):
        assert [y.dtype for y in got] == [torch.bfloat16] * 5
        assert torch.equal(got[0], 2 * x)


def test_an_axis_of_one_rank_changes_nothing() -> None:
    x = torch.ones(2, 3)
    for collective in (*ALL, partial(exchange_rows, receive=[2], send=[2])):
        assert collective(x, ALONE.tensor) is x


def world() -> Axis:
    ranks = tuple(range(dist.get_world_size()))
    return Axis(name="world", ranks=ranks, rank=dist.get_rank(), group=dist.group.WORLD)


def _talk() -> list[Any]:
    messages = JsonGroup(world())
    rank = messages.rank
    said = {"rank": rank, "text": "\u00e9" * 5000 * rank}  # sizes differ, and bytes are more than characters
    heard = [
        messages.all_gather(said),
        messages.gather([rank]),
        messages.from_first(rank + 7),
        messages.all_gather(None),
    ]
    messages.close()
    return [*heard, all_gather_json(rank, world())]


def test_every_rank_hears_what_every_rank_says(ranks: Pool) -> None:
    said = [{"rank": rank, "text": "\u00e9" * 5000 * rank} for rank in range(3)]
    heard = ranks.run(3, _talk)
    assert heard == [[said, [[0], [1], [2]] if rank == 0 else [], 7, [None] * 3, [0, 1, 2]] for rank in range(3)]


def _talk_while_training() -> tuple[list[int], float]:
    messages = JsonGroup(world())
    total = torch.ones(())
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: [sum(messages.all_gather(messages.rank + n)) for n in range(50)])
        for _ in range(20):
            dist.all_reduce(total)
        heard = running.result()
    messages.close()
    return heard, total.item()


def test_a_thread_talks_while_training_uses_its_own_group(ranks: Pool) -> None:
    for heard, total in ranks.run(2, _talk_while_training):
        assert heard == [1 + 2 * n for n in range(50)]
        assert total == 2.0**20  # doubled by each of 20 sums over two ranks


def _last_one_leaves() -> str:
    messages = JsonGroup(world())
    if messages.rank == 1:
        messages.close()
        return "left"
    try:
        messages.all_gather(None)
    except DeviceError as error:
        return str(error)
    return "no error"


def test_a_rank_that_is_gone_is_one_line(ranks: Pool) -> None:
    said, left = ranks.run(2, _last_one_leaves)
    assert left == "left"
    assert said.startswith("another rank has ended or does not answer; got ")
    assert "\n" not in said


def test_a_rank_that_is_alone_hears_itself() -> None:
    messages = JsonGroup(Axis(name="world"))
    assert (messages.all_gather(3), messages.gather("a"), messages.from_first([1])) == ([3], ["a"], [1])
    assert all_gather_json(5, Axis(name="world")) == [5]
    messages.close()
