"""Loss on held-out text, with the model and the loss of training.

The rows are the same at every evaluation and for every run with the same data, so figures compare. Sums are taken over
counted tokens in float64 and divided once, so the result does not depend on how the rows are cut into batches. Bits per
byte are the same nats over ln 2 and over the bytes of text that the counted tokens stand for.
"""

import math
import time

import torch

from penstock.data.evaluation import Evaluation
from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.models.decoder import Decoder
from penstock.train.observer import HeldOutLoss


@torch.no_grad()
def evaluate(model: Decoder, rows: Evaluation, chunk_tokens: int | None = None) -> HeldOutLoss:
    """Measure a model. Its weights, expert loads and mode are what they were before.

    Args:
        model: in training mode.
        rows: held-out rows on the CPU, with the text that they stand for.
        chunk_tokens: tokens whose logits exist at once; None leaves it to the kernel.
    """
    begin = time.perf_counter()
    device = model.head_VD.device
    model.eval()  # routers do not count load
    nats = torch.zeros((), dtype=torch.float64, device=device)
    for cpu_batch in rows.batches:
        batch = cpu_batch.to(device)
        hidden_TD = model(batch.tokens_BS, batch.positions_BS, batch.documents_BS).main_BSD.flatten(0, 1)
        nats += linear_cross_entropy(hidden_TD, model.head_VD, batch.labels_BS.flatten(), chunk_tokens=chunk_tokens)
    model.train()
    total = nats.item()
    return HeldOutLoss(
        loss=total / rows.tokens,
        bits_per_byte=total / math.log(2) / rows.text_bytes,
        tokens=rows.tokens,
        seconds=time.perf_counter() - begin,
    )
