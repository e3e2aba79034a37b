"""Published runs beside their projections: a seeded draw, reasons for what is far off, one command a row."""

import json
from pathlib import Path

import pytest

from benchmarks.planning_published import WITHIN, PublishedRun, drawn, published_runs, row_of, sources

RESULT = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "plan-published.json").read_text())
ROWS = {row["id"]: row for row in RESULT["numbers"]["rows"]}
RUNS = {run.id: run for run in published_runs()}


def test_half_of_the_first_runs_was_drawn_by_its_seed_and_the_later_ones_were_fitted() -> None:
    first, later = list(RUNS)[:76], list(RUNS)[76:]
    assert {name for name in first if RUNS[name].is_fitted} == drawn(first)
    assert all(RUNS[name].is_fitted for name in later)
    assert {run.source for run in RUNS.values()} <= sources().keys()


def test_the_result_has_every_run_as_it_stands_in_the_table() -> None:
    told = {name: (row["command"], row["published"], row["is_fitted"], row["reason"]) for name, row in ROWS.items()}
    assert told == {name: (run.command, run.speed, run.is_fitted, run.reason) for name, run in RUNS.items()}


@pytest.mark.parametrize("half", ["drawn half", "other half", "all"])
def test_half_of_the_errors_are_below_an_eighth_and_what_is_far_off_has_a_reason(half: str) -> None:
    error = RESULT["numbers"]["errors"][half]
    assert error["median"] <= 0.08 and error["unexplained"] == 0
    far = {name for name, row in ROWS.items() if abs(row["ratio"] - 1) > WITHIN}
    assert far == {name for name, run in RUNS.items() if run.reason}
    assert all(row["fits"] or row["memory_reason"] for row in ROWS.values())


@pytest.mark.parametrize("name", ["oss20-mi355x-turbo", "oss120-gb200-26.06", "qwen30-h100-16-deepep"])
def test_a_command_says_what_is_written_down(name: str) -> None:
    found, known = row_of(RUNS[name]), ROWS[name]
    assert found["projected"] == pytest.approx(known["projected"], rel=0.01)
    assert found["memory"] == pytest.approx(known["memory"], rel=0.01)


def test_a_row_is_a_run_with_a_command_for_its_chips() -> None:
    for run in RUNS.values():
        assert isinstance(run, PublishedRun)
        assert run.command.startswith("penstock plan ") and "--software " in run.command and "--layout " in run.command
