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

Weights & Biases has the figures in the user's project, over the network (online) or in files (offline); `record.wandb`
is the mode, and it reads its own environment variables and login:

    runs/NAME/wandb/id                the run at W&B: PROJECT/ID
                    step              the last step that W&B has: its library had ended, with nothing left to send
                    offline-run-...   files for `wandb sync`

A resumed run continues the same run at W&B, whose history cannot go back: steps that are repeated have the same figures
and are not sent again. The library sends in a process of its own, and a kill loses what waits there. So a run that was
killed sends the steps before its checkpoint again, from metrics.jsonl; W&B drops those that it has.

The endpoint for Prometheus shows the last step of the run: `curl http://127.0.0.1:PORT/metrics`. A report is stored by
one assignment, and a thread of the endpoint writes the answer, so requests cost the run nothing. Names follow
Prometheus' conventions: the program first, base units last, `_total` for counters. The counters of a resumed run start
with its earlier steps, which Prometheus takes for a restart.
"""

import json
import os
import platform
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from penstock import __version__
from penstock.base.errors import DeviceError, RunFolderError, system_errors
from penstock.base.files import open_to_append, write_whole
from penstock.base.origin import command_text, commit_of_code, version_of
from penstock.config.run import Run
from penstock.train.metrics import (
    FIELDS,
    LAYER_FIELDS,
    MetricField,
    MetricsFile,
    is_recorded,
    lines_between,
    record,
    scalars,
    scalars_of,
)
from penstock.train.observer import Observer, RunStart, StepReport
from penstock.train.run_folder import RunFolder

EXPORTED: Mapping[str, str] = MappingProxyType(
    {
        "step": "penstock_steps_total",
        "loss": "penstock_loss_nats",
        "mtp_losses": "penstock_mtp_loss_nats",
        "gradient_norm": "penstock_gradient_norm",
        "learning_rate": "penstock_learning_rate",
        "tokens_seen": "penstock_tokens_total",
        "tokens_per_second_per_device": "penstock_device_tokens_per_second",
        "step_seconds": "penstock_step_seconds",
        "phase_seconds": "penstock_phase_seconds",
        "model_flops_utilization": "penstock_model_flops_utilization_ratio",
        "peak_memory_bytes": "penstock_peak_memory_bytes",
        "peak_host_memory_bytes": "penstock_peak_host_memory_bytes",
        "power_watts": "penstock_power_watts",
        "tokens_per_joule": "penstock_tokens_per_joule",
        "power_limit_watts": "penstock_power_limit_watts",
        "clock_mhz": "penstock_clock_megahertz",
        "clock_limit_mhz": "penstock_clock_limit_megahertz",
        "goodput": "penstock_goodput_ratio",
        "wall_seconds": "penstock_wall_seconds",
        "graph_pool_bytes": "penstock_graph_pool_bytes",
        "expert_load_max_over_mean": "penstock_expert_load_max_over_mean_ratio",
        "expert_rank_load_max_over_mean": "penstock_expert_rank_load_max_over_mean_ratio",
        "expert_rank_load_fullest": "penstock_expert_rank_load_fullest_ratio",
        "balance_load_before": "penstock_balance_load_before_ratio",
        "balance_load_after": "penstock_balance_load_after_ratio",
        "balance_replicas": "penstock_balance_replicas",
        "balance_slots_needed": "penstock_balance_slots_needed",
        "dropped_slots": "penstock_dropped_slots",
        "rows_left_out": "penstock_left_out_rows",
        "records_skipped": "penstock_skipped_records",
        "auxiliary_loss": "penstock_auxiliary_loss",
        "forced_balance": "penstock_forced_balance",
        "evaluation_loss": "penstock_evaluation_loss_nats",
        "evaluation_bits_per_byte": "penstock_evaluation_bits_per_byte",
    }
)
"""Names of the fields of `penstock.train.metrics.FIELDS`; `phase_seconds` has a label `phase`, `mtp_losses` a
`depth`, `wall_seconds` a `kind`.
"""

EXPORTED_OF_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "max_over_mean": "penstock_layer_expert_load_max_over_mean_ratio",
        "entropy": "penstock_layer_expert_load_entropy_ratio",
        "dropped_slots": "penstock_layer_dropped_slots",
        "auxiliary_loss": "penstock_layer_auxiliary_loss",
        "rank_load": "penstock_layer_expert_rank_load_ratio",
        "balance_load_before": "penstock_layer_balance_load_before_ratio",
        "balance_load_after": "penstock_layer_balance_load_after_ratio",
        "balance_replicas": "penstock_layer_balance_replicas",
    }
)
"""Names of the entries of `layers`, which have a label `layer`; `slots` has none, being a list."""

RUN_INFO = "penstock_run_info"
WANTED_STEPS = "penstock_wanted_steps"
STEP_TIME = "penstock_step_timestamp_seconds"
SAVED_STEP = "penstock_saved_step"
SAVED_TIME = "penstock_checkpoint_timestamp_seconds"

ENDPOINT_FIELDS: Mapping[str, MetricField] = MappingProxyType(
    {
        RUN_INFO: MetricField(
            "", "Always 1; its labels are the model's family, the device, the ranks, and the run's name."
        ),
        WANTED_STEPS: MetricField("steps", "Steps that the run asks for."),
        STEP_TIME: MetricField("s", "When the last step ended, since 1970; of a run that hangs it stays behind."),
        SAVED_STEP: MetricField("steps", "Step of the newest checkpoint of this process; absent before the first."),
        SAVED_TIME: MetricField("s", "When that was handed to the writer, since 1970."),
    }
)
"""Metrics that only the endpoint has."""

_LABELS = {"phase_seconds": "phase", "mtp_losses": "depth", "wall_seconds": "kind"}


class PrometheusEndpoint(Observer):
    """Observer that answers HTTP requests; port 0 takes a free one.

    Raises OSError if the port is taken, or the address is none of this machine.
    """

    def __init__(self, address: str, port: int) -> None:
        client: Any = import_module("prometheus_client")
        self._core: Any = import_module("prometheus_client.core")
        self._run = ""
        self._figures: dict[str, Any] = {}  # by field; replaced and not changed, as the server's thread reads it
        registry = client.CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, self._thread = client.start_http_server(port, addr=address, registry=registry)
        self.port = int(self._server.server_port)

    def started(self, start: RunStart) -> None:
        self._run = start.run.name
        info = {"model": start.run.model.family, "device": start.device_name, "ranks": f"{start.ranks}"}
        self._figures = {RUN_INFO: info, WANTED_STEPS: start.run.training.steps}

    def stepped(self, report: StepReport) -> None:
        """Store the figures of a step; those of an evaluation stay until the next one."""
        self._figures = self._figures | record(report) | {STEP_TIME: time.time()}

    def saved(self, step: int) -> None:
        self._figures = self._figures | {SAVED_STEP: step, SAVED_TIME: time.time()}

    def closed(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Metric families of prometheus_client; its thread calls this for each request."""
        figures = self._figures  # once: the training thread may replace it meanwhile
        for name, field in ENDPOINT_FIELDS.items():
            if name == RUN_INFO and name in figures:
                info = {"run": self._run, **figures[name]}
                yield self._core.InfoMetricFamily(name.removesuffix("_info"), field.doc, info)
            elif name in figures:
                yield self._family(name, field.doc, figures[name])
        for key, name in EXPORTED.items():
            if key in figures:
                yield self._family(name, FIELDS[key].doc, figures[key], _LABELS.get(key))
        for key, name in EXPORTED_OF_LAYER.items():
            if "layers" in figures:
                layers = {layer["layer"]: layer[key] for layer in figures["layers"] if layer[key] is not None}
                yield self._family(name, LAYER_FIELDS[key].doc, layers, "layer")

    def _family(self, name: str, doc: str, value: Any, label: str | None = None) -> Any:
        """One metric with its samples, each labeled with the run; a figure that is None has none."""
        kind = self._core.CounterMetricFamily if name.endswith("_total") else self._core.GaugeMetricFamily
        family = kind(name, doc, labels=("run", label) if label else ("run",))
        if isinstance(value, list):
            value = dict(enumerate(value, start=1))
        samples = value if isinstance(value, dict) else {} if value is None else {None: value}
        for key, number in samples.items():
            family.add_metric((self._run, str(key)) if label else (self._run,), float(number))
        return family


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


class WeightsAndBiases(Observer):
    """Observer that sends figures to Weights & Biases."""

    def __init__(self, folder: RunFolder) -> None:
        self._wandb: Any = import_module("wandb")
        self._folder = folder
        self._step_file = folder.wandb / "step"
        self._run: Any = None
        self._every, self._wanted, self._last, self._sent = 1, 0, 0, 0  # steps

    def started(self, start: RunStart) -> None:
        """Create the run at W&B, or continue it."""
        record = start.run.record
        self._folder.wandb.mkdir(exist_ok=True)
        self._every, self._wanted = record.every, start.run.training.steps
        self._last = start.steps_done
        name = _known_id(self._folder.wandb / "id", record.wandb_project)
        if name is None:
            name = uuid.uuid4().hex[:12]
            write_whole(self._folder.wandb / "id", f"{record.wandb_project}/{name}\n")
        else:
            self._sent = _number(self._step_file)
        self._run = self._wandb.init(
            project=record.wandb_project,
            id=name,
            name=start.run.name,
            dir=str(self._folder.path),
            mode=record.wandb,
            resume="allow",  # continue the run with this id, or create it
            reinit="create_new",
            config={
                **start.run.model_dump(mode="json"),
                "device_name": start.device_name,
                "ranks": start.ranks,
                "parameters": start.parameters,
                "active_parameters": start.active_parameters,
            },
            # The terminal shows the live view, whose output is no log.
            settings=self._wandb.Settings(console="off", silent=True, save_code=False),
        )
        self._sent = max(self._sent, self._run.starting_step - 1)  # 0 unless W&B has answered
        for line in lines_between(self._folder.metrics, self._sent, start.steps_done):
            self._log(line["step"], scalars_of(line))

    def stepped(self, report: StepReport) -> None:
        """Send a step, unless it was sent before."""
        self._last = report.step
        if report.step <= self._sent or not is_recorded(report, self._every):
            return
        self._log(report.step, scalars(report))

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step, commit=True)
        self._sent = step

    def closed(self) -> None:
        """Send the rest. A run with missing steps is marked as failed until it is resumed."""
        if self._run is not None:
            self._run.finish(exit_code=0 if self._last >= self._wanted else 1)
            write_whole(self._step_file, f"{self._sent}\n")


def _known_id(path: Path, project: str) -> str | None:
    known, _, name = path.read_text().strip().rpartition("/") if path.is_file() else ("", "", "")
    return name if known == project and name else None


def _number(path: Path) -> int:
    """The number in a file; 0 if the file is missing or damaged."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isascii() and text.isdigit() else 0
