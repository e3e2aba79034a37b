"""Operators above kernels: parents, spans, layers, backward, recomputation, and the leaves of a trace's time."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.spans import Span
from penstock.trace.events import NONE, Trace
from penstock.trace.launches import find_launches, idle_behind_waits
from penstock.trace.phases import find_phases
from penstock.trace.tables import hierarchy
from penstock.trace.tree import NODE, SPANS, build_tree, place
from tests.trace.tiny import TIME_US, decoded, event, kernel, operator, ran, read, span, started, tiny

AUTOGRAD = 99


def on_autograd(*events: dict[str, Any]) -> list[dict[str, Any]]:
    """Events of the host on autograd's thread; kernels as they are."""
    return [one if one["cat"] == "kernel" else one | {"tid": AUTOGRAD} for one in events]


def names_at(trace: Trace, rows: np.ndarray) -> list[str | None]:
    return [None if row == NONE else trace.host.name(row) for row in rows.tolist()]


def training() -> Trace:
    """Layer 3's route forward; its backward on autograd's thread, which recomputes the norm before."""
    forward = [
        span("ProfilerStep#4", 0, 500),
        span("forward of stage 1, micro-batch 2", 1, 100),
        span("layer 3", 2, 90),
        span(Span.ROUTE, 4, 40),
        operator("aten::linear", 5, 20, **{"Sequence number": 7, "Fwd thread id": 0}),
        operator("aten::mm", 6, 10, **{"Sequence number": 8, "Fwd thread id": 0}),
        *started(8, 1),
    ]
    backward = on_autograd(
        operator(NODE + "MmBackward0", 210, 60, **{"Sequence number": 8, "Fwd thread id": 1}),
        operator("MmBackward0", 211, 58, **{"Sequence number": 8, "Fwd thread id": 1}),
        operator("aten::rsqrt", 214, 6, **{"Sequence number": 30, "Fwd thread id": 0}),
        *started(215, 2),
        operator("aten::mm", 230, 10),
        *started(232, 3),
    )
    return decoded(*forward, span("backward of stage 1, micro-batch 2", 200, 200), *backward)


def test_a_kernel_belongs_to_the_innermost_operator_and_span_around_its_launch() -> None:
    trace = training()
    found = place(trace)
    assert names_at(trace, found.operator)[0] == "aten::mm"
    assert SPANS[found.span[0]] is Span.ROUTE
    assert found.layer[0] == 3
    assert not found.is_backward[0]


def test_step_and_action_cover_the_threads_of_autograd() -> None:
    trace = training()
    found = place(trace)
    assert names_at(trace, found.step) == ["ProfilerStep#4"] * 3
    forward, *backward = names_at(trace, found.action)
    assert forward == "forward of stage 1, micro-batch 2"
    assert backward == ["backward of stage 1, micro-batch 2"] * 2


def test_what_autograd_starts_between_nodes_is_backward() -> None:
    between = on_autograd(operator("aten::add_", 130, 10), *started(132, 2))
    trace = decoded(span("forward", 0, 90), *started(5, 1), span("backward", 100, 80), *between)
    assert place(trace).is_backward.tolist() == [False, True]


def test_a_backward_kernel_has_the_span_and_layer_of_the_operator_that_made_its_node() -> None:
    trace = training()
    found = place(trace)
    assert found.is_backward.tolist() == [False, False, True]  # forward, recomputed, backward
    assert SPANS[found.span[2]] is Span.ROUTE
    assert found.layer[2] == 3
    assert names_at(trace, found.maker)[2] == "aten::mm"


def test_a_forward_operator_inside_a_node_is_recomputed_unless_its_number_is_the_nodes() -> None:
    assert place(training()).is_recomputed.tolist() == [False, True, False]


def test_a_kernel_whose_launch_is_not_in_the_trace_has_no_place() -> None:
    trace = decoded(span("layer 1", 0, 90), *started(5, 1), kernel("stray", 2000, 5, correlation=77))
    found = place(trace)
    assert found.layer.tolist() == [1, NONE]
    assert found.operator.tolist() == [NONE, NONE]


def test_events_that_overlap_without_nesting_do_not_become_parents_of_what_comes_later() -> None:
    trace = decoded(operator("a", 0, 10), operator("b", 5, 10), operator("c", 20, 5), *started(21, 1))
    assert names_at(trace, place(trace).operator) == ["c"]


@st.composite
def nested(draw: st.DrawFn) -> list[tuple[int, int, int | None]]:
    """Intervals that nest properly, with the place of each one's parent."""
    found: list[tuple[int, int, int | None]] = []

    def fill(low: int, high: int, parent: int | None, depth: int) -> None:
        at = low
        while at + 2 <= high and depth < 5 and len(found) < 30 and draw(st.booleans()):
            start = draw(st.integers(at, high - 2))
            end = draw(st.integers(start + 1, high - 1))
            found.append((start, end, parent))
            fill(start + 1, end, len(found) - 1, depth + 1)
            at = end + 1

    fill(0, 200, None, 0)
    return found


@given(nested())
def test_parents_of_nested_events_are_those_that_contain_them(made: list[tuple[int, int, int | None]]) -> None:
    trace = decoded(
        *(operator(str(one), start, end - start) for one, (start, end, _) in enumerate(made)), *started(999, 1)
    )
    parents = names_at(trace, build_tree(trace).parent)
    parent_of = {trace.host.name(row): parents[row] for row in range(len(trace.host))}
    for one, (_, _, parent) in enumerate(made):
        assert parent_of[str(one)] == (None if parent is None else str(parent))


@pytest.mark.parametrize("name", ["ProfilerStep#4", "step 12"])
def test_a_step_is_known_by_the_profilers_name_or_by_ours(name: str) -> None:
    trace = decoded(span(name, 0, 50), *started(5, 1), *started(60, 2))
    assert names_at(trace, place(trace).step) == [name, None]


def test_a_span_goes_on_after_one_inside_it_has_ended() -> None:
    outer, inner = "forward of stage 1, micro-batch 2", "backward of stage 0, micro-batch 1"
    spans = [span(outer, 0, 100), span(inner, 20, 30), span("forward of stage 9, micro-batch 9", 60, 0)]
    trace = decoded(*spans, *started(10, 1), *started(30, 2), *started(80, 3), *started(150, 4))
    assert names_at(trace, place(trace, build_tree(trace)).action) == [outer, inner, outer, None]


# ------------------------------------------------------------------------------------------------------- test hierarchy


def test_a_leaf_says_step_action_layer_phase_operator_shapes_and_kernel() -> None:
    trace = decoded(
        span("ProfilerStep#2", 0, 90),
        span("forward of stage 1, micro-batch 0", 1, 80),
        span("layer 4", 2, 70),
        span(Span.ATTENTION, 3, 60),
        operator("aten::mm", 4, 20, **{"Input Dims": [[3, 5], [5, 7]], "Input type": ["float", "float"]}),
        *started(5, 1, "void nvjet<3>(int)", lasts=12),
    )
    (leaf,) = hierarchy(trace, find_phases(trace))
    assert leaf[:5] == ("ProfilerStep#2", "forward of stage 1, micro-batch 0", 4, "attention", "forward")
    assert leaf[5:] == ("aten::mm", ((3, 5), (5, 7)), "nvjet", 1, pytest.approx(12), pytest.approx(12))


def test_leaves_add_up_to_all_time_on_the_device() -> None:
    trace = read(tiny())
    phases = find_phases(trace)
    leaves = hierarchy(trace, phases)
    assert sum(leaf.kernel_us for leaf in leaves) == pytest.approx(trace.gpu.duration_us.sum())
    assert sum(leaf.exposed_us for leaf in leaves) == pytest.approx(phases.exposed_us.sum())
    assert {leaf.step for leaf in leaves} == {"", "ProfilerStep#3", "ProfilerStep#4"}


def test_kernels_below_ten_microseconds_are_counted_and_added() -> None:
    copy = event("gpu_memcpy", "Memcpy DtoD", 90, 3, stream=7, correlation=3)
    found = find_launches(decoded(kernel("a", 0, 9.5, correlation=1), kernel("b", 20, 10, correlation=2), copy))
    assert (found.short_count, found.short_us, found.kernel_count) == (1, pytest.approx(9.5), 2)


def test_a_gap_is_the_hosts_if_what_ends_it_was_launched_after_it_began() -> None:
    trace = decoded(
        *ran("first", 0, 10, 20),
        *ran("launched_in_time", 15, 50, 10),
        span("ProfilerStep#1", 100, 200),
        operator("aten::slow", 110, 60),
        *ran("launched_late", 160, 200, 10),
    )
    gaps = find_launches(trace).gaps
    assert (gaps.count, gaps.long_count, gaps.max_us) == (2, 1, pytest.approx(140))
    # 30 to 50 us: launched before; 60 to 200 us: launched at 160.
    assert (gaps.hosts_us, gaps.devices_us, gaps.unknown_us) == (pytest.approx(140), pytest.approx(20), 0)
    assert [(one.before, one.after, one.is_hosts, one.host) for one in gaps.longest] == [
        ("launched_in_time", "launched_late", True, "aten::slow"),
        ("first", "launched_in_time", False, ""),
    ]


def test_a_gap_before_an_event_without_a_launch_has_no_cause() -> None:
    gaps = find_launches(decoded(kernel("a", 0, 10, correlation=1), kernel("b", 60, 10, correlation=2))).gaps
    assert (gaps.unknown_us, gaps.hosts_us, gaps.longest[0].is_hosts) == (pytest.approx(50), 0, None)


def test_a_wait_of_the_host_says_where_it_comes_from() -> None:
    trace = decoded(
        kernel("a", 0, 10, correlation=1),
        span("clip", 20, 100),
        operator("aten::item", 30, 50),
        event("cuda_runtime", "cudaStreamSynchronize", 40, 30, correlation=5),
        event("cuda_runtime", "hipDeviceSynchronize", 200, 70, correlation=6),
    )
    waits = find_launches(trace).waits
    assert [(one.call, one.where, one.count, one.total_us) for one in waits] == [
        ("hipDeviceSynchronize", (), 1, pytest.approx(70)),
        ("cudaStreamSynchronize", ("clip", "aten::item"), 1, pytest.approx(30)),
    ]


def copied(called: float, lasts: float, name: str, start: float, us: float = 1) -> list[dict[str, Any]]:
    """A call that copies, and its copy on the device."""
    call = event("cuda_runtime", "cudaMemcpyAsync", called, lasts, correlation=int(called))
    return [call, event("gpu_memcpy", f"Memcpy {name}", start, us, stream=7, correlation=int(called))]


def read_of(start: float, lasts: float) -> list[dict[str, Any]]:
    """A number is read: the device copies it 3 us before the host goes on."""
    return copied(start, lasts, "DtoH (Device -> Pageable)", start + lasts - 4)


def test_a_copy_that_the_host_comes_back_behind_is_a_wait() -> None:
    trace = decoded(
        kernel("a", 0, 60, correlation=1),
        span("dispatch", 20, 100),
        *read_of(30, 40),
        *copied(380, 5, "DtoH (Device -> Pinned)", 400),
        *copied(410, 30, "HtoD (Pageable -> Device)", 420, 5),
    )
    (wait,) = find_launches(trace).waits
    assert (wait.call, wait.where, wait.total_us) == ("cudaMemcpyAsync", ("dispatch",), pytest.approx(40))


def test_only_waits_of_a_stretch_are_told_if_one_is_asked_for() -> None:
    trace = decoded(kernel("a", 0, 60, correlation=1), *read_of(30, 40), *read_of(130, 40))
    assert [one.count for one in find_launches(trace).waits] == [2]
    assert [one.count for one in find_launches(trace, (TIME_US + 100, TIME_US + 200)).waits] == [1]


def test_idle_time_behind_a_wait_is_what_the_host_could_have_launched_meanwhile() -> None:
    """The host waits 40 us, and is 90 us late with the next kernel: 40 of these would not be."""
    trace = decoded(*ran("a", 0, 5, 61), *read_of(30, 40), *ran("b", 150, 157, 9))
    assert idle_behind_waits(trace) == pytest.approx(40)


def test_a_long_wait_excuses_late_launches_until_they_have_used_it_up() -> None:
    late = [*ran("b", 118, 120, 10), *ran("c", 158, 160, 10), *ran("d", 198, 200, 10)]
    trace = decoded(*ran("a", 0, 5, 92), *read_of(10, 91), *late)
    assert idle_behind_waits(trace) == pytest.approx(22 + 30 + 30)  # before b, before c, before d
    assert idle_behind_waits(decoded(*ran("a", 0, 5, 92), *read_of(61, 40), *late)) == pytest.approx(40)  # the wait


def test_a_host_that_launches_slowly_and_never_waits_is_late_by_itself() -> None:
    assert idle_behind_waits(decoded(*ran("a", 0, 5, 10), *ran("b", 90, 95, 10))) == 0
    assert idle_behind_waits(decoded(kernel("a", 0, 10, correlation=1))) == 0


def test_work_that_had_been_launched_waits_for_no_host() -> None:
    assert idle_behind_waits(decoded(*ran("a", 0, 5, 20), *ran("b", 6, 40, 36), *read_of(20, 60))) == 0


def test_a_wait_that_stays_ends_what_others_excuse() -> None:
    """A wait in the dispatch is spared; the one for the step's figures is not, and all work is done by then."""
    spared = [*ran("a", 0, 5, 92), span("dispatch", 9, 100), *read_of(10, 91), *ran("b", 118, 120, 10)]
    trace = decoded(*spared, span("read", 131, 30), *read_of(132, 5), *ran("c", 190, 195, 10))
    assert idle_behind_waits(trace, frozenset({"dispatch"})) == pytest.approx(22 + 3)  # gaps up to the read
    assert idle_behind_waits(trace) > 22 + 3


def test_the_queue_is_what_was_launched_and_has_not_begun() -> None:
    queue = find_launches(decoded(*ran("a", 0, 30, 10), *ran("b", 10, 50, 5))).queue
    assert queue is not None
    assert (queue.max, queue.empty_share) == (2, 0)
    assert queue.mean == pytest.approx((1 * 10 + 2 * 20 + 1 * 20) / 50)  # depth x time between 0, 10, 30 and 50 us
    assert queue.median_delay_us == pytest.approx((28 + 38) / 2)  # launches take 2 us


def test_without_launches_there_is_no_queue() -> None:
    assert find_launches(decoded(kernel("a", 0, 10, correlation=1))).queue is None
