"""One model here and in `transformers`, on the same tokens: how far logits, loss and gradients are apart.

Both compute in float64 (tests/float64.py), also where `transformers` casts to float32.

Weights travel through the files that we write. Gradients come back the same way: `transformers` saves them as if they
were weights, in the form of the published files, and our own import reads them. So the names of both directions are
tried too. Rows of several documents have the masks that `transformers` makes from positions that begin anew; a model
with linear attention, whose state takes no mask there, gets each document as a row of its own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask

from penstock.config.model import CompressedAttention, Model
from penstock.models.decoder import Decoder
from penstock.models.huggingface.weights import load_huggingface
from tests.closeness import relative_error
from tests.float64 import EXACT, in_float64
from tests.models.families import in_transformers, reading_of, tiny_decoder

ROWS, POSITIONS = 3, 24
DOCUMENTS = ((11, 13), (24,), (5, 8, 11))
"""Lengths of the documents of each packed row."""

TOLERANCES = dict.fromkeys(("logits", "loss", "gradient"), EXACT)
"""Largest relative difference that passes."""

SMALL = 1e-3
"""Gradients are compared relative to their own size, but at least to this share of the model's largest."""


@dataclass(frozen=True)
class Parity:
    """Largest differences, relative to the largest value of `transformers`."""

    logits: float  # of all tokens
    loss: float  # of the next token
    gradient: float  # of the weight with the largest
    weight: str  # that weight


@in_float64()
def compare(config: Model, folder: Path, *, packed: bool = False) -> Parity:
    """Run the model here and there, forward and backward, on the CPU; files go to an empty folder.

    `packed` are rows of several documents, whose positions begin anew.
    """
    ours = unsettled(tiny_decoder(config).train())
    theirs = in_transformers(ours, folder / "weights")
    tokens_BS = torch.randint(config.vocab_size, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(5))
    logits_BSV, expected_BSV = both_logits(ours, theirs, tokens_BS, packed=packed)
    loss, expected = (
        F.cross_entropy(one[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten()) for one in (logits_BSV, expected_BSV)
    )
    loss.backward()
    expected.backward()
    gradient, weight = worst_gradient(ours, their_gradients(config, theirs, folder / "gradients"))
    return Parity(relative_error(logits_BSV, expected_BSV), relative_error(loss, expected), gradient, weight)


def unsettled(model: Decoder) -> Decoder:
    """Noise on every weight, because norms begin at one and biases at zero, wherever they stand."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def both_logits(ours: Decoder, theirs: PreTrainedModel, tokens_BS: Tensor, *, packed: bool) -> tuple[Tensor, Tensor]:
    """Logits of both, B x S x V; of documents that know nothing of each other if `packed`."""
    if not packed:
        positions_BS = torch.arange(POSITIONS).expand(ROWS, -1)
        return ours.logits(tokens_BS, positions_BS), theirs(tokens_BS, use_cache=False).logits
    positions_BS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in DOCUMENTS])
    documents_BS = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in DOCUMENTS])
    reading = reading_of(tokens_BS, positions_BS, documents_BS)
    logits_BSV = F.linear(ours(reading).main_BSD, ours.head_VD)
    if ours.config.linear_attention is not None or isinstance(ours.config.attention, CompressedAttention):
        return logits_BSV, _document_by_document(theirs, tokens_BS)
    masks = packed_masks(theirs, tokens_BS, positions_BS)
    output = theirs(tokens_BS, attention_mask=masks, position_ids=positions_BS, use_cache=False)
    return logits_BSV, output.logits


def _document_by_document(theirs: PreTrainedModel, tokens_BS: Tensor) -> Tensor:
    """Logits of rows whose documents are rows of their own."""
    rows = []
    for tokens_S, lengths in zip(tokens_BS, DOCUMENTS, strict=True):
        documents = tokens_S.split(list(lengths))
        rows.append(torch.cat([theirs(one[None], use_cache=False).logits[0] for one in documents]))
    return torch.stack(rows)


def packed_masks(theirs: PreTrainedModel, tokens_BS: Tensor, positions_BS: Tensor) -> Any:
    """The masks of `transformers` for packed rows: one by kind of layer, or the one of all layers."""
    config = theirs.config
    arguments = {
        "config": config,
        "inputs_embeds": theirs.get_input_embeddings()(tokens_BS),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions_BS,
    }
    fields = config.to_dict()
    if fields.get("layer_types") is None or "indexed_attention" in fields["layer_types"]:
        make = create_causal_mask if fields.get("sliding_window") is None else create_sliding_window_causal_mask
        return make(**arguments)
    makers = {
        "full_attention": create_causal_mask,
        "sliding_attention": create_sliding_window_causal_mask,
        "chunked_attention": create_chunked_causal_mask,
    }
    return {kind: makers[kind](**arguments) for kind in set(fields["layer_types"])}


def their_gradients(config: Model, theirs: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The gradients of `transformers` under our names."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    save(theirs, folder)
    as_weights = tiny_decoder(config)
    load_huggingface(as_weights, folder)
    return {name: parameter.detach() for name, parameter in as_weights.named_parameters()}


def save(theirs: PreTrainedModel, folder: str | Path) -> None:
    """`save_pretrained`, whose thousands of calls create no numbers that `in_float64` could widen."""
    with torch._C.DisableTorchFunction():
        theirs.save_pretrained(folder)


def worst_gradient(ours: Decoder, expected: dict[str, Tensor]) -> tuple[float, str]:
    least = SMALL * max(float(gradient.abs().max()) for gradient in expected.values())
    apart = {}
    for name, parameter in ours.named_parameters():
        if ".indexer." in name:  # `transformers` has no gradient for it: tests/models/test_indexer.py
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        apart[name] = relative_error(gradient, expected[name], least=least)
    worst = max(apart, key=lambda name: apart[name])
    return apart[worst], worst
