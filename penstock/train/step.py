"""One optimizer step, the evaluation of the model between steps, and requests to stop after a step.

Outside of MoE layers, which may read row counts at `dispatch.sync_free` 0 and 1, the host waits for the device once a
step: after the last backward pass, loss, norm and expert loads are read in one copy. The update is decided after that,
so a step that is not finite leaves parameters, moments and expert bias unchanged, and the kernels of the update still
run while the host prepares the next step. Peak memory and stop requests of the ranks travel with these figures.

If the rows of any rank exceeded the expert buffers, the step is repeated with larger ones
(penstock/moe/dispatch/row_capacity.py).

Evaluation uses the same held-out rows every time. Its sums over counted tokens are float64 and divided once, so the
result does not depend on the batch size. Expert buffers then hold all rows.

For a stop a signal sets a flag, and the loop stops after the running step, with a checkpoint:

    SIGINT (Ctrl-C)            stop after this step; exit code 130. A second one stops at once, without a checkpoint.
    SIGTERM (Slurm, a pod,     stop after this step; exit code 143. Repeats change nothing: the sender waits until
    torchrun, systemd)         SIGKILL, and the checkpoint needs that time.
    SIGHUP (the terminal is    stop after this step; exit code 129. What is printed goes nowhere, since a lost terminal
    lost)                      refuses it. Under nohup the signal is ignored, and the run goes on.

The exit codes are the shell's 128 + signal, not 0, because the run is unfinished: a Kubernetes Job restarts the pod and
a Slurm script can requeue. Several ranks may make one more step until all know of the request, so allow for two steps
and the checkpoint: `terminationGracePeriodSeconds`, or `sbatch --signal=TERM@120`. A launcher that forwards Ctrl-C
sends a second SIGINT right after the terminal's. Those within `SAME_PRESS_SECONDS` count as one.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import DeviceError
from penstock.base.spans import Span
from penstock.config.run import Run
from penstock.data.evaluation import EvaluationRows
from penstock.data.loader import Batch
from penstock.kernels.replica_plan import PlanFact
from penstock.models.attention import clip_factors
from penstock.models.parameters import refresh_float8
from penstock.models.rank_model import RankModel
from penstock.moe.balance import LayerLoad, reset_meters
from penstock.moe.dispatch.row_capacity import CapacityTracker, capacity_trackers, make_room, rows_left_out
from penstock.moe.layer import moe_loads
from penstock.moe.router import update_expert_bias
from penstock.parallel.launch.process import peak_memory_bytes
from penstock.parallel.spans import EnterPhase, span, untimed
from penstock.train.observer import BalanceReport, HeldOutLoss, LayerReport, StepTotals
from penstock.train.optimizer import NO_FACTORS, MasterAdamW, clip_divisor
from penstock.train.passes import CutRule, GlobalBatch, LossRule, cut, forward_backward, held_out_nats, loss_rule, read
from penstock.train.stragglers import RankPulse

SAME_PRESS_SECONDS = 1.0


class StopRequest:
    """Context in which signals request a stop; `notify` is called once, in the training thread."""

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self._notify = notify
        self.signal: signal.Signals | None = None  # the first one
        self.has_failed = False  # this rank cannot go on, so no rank applies the step
        self._first_seconds = 0.0  # when it came
        self._previous: dict[signal.Signals, Any] = {}  # handlers to restore
        self._terminals: list[int] = []  # descriptors of output

    @property
    def exit_code(self) -> int:
        """128 + signal as in a shell, or 0 without a request."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]  # a lost one is none any more
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Python calls this between two bytecodes of the main thread."""
        now = time.monotonic()
        if number == signal.SIGHUP:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in self._terminals:
                os.dup2(nowhere, descriptor)
            os.close(nowhere)
        if self.signal is None:
            self.signal, self._first_seconds = signal.Signals(number), now
            self._notify()
        elif number == signal.SIGINT and now - self._first_seconds > SAME_PRESS_SECONDS:
            raise KeyboardInterrupt


NO_PULSE = RankPulse()

Passes = Callable[[RankModel, GlobalBatch, LossRule, EnterPhase], Tensor]
"""Signature of `forward_backward`."""


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """Constants of every step."""

    cut: CutRule  # of a rank's rows into micro-batches
    clip_norm: float  # largest gradient norm; 0 does not clip
    loss: LossRule
    moe_layers: tuple[int, ...]  # indices of the MoE layers of all ranks
    experts: int
    passes: Passes = forward_backward
    qk_clip: float = 0.0  # largest attention logit; 0 does not clip
    has_float8: bool = False  # weights have 8-bit copies, which follow each update
    capacities: tuple[CapacityTracker, ...] = ()  # limits of the rows of experts; none where the host reads row counts


@dataclass(frozen=True, kw_only=True)
class StepResult(StepTotals):
    """Figures of a step, and what the ranks told each other with them."""

    wants_stop: bool  # a rank had received a stop request when the passes were launched
    pulses: tuple[RankPulse, ...]  # of each rank, of earlier steps
    has_failed: bool = False  # a rank cannot go on (`StopRequest.has_failed`), so the step was not applied

    @property
    def is_finite(self) -> bool:
        """Whether the step was applied."""
        return all(map(math.isfinite, (self.loss, *self.mtp_losses, self.gradient_norm)))


def step_rule(run: Run, model: RankModel, device: torch.device, passes: Passes = forward_backward) -> StepRule:
    axes = model.axes
    cut_rule = CutRule(
        micro_batch=run.training.micro_batch,
        depths=run.model.mtp_layers,
        device=device,
        data=axes.data,
        places=model.positions,
        sees_row=model.context_method == "ulysses",
    )
    model_layers = range(run.model.layers + run.model.mtp_layers)
    return StepRule(
        cut=cut_rule,
        clip_norm=run.training.clip_norm,
        loss=loss_rule(run, axes),
        moe_layers=tuple(layer for layer in model_layers if not run.model.is_dense(layer)),
        experts=0 if run.model.moe is None else run.model.moe.experts,
        passes=passes,
        qk_clip=run.optimizer.muon.qk_clip,
        has_float8=run.float8.is_used,
        capacities=capacity_trackers(model.modules),
    )


def train_step(
    model: RankModel,
    optimizer: MasterAdamW,
    batch: Batch,
    rule: StepRule,
    learning_rate: float,
    stop: StopRequest | None = None,
    enter: EnterPhase = untimed,
    pulse: RankPulse = NO_PULSE,
) -> StepResult:
    """Train on one global batch, unless its loss or gradients are not finite. All ranks call it together.

    `batch` has this rank's rows, on the CPU. `stop` is read when the passes are launched, and sent to the other ranks,
    as is `pulse`.
    Raises a DataError if no token is counted, and a DeviceError if a GPU of a node did not send its rows in time.
    """
    # 1. Count the labels of the global batch, cut our rows, copy them to the device.
    with span(Span.DATA):
        whole = cut(batch, rule.cut)

    # 2. to 4. Gradients and figures, repeated if rows had no room. The rows of a layer depend on the rows that earlier
    # layers left out, so buffers may have to grow twice.
    result, loads = _differentiate(model, optimizer, whole, rule, stop, enter, pulse)
    left_out = result.left_out
    while result.left_out:
        make_room(rule.capacities)
        result, loads = _differentiate(model, optimizer, whole, rule, stop, enter, pulse)
    result = replace(result, left_out=left_out)
    if result.has_failed or not result.is_finite:
        return result

    # 5. Clip and update, 6. move the expert bias: once a global batch.
    enter(Span.OPTIMIZER)
    with span(Span.OPTIMIZER):
        factors = clip_factors(model.modules, rule.qk_clip, model.axes.dense_data) if rule.qk_clip else NO_FACTORS
        optimizer.step(learning_rate, clip_divisor(result.gradient_norm, rule.clip_norm), factors)
        if rule.has_float8:
            refresh_float8(model.modules)
    with span(Span.BALANCE):
        update_expert_bias(model.modules, loads)
    return result


def _differentiate(
    model: RankModel,
    optimizer: MasterAdamW,
    whole: GlobalBatch,
    rule: StepRule,
    stop: StopRequest | None,
    enter: EnterPhase,
    pulse: RankPulse,
) -> tuple[StepResult, list[LayerLoad]]:
    # 2. Forward and backward, micro-batch by micro-batch.
    enter(Span.OPTIMIZER)
    with span(Span.ZERO):
        reset_meters(model.modules)
        optimizer.zero_gradients(before_passes=True)
    losses = rule.passes(model, whole, rule.loss, enter)

    # 3. Sum over ranks.
    enter(Span.REDUCE)
    with span(Span.REDUCE):
        optimizer.reduce_gradients()
    with span(Span.CLIP):
        norm = optimizer.gradient_norm()

    # 4. Read everything in one copy, for which the host waits.
    with span(Span.READ):
        figures = _figures_of(model, losses, rule, _votes(model, stop), pulse)
        if model.axes.world.group is not None:
            figures = _summed(figures, model)
        result, is_late = _read(figures, norm, rule.moe_layers, model.axes.grid.expert)
    if is_late:
        refuse_late(model)
    loads = [
        LayerLoad(layer, figures.slots_LE[row], figures.dropped_L[row], figures.auxiliary_loss_L[row])
        for row, layer in enumerate(rule.moe_layers)
    ]
    return result, loads


def refuse_late(model: RankModel) -> NoReturn:
    """Raise a DeviceError: a rank timed out waiting for rows of its node's GPUs, so the results of all ranks are wrong.

    The error names the rank if it is this one.
    """
    if model.buffers is not None:
        model.buffers.check()
    raise DeviceError("another rank timed out waiting for the GPUs of its node", fix="read the message of that rank")


@dataclass(frozen=True)
class _Figures:
    """Figures of the global batch, or this rank's part of them; L layers with experts of all ranks, W ranks."""

    losses: Tensor  # 1 + depths: main loss, then those of multi-token prediction
    overflow_rows: Tensor  # scalar, rows without room
    votes: Tensor  # [3], ranks with a stop request, late ones, those that cannot go on
    rank_stats_WR: Tensor  # peak memory of each rank, slots that its plans of replicas needed, its pulse
    dropped_L: Tensor
    auxiliary_loss_L: Tensor
    slots_LE: Tensor
    plans_LP: Tensor  # by `PlanFact`; zero without replicas

    def flat(self) -> Tensor:
        """All figures in a row; float64 holds counts up to 2**53 exactly."""
        return torch.cat([figure.detach().double().reshape(-1) for figure in vars(self).values()])

    def from_flat(self, row: Tensor) -> "_Figures":
        """Figures of these shapes, as `flat` puts them in a row."""
        shapes = [figure.shape for figure in vars(self).values()]
        parts = row.split([shape.numel() for shape in shapes])
        return _Figures(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


def _votes(model: RankModel, stop: StopRequest | None) -> Tensor:
    votes = torch.zeros(3, dtype=torch.float64, device=model.device)
    # Filled on the device: a copy from the host would wait for the device.
    votes[0].fill_(stop is not None and stop.signal is not None)
    if model.buffers is not None:
        votes[1] = model.buffers.late.bool()
    votes[2].fill_(stop is not None and stop.has_failed)
    return votes


def _rank_stats(model: RankModel, loads: Sequence[LayerLoad], pulse: RankPulse) -> Tensor:
    world, stats = model.axes.world, (peak_memory_bytes(model.device), 0, *pulse)
    stats_WR = torch.zeros(world.size, len(stats), dtype=torch.float64, device=model.device)
    for column, figure in enumerate(stats):
        if figure:
            stats_WR[world.rank, column].fill_(figure)
    if needed := [load.plans[PlanFact.SLOTS_NEEDED] for load in loads if load.plans is not None]:
        stats_WR[world.rank, 1] = torch.stack(needed).max()
    return stats_WR


def _figures_of(model: RankModel, losses: Tensor, rule: StepRule, votes: Tensor, pulse: RankPulse) -> _Figures:
    loads, capacities = moe_loads(model.modules), rule.capacities

    def column(name: str, *shape: int) -> Tensor:
        """A figure of all layers; those on other stages are zero."""
        figures = {load.layer: figure for load in loads if (figure := vars(load)[name]) is not None}
        zero = next((torch.zeros_like(figure) for figure in figures.values()), losses.new_zeros(shape))
        return torch.stack([figures.get(layer, zero) for layer in rule.moe_layers] or [zero])[: len(rule.moe_layers)]

    return _Figures(
        losses=losses,
        overflow_rows=rows_left_out(capacities) if capacities else losses.new_zeros((), dtype=torch.int64),
        votes=votes,
        rank_stats_WR=_rank_stats(model, loads, pulse),
        dropped_L=column("dropped"),
        auxiliary_loss_L=column("auxiliary_loss"),
        slots_LE=column("slots_E", rule.experts),
        plans_LP=column("plans", len(PlanFact)),
    )


def _summed(figures: _Figures, model: RankModel) -> _Figures:
    if model.axes.tensor.rank > 0:  # ranks that share the vocabulary have the same loss; one of them contributes it
        figures = replace(figures, losses=torch.zeros_like(figures.losses))
    row = figures.flat()
    dist.all_reduce(row, group=model.axes.world.group)
    return figures.from_flat(row)


def _read(figures: _Figures, norm: Tensor, moe_layers: Sequence[int], groups: int) -> tuple[StepResult, bool]:
    """Copy the figures to the host in one copy; also returns whether a rank timed out."""
    *values, gradient_norm = torch.cat((figures.flat(), norm.detach().double().reshape(1))).tolist()
    parts = np.split(np.array(values), np.cumsum([figure.numel() for figure in vars(figures).values()])[:-1])
    host = {name: part.reshape(figure.shape) for (name, figure), part in zip(vars(figures).items(), parts, strict=True)}
    main, *depths = host["losses"].reshape(-1).tolist()
    wants_stop, is_late, has_failed = (votes > 0 for votes in host["votes"].tolist())
    peaks, needed, *pulses = host["rank_stats_WR"].T.tolist()
    by_layer = (moe_layers, *(host[name] for name in ("slots_LE", "dropped_L", "auxiliary_loss_L", "plans_LP")))
    layers = tuple(
        LayerReport(
            layer=layer,
            slots=tuple(map(int, slots_E.tolist())),
            dropped=int(dropped),
            auxiliary_loss=float(auxiliary_loss),
            balance=balance_report(plans.tolist(), groups),
        )
        for layer, slots_E, dropped, auxiliary_loss, plans in zip(*by_layer, strict=True)
    )
    result = StepResult(
        loss=main,
        mtp_losses=tuple(depths),
        gradient_norm=gradient_norm,
        layers=layers,
        peak_memory_bytes=int(max(peaks)),
        wants_stop=wants_stop,
        left_out=int(host["overflow_rows"]),
        pulses=tuple(RankPulse(*pulse) for pulse in zip(*pulses, strict=True)),
        slots_needed=int(max(needed)),
        has_failed=has_failed,
    )
    return result, is_late


def balance_report(facts: Sequence[float], groups: int) -> BalanceReport | None:
    """The report of a layer's plans, whose facts are summed over all ranks; None without one."""
    plans, rows = facts[PlanFact.PLANS], max(facts[PlanFact.ROWS], 1)
    if not plans:
        return None
    before, after = (facts[fullest] * groups / rows for fullest in (PlanFact.FULLEST_HOME, PlanFact.FULLEST))
    return BalanceReport(before=before, after=after, replicas=facts[PlanFact.REPLICAS] / plans)


@torch.no_grad()
def evaluate(model: RankModel, rows: EvaluationRows, cut: CutRule, rule: LossRule) -> HeldOutLoss:
    """Held-out loss of a model. Weights, expert loads and mode stay the same. All ranks call it together.

    Raises a DeviceError if a GPU of a node did not send its rows in time.
    """
    begin = time.perf_counter()
    model.train(False)  # routers do not count load
    nats = held_out_nats(model, [read(batch, cut) for batch in rows.batches], rule)
    model.train()
    is_late = torch.zeros_like(nats) if model.buffers is None else model.buffers.late.bool().to(nats.dtype)
    world = model.axes.world
    # Ranks that share the vocabulary have the same sum; one of them contributes it.
    figures = torch.stack((nats if model.axes.tensor.rank == 0 else torch.zeros_like(nats), is_late))
    if world.group is not None:
        dist.all_reduce(figures, group=world.group)
    total, late = figures.tolist()
    if late:
        refuse_late(model)
    return HeldOutLoss(
        loss=total / rows.tokens,
        bits_per_byte=total / math.log(2) / rows.text_bytes,
        tokens=rows.tokens,
        seconds=time.perf_counter() - begin,
    )
