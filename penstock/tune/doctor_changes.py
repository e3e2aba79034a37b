"""What the plan says of changes: each that a rule offers is projected, and one that the plan refuses is not offered.

A change is refused if the fullest rank would have no room for it, or if the run with it comes down to the same run. A
trace knows more of a step than the plan does, so what the plan says it saves counts only where there is no trace.
"""

from dataclasses import dataclass, replace

from penstock.base.errors import ConfigError, HardwareError, KernelError
from penstock.config.run import Run
from penstock.plan.project import project
from penstock.plan.projection import Projection
from penstock.tune.doctor_compute import FLOAT8, FLOAT8_DISPATCH
from penstock.tune.doctor_evidence import Evidence, Facts
from penstock.tune.doctor_memory import SELECTIVE
from penstock.tune.doctor_remedy import accepted
from penstock.tune.doctor_rules import remedies
from penstock.tune.doctor_walls import walls_of

UNSEEN = ("model.moe.", "host.", "training.collect_garbage_every")
"""Beginnings of changes of which a plan says nothing: who is late, only a trace knows."""

LAUNCHES = "graphs."
"""Beginning of changes that save launches only: nothing where the plan hides them, but a trace may show them."""


@dataclass(frozen=True, kw_only=True)
class _Change:
    """What the plan says of a run with a change.

    Attributes:
        saved_seconds: that it takes less for the tokens of a step.
        freed_bytes: on the fullest rank.
        lacking_bytes: on the fullest rank; at most 0 if it fits.
    """

    saved_seconds: float
    freed_bytes: int
    lacking_bytes: int

    @property
    def is_none(self) -> bool:
        """The run comes down to what it was."""
        return self.saved_seconds == 0 and self.freed_bytes == 0


def with_changes(evidence: Evidence, planned: Projection) -> Evidence:
    """The evidence with what the plan says of changes: what they save, what they free, and which it refuses.

    Args:
        evidence: with the plan's memory, and its times where there is no trace.
        planned: the run as it is.
    """
    run, facts = evidence.facts.run, evidence.facts
    assert run is not None, "a plan needs a configuration"
    if not facts.has_steps and not planned.fits:
        facts = _with_freed(facts, run, planned)
    elif run.training.precision == "bf16" and not run.float8.is_used:
        facts = _with_8_bits(facts, run, planned)
    evidence = replace(evidence, facts=facts)
    walls = walls_of(evidence)
    # A change that is refused may make room for another of the same rule.
    while asked := [one.change for one in remedies(evidence, walls) if _is_open(one.change, evidence, run)]:
        evidence = replace(evidence, facts=_judged(evidence, run, planned, asked))
    return evidence


def _is_open(change: str, evidence: Evidence, run: Run) -> bool:
    """An override of which the plan can say something, and has not."""
    facts = evidence.facts
    if change in facts.saved_seconds or change.startswith(UNSEEN):
        return False
    return accepted(run, change, facts.world) is not None


def _judged(evidence: Evidence, run: Run, planned: Projection, changes: list[str]) -> Facts:
    """With what the plan says of some more changes."""
    facts = evidence.facts
    saved, lacking = dict(facts.saved_seconds), dict(facts.lacking_bytes)
    # A run that has made steps fits, whatever the plan says of it.
    spare = max(0, planned.over_bytes) if facts.has_steps else 0
    for change in changes:
        found = _projected(run, change, planned)
        saved[change] = 0.0 if found is None else found.saved_seconds
        if found is None or _is_vain(change, found, evidence):
            lacking[change] = 0
        elif found.lacking_bytes > spare:
            lacking[change] = found.lacking_bytes
    return replace(facts, saved_seconds=saved, lacking_bytes=lacking)


def _is_vain(change: str, found: _Change, evidence: Evidence) -> bool:
    """It makes no other run, or wins nothing by the plan where no trace says more."""
    if evidence.source == "plan":
        return found.saved_seconds <= 0
    return found.is_none and not change.startswith(LAUNCHES)


def _with_8_bits(facts: Facts, run: Run, planned: Projection) -> Facts:
    """With products in 8 bits; nothing where the chip, or the model, has none, or where they do not fit."""
    changes = (FLOAT8_DISPATCH, FLOAT8) if run.parallel.expert > 1 else (FLOAT8,)
    found = {change: _projected(run, change, planned) for change in changes}
    room = max(0, planned.over_bytes)
    saved = {name: one.saved_seconds for name, one in found.items() if one is not None and one.lacking_bytes <= room}
    return replace(facts, saved_seconds={**facts.saved_seconds, **saved})


def _with_freed(facts: Facts, run: Run, planned: Projection) -> Facts:
    """With changes that cost least speed for their bytes."""
    changes = (
        SELECTIVE,
        f"training.micro_batch={run.training.micro_batch // 2}",
        'recompute.modules=["layer"]',
        'parallel.shard="optimizer"',
        "offload.optimizer=true",
    )
    asked = {change: _projected(run, change, planned) for change in changes}
    found = {change: one for change, one in asked.items() if one is not None and one.freed_bytes > 0}
    return replace(
        facts,
        freed_bytes={change: one.freed_bytes for change, one in found.items()},
        saved_seconds={change: one.saved_seconds for change, one in found.items()},
    )


def _projected(run: Run, change: str, planned: Projection) -> _Change | None:
    """What the plan says of a change; None if the run, the chip or the model does not take it."""
    changed = accepted(run, change, planned.cluster.devices)
    if changed is None:
        return None
    try:
        found = project(changed, planned.cluster)
    except (ConfigError, HardwareError, KernelError):
        return None
    tokens = run.tokens_per_step / changed.tokens_per_step
    return _Change(
        saved_seconds=planned.time.step_seconds - found.time.step_seconds * tokens,
        freed_bytes=planned.memory.total - found.memory.total,
        lacking_bytes=found.over_bytes,
    )
