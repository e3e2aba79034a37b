"""Who divides by what: the losses of a micro-batch, averaged exactly over the global batch.

The loss of a step is a mean over the counted tokens of its global batch, not a mean of the micro-batches' means,
which would give a token in a nearly empty micro-batch more weight than one in a full one. The whole global batch is
on the host before its first forward pass, so its counted tokens are known, and each micro-batch divides its own sums
by them:

    main        sum over counted tokens / counted tokens
    depth k     the same k tokens further on, times mtp_weight / depths (arXiv 2412.19437, equation 25)

Added up over micro-batches, the gradients are those of one large batch, however it was cut. Balance losses are no
business of this file: routers attach them to the graph, scaled by the share that the forward pass is told.

Depth k predicts at each position the token k further on than the main loss does. With k = 1 and labels b c d e, the
row's labels become c d e -: what lies behind the row's end, or in another document, is not counted.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import DataError
from penstock.config.run import Run
from penstock.data.batch import Batch
from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.kernels.reference import IGNORED_LABEL
from penstock.models.decoder import Decoder, Hidden


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """What is added to what.

    Attributes:
        depths: multi-token prediction depths of the model.
        mtp_weight: factor on the mean over these depths.
        z_weight: factor on logsumexp(logits)**2 of each counted token.
        chunk_tokens: tokens whose logits exist at once; None leaves it to the kernel.
    """

    depths: int
    mtp_weight: float
    z_weight: float
    chunk_tokens: int | None


@dataclass(frozen=True)
class GlobalBatch:
    """The rows of one step, cut for the device.

    Attributes:
        micro_batches: equally many rows each.
        counted: counted labels of all of them together: of the main loss, then of each depth.
    """

    micro_batches: tuple[Batch, ...]
    counted: tuple[int, ...]

    @property
    def share(self) -> float:
        """Part of the global batch that one micro-batch is."""
        return 1 / len(self.micro_batches)


class MicroLoss(NamedTuple):
    """Losses of one micro-batch.

    Attributes:
        total: float32 scalar to differentiate: this micro-batch's part of the step's loss.
        parts: float32, 1 + depths: the same without factors, detached: main loss first, then each depth. Added up over
            the micro-batches they are means over the global batch.
    """

    total: Tensor
    parts: Tensor


def loss_rule(run: Run) -> LossRule:
    """The rule of a run."""
    return LossRule(
        depths=run.model.mtp_layers,
        mtp_weight=run.training.mtp_weight,
        z_weight=run.training.z_weight,
        chunk_tokens=run.kernels.loss_chunk or None,
    )


def labels_at_depth(batch: Batch, depth: int) -> Tensor:
    """Labels of one prediction depth.

    Args:
        batch: rows with the labels of the main loss.
        depth: 0 for the main loss, k for k tokens further on.

    Returns:
        int64, B x S.
    """
    if depth == 0:
        return batch.labels_BS
    labels_BS = torch.full_like(batch.labels_BS, IGNORED_LABEL)
    labels_BS[:, :-depth] = batch.labels_BS[:, depth:]
    if batch.documents_BS is not None:
        crosses = batch.documents_BS[:, :-depth] != batch.documents_BS[:, depth:]
        labels_BS[:, :-depth].masked_fill_(crosses, IGNORED_LABEL)
    return labels_BS


def cut(batch: Batch, rows: int, depths: int, device: torch.device) -> GlobalBatch:
    """Count the labels of a global batch, cut it, and start the copies to the device.

    Args:
        batch: the global batch, on the CPU, where counting waits for nobody.
        rows: of a micro-batch.
        depths: multi-token prediction depths.
        device: where the model is.

    Raises:
        DataError: the main loss has nothing to count.
    """
    counted = tuple(int((labels_at_depth(batch, depth) != IGNORED_LABEL).sum()) for depth in range(depths + 1))
    if counted[0] == 0:
        raise DataError("no token of the global batch is counted in the loss", fix="longer documents or a larger batch")
    return GlobalBatch(tuple(part.to(device) for part in batch.micro_batches(rows)), counted)


def batch_loss(hidden: Hidden, head_VD: Tensor, batch: Batch, counted: tuple[int, ...], rule: LossRule) -> MicroLoss:
    """Losses of a micro-batch as parts of the global batch's.

    Args:
        hidden: what the decoder gave for the micro-batch.
        head_VD: output projection.
        batch: the micro-batch, on the model's device.
        counted: counted labels of the GLOBAL batch, main loss first (see `GlobalBatch`).
        rule: factors.
    """
    parts = []
    for depth, hidden_BSD in enumerate((hidden.main_BSD, *hidden.mtp)):
        labels_T = labels_at_depth(batch, depth).flatten()
        loss_sum = linear_cross_entropy(
            hidden_BSD.flatten(0, 1), head_VD, labels_T, rule.z_weight, chunk_tokens=rule.chunk_tokens
        )
        # A depth that no row is long enough for has no token: its sum is 0.
        parts.append(loss_sum / max(counted[depth], 1))
    total = parts[0]
    if rule.depths:
        total = total + rule.mtp_weight / rule.depths * torch.stack(parts[1:]).sum()
    return MicroLoss(total, torch.stack(parts).detach())


def model_loss(model: Decoder, batch: Batch, whole: GlobalBatch, rule: LossRule) -> MicroLoss:
    """Forward pass and losses of one micro-batch.

    Args:
        model: the decoder.
        batch: one of the micro-batches of `whole`.
        whole: the global batch.
        rule: factors.
    """
    hidden = model(batch.tokens_BS, batch.positions_BS, batch.documents_BS, share=whole.share)
    return batch_loss(hidden, model.head_VD, batch, whole.counted, rule)
