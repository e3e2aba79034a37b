"""What the doctor takes from the folder of a run: the usual step, and those beside the recorded ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.load import RUN_FILE, dump_toml, load_run
from penstock.tune.doctor.evidence import RunFacts
from penstock.tune.doctor.run_facts import facts_of


def facts(folder: Path, milliseconds: list[float], *overrides: str, **more: Any) -> RunFacts:
    """Of a run with steps of these times; the phases of a line are those of the step before."""
    run = load_run("debug", overrides)
    (folder / RUN_FILE).write_text(dump_toml(run))
    lines = [
        {
            "step": step,
            "step_seconds": time / 1e3,
            "tokens_per_second_per_device": run.tokens_per_step / (time / 1e3),
            "phase_seconds": {"forward": before / 2e3} if before else None,
        }
        for step, (before, time) in enumerate(zip([0.0, *milliseconds], milliseconds, strict=False), start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line | more)}\n" for line in lines))
    return facts_of(folder)[0]


def test_the_usual_step_is_none_that_was_recorded_nor_the_one_that_waits_for_the_files(tmp_path: Path) -> None:
    found = facts(tmp_path, [5000, 300, 310, 400, 410, 700], "profile.start=4", "profile.steps=2")
    assert found.step_seconds == pytest.approx(0.310)
    assert found.phase_seconds["forward"] == pytest.approx((0.300 + 0.310) / 2 / 2), "of the steps before the lines"


def test_the_usual_step_of_a_run_that_recorded_nothing_is_of_its_second_half(tmp_path: Path) -> None:
    found = facts(tmp_path, [5000, 900, 800, 300, 310, 320])
    assert found.step_seconds == pytest.approx(0.310)
    assert found.beside_seconds is None


def test_a_run_of_which_all_steps_were_recorded_has_a_usual_step_all_the_same(tmp_path: Path) -> None:
    found = facts(tmp_path, [5000, 400], "profile.start=1", "profile.steps=2")
    assert found.step_seconds == pytest.approx(0.4)
    assert found.beside_seconds is None


def test_beside_recorded_steps_the_longest_of_the_nearest_counts(tmp_path: Path) -> None:
    times = [5000.0, 900.0, 310.0, 330.0, 320.0, 420.0, 800.0, 300.0, 305.0, 950.0, 960.0, 970.0, 980.0]
    found = facts(tmp_path, times, "profile.start=6", "profile.steps=1")
    assert found.beside_seconds == pytest.approx(0.330)
