"""Balanced dispatch: no rank computes more rows than a bound, because a few experts have replicas on ranks with room.

    dispatch   gather how many slots of each rank chose each expert; every rank makes the same plan from that
               begin to fetch the weights of replicas
               name the physical expert of each slot: its home, or a replica (penstock/kernels/replica_plan.py)
               dispatch to physical experts by any other dispatcher
    experts    weights of replicas come beside the rank's own; their gradients go home (expert_parts.py)
    combine    that of the other dispatcher; its backward pass begins with the fetch for that of the experts

The other dispatcher sees experts x groups of ranks with per_group + slots experts each, so nothing in it knows of
replicas. The plan is kept for backward in the rows of the experts, and for a recomputed region by the region.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from penstock.config.dispatcher import DispatcherName
from penstock.kernels.expert_parts import ReplicaSlots
from penstock.kernels.operators import Operators
from penstock.kernels.replica_plan import PlanFact, ReplicaPlan, ReplicaRule
from penstock.moe.balance import Routing, StepMeter
from penstock.moe.dispatch.contract import Dispatcher, DispatchMetadata, DispatchPayload, ExpertRows
from penstock.parallel.recompute import is_recomputing, remembered
from penstock.parallel.replicas import in_backward

CountsOf = Callable[[Tensor], Tensor]
"""The int32 counts of this rank to those of all, W x E. All ranks of the axis call it."""

SlotsOf = Callable[[ReplicaPlan], ReplicaSlots | None]
"""The slots of a plan; None if the plan has no replica and the host knows that."""


class ReplicaMeter(StepMeter):
    """Facts of a layer's plans."""

    facts: Tensor  # int64 by `PlanFact`: sums over the passes, of SLOTS_NEEDED the largest; `plan_replicas` adds to it

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("facts", torch.zeros(len(PlanFact), dtype=torch.int64), persistent=False)


@dataclass(frozen=True)
class BalancedMetadata(DispatchMetadata):
    """Metadata of a balanced dispatch."""

    inner: DispatchMetadata  # of the other dispatcher
    slots: ReplicaSlots | None  # None if the plan has no replicas and the host knows it


def no_resident_weights() -> tuple[Tensor, ...]:
    """For experts whose parameters are there only while their network runs: a fetch waits for that."""
    return ()


@dataclass(frozen=True)
class BalancedDispatcher:
    """Sends slots to home experts and replicas by `inner`, whose placement is that of physical experts."""

    rule: ReplicaRule
    rank: int
    inner: Dispatcher
    operators: Operators
    counts_of: CountsOf
    slots_of: SlotsOf
    meter: ReplicaMeter
    # Parameters of own experts, as they are fetched.
    resident_weights: Callable[[], tuple[Tensor, ...]] = no_resident_weights

    @property
    def name(self) -> DispatcherName:
        """That of `inner`, by which rows travel."""
        return self.inner.name

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """See `Dispatcher.dispatch`. All ranks of the axis call it."""
        order = self.operators.order_rows(routing.experts_TK, self.rule.experts)
        plan = ReplicaPlan(*remembered(lambda: self._plan(order.counts_E)))
        slots = self.slots_of(plan)
        self._begin(slots)
        physical_TK = self.operators.assign_replicas(routing.experts_TK, order, plan, self.rule)
        rows, inner = self.inner.dispatch(x_TD, Routing(routing.weights_TK, physical_TK))
        metadata = BalancedMetadata(inner.order, inner, slots)
        if slots is None:
            return replace(rows, counts_e=rows.counts_e[: self.rule.per_group]), metadata
        return replace(rows, replicas=slots), metadata

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        """See `Dispatcher.combine`. All ranks of the axis call it."""
        assert isinstance(metadata, BalancedMetadata), f"not a metadata of this dispatcher: {metadata}"
        return in_backward(self.inner.combine(y_RD, metadata.inner), partial(self._begin, metadata.slots))

    def _begin(self, slots: ReplicaSlots | None) -> None:
        if slots is not None and (weights := self.resident_weights()):
            slots.begin(*weights)

    def _plan(self, counts_E: Tensor) -> ReplicaPlan:
        passes = self.meter.facts if torch.is_grad_enabled() and not is_recomputing() else None
        return self.operators.plan_replicas(self.counts_of(counts_E), self.rule, self.rank, passes)
