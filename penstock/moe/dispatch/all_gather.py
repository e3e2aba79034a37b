"""The promise kept by gathering: every rank sees all tokens and works on those that chose its experts.

    dispatch   tokens of all ranks gathered; their choices and weights gathered, in one message
               slots ordered by OUR experts; those of other ranks' experts come last, as if dropped
    experts    read the gathered tokens through an index: no copy brings them into order
    combine    what our experts give for each gathered token summed, in float32
               sums of all ranks added up where the token came from (reduce-scatter)

A token crosses once to every other rank, needed there or not, but never once for each choice. Of all shapes only the
number of rows depends on the routing: with a `RowCapacity` it is what that says, without one the host reads how many
there are. The parts of an expert that several ranks share ("expert tensor parallelism") need no case of their own: each
rank takes its part of each expert's rows, and the sum at the token adds them up.

Simpler than a dispatch that sends a token only where it is needed, which sends less; docs/dispatch.md has the numbers.
Sums over ranks are taken in the dtype of the tokens, whatever they are packed in on the way out.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from penstock.config.dispatcher import DispatcherName
from penstock.kernels.operators import Operators
from penstock.kernels.reference import RowOrder
from penstock.layout.experts import ExpertPlacement
from penstock.moe.dispatch.contract import DispatchMetadata, ExpertRows
from penstock.moe.dispatch.gathers import pick_kept
from penstock.moe.dispatch.payload import UNQUANTIZED, DispatchPayload, WireFormat
from penstock.moe.dispatch.row_capacity import READ, RowCapacity, SplitSizes
from penstock.moe.routing import Routing
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.recompute import is_recomputing


@dataclass(frozen=True)
class AllGatherDispatcher:
    """Gathers all tokens of the axis; each of its ranks has the same number of them.

    Attributes:
        placement: who holds which experts.
        axis: its places.
        operators: kernels to run on.
        room: says how many rows the experts have room for; None asks the device, and the host waits.
        counts: asks it.
        wire_format: in which form rows travel.
    """

    name: ClassVar[DispatcherName] = "all-gather"

    placement: ExpertPlacement
    axis: Axis
    operators: Operators
    room: RowCapacity | None = None
    counts: SplitSizes = READ
    wire_format: WireFormat = UNQUANTIZED

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """See `Dispatcher.dispatch`. All ranks of the axis call it."""
        payload = self.wire_format.load(x_TD).moved(
            lambda rows: all_gather(rows, self.axis, dim=0), lambda gradient: reduce_scatter(gradient, self.axis, dim=0)
        )
        weights_NK, experts_NK = _gather_choices(routing, self.axis)
        own_NK = as_local(experts_NK, self.placement.experts_of(self.axis.rank))
        order = self._make_room(self.operators.order_rows(own_NK, self.placement.per_place))
        weights_R = pick_kept(weights_NK, order)
        x_ND, quantized = self.wire_format.unload(payload)
        index_R = order.slots_R // own_NK.shape[1]
        return ExpertRows(x_ND, index_R, weights_R, order.counts_E, order.places_TK, quantized), DispatchMetadata(order)

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        """See `Dispatcher.combine`. All ranks of the axis call it."""
        return reduce_scatter(self.operators.unpermute(y_RD, metadata.order), self.axis, dim=0)

    def _make_room(self, order: RowOrder) -> RowOrder:
        """The order with as many rows as there is room for."""
        tokens, top_k = order.places_TK.shape
        if self.room is None:
            share = tokens * top_k / self.placement.expert
            return first_rows(order, self.counts.total(order.counts_E, share, tokens * top_k))
        rows = self.room.rows(tokens, top_k)
        if self.room.training and not is_recomputing():
            self.room.count(order.counts_E.sum(), rows)
        return first_rows(order, rows)


def first_rows(order: RowOrder, rows: int) -> RowOrder:
    """Keep the slots of the first rows; the others are dropped.

    With places_TK = [[1, 0], [2, 3]] and counts_E = [1, 2, 1], two rows leave counts_E = [1, 1, 0] and
    places_TK = [[1, 0], [2, 2]]: the third row is nobody's, and dropped slots share it.

    Args:
        order: of all slots.
        rows: that are kept, if there are so many.

    Returns:
        An order of rows + 1 places, or the same if it has no more. Dropped slots may have one place together, past the
        last expert's.
    """
    if rows >= order.slots_R.numel():
        return order
    ends_E = order.counts_E.cumsum(0).clamp(max=rows)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1)).int()
    return RowOrder(order.slots_R[: rows + 1], order.places_TK.clamp(max=rows), counts_E)


def packed(routing: Routing) -> Tensor:
    """Weights and ids as one message: ids travel as the bits of float32 numbers. Only the weights have a gradient."""
    return torch.cat((routing.weights_TK, routing.experts_TK.int().view(torch.float32)), dim=1)


def unpacked(choices: Tensor) -> tuple[Tensor, Tensor]:
    """The weights and the ids, int64, that were `packed`."""
    weights_TK, bits_TK = choices.chunk(2, dim=1)
    return weights_TK, bits_TK.detach().view(torch.int32).long()


def as_local(experts_TK: Tensor, own: range) -> Tensor:
    """Ids among our own experts; their number, which marks a dropped slot, for all others."""
    is_own_TK = (experts_TK >= own.start) & (experts_TK < own.stop)
    return torch.where(is_own_TK, experts_TK - own.start, len(own))


def _gather_choices(routing: Routing, axis: Axis) -> tuple[Tensor, Tensor]:
    """Weights and expert ids of all ranks' tokens."""
    if axis.size == 1:
        return routing.weights_TK, routing.experts_TK
    return unpacked(all_gather(packed(routing), axis, dim=0))
