"""Trace files of torch.profiler and Nsight Systems: a file, a folder with a file per rank, or the folder of a run.

    load_ranks([Path("rank0.json.gz")])        # one rank
    load_ranks([Path("runs/debug")])           # every runs/debug/profile/rank-*.json.gz

The rank of a file is in its name (`rank-3.json.gz`, `rank3_trace.json`), else in its content (`distributedInfo`).

A trace without events of a device is that of a CPU (penstock.trace.on_host). A thread reads and unpacks the next file
while the current one is parsed.

Of Nsight Systems the database is read that `nsys export --type sqlite` writes (SQLite Export Schema Reference, 2024.5).
Its rows become events of torch.profiler's file: kernels, copies and fills of the device; calls of CUDA that started
them; NVTX ranges as regions, and those of `torch.autograd.profiler.emit_nvtx` as operators. A report may hold many
processes, and correlations are numbers of a process, so each process with work on a device is a rank.
"""

import json
import re
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.base.errors import TraceError, did_you_mean_path
from penstock.base.files import most_unpacked, open_file
from penstock.trace.decode import ChromeEvent, TraceFile, columns_of, parse
from penstock.trace.events import Trace
from penstock.trace.on_host import on_host
from penstock.trace.recognize import PhaseNames, recognized

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


PROFILE = "profile"  # folder of the traces inside the folder of a run
READER = "penstock-trace"  # name of the thread that reads ahead
_RANK = re.compile(r"rank[-_ ]?(\d+)", re.IGNORECASE)
_ENDS = (".json", ".json.gz", ".sqlite")
_REPORTS = (".nsys-rep", ".qdrep")
_BEGINNING_BYTES = 4096
_PEEKED_BYTES = 2**20  # the profiler writes devices and process groups before the events
_GZIP_MAGIC = b"\x1f\x8b"  # first bytes of a gzip file
_GZIP = 31  # zlib's `wbits` for a gzip header and the largest window


def decode_trace(text: bytes, *, path: Path = Path("trace"), names: PhaseNames | None = None) -> Trace:
    """Decode the text of a file; `path` names it in errors."""
    trace = columns_of(parse(text, path), path)
    return recognized(trace if len(trace.gpu) else on_host(trace), names)


def _decoded(text: bytes, path: Path, names: PhaseNames | None) -> Iterator[Trace]:
    if path.suffix in _REPORTS:
        what = f"{path} is a report in Nsight Systems' own format"
        raise TraceError(what, fix=f"nsys export --type sqlite {path}, and give the .sqlite file")
    if not text.startswith(DATABASE):
        yield decode_trace(text, path=path, names=names)
        return
    for recording in recordings_of(path):
        yield recognized(columns_of(recording, path), names)


def load_ranks(paths: Path | Sequence[Path], *, names: PhaseNames | None = None) -> dict[int, Trace]:
    """Load the traces of several ranks, in ascending order of rank.

    `paths` are a file, a folder of files that end in .json, .json.gz or .sqlite, the folder of a run, or several files.
    Raises a TraceError if a file cannot be read, is damaged or of another tool, or has no events; if traces of GPUs and
    of CPUs are mixed; if there is no trace, or two have one rank.
    """
    files = trace_files(paths)
    # The pool ends here and not in `_texts`: collecting an abandoned generator must not wait for a thread.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix=READER) as reader:
        traces = [trace for path, text in _texts(files, reader) for trace in _decoded(text, path, names)]
    if len({trace.is_host for trace in traces}) > 1:
        bare = next(trace.path for trace in traces if trace.is_host)
        raise TraceError(f"{bare} has no event on a GPU, but other files have", fix="record it again, or leave it out")
    ranks = _ranks(traces)
    return {rank: replace(trace, rank=rank) for rank, trace in sorted(zip(ranks, traces, strict=True))}


def trace_files(paths: Path | Sequence[Path]) -> tuple[Path, ...]:
    """The files of a path: a file, a folder, of a run, or several files. Raises a TraceError without any."""
    several = (paths,) if isinstance(paths, Path) else tuple(paths)
    files = [file for path in several for file in _files(path)]
    if not files:
        raise TraceError("no trace was given", allowed="a file, a folder of files, or the folder of a run")
    return tuple(dict.fromkeys(files))


def read_text(path: Path) -> bytes:
    """The content of a file, unpacked if it is gzip. Raises a TraceError if it cannot be read or is damaged."""
    try:
        with open_file(path, buffering=0) as file:
            packed = file.read(_BEGINNING_BYTES)
            is_packed = packed[:2] == _GZIP_MAGIC
            beginning = zlib.decompressobj(_GZIP).decompress(packed, _BEGINNING_BYTES) if is_packed else packed
            if beginning.lstrip()[:1] not in (b"", b"{", b"["):
                return beginning  # not JSON: do not read the rest, which can have any size
            if file.seekable():  # reading all at once is faster than appending; a pipe cannot be read again
                file.seek(0)
                packed = b""
            packed += file.readall()
    except OSError as error:
        suggestion = None if path.exists() else did_you_mean_path(path)
        raise TraceError(f"cannot read {path}: {error.strerror}", fix=suggestion) from error
    except zlib.error as error:
        raise _damaged(path, error) from error
    return _unpacked(packed, path) if is_packed else packed


def _unpacked(packed: bytes, path: Path) -> bytes:
    """All members of a gzip file, with their checksums verified."""
    parts: list[bytes] = []
    left = most_unpacked(len(packed))
    try:
        while packed:
            member = zlib.decompressobj(_GZIP)
            parts.append(member.decompress(packed, left))
            left -= len(parts[-1])
            if member.unconsumed_tail or not left:
                raise TraceError(f"{path} becomes more than 100 times as large when it is unpacked: it is no trace")
            if not member.eof:
                raise TraceError(f"{path} was cut off: its gzip data do not end", fix="copy or record it again")
            # A gzip file can have several members and zero padding.
            packed = member.unused_data.lstrip(b"\0")
    except zlib.error as error:
        raise _damaged(path, error) from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _damaged(path: Path, error: zlib.error) -> TraceError:
    return TraceError(f"{path} is damaged: its gzip data are wrong ({error})", fix="copy or record it again")


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    for folder in (path / PROFILE, path):
        ended, below = (
            [file for file in folder.glob(pattern) if file.name.endswith(_ENDS) and file.is_file()]
            for pattern in ("[!.]*", "*/[!.]*")  # a recorder's drafts begin with a dot
        )
        # Files with a rank in their own name are traces. Beside those of a folder are other .json files.
        named = [file for file in ended if _RANK.search(file.name)]
        ranked = [file for file in below if _rank_in(file) is not None]
        for files in (named, _traces_among(ranked), _traces_among(ended)):
            if files:
                return sorted(files)
    raise TraceError(
        f"{path} holds no trace",
        allowed="files that end in .json, .json.gz or .sqlite, in it or in its `profile`",
        fix="if it is of a run, record some steps: profile.start",
    )


def _traces_among(files: Sequence[Path]) -> Sequence[Path]:
    """Of files without a rank in their own name those that begin as a trace; all if none does."""
    traces = [file for file in files if _RANK.search(file.name) or _begins_as_trace(file)]
    return traces or files


def _begins_as_trace(path: Path) -> bool:
    """Whether a file begins as a list or as an object with events; damaged files count, so that they are reported."""
    try:
        with open_file(path) as file:
            text = file.read(_PEEKED_BYTES)
        text = zlib.decompressobj(_GZIP).decompress(text, _PEEKED_BYTES) if text[:2] == _GZIP_MAGIC else text
    except (OSError, zlib.error):
        return True
    begin = text.lstrip()[:1]
    return b'"traceEvents"' in text if begin == b"{" else b'"ph"' in text if begin == b"[" else True


def _rank_in(path: Path) -> int | None:
    matches = _RANK.findall(path.name) or _RANK.findall(path.parent.name)
    return int(matches[-1]) if matches else None


def _texts(files: Sequence[Path], reader: ThreadPoolExecutor) -> Iterator[tuple[Path, bytes]]:
    """Files with their text; the next file is read while the caller works on the current one."""
    ahead = reader.submit(read_text, files[0])
    for file, following in zip(files, (*files[1:], None), strict=True):
        text = ahead.result()
        if following is not None:
            ahead = reader.submit(read_text, following)
        yield file, text


def _ranks(traces: Sequence[Trace]) -> list[int]:
    """The rank of each trace: from the names if all have one, else from the files."""
    named = [_rank_in(trace.path) for trace in traces]
    recorded = [trace.rank for trace in traces]
    ranks = named if None not in named and len(set(named)) == len(named) else recorded  # copies can have equal content
    if len(traces) == 1:
        ranks = [recorded[0] if recorded[0] is not None else named[0] or 0]
    sure = [rank for rank in ranks if rank is not None]
    if len(set(sure)) < len(traces):
        places = {(trace.path.parent, rank) for trace, rank in zip(traces, ranks, strict=True)}
        folders = sorted({f"{folder}" for folder, _ in places})
        if 1 < len(folders) < len(places) == len(traces):
            what = f"{len(folders)} folders with traces of the same ranks"
            raise TraceError(what, fix=f"give one of {', '.join(folders)}")
        raise TraceError(
            f"{traces[0].path.parent}: it is not clear which rank each of {len(traces)} files is of",
            got=ranks,
            fix="name them rank-0.json.gz, rank-1.json.gz, ...",
        )
    return sure
