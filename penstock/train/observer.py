"""Reports of a run, as frozen values on the host, and the protocol of their receivers.

The loop makes one `StepReport` a step and passes it to every observer: metrics.jsonl, TensorBoard, the live view. A
report holds plain numbers, so an observer can store, print or send it without touching a device.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from penstock.config.run import Run
from penstock.train.power import NO_POWER, PowerReading


@dataclass(frozen=True, kw_only=True)
class BalanceReport:
    """Plans of replicas in one layer and step (`dispatch.balance`), as means over the passes.

    Loads are those of the pass's fullest expert rank over its even share.
    """

    before: float  # without replicas
    after: float  # with them
    replicas: float  # on all ranks


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Load of one MoE layer in one step."""

    layer: int  # index of the decoder layer
    slots: tuple[int, ...]  # (token, choice) pairs of each expert, dropped ones included
    dropped: int  # of these pairs
    auxiliary_loss: float  # balance losses of the layer, weighted
    balance: BalanceReport | None = None  # None without replicas

    @property
    def max_over_mean(self) -> float:
        """Load of the fullest expert over the mean, from 1 (even) to the number of experts."""
        total = sum(self.slots)
        return max(self.slots) * len(self.slots) / total if total else 1.0

    @property
    def entropy(self) -> float:
        """Entropy of the load over that of an even one, from 0 (one expert) to 1 (even)."""
        total = sum(self.slots)
        if total == 0 or len(self.slots) == 1:
            return 1.0
        shares = [slots / total for slots in self.slots if slots]
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.slots))

    def rank_loads(self, ranks: int) -> tuple[float, ...]:
        """Load of each of the ranks that share the experts, over their mean."""
        total, each = sum(self.slots), len(self.slots) // ranks  # a rank holds `each` neighbouring experts
        if total == 0:
            return (1.0,) * ranks
        return tuple(sum(self.slots[first : first + each]) * ranks / total for first in range(0, ranks * each, each))


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Result of an evaluation."""

    loss: float  # cross entropy, nats per token
    bits_per_byte: float  # cross entropy in bits per byte of UTF-8 text, comparable between tokenizers
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Figures of a step, the same on all ranks."""

    loss: float  # mean over the counted tokens of the global batch
    mtp_losses: tuple[float, ...]  # the same for each multi-token prediction depth
    gradient_norm: float  # before clipping
    layers: tuple[LayerReport, ...]  # one for each MoE layer, before the update of the expert bias
    peak_memory_bytes: int  # maximum over ranks when the passes were launched; an update shows in the next step
    left_out: int  # rows without room in the first attempt, over all ranks and layers; above 0 the step was repeated
    slots_needed: int = 0  # replicas of a rank with which every plan would have kept its bound


@dataclass(frozen=True, kw_only=True)
class StepReport(StepTotals):
    """One optimizer step. Fields that are also in metrics.jsonl are documented in `penstock.train.metrics.FIELDS`."""

    step: int  # from 1
    learning_rate: float
    tokens_seen: int
    tokens_per_second_per_device: float
    step_seconds: float
    elapsed_seconds: float  # since this process began to train, evaluations and checkpoints included
    model_flops_utilization: float | None
    forced_balance: bool
    evaluation: HeldOutLoss | None  # after this step; None if none was due
    records_skipped: int = 0
    graph_pool_bytes: int = 0
    peak_host_memory_bytes: int = 0
    notices: tuple[str, ...] = ()  # new messages for the user, one line each
    expert_ranks: int = 1  # that share the experts of a layer
    phase_seconds: Mapping[str, float] = field(default_factory=dict)  # of the step before; empty in the first step
    power: PowerReading = NO_POWER  # of this rank's GPU
    wall_seconds: Mapping[str, float] = field(default_factory=dict)  # of the whole run; empty where it is not kept

    @property
    def expert_rank_load_max_over_mean(self) -> float | None:
        """Mean over layers of the fullest expert rank's load, which decides the time; None without expert ranks."""
        if self.expert_ranks == 1 or not self.layers:
            return None
        return fmean(max(layer.rank_loads(self.expert_ranks)) for layer in self.layers)

    @property
    def expert_rank_load_fullest(self) -> float | None:
        """Highest mean over layers of an expert rank's load, which decides its memory; None without expert ranks."""
        if self.expert_ranks == 1 or not self.layers:
            return None
        loads = (layer.rank_loads(self.expert_ranks) for layer in self.layers)
        return max(map(fmean, zip(*loads, strict=True)))

    @property
    def balance(self) -> BalanceReport | None:
        """Means over the layers with plans of replicas; None without any."""
        plans = [layer.balance for layer in self.layers if layer.balance is not None]
        if not plans:
            return None
        return BalanceReport(
            before=fmean(plan.before for plan in plans),
            after=fmean(plan.after for plan in plans),
            replicas=fmean(plan.replicas for plan in plans),
        )

    @property
    def worst_layer(self) -> LayerReport | None:
        """The layer with the least even load, or None for a dense model."""
        return max(self.layers, key=lambda layer: layer.max_over_mean, default=None)


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Facts before the first step."""

    run: Run
    folder: Path
    device_name: str
    kernels: str  # backend of each operator, in one line
    parameters: int
    active_parameters: int  # that one token uses
    steps_done: int  # by earlier processes
    ranks: int = 1
    micro_batches: int = 1  # forward passes of one rank in a step
    graphs: str = ""  # the note of `penstock.train.capture.choose_capture`
    sync_free: str = ""  # that of `penstock.config.sync_free.settled_sync_free`


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """What a run has done when it ends."""

    step: int  # the last one that was made
    steps: int  # that the run asks for
    seconds: float  # since this process began to train
    checkpoint: Path | None  # the newest on disk
    last: StepReport | None  # None if no step was left to make
    stopped_by: str | None  # name of the signal that requested the stop


class Observer:
    """Receiver of reports; does nothing by default. The training thread makes the calls, so they should be quick."""

    def started(self, start: RunStart) -> None:
        """Called once, before the first step."""

    def stepped(self, report: StepReport) -> None:
        """Called after every step and its evaluation, before a checkpoint of the step."""

    def saving(self) -> None:
        """Called before a checkpoint is passed to the writer."""

    def saved(self, step: int) -> None:
        """Called when a checkpoint of that step was passed to the writer."""

    def closed(self) -> None:
        """Called last, also after an error; releases files and the terminal."""
