"""Tables beside phases: streams, annotations, counters, the critical path, and their sheets."""

import csv
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import TraceError
from penstock.trace.analysis import RankAnalysis, TraceAnalysis, analyse_files, analyse_traces, sheets, write_sheets
from tests.trace.synthetic import make
from tests.trace.synthetic_job import Job
from tests.trace.tiny import decoded, event, kernel, launch, operator, read, span, tiny

GEMM, SUM = "nvjet_sm90_tst_128x256", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)"


def of(*events: dict[str, Any]) -> RankAnalysis:
    return analysed(*events).ranks[0]


def analysed(*events: dict[str, Any]) -> TraceAnalysis:
    return analyse_traces({0: decoded(*events)})


def ran(name: str, launched: float, start: float, lasts: float, *, stream: int = 7, thread: int = 77) -> list[Any]:
    number = 1000 + int(launched)
    call = launch(launched, correlation=number) | {"tid": thread}
    return [call, kernel(name, start, lasts, correlation=number, stream=stream)]


# ---------------------------------------------------------------------------------------------------------------- steps


def test_all_tables_are_of_the_marked_steps_alone() -> None:
    early = [kernel("leaked", 0, 500, correlation=9, stream=7), *ran("warm_up", 5, 500, 300)]
    steps = [span(f"ProfilerStep#{number}", 100 * number, 100) for number in (1, 2)]
    work = [*ran(GEMM, 110, 900, 40), *ran(GEMM, 210, 960, 40)]
    one = of(*early, *steps, *work)
    assert [(step.number, *step.window_us) for step in one.steps] == [
        (1, 1_000_900, 1_000_940),
        (2, 1_000_940, 1_001_000),
    ]
    assert (one.spent.total_us, one.spent.compute_us, one.spent.idle_us) == (100, 80, 20)
    assert one.timelines["all"].total_us == 1000  # the recording, for comparison
    assert (one.left_out.earlier, one.left_out.earlier_us, one.left_out.others, one.left_out.others_us) == (
        1,
        500,
        1,
        300,
    )
    assert [(row.name, row.kernel_us) for row in one.phases.rows()] == [("matrix products", 80)]
    assert one.launches.kernel_count == 2


def test_a_stream_without_launches_in_the_trace_is_not_of_an_earlier_step() -> None:
    step = span("ProfilerStep#1", 0, 100)
    one = of(step, *ran(GEMM, 10, 100, 40), *ran(GEMM, 20, 200, 40), kernel("acme", 120, 30, correlation=9, stream=30))
    assert (one.spent.compute_us, one.left_out.earlier) == (90, 0)  # 100 to 150 and 200 to 240 us


def test_collectives_at_the_edge_of_the_steps_are_matched_and_left_out() -> None:
    made = make(Job(ranks=4, steps=3, layers=1))
    traces = made.ranks()
    whole = analyse_traces(traces)
    single = analyse_traces(traces, step=5)
    assert 0 < len(single.collectives.meetings) < len(whole.collectives.meetings)
    assert single.collectives.unmatched == ()
    for one in single.ranks:
        rows = single.collectives.calls.gpu_row[single.collectives.calls.rank == one.rank]
        assert all("nccl" in one.trace.gpu.name(int(row)).lower() for row in rows)


# -------------------------------------------------------------------------------------------------------------- streams


def test_a_stream_has_its_busy_time_kinds_and_longest_phase() -> None:
    one = of(*ran(GEMM, 1, 100, 40), *ran("zorbl", 5, 150, 20), *ran(SUM, 9, 120, 60, stream=20))
    told = [
        (row.stream, row.events, row.busy_us, row.compute_us, row.communication_us, row.phase) for row in one.streams
    ]
    assert told == [(7, 2, 60, 60, 0, "matrix products"), (20, 1, 60, 0, 60, "all-reduce")]
    assert [row.exposed_us for row in one.streams] == [60, 20]  # 140 to 150 and 170 to 180 us


# ---------------------------------------------------------------------------------------------------------- annotations


def test_an_annotation_has_the_kernels_launched_inside_it_and_inside_nested_ones() -> None:
    one = of(
        span("ProfilerStep#1", 0, 200),
        span("outer", 10, 100),
        span("inner", 20, 30),
        *ran(GEMM, 25, 1000, 40),
        *ran(GEMM, 60, 1100, 10),
        *ran(GEMM, 150, 1200, 5),
    )
    told = [(row.name, row.count, row.host_us, row.kernel_us, row.events) for row in one.annotations]
    assert told == [("outer", 1, 100, 50, 2), ("inner", 1, 30, 40, 1)]  # steps have a table of their own


def test_an_annotation_inside_one_of_its_name_counts_kernels_once() -> None:
    one = of(span("block", 0, 100), span("block", 10, 50), *ran(GEMM, 20, 1000, 40))
    assert [(row.count, row.kernel_us) for row in one.annotations] == [(2, 40)]


def test_launches_of_autograds_thread_belong_to_what_is_open_on_the_main_thread() -> None:
    one = of(span("ProfilerStep#1", 0, 200), span("backward pass", 10, 100), *ran(GEMM, 25, 1000, 40, thread=88))
    assert [(row.name, row.kernel_us) for row in one.annotations] == [("backward pass", 40)]


# ------------------------------------------------------------------------------------------------------------- counters


def counter(name: str, at: float, **values: Any) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": 0, "ts": 1_000_000 + at, "args": values}


def test_counters_have_their_range_over_the_steps() -> None:
    measured = event("cuda_profiler_range", "gemm", 30, 5, **{"smsp__inst_executed.sum": 12.0})
    one = of(
        span("ProfilerStep#1", 20, 100),
        *ran(GEMM, 25, 50, 40),
        counter("GPU 0 power", 0, watts=90),
        counter("GPU 0 power", 30, watts=500),
        counter("GPU 0 power", 60, watts=700),
        counter("queue", 30, length=3, depth=True),
        counter("nothing", 30, text="a\x1bb"),
        measured,
    )
    assert [(row.name, row.samples, row.least, row.mean, row.most, row.last) for row in one.counters] == [
        ("GPU 0 power", 2, 500, 600, 700, 700),  # one sample came before the step
        ("queue length", 1, 3, 3, 3, 3),
        ("smsp__inst_executed.sum", 1, 12, 12, 12, 12),
    ]


# -------------------------------------------------------------------------------------------------------- critical path


def path_of(answer: TraceAnalysis) -> list[tuple[int, str, str, float]]:
    return [(one.rank, one.kind, one.name, round(one.end_us - one.start_us, 3)) for one in answer.path.segments]


def test_the_path_follows_the_device_and_goes_to_the_host_where_that_launched_late() -> None:
    answer = analysed(
        span("ProfilerStep#1", 0, 500),
        *ran(GEMM, 1, 10, 40),  # until 50 us
        operator("aten::index", 60, 35),
        *ran("zorbl", 90, 100, 30),  # launched 40 us after the device had become idle
        *ran(GEMM, 95, 133, 20),  # launched in time; 3 us after the event before it on its stream
    )
    assert path_of(answer) == [
        (0, "compute", "matrix products", 40),
        (0, "host", "outside of operators", 10),
        (0, "host", "aten::index", 30),
        (0, "launch", "gather and scatter", 10),
        (0, "compute", "gather and scatter", 30),
        (0, "gap", "between kernels", 3),
        (0, "compute", "matrix products", 20),
    ]
    assert answer.path.total_us == 143
    assert answer.path.by_kind()["host"] == 40
    assert answer.path.as_json()["step"] == "ProfilerStep#1"


def test_work_on_another_stream_that_a_kernel_waited_for_is_on_the_path() -> None:
    answer = analysed(*ran(GEMM, 1, 10, 20), *ran(SUM, 3, 12, 60, stream=20), *ran(GEMM, 5, 74, 20))
    assert path_of(answer) == [
        (0, "gap", "between kernels", 2),  # nothing had ended when the all-reduce began
        (0, "communication", "all-reduce", 60),
        (0, "gap", "between kernels", 2),
        (0, "compute", "matrix products", 20),
    ]


def test_a_collective_leads_to_the_rank_that_came_last() -> None:
    about = {"Collective name": "allreduce", "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": 1}

    def rank(computes: float) -> Any:
        at = 10 + computes
        total = kernel(SUM, at, 160 - at, correlation=1003, stream=20)  # both leave at 160 us
        total["args"] |= about | {"Group size": 2}
        return decoded(span("ProfilerStep#1", 0, 99), *ran(GEMM, 1, 10, computes), launch(3, correlation=1003), total)

    answer = analyse_traces({0: rank(40), 1: rank(120)})
    assert path_of(answer) == [(1, "compute", "matrix products", 120), (0, "communication", "all-reduce", 30)]
    fast = analyse_traces({0: rank(40), 1: rank(120)}, rank=0)  # without the tables of rank 1
    assert path_of(fast) == [(0, "compute", "matrix products", 40), (0, "communication", "all-reduce", 110)]


def test_the_path_of_a_job_with_hot_experts_is_their_rank_and_adds_up_to_the_step(tmp_path: Path) -> None:
    answer = analyse_files([make(Job(ranks=4, hot_rank=1)).write(tmp_path)])
    path = answer.path
    experts = {row.rank for row in path.rows() if row.name.startswith("experts")}
    assert experts == {1}  # the others wait for it in every layer
    assert sum(row.total_us for row in path.rows()) == pytest.approx(path.total_us)
    assert all(one.end_us == two.start_us for one, two in zip(path.segments, path.segments[1:], strict=False))


# --------------------------------------------------------------------------------------------------------------- sheets


def test_sheets_are_of_one_step_and_hold_every_table(tmp_path: Path) -> None:
    answer = analyse_traces({0: read(tiny())})
    found = sheets(answer)
    assert {"timeline", "steps", "phases", "operators", "streams", "collectives", "critical_path", "gaps"} <= set(found)
    spent = {name: value for name, value in found["timeline"][0].items() if name != "of"}
    assert (spent["rank"], spent["total_us"], spent["events"]) == (0, 185, 4)  # of 170 and 200 us
    assert (
        sum(row["kernel_us"] for row in found["operators"]) == sum(row["kernel_us"] for row in found["phases"]) == 115
    )
    assert [row["total_us"] for row in found["steps"]] == [170, 200]
    write_sheets(answer, tmp_path / "sheets")
    with (tmp_path / "sheets" / "operators.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["operator"] for row in rows} == {"aten::mm", ""}
    assert rows[0]["kernel"] == "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def test_a_name_cannot_be_a_formula_in_a_spreadsheet(tmp_path: Path) -> None:
    write_sheets(analysed(*ran('=HYPERLINK("x")', 1, 10, 20)), tmp_path)
    assert "'=HYPERLINK" in (tmp_path / "operators.csv").read_text()


def test_sheets_go_into_an_empty_folder_only(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("")
    with pytest.raises(TraceError, match="is not empty; fix: name a new folder"):
        write_sheets(analysed(*ran(GEMM, 1, 10, 20)), tmp_path)
    with pytest.raises(TraceError, match="cannot write"):
        write_sheets(analysed(*ran(GEMM, 1, 10, 20)), tmp_path / "mine.csv")
