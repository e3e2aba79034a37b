"""Recordings of Nsight Systems, read from the database that `nsys export --type sqlite` writes.

    nsys profile --trace=cuda,nvtx --cuda-graph-trace=node -o run python train.py
    nsys export --type sqlite run.nsys-rep
    penstock trace run.sqlite

The rows become events of torch.profiler's file, and from there on both are one: kernels, copies and fills of the
device; calls of CUDA that started them; NVTX ranges as regions, and those of `torch.autograd.profiler.emit_nvtx` as
operators. CPU samples, context switches and calls of the system are not read. A report may hold many processes, and
correlations are numbers of a process, so each process with work on a device is a rank.

Source: SQLite Export Schema Reference of Nsight Systems 2024.5; tables are written only where they have rows.
"""

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.base.errors import TraceError
from penstock.trace.decode import ChromeEvent, TraceFile

DATABASE = b"SQLite format 3\0"  # a file of SQLite begins so

_KERNEL, _COPY, _SET, _GRAPH = (f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE"))
_DEVICE_TABLES = (_KERNEL, _COPY, _SET, _GRAPH)
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"

_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
"""Kinds of copies (CUpti_ActivityMemcpyKind) in the words of torch.profiler."""

_RANGES = (59, 60)
"""Types of NVTX events that last: pushed and popped, started and ended."""

_CALLED = (0, 1)
"""Classes of calls: of the runtime and of the driver. Wrappers of another class repeat calls of the runtime."""

_VERSION = re.compile(r"_v\d+$")  # nsys adds the version of CUDA that a call came with

_OPERATOR = re.compile(r"(?P<name>\w+::[\w.]+|\w+Backward\w*)(?:, (?P<rest>.*))?", re.DOTALL)
"""A range of `emit_nvtx`: `aten::mm, seq = 3, op_id = 7, sizes = [[2, 3], [3, 4]]`."""

_SEQUENCE, _SHAPES = re.compile(r"\bseq = (\d+)"), re.compile(r"\bsizes = (\[.*\])")

Row = Mapping[str, Any]


def recordings_of(path: Path) -> list[TraceFile]:
    """The recording of each process with work on a device, in the order of the devices.

    Raises a TraceError if the file cannot be read, or is no database of Nsight Systems with CUDA events.
    """
    try:
        # Immutable: the folder may be read-only, and nothing else writes there.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as database:
            database.row_factory = sqlite3.Row
            return _Report(database).recordings(path)
    except sqlite3.Error as error:
        raise TraceError(f"{path} is damaged: {error}", fix="export it again") from error
    except IndexError as error:  # of a row that lacks a column
        what = f"{path} lacks a column that Nsight Systems writes since 2022"
        raise TraceError(what, fix="export the .nsys-rep with a newer nsys") from error


class _Report:
    """The tables of a report."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        named = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self._tables = frozenset(row["name"] for row in named)
        self._texts = {row["id"]: row["value"] for row in self._rows("StringIds")}

    def recordings(self, path: Path) -> list[TraceFile]:
        on_device = {table: self._by_process(table, "globalPid") for table in _DEVICE_TABLES}
        devices: dict[int, int] = {}
        for rows_of in on_device.values():
            for process, rows in rows_of.items():
                first = min(row["deviceId"] for row in rows)
                devices[process] = min(devices.get(process, first), first)
        if not devices:
            raise TraceError(
                f"{path} is a database without work of a GPU",
                allowed="an export of Nsight Systems with CUDA events",
                fix="record with nsys profile --trace=cuda,nvtx, then nsys export --type sqlite",
            )
        calls, ranges = self._by_process(_CALLS, "globalTid"), self._by_process("NVTX_EVENTS", "globalTid")
        threads = self._by_process("ThreadNames", "globalTid")
        header: dict[str, Any] = {"deviceProperties": _raw([_device(row) for row in self._rows("TARGET_INFO_GPU")])}
        for row in self._rows("TARGET_INFO_SESSION_START_TIME"):
            header["baseTimeNanoseconds"] = _raw(row["utcEpochNs"])
        files = []
        for rank, process in enumerate(sorted(devices, key=lambda process: (devices[process], process))):
            if len(devices) > 1:
                header["distributedInfo"] = _raw({"rank": rank, "world_size": len(devices)})
            events = [
                *(
                    self._device_event(table, row)
                    for table in _DEVICE_TABLES
                    for row in on_device[table].get(process, [])
                ),
                *(self._call(row) for row in calls.get(process, []) if row["eventClass"] in _CALLED),
                *self._ranges(ranges.get(process, [])),
                *(self._thread(row) for row in threads.get(process, [])),
            ]
            files.append(TraceFile(traceEvents=events, **header))
        return files

    def _rows(self, table: str) -> Iterator[Row]:
        return self._database.execute(f'SELECT * FROM "{table}"') if table in self._tables else iter(())

    def _by_process(self, table: str, column: str) -> dict[int, list[Row]]:
        """Rows of a table by process; the lowest 24 bits of an identifier are the thread."""
        rows: dict[int, list[Row]] = {}
        for row in self._rows(table):
            rows.setdefault((row[column] or 0) >> _THREAD_BITS, []).append(row)
        return rows

    def _device_event(self, table: str, row: Row) -> ChromeEvent:
        joins = {"device": row["deviceId"], "stream": row["streamId"], "correlation": row["correlationId"]}
        if table == _KERNEL:
            category, name = "kernel", self._text(row["demangledName"])
            for key in ("grid", "block"):
                joins[key] = [row[f"{key}{axis}"] for axis in "XYZ"]
            joins["registers per thread"] = row["registersPerThread"]
            joins["shared memory"] = row["staticSharedMemory"] + row["dynamicSharedMemory"]
        elif table == _COPY:
            category, name = "gpu_memcpy", f"Memcpy {_COPIES.get(row['copyKind'], 'of another kind')}"
            joins["bytes"] = row["bytes"]
        elif table == _SET:
            category, name, joins["bytes"] = "gpu_memset", "Memset (Device)", row["bytes"]
        else:
            category, name = "kernel", f"CUDA graph {row['graphId']}"
        return _lasting(category, name, row, (row["deviceId"], row["streamId"]), joins)

    def _call(self, row: Row) -> ChromeEvent:
        name = _VERSION.sub("", self._text(row["nameId"]))
        category = "cuda_runtime" if name.startswith("cuda") else "cuda_driver"
        return _lasting(category, name, row, _place(row["globalTid"]), {"correlation": row["correlationId"]})

    def _ranges(self, rows: list[Row]) -> Iterator[ChromeEvent]:
        for row in rows:
            text = row["text"] or self._text(row["textId"])
            if row["eventType"] not in _RANGES or row["end"] is None or not text:
                continue
            operator = _OPERATOR.fullmatch(text)
            if operator is None:
                yield _lasting("user_annotation", text, row, _place(row["globalTid"]), {})
                continue
            args: dict[str, Any] = {}
            rest = operator["rest"] or ""
            if (sequence := _SEQUENCE.search(rest)) is not None:
                args["Sequence number"] = int(sequence[1])
            if (shapes := _SHAPES.search(rest)) is not None:
                with suppress(ValueError):  # a range is at most so long, and nsys cuts the rest
                    args["Input Dims"] = json.loads(shapes[1])
            yield _lasting("cpu_op", operator["name"], row, _place(row["globalTid"]), args)

    def _thread(self, row: Row) -> ChromeEvent:
        process, thread = _place(row["globalTid"])
        name = _raw({"name": self._text(row["nameId"])})
        return ChromeEvent(ph="M", name="thread_name", pid=process, tid=thread, args=name)

    def _text(self, number: int | None) -> str:
        return self._texts.get(number) or ""


_THREAD_BITS = 24


def _place(global_tid: int) -> tuple[int, int]:
    """Process and thread of a serialized identifier."""
    mask = (1 << _THREAD_BITS) - 1
    return (global_tid >> _THREAD_BITS) & mask, global_tid & mask


def _lasting(category: str, name: str, row: Row, place: tuple[int, int], args: Mapping[str, Any]) -> ChromeEvent:
    start, end = row["start"], row["end"]
    return ChromeEvent(
        ph="X", cat=category, name=name, pid=place[0], tid=place[1], ts=start / 1e3, dur=(end - start) / 1e3,
        args=_raw(args) if args else msgspec.Raw(),
    )  # fmt: skip


def _device(row: Row) -> dict[str, Any]:
    return {
        "id": row["id"],
        "name": row["name"] or "",
        "totalGlobalMem": row["totalMemory"],
        "numSms": row["smCount"],
    }


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
