"""One optimizer step, and the evaluation of the model between steps.

Outside of MoE layers, which may read row counts at `dispatch.sync_free` 0 and 1, the host waits for the device once a
step: after the last backward pass, loss, norm and expert loads are read in one copy. The update is decided after that,
so a step that is not finite leaves parameters, moments and expert bias unchanged, and the kernels of the update still
run while the host prepares the next step. Peak memory and stop requests of the ranks travel with these figures.

If the rows of any rank exceeded the expert buffers, the step is repeated with larger ones
(penstock/moe/dispatch/row_capacity.py).

Evaluation uses the same held-out rows every time. Its sums over counted tokens are float64 and divided once, so the
result does not depend on the batch size. Expert buffers then hold all rows.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import DeviceError
from penstock.base.spans import Span
from penstock.config.run import Run
from penstock.data.batch import Batch
from penstock.data.evaluation import EvaluationRows
from penstock.kernels.replica_plan import PlanFact
from penstock.models.parameters import refresh_float8
from penstock.models.qk_clip import clip_factors, reset_logits
from penstock.models.rank_model import RankModel
from penstock.moe.balance import LayerLoad
from penstock.moe.dispatch.balanced import replica_meters
from penstock.moe.dispatch.row_capacity import forget_left_out, make_room, rows_left_out
from penstock.moe.layer import moe_loads
from penstock.moe.router import reset_loads, update_expert_bias
from penstock.parallel.launch.process import peak_memory_bytes
from penstock.parallel.spans import EnterPhase, span, untimed
from penstock.train.global_batch import CutRule, GlobalBatch, cut, read
from penstock.train.loss import LossRule, loss_rule
from penstock.train.observer import BalanceReport, HeldOutLoss, LayerReport
from penstock.train.optimizer import NO_FACTORS, MasterAdamW, clip_divisor
from penstock.train.passes import forward_backward, held_out_nats
from penstock.train.stop import StopRequest
from penstock.train.stragglers import RankPulse

NO_PULSE = RankPulse()
_VOTES = 3  # words of all ranks: those with a stop request, late ones, those that cannot go on
_OF_RANK = 2 + len(NO_PULSE)  # words of each rank: peak memory, slots of replicas, pulse

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


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Figures of a step, the same on all ranks."""

    loss: float  # mean over the counted tokens of the global batch
    mtp_losses: tuple[float, ...]  # the same for each multi-token prediction depth
    gradient_norm: float  # before clipping
    layers: tuple[LayerReport, ...]  # load of each MoE layer, before the update of the expert bias
    peak_memory_bytes: int  # maximum over ranks when the passes were launched; an update shows in the next step
    wants_stop: bool  # a rank had received a stop request by then
    left_out: int  # rows without room in the first attempt, over all ranks and layers; above 0 the step was repeated
    pulses: tuple[RankPulse, ...]  # of each rank, of earlier steps
    slots_needed: int = 0  # replicas of a rank with which every plan would have kept its bound
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
        make_room(model.modules)
        result, loads = _differentiate(model, optimizer, whole, rule, stop, enter, pulse)
    result = replace(result, left_out=left_out)
    if result.has_failed or not result.is_finite:
        return result

    # 5. Clip and update, 6. move the expert bias: once a global batch.
    enter(Span.OPTIMIZER)
    with span(Span.OPTIMIZER):
        factors = clip_factors(model.modules, rule.qk_clip, model.axes.dense_data) if rule.qk_clip else NO_FACTORS
        optimizer.step(learning_rate, clip_divisor(result.gradient_norm, rule.clip_norm), factors)
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
        reset_loads(model.modules)
        forget_left_out(model.modules)
        if rule.qk_clip:
            reset_logits(model.modules)
        for meter in replica_meters(model.modules):
            meter.reset()
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
        figures = _sum_figures(losses, _own_words(model, stop, pulse), model, rule)
        result, is_late = _read(figures, norm, model.axes.grid.expert)
    if is_late:
        refuse_late(model)
    return result, figures.loads


def refuse_late(model: RankModel) -> NoReturn:
    """Raise a DeviceError: a rank timed out waiting for rows of its node's GPUs, so the results of all ranks are wrong.

    The error names the rank if it is this one.
    """
    if model.buffers is not None:
        model.buffers.check()
    raise DeviceError("another rank timed out waiting for the GPUs of its node", fix="read the message of that rank")


@dataclass(frozen=True)
class _Figures:
    """Figures of the global batch on the device."""

    losses: Tensor  # 1 + depths: main loss, then those of multi-token prediction
    left_out: Tensor  # scalar, rows without room
    loads: list[LayerLoad]
    words: Tensor  # see `_own_words`


def _own_words(model: RankModel, stop: StopRequest | None, pulse: RankPulse) -> Tensor:
    """This rank's part of the words of all: `_VOTES`, then `_OF_RANK` words of each rank.

    These are its peak memory, the slots that its plans of replicas needed, and its pulse. Float64.
    """
    world = model.axes.world
    words = torch.zeros(_VOTES + world.size * _OF_RANK, dtype=torch.float64, device=model.device)
    # Filled on the device: a copy from the host would wait for the device.
    words[0].fill_(stop is not None and stop.signal is not None)
    if model.buffers is not None:
        words[1] = model.buffers.late.bool()
    words[2].fill_(stop is not None and stop.has_failed)
    mine = words[_VOTES + world.rank * _OF_RANK :]
    for place, figure in zip((0, *range(2, _OF_RANK)), (peak_memory_bytes(model.device), *pulse), strict=True):
        mine[place].fill_(figure)
    if needed := [meter.facts[PlanFact.SLOTS_NEEDED] for meter in replica_meters(model.modules)]:
        mine[1] = torch.stack(needed).max()
    return words


def _sum_figures(losses: Tensor, words: Tensor, model: RankModel, rule: StepRule) -> _Figures:
    """Sum the figures of all ranks in one all-reduce. float64 holds counts up to 2**53 exactly."""
    loads = moe_loads(model.modules)
    left_out = rows_left_out(model.modules, losses.device)
    axes = model.axes
    if axes.world.group is None:
        return _Figures(losses, left_out, loads, words)  # one rank: its figures are those of the global batch
    # Ranks that share the vocabulary have the same loss; one of them contributes it.
    losses = losses.double() if axes.tensor.rank == 0 else torch.zeros_like(losses, dtype=torch.float64)
    first = 2 + len(PlanFact)
    table = losses.new_zeros(len(rule.moe_layers), first + rule.experts)  # rows of layers on other stages stay zero
    for load in loads:
        row = table[rule.moe_layers.index(load.layer)]
        row[0], row[1], row[first:] = load.dropped, load.auxiliary_loss, load.slots_E
        if load.plans is not None:
            row[2:first] = load.plans
    figures = torch.cat((losses, left_out.double()[None], words, table.flatten()))
    dist.all_reduce(figures, group=axes.world.group)
    losses, left_out, words, table = figures.split((losses.numel(), 1, words.numel(), table.numel()))
    rows = table.view(len(rule.moe_layers), first + rule.experts)
    summed = [
        LayerLoad(layer, row[first:], row[0], row[1], row[2:first])
        for layer, row in zip(rule.moe_layers, rows, strict=True)
    ]
    return _Figures(losses, left_out, summed, words)


def _read(figures: _Figures, norm: Tensor, groups: int) -> tuple[StepResult, bool]:
    """Copy the figures to the host; also returns whether a rank timed out."""
    pieces = [figures.losses, norm, figures.left_out, figures.words]
    for load in figures.loads:
        pieces += [load.dropped, load.auxiliary_loss, load.slots_E]
        pieces += [] if load.plans is None else [load.plans]
    values = iter(torch.cat([piece.detach().double().reshape(-1) for piece in pieces]).tolist())

    def take(count: int) -> list[float]:
        return [next(values) for _ in range(count)]

    main, *depths = take(figures.losses.numel())
    gradient_norm, left_out, wishes, late, failed = take(2 + _VOTES)
    ranks = [take(_OF_RANK) for _ in range((figures.words.numel() - _VOTES) // _OF_RANK)]
    layers = []
    for load in figures.loads:
        dropped, auxiliary_loss = take(2)
        slots = tuple(map(int, take(load.slots_E.numel())))
        balance = None if load.plans is None else balance_report(take(len(PlanFact)), groups)
        layers.append(
            LayerReport(
                layer=load.layer,
                slots=slots,
                dropped=int(dropped),
                auxiliary_loss=auxiliary_loss,
                balance=balance,
            )
        )
    result = StepResult(
        loss=main,
        mtp_losses=tuple(depths),
        gradient_norm=gradient_norm,
        layers=tuple(layers),
        peak_memory_bytes=int(max(peak for peak, *_ in ranks)),
        wants_stop=wishes > 0,
        left_out=int(left_out),
        pulses=tuple(RankPulse(*pulse) for _, _, *pulse in ranks),
        slots_needed=int(max(needed for _, needed, *_ in ranks)),
        has_failed=failed > 0,
    )
    return result, late > 0


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
