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

import torch
from torch import Tensor, nn

from penstock.kernels.expert_parts import SavedRows, claim_rows
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

    def total(self, counts_E: Tensor, even_share: float, most: int) -> int:
        """Rows of all experts here.

        Args:
            counts_E: rows of each.
            even_share: this rank's, if all ranks had the same number.
            most: that there can be.
        """
        if not counts_E.is_meta:
            return int(counts_E.sum())
        record_wait(counts_E)
        return self.stated(even_share, most)

    def exchanged(self, sent_W: Tensor, arriving_W: Tensor, even_share: int) -> tuple[list[int], list[int]]:
        """Rows that go to each rank, and rows that come from each.

        Args:
            sent_W: integers on the device.
            arriving_W: likewise.
            even_share: all rows that we send.
        """
        if not sent_W.is_meta:
            send, receive = torch.stack((sent_W, arriving_W)).tolist()
            return send, receive
        record_wait(sent_W)
        ranks = sent_W.numel()
        return _dealt(math.ceil(even_share * self.part), ranks), _dealt(
            self.stated(even_share, even_share * ranks), ranks
        )

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

    def stated(self, even_share: float, most: int) -> int:
        """Rows where nothing can be read."""
        return min(most, math.ceil(even_share * self.part * self.imbalance))


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
        factor: rows over the even share to begin with.

    Attributes:
        factor: now.
        even_share: rows of the last pass, had all ranks had as many.
        widenings: how often shapes may have changed, the same on all ranks.
        meter: int64 [2]: rows that found no room, and the most rows that came in a pass, since `forget`.
    """

    meter: Tensor

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.even_share = 0.0
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
        if most > self.even_share * self.factor:
            self.factor = most / self.even_share * SPARE


class RowCapacity(CapacityTracker):
    """Room for the rows of one layer on one rank.

    Args:
        placement: of the layer's experts.
        factor: rows over the even share to begin with; infinity for the worst case.
    """

    def __init__(self, placement: ExpertPlacement, factor: float) -> None:
        super().__init__(factor)
        self.placement = placement

    def rows(self, tokens: int, top_k: int) -> int:
        """Rows that there is room for.

        Args:
            tokens: of all ranks together.
            top_k: slots of each, all of different experts.
        """
        worst = tokens * min(top_k, self.placement.per_place)
        if math.isinf(self.factor) or not self.training:
            return worst
        self.even_share = tokens * top_k / self.placement.expert
        return min(worst, math.ceil((self.even_share * self.factor + 1) / MULTIPLE) * MULTIPLE - 1)

    def count(self, rows: Tensor, capacity: int) -> None:
        """Note on the device that a pass brought so many rows.

        Args:
            rows: integer scalar.
            capacity: for how many there was room.
        """
        self.meter[0] += (rows - capacity).clamp(min=0)
        self.meter[1] = torch.maximum(self.meter[1], rows)


def rows_left_out(modules: Iterable[nn.Module], device: torch.device) -> Tensor:
    """Rows of this rank that found no room, over all layers: int64 scalar on the device."""
    counts = [capacity.left_out for capacity in _trackers(modules)]
    return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=device)


@torch.no_grad()
def forget_left_out(modules: Iterable[nn.Module]) -> None:
    """Start counting anew in every layer."""
    for capacity in _trackers(modules):
        capacity.forget()


def make_room(modules: Iterable[nn.Module]) -> None:
    """Room for what came since `forget_left_out`, in every layer. All ranks call it when any left out a row."""
    trackers = list(_trackers(modules))
    for capacity, most in zip(
        trackers, torch.stack([capacity.meter[1] for capacity in trackers]).tolist() if trackers else (), strict=True
    ):
        capacity.widen(most)


def widenings(modules: Iterable[nn.Module]) -> int:
    """How often shapes may have changed since the modules were made, the same on all ranks."""
    return max((capacity.widenings for capacity in _trackers(modules)), default=0)


def _trackers(modules: Iterable[nn.Module]) -> Iterator[CapacityTracker]:
    return (module for model in modules for module in model.modules() if isinstance(module, CapacityTracker))


class ActivationArena(CapacityTracker):
    """Room for what the layers of a stage keep on one rank; `even_share` is that of all of them together.

    Args:
        factor: rows over the even share to begin with.

    Attributes:
        layers: that keep rows here.
    """

    def __init__(self, factor: float) -> None:
        super().__init__(factor)
        self.layers = 0
        self._buffer: Tensor | None = None
        self._cursor: Tensor | None = None
        self._left = 0

    def join(self) -> None:
        """Say that one more layer keeps its rows here."""
        self.layers += 1

    def begin(self) -> None:
        """A pass begins: its rows go to a board of its own."""
        self._buffer = self._cursor = None
        self._left = 0

    def forget(self) -> None:
        """See `CapacityTracker`. Also the board of a pass that was given up."""
        super().forget()
        self.begin()

    def place(self, used: Tensor, capacity: int, like: Tensor, *, even_share: float) -> SavedRows:
        """A place for the rows of the next layer.

        Args:
            used: int32, one number: rows that it has, on the device.
            capacity: most rows that it can have.
            like: of the width, dtype and device of the rows.
            even_share: the layer's even share of rows.
        """
        width = like.shape[1]
        if like.is_meta:  # Layers are planned one at a time, so each counts for itself.
            return SavedRows(
                like.new_empty(self._rows(even_share), width), used.new_empty(1, dtype=torch.int64), capacity
            )
        if self._left == 0 or self._buffer is None or self._cursor is None:
            self.even_share = even_share * self.layers
            self._buffer = like.new_empty(max(self._rows(self.even_share), capacity), width)
            self._cursor = torch.zeros(1, dtype=torch.int64, device=like.device)
            self._left = self.layers
        buffer = self._buffer
        assert buffer.shape[1] == width, "all layers of a arena are as wide"
        first = claim_rows(self._cursor, used, len(buffer), self.meter)
        self._left -= 1
        if self._left == 0:  # From now on the board lives as long as layers keep rows on it.
            self.begin()
        return SavedRows(buffer, first, capacity)

    def _rows(self, even_share: float) -> int:
        return math.ceil(even_share * self.factor)
