"""Who is told how a run goes, besides the person in front of it; the first rank tells all of them.

    metrics.jsonl                always; the run's own record, so a disk that takes no more ends the run
    starts.jsonl                 always; what it was started with, and on
    TensorBoard                  record.tensorboard
    Weights & Biases             record.wandb                penstock[wandb]
    an endpoint for Prometheus   record.prometheus_port      penstock[prometheus]

Whatever goes wrong in the last three never ends a run (penstock/train/background_sink.py). Only what the user can mend
before it starts does: a package that is not installed, an account that is not known.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from penstock.base.errors import DeviceError
from penstock.config.run import Run
from penstock.train.background_sink import BackgroundSink
from penstock.train.metrics import MetricsFile
from penstock.train.observer import Observer
from penstock.train.prometheus import PrometheusEndpoint
from penstock.train.run_folder import RunFolder
from penstock.train.starts import StartsFile
from penstock.train.tensorboard import TensorBoard
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
