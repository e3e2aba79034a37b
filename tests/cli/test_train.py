"""`penstock train` from the outside: what it leaves, prints and refuses, how it is stopped and started again."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.cli.main import main
from penstock.config.load import dump_toml, load_run
from penstock.parallel.launch.rendezvous import Rendezvous
from penstock.train import manifest, run_folder
from penstock.train.metrics import FIELDS, MetricsFile
from penstock.train.observer import StepReport
from penstock.train.step import StopRequest
from tests import warm
from tests.cli import answers
from tests.train.tiny_run import act_in_step, signal_itself, signal_launcher, tiny_run

WarmRanks = Callable[[Callable[[], object]], None]

TIMED = {
    *("tokens_per_second_per_device", "step_seconds", "phase_seconds", "goodput", "wall_seconds"),
    *("peak_memory_bytes", "peak_host_memory_bytes"),
}  # differ from run to run


@pytest.fixture(autouse=True)
def a_small_run(in_a_folder_of_its_own: None) -> None:
    """Every test starts with it in tiny.toml."""
    Path("tiny.toml").write_text(dump_toml(tiny_run(Path("runs"))), encoding="utf-8")


printed = partial(answers.printed, "train")
refused = partial(answers.refused, "train", starts=True)


def everything() -> dict[str, bytes]:
    """Content of every file below the present folder."""
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def metrics_of(folder: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMED} for line in lines]


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, *signals: signal.Signals) -> None:
    """Send signals to this process when a step's metrics have been written."""
    write = MetricsFile.stepped

    def stepped(metrics: MetricsFile, report: StepReport) -> None:
        write(metrics, report)
        if report.step == step:
            for number in signals:
                signal.raise_signal(number)

    monkeypatch.setattr(MetricsFile, "stepped", stepped)


def run_and_signal(step: int, number: signal.Signals, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`penstock train` in a process of its own; it sends itself a signal twice when a step's metrics are written."""
    return warm.run(_train_and_signal, step, number, arguments, folder=Path.cwd(), environment=os.environ)


def _train_and_signal(step: int, number: signal.Signals, arguments: Sequence[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.train.step.SAME_PRESS_SECONDS", -1.0)  # two signals at once are two presses
        at_step(patch, step, number, number)
        return main(["train", *arguments])


# A run from its start to its end


def test_a_run_leaves_configuration_metrics_checkpoints_and_events() -> None:
    text = printed("tiny.toml", "record.tensorboard=true")
    folder = Path("runs/tiny")
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "checkpoints", "config.toml", "goodput.jsonl", "metrics.jsonl", "saved", "starts.jsonl", "tensorboard",
    ]  # fmt: skip
    assert load_run(str(folder)) == load_run("tiny.toml", ["record.tensorboard=true"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert list(lines[-1]) == list(FIELDS)
    # Every second step.
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert list((folder / "tensorboard").iterdir())
    assert "penstock: tiny in runs/tiny" in text
    assert re.search(r"done: 4 steps in \d+:\d\d", text)
    assert "held out" in text


def test_overrides_win_and_the_next_run_of_the_same_name_gets_a_number() -> None:
    short = ("tiny.toml", "training.steps=2", "schedule.warmup_steps=1")
    printed(*short)
    assert "in runs/tiny-2" in printed(*short)
    assert load_run("runs/tiny-2").name == "tiny-2"
    assert [line["step"] for line in metrics_of("runs/tiny-2")] == [1, 2]


def test_two_runs_are_the_same_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which determinism needs on a GPU
    for options in ((), (), ("training.deterministic=true",)):
        printed("tiny.toml", *options)
    # The last by deterministic algorithms.
    assert metrics_of("runs/tiny") == metrics_of("runs/tiny-2") == metrics_of("runs/tiny-3")


def test_a_dry_run_says_what_would_be_and_writes_nothing() -> None:
    before = everything()
    text = printed("tiny.toml", "--dry-run")
    assert everything() == before
    assert "run tiny is new, in runs; nothing was written" in text
    assert "FLOP a token" in text
    assert "for weights, gradients and optimizer" in text
    assert "48 tokens a step, 192 in 4 steps" in text


def test_a_run_that_cannot_fit_is_refused_at_once_and_a_dry_run_says_so() -> None:
    before = everything()
    huge = ("tiny.toml", "training.sequence_length=1000000000")  # a row of 8 GB
    assert "does not fit into the memory of this machine" in refused(*huge)
    _, out, err = answers.outcome("train", *huge, "--dry-run")
    assert "warning: run tiny does not fit" in err
    assert "rows not cut" in out
    assert everything() == before


def test_a_tokenizer_that_leaves_most_of_the_vocabulary_is_warned_of() -> None:
    bytes_of_many = ("debug-2l", "model.vocab_size=5000")
    for words in (
        ["train", *bytes_of_many, "--dry-run"],
        ["config", "validate", *bytes_of_many],
        ["launch", "slurm", *bytes_of_many, "--nodes", "1", "--gpus-per-node", "1"],
        ["train", *bytes_of_many, "training.steps=1", "evaluation.rows=1"],
    ):
        code, _, err = answers.outcome(*words)
        assert code == 0
        assert err.count("warning: data.tokenizer bytes has 257 ids of model.vocab_size 5,000") == 1, words
    answers.printed("config validate debug")


# Stopping and going on


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_a_run_whose_checkpoints_were_taken_away_is_not_begun_again(how: str) -> None:
    printed("tiny.toml")
    before = metrics_of("runs/tiny")
    shutil.rmtree("runs/tiny/checkpoints")
    if how == "empty":
        Path("runs/tiny/checkpoints").mkdir()
    message = refused("runs/tiny", "--resume", "training.steps=8")
    assert f"checkpoints {'is gone' if how == 'gone' else 'holds no checkpoint'}: the run cannot go on" in message
    assert "got 4 steps in runs/tiny/metrics.jsonl" in message
    assert metrics_of("runs/tiny") == before
    assert message.endswith("begin a new run: penstock train runs/tiny/config.toml")
    assert "in runs/tiny-2" in printed("runs/tiny/config.toml")


def test_twenty_steps_are_ten_and_kill_9_and_ten() -> None:
    longer = ("training.steps=20", "checkpoint.every=10")
    printed("tiny.toml", *longer, "--name", "whole")
    killed = run_and_signal(13, signal.SIGKILL, "tiny.toml", *longer, "--name", "broken")  # three steps after one
    assert killed.returncode == -signal.SIGKILL
    assert [line["step"] for line in metrics_of("runs/broken")] == list(range(1, 14))
    # Steps 11 to 13 are computed again.
    assert [path.name for path in Path("runs/broken/checkpoints").iterdir()] == ["step-000010"]
    text = printed("runs/broken", "--resume")
    assert metrics_of("runs/broken") == metrics_of("runs/whole")
    assert "done: 20 steps" in text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_after_the_step_with_a_checkpoint(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 3, number)
    text = printed("tiny.toml", code=code)
    assert "stopping after this step; Ctrl-C once more" in text
    assert f"stopped by {number.name} after step 3 of 4, saved in runs/tiny/checkpoints/step-000003" in text
    assert "next:  penstock train runs/tiny --resume" in text


def test_under_nohup_a_lost_terminal_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        at_step(monkeypatch, 3, signal.SIGHUP)
        assert "done: 4 steps" in printed("tiny.toml")
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_stopped_run_goes_on_as_it_says() -> None:
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 3, signal.SIGTERM)
        text = printed("tiny.toml", code=143)
    command = text[text.index("penstock train ") :].split()[2:]  # without `penstock train`
    printed(*command)
    printed("tiny.toml", "--name", "whole")
    assert metrics_of("runs/tiny") == metrics_of("runs/whole")


def test_a_run_without_checkpoints_says_that_nothing_is_saved() -> None:
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 3, signal.SIGTERM)
        text = printed("tiny.toml", "checkpoint.enabled=false", code=143)
    assert "stopped by SIGTERM after step 3 of 4, nothing is saved" in text
    assert "go on" not in text
    assert not any(Path("runs/tiny/checkpoints").iterdir())
    text = printed("tiny.toml", "checkpoint.enabled=false")
    assert re.search(r"done: 4 steps in \d+:\d\d, nothing is saved", text)


def test_a_second_ctrl_c_stops_at_once() -> None:
    stopped = run_and_signal(3, signal.SIGINT, "tiny.toml")
    assert stopped.returncode == 130
    assert stopped.stderr == "stopped at once; newest checkpoint: step 2\n"  # checkpoints come every second step


def test_the_newest_run_of_a_name_goes_on_or_the_one_that_is_named() -> None:
    for _ in range(2):
        printed("tiny.toml")
    assert "in runs/tiny-2" in printed("tiny.toml", "--resume", "training.steps=5")
    assert [line["step"] for line in metrics_of("runs/tiny-2")] == [1, 2, 3, 4, 5]
    assert len(metrics_of("runs/tiny")) == 4
    assert "in runs/tiny\n" in printed("tiny.toml", "--resume", "--name", "tiny", "training.steps=5")


def tensors_of(folder: str, step: int) -> dict[str, torch.Tensor]:
    files = Path(folder, "checkpoints", f"step-{step:06d}").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_a_new_run_begins_with_the_weights_of_another_and_has_nothing_else_of_it() -> None:
    printed("tiny.toml")
    changed = ("seed=1", "optimizer.learning_rate=0", "training.steps=2", "schedule.warmup_steps=0")
    assert printed("--from", "runs/tiny", *changed, "--dry-run").endswith(
        f"train {' '.join(changed)} --from runs/tiny\n"
    )
    text = printed("--from", "runs/tiny", *changed)
    assert "in runs/tiny-2" in text and "begins with the weights of step 4 of runs/tiny; optimizer" in text
    old, new = (tensors_of("runs/tiny", 4), tensors_of("runs/tiny-2", 2))  # at a rate of 0 weights stay what they were
    weights = [name for name in old if name.startswith("model.") and "expert_bias" not in name]  # the bias has no rate
    assert weights and all(torch.equal(new[name], old[name]) for name in weights)
    assert [line["step"] for line in metrics_of("runs/tiny-2")] == [1, 2]
    assert [int(new[name]) for name in new if name.startswith("step")] == [2]  # updates that the moments have seen
    assert "in runs/tiny-3" in printed("tiny.toml", "--from", "runs/tiny-2")


def test_what_a_run_cannot_go_on_with_it_may_begin_with_and_the_line_that_says_so_can_be_typed() -> None:
    printed("tiny.toml")
    message = refused("runs/tiny", "--resume", "training.steps=6", "data.source=synthetic-random")
    _, _, command = message.partition("begin one with its weights: penstock train ")
    assert "in runs/tiny-2" in printed(*shlex.split(command))
    assert len(metrics_of("runs/tiny-2")) == 6


def test_a_longer_schedule_that_raises_the_rate_says_so_with_a_way_to_keep_it() -> None:
    printed("tiny.toml")
    longer = ("runs/tiny", "--resume", "training.steps=30")
    for decay, share in (("cosine", "0.97"), ("wsd", "1.00")):
        rises = (
            f"the learning rate rises from 0.001 to .* \\(0.10 to {share} of its peak\\), because the schedule now ends"
        )
        text = printed(*longer, f"schedule.decay={decay}", "--dry-run")
        assert re.search(rf"{rises} at step 30; .* penstock train --from runs/tiny begins a schedule anew\n", text)
    keeps = re.search(r"; (schedule\S* \S*) keeps it", text)
    assert keeps and "rises" not in printed(*longer, *keeps[1].split(), "--dry-run")
    assert "rises" not in printed("runs/tiny", "--resume", "training.steps=4", "--dry-run")
    assert "learning rate rises" in printed("runs/tiny", "--resume", "training.steps=6")


# Bad input


def test_a_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "device is cuda, but there is no GPU to use" in refused("tiny.toml", "device=cuda")
    assert not Path("runs").exists()


def test_a_name_that_is_taken_is_refused() -> None:
    printed("tiny.toml", "--name", "first")
    before = everything()
    message = refused("tiny.toml", "--name", "first")
    assert message == "runs/first exists already; fix: --resume to go on with it, or another --name"
    assert everything() == before


def test_a_run_folder_is_no_start() -> None:
    printed("tiny.toml")
    assert "runs/tiny is the folder of a run; fix: add --resume" in refused("runs/tiny")
    assert "both say which run" in refused("runs/tiny", "--resume", "--name", "tiny")
    assert "penstock train --from runs/tiny" in refused("runs/tiny")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "Missing argument 'TARGET'; allowed: a preset, a TOML file, a run folder, or --from RUN"),
        ("seed=1 --from runs/tiny", "training.initial_weights: runs/tiny has no weights"),
        ("--from runs/tiny --resume", "--resume goes on with a run, and --from begins a new one"),
        ("--from runs/gone", "runs/gone is not the folder of a run; fix: give one, such as runs/debug"),
        ("--from theirs", "theirs is not the folder of a run; fix: penstock import theirs --output NAME makes one"),
    ],
)
def test_a_run_that_has_nothing_to_begin_with_is_refused(words: str, line: str) -> None:
    Path("theirs").mkdir()
    Path("theirs/model.safetensors").touch()
    printed("tiny.toml", "checkpoint.enabled=false")
    assert line in refused(*words.split())


def test_weights_of_another_model_are_refused_before_anything_is_built() -> None:
    printed("tiny.toml")
    assert "is of another model; got model.layers = 3" in refused("tiny.toml", "model.layers=3", "--from", "runs/tiny")


def test_a_rank_goes_on_with_the_folder_of_the_first_and_stops_where_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        printed("tiny.toml", "checkpoint.enabled=false")
    answers = iter(["runs/tiny", True])  # the folder of rank 0; it is finished
    monkeypatch.setattr(Rendezvous, "agree", lambda *arguments: next(answers))
    assert "runs/tiny is finished" in printed("tiny.toml", "--resume")


def test_a_loss_that_is_not_finite_ends_the_run_with_a_report() -> None:
    diverging = ("optimizer.learning_rate=1e20", "schedule.warmup_steps=0", "evaluation.rows=0")
    message = refused("tiny.toml", *diverging)
    assert re.match("the (loss|gradient norm) of step 2 is nan: it began in the (output|gradient) of ", message)
    assert "fix: read runs/tiny/nonfinite.json; newest checkpoint: runs/tiny/checkpoints/step-000001" in message
    report = json.loads(Path("runs/tiny/nonfinite.json").read_text())
    assert report["step"] == 2
    assert Path(report["checkpoint"]).is_dir()
    assert [line["step"] for line in metrics_of("runs/tiny")] == [1]  # the second is not written


def test_a_full_disk_is_one_line_and_the_run_can_go_on() -> None:
    def no_space(path: Path, entries: object, **_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "write_entries", no_space)
        message = refused("tiny.toml")
    assert message == "cannot write runs/tiny/checkpoints/step-000002; got No space left on device"
    assert list(Path("runs/tiny/checkpoints").iterdir()) == []  # no draft of step 2
    printed("runs/tiny", "--resume")
    assert [line["step"] for line in metrics_of("runs/tiny")] == [1, 2, 3, 4]


def test_a_full_disk_at_the_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "write_whole", no_space)
    assert "cannot make a run folder in runs; got No space left on device" in refused("tiny.toml")
    assert list(Path("runs").iterdir()) == []


def be_the_only_rank(monkeypatch: pytest.MonkeyPatch, *, launch: str, restarts: int = 0) -> None:
    """What torchrun would say to this process."""
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": launch, "TORCHELASTIC_RESTART_COUNT": str(restarts),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


def test_a_log_begins_with_the_run_and_says_what_is_in_force_in_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    lines = printed("tiny.toml").splitlines()
    assert lines[0].startswith("penstock: tiny in ")
    (line,) = (line for line in lines if line.startswith("  env "))
    assert "OMP_WAIT_POLICY=PASSIVE" in line


@pytest.mark.often("options1")
@pytest.mark.parametrize("options", [(), ("--name", "first")])
def test_a_launch_that_starts_again_goes_on_with_its_run(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed("tiny.toml", "--name", "whole")
    be_the_only_rank(monkeypatch, launch="job-7")
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 2, signal.SIGTERM)
        printed("tiny.toml", *options, code=143)
    be_the_only_rank(monkeypatch, launch="job-7", restarts=1)
    printed("tiny.toml", *options)
    name = options[1] if options else "tiny"
    assert metrics_of(f"runs/{name}") == metrics_of("runs/whole")
    assert sorted(path.name for path in Path("runs").iterdir()) == sorted([name, "whole"])
    assert "is finished" in printed("tiny.toml", *options)


def test_another_launch_starts_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for launch in ("job-7", "job-8"):
        be_the_only_rank(monkeypatch, launch=launch)
        printed("tiny.toml")
    assert {path.name: (path / "launch").read_text() for path in Path("runs").iterdir()} == {
        "tiny": "job-7", "tiny-2": "job-8",
    }  # fmt: skip


def test_a_restart_that_does_not_know_its_run_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    be_the_only_rank(monkeypatch, launch="none", restarts=1)  # torchrun without --rdzv-id
    assert "a restart does not know with which run it goes on" in refused("tiny.toml")
    assert not Path("runs").exists()


def lose_a_rank_of_four_and_ask_for_all(launcher: int) -> None:
    act_in_step(8, partial(signal_itself, signal.SIGKILL), rank=1, restarts=0)
    act_in_step(4, partial(signal_launcher, launcher, signal.SIGUSR1), restarts=1)


def test_a_run_that_loses_a_rank_goes_on_with_fewer_and_then_with_all_on_the_same_curve(warm_ranks: WarmRanks) -> None:
    words = ("training.steps=15", "checkpoint.every=5", "training.micro_batch=1", "training.global_batch=4")
    words = ("tiny.toml", *words, "parallel.expert=4", "evaluation.rows=0", "training.precision=fp32")
    printed(*words, "--name", "whole", "--processes", "1", "parallel.expert=1")
    warm_ranks(partial(lose_a_rank_of_four_and_ask_for_all, os.getpid()))
    text = printed(*words, "elastic.min=2", "--name", "lossy", "--processes", "4")
    assert re.search(r"rank 1 \(process \d+\) was ended by SIGKILL; the run goes on with 2 of 4 ranks", text)
    assert "all 4 ranks start again, as SIGUSR1 asked" in text
    assert load_run("runs/lossy/config.toml", follows=False).parallel.expert == 4
    lossy, whole = metrics_of("runs/lossy"), metrics_of("runs/whole")
    assert [line["step"] for line in lossy] == [*range(1, 16)]
    assert [line["tokens_seen"] for line in lossy] == [line["tokens_seen"] for line in whole]
    # Only the order of sums differs; rounding grows from step to step.
    assert [line["loss"] for line in lossy] == pytest.approx([line["loss"] for line in whole], rel=1e-3)


def kill_itself_after(path: str, pattern: str, stop: StopRequest) -> None:
    """Kill this process as soon as a file is there."""
    while not any(Path(path).glob(pattern)):
        time.sleep(0.001)
    signal_itself(signal.SIGKILL, stop)


def test_a_rank_that_is_killed_is_started_again_and_loses_nothing(warm_ranks: WarmRanks) -> None:
    longer = ("training.steps=16", "checkpoint.every=5")
    printed("tiny.toml", *longer, "--name", "whole")
    act = partial(kill_itself_after, "runs/broken/checkpoints", "step-000005/manifest.json")
    warm_ranks(partial(act_in_step, 8, act, restarts=0))
    text = printed("tiny.toml", *longer, "--name", "broken", "--processes", "1", "--restarts", "1")
    assert re.search(r"rank 0 \(process \d+\) was ended by SIGKILL; restart 1 of 1", text)
    assert metrics_of("runs/broken") == metrics_of("runs/whole")
