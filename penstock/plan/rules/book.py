"""All rules, and the ways to ask them.

A search asks `first_refusal` of every layout that it can think of, walks through what is left in the order of
`order_key`, and stops behind the first key at which something fits: what comes later is refused by `out_of_order`, with
the name of the rule that put it there. Whoever has one run only asks `config_refusal` and `advice`, as `penstock plan
--layout` does (penstock/plan/project.py).
"""

from penstock.base.errors import ConfigError
from penstock.config.fit import grid_of
from penstock.config.rules import RULES as CONFIG_RULES
from penstock.config.run import Run
from penstock.plan.rules.advice import ADVICE
from penstock.plan.rules.legal import LEGAL, rule_name
from penstock.plan.rules.order import ORDER
from penstock.plan.rules.prune import PRUNE
from penstock.plan.rules.rule import Rule
from penstock.plan.rules.sizes import Sizes

RULES: tuple[Rule, ...] = (*LEGAL, *PRUNE, *ORDER, *ADVICE)
"""Every rule of a plan."""

OrderKey = tuple[int, ...]
"""How far a layout goes in each of ORDER; a smaller one comes before."""

_REFUSING = (*LEGAL, *PRUNE)
_TOLD = (*ORDER, *ADVICE)


def first_refusal(sizes: Sizes) -> tuple[Rule, str] | None:
    """The first rule that keeps a layout from being projected, with its reason; None if none does.

    Args:
        sizes: any, also such that divide nothing.
    """
    for rule in _REFUSING:
        if (reason := rule.check(sizes)) is not None:
            return rule, reason
    return None


def illegal(sizes: Sizes) -> tuple[Rule, str] | None:
    """As `first_refusal`, for a layout that somebody asked for: only what could not run is refused."""
    for rule in LEGAL:
        if (reason := rule.check(sizes)) is not None:
            return rule, reason
    return None


def advice(sizes: Sizes) -> list[tuple[Rule, str]]:
    """What is told of a layout that stays: also what of it should be tried last.

    Args:
        sizes: of a run that can start.
    """
    return [(rule, reason) for rule in _TOLD if (reason := rule.check(sizes)) is not None]


def order_key(sizes: Sizes) -> OrderKey:
    """Where a layout stands in the order of the search: least first, compared from the left."""
    return tuple(rule.rank(sizes) for rule in ORDER if rule.rank is not None)


def out_of_order(sizes: Sizes, fits: OrderKey) -> tuple[Rule, str] | None:
    """The rule that puts a layout behind one that fits, with the reason; None if nothing puts it there.

    Args:
        sizes: of the layout.
        fits: least key of the layouts that fit.
    """
    for rule, own, other in zip(ORDER, order_key(sizes), fits, strict=True):
        if own < other:
            return None
        if own > other:
            reason = rule.check(sizes)
            assert reason is not None, f"{rule.name} has a rank and no reason"
            return rule, f"{reason}; layouts without it fit" if other == 0 else f"{reason}; layouts with less of it fit"
    return None


def config_refusal(run: Run, world: int) -> tuple[str, str] | None:
    """Name and reason of the first thing that a run's own config has against it on so many ranks; None if nothing.

    Args:
        run: any.
        world: ranks.
    """
    for rule in CONFIG_RULES:
        if (problem := rule(run)) is not None:
            error = ConfigError(
                f"{problem.field} {problem.what}", got=problem.got, allowed=problem.allowed, fix=problem.fix
            )
            return rule_name(rule), str(error)
    try:
        grid_of(run, world)
    except ConfigError as error:
        return "ranks-fit-the-run", str(error)
    return None
