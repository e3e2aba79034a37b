"""One optimizer step: global batch in, updated parameters and plain numbers out.

Outside of MoE layers, which at `dispatch.sync_free` 0 and 1 may read how many rows there are, the host waits for the
device once: when all gradients are there, loss, norm and expert loads are read in one copy. Only then is it decided
whether to update. So a step that is not finite leaves parameters, moments and expert bias exactly as they were, and the
update's kernels still run while the host prepares the next step. What else ranks must tell each other, their memory and
whether somebody asked them to stop, is summed and read with these figures.

A step in which rows found no room at their experts, on any rank, is made again with more of it
(penstock/moe/dispatch/row_capacity.py).
"""

import math
import time
from collections.abc import Callable
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
from penstock.models.parameters import refresh_float8
from penstock.models.rank_model import RankModel
from penstock.moe.balance import LayerLoad, layer_loads, reset_loads, update_expert_bias
from penstock.moe.dispatch.row_capacity import forget_left_out, make_room, rows_left_out
from penstock.parallel.launch.process import peak_memory_bytes
from penstock.parallel.spans import EnterPhase, span, untimed
from penstock.train.global_batch import CutRule, GlobalBatch, cut, read
from penstock.train.loss import LossRule, loss_rule
from penstock.train.observer import HeldOutLoss, LayerReport
from penstock.train.optimizer import MasterAdamW, clip_divisor
from penstock.train.passes import forward_backward, held_out_nats
from penstock.train.stop import StopRequest

Passes = Callable[[RankModel, GlobalBatch, LossRule, EnterPhase], Tensor]
"""Makes the passes of a global batch, as `forward_backward` does."""


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """How a step is made.

    Attributes:
        cut: how a rank's rows are cut.
        clip_norm: largest gradient norm; 0 does not clip.
        loss: what is added to what.
        moe_layers: numbers of all layers with experts, of every rank.
        experts: of such a layer.
        passes: makes the forward and backward passes.
    """

    cut: CutRule
    clip_norm: float
    loss: LossRule
    moe_layers: tuple[int, ...]
    experts: int
    passes: Passes = forward_backward


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step gave.

    Attributes:
        loss: mean over the counted tokens of the global batch.
        mtp_losses: the same for each multi-token prediction depth.
        gradient_norm: before clipping.
        layers: load of each MoE layer, before the expert bias moved.
        peak_memory_bytes: the most that a rank had taken when its passes were launched; an update shows in the next.
        wants_stop: a rank had been asked to stop by then. All ranks hear the same, so all stop after the same step.
        left_out: rows that found no room at first, over all ranks and layers; above 0 the step was made twice.
    """

    loss: float
    mtp_losses: tuple[float, ...]
    gradient_norm: float
    layers: tuple[LayerReport, ...]
    peak_memory_bytes: int
    wants_stop: bool
    left_out: int

    @property
    def is_finite(self) -> bool:
        """Whether the step was applied; else everything is as before it."""
        return all(map(math.isfinite, (self.loss, *self.mtp_losses, self.gradient_norm)))


def step_rule(run: Run, model: RankModel, device: torch.device, passes: Passes = forward_backward) -> StepRule:
    """The rule of a run on one rank."""
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
    )


def train_step(
    model: RankModel,
    optimizer: MasterAdamW,
    batch: Batch,
    rule: StepRule,
    learning_rate: float,
    stop: StopRequest | None = None,
    enter: EnterPhase = untimed,
) -> StepResult:
    """Train on one global batch, unless its loss or gradients are not finite. All ranks make the step together.

    Args:
        model: in training mode.
        optimizer: of the model's parameters.
        batch: our rows of the global batch, on the CPU.
        rule: how.
        learning_rate: of this step.
        stop: asked when the passes are launched, for the other ranks to hear; None if nobody can ask.
        enter: is told when phases begin.

    Returns:
        Figures of the global batch, the same on all ranks.

    Raises:
        DataError: no token of the batch is counted.
        DeviceError: a GPU of a node did not come in time to where others waited for its rows.
    """
    # 1. Count the labels of the global batch, cut our rows, copy them to the device.
    with span(Span.DATA):
        whole = cut(batch, rule.cut)

    # 2. to 4. Gradients and figures; again if some rows found no room. What comes to a layer depends on what the layers
    # before it left out, so its room may have to grow twice.
    result, loads = _differentiate(model, optimizer, whole, rule, stop, enter)
    left_out = result.left_out
    while result.left_out:
        make_room(model.modules)
        result, loads = _differentiate(model, optimizer, whole, rule, stop, enter)
    result = replace(result, left_out=left_out)
    if not result.is_finite:
        return result

    # 5. Clip and update, 6. move the expert bias: once a global batch.
    enter(Span.OPTIMIZER)
    with span(Span.OPTIMIZER):
        optimizer.step(learning_rate, clip_divisor(result.gradient_norm, rule.clip_norm))
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
) -> tuple[StepResult, list[LayerLoad]]:
    """Gradients of a global batch; returns the step's figures, and of these what the expert bias needs."""
    # 2. Forward and backward, micro-batch by micro-batch.
    enter(Span.OPTIMIZER)
    with span(Span.ZERO):
        reset_loads(model.modules)
        forget_left_out(model.modules)
        optimizer.zero_gradients()
    losses = rule.passes(model, whole, rule.loss, enter)

    # 3. Sum over ranks.
    enter(Span.REDUCE)
    with span(Span.REDUCE):
        optimizer.reduce_gradients()
    with span(Span.CLIP):
        norm = optimizer.gradient_norm()

    # 4. Read everything in one copy.
    with span(Span.READ):
        figures = _sum_figures(losses, _own_words(model, stop), model, rule)
        result, is_late = _read(figures, norm)
    if is_late:
        refuse_late(model)
    return result, figures.loads


def refuse_late(model: RankModel) -> NoReturn:
    """Some rank waited in vain for rows from the GPUs of its node, so what was computed is wrong everywhere.

    Raises:
        DeviceError: always; it says which rank, if it was this one that waited.
    """
    if model.buffers is not None:
        model.buffers.check()
    raise DeviceError("another rank waited in vain for the GPUs of its node", fix="look at what that rank says")


@dataclass(frozen=True)
class _Figures:
    """Of the global batch, on the device.

    Attributes:
        losses: main loss, then those of multi-token prediction.
        left_out: scalar, rows that found no room.
        loads: of all MoE layers.
        words: float64, 2 + ranks: how many ranks were asked to stop, how many waited in vain for other GPUs, and each
            one's peak memory.
    """

    losses: Tensor
    left_out: Tensor
    loads: list[LayerLoad]
    words: Tensor


def _own_words(model: RankModel, stop: StopRequest | None) -> Tensor:
    """This rank's summand of `_Figures.words`."""
    world = model.axes.world
    words = torch.zeros(2 + world.size, dtype=torch.float64, device=model.device)
    # Filled on the device: a copy from the host would wait for it.
    words[0].fill_(stop is not None and stop.signal is not None)
    if model.buffers is not None:
        words[1] = model.buffers.late.bool()
    words[2 + world.rank].fill_(peak_memory_bytes(model.device))
    return words


def _sum_figures(losses: Tensor, words: Tensor, model: RankModel, rule: StepRule) -> _Figures:
    """Figures of the global batch, from those of every rank, in one all-reduce.

    float64 holds counts up to 2**53 exactly.
    """
    loads = layer_loads(model.modules)
    left_out = rows_left_out(model.modules, losses.device)
    axes = model.axes
    if axes.world.group is None:
        return _Figures(losses, left_out, loads, words)
    # Ranks that share the vocabulary have the same loss; one of them says it.
    losses = losses.double() if axes.tensor.rank == 0 else torch.zeros_like(losses, dtype=torch.float64)
    table = losses.new_zeros(len(rule.moe_layers), 2 + rule.experts)
    for load in loads:
        row = table[rule.moe_layers.index(load.layer)]
        row[0], row[1], row[2:] = load.dropped, load.auxiliary_loss, load.slots_E
    figures = torch.cat((losses, left_out.double()[None], words, table.flatten()))
    dist.all_reduce(figures, group=axes.world.group)
    losses, left_out, words, table = figures.split((losses.numel(), 1, words.numel(), table.numel()))
    rows = table.view(len(rule.moe_layers), 2 + rule.experts)
    summed = [LayerLoad(layer, row[2:], row[0], row[1]) for layer, row in zip(rule.moe_layers, rows, strict=True)]
    return _Figures(losses, left_out, summed, words)


def _read(figures: _Figures, norm: Tensor) -> tuple[StepResult, bool]:
    """Copy a step's figures to the host, and whether any rank waited in vain.

    float64 holds float32 values, and counts up to 2**53, exactly.
    """
    pieces = [figures.losses, norm, figures.left_out, figures.words]
    for load in figures.loads:
        pieces += [load.dropped, load.auxiliary_loss, load.slots_E]
    values = iter(torch.cat([piece.detach().double().reshape(-1) for piece in pieces]).tolist())

    def take(count: int) -> list[float]:
        return [next(values) for _ in range(count)]

    main, *depths = take(figures.losses.numel())
    gradient_norm, left_out, wishes, late = take(4)
    peaks = take(figures.words.numel() - 2)
    layers = []
    for load in figures.loads:
        dropped, auxiliary_loss = take(2)
        slots = tuple(map(int, take(load.slots_E.numel())))
        layers.append(LayerReport(layer=load.layer, slots=slots, dropped=int(dropped), auxiliary_loss=auxiliary_loss))
    result = StepResult(
        loss=main,
        mtp_losses=tuple(depths),
        gradient_norm=gradient_norm,
        layers=tuple(layers),
        peak_memory_bytes=int(max(peaks)),
        wants_stop=wishes > 0,
        left_out=int(left_out),
    )
    return result, late > 0


@torch.no_grad()
def evaluate(model: RankModel, rows: EvaluationRows, cut: CutRule, rule: LossRule) -> HeldOutLoss:
    """Measure a model. Its weights, expert loads and mode are what they were before. All ranks measure together.

    Args:
        model: in training mode.
        rows: our held-out rows on the CPU, with the text that all ranks' rows stand for.
        cut: how rows are cut.
        rule: of the loss.

    Raises:
        DeviceError: a GPU of a node did not come in time to where others waited for its rows.
    """
    begin = time.perf_counter()
    model.train(False)  # routers do not count load
    nats = held_out_nats(model, [read(batch, cut) for batch in rows.batches], rule)
    model.train()
    is_late = torch.zeros_like(nats) if model.buffers is None else model.buffers.late.bool().to(nats.dtype)
    world = model.axes.world
    # Ranks that share the vocabulary have the same sum; one of them says it.
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
