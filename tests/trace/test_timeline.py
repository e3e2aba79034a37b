"""The time of a device: by definition, on a handmade trace, on real ones; intervals agree with sets of moments."""

from dataclasses import asdict, astuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trace.analysis import analyse_traces
from penstock.trace.events import GpuKind
from penstock.trace.intervals import Intervals, union
from penstock.trace.load import load_ranks
from penstock.trace.timeline import TimeBreakdown, lag_note, steps_of, timeline_of, timelines
from tests.trace.synthetic import make
from tests.trace.synthetic_job import Job
from tests.trace.tiny import decoded, event, kernel, load_trace, ran, read, span, tiny

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
    # From the end of an earlier event to the end of the first region, and on to that of the second.
    assert [step.timeline.total_us for step in steps] == [170, 200]
    linked = timelines(trace)["linked"]
    total_us, *others = [sum(values) for values in zip(*(astuple(step.timeline) for step in steps), strict=True)]
    *parts, idle_us, events = others
    assert (total_us - idle_us, *parts, events) == pytest.approx(
        (linked.busy_us, *astuple(linked)[1:-2], linked.events)
    )


def test_a_step_is_what_it_launched_however_late_that_runs() -> None:
    steps = [span("step 7", 0, 100), span("step 8", 100, 100)]
    trace = decoded(*steps, *ran("late", 10, 150, 100), *ran("later", 110, 300, 50))
    assert [(step.name, *step.window_us) for step in steps_of(trace)] == [
        ("step 7", 1_000_150, 1_000_250),
        ("step 8", 1_000_250, 1_000_350),
    ]
    assert [step.timeline.idle_us for step in steps_of(trace)] == [0, 50]  # from 250 to 300 us


@pytest.mark.parametrize("is_recorded", [True, False], ids=["backlog recorded", "backlog not recorded"])
def test_steps_of_a_device_that_lags_take_as_long_as_they_compute(is_recorded: bool) -> None:
    """Steps of 100 us compute for 90 us, 250 us behind the host; rows are copied at once, on another stream."""
    events = [kernel("gemm", 0, 245, correlation=900)] if is_recorded else []  # launched before the recording
    for step in range(3):
        host, device = 100 * step, 250 + 100 * step
        events += [
            span(f"ProfilerStep#{step}", host, 100),
            event("cuda_runtime", "cudaMemcpyAsync", host + 2, 1, correlation=700 + step),
            event("gpu_memcpy", "Memcpy HtoD", host + 5, 4, stream=20, correlation=700 + step),
            *ran("gemm", host + 10, device, 60),
            *ran("gemm", host + 15, device + 65, 30),
        ]
    windows = [(1_000_250, 1_000_345), (1_000_345, 1_000_445), (1_000_445, 1_000_545)]
    steps = steps_of(decoded(*events))
    assert [step.window_us for step in steps] == windows
    assert [step.timeline.compute_us for step in steps] == [90, 90, 90]
    assert [step.timeline.idle_us for step in steps] == [5, 10, 10]
    assert lag_note(steps) is None  # 98.3 us on the device


def test_steps_that_are_longer_on_the_device_than_on_the_host_are_told_with_both_times() -> None:
    """Steps of 100 us on the host; the device computes for 130, and waits 10 at first."""
    steps = [
        one
        for step in range(2)
        for one in (span(f"ProfilerStep#{step}", 100 * step, 100), *ran("gemm", 100 * step + 1, 130 * step + 10, 130))
    ]
    (one,) = analyse_traces({0: decoded(*steps)}).ranks
    (note,) = [note for note in one.trace.notes if "on the host" in note]
    assert "0.14 ms on the device and 0.10 ms on the host" in note


def test_the_host_before_the_first_launch_and_after_the_last_kernel_is_part_of_a_step() -> None:
    """One step of 400 us, such as of inference: the host prepares images for 200, and the device computes for 100."""
    trace = decoded(span("ProfilerStep#6", 0, 400), *ran("gemm", 200, 210, 100))
    (step,) = steps_of(trace)
    assert (step.timeline.total_us, step.timeline.idle_us) == (400, 300)


def test_a_step_that_launched_nothing_is_idle_as_long_as_its_region() -> None:
    steps = [span(f"ProfilerStep#{number}", 100 * number, 100) for number in range(3)]
    trace = decoded(*steps, *ran("first", 10, 20, 10), *ran("last", 210, 220, 10))
    assert [step.timeline.idle_us for step in steps_of(trace)] == [90, 100, 90]
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
