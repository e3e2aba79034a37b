"""The ranks of a run, and the experts and positions of each. Two views ("parallel folding"): dense layers and experts.

    dense view      pipeline x data x context x tensor
    expert view     pipeline x expert_data x expert x expert_tensor

The views are independent and cover the same ranks. A rank's number counts through a view with the last axis fastest, so
neighbours in `tensor` (and `expert_tensor`) are neighbours on the machine, and a pipeline stage is a block of
consecutive ranks in both views. `data` and `expert_data` follow from the other axes.

With 8 ranks, tensor 2 and expert 4: rank 5 is dense (pipeline 0, data 2, context 0, tensor 1) and expert (pipeline 0,
expert_data 1, expert 1, expert_tensor 0). Its tensor group is (4, 5), its expert group (4, 5, 6, 7).

Source: MoE Parallel Folding (arXiv 2504.14960).
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

DENSE_AXES = ("pipeline", "data", "context", "tensor")
EXPERT_AXES = ("pipeline", "expert_data", "expert", "expert_tensor")

MOST_RANKS = 2**20  # largest supported world, several times the largest existing cluster


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of all axes. The product of each view is the number of ranks; `penstock.config.fit` checks that first."""

    world: int = 1
    tensor: int = 1  # ranks that divide each dense matrix
    context: int = 1  # ranks that divide each row of tokens
    pipeline: int = 1  # ranks that divide the layers
    expert: int = 1  # ranks that divide the experts of a layer
    expert_tensor: int = 1  # ranks that divide each expert's matrices

    def __post_init__(self) -> None:
        assert self.world == prod(self.shape(DENSE_AXES)), f"{self} does not divide: the dense view"
        assert self.world == prod(self.shape(EXPERT_AXES)), f"{self} does not divide: the expert view"

    @property
    def data(self) -> int:
        """Ranks that train on different rows."""
        return self.world // (self.pipeline * self.tensor * self.context)

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.world // (self.pipeline * self.expert * self.expert_tensor)

    def shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in axes)

    def place(self, rank: int, view: tuple[str, ...] = DENSE_AXES) -> dict[str, int]:
        coordinates = {}
        for axis in reversed(view):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return {axis: coordinates[axis] for axis in view}

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Ranks that differ from `rank` on these axes of one view only, ascending, `rank` included.

        For example, `("context", "tensor")` are the ranks that divide a row of tokens.
        """
        view = _view_of(axes)
        position = self.place(rank, view)
        strides = self._strides(view)
        first = rank - sum(position[axis] * strides[axis] for axis in axes)  # the rank with coordinate 0 on these axes
        return tuple(first + offset for offset in self._offsets(view, axes))

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Every group of these axes, ordered by first rank; together they are all ranks."""
        view = _view_of(axes)
        offsets = self._offsets(view, axes)
        firsts = self._offsets(view, tuple(axis for axis in view if axis not in axes))
        return tuple(tuple(first + offset for offset in offsets) for first in firsts)

    def _strides(self, view: tuple[str, ...]) -> dict[str, int]:
        sizes = self.shape(view)
        return {axis: prod(sizes[number + 1 :]) for number, axis in enumerate(view)}  # the last axis counts fastest

    def _offsets(self, view: tuple[str, ...], axes: tuple[str, ...]) -> list[int]:
        """Ranks with coordinate 0 on every other axis of the view, ascending."""
        strides = self._strides(view)
        offsets = [0]
        for axis in view:
            if axis in axes:
                offsets = [offset + index * strides[axis] for offset in offsets for index in range(getattr(self, axis))]
        return offsets


def _view_of(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The view of these axes; `pipeline` alone means the same ranks in both."""
    view = DENSE_AXES if set(axes) <= set(DENSE_AXES) else EXPERT_AXES
    assert set(axes) <= set(view), f"{axes} are axes of two views"
    return view


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Experts of a layer over the places of the expert axis.

    The axis has expert x expert_tensor places. `expert` divides the experts of a layer between groups of places, each
    with consecutive experts; inside a group `expert_tensor` divides every expert's width. With 8 experts, expert 2 and
    expert_tensor 2:

        place             0              1              2              3
        holds       0 1 2 3, left  0 1 2 3, right  4 5 6 7, left  4 5 6 7, right

    A row travels to every place that holds a part of its expert. A dispatcher sees each part as a virtual expert,
    numbered so that those of a place are consecutive. Above, expert 5 is the virtual experts 9 and 13.
    """

    experts: int
    expert: int = 1  # groups of places, with different experts
    expert_tensor: int = 1  # places that divide each expert

    def __post_init__(self) -> None:
        assert self.experts % self.expert == 0, f"{self} does not divide"

    @property
    def places(self) -> int:
        return self.expert * self.expert_tensor

    @property
    def per_place(self) -> int:
        """Experts that each place holds, whole or a part of each; also its virtual experts."""
        return self.experts // self.expert

    @property
    def virtual_experts(self) -> int:
        return self.experts * self.expert_tensor

    def block(self, places: int) -> "ExpertPlacement":
        """The placement inside a block of neighbouring places, counted from its first one.

        Above, a block of 2 places holds 4 experts by halves. A block of 1 holds halves of 4 experts and counts them as
        whole.
        """
        assert divides_into(self.places, self.expert_tensor, places), f"{self} in blocks of {places}"
        parts = min(places, self.expert_tensor)
        return ExpertPlacement(experts=self.per_place * (places // parts), expert=places // parts, expert_tensor=parts)

    def experts_of(self, member: int) -> range:
        """Experts that a place holds, whole or in part."""
        first = member // self.expert_tensor * self.per_place
        return range(first, first + self.per_place)


def divides_into(places: int, expert_tensor: int, block: int) -> bool:
    """Whether each `block` of neighbouring places holds whole experts, or equal parts of the same experts."""
    return places % block == 0 and (block % expert_tensor == 0 or expert_tensor % block == 0)


Method = Literal["all-gather", "ulysses"]


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """The positions of a row over context x tensor ranks.

    Causal attention costs more at later positions. With the "all-gather" method (of keys and values) every rank attends
    for its own positions, so the row is cut into 2 x context chunks, and rank i takes the i-th from the front and the
    i-th from the back: all ranks get equal work. With context 2:

        position  0 1 2 3 4 5 6 7        rank 0: 0 1 6 7        rank 1: 2 3 4 5

    With "ulysses" ranks exchange positions for heads and attend over the whole row, so plain chunks are balanced: rank
    0 has 0 1 2 3. Tensor parallelism cuts the positions of a context rank, in their local order, into `tensor` equal
    parts (sequence parallelism).

    Sources: Llama 3 (arXiv 2407.21783, section 3.3.2) for the chunks, arXiv 2309.14509 for Ulysses.
    """

    length: int
    context: int = 1
    tensor: int = 1
    method: Method = "all-gather"

    def __post_init__(self) -> None:
        assert self.length % multiple_of(self.context, self.tensor, self.method) == 0, f"{self} does not divide"

    def chunks(self, context_rank: int) -> tuple[range, ...]:
        """Positions of a context rank as contiguous ranges: one, or an early and a late one."""
        chunks = [context_rank]
        if self.method == "all-gather" and self.context > 1:
            chunks.append(2 * self.context - 1 - context_rank)
        size = self.length // (self.context * len(chunks))
        return tuple(range(chunk * size, (chunk + 1) * size) for chunk in chunks)

    def of_context(self, context_rank: int) -> tuple[int, ...]:
        """Positions of a context rank (all its tensor ranks), ascending."""
        return tuple(position for chunk in self.chunks(context_rank) for position in chunk)

    def of_rank(self, context_rank: int, tensor_rank: int) -> tuple[int, ...]:
        """Positions of one rank, ascending."""
        held = self.of_context(context_rank)
        size = len(held) // self.tensor
        return held[tensor_rank * size : (tensor_rank + 1) * size]


def multiple_of(context: int, tensor: int, method: Method) -> int:
    """The divisor of a row's length: every chunk needs an equal part for every tensor rank."""
    chunks = 2 if method == "all-gather" and context > 1 else 1
    return chunks * context * tensor
