"""A CPU's trace as a table: own time by operator and phase, per step, that adds up to the step."""

from pathlib import Path

import pytest

from penstock.trace.analysis import analyse_files
from penstock.trace.host_table import HostTable, host_table
from tests.trace.tiny import event, text_of, trace_of


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
