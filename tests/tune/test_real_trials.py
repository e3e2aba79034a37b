"""Trials of `penstock tune` in processes: how they are watched, and what their failures are."""

import json
import time
from pathlib import Path

import pytest

from penstock.tune import real_trials
from penstock.tune.belief import TrialCandidate
from penstock.tune.real_trials import RealTrials, kind_of
from penstock.tune.search_loop import judged
from penstock.tune.trial import Failure, Trial
from tests.tune.test_search_loop import NO_LIMIT


@pytest.mark.parametrize(
    ("reason", "begun", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True, "out of memory"),
        ("not done after 90 s, in which it made 3 steps", True, "hang"),
        ("the loss of step 3 is nan: it began in layer 2", True, "not finite"),
        ("rank 1 (process 71) was ended by SIGSEGV", True, "crash"),
    ],
)
def test_failures_have_kinds(reason: str, begun: bool, kind: str) -> None:
    assert kind_of(Failure(kind="failed", reason=reason, had_begun=begun)) == kind
    assert kind_of(Failure(kind="refused", reason="parallel.expert is 3", had_begun=False)) == "refused"


TRAINER = """
import json, pathlib, sys, time
said = dict(one.split("=", 1) for one in sys.argv if "=" in one)
real, told, steps = (float(said[name]) for name in ("a.real", "a.told", "a.steps"))
folder, name = said["record.folder"], sys.argv[sys.argv.index("--name") + 1]
path = pathlib.Path(folder, name); path.mkdir(parents=True)
with open(path / "metrics.jsonl", "w", buffering=1) as file:
    for step in range(int(steps)):
        time.sleep(real)
        file.write(json.dumps(dict(step_seconds=told, tokens_per_second_per_device=1.0, model_flops_utilization=None,
            peak_memory_bytes=1, expert_load_max_over_mean=None, rows_left_out=0, loss=2.0)) + chr(10))
"""


def trials(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> RealTrials:
    """Trials of a program that writes metrics as told by its overrides."""
    program = folder / "program.py"
    program.write_text(TRAINER, encoding="utf-8")
    starter = folder / "python"
    starter.write_text(f'#!/bin/sh\nshift 2\nexec python3 {program} "$@"\n', encoding="utf-8")
    starter.chmod(0o755)
    monkeypatch.setattr("penstock.tune.trial.sys.executable", f"{starter}")
    base = Trial(name="", target="x", overrides=overrides, processes=1, warm_up=2, folder=folder / "trials")
    return RealTrials(base, first_limit=20.0)


NOTHING = TrialCandidate(overrides=(), terms={"products": 1.0})


def test_a_trial_that_cannot_win_is_ended_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = trials(tmp_path, monkeypatch, "a.real=0.1", "a.told=0.1", "a.steps=100")
    begin = time.monotonic()
    found = there.run(NOTHING, 0.05)
    assert found.was_stopped
    assert found.kind == "ran"
    assert found.step == pytest.approx(0.1)
    assert time.monotonic() - begin < 8


def test_a_clock_that_lies_is_caught_by_the_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trials(tmp_path, monkeypatch, "a.real=0.15", "a.told=0.01", "a.steps=9").run(NOTHING, 1.0)
    assert judged(found, None, NO_LIMIT).kind == "lying clock"


def test_a_hang_is_ended_by_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = trials(tmp_path, monkeypatch, "a.real=60", "a.told=1", "a.steps=3")
    there.first_limit = 1.0
    found = there.run(NOTHING, 1.0)
    assert found.kind == "hang"
    assert "made 0 steps" in found.reason


def test_results_go_through_a_journal() -> None:
    found = json.loads(json.dumps({**vars(real_trials.TrialResult(step_seconds=(1.0, 2.0), losses=(3.0,)))}))
    assert real_trials.result_from(found).step_seconds == (1.0, 2.0)
