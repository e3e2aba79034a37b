"""Databases of Nsight Systems are read as the recording of torch.profiler with the same events.

The tables are those of exports of nsys 2023.2 and 2024.5, with the columns that a reader needs.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import TraceError
from penstock.trace.analysis import analyse_files
from penstock.trace.events import HostKind, Trace
from penstock.trace.load import load_ranks
from tests.trace.tiny import TIME_US, read, text_of, tiny

PROCESS = 1 << 48  # of a serialized identifier: the machine

ON_DEVICE = "start, end, deviceId, contextId, streamId, correlationId, globalPid"
KERNEL = (
    f"{ON_DEVICE}, demangledName, shortName, registersPerThread, gridX, gridY, gridZ, blockX, blockY, blockZ, "
    "staticSharedMemory, dynamicSharedMemory"
)
TABLES = {
    "StringIds": "id, value",
    "TARGET_INFO_GPU": "id, name, totalMemory, smCount",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs",
    "ThreadNames": "nameId, globalTid",
    "CUPTI_ACTIVITY_KIND_KERNEL": KERNEL,
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{ON_DEVICE}, bytes, copyKind",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{ON_DEVICE}, bytes",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{ON_DEVICE}, graphId",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, eventClass, globalTid, correlationId, nameId",
    "NVTX_EVENTS": "start, end, eventType, text, globalTid, textId",
}


class Report:
    """A report, filled with the events of traces in JSON, each of a process of its own."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Any, ...]]] = {}
        self._texts: dict[str, int] = {}
        self.add("TARGET_INFO_GPU", 0, "NVIDIA H100 80GB HBM3", 80 << 30, 132)
        self.add("TARGET_INFO_SESSION_START_TIME", 1_700_000_000_000_000_000)

    def add(self, table: str, *values: Any) -> None:
        self._rows.setdefault(table, []).append(values)

    def text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts) + 1)

    def process(self, events: Sequence[dict[str, Any]], number: int = 77, device: int = 0) -> None:
        process, thread = PROCESS | number << 24, PROCESS | number << 24 | 77
        for event in events:
            if event["ph"] != "X":
                continue
            args, name = event["args"], event["name"]
            begin = round(event["ts"] * 1000)
            times = begin, begin + round(event["dur"] * 1000)
            on_device = (*times, device, 1, args.get("stream"), args.get("correlation"), process)
            match event["cat"]:
                case "kernel":
                    shape = (40, 8, 1, 1, 128, 1, 1, 1024, 2048)
                    self.add("CUPTI_ACTIVITY_KIND_KERNEL", *on_device, self.text(name), self.text("short"), *shape)
                case "gpu_memcpy":
                    self.add("CUPTI_ACTIVITY_KIND_MEMCPY", *on_device, args["bytes"], 8)
                case "gpu_memset":
                    self.add("CUPTI_ACTIVITY_KIND_MEMSET", *on_device, 512)
                case "cuda_runtime":
                    call = self.text(f"{name}_v7000")
                    self.add("CUPTI_ACTIVITY_KIND_RUNTIME", *times, 0, thread, args["correlation"], call)
                    # Wrappers of another class are in the same table.
                    self.add("CUPTI_ACTIVITY_KIND_RUNTIME", *times, 67, thread, args["correlation"], self.text(name))
                case "user_annotation":
                    self.add("NVTX_EVENTS", *times, 59, name, thread, None)
                case "cpu_op":
                    text = f"{name}, seq = {args['Sequence number']}, op_id = 4, sizes = [[2, 3], [3, 4]]"
                    self.add("NVTX_EVENTS", *times, 59, None, thread, self.text(text))

    def write(self, path: Path) -> Path:
        with closing(sqlite3.connect(path)) as database:
            for number, text in [(number, text) for text, number in self._texts.items()]:
                self.add("StringIds", number, text)
            for table, rows in self._rows.items():  # as nsys does: no table without rows
                database.execute(f"CREATE TABLE {table} ({TABLES[table]})")
                database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
            database.commit()
        return path


def columns(trace: Trace) -> list[tuple[Any, ...]]:
    """What the device did and which call started it; a rounded time in microseconds."""
    gpu = trace.gpu
    launched = [trace.host.name(row) if row >= 0 else None for row in gpu.launch]
    return [
        (
            gpu.name(i),
            int(gpu.kind[i]),
            int(gpu.stream[i]),
            float(gpu.start_us[i]),
            float(gpu.duration_us[i]),
            launched[i],
        )
        for i in range(len(gpu))
    ]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    report = Report()
    report.process(tiny()["traceEvents"])
    report.add("NVTX_EVENTS", 0, None, 75, "NCCL", PROCESS, None)  # the creation of a domain, which does not last
    return report.write(tmp_path / "run.sqlite")


def test_a_database_has_the_events_of_the_same_recording_in_json(report: Path) -> None:
    (trace,), expected = load_ranks(report).values(), read(tiny())
    assert columns(trace) == columns(expected)
    assert trace.device_name == expected.device_name
    product = next(i for i in range(len(trace.gpu)) if "gemm" in trace.gpu.name(i))
    assert trace.gpu.args(product)["grid"] == [8, 1, 1]
    assert not trace.notes


def test_ranges_of_emit_nvtx_are_operators_with_shapes_and_others_are_regions(report: Path) -> None:
    (trace,) = load_ranks(report).values()
    host = trace.host
    operators = host.take(host.kind == HostKind.OPERATOR)
    assert [operators.name(i) for i in range(len(operators))] == ["aten::mm", "aten::mm"]
    assert operators.sequence.tolist() == [5, 5]
    assert operators.args(0)["Input Dims"] == [[2, 3], [3, 4]]
    regions = host.take(host.kind == HostKind.SPAN)
    assert [regions.name(i) for i in range(len(regions))] == ["ProfilerStep#3", "ProfilerStep#4"]


def test_times_of_a_database_equal_those_of_the_recording_in_json(report: Path, tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_bytes(text_of(tiny()))
    of_database, of_json = (analyse_files([path]).ranks[0] for path in (report, tmp_path / "rank-0.json"))
    assert of_database.spent == of_json.spent
    assert of_database.streams == of_json.streams
    assert [row.name for row in of_database.annotations] == [row.name for row in of_json.annotations]


def test_each_process_of_a_report_is_a_rank_in_the_order_of_the_devices(tmp_path: Path) -> None:
    report = Report()
    report.process(tiny()["traceEvents"], number=80, device=1)
    report.process(tiny()["traceEvents"][:-9], number=90, device=0)
    ranks = load_ranks(report.write(tmp_path / "run.sqlite"))
    assert list(ranks) == [0, 1]
    assert [int(trace.gpu.device[0]) for trace in ranks.values()] == [0, 1]
    assert columns(ranks[1]) == columns(read(tiny())), "correlations of another process start nothing here"


def test_a_graph_that_was_recorded_as_a_whole_is_work_of_the_device(tmp_path: Path) -> None:
    report, begin = Report(), round(TIME_US * 1000)
    report.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", begin, begin + 5000, 0, 1, 7, 3, PROCESS, 12)
    (trace,) = load_ranks(report.write(tmp_path / "run.sqlite")).values()
    assert (trace.gpu.name(0), trace.gpu.duration_us.tolist()) == ("CUDA graph 12", [5.0])


def test_a_database_that_cannot_be_read_says_why(tmp_path: Path, report: Path) -> None:
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(report.read_bytes()[:5000])
    foreign = Report().write(tmp_path / "foreign.sqlite")
    old = tmp_path / "old.sqlite"
    old.write_bytes(report.read_bytes())
    with closing(sqlite3.connect(old)) as database:
        database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME DROP COLUMN eventClass")
    binary = tmp_path / "run.nsys-rep"
    binary.write_bytes(b"\x01\x02")
    for path, says in (
        (cut, "is damaged"),
        (foreign, "without work of a GPU"),
        (old, "newer nsys"),
        (binary, f"nsys export --type sqlite {binary}"),
    ):
        with pytest.raises(TraceError, match=says) as caught:
            load_ranks(path)
        assert f"{path}" in str(caught.value)
