"""The rows of one step, cut into micro-batches and into what one rank reads of each.

    labels of depth k and tokens ahead    made from whole rows: they look across every later cut
    documents                             whole rows, for a mask that a pass makes on the device when it begins
    context parallelism                   takes our positions (penstock/layout/sequence.py)
    tensor parallelism                    takes nothing here: its ranks read the same tokens, the embedding divides them

All of it happens on the host, before the copies to the device. These go through pinned memory, so it waits for nobody.
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
    """How a rank's rows are cut.

    Attributes:
        micro_batch: rows of one forward pass.
        depths: multi-token prediction depths.
        device: where the model is.
        data: ranks that read other rows of the same global batch.
        places: positions of a row that are ours, in our order; None for all of them.
        sees_row: attention looks from every position of the row (heads are divided instead), so queries are everywhere.
    """

    micro_batch: int
    depths: int
    device: torch.device
    data: Axis = field(default_factory=lambda: Axis(name="data"))
    places: tuple[int, ...] | None = None
    sees_row: bool = False


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one rank reads and predicts in one forward pass.

    Attributes:
        reading: for the model.
        labels: int64 B x S of the main loss, then of each depth; IGNORED_LABEL where nothing is predicted.
    """

    reading: ModelInputs
    labels: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The rows of one step, cut for the device.

    Attributes:
        micro_batches: equally many rows each.
        counted: float64 on the device: counted labels of the global batch, of the main loss and then of each depth;
            over all ranks.
    """

    micro_batches: tuple[MicroBatch, ...]
    counted: Tensor


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


def cut(batch: Batch, rule: CutRule) -> GlobalBatch:
    """Count the labels of this rank's rows, sum over ranks, cut the rows, and start the copies to the device.

    Args:
        batch: this rank's rows of the global batch, on the CPU.
        rule: how.

    Raises:
        DataError: the main loss has nothing to count. Among several ranks that shows as a loss of 0 instead.
    """
    counts = [int((labels_at_depth(batch, depth) != IGNORED_LABEL).sum()) for depth in range(rule.depths + 1)]
    if counts[0] == 0 and rule.data.size == 1:
        raise DataError("no token of the global batch is counted in the loss", fix="longer documents or a larger batch")
    counted = _sent(torch.tensor(counts, dtype=torch.float64), rule.device)
    if rule.data.group is not None:
        dist.all_reduce(counted, group=rule.data.group)
    rows = batch.micro_batches(rule.micro_batch)
    share = 1 / (len(rows) * rule.data.size)
    return GlobalBatch(micro_batches=tuple(read(part, rule, share) for part in rows), counted=counted)


def read(batch: Batch, rule: CutRule, share: float = 1.0) -> MicroBatch:
    """What this rank reads of whole rows, on the device.

    Args:
        batch: rows of one micro-batch, on the CPU.
        rule: how.
        share: part of the global batch that they are.
    """
    places = None if rule.places is None else torch.tensor(rule.places)

    def ours(x_BS: Tensor) -> Tensor:
        return _sent(x_BS if places is None else x_BS[:, places], rule.device)

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
    """A copy on the device, which its stream makes when it comes to it; from pinned memory the host goes on at once."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
