"""A thing that is wrong with a run, as data: what checks return, and what becomes the one line that a user reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.base.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """One mistake.

    Attributes:
        what: the fact, beginning with the full path of a field.
        got: the offending value or values, if `what` does not show them.
        allowed: what would have been right.
        fix: the change that mends it.
    """

    what: str
    got: str | None = None
    allowed: str | None = None
    fix: str | None = None


def refuse(problems: Sequence[Problem]) -> None:
    """Raise if anything is wrong. The first problem is told in full, of the others the fields.

    Raises:
        ConfigError: `problems` is not empty.
    """
    if not problems:
        return
    first, *others = problems
    fix = first.fix
    if others:
        also = "also wrong: " + ", ".join(problem.what.split()[0] for problem in others)
        fix = also if fix is None else f"{fix}; {also}"
    raise ConfigError(first.what, got=first.got, allowed=first.allowed, fix=fix)
