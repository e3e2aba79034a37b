"""The ranks of a run in two views: axes of attention and dense layers, and axes of experts ("parallel folding").

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
