"""Times every implementation of every operator on this GPU, for the shapes of one run: `penstock kernels tune`.

A clock times calls that take turns, each on inputs of its own, so that together they move several times what the L2
cache holds. `GpuClock` keeps the device busy while the host queues them, so what is measured is the device and not how
fast Python launches; an implementation that waits for the host is charged for that. Times are medians of some rounds.

Here and not in a training step: a first step that searches is slow, differs between ranks, and is not the same twice.
"""

import math
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Protocol

import torch

from penstock.kernels.device_facts import DeviceFacts
from penstock.kernels.measured import Measurements, OperatorTimes
from penstock.tune.cases import Call, Case, Workload, cases

MOST_COPIES = 16
"""Sets of inputs at most."""

MOST_BUSY_SECONDS = 0.02
"""The device is kept busy no longer; calls that take the host so long wait for the device anyway."""


class Clock(Protocol):
    """Times calls that do the same on different inputs.

    Attributes:
        rotation: bytes that the inputs of all calls should have together.
    """

    rotation: int

    def __call__(self, calls: Sequence[Call]) -> float:
        """Microseconds of one call."""
        ...


class GpuClock:
    """Times calls on the current GPU by events of its stream; inputs are several times as large as its L2 cache.

    Args:
        rounds: of which the median is taken.
        least_ms: device time that a round should have at least.
        most_calls: of a round; more would fill the device's queue.
    """

    rotation = 2**28

    def __init__(self, rounds: int = 7, least_ms: float = 2.0, most_calls: int = 32) -> None:
        self._rounds = rounds
        self._least_ms = least_ms
        self._most_calls = most_calls

    def __call__(self, calls: Sequence[Call]) -> float:
        """See `Clock`."""
        for call in (*calls, *calls):  # compiles, and finds the device's clock rates
            call()
        calls = [*calls] * math.ceil(4 / len(calls))
        queued, least = self._round(calls, busy_seconds=0.0)
        repeats = min(math.ceil(self._least_ms / least), self._most_calls // len(calls)) or 1
        busy_seconds = min(1.5 * queued * repeats, MOST_BUSY_SECONDS)
        times = [self._round([*calls] * repeats, busy_seconds)[1] for _ in range(self._rounds)]
        return median(times) / len(calls) / repeats * 1e3

    def _round(self, calls: Sequence[Call], busy_seconds: float) -> tuple[float, float]:
        """Seconds in which the host queued the calls, and milliseconds in which the device ran them."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        # At least so long: the argument is cycles, and no GPU runs at more than 3 GHz.
        torch.cuda._sleep(int(busy_seconds * 3e9))
        start.record()
        began = time.perf_counter()
        for call in calls:
            call()
        queued = time.perf_counter() - began
        stop.record()
        stop.synchronize()
        return queued, start.elapsed_time(stop)


def measure(work: Workload, facts: DeviceFacts, clock: Clock) -> Iterator[OperatorTimes]:
    """Time every case of a workload; a generator, so that somebody can watch.

    Args:
        work: what to time.
        facts: of the device that it is on.
        clock: of that device.
    """
    for case in cases(work, facts):
        times = {backend: _time(case, backend, clock) for backend in case.backends}
        yield OperatorTimes(
            op=case.part.op,
            direction=case.part.direction,
            dtype=facts.dtype,
            skew=case.skew,
            shape=case.shape,
            microseconds={backend: round(time, 2) for backend, time in times.items() if time is not None},
        )


def _time(case: Case, backend: str, clock: Clock) -> float | None:
    """Microseconds, or None if it does not fit into the device's memory."""
    try:
        torch.manual_seed(0)
        first = case.draw()
        copies = math.ceil(clock.rotation / sum(x.nbytes for x in first))
        inputs = [first, *(case.draw() for _ in range(min(copies, MOST_COPIES) - 1))]
        return clock([case.bind(backend, one) for one in inputs])
    except torch.OutOfMemoryError:
        return None


def environment() -> dict[str, str]:
    """Versions that times depend on."""
    try:
        triton = version("triton")
    except PackageNotFoundError:  # on AMD it has another name, whose version is torch's
        triton = "with torch"
    return {"torch": torch.__version__, "triton": triton}


def merged(old: Measurements | None, new: Measurements) -> Measurements:
    """What a file shall hold: other shapes stay if they were measured on the same device with the same versions."""
    if old is None or (old.device, old.environment) != (new.device, new.environment):
        return new
    return old.with_entries(new.entries)


def winner(entry: OperatorTimes) -> str:
    """The fastest backend of an entry."""
    return min(entry.microseconds, key=lambda backend: entry.microseconds[backend])
