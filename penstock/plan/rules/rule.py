"""What a rule is: a name, what it says, why, and a function from sizes to a reason.

Four kinds:

    legal    the run would be refused when it is loaded or started; `by` names the function that refuses it
    prune    a layout that a search does not project, because another one does the same with less
    order    a layout that is projected only if none that comes before it fits; such a rule has a `rank` too
    advice   the layout stays, and `penstock plan --layout` says so

A reason is one line with the numbers of the case in it. None means that the rule has nothing against these sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.plan.rules.sizes import Sizes

Kind = Literal["legal", "prune", "order", "advice"]

Check = Callable[[Sizes], str | None]
"""The reason against sizes, or None."""

Rank = Callable[[Sizes], int]
"""How far sizes go in what is tried last; 0 not at all."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        name: by which plans and reports call it; never changes.
        kind: what it is for.
        doc: what it says, in words, with the number behind it.
        source: where it comes from; ids such as L10 are of the list in docs/rules.md.
        check: the reason against sizes, or None.
        rank: of an order rule: sizes of a lower rank are tried before; None for others.
        by: of a legal rule: the function that refuses such a run.
        fix: overrides of a run that try what the rule says; empty where they depend on the case.
    """

    name: str
    kind: Kind
    doc: str
    source: str
    check: Check
    rank: Rank | None = None
    by: str = ""
    fix: tuple[str, ...] = ()
