"""Replicas of experts by collectives: weights to the ranks that hold them, gradients back.

The host reads which slots are filled, and every exchange sends just these replicas. All ranks of the axis make the same
calls, one message each; if no replica is placed anywhere there is none. GPUs of a node write to each other's slots
instead, and the host reads nothing (penstock/parallel/replica_memory.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from math import prod

import torch
from torch import Tensor

from penstock.config.dispatcher import plain_row_bytes
from penstock.config.parallel import Dispatch
from penstock.config.run import Run
from penstock.kernels.launching import record_wait
from penstock.kernels.replica_plan import MILLION, ReplicaPlan, ReplicaRule
from penstock.kernels.replica_slots import already_here
from penstock.layout.grid import Grid
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather, exchange_rows

ALIGNMENT = 256  # bytes; every section begins at a multiple
USUAL_SLOTS = 4  # with `dispatch.balance` auto and bounded: enough for all loads but groups without a single row

IDLE = 0.1
"""With auto: rows over a rank's even share up to which nothing is copied.

On 4 H200 replicas cost 0.6 % of a layer with 1.04 times the even share, and save 1.0 and 1.3 % with 1.12 and 1.13 times
(benchmarks/results/several-h200x4.json, `layer`).
"""


def replica_rule(experts: int, groups: int, dispatch: Dispatch) -> ReplicaRule | None:
    """The rule of a layer; None if its loads are not balanced, or one group holds all experts."""
    if dispatch.balance == "none" or groups == 1:
        return None
    per_group, is_exact = experts // groups, dispatch.balance == "exact"
    return ReplicaRule(
        experts=experts,
        groups=groups,
        slots=dispatch.balance_slots or (per_group if is_exact else min(USUAL_SLOTS, per_group)),
        tolerance=0 if is_exact else round(dispatch.balance_tolerance * MILLION),
        idle=round(IDLE * MILLION) if dispatch.balance == "auto" else 0,
        least_rows=0 if is_exact else dispatch.balance_rows,
    )


def bound_factor(dispatch: Dispatch) -> float:
    """Most rows of a rank over its even share, if there are slots enough."""
    if dispatch.balance == "auto":
        return 1 + max(dispatch.balance_tolerance, IDLE)
    return 1 + (dispatch.balance_tolerance if dispatch.balance == "bounded" else 0.0)


@dataclass(frozen=True)
class ReplicaSizes:
    """Sections of a rank's symmetric memory for the replicas of its layers; the same on all ranks."""

    rule: ReplicaRule
    shapes: tuple[tuple[int, ...], ...]  # of one expert's matrices and biases, as a rank holds them
    itemsize: int  # of the weights

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """First byte of each parameter's slots."""
        return self._starts[: len(self.shapes)]

    @cached_property
    def gradients(self) -> tuple[int, ...]:
        """First byte of each parameter's float32 sums."""
        return self._starts[len(self.shapes) : -1]

    @property
    def total_bytes(self) -> int:
        return self._starts[-1]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        numbers = [self.rule.slots * prod(shape) for shape in self.shapes]
        sizes = [count * self.itemsize for count in numbers] + [count * 4 for count in numbers]
        return tuple(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


def replica_sizes(run: Run, grid: Grid) -> ReplicaSizes | None:
    """Sections of a rank; None without replicas."""
    moe = run.model.moe
    rule = None if moe is None else replica_rule(moe.experts, grid.expert, run.dispatch)
    if moe is None or rule is None:
        return None
    hidden, width = run.model.hidden_size, moe.moe_intermediate_size // grid.expert_tensor
    wide = run.model.projections * width
    shapes: tuple[tuple[int, ...], ...] = ((wide, hidden), (hidden, width))
    biases: tuple[tuple[int, ...], ...] = ((wide,), (hidden,)) if moe.bias else ()
    return ReplicaSizes(rule, shapes + biases, plain_row_bytes(run) // hidden)


@dataclass(frozen=True)
class ExchangedSlots:
    """`penstock.kernels.replica_slots.ReplicaSlots` for one plan."""

    axis: Axis
    slots: int
    send: tuple[tuple[int, ...], ...]  # own experts whose replicas are on each rank, in the order of its slots
    fill: tuple[tuple[int, ...], ...]  # own slots that are filled from each rank

    def begin(self, *own: Tensor) -> None:
        """See `ReplicaSlots.begin`: collectives wait for their turn."""

    def fetch(self, *own: Tensor) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        sent = torch.cat([weight_e.detach()[list(chain(*self.send))].flatten(1) for weight_e in own], 1)
        came = exchange_rows(sent, self.axis, _sizes(self.fill), _sizes(self.send))
        slots = tuple(weight_e.new_empty(self.slots, *weight_e.shape[1:]) for weight_e in own)
        for slots_X, part in zip(slots, came.split([weight_e[0].numel() for weight_e in own], 1), strict=True):
            slots_X[list(chain(*self.fill))] = part.view(-1, *slots_X.shape[1:])
        return slots, already_here

    def gradient_sums(self, place: int, weight_e: Tensor) -> Tensor:
        return torch.zeros(self.slots, *weight_e.shape[1:], dtype=torch.float32, device=weight_e.device)

    def give_back(
        self, place: int, gradients: Sequence[Tensor], totals: Sequence[Tensor], *, aside: bool = False
    ) -> None:
        sent = torch.cat([gradient_X[list(chain(*self.fill))].flatten(1) for gradient_X in gradients], 1)
        came = exchange_rows(sent, self.axis, _sizes(self.send), _sizes(self.fill))
        for total_e, part in zip(totals, came.split([total_e[0].numel() for total_e in totals], 1), strict=True):
            of_expert: dict[int, Tensor] = {}
            for expert, row in zip(chain(*self.send), part.view(-1, *total_e.shape[1:]), strict=True):
                of_expert[expert] = of_expert.get(expert, total_e[expert].float()) + row
            for expert, total in of_expert.items():
                total_e[expert].copy_(total)


def exchanged_counts(counts_E: Tensor, axis: Axis) -> Tensor:
    """The loads of all ranks, W x E."""
    return all_gather(counts_E[None], axis, dim=0)


def exchanged_slots(plan: ReplicaPlan, rule: ReplicaRule, axis: Axis) -> ExchangedSlots | None:
    """The slots of a plan, which the host reads; None if no group holds a replica."""
    if plan.slot_experts_ZX.is_meta:
        record_wait(plan.slot_experts_ZX)
        nothing: tuple[tuple[int, ...], ...] = ((),) * axis.size
        return ExchangedSlots(axis, rule.slots, nothing, nothing)
    slot_experts: list[list[int]] = plan.slot_experts_ZX.tolist()
    if all(expert == rule.experts for expert in chain(*slot_experts)):
        return None
    parts, m = axis.size // rule.groups, rule.per_group
    group, part = divmod(axis.rank, parts)
    # With expert tensor parallelism a rank sends its part of an expert to the same part of another group.
    send = tuple(
        tuple(expert % m for expert in slot_experts[rank // parts] if expert // m == group)
        if rank % parts == part
        else ()
        for rank in range(axis.size)
    )
    fill = tuple(
        tuple(slot for slot, expert in enumerate(slot_experts[group]) if expert // m == rank // parts)
        if rank % parts == part
        else ()
        for rank in range(axis.size)
    )
    return ExchangedSlots(axis, rule.slots, send, fill)


def _sizes(by_rank: Sequence[Sequence[int]]) -> list[int]:
    return [len(one) for one in by_rank]
