"""Orthogonalizes matrices whose parts several ranks hold: Muon on any layout.

The ranks of a pipeline stage divide the matrices among themselves (penstock/layout/sharding.py), whatever divides the
rows: tensor and expert parallelism, ZeRO-1 or FSDP2. The owner of a matrix gathers its parts, orthogonalizes it whole,
and sends the parts back to all that hold them. So results are those of one process. For two ranks, each with half of
the rows of matrices a and b:

    rank 0    a0 b0    sends b0, gets a1    a0 a1 -> A0 A1    sends A1, gets B0    A0 B0
    rank 1    a1 b1    sends a1, gets b0    b0 b1 -> B0 B1    sends B0, gets A1    A1 B1

Matrices go in rounds, which bound memory; the parts of the next round travel while those of this one are multiplied.
Of parts that several ranks hold, one is sent: that of the owner if it has one. A rank of N sends and receives about 1/N
of the stage's values each way.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.kernels.gram import orthogonalize
from penstock.layout.grid import DENSE_AXES, EXPERT_AXES, Grid
from penstock.layout.sharding import (
    Cut,
    Matrices,
    MatrixPart,
    Rectangle,
    local_shape,
    local_slices,
    newton_schulz_flops,
    owners_of,
    parts_of,
    rows_of_chunk,
    rows_of_shard,
)
from penstock.parallel.axes import Axes, place_on
from penstock.parallel.shard import ShardedTensor

ROUND_VALUES = 32_000_000  # values of a rank's own matrices in a round, or one matrix


@dataclass(frozen=True)
class RowDivision:
    """How data-parallel ranks divide the rows of a parameter."""

    axis: str  # of the data-parallel ranks
    ranks: int = 1  # neighbours on the axis that divide one copy
    is_chunked: bool = False  # as FSDP2 divides (`rows_of_chunk`)


@dataclass(frozen=True, kw_only=True)
class MatrixShard:
    """A parameter whose matrices are orthogonalized, as this rank holds it."""

    matrices: Matrices
    cuts: tuple[Cut, ...]
    division: RowDivision
    part: ShardedTensor  # the values, which are replaced


@cache
def stage_parts(
    matrices: Matrices, cuts: tuple[Cut, ...], division: RowDivision, grid: Grid, stage: tuple[int, ...]
) -> tuple[tuple[MatrixPart, ...], ...]:
    """The parts of each matrix on the ranks of a stage; holders are places in it. Indexes of `cuts` are not read."""
    return tuple(parts_of(matrices, [_rectangles(matrices.shape, cuts, division, grid, rank) for rank in stage]))


def _rectangles(
    shape: tuple[int, ...], cuts: tuple[Cut, ...], division: RowDivision, grid: Grid, rank: int
) -> tuple[Rectangle, ...]:
    places = {**grid.place(rank, EXPERT_AXES), **grid.place(rank, DENSE_AXES)}
    own_cuts = tuple(replace(cut, index=places[cut.axis]) for cut in cuts)
    rows = None
    if division.ranks > 1:
        part = place_on(grid, division.axis, rank) % division.ranks
        divide = rows_of_chunk if division.is_chunked else rows_of_shard
        rows = divide(prod(local_shape(shape, own_cuts)[:-1]), part, division.ranks)
    return tuple(Rectangle(local_slice.whole, local_slice.sizes) for local_slice in local_slices(shape, own_cuts, rows))


@dataclass(frozen=True)
class _Task:
    """A matrix of a round."""

    shard: int
    box: Rectangle  # of the matrix in its parameter
    parts: tuple[MatrixPart, ...] = field(compare=False)
    owner: int

    def source(self, part: MatrixPart) -> int:
        return self.owner if self.owner in part.holders else part.holders[sum(self.box.begin) % len(part.holders)]


class MatrixExchange:
    """Orthogonalizes the matrices of some parameters in place. Ranks with the same parameters make it together."""

    def __init__(
        self,
        shards: Sequence[MatrixShard],
        axes: Axes,
        *,
        dtype: torch.dtype,
        steps: int,
        values_per_round: int | None = None,
    ) -> None:
        self._stage, self._steps = axes.stage, steps
        rounds = _tasks(shards, axes, steps, values_per_round or ROUND_VALUES)
        places = [_Places(shard.part) for shard in shards]
        prototype = shards[0].part.tensor.new_empty(0, dtype=dtype) if shards else torch.empty(0, dtype=dtype)
        self._rounds = [_Round(tasks, places, axes.stage.rank, axes.stage.size, prototype) for tasks in rounds]

    @torch.no_grad()
    def run(self) -> None:
        """Replace the values of all shards. The ranks of the stage call it together; the host does not wait."""
        under_way: deque[Iterator[None]] = deque()
        for steps in map(self._steps_of, self._rounds):
            next(steps)  # its parts travel
            under_way = _advanced(under_way)
            under_way.append(steps)
        while under_way:
            under_way = _advanced(under_way)

    def _steps_of(self, round_: "_Round") -> Iterator[None]:
        """One round; yields when messages are on their way."""
        received, work = self._send(round_.pack(), round_.outward_sizes, round_.inward_sizes)
        yield
        _wait(work)
        stacks = [orthogonalize(stack, self._steps) for stack in round_.stacks(received)]
        received, work = self._send(round_.pack_back(stacks), round_.inward_back_sizes, round_.outward_back_sizes)
        round_.keep(stacks)
        del stacks
        yield
        _wait(work)
        round_.unpack(received)

    def _send(self, flat: Tensor, send: Sequence[int], receive: Sequence[int]) -> tuple[Tensor, dist.Work | None]:
        if self._stage.group is None:
            return flat, None
        received = flat.new_empty(sum(receive))
        sizes = list(receive), list(send)  # torch takes lists only
        work = dist.all_to_all_single(received, flat, *sizes, group=self._stage.group, async_op=True)
        return received, work


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()  # the current stream waits; the host waits with gloo only


def _advanced(under_way: Iterable[Iterator[None]]) -> deque[Iterator[None]]:
    """Rounds that go on after one more step of each."""
    return deque(steps for steps in under_way if next(steps, steps) is None)


def _tasks(shards: Sequence[MatrixShard], axes: Axes, steps: int, values_per_round: int) -> list[list[_Task]]:
    """All matrices of the stage in rounds; in each, those of one shape are neighbours."""
    stage = axes.stage
    by_matrix = [
        stage_parts(shard.matrices, _uncounted(shard.cuts), shard.division, axes.grid, stage.ranks) for shard in shards
    ]
    entries = [
        (index, shards[index].matrices, number, parts)
        for index, matrices in enumerate(by_matrix)
        for number, parts in enumerate(matrices)
    ]
    costs = [newton_schulz_flops(matrices.rows, matrices.columns, steps) for _, matrices, _, _ in entries]
    candidates = [sorted({rank for part in parts for rank in part.holders}) for *_, parts in entries]
    owners = owners_of(costs, candidates, stage.size)
    filled = [0] * stage.size
    rounds: list[list[_Task]] = []
    order = sorted(range(len(entries)), key=lambda index: (entries[index][1].rows, entries[index][1].columns, index))
    for (shard_index, matrices, number, parts), owner in ((entries[index], owners[index]) for index in order):
        round_ = filled[owner] // values_per_round
        filled[owner] += matrices.rows * matrices.columns
        rounds += [[] for _ in range(round_ + 1 - len(rounds))]
        rounds[round_].append(_Task(shard_index, matrices.box(number), parts, owner))
    return rounds


def _uncounted(cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
    return tuple(replace(cut, index=0) for cut in cuts)  # without this rank's place, the same on all ranks


class _Places:
    """Finds rectangles of a parameter in this rank's values."""

    def __init__(self, part: ShardedTensor) -> None:
        self._views = [(Rectangle(piece.whole, piece.sizes), values) for piece, values in part.views()]

    def view(self, box: Rectangle) -> Tensor:
        for held, values in self._views:
            if held.overlap(box) == box:
                region = values[box.within(held.begin)]
                return region[0] if region.ndim == 3 else region  # a stack of one
        raise AssertionError(f"this rank does not hold {box}")


class _Round:
    """Matrices that are exchanged and orthogonalized together, from one rank's view.

    Messages are ordered by the other rank, then by matrix and part. Parts that stay on this rank are in none.
    """

    def __init__(
        self, tasks: Sequence[_Task], places: Sequence[_Places], me: int, ranks: int, prototype: Tensor
    ) -> None:
        self._prototype = prototype  # dtype and device of messages and products
        own_tasks = [task for task in tasks if task.owner == me]
        self._shapes = [(len(list(same)), *shape) for shape, same in groupby(task.box.sizes[-2:] for task in own_tasks)]
        number = {task: position for position, task in enumerate(own_tasks)}

        def regions(entries: Sequence[_Entry]) -> list[_Region]:
            return [(number[task], part.box.within(task.box.begin)[-2:]) for _, task, part in entries]

        def values(entries: Sequence[_Entry]) -> list[Tensor]:
            return [places[task.shard].view(part.box) for _, task, part in entries]

        of_own = [(task, part) for task in own_tasks for part in task.parts]
        staying = [(me, task, part) for task, part in of_own if me in part.holders]
        self._here, self._staying = values(staying), regions(staying)
        # Parts for other owners, and what comes back, to all holders.
        others = [(task, part) for task in tasks if task.owner != me for part in task.parts if me in part.holders]
        sent = _ordered((task.owner, task, part) for task, part in others if task.source(part) == me)
        awaited = _ordered((task.owner, task, part) for task, part in others)
        self._sent, self._awaited = values(sent), values(awaited)
        # Parts of this rank's matrices that other ranks hold.
        arriving = _ordered((task.source(part), task, part) for task, part in of_own if me not in part.holders)
        leaving = _ordered((rank, task, part) for task, part in of_own for rank in part.holders if rank != me)
        self._arriving, self._leaving = regions(arriving), regions(leaving)
        self.outward_sizes, self.inward_sizes = _sizes(sent, ranks), _sizes(arriving, ranks)
        self.inward_back_sizes, self.outward_back_sizes = _sizes(leaving, ranks), _sizes(awaited, ranks)

    def pack(self) -> Tensor:
        return self._packed(self._sent)

    def stacks(self, received_N: Tensor) -> list[Tensor]:
        """This rank's matrices, in stacks of one shape each."""
        stacks = [self._prototype.new_empty(shape) for shape in self._shapes]
        arriving = _take(stacks, self._arriving)
        _copy(self._here + _slices(received_N, arriving), _take(stacks, self._staying) + arriving)
        return stacks

    def pack_back(self, stacks: Sequence[Tensor]) -> Tensor:
        return self._packed(_take(stacks, self._leaving))

    def keep(self, stacks: Sequence[Tensor]) -> None:
        _copy(_take(stacks, self._staying), self._here)

    def unpack(self, received_N: Tensor) -> None:
        _copy(_slices(received_N, self._awaited), self._awaited)

    def _packed(self, values: Sequence[Tensor]) -> Tensor:
        flat = self._prototype.new_empty(sum(value.numel() for value in values))
        _copy(values, _slices(flat, values))
        return flat


_Entry = tuple[int, _Task, MatrixPart]
"""The other rank of a message, a matrix and a part of it."""

_Region = tuple[int, tuple[slice, ...]]
"""Place of a matrix in the stacks, and slices of it."""


def _ordered(entries: Iterable[_Entry]) -> list[_Entry]:
    return sorted(entries, key=lambda entry: entry[0])


def _take(stacks: Sequence[Tensor], regions: Sequence[_Region]) -> list[Tensor]:
    matrices = [matrix for stack in stacks for matrix in stack] if regions else []
    return [matrices[index][slices] for index, slices in regions]


def _sizes(entries: Iterable[_Entry], ranks: int) -> list[int]:
    sizes = [0] * ranks
    for rank, _, part in entries:
        sizes[rank] += part.box.elements
    return sizes


def _slices(flat_N: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive values of a vector, in the shapes of other tensors."""
    pieces = flat_N.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    if target:
        torch._foreach_copy_(list(target), list(source))
