"""The text of a trace, decoded into the columns of a `Trace`.

1. One typed pass over the JSON, in which the `args` of an event stay text. Profilers have written numbers that are not
   JSON (`inf`, `nan`) and bytes that are not UTF-8; such a text is repaired once before it is refused.
2. Events are sorted by category. Python functions are most of a file with stacks, and are skipped.
3. Of the remaining events, only the integers in `args` that join events are decoded.
4. Every GPU event gets the runtime call that started it: by `correlation`, or by the arrow (`ac2g`) between them where
   a tool wrote no correlation.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.base.errors import TraceError
from penstock.base.numbers import printable
from penstock.trace.events import (
    DAMAGE,
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
    """The events and the other entries that torch.profiler writes."""

    traceEvents: list[ChromeEvent]  # noqa: N815  (keys of the file)
    deviceProperties: msgspec.Raw = _NO_TEXT  # noqa: N815
    distributedInfo: msgspec.Raw = _NO_TEXT  # noqa: N815
    schemaVersion: msgspec.Raw = _NO_TEXT  # noqa: N815
    traceName: msgspec.Raw = _NO_TEXT  # noqa: N815
    baseTimeNanoseconds: msgspec.Raw = _NO_TEXT  # noqa: N815
    host_name: msgspec.Raw = _NO_TEXT
    record_shapes: msgspec.Raw = _NO_TEXT
    with_stack: msgspec.Raw = _NO_TEXT
    with_flops: msgspec.Raw = _NO_TEXT
    profile_memory: msgspec.Raw = _NO_TEXT
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
_UNNUMBER = re.compile(rb"(:\s*)[-+]?(?:infinity|inf|nan)\b", re.IGNORECASE)


def parse(text: bytes, path: Path) -> TraceFile:
    """The events of a text.

    Raises:
        TraceError: it is empty, not JSON, or not a list of events.
    """
    start = text[:64].lstrip()[:1]
    if not start and not text.strip():
        raise TraceError(f"{path} is empty", fix="record it again")
    try:
        return _parsed(text, start)
    except DAMAGE as error:
        try:
            # Null for numbers that JSON does not have, and a replacement character for bytes that are not UTF-8.
            return _parsed(_UNNUMBER.sub(rb"\1null", text).decode(errors="replace").encode(), start)
        except DAMAGE:
            raise TraceError(
                f"{path} is no trace of torch.profiler, or damaged: {reason(error)}",
                fix="if it was cut off while it was written or copied, record or copy it again",
            ) from error


def joins_of(events: Iterable[ChromeEvent], path: Path) -> list[JoinKeys]:
    """The join keys of each event.

    Raises:
        TraceError: the `args` of one are damaged.
    """
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


def _parsed(text: bytes, start: bytes) -> TraceFile:
    return TraceFile(traceEvents=_LIST.decode(text)) if start == b"[" else _FILE.decode(text)


# -------------------------------------------------------------------------------------------------------------- columns

_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")
"""Categories of GPU events, old spellings included."""

_HOST = {
    **dict.fromkeys(("cpu_op", "Operator"), HostKind.OPERATOR),
    "user_annotation": HostKind.SPAN,
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "Runtime"), HostKind.RUNTIME),
    "cuda_sync": HostKind.SYNC,
    "overhead": HostKind.OVERHEAD,
    "cpu_instant_event": HostKind.INSTANT,
}

_HEADER = TraceFile.__struct_fields__[3:]  # without events, devices and process groups, which are parts of a `Trace`

_TIMED = ("X", "i", "I")  # phases of Chrome's format: an event that lasts, and instants in two spellings
_ARROW = "ac2g"  # category of arrows: asynchronous CPU to GPU
_MEASURED = "cuda_profiler_range"  # category of ranges of kernels with CUPTI's hardware counters
_HALF = 2**63
_FOREVER_US = 1e17
"""More than three thousand years: a time beyond this is damage."""


Place = tuple[int | str, int | str]
"""Process and thread, or device and stream."""


def columns_of(file: TraceFile, path: Path) -> Trace:
    """The trace of parsed events. Clears the list of events, because it holds most of the memory.

    Raises:
        TraceError: a number or the `args` of an event are damaged, or there is neither a GPU event nor an operator.
    """
    on_gpu, on_host, arrows, named, endless, counted = _sorted_events(file)
    if not on_gpu:
        _check_host(file, path, endless)
    file.traceEvents.clear()
    names: dict[str, int] = {}  # name -> its number, shared by both tables, in the order of first use
    places: dict[Place, int] = {}  # (process, thread) -> its number
    notes: list[str] = []
    if endless:
        notes.append(f"{len(endless)} events without a duration are left out, the first {endless[0].name[:80]!r}")
    try:
        host = _host(on_host, names, places, path, notes)
        gpu = _gpu(on_gpu, names, path, notes)
        gpu = replace(gpu, launch=launches(gpu.correlation, host))
        gpu = replace(gpu, launch=_launches_by_arrow(arrows, gpu, host, places))  # for those without correlation
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
            threads=_threads(named, places),
            devices=_devices(file),
            distributed=distributed,
            header={key: value for key in _HEADER if (value := value_of(getattr(file, key))) is not None},
            notes=tuple(notes),
            counters=_counters(counted),
        )
    except DAMAGE as error:
        raise TraceError(f"{path} is damaged: {reason(error)}", fix="record it again") from error


def _sorted_events(file: TraceFile) -> list[list[ChromeEvent]]:
    """Events on the GPU, on the host, arrows, names of threads, timed events without a duration, and counters."""
    tables: list[list[ChromeEvent]] = [[], [], [], [], [], []]
    on_gpu, on_host, arrows, named, endless, counted = tables
    table_of = dict.fromkeys(_GPU, on_gpu) | dict.fromkeys(_HOST, on_host)  # by category; others are left out
    for event in file.traceEvents:
        table = table_of.get(event.cat or "")
        if table is not None and event.ph in _TIMED:
            is_endless = event.dur is None and event.ph == "X" and event.ts is not None
            (endless if is_endless else table).append(event)
        elif event.cat == _ARROW:
            arrows.append(event)
        elif event.name == "thread_name" and event.ph == "M":
            named.append(event)
        elif event.ph == "C" or event.cat == _MEASURED:
            counted.append(event)
    return tables


def _devices(file: TraceFile) -> tuple[dict[str, Any], ...]:
    """Properties of the devices that have a number and a name."""
    properties = value_of(file.deviceProperties)
    each = [_mapping(one) for one in properties] if isinstance(properties, list) else []
    return tuple(
        {**one, "name": printable(one["name"])}
        for one in each
        if isinstance(one.get("id"), int) and isinstance(one.get("name"), str)
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
    columns = {name: np.array(sorted(found, key=lambda one: one[0])) for name, found in samples.items()}
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


def _host(
    events: list[ChromeEvent], names: dict[str, int], places: dict[Place, int], path: Path, notes: list[str]
) -> HostEvents:
    joins = joins_of(events, path)
    table = HostEvents(
        **_common(events, joins, names, path, notes),
        kind=np.fromiter((_HOST[event.cat or ""] for event in events), np.int8, len(events)),
        thread=_codes(((event.pid, event.tid) for event in events), places, len(events)),
        sequence=_integers([join.sequence for join in joins]),
    )
    # By start; of equal starts the longer first, so that parents precede children.
    return table.take(np.lexsort((-table.duration_us, table.start_us)))


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
    """The number of each value in `codes`; new values get the next number."""
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
    found = Counter(event.cat for event in file.traceEvents if event.cat)
    if not found.keys() & _HOST.keys():
        here = ", ".join(repr(name[:40]) for name, _ in found.most_common(4)) or "no categories"
        raise TraceError(f"{path} is no trace of torch.profiler", got=f"{len(file.traceEvents)} events with {here}")
