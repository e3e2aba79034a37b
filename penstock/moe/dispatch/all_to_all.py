"""All-to-all dispatch: each row goes to the rank of its expert, and its output comes back.

    dispatch   sort slots by (virtual) expert, and so by rank
               exchange row counts; the host reads them
               exchange rows and weights; they arrive by source rank, and from each rank by expert
    experts    read rows through an index, expert by expert, without a copy in that order
    combine    bring outputs into the order of arrival, send them back, sum at the token

With expert tensor parallelism a slot becomes one slot for each part of its expert, with the same weight: the row goes
to all parts, and the sum at the token adds their outputs (penstock/layout/experts.py numbers the parts as virtual
experts).

`AllToAllDispatcher` sends the rows that there are, so the host must know their numbers. `PaddedAllToAllDispatcher`
sends the capacity of every expert: all shapes are static and the host reads nothing. It also serves one rank that holds
all experts, and sends nothing there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.base.spans import Span
from penstock.config.dispatcher import DispatcherName
from penstock.kernels.operators import Operators
from penstock.kernels.reference import RowOrder
from penstock.layout.experts import ExpertPlacement
from penstock.moe.balance import capacity
from penstock.moe.dispatch.contract import DispatchMetadata, ExpertRows
from penstock.moe.dispatch.gathers import collect_padded, reorder, spread, spread_padded
from penstock.moe.dispatch.payload import UNQUANTIZED, DispatchPayload, WireFormat
from penstock.moe.dispatch.row_capacity import READ, SplitSizes
from penstock.moe.routing import Routing, SortedSlots
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import exchange_rows
from penstock.parallel.spans import span


@dataclass(frozen=True)
class AllToAllMetadata(DispatchMetadata):
    """Its order is that of our own slots; R counts the rows that arrived here."""

    arrived_R: Tensor  # int64: for each place of the experts' order, the row in order of arrival
    places_R: Tensor  # its inverse
    receive: tuple[int, ...] | None = None  # rows from each rank; None if all are equal
    send: tuple[int, ...] | None = None  # rows to each rank


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Sends each row to the ranks of its expert."""

    name: ClassVar[DispatcherName] = "all-to-all"

    placement: ExpertPlacement
    axis: Axis
    operators: Operators
    counts: SplitSizes = READ
    wire_format: WireFormat = UNQUANTIZED

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """See `Dispatcher.dispatch`. All ranks of the axis call it."""
        # 1. Our slots in the order of the experts.
        slots = routing.sorted or self.sorted_slots(routing)
        order = slots.order

        # 2. How many rows go where, and come from where. The only time that the host waits.
        counts_We = order.counts_E.view(self.axis.size, -1)  # rows for each expert of each rank
        arriving_We = exchange_rows(counts_We, self.axis)  # rows from each rank for each of our experts
        send, receive = self.counts.exchanged(counts_We.sum(1), arriving_We.sum(1), order.slots_R.numel())

        # 3. Send rows and weights. Dropped slots are last and stay here.
        kept = sum(send)
        payload = self.wire_format.encode(x_TD).move(
            lambda rows: exchange_rows(_first(spread(rows, order, self.operators), kept), self.axis, receive, send),
            lambda gradient: self._bring_home(gradient, order, send, receive),
        )
        weights_R = exchange_rows(_first(slots.weights_R, kept), self.axis, receive, send)

        # 4. Sort what arrived by expert, as an index.
        arrived_R, places_R = _by_expert(arriving_We, sum(receive))
        weights_R = reorder(weights_R, arrived_R, places_R)
        counts_e = arriving_We.sum(0, dtype=torch.int32)
        x_RD, quantized = self.wire_format.decode(payload)
        rows = ExpertRows(x_RD, arrived_R, weights_R, counts_e, places_R[:, None], quantized)
        return rows, AllToAllMetadata(order, arrived_R, places_R, tuple(receive), tuple(send))

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        """See `Dispatcher.combine`. All ranks of the axis call it."""
        assert isinstance(metadata, AllToAllMetadata), f"not a metadata of this dispatcher: {metadata}"
        assert metadata.send is not None and metadata.receive is not None, "as many rows to each as there are"
        arrived_RD = reorder(y_RD, metadata.places_R, metadata.arrived_R)  # experts' order -> order of arrival
        return self._bring_home(arrived_RD, metadata.order, metadata.send, metadata.receive)

    def _bring_home(self, arrived_RD: Tensor, order: RowOrder, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send rows back to their tokens' ranks and sum them for each token."""
        returned_RD = exchange_rows(arrived_RD, self.axis, receive=send, send=receive)
        dropped = order.slots_R.numel() - returned_RD.shape[0]
        if dropped:
            returned_RD = F.pad(returned_RD, (0, 0, 0, dropped))  # zeros at the places of dropped slots
        return self.operators.unpermute(returned_RD, order)

    def sorted_slots(self, routing: Routing) -> SortedSlots:
        """See `SlotSorter.sorted_slots`."""
        with span(Span.SORT):
            parts = each_part(routing, self.placement)
            order = self.operators.order_rows(parts.experts_TK, self.placement.virtual_experts)
            return SortedSlots(order, reorder(parts.weights_TK.reshape(-1), order.slots_R, order.places_TK.reshape(-1)))


@dataclass(frozen=True)
class PaddedAllToAllDispatcher:
    """Sends the capacity of every expert, that of the router: static shapes, padding.

    All ranks of the axis have the same number of tokens. Ranks that share rows share their capacity too, and a rank
    sends the whole of it for each expert, because all slots that were kept may be its own. Slots over capacity must
    have been dropped.
    """

    name: ClassVar[DispatcherName] = "padded"

    placement: ExpertPlacement
    axis: Axis
    factor: float
    operators: Operators
    wire_format: WireFormat = UNQUANTIZED
    sharing: int = 1  # ranks that share rows

    @property
    def dropless(self) -> AllToAllDispatcher:
        """The dispatcher of evaluation, which drops no slot and therefore knows no capacity."""
        return AllToAllDispatcher(self.placement, self.axis, self.operators, wire_format=self.wire_format)

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """See `Dispatcher.dispatch`. All ranks of the axis call it."""
        T, K = routing.experts_TK.shape
        # Rows of each expert from this rank. As the router computes it: a scaled factor may round to another number.
        limit = min(T, capacity(T * self.sharing, K, self.placement.experts, self.factor))
        parts = each_part(routing, self.placement)
        order = _padded_order(parts, self.placement.virtual_experts, limit, self.operators)
        past = order.slots_R.numel()  # the place of dropped slots

        payload = self.wire_format.encode(x_TD).move(
            lambda rows: exchange_rows(spread_padded(rows, order.slots_R, order.places_TK), self.axis),
            lambda gradient: self._bring_home(gradient, order),
        )
        sent_R = parts.weights_TK.new_zeros(past + 1).index_put((order.places_TK,), parts.weights_TK)[:past]
        weights_R = exchange_rows(sent_R, self.axis)

        arrived_R, places_R = _by_expert_evenly(self.axis.size, self.placement.per_place, limit, weights_R.device)
        weights_R = reorder(weights_R, arrived_R, places_R)
        counts_e = order.counts_E.new_full((self.placement.per_place,), self.axis.size * limit)
        x_RD, quantized = self.wire_format.decode(payload)
        rows = ExpertRows(x_RD, arrived_R, weights_R, counts_e, places_R[:, None], quantized)
        return rows, AllToAllMetadata(order, arrived_R, places_R)

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        """See `Dispatcher.combine`. All ranks of the axis call it."""
        assert isinstance(metadata, AllToAllMetadata), f"not a metadata of this dispatcher: {metadata}"
        return self._bring_home(reorder(y_RD, metadata.places_R, metadata.arrived_R), metadata.order)

    def _bring_home(self, arrived_RD: Tensor, order: RowOrder) -> Tensor:
        """A row for each that arrived back to where it came from, summed for each token."""
        return collect_padded(exchange_rows(arrived_RD, self.axis), order.slots_R, order.places_TK)


def each_part(routing: Routing, placement: ExpertPlacement) -> Routing:
    """The slots with one for each part of their expert, by virtual expert; dropped ones have the id past the last."""
    parts = placement.expert_tensor
    if parts == 1:
        return routing
    e = placement.per_place
    experts_TK1 = routing.experts_TK[:, :, None]
    place = experts_TK1 // e * parts + torch.arange(parts, device=experts_TK1.device)  # T x K x parts
    virtual = place * e + experts_TK1 % e
    weights = routing.weights_TK[:, :, None].expand(-1, -1, parts)
    return Routing(weights.flatten(1), virtual.clamp(max=placement.virtual_experts).flatten(1))


def _first(rows_R: Tensor, count: int) -> Tensor:
    return rows_R if count == rows_R.shape[0] else rows_R[:count]


def _by_expert(arriving_We: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The permutation from order of arrival (source, expert) to the experts' order (expert, source), and its inverse.

    With 2 sources and 2 experts, arriving_We = [[1, 2], [1, 0]]: the rows a | b b | c are read as a c | b b, so
    arrived_R = [0, 3, 1, 2] and places_R = [0, 2, 3, 1].
    """
    # A block is what came from one source for one expert: it lies together in both orders, only shifted.
    by_source, by_expert = arriving_We.flatten(), arriving_We.T.flatten()
    first_row_We = (by_source.cumsum(0) - by_source).view_as(arriving_We)
    first_place_We = (by_expert.cumsum(0) - by_expert).view_as(arriving_We.T).T
    shift_We = first_place_We - first_row_We
    number_R = torch.arange(rows, device=arriving_We.device)
    arrived_R = number_R - shift_We.T.flatten().repeat_interleave(by_expert, output_size=rows)
    places_R = number_R + shift_We.flatten().repeat_interleave(by_source, output_size=rows)
    return arrived_R, places_R


def _by_expert_evenly(sources: int, experts: int, limit: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`_by_expert` if every source sent `limit` rows for every expert."""
    number_R = torch.arange(sources * experts * limit, device=device)
    arrived_R = number_R.view(sources, experts, limit).transpose(0, 1).flatten()
    places_R = number_R.view(experts, sources, limit).transpose(0, 1).flatten()
    return arrived_R, places_R


def _padded_order(routing: Routing, experts: int, limit: int, operators: Operators) -> RowOrder:
    """`order_rows` with `limit` places for every expert.

    slots_R holds the TOKEN of each place, T for an empty place; a dropped slot's place is one past the last.
    """
    T, K = routing.experts_TK.shape
    past = experts * limit
    order = operators.order_rows(routing.experts_TK, experts)
    firsts_E = F.pad(order.counts_E.cumsum(0) - order.counts_E, (0, 1))  # one more entry for dropped slots
    rank_TK = order.places_TK - firsts_E[routing.experts_TK]  # among the slots of the expert
    places_TK = torch.where(routing.experts_TK < experts, routing.experts_TK * limit + rank_TK, past)
    tokens_TK = torch.arange(T, device=places_TK.device)[:, None].expand(T, K)
    tokens_R = torch.full((past + 1,), T, device=places_TK.device).index_put((places_TK,), tokens_TK)[:past]
    return RowOrder(tokens_R, places_TK, torch.full_like(order.counts_E, limit))
