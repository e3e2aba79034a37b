"""The receivers of a run's figures besides the terminal; only the first rank has them.

    metrics.jsonl                always; an error ends the run
    starts.jsonl                 always; one line for each process that trained: command, device, ranks, steps done
                                 before, kernels, parameters, versions (null if not installed)
    TensorBoard                  record.tensorboard
    Weights & Biases             record.wandb                penstock[wandb]
    Prometheus endpoint          record.prometheus_port      penstock[prometheus]

Each of the last three runs in its own thread (`BackgroundSink`), because libraries and services of others may fail,
hang or be slow. An exception ends that thread and the user is told once; the run continues. The training thread only
puts reports into a queue, and reports are dropped when it is full. Only problems that the user can fix before the start
are errors: a missing package or account.
"""

import json
import os
import platform
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from penstock import __version__
from penstock.base.errors import DeviceError, RunFolderError, system_errors
from penstock.base.files import open_to_append
from penstock.base.origin import command_text, commit_of_code, version_of
from penstock.config.run import Run
from penstock.train.metrics import MetricsFile, is_recorded, scalars
from penstock.train.observer import Observer, RunStart, StepReport
from penstock.train.prometheus import PrometheusEndpoint
from penstock.train.run_folder import RunFolder
from penstock.train.weights_and_biases import WeightsAndBiases


def check_sinks(run: Run) -> None:
    """Check the sinks of a run before it is built: a DeviceError if a package is missing, or W&B has no account."""
    record = run.record
    if record.wandb != "off":
        _check_package("wandb", f"record.wandb={record.wandb}", "wandb", "record.wandb=off")
    if record.prometheus_port:
        field = f"record.prometheus_port={record.prometheus_port}"
        _check_package("prometheus_client", field, "prometheus", "record.prometheus_port=0")
    if record.wandb == "online" and not import_module("wandb").login(prompt=False, verify=False):
        raise DeviceError(
            "record.wandb=online needs an account, and W&B knows none here",
            fix="wandb login, or WANDB_API_KEY in the environment, or record.wandb=offline",
        )


def _check_package(package: str, field: str, extra: str, without: str) -> None:
    if find_spec(package) is None:
        raise DeviceError(
            f"{field} needs the package {package}, which is not installed",
            fix=f"pip install 'penstock[{extra}]', or {without}",
        )


def open_sinks(run: Run, folder: RunFolder, steps_done: int, tell: Callable[[str], None]) -> list[Observer]:
    """Open every sink of a run that resumes after `steps_done`; the run closes them. `tell` prints a line."""
    record = run.record
    files: list[Observer] = [MetricsFile(folder.metrics, record.every), StartsFile(folder.starts)]  # first: may raise
    opened: dict[str, Callable[[], Observer]] = {}
    if record.tensorboard:
        opened["TensorBoard"] = partial(TensorBoard, folder.tensorboard, record.every, steps_done)
    if record.wandb != "off":
        opened["Weights & Biases"] = partial(WeightsAndBiases, folder)
    if record.prometheus_port:
        address, port = record.prometheus_address, record.prometheus_port
        opened[f"the endpoint at {address}:{port}"] = partial(PrometheusEndpoint, address, port)
    return [*files, *(BackgroundSink(name, open_sink, tell) for name, open_sink in opened.items())]


WAITING = 64
"""Reports that may wait for a sink."""

CLOSE_SECONDS = 15.0
"""Time that the end of a run waits for a sink."""

SAVING_SECONDS = 1.0
"""Time that a checkpoint waits for a sink."""

Call = Callable[[Observer], None]


class BackgroundSink(Observer):
    """Forwards calls to a sink, which is opened and called in a thread; `tell` prints a line in the training thread."""

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Observer],
        tell: Callable[[str], None],
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._name = name
        self._open_sink = open_sink
        self._tell = tell
        self._close_seconds = close_seconds
        self._calls: queue.Queue[Call | None] = queue.Queue(WAITING)  # None ends the thread
        self._error: BaseException | None = None  # set by the thread
        self._is_told = False
        self._left_out = 0  # reports that found the queue full
        self._thread = threading.Thread(target=self._work, name=f"penstock {name}", daemon=True)
        self._thread.start()

    def started(self, start: RunStart) -> None:
        self._pass_on(lambda sink: sink.started(start))

    def stepped(self, report: StepReport) -> None:
        """Forward the call, unless the queue is full."""
        self._pass_on(lambda sink: sink.stepped(report))

    def saving(self) -> None:
        """Wait, for a limited time, until the sink has the steps of a checkpoint: no later process sends them."""
        is_empty = threading.Event()
        if not self._calls.full() and self._pass_on(lambda sink: is_empty.set()):
            is_empty.wait(SAVING_SECONDS)

    def saved(self, step: int) -> None:
        self._pass_on(lambda sink: sink.saved(step))

    def closed(self) -> None:
        """Wait, for a limited time, until the sink has processed everything and is closed."""
        missing = self._left_out
        if self._pass_on(None, self._close_seconds):
            self._thread.join(self._close_seconds)
        self._look()
        if self._thread.is_alive():
            self._tell(f"{self._name} has not ended after {self._close_seconds:g} s and is left behind")
        elif missing:
            self._tell(f"{self._name} was too slow for {missing} reports, which are missing there")

    def _pass_on(self, call: Call | None, seconds: float = 0.0) -> bool:
        """Whether the call is in the queue, which may be full."""
        self._look()
        if self._error is not None:
            return False
        try:
            self._calls.put(call, block=seconds > 0, timeout=seconds or None)
        except queue.Full:
            self._left_out += 1
            return False
        return True

    def _look(self) -> None:
        """Tell the user once if the sink has failed."""
        if self._error is None or self._is_told:
            return
        self._is_told = True
        lines = str(self._error).strip().splitlines() or [""]
        why = f"{type(self._error).__name__}: {lines[0]}".rstrip(": ")
        self._tell(f"{self._name} is off from here on, the run goes on without it ({why})")

    def _work(self) -> None:
        with ExitStack() as cleanup:
            cleanup.push(self._keep)  # runs last, so it also keeps an error of `closed`
            sink = self._open_sink()
            cleanup.callback(sink.closed)
            while (call := self._calls.get()) is not None:
                call(sink)

    def _keep(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Catch every exception of the thread, for the training thread to tell."""
        self._error = error
        return True


class TensorBoard(Observer):
    """Observer that writes the numbers of `penstock.train.metrics.scalars` as TensorBoard events.

    Points after `steps_done` in the folder, of a process that was killed, are hidden.
    """

    def __init__(self, folder: Path, every: int, steps_done: int) -> None:
        self._every = every
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010}.{socket.gethostname()}.{os.getpid()}"
        self._file = open_to_append(folder / name)
        start = SessionLog(status=SessionLog.START)
        self._write(Event(file_version="brain.Event:2"), Event(step=steps_done + 1, session_log=start))

    def stepped(self, report: StepReport) -> None:
        if is_recorded(report, self._every):
            values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(report).items()]
            self._write(Event(step=report.step, summary=Summary(value=values)))

    def _write(self, *events: Any) -> None:
        """Write at once: torch's writer has a thread that prints a traceback when the disk is full."""
        records = BytesIO()
        for event in events:
            event.wall_time = time.time()
            RecordWriter(records).write(event.SerializeToString())
        self._file.write(records.getvalue())

    def closed(self) -> None:
        self._file.close()


class StartsFile(Observer):
    """Observer that adds a line to starts.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def started(self, start: RunStart) -> None:
        """Write the line. Raises a RunFolderError if that fails."""
        line = json.dumps(start_record(start)) + "\n"
        with system_errors(RunFolderError, f"cannot write {self._path}"), open_to_append(self._path) as file:
            file.write(line.encode())


def start_record(start: RunStart) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_text(),
        "device": start.device_name,
        "ranks": start.ranks,
        "steps_done": start.steps_done,
        "kernels": start.kernels,
        "parameters": start.parameters,
        "active_parameters": start.active_parameters,
        "penstock": __version__,
        "commit": commit_of_code(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
