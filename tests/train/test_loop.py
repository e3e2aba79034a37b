"""The loop: due events, reports, stops, and resumed runs that equal uninterrupted ones."""

import errno
import gc
import json
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from penstock.base.errors import CheckpointError, DataError, NonFiniteError, PenstockError, RunFolderError
from penstock.config.model import Balance
from penstock.config.run import Checkpoint, Evaluation, Run, Training
from penstock.models.rank_model import RankModel
from penstock.train import checkpoint, loop
from penstock.train import step as step_module
from penstock.train.loop import Progress, open_store, resume, train_run
from penstock.train.manifest import WrittenFiles
from penstock.train.metrics import MetricsFile
from penstock.train.observer import Observer, RunEnd, StepReport
from penstock.train.optimizer import MasterAdamW
from penstock.train.run_folder import RunFolder, create_run_folder
from penstock.train.setup import Session, prepare
from penstock.train.step import StopRequest
from tests.closeness import assert_equal
from tests.distributed.one_loss import layout, start_session
from tests.distributed.pool import Pool
from tests.train.tiny_run import ENVIRONMENT, TRAINING, Recorder, tiny_moe, tiny_run


def start(run: Run, observers: Sequence[Observer] = (), stop: StopRequest | None = None) -> tuple[RunEnd, RunFolder]:
    session = prepare(run, ENVIRONMENT)
    _, folder = create_run_folder(run, number_if_taken=False)
    return _train(session, folder, Progress(), observers, stop), folder


def go_on(run: Run, folder: RunFolder, observers: Sequence[Observer] = ()) -> RunEnd:
    session = prepare(run, ENVIRONMENT)
    begin = resume(session, folder, open_store(run, folder))
    return _train(session, folder, begin, observers, None)


def _train(
    session: Session, folder: RunFolder, begin: Progress, observers: Sequence[Observer], stop: StopRequest | None
) -> RunEnd:
    store = open_store(session.run, folder)
    everyone = [MetricsFile(folder.metrics, 1), *observers]
    return train_run(session, folder, store, begin, everyone, stop or StopRequest())


def lines_of(folder: RunFolder) -> list[dict[str, object]]:
    """Lines of metrics.jsonl without what depends on the clock or on the process."""
    timed = {"tokens_per_second_per_device", "step_seconds", "phase_seconds", "peak_memory_bytes"}
    timed |= {"goodput", "wall_seconds", "peak_host_memory_bytes"}
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


def weights_of(run: Run, folder: RunFolder, step: int) -> dict[str, Tensor]:
    session = prepare(run, ENVIRONMENT)
    parts = session.state.parts()
    open_store(run, folder).load(step, parts)
    return {name: part.tensor for name, part in parts.items()}


def training(**changes: int) -> Training:
    return TRAINING.model_copy(update=changes)


class Killed(BaseException):
    """Ends a run as a kill does: nothing catches it."""


class EndsAfter(Recorder):
    """After a step, asks for a stop as a signal would, or ends the run without any warning."""

    def __init__(self, step: int, stop: StopRequest | None = None) -> None:
        super().__init__()
        self.step, self.stop = step, stop

    def stepped(self, report: StepReport) -> None:
        super().stepped(report)
        if report.step == self.step:
            if self.stop is None:
                raise Killed
            self.stop.signal = signal.SIGTERM


def test_a_run_makes_all_its_steps_and_tells_its_observers(tmp_path: Path) -> None:
    recorder = Recorder()
    end, folder = start(tiny_run(tmp_path), [recorder])
    assert [report.step for report in recorder.reports] == [1, 2, 3, 4]
    assert [report.tokens_seen for report in recorder.reports] == [48, 96, 144, 192]
    assert recorder.is_closed
    assert all(report.model_flops_utilization is None for report in recorder.reports), "the peak is not known"
    assert recorder.starts[0].steps_done == 0
    assert recorder.starts[0].parameters > recorder.starts[0].active_parameters
    assert (end.step, end.steps, end.stopped_by, end.last) == (4, 4, None, recorder.reports[-1])
    assert end.checkpoint == folder.checkpoints / "step-000004"
    assert end.checkpoint.is_dir()


def test_evaluation_is_due_first_every_so_often_and_last(tmp_path: Path) -> None:
    for every, rows, steps in ((2, 3, [1, 2, 4, 5]), (0, 3, [5]), (3, 3, [1, 3, 5]), (2, 0, [])):
        recorder, folder = Recorder(), tmp_path / f"{every}-{rows}"
        run = tiny_run(folder, training=training(steps=5), evaluation=Evaluation(every=every, rows=rows))
        start(run, [recorder])
        assert [report.step for report in recorder.reports if report.evaluation] == steps


def test_checkpoints_are_due_every_so_often_and_last(tmp_path: Path) -> None:
    for every, steps in ((2, [2, 4, 5]), (0, [5])):
        recorder, checkpoint = Recorder(), Checkpoint(every=every, keep=0, asynchronous=every == 2)
        run = tiny_run(tmp_path / str(every), training=training(steps=5), checkpoint=checkpoint)
        _, folder = start(run, [recorder])
        assert recorder.saves == steps
        assert sorted(path.name for path in folder.checkpoints.iterdir()) == [f"step-{step:06}" for step in steps]


def test_figures_of_a_step(tmp_path: Path) -> None:
    recorder = Recorder()
    session = replace(prepare(tiny_run(tmp_path), ENVIRONMENT), peak_flops=1e9)
    _, folder = create_run_folder(session.run, number_if_taken=False)
    _train(session, folder, Progress(), [recorder], None)
    for report in recorder.reports:
        speed = 48 / report.step_seconds
        assert math.isclose(report.tokens_per_second_per_device, speed)
        assert report.model_flops_utilization is not None
        assert math.isclose(report.model_flops_utilization, session.size.flops_per_token * speed / 1e9)
        assert report.peak_memory_bytes > 1 << 20
        assert report.elapsed_seconds >= report.step_seconds > 0
    assert [report.learning_rate for report in recorder.reports][:2] == [5e-3, 1e-2]


def test_forced_balance_is_marked_in_every_report(tmp_path: Path) -> None:
    recorder = Recorder()
    _, folder = start(tiny_run(tmp_path, model=tiny_moe(balance=Balance(force_load_balance=True))), [recorder])
    assert all(report.forced_balance for report in recorder.reports)
    assert all(line["forced_balance"] is True for line in lines_of(folder))


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(tmp_path: Path) -> None:
    _, whole_folder = start(tiny_run(tmp_path / "whole"))
    run = tiny_run(tmp_path / "broken")
    with pytest.raises(Killed):
        start(run, [EndsAfter(1)])
    folder = RunFolder(tmp_path / "broken" / "tiny")
    go_on(run, folder)
    assert lines_of(folder) == lines_of(whole_folder)


def test_a_request_to_stop_during_the_last_step_finds_a_finished_run(tmp_path: Path) -> None:
    stop = StopRequest()
    end, _ = start(tiny_run(tmp_path), [EndsAfter(4, stop)], stop)
    assert (end.step, end.stopped_by) == (4, None)


def test_a_run_can_go_on_for_longer(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    _, folder = start(run)
    longer = run.model_copy(update={"training": training(steps=6)})
    assert go_on(longer, folder).step == 6
    assert [line["tokens_seen"] for line in lines_of(folder)] == [48 * step for step in range(1, 7)]
    assert "steps = 6" in folder.config.read_text()


def spoil_from(monkeypatch: pytest.MonkeyPatch, step: int, path: str, spoil: Callable[..., Tensor]) -> None:
    """From a step on, put a hook on the output of a module."""
    real, steps = loop.train_step, count(1)

    def spoiled(model: RankModel, *rest: object) -> object:
        if next(steps) == step:
            model.whole.get_submodule(path).register_forward_hook(spoil)
        return real(model, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "train_step", spoiled)


def times_nan(module: object, inputs: object, output: Tensor) -> Tensor:
    return output * math.nan


@pytest.mark.parametrize(("figure", "place"), [("loss", "output"), ("gradient norm", "gradient")])
def test_a_step_that_is_not_finite_ends_the_run_before_it(
    figure: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(module: object, inputs: object, y_RD: Tensor) -> Tensor:
        if place == "output":
            return y_RD * math.nan
        if y_RD.requires_grad:  # the search runs forward alone
            y_RD.register_hook(lambda gradient: gradient * math.nan)
        return y_RD

    spoil_from(monkeypatch, 3, "blocks.1.ffn.experts", spoil)
    run, recorder = tiny_run(tmp_path / "broken"), Recorder()
    with pytest.raises(NonFiniteError, match=f"the {figure} of step 3 is nan: it began in the {place} of"):
        start(run, [recorder])
    assert recorder.is_closed

    folder = RunFolder(tmp_path / "broken" / "tiny")
    report = json.loads(folder.nonfinite.read_text())
    assert (report["step"], report["figure"], report["value"]) == (3, figure, "nan")
    assert report["checkpoint"].endswith("step-000002")
    origin = report["origin"]
    assert (origin["place"], origin["layer"]) == (place, 1)
    assert origin["name"].startswith("blocks.1.ffn.experts")

    monkeypatch.undo()
    go_on(run, folder)
    _, whole_folder = start(tiny_run(tmp_path / "whole"))
    assert lines_of(folder) == lines_of(whole_folder)


@pytest.mark.parametrize("saves", [True, False])
def test_the_state_before_a_first_step_that_is_not_finite_is_saved_if_checkpoints_are_enabled(
    saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_from(monkeypatch, 1, "norm", times_nan)
    newest = ".*step-000000" if saves else "none"
    with pytest.raises(NonFiniteError, match=f"1 is nan: it began in the output of norm.*newest checkpoint: {newest}"):
        start(tiny_run(tmp_path, checkpoint=Checkpoint(enabled=saves)))
    folder = RunFolder(tmp_path / "tiny")
    assert [path.name for path in folder.checkpoints.iterdir()] == (["step-000000"] if saves else [])
    assert (json.loads(folder.nonfinite.read_text())["checkpoint"] is None) != saves


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_does_not_hide_a_step_that_is_not_finite(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = RunFolder(tmp_path / "tiny").nonfinite
    known: list[dict[str, object]] = []

    def no_space(*arguments: object) -> WrittenFiles:
        known.append(json.loads(path.read_text()))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_parts", no_space)
    spoil_from(monkeypatch, 1, "norm", times_nan)
    message = (
        r"^the loss of step 1 is nan: it began in the output of norm; nothing was saved: "
        r"cannot write \S+step-000000; got No space left on device; fix: read \S+; newest checkpoint: none$"
    )
    with pytest.raises(NonFiniteError, match=message):
        start(tiny_run(tmp_path, checkpoint=Checkpoint(asynchronous=asynchronous)))
    assert [(report["figure"], report["value"], report["origin"]) for report in known] == [("loss", "nan", None)]
    report = json.loads(path.read_text())
    assert report["origin"]["name"] == "norm"
    assert "No space left on device" in report["unsaved"]


def test_an_update_that_spoils_the_model_is_found_by_the_next_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.train_step

    def spoiled(model: RankModel, *rest: object) -> object:
        result = real(model, *rest)  # type: ignore[arg-type]
        if rest[3] == 1e-2 * 0.1:  # the learning rate of the last step
            with torch.no_grad():
                model.whole.get_parameter("blocks.0.ffn.down.weight").fill_(math.inf)
        return result

    monkeypatch.setattr(loop, "train_step", spoiled)
    message = "the held-out loss of step 4 is nan: it began in the parameter of blocks.0.ffn.down.weight .*step-000002"
    with pytest.raises(NonFiniteError, match=message):
        start(tiny_run(tmp_path))
    report = json.loads((tmp_path / "tiny" / "nonfinite.json").read_text())
    assert (report["step"], report["figure"]) == (4, "held-out loss")
    assert [path.name for path in (tmp_path / "tiny" / "checkpoints").iterdir()] == ["step-000002"]


class Broken(Recorder):
    """Cannot take the report of a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def stepped(self, report: StepReport) -> None:
        super().stepped(report)
        if report.step == self.step:
            raise RunFolderError("cannot write the report", fix="free space")

    def closed(self) -> None:
        super().closed()
        raise RunFolderError("cannot close the file either")


@pytest.mark.parametrize("place", ["report", "evaluation", "update"])
def test_an_error_ends_the_run_with_the_last_complete_step_saved(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observers: list[Observer] = [Broken(3)] if place == "report" else []
    kind, real = (RunFolderError if place == "report" else RuntimeError), loop.evaluate
    if place == "evaluation":
        calls = count(1)
        lost = RuntimeError("no memory")
        monkeypatch.setattr(loop, "evaluate", lambda *given: raises(lost) if next(calls) == 2 else real(*given))
    if place == "update":  # the parameters are those of no step
        calls = count(1)
        lost = RuntimeError("no memory")
        step = MasterAdamW.step
        monkeypatch.setattr(MasterAdamW, "step", lambda *given: raises(lost) if next(calls) == 4 else step(*given))
    run = tiny_run(tmp_path / "broken", training=training(steps=5), checkpoint=Checkpoint(every=0))
    with pytest.raises(kind, match="cannot write the report" if place == "report" else "no memory"):
        start(run, observers)
    folder, saved = RunFolder(tmp_path / "broken" / "tiny"), {"report": 3, "evaluation": 2, "update": None}[place]
    assert open_store(run, folder).latest() == saved
    monkeypatch.undo()
    go_on(run, folder)
    _, whole = start(tiny_run(tmp_path / "whole", training=training(steps=5)))
    assert_equal(weights_of(run, folder, 5), weights_of(run, whole, 5))


def raises(error: Exception) -> NoReturn:
    raise error


def test_a_failed_save_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = checkpoint.write_parts, count(1)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(checkpoint, "write_parts", lambda *given: raises(full) if next(calls) == 1 else real(*given))
    run = tiny_run(tmp_path, checkpoint=Checkpoint(every=2, asynchronous=True))
    with pytest.raises(CheckpointError, match="step-000002; got No space left"):
        start(run)
    assert open_store(run, RunFolder(tmp_path / "tiny")).latest() == 4, "another step was trained before it was known"


SAVES = ("model.layers=2", "model.mtp_layers=0", "checkpoint.enabled=true", "checkpoint.every=0")


def _ends_of(folder: Path, place: str) -> tuple[str, int | None]:
    """The error of this rank, and the newest checkpoint, if one rank cannot read a batch or write a report."""
    session = start_session(layout("expert=2", "evaluation.rows=0", "training.steps=4", *SAVES))
    rank, batches = session.axes.rank, session.state.batches
    if (place, rank) == ("data", 1):
        calls, next_batch = count(1), batches.next_batch
        lost = DataError("the disk of this rank is gone")
        batches.next_batch = lambda: raises(lost) if next(calls) == 3 else next_batch()  # type: ignore[method-assign]
    observers = [Broken(4 if place == "last report" else 2)] if rank == 0 and place != "data" else []
    store = open_store(session.run, RunFolder(folder), session.axes.world)
    try:
        train_run(session, RunFolder(folder), store, Progress(), observers, StopRequest())
    except PenstockError as error:
        return str(error), store.latest()
    return "", store.latest()


@pytest.mark.parametrize("place", ["data", "report", "last report"])
def test_an_error_of_one_rank_ends_all_ranks_with_the_same_steps_saved(place: str, tmp_path: Path, ranks: Pool) -> None:
    first, second = ranks.run(2, _ends_of, tmp_path, place)
    line = "the disk of this rank is gone" if place == "data" else "cannot write the report; fix: free space"
    assert first == second == (line, 4 if place == "last report" else 2)


def test_garbage_is_collected_between_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    was_enabled: list[bool] = []
    collected: list[int] = []

    class Watcher(Recorder):
        def stepped(self, report: StepReport) -> None:
            was_enabled.append(gc.isenabled())

    monkeypatch.setattr(loop.gc, "collect", lambda: collected.append(len(was_enabled)))
    start(tiny_run(tmp_path / "manual", training=training(collect_garbage_every=2)), [Watcher()])
    assert was_enabled == [False] * 4  # while the steps run
    assert collected == [0, 2, 4]
    assert gc.isenabled()
    start(tiny_run(tmp_path / "python", training=training(collect_garbage_every=0)), [Watcher()])
    assert was_enabled[4:] == [True] * 4
    assert collected == [0, 2, 4]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_asks_is_told_once_and_does_not_interrupt(number: signal.Signals, code: int) -> None:
    before, told = signal.getsignal(number), list[int]()
    with StopRequest(lambda: told.append(1)) as stop:
        assert (stop.signal, stop.exit_code) == (None, 0)
        for _ in range(2):  # a launcher passes Ctrl-C on: that is no second press
            signal.raise_signal(number)
        assert (stop.signal, stop.exit_code, told) == (number, code, [1])
    assert signal.getsignal(number) == before, "the handlers are put back"


@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 3)])
def test_a_ctrl_c_after_a_request_stops_at_once_and_repeated_termination_never_insists(
    number: signal.Signals, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "SAME_PRESS_SECONDS", -1.0)
    with StopRequest() as stop:
        for _ in range(times):
            signal.raise_signal(number)
        assert stop.signal == number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
