"""The form of the doctor's remedies, the checks that their changes pass, and the parts of a loss that one can save.

Times are microseconds of the mean rank's step; `remedies` has the rules themselves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from penstock.base.errors import ConfigError
from penstock.config.fit import grid_of
from penstock.config.rules import check
from penstock.config.run import Run
from penstock.config.tree import build, merge, parse_overrides
from penstock.plan.rules import ADVICE
from penstock.tune.doctor.evidence import Bottlenecks, Evidence, LateRank

WAITS_OF_STAGE_2 = 6 / 7
"""Waits of the host that sync-free stage 2 saves: from 7 to 1 in a step (host-waits-h200x2.json)."""

LAUNCHES_OF_PASSES = 0.81
"""Launches that captured passes save: from 2,541 to 477 (graphs-h200.json), the least of three cases (most: 0.92)."""

LAUNCHES_OF_PARTS = 0.55  # launches that captured parts of layers save: from 4,021 to 1,805 (graphs-parts-h200.json)

REFERENCE_COSTS = 1 - 14307 / 78946
"""Share of the computing that our kernels save in a run with eager operators (one-gpu.json, tokens/s)."""

TORCH_COSTS = 1 - 51188 / 78946  # the same for a run with PyTorch's fused operators (one-gpu.json)


def named(ranks: list[LateRank]) -> str:
    """Such as `ranks 5 and 3`."""
    numbers = [f"{rank.rank}" for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def transfers_us(evidence: Evidence, bottlenecks: Bottlenecks, *kinds: str) -> float:
    """Exposed communication of some kinds, without the share that is known to be waiting."""
    exposed = evidence.mean("exposed_communication_us")
    moving = bottlenecks.transfer_us / exposed if exposed else 0.0  # the same share for every kind: no trace tells more
    return moving * sum(evidence.communication(kind) for kind in kinds)


def waits_us(ranks: list[LateRank], evidence: Evidence, bottlenecks: Bottlenecks) -> float:
    """Waiting of the mean rank for these ranks."""
    # `waiting_us` is without the waiting for late hosts, so what it is divided by is too.
    caused = evidence.caused_wait_us - sum(rank.caused_wait_us for rank in evidence.late if rank.cause == "host")
    return bottlenecks.waiting_us * sum(rank.share * rank.caused_wait_us for rank in ranks) / caused if caused else 0.0


def imbalance_us(evidence: Evidence, limit: float = 1.0) -> float:
    """Time that ranks lose because each layer waits for its fullest rank: what an end to rows beyond `limit` saves.

    It is the sum over layers of the fullest rank's rows beyond `limit` times the mean, times the mean rank's time in
    the experts of a layer.
    """
    loads = evidence.facts.layer_loads
    beyond = sum(load.computed - min(load.computed, max(1.0, limit)) for load in loads)
    return evidence.computing.get("experts", 0.0) / len(loads) * beyond if loads else 0.0


def between_steps_us(evidence: Evidence) -> float:
    """The part of `imbalance_us` that the loads of whole steps show: routing that is more even can save it."""
    loads = evidence.facts.layer_loads
    beyond = sum(min(load.step, load.computed) - 1.0 for load in loads)
    return evidence.computing.get("experts", 0.0) / len(loads) * beyond if loads else 0.0


def least_even(evidence: Evidence) -> str:
    worst = max(evidence.facts.layer_loads, key=lambda layer_load: layer_load.computed, default=None)
    return "" if worst is None else f"the fullest rank of layer {worst.layer} has {worst.computed:.2f} times the mean"


def most_waiting_us(evidence: Evidence, bottlenecks: Bottlenecks) -> float:
    """Exposed communication that may be waiting for late ranks; all of it if no trace compares ranks."""
    compared = any(rank.wait_us is not None for rank in evidence.ranks)
    return bottlenecks.waiting_us if compared else bottlenecks.communication_us


def late_launches_us(evidence: Evidence, bottlenecks: Bottlenecks) -> float:
    """Idle time before kernels that the host launched late, without the idle time after its waits for the device."""
    other = evidence.mean("sync_idle_us") + evidence.mean("launched_idle_us")
    return bottlenecks.usual_host * max(0.0, evidence.mean("idle_us") - other)


def behind_counts_us(evidence: Evidence, bottlenecks: Bottlenecks) -> float:
    """Idle time after waits for row counts, and the other ranks' waiting for hosts that this makes late.

    If no span shows which waits these are, they are taken as the measured share of all waits.
    """
    behind = {
        rank.rank: WAITS_OF_STAGE_2 * rank.sync_idle_us if rank.counts_idle_us is None else rank.counts_idle_us
        for rank in evidence.ranks
    }
    idle = {rank.rank: rank.idle_us for rank in evidence.ranks}
    late = [rank for rank in evidence.late if rank.cause == "host" and idle.get(rank.rank)]
    caused = sum(rank.caused_wait_us for rank in late)
    # A rank is late by its host for as much as the counts explain of its idle time.
    explained = sum(rank.caused_wait_us * min(1.0, behind[rank.rank] / idle[rank.rank]) for rank in late)
    waited = bottlenecks.late_host_us * explained / caused if caused else 0.0
    return bottlenecks.usual_host * (sum(behind.values()) / max(1, len(behind)) + waited)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change and its gain."""

    change: str  # overrides of the run, separated by blanks; words if no override makes the change
    what: str  # the change in words
    gain_us: float  # upper bound per step
    rule: str
    source: str  # of the gain or of the rule
    how: str = ""  # the gain is computed
    gain_bytes: int = 0  # freed memory, for a run that does not fit
    fits: bool = True  # whether the run fits its devices with this change alone, by the plan if that was asked


def accepted(run: Run, change: str, world: int | None = None) -> Run | None:
    """The run with overrides, separated by blanks, or None if that run could not start or is the same run.

    A `world` of None skips the rules that need the number of ranks.
    """
    try:
        changed = build(Run, merge(Run, run.model_dump(), parse_overrides(Run, change.split())))
        check(changed)
        if world is not None:
            grid_of(changed, world)
    except ConfigError:
        return None
    return None if changed == run else changed


def first_accepted(evidence: Evidence, *changes: str, text: str = "") -> str | None:
    """The first change that the run accepts and the plan does not refuse; `text` for another program's run."""
    facts = evidence.facts
    if facts.run is None:
        return text or None
    asked = (change for change in changes if change not in facts.lacking_bytes)
    return next((change for change in asked if accepted(facts.run, change, facts.world) is not None), None)


Offer: TypeAlias = tuple[str | None, str, float]
"""`change`, `what` and `gain_us` of a remedy; without a change the run accepts none of its forms."""

NO_OFFER: Offer = (None, "", 0.0)

PLAN_SOURCES: Mapping[str, str] = {advice.name: advice.source for advice in ADVICE}
"""Sources of the plan's rules, by name."""


@dataclass(frozen=True)
class RemedyRule:
    """Offers a change, or None where the change cannot help."""

    name: str
    source: str
    how: str  # the gain is computed
    on_cpu: bool  # it also applies to a recording of a CPU
    offer: Callable[[Evidence, Bottlenecks], Offer | None]


def rule(
    name: str, source: str = "", *, how: str, on_cpu: bool = False
) -> Callable[[Callable[[Evidence, Bottlenecks], Offer | None]], RemedyRule]:
    """Make a function a rule; without a source it has that of the plan's rule with its name."""
    return partial(RemedyRule, name, source or PLAN_SOURCES[name], how, on_cpu)


cpu_rule = partial(rule, on_cpu=True)
"""For remedies that neither need a device nor have a gain that was measured on one."""
