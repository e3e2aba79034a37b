"""Who is told how a run goes, besides the person in front of it; the first rank tells all of them.

    metrics.jsonl                always; the run's own record, so a disk that takes no more ends the run
    starts.jsonl                 always; what it was started with, and on
    TensorBoard                  record.tensorboard
    Weights & Biases             record.wandb                penstock[wandb]
    an endpoint for Prometheus   record.prometheus_port      penstock[prometheus]

Whatever goes wrong in the last three never ends a run (penstock/train/sinks.py). Only what the user can mend
before it starts does: a package that is not installed, an account that is not known.
"""

import json
import platform
import queue
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from penstock import __version__
from penstock.base.errors import DeviceError, RunFolderError
from penstock.config.run import Run
from penstock.train.metrics import MetricsFile, is_recorded, scalars
from penstock.train.observer import Observer, RunStart, StepReport
from penstock.train.prometheus import PrometheusEndpoint
from penstock.train.run_folder import RunFolder
from penstock.train.weights_and_biases import WeightsAndBiases


def check_sinks(run: Run) -> None:
    """Refuse sinks that could not be told anything, before the run is made.

    Raises:
        DeviceError: a package is not installed, or W&B knows no account.
    """
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
    """Every sink of a run, ready to be told; the run closes them.

    Args:
        run: says which.
        folder: of the run.
        steps_done: steps of the checkpoint that the run goes on from.
        tell: prints a line for the user.
    """
    record = run.record
    sinks: list[Observer] = [MetricsFile(folder.metrics, record.every), StartsFile(folder.starts)]
    if record.tensorboard:
        sinks.append(
            BackgroundSink("TensorBoard", lambda: TensorBoard(folder.tensorboard, record.every, steps_done), tell)
        )
    if record.wandb != "off":
        sinks.append(BackgroundSink("Weights & Biases", lambda: WeightsAndBiases(folder), tell))
    if record.prometheus_port:
        address, port = record.prometheus_address, record.prometheus_port
        sinks.append(
            BackgroundSink(f"the endpoint at {address}:{port}", lambda: PrometheusEndpoint(address, port), tell)
        )
    return sinks


WAITING = 64
"""Reports that may wait for a sink: enough for a service that pauses, and little memory for wide models."""

CLOSE_SECONDS = 15.0
"""How long the end of a run waits for a sink."""

Call = Callable[[Observer], None]
"""What the sink shall do next."""


class BackgroundSink:
    """Observer that passes everything on to a sink in a thread, until the sink fails.

    Args:
        name: of the sink, for the user.
        open_sink: makes it, in the thread.
        tell: prints a line for the user; called by the thread that trains.
        close_seconds: how long `closed` waits for what is left to be told.
    """

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
        self._calls: queue.Queue[Call | None] = queue.Queue(WAITING)
        self._kept = _Kept()
        self._is_told = False
        self._left_out = 0
        self._thread = threading.Thread(target=self._work, name=f"penstock {name}", daemon=True)
        self._thread.start()

    def started(self, start: RunStart) -> None:
        """Pass it on."""
        self._pass_on(lambda sink: sink.started(start))

    def stepped(self, report: StepReport) -> None:
        """Pass it on, unless the sink is too far behind."""
        self._pass_on(lambda sink: sink.stepped(report))

    def saved(self, step: int) -> None:
        """Pass it on."""
        self._pass_on(lambda sink: sink.saved(step))

    def closed(self) -> None:
        """Wait until the sink has told everything and is closed, but not for ever."""
        missing = self._left_out
        if self._pass_on(None, self._close_seconds):
            self._thread.join(self._close_seconds)
        self._look()
        if self._thread.is_alive():
            self._tell(f"{self._name} has not ended after {self._close_seconds:g} s and is left behind")
        elif missing:
            self._tell(f"{self._name} was too slow for {missing} reports, which are missing there")

    def _pass_on(self, call: Call | None, seconds: float = 0.0) -> bool:
        """Whether the sink will hear of it."""
        self._look()
        if self._kept.error is not None:
            return False
        try:
            self._calls.put(call, block=seconds > 0, timeout=seconds or None)
        except queue.Full:
            self._left_out += 1
            return False
        return True

    def _look(self) -> None:
        """Tell the user, once, if the sink has failed."""
        error = self._kept.error
        if error is None or self._is_told:
            return
        self._is_told = True
        lines = str(error).strip().splitlines() or [""]
        why = f"{type(error).__name__}: {lines[0]}".rstrip(": ")
        self._tell(f"{self._name} is off from here on, the run goes on without it ({why})")

    def _work(self) -> None:
        """The thread of the sink."""
        with self._kept, ExitStack() as cleanup:
            sink = self._open_sink()
            cleanup.callback(sink.closed)
            while (call := self._calls.get()) is not None:
                call(sink)


class _Kept:
    """Keeps what leaves it, whatever it is, for another thread to see.

    Attributes:
        error: what has left it, or None.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True


class TensorBoard:
    """Observer that writes TensorBoard events: the numbers of `penstock.train.metrics.scalars`.

    Args:
        folder: where event files go.
        every: steps between points.
        steps_done: steps of the checkpoint; points after it, from a process that was killed, are hidden.
    """

    def __init__(self, folder: Path, every: int, steps_done: int) -> None:
        self._every = every
        self._writer = SummaryWriter(str(folder), purge_step=steps_done + 1)

    def started(self, start: RunStart) -> None:
        """Nothing to write."""

    def stepped(self, report: StepReport) -> None:
        """Write the points of a step."""
        if is_recorded(report, self._every):
            for name, value in scalars(report).items():
                self._writer.add_scalar(name, value, report.step)

    def saved(self, step: int) -> None:
        """A checkpoint is a good moment to put the points on disk."""
        self._writer.flush()

    def closed(self) -> None:
        """Close the event file."""
        self._writer.close()


class StartsFile:
    """Observer that adds a line to starts.jsonl.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def started(self, start: RunStart) -> None:
        """Write the line.

        Raises:
            RunFolderError: it cannot be written.
        """
        line = json.dumps(start_record(start, sys.argv)) + "\n"
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(line.encode())
        except OSError as error:
            raise RunFolderError(f"cannot write {self._path}", got=error.strerror) from error

    def stepped(self, report: StepReport) -> None:
        """Nothing to write."""

    def saved(self, step: int) -> None:
        """Nothing to write."""

    def closed(self) -> None:
        """Nothing to close."""


def start_record(start: RunStart, words: Sequence[str]) -> dict[str, Any]:
    """The line of a start, as JSON values.

    Args:
        start: what is known before the first step.
        words: of the command, the program first.
    """
    program = Path(words[0]).name
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["penstock" if program == "__main__.py" else program, *words[1:]]),
        "device": start.device_name,
        "ranks": start.ranks,
        "steps_done": start.steps_done,
        "kernels": start.kernels,
        "parameters": start.parameters,
        "active_parameters": start.active_parameters,
        "penstock": __version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
