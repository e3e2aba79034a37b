"""Which dispatcher a layer gets: what the run asks for, or with `auto` the best that can run here.

all experts here        local, or padded if every expert is given its capacity
padded                  all-to-all of the capacity
deep-ep                 as asked
hierarchical            as asked, if there are several nodes; with auto, if several ranks of each share the experts
symmetric               where memory is mapped (`LayerContext.buffers`)
all-to-all, all-gather  as asked; else gathers where the host must not read how many rows to send

The last two rows also say who spreads tokens inside a node for `hierarchical`.
"""

import math
from importlib import import_module

from penstock.config.dispatch_rules import COUNTS_STAY
from penstock.config.model import Moe
from penstock.layout.experts import ExpertPlacement
from penstock.moe.dispatch.all_gather import AllGatherDispatcher
from penstock.moe.dispatch.all_to_all import AllToAllDispatcher, PaddedAllToAllDispatcher
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.deep_ep import DeepEpDispatcher
from penstock.moe.dispatch.hierarchical import HierarchicalDispatcher, Nodes
from penstock.moe.dispatch.local import LocalDispatcher
from penstock.moe.dispatch.payload import wire_format_of
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.parallel.axes import Axis
from penstock.parallel.dispatch_buffers import crosses_nodes
from penstock.parallel.layer_context import LayerContext


def make_dispatcher(
    moe: Moe, layer_context: LayerContext, *, is_shelved: bool = False
) -> tuple[Dispatcher, RowCapacity | None]:
    """The dispatcher of one layer, and what it asks for its number of rows.

    Args:
        moe: the layer.
        layer_context: kernels, ranks, the run's choice, and the memory that GPUs of the node share if there is any.
        is_shelved: what the experts keep stands with that of other layers, see `is_shelved`.
    """
    grid, axis, operators = layer_context.axes.grid, layer_context.axes.expert, layer_context.operators
    placement = ExpertPlacement(experts=moe.experts, expert=grid.expert, expert_tensor=grid.expert_tensor)
    wire_format = wire_format_of(layer_context.float8)
    if moe.balance.pad_to_capacity:
        # Ranks that share rows share their capacity too, and all of it may fall to one of them.
        factor = moe.balance.capacity_factor * layer_context.axes.sequence.size
        return PaddedAllToAllDispatcher(placement, axis, factor, operators, wire_format), None
    if axis.size == 1:
        return LocalDispatcher(moe.experts, operators, wire_format), None
    if layer_context.deep_ep is not None:
        return DeepEpDispatcher(placement, operators, layer_context.deep_ep, wire_format), None
    room = _room(placement, layer_context, is_shelved=is_shelved)
    if crosses_nodes(layer_context.dispatch.method, placement, layer_context.axes):
        nodes = Nodes(placement, layer_context.axes.expert_node, layer_context.axes.expert_across)
        inner = _inside(placement.block(nodes.node.size), nodes.node, layer_context, room)
        is_even, is_counted = not isinstance(inner, AllToAllDispatcher), room is None
        return HierarchicalDispatcher(nodes, inner, operators, is_counted, is_even, wire_format=wire_format), room
    return _inside(placement, axis, layer_context, room), room


def _inside(
    placement: ExpertPlacement, axis: Axis, layer_context: LayerContext, room: RowCapacity | None
) -> Dispatcher:
    """Among ranks none of which is special."""
    method, counts_stay = layer_context.dispatch.method, layer_context.dispatch.sync_free >= COUNTS_STAY
    wire_format = wire_format_of(layer_context.float8)
    if layer_context.buffers is not None:
        # By name, because it needs Triton, which may be absent.
        symmetric = import_module("penstock.moe.dispatch.symmetric")
        links = symmetric.links_of(
            placement, layer_context.buffers, layer_context.dispatch.num_sms, by_engines=layer_context.dispatch.engines
        )
        is_filled = layer_context.transfers is None
        mapped: Dispatcher = symmetric.SymmetricDispatcher(
            placement, links, room, wire_format=wire_format, is_filled=is_filled
        )
        return mapped
    if method == "all-gather" or (method != "all-to-all" and counts_stay):
        return AllGatherDispatcher(placement, axis, layer_context.operators, room, wire_format=wire_format)
    return AllToAllDispatcher(placement, axis, layer_context.operators, wire_format=wire_format)


def is_shelved(moe: Moe, layer_context: LayerContext) -> bool:
    """Whether the experts of a layer keep their rows together with those of other layers.

    So it is where only the device knows how many there are, and our own kernels compute with them; but not if what a
    layer keeps goes to the host, one layer after another, nor in 8 bits with biases, which passes of their own add.
    """
    if layer_context.offload.kinds & {"moe", "layer"}:
        return False
    is_bounded = (
        layer_context.dispatch.sync_free == COUNTS_STAY
        and layer_context.axes.expert.size > 1
        and not moe.balance.pad_to_capacity
    )
    if layer_context.float8.experts is None:
        keeps_rows = layer_context.operators.keeps_rows
    else:
        keeps_rows = layer_context.float8.operators.keeps_rows and not moe.bias
    return is_bounded and layer_context.deep_ep is None and keeps_rows


def _room(placement: ExpertPlacement, layer_context: LayerContext, *, is_shelved: bool) -> RowCapacity | None:
    """None where the host reads how many rows there are. Of all ranks together, also if nodes come first."""
    dispatch = layer_context.dispatch
    if dispatch.sync_free < COUNTS_STAY:
        return None
    if dispatch.sync_free > COUNTS_STAY:
        return RowCapacity(placement, math.inf)
    return RowCapacity(
        placement,
        max(dispatch.row_capacity_factor, dispatch.layer_capacity_factor)
        if is_shelved
        else dispatch.row_capacity_factor,
    )
