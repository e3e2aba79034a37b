"""How many rows a rank's experts have room for, and a count of those that found none.

A dispatcher that must know its shapes before it knows the routing asks its `Room`. Rows beyond it are left out of that
pass, so the pass is worth nothing: they are counted on the device, the count is read once a step with the other
figures, and the step is made again with room for all (penstock/train/step.py). Passes that are not trained on are not
repeated, so they always have room for all.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.layout.experts import ExpertPlacement

MULTIPLE = 16
"""A buffer with a bound has a multiple of this, rounded up; its last row is nobody's."""


class Room(nn.Module):
    """Room for the rows of one layer on one rank.

    Args:
        placement: of the layer's experts.
        bound: rows over the even share; infinity for the worst case.

    Attributes:
        left_out: int64 scalar, rows that found no room since the last `forget_left_out`.
    """

    left_out: Tensor

    def __init__(self, placement: ExpertPlacement, bound: float) -> None:
        super().__init__()
        self.placement = placement
        self.bound = bound
        self.is_lifted = False
        self.register_buffer("left_out", torch.zeros((), dtype=torch.int64), persistent=False)

    def rows(self, tokens: int, top_k: int) -> int:
        """Rows that there is room for.

        Args:
            tokens: of all ranks together.
            top_k: slots of each, all of different experts.
        """
        worst = tokens * min(top_k, self.placement.per_place)
        if math.isinf(self.bound) or self.is_lifted or not self.training:
            return worst
        share = tokens * top_k / self.placement.expert
        return min(worst, math.ceil((share * self.bound + 1) / MULTIPLE) * MULTIPLE - 1)


def rows_left_out(modules: Iterable[nn.Module], device: torch.device) -> Tensor:
    """Rows of this rank that found no room, over all layers: int64 scalar on the device."""
    counts = [room.left_out for room in _rooms(modules)]
    return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=device)


@torch.no_grad()
def forget_left_out(modules: Iterable[nn.Module]) -> None:
    """Start counting anew in every layer."""
    for room in _rooms(modules):
        room.left_out.zero_()


@contextmanager
def room_for_all(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, every layer has room for the worst case."""
    rooms = list(_rooms(modules))
    for room in rooms:
        room.is_lifted = True
    try:
        yield
    finally:
        for room in rooms:
            room.is_lifted = False


def has_room_for_all(modules: Iterable[nn.Module]) -> bool:
    """Whether this is inside `room_for_all`, and there is a layer that asks."""
    return any(room.is_lifted for room in _rooms(modules))


def _rooms(modules: Iterable[nn.Module]) -> Iterator[Room]:
    return (module for model in modules for module in model.modules() if isinstance(module, Room))
