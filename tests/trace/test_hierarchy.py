"""Leaves of a trace's time: every level is said, and the sums are those of the phases."""

import pytest

from penstock.base.spans import Span
from penstock.trace.load import decode_trace
from penstock.trace.operators import hierarchy
from penstock.trace.phases import find_phases
from tests.trace.test_tree import decoded, operator, span, started
from tests.trace.tiny import text_of, tiny


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
