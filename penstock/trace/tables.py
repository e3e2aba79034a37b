"""Tables of one rank beside phases: streams, annotations (`record_function`), operators of a CPU, and counters.

An annotation has the device time of all kernels that were launched inside it, also inside nested ones, so rows overlap.
Autograd launches from threads of its own; a launch on a thread without annotations belongs to what is open on the
thread of the steps. A counter is a number over time that the profiler, or another tool, wrote into the trace; hardware
counters that CUPTI measured for ranges of kernels are counters too.
"""

from dataclasses import dataclass

import numpy as np

from penstock.trace.events import NONE, Flags, Floats, GpuKind, HostKind, Integers, Trace
from penstock.trace.intervals import union
from penstock.trace.phases import Phases
from penstock.trace.timeline import STEP_NAMES, RecordedStep, step_spans, timeline_of
from penstock.trace.tree import nest, open_at


@dataclass(frozen=True, kw_only=True)
class StreamRow:
    """One stream of the device."""

    stream: int
    events: int
    busy_us: float  # union of its events
    compute_us: float  # the sums of its kernels by kind
    communication_us: float
    copies_us: float
    exposed_us: float  # time of the device that is charged to it (penstock.trace.phases)
    phase: str  # with the most time on it


@dataclass(frozen=True, kw_only=True)
class AnnotationRow:
    """All annotations of one name."""

    name: str
    count: int
    host_us: float
    kernel_us: float  # of all events launched inside
    exposed_us: float
    events: int


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """All calls of an operator on a CPU, or all transfers of one name."""

    name: str
    count: int
    own_us: float  # without operators that it calls; several threads at once count once
    exposed_us: float  # time of the process that is charged to it (penstock.trace.phases)


@dataclass(frozen=True, kw_only=True)
class CounterRow:
    """One counter."""

    name: str
    samples: int
    least: float
    mean: float
    most: float
    last: float


def stream_rows(trace: Trace, phases: Phases) -> list[StreamRow]:
    """Streams by busy time, the longest first."""
    gpu, count = trace.gpu, len(trace.gpu)
    exposed_us = np.bincount(phases.event, phases.exposed_us, count)
    streams = []
    for stream in np.unique(gpu.stream).tolist():
        rows = gpu.stream == stream
        us = {kind: float(gpu.duration_us[rows & (gpu.kind == kind)].sum()) for kind in GpuKind}
        by_phase = np.bincount(phases.name_id, phases.kernel_us * rows[phases.event], len(phases.names))
        streams.append(
            StreamRow(
                stream=stream,
                events=int(rows.sum()),
                busy_us=timeline_of(gpu.take(rows)).busy_us,
                compute_us=us[GpuKind.COMPUTE] + us[GpuKind.SET],
                communication_us=us[GpuKind.COMMUNICATION],
                copies_us=us[GpuKind.COPY],
                exposed_us=float(exposed_us[rows].sum()),
                phase=phases.names[int(by_phase.argmax())],
            )
        )
    return sorted(streams, key=lambda row: (-row.busy_us, row.stream))


def operator_rows(trace: Trace, phases: Phases) -> list[OperatorRow]:
    """Operators of a CPU by own time, the longest first."""
    events = trace.gpu
    exposed_us = np.bincount(events.name_id[phases.event], phases.exposed_us, len(events.names))
    by_name = np.argsort(events.name_id, kind="stable")
    cuts = np.flatnonzero(np.diff(events.name_id[by_name])) + 1
    operators = [
        OperatorRow(
            name=events.name(int(rows[0])),
            count=len(np.unique(events.launch[rows])),  # an operator that calls others has several events
            own_us=union(events.start_us[rows], events.end_us[rows]).length_us,
            exposed_us=float(exposed_us[events.name_id[rows[0]]]),
        )
        for rows in np.split(by_name, cuts)
    ]
    return sorted(operators, key=lambda row: (-row.own_us, row.name))


def annotation_rows(trace: Trace, phases: Phases, steps: tuple[RecordedStep, ...]) -> list[AnnotationRow]:
    """Annotations that began within the steps, by device time and then by host time, the longest first."""
    host, gpu = trace.host, trace.gpu
    is_step = host.named(lambda name: any(names.fullmatch(name) for names in STEP_NAMES))
    is_span = (host.kind == HostKind.SPAN) & ~is_step  # steps have a table of their own
    if steps:
        end_us = steps[-1].start_us + steps[-1].duration_us
        is_span &= (host.start_us >= steps[0].start_us) & (host.start_us < end_us)
    spans = np.flatnonzero(is_span)
    if not len(spans):
        return []
    inside = _innermost(trace, is_span)
    exposed_us = np.bincount(phases.event, phases.exposed_us, len(gpu))
    parent = nest(host, spans).parent
    kernel_us, own_us, events = (np.zeros(len(host.names)) for _ in range(3))
    seen: list[Integers] = []  # names of the inner levels, to count nested annotations of one name once
    while (inside != NONE).any():
        name = np.where(inside == NONE, NONE, host.name_id[inside])
        new = (inside != NONE) & ~np.any([name == inner for inner in seen] or [np.zeros(len(name), dtype=bool)], axis=0)
        for sums, values in ((kernel_us, gpu.duration_us), (own_us, exposed_us), (events, np.ones(len(gpu)))):
            sums += np.bincount(name[new], values[new], len(sums))
        seen.append(name)
        inside = np.where(inside == NONE, NONE, parent[inside])
    count = np.bincount(host.name_id[spans], minlength=len(events))
    host_us = np.bincount(host.name_id[spans], host.duration_us[spans], len(events))
    annotations = [
        AnnotationRow(
            name=host.names[index],
            count=int(count[index]),
            host_us=float(host_us[index]),
            kernel_us=float(kernel_us[index]),
            exposed_us=float(own_us[index]),
            events=int(events[index]),
        )
        for index in np.flatnonzero(count).tolist()
    ]
    return sorted(annotations, key=lambda row: (-row.kernel_us, -row.host_us, row.name))


def _innermost(trace: Trace, is_span: Flags) -> Integers:
    """For each GPU event the row of the innermost of these spans that was open at its launch, or NONE."""
    host = trace.host
    threads, marked = np.unique(host.thread[is_span]), step_spans(trace)
    main = int(marked.thread[0]) if len(marked) else int(np.bincount(host.thread[is_span]).argmax())
    thread = np.append(host.thread, main)[trace.gpu.launch]
    thread = np.where(np.isin(thread, threads), thread, main)  # threads without spans are autograd's
    inside = np.full(len(thread), NONE)
    for number in threads.tolist():
        inside = np.where(thread == number, open_at(trace, is_span & (host.thread == number)), inside)
    return inside


def counter_rows(trace: Trace, steps: tuple[RecordedStep, ...]) -> list[CounterRow]:
    """Counters by name, over the steps; over the recording where no sample is in a step."""
    counters = []
    for name, (time_us, value) in sorted(trace.counters.items()):
        chosen: Floats = value
        if steps:
            begin_us, end_us = (
                steps[0].start_us,
                max(steps[-1].window_us[1], steps[-1].start_us + steps[-1].duration_us),
            )
            within = value[(time_us >= begin_us) & (time_us < end_us)]
            chosen = within if len(within) else value
        counters.append(
            CounterRow(
                name=name,
                samples=len(chosen),
                least=float(chosen.min()),
                mean=float(chosen.mean()),
                most=float(chosen.max()),
                last=float(chosen[-1]),
            )
        )
    return counters
