"""A thing that is wrong with a run, as data: what checks return, and what becomes the one line that a user reads."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from penstock.base.errors import ConfigError

_LINE = re.compile(
    r"(?P<field>\S+) (?P<what>.*?)(; got (?P<got>.*?))?(; allowed: (?P<allowed>.*?))?(; fix: (?P<fix>.*))?", re.DOTALL
)
_MOST_OTHERS = 4  # fields of further problems that a message names
_MOST_DIVISORS = 12  # that a message lists


@dataclass(frozen=True)
class Problem:
    """One mistake, and how to mend it."""

    field: str  # path of the field that most likely changes
    what: str  # what is wrong with it; reads on after the path
    got: str | None = None  # the offending value, if `what` does not show it
    allowed: str | None = None
    fix: str | None = None

    @classmethod
    def from_line(cls, line: str) -> "Problem":
        """The problem of a line as users read it: `FIELD WHAT`, and perhaps `; got GOT; allowed: ALLOWED; fix: FIX`."""
        parts = _LINE.fullmatch(line)  # lazy groups: the first `; got ` ends WHAT
        assert parts is not None, f"{line!r} names a field and a mistake"
        return cls(**parts.groupdict())


def refuse(problems: Sequence[Problem]) -> None:
    """Raise a ConfigError, with the first problem in full and the fields of some others, if there is any."""
    if not problems:
        return
    first, *others = problems
    fields = [problem.field for problem in others[:_MOST_OTHERS]]
    fields += ["..."] if len(others) > _MOST_OTHERS else []
    also = f" (also wrong: {', '.join(fields)})" if fields else ""
    raise ConfigError(f"{first.field} {first.what}{also}", got=first.got, allowed=first.allowed, fix=first.fix)


def must_divide(field: str, size: int, whole: str, count: int) -> Problem | None:
    """The size in a field divides the `count` in the field `whole`."""
    if count % size == 0:
        return None
    return Problem(field, f"must divide {whole} ({count})", f"{size}", divisors(count))


def at_most(field: str, size: int, limit: str, count: int) -> Problem | None:
    """The size in a field is at most the `count` in the field `limit`."""
    if size <= count:
        return None
    return Problem(field, f"is more than {limit}", f"{size}", f"1 to {count}")


def multiples_near(number: int, divisor: int) -> str:
    """The multiples of a divisor below and above a number, in words."""
    below = number - number % divisor
    return " or ".join(f"{multiple}" for multiple in (below, below + divisor) if multiple)


@cache
def divisors(number: int) -> str:
    """The divisors of a number in words, or a few of them if they are many."""
    texts = [f"{divisor}" for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(texts if len(texts) <= _MOST_DIVISORS else [*texts[: _MOST_DIVISORS - 1], "..."])
