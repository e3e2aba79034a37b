"""Files become columns; a damaged file gives an error of one line."""

import gzip
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import TraceError
from penstock.trace.calls import calls_of
from penstock.trace.events import NONE, GpuKind, HostKind
from penstock.trace.load import READER, decode_trace, load_ranks, trace_files
from penstock.trace.timeline import steps_of, timelines
from tests.report.made_runs import host_trace
from tests.trace.tiny import damaged, decoded, event, kernel, launch, load_trace, read, text_of, tiny, trace_of, write


def told(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        load_ranks(path)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------- columns


def test_events_of_the_gpu_are_sorted_and_know_kind_stream_and_launch() -> None:
    gpu = read(tiny()).gpu
    assert [(gpu.name(row)[:6], gpu.kind[row], gpu.stream[row]) for row in range(5)] == [
        ("leaked", GpuKind.COMPUTE, 7),
        ("ampere", GpuKind.COMPUTE, 7),
        ("ncclDe", GpuKind.COMMUNICATION, 20),
        ("Memcpy", GpuKind.COPY, 7),
        ("Memset", GpuKind.SET, 7),
    ]
    assert gpu.is_linked.tolist() == [False] + [True] * 8
    assert (np.diff(gpu.start_us) >= 0).all()


def test_the_launch_of_an_event_has_its_correlation_and_a_part_of_a_table_its_own_ends() -> None:
    trace = read(tiny())
    linked, end_us = trace.gpu.take(trace.gpu.is_linked), trace.gpu.end_us
    assert trace.host.correlation[linked.launch].tolist() == linked.correlation.tolist()
    assert set(trace.host.kind[linked.launch].tolist()) == {HostKind.RUNTIME}
    assert linked.end_us.tolist() == end_us[1:].tolist()


def test_events_of_the_host_know_thread_sequence_and_external_id() -> None:
    trace = read(tiny())
    operators = trace.host.take(trace.host.kind == HostKind.OPERATOR)
    assert [operators.name(row) for row in range(len(operators))] == ["aten::mm"] * 2
    assert (operators.external_id.tolist(), operators.sequence.tolist()) == ([1, 11], [5, 5])
    assert trace.threads[operators.thread[0]].name == "thread 77 (python)"
    assert trace.host.take(trace.host.kind == HostKind.SPAN).sequence.tolist() == [NONE, NONE]


def test_of_host_events_that_start_together_the_longer_is_first() -> None:
    trace = decoded(event("cpu_op", "inner", 0, 1), event("cpu_op", "outer", 0, 9), kernel("one", 5, 5, correlation=1))
    assert [trace.host.name(row) for row in range(2)] == ["outer", "inner"]


def test_args_are_decoded_on_access_and_stay_with_their_events() -> None:
    gpu = read(tiny()).gpu
    copies = gpu.take(gpu.kind == GpuKind.COPY)
    assert copies.args(1) == {"device": 0, "stream": 7, "correlation": 13, "bytes": 4096}
    bare = decoded({"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2}).gpu
    assert (bare.args(0), bare.correlation[0], bare.stream[0]) == ({}, NONE, 0)


def test_machine_and_rank_are_known() -> None:
    trace = read(tiny(rank=3))
    assert (trace.rank, trace.world, trace.device_name) == (3, 8, "NVIDIA H100 80GB HBM3")


def test_arrows_link_events_without_correlation() -> None:
    call, there = launch(5, correlation=0), kernel("k", 50, 5, correlation=0)
    ends = [
        {"cat": "ac2g", "name": "ac2g", "id": 9, "ph": phase} | {key: one[key] for key in ("pid", "tid", "ts")}
        for phase, one in (("s", call), ("f", there))
    ]
    trace = decoded(call, there, kernel("no arrow", 60, 5, correlation=0), *ends)
    assert trace.gpu.launch.tolist() == [0, NONE]


def test_of_calls_with_one_correlation_the_first_is_the_launch() -> None:
    trace = decoded(launch(9, correlation=4), launch(3, correlation=4), kernel("k", 50, 5, correlation=4))
    assert trace.host.start_us[trace.gpu.launch[0]] == 1_000_003


def test_old_names_of_categories_are_known() -> None:
    trace = decoded(
        event("Kernel", "gemm", 20, 5, stream=7, correlation=3),
        event("Runtime", "cudaLaunchKernel", 2, 5, correlation=3, **{"external id": 6}),
    )
    assert trace.gpu.is_linked.all()
    assert trace.host.external_id.tolist() == [6]


def test_numbers_without_a_sign_wrap_around() -> None:
    operator = event("cpu_op", "aten::mm", 0, 5, **{"External id": 2**64 - 1})
    assert decoded(operator, kernel("k", 50, 5, correlation=4)).host.external_id.tolist() == [NONE]


def test_notes_list_oddities() -> None:
    trace = decoded(kernel("backwards", 50, -5, correlation=4), event("kernel", "elsewhere", 70, 5, stream=1, device=1))
    assert trace.gpu.duration_us.tolist() == [0, 5]
    assert len(trace.notes) == 2
    assert "end before they start" in trace.notes[0]
    assert "2 devices" in trace.notes[1]


# ------------------------------------------------------------------------------------------------- odd but readable


def test_a_bare_list_of_events_is_a_trace() -> None:
    assert len(read(tiny()["traceEvents"]).gpu) == 9


@pytest.mark.parametrize("number", [b"inf", b"-nan", b"NaN", b"Infinity"])
def test_numbers_that_are_none_are_read_as_missing(number: bytes) -> None:
    text = text_of(trace_of(event("gpu_memcpy", "Memcpy", 0, 5, stream=7, bandwidth=7777)))
    assert decode_trace(text.replace(b"7777", number)).gpu.args(0)["bandwidth"] is None


def test_bytes_that_are_no_text_are_marked() -> None:
    text = text_of(trace_of(kernel("NAME", 0, 5, correlation=1), event("cpu_op", "a", 0, 5, kernel="NAME")))
    trace = decode_trace(text.replace(b"NAME", b"k\xff"))
    assert trace.gpu.name(0) == trace.host.args(0)["kernel"] == "k\ufffd"


def test_a_packed_file_of_several_members_is_read_whole(tmp_path: Path) -> None:
    text = text_of(tiny())
    path = tmp_path / "rank-0.json"
    path.write_bytes(gzip.compress(text[:900]) + gzip.compress(text[900:]))
    assert len(load_trace(path).gpu) == 9


def test_streams_of_hip_are_texts_of_numbers() -> None:
    call, there = launch(5, correlation=1), kernel("k", 50, 5, correlation=1)
    call["args"] |= {"stream": "0x0", "device": "0"}
    there["args"]["stream"] = "0x1f"
    trace = decoded(call, there)
    assert (trace.gpu.stream.tolist(), trace.gpu.launch.tolist()) == ([31], [0])


def test_events_without_a_duration_are_left_out_and_counted() -> None:
    whole = tiny()
    for one in whole["traceEvents"]:
        if one["name"] in ("leaked_kernel", "aten::mm"):
            del one["dur"]
    trace = read(whole)
    assert (len(trace.gpu), trace.host.called("aten::mm").any()) == (8, False)
    assert trace.notes == ("3 events without a duration are left out, the first 'leaked_kernel'",)
    bare = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1}
    with pytest.raises(TraceError, match="no event on a GPU with a duration; got 1 events without one"):
        decoded(bare)


def test_control_characters_of_names_are_escaped() -> None:
    spoiled = kernel("ncclDevKernel\x1b[31m\n", 50, 5, correlation=1)
    spoiled["args"] |= {"Collective name": "all\x07reduce", "Process Group Name": "\u202e0"}
    trace = decoded(spoiled, deviceProperties=[{"id": 0, "name": "H\x9b1"}])
    assert (trace.gpu.name(0), trace.device_name) == ("ncclDevKernel\\x1b[31m\\n", "H\\x9b1")
    calls = calls_of({0: trace})
    assert (calls.name(0), calls.groups[0].name) == ("all\\x07reduce", "\\u202e0")


# ------------------------------------------------------------------------------------------------------- many ranks


@pytest.mark.parametrize(
    "names",
    [
        ("rank-{}.json.gz", "nothing.json"),
        ("rank{}_trace.json", "truth.json"),
        ("profile/rank-{}.json.gz", "config.json"),
        ("rank_{}/host.pt.trace.json", "facts.json"),
    ],
)
def test_a_folder_holds_a_trace_for_each_rank(tmp_path: Path, names: tuple[str, str]) -> None:
    for rank in (10, 2):
        write(tmp_path / names[0].format(rank), tiny(rank))
    write(tmp_path / names[1], {"not": "a trace"})
    ranks = load_ranks(tmp_path)
    assert [(rank, trace.rank) for rank, trace in ranks.items()] == [(2, 2), (10, 10)]


def test_ranks_come_from_names_else_from_the_files_and_one_file_without_is_rank_0(tmp_path: Path) -> None:
    written = [write(tmp_path / name, tiny(rank)) for name, rank in (("a.pt.json", 5), ("b.pt.json.gz", 4))]
    assert list(load_ranks(written)) == [4, 5]
    named = [write(tmp_path / f"rank-{rank}.json", tiny(rank=0)) for rank in range(3)]
    assert [(rank, trace.rank) for rank, trace in load_ranks(named).items()] == [(0, 0), (1, 1), (2, 2)]
    assert list(load_ranks(write(tmp_path / "trace.json", tiny() | {"distributedInfo": {}}))) == [0]


@pytest.mark.parametrize("name", ["host.pt.trace.json.gz", "rank7.json"])
def test_in_a_folder_named_after_a_rank_other_files_are_no_traces(tmp_path: Path, name: str) -> None:
    for below in ("config.json", "metrics.json"):
        write(tmp_path / "job_rank2" / below, {"not": "a trace"})
    trace = tiny() | {"distributedInfo": {}, "deviceProperties": [{"id": 0, "name": "a" * 5000}]}
    write(tmp_path / "job_rank2" / name, trace)
    rank = 7 if name == "rank7.json" else 2
    assert list(load_ranks(tmp_path / "job_rank2")) == list(load_ranks(tmp_path)) == [rank]


def test_drafts_of_a_recorder_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path / ".rank-1.json", tiny(1))
    write(tmp_path / "rank-0.json", tiny(0))
    assert [path.name for path in trace_files(tmp_path)] == ["rank-0.json"]


@pytest.mark.parametrize("other", [tiny(4), {"traceEvents": tiny()["traceEvents"]}])
def test_two_files_of_one_rank_or_without_a_rank_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    write(tmp_path / "a.json", tiny(4))
    write(tmp_path / "b.json", other)
    assert "not clear which rank" in told(tmp_path)


# --------------------------------------------------------------------------------------------------------- refusals


def test_of_several_recordings_in_a_folder_one_must_be_given(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        for rank in range(2):
            write(tmp_path / folder / f"rank{rank}.json", tiny(rank))
    assert told(tmp_path) == (
        f"2 folders with traces of the same ranks; fix: give one of {tmp_path / 'first'}, {tmp_path / 'second'}"
    )


def test_a_file_or_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert "cannot read" in told(tmp_path / "nothing.json")
    assert "holds no trace" in told(tmp_path)
    with pytest.raises(TraceError, match="no trace was given"):
        load_ranks([])


def test_the_folder_of_a_run_without_a_recording_says_how_to_record(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints/step-5/facts.json", {})
    assert "profile.start" in told(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"rank-0.json".ljust(257, b"\0") + b"ustar", "is a tar archive; fix: unpack it first"),
        (b'{"schema": "1.0.1", "nodes": [{"name": "op", "id": 2}]}', "is an execution trace"),
        (b'{"a": 1}', "missing required field `traceEvents`"),
        (b'{"traceEvents": {}}', "Expected `array`"),
        (b'{"traceEvents": []}', "no trace of torch.profiler; got 0 events"),
        (b"[" * 100_000, "no trace of torch.profiler"),
        (b'[{"ph": "X", "cat": "Op", "name": "jit", "ts": 1, "dur": 2}]', "'Op'"),
        (b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": "soon"}]', "Expected `float | null`, got `str`"),
        (b'[{"ph": "X", "cat": "kernel", "name": "k"}]', "'k' has no start"),
        (b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1e300}]', "a time that cannot be"),
        (b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": {"stream": []}}]', "args of an event"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "rank-0.json"
    path.write_bytes(content)
    message = told(path)
    assert says in message
    assert str(path) in message
    assert "\n" not in message


def test_a_trace_without_a_device_and_without_operators_is_refused() -> None:
    with pytest.raises(TraceError, match="has neither an event on a GPU nor an operator"):
        decode_trace(text_of(trace_of(event("cuda_runtime", "cudaMalloc", 0, 5))))


def test_files_of_a_device_and_of_a_cpu_are_not_read_together(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"rank-{rank}.json", one) for rank, one in enumerate((tiny(), host_trace()))]
    with pytest.raises(TraceError, match="rank-1.json has no event on a GPU, but other files have"):
        load_ranks(paths)


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_was_cut_off_is_refused_wherever_the_cut_is(tmp_path: Path, packed: bool) -> None:
    text = gzip.compress(text_of(tiny()), mtime=0) if packed else text_of(tiny())
    path = tmp_path / "rank-0.json"
    for length in range(0, len(text) - 1, 97):
        path.write_bytes(text[:length])
        assert "cop" in told(path) or length < 3


def test_no_thread_is_left_behind_by_a_file_that_is_refused(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"rank-{rank}.json", tiny()) for rank in range(3)]
    paths[1].write_bytes(b"no trace")
    with pytest.raises(TraceError) as caught:
        load_ranks(paths)
    assert caught.tb is not None, "whose frames are still there"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(READER)]


def test_damaged_args_are_refused_on_access() -> None:
    text = text_of(trace_of(kernel("k", 0, 5, correlation=1), event("cpu_op", "a", 0, 5, shapes=7777)))
    trace = decode_trace(text.replace(b"7777", b"1e999"))
    with pytest.raises(TraceError, match="args of 'a' are damaged"):
        trace.host.args(0)


# ------------------------------------------------------------------------------------------------------------- fuzz


def read_all(path: Path) -> None:
    trace = load_ranks(path)[load_trace(path).rank or 0]
    assert all(np.isfinite(value) for value in vars(timelines(trace)["all"]).values())
    assert trace.device_name is None or isinstance(trace.device_name, str)
    steps_of(trace)
    for table in (trace.gpu, trace.host):
        for row in range(len(table)):
            table.args(row)


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_refused_in_one_line(count: int, tmp_path: Path) -> None:
    path, readable = tmp_path / "rank-0.json", 0
    for seed in range(count):
        path.write_bytes(damaged(tiny(), random.Random(seed)))
        refusal = ""
        try:
            read_all(path)
        except TraceError as error:
            refusal = str(error)
        assert "\n" not in refusal, seed
        readable += not refusal
    assert 0.025 * count < readable < 0.975 * count


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_file_that_does_not_begin_as_json_is_refused_by_its_beginning(
    pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(pack(bytes(4096)))
    with path.open("r+b") as file:
        file.truncate(10**12)
    with pytest.raises(TraceError, match="is no trace of torch.profiler, or damaged"):
        load_trace(path)


def test_a_file_that_becomes_far_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (80 << 20)))
    assert told(path) == f"{path} becomes more than 100 times as large when it is unpacked: it is no trace"


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace.json")
    assert told(tmp_path / "trace.json") == f"cannot read {tmp_path}/trace.json: it is a pipe or a device, no file"
