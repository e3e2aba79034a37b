"""Which sinks a run has, what is refused before it starts, and that a sink in trouble does not end it."""

import json
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.base.errors import DeviceError, RunFolderError
from penstock.base.origin import commit_of_code
from penstock.cli.main import main
from penstock.config.load import dump_toml
from penstock.config.run import Record, Run
from penstock.train.observer import Observer, RunStart, StepReport
from penstock.train.run_folder import RunFolder
from penstock.train.sinks import (
    CLOSE_SECONDS,
    WAITING,
    BackgroundSink,
    StartsFile,
    TensorBoard,
    check_sinks,
    open_sinks,
    start_record,
)
from tests.train.tiny_run import HELD_OUT, Recorder, run_start, step_report, tiny_run


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr("penstock.train.sinks.find_spec", lambda name: None if name == package else find_spec("json"))


def with_record(folder: Path, **changes: object) -> Run:
    return tiny_run(folder, record=Record(folder=str(folder), **({"tensorboard": False} | changes)))


@pytest.mark.parametrize(
    ("package", "key", "value", "extra", "off"),
    [("wandb", "wandb", "offline", "wandb", "off"), ("prometheus_client", "prometheus_port", 9400, "prometheus", "0")],
)
def test_a_package_that_is_missing_is_refused_before_the_run(
    package: str, key: str, value: object, extra: str, off: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, package)
    check_sinks(with_record(tmp_path))
    with pytest.raises(DeviceError) as refusal:
        check_sinks(with_record(tmp_path, **{key: value}))
    assert str(refusal.value) == (
        f"record.{key}={value} needs the package {package}, which is not installed; "
        f"fix: pip install 'penstock[{extra}]', or record.{key}={off}"
    )


@pytest.mark.parametrize("is_known", [True, False])
def test_online_needs_an_account(is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("wandb")
    module.login = lambda *, prompt, verify: is_known and not prompt and not verify  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("penstock.train.sinks.find_spec", lambda name: object())
    with nullcontext() if is_known else pytest.raises(DeviceError, match="needs an account"):
        check_sinks(with_record(tmp_path, wandb="online"))


def test_a_run_that_asks_for_nothing_has_its_own_record_only(tmp_path: Path) -> None:
    told = list[str]()
    for sink in open_sinks(with_record(tmp_path), RunFolder(tmp_path), 0, told.append):
        sink.started(run_start(with_record(tmp_path)))
        sink.stepped(step_report(1))
        sink.closed()
    assert (sorted(path.name for path in tmp_path.iterdir()), told) == (["metrics.jsonl", "starts.jsonl"], [])


def test_a_run_trains_to_its_end_though_its_port_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(dump_toml(with_record(Path("runs"))), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["train", "tiny.toml", f"record.prometheus_port={port}"]) == 0
    out = capsys.readouterr().out
    assert out.count(f"the endpoint at 127.0.0.1:{port} is off from here on, the run goes on without it (OSError") == 1
    assert "done: 4 steps" in out


class Sink(Recorder):
    """Remembers what it was told; raises at a step, or waits at one for a gate to open. `sink` forwards to it."""

    def __init__(self, fails_at: int = 0, waits_at: int = 0, close_seconds: float = CLOSE_SECONDS) -> None:
        super().__init__()
        self.fails_at, self.waits_at = fails_at, waits_at
        self.gate, self.waits = threading.Event(), threading.Event()
        self.told: list[str] = []
        self.sink = BackgroundSink("a service", lambda: self, self.told.append, close_seconds)

    def stepped(self, report: StepReport) -> None:
        super().stepped(report)
        if report.step == self.fails_at:
            raise ConnectionError("the service\nis down")
        if report.step == self.waits_at:
            self.waits.set()
            self.gate.wait()


@pytest.fixture
def start(tmp_path: Path) -> RunStart:
    return run_start(tiny_run(tmp_path))


def drive(sink: BackgroundSink, start: RunStart, steps: int) -> None:
    sink.started(start)
    for step in range(1, steps + 1):
        sink.stepped(step_report(step))
    sink.saved(steps)
    sink.closed()


def test_everything_reaches_a_sink_in_its_order(start: RunStart) -> None:
    inner = Sink()
    drive(inner.sink, start, 3)
    assert inner.starts == [start]
    assert [report.step for report in inner.reports] == [1, 2, 3]
    assert (inner.saves, inner.is_closed, inner.told) == ([3], True, [])


def test_a_sink_that_fails_is_told_once_and_closed(start: RunStart) -> None:
    inner = Sink(fails_at=2)
    drive(inner.sink, start, 9)
    inner.sink.closed()
    assert inner.told == ["a service is off from here on, the run goes on without it (ConnectionError: the service)"]
    assert [report.step for report in inner.reports] == [1, 2]
    assert inner.is_closed


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(98, "Address already in use"), "OSError: [Errno 98] Address already in use"),
        (SystemExit(1), "SystemExit: 1"),
    ],
)
def test_a_sink_that_cannot_be_opened_is_told_once(error: BaseException, told: str, start: RunStart) -> None:
    lines, threads = list[str](), list[threading.Thread]()

    def open_sink() -> Observer:
        threads.append(threading.current_thread())
        raise error

    sink = BackgroundSink("the endpoint", open_sink, lines.append)
    drive(sink, start, 3)
    assert lines == [f"the endpoint is off from here on, the run goes on without it ({told})"]
    assert threads[0] is not threading.current_thread() and not threads[0].is_alive()


def test_a_slow_sink_misses_steps_and_the_run_does_not_wait(start: RunStart) -> None:
    inner = Sink(waits_at=1)
    inner.sink.started(start)
    inner.sink.stepped(step_report(1))
    inner.waits.wait()  # the sink has begun with the first step
    for step in range(2, WAITING + 5):
        inner.sink.stepped(step_report(step))
    inner.gate.set()
    inner.sink.closed()
    assert [report.step for report in inner.reports] == list(range(1, WAITING + 2))
    assert inner.told == ["a service was too slow for 3 reports, which are missing there"]


def test_a_sink_that_hangs_is_left_behind(start: RunStart) -> None:
    inner = Sink(waits_at=1, close_seconds=0.05)
    drive(inner.sink, start, 2)
    assert inner.told == ["a service has not ended after 0.05 s and is left behind"]
    inner.gate.set()  # so that the thread ends with the test


def test_tensorboard_holds_the_same_figures(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, every=2, steps_done=0)
    board.started(run_start(tiny_run(tmp_path)))
    for step in (1, 2, 3, 4):
        board.stepped(step_report(step, evaluation=HELD_OUT if step == 3 else None))
    board.saved(4)
    board.closed()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (step, pytest.approx(5.0 / step)) for step in (2, 3, 4)
    ]
    assert [event.step for event in events.Scalars("train/evaluation_bits_per_byte")] == [3]
    assert events.Scalars("layer 01/max_over_mean")[0].value == pytest.approx(1.6)
    assert events.Scalars("train/mtp_loss_1")[0].value == pytest.approx(3.0)


def test_tensorboard_hides_points_after_the_checkpoint(tmp_path: Path) -> None:
    for steps_done, steps in ((0, (1, 2, 3)), (1, (2,))):
        board = TensorBoard(tmp_path, every=1, steps_done=steps_done)
        for step in steps:
            board.stepped(step_report(step, loss=float(steps_done)))
        board.closed()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.0), (2, 1.0)]


def test_every_start_adds_a_line_or_the_error_is_told(tmp_path: Path, start: RunStart) -> None:
    for steps_done in (0, 20):
        StartsFile(tmp_path / "starts.jsonl").started(replace(start, steps_done=steps_done))
    lines = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [line["steps_done"] for line in lines] == [0, 20]
    with pytest.raises(RunFolderError, match="cannot write"):
        StartsFile(tmp_path / "gone" / "starts.jsonl").started(start)


def test_a_start_says_what_was_typed_and_on_what(start: RunStart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/penstock", "train", "debug", "seed=1", 'data.files=["a b"]'])
    line = start_record(replace(start, ranks=4))
    assert line["command"] == "penstock train debug seed=1 'data.files=[\"a b\"]'"
    assert (line["device"], line["ranks"], line["torch"]) == ("a laptop", 4, torch.__version__)
    assert line["commit"] == commit_of_code()
    monkeypatch.setattr(sys, "argv", ["/x/penstock/__main__.py", "train"])
    assert start_record(start)["command"] == "penstock train"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # a traceback of a thread
def test_tensorboard_on_a_full_disk_is_told_and_prints_nothing_else(tmp_path: Path, start: RunStart) -> None:
    told: list[str] = []
    sink = BackgroundSink("TensorBoard", partial(TensorBoard, tmp_path, 1, 0), told.append)
    sink.started(start)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error, as of a full disk
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limit[1]))
        for step in range(1, 40):
            sink.stepped(step_report(step))
        sink.closed()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, previous)
    assert told == ["TensorBoard is off from here on, the run goes on without it (OSError: [Errno 27] File too large)"]
