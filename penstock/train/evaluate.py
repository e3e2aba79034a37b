"""Loss on held-out text, with the model and the loss of training.

The rows are the same at every evaluation and for every run with the same data, so figures compare. Sums are taken over
counted tokens in float64 and divided once, so the result does not depend on how the rows are cut into batches. Bits per
byte are the same nats over ln 2 and over the bytes of text that the counted tokens stand for.

Experts have room for all rows here (penstock/moe/dispatch/row_capacity.py), so none is left out. But a rank may wait in
vain for rows of other GPUs of its node; that is read with the sum, as a step reads it with its figures.
"""

import math
import time

import torch
import torch.distributed as dist

from penstock.data.evaluation import EvaluationRows
from penstock.models.rank_model import RankModel
from penstock.train.global_batch import CutRule, read
from penstock.train.loss import LossRule
from penstock.train.observer import HeldOutLoss
from penstock.train.passes import held_out_nats
from penstock.train.step import refuse_late


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
