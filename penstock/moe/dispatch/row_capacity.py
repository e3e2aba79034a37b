"""Row counts: read by the host (`SplitSizes`), or bounded beforehand (`RowCapacity`).

A dispatcher without a `RowCapacity` brings row counts to the host, which waits for the device. With one, shapes are
known before routing. Rows over the capacity are left out of the pass, which makes its result worthless: they are
counted on the device, the count is read once a step with the other figures, and the step is repeated
(penstock/train/step.py) with more capacity where it was too small. Passes without training are not repeated, so they
always have the worst-case capacity.

`ActivationArena` is one buffer for the pre-activations of all layers. A single layer needs capacity for an unlucky
routing, but the sum over layers hardly varies: the arena holds `factor` times the even share of all of them, one
layer's rows behind the other's. Each pass allocates its own buffer with its first layer, and autograd frees it after
the backward pass of its last one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.kernels.expert_parts import SavedRows, claim_rows
from penstock.kernels.language import record_wait
from penstock.layout.grid import ExpertPlacement
from penstock.moe.balance import StepMeter


@dataclass(frozen=True)
class SplitSizes:
    """Reads counts; the host waits for the device.

    A meta device has none: there a rank has `imbalance` times the even share, of the `part` that is not dropped.
    """

    imbalance: float = 1.0  # of the fullest rank, as a plan assumes it
    part: float = 1.0
    reached: float = 0.0  # share of tokens with a choice on a given node; 0 for `part_that_crosses`

    def total(self, counts_E: Tensor, even_share: float, limit: int) -> int:
        if not counts_E.is_meta:
            return int(counts_E.sum())
        record_wait(counts_E)
        return self._assumed(even_share, limit)

    def exchanged(self, sent_W: Tensor, arriving_W: Tensor, even_share: int) -> tuple[list[int], list[int]]:
        """Rows to each rank, and rows from each."""
        if not sent_W.is_meta:
            send, receive = torch.stack((sent_W, arriving_W)).tolist()  # one copy to the host, one wait
            return send, receive
        record_wait(sent_W)
        ranks = sent_W.numel()
        arriving = self._assumed(even_share, even_share * ranks)
        # The rows that a rank sends to itself alone are those that arrive: the imbalance is among nodes.
        sent = math.ceil(even_share * self.part) if ranks > 1 else arriving
        return _dealt(sent, ranks), _dealt(arriving, ranks)

    def crossing(self, counts: Tensor, choices: tuple[int, ...]) -> list[int]:
        """Tokens from each node, tokens to each, and tokens to allocate: read from `counts`; `choices` is T x K."""
        if not counts.is_meta:
            read: list[int] = counts.tolist()
            return read
        record_wait(counts)
        nodes = counts.numel() // 2
        each = math.ceil(choices[0] * (self.reached or part_that_crosses(nodes, choices[1])))
        return [each] * (2 * nodes) + [each * nodes]

    def _assumed(self, even_share: float, limit: int) -> int:
        return min(limit, math.ceil(even_share * self.part * self.imbalance))


def part_that_crosses(nodes: int, top_k: int) -> float:
    """Share of tokens with at least one choice on a given node, if choices ignore nodes."""
    return 1 - (1 - 1 / nodes) ** top_k


READ = SplitSizes()


def _dealt(rows: int, ranks: int) -> list[int]:
    each, more = divmod(rows, ranks)
    return [each + (rank < more) for rank in range(ranks)]


MULTIPLE = 16  # capacities are a multiple of this less one; the row after the last is for dropped slots
SPARE = 1.1  # new capacity over the most rows that came, because the next step's routing differs a little


class CapacityTracker(StepMeter):
    """A limited number of rows, and a count of those over it."""

    meter: Tensor  # int64 [2]: the rows over capacity, and the most rows of a pass

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor  # capacity over the even share
        self.even_share = 0.0  # of the last pass
        self.widenings = 0  # shape changes, the same on all ranks
        self.register_buffer("meter", torch.zeros(2, dtype=torch.int64), persistent=False)

    @property
    def left_out(self) -> Tensor:
        """Int64 scalar, rows over capacity."""
        return self.meter[0]

    def widen(self, rows: int) -> None:
        """Make room for `rows` of a pass like the last ones, and some more."""
        self.widenings += 1
        if rows > self.even_share * self.factor:
            self.factor = rows / self.even_share * SPARE


class RowCapacity(CapacityTracker):
    """Capacity for the rows of one layer on one rank: `factor` times the even share; infinity for the worst case."""

    def __init__(self, placement: ExpertPlacement, factor: float) -> None:
        super().__init__(factor)
        self.placement = placement

    def rows(self, tokens: int, top_k: int) -> int:
        """The capacity in rows; the `top_k` slots of a token are of different experts."""
        worst = tokens * min(top_k, self.placement.per_place)
        if math.isinf(self.factor) or not self.training:
            return worst
        self.even_share = tokens * top_k / self.placement.expert
        return min(worst, math.ceil((self.even_share * self.factor + 1) / MULTIPLE) * MULTIPLE - 1)

    def count(self, rows: Tensor, capacity: int) -> None:
        self.meter[0] += (rows - capacity).clamp(min=0)  # on the device: the host reads it once a step
        self.meter[1] = torch.maximum(self.meter[1], rows)


def rows_left_out(trackers: Sequence[CapacityTracker]) -> Tensor:
    """Rows of this rank over capacity, over all layers: int64 scalar on the device."""
    return torch.stack([capacity.left_out for capacity in trackers]).sum()


def make_room(trackers: Sequence[CapacityTracker]) -> None:
    """Widen every layer to the rows that came in the step. All ranks call it when any left out a row."""
    peaks = torch.stack([capacity.meter[1] for capacity in trackers]).tolist() if trackers else []  # one wait for all
    for capacity, most_rows in zip(trackers, peaks, strict=True):
        capacity.widen(most_rows)


def widenings(modules: Iterable[nn.Module]) -> int:
    """Number of shape changes since the modules were made, the same on all ranks."""
    return max((capacity.widenings for capacity in capacity_trackers(modules)), default=0)


def capacity_trackers(modules: Iterable[nn.Module]) -> tuple[CapacityTracker, ...]:
    """All limits of rows of a rank; none where the host reads row counts."""
    return tuple(module for model in modules for module in model.modules() if isinstance(module, CapacityTracker))


class ActivationArena(CapacityTracker):
    """Capacity for the pre-activations of a stage's layers on one rank; `even_share` is that of all layers together."""

    def __init__(self, factor: float) -> None:
        super().__init__(factor)
        self.layers = 0
        self._buffer: Tensor | None = None
        self._cursor: Tensor | None = None  # int64 [1] on the device: rows in use
        self._left = 0  # layers of the pass that have no rows yet

    def join(self) -> None:
        self.layers += 1

    def begin(self) -> None:
        """Begin a pass: its rows go to a new buffer."""
        self._buffer = self._cursor = None
        self._left = 0

    def reset(self) -> None:
        """See `StepMeter`. Also drops the buffer of a pass that was given up."""
        super().reset()
        self.begin()

    def place(self, used: Tensor, capacity: int, like: Tensor, *, even_share: float) -> SavedRows:
        """Allocate up to `capacity` rows of the next layer, as those of `like`; `used` is int32 [1], its rows."""
        width = like.shape[1]
        if like.is_meta:  # A plan runs one layer at a time, so each layer counts only itself.
            return SavedRows(
                like.new_empty(self._rows(even_share), width), used.new_empty(1, dtype=torch.int64), capacity
            )
        if self._left == 0 or self._buffer is None or self._cursor is None:
            self.even_share = even_share * self.layers
            self._buffer = like.new_empty(max(self._rows(self.even_share), capacity), width)
            self._cursor = torch.zeros(1, dtype=torch.int64, device=like.device)
            self._left = self.layers
        buffer = self._buffer
        assert buffer.shape[1] == width, "all layers of an arena have one width"
        first = claim_rows(self._cursor, used, len(buffer), self.meter)
        self._left -= 1
        if self._left == 0:  # from now on the buffer lives as long as a layer's graph holds rows of it
            self.begin()
        return SavedRows(buffer, first, capacity)

    def _rows(self, even_share: float) -> int:
        return math.ceil(even_share * self.factor)
