"""Tables of one rank beside phases: streams, annotations (`record_function`), operators of a CPU, counters, and calls.

An annotation has the device time of all kernels that were launched inside it, also inside nested ones, so rows overlap.
Autograd launches from threads of its own; a launch on a thread without annotations belongs to what is open on the
thread of the steps. A counter is a number over time that the profiler, or another tool, wrote into the trace; hardware
counters that CUPTI measured for ranges of kernels are counters too.

A call is an operator with the shapes and types of its arguments, and with its scalar arguments where they change the
work (a causal mask, the stride of a convolution). Thousands of events are a few hundred different calls, so results per
call (penstock.trace.work) are computed once. Calls are compared by their text in the file; one of each is decoded.

`hierarchy` gives all device time as leaves of one tree: step, pipeline action, layer, phase, pass, operator, shapes,
kernel. A level that an event does not have is empty or None: without a launch there is neither step nor operator.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.trace.events import DAMAGE, NONE, Flags, Floats, GpuKind, HostKind, Integers, Trace, decoded_or
from penstock.trace.intervals import union
from penstock.trace.kernel_names import function_of
from penstock.trace.phases import PASSES, Phases, grouped
from penstock.trace.timeline import STEP_NAMES, RecordedStep, step_spans, timeline_of
from penstock.trace.tree import Placement, nest, open_at


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


WITH_ARGUMENTS = re.compile(r"attention|conv(?!ert)|aten::(sum|mean|cat|softmax|_softmax|_log_softmax)")
"""Operators whose scalar arguments change the work."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class OperatorCall:
    """An operator with the shapes of its arguments."""

    name: str
    # Of each argument: a shape, a tuple of shapes for a list of tensors, `()` for other arguments.
    shapes: tuple[Any, ...]
    types: tuple[str, ...]  # of each argument, in the profiler's words (`c10::BFloat16`, `Scalar`, `TensorList`)
    plain: tuple[str, ...] = ()  # scalar arguments as text; empty where they do not change the work
    made_by: "OperatorCall | None" = None  # for the backward of a Python autograd function, the forward call


@dataclass(frozen=True, kw_only=True, eq=False)
class CallTable:
    """The different calls of a trace."""

    calls: tuple[OperatorCall, ...]
    call_of: Integers  # index into `calls` for each row of `Trace.gpu`, or NONE
    row_of: Integers  # row in `Trace.host` of the operator for each row of `Trace.gpu`, or NONE


class _Args(msgspec.Struct, gc=False, frozen=True):
    """The `args` of an operator that are read, still as text."""

    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    plain: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Concrete Inputs")


_DECODER, _NOTHING = msgspec.json.Decoder(_Args), _Args()
_Key = tuple[int, bytes, bytes, bytes, int]


def calls_made(trace: Trace, placement: Placement) -> CallTable:
    """The call behind each GPU event."""
    host, row_of = trace.host, placement.operator
    rows, event = np.unique(row_of, return_inverse=True)  # distinct operators, and the index of each event's among them
    makers = np.full(len(rows), NONE)
    makers[event] = placement.maker
    known: dict[_Key, int] = {}  # key -> index into `calls`
    calls: list[OperatorCall] = []

    def index_of(row: int, maker: int) -> int:
        if row == NONE:
            return NONE
        name = trace.names[host.name_id[row]]
        args = decoded_or(_NOTHING, _DECODER, host.raw[row])
        plain = bytes(args.plain) if WITH_ARGUMENTS.search(name) else b""
        made_by = index_of(maker, NONE) if maker != NONE and "::" not in name and name.endswith("Backward") else NONE
        # Equal text is an equal call; only the first one is decoded.
        key = (int(host.name_id[row]), bytes(args.dims), bytes(args.types), plain, made_by)
        if key not in known:
            known[key] = len(calls)
            calls.append(
                OperatorCall(
                    name=name,
                    shapes=_frozen(_value(key[1])),
                    types=tuple(str(dtype) for dtype in _value(key[2])),
                    plain=tuple(str(argument) for argument in _value(plain)),
                    made_by=None if made_by == NONE else calls[made_by],
                )
            )
        return known[key]

    of_row = np.array([index_of(row, maker) for row, maker in zip(rows.tolist(), makers.tolist(), strict=True)])
    return CallTable(calls=tuple(calls), call_of=of_row.astype(np.int64)[event], row_of=row_of)


def _value(text: bytes) -> list[Any]:
    try:
        value = msgspec.json.decode(text) if text else []
    except DAMAGE:  # such as a number out of range
        return []
    return value if isinstance(value, list) else []


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------------------ hierarchy


class Leaf(NamedTuple):
    """Kernels of one name from calls of one operator on the same shapes, at one place: its name, events and time."""

    step: str
    action: str
    layer: int | None
    phase: str
    pass_: str
    operator: str
    shapes: tuple[Any, ...]
    kernel: str
    events: int
    kernel_us: float
    exposed_us: float


def hierarchy(trace: Trace, phases: Phases) -> list[Leaf]:
    """The leaves, longest first."""
    placement = phases.placement
    calls = calls_made(trace, placement)
    event = phases.event  # columns of the trace by entry of `phases`: an event that waited has two
    groups, group = grouped(
        placement.step[event],
        np.append(trace.host.name_id, NONE)[placement.action][event],  # micro-batches of one name are one action
        phases.layer,
        phases.name_id,
        phases.pass_id,
        calls.call_of[event],
        trace.gpu.name_id[event],
    )
    counts = np.bincount(group, minlength=len(groups)).tolist()
    kernel_us = np.bincount(group, phases.kernel_us, len(groups)).tolist()
    exposed_us = np.bincount(group, phases.exposed_us, len(groups)).tolist()
    leaves = [
        Leaf(
            step="" if step == NONE else trace.host.name(step),
            action="" if action == NONE else trace.names[action],
            layer=None if layer == NONE else layer,
            phase=phases.names[phase],
            pass_=PASSES[pass_],
            operator="" if call == NONE else calls.calls[call].name,
            shapes=() if call == NONE else calls.calls[call].shapes,
            kernel=function_of(trace.names[kernel]),
            events=counts[index],
            kernel_us=kernel_us[index],
            exposed_us=exposed_us[index],
        )
        for index, (step, action, layer, phase, pass_, call, kernel) in enumerate(groups)
    ]
    return sorted(leaves, key=lambda leaf: -leaf.kernel_us)
