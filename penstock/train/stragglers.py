"""Which rank is late while a run trains, and why: rank 0 judges figures that every rank sends with those of a step.

    every step        each rank sends its `RankPulse`, in the all-reduce of the step's figures
    every `WINDOW`    rank 0 takes medians over the steps, compares ranks, and prints a line if the finding is new

A rank is late if its part of a step before the sum of gradients takes `LATE` of the step longer than that of the median
rank: the others wait for it. Ranks that exchange tokens or messages wait for each other inside of it and look equally
long, so a rank is late too if its rows, or the launches of its host, take that much longer and fill the step, or if its
clock is low. The cause is what explains most of it: rows (data), the clock of the GPU, the host, else its computing. If
no rank is late and the sum of gradients takes `SLOWER` of the step longer than in the fastest window, it is the
network. Times that kernels spend in collectives are in no figure of the run: traces and `penstock doctor` have them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW = 20
"""Steps that are judged together."""

WARM_UP = 5
"""First steps of a process, which compile and are not judged."""

LATE, SLOWER = 0.05, 0.2
"""Shares of the step."""

SURE = 0.15
"""Share of the step from which one window is enough; less must be found in two windows one after the other."""

LOW_CLOCK = 0.9
"""Share of the median clock below which a clock is low. Clocks of H200s that are limited by power differ by less."""

FULL = 0.95
"""Share of the step from which a host that launches never waits for its device."""


class RankPulse(NamedTuple):
    """Figures of one rank in a step. 0 is unknown."""

    data: float = 0.0  # seconds that the host waited for its rows
    work: float = 0.0  # seconds of the device, or of the CPU, without the sum of gradients
    host: float = 0.0  # seconds in which the host launched the passes
    clock: float = 0.0  # MHz of the GPU


Floats = NDArray[np.float64]
Cause = Literal["data", "GPU clock", "host", "computing", "network"]


@dataclass(frozen=True)
class LateFinding:
    """A late rank, or the network."""

    rank: int  # -1: the network of all ranks
    cause: Cause
    seconds: float  # of a step that the others wait; 0 if only the clock is known
    detail: str


class StragglerWatch:
    """Finds late ranks on rank 0; `host_of` gives the machine of a rank."""

    def __init__(self, host_of: Callable[[int], str]) -> None:
        self._host_of = host_of
        self._seen = 0
        self._steps: list[tuple[float, tuple[RankPulse, ...]]] = []
        self._least_sums: float | None = None  # seconds that no rank worked, in the fastest window
        self._last: LateFinding | None = None
        self._told: LateFinding | None = None

    def add(self, seconds: float, pulses: tuple[RankPulse, ...]) -> tuple[str, ...]:
        """Add a step; returns what is new, a line each."""
        self._seen += 1
        if len(pulses) < 2 or self._seen <= WARM_UP or not all(pulse.work for pulse in pulses):
            return ()
        self._steps.append((seconds, pulses))
        if len(self._steps) < WINDOW:
            return ()
        step = median(seconds for seconds, _ in self._steps)
        figures = np.median(np.array([pulses for _, pulses in self._steps]), axis=0)
        self._steps = []
        sums = max(0.0, step - float(figures[:, 1].max()))
        delay = late_rank(step, figures) or self._network(step, sums)
        self._least_sums = sums if self._least_sums is None else min(sums, self._least_sums)
        last, self._last = self._last, delay
        if delay is None:
            before, self._told = self._told, None
            return () if before is None else (f"{self._named(before)} no longer late ({before.cause})",)
        is_large = delay.seconds >= SURE * step
        if _same(delay, self._told) or not (is_large or _same(delay, last)):
            return ()
        self._told = delay
        share = f"{delay.seconds:.3g} s of a step of {step:.3g} s, " if delay.seconds else ""
        return (f"{self._named(delay)} late: {share}median of {WINDOW} steps; cause: {delay.cause}, {delay.detail}",)

    def _network(self, step: float, sums: float) -> LateFinding | None:
        least = sums if self._least_sums is None else self._least_sums
        if sums - least < SLOWER * step:
            return None
        detail = f"no rank works longer, and the sum of gradients takes {sums:.3g} s instead of {least:.3g} s"
        return LateFinding(-1, "network", sums - least, detail)

    def _named(self, delay: LateFinding) -> str:
        return "all ranks are" if delay.rank < 0 else f"rank {delay.rank} on {self._host_of(delay.rank)} is"


def _same(delay: LateFinding, other: LateFinding | None) -> bool:
    return other is not None and (delay.rank, delay.cause) == (other.rank, other.cause)


def late_rank(step: float, figures: Floats) -> LateFinding | None:
    """The latest rank, or None.

    Args:
        step: seconds of a step.
        figures: a row for each rank, the medians of its `RankPulse` over some steps.
    """
    data, host, clock = figures[:, 0], figures[:, 2], figures[:, 3]
    longer = figures - np.median(figures, axis=0)
    usual = float(np.median(clock[clock > 0])) if (clock > 0).any() else 0.0
    is_low = (clock > 0) & (clock < LOW_CLOCK * usual)
    # Ranks that wait for each other work equally long, so a rank can be late without a longer part of the step.
    launches = np.where(data + host >= FULL * step, longer[:, 2], 0.0)
    lost = np.stack((longer[:, 0], longer[:, 1], launches)).max(axis=0)
    rank = int(lost.argmax())
    seconds = float(lost[rank])
    if seconds < LATE * step:
        if not is_low.any():
            return None
        rank, seconds = int(np.where(is_low, clock, np.inf).argmin()), 0.0
    if seconds and longer[rank, 0] >= seconds / 2:
        return LateFinding(rank, "data", seconds, f"its rows take {data[rank]:.3g} s")
    if is_low[rank]:
        return LateFinding(rank, "GPU clock", seconds, f"{clock[rank]:,.0f} MHz, {usual:,.0f} MHz in the median")
    if longer[rank, 2] >= seconds / 2:
        return LateFinding(rank, "host", seconds, f"its passes take {host[rank]:.3g} s to launch")
    return LateFinding(rank, "computing", seconds, "with the clock of the others: fuller experts, or a slower device")
