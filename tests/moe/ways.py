"""Every way to experts and back, as tests try it on simulated or real ranks.

way                     ranks                       nodes
alone                   this process
sent ... worst case     a process each, over gloo
by node, ...            a process each, over gloo   half of the ranks are on each
pushed                  a thread each, of which one runs at a time (tests/parallel/symmetric_ranks)
by node, pushed         threads of two processes    a process is a node
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from torch import Tensor

from penstock.kernels.operators import REFERENCE, Operators
from penstock.kernels.symmetric import PersistentLaunch
from penstock.kernels.triton_operators import TRITON
from penstock.layout.experts import ExpertPlacement
from penstock.layout.grid import Grid
from penstock.moe.dispatch.all_gather import AllGatherDispatcher
from penstock.moe.dispatch.all_to_all import AllToAllDispatcher, PaddedAllToAllDispatcher
from penstock.moe.dispatch.contract import Dispatcher, LocalDispatcher
from penstock.moe.dispatch.hierarchical import HierarchicalDispatcher, NodePlacement
from penstock.moe.dispatch.payload import UNQUANTIZED, WireFormat
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.moe.dispatch.symmetric import SymmetricDispatcher, SymmetricTransport, transport_of
from penstock.parallel.axes import Axes, Axis, make_axes
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers
from tests.distributed.pool import Pool
from tests.moe.mixture import D, Problem, mix
from tests.parallel.symmetric_ranks import run_ranks

Gloo = Literal[
    "sent",
    "padded",
    "gathered, counted",
    "gathered, bounded",
    "gathered, worst case",
    "by node, sent",
    "by node, gathered",
    "by node, bounded",
    "by node, worst case",
]
Way = Gloo | Literal["alone", "pushed", "by node, pushed"]
OVER_GLOO: tuple[Gloo, ...] = get_args(Gloo)

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
    bound: float = 0,
    per_node: int = 0,
    wire_format: WireFormat = UNQUANTIZED,
) -> list[Results]:
    """What `mix` gives on every rank.

    Args:
        triton: run on our kernels.
        bound: of the room, where there is one; 0 has room for all rows on one rank.
        per_node: ranks of a node; 0 is half of them.
    """
    placement = flights[0][0].placement
    bound = bound or float(placement.expert)
    if way == "alone":
        alone = LocalDispatcher(placement.experts, TRITON if triton else REFERENCE, wire_format)
        dispatchers = [alone for _ in flights[0]]
        return [[one for problems in flights for one in mix(dispatchers, problems, 0)]]
    if way == "pushed":
        return run_ranks(_pushed, _sizes(flights, nodes=1), flights, bound, wire_format)
    if way == "by node, pushed":
        by_node = ranks.run(2, _node_of_pushed, flights, bound, wire_format)
        return [results for node in by_node for results in node]
    arguments = (way, flights, triton, bound, per_node, wire_format)
    return [results for results, _ in ranks.run(placement.places, over_gloo, *arguments)]


def over_gloo(
    way: Gloo,
    flights: Flights,
    triton: bool,
    bound: float,
    per_node: int = 0,
    wire_format: WireFormat = UNQUANTIZED,
) -> tuple[Results, list[int]]:
    """On a rank: what `mix` gives, and rows of each layer that found no room."""
    placement = flights[0][0].placement
    row_capacities = [RowCapacity(placement, bound) for _ in flights[0]]
    dispatchers, place = dispatchers_on_a_rank(way, placement, row_capacities, triton, per_node, wire_format)
    results = [one for problems in flights for one in mix(dispatchers, problems, place)]
    return results, [int(row_capacity.left_out) for row_capacity in row_capacities]


def dispatchers_on_a_rank(
    way: Gloo,
    placement: ExpertPlacement,
    row_capacities: Sequence[RowCapacity],
    triton: bool,
    per_node: int = 0,
    wire_format: WireFormat = UNQUANTIZED,
) -> tuple[list[Dispatcher], int]:
    """A dispatcher for each room, and our place."""
    grid = Grid(world=placement.places, expert=placement.expert, expert_tensor=placement.expert_tensor)
    axes = make_axes(grid, ranks_per_node=per_node or max(1, placement.places // 2))
    operators: Operators = TRITON if triton else REFERENCE
    return [
        _dispatcher(way, placement, axes, operators, row_capacity, wire_format) for row_capacity in row_capacities
    ], axes.expert.rank


def _dispatcher(
    way: Gloo,
    placement: ExpertPlacement,
    axes: Axes,
    operators: Operators,
    row_capacity: RowCapacity,
    wire_format: WireFormat,
) -> Dispatcher:
    if way == "padded":
        # a factor of E gives every expert room for all slots, so padding itself drops none
        return PaddedAllToAllDispatcher(placement, axes.expert, float(placement.experts), operators, wire_format)
    if way == "sent":
        return AllToAllDispatcher(placement, axes.expert, operators, wire_format=wire_format)
    if way.startswith("gathered"):
        asked = None if way == "gathered, counted" else row_capacity
        return AllGatherDispatcher(placement, axes.expert, operators, asked, wire_format=wire_format)
    nodes = NodePlacement(placement, axes.expert_node, axes.expert_across)
    block = placement.block(nodes.node.size)
    if way == "by node, sent":
        inner: Dispatcher = AllToAllDispatcher(block, nodes.node, operators, wire_format=wire_format)
        return HierarchicalDispatcher(nodes, inner, operators, is_counted=True, wire_format=wire_format)
    if way == "by node, gathered":
        inner = AllGatherDispatcher(block, nodes.node, operators, wire_format=wire_format)
        return HierarchicalDispatcher(nodes, inner, operators, is_counted=True, is_even=True, wire_format=wire_format)
    inner = AllGatherDispatcher(block, nodes.node, operators, row_capacity, wire_format=wire_format)
    return HierarchicalDispatcher(nodes, inner, operators, is_counted=False, wire_format=wire_format)


def _sizes(flights: Flights, nodes: int) -> BufferSizes:
    """Of buffers that tokens of all nodes may fill."""
    placement, problems = flights[0][0].placement, [one for problems in flights for one in problems]
    per_node = placement.places // nodes
    return BufferSizes(
        tokens=max(one.x_TD.shape[0] for one in problems) // per_node,
        top_k=max(one.experts_TK.shape[1] for one in problems) * placement.expert_tensor,
        row_bytes=D * problems[0].x_TD.element_size(),
        ranks=per_node,
    )


def _transport(placement: ExpertPlacement, buffers: SymmetricBuffers) -> SymmetricTransport:
    """In large tiles: the interpreter's time is that of the tiles, whatever is in them."""
    launch = PersistentLaunch(block_rows=8, block_columns=64, warps=1, programs=3)
    return replace(transport_of(placement, buffers), push=launch, take=launch, back=launch, sum=launch)


def _pushed(buffers: SymmetricBuffers, flights: Flights, bound: float, wire_format: WireFormat) -> Results:
    placement = flights[0][0].placement
    transport, row_capacities = _transport(placement, buffers), [RowCapacity(placement, bound) for _ in flights[0]]
    dispatchers = [
        SymmetricDispatcher(placement, transport, row_capacity=row_capacity, wire_format=wire_format)
        for row_capacity in row_capacities
    ]
    return [one for problems in flights for one in mix(dispatchers, problems, buffers.peers.rank)]


def _node_of_pushed(flights: Flights, bound: float, wire_format: WireFormat) -> list[Results]:
    """One of two nodes: what each of its ranks gives.

    Both draw whose turn it is from one seed and make the same calls, so the same rank runs on both and meets itself in
    the collectives between them.
    """
    across = make_axes(Grid(world=2)).world
    return run_ranks(_by_node_pushed, _sizes(flights, nodes=2), flights, bound, across, wire_format)


def _by_node_pushed(
    buffers: SymmetricBuffers, flights: Flights, bound: float, across: Axis, wire_format: WireFormat
) -> Results:
    placement, rank, per_node = flights[0][0].placement, buffers.peers.rank, buffers.peers.size
    nodes = NodePlacement(placement, Axis(name="expert_node", ranks=tuple(range(per_node)), rank=rank), across)
    block = placement.block(per_node)
    inner = SymmetricDispatcher(
        block, _transport(block, buffers), row_capacity=RowCapacity(placement, bound), wire_format=wire_format
    )
    outer = HierarchicalDispatcher(nodes, inner, REFERENCE, is_counted=False, wire_format=wire_format)
    dispatchers = [outer for _ in flights[0]]
    place = across.rank * per_node + rank
    return [one for problems in flights for one in mix(dispatchers, problems, place)]
