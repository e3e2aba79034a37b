"""Operators above kernels: parents, spans, layers, backward, recomputation, and the leaves of a trace's time."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.spans import Span
from penstock.trace.events import NONE, Trace
from penstock.trace.load import decode_trace
from penstock.trace.operators import hierarchy
from penstock.trace.phases import find_phases
from penstock.trace.tree import SPANS, build_tree, place
from tests.trace.tiny import event, kernel, text_of, tiny, trace_of

AUTOGRAD = 99
NODE = "autograd::engine::evaluate_function: "


def on(thread: int, one: dict[str, Any]) -> dict[str, Any]:
    return {**one, "tid": thread}


def operator(name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    return event("cpu_op", name, start, duration, **args)


def span(name: str, start: float, duration: float) -> dict[str, Any]:
    return event("user_annotation", name, start, duration)


def started(start: float, number: int, name: str = "some_kernel", lasts: float = 10.0) -> list[dict[str, Any]]:
    """A launch and, 1,000 us later, its kernel."""
    call = event("cuda_runtime", "cudaLaunchKernel", start, 1, correlation=number)
    return [call, kernel(name, start + 1000, lasts, correlation=number)]


def decoded(*events: dict[str, Any]) -> Trace:
    return decode_trace(text_of(trace_of(*events)))


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
    backward = [
        span("backward of stage 1, micro-batch 2", 200, 200),
        on(AUTOGRAD, operator(NODE + "MmBackward0", 210, 60, **{"Sequence number": 8, "Fwd thread id": 1})),
        on(AUTOGRAD, operator("MmBackward0", 211, 58, **{"Sequence number": 8, "Fwd thread id": 1})),
        on(AUTOGRAD, operator("aten::rsqrt", 214, 6, **{"Sequence number": 30, "Fwd thread id": 0})),
        *[on(AUTOGRAD, one) if one["cat"] == "cuda_runtime" else one for one in started(215, 2)],
        on(AUTOGRAD, operator("aten::mm", 230, 10)),
        *[on(AUTOGRAD, one) if one["cat"] == "cuda_runtime" else one for one in started(232, 3)],
    ]
    return decoded(*forward, *backward)


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
    between = [on(AUTOGRAD, one) for one in (operator("aten::add_", 130, 10), started(132, 2)[0])]
    trace = decoded(span("forward", 0, 90), *started(5, 1), span("backward", 100, 80), *between, started(132, 2)[1])
    assert place(trace).is_backward.tolist() == [False, True]


def test_a_backward_kernel_has_the_span_and_layer_of_the_operator_that_made_its_node() -> None:
    trace = training()
    found = place(trace)
    assert found.is_backward.tolist() == [False, False, True]
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
    tree = build_tree(trace)
    parent_of = {
        trace.host.name(row): None if tree.parent[row] == NONE else trace.host.name(int(tree.parent[row]))
        for row in range(len(trace.host))
    }
    for one, (_, _, parent) in enumerate(made):
        assert parent_of[str(one)] == (None if parent is None else str(parent))


@pytest.mark.parametrize("name", ["ProfilerStep#4", "step 12"])
def test_a_step_is_known_by_the_profilers_name_or_by_ours(name: str) -> None:
    trace = decoded(span(name, 0, 50), *started(5, 1), *started(60, 2))
    assert names_at(trace, place(trace).step) == [name, None]


def test_a_span_goes_on_after_one_inside_it_has_ended() -> None:
    trace = decoded(
        span("forward of stage 1, micro-batch 2", 0, 100),
        span("backward of stage 0, micro-batch 1", 20, 30),
        span("forward of stage 9, micro-batch 9", 60, 0),
        *started(10, 1),
        *started(30, 2),
        *started(80, 3),
        *started(150, 4),
    )
    found = names_at(trace, place(trace, build_tree(trace)).action)
    outer, inner = "forward of stage 1, micro-batch 2", "backward of stage 0, micro-batch 1"
    assert found == [outer, inner, outer, None]


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
    trace = decode_trace(text_of(tiny()))
    phases = find_phases(trace)
    leaves = hierarchy(trace, phases)
    assert sum(leaf.kernel_us for leaf in leaves) == pytest.approx(trace.gpu.duration_us.sum())
    assert sum(leaf.exposed_us for leaf in leaves) == pytest.approx(phases.exposed_us.sum())
    assert {leaf.step for leaf in leaves} == {"", "ProfilerStep#3", "ProfilerStep#4"}
