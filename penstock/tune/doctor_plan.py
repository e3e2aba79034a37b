"""What the plan says of a run that is examined: its memory by component, and its step where no trace says it.

This and `doctor_changes` are the only parts of the doctor that import PyTorch, so the verb loads it by name, and only
for a run.
"""

from dataclasses import replace

from penstock.base.errors import ConfigError, HardwareError, KernelError
from penstock.plan.hardware import Cluster
from penstock.plan.project import project
from penstock.plan.projection import Projection, RankTime
from penstock.plan.what_if import components
from penstock.tune.doctor_changes import with_changes
from penstock.tune.doctor_evidence import Evidence, Facts, RankCosts

_KINDS = {
    "weights": "all-gather",
    "gradients": "reduce-scatter",
    "exchange": "exchange",
    "bubble": "send-recv",
}
"""Kinds of communication, by the plan's terms; that of `dispatch` is the dispatcher."""


def with_plan(evidence: Evidence, cluster: Cluster) -> Evidence:
    """The evidence with what a plan says: its memory always, its times if there is no trace.

    Args:
        evidence: of a run whose configuration is known.
        cluster: where it ran.
    """
    run = evidence.facts.run
    assert run is not None, "a plan needs a configuration"
    try:
        planned = project(run, cluster)
    except (ConfigError, HardwareError, KernelError) as error:
        return replace(evidence, missing=(*evidence.missing, f"no plan of the run: {error}"))
    return with_projection(evidence, planned)


def with_projection(evidence: Evidence, planned: Projection) -> Evidence:
    """The same with a plan that is there already.

    Args:
        evidence: of a run whose configuration is known.
        planned: that run, where it ran.
    """
    assert evidence.facts.run is not None, "a plan needs a configuration"
    facts = _facts(evidence.facts, planned)
    if evidence.ranks:
        return with_changes(replace(evidence, facts=facts), planned)
    step = planned.time.step_seconds * 1e6
    ranks = tuple(_costs(one, step, planned.layout.dispatcher) for one in planned.time.ranks)
    recorded = "no trace was recorded" if evidence.host is None else "the trace is of a CPU"
    told = f"times are those of the plan: {recorded}"
    missing = (*evidence.missing, told)
    return with_changes(replace(evidence, source="plan", ranks=ranks, steps=1, facts=facts, missing=missing), planned)


def _facts(facts: Facts, planned: Projection) -> Facts:
    return replace(
        facts,
        world=planned.cluster.devices,
        device=facts.device or planned.cluster.hardware.name,
        capacity_bytes=facts.capacity_bytes or planned.capacity_bytes,
        planned_bytes=planned.memory.total,
        planned_terms=components(planned.memory),
        planned_step_seconds=planned.time.step_seconds,
    )


def _costs(time: RankTime, step_us: float, dispatcher: str) -> RankCosts:
    """One place on the pipeline. Waiting for other stages is communication that nothing hides."""
    exposed = (time.exposed_communication + time.waiting) * 1e6
    host, copies = time.host * 1e6, time.host_link * 1e6
    terms = {kind: time.terms.get(term, 0.0) for term, kind in (_KINDS | {"dispatch": dispatcher}).items()}
    # A term holds all that a transfer costs, computing around it too; exposed time is divided like the terms.
    scale = exposed / sum(terms.values()) if sum(terms.values()) else 0.0
    return RankCosts(
        rank=time.rank,
        total_us=step_us,
        compute_us=max(0.0, step_us - exposed - host - copies),
        exposed_communication_us=exposed,
        exposed_copies_us=copies,
        idle_us=host,
        communication_us={kind: value * scale for kind, value in terms.items() if value},
    )
