"""metrics.jsonl: figures of the steps as JSON lines, and the names of the same figures in other sinks.

Each line has the fields of `FIELDS` and is written in one unbuffered write, so a killed run leaves complete lines; they
are synced to disk before a checkpoint is written. A resumed run repeats the steps after its checkpoint: `drop_after`
deletes their lines, so each step has one line. Lines that a bad disk or an editor damaged are put aside.
tools/pages.py makes docs/metrics.md of these tables.
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.base.errors import RunFolderError, system_errors
from penstock.base.files import open_file, open_to_append, parse_json, sync, write_whole
from penstock.base.spans import Span
from penstock.train.goodput import goodput
from penstock.train.observer import BalanceReport, LayerReport, Observer, StepReport


@dataclass(frozen=True)
class MetricField:
    """A key of a line."""

    unit: str  # empty for ratios, lists and booleans
    doc: str


SLOTS_EVERY = 100
"""Steps between lines that list the slots of each expert; powers of two list them too."""

FIELDS: dict[str, MetricField] = {
    "step": MetricField("steps", "Optimizer steps done, this one included."),
    "loss": MetricField(
        "nats/token", "Mean over the counted tokens of the global batch, z-loss on the logits included."
    ),
    "mtp_losses": MetricField("nats/token", "The same for each depth of multi-token prediction, without their factor."),
    "gradient_norm": MetricField("", "L2 norm of all gradients together, before clipping."),
    "learning_rate": MetricField("", "Learning rate of the step."),
    "tokens_seen": MetricField("tokens", "Tokens of all steps so far."),
    "tokens_per_second_per_device": MetricField(
        "tokens/s", "Tokens of the step over its time and the number of devices."
    ),
    "step_seconds": MetricField("s", "Time of the step, data included; evaluation, checkpoint and records are not."),
    "phase_seconds": MetricField(
        "s",
        "Time of each phase of the STEP BEFORE on the first rank's device, see below; null in a process's first step.",
    ),
    "model_flops_utilization": MetricField(
        "",
        "Model FLOPs of the step over what the device could have done in bf16 meanwhile; null where that is unknown.",
    ),
    "peak_memory_bytes": MetricField(
        "bytes", "Most memory so far: allocated by PyTorch on a GPU, resident set of the process on a CPU."
    ),
    "peak_host_memory_bytes": MetricField(
        "bytes", "Most host memory of the first rank's process so far: its resident set, pinned memory included."
    ),
    "power_watts": MetricField(
        "W",
        "Power of the first rank's GPU, the median of the step. This and the next four need the package nvidia-ml-py "
        "or amdsmi, and are null without it.",
    ),
    "tokens_per_joule": MetricField(
        "tokens/J", "Tokens of a device in a second over that power: at the power limit, speed is energy."
    ),
    "power_limit_watts": MetricField("W", "Power that its board may draw."),
    "clock_mhz": MetricField("MHz", "Its clock, the median of the step: lower than the highest where power limits it."),
    "clock_limit_mhz": MetricField("MHz", "Its highest clock."),
    "goodput": MetricField(
        "", "Share of the wall clock since the first process began in which steps were trained that are kept."
    ),
    "wall_seconds": MetricField("s", "That wall clock by kind, see below."),
    "graph_pool_bytes": MetricField("bytes", "Device memory that captured work keeps (graphs.capture); 0 without any."),
    "expert_load_max_over_mean": MetricField("", "Of the least even layer; 1 is even. Null for a dense model."),
    "expert_rank_load_max_over_mean": MetricField(
        "",
        "Load of the fullest expert rank over the mean, as a mean of layers: what the time sees. Over all groups of "
        "expert ranks together. Null if ranks do not share experts.",
    ),
    "expert_rank_load_fullest": MetricField(
        "",
        "The same of one rank, the one whose mean of layers is highest: what its memory sees. At most the field above.",
    ),
    "balance_load_before": MetricField(
        "",
        "Rows of the fullest expert rank of each pass over its even share, without replicas; mean of layers and "
        "passes. Null without dispatch.balance, as the next two.",
    ),
    "balance_load_after": MetricField("", "The same with replicas: the rows that ranks computed."),
    "balance_replicas": MetricField("", "Replicas of a layer and pass on all ranks of a group, mean of both."),
    "balance_slots_needed": MetricField(
        "experts", "dispatch.balance_slots with which every plan of the step would have kept its bound; 0 without any."
    ),
    "dropped_slots": MetricField("slots", "(token, expert) pairs over capacity, all layers together."),
    "rows_left_out": MetricField(
        "rows", "Rows that exceeded the expert buffers (dispatch.row_capacity_factor); if any, the step was repeated."
    ),
    "records_skipped": MetricField(
        "records", "Records of text that could not be read and were skipped so far (data.corrupt); each epoch anew."
    ),
    "auxiliary_loss": MetricField("", "Balance losses, weighted, all layers together. Not part of `loss`."),
    "forced_balance": MetricField(
        "", "True if the router's choice is ignored (model.moe.balance.force_load_balance): benchmark only."
    ),
    "layers": MetricField("", "One object for each MoE layer, see below."),
    "evaluation_loss": MetricField(
        "nats/token", "On held-out text after this step; only in lines of steps that evaluate."
    ),
    "evaluation_bits_per_byte": MetricField("bits/byte", "The same over the bytes of text that the tokens stand for."),
}
"""Keys of a line, in order."""

PHASE_FIELDS: Mapping[Span, str] = MappingProxyType(
    {
        Span.DATA: "Rows are fetched, cut and copied to the device.",
        Span.OPTIMIZER: "Gradients become zero; later, parameters and expert bias are updated.",
        Span.FORWARD: "Forward passes with their losses; what they wait for counts.",
        Span.BACKWARD: "Backward passes, what is computed again, and forward passes beside one (dispatch.overlap).",
        Span.REPLAY: "Passes that are one captured graph (graphs.capture full): forward and backward in one.",
        Span.REDUCE: "Gradients are summed over ranks, their norm is taken, the host reads the step's figures.",
    }
)
"""Keys of `phase_seconds`. A phase lasts until the next begins; their sum is the step."""

LAYER_FIELDS: dict[str, MetricField] = {
    "layer": MetricField("", "Index of the decoder layer; multi-token prediction layers count on after the last one."),
    "max_over_mean": MetricField("", "Load of the fullest expert over the mean: 1 is even."),
    "entropy": MetricField("", "Entropy of the load over that of an even one: 1 is even, 0 is all on one expert."),
    "dropped_slots": MetricField("slots", "(token, expert) pairs over capacity."),
    "auxiliary_loss": MetricField("", "Balance losses of the layer, weighted."),
    "rank_load": MetricField(
        "", "Rows of the fullest expert rank over the mean, of the whole step; null if ranks do not share experts."
    ),
    "balance_load_before": MetricField("", "As in the line, of the layer; null without dispatch.balance."),
    "balance_load_after": MetricField("", "As in the line, of the layer; null without dispatch.balance."),
    "balance_replicas": MetricField("", "As in the line, of the layer; null without dispatch.balance."),
    "slots": MetricField(
        "slots",
        "(token, expert) pairs of each expert, dropped ones included, as a list: what `penstock plan --routing` reads. "
        "In lines of every hundredth step and of steps 1, 2, 4, 8 and so on; null in others.",
    ),
}
"""Keys of each object in `layers`, in order."""


def record(report: StepReport) -> dict[str, Any]:
    """The line of a step, as JSON values."""
    worst = report.worst_layer
    line: dict[str, Any] = {
        "step": report.step,
        "loss": report.loss,
        "mtp_losses": list(report.mtp_losses),
        "gradient_norm": report.gradient_norm,
        "learning_rate": report.learning_rate,
        "tokens_seen": report.tokens_seen,
        "tokens_per_second_per_device": report.tokens_per_second_per_device,
        "step_seconds": report.step_seconds,
        "phase_seconds": dict(report.phase_seconds) or None,
        "model_flops_utilization": report.model_flops_utilization,
        "peak_memory_bytes": report.peak_memory_bytes,
        "peak_host_memory_bytes": report.peak_host_memory_bytes,
        "power_watts": report.power.watts,
        "tokens_per_joule": report.tokens_per_second_per_device / report.power.watts if report.power.watts else None,
        "power_limit_watts": report.power.limits.watts,
        "clock_mhz": report.power.clock_mhz,
        "clock_limit_mhz": report.power.limits.clock_mhz,
        "goodput": goodput(report.wall_seconds),
        "wall_seconds": dict(report.wall_seconds) or None,
        "graph_pool_bytes": report.graph_pool_bytes,
        "expert_load_max_over_mean": None if worst is None else worst.max_over_mean,
        "expert_rank_load_max_over_mean": report.expert_rank_load_max_over_mean,
        "expert_rank_load_fullest": report.expert_rank_load_fullest,
        **_balance_record(report.balance),
        "balance_slots_needed": report.slots_needed,
        "dropped_slots": sum(layer.dropped for layer in report.layers),
        "rows_left_out": report.left_out,
        "records_skipped": report.records_skipped,
        "auxiliary_loss": sum(layer.auxiliary_loss for layer in report.layers),
        "forced_balance": report.forced_balance,
        "layers": [_layer_record(layer, report) for layer in report.layers],
    }
    if report.evaluation is not None:
        line["evaluation_loss"] = report.evaluation.loss
        line["evaluation_bits_per_byte"] = report.evaluation.bits_per_byte
    return line


def _layer_record(layer: LayerReport, report: StepReport) -> dict[str, Any]:
    lists_slots = report.step % SLOTS_EVERY == 0 or report.step.bit_count() == 1
    return {
        "layer": layer.layer,
        "max_over_mean": layer.max_over_mean,
        "entropy": layer.entropy,
        "dropped_slots": layer.dropped,
        "auxiliary_loss": layer.auxiliary_loss,
        "rank_load": None if report.expert_ranks == 1 else max(layer.rank_loads(report.expert_ranks)),
        **_balance_record(layer.balance),
        "slots": list(layer.slots) if lists_slots else None,
    }


def _balance_record(balance: BalanceReport | None) -> dict[str, float | None]:
    return {
        "balance_load_before": None if balance is None else balance.before,
        "balance_load_after": None if balance is None else balance.after,
        "balance_replicas": None if balance is None else balance.replicas,
    }


def scalars(report: StepReport) -> dict[str, float]:
    """Every number of a line, named `GROUP/NAME` as TensorBoard and W&B group them."""
    return scalars_of(record(report))


def scalars_of(line: dict[str, Any]) -> dict[str, float]:
    """`scalars` of a line, which is used up."""
    del line["step"]
    groups: dict[str, dict[str, float | None]] = {}
    for layer in line.pop("layers"):
        del layer["slots"]
        groups[f"layer {layer.pop('layer'):02}/"] = layer
    groups["phase/"] = line.pop("phase_seconds") or {}
    groups["wall/"] = line.pop("wall_seconds") or {}
    losses = {f"mtp_loss_{depth}": loss for depth, loss in enumerate(line.pop("mtp_losses"), start=1)}
    groups["train/"] = losses | line
    return {
        prefix + name: float(value)
        for prefix, values in groups.items()
        for name, value in values.items()
        if value is not None
    }


def is_recorded(report: StepReport, every: int) -> bool:
    """Whether a sink with this interval records a step; steps with an evaluation always are."""
    return report.step % every == 0 or report.evaluation is not None


def drop_after(path: Path, step: int, every: int = 1) -> tuple[str, ...]:
    """Delete the lines after those of a step; returns notices for the user about lines that are damaged or missing.

    Every step that `every` divides should have a line. Lines that are no JSON or repeat a step are left out, and the
    file as it was is kept under another name. Raises a RunFolderError if the file cannot be read or written, or no line
    is of metrics.
    """
    kept: list[tuple[int, int]] = []  # begin and end of neighbouring lines
    begin = last = damaged = 0
    is_ours = False  # some line is of metrics
    notices = []
    with _io_errors(path):
        for line in _lines(path):
            end, number = begin + len(line), _step_of(line)
            if number is not None and last < number <= step:
                first = kept.pop()[0] if kept and kept[-1][1] == begin else begin
                kept.append((first, end))
                last = number
            elif line.endswith(b"\n") and (number is None or number <= last):  # a kill leaves a last line without end
                damaged += 1
            is_ours |= number is not None
            begin = end
        if damaged and not is_ours:
            raise RunFolderError(f"cannot read {path} as metrics", fix="move the file away to go on")
        if damaged:
            aside = path.with_name(f"{path.name}.damaged")
            shutil.copyfile(path, aside)
            content = aside.read_bytes()
            write_whole(path, b"".join(content[first:end] for first, end in kept))
            notices.append(f"{path}: left out {damaged} lines that are damaged or repeated; {aside.name} has them")
        elif begin:
            os.truncate(path, kept[0][1] if kept else 0)
    if last < step - step % every:
        notices.append(f"{path} has no figures of steps {last + 1} to {step - step % every}: its lines are lost")
    return tuple(notices)


def lines_between(path: Path, after: int, last: int) -> Iterator[dict[str, Any]]:
    """Lines of the steps after `after` up to `last`. Raises a RunFolderError if the file cannot be read."""
    with _io_errors(path):
        for line in _lines(path):
            step = _step_of(line)
            if step is not None and after < step <= last:
                yield parse_json(line)


def last_step(path: Path) -> int:
    """The step of the last line that is whole; 0 without one. Raises a RunFolderError if the file cannot be read."""
    with _io_errors(path):
        newest = deque(_lines(path), maxlen=100)
    return next(filter(None, map(_step_of, reversed(newest))), 0)


def _io_errors(path: Path) -> AbstractContextManager[None]:
    return system_errors(RunFolderError, f"cannot read or write {path}")


def _lines(path: Path) -> Iterator[bytes]:
    """Lines of the file, which may be missing."""
    with suppress(FileNotFoundError), open_file(path) as file:
        yield from file


def _step_of(line: bytes) -> int | None:
    """The step of a line; None if it is damaged, or its end is missing."""
    try:
        step = parse_json(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return step if type(step) is int else None


class MetricsFile(Observer):
    """Observer that appends to metrics.jsonl, `every` so many steps; steps with an evaluation are always written."""

    def __init__(self, path: Path, every: int) -> None:
        self._path = path
        self._every = every
        self._rest = b""  # lines that could not be written
        with system_errors(RunFolderError, f"cannot write {path}"):
            self._file = open_to_append(path)  # a line is one write: a killed process leaves no part of it
            sync(path.parent)  # the name of the file

    def stepped(self, report: StepReport) -> None:
        """Write the line of a step. Raises a RunFolderError if the file cannot be written."""
        if is_recorded(report, self._every):
            self._rest += (json.dumps(record(report), allow_nan=False) + "\n").encode()
            self._write()

    def _write(self) -> None:
        rest = memoryview(self._rest)
        with self._writing():
            begin = os.fstat(self._file.fileno()).st_size
            try:
                while rest:  # a disk that gets full may take a part
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(begin)
                raise
        self._rest = b""

    def saving(self) -> None:
        """Sync the lines to disk, also those that could not be written. Raises a RunFolderError if that fails."""
        self._write()
        with self._writing():
            os.fsync(self._file.fileno())

    def closed(self) -> None:
        with self._writing(), self._file:
            os.fsync(self._file.fileno())

    def _writing(self) -> AbstractContextManager[None]:
        return system_errors(RunFolderError, f"cannot write {self._path}", "free space, --resume")
