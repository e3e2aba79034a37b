"""How many rows a rank's experts have room for, and a count of those that found none.

A dispatcher that must know its shapes before it knows the routing asks its `RowCapacity`; what is kept for backward may
stand on a `ActivationArena` that all layers share (penstock/moe/dispatch/activation_arena.py). Rows beyond it are left
out of that pass, so the pass is worth nothing: they are counted on the device, the count is read once a step with the
other figures, and the step is made again (penstock/train/step.py) with more room in the layers and on the ranks that
were too small, which they keep. Passes that are not trained on are not repeated, so they always have room for all.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from penstock.layout.experts import ExpertPlacement

MULTIPLE = 16
"""A buffer with a bound has a multiple of this, rounded up; its last row is nobody's."""

SPARE = 1.1
"""Room over the most rows that came, so that the next step, whose routing differs a little, finds room."""


class CapacityTracker(nn.Module):
    """Something that has room for so many rows and no more.

    Args:
        bound: rows over the even share to begin with.

    Attributes:
        bound: now.
        share: rows of the last pass, had all ranks had as many.
        widenings: how often shapes may have changed, the same on all ranks.
        meter: int64 [2]: rows that found no room, and the most rows that came in a pass, since `forget`.
    """

    meter: Tensor

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound
        self.share = 0.0
        self.widenings = 0
        self.register_buffer("meter", torch.zeros(2, dtype=torch.int64), persistent=False)

    @property
    def left_out(self) -> Tensor:
        """Int64 scalar, rows that found no room since `forget`."""
        return self.meter[0]

    def forget(self) -> None:
        """Start counting anew."""
        self.meter.zero_()

    def widen(self, most: int) -> None:
        """From now on there is room for so many rows of a pass like the last ones, and for some more.

        Args:
            most: rows of a pass.
        """
        self.widenings += 1
        if most > self.share * self.bound:
            self.bound = most / self.share * SPARE


class RowCapacity(CapacityTracker):
    """Room for the rows of one layer on one rank.

    Args:
        placement: of the layer's experts.
        bound: rows over the even share to begin with; infinity for the worst case.
    """

    def __init__(self, placement: ExpertPlacement, bound: float) -> None:
        super().__init__(bound)
        self.placement = placement

    def rows(self, tokens: int, top_k: int) -> int:
        """Rows that there is room for.

        Args:
            tokens: of all ranks together.
            top_k: slots of each, all of different experts.
        """
        worst = tokens * min(top_k, self.placement.per_place)
        if math.isinf(self.bound) or not self.training:
            return worst
        self.share = tokens * top_k / self.placement.expert
        return min(worst, math.ceil((self.share * self.bound + 1) / MULTIPLE) * MULTIPLE - 1)

    def count(self, rows: Tensor, room: int) -> None:
        """Note on the device that a pass brought so many rows.

        Args:
            rows: integer scalar.
            room: for how many there was room.
        """
        self.meter[0] += (rows - room).clamp(min=0)
        self.meter[1] = torch.maximum(self.meter[1], rows)


def rows_left_out(modules: Iterable[nn.Module], device: torch.device) -> Tensor:
    """Rows of this rank that found no room, over all layers: int64 scalar on the device."""
    counts = [room.left_out for room in _rooms(modules)]
    return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=device)


@torch.no_grad()
def forget_left_out(modules: Iterable[nn.Module]) -> None:
    """Start counting anew in every layer."""
    for room in _rooms(modules):
        room.forget()


def make_room(modules: Iterable[nn.Module]) -> None:
    """Room for what came since `forget_left_out`, in every layer. All ranks call it when any left out a row."""
    rooms = list(_rooms(modules))
    for room, most in zip(rooms, torch.stack([room.meter[1] for room in rooms]).tolist() if rooms else (), strict=True):
        room.widen(most)


def widenings(modules: Iterable[nn.Module]) -> int:
    """How often shapes may have changed since the modules were made, the same on all ranks."""
    return max((room.widenings for room in _rooms(modules)), default=0)


def _rooms(modules: Iterable[nn.Module]) -> Iterator[CapacityTracker]:
    return (module for model in modules for module in model.modules() if isinstance(module, CapacityTracker))
