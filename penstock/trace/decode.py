"""The text of a trace, decoded into the columns of a `Trace`.

1. One typed pass over the JSON, in which the `args` of an event stay text. Profilers have written numbers that are not
   JSON (`inf`, `nan`) and bytes that are not UTF-8; such a text is repaired once before it is refused.
2. Events are sorted by category. Python functions are most of a file with stacks, and are skipped. An event whose
   category is on no list runs on a device if its `args` name a stream; other such events are counted in a note.
3. Of the remaining events, only the integers in `args` that join events are decoded.
4. Every GPU event gets the runtime call that started it: by `correlation`, or by the arrow (`ac2g`) between them where
   a tool wrote no correlation.
5. A stream runs in order, so an event that overruns the next one of its stream by far is cut there, and an event that
   lasts by far longer than all else in the file is left out; a note names both.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.base.errors import TraceError
from penstock.base.numbers import printable
from penstock.trace.events import (
    DAMAGE,
    GARBAGE,
    NONE,
    ArgsColumn,
    Floats,
    GpuEvents,
    HostEvents,
    HostKind,
    Integers,
    Thread,
    Trace,
    decoded_or,
)
from penstock.trace.kernel_names import kind_of

_NO_TEXT = msgspec.Raw()


class ChromeEvent(msgspec.Struct, gc=False):
    """An event in Chrome's format: phase, category, process, thread, microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float | None = None
    dur: float | None = None
    id: int | str | None = None
    args: msgspec.Raw = _NO_TEXT


class TraceFile(msgspec.Struct):
    """The events and the other entries of torch.profiler that are read."""

    traceEvents: list[ChromeEvent]  # noqa: N815  (keys of the file)
    deviceProperties: msgspec.Raw = _NO_TEXT  # noqa: N815
    distributedInfo: msgspec.Raw = _NO_TEXT  # noqa: N815
    baseTimeNanoseconds: msgspec.Raw = _NO_TEXT  # noqa: N815
    host_name: msgspec.Raw = _NO_TEXT
    cuda_runtime_version: msgspec.Raw = _NO_TEXT
    cuda_driver_version: msgspec.Raw = _NO_TEXT
    hip_runtime_version: msgspec.Raw = _NO_TEXT
    hip_driver_version: msgspec.Raw = _NO_TEXT
    penstock: msgspec.Raw = _NO_TEXT


class JoinKeys(msgspec.Struct, gc=False):
    """The integers in `args` that join events; `external_once` is the spelling of old profilers."""

    correlation: int = NONE
    stream: int | str | None = None  # ROCm writes "0x0" on calls of the host
    device: int | str | None = None
    external: int = msgspec.field(name="External id", default=NONE)
    external_once: int = msgspec.field(name="external id", default=NONE)
    sequence: int = msgspec.field(name="Sequence number", default=NONE)


_FILE = msgspec.json.Decoder(TraceFile)
_LIST = msgspec.json.Decoder(list[ChromeEvent])
_JOINS = msgspec.json.Decoder(JoinKeys, strict=False)
_ANY = msgspec.json.Decoder()
_NOTHING = JoinKeys()
_LAX_FILE = msgspec.json.Decoder(TraceFile, strict=False)
_LAX_LIST = msgspec.json.Decoder(list[ChromeEvent], strict=False)  # for times that a tool wrote as text
_UNNUMBER = re.compile(rb"(:\s*)[-+]?(?:infinity|inf|nan)\b", re.IGNORECASE)


def parse(text: bytes, path: Path) -> TraceFile:
    """The events of a text. Raises a TraceError if it is empty, not JSON, or not a list of events."""
    start = text[:64].lstrip()[:1]
    if not start and not text.strip():
        raise TraceError(f"{path} is empty", fix="record it again")
    if text[257:262] == b"ustar":
        raise TraceError(f"{path} is a tar archive", fix="unpack it first: tar xf")
    if start == b"{" and b'"nodes"' in text[:_HEAD_BYTES] and b'"traceEvents"' not in text:
        what = f"{path} is an execution trace (torch.profiler.ExecutionTraceObserver, Chakra), which has no times"
        raise TraceError(what, fix="give the recording of torch.profiler beside it")
    try:
        return _parsed(text, start)
    except DAMAGE as error:
        try:
            # Null for numbers that JSON does not have, and a replacement character for bytes that are not UTF-8.
            whole = _UNNUMBER.sub(rb"\1null", text).decode(errors="replace").encode()
            return _parsed(whole, start, _LAX_LIST, _LAX_FILE)
        except DAMAGE:
            raise TraceError(
                f"{path} is no trace of torch.profiler, or damaged: {reason(error)}",
                fix="if it was cut off while it was written or copied, record or copy it again",
            ) from error


def joins_of(events: Iterable[ChromeEvent], path: Path) -> list[JoinKeys]:
    """The join keys of each event. Raises a TraceError if the `args` of one are damaged."""
    decode = _JOINS.decode  # looked up once: there are millions of events
    try:
        return [decode(event.args) if event.args else _NOTHING for event in events]
    except DAMAGE as error:
        raise TraceError(f"{path}: args of an event are damaged: {reason(error)}", fix="record it again") from error


def value_of(text: msgspec.Raw) -> object:
    """The decoded value of a part of a file; None if it is absent."""
    return msgspec.json.decode(text) if bytes(text) else None


def reason(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _parsed(
    text: bytes,
    start: bytes,
    of_list: msgspec.json.Decoder[list[ChromeEvent]] = _LIST,
    of_file: msgspec.json.Decoder[TraceFile] = _FILE,
) -> TraceFile:
    return TraceFile(traceEvents=of_list.decode(text)) if start == b"[" else of_file.decode(text)


# -------------------------------------------------------------------------------------------------------------- columns

_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")
"""Categories of GPU events, old spellings included."""

_HEAD_BYTES = 4096  # in which an execution trace has come to its nodes

_HOST = {
    **dict.fromkeys(("cpu_op", "Operator"), HostKind.OPERATOR),
    "user_annotation": HostKind.SPAN,
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "Runtime"), HostKind.RUNTIME),
    "cuda_sync": HostKind.SYNC,
    "overhead": HostKind.OVERHEAD,
    "cpu_instant_event": HostKind.INSTANT,
}

_SKIPPED = ("python_function", "gpu_user_annotation", "fwdbwd", "async_cpu_to_gpu", "Trace", "Spans")
"""Categories of events that no table needs."""

_BY_CATEGORY = dict.fromkeys(_GPU, "gpu") | dict.fromkeys((*_HOST, *_SKIPPED), "host")
"""Tables of the events that are timed; of skipped ones the garbage collections, which are the host's."""

_RUNTIMES = ("_runtime", "_driver")
"""Ends of the categories of calls that start work, whatever the device is called: `xpu_runtime`."""

_NO_WORK = re.compile(r"(wait|record)_?event|event_?(wait|record)|synchroni[sz]e", re.IGNORECASE)
"""Names of a device's events that are no work, in categories on no list."""

_TOOLS = {
    b"/device:": "of JAX or TensorFlow (XLA)",
    b"Ascend": "of torch_npu",
    b"HIP API": "of rocprof",
    b"CUDA API": "of Nsight Systems",
}
"""Parts of the names of processes in recordings of other tools, which have no categories."""

_HEADER = TraceFile.__struct_fields__[3:]  # without events, devices and process groups, which are parts of a `Trace`

_TIMED = ("X", "i", "I")  # phases of Chrome's format: an event that lasts, and instants in two spellings
_PARTS = ("B", "E")  # begin and end of an event
_ARROW = "ac2g"  # category of arrows: asynchronous CPU to GPU
_MEASURED = "cuda_profiler_range"  # category of ranges of kernels with CUPTI's hardware counters
_HALF = 2**63
_NAMED = 6  # categories that a note names
_FOREVER_US = 1e17  # more than three thousand years: a time beyond this is damage

_OVERRUN_US = 100.0
"""Time by which an event overruns the next of its stream before it is damage; of 20 recordings 13 us was the most."""

_LONGER, _LONG_US = 100, 60e6
"""An event is doubted that lasts so many times as long as all else in the file, and a minute at least."""


Place = tuple[int | str, int | str]  # process and thread, or device and stream


def columns_of(file: TraceFile, path: Path) -> Trace:
    """The trace of parsed events. Clears the list of events, because it holds most of the memory.

    Raises a TraceError if an event is damaged, or if there is neither a GPU event nor an operator.
    """
    tables = _sorted_events(file)
    endless, unread = tables["endless"], tables["unread"]
    if not tables["gpu"]:
        _check_host(file, path, endless)
    file.traceEvents.clear()
    names: dict[str, int] = {}  # name -> its number, shared by both tables, in the order of first use
    places: dict[Place, int] = {}  # (process, thread) -> its number
    notes: list[str] = []
    if unread:
        counts = Counter(event.cat or "" for event in unread).most_common(_NAMED)
        which = ", ".join(f"{count:,} of {printable(category[:40])!r}" for category, count in counts)
        notes.append(f"events of categories that are not read: {which}")
    if endless:
        notes.append(f"{len(endless)} events without a duration are left out, the first {endless[0].name[:80]!r}")
    try:
        host = _host(tables["host"], names, places, path, notes)
        gpu = _without_damage(_gpu(tables["gpu"], names, path, notes), host, list(names), notes)
        gpu = replace(gpu, launch=launches(gpu.correlation, host))
        gpu = replace(gpu, launch=_launches_by_arrow(tables["arrows"], gpu, host, places))  # without correlation
        if len(devices := np.unique(gpu.device)) > 1:
            notes.append(f"events of {len(devices)} devices in one file are taken as of one")
        distributed = _mapping(value_of(file.distributedInfo))
        texts = tuple(map(printable, names))  # names in a file can hold control characters
        sizes = (distributed.get(key) for key in ("rank", "world_size"))
        rank, world = (size if isinstance(size, int) else None for size in sizes)
        return Trace(
            path=path,
            rank=rank,
            world=world,
            gpu=replace(gpu, names=texts),
            host=replace(host, names=texts),
            threads=_threads(tables["named"], places),
            devices=_devices(file),
            distributed=distributed,
            header={key: value for key in _HEADER if (value := value_of(getattr(file, key))) is not None},
            notes=tuple(notes),
            counters=_counters(tables["counted"]),
        )
    except DAMAGE as error:
        raise TraceError(f"{path} is damaged: {reason(error)}", fix="record it again") from error


def _sorted_events(file: TraceFile) -> dict[str, list[ChromeEvent]]:
    """Events by table: gpu, host, arrows, named (threads), endless (timed without a duration), counted, unread."""
    tables: dict[str, list[ChromeEvent]] = defaultdict(list)
    begun: dict[Place, list[ChromeEvent]] = defaultdict(list)  # events in two parts, begin and end
    for event in file.traceEvents:
        category = event.cat or ""
        if category in _SKIPPED and event.name != GARBAGE:
            continue
        if event.ph in _PARTS and event.ts is not None:
            _join_parts(event, begun[event.pid, event.tid])
        table = _BY_CATEGORY.get(category)
        if table is None or event.ph not in _TIMED:
            table = _table_without_category(event)
        elif event.dur is None and event.ph == "X" and event.ts is not None:
            table = "endless"
        tables[table].append(event)
    for event in chain.from_iterable(begun.values()):  # of those that end `ph` is X now; the others are in no table
        if (table := _BY_CATEGORY.get(event.cat or "")) is not None:
            tables[table if event.ph == "X" else "endless"].append(event)
    return tables


def _table_without_category(event: ChromeEvent) -> str:
    """The table of an event that is not timed, or in a category on no list; empty if it says nothing."""
    if event.cat == _ARROW:
        return "arrows"
    if event.name == "thread_name" and event.ph == "M":
        return "named"
    if event.ph == "C" or event.cat == _MEASURED:
        return "counted"
    if event.ph != "X":
        return ""
    if (event.cat or "").endswith(_RUNTIMES):
        return "host"
    # Work of a device has a stream and lasts.
    is_work = b'"stream"' in bytes(event.args) and event.dur is not None and not _NO_WORK.search(event.name)
    return "gpu" if is_work else "unread"


def _join_parts(event: ChromeEvent, parts: list[ChromeEvent]) -> None:
    """Add a begin to the parts of its thread; an end turns the last open one into an event that lasts."""
    if event.ph == "B":
        parts.append(event)
        return
    started = next((part for part in reversed(parts) if part.ph == "B"), None)
    if started is not None:
        started.ph, started.dur = "X", (event.ts or 0.0) - (started.ts or 0.0)


def _devices(file: TraceFile) -> tuple[dict[str, Any], ...]:
    properties = value_of(file.deviceProperties)
    each = [_mapping(device) for device in properties] if isinstance(properties, list) else []
    return tuple(
        {**device, "name": printable(device["name"])}
        for device in each
        if isinstance(device.get("id"), int) and isinstance(device.get("name"), str)
    )


def _counters(events: Sequence[ChromeEvent]) -> dict[str, tuple[Floats, Floats]]:
    """The numbers of counter events by name, with their times; args that are no numbers are left out."""
    samples: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        values = _mapping(decoded_or(None, _ANY, event.args))
        for key, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and event.ts is not None and abs(event.ts) < _FOREVER_US and abs(value) < _HALF:
                # The events of a counter of one number repeat its name as the key, or say `value`.
                plain = event.ph == "C" and (len(values) == 1 or key == event.name)
                name = event.name if plain else key if event.cat == _MEASURED else f"{event.name} {key}"
                samples.setdefault(printable(name), []).append((float(event.ts), float(value)))
    columns = {name: np.array(sorted(pairs, key=lambda pair: pair[0])) for name, pairs in samples.items()}
    return {name: (table[:, 0], table[:, 1]) for name, table in columns.items()}


def launches(correlation: Integers, host: HostEvents) -> Integers:
    """For each correlation the row of the first runtime call with the same, or NONE."""
    calls = np.flatnonzero((host.kind == HostKind.RUNTIME) & (host.correlation > 0))
    if not len(calls):
        return np.full(len(correlation), NONE, dtype=np.int64)
    calls = calls[np.argsort(host.correlation[calls], kind="stable")]  # stable: of equal correlations the first call
    keys = host.correlation[calls]
    at = np.minimum(np.searchsorted(keys, correlation), len(keys) - 1)  # the first key that is not smaller
    return np.where(keys[at] == correlation, calls[at], NONE)


def _gpu(events: list[ChromeEvent], names: dict[str, int], path: Path, notes: list[str]) -> GpuEvents:
    joins = joins_of(events, path)
    kinds = {key: kind_of(*key) for key in {(event.cat or "", event.name) for event in events}}  # once for each name
    table = GpuEvents(
        **_common(events, joins, names, path, notes),
        kind=np.fromiter((kinds[event.cat or "", event.name] for event in events), np.int8, len(events)),
        # Old files have device and stream only as Chrome's process and thread.
        device=_integers([_whole(join.device, event.pid) for event, join in zip(events, joins, strict=True)]),
        stream=_integers([_whole(join.stream, event.tid) for event, join in zip(events, joins, strict=True)]),
        launch=np.full(len(events), NONE, dtype=np.int64),
    )
    return table.take(np.argsort(table.start_us, kind="stable"))


def _without_damage(gpu: GpuEvents, host: HostEvents, names: list[str], notes: list[str]) -> GpuEvents:
    """The events without times that the other events of their stream, or all others, exclude."""
    duration_us = gpu.duration_us.copy()
    for device, stream in {*zip(gpu.device.tolist(), gpu.stream.tolist(), strict=True)}:
        mine = np.flatnonzero((gpu.device == device) & (gpu.stream == stream))
        before, after = mine[:-1], mine[1:]
        over_us = gpu.start_us[before] + duration_us[before] - gpu.start_us[after]
        # Kernels of one graph have one launch, and run beside each other.
        late = (over_us > _OVERRUN_US) & (
            (gpu.correlation[before] <= 0) | (gpu.correlation[before] != gpu.correlation[after])
        )
        duration_us[before[late]] = np.maximum(gpu.start_us[after[late]] - gpu.start_us[before[late]], 0.0)
    cut = duration_us < gpu.duration_us
    if cut.any():
        longest = int((gpu.duration_us - duration_us).argmax())
        what = f"{names[gpu.name_id[longest]][:80]!r} of {gpu.duration_us[longest] / 1e3:,.3f} ms"
        notes.append(f"{cut.sum()} events last beyond the next of their stream and are cut there, the longest {what}")
    gpu = replace(gpu, duration_us=duration_us)
    # What the starts of all events and the ends of those on the host leave of a time for one event.
    starts_us = np.append(gpu.start_us, host.start_us)
    rest_us = max(starts_us.max(), host.end_us.max(initial=-np.inf)) - starts_us.min() if len(starts_us) else 0.0
    sound = duration_us <= max(_LONG_US, _LONGER * rest_us)
    if sound.all():
        return gpu
    worst = int(duration_us.argmax())
    what = f"{names[gpu.name_id[worst]][:80]!r} of {duration_us[worst] / 1e3:,.0f} ms"
    notes.append(f"{(~sound).sum()} events last longer than all else in the file by far and are left out: {what}")
    return gpu.take(sound)


def _host(
    events: list[ChromeEvent], names: dict[str, int], places: dict[Place, int], path: Path, notes: list[str]
) -> HostEvents:
    joins = joins_of(events, path)
    table = HostEvents(
        **_common(events, joins, names, path, notes),
        kind=np.fromiter(map(_host_kind, events), np.int8, len(events)),
        thread=_codes(((event.pid, event.tid) for event in events), places, len(events)),
        sequence=_integers([join.sequence for join in joins]),
    )
    # By start; of equal starts the longer first, so that parents precede children.
    return table.take(np.lexsort((-table.duration_us, table.start_us)))


def _host_kind(event: ChromeEvent) -> HostKind:
    """By category. In recordings of PyTorch 1.x regions such as `ProfilerStep#3` are operators; no operator has a #."""
    if event.name == GARBAGE:
        return HostKind.SPAN
    kind = _HOST.get(event.cat or "", HostKind.RUNTIME)
    return HostKind.SPAN if kind == HostKind.OPERATOR and "#" in event.name else kind


def _common(
    events: list[ChromeEvent], joins: list[JoinKeys], names: dict[str, int], path: Path, notes: list[str]
) -> dict[str, Any]:
    start_us = np.array([event.ts for event in events], dtype=np.float64)
    duration_us = np.array([event.dur for event in events], dtype=np.float64)  # nan for instants
    if not (sound := (np.abs(start_us) < _FOREVER_US) & ~(np.abs(duration_us) >= _FOREVER_US)).all():
        name = events[int(np.argmin(sound))].name[:80]
        raise TraceError(f"{path} is damaged: event {name!r} has no start, or a time that cannot be")
    if (odd := int((duration_us < 0).sum())) > 0:
        notes.append(f"{odd} events end before they start; they count as having no duration")
    return {
        "names": (),  # `columns_of` sets it when both tables are complete
        "name_id": _codes(map(attrgetter("name"), events), names, len(events)),
        "start_us": start_us,
        "duration_us": np.maximum(np.nan_to_num(duration_us), 0.0),
        "correlation": _integers([join.correlation for join in joins]),
        "external_id": _integers([join.external_once if join.external == NONE else join.external for join in joins]),
        "raw": _texts([event.args for event in events]),
    }


def _texts(pieces: list[msgspec.Raw]) -> ArgsColumn:
    """The `args` of all events, concatenated; the parser skips bytes that are not UTF-8, so they are replaced here."""
    whole = b"".join(pieces)
    lengths = map(len, (memoryview(piece) for piece in pieces))
    if not whole.isascii():
        parts = [bytes(piece).decode(errors="replace").encode() for piece in pieces]
        whole, lengths = b"".join(parts), map(len, parts)
    end = np.cumsum(np.fromiter(lengths, np.int64, len(pieces)))  # total bytes up to the end of each text
    return ArgsColumn(whole, np.append(0, end)[:-1], end)


def _codes(values: Iterable[Hashable], codes: dict[Any, int], count: int) -> Integers:
    return np.fromiter((codes.setdefault(value, len(codes)) for value in values), np.int64, count)


def _integers(values: list[int]) -> Integers:
    """A column; numbers of 64 bits without a sign (NONE is written so by some) wrap around."""
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        return np.array([(value + _HALF) % (2 * _HALF) - _HALF for value in values], dtype=np.int64)


def _whole(*values: object) -> int:
    """The first of these that is a whole number, also as text ("0x0"), or NONE."""
    for value in values:
        if isinstance(value, int):
            return value
        if isinstance(value, str):
            with suppress(ValueError):
                return int(value[:64], 0)
    return NONE


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _launches_by_arrow(
    arrows: Sequence[ChromeEvent], gpu: GpuEvents, host: HostEvents, places: Mapping[Place, int]
) -> Integers:
    """`gpu.launch`, completed by arrows for events without correlation.

    An arrow has a number and two ends: `s` has the place and time of a runtime call, `f` those of the event it started.
    """
    lost = np.flatnonzero((gpu.correlation <= 0) & (gpu.launch == NONE))
    if not len(lost):
        return gpu.launch
    heads = {(event.pid, event.tid, event.ts): event.id for event in arrows if event.ph == "f"}  # GPU event -> arrow
    tails = {event.id: (places.get((event.pid, event.tid)), event.ts) for event in arrows if event.ph == "s"}
    calls = np.flatnonzero(host.kind == HostKind.RUNTIME)
    rows = {(int(host.thread[row]), float(host.start_us[row])): int(row) for row in calls}  # (thread, start) -> call
    launch = gpu.launch.copy()
    for row in lost:
        head = heads.get((int(gpu.device[row]), int(gpu.stream[row]), float(gpu.start_us[row])))
        launch[row] = rows.get(tails.get(head), NONE)  # type: ignore[arg-type]
    return launch


def _threads(named: Sequence[ChromeEvent], places: Mapping[Place, int]) -> tuple[Thread, ...]:
    names = {(event.pid, event.tid): _mapping(value_of(event.args)).get("name") for event in named}
    return tuple(
        Thread(process=pid, number=tid, name=printable(str(names.get((pid, tid), tid)))) for pid, tid in places
    )


def _check_host(file: TraceFile, path: Path, endless: Sequence[ChromeEvent]) -> None:
    """Refuse a file without GPU events that is not of a CPU either."""
    if any(event.cat in _GPU for event in endless):
        raise TraceError(f"{path} has no event on a GPU with a duration", got=f"{len(endless)} events without one")
    categories = Counter(event.cat for event in file.traceEvents if event.cat)
    if not categories.keys() & _HOST.keys():
        processes = b" ".join(bytes(event.args) for event in file.traceEvents if event.name == "process_name")
        if (tool := next((tool for mark, tool in _TOOLS.items() if mark in processes), None)) is not None:
            raise TraceError(f"{path} is a recording {tool}, which is not read", allowed="traces of torch.profiler")
        here = ", ".join(repr(name[:40]) for name, _ in categories.most_common(4)) or "no categories"
        raise TraceError(f"{path} is no trace of torch.profiler", got=f"{len(file.traceEvents)} events with {here}")
