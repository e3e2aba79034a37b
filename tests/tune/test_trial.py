"""A trial: what it is cut from, its figures, why it failed, its end, and the file of a measurement."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock.base.errors import ConfigError
from penstock.base.origin import UNKNOWN, commit_of_code
from penstock.config.load import load_run
from penstock.train.optimizer import learning_rate
from penstock.train.run_folder import RunFolder
from penstock.tune import trial as trials
from penstock.tune import trial_ranks
from penstock.tune.kernels import describe_machine, write_result
from penstock.tune.trial import Failure, Figures, Trial, failure_of, figures_of, first_steps, run_trial
from tests.parallel.launch.ranks import wait_for_end, when
from tests.promises.test_results import faults

STUBBORN = """#!/bin/sh
trap '' TERM
sleep 1000 &
echo $! > {folder}/child.new && mv {folder}/child.new {folder}/child
wait
"""


def line(step: int, **changes: Any) -> dict[str, Any]:
    speed = {"tokens_per_second_per_device": 100.0 * step, "step_seconds": 1.0 / step}
    speed |= {"model_flops_utilization": 0.1 * step, "power_watts": 690.0, "peak_memory_bytes": 1000 - step}
    return speed | {"expert_load_max_over_mean": 2.0, "rows_left_out": 0, "loss": 10.0 - step} | changes


def trial_in(folder: Path, *overrides: str, most_seconds: float = 0.0) -> Trial:
    small = {"name": "first", "target": "debug-2l", "processes": 1, "warm_up": 1}
    return Trial(**small, overrides=overrides, folder=folder / "ladder", most_seconds=most_seconds)  # type: ignore[arg-type]


def stand_in_for_python(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "python"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.parametrize(
    ("target", "steps"), [("deepseek-v2-lite", 50), ("deepseek-v2-lite", 2000), ("debug", 7), ("debug", 60)]
)
def test_first_steps_have_the_learning_rates_of_the_whole_run_until_it_decays(target: str, steps: int) -> None:
    whole = load_run(target, ["schedule.decay=constant", "optimizer.learning_rate=0.002"])
    cut = load_run(target, [*first_steps(whole, steps)])
    for step in range(steps):
        expected = learning_rate(step, whole.training.steps, whole.optimizer.learning_rate, whole.schedule)
        assert learning_rate(step, steps, cut.optimizer.learning_rate, cut.schedule) == pytest.approx(expected)


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_first_steps_do_not_decay_and_do_nothing_but_steps(decay: str) -> None:
    own = [f"schedule.decay={decay}", "schedule.decay_steps=0", "training.steps=200", "profile.start=100"]
    own += ["profile.ranks=[0]", "record.wandb=offline", "record.prometheus_port=9400"]
    cut = load_run("debug", [*own, *first_steps(load_run("debug", own), 25)])
    assert (cut.schedule.decay, cut.training.steps) == ("constant", 25)
    assert (cut.evaluation.rows, cut.checkpoint.enabled, cut.record.tensorboard) == (0, False, False)
    assert (cut.profile.start, cut.record.wandb, cut.record.prometheus_port) == (0, "off", 0)


@pytest.mark.parametrize(("own", "kept"), [([], "runs/cache"), (['data.cache="/with a [space"'], "/with a [space")])
def test_first_steps_find_decompressed_text_where_the_whole_run_keeps_it(own: list[str], kept: str) -> None:
    cut = load_run("debug", [*own, *first_steps(load_run("debug", own), 25), "record.folder=elsewhere"])
    assert cut.data.cache == kept


def test_figures_are_medians_of_the_steps_after_warm_up() -> None:
    lines = [line(1, rows_left_out=3), line(2), line(3, rows_left_out=5), line(4)]
    found = figures_of(lines, 1, 9.0)
    assert (found.tokens_per_second_per_device, found.step_seconds) == (300.0, (1 / 2, 1 / 3, 1 / 4))
    assert (found.step_seconds_median, found.step_seconds_highest) == (1 / 3, 1 / 2)
    assert 1 / 3 < found.step_seconds_p99 <= 1 / 2  # interpolated
    assert found.jitter == pytest.approx(found.step_seconds_p99 * 3)
    assert found.model_flops_utilization == pytest.approx(0.3)
    assert (found.repeated_steps, found.flops_per_second(10.0)) == (1, 3000.0)
    assert (found.peak_memory_bytes, found.losses, found.seconds) == (999, (9.0, 8.0, 7.0, 6.0), 9.0), "of all steps"
    dense = [line(step, expert_load_max_over_mean=None, model_flops_utilization=None) for step in (1, 2)]
    found = figures_of(dense, 1, 9.0)
    assert (found.expert_load_max_over_mean, found.model_flops_utilization) == (None, None)


LOST = "error: another rank has ended or does not answer; got Connection closed by peer"
MEMORY = "error: the GPU is out of memory; got CUDA out of memory; fix: a smaller training.micro_batch or model"
RAISED = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
ENDED = "rank 2 (process 4242) was ended by SIGKILL"


@pytest.mark.parametrize(
    ("log", "kind", "reason"),
    [
        ([LOST, "step 1", MEMORY, LOST], "refused", MEMORY.removeprefix("error: ")),
        (["Traceback (most recent call last):", RAISED, LOST, ENDED], "failed", RAISED),
        ([LOST, ENDED], "failed", ENDED),
        (["KeyboardInterrupt"], "failed", "KeyboardInterrupt"),
        (["nothing at all"], "failed", "exit code 7 without a message"),
    ],
)
def test_the_reason_is_the_line_of_the_rank_that_failed_first(log: list[str], kind: str, reason: str) -> None:
    assert failure_of("\n".join(log), 7, 1.5) == Failure(kind=kind, reason=reason, seconds=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "lacks_memory"),
    [
        (MEMORY, True),
        ("error: graphs.capture=full finds no memory for a pass; got CUDA out of memory", True),
        ("torch.AcceleratorError: CUDA error: out of memory", True),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("error: the loss is NaN at step 3", False),
        (RAISED, False),
    ],
)
def test_a_lack_of_memory_is_known_by_its_message(line: str, lacks_memory: bool) -> None:
    assert failure_of(line, 2, 1.5).lacks_memory == lacks_memory


def test_a_long_reason_is_cut() -> None:
    assert failure_of(f"error: {'x' * 1000}", 2, 0.0).reason == f"{'x' * trials.MOST_LETTERS} ..."
    assert failure_of(f"error: {'word ' * 1000}", 2, 0.0).reason.endswith("word word ...")


@pytest.fixture
def stubborn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces Python by a launcher that ignores signals and has a child; the file with the number of the child."""
    stand_in_for_python(tmp_path, STUBBORN.format(folder=tmp_path), monkeypatch)
    monkeypatch.setattr(trial_ranks, "GRACE_SECONDS", 0.1)  # it ignores SIGTERM, so SIGKILL comes after that
    return tmp_path / "child"


@pytest.mark.skipif(not Path("/proc").exists(), reason="asks Linux whether a process lives")
@pytest.mark.parametrize("steps", [0, 2])
def test_a_trial_that_is_not_done_in_time_is_ended_with_all_of_its_ranks(
    steps: int, tmp_path: Path, stubborn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 2.0 * stubborn.exists(), sleep=time.sleep)  # it waits for the child
    monkeypatch.setattr(trial_ranks, "time", clock)
    trial = trial_in(tmp_path, most_seconds=1.0)
    metrics = RunFolder(trial.folder / trial.name).metrics
    metrics.parent.mkdir(parents=True)
    metrics.write_text("{}\n" * steps)  # as if it had made steps
    found = run_trial(trial)
    reason = f"not done after 1 s, in which it made {steps} steps"
    assert found == Failure(kind="failed", reason=reason, seconds=found.seconds)
    wait_for_end(int(stubborn.read_text()))


@pytest.mark.skipif(not Path("/proc").exists(), reason="asks Linux whether a process lives")
def test_a_trial_ends_with_the_process_that_asked_for_it(tmp_path: Path, stubborn: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    when(stubborn.exists, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as raised:
        run_trial(trial_in(tmp_path))
    assert raised.value.code == 143  # 128 + SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    wait_for_end(int(stubborn.read_text()))


KILLED = """
from pathlib import Path
from penstock.tune.trial import Trial, run_trial
folder = Path({folder!r})
run_trial(Trial(name="first", target="debug-2l", overrides={overrides}, processes=2, warm_up=1, folder=folder))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="asks Linux whether a process lives")
def test_a_trial_ends_when_the_process_that_asked_for_it_is_killed(tmp_path: Path) -> None:
    overrides = ("training.steps=100000", "training.micro_batch=1", "checkpoint.enabled=false", "evaluation.rows=0")
    code = KILLED.format(overrides=overrides, folder=str(tmp_path))
    asking = subprocess.Popen([sys.executable, "-c", code])
    metrics = RunFolder(tmp_path / "first").metrics
    while not metrics.exists() or not metrics.read_text():
        assert asking.poll() is None
        time.sleep(0.05)
    (trial,) = (int(one) for one in Path(f"/proc/{asking.pid}/task/{asking.pid}/children").read_text().split())
    asking.kill()
    asking.wait()
    wait_for_end(trial)


@pytest.mark.parametrize("had_begun", [True, False])
def test_a_run_that_has_its_folder_had_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had_begun: bool) -> None:
    folder = tmp_path / "ladder" / "first"
    make = f"mkdir {folder} && touch {folder}/config.toml\n" if had_begun else ""
    stand_in_for_python(tmp_path, f"#!/bin/sh\n{make}echo 'error: the loss is NaN' >&2\nexit 2\n", monkeypatch)
    found = run_trial(trial_in(tmp_path))
    expected = Failure(kind="refused", reason="the loss is NaN", seconds=found.seconds, had_begun=had_begun)
    assert found == expected


@pytest.mark.slow
def test_what_the_product_refuses_is_the_reason(tmp_path: Path) -> None:
    found = run_trial(trial_in(tmp_path, "training.micro_batch=3", "training.global_batch=4"))
    assert isinstance(found, Failure) and found.reason.startswith("training.global_batch must be a multiple")
    assert (found.kind, found.had_begun) == ("refused", False)


@pytest.mark.slow
def test_a_trial_trains_and_its_figures_are_those_of_its_metrics(tmp_path: Path) -> None:
    overrides = first_steps(load_run("debug-2l"), 3)
    found = run_trial(trial_in(tmp_path, "device=cpu", *overrides))
    assert isinstance(found, Figures)
    assert (len(found.losses), len(found.step_seconds)) == (3, 2)
    assert found.losses[0] > found.losses[2] > 0


def test_a_measurement_says_how_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "speed.json"
    machine = describe_machine(on_gpu=False)
    write_result(path, command="penstock ladder", commit="0123abc", environment=machine, numbers={"ratio": 1.5})
    assert faults(json.loads(path.read_text())) == []
    assert [found.name for found in path.parent.iterdir()] == ["speed.json"]


def test_files_without_a_history_have_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock, "__path__", [str(tmp_path / "penstock")])
    assert commit_of_code() == UNKNOWN


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_result(tmp_path / "taken" / "a.json", command="", commit="0123abc", environment={}, numbers={})
