"""The time of a device: by definition, on a handmade trace, on real ones; intervals agree with sets of moments."""

from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trace.analysis import analyse_files, analyse_traces
from penstock.trace.events import GpuKind, Trace
from penstock.trace.host_table import HostTable, host_table
from penstock.trace.intervals import Intervals, union
from penstock.trace.load import load_ranks, on_host
from penstock.trace.timeline import TimeBreakdown, steps_of, timeline_of, timelines
from tests.report.made_runs import host_trace
from tests.trace.synthetic import make
from tests.trace.synthetic_job import Job
from tests.trace.tiny import decoded, event, kernel, load_trace, operator, ran, read, span, tiny, trace_of, write

DATA = Path(__file__).parent / "data"
PARTS = ("total", "busy", "compute", "communication", "exposed_communication", "memcpy", "exposed_memcpy", "idle")

REAL = (
    ("mi300x_resnet", 0, "all", (86567.708, 84002.069, 26175.002, 71516.523, 55371.218, 2538.598, 2455.848, 2565.639)),
    ("mi300x_resnet", 0, "linked", (56517.603, 56234.083, 19561.969, 47200.31, 35088.481, 1633.433, 1583.632, 283.521)),
    ("dlrm", 0, "all", (1222847, 547656, 210348, 396199, 336981, 1297, 327, 675191)),
    ("dlrm", 1, "linked", (1231186, 580050, 272004, 379053, 303520, 16473, 4526, 651136)),
    ("b200_gpt_oss", 0, "all", (84487.178, 11596.479, 8652.136, 2141.5, 2141.5, 802.843, 802.843, 72890.698)),
)
"""Folder of the data, rank, which events, microseconds of PARTS: from a calculator of its own, on the whole files."""

KINDS = {
    "kernel": ("gemm", GpuKind.COMPUTE),
    "collective": ("ncclDevKernel_AllGather", GpuKind.COMMUNICATION),
    "gpu_memcpy": ("Memcpy", GpuKind.COPY),
    "gpu_memset": ("Memset", GpuKind.SET),
}


def spent(timeline: TimeBreakdown) -> tuple[float, ...]:
    return tuple(round(value, 3) for value in astuple(timeline)[:-1])


@pytest.mark.parametrize(("folder", "rank", "which", "expected"), REAL)
def test_a_real_trace_is_timed_to_the_microsecond(
    folder: str, rank: int, which: str, expected: tuple[float, ...]
) -> None:
    found = asdict(timelines(load_ranks(DATA / folder)[rank])[which])
    assert [found[f"{part}_us"] for part in PARTS] == pytest.approx(expected, abs=0.01)


def test_kernels_that_were_launched_before_the_profiler_began_are_in_one_of_two_answers() -> None:
    both = timelines(load_trace(DATA / "mi300x_resnet/rank-0.json.gz"))
    assert both["all"].events - both["linked"].events == 968  # launched before the profiler began


@given(
    st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=14)
)
def test_every_part_of_a_timeline_is_a_set_of_moments(some: list[tuple[str, int, int]]) -> None:
    events = [
        event("kernel" if category == "collective" else category, KINDS[category][0], start, duration, stream=row)
        for row, (category, start, duration) in enumerate(some)
    ]
    held: dict[GpuKind, set[int]] = {kind: set() for kind in GpuKind}
    for category, start, duration in some:
        held[KINDS[category][1]].update(range(start, start + duration))
    compute = held[GpuKind.COMPUTE] | held[GpuKind.SET]
    sent, copied = held[GpuKind.COMMUNICATION], held[GpuKind.COPY]
    busy = compute | sent | copied
    total = max(start + duration for _, start, duration in some) - min(start for _, start, _ in some)
    parts = (busy, compute, sent, sent - compute, copied, copied - compute - sent)
    assert spent(timeline_of(decoded(*events).gpu)) == (total, *map(len, parts), total - len(busy))


def test_a_trace_by_hand_adds_up() -> None:
    both = timelines(read(tiny()))
    assert spent(both["all"]) == (315, 180, 100, 100, 60, 40, 20, 135)
    assert spent(both["linked"]) == (295, 170, 90, 100, 60, 40, 20, 125)


def test_windows_of_steps_leave_nothing_out() -> None:
    trace = read(tiny())
    steps = steps_of(trace)
    assert [(step.number, step.duration_us, step.timeline.events) for step in steps] == [(3, 190, 4), (4, 190, 4)]
    assert [step.timeline.total_us for step in steps] == [200, 95]  # to the next step's first event; to the last end
    linked = timelines(trace)["linked"]
    sums = [sum(values) for values in zip(*(astuple(step.timeline) for step in steps), strict=True)]
    assert sums == pytest.approx(astuple(linked))


def test_a_step_is_what_it_launched_however_late_that_runs() -> None:
    steps = [span("step 7", 0, 100), span("step 8", 100, 100)]
    trace = decoded(*steps, *ran("late", 10, 150, 100), *ran("later", 110, 300, 50))
    assert [(step.name, *step.window_us) for step in steps_of(trace)] == [
        ("step 7", 1_000_150, 1_000_300),
        ("step 8", 1_000_300, 1_000_350),
    ]
    assert [step.timeline.idle_us for step in steps_of(trace)] == [50, 0]  # from 250 to 300 us


def test_a_step_that_launched_nothing_has_an_empty_window() -> None:
    steps = [span(f"ProfilerStep#{number}", 100 * number, 100) for number in range(3)]
    trace = decoded(*steps, *ran("first", 10, 20, 10), *ran("last", 210, 220, 10))
    assert [step.timeline.total_us for step in steps_of(trace)] == [200, 0, 10]
    assert [step.timeline.events for step in steps_of(trace)] == [1, 0, 1]


def test_steps_of_the_profiler_go_before_spans_of_the_same_name() -> None:
    trace = decoded(span("step 1", 0, 10), span("ProfilerStep#1", 0, 20), kernel("one", 30, 5, correlation=1))
    assert [step.name for step in steps_of(trace)] == ["ProfilerStep#1"]


def test_names_that_only_begin_like_steps_are_none() -> None:
    spans = [span(name, 0, 10) for name in ("stepping", "step one", "ProfilerStep", "Optimizer.step")]
    assert steps_of(decoded(*spans, kernel("one", 30, 5, correlation=1))) == ()


def test_a_trace_without_linked_events_has_a_timeline_of_zeros() -> None:
    trace = decoded(span("step 1", 0, 10), kernel("one", 30, 5, correlation=1))
    assert spent(timelines(trace)["linked"]) == (0,) * 8
    assert steps_of(trace)[0].timeline.total_us == 0


# ------------------------------------------------------------------------------------------------------- test intervals

MOMENTS = 40
Pairs = list[tuple[int, int]]

pairs = st.lists(st.tuples(st.integers(0, MOMENTS), st.integers(0, MOMENTS)), max_size=12)
"""Starts and ends as whole numbers, in any order: some end before they start."""


def made(some: Pairs) -> Intervals:
    start_us, end_us = np.array(some, dtype=np.float64).reshape(-1, 2).T
    return union(start_us, end_us)


def moments(some: Pairs) -> set[int]:
    """The definition: a moment `m` stands for the time from m to m + 1."""
    return {moment for start, end in some for moment in range(start, end)}


def moments_in(intervals: Intervals) -> set[int]:
    return moments([(int(a), int(b)) for a, b in zip(intervals.start_us, intervals.end_us, strict=True)])


def has_one_form(intervals: Intervals) -> bool:
    """Sorted, none empty, none touching the next."""
    start_us, end_us = intervals.start_us, intervals.end_us
    return bool((end_us > start_us).all() and (start_us[1:] > end_us[:-1]).all())


@given(pairs)
def test_a_union_holds_the_moments_of_any_and_has_one_form(some: Pairs) -> None:
    assert moments_in(made(some)) == moments(some)
    assert has_one_form(made(some))
    assert made(some).length_us == len(moments(some))


@given(pairs, pairs)
def test_or_and_minus_are_those_of_sets(some: Pairs, others: Pairs) -> None:
    left, right = made(some), made(others)
    expected = {
        left | right: moments(some) | moments(others),
        left & right: moments(some) & moments(others),
        left - right: moments(some) - moments(others),
    }
    for intervals, truth in expected.items():
        assert moments_in(intervals) == truth
        assert has_one_form(intervals)


@given(pairs, pairs)
def test_covered_time_is_counted_for_each_query(some: Pairs, queries: Pairs) -> None:
    start_us, end_us = np.array(queries, dtype=np.float64).reshape(-1, 2).T
    truth = [len(moments(some) & moments([query])) for query in queries]
    assert made(some).covered_us(start_us, end_us).tolist() == truth


@given(pairs, st.integers(0, MOMENTS), st.integers(0, MOMENTS))
def test_within_holds_the_moments_between_two_times(some: Pairs, start: int, end: int) -> None:
    assert moments_in(made(some).within(start, end)) == moments(some) & set(range(start, end))


@given(pairs)
def test_gaps_are_the_missing_moments_between_the_first_and_the_last(some: Pairs) -> None:
    held = moments(some)
    between = set(range(min(held), max(held))) - held if held else set()
    assert moments_in(made(some).gaps()) == between


@given(pairs)
def test_a_set_and_its_complement_are_disjoint_and_cover_everything(some: Pairs) -> None:
    inside = made(some)
    assert len(inside & inside.outside()) == 0
    assert (inside | inside.outside()).start_us.tolist() == [-np.inf]


@pytest.mark.parametrize("origin_us", [0.0, 1.7e15])
def test_times_since_1970_lose_no_microsecond(origin_us: float) -> None:
    start_us = origin_us + np.arange(0.0, 100_000.0, 10.0)
    assert union(start_us, start_us + 4).length_us == 40_000


JOBS = [
    Job(hot_rank=1),
    Job(is_even=True, slow_rank=2, offsets_us=(5.0, -70.5, 0.0, 900.125)),
    Job(dispatch="symmetric", stall_us=300.0),
    Job(dispatch="deep_ep", missing=((1, 2),)),
    Job(metadata="launch", missing=((0, 0), (3, 11))),
    Job(metadata="none", has_sequence=False),
]


@pytest.mark.parametrize("job", JOBS)
def test_a_folder_is_read_as_one_trace_for_each_rank_with_the_timeline_that_is_swept(job: Job, tmp_path: Path) -> None:
    traces = make(job)
    ranks = load_ranks(traces.write(tmp_path / "traces"))
    assert sorted(ranks) == list(range(job.ranks))
    for rank, trace in ranks.items():
        categories = [event["cat"] for event in traces.files[rank]["traceEvents"]]
        assert (trace.rank, trace.world, trace.notes) == (rank, job.ranks, ())
        assert len(trace.gpu) == sum(one in ("kernel", "gpu_memcpy", "gpu_memset") for one in categories)
        assert trace.gpu.is_linked.all()
        found, true = timelines(trace)["all"], traces.truth.timelines[rank]
        for name, us in true.items():
            assert getattr(found, f"{name}_us") == pytest.approx(us, abs=1e-2), name


def of_host(*events: dict[str, Any]) -> Trace:
    return on_host(read(trace_of(*events), gpu_required=False))


def stretches(trace: Trace) -> list[tuple[str, float, float]]:
    gpu, begin = trace.gpu, trace.host.start_us[0]
    return [(gpu.name(row), gpu.start_us[row] - begin, gpu.end_us[row] - begin) for row in range(len(gpu))]


def test_an_operator_has_what_those_inside_leave_and_messages_of_gloo_are_communication() -> None:
    trace = of_host(*host_trace()["traceEvents"])
    assert stretches(trace) == [
        ("aten::linear", 30, 50),
        ("aten::addmm", 50, 170),
        ("aten::linear", 170, 230),
        ("gloo:all_reduce", 760, 790),
        ("aten::_fused_adamw_", 810, 910),
    ]
    kinds = [GpuKind.COMPUTE] * 3 + [GpuKind.COMMUNICATION, GpuKind.COMPUTE]
    assert trace.gpu.kind.tolist() == kinds


def test_phases_and_steps_are_found_as_on_a_device() -> None:
    (one,) = analyse_traces({0: of_host(*host_trace()["traceEvents"])}).ranks
    rows = {(row.name, row.layer, row.pass_): row.kernel_us for row in one.phases.rows()}
    assert rows["attention", 1, "forward"] == 200
    assert rows["optimizer", None, "update"] == 100
    (step,) = one.steps
    assert (step.number, step.timeline.compute_us) == (3, 300)


def test_an_operator_that_outlasts_the_one_around_it_is_cut() -> None:
    trace = of_host(operator("aten::a", 0, 100), operator("aten::b", 50, 50.001), operator("aten::c", 100, 10))
    assert stretches(trace) == [("aten::a", 0, 50), ("aten::b", 50, 100), ("aten::c", 100, 110)]  # b ends with a


def test_threads_work_at_the_same_time() -> None:
    trace = of_host(operator("aten::a", 0, 100), operator("aten::b", 20, 30) | {"tid": 5})
    assert stretches(trace) == [("aten::a", 0, 100), ("aten::b", 20, 50)]
    assert analyse_traces({0: trace}).ranks[0].timelines["all"].busy_us == 100  # not 130


def test_a_trace_with_a_device_is_not_asked() -> None:
    with pytest.raises(AssertionError, match="a device of its own"):
        of_host(kernel("gemm", 0, 10, correlation=1))


# ------------------------------------------------------------------------------------------------------ test host table


def _step(number: int, begin: float, product_us: float) -> list[dict[str, Any]]:
    """One step: a linear under the span of attention, which calls one product; then AdamW."""
    return [
        span(f"step {number}", begin, 100),
        span("attention", begin, 60),
        operator("aten::linear", begin + 5, 10 + product_us),
        operator("aten::addmm", begin + 10, product_us),
        span("optimizer", begin + 70, 20),
        operator("aten::_fused_adamw_", begin + 70, 20),
    ]


@pytest.fixture
def table(tmp_path: Path) -> HostTable:
    answer = analyse_files([write(tmp_path / "rank-0.json", trace_of(*_step(3, 0, 20), *_step(4, 100, 40)))])
    assert answer.is_host
    return host_table(answer.ranks[0])


def test_operators_have_their_own_time_per_step(table: HostTable) -> None:
    found = {row.name: (row.calls, row.own_us) for row in table.operators}
    assert found == {"aten::addmm": (1, 30), "aten::linear": (1, 10), "aten::_fused_adamw_": (1, 20)}
    assert [row.name for row in table.operators] == ["aten::addmm", "aten::_fused_adamw_", "aten::linear"]


def test_phases_are_those_of_the_spans(table: HostTable) -> None:
    found = {(row.name, row.pass_): (row.calls, row.own_us) for row in table.phases}
    assert found == {("attention", "forward"): (2, 40), ("optimizer", "update"): (1, 20)}


def test_operators_and_what_is_outside_of_them_are_the_step(table: HostTable) -> None:
    assert table.steps == 2
    assert sum(row.own_us for row in table.operators) + table.outside_us == pytest.approx(table.step_us)
    assert sum(row.share for row in table.operators) + table.outside == pytest.approx(1)
