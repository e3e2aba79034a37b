"""Forward and backward passes over a global batch, by one decoder or a pipeline, and forward passes for evaluation."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.base.spans import MICRO_BATCH, Span
from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.models.decoder import Decoder, Hidden
from penstock.models.rank_model import RankModel
from penstock.parallel.collectives import all_gather
from penstock.parallel.layer_context import Steps
from penstock.parallel.pipeline import StageCall
from penstock.parallel.spans import EnterPhase, span, untimed
from penstock.train.global_batch import GlobalBatch, MicroBatch
from penstock.train.loss import LossRule, batch_loss, model_loss

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
