"""Makes the dispatcher of a layer, as `penstock.config.dispatcher.choose_dispatcher` decides it."""

import math
from dataclasses import replace
from functools import partial

from penstock.config.dispatcher import COUNTS_STAY, DispatcherName, DispatchFacts, choose_dispatcher
from penstock.config.model import Moe
from penstock.config.schema import Problem
from penstock.config.sync_free import bound_factor
from penstock.kernels.replica_plan import ReplicaRule
from penstock.layout.grid import ExpertPlacement
from penstock.moe.dispatch.balanced import BalancedDispatcher, CountsOf, ReplicaMeter, SlotsOf
from penstock.moe.dispatch.collective import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    HierarchicalDispatcher,
    NodePlacement,
    PaddedAllToAllDispatcher,
)
from penstock.moe.dispatch.contract import Dispatcher, LocalDispatcher, wire_format_of
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.moe.dispatch.symmetric import SymmetricDispatcher, transport_of
from penstock.parallel.axes import Axis
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.replicas import (
    MappedSlots,
    exchanged_counts,
    exchanged_slots,
    refuse,
    replica_rule,
)


def make_dispatcher(
    moe: Moe, layer_context: LayerContext, *, in_arena: bool = False
) -> tuple[Dispatcher, RowCapacity | None]:
    """The dispatcher of one layer, and the limit of its row count if it has one; `in_arena` as `shares_arena` says.

    Raises a DeviceError if hierarchical dispatch was asked for and the nodes hold unequal parts of the experts.
    """
    axes, dispatch, operators = layer_context.axes, layer_context.dispatch, layer_context.operators
    grid, axis, wire_format = axes.grid, axes.expert, wire_format_of(layer_context.float8)
    placement = ExpertPlacement(experts=moe.experts, expert=grid.expert, expert_tensor=grid.expert_tensor)
    choice = choose_dispatcher(
        DispatchFacts(
            method=dispatch.method,
            sync_free=dispatch.sync_free_stage,
            pads=moe.balance.pad_to_capacity,
            ranks=axis.size,
            node_ranks=axes.expert_node.size,
            expert_tensor=grid.expert_tensor,
            obstacle="" if layer_context.buffers is not None else "no memory is mapped",
        )
    )
    if dispatch.method == "hierarchical":
        refuse(choice)
    if choice.name == "padded":
        factor, sharing = moe.balance.capacity_factor, axes.sequence.size
        return PaddedAllToAllDispatcher(placement, axis, operators, wire_format, factor, sharing), None
    if choice.name == "local":
        return LocalDispatcher(moe.experts, operators, wire_format), None
    rule = replica_rule(moe.experts, grid.expert, dispatch)
    if rule is not None:
        if choice.inner is not None:
            refuse(replace(choice, refusal=_across_nodes(axis.size, axes.expert_node.size)))
        placement = replace(placement, experts=rule.groups * rule.places)  # physical experts
    row_capacity = _row_capacity(placement, layer_context, rule, in_arena=in_arena)
    if choice.inner is None:
        flat = _flat(choice.name, placement, axis, layer_context, row_capacity)
        if rule is None:
            return flat, row_capacity
        return _balanced(rule, axis, flat, layer_context), row_capacity
    nodes = NodePlacement(placement, axes.expert_node, axes.expert_across)
    inner = _flat(choice.inner, placement.block(nodes.node.size), nodes.node, layer_context, row_capacity)
    # All-gather and symmetric dispatch need equally many tokens on each rank of the node.
    is_even, is_counted = not isinstance(inner, AllToAllDispatcher), row_capacity is None
    return HierarchicalDispatcher(nodes, inner, operators, is_counted, is_even, wire_format=wire_format), row_capacity


def _balanced(rule: ReplicaRule, axis: Axis, flat: Dispatcher, layer_context: LayerContext) -> BalancedDispatcher:
    replicas, meter = layer_context.replicas, ReplicaMeter()
    counts_of: CountsOf
    slots_of: SlotsOf
    if replicas is None:
        counts_of, slots_of = partial(exchanged_counts, axis=axis), partial(exchanged_slots, rule=rule, axis=axis)
    else:
        counts_of, slots_of = replicas.buffers.gather, partial(MappedSlots, replicas)
    return BalancedDispatcher(rule, axis.rank, flat, layer_context.operators, counts_of, slots_of, meter)


def _flat(
    name: DispatcherName,
    placement: ExpertPlacement,
    axis: Axis,
    layer_context: LayerContext,
    row_capacity: RowCapacity | None,
) -> Dispatcher:
    wire_format = wire_format_of(layer_context.float8)
    if name == "symmetric":
        dispatch, buffers = layer_context.dispatch, layer_context.buffers
        assert buffers is not None, "the GPUs of the node map each other's memory"
        transport = transport_of(placement, buffers, dispatch.num_sms, by_engines=dispatch.engines)
        return SymmetricDispatcher(placement, transport, row_capacity, wire_format=wire_format)
    if name == "all-gather":
        return AllGatherDispatcher(placement, axis, layer_context.operators, row_capacity, wire_format=wire_format)
    return AllToAllDispatcher(placement, axis, layer_context.operators, wire_format=wire_format)


def shares_arena(moe: Moe, layer_context: LayerContext) -> bool:
    """Whether the experts of a layer save their pre-activations in one buffer with those of other layers.

    They do if only the device knows the row counts and our own kernels compute; not if the layer is offloaded to the
    host, and not in 8 bits with biases, which a separate pass adds.
    """
    if layer_context.offload.kinds & {"moe", "layer"}:
        return False
    is_bounded = (
        layer_context.dispatch.sync_free_stage == COUNTS_STAY
        and layer_context.axes.expert.size > 1
        and not moe.balance.pad_to_capacity
    )
    if layer_context.float8.experts is None:
        saves_rows = layer_context.operators.saves_rows
    else:
        saves_rows = layer_context.float8.operators.saves_rows and not moe.bias
    return is_bounded and saves_rows


def _across_nodes(ranks: int, per_node: int) -> Problem:
    return Problem(
        "dispatch.balance",
        "copies experts between GPUs of one node; between nodes that takes longer than the rows that it saves",
        got=f"experts shared by {ranks} ranks, {per_node} on a node",
        fix="set parallel.expert to ranks of one node, or dispatch.balance=none",
    )


def _row_capacity(
    placement: ExpertPlacement, layer_context: LayerContext, rule: ReplicaRule | None, *, in_arena: bool
) -> RowCapacity | None:
    """None if the host reads row counts. Counts the rows of all ranks, also with hierarchical dispatch."""
    dispatch = layer_context.dispatch
    if dispatch.sync_free_stage < COUNTS_STAY:
        return None
    if rule is not None:  # the bound always holds if a group can hold replicas of all experts of another one
        is_sure = rule.slots >= rule.per_group
        return RowCapacity(
            placement, bound_factor(dispatch) if dispatch.sync_free_stage == COUNTS_STAY or is_sure else math.inf
        )
    factor = dispatch.row_capacity_factor
    if in_arena:  # which bounds the sum over layers, so that a single one may have more
        factor = max(factor, dispatch.layer_capacity_factor)
    return RowCapacity(placement, factor if dispatch.sync_free_stage == COUNTS_STAY else math.inf)
