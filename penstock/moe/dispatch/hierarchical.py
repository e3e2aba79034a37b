"""Hierarchical dispatch over several nodes: a token crosses to each node once, and another dispatcher spreads it there.

    dispatch   find the nodes that hold an expert of each token: slots (token, node), sorted by node
               send rows, choices and weights to the rank at our own place of each of these nodes
               dispatch the arrived rows inside the node; experts of other nodes count as dropped
    combine    sum inside the node by the inner dispatcher
               send one row for each (token, node) back, and sum over nodes in float32

Each rank uses its own network card. If expert_tensor is larger than a node, a node holds a part of each of its experts,
and a token goes to all nodes that hold the other parts.

Counted: only tokens that need a node cross to it, and the host reads how many. Ranks then have different numbers of
tokens; an inner dispatcher that needs equal numbers gets empty rows, up to the node's fullest rank. Not counted: every
token crosses to every node, so all shapes are known (docs/dispatch.md compares the bytes).

Simpler than DeepEP's kernels, which forward tokens inside the node while others still cross.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.config.dispatcher import DispatcherName
from penstock.kernels.operators import Operators
from penstock.kernels.reference import RowOrder
from penstock.layout.experts import ExpertPlacement
from penstock.moe.dispatch.collective import Exchange, as_local, first_rows, more_rows, packed, unpacked
from penstock.moe.dispatch.contract import Dispatcher, DispatchMetadata, ExpertRows
from penstock.moe.dispatch.payload import UNQUANTIZED, DispatchPayload, WireFormat
from penstock.moe.dispatch.row_capacity import READ, SplitSizes
from penstock.moe.routing import Routing
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather, exchange_rows


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
    """Sends each token once to each node, where another dispatcher spreads it; ranks have equally many tokens."""

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
