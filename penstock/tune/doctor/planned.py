"""Adds the plan of a run to the evidence: memory by component, step time, and the projection of each change.

Imports PyTorch, so the command line loads it by name and only for a run with a configuration.

A change is refused if the changed run would not fit the fullest rank, or if it resolves to the same run. A trace knows
more of a step than the plan does, so the saving that the plan projects counts only without a trace.
"""

from dataclasses import dataclass, replace

from penstock.base.errors import ConfigError, HardwareError, KernelError
from penstock.config.run import Run
from penstock.plan.assumptions import DEFAULT_ASSUMPTIONS
from penstock.plan.costs import assumed_imbalance
from penstock.plan.hardware import Cluster
from penstock.plan.memory import components
from penstock.plan.project import project
from penstock.plan.projection import Projection, RankTime
from penstock.tune.doctor.evidence import Evidence, RankCosts, RunFacts, bottlenecks_of
from penstock.tune.doctor.remedies import FLOAT8, FLOAT8_DISPATCH, SELECTIVE, remedies
from penstock.tune.doctor.remedy import accepted

_KINDS = {"weights": "all-gather", "gradients": "reduce-scatter", "exchange": "exchange", "bubble": "send-recv"}
"""Kind of communication of each term of the plan; the kind of `dispatch` is the dispatcher."""

NOT_PROJECTED = ("model.moe.", "dispatch.balance", "host.", "training.collect_garbage_every")
"""Prefixes of changes that act on late ranks, which a plan does not model, or on rows that it only assumes."""

LAUNCHES = "graphs."  # prefix of changes that save only launches: a trace may show a gain that the plan hides


def with_plan(evidence: Evidence, cluster: Cluster) -> Evidence:
    """The evidence with the plan of a run of known configuration; with a line in `missing` if the plan fails."""
    run = evidence.facts.run
    assert run is not None, "a plan needs a configuration"
    try:
        planned = project(run, cluster)
    except (ConfigError, HardwareError, KernelError) as error:
        return replace(evidence, missing=(*evidence.missing, f"no plan of the run: {error}"))
    return with_projection(evidence, planned)


def with_projection(evidence: Evidence, planned: Projection) -> Evidence:
    """The evidence with a plan of a run of known configuration: its memory always, its times if there is no trace."""
    facts = replace(
        evidence.facts,
        world=planned.cluster.devices,
        device=evidence.facts.device or planned.cluster.hardware.name,
        capacity_bytes=evidence.facts.capacity_bytes or planned.capacity_bytes,
        planned_bytes=planned.memory.total,
        planned_terms=components(planned.memory),
        planned_step_seconds=planned.time.step_seconds,
    )
    evidence = replace(evidence, facts=facts)
    if not evidence.ranks:
        step_us = planned.time.step_seconds * 1e6
        fullest = assumed_imbalance(planned.run, DEFAULT_ASSUMPTIONS.in_time)
        ranks = tuple(_costs(rank, step_us, planned.layout.dispatcher, fullest) for rank in planned.time.ranks)
        missing = (*evidence.missing, "times are those of the plan")
        evidence = replace(evidence, source="plan", ranks=ranks, steps=1, missing=missing)
    return with_changes(evidence, planned)


def _costs(time: RankTime, step_us: float, dispatcher: str, fullest: float) -> RankCosts:
    """Costs of one pipeline rank; waiting for other stages counts as exposed communication.

    `fullest` is the rows of the rank's experts in the plan over those of the mean rank.
    """
    exposed = (time.exposed_communication + time.waiting) * 1e6  # the plan's seconds become microseconds
    host, copies = time.host * 1e6, time.host_link * 1e6
    terms = {kind: time.terms.get(term, 0.0) for term, kind in (_KINDS | {"dispatch": dispatcher}).items()}
    # A term includes the hidden part of its transfers, so the exposed time is divided in proportion to the terms.
    scale = exposed / sum(terms.values()) if sum(terms.values()) else 0.0
    return RankCosts(
        rank=time.rank,
        total_us=step_us,
        compute_us=max(0.0, step_us - exposed - host - copies),
        exposed_communication_us=exposed,
        exposed_copies_us=copies,
        idle_us=host,
        computing_us={"experts": time.terms.get("experts", 0.0) * 1e6 / fullest},
        communication_us={kind: value * scale for kind, value in terms.items() if value},
    )


@dataclass(frozen=True, kw_only=True)
class _Projected:
    """A change by the plan, for the tokens of one step of the unchanged run."""

    saved_seconds: float
    freed_bytes: int
    lacking_bytes: int  # missing memory on the fullest rank; at most 0 if the run fits


def with_changes(evidence: Evidence, planned: Projection) -> Evidence:
    """The evidence with the projection of each change that a rule offers; `planned` is of the unchanged run."""
    run, facts = evidence.facts.run, evidence.facts
    assert run is not None, "a plan needs a configuration"
    if not facts.has_steps and not planned.fits:
        facts = _with_freed(facts, run, planned)
    elif run.training.precision == "bf16" and not run.float8.is_used:
        facts = _with_float8(facts, run, planned)
    evidence = replace(evidence, facts=facts)
    bottlenecks = bottlenecks_of(evidence)
    # Refusing a change may make a rule offer its next form, so this repeats until no offer is new.
    while asked := [
        remedy.change for remedy in remedies(evidence, bottlenecks) if _is_open(remedy.change, evidence, run)
    ]:
        evidence = replace(evidence, facts=_with_projected(evidence, run, planned, asked))
    return evidence


def _is_open(change: str, evidence: Evidence, run: Run) -> bool:
    facts = evidence.facts
    if change in facts.saved_seconds or change.startswith(NOT_PROJECTED):
        return False
    return accepted(run, change, facts.world) is not None


def _with_projected(evidence: Evidence, run: Run, planned: Projection, changes: list[str]) -> RunFacts:
    facts = evidence.facts
    saved, lacking = dict(facts.saved_seconds), dict(facts.lacking_bytes)
    # A run that completed steps fits, so a changed run may need as much more as the plan overestimates this one.
    spare = max(0, planned.over_bytes) if facts.has_steps else 0
    for change in changes:
        projected = _projected(run, change, planned)
        saved[change] = 0.0 if projected is None else projected.saved_seconds
        if projected is None or _is_vain(change, projected, evidence):
            lacking[change] = 0
        elif projected.lacking_bytes > spare:
            lacking[change] = projected.lacking_bytes
    return replace(facts, saved_seconds=saved, lacking_bytes=lacking)


def _is_vain(change: str, projected: _Projected, evidence: Evidence) -> bool:
    """Whether a change has no effect, or no gain by the plan where there is no trace."""
    if evidence.source == "plan":
        return projected.saved_seconds <= 0
    is_same_run = projected.saved_seconds == 0 and projected.freed_bytes == 0
    return is_same_run and not change.startswith(LAUNCHES)


def _with_float8(facts: RunFacts, run: Run, planned: Projection) -> RunFacts:
    """Savings of float8 products where chip and model support them and they fit."""
    changes = (FLOAT8_DISPATCH, FLOAT8) if run.parallel.expert > 1 else (FLOAT8,)
    projections = {change: _projected(run, change, planned) for change in changes}
    room = max(0, planned.over_bytes)
    saved = {
        name: projected.saved_seconds
        for name, projected in projections.items()
        if projected is not None and projected.lacking_bytes <= room
    }
    return replace(facts, saved_seconds={**facts.saved_seconds, **saved})


def _with_freed(facts: RunFacts, run: Run, planned: Projection) -> RunFacts:
    """Memory that the changes free which cost the least speed for their bytes."""
    changes = (
        SELECTIVE,
        f"training.micro_batch={run.training.micro_batch // 2}",
        'recompute.modules=["layer"]',
        'parallel.shard="optimizer"',
        "offload.optimizer=true",
    )
    asked = {change: _projected(run, change, planned) for change in changes}
    projections = {
        change: projected for change, projected in asked.items() if projected is not None and projected.freed_bytes > 0
    }
    return replace(
        facts,
        freed_bytes={change: projected.freed_bytes for change, projected in projections.items()},
        saved_seconds={change: projected.saved_seconds for change, projected in projections.items()},
    )


def _projected(run: Run, change: str, planned: Projection) -> _Projected | None:
    changed = accepted(run, change, planned.cluster.devices)
    if changed is None:
        return None
    try:
        projection = project(changed, planned.cluster)
    except (ConfigError, HardwareError, KernelError):
        return None
    tokens = run.tokens_per_step / changed.tokens_per_step  # a changed batch: compare times of equal tokens
    return _Projected(
        saved_seconds=planned.time.step_seconds - projection.time.step_seconds * tokens,
        freed_bytes=planned.memory.total - projection.memory.total,
        lacking_bytes=projection.over_bytes,
    )
