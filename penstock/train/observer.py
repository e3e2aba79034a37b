"""What a run tells: frozen values on the host, and the protocol of whoever listens.

The loop knows no file, terminal or service. It makes one `StepReport` a step and hands it to every observer in turn:
metrics.jsonl, TensorBoard, the live view. A report holds plain numbers only, so that an observer can keep it, print
it or send it away without touching a device.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Protocol

from penstock.config.run import Run


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Load of one MoE layer in one step.

    Attributes:
        layer: index of the decoder layer.
        slots: (token, choice) pairs that chose each expert, dropped ones too.
        dropped: slots over capacity.
        auxiliary_loss: balance losses of the layer, weighted.
    """

    layer: int
    slots: tuple[int, ...]
    dropped: int
    auxiliary_loss: float

    @property
    def max_over_mean(self) -> float:
        """Load of the fullest expert over the mean: 1 is even, the number of experts is all on one."""
        total = sum(self.slots)
        return max(self.slots) * len(self.slots) / total if total else 1.0

    @property
    def entropy(self) -> float:
        """Entropy of the load over that of an even one: 1 is even, 0 is all on one expert."""
        total = sum(self.slots)
        if total == 0 or len(self.slots) == 1:
            return 1.0
        shares = [slots / total for slots in self.slots if slots]
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.slots))

    def rank_loads(self, ranks: int) -> tuple[float, ...]:
        """Load of each of the ranks that share the layer's experts, over their mean: 1 is even."""
        total, each = sum(self.slots), len(self.slots) // ranks
        if total == 0:
            return (1.0,) * ranks
        return tuple(sum(self.slots[first : first + each]) * ranks / total for first in range(0, ranks * each, each))


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Held-out text, measured.

    Attributes:
        loss: cross entropy, nats per token.
        bits_per_byte: the same text's cost in bits per byte of UTF-8, which no tokenizer can flatter.
        tokens: counted tokens.
        seconds: time that it took.
    """

    loss: float
    bits_per_byte: float
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step. Fields that also stand in metrics.jsonl are documented in `penstock.train.metrics.FIELDS`.

    Attributes:
        step: counted from 1.
        elapsed_seconds: since this process began to train, evaluations and checkpoints included.
        layers: one for each MoE layer; empty for a dense model.
        evaluation: held-out loss after this step, or None if none was due.
        notices: what the user should know from now on, one line each; told once.
        expert_ranks: that share the experts of a layer.
        phase_seconds: of the step before; empty if this process did not make it.
    """

    step: int
    loss: float
    mtp_losses: tuple[float, ...]
    gradient_norm: float
    learning_rate: float
    tokens_seen: int
    tokens_per_second_per_device: float
    step_seconds: float
    elapsed_seconds: float
    model_flops_utilization: float | None
    peak_memory_bytes: int
    forced_balance: bool
    layers: tuple[LayerReport, ...]
    left_out: int
    evaluation: HeldOutLoss | None
    records_skipped: int = 0
    graph_pool_bytes: int = 0
    notices: tuple[str, ...] = ()
    expert_ranks: int = 1
    phase_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def expert_rank_load_max_over_mean(self) -> float | None:
        """Of each layer the fullest expert rank's load over the mean, then the mean of layers: what the time sees.

        None if ranks do not share experts.
        """
        if self.expert_ranks == 1 or not self.layers:
            return None
        return fmean(max(layer.rank_loads(self.expert_ranks)) for layer in self.layers)

    @property
    def expert_rank_load_fullest(self) -> float | None:
        """Of each expert rank the mean of its layers' loads, then the fullest rank: what the memory sees. Or None."""
        if self.expert_ranks == 1 or not self.layers:
            return None
        loads = (layer.rank_loads(self.expert_ranks) for layer in self.layers)
        return max(map(fmean, zip(*loads, strict=True)))

    @property
    def worst_layer(self) -> LayerReport | None:
        """The layer whose load is least even, or None for a dense model."""
        return max(self.layers, key=lambda layer: layer.max_over_mean, default=None)


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What is known before the first step.

    Attributes:
        run: the configuration.
        folder: where the run is recorded.
        device_name: as the driver reports it.
        kernels: which backend runs each operator, in one line.
        parameters: all parameters of the model.
        active_parameters: those that one token meets.
        steps_done: steps of earlier processes; more than 0 after resuming.
        ranks: processes that train together.
        micro_batches: forward passes of one rank in a step.
        graphs: what is captured, or why nothing is; empty if nobody asked.
    """

    run: Run
    folder: Path
    device_name: str
    kernels: str
    parameters: int
    active_parameters: int
    steps_done: int
    ranks: int = 1
    micro_batches: int = 1
    graphs: str = ""


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How a run ended.

    Attributes:
        step: last finished step.
        steps: steps that the run asks for.
        seconds: time since this process began to train.
        checkpoint: the newest checkpoint on disk, or None.
        last: report of the last step, or None if this process made none.
        stopped_by: name of the signal that asked for the stop, or None.
    """

    step: int
    steps: int
    seconds: float
    checkpoint: Path | None
    last: StepReport | None
    stopped_by: str | None


class Observer(Protocol):
    """Whoever listens to a run. Calls come from the thread that trains, so they should be quick."""

    def started(self, start: RunStart) -> None:
        """Called once, before the first step."""

    def stepped(self, report: StepReport) -> None:
        """Called after every step, evaluation included, before a checkpoint of that step is written."""

    def saved(self, step: int) -> None:
        """Called when a checkpoint of that step was handed to the writer."""

    def closed(self) -> None:
        """Called last, also when the run failed; releases files and the terminal."""
