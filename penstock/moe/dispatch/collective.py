"""Dispatch by collectives: all-gather, all-to-all (also padded to the capacity of every expert), and over nodes.

All-gather: every rank sees all tokens and computes those that chose its experts.

    dispatch   gather the tokens of all ranks, and in one message their choices and weights
               sort slots by OUR experts; slots of other ranks' experts come last, as if dropped
    experts    read the gathered tokens through an index, without a copy in sorted order
    combine    sum the outputs for each gathered token in float32
               reduce-scatter the sums to the ranks of the tokens

A token crosses once to every other rank, even if it is not needed there, but never once for each choice. Only the
number of rows depends on the routing: a `RowCapacity` bounds it, or the host reads it. Expert tensor parallelism needs
no special case: each rank takes its part of each expert's rows, and the reduce-scatter adds the parts up. Sums over
ranks are in the dtype of the tokens, also if rows travel in 8 bits.

All-to-all: each row goes to the rank of its expert, and its output comes back.

    dispatch   sort slots by (virtual) expert, and so by rank
               exchange row counts; the host reads them
               exchange rows and weights; they arrive by source rank, and from each rank by expert
    experts    read rows through an index, expert by expert, without a copy in that order
    combine    bring outputs into the order of arrival, send them back, sum at the token

With expert tensor parallelism a slot becomes one slot for each part of its expert, with the same weight: the row goes
to all parts, and the sum at the token adds their outputs (penstock/layout/grid.py numbers the parts as virtual
experts). Padded, the capacity of every expert is sent: all shapes are static and the host reads nothing. That also
serves one rank that holds all experts, and sends nothing there. docs/dispatch.md compares the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.dispatcher import DispatcherName
from penstock.kernels.operators import Operators
from penstock.kernels.reference import RowOrder
from penstock.layout.grid import ExpertPlacement
from penstock.moe.balance import Routing, SortedSlots, capacity
from penstock.moe.dispatch.contract import (
    UNQUANTIZED,
    Dispatcher,
    DispatchMetadata,
    DispatchPayload,
    ExpertRows,
    WireFormat,
    collect_padded,
    pick_kept,
    reorder,
    sort_slots,
    spread,
    spread_padded,
)
from penstock.moe.dispatch.row_capacity import READ, RowCapacity, SplitSizes
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather, exchange_rows, reduce_scatter
from penstock.parallel.recompute import is_recomputing


@dataclass(frozen=True)
class AllGatherDispatcher:
    """Gathers all tokens of `axis`, equally many of each rank; without `row_capacity` the host reads the row count."""

    name: DispatcherName = field(default="all-gather", init=False)

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


def as_local(experts_TK: Tensor, local_experts: range) -> Tensor:
    """Ids among our own experts; `len(local_experts)`, which marks a dropped slot, for all others."""
    is_own_TK = (experts_TK >= local_experts.start) & (experts_TK < local_experts.stop)
    return torch.where(is_own_TK, experts_TK - local_experts.start, len(local_experts))


@dataclass(frozen=True)
class Exchange:
    """Rows of this rank's slots, sent to the ranks of an axis and back; the host knows the numbers."""

    order: RowOrder
    axis: Axis
    operators: Operators
    receive: Sequence[int] | None = None  # rows from each rank; None if all are equal
    send: Sequence[int] | None = None  # rows to each rank

    def there(self, x_TD: Tensor) -> Tensor:
        """Each slot's row at its rank, without those of dropped slots, which are last."""
        rows_RD = spread(x_TD, self.order, self.operators)
        if self.send is not None:
            rows_RD = _first(rows_RD, sum(self.send))
        return exchange_rows(rows_RD, self.axis, self.receive, self.send)

    def back(self, y_RD: Tensor) -> Tensor:
        """Rows that arrived, returned to their ranks and summed for each token in float32; those dropped are zeros."""
        rows_RD = exchange_rows(y_RD, self.axis, receive=self.send, send=self.receive)
        return self.operators.unpermute(more_rows(rows_RD, self.order.slots_R.numel() - rows_RD.shape[0]), self.order)


class _PaddedExchange(Exchange):
    """The same number of rows for each expert; `slots_R` has the token of each row, as `_padded_order` says."""

    def there(self, x_TD: Tensor) -> Tensor:
        return exchange_rows(spread_padded(x_TD, self.order.slots_R, self.order.places_TK), self.axis)

    def back(self, y_RD: Tensor) -> Tensor:
        return collect_padded(exchange_rows(y_RD, self.axis), self.order.slots_R, self.order.places_TK)


@dataclass(frozen=True)
class AllToAllMetadata(DispatchMetadata):
    """Its order is that of this rank's slots; R counts the rows that arrived here."""

    exchange: Exchange
    arrived_R: Tensor  # int64: for each place of the experts' order, the row in order of arrival
    places_R: Tensor  # its inverse


@dataclass(frozen=True)
class _AllToAll:
    """Rows at the ranks of their experts, which read them through an index; subclasses say which rows leave."""

    placement: ExpertPlacement
    axis: Axis
    operators: Operators
    wire_format: WireFormat = UNQUANTIZED

    def _sent(
        self, x_TD: Tensor | DispatchPayload, weights_R: Tensor, arriving_We: Tensor, exchange: Exchange
    ) -> tuple[ExpertRows, DispatchMetadata]:
        """`arriving_We` has the rows from each rank for each of our experts."""
        payload = self.wire_format.encode(x_TD).move(exchange.there, exchange.back)
        weights_R = exchange_rows(weights_R, self.axis, exchange.receive, exchange.send)
        # After the exchanges: before them its small kernels would delay a device that has waited for the host.
        arrived_R, places_R = _by_expert(arriving_We, weights_R.shape[0])
        weights_R = reorder(weights_R, arrived_R, places_R)
        x_RD, quantized = self.wire_format.decode(payload)
        counts_e = arriving_We.sum(0, dtype=torch.int32)
        rows = ExpertRows(x_RD, arrived_R, weights_R, counts_e, places_R[:, None], quantized)
        return rows, AllToAllMetadata(exchange.order, exchange, arrived_R, places_R)

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        assert isinstance(metadata, AllToAllMetadata), f"not a metadata of this dispatcher: {metadata}"
        return metadata.exchange.back(reorder(y_RD, metadata.places_R, metadata.arrived_R))


@dataclass(frozen=True)
class AllToAllDispatcher(_AllToAll):
    """Sends each row to the ranks of its expert, so the host must know how many there are."""

    name: DispatcherName = field(default="all-to-all", init=False)

    counts: SplitSizes = READ

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
        exchange = Exchange(order, self.axis, self.operators, receive, send)
        return self._sent(x_TD, _first(slots.weights_R, sum(send)), arriving_We, exchange)

    def sorted_slots(self, routing: Routing) -> SortedSlots:
        return sort_slots(each_part(routing, self.placement), self.placement.virtual_experts, self.operators)


@dataclass(frozen=True)
class PaddedAllToAllDispatcher(_AllToAll):
    """Sends the capacity of every expert, that of the router: static shapes, padding.

    All ranks of the axis have the same number of tokens. Ranks that share rows share their capacity too, and a rank
    sends the whole of it for each expert, because all slots that were kept may be its own. Slots over capacity must
    have been dropped.
    """

    name: DispatcherName = field(default="padded", init=False)

    factor: float = 1.0
    sharing: int = 1  # ranks that share rows

    @property
    def dropless(self) -> AllToAllDispatcher:
        """The dispatcher of evaluation, which drops no slot and therefore knows no capacity."""
        return AllToAllDispatcher(self.placement, self.axis, self.operators, self.wire_format)

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """See `Dispatcher.dispatch`. All ranks of the axis call it."""
        T, K = routing.experts_TK.shape
        # Rows of each expert from this rank. As the router computes it: a scaled factor may round to another number.
        limit = min(T, capacity(T * self.sharing, K, self.placement.experts, self.factor))
        parts = each_part(routing, self.placement)
        order = _padded_order(parts, self.placement.virtual_experts, limit, self.operators)
        past = order.slots_R.numel()  # the place of dropped slots
        weights_R = parts.weights_TK.new_zeros(past + 1).index_put((order.places_TK,), parts.weights_TK)[:past]
        arriving_We = order.counts_E.new_full((self.axis.size, self.placement.per_place), limit)
        return self._sent(x_TD, weights_R, arriving_We, _PaddedExchange(order, self.axis, self.operators))


def each_part(routing: Routing, placement: ExpertPlacement) -> Routing:
    """The slots with one for each part of their expert, by virtual expert; dropped ones have the id past the last."""
    parts = placement.expert_tensor
    if parts == 1:
        return routing
    e = placement.per_place
    experts_TK1 = routing.experts_TK[:, :, None]
    owner = experts_TK1 // e * parts + torch.arange(parts, device=experts_TK1.device)  # T x K x parts
    virtual = owner * e + experts_TK1 % e
    weights = routing.weights_TK[:, :, None].expand(-1, -1, parts)
    return Routing(weights.flatten(1), virtual.clamp(max=placement.virtual_experts).flatten(1))


def _first(rows_R: Tensor, count: int) -> Tensor:
    return rows_R if count == rows_R.shape[0] else rows_R[:count]


def more_rows(rows: Tensor, more: int, value: int = 0) -> Tensor:
    return F.pad(rows, (0, 0, 0, more), value=value) if more else rows


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


@dataclass(frozen=True)
class NodePlacement:
    """The ranks that share the experts of a layer, by node; `across` are the ranks at our place of every node."""

    placement: ExpertPlacement
    node: Axis
    across: Axis

    def experts_of(self, node: int) -> range:
        """Experts of which a node holds a part."""
        first = self.placement.experts_of(node * self.node.size).start
        return range(first, first + self.placement.block(self.node.size).experts)

    def needed(self, experts_TK: Tensor) -> Tensor:
        """nodes_TW: int64 number of each node that a token needs, or the number of nodes where it needs none."""
        node_W = torch.arange(self.across.size, device=experts_TK.device)
        # The experts of a node are consecutive: first_W .. end_W - 1.
        first_W = node_W * self.node.size // self.placement.expert_tensor * self.placement.per_place
        end_W = first_W + len(self.experts_of(0))
        experts_TK1 = experts_TK[:, :, None]
        is_needed_TW = ((experts_TK1 >= first_W) & (experts_TK1 < end_W)).any(1)  # T x K x W -> T x W
        return torch.where(is_needed_TW, node_W, self.across.size)


@dataclass(frozen=True)
class HierarchicalMetadata(DispatchMetadata):
    """Its order is that of the slots (token, node)."""

    inner: DispatchMetadata
    exchange: Exchange  # across the nodes
    arrived: int  # tokens that arrived here, without empty rows


@dataclass(frozen=True)
class HierarchicalDispatcher:
    """Sends each token once to each node, where another dispatcher spreads it; ranks have equally many tokens.

        dispatch   find the nodes that hold an expert of each token: slots (token, node), sorted by node
                   send rows, choices and weights to the rank at our own place of each of these nodes
                   dispatch the arrived rows inside the node; experts of other nodes count as dropped
        combine    sum inside the node by the inner dispatcher
                   send one row for each (token, node) back, and sum over nodes in float32

    Each rank uses its own network card. If expert_tensor is larger than a node, a node holds a part of each of its
    experts, and a token goes to all nodes that hold the other parts.

    Counted: only tokens that need a node cross to it, and the host reads how many. Ranks then have different numbers of
    tokens; an inner dispatcher that needs equal numbers gets empty rows, up to the node's fullest rank. Not counted:
    every token crosses to every node, so all shapes are known (docs/dispatch.md compares the bytes).

    Simpler than DeepEP's kernels, which forward tokens inside the node while others still cross.
    """

    name: DispatcherName = field(default="hierarchical", init=False)

    nodes: NodePlacement
    inner: Dispatcher  # over `nodes.node`, with the placement `nodes.placement.block(nodes.node.size)`
    operators: Operators
    is_counted: bool  # send only tokens that need a node; else all
    is_even: bool = False  # the inner dispatcher needs equal token numbers on all ranks; read only if counted
    counts: SplitSizes = READ
    wire_format: WireFormat = UNQUANTIZED

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """See `Dispatcher.dispatch`. All ranks of both axes call it, each with the same number of tokens."""
        # 1. Our tokens in the order of the nodes that they go to.
        exchange, rows = self._count(routing) if self.is_counted else self._all(routing)
        arrived = rows if exchange.receive is None else sum(exchange.receive)
        more = rows - arrived  # empty rows

        # 2. Across the nodes.
        payload = self.wire_format.encode(x_TD).move(
            lambda rows: more_rows(exchange.there(rows), more), lambda gradient: exchange.back(gradient[:arrived])
        )
        weights_TK, experts_TK = unpacked(exchange.there(packed(routing)))

        # 3. Inside our node, where empty rows chose no expert.
        local_experts = self.nodes.experts_of(self.nodes.across.rank)
        experts_TK = as_local(experts_TK, local_experts)
        inside = Routing(more_rows(weights_TK, more), more_rows(experts_TK, more, len(local_experts)))
        expert_rows, inner = self.inner.dispatch(payload, inside)
        return expert_rows, HierarchicalMetadata(exchange.order, inner, exchange, arrived)

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        """See `Dispatcher.combine`. All ranks of both axes call it."""
        assert isinstance(metadata, HierarchicalMetadata), f"not a metadata of this dispatcher: {metadata}"
        return metadata.exchange.back(self.inner.combine(y_RD, metadata.inner)[: metadata.arrived])

    def _count(self, routing: Routing) -> tuple[Exchange, int]:
        """Returns also the tokens of the inner dispatch. The only wait of the host outside the inner dispatcher."""
        nodes, across = self.nodes, self.nodes.across
        order = self.operators.order_rows(nodes.needed(routing.experts_TK), across.size)  # a node counts as an expert
        arriving_W = exchange_rows(order.counts_E, across)
        arrivals = arriving_W.sum(dtype=torch.int32)[None]
        if self.is_even:
            arrivals = all_gather(arrivals, nodes.node, dim=0).amax(0, keepdim=True)  # of the node's fullest rank
        counts = self.counts.crossing(torch.cat((arriving_W, order.counts_E, arrivals)), routing.experts_TK.shape)
        receive, send = tuple(counts[: across.size]), tuple(counts[across.size : -1])
        exchange = Exchange(first_rows(order, sum(send)), across, self.operators, receive, send)
        return exchange, max(1, counts[-1])  # at least one row: kernels refuse an empty batch

    def _all(self, routing: Routing) -> tuple[Exchange, int]:
        T, W = routing.experts_TK.shape[0], self.nodes.across.size
        number_R = torch.arange(T * W, device=routing.experts_TK.device)
        counts_W = torch.full((W,), T, dtype=torch.int32, device=number_R.device)
        # Slot t W + w of token t stands at place w T + t: all tokens for node 0, then all for node 1, ...
        order = RowOrder(number_R.view(T, W).T.flatten(), number_R.view(W, T).T.contiguous(), counts_W)
        return Exchange(order, self.nodes.across, self.operators), T * W
