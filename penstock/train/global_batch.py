"""Cuts the rows of a step into micro-batches and into this rank's part of each.

    labels of depth k and tokens ahead    from whole rows, because they look across every later cut
    documents                             whole rows; a pass makes the mask from them on the device
    context parallelism                   takes this rank's positions (penstock/layout/sequence.py)
    tensor parallelism                    takes nothing: its ranks read the same tokens, and the embedding is divided

All of this runs on the host. Copies to the device go through pinned memory, so the host does not wait for them.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import DataError
from penstock.data.batch import Batch
from penstock.kernels.reference import IGNORED_LABEL
from penstock.models.model_inputs import ModelInputs, shifted_tokens
from penstock.parallel.axes import Axis


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
