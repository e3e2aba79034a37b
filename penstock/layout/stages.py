"""The parts of a model on each pipeline stage: from a layout string, or balanced by cost.

A model is one line of parts: the embedding, the decoder layers, then multi-token prediction with the final norm, the
output projection and the loss. A layout cuts that line into stages:

    layout = item , { item } ;                      E   embedding: the first part of the first stage
    item   = ( letter | group ) , [ "*" , number ]  t   decoder layer
           | "|" ;                                  m   multi-token prediction layer
    group  = "(" , item , { item } , ")" ;          L   final norm, output projection, loss: the last part
    letter = "E" | "t" | "m" | "L" ;                |   ends a stage

`x*N` repeats x N times. Commas and blanks are ignored. A `|` right after a group that ends in one, and one at the end,
end no second stage. So `Et*3|t*4|(t*4|)*13|t*2,mL` is 16 stages of DeepSeek-V3's 61 layers.

All of multi-token prediction is directly before L: it reads the output of the final norm, shares the output projection,
and its loss is added to the main one. Every stage has a layer, except one that has only E or ends in L.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import inf

from penstock.base.errors import ConfigError

FIELD = "pipeline.layout"  # the field of the layout string, for errors

_LETTERS = "E, t, m, L"
_FOLLOWS = {"E": "t|mL", "t": "t|mL", "m": "mL", "|": "tmL", "L": ""}
"""Letters that may follow a letter; only L may end the layout."""

_NUMBER = re.compile(r"[0-9]+")
_MOST_PARTS, _DEEPEST = 100_000, 20  # parts, and nested groups; larger layouts are typing errors
_SHOWN = 40  # characters that an error shows before and after its position


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The parts of one stage."""

    embed: bool = False
    layers: tuple[int, ...] = ()
    mtp: tuple[int, ...] = ()  # multi-token prediction layers, counted from 0
    norm_and_head: bool = False


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """The cost of each part of a model, all in one unit."""

    embed: float
    layers: tuple[float, ...]
    mtp: tuple[float, ...] = ()  # each includes its use of the output projection
    head: float  # final norm, output projection and loss

    def of(self, stage: Stage) -> float:
        layers = sum(self.layers[layer] for layer in stage.layers) + sum(self.mtp[layer] for layer in stage.mtp)
        return layers + self.embed * stage.embed + self.head * stage.norm_and_head


def parse_stages(text: str, *, layers: int, mtp_layers: int, stages: int) -> tuple[Stage, ...]:
    """Parse a layout string; the module docstring has the grammar. `stages` includes virtual ones.

    Raises a ConfigError if the text breaks the grammar, a part is in a wrong place, or the totals are wrong.
    """
    parts = _Reader(text).read()
    _check_order(text, parts)
    letters = "".join(part.letter for part in parts)
    rows = letters.split("|")
    _check_total(text, "decoder layers (t)", letters.count("t"), layers, "model.layers")
    _check_total(text, "multi-token prediction layers (m)", letters.count("m"), mtp_layers, "model.mtp_layers")
    _check_total(text, "stages", len(rows), stages, "parallel.pipeline x pipeline.stages_per_rank")
    ends = list(accumulate(row.count("t") for row in rows))
    return tuple(
        Stage(
            embed="E" in row,
            layers=tuple(range(end - row.count("t"), end)),
            mtp=tuple(range(row.count("m"))),
            norm_and_head="L" in row,
        )
        for row, end in zip(rows, ends, strict=True)
    )


def stages_text(stages: Sequence[Stage]) -> str:
    """The shortest layout string of some stages: the inverse of `parse_stages`."""
    runs = [(row, len(list(same))) for row, same in groupby(_stage_text(stage) for stage in stages)]
    written = "".join(f"{row}|" if count == 1 else f"({row}|)*{count}" for row, count in runs)
    return written.removesuffix("|")


def _stage_text(stage: Stage) -> str:
    layers, mtp = (
        letter * min(len(held), 1) + (f"*{len(held)}" if len(held) > 1 else "")
        for letter, held in (("t", stage.layers), ("m", stage.mtp))
    )
    last = mtp + "L" * stage.norm_and_head
    return "E" * stage.embed + layers + ("," if last and "*" in layers else "") + last


# ------------------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class _Part:
    """A letter or `|`, and its index in the text."""

    letter: str
    place: int


class _Reader:
    """Recursive descent parser; it writes repetitions out."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._opened: list[int] = []

    def read(self) -> list[_Part]:
        """All parts, without a `|` at the end."""
        parts = self._items()
        if self._peek() == ")":
            raise _wrong(self._text, self._place, "this ) closes no group", f"{_LETTERS}, ( or |")
        if parts and parts[-1].letter == "|":
            parts.pop()
        if not parts:
            raise _wrong(self._text, 0, "the layout is empty", "E")
        return parts

    def _items(self) -> list[_Part]:
        """Items up to a `)` or the end."""
        parts: list[_Part] = []
        has_ended_stage = False
        while (sign := self._peek()) not in ("", ")"):
            position = self._place
            if sign == "|":
                self._place += 1
                parts += [] if has_ended_stage else [_Part(sign, position)]
                has_ended_stage = False
                continue
            item = self._repeated(self._group() if sign == "(" else self._letter())
            has_ended_stage = item[-1].letter == "|"
            parts += item
            if len(parts) > _MOST_PARTS:
                raise _wrong(self._text, position, "the layout is too long from here on", f"up to {_MOST_PARTS} parts")
        return parts

    def _peek(self) -> str:
        """The next character that is not ignored; empty at the end."""
        while self._text[self._place : self._place + 1] in (",", " "):
            self._place += 1
        return self._text[self._place : self._place + 1]

    def _letter(self) -> list[_Part]:
        letter, position = self._text[self._place], self._place
        if letter == "*":
            raise _wrong(self._text, position, "there is nothing to repeat", f"{_LETTERS}, ( or |")
        if letter not in _FOLLOWS:
            raise _wrong(self._text, position, f"{letter!r} means nothing", f"{_LETTERS}, ( or |")
        self._place += 1
        return [_Part(letter, position)]

    def _group(self) -> list[_Part]:
        self._opened.append(self._place)
        if len(self._opened) > _DEEPEST:
            raise _wrong(self._text, self._place, "too many groups inside one another", f"up to {_DEEPEST}")
        self._place += 1
        parts = self._items()
        opened = self._opened.pop()
        if self._peek() != ")":
            raise _wrong(self._text, opened, "this ( is never closed", "a ) behind its group")
        if not parts:
            raise _wrong(self._text, self._place, "the group is empty", f"{_LETTERS}, ( or |")
        self._place += 1
        return parts

    def _repeated(self, item: list[_Part]) -> list[_Part]:
        if self._peek() != "*":
            return item
        self._place += 1
        self._peek()
        position, number = self._place, _NUMBER.match(self._text, self._place)
        if number is None:
            raise _wrong(self._text, position, "there is no number after *", "a whole number >= 1")
        self._place = number.end()
        digits = number[0].lstrip("0")
        if not digits:
            raise _wrong(self._text, position, "0 times is nothing", "a whole number >= 1")
        if len(digits) > len(f"{_MOST_PARTS}") or int(digits) * len(item) > _MOST_PARTS:
            raise _wrong(self._text, position, "the layout is too long", f"up to {_MOST_PARTS} parts")
        return item * int(digits)


def _check_order(text: str, parts: Sequence[_Part]) -> None:
    """E first, then layers, then multi-token prediction, L last; no stage without parts."""
    if parts[0].letter != "E":
        raise _wrong(text, parts[0].place, f"{parts[0].letter} stands before the embedding", "E")
    for before, part in pairwise(parts):
        if part.letter not in _FOLLOWS[before.letter]:
            allowed = " or ".join(_FOLLOWS[before.letter]) or "the end"
            what = "a stage is empty" if before.letter == part.letter == "|" else f"{part.letter} after {before.letter}"
            raise _wrong(text, part.place, what, allowed)
    if parts[-1].letter != "L":
        raise _wrong(text, len(text), "the layout ends without its head", "L")


def _check_total(text: str, what: str, got: int, wanted: int, field: str) -> None:
    if got != wanted:
        raise ConfigError(
            f"{FIELD} has the wrong number of {what}",
            got=f"{got} in {_shown(text)}",
            allowed=f"{wanted} ({field})",
            fix=f"{'add' if got < wanted else 'take away'} {abs(wanted - got)}, or leave it empty",
        )


def _wrong(text: str, position: int, what: str, allowed: str) -> ConfigError:
    """An error at an index of the text; users count characters from 1."""
    return ConfigError(
        f"{FIELD} at character {position + 1}: {what}",
        got=f"{_shown(text[position:]) if text[position:] else 'the end'} after {_shown(text[:position], is_end=True)}",
        allowed=allowed,
        fix=f"write it like Et*3|(t*4|)*14t*2,mL, or leave {FIELD} empty",
    )


def _shown(text: str, *, is_end: bool = False) -> str:
    if len(text) <= _SHOWN:
        return f"'{text}'"
    return f"'...{text[-_SHOWN:]}'" if is_end else f"'{text[:_SHOWN]}...'"


# ---------------------------------------------------------------------------------------------------------- balancing


def balanced_stages(*, layers: int, mtp_layers: int, stages: int, costs: StageCosts) -> tuple[Stage, ...]:
    """The split with the cheapest most expensive stage, exactly; of several such splits, the most even one.

    Evenness is the sum of squared costs. If that is equal too, later stages get more layers: under 1F1B the earlier
    ones hold more micro-batches. Raises a ConfigError if there are more `stages`, virtual ones included, than parts.
    """
    assert (len(costs.layers), len(costs.mtp)) == (layers, mtp_layers), "every layer has a cost"
    parts = [costs.embed, *costs.layers, costs.head + sum(costs.mtp)]  # MTP layers stay with the head
    if stages > len(parts):
        raise ConfigError(
            f"a model of {layers} layers is too short for parallel.pipeline x pipeline.stages_per_rank stages",
            got=stages,
            allowed=f"up to {len(parts)}: the layers, the embedding alone, the head alone",
        )
    starts = _even_starts(parts, stages)
    last = len(parts) - 1
    return tuple(
        Stage(
            embed=start == 0,
            layers=tuple(range(max(start - 1, 0), min(end, last) - 1)),
            mtp=tuple(range(mtp_layers)) if end > last else (),
            norm_and_head=end > last,
        )
        for start, end in zip(starts, [*starts[1:], len(parts)], strict=True)
    )


def _even_starts(parts: Sequence[float], count: int) -> list[int]:
    """First part of each of `count` runs: least largest sum, then least sum of squares. Dynamic programming."""
    sums = [0.0, *accumulate(parts)]
    # The least possible cost of the most expensive run: it is the cost of some run, and more than that works too.
    costs = sorted({end - start for number, start in enumerate(sums) for end in sums[number + 1 :]})
    limit = costs[bisect_left(costs, True, key=lambda limit: _runs_within(sums, limit) <= count)]
    # squares[end] is the least sum of squares of the first `end` parts in as many runs as there are rows of `begins`.
    squares, begins = [0.0] + [inf] * len(parts), []
    for _ in range(count):
        better, begin = [inf] * len(sums), [0] * len(sums)
        for end in range(1, len(sums)):
            for start in range(end - 1, -1, -1):
                cost = sums[end] - sums[start]
                if cost > limit:
                    break
                if squares[start] + cost**2 <= better[end]:  # equal: an earlier start, so later runs get more
                    better[end], begin[end] = squares[start] + cost**2, start
        squares = better
        begins.append(begin)
    end, starts = len(parts), []  # back from the last run
    for begin in reversed(begins):
        end = begin[end]
        starts.append(end)
    return starts[::-1]


def _runs_within(sums: Sequence[float], limit: float) -> float:
    """Runs that are needed if none may exceed a limit; infinite if one part exceeds it."""
    runs, start = 0, 0
    while start < len(sums) - 1:
        end = start
        while end + 1 < len(sums) and sums[end + 1] - sums[start] <= limit:
            end += 1
        if end == start:
            return inf
        runs, start = runs + 1, end
    return runs
