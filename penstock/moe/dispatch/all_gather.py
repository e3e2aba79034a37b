"""All-gather dispatch: every rank sees all tokens and computes those that chose its experts.

    dispatch   gather the tokens of all ranks, and in one message their choices and weights
               sort slots by OUR experts; slots of other ranks' experts come last, as if dropped
    experts    read the gathered tokens through an index, without a copy in sorted order
    combine    sum the outputs for each gathered token in float32
               reduce-scatter the sums to the ranks of the tokens

A token crosses once to every other rank, even if it is not needed there, but never once for each choice. Only the
number of rows depends on the routing: a `RowCapacity` bounds it, or the host reads it. Expert tensor parallelism needs
no special case: each rank takes its part of each expert's rows, and the reduce-scatter adds the parts up.

docs/dispatch.md compares the bytes with those of other dispatchers. Sums over ranks are in the dtype of the tokens,
also if rows travel in 8 bits.
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
    """Gathers all tokens of `axis`, equally many of each rank; without `row_capacity` the host reads the row count."""

    name: ClassVar[DispatcherName] = "all-gather"

    placement: ExpertPlacement
    axis: Axis
    operators: Operators
    row_capacity: RowCapacity | None = None
    counts: SplitSizes = READ
    wire_format: WireFormat = UNQUANTIZED

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """See `Dispatcher.dispatch`. All ranks of the axis call it."""
        payload = self.wire_format.encode(x_TD).move(
            lambda rows: all_gather(rows, self.axis, dim=0), lambda gradient: reduce_scatter(gradient, self.axis, dim=0)
        )
        weights_NK, experts_NK = unpacked(all_gather(packed(routing), self.axis, dim=0))  # N = W x T tokens
        own_NK = as_local(experts_NK, self.placement.experts_of(self.axis.rank))
        order = self._keep_capacity(self.operators.order_rows(own_NK, self.placement.per_place))
        weights_R = pick_kept(weights_NK, order)
        x_ND, quantized = self.wire_format.decode(payload)
        index_R = order.slots_R // own_NK.shape[1]  # token of each slot
        return ExpertRows(x_ND, index_R, weights_R, order.counts_E, order.places_TK, quantized), DispatchMetadata(order)

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        """See `Dispatcher.combine`. All ranks of the axis call it."""
        return reduce_scatter(self.operators.unpermute(y_RD, metadata.order), self.axis, dim=0)

    def _keep_capacity(self, order: RowOrder) -> RowOrder:
        tokens, top_k = order.places_TK.shape
        if self.row_capacity is None:
            share = tokens * top_k / self.placement.expert
            return first_rows(order, self.counts.total(order.counts_E, share, tokens * top_k))
        rows = self.row_capacity.rows(tokens, top_k)
        if self.row_capacity.training and not is_recomputing():  # recomputed rows were counted in forward
            self.row_capacity.count(order.counts_E.sum(), rows)
        return first_rows(order, rows)


def first_rows(order: RowOrder, rows: int) -> RowOrder:
    """Keep the slots of the first rows; the others are dropped.

    With places_TK = [[1, 0], [2, 3]] and counts_E = [1, 2, 1], two rows leave counts_E = [1, 1, 0] and places_TK =
    [[1, 0], [2, 2]]. Dropped slots share the place after the last row, so the result has rows + 1 places.
    """
    if rows >= order.slots_R.numel():
        return order
    ends_E = order.counts_E.cumsum(0).clamp(max=rows)  # the expert at the border keeps a part, later ones nothing
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1)).int()
    return RowOrder(order.slots_R[: rows + 1], order.places_TK.clamp(max=rows), counts_E)


def packed(routing: Routing) -> Tensor:
    """Weights and ids as one message: ids travel as the bits of float32 numbers. Only the weights have a gradient."""
    return torch.cat((routing.weights_TK, routing.experts_TK.int().view(torch.float32)), dim=1)


def unpacked(choices: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `packed`: weights, and int64 ids."""
    weights_TK, bits_TK = choices.chunk(2, dim=1)
    return weights_TK, bits_TK.detach().view(torch.int32).long()


def as_local(experts_TK: Tensor, own: range) -> Tensor:
    """Ids among our own experts; `len(own)`, which marks a dropped slot, for all others."""
    is_own_TK = (experts_TK >= own.start) & (experts_TK < own.stop)
    return torch.where(is_own_TK, experts_TK - own.start, len(own))
