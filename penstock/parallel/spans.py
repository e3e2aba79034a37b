"""Named regions in traces, for nothing where nobody records.

    with span(Span.ATTENTION):
    with span(LAYER, 3):           the name is put together only if somebody records

While the profiler runs, on this thread or on the one whose backward pass this thread does, a region is an event of its
trace, and operators that are called inside lie inside. Backward has no regions of its own: autograd's nodes carry the
number of the operator that made them, and so lead to the region where that was called. Else a region is one check and
no object.

A region may stand inside captured work, a recomputed one, a transfer or a hook: it gives the device nothing to do. It
must not last over a stop of work in pieces (`penstock.parallel.async_transfer.within`).
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
    """A region of the current thread, from its beginning to its end.

    Args:
        name: of `penstock.base.spans`.
        numbers: for the places of the name.
    """
    return record_function(name.format(*numbers)) if _profiler_enabled() else _NOTHING


EnterPhase = Callable[[Span], None]
"""Says that a phase begins here: `Stopwatch.enter`, or `untimed`."""


def untimed(phase: Span) -> None:
    """Where nobody measures."""
    del phase


Moment = float | torch.cuda.Event
"""Of the host, in seconds; or of the device: when it comes to here on the current stream."""


class Stopwatch:
    """Times of one process.

    Args:
        device: whose time is meant.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._phases: list[Span] = []
        self._moments: list[Moment] = []
        self._last: tuple[list[Span], list[Moment]] | None = None
        self._unused: list[torch.cuda.Event] = []  # making one takes longer than all else here

    def start(self, phase: Span) -> None:
        """Begin a step, with its first phase. What a step that failed has left is forgotten."""
        self._phases, self._moments = [], []
        self.enter(phase)

    def enter(self, phase: Span) -> None:
        """End the phase that is, and begin one."""
        self._phases.append(phase)
        self._moments.append(self._now())

    def stop(self) -> dict[str, float]:
        """End a step. Returns the seconds of each phase of the step before, which the device has done by now."""
        self._moments.append(self._now())
        last, self._last = self._last, (self._phases, self._moments)
        total: dict[str, float] = {}
        if last is not None:
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
    return begin.elapsed_time(end) / 1e3
