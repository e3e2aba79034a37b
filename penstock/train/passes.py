"""Forward and backward passes over a global batch, by one decoder or through a pipeline; forward passes to judge."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.models.decoder import Decoder, Hidden
from penstock.models.rank_model import RankModel
from penstock.parallel.collectives import all_gather
from penstock.parallel.pipeline import StageCall
from penstock.train.global_batch import GlobalBatch, MicroBatch
from penstock.train.loss import LossRule, batch_loss, model_loss

FromHidden = Callable[[int, Hidden, Decoder], Tensor]


def forward_backward(model: RankModel, batch: GlobalBatch, rule: LossRule) -> Tensor:
    """Differentiate the loss of a global batch; gradients of our rows are in the parameters afterwards.

    Args:
        model: in training mode.
        batch: cut for this rank.
        rule: of the loss.

    Returns:
        float32, 1 + depths: losses of our rows as parts of the global batch's, main loss first. Only the rank whose
        stage holds the output projection has them; zero elsewhere.
    """
    sums = torch.zeros(1 + rule.depths, device=model.device)
    if model.pipeline is None:
        for micro_batch in batch.micro_batches:
            loss = model_loss(model.whole, micro_batch, batch.counted, rule)
            loss.total.backward()
            sums += loss.parts
        return sums

    def loss_of(number: int, hidden: Hidden, decoder: Decoder) -> Tensor:
        loss = batch_loss(hidden, decoder.head_VD, batch.micro_batches[number].labels, batch.counted, rule)
        sums.add_(loss.parts)
        return loss.total

    model.pipeline.train(_calls(model, batch.micro_batches, loss_of))
    return sums


@torch.no_grad()
def held_out_nats(model: RankModel, batches: Sequence[MicroBatch], rule: LossRule) -> Tensor:
    """Sum of the main loss over the counted labels of some rows.

    Args:
        model: in evaluation mode.
        batches: equally many on every rank.
        rule: of the loss; its z-loss is left out.

    Returns:
        float64 scalar: of our rows; zero on ranks without the output projection.
    """
    nats = torch.zeros((), dtype=torch.float64, device=model.device)

    def loss_of(number: int, hidden: Hidden, decoder: Decoder) -> Tensor:
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
    """One call for each stage: its part of the decoder, and the loss where the stage has the output projection."""

    def call_of(decoder: Decoder) -> StageCall:
        def call(number: int, x_BSD: Tensor | None) -> Tensor:
            hidden = decoder(batches[number].reading, x_BSD)
            return hidden.main_BSD if decoder.norm is None else at_end(number, hidden, decoder)

        return call

    return {number: call_of(decoder) for number, decoder in model.decoders.items()}
