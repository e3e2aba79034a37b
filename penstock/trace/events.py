"""A trace as columns: events of the GPU (`Trace.gpu`), events of the host (`Trace.host`), and the machine.

A column is a numpy array. Row `i` of all columns of a table is one event, and rows are sorted by start. Names are
stored once in `names`, and columns hold their index. The `args` of an event are most of a file and rarely needed, so
they stay text until they are read:

    kernels = trace.gpu.take(trace.gpu.kind == GpuKind.COMMUNICATION)
    kernels.name(0), kernels.args(0)["Collective name"]
    launch = trace.host.take(kernels.launch[kernels.is_linked])

Times are microseconds on the clock of the file (float64). An absent integer is `NONE`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import TraceError

GARBAGE = "Python GC"  # the event of a collection of garbage, which `record_python_gc_info` records
NONE = -1  # in an integer column: the event does not have this value
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
DAMAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # errors of msgspec on damaged JSON
_DICTIONARY = msgspec.json.Decoder(dict[str, Any])
_Value = TypeVar("_Value")


def decoded_or(absent: _Value, decoder: msgspec.json.Decoder[_Value], text: bytes) -> _Value:
    """The decoded JSON text; `absent` if it is empty or damaged."""
    try:
        return decoder.decode(text) if text else absent
    except DAMAGE:
        return absent


class GpuKind(IntEnum):
    """Kind of a GPU event; the first two are kernels."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2
    SET = 3


class HostKind(IntEnum):
    """Kind of a host event.

    `RUNTIME` are calls of the CUDA or HIP runtime and driver, `SPAN` are `record_function` regions, `SYNC` are waits
    that the profiler saw on a stream, and in the trace of a CPU transfers, `INSTANT` have no duration (memory events).
    """

    OPERATOR = 0
    SPAN = 1
    RUNTIME = 2
    SYNC = 3
    OVERHEAD = 4
    INSTANT = 5


@dataclass(frozen=True, kw_only=True)
class Thread:
    """A thread of the host: process, number and name as in the file."""

    process: int | str
    number: int | str
    name: str


@dataclass(frozen=True, eq=False)
class ArgsColumn:
    """A column of JSON texts, as slices (start, end) of one buffer, so that the file itself can be freed."""

    whole: bytes  # the texts of all events, one behind the other; `take` shares it
    start: Integers
    end: Integers

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, row: int) -> bytes:
        return self.whole[self.start[row] : self.end[row]]

    def take(self, rows: Flags | Integers | slice) -> "ArgsColumn":
        """Only these rows."""
        return ArgsColumn(self.whole, self.start[rows], self.end[rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """Columns that all events have."""

    names: tuple[str, ...]  # all names of the trace, shared by both tables
    name_id: Integers  # index into `names`
    start_us: Floats
    duration_us: Floats
    correlation: Integers  # joins a runtime call and the GPU event that it started, or NONE
    external_id: Integers  # joins an operator, its runtime calls and its kernels, or NONE
    raw: ArgsColumn  # the `args` as UTF-8 JSON, not decoded; empty where there are none

    def __len__(self) -> int:
        return len(self.start_us)

    @cached_property
    def end_us(self) -> Floats:
        return self.start_us + self.duration_us

    def name(self, row: int) -> str:
        return self.names[self.name_id[row]]

    def args(self, row: int) -> dict[str, Any]:
        """The `args` of one event, decoded at each call. Raises a TraceError if they are damaged."""
        try:
            return _DICTIONARY.decode(self.raw[row] or b"{}")
        except DAMAGE as error:
            raise TraceError(f"args of {self.name(row)[:80]!r} are damaged: {error}", fix="record it again") from error

    def take(self, rows: Flags | Integers | slice) -> Self:
        """The table with only these rows (a mask, indices or a slice), which must leave them sorted."""
        held = {field.name: vars(self)[field.name] for field in fields(self)}
        columns: dict[str, Any] = {name: value[rows] for name, value in held.items() if isinstance(value, np.ndarray)}
        return replace(self, raw=self.raw.take(rows), **columns)

    def named(self, test: Callable[[str], object]) -> Flags:
        """Mask of the rows whose name passes a test, such as `PATTERN.search`."""
        # Once for each distinct name: a trace has millions of rows and some hundred names.
        return np.array([bool(test(name)) for name in self.names], dtype=bool)[self.name_id]

    def called(self, *names: str) -> Flags:
        """Mask of the rows that have one of these names."""
        return self.named(names.__contains__)

    def starting_in(self, start_us: float, end_us: float) -> slice:
        """Rows that start at or after `start_us` and before `end_us`."""
        low, high = np.searchsorted(self.start_us, [start_us, end_us])
        return slice(int(low), int(high))


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuEvents(Events):
    """Kernels, copies and fills."""

    kind: NDArray[np.int8]
    device: Integers  # its number in the file, or NONE
    stream: Integers
    # Row in `Trace.host` of the runtime call that started the event, or NONE if it is not in the trace.
    launch: Integers

    @property
    def is_linked(self) -> Flags:
        """The runtime call that started the event is in the trace."""
        return self.launch != NONE

    @property
    def is_kernel(self) -> Flags:
        """The event is a kernel, not a copy or a fill."""
        return self.kind <= GpuKind.COMMUNICATION


@dataclass(frozen=True, kw_only=True, eq=False)
class HostEvents(Events):
    """Operators, spans and runtime calls. Of events with the same start the longer is first."""

    kind: NDArray[np.int8]
    thread: Integers  # index into `Trace.threads`
    sequence: Integers  # joins an operator and its backward, or NONE


def as_gpu_events(host: HostEvents, rows: Integers, **columns: Any) -> GpuEvents:
    """Rows of the host in place of GPU events, each launched by itself.

    Columns that are not given are those of the host; without a kind the events compute.
    """
    taken = host.take(rows)
    shared = {field.name: vars(taken)[field.name] for field in fields(Events)}
    unknown = np.full(len(rows), NONE)
    defaults: dict[str, Any] = {
        "kind": np.full(len(rows), GpuKind.COMPUTE, dtype=np.int8),
        "device": unknown,
        "stream": unknown,
    }
    return GpuEvents(**shared | defaults | {"launch": rows} | columns)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """The content of one file: one rank."""

    path: Path
    rank: int | None  # as the file says, or None
    world: int | None  # ranks of the run, or None
    gpu: GpuEvents
    host: HostEvents
    threads: tuple[Thread, ...]  # indexed by `host.thread`
    devices: tuple[Mapping[str, Any], ...]  # properties of every device of the machine, as in the file
    distributed: Mapping[str, Any]  # of the process groups, as in the file (`pg_config`, `backend`, ...)
    header: Mapping[str, Any]  # other entries beside the events; Penstock's own recordings have `penstock`
    notes: tuple[str, ...]  # oddities of the file and how they were treated, a line each
    # Kernel -> phase, from a file of the user (penstock.trace.recognize).
    mapped: Mapping[str, str] = field(default_factory=dict)
    is_host: bool = False  # of a CPU, whose operators take the place of GPU events (penstock.trace.on_host)
    # Counter -> times in microseconds, ascending, and its values.
    counters: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return self.gpu.names

    def setting(self, *path: str) -> Any:
        """An entry of the configuration in Penstock's recording, by its keys; None where there is none."""
        value: Any = self.header.get("penstock")
        for key in ("config", *path):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @cached_property
    def launched_us(self) -> Floats:
        """When the host began to launch each row of `gpu`; nan if the launch is not in the trace."""
        return np.append(self.host.start_us, np.nan)[self.gpu.launch]  # NONE is -1 and reads the appended nan

    @property
    def device_name(self) -> str | None:
        """The driver's name of the device that ran most events, if the file has it."""
        numbers, counts = np.unique(self.gpu.device, return_counts=True)
        used = int(numbers[counts.argmax()]) if len(numbers) else NONE
        named = {device["id"]: device["name"] for device in self.devices if {"id", "name"} <= device.keys()}
        # Old profilers number devices differently from their list of properties: then the first one of the list.
        return named.get(used, next(iter(named.values()), None))
