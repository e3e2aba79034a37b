"""How many rows a rank's experts have room for, and a count of those that found none.

A dispatcher that must know its shapes before it knows the routing asks its `RowCapacity`; what is kept for backward may
stand on a `ActivationArena` that all layers share (penstock/moe/dispatch/row_capacity.py). Rows beyond it are left
out of that pass, so the pass is worth nothing: they are counted on the device, the count is read once a step with the
other figures, and the step is made again (penstock/train/step.py) with more room in the layers and on the ranks that
were too small, which they keep. Passes that are not trained on are not repeated, so they always have room for all.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor, nn

from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.launching import record_wait
from penstock.layout.experts import ExpertPlacement


@dataclass(frozen=True)
class SplitSizes:
    """Reads counts; the host waits for the device.

    Attributes:
        imbalance: where nothing can be read, the rows of this rank's experts over the even share.
        part: where nothing can be read, of the choices that a dispatcher sees those that are not dropped.
    """

    imbalance: float = 1.0
    part: float = 1.0

    def total(self, counts_E: Tensor, share: float, most: int) -> int:
        """Rows of all experts here.

        Args:
            counts_E: rows of each.
            share: this rank's, if all ranks had the same number.
            most: that there can be.
        """
        if not counts_E.is_meta:
            return int(counts_E.sum())
        record_wait(counts_E)
        return self.stated(share, most)

    def exchanged(self, sent_W: Tensor, arriving_W: Tensor, share: int) -> tuple[list[int], list[int]]:
        """Rows that go to each rank, and rows that come from each.

        Args:
            sent_W: integers on the device.
            arriving_W: likewise.
            share: all rows that we send.
        """
        if not sent_W.is_meta:
            send, receive = torch.stack((sent_W, arriving_W)).tolist()
            return send, receive
        record_wait(sent_W)
        ranks = sent_W.numel()
        return _dealt(math.ceil(share * self.part), ranks), _dealt(self.stated(share, share * ranks), ranks)

    def crossing(self, counts: Tensor, choices: tuple[int, ...]) -> list[int]:
        """Tokens that come from each node, tokens that go to each, and tokens to make room for.

        Args:
            counts: all of these, on the device.
            choices: T x K of ours, which are of all nodes.
        """
        if not counts.is_meta:
            read: list[int] = counts.tolist()
            return read
        record_wait(counts)
        nodes = counts.numel() // 2
        each = math.ceil(choices[0] * part_that_crosses(nodes, choices[1]))
        return [each] * (2 * nodes) + [each * nodes]

    def stated(self, share: float, most: int) -> int:
        """Rows where nothing can be read."""
        return min(most, math.ceil(share * self.part * self.imbalance))


def part_that_crosses(nodes: int, top_k: int) -> float:
    """Of the tokens, those of whose choices at least one is on a given node, if choices know nothing of nodes."""
    return 1 - (1 - 1 / nodes) ** top_k


READ = SplitSizes()


def _dealt(rows: int, ranks: int) -> list[int]:
    """As even as whole numbers are."""
    each, more = divmod(rows, ranks)
    return [each + (rank < more) for rank in range(ranks)]


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


class ActivationArena(CapacityTracker):
    """Room for what the layers of a stage keep on one rank; `share` is that of all of them together.

    Args:
        bound: rows over the even share to begin with.

    Attributes:
        layers: that keep rows here.
    """

    def __init__(self, bound: float) -> None:
        super().__init__(bound)
        self.layers = 0
        self._board: Tensor | None = None
        self._cursor: Tensor | None = None
        self._left = 0
        # By name, because it needs Triton, which may be absent.
        self._claim_rows = import_module("penstock.kernels.expert_parts").claim_rows

    def join(self) -> None:
        """Say that one more layer keeps its rows here."""
        self.layers += 1

    def begin(self) -> None:
        """A pass begins: its rows go to a board of its own."""
        self._board = self._cursor = None
        self._left = 0

    def forget(self) -> None:
        """See `CapacityTracker`. Also the board of a pass that was given up."""
        super().forget()
        self.begin()

    def place(self, used: Tensor, room: int, like: Tensor, *, share: float) -> SavedRows:
        """A place for the rows of the next layer.

        Args:
            used: int32, one number: rows that it has, on the device.
            room: most rows that it can have.
            like: of the width, dtype and device of the rows.
            share: the layer's even share of rows.
        """
        width = like.shape[1]
        if like.is_meta:  # Layers are planned one at a time, so each counts for itself.
            return SavedRows(like.new_empty(self._rows(share), width), used.new_empty(1, dtype=torch.int64), room)
        if self._left == 0 or self._board is None or self._cursor is None:
            self.share = share * self.layers
            self._board = like.new_empty(max(self._rows(self.share), room), width)
            self._cursor = torch.zeros(1, dtype=torch.int64, device=like.device)
            self._left = self.layers
        board = self._board
        assert board.shape[1] == width, "all layers of a arena are as wide"
        first: Tensor = self._claim_rows(self._cursor, used, len(board), self.meter)
        self._left -= 1
        if self._left == 0:  # From now on the board lives as long as layers keep rows on it.
            self.begin()
        return SavedRows(board, first, room)

    def _rows(self, share: float) -> int:
        return math.ceil(share * self.bound)
