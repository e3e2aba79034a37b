"""Which dispatcher a layer gets: what the run asks for, or with `auto` the best that can run here.

all experts here        local, or padded if every expert is given its capacity
padded                  all-to-all of the capacity
symmetric               where memory is mapped (`Kit.buffers`)
all-to-all, all-gather  as asked; auto gathers where the host must not read how many rows to send
"""

import math
from importlib import import_module

from penstock.config.dispatch_rules import COUNTS_STAY
from penstock.config.model import Moe
from penstock.layout.experts import ExpertPlacement
from penstock.moe.dispatch.all_gather import AllGatherDispatcher
from penstock.moe.dispatch.all_to_all import AllToAllDispatcher, PaddedAllToAllDispatcher
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.local import LocalDispatcher
from penstock.moe.dispatch.room import Room
from penstock.parallel.kit import Kit


def make_dispatcher(moe: Moe, kit: Kit) -> tuple[Dispatcher, Room | None]:
    """The dispatcher of one layer, and what it asks for its number of rows.

    Args:
        moe: the layer.
        kit: kernels, ranks, the run's choice, and the memory that GPUs of the node share if there is any.
    """
    grid, axis, operators = kit.axes.grid, kit.axes.expert, kit.operators
    placement = ExpertPlacement(experts=moe.experts, expert=grid.expert, expert_tensor=grid.expert_tensor)
    if moe.balance.pad_to_capacity:
        # Ranks that share rows share their capacity too, and all of it may fall to one of them.
        factor = moe.balance.capacity_factor * kit.axes.sequence.size
        return PaddedAllToAllDispatcher(placement, axis, factor, operators), None
    if axis.size == 1:
        return LocalDispatcher(moe.experts, operators), None
    room = _room(placement, kit)
    if kit.buffers is not None:
        # By name, because it needs Triton, which may be absent.
        symmetric = import_module("penstock.moe.dispatch.symmetric")
        links = symmetric.links_of(placement, kit.buffers)
        return symmetric.SymmetricDispatcher(placement, links, operators, room), room
    if kit.dispatch.method == "all-gather" or (kit.dispatch.method == "auto" and kit.dispatch.sync_free >= COUNTS_STAY):
        return AllGatherDispatcher(placement, axis, operators, room), room
    return AllToAllDispatcher(placement, axis, operators), None


def _room(placement: ExpertPlacement, kit: Kit) -> Room | None:
    """None where the host reads how many rows there are."""
    if kit.dispatch.sync_free < COUNTS_STAY:
        return None
    return Room(placement, kit.dispatch.bound if kit.dispatch.sync_free == COUNTS_STAY else math.inf)
