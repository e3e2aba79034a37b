"""Tables of ladders, scaling and jitter: what ran, what did not and why; and a result that is not there yet."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.tune.trials import figures
from tools import documents, ladder_tables

ENVIRONMENT = {"device": "H200", "torch": "2.11", "ranks": 4, "steps": 30, "warm_up_steps": 10}
GAIN = {"before": 1.5, "first": 3.0, "by_optimization": 2.0, "by_size": 1.5, "loss_gap": 0.001}


def result(**numbers: Any) -> dict[str, Any]:
    common = {"target": "small", "overrides": ["seed=1"], "routing": "natural routing"}
    return {"commit": "0123abc", "environment": ENVIRONMENT, "numbers": common | numbers}


def step(name: str, **changes: Any) -> dict[str, Any]:
    measured = asdict(figures(16_894.0)) | {"jitter": 1.2, "flops_per_second_per_device": 2.5e14}
    fields = {"name": name, "what": f"the {name}", "kind": "optimization", "state": "ran", "reason": ""}
    return fields | {"changed": ["seed=2"], "figures": measured, "gain": GAIN} | changes


def row_of(text: str, start: str) -> list[str]:
    found = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    assert len(found) == 1, f"{len(found)} rows start with {start!r}"
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def assert_is_table(text: str) -> None:
    """Every row has as many cells as the head."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {rows[0].count("|")}


def test_a_ladder_tells_every_step_and_why_one_did_not_run() -> None:
    failed = step("graphs", state="failed", reason="a | b", figures=None, gain=None, changed=[])
    made = result(ladder_steps=[step("baseline"), failed, step("larger", kind="size")])
    text = ladder_tables.ladder(made)
    assert_is_table(text)
    assert "Measured on 4 x H200 (torch 2.11), commit `0123abc`; 30 training steps each, medians after 10." in text
    assert "`small seed=1`; natural routing" in text
    assert row_of(text, "graphs")[1] == "failed: a / b"
    assert row_of(text, "larger (size)")[1:] == [
        "16,894",
        "100.0 ms, 1.20",
        "25.0%, 250",
        "3.0 GiB",
        "6.0000 -> 4.0000, 1.0e-03",
        "1.50",
        "2.00",
        "1.50",
        "3.00",
    ]
    changes = ladder_tables.ladder_changes(made)
    assert_is_table(changes)
    assert row_of(changes, "baseline")[1:] == ["the baseline", "`seed=2`"]
    assert row_of(changes, "graphs")[2] == "nothing: failed"


def test_scaling_is_told_over_one_rank_and_over_two() -> None:
    measured = asdict(figures(9_000.0))
    cases = [
        {"expert_ranks": 4, "method": "symmetric", "reason": "", "figures": measured, "over_1": 0.9, "over_2": None},
        {
            "expert_ranks": 4,
            "method": "all-to-all",
            "reason": "no memory",
            "figures": None,
            "over_1": None,
            "over_2": None,
        },
    ]
    text = ladder_tables.scaling(result(rows_per_device=16, micro_batch=4, cases=cases))
    assert_is_table(text)
    assert row_of(text, "4 | symmetric")[2:] == ["9,000", "90.0%", "", "3.0 GiB"]
    assert row_of(text, "4 | all-to-all")[2] == "no memory"


def test_jitter_is_told_as_ratios_to_the_median() -> None:
    cases = [
        {"garbage": "between steps", "graphs": "none", "reason": "", "figures": asdict(figures(1.0))},
        {"garbage": "between steps", "graphs": "passes", "reason": "no GPU", "figures": None},
    ]
    text = ladder_tables.jitter(result(cases=cases))
    assert_is_table(text)
    assert row_of(text, "between steps | none")[2:] == ["100.0 ms", "120.0 ms", "125.0 ms", "1.200", "1.250"]
    assert row_of(text, "between steps | passes")[2] == "no GPU"


def test_a_table_that_may_be_missing_says_so_until_it_is_measured(tmp_path: Path) -> None:
    marked = "<!--table? later.json jitter-->\n{}\n<!--/table-->\n"
    waiting = marked.format("Not measured yet.")
    assert documents.with_measurements(marked.format("old"), tmp_path) == waiting
    folder = tmp_path / documents.RESULTS
    folder.mkdir(parents=True)
    (folder / "later.json").write_text('{"numbers": {}}')
    with pytest.raises(LookupError):
        documents.with_measurements(waiting, tmp_path)
