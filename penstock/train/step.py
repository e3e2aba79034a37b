"""One optimizer step: global batch in, updated parameters and plain numbers out.

The host waits for the device once: when all gradients are there, loss, norm and expert loads are read in one copy. Only
then is it decided whether to update. So a step that is not finite leaves parameters, moments and expert bias exactly as
they were, and the update's kernels still run while the host prepares the next step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.config.run import Run
from penstock.data.batch import Batch
from penstock.models.decoder import Decoder
from penstock.moe.balance import LayerLoad, layer_loads, reset_loads, update_expert_bias
from penstock.train.loss import LossRule, cut, loss_rule, model_loss
from penstock.train.observer import LayerReport
from penstock.train.optimizer import MasterAdamW


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """How a step is made.

    Attributes:
        micro_batch: rows of one forward pass.
        clip_norm: largest gradient norm; 0 does not clip.
        loss: what is added to what.
    """

    micro_batch: int
    clip_norm: float
    loss: LossRule


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step gave.

    Attributes:
        loss: mean over the counted tokens of the global batch.
        mtp_losses: the same for each multi-token prediction depth.
        gradient_norm: before clipping.
        layers: load of each MoE layer, before the expert bias moved.
    """

    loss: float
    mtp_losses: tuple[float, ...]
    gradient_norm: float
    layers: tuple[LayerReport, ...]

    @property
    def is_finite(self) -> bool:
        """Whether the step was applied; else everything is as before it."""
        return all(map(math.isfinite, (self.loss, *self.mtp_losses, self.gradient_norm)))


def step_rule(run: Run) -> StepRule:
    """The rule of a run."""
    training = run.training
    return StepRule(micro_batch=training.micro_batch, clip_norm=training.clip_norm, loss=loss_rule(run))


def train_step(
    model: Decoder, optimizer: MasterAdamW, batch: Batch, rule: StepRule, learning_rate: float
) -> StepResult:
    """Train on one global batch, unless its loss or gradients are not finite.

    Args:
        model: in training mode.
        optimizer: of the model's parameters.
        batch: the global batch, on the CPU.
        rule: how.
        learning_rate: of this step.

    Raises:
        DataError: no token of the batch is counted.
    """
    # 1. Count the labels of the global batch, cut it, copy it to the device.
    whole = cut(batch, rule.micro_batch, rule.loss.depths, model.head_VD.device)

    # 2. Forward and backward, micro-batch by micro-batch.
    reset_loads(model)
    optimizer.zero_gradients()
    losses = []
    for micro_batch in whole.micro_batches:
        loss = model_loss(model, micro_batch, whole, rule.loss)
        loss.total.backward()
        losses.append(loss.parts)

    # 3. Read everything in one copy, and look at it.
    norm = optimizer.gradient_norm()
    result = _read(torch.stack(losses).sum(0), norm, layer_loads(model))
    if not result.is_finite:
        return result

    # 4. Clip, 5. update, 6. move the expert bias: once a global batch.
    optimizer.clip(norm, rule.clip_norm)
    optimizer.step(learning_rate)
    update_expert_bias(model)
    return result


def _read(losses: Tensor, norm: Tensor, loads: Sequence[LayerLoad]) -> StepResult:
    """Copy a step's figures to the host. float64 holds float32 values, and counts up to 2**53, exactly."""
    pieces = [losses, norm]
    for load in loads:
        pieces += [load.dropped, load.auxiliary_loss, load.slots_E]
    values = iter(torch.cat([piece.detach().double().reshape(-1) for piece in pieces]).tolist())

    def take(count: int) -> list[float]:
        return [next(values) for _ in range(count)]

    main, *depths = take(losses.numel())
    (gradient_norm,) = take(1)
    layers = []
    for load in loads:
        dropped, auxiliary_loss = take(2)
        slots = tuple(map(int, take(load.slots_E.numel())))
        layers.append(LayerReport(layer=load.layer, slots=slots, dropped=int(dropped), auxiliary_loss=auxiliary_loss))
    return StepResult(loss=main, mtp_losses=tuple(depths), gradient_norm=gradient_norm, layers=tuple(layers))
