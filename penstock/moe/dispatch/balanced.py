"""Balanced dispatch: no rank computes more rows than a bound, because a few experts have replicas on ranks with room.

    dispatch   gather how many slots of each rank chose each expert; every rank makes the same plan from that
               name the physical expert of each slot: its home, or a replica (penstock/kernels/replica_plan.py)
               dispatch to physical experts by any other dispatcher
    experts    weights of replicas come beside the rank's own; their gradients go home (replica_slots.py)
    combine    that of the other dispatcher

The other dispatcher sees experts x groups of ranks with per_group + slots experts each, so nothing in it knows of
replicas. The plan is kept for backward in the rows of the experts, and for a recomputed region by the region.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor, nn

from penstock.config.dispatcher import DispatcherName
from penstock.kernels.operators import Operators
from penstock.kernels.replica_plan import PlanFact, ReplicaPlan, ReplicaRule
from penstock.kernels.replica_slots import ReplicaSlots
from penstock.moe.dispatch.contract import Dispatcher, DispatchMetadata, ExpertRows
from penstock.moe.dispatch.payload import DispatchPayload
from penstock.moe.routing import Routing
from penstock.parallel.recompute import is_recomputing, remembered

CountsOf = Callable[[Tensor], Tensor]
"""The int32 counts of this rank to those of all, W x E. All ranks of the axis call it."""

SlotsOf = Callable[[ReplicaPlan], ReplicaSlots | None]
"""The slots of a plan; None if the plan has no replica and the host knows that."""


class PlanSums(IntEnum):
    """Places in `ReplicaMeter.sums`."""

    ROWS = 0  # of all groups
    BEFORE = 1  # rows of the fullest group without replicas, times groups
    AFTER = 2  # the same with replicas
    REPLICAS = 3
    PASSES = 4


class ReplicaMeter(nn.Module):
    """Facts of a layer's plans since the last reset; on the device, read once a step."""

    facts: Tensor  # int64, sums over the passes by `PlanFact`
    slots_needed: Tensor  # int64 scalar, the most of a pass

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.register_buffer("facts", torch.zeros(len(PlanFact), dtype=torch.int64), persistent=False)
        self.register_buffer("slots_needed", torch.zeros((), dtype=torch.int64), persistent=False)

    @property
    def sums(self) -> Tensor:
        """Int64 [5] by `PlanSums`, for once a step."""
        rows, home, fullest, replicas, plans = (
            self.facts[fact]
            for fact in (PlanFact.ROWS, PlanFact.FULLEST_HOME, PlanFact.FULLEST, PlanFact.REPLICAS, PlanFact.PLANS)
        )
        return torch.stack((rows, home * self.groups, fullest * self.groups, replicas, plans))

    @torch.no_grad()
    def count(self, facts: Tensor) -> None:
        """Add one plan, in two kernels: each layer does it in each pass."""
        self.facts += facts
        torch.maximum(self.slots_needed, facts[PlanFact.SLOTS_NEEDED], out=self.slots_needed)

    def reset(self) -> None:
        """Start a new step."""
        self.facts.zero_()
        self.slots_needed.zero_()


def replica_meters(modules: Iterable[nn.Module]) -> list[ReplicaMeter]:
    """The meters of all layers."""
    return [module for model in modules for module in model.modules() if isinstance(module, ReplicaMeter)]


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

    @property
    def name(self) -> DispatcherName:
        """That of `inner`, by which rows travel."""
        return self.inner.name

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """See `Dispatcher.dispatch`. All ranks of the axis call it."""
        order = self.operators.order_rows(routing.experts_TK, self.rule.experts)
        plan = ReplicaPlan(*remembered(lambda: self._plan(order.counts_E)))
        physical_TK = self.operators.assign_replicas(routing.experts_TK, order, plan, self.rule)
        rows, metadata = self.inner.dispatch(x_TD, Routing(routing.weights_TK, physical_TK))
        slots = self.slots_of(plan)
        if slots is None:
            return replace(rows, counts_e=rows.counts_e[: self.rule.per_group]), metadata
        return replace(rows, replicas=slots), metadata

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        """See `Dispatcher.combine`. All ranks of the axis call it."""
        return self.inner.combine(y_RD, metadata)

    def _plan(self, counts_E: Tensor) -> ReplicaPlan:
        plan: ReplicaPlan = self.operators.plan_replicas(self.counts_of(counts_E), self.rule, self.rank)
        if torch.is_grad_enabled() and not is_recomputing():
            self.meter.count(plan.facts)
        return plan
