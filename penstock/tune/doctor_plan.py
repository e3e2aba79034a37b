"""What the plan says of a run that is examined: its memory by component, and its step where no trace says it.

This is the only part of the doctor that imports PyTorch, so the verb loads it by name, and only for a run.
"""

from dataclasses import replace

from penstock.base.errors import ConfigError, HardwareError, KernelError
from penstock.config.run import Run
from penstock.plan.hardware import Cluster
from penstock.plan.project import project
from penstock.plan.projection import Projection, RankTime
from penstock.plan.what_if import components
from penstock.tune.doctor_compute import FLOAT8, FLOAT8_DISPATCH
from penstock.tune.doctor_evidence import Evidence, Facts, RankCosts
from penstock.tune.doctor_memory import SELECTIVE
from penstock.tune.doctor_remedy import accepted

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
    run = evidence.facts.run
    assert run is not None, "a plan needs a configuration"
    facts = _facts(evidence.facts, planned)
    if not facts.has_steps and not planned.fits:
        facts = replace(facts, freed_bytes=_freed(run, planned.cluster, planned))
    elif run.training.precision == "bf16" and not run.float8.is_used:
        facts = replace(facts, saved_seconds=_saved(run, planned.cluster, planned))
    if evidence.ranks:
        return replace(evidence, facts=facts)
    step = planned.time.step_seconds * 1e6
    ranks = tuple(_costs(one, step, planned.layout.dispatcher) for one in planned.time.ranks)
    told = "times are those of the plan: no trace was recorded"
    return replace(evidence, source="plan", ranks=ranks, steps=1, facts=facts, missing=(*evidence.missing, told))


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
    host = time.host * 1e6
    terms = {kind: time.terms.get(term, 0.0) for term, kind in (_KINDS | {"dispatch": dispatcher}).items()}
    # A term holds all that a transfer costs, computing around it too; exposed time is divided like the terms.
    scale = exposed / sum(terms.values()) if sum(terms.values()) else 0.0
    return RankCosts(
        rank=time.rank,
        total_us=step_us,
        compute_us=max(0.0, step_us - exposed - host),
        exposed_communication_us=exposed,
        exposed_copies_us=0.0,
        idle_us=host,
        communication_us={kind: value * scale for kind, value in terms.items() if value},
    )


def _saved(run: Run, cluster: Cluster, planned: Projection) -> dict[str, float]:
    """What a step in 8 bits takes less, by the plan; nothing where the chip, or the model, has no such products."""
    saved = {}
    for change in (FLOAT8_DISPATCH, FLOAT8) if run.parallel.expert > 1 else (FLOAT8,):
        changed = accepted(run, change, cluster.devices)
        if changed is None:
            continue
        try:
            saved[change] = planned.time.step_seconds - project(changed, cluster).time.step_seconds
        except (ConfigError, HardwareError, KernelError):
            continue
    return saved


def _freed(run: Run, cluster: Cluster, planned: Projection) -> dict[str, int]:
    """What changes that cost least speed would free on the fullest rank."""
    changes = (
        SELECTIVE,
        f"training.micro_batch={run.training.micro_batch // 2}",
        'recompute.modules=["layer"]',
        'parallel.shard="optimizer"',
        "offload.optimizer=true",
    )
    freed = {}
    for change in changes:
        changed = accepted(run, change, cluster.devices)
        if changed is None:
            continue
        try:
            freed[change] = planned.memory.total - project(changed, cluster).memory.total
        except (ConfigError, HardwareError, KernelError):
            continue
    return freed
