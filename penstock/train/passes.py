"""Forward and backward passes over a global batch, by one decoder or a pipeline, with their losses; and evaluation.

The loss of a step is a mean over the counted tokens of its global batch. A mean of the micro-batches' means would
weight a token of a nearly empty micro-batch more. The counted tokens are known before the first forward pass, so each
micro-batch divides its own sums by them:

    main        sum over counted tokens / counted tokens
    depth k     the same k tokens further on, times mtp_weight / depths (arXiv 2412.19437, equation 25)

Summed over micro-batches, the gradients are those of one large batch, however it was cut. Balance losses are not
computed here: routers attach them to the graph, scaled by the share of the micro-batch.

Depth k predicts at each position the token k further on than the main loss does. With k = 1 and labels b c d e, the
labels become c d e -: positions behind the end of the row, or in another document, are not counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.base.spans import MICRO_BATCH, Span
from penstock.config.run import Run
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.models.decoder import Decoder, Hidden
from penstock.models.rank_model import RankModel
from penstock.parallel.axes import ALONE, Axes, Axis
from penstock.parallel.collectives import all_gather
from penstock.parallel.layer_context import Steps
from penstock.parallel.pipeline import StageCall
from penstock.parallel.spans import EnterPhase, span, untimed
from penstock.train.global_batch import GlobalBatch, MicroBatch


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """Factors of the loss."""

    depths: int  # of multi-token prediction
    mtp_weight: float  # factor on the mean over these depths
    z_weight: float  # factor on logsumexp(logits)**2 of each counted token
    chunk_tokens: int | None  # tokens whose logits exist at once; None leaves it to the kernel
    # Ranks that share the vocabulary; each computes the same loss, and its own part of the gradients.
    tensor: Axis = ALONE.tensor


class MicroLoss(NamedTuple):
    """Losses of one micro-batch, float32."""

    total: Tensor  # scalar to differentiate: this micro-batch's part of the step's loss
    # 1 + depths, detached, without factors, main loss first; the sum over micro-batches is the mean over the batch.
    parts: Tensor


def loss_rule(run: Run, axes: Axes = ALONE) -> LossRule:
    return LossRule(
        depths=run.model.mtp_layers,
        mtp_weight=run.training.mtp_weight,
        z_weight=run.training.z_loss_coef,
        chunk_tokens=run.kernels.loss_chunk or None,
        tensor=axes.tensor,
    )


def batch_loss(
    hidden: Hidden,
    head_VD: Tensor,
    labels: Sequence[Tensor],
    counted: Tensor,
    rule: LossRule,
    total_VD: Tensor | None = None,
    float8: Float8Rule | None = None,
) -> MicroLoss:
    """Losses of a micro-batch as parts of the losses of the global batch.

    Args:
        hidden: output of the decoder for this rank's positions.
        head_VD: output projection, or this rank's rows of it.
        labels: of the main loss, then of each depth, for the positions of all tensor-parallel ranks.
        counted: labels of the GLOBAL batch, see `GlobalBatch`.
        total_VD: float32 sum of the head's gradients, which backward adds to; None leaves it to autograd.
        float8: rule of the head's products; None computes them in 16 bits.
    """
    parts = []
    for depth, hidden_BSD in enumerate((hidden.main_BSD, *hidden.mtp)):
        whole_BSD = all_gather(hidden_BSD, rule.tensor, dim=1)  # S/tp positions of each rank -> S
        loss_sum = linear_cross_entropy(
            whole_BSD.flatten(0, 1),
            head_VD,
            labels[depth].flatten(),
            rule.z_weight,
            chunk_tokens=rule.chunk_tokens,
            group=rule.tensor.group,
            accumulate_into=total_VD,
            float8=float8,
        )
        # A depth beyond the length of all rows counts no token, and its sum is 0. `counted` is float64.
        parts.append((loss_sum / counted[depth].clamp(min=1)).to(loss_sum.dtype))
    total = parts[0]
    if rule.depths:
        total = total + rule.mtp_weight / rule.depths * torch.stack(parts[1:]).sum()
    return MicroLoss(total, torch.stack(parts).detach())


def model_loss(model: Decoder, batch: MicroBatch, counted: Tensor, rule: LossRule) -> MicroLoss:
    """Forward pass and losses of one micro-batch on a rank without pipeline; arguments as of `batch_loss`."""
    hidden = model(batch.reading)
    with span(Span.LOSS):
        return batch_loss(hidden, model.head_VD, batch.labels, counted, rule, model.head_main_grad, model.head_float8)


FromHidden = Callable[[int, Hidden, Decoder], Tensor]
"""Computes a loss from the number of the micro-batch, the decoder's output, and the decoder."""


def forward_backward(model: RankModel, batch: GlobalBatch, rule: LossRule, enter: EnterPhase = untimed) -> Tensor:
    """Differentiate the loss of a global batch into the parameters' gradients; `enter` is called when a phase begins.

    Returns float32, 1 + depths: this rank's part of the losses of the global batch, main loss first. Zero on ranks
    without the output projection.
    """
    sums = torch.zeros(1 + rule.depths, device=model.device)
    if model.pipeline is None:
        for number, micro_batch in enumerate(batch.micro_batches):
            with span(MICRO_BATCH, number):
                sums += differentiate(model, micro_batch, batch.counted, rule, enter)
        return sums

    def loss_of(number: int, hidden: Hidden, decoder: Decoder) -> Tensor:
        labels = batch.micro_batches[number].labels
        with span(Span.LOSS):
            total_VD, float8 = decoder.head_main_grad, decoder.head_float8
            loss = batch_loss(hidden, decoder.head_VD, labels, batch.counted, rule, total_VD, float8)
            sums.add_(loss.parts)
        return loss.total

    model.pipeline.train(_calls(model, batch.micro_batches, loss_of), enter)
    return sums


def differentiate(
    model: RankModel, batch: MicroBatch, counted: Tensor, rule: LossRule, enter: EnterPhase = untimed
) -> Tensor:
    """Forward and backward pass of one micro-batch on a rank without pipeline; returns `MicroLoss.parts`.

    May be captured as a graph, which cannot be timed in parts: then no phase is entered.
    """
    enter(Span.FORWARD)
    with span(Span.FORWARD):
        loss = model_loss(model.whole, batch, counted, rule)
    enter(Span.BACKWARD)
    with span(Span.BACKWARD):
        loss.total.backward()
    return loss.parts


@torch.no_grad()
def held_out_nats(model: RankModel, batches: Sequence[MicroBatch], rule: LossRule) -> Tensor:
    """Sum of the main loss, without z-loss, over the counted labels of this rank's rows: float64 scalar.

    Zero on ranks without the output projection. The ranks have equally many batches.
    """
    nats = torch.zeros((), dtype=torch.float64, device=model.device)

    def loss_of(number: int, hidden: Hidden, decoder: Decoder) -> Tensor:
        # Tensor-parallel ranks hold other positions of a row; each computes the logits of all of them for its words.
        whole_TD = all_gather(hidden.main_BSD, rule.tensor, dim=1).flatten(0, 1)
        labels_T = batches[number].labels[0].flatten()
        loss = linear_cross_entropy(
            whole_TD, decoder.head_VD, labels_T, chunk_tokens=rule.chunk_tokens, group=rule.tensor.group
        )
        nats.add_(loss)
        return loss

    if model.pipeline is not None:
        model.pipeline.evaluate(_calls(model, batches, loss_of), len(batches))
        return nats
    for number, batch in enumerate(batches):
        loss_of(number, model.whole(batch.reading), model.whole)
    return nats


def _calls(model: RankModel, batches: Sequence[MicroBatch], at_end: FromHidden) -> dict[int, StageCall]:
    """One call for each stage: its part of the decoder, and the loss on the stage with the output projection."""

    def call_of(decoder: Decoder) -> StageCall:
        def call(number: int, x_BSD: Tensor | None) -> Steps[Tensor]:
            # x_BSD is the output of the stage before; None on the first stage, which embeds the tokens.
            hidden = yield from decoder.call_in_steps(batches[number].reading, x_BSD)
            return hidden.main_BSD if decoder.norm is None else at_end(number, hidden, decoder)

        return call

    return {number: call_of(decoder) for number, decoder in model.decoders.items()}
