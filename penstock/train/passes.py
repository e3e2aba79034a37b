"""A global batch, cut into micro-batches and this rank's part; the passes over it, with losses; and evaluation.

The loss of a step is a mean over the counted tokens of its global batch. A mean of the micro-batches' means would
weight a token of a nearly empty micro-batch more. The counted tokens are known before the first forward pass, so each
micro-batch divides its own sums by them:

    main        sum over counted tokens / counted tokens
    depth k     the same k tokens further on, times mtp_weight / depths (arXiv 2412.19437, equation 25)

Summed over micro-batches, the gradients are those of one large batch, however it was cut. Balance losses are not
computed here: routers attach them to the graph, scaled by the share of the micro-batch.

Depth k predicts at each position the token k further on than the main loss does. With k = 1 and labels b c d e, the
labels become c d e -: positions behind the end of the row, or in another document, are not counted.

The cut of the rows of a step:

    labels of depth k and tokens ahead    from whole rows, because they look across every later cut
    documents                             whole rows; a pass makes the mask from them on the device
    context parallelism                   takes this rank's positions (penstock/layout/grid.py)
    tensor parallelism                    takes nothing: its ranks read the same tokens, and the embedding is divided

It runs on the host. Copies to the device go through pinned memory, so the host does not wait for them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import DataError
from penstock.base.spans import MICRO_BATCH, Span
from penstock.config.run import Run
from penstock.data.loader import Batch
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.kernels.reference import IGNORED_LABEL
from penstock.models.decoder import Decoder, Hidden
from penstock.models.model_inputs import ModelInputs, shifted_tokens
from penstock.models.rank_model import RankModel
from penstock.parallel.axes import ALONE, Axes, Axis
from penstock.parallel.collectives import all_gather
from penstock.parallel.layer_context import Steps
from penstock.parallel.pipeline import StageCall
from penstock.parallel.spans import EnterPhase, span, untimed


@dataclass(frozen=True, kw_only=True)
class CutRule:
    """Constants of the cut."""

    micro_batch: int  # rows of one forward pass
    depths: int  # of multi-token prediction
    device: torch.device
    data: Axis = field(default_factory=lambda: Axis(name="data"))  # ranks that read other rows of the global batch
    places: tuple[int, ...] | None = None  # this rank's positions of a row, in its order; None for all
    sees_row: bool = False  # attention reads every position of the row: heads are divided instead of positions


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Input of one forward pass on one rank."""

    reading: ModelInputs
    labels: tuple[Tensor, ...]  # int64 B x S of the main loss, then of each depth; IGNORED_LABEL predicts nothing


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The rows of one step on the device."""

    micro_batches: tuple[MicroBatch, ...]
    counted: Tensor  # float64, 1 + depths: counted labels over all ranks, of the main loss, then of each depth


def labels_at_depth(batch: Batch, depth: int) -> Tensor:
    """int64 B x S labels of one prediction depth: 0 for the main loss, k for k tokens further on."""
    if depth == 0:
        return batch.labels_BS
    labels_BS = torch.full_like(batch.labels_BS, IGNORED_LABEL)
    labels_BS[:, :-depth] = batch.labels_BS[:, depth:]
    if batch.documents_BS is not None:
        crosses = batch.documents_BS[:, :-depth] != batch.documents_BS[:, depth:]
        labels_BS[:, :-depth].masked_fill_(crosses, IGNORED_LABEL)
    return labels_BS


def cut(batch: Batch, rule: CutRule) -> GlobalBatch:
    """Count the labels of this rank's rows, sum the counts over ranks, cut the rows, and start copies to the device.

    Raises a DataError if the main loss counts no label. With several ranks the loss is 0 instead.
    """
    counts = [int((labels_at_depth(batch, depth) != IGNORED_LABEL).sum()) for depth in range(rule.depths + 1)]
    if counts[0] == 0 and rule.data.size == 1:
        raise DataError("no token of the global batch is counted in the loss", fix="longer documents or a larger batch")
    counted = _sent(torch.tensor(counts, dtype=torch.float64), rule.device)
    if rule.data.group is not None:
        dist.all_reduce(counted, group=rule.data.group)
    rows = batch.micro_batches(rule.micro_batch)
    share = 1 / (len(rows) * rule.data.size)  # of a micro-batch in the global batch, for balance losses
    return GlobalBatch(micro_batches=tuple(read(part, rule, share) for part in rows), counted=counted)


def read(batch: Batch, rule: CutRule, share: float = 1.0) -> MicroBatch:
    """This rank's part of a micro-batch, which is a `share` of the global batch, on the device."""
    places = None if rule.places is None else torch.tensor(rule.places)

    def ours(x_BS: Tensor) -> Tensor:
        return _sent(x_BS if places is None else x_BS[:, places], rule.device)

    # Documents stay whole rows: the mask of our positions reads the documents of all keys.
    documents_BS, query_positions_S = None, None
    if batch.documents_BS is not None:
        documents_BS = _sent(batch.documents_BS, rule.device)
        query_positions_S = None if places is None or rule.sees_row else _sent(places, rule.device)
    reading = ModelInputs(
        tokens_BS=ours(batch.tokens_BS),
        positions_BS=ours(batch.positions_BS),
        ahead=tuple(map(ours, shifted_tokens(batch.tokens_BS, rule.depths))),
        documents_BS=documents_BS,
        query_positions_S=query_positions_S,
        share=share,
    )
    return MicroBatch(
        reading=reading, labels=tuple(ours(labels_at_depth(batch, depth)) for depth in range(rule.depths + 1))
    )


def _sent(x: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


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
