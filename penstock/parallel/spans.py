"""What a run shows of its time: named regions in traces, and seconds of each phase of a step.

    with span(Span.ATTENTION):
    with span(LAYER, 3):           the name is formatted only while the profiler runs

A span costs one check if the profiler is off. Backward needs none of its own: autograd's nodes carry the number of the
operator that made them. A span may be in captured or recomputed work, a transfer or a hook, because it launches
nothing; it must not last over a `yield` of work in steps (`within`).

    start, enter, ..., stop     a step
    start, enter, ...           the next step; the host waits for its figures
    stop                        returns the times of the first

The stopwatch records an event at each phase (on a CPU it reads the clock). It never waits for the device: events of a
step have run when the next step's figures are read, so times are known one step late.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from penstock.base.spans import Span

_NOTHING = nullcontext()


def span(name: str, *numbers: int | str) -> AbstractContextManager[object]:
    """A region of the current thread; the numbers fill the placeholders of the name."""
    return record_function(name.format(*numbers)) if _profiler_enabled() else _NOTHING


EnterPhase = Callable[[Span], None]
"""Called when a phase begins: `Stopwatch.enter`, or `untimed`."""


def untimed(phase: Span) -> None:
    del phase


Moment = float | torch.cuda.Event
"""Seconds of the host clock, or an event on the current stream."""


class Stopwatch:
    """Times of one process on one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._phases: list[Span] = []
        self._moments: list[Moment] = []
        self._last: tuple[list[Span], list[Moment]] | None = None
        self._unused: list[torch.cuda.Event] = []  # making one takes longer than all else here

    def start(self, phase: Span) -> None:
        """Begin a step; a failed one is forgotten."""
        self._phases, self._moments = [], []
        self.enter(phase)

    def enter(self, phase: Span) -> None:
        self._phases.append(phase)
        self._moments.append(self._now())

    def stop(self) -> dict[str, float]:
        """End a step. Returns seconds of each phase of the step before, which the device has finished."""
        self._moments.append(self._now())
        last, self._last = self._last, (self._phases, self._moments)
        total: dict[str, float] = {}
        if last is not None:  # the first step has none before it
            phases, moments = last
            for phase, (begin, end) in zip(phases, pairwise(moments), strict=True):
                total[phase.value] = total.get(phase.value, 0.0) + _seconds(begin, end)
            self._unused += [moment for moment in moments if isinstance(moment, torch.cuda.Event)]
        return total

    def _now(self) -> Moment:
        if not self._is_gpu:
            return time.perf_counter()
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event), "moments of one clock"
    return begin.elapsed_time(end) / 1e3  # from milliseconds
