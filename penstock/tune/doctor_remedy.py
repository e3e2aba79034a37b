"""A remedy, and whether a run would take it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.base.errors import ConfigError
from penstock.config.fit import grid_of
from penstock.config.merge import merge, parse_overrides
from penstock.config.rules import check
from penstock.config.run import Run
from penstock.config.validation import build
from penstock.plan.rules.advice import ADVICE
from penstock.plan.rules.order import ORDER
from penstock.tune.doctor_evidence import Evidence, Late
from penstock.tune.doctor_walls import Bottlenecks

DOUBLED = 0.5
"""Share of what is done once a pass, or once a step, that goes away if a pass, or a step, has twice the rows."""

PLAN_SOURCES: Mapping[str, str] = {rule.name: rule.source for rule in (*ADVICE, *ORDER)}
"""Sources of a plan's rules, by name: what is the same rule keeps both."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change, and what it wins.

    Attributes:
        change: overrides of the run, separated by blanks; words where no override does it.
        what: the same in words.
        gain_us: at most, per step.
        rule: name of the rule.
        source: of the gain, or of the rule.
        gain_bytes: memory that it frees, where that is the point.
    """

    change: str
    what: str
    gain_us: float
    rule: str
    source: str
    gain_bytes: int = 0


Offer = Callable[[Evidence, Bottlenecks], Remedy | None]
"""A rule: what it offers for this evidence, or nothing."""


def accepted(run: Run, change: str, world: int | None = None) -> Run | None:
    """The run with a change, or None if it could not start or nothing would be another.

    Args:
        run: as it was trained.
        change: overrides, separated by blanks.
        world: ranks, if somebody knows.
    """
    try:
        changed = build(Run, merge(Run, run.model_dump(), parse_overrides(Run, change.split())))
        check(changed)
        if world is not None:
            grid_of(changed, world)
    except ConfigError:
        return None
    return None if changed == run else changed


def first_accepted(evidence: Evidence, *changes: str, words: str = "") -> str | None:
    """The first change that the run takes, and that the plan does not refuse.

    Args:
        evidence: with the run, and what the plan said of changes so far.
        changes: overrides, separated by blanks.
        words: for another program's run, which has other names for what we override.
    """
    facts = evidence.facts
    if facts.run is None:
        return words or None
    asked = (one for one in changes if one not in facts.lacking_bytes)
    return next((one for one in asked if accepted(facts.run, one, facts.world) is not None), None)


def named(ranks: list[Late]) -> str:
    """Such as `ranks 5 and 3`."""
    numbers = [f"{one.rank}" for one in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
