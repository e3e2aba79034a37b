"""`penstock tune` from the outside: with trials that are made up, and once, slowly, with real ones."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.cli import tune as verb
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.plan.hardware import cluster_of
from penstock.plan.hardware_file import load_hardware
from penstock.plan.project import project
from penstock.plan.projection import Plan
from penstock.plan.search_request import SearchRequest
from penstock.tune import trial, tune_candidates
from penstock.tune.belief import TrialCandidate
from penstock.tune.search_loop import TrialLimits, TrialResult
from penstock.tune.trial import Failure, Figures, RealTrials, Trial, figures_of
from tests.cli import answers

RUN = "tune debug-2l training.micro_batch=1 device=cpu --processes 1 --on H200"
LOSSES = (5.5, 5.4, 5.3, 5.2, 5.1, 5.0)


def no_layouts(request: SearchRequest, progress: object = None) -> Plan:
    """A search takes seconds; without layouts the candidates are single changes."""
    return Plan(model="debug", cluster=request.cluster, candidates=(), refused=(), considered=0)


def test_the_objective_energy_says_what_to_install_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "_on_gpu", lambda run: True)
    monkeypatch.setattr(verb, "find_spec", lambda name: None)
    refusal = answers.refused(RUN, "--objective", "energy")
    assert "--objective energy reads the power of a GPU; got no package nvidia-ml-py; fix: pip install" in refusal


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trials take less time with larger micro-batches, and recomputation fails; keys of those that were asked for."""
    keys: list[str] = []

    def run(trials: RealTrials, candidate: TrialCandidate, limits: TrialLimits) -> TrialResult:
        keys.append(candidate.key)
        if "recompute" in candidate.key:
            return TrialResult(kind="hang", reason="not done after 90 s, in which it made 0 steps", seconds=90.0)
        step = 0.1 / int(candidate.choices.get("training.micro_batch", "1"))
        return TrialResult(step_seconds=(step, step, step), losses=LOSSES, peak_memory_bytes=10**9, seconds=5.0)

    monkeypatch.setattr(RealTrials, "run", run)
    monkeypatch.setattr(tune_candidates, "search", no_layouts)
    monkeypatch.setattr(verb._Session, "diagnose", lambda session, leader, left: ())
    monkeypatch.setattr(verb, "faults", lambda ground: ())
    return keys


def test_the_tuned_run_trains_as_it_is_and_tells_what_each_line_gained(asked: list[str]) -> None:
    told = answers.printed(RUN)
    assert "best: training.micro_batch=4: 4.000 x the run as it is" in told
    text = Path("runs/tune-debug-2l/tuned.toml").read_text(encoding="utf-8")
    assert "micro_batch = 4  # was 1; 4.000 x, measured with and without it" in text
    tuned, own = load_run("runs/tune-debug-2l/tuned.toml"), load_run("debug-2l", ["training.micro_batch=1"])
    assert tuned.training.micro_batch == 4
    assert tuned.training.global_batch == own.training.global_batch
    assert Path("runs/tune-debug-2l/tune.html").stat().st_size > 10_000
    found = json.loads(Path("runs/tune-debug-2l/tune.json").read_text(encoding="utf-8"))
    assert found["leader"] == ["training.micro_batch=4"]
    assert found["gain"] == pytest.approx(4.0)


def test_a_search_goes_on_with_nothing_measured_twice(asked: list[str]) -> None:
    answers.printed(RUN, "--trials", "2")
    before = len(asked)
    answers.printed(RUN, "--resume")
    assert asked[:before] != []
    twice = {key for key in asked if asked.count(key) > 1}
    assert len(twice) <= 2, "only the reference and the leader have a second trial"
    assert max(map(asked.count, asked)) <= 2


def test_a_search_of_a_run_whose_name_begins_alike_is_not_gone_on_with(asked: list[str]) -> None:
    answers.printed(RUN.replace("debug-2l", "debug-2l name=debug-2l-2"), "--trials", "1")
    assert "there is no search to go on with" in answers.refused(RUN, "--resume")


def test_faults_of_the_machine_are_told_and_the_search_goes_on(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "faults", lambda ground: ("host clock is not synchronized",))
    assert answers.printed(RUN, "--trials", "1").startswith("preflight: host clock is not synchronized\n")
    found = json.loads(Path("runs/tune-debug-2l/tune.json").read_text(encoding="utf-8"))
    assert found["preflight"] == ["host clock is not synchronized"]


def test_a_trial_with_which_two_searches_were_killed_is_a_crash(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, deadly = RealTrials.run, "training.micro_batch=4"

    def die(trials: RealTrials, candidate: TrialCandidate, limits: TrialLimits) -> TrialResult:
        if candidate.key == deadly:
            raise RuntimeError  # as if the process were gone
        return run(trials, candidate, limits)

    monkeypatch.setattr(RealTrials, "run", die)
    for more in ((), ("--resume",)):
        with pytest.raises(RuntimeError):
            answers.outcome(*RUN.split(), *more)
    told = answers.printed(RUN, "--resume")
    assert f"{deadly}: crash: 2 searches were killed in this trial" in told
    assert "best: training.micro_batch=2: 2.000 x the run as it is" in told


def test_a_launch_that_starts_again_goes_on_with_its_search(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "job-7"}.items():
        monkeypatch.setenv(name, value)
    words = RUN.replace(" --processes 1", "")
    answers.printed(words, "--trials", "2")
    before = len(asked)
    answers.printed(words)
    assert max(map(asked.count, asked[:before])) <= 2
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-8")
    answers.printed(words, "--trials", "1")
    assert sorted(path.name for path in Path("runs").glob("tune-*")) == ["tune-debug-2l", "tune-debug-2l-2"]


def test_searches_of_a_run_that_begin_together_have_folders_of_their_own(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin_another(ground: object) -> tuple[str, ...]:
        monkeypatch.setattr(verb, "faults", lambda ground: ())
        answers.printed(RUN, "--trials", "1")
        return ()

    monkeypatch.setattr(verb, "faults", begin_another)
    assert "runs/tune-debug-2l\n" in answers.printed(RUN, "--trials", "1")
    assert Path("runs/tune-debug-2l-2/journal.json").exists()


def test_an_interrupted_search_leaves_its_best(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = RealTrials.run

    def stop(trials: RealTrials, candidate: TrialCandidate, limits: TrialLimits) -> TrialResult:
        if len(asked) == 2:
            raise KeyboardInterrupt
        return run(trials, candidate, limits)

    monkeypatch.setattr(RealTrials, "run", stop)
    code, out, _ = answers.outcome(*RUN.split())
    assert code == 130
    assert "interrupted" in out
    assert load_run("runs/tune-debug-2l/tuned.toml").name == "debug-2l"


@pytest.mark.parametrize(
    ("keep", "fields"),
    [
        ("training.micro_batch=1", ("training.micro_batch",)),
        ('recompute.modules=["norm","moe"], training.micro_batch = 1,', ("recompute.modules", "training.micro_batch")),
    ],
)
def test_kept_fields_stay(asked: list[str], keep: str, fields: tuple[str, ...]) -> None:
    found = answers.told_as_json(RUN, "--keep", keep)
    assert not [one for trial in found["trials"] for one in trial["change"] if one.startswith(fields)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--budget", "soon"), "--budget is no time"),
        (("--free", "floot8"), "did you mean float8?"),
        (("--objective", "joy"), "'joy' is not one of 'tokens', 'memory', 'energy', 'time-to-loss'"),
        (("--objective", "energy"), "--objective energy reads the power of a GPU; got a CPU"),
        (("--resume",), "there is no search to go on with"),
        (("--keep", "training.micro_batsh=1"), "micro_batch"),
    ],
)
def test_wrong_options_are_refused(words: tuple[str, ...], told: str) -> None:
    assert told in answers.refused(RUN, *words)


@pytest.fixture
def simulated_h200(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Trials take what the plan of their run on an H200 says, a start included; the runs that were tried."""
    there, tried = cluster_of(1, load_hardware("H200")), list[Run]()

    def trained(trial: Trial, watch: object = None) -> Figures | Failure:
        run = load_run(trial.target, trial.overrides)
        tried.append(run)
        step = 1.1 * project(run, there).time.step_seconds
        seconds = 15.0 + run.training.steps * step
        if 0 < trial.most_seconds < seconds:
            made = int((trial.most_seconds - 15.0) / step)
            reason = f"not done after {trial.most_seconds:.0f} s, in which it made {made} steps"
            return Failure(kind="failed", reason=reason, seconds=trial.most_seconds)
        each = {
            "tokens_per_second_per_device": 1.0,
            "step_seconds": step,
            "model_flops_utilization": None,
            "power_watts": None,
        }
        each |= {"peak_memory_bytes": 10**10, "expert_load_max_over_mean": 2.0, "rows_left_out": 0}
        lines = [{**each, "loss": 11.0 - step / run.training.global_batch} for step in range(run.training.steps)]
        return figures_of(lines, trial.warm_up, seconds)

    monkeypatch.setattr(trial, "run_trial", trained)
    monkeypatch.setattr(verb, "time", SimpleNamespace(monotonic=lambda: 0.0))  # planning takes no time of the budget
    monkeypatch.setattr(tune_candidates, "search", no_layouts)
    monkeypatch.setattr(verb._Session, "diagnose", lambda session, leader, left: ())
    monkeypatch.setattr(verb, "faults", lambda ground: ())
    return tried


LONG = "tune gpt-oss-20b-4l device=cpu --processes 1 --on H200 --free micro_batch"
"""1,024 micro-batches of a step take a minute. Its auxiliary loss is of micro-batches."""


def test_a_step_that_is_longer_than_the_budget_is_tuned_by_shorter_ones(simulated_h200: list[Run]) -> None:
    told = answers.printed(LONG, "--budget", "2m")
    assert "they make steps of 8 rows" in told.splitlines()[0]
    assert "trials made steps of 8 of 1,024 rows; a whole step is the measured short one x the projected" in told
    assert "no whole step was measured" in told
    assert {run.training.global_batch for run in simulated_h200} == {8}
    tuned = load_run("runs/tune-gpt-oss-20b-4l/tuned.toml")
    assert (tuned.training.micro_batch, tuned.training.global_batch) == (8, 1024)
    assert "steps of 8 of 1,024 rows" in Path("runs/tune-gpt-oss-20b-4l/tune.html").read_text(encoding="utf-8")
    found = json.loads(Path("runs/tune-gpt-oss-20b-4l/tune.json").read_text(encoding="utf-8"))
    first, there = found["trials"][0], cluster_of(1, load_hardware("H200"))
    whole = project(load_run("gpt-oss-20b-4l"), there).time.step_seconds
    assert first["short_rows"] == 8
    assert first["measured_seconds"] < 1
    assert first["whole_seconds"] == pytest.approx(1.1 * whole), "trials take a tenth longer than the plan says"


def test_a_search_goes_on_with_the_steps_that_it_began_with(simulated_h200: list[Run]) -> None:
    answers.printed(LONG, "--budget", "45s")
    before = len(simulated_h200)
    told = answers.printed(LONG, "--budget", "20m", "--resume")
    assert "whole steps: " in told, "the larger budget has room for one trial of whole steps"
    rows = [run.training.global_batch for run in simulated_h200]
    assert rows == [8] * (len(rows) - 1) + [1024]
    assert len(rows) == told.count(" a step") > before > 1, "nothing is measured twice"


def test_a_journal_that_does_not_say_its_steps_is_not_gone_on_with(asked: list[str]) -> None:
    answers.printed(RUN, "--trials", "1")
    path = Path("runs/tune-debug-2l/journal.json")
    saved = json.loads(path.read_text(encoding="utf-8"))
    del saved["rows"]
    path.write_text(json.dumps(saved), encoding="utf-8")
    assert "is no journal to go on with; got 'rows'; fix: leave out --resume" in answers.refused(RUN, "--resume")


def test_a_budget_that_no_step_fits_is_told_before_a_trial(simulated_h200: list[Run]) -> None:
    told = answers.refused(LONG, "--budget", "6s")
    assert "the shortest possible step, of 4 rows, is projected at " in told
    assert told.endswith("got 0:06; fix: --budget 2m")
    assert simulated_h200 == []
    assert not list(Path("runs").glob("tune-*"))


@pytest.mark.slow
def test_real_trials_tune_a_small_run() -> None:
    told = answers.printed("tune debug-2l device=cpu --processes 1 --budget 2m --steps 6 --trials 2")
    assert "2 trials were made" in told
    assert load_run("runs/tune-debug-2l/tuned.toml").name == "debug-2l"
