"""Trials of `penstock tune` in processes: how they are watched, and what their failures are."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.tune import trial
from penstock.tune.belief import ShortStep, TrialCandidate
from penstock.tune.search_loop import TrialLimits, TrialResult, judged
from penstock.tune.trial import Failure, RealTrials, Trial, kind_of
from tests.tune.test_search_loop import NO_LIMIT


@pytest.mark.parametrize(
    ("reason", "begun", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True, "out of memory"),
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
            peak_memory_bytes=1, power_watts=None, expert_load_max_over_mean=None, rows_left_out=0,
            loss=2.0)) + chr(10))
"""


def trials(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> RealTrials:
    """Trials of a program that writes metrics as told by its overrides."""
    program = folder / "program.py"
    program.write_text(TRAINER, encoding="utf-8")
    starter = folder / "python"
    starter.write_text(f'#!/bin/sh\nshift 2\nexec python3 {program} "$@"\n', encoding="utf-8")
    starter.chmod(0o755)
    monkeypatch.setattr("penstock.tune.trial_ranks.sys.executable", f"{starter}")
    base = Trial(name="", target="x", overrides=overrides, processes=1, warm_up=2, folder=folder / "trials")
    return RealTrials(base, first_limit=600.0, least_limit=600.0)


def limits(expected: float = 0.1, most: float = math.inf, left: float = math.inf) -> TrialLimits:
    return TrialLimits(expected_seconds=expected, most_seconds=most, left_seconds=left)


NOTHING = TrialCandidate(overrides=(), terms={"products": 1.0})


def test_a_trial_that_cannot_win_is_ended_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = trials(tmp_path, monkeypatch, "a.real=0.01", "a.told=0.1", "a.steps=1000000")
    found = there.run(NOTHING, limits(most=0.05))
    assert found.was_stopped
    assert found.kind == "ran"
    assert found.step == pytest.approx(0.1)


def test_the_folder_of_a_trial_that_was_killed_stays_beside_that_of_its_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = trials(tmp_path, monkeypatch, "a.real=0", "a.told=0.1", "a.steps=5")
    (there.base.folder / "trial-1").mkdir(parents=True)
    found = there.run(NOTHING, limits())
    assert (found.kind, Path(found.folder).name) == ("ran", "trial-1-2")


def test_a_hang_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = trials(tmp_path, monkeypatch, "a.real=60", "a.told=1", "a.steps=3")
    there.least_limit = there.first_limit = 0.5
    found = there.run(NOTHING, limits(expected=0.01))
    assert found.kind == "hang"
    assert found.reason.startswith("no further step for ")
    assert found.reason.endswith(" s, after 0 steps")


@dataclass
class Watched:
    """A watch with a clock of its own, and the metrics that it reads."""

    watch: trial._Watch
    metrics: Path
    clock: list[float]

    def after(self, seconds: float, steps: int = 0, *, told: float = 1.0) -> str | None:
        """What the watch says when the time has passed and so many further steps are done."""
        self.clock[0] += seconds
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(steps * (json.dumps({"step_seconds": told}) + "\n"))
        return self.watch(self.metrics)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[TrialLimits], Watched]:
    """Watches of trials with four steps of warm-up, which may start for 300 s and make steps of 90 s in any case."""
    clock = [0.0]
    monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return lambda limits: Watched(trial._Watch(4, limits, 300.0, 90.0), tmp_path / "metrics.jsonl", clock)


def test_a_clock_that_lies_is_caught_by_the_real_one(watched: Callable[[TrialLimits], Watched]) -> None:
    one = watched(limits())
    for _ in range(8):
        assert one.after(0.25, 1, told=0.01) is None
    assert one.watch.observed_seconds == 0.25
    found = TrialResult(step_seconds=(0.01,) * 4, observed_seconds=one.watch.observed_seconds)
    assert judged(found, None, NO_LIMIT).kind == "lying clock"


def test_a_trial_is_no_hang_as_long_as_it_makes_steps(watched: Callable[[TrialLimits], Watched]) -> None:
    one = watched(limits(expected=58.0))
    assert one.after(450.0) is None, "300 s, and three steps"
    for _ in range(14):
        assert one.after(100.0, 1, told=100.0) is None
    assert one.after(380.0) is None, "90 s, and three of the longest steps"
    assert one.after(20.0) == "no further step for 400 s, after 14 steps"
    assert one.watch.kind == "hang"


def test_a_trial_that_is_far_behind_is_ended_in_its_warm_up(watched: Callable[[TrialLimits], Watched]) -> None:
    one = watched(limits(most=1.0))
    assert one.after(9.0, 1, told=9.0) is None, "the first step compiles"
    assert one.after(2.5, 2, told=2.5) is None
    assert one.after(2.5, 1, told=2.5) == ""
    assert (one.watch.kind, one.watch.has_stopped) == ("ran", True)


def test_the_end_of_the_budget_ends_a_trial(watched: Callable[[TrialLimits], Watched]) -> None:
    slow = watched(limits(expected=58.0, left=120.0))
    assert slow.after(149.0, 1) is None
    assert slow.after(2.0) == "1 step in 151 s, when the budget ended"
    assert slow.watch.kind == "too slow"
    steps = watched(limits(left=120.0))
    assert steps.after(151.0, 2) == "", "the figures of its steps so far"
    stuck = watched(limits(expected=0.1, left=120.0))
    assert stuck.after(10.0, 1) is None
    assert stuck.after(85.0) is None
    assert stuck.after(60.0) is not None
    assert stuck.watch.kind == "hang"


def test_a_trial_of_whole_steps_makes_few_of_them(watched: Callable[[TrialLimits], Watched]) -> None:
    one = watched(replace(limits(), most_steps=3))
    assert one.after(60.0, 2) is None
    assert one.after(60.0, 1) == ""


def test_a_trial_ends_when_its_time_is_known(watched: Callable[[TrialLimits], Watched]) -> None:
    even = watched(replace(limits(), sure_error=0.002))
    assert even.after(9.0, 4 + 4) is None, "four timed steps"
    assert even.after(1.0, 1) == ""
    assert (even.watch.kind, even.watch.has_stopped) == ("ran", False)


def test_a_trial_whose_steps_scatter_makes_all_of_them(watched: Callable[[TrialLimits], Watched]) -> None:
    uneven = watched(replace(limits(), sure_error=0.002))
    assert uneven.after(9.0, 8) is None
    assert uneven.after(1.0, 2, told=1.1) is None


def test_a_short_step_overrides_the_rows_of_a_candidate() -> None:
    base = Trial(name="", target="x", overrides=("a=1",), processes=1, warm_up=2, folder=Path("x"))
    short = ShortStep(rows=8, terms={"products": 0.1})
    candidate = replace(NOTHING, overrides=("training.global_batch=64",), short=short)
    assert RealTrials(base).overrides_of(candidate) == ("a=1", "training.global_batch=64", "training.global_batch=8")
    assert RealTrials(base).overrides_of(replace(candidate, short=None))[-1] == "training.global_batch=64"


def test_results_go_through_a_journal() -> None:
    found = json.loads(json.dumps({**vars(trial.TrialResult(step_seconds=(1.0, 2.0), losses=(3.0,)))}))
    assert trial.result_from(found).step_seconds == (1.0, 2.0)
