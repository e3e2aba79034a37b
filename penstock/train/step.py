"""One optimizer step: global batch in, updated parameters and plain numbers out.

The host waits for the device once: when all gradients are there, loss, norm and expert loads are read in one copy. Only
then is it decided whether to update. So a step that is not finite leaves parameters, moments and expert bias exactly as
they were, and on one device the update's kernels still run while the host prepares the next step; many ranks agree on
peak memory and on a stop afterwards, and wait for that.

A step in which rows found no room at their experts, on any rank, is made again with room for all
(penstock/moe/dispatch/room.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.config.run import Run
from penstock.data.batch import Batch
from penstock.models.rank_model import RankModel
from penstock.moe.balance import LayerLoad, layer_loads, reset_loads, update_expert_bias
from penstock.moe.dispatch.room import forget_left_out, room_for_all, rows_left_out
from penstock.parallel.axes import Axis
from penstock.train.global_batch import CutRule, GlobalBatch, cut
from penstock.train.loss import LossRule, loss_rule
from penstock.train.observer import LayerReport
from penstock.train.optimizer import MasterAdamW
from penstock.train.passes import forward_backward


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """How a step is made.

    Attributes:
        cut: how a rank's rows are cut.
        clip_norm: largest gradient norm; 0 does not clip.
        loss: what is added to what.
        moe_layers: numbers of all layers with experts, of every rank.
        experts: of such a layer.
    """

    cut: CutRule
    clip_norm: float
    loss: LossRule
    moe_layers: tuple[int, ...]
    experts: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step gave.

    Attributes:
        loss: mean over the counted tokens of the global batch.
        mtp_losses: the same for each multi-token prediction depth.
        gradient_norm: before clipping.
        layers: load of each MoE layer, before the expert bias moved.
        left_out: rows that found no room at first, over all ranks and layers; above 0 the step was made twice.
    """

    loss: float
    mtp_losses: tuple[float, ...]
    gradient_norm: float
    layers: tuple[LayerReport, ...]
    left_out: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether the step was applied; else everything is as before it."""
        return all(map(math.isfinite, (self.loss, *self.mtp_losses, self.gradient_norm)))


def step_rule(run: Run, model: RankModel, device: torch.device) -> StepRule:
    """The rule of a run on one rank."""
    axes = model.axes
    cut_rule = CutRule(
        micro_batch=run.training.micro_batch,
        depths=run.model.mtp_layers,
        device=device,
        data=axes.data,
        places=model.places,
        sees_row=model.context_method == "ulysses",
    )
    first = run.model.layers if run.model.moe is None else run.model.dense_layers
    last = run.model.layers if run.model.moe is None else run.model.layers + run.model.mtp_layers
    return StepRule(
        cut=cut_rule,
        clip_norm=run.training.clip_norm,
        loss=loss_rule(run, axes),
        moe_layers=tuple(range(first, last)),
        experts=0 if run.model.moe is None else run.model.moe.experts,
    )


def train_step(
    model: RankModel, optimizer: MasterAdamW, batch: Batch, rule: StepRule, learning_rate: float
) -> StepResult:
    """Train on one global batch, unless its loss or gradients are not finite. All ranks make the step together.

    Args:
        model: in training mode.
        optimizer: of the model's parameters.
        batch: our rows of the global batch, on the CPU.
        rule: how.
        learning_rate: of this step.

    Returns:
        Figures of the global batch, the same on all ranks.

    Raises:
        DataError: no token of the batch is counted.
    """
    # 1. Count the labels of the global batch, cut our rows, copy them to the device.
    whole = cut(batch, rule.cut)

    # 2. to 4. Gradients and figures, once more if some rows found no room.
    result, norm, loads = _differentiate(model, optimizer, whole, rule)
    if result.left_out:
        left_out = result.left_out
        with room_for_all(model.modules):
            result, norm, loads = _differentiate(model, optimizer, whole, rule)
        result = replace(result, left_out=left_out)
    if not result.is_finite:
        return result

    # 5. Clip, 6. update, 7. move the expert bias: once a global batch.
    optimizer.clip(norm, rule.clip_norm)
    optimizer.step(learning_rate)
    update_expert_bias(model.modules, loads)
    return result


def _differentiate(
    model: RankModel, optimizer: MasterAdamW, whole: GlobalBatch, rule: StepRule
) -> tuple[StepResult, Tensor, list[LayerLoad]]:
    """Gradients of a global batch; returns the step's figures, and of these what goes on to the update."""
    # 2. Forward and backward, micro-batch by micro-batch.
    reset_loads(model.modules)
    forget_left_out(model.modules)
    optimizer.zero_gradients()
    losses = forward_backward(model, whole, rule.loss)

    # 3. Sum over ranks.
    optimizer.reduce_gradients()
    norm = optimizer.gradient_norm()
    figures = _sum_figures(losses, model, rule)

    # 4. Read everything in one copy.
    result = _read(figures, norm)
    if model.buffers is not None:
        model.buffers.check()
    return result, norm, figures.loads


def largest(values: Sequence[float], world: Axis, device: torch.device) -> list[float]:
    """The largest of each value over all ranks, such as peak memory, or a wish to stop as 0 or 1. Waits for them."""
    if world.group is None:
        return list(values)
    highest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=world.group)
    return highest.tolist()


@dataclass(frozen=True)
class _Figures:
    """Of the global batch, on the device.

    Attributes:
        losses: main loss, then those of multi-token prediction.
        left_out: scalar, rows that found no room.
        loads: of all MoE layers.
    """

    losses: Tensor
    left_out: Tensor
    loads: list[LayerLoad]


def _sum_figures(losses: Tensor, model: RankModel, rule: StepRule) -> _Figures:
    """Figures of the global batch, from those of every rank, in one all-reduce.

    float64 holds counts up to 2**53 exactly.
    """
    loads = layer_loads(model.modules)
    left_out = rows_left_out(model.modules, losses.device)
    axes = model.axes
    if axes.world.group is None:
        return _Figures(losses, left_out, loads)
    # Ranks that share the vocabulary have the same loss; one of them says it.
    losses = losses.double() if axes.tensor.rank == 0 else torch.zeros_like(losses, dtype=torch.float64)
    table = losses.new_zeros(len(rule.moe_layers), 2 + rule.experts)
    for load in loads:
        row = table[rule.moe_layers.index(load.layer)]
        row[0], row[1], row[2:] = load.dropped, load.auxiliary_loss, load.slots_E
    figures = torch.cat((losses, left_out.double()[None], table.flatten()))
    dist.all_reduce(figures, group=axes.world.group)
    losses, left_out, table = figures.split((losses.numel(), 1, table.numel()))
    rows = table.view(len(rule.moe_layers), 2 + rule.experts)
    summed = [LayerLoad(layer, row[2:], row[0], row[1]) for layer, row in zip(rule.moe_layers, rows, strict=True)]
    return _Figures(losses, left_out, summed)


def _read(figures: _Figures, norm: Tensor) -> StepResult:
    """Copy a step's figures to the host. float64 holds float32 values, and counts up to 2**53, exactly."""
    pieces = [figures.losses, norm, figures.left_out]
    for load in figures.loads:
        pieces += [load.dropped, load.auxiliary_loss, load.slots_E]
    values = iter(torch.cat([piece.detach().double().reshape(-1) for piece in pieces]).tolist())

    def take(count: int) -> list[float]:
        return [next(values) for _ in range(count)]

    main, *depths = take(figures.losses.numel())
    gradient_norm, left_out = take(2)
    layers = []
    for load in figures.loads:
        dropped, auxiliary_loss = take(2)
        slots = tuple(map(int, take(load.slots_E.numel())))
        layers.append(LayerReport(layer=load.layer, slots=slots, dropped=int(dropped), auxiliary_loss=auxiliary_loss))
    return StepResult(
        loss=main,
        mtp_losses=tuple(depths),
        gradient_norm=gradient_norm,
        layers=tuple(layers),
        left_out=int(left_out),
    )
