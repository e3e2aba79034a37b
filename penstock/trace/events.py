"""A trace as columns: what the GPU did (`Trace.gpu`), what the host did (`Trace.host`), and what machine it was.

A column is a numpy array; row `i` of all columns of a table is one event, and rows are sorted by start. Names stand
once in `names` and columns hold their index. The `args` of an event stay text until someone asks for them, because few
are ever needed and they are most of a file:

    kernels = trace.gpu.take(trace.gpu.kind == GpuKind.COMMUNICATION)
    kernels.name(0), kernels.args(0)["Collective name"]
    launch = trace.host.take(kernels.launch[kernels.is_linked])

This is simpler than a table of a data frame library: two tables, no index, and every operation is numpy's own.
Times are microseconds on the clock of the file (float64). A number that an event does not have is `NONE`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import TraceError

NONE = -1
"""In a column of whole numbers: the event does not say."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


Decoded = TypeVar("Decoded")

_DICTIONARY = msgspec.json.Decoder(dict[str, Any])


class GpuKind(IntEnum):
    """What an event on a GPU is: a kernel is one of the first two."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2
    SET = 3


class HostKind(IntEnum):
    """What an event on the host is.

    `RUNTIME` are calls of the CUDA or HIP runtime and driver, `SPAN` are `record_function` regions (ours too),
    `PYTHON` are there only if asked for, `SYNC` are waits that the profiler saw on a stream, `INSTANT` have no duration
    (memory events among them).
    """

    OPERATOR = 0
    SPAN = 1
    RUNTIME = 2
    PYTHON = 3
    SYNC = 4
    OVERHEAD = 5
    INSTANT = 6


@dataclass(frozen=True, kw_only=True)
class Thread:
    """A thread of the host: process, number and name as the file has them."""

    process: int | str
    number: int | str
    name: str


@dataclass(frozen=True, eq=False)
class ArgsColumn:
    """A column of texts: pieces of one text that all tables share, so that the file itself need not stay in memory.

    Attributes:
        whole: all pieces, one after the other.
        start: of each row in `whole`.
        end: of each row in `whole`.
    """

    whole: bytes
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
    """Columns that all events have.

    Attributes:
        names: all names of the trace; both tables share them.
        name_id: index into `names`.
        start_us: sorted.
        duration_us: never negative.
        correlation: joins a call of the runtime and what it started on the GPU, or NONE.
        external_id: joins an operator, its calls and its kernels, or NONE.
        raw: the `args` as JSON in UTF-8, not decoded; empty where there are none.
    """

    names: tuple[str, ...]
    name_id: Integers
    start_us: Floats
    duration_us: Floats
    correlation: Integers
    external_id: Integers
    raw: ArgsColumn

    def __len__(self) -> int:
        return len(self.start_us)

    @cached_property
    def end_us(self) -> Floats:
        """Start and duration, added."""
        return self.start_us + self.duration_us

    def name(self, row: int) -> str:
        """The name of one event."""
        return self.names[self.name_id[row]]

    def args(self, row: int) -> dict[str, Any]:
        """The `args` of one event: shapes, dtypes, metadata of a collective, grid of a kernel. Decoded at each call.

        Raises:
            TraceError: they are damaged.
        """
        return self.args_as(row, _DICTIONARY)

    def args_as(self, row: int, decoder: msgspec.json.Decoder[Decoded]) -> Decoded:
        """The same as a type of yours; faster, because what the type does not name is skipped.

        Raises:
            TraceError: they are damaged, or of other types.
        """
        try:
            return decoder.decode(self.raw[row] or b"{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise TraceError(f"args of {self.name(row)[:80]!r} are damaged: {error}", fix="record it again") from error

    def take(self, rows: Flags | Integers | slice) -> Self:
        """The same table with only these rows (a mask, indices or a slice), which must leave them sorted."""
        held = {one.name: vars(self)[one.name] for one in fields(self)}
        columns: dict[str, Any] = {name: value[rows] for name, value in held.items() if isinstance(value, np.ndarray)}
        return replace(self, raw=self.raw.take(rows), **columns)

    def called(self, *names: str) -> Flags:
        """Which rows have one of these names."""
        wanted = set(names)
        return np.array([name in wanted for name in self.names], dtype=bool)[self.name_id]

    def starting_in(self, start_us: float, end_us: float) -> slice:
        """Rows that start at or after `start_us` and before `end_us`."""
        low, high = np.searchsorted(self.start_us, [start_us, end_us])
        return slice(int(low), int(high))


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuEvents(Events):
    """Kernels, copies and fills.

    Attributes:
        kind: GpuKind.
        device: number of the device as the file has it, or NONE.
        stream: of the device, or NONE.
        launch: row in `Trace.host` of the call that started it, or NONE if that call is not in the trace.
    """

    kind: NDArray[np.int8]
    device: Integers
    stream: Integers
    launch: Integers

    @property
    def is_linked(self) -> Flags:
        """Whether the call that started it is in the trace."""
        return self.launch != NONE

    @property
    def is_kernel(self) -> Flags:
        """Whether it is a kernel, not a copy or a fill."""
        return self.kind <= GpuKind.COMMUNICATION


@dataclass(frozen=True, kw_only=True, eq=False)
class HostEvents(Events):
    """Operators, spans and calls of the runtime. Of events that start together the longer is first.

    Attributes:
        kind: HostKind.
        thread: index into `Trace.threads`.
        sequence: joins an operator and its backward, or NONE.
    """

    kind: NDArray[np.int8]
    thread: Integers
    sequence: Integers


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """What one file says: one rank.

    Attributes:
        path: of the file.
        rank: that it says, or None.
        world: ranks of the run, or None.
        gpu: what the device did.
        host: what the host did.
        threads: that `host.thread` counts.
        devices: properties of every device of the machine, as in the file.
        distributed: of the process groups, as in the file (`pg_config`, `backend`, ...).
        header: what else stands beside the events; `penstock` is there if we recorded it.
        notes: what was odd and how it was taken, a line each.
    """

    path: Path
    rank: int | None
    world: int | None
    gpu: GpuEvents
    host: HostEvents
    threads: tuple[Thread, ...]
    devices: tuple[Mapping[str, Any], ...]
    distributed: Mapping[str, Any]
    header: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of both tables."""
        return self.gpu.names

    @property
    def device_name(self) -> str | None:
        """What the driver calls the device that did the work, if the file says."""
        numbers, counts = np.unique(self.gpu.device, return_counts=True)
        used = int(numbers[counts.argmax()]) if len(numbers) else NONE
        named = {one["id"]: one["name"] for one in self.devices if {"id", "name"} <= one.keys()}
        return named.get(used, next(iter(named.values()), None))

    def operators(self) -> HostEvents:
        """Operators of the host."""
        return self.host.take(self.host.kind == HostKind.OPERATOR)

    def spans(self) -> HostEvents:
        """Regions that `record_function` named, `ProfilerStep#N` among them."""
        return self.host.take(self.host.kind == HostKind.SPAN)

    def calls(self) -> HostEvents:
        """Calls of the runtime and driver."""
        return self.host.take(self.host.kind == HostKind.RUNTIME)

    def kernels(self) -> GpuEvents:
        """Kernels, without copies and fills."""
        return self.gpu.take(self.gpu.is_kernel)

    def communication(self) -> GpuEvents:
        """Kernels that talk to other ranks."""
        return self.gpu.take(self.gpu.kind == GpuKind.COMMUNICATION)
