"""A small mixture of experts: written out token by token, and as a problem that many ranks solve together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from penstock.config.model import Balance, Moe, Router
from penstock.kernels.backends import TRITON
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.float8.reference import dequantize
from penstock.kernels.operators import REFERENCE, Operators
from penstock.kernels.reference import SWIGLU, ExpertRule
from penstock.kernels.symmetric import PersistentLaunch
from penstock.layout.grid import ExpertPlacement, Grid
from penstock.models.block import FeedForward
from penstock.moe.balance import Routing
from penstock.moe.dispatch.build import make_dispatcher
from penstock.moe.dispatch.collective import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    HierarchicalDispatcher,
    NodePlacement,
    PaddedAllToAllDispatcher,
)
from penstock.moe.dispatch.contract import UNQUANTIZED, Dispatcher, ExpertRows, LocalDispatcher, WireFormat
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.moe.dispatch.symmetric import SymmetricDispatcher, SymmetricTransport, transport_of
from penstock.moe.experts import GroupedExperts, expert_rule, shared_rule
from penstock.moe.layer import MoE
from penstock.moe.router import TopKRouter
from penstock.parallel.axes import Axes, Axis, make_axes
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers
from tests.closeness import assert_close
from tests.distributed.pool import Pool
from tests.parallel.symmetric_ranks import run_ranks

D, F = 8, 8

Family = Literal["plain", "gpt-oss", "llama4"]
RULES = {
    "plain": SWIGLU,
    "gpt-oss": ExpertRule(limit=1.0, alpha=1.702),
    "llama4": ExpertRule(weighs_input=True),
}
"""Experts of gpt-oss have biases besides."""


def random_routing(tokens: int, experts: int, top_k: int, seed: int, dropped: float = 0.0) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.rand(tokens, experts, generator=generator)
    experts_TK = scores_TE.topk(top_k).indices
    weights_TK = torch.rand(tokens, top_k, generator=generator)
    drop_TK = torch.rand(tokens, top_k, generator=generator) < dropped
    return Routing(weights_TK.masked_fill(drop_TK, 0).requires_grad_(), experts_TK.masked_fill(drop_TK, experts))


def weights_of(experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    gate_up_eFD = torch.randn(experts, 2 * F, D, generator=generator, requires_grad=True)
    return gate_up_eFD, torch.randn(experts, D, F, generator=generator, requires_grad=True)


def token_by_token(x_TD: Tensor, routing: Routing, gate_up_eFD: Tensor, down_eDF: Tensor) -> Tensor:
    rows = []
    for token in range(x_TD.shape[0]):
        row = x_TD[token] * 0
        for expert, weight in zip(routing.experts_TK[token].tolist(), routing.weights_TK[token], strict=True):
            if expert < gate_up_eFD.shape[0]:
                gate, up = (gate_up_eFD[expert] @ x_TD[token]).chunk(2)
                row = row + weight * (down_eDF[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@dataclass(frozen=True)
class Problem:
    """One layer's problem, of all ranks together. Its matrices are `weights_of`, its biases `biases_of`."""

    placement: ExpertPlacement
    x_TD: Tensor  # divided evenly among the places
    weights_TK: Tensor  # zero where a slot was dropped
    experts_TK: Tensor
    direction_TD: Tensor  # gradient of the output
    family: Family = "plain"

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        experts = self.placement.experts
        biases = biases_of(experts) if self.family == "gpt-oss" else ()
        return tuple(one.detach().to(self.x_TD.dtype) for one in (*weights_of(experts), *biases))

    def of(self, place: int) -> "Problem":
        whole = (self.x_TD, self.weights_TK, self.experts_TK, self.direction_TD)
        own = (tensor.chunk(self.placement.places)[place] for tensor in whole)
        return Problem(self.placement, *own, family=self.family)


def biases_of(experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(12)
    return torch.randn(experts, 2 * F, generator=generator), torch.randn(experts, D, generator=generator)


def problem(placement: ExpertPlacement, routing: Routing, family: Family = "plain") -> Problem:
    T = routing.experts_TK.shape[0]
    weights_TK, experts_TK = routing.weights_TK.detach(), routing.experts_TK
    return Problem(placement, torch.randn(T, D), weights_TK, experts_TK, torch.randn(T, D), family)


def parts_of(parameters: Sequence[Tensor], place: int, placement: ExpertPlacement) -> list[Tensor]:
    """What a place holds: some experts, and of each its part of the width; the last bias with the first part only."""
    own, part, parts = placement.experts_of(place), place % placement.expert_tensor, placement.expert_tensor
    gate_up_eFD, down_eDF, *biases = (parameter[own.start : own.stop] for parameter in parameters)

    def cut(gate_up: Tensor) -> Tensor:
        return gate_up.unflatten(1, (2, parts, -1))[:, :, part].flatten(1, 2)

    held = [cut(gate_up_eFD), down_eDF.chunk(parts, 2)[part]]
    return held + [cut(bias) for bias in biases[:1]] + ([] if part else biases[1:])


def mix(dispatchers: Sequence[Dispatcher], problems: Sequence[Problem], place: int) -> list[list[Tensor]]:
    """Outputs of our tokens, and gradients of x, the weights and our matrices, for each problem.

    All dispatch before the first combines, and their backward passes are one, so all layers are in flight at once.
    """
    flying = []
    for dispatcher, whole in zip(dispatchers, problems, strict=True):
        own = whole.of(place)
        parameters = parts_of(whole.parameters, place, whole.placement)
        leaves = [leaf.clone().requires_grad_() for leaf in (own.x_TD, own.weights_TK, *parameters)]
        sent = dispatcher.dispatch(leaves[0], Routing(leaves[1], own.experts_TK))
        flying.append((dispatcher, leaves, RULES[whole.family], *sent))
    outputs = []
    for dispatcher, leaves, rule, rows, metadata in flying:
        _, _, gate_up_eFD, down_eDF, *held = leaves
        biases = (held[0], held[1] if len(held) > 1 else None) if held else None
        rest = rows.counts_e, rows.weights_R, rows.index_R
        options = {"places_TK": rows.places_NK, "biases": biases, "rule": rule}
        outputs.append(dispatcher.combine(expert_ffn(read(rows), gate_up_eFD, down_eDF, *rest, **options), metadata))
    directions = [whole.of(place).direction_TD for whole in problems]
    gradients = iter(torch.autograd.grad(outputs, [leaf for one in flying for leaf in one[1]], directions))
    return [
        [y_TD.detach(), *(next(gradients) for _ in leaves)]
        for y_TD, (_, leaves, *_) in zip(outputs, flying, strict=True)
    ]


def read(rows: ExpertRows) -> Tensor:
    return rows.x_ND if rows.quantized is None else _Read.apply(rows.x_ND, rows.quantized)


class _Read(torch.autograd.Function):
    """What experts that multiply 8 bits do: they read those, and give the gradient to what carries it."""

    @staticmethod
    def forward(ctx: Any, carrier_ND: Tensor, quantized: Quantized) -> Tensor:
        return dequantize(quantized).to(carrier_ND.dtype)

    @staticmethod
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, None]:
        return gradient_ND, None


def compare(whole: Problem, got: Sequence[Sequence[Tensor]], tolerance: float = 1e-4) -> None:
    placement = whole.placement
    alone = replace(whole, placement=ExpertPlacement(experts=placement.experts))
    y_TD, dx_TD, dweights_TK, *parameters = mix([LocalDispatcher(placement.experts, REFERENCE)], [alone], 0)[0]
    is_kept_TK = whole.experts_TK < placement.experts
    found_TD, found_dx_TD, found_dweights_TK = (torch.cat([one[index] for one in got]) for index in range(3))
    assert_close(found_TD, y_TD, tolerance=tolerance)
    assert_close(found_dx_TD, dx_TD, tolerance=tolerance, what="gradient of x")
    assert_close(found_dweights_TK[is_kept_TK], dweights_TK[is_kept_TK], tolerance=tolerance)
    for place, one in enumerate(got):
        expected = parts_of(parameters, place, placement)
        assert_close(one[3:], expected, tolerance=tolerance, what=f"parameters of place {place}")


Flat = Literal["sent", "padded", "gathered, counted", "gathered, bounded", "gathered, worst case"]
ByNode = Literal["by node, sent", "by node, gathered", "by node, bounded", "by node, worst case"]
Gloo = Flat | ByNode
Way = Gloo | Literal["alone", "pushed", "by node, pushed"]
FLAT: tuple[Flat, ...] = get_args(Flat)
BY_NODE: tuple[ByNode, ...] = get_args(ByNode)
OVER_GLOO: tuple[Gloo, ...] = (*FLAT, *BY_NODE)

Results = list[list[Tensor]]
"""Of one rank, for each problem."""

Flights = Sequence[Sequence[Problem]]
"""Problems of a flight are layers and in flight at once; flights are steps, one after another."""


def solve(
    ranks: Pool,
    way: Way,
    flights: Flights,
    *,
    triton: bool = False,
    per_node: int = 0,
    wire_format: WireFormat = UNQUANTIZED,
) -> list[Results]:
    """What `mix` gives on every rank; `per_node` ranks are on a node, or half of them. All rows find room."""
    placement = flights[0][0].placement
    if way == "alone":
        alone = LocalDispatcher(placement.experts, TRITON if triton else REFERENCE, wire_format)
        return [_fly([alone] * len(flights[0]), flights, 0)]
    if way == "pushed":
        return run_ranks(_pushed, buffer_sizes(flights, nodes=1), flights, wire_format)
    if way == "by node, pushed":
        by_node = ranks.run(2, _node_of_pushed, flights, wire_format)
        return [results for node in by_node for results in node]
    return ranks.run(placement.places, _over_gloo, way, flights, triton, per_node, wire_format)


def _fly(dispatchers: Sequence[Dispatcher], flights: Flights, place: int) -> Results:
    """Flight after flight, with a dispatcher for each layer."""
    return [one for problems in flights for one in mix(dispatchers, problems, place)]


def with_room(placement: ExpertPlacement) -> RowCapacity:
    """A capacity for all rows of all ranks."""
    return RowCapacity(placement, float(placement.expert))


def _over_gloo(way: Gloo, flights: Flights, triton: bool, per_node: int, wire_format: WireFormat) -> Results:
    row_capacities = [with_room(flights[0][0].placement) for _ in flights[0]]
    dispatchers, place = dispatchers_on_a_rank(way, row_capacities, triton, per_node, wire_format)
    return _fly(dispatchers, flights, place)


def dispatchers_on_a_rank(
    way: Gloo,
    row_capacities: Sequence[RowCapacity],
    triton: bool = False,
    per_node: int = 0,
    wire_format: WireFormat = UNQUANTIZED,
) -> tuple[list[Dispatcher], int]:
    """A dispatcher for each capacity, and our place."""
    placement = row_capacities[0].placement
    grid = Grid(world=placement.places, expert=placement.expert, expert_tensor=placement.expert_tensor)
    axes = make_axes(grid, ranks_per_node=per_node or max(1, placement.places // 2))
    operators = TRITON if triton else REFERENCE
    return [_dispatcher(way, axes, operators, wire_format, one) for one in row_capacities], axes.expert.rank


def _dispatcher(
    way: Gloo, axes: Axes, operators: Operators, wire_format: WireFormat, row_capacity: RowCapacity
) -> Dispatcher:
    placement = row_capacity.placement
    if way == "padded":
        # a factor of E gives every expert room for all slots, so padding itself drops none
        return PaddedAllToAllDispatcher(placement, axes.expert, operators, wire_format, float(placement.experts))
    nodes = NodePlacement(placement, axes.expert_node, axes.expert_across)
    by_node = way.startswith("by node")
    held, axis = (placement.block(nodes.node.size), nodes.node) if by_node else (placement, axes.expert)
    is_counted = way in ("gathered, counted", "by node, sent", "by node, gathered")
    if way.endswith("sent"):
        flat: Dispatcher = AllToAllDispatcher(held, axis, operators, wire_format=wire_format)
    else:
        flat = AllGatherDispatcher(held, axis, operators, None if is_counted else row_capacity, wire_format=wire_format)
    if not by_node:
        return flat
    is_even = way == "by node, gathered"
    return HierarchicalDispatcher(nodes, flat, operators, is_counted, is_even, wire_format=wire_format)


def buffer_sizes(flights: Flights, nodes: int) -> BufferSizes:
    placement, problems = flights[0][0].placement, [one for problems in flights for one in problems]
    per_node = placement.places // nodes
    return BufferSizes(
        tokens=max(one.x_TD.shape[0] for one in problems) // per_node,
        top_k=max(one.experts_TK.shape[1] for one in problems) * placement.expert_tensor,
        row_bytes=D * problems[0].x_TD.element_size(),
        ranks=per_node,
    )


def in_large_tiles(transport: SymmetricTransport) -> SymmetricTransport:
    """The interpreter's time is that of the tiles, whatever is in them. Small ones are in tests/kernels."""
    launch = PersistentLaunch(block_rows=8, block_columns=64, warps=1, programs=3)
    return replace(transport, **dict.fromkeys(("push", "take", "take_all", "back", "sum", "sum_all"), launch))


def _pushed(buffers: SymmetricBuffers, flights: Flights, wire_format: WireFormat) -> Results:
    placement = flights[0][0].placement
    transport = in_large_tiles(transport_of(placement, buffers))
    make = partial(SymmetricDispatcher, placement, transport, wire_format=wire_format)
    return _fly([make(with_room(placement)) for _ in flights[0]], flights, buffers.peers.rank)


def _node_of_pushed(flights: Flights, wire_format: WireFormat) -> list[Results]:
    """One of two nodes: what each of its ranks gives.

    Both draw whose turn it is from one seed and make the same calls, so the same rank runs on both and meets itself in
    the collectives between them.
    """
    across = make_axes(Grid(world=2)).world
    return run_ranks(_by_node_pushed, buffer_sizes(flights, nodes=2), flights, across, wire_format)


def _by_node_pushed(buffers: SymmetricBuffers, flights: Flights, across: Axis, wire_format: WireFormat) -> Results:
    placement, rank, per_node = flights[0][0].placement, buffers.peers.rank, buffers.peers.size
    nodes = NodePlacement(placement, Axis(name="expert_node", ranks=tuple(range(per_node)), rank=rank), across)
    block = placement.block(per_node)
    transport = in_large_tiles(transport_of(block, buffers))
    inner = SymmetricDispatcher(block, transport, with_room(placement), wire_format=wire_format)
    outer = HierarchicalDispatcher(nodes, inner, REFERENCE, is_counted=False, wire_format=wire_format)
    return _fly([outer] * len(flights[0]), flights, across.rank * per_node + rank)


def plain_moe(experts: int, width: int, **changes: Any) -> Moe:
    """A mixture without shared expert and balance loss."""
    router = Router(scoring_func="softmax", norm_topk_prob=True, expert_bias=False)
    fields = {"experts": experts, "top_k": 2, "moe_intermediate_size": width, "shared_expert_intermediate_size": 0}
    balance = Balance(aux_loss="none", aux_loss_coef=0.0)
    return Moe.model_validate({**fields, "router": router, "balance": balance, **changes})


def make_layer(
    moe: Moe,
    layer_context: LayerContext,
    hidden: int,
    std: float = 0.3,
    *,
    activation: ExpertRule = SWIGLU,
    table_VK: Tensor | None = None,
) -> MoE:
    """The layer of a run, with the same initial values each time; a table of token ids may choose the experts."""
    dispatcher, row_capacity = make_dispatcher(moe, layer_context)
    rule = expert_rule(moe, activation)
    experts = GroupedExperts(moe.experts, hidden, moe.moe_intermediate_size, layer_context, rule=rule, bias=moe.bias)
    width = moe.shared_expert_intermediate_size
    shared = FeedForward(hidden, width, layer_context, shared_rule(moe, activation)) if width else None
    hashed_ids = 0 if table_VK is None else len(table_VK)
    router = TopKRouter(moe, hidden, 0, layer_context, hashed_ids)
    if table_VK is not None:
        router.table_VK = table_VK
    layer = MoE(router, dispatcher, experts, shared, layer_context, row_capacity)
    torch.manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=std)
    return layer
