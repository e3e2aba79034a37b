"""The form of the doctor's remedies, and the checks that their changes pass; `remedies` has the rules themselves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from penstock.base.errors import ConfigError
from penstock.config.fit import grid_of
from penstock.config.rules import check
from penstock.config.run import Run
from penstock.config.tree import build, merge, parse_overrides
from penstock.plan.rules.advice import ADVICE
from penstock.tune.doctor.evidence import Bottlenecks, Evidence


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
