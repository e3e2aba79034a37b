"""What goes wrong on one rank ends all of them, once, with one line and a checkpoint."""

import json
import math
import multiprocessing
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.base.errors import CheckpointError, NonFiniteError
from penstock.cli.main import main
from penstock.config.load import dump_toml
from penstock.config.run import Checkpoint, Evaluation, Training
from penstock.moe.layer import Terms
from penstock.train import diagnose
from penstock.train.diagnose import NO_ORIGIN
from penstock.train.loop import Progress, open_store, resume, train_run
from penstock.train.observer import StepReport
from penstock.train.run_folder import RunFolder, locked
from penstock.train.setup import Session
from penstock.train.state import restore_state, save_state
from penstock.train.step import StopRequest
from tests import warm
from tests.closeness import assert_close
from tests.distributed.one_loss import layout, pipeline, same_state, saved_by, start_session, trace
from tests.distributed.pool import Pool, WorkerError
from tests.parallel.launch.ranks import when
from tests.train.tiny_run import Recorder, act_in_step, signal_itself, signal_launcher, tiny_run

WarmRanks = Callable[[Callable[[], object]], None]

# A figure that is not finite


class _Spoiler(Recorder):
    """Does harm on one rank after the first step, and keeps the state that the second begins with."""

    def __init__(self, session: Session, where: str, rank: int) -> None:
        super().__init__()
        self._session, self._where, self._does_harm = session, where, dist.get_rank() == rank

    def stepped(self, report: StepReport) -> None:
        super().stepped(report)
        if self._does_harm:
            kind, name = self._where.split()
            _spoil(self._session, kind, name)
        self.left = saved_by(self._session)
        self.place = self._session.state.batches.state()


def _spoil(session: Session, kind: str, name: str) -> None:
    if kind == "parameter":
        parameter = dict(session.model.named_parameters())[name]
        with torch.no_grad():
            parameter.view(-1)[-1] = math.inf
        return
    module = next(one for stage in session.model.modules for path, one in stage.named_modules() if path == name)
    module.register_forward_hook(_spoiled_gradient if kind == "gradient" else _spoiled_output)


def _spoiled_output(module: nn.Module, inputs: object, output: Tensor | Terms) -> Tensor | Terms:
    return (*output[:-1], output[-1] * math.nan) if isinstance(output, tuple) else output * math.nan


def _spoiled_gradient(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * math.nan)
    return output


def _train(session: Session, folder: str, spoiler: _Spoiler) -> None:
    paths = RunFolder(Path(folder))
    store = open_store(session.run, paths, session.axes.world)
    train_run(session, paths, store, Progress(), [spoiler], StopRequest())


def _saving(folder: str) -> tuple[str, ...]:
    return "model.layers=4", "checkpoint.enabled=true", f'record.folder="{folder}"'


def _report_in(folder: Path) -> dict[str, Any]:
    """What was written of a figure that is not finite, which must name the checkpoint of the step before."""
    report: dict[str, Any] = json.loads((folder / "nonfinite.json").read_text())
    assert report["checkpoint"] == str(folder / "checkpoints" / "step-000001")
    return report


def _halted(overrides: tuple[str, ...], folder: str, where: str, rank: int) -> tuple[str, bool]:
    """The line that ends this rank, and whether what was saved is the state before the step."""
    session = start_session((*overrides, *_saving(folder)))
    spoiler = _Spoiler(session, where, rank)  # does harm after step 1, so step 2 is not finite
    with pytest.raises(NonFiniteError) as refusal:
        _train(session, folder, spoiler)

    again = start_session((*overrides, "model.layers=4", f'record.folder="{folder}"'))
    reader = open_store(again.run, RunFolder(Path(folder)), again.axes.world)
    restore_state(reader, 1, again.state)
    reader.close()
    is_same = again.state.batches.state() == spoiler.place
    again.state.batches.close()
    return str(refusal.value), is_same and same_state(saved_by(again), spoiler.left)


@pytest.mark.often("2-overrides0-*", "2-overrides3-*")
@pytest.mark.parametrize(
    ("count", "overrides", "where", "rank"),
    [
        (2, layout("expert=2"), "parameter blocks.3.ffn.experts.down_eDF", 1),
        (4, layout("expert=2", "shard=full"), "output blocks.2.attention", 2),
        (4, pipeline("zb-v", 2, "expert=2"), "output blocks.3.ffn", 3),
        (2, layout("shard=optimizer"), "gradient blocks.2.ffn.experts", 1),
    ],
)
def test_what_breaks_on_one_rank_ends_all_with_its_place_and_the_state_before(
    count: int, overrides: tuple[str, ...], where: str, rank: int, ranks: Pool, tmp_path: Path
) -> None:
    lines, same = zip(*ranks.run(count, _halted, overrides, str(tmp_path), where, rank), strict=True)
    assert len(set(lines)) == 1  # all ranks end with one line
    kind, name = where.split()
    layer = int(name.split(".")[1])
    report = _report_in(tmp_path)
    origin = report["origin"]
    assert (report["step"], origin["place"], origin["layer"]) == (2, kind, layer)
    assert origin["name"] == name if kind != "gradient" else origin["name"].startswith(f"blocks.{layer}.ffn")
    assert f"of step 2 is nan: it began in the {kind} of {origin['name']} (layer {layer}); fix: read " in lines[0]
    assert all(same), "not the state before the step"


def _halted_without_memory(folder: str, where: str, rank: int) -> str:
    """The line that ends this rank, if one rank has no memory left to look in a part of the search."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(diagnose, where, Mock(side_effect=torch.OutOfMemoryError))
        return _halted(layout("expert=2"), folder, "parameter blocks.3.ffn.experts.down_eDF", rank)[0]


def test_a_rank_without_memory_to_look_ends_the_search_of_all(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(2, _halted_without_memory, str(tmp_path), "own_rows", 1)
    assert first == second
    assert f"of step 2 is nan: {NO_ORIGIN}; fix: read " in first
    assert _report_in(tmp_path)["origin"] is None


def _halted_in_a_pass(folder: str, rank: int) -> None:
    """Train until a layer's gradient is spoiled; a rank has no memory left for a pass of the search."""
    session = start_session((*layout("expert=2"), "evaluation.rows=0", *_saving(folder)))
    if dist.get_rank() == rank:
        experts = session.model.whole.get_submodule("blocks.1.ffn.experts")
        experts.register_forward_hook(_no_memory_to_look)
    _train(session, folder, _Spoiler(session, "gradient blocks.2.ffn.experts", rank))


def _no_memory_to_look(module: nn.Module, *arguments: object) -> None:
    if not module.training:  # the search for the origin runs in evaluation mode
        raise torch.OutOfMemoryError


@pytest.mark.slow
def test_a_rank_without_memory_in_the_middle_of_a_pass_keeps_no_other_waiting(tmp_path: Path) -> None:
    with closing(Pool(grace=30)) as pool, pytest.raises(WorkerError) as caught:
        pool.run(2, _halted_in_a_pass, str(tmp_path), 1)
    _, *texts = str(caught.value).split("_halted_in_a_pass on rank ")
    assert len(texts) == 2
    for text in texts:
        assert f"NonFiniteError: the gradient norm of step 2 is nan: {NO_ORIGIN}; fix: read " in text
    assert "hangs" not in str(caught.value)
    report = _report_in(tmp_path)
    assert (report["figure"], report["step"], report["origin"]) == ("gradient norm", 2, None)


# A file system that shows ranks different things


def _resumed(folder: str, blind: int) -> tuple[str, bool]:
    """The error of a rank that resumes while one of them does not see the checkpoint, and whether metrics are there."""
    session = start_session((*layout("expert=2"), "evaluation.rows=0"))
    session.state.batches.close()
    paths = RunFolder(Path(folder))
    store = open_store(session.run, paths, session.axes.world)
    save_state(store, 2, session.state, {"tokens_seen": 1})
    store.wait()
    paths.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == blind:
            patch.setattr(store, "steps", list)  # this rank sees no checkpoint
        with pytest.raises(CheckpointError) as refusal:
            resume(session, paths, store)
    store.close()
    return str(refusal.value), paths.metrics.read_text().count("\n") == 2


@pytest.mark.parametrize("blind", [0, 1])
def test_a_rank_that_does_not_see_the_checkpoint_keeps_all_from_starting_anew(
    blind: int, ranks: Pool, tmp_path: Path
) -> None:
    (first, is_whole), other = ranks.run(2, _resumed, str(tmp_path), blind)
    assert other == (first, is_whole) and is_whole
    assert f"not every rank sees {tmp_path}/checkpoints/step-000002; got 1 of 2 that do not: rank {blind}" in first


# What comes from outside


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_ranks: WarmRanks) -> Path:
    """An empty folder, the present one, with a small run of two experts' ranks in tiny.toml."""
    monkeypatch.chdir(tmp_path)
    run = tiny_run(
        Path("runs"),
        training=Training(steps=4000, sequence_length=12, micro_batch=2, global_batch=4, precision="fp32"),
        checkpoint=Checkpoint(every=2, keep=2),
        evaluation=Evaluation(rows=0),
    )
    (tmp_path / "tiny.toml").write_text(dump_toml(run), encoding="utf-8")
    return tmp_path


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("[W")]


def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    tiny: Path, warm_ranks: WarmRanks, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tiny / "runs" / "tiny")
    warm_ranks(partial(act_in_step, 4, partial(signal_itself, signal.SIGTERM), rank=1))
    assert main(["train", "tiny.toml", "parallel.expert=2", "--processes", "2"]) == 128 + signal.SIGTERM
    captured = capfd.readouterr()
    found = re.search(r"stopped by SIGTERM after step (\d+) of 4000, saved in \S+/step-(\d+)", captured.out)
    assert found is not None, captured.out
    assert int(found[1]) == int(found[2]) == folder.metrics.read_text().count("\n")
    assert (folder.checkpoints / f"step-{found[2]}" / "manifest.json").exists()
    assert lines_of(captured.err) == []


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ends_the_run_within_the_limit_while_a_checkpoint_is_written(
    tiny: Path, warm_ranks: WarmRanks, capfd: pytest.CaptureFixture[str]
) -> None:
    warm_ranks(partial(act_in_step, 11, partial(signal_itself, signal.SIGSTOP), rank=1))
    options = ("checkpoint.every=1", "host.timeout_minutes=1", "parallel.expert=2", "--processes", "2")
    begin = time.monotonic()
    assert main(["train", "tiny.toml", *options]) == 1
    assert time.monotonic() - begin > 60
    captured = capfd.readouterr()
    (line,) = lines_of(captured.err)
    assert re.match(rf"error: rank \d on {socket.gethostname()}: ended, or does not answer; got ", line)
    assert "a rank was lost" in captured.out
    again = ("training.steps=30", "host.timeout_minutes=30", "--processes", "2")
    assert main(["train", "runs/tiny", "--resume", *again]) == 0


def test_ranks_save_and_end_when_their_launcher_is_killed(tiny: Path) -> None:
    folder = RunFolder(tiny / "runs" / "tiny")
    others = set(multiprocessing.active_children())

    def kill() -> None:
        (launcher,) = set(multiprocessing.active_children()) - others
        launcher.kill()

    when((folder.checkpoints / "step-000004").exists, kill)
    words = ["train", "tiny.toml", "parallel.expert=2", "checkpoint.keep=0", "--processes", "2"]
    assert warm.run(warm.penstock, words, folder=tiny, environment=os.environ).returncode == -signal.SIGKILL
    with locked(folder.path, wait_seconds=600):  # until the first rank has ended
        steps = folder.metrics.read_text().count("\n")
        assert (folder.checkpoints / f"step-{steps:06}" / "manifest.json").exists()


def test_a_lost_terminal_stops_the_ranks_with_a_checkpoint(
    tiny: Path, warm_ranks: WarmRanks, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tiny / "runs" / "tiny")
    warm_ranks(partial(act_in_step, 5, partial(signal_launcher, os.getpid(), signal.SIGHUP)))
    assert main(["train", "tiny.toml", "parallel.expert=2", "--processes", "2"]) == 128 + signal.SIGHUP
    found = re.search(r"stopped by SIGHUP after step (\d+) of 4000", capfd.readouterr().out)
    assert found is not None
    assert (folder.checkpoints / f"step-{int(found[1]):06}" / "manifest.json").exists()


@pytest.mark.often("data.files*", "training*")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.files=['gone.txt']", "gone.txt"),  # every rank finds it
        ("record.folder=tiny.toml/runs", "cannot make a run folder in tiny.toml/runs"),  # the first rank finds it
        ("training.micro_batch=4", "x data-parallel ranks (4 x 2)"),  # no rank is started
    ],
)
def test_what_ranks_cannot_start_with_is_said_once(
    override: str, message: str, tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ("data.source=text", "model.vocab_size=257") if "files" in override else ()
    assert main(["train", "tiny.toml", override, *more, "parallel.expert=2", "--processes", "2"]) == 2
    (line,) = lines_of(capfd.readouterr().err)
    assert line.startswith("error: ") and message in line
    assert sorted(path.name for path in tiny.iterdir()) == ["tiny.toml"]


# What is less than the ranks


@pytest.mark.often("5")
@pytest.mark.parametrize("rows", [1, 5])
def test_held_out_rows_need_not_be_as_many_as_ranks(rows: int, ranks: Pool) -> None:
    few = (f"evaluation.rows={rows}",)  # fewer than ranks, or no multiple of them
    alone, shared = (trace(ranks, count, few, steps=0).held_out for count in (1, 4))
    assert_close(shared, alone, tolerance=2e-5)
