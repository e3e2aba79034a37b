"""A rule: a name, its text, its source, and a function from sizes to a reason.

Four kinds:

    legal    the run would be refused when it is loaded or started; `by` names the function that refuses it
    prune    a search does not project the layout, because another one does the same with less
    order    the layout is projected only if no layout of a lower rank fits
    advice   the layout stays, and `penstock plan --layout` prints the reason

A reason is one line with the numbers of the case. None means that the rule does not apply to these sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.plan.rules.sizes import Sizes

Kind = Literal["legal", "prune", "order", "advice"]

Check = Callable[[Sizes], str | None]
"""The reason against sizes, or None."""

Rank = Callable[[Sizes], int]
"""How late sizes are tried; 0 first."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        name: name in plans and reports; never changes.
        kind: legal, prune, order or advice.
        doc: the rule in words, with the measurement behind it.
        source: origin of the rule; ids such as L10 are of the list in docs/rules.md.
        check: the reason against sizes, or None.
        rank: of an order rule: sizes of a lower rank are tried before; None for others.
        by: of a legal rule: the function that refuses such a run.
        fix: overrides of a run that try the opposite; empty if they depend on the case.
    """

    name: str
    kind: Kind
    doc: str
    source: str
    check: Check
    rank: Rank | None = None
    by: str = ""
    fix: tuple[str, ...] = ()


def rule(kind: Kind, source: str, *fix: str, rank: Rank | None = None) -> Callable[[Check], Rule]:
    """Make a rule of a function: its name is the rule's name, its docstring the rule's text.

    Args:
        kind: of the rule.
        source: of the rule.
        fix: overrides that try the opposite.
        rank: of an order rule; its function is asked for a reason only above rank 0.
    """

    def made(function: Check) -> Rule:
        assert function.__doc__ is not None, f"{function} is documented"
        check = function if rank is None else lambda sizes: function(sizes) if rank(sizes) else None
        name = function.__name__.replace("_", "-")
        doc = " ".join(function.__doc__.split())
        return Rule(name=name, kind=kind, doc=doc, source=source, check=check, rank=rank, fix=fix)

    return made
