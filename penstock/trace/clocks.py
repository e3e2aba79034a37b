"""How far the clocks of ranks are apart, told by moments that they share.

Ranks leave an all-reduce, all-gather, reduce-scatter or all-to-all together. So the end of each is one moment, seen
on as many clocks as there are ranks, and

    ahead of rank r = median over collectives of (its end - the median of all ranks' ends)

The median forgives the few that ended unevenly; what is within its own error counts as nothing, because the clocks of
one host are one clock. Groups of the same ranks give one such list each; lists are joined at the ranks that they share,
those of many strict collectives first. Ranks that no chain of groups joins stay on islands: their times cannot be
compared, and nothing here pretends so.

Simpler than following drift: over the seconds of a trace, clocks of one machine room part by less than a kernel's
launch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.trace.calls import Calls, Way
from penstock.trace.events import NONE, Flags, Floats, Integers


@dataclass(frozen=True, kw_only=True, eq=False)
class Clocks:
    """What must be taken off each rank's times.

    Attributes:
        ahead_us: of each rank, against the median clock of its island.
        island: that each rank is on; only ranks of one island can be compared.
        shared: moments that each rank's clock was told by.
        spread_us: half of these moments lie within this of what `ahead_us` says; 0 if there are none.
    """

    ahead_us: Floats
    island: Integers
    shared: Integers
    spread_us: Floats

    def start_us(self, calls: Calls) -> Floats:
        """Starts on the common clock."""
        return calls.start_us - self.ahead_us[calls.rank]

    def end_us(self, calls: Calls) -> Floats:
        """Ends on the common clock."""
        return calls.end_us - self.ahead_us[calls.rank]

    def is_joined(self, present: Flags) -> Flags:
        """Whether all ranks that are present in each row stand on one island."""
        highest = np.where(present, self.island, NONE).max(axis=1, initial=NONE)
        lowest = np.where(present, self.island, len(self.island)).min(axis=1, initial=len(self.island))
        joined: Flags = highest == lowest
        return joined


@dataclass(frozen=True, kw_only=True, eq=False)
class _Circle:
    """What one set of ranks says of each other's clocks."""

    members: Integers
    ahead_us: Floats
    moments: int
    is_strict: bool


def clocks_of(calls: Calls, met: Integers) -> Clocks:
    """Clocks of all ranks.

    Args:
        calls: the kernels.
        met: rows of `calls` that met, a column for each rank; NONE if it took no part.
    """
    ranks = len(calls.ranks)
    ahead_us, island = np.zeros(ranks), np.arange(ranks)
    met = _telling(calls, met)
    circles = _circles(calls, met)
    for circle in sorted(circles, key=lambda one: (one.is_strict, one.moments), reverse=True):
        first, *others = circle.members
        for other, apart in zip(others, circle.ahead_us[1:] - circle.ahead_us[0], strict=True):
            if island[other] != island[first]:
                moved = island == island[other]
                ahead_us[moved] += ahead_us[first] + apart - ahead_us[other]
                island[moved] = island[first]
    for one in np.unique(island):
        ahead_us[island == one] -= np.median(ahead_us[island == one])
    shared, spread_us = _spread(calls, met, ahead_us)
    ahead_us[np.abs(ahead_us) <= spread_us / np.sqrt(np.maximum(shared, 1))] = 0.0
    return Clocks(ahead_us=ahead_us, island=island, shared=shared, spread_us=spread_us)


def _telling(calls: Calls, met: Integers) -> Integers:
    """Meetings of at least two ranks whose ends are one moment."""
    present = met != NONE
    way = np.where(present, calls.way[met], Way.TOGETHER).max(axis=1, initial=Way.TOGETHER)
    return met[(present.sum(axis=1) > 1) & (way <= Way.UNEVEN)]


def _circles(calls: Calls, met: Integers) -> list[_Circle]:
    """One for each set of ranks that met, by its strict collectives if it has any."""
    present = met != NONE
    circles = []
    packed: NDArray[np.uint8] = np.packbits(present, axis=1)
    _, first, kinds = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    for kind, example in enumerate(first):
        members = np.flatnonzero(present[example])
        rows = met[kinds.reshape(-1) == kind][:, members]
        is_strict = calls.way[rows[:, 0]] == Way.TOGETHER
        if is_strict.any():
            rows = rows[is_strict]
        ends = calls.end_us[rows]
        ahead = np.median(ends - np.median(ends, axis=1, keepdims=True), axis=0)
        circles.append(_Circle(members=members, ahead_us=ahead, moments=len(rows), is_strict=bool(is_strict.any())))
    return circles


def _spread(calls: Calls, met: Integers, ahead_us: Floats) -> tuple[Integers, Floats]:
    """How many moments each rank shared, and how far from the common one its ends lie, in strict ones if it has any."""
    present = met != NONE
    shared, spread = present.sum(axis=0), np.zeros(len(ahead_us))
    if not len(met):
        return shared, spread
    ends = np.where(present, calls.end_us[met] - ahead_us, np.nan)
    away = np.abs(ends - np.nanmedian(ends, axis=1, keepdims=True))
    is_strict = np.where(present, calls.way[met], Way.TOGETHER).max(axis=1) == Way.TOGETHER
    for rank in np.flatnonzero(shared):
        strict = is_strict & present[:, rank]
        spread[rank] = np.median(away[strict if strict.any() else present[:, rank], rank])
    return shared, spread
