"""CPU traces: each moment of a thread counts once, for its innermost operator, and the table adds up to the step."""

from pathlib import Path
from typing import Any

import pytest

from penstock.trace.analysis import analyse_files, analyse_traces
from penstock.trace.events import GpuKind, Trace
from penstock.trace.host_table import HostTable, host_table
from penstock.trace.load import decode_trace, on_host
from tests.report.made_runs import host_trace
from tests.trace.tiny import event, text_of, trace_of


def read(content: Any) -> Trace:
    return decode_trace(text_of(content), path=Path("rank-0.json"), gpu_required=False)


def stretches(trace: Trace) -> list[tuple[str, float, float]]:
    gpu, begin = trace.gpu, trace.host.start_us[0]
    return [(gpu.name(row), gpu.start_us[row] - begin, gpu.end_us[row] - begin) for row in range(len(gpu))]


def test_an_operator_has_what_those_inside_leave() -> None:
    found = stretches(on_host(read(host_trace())))
    assert found == [
        ("aten::linear", 30, 50),
        ("aten::addmm", 50, 170),
        ("aten::linear", 170, 230),
        ("gloo:all_reduce", 760, 790),
        ("aten::_fused_adamw_", 810, 910),
    ]


def test_messages_of_gloo_are_communication() -> None:
    trace = on_host(read(host_trace()))
    kinds = {trace.gpu.name(row): trace.gpu.kind[row] for row in range(len(trace.gpu))}
    assert kinds["gloo:all_reduce"] == GpuKind.COMMUNICATION
    assert kinds["aten::addmm"] == GpuKind.COMPUTE


def test_phases_and_steps_are_found_as_on_a_device() -> None:
    (one,) = analyse_traces({0: on_host(read(host_trace()))}).ranks
    rows = {(row.name, row.layer, row.pass_): row.kernel_us for row in one.phases.rows()}
    assert rows["attention", 1, "forward"] == 200
    assert rows["optimizer", None, "update"] == 100
    (step,) = one.steps
    assert (step.number, step.timeline.compute_us) == (3, 300)


def test_an_operator_that_outlasts_the_one_around_it_is_cut() -> None:
    inside = [event("cpu_op", "aten::b", 50, 50.001), event("cpu_op", "aten::c", 100, 10)]
    trace = on_host(read(trace_of(event("cpu_op", "aten::a", 0, 100), *inside)))
    assert stretches(trace) == [("aten::a", 0, 50), ("aten::b", 50, 100), ("aten::c", 100, 110)]


def test_threads_work_at_the_same_time() -> None:
    other = event("cpu_op", "aten::b", 20, 30) | {"tid": 5}
    trace = on_host(read(trace_of(event("cpu_op", "aten::a", 0, 100), other)))
    assert stretches(trace) == [("aten::a", 0, 100), ("aten::b", 20, 50)]
    assert analyse_traces({0: trace}).ranks[0].timelines["all"].busy_us == 100


def test_a_trace_with_a_device_is_not_asked() -> None:
    kernel = event("kernel", "gemm", 0, 10, stream=7)
    with pytest.raises(AssertionError, match="a device of its own"):
        on_host(read(trace_of(kernel)))


# ------------------------------------------------------------------------------------------------------ test host table


def _step(number: int, begin: float, product_us: float) -> list[dict[str, object]]:
    """One step: a linear under the span of attention, which calls one product; then AdamW."""
    return [
        event("user_annotation", f"step {number}", begin, 100),
        event("user_annotation", "attention", begin, 60),
        event("cpu_op", "aten::linear", begin + 5, 10 + product_us),
        event("cpu_op", "aten::addmm", begin + 10, product_us),
        event("user_annotation", "optimizer", begin + 70, 20),
        event("cpu_op", "aten::_fused_adamw_", begin + 70, 20),
    ]


@pytest.fixture
def table(tmp_path: Path) -> HostTable:
    path = tmp_path / "rank-0.json"
    path.write_bytes(text_of(trace_of(*_step(3, 0, 20), *_step(4, 100, 40))))
    answer = analyse_files([path])
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
