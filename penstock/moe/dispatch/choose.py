"""Which dispatcher a layer gets: what the run asks for, or with `auto` the best that can run here.

all experts here        local, or padded if every expert is given its capacity
padded                  all-to-all of the capacity
deep-ep                 as asked
hierarchical            as asked, if there are several nodes; with auto, if several ranks of each share the experts
symmetric               where memory is mapped (`Kit.buffers`)
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
from penstock.moe.dispatch.cargo import packing_of
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.deep_ep import DeepEpDispatcher
from penstock.moe.dispatch.hierarchical import HierarchicalDispatcher, Nodes
from penstock.moe.dispatch.local import LocalDispatcher
from penstock.moe.dispatch.room import Room
from penstock.parallel.axes import Axis
from penstock.parallel.kit import Kit
from penstock.parallel.reach import crosses_nodes


def make_dispatcher(moe: Moe, kit: Kit, *, is_shelved: bool = False) -> tuple[Dispatcher, Room | None]:
    """The dispatcher of one layer, and what it asks for its number of rows.

    Args:
        moe: the layer.
        kit: kernels, ranks, the run's choice, and the memory that GPUs of the node share if there is any.
        is_shelved: what the experts keep stands with that of other layers, see `is_shelved`.
    """
    grid, axis, operators = kit.axes.grid, kit.axes.expert, kit.operators
    placement = ExpertPlacement(experts=moe.experts, expert=grid.expert, expert_tensor=grid.expert_tensor)
    packing = packing_of(kit.float8)
    if moe.balance.pad_to_capacity:
        # Ranks that share rows share their capacity too, and all of it may fall to one of them.
        factor = moe.balance.capacity_factor * kit.axes.sequence.size
        return PaddedAllToAllDispatcher(placement, axis, factor, operators, packing), None
    if axis.size == 1:
        return LocalDispatcher(moe.experts, operators, packing), None
    if kit.deep_ep is not None:
        return DeepEpDispatcher(placement, operators, kit.deep_ep, packing), None
    room = _room(placement, kit, is_shelved=is_shelved)
    if crosses_nodes(kit.dispatch.method, placement, kit.axes):
        nodes = Nodes(placement, kit.axes.expert_node, kit.axes.expert_across)
        inner = _inside(placement.block(nodes.node.size), nodes.node, kit, room)
        is_even, is_counted = not isinstance(inner, AllToAllDispatcher), room is None
        return HierarchicalDispatcher(nodes, inner, operators, is_counted, is_even, packing=packing), room
    return _inside(placement, axis, kit, room), room


def _inside(placement: ExpertPlacement, axis: Axis, kit: Kit, room: Room | None) -> Dispatcher:
    """Among ranks none of which is special."""
    method, counts_stay = kit.dispatch.method, kit.dispatch.sync_free >= COUNTS_STAY
    packing = packing_of(kit.float8)
    if kit.buffers is not None:
        # By name, because it needs Triton, which may be absent.
        symmetric = import_module("penstock.moe.dispatch.symmetric")
        links = symmetric.links_of(placement, kit.buffers, kit.dispatch.sms, by_engines=kit.dispatch.engines)
        is_filled = kit.transfers is None
        mapped: Dispatcher = symmetric.SymmetricDispatcher(placement, links, room, packing=packing, is_filled=is_filled)
        return mapped
    if method == "all-gather" or (method != "all-to-all" and counts_stay):
        return AllGatherDispatcher(placement, axis, kit.operators, room, packing=packing)
    return AllToAllDispatcher(placement, axis, kit.operators, packing=packing)


def is_shelved(moe: Moe, kit: Kit) -> bool:
    """Whether the experts of a layer keep their rows together with those of other layers.

    So it is where only the device knows how many there are, and our own kernels compute with them; but not if what a
    layer keeps goes to the host, one layer after another, nor in 8 bits with biases, which passes of their own add.
    """
    if kit.offload.kinds & {"moe", "layer"}:
        return False
    is_bounded = kit.dispatch.sync_free == COUNTS_STAY and kit.axes.expert.size > 1 and not moe.balance.pad_to_capacity
    if kit.float8.experts is None:
        keeps_rows = kit.operators.keeps_rows
    else:
        keeps_rows = kit.float8.operators.keeps_rows and not moe.bias
    return is_bounded and kit.deep_ep is None and keeps_rows


def _room(placement: ExpertPlacement, kit: Kit, *, is_shelved: bool) -> Room | None:
    """None where the host reads how many rows there are. Of all ranks together, also if nodes come first."""
    dispatch = kit.dispatch
    if dispatch.sync_free < COUNTS_STAY:
        return None
    if dispatch.sync_free > COUNTS_STAY:
        return Room(placement, math.inf)
    return Room(placement, max(dispatch.bound, dispatch.layer_bound) if is_shelved else dispatch.bound)
