"""How a device spent its time: busy, compute, communication, copies, idle; for a whole trace and for each step.

    total = compute + exposed communication + exposed copies + idle

- total: from the start of the first GPU event to the end of the last one,
- busy: the union of all events,
- compute: the union of fills and of kernels that do not communicate,
- communication and copies (memcpy): unions too, so concurrent streams count once,
- exposed communication: without concurrent compute; exposed copies: without concurrent compute or communication,
- idle: total minus busy.

Kernels that were launched before the profiler started still run in its window. `timelines` therefore gives two
breakdowns of the whole recording, of `all` events and of `linked` ones, whose launch is in the trace.

Steps are torch.profiler's regions `ProfilerStep#N`, or Penstock's spans `step N`. The host runs ahead of the device, so
the events of a step are those that were launched in its region, and on the device it ends with the last of them, or
with its region if that is later. The next step begins there; the first begins with its region, or with its first event
on the stream that computes most if that waited for earlier work. All other tables are of the events in these windows
(`in_steps`), so warm-up and events of earlier steps count nowhere. On a CPU, the regions are the windows.
A stream runs in order: an event without a launch is of an earlier step if it precedes all linked ones of its stream.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from penstock.base.spans import Span
from penstock.trace.events import Flags, GpuEvents, GpuKind, HostEvents, HostKind, Trace
from penstock.trace.intervals import Intervals, union

STEP_NAMES = (re.compile(r"ProfilerStep\s*#(\d+)"), re.compile(rf"{Span.STEP}(?:[ #:](\d+))?"))
"""Names of steps: the profiler's, and Penstock's spans, which count where the profiler marked none."""

QUEUED_US, QUEUED = 100.0, 0.01  # waiting of a first event, and its share of the time before, that show earlier work

APART = 0.02  # share by which steps of the device and of the host differ before a note says so


@dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """How a stretch of time was spent, in microseconds; the module's docstring defines each term."""

    total_us: float
    busy_us: float
    compute_us: float
    communication_us: float
    exposed_communication_us: float
    memcpy_us: float
    exposed_memcpy_us: float
    idle_us: float
    events: int


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One training step."""

    name: str  # of the region, such as `ProfilerStep#15`
    number: int  # from the name, or counted from 0
    start_us: float  # when the host began it
    duration_us: float
    window_us: tuple[float, float]  # start and end on the device
    timeline: TimeBreakdown  # of that window, without events of earlier steps


@dataclass(frozen=True, kw_only=True)
class BusyIntervals:
    """When a device computed, communicated and copied."""

    compute: Intervals
    communication: Intervals
    copies: Intervals

    def within(self, start_us: float, end_us: float) -> "BusyIntervals":
        """The part between two times."""
        parts = (part.within(start_us, end_us) for part in (self.compute, self.communication, self.copies))
        compute, communication, copies = parts
        return BusyIntervals(compute=compute, communication=communication, copies=copies)


def busy_of(events: GpuEvents) -> BusyIntervals:
    def when(*kinds: GpuKind) -> Intervals:
        rows = np.isin(events.kind, kinds)
        return union(events.start_us[rows], events.end_us[rows])

    return BusyIntervals(
        compute=when(GpuKind.COMPUTE, GpuKind.SET), communication=when(GpuKind.COMMUNICATION), copies=when(GpuKind.COPY)
    )


def timeline_of(events: GpuEvents) -> TimeBreakdown:
    """The breakdown of these events, from the first to the last; all zeros without events."""
    if not len(events):
        return _spent(busy_of(events), 0.0, 0)
    total_us = float(events.end_us.max() - events.start_us[0])
    return _spent(busy_of(events), total_us, len(events))


def together(parts: Sequence[TimeBreakdown]) -> TimeBreakdown:
    """The sum of several stretches."""
    return TimeBreakdown(
        **{field.name: sum(vars(part)[field.name] for part in parts) for field in fields(TimeBreakdown)}
    )


def timelines(trace: Trace) -> dict[str, TimeBreakdown]:
    """`all`: of every GPU event. `linked`: of those whose launch is in the trace."""
    return {"all": timeline_of(trace.gpu), "linked": timeline_of(trace.gpu.take(trace.gpu.is_linked))}


def steps_of(trace: Trace) -> tuple[RecordedStep, ...]:
    """The steps of a trace in order; none if it has no step regions."""
    regions = step_spans(trace)
    launched = trace.gpu.take(~is_earlier(trace.gpu))
    busy = busy_of(launched)
    windows = list(zip(regions.start_us.tolist(), regions.end_us.tolist(), strict=True))
    if not trace.is_host and windows:
        windows = _windows(regions, trace)
    steps = []
    for row, (start_us, end_us) in enumerate(windows):
        digits = re.search(r"(\d+)$", regions.name(row))
        events = launched.starting_in(start_us, end_us)
        steps.append(
            RecordedStep(
                name=regions.name(row),
                number=int(digits[1]) if digits else row,
                start_us=float(regions.start_us[row]),
                duration_us=float(regions.duration_us[row]),
                window_us=(start_us, end_us),
                timeline=_spent(busy.within(start_us, end_us), end_us - start_us, events.stop - events.start),
            )
        )
    return tuple(steps)


def on_host_us(steps: Sequence[RecordedStep]) -> tuple[float, float] | None:
    """Start and end of all steps on the host; None without steps."""
    return (steps[0].start_us, steps[-1].start_us + steps[-1].duration_us) if steps else None


def lag_note(steps: Sequence[RecordedStep]) -> str | None:
    """A line for steps whose mean time on the device is not that on the host, by `APART` or more."""
    ran = [step for step in steps if step.timeline.events]
    if not ran:
        return None
    device_us = (ran[-1].window_us[1] - ran[0].window_us[0]) / len(ran)
    host_us = (ran[-1].start_us + ran[-1].duration_us - ran[0].start_us) / len(ran)
    if abs(device_us - host_us) <= APART * host_us:
        return None
    times = f"{device_us / 1e3:,.2f} ms on the device and {host_us / 1e3:,.2f} ms on the host"
    return f"a step takes {times}: tables cut steps by the launches of their events, not at the host's annotations"


def is_earlier(gpu: GpuEvents) -> Flags:
    """Mask of the events that were launched before the recording began."""
    first_us = np.full(len(gpu), np.inf)  # of each event, the start of the first linked event of its stream
    for stream in np.unique(gpu.stream):
        mine = gpu.stream == stream
        first_us[mine] = gpu.start_us[mine & gpu.is_linked].min(initial=np.inf)
    is_known = np.isfinite(first_us)
    # A stream without any launch in the trace was not recorded on the host; it counts from the first launch elsewhere.
    first_us[~is_known] = first_us[is_known].min(initial=-np.inf) if is_known.any() else -np.inf
    earlier: Flags = ~gpu.is_linked & (gpu.start_us < first_us)
    return earlier


def in_steps(trace: Trace, steps: Sequence[RecordedStep]) -> Flags:
    """Mask of the GPU events in the windows of steps; without any window, of all but those of earlier steps."""
    gpu = trace.gpu
    inside: Flags = ~is_earlier(gpu)
    windows = [step.window_us for step in steps if step.window_us[1] > step.window_us[0]]
    if not windows:
        return inside
    timed = np.zeros(len(gpu), dtype=bool)
    for start_us, end_us in windows:
        timed[gpu.starting_in(start_us, end_us)] = True
    return inside & timed


def step_spans(trace: Trace) -> HostEvents:
    """The host regions of steps: `ProfilerStep#N`, or else Penstock's own spans."""
    spans = trace.host.take(trace.host.kind == HostKind.SPAN)
    by_profiler, by_span = (spans.named(names.fullmatch) for names in STEP_NAMES)
    return spans.take(by_profiler if by_profiler.any() else by_span)


def _windows(regions: HostEvents, trace: Trace) -> list[tuple[float, float]]:
    """Start and end of every step on the device. A step that launched nothing has an empty window."""
    gpu, launched_us = trace.gpu, trace.launched_us
    # The step of each event: the last region that began before its launch, if it was still open; nan is in none.
    step = np.searchsorted(regions.start_us, launched_us, side="right") - 1
    inside = (step >= 0) & (launched_us < regions.end_us[step])
    if not inside.any():
        return [(float(regions.end_us[-1]), float(regions.end_us[-1]))] * len(regions)
    first = inside & (step == step[inside].min())
    streams, stream = np.unique(gpu.stream, return_inverse=True)
    computes = np.isin(gpu.kind, (GpuKind.COMPUTE, GpuKind.SET))
    main = first & (stream == np.bincount(stream, gpu.duration_us * computes, len(streams)).argmax())
    row = int((main if main.any() else first).argmax())  # the first event of the step, by start
    begin_us = float(gpu.start_us[row])
    if begin_us - launched_us[row] < max(QUEUED_US, QUEUED * (begin_us - regions.start_us[0])):
        begin_us = max(float(regions.start_us[0]), min(begin_us, float(gpu.end_us[:row].max(initial=-np.inf))))
    ends_us = np.maximum(regions.end_us, begin_us)
    np.maximum.at(ends_us, step[inside], gpu.end_us[inside])
    return list(pairwise([begin_us, *np.maximum.accumulate(ends_us).tolist()]))


def _spent(busy: BusyIntervals, total_us: float, events: int) -> TimeBreakdown:
    working = busy.compute | busy.communication
    busy_us = (working | busy.copies).length_us
    return TimeBreakdown(
        total_us=total_us,
        busy_us=busy_us,
        compute_us=busy.compute.length_us,
        communication_us=busy.communication.length_us,
        exposed_communication_us=(busy.communication - busy.compute).length_us,
        memcpy_us=busy.copies.length_us,
        exposed_memcpy_us=(busy.copies - working).length_us,
        idle_us=total_us - busy_us,
        events=events,
    )
