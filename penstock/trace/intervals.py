"""Sets of times and their algebra, for instance the times in which a device was busy.

`Intervals` are half open, sorted, and neither overlap nor touch, so a set has one representation:

    compute = union(kernels.start_us, kernels.end_us)
    exposed = communication - compute
    exposed.length_us

A union sorts by start and takes the running maximum of the ends: a start beyond it begins a new interval. An
intersection pairs each interval with the run of overlapping intervals of the other set, found by bisection. A
difference is the intersection with the complement.
"""

from dataclasses import dataclass

import numpy as np

from penstock.trace.events import Floats


@dataclass(frozen=True, eq=False)
class Intervals:
    """A set of times."""

    start_us: Floats
    end_us: Floats

    def __len__(self) -> int:
        return len(self.start_us)

    def __or__(self, other: "Intervals") -> "Intervals":
        return union(np.concatenate([self.start_us, other.start_us]), np.concatenate([self.end_us, other.end_us]))

    def __and__(self, other: "Intervals") -> "Intervals":
        # Interval i of this set overlaps the intervals first[i] .. last[i] - 1 of the other.
        first = np.searchsorted(other.end_us, self.start_us, side="right")
        last = np.searchsorted(other.start_us, self.end_us, side="left")
        count = np.maximum(last - first, 0)
        # One row for each overlapping pair.
        mine = np.repeat(np.arange(len(self)), count)
        before = np.repeat(np.cumsum(count) - count, count)  # pairs of earlier intervals
        theirs = np.repeat(first, count) + np.arange(len(mine)) - before
        return Intervals(
            np.maximum(self.start_us[mine], other.start_us[theirs]), np.minimum(self.end_us[mine], other.end_us[theirs])
        )

    def __sub__(self, other: "Intervals") -> "Intervals":
        return self & other.outside()

    @property
    def length_us(self) -> float:
        return float((self.end_us - self.start_us).sum())

    def outside(self) -> "Intervals":
        """The complement, from minus to plus infinity."""
        return Intervals(np.append(-np.inf, self.end_us), np.append(self.start_us, np.inf))

    def gaps(self) -> "Intervals":
        return Intervals(self.end_us[:-1], self.start_us[1:])

    def within(self, start_us: float, end_us: float) -> "Intervals":
        """The part of the set between two times."""
        return self & union(np.array([start_us]), np.array([end_us]))

    def covered_us(self, start_us: Floats, end_us: Floats) -> Floats:
        """For each of several stretches, which may overlap, the time that is in the set."""
        return np.maximum(self.before_us(end_us) - self.before_us(start_us), 0.0)

    def before_us(self, time_us: Floats) -> Floats:
        """Time in the set before each of these times."""
        if not len(self):
            return np.zeros(len(time_us))
        total = np.append(0.0, np.cumsum(self.end_us - self.start_us))  # length of the first n intervals
        begun = np.searchsorted(self.start_us, time_us, side="right")  # intervals that began by each time
        last = np.maximum(begun - 1, 0)
        # The part of the last begun interval that is after the time.
        beyond = np.maximum(self.end_us[last] - np.maximum(time_us, self.start_us[last]), 0.0)
        return np.where(begun > 0, total[begun] - beyond, 0.0)


def union(start_us: Floats, end_us: Floats) -> Intervals:
    """The set of times between any start and its end. An end before its start gives an empty interval."""
    some = end_us > start_us
    start_us, end_us = start_us[some], end_us[some]
    order = np.argsort(start_us, kind="stable")
    start_us, reached = start_us[order], np.maximum.accumulate(end_us[order])
    # A start beyond every earlier end begins a new interval; without any start the slices are empty.
    begins = np.append(True, start_us[1:] > reached[:-1])[: len(start_us)]
    ends = np.append(begins[1:], True)[: len(start_us)]  # an interval ends before the next one begins
    return Intervals(start_us[begins], reached[ends])
