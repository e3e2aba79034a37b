"""How searches of `penstock tune` are compared with the exhaustive sweep of their space."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tune_sweep
from benchmarks.tune_gpu import join, over_best
from penstock.tune.belief import TrialCandidate
from penstock.tune.tune_candidates import CandidateSource


def row(change: str, seconds: float, *, is_plain: bool = False) -> dict[str, Any]:
    found = {"change": change, "whole_seconds": seconds, "projected": 1.0, "is_plain": is_plain}
    return {**found, "losses": [5.0], "overrides": [change]}


def trial(change: list[str], seconds: float, expected: float) -> dict[str, Any]:
    return {"change": change, "kind": "ran", "is_whole": False, "whole_seconds": seconds, "expected_seconds": expected}


SUMMARY = {"configurations": 4, "failed": 1, "ended_early": 1, "best": "b=1", "tuned_over_best": 1.01}
SWEEP: dict[str, Any] = {
    "summary": {**SUMMARY, "as_it_is_over_best": 2.0, "plain_over_tuned": 2.5},
    "rows": [row("", 2.0), row("a=1", 1.1), row("b=1", 1.0), {"change": "c=1", "failed": "out of memory"}],
    "again": [row("b=1", 1.02), row("a=1 b=1", 1.0), row("b=1", 1.04), row("plain=1", 2.5, is_plain=True)],
}


def test_a_configuration_that_was_measured_in_turn_counts_by_that() -> None:
    assert over_best(SWEEP) == {"": 2.0, "a=1": 1.1, "b=1": pytest.approx(1.03), "a=1 b=1": 1.0}


def test_searches_and_sweeps_are_joined_with_a_summary_and_without_paths(tmp_path: Path) -> None:
    trials = [trial([], 2.0, 3.0), trial(["a=1"], 1.1, 1.0), trial(["b=1", "a=1"], 1.0, 1.02)]
    tune = {"trials": trials, "gain": 2.0, "leader": ["b=1", "a=1"], "spent_seconds": {"plan": 5.0, "trials": 60.0}}
    tune |= {"median_error": 0.2, "median_error_corrected": 0.06}
    parts = {
        "case.json": {"case": {"tune": tune}},
        "plain-case.json": {"case": {"plain": {"trials": [trial([], 3.0, 3.0)]}}},
        "sweep-case.json": {"case": SWEEP},
    }
    for name, numbers in parts.items():
        command = "python -m benchmarks.one --case case --folder /somewhere/x --rows 8 --confirm --output /somewhere/y"
        text = json.dumps({"command": command, "commit": "abc", "environment": {}, "numbers": numbers})
        (tmp_path / name).write_text(text, encoding="utf-8")
    join([tmp_path / name for name in parts], tmp_path / "tune-chip.json")
    found, sweeps = (json.loads((tmp_path / f"tune-{name}.json").read_text()) for name in ("chip", "sweep-chip"))
    assert found["command"] == "python -m benchmarks.one --rows 8"
    told = found["numbers"]["summary"]
    assert told["cases"]["case"]["trials_to_2_percent"] == 3
    assert told["cases"]["case"]["plain_over_tuned"] == 3.0
    assert told["median_error_corrected"] == pytest.approx((0.1 + 0.02 / 1.02) / 2)
    assert (told["swept"], told["median_error_swept"]) == (3, pytest.approx(1 - 1 / 1.1)), "of 2.0, 1.1 and 1.0 s"
    assert "losses" not in sweeps["numbers"]["case"]["rows"][0]


def test_workers_share_a_sweep_and_a_configuration_that_ended_a_process_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = [TrialCandidate(overrides=(f"a={n}",), terms={"products": 1.0}) for n in range(3)]
    asked = []

    def measured(source: CandidateSource, one: TrialCandidate, *_: object) -> dict[str, Any]:
        asked.append(one.key)
        return {**row(one.key, 1.0), "is_behind": False}

    monkeypatch.setattr(tune_sweep, "measured", measured)
    options = argparse.Namespace(folder=tmp_path, worker=0, until=float("inf"))
    (tmp_path / "rows-0.jsonl").write_text('{"begun": "a=0"}\n')
    source = tune_sweep.source_of("debug", "H200")
    with tune_sweep.claimed(tmp_path, "a=1") as is_ours:
        assert is_ours
        tune_sweep.sweep(source, candidates, options)
    assert asked == ["a=2"], "another worker measures a=1"
    tune_sweep.sweep(source, candidates, options)
    assert asked == ["a=2", "a=1"], "and ended without a result"
    assert tune_sweep.rows_in(tmp_path)["a=0"]["failed"] == "the process ended with it"


def test_the_space_of_a_sweep_is_kept_and_has_the_run_as_it_is_and_that_of_the_search(tmp_path: Path) -> None:
    source = tune_sweep.source_of("debug", "H200")
    found = tune_sweep.candidates_of(source, tmp_path)
    assert tune_sweep.candidates_of(source, tmp_path) == found
    assert sorted(one.projected for one in found) == [one.projected for one in found]
    tuned = replace(found[-1], overrides=("host.numa=false",))
    chosen = tune_sweep.chosen_of(found, 3, tuned)
    assert {one.key for one in chosen} >= {"", tuned.key}
    assert len(chosen) <= 5
