"""Rounds of a campaign: faults in turn, by a seed, for a time; and how often each has happened."""

import random
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.faults import ALONE, TOGETHER
from tests.campaign.runs import TWO_RANKS, Reference, make_folder, reference


@dataclass(frozen=True)
class Round:
    """One disturbed run."""

    kind: str
    seed: int
    happened: int  # how often the fault did
    why: str = ""  # what went wrong; empty if the run equals the one that nothing disturbed


def rounds(folder: Path, seconds: float, seed: int, kinds: Sequence[str] = (), first: int = 0) -> Iterator[Round]:
    """Disturb run after run until the time is over, at least one for each kind; `first` is the number of the first."""
    names = list(kinds) or [*ALONE, *TOGETHER]
    wanted: dict[str, Reference] = {}
    if not TOGETHER.keys().isdisjoint(names):
        wanted |= dict.fromkeys(TOGETHER, reference(folder / "together", TWO_RANKS))
    if not ALONE.keys().isdisjoint(names):
        wanted |= dict.fromkeys(ALONE, reference(folder / "alone"))
    end, number = time.monotonic() + seconds, first
    while number < first + len(names) or time.monotonic() < end:
        kind, own = names[number % len(names)], seed * 1_000_003 + number
        place = folder / f"round-{number}"
        make_folder(place)
        try:
            happened = (ALONE | TOGETHER)[kind](place, random.Random(own), wanted[kind])
        except (AssertionError, OSError, ValueError, LookupError) as error:
            traceback.print_exc(file=sys.stderr)
            yield Round(kind, own, 0, f"{type(error).__name__}: {error!s:.300}")
        else:
            yield Round(kind, own, happened)
            shutil.rmtree(place)
        number += 1


def summary(done: Sequence[Round]) -> Mapping[str, Mapping[str, int]]:
    """Runs, faults that happened in them, and runs that differ, by kind."""
    kinds = sorted({one.kind for one in done})
    return {
        kind: {
            "runs": sum(one.kind == kind for one in done),
            "faults": sum(one.happened for one in done if one.kind == kind),
            "wrong": sum(bool(one.why) for one in done if one.kind == kind),
        }
        for kind in kinds
    }
