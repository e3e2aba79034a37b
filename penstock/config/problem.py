"""A thing that is wrong with a run, as data: what checks return, and what becomes the one line that a user reads."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from penstock.base.errors import ConfigError

_LINE = re.compile(
    r"(?P<field>\S+) (?P<what>.*?)(; got (?P<got>.*?))?(; allowed: (?P<allowed>.*?))?(; fix: (?P<fix>.*))?", re.DOTALL
)
_MOST_OTHERS = 4
_MOST_DIVISORS = 12


@dataclass(frozen=True)
class Problem:
    """One mistake: the path of the field that most likely changes, `what` is wrong with it, and how to mend it.

    `what` reads on after the path; `got` is the offending value, if `what` does not show it.
    """

    field: str
    what: str
    got: str | None = None
    allowed: str | None = None
    fix: str | None = None

    @classmethod
    def from_line(cls, line: str) -> "Problem":
        """The problem of a line as the user reads it: `FIELD WHAT; got GOT; allowed: ALLOWED; fix: FIX`.

        All parts behind WHAT may be left out.
        """
        found = _LINE.fullmatch(line)
        assert found is not None, f"{line!r} names a field and a mistake"
        return cls(**found.groupdict())


def refuse(problems: Sequence[Problem]) -> None:
    """Raise a ConfigError, with the first problem in full and the fields of some others, if there is any."""
    if not problems:
        return
    first, *others = problems
    fields = [problem.field for problem in others[:_MOST_OTHERS]]
    fields += ["..."] if len(others) > _MOST_OTHERS else []
    also = f" (also wrong: {', '.join(fields)})" if fields else ""
    raise ConfigError(f"{first.field} {first.what}{also}", got=first.got, allowed=first.allowed, fix=first.fix)


@cache
def divisors(number: int) -> str:
    """The divisors of a number in words, or a few of them if they are many."""
    found = [f"{one}" for one in range(1, number + 1) if number % one == 0]
    return ", ".join(found if len(found) <= _MOST_DIVISORS else [*found[: _MOST_DIVISORS - 1], "..."])
