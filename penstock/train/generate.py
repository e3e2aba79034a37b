"""Generates text with the weights of a checkpoint: one process, one row, computed anew for each token.

    open_saved -> load_decoder -> generate -> text_pieces

The decoder is that of evaluation, in the run's precision, so no token is dropped over capacity and no balance is
forced; float8 products run in 16 bits, and kernels are chosen for this device.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.base.errors import DeviceError
from penstock.config.run import Kernels, Run
from penstock.data.tokenizer_rules import Tokenizer
from penstock.layout.sharding import Rectangle
from penstock.models.build import compute_dtype, meta_model, to_dtype
from penstock.models.decoder import Decoder
from penstock.models.huggingface.weights import load_huggingface
from penstock.models.kernels import choose_operators
from penstock.models.model_inputs import ModelInputs
from penstock.parallel.launch.process import free_memory_bytes
from penstock.parallel.layer_context import LayerContext
from penstock.train.checkpoint import CheckpointStore
from penstock.train.saved_weights import open_weights
from penstock.train.state import check_same_model, identity_of

NOT_TEXT = "\ufffd"
"""Decoded form of incomplete UTF-8, which may become a character with the next token."""


@dataclass(frozen=True, kw_only=True)
class SamplingRule:
    """How the next token is chosen."""

    temperature: float = 0.0  # divisor of the logits; 0 takes the largest logit
    top_p: float = 1.0  # only the most probable tokens whose probabilities reach this sum are drawn from
    seed: int = 0


def load_decoder(run: Run, store: CheckpointStore, step: int, device: torch.device) -> Decoder:
    """The whole model of a run's checkpoint, of any layout, in evaluation mode.

    Raises a CheckpointError if the checkpoint is damaged or of another model, and a DeviceError, before anything is
    allocated, if the device has too little free memory.
    """
    check_same_model(step, store.read_facts(step)["model"], identity_of(run))
    decoder = _meta_decoder(run, device)
    _allocate(decoder, run, device)
    weights = decoder.state_dict()
    with open_weights(store, step, weights) as saved:
        for name, tensor in weights.items():
            tensor.copy_(saved.read(name, Rectangle((0,) * tensor.ndim, tuple(tensor.shape))))
    return decoder.eval()


def load_weight_folder(run: Run, folder: Path, device: torch.device) -> Decoder:
    """As `load_decoder`, from a folder of Hugging Face weights.

    Raises a CheckpointError if the weights cannot be read or are not those of the run's model, and a DeviceError.
    """
    decoder = _meta_decoder(run, device)
    _allocate(decoder, run, device)
    load_huggingface(decoder, folder)
    return decoder.eval()


def _meta_decoder(run: Run, device: torch.device) -> Decoder:
    model = run.model.model_copy(update={"mtp_layers": 0})
    plain = run.model_copy(update={"model": model, "kernels": Kernels()})
    return meta_model(plain.model, LayerContext(operators=choose_operators(plain, device)))


def _allocate(decoder: Decoder, run: Run, device: torch.device) -> None:
    to_dtype(decoder, compute_dtype(run))
    _refuse_too_large(decoder, device)
    decoder.to_empty(device=device)
    for buffer in decoder.buffers():
        buffer.zero_()  # those that are not saved


@torch.no_grad()
def generate(
    decoder: Decoder, prompt: Sequence[int], *, limit: int, end: int, vocabulary: int, rule: SamplingRule
) -> Iterator[int]:
    """At most `limit` token ids that continue a prompt of at least one id, up to the id `end` of the document's end.

    Ids from `vocabulary` on stand for no text and are never chosen.
    """
    device = decoder.head_VD.device
    generator = torch.Generator().manual_seed(rule.seed)  # on the CPU, so that every device draws the same
    tokens = list(prompt)
    for _ in range(limit):
        tokens_BS = torch.tensor([tokens], device=device)
        reading = ModelInputs(tokens_BS=tokens_BS, positions_BS=torch.arange(len(tokens), device=device)[None])
        last_D = decoder(reading).main_BSD[0, -1]
        logits_V = F.linear(last_D, decoder.head_VD)[:vocabulary].float().cpu()
        token = _chosen(logits_V, rule, generator)
        if token == end:
            return
        yield token
        tokens.append(token)


def text_pieces(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens as they come, each character once and complete, without that of the prompt before them."""
    ids = list(prompt)
    length = len(_text(tokenizer, ids))  # characters
    text = ""
    for token in tokens:
        ids.append(token)
        text = _text(tokenizer, ids)
        sure = text.rstrip(NOT_TEXT)
        if len(sure) > length:
            yield sure[length:]
            length = len(sure)
    if len(text) > length:
        yield text[length:]


def _refuse_too_large(decoder: Decoder, device: torch.device) -> None:
    tensors = list(decoder.state_dict().values())
    held = sum(tensor.nbytes for tensor in tensors)
    read = max(4 * tensor.numel() for tensor in tensors)  # the host reads one weight at a time, in float32
    for location, needed in {device: held, torch.device("cpu"): read + (held if device.type == "cpu" else 0)}.items():
        free = free_memory_bytes(location)
        if free is not None and needed > free:
            raise DeviceError(
                f"the model is too large for the {'GPU' if location.type == 'cuda' else 'memory of this machine'}",
                got=f"{needed / 1e9:.1f} GB of weights",
                allowed=f"{free / 1e9:.1f} GB that are free",
                fix="run it on a larger machine, or export the weights",
            )


def _chosen(logits_V: Tensor, rule: SamplingRule, generator: torch.Generator) -> int:
    if rule.temperature == 0:
        return int(logits_V.argmax())
    probabilities_V, order_V = (logits_V / rule.temperature).softmax(0).sort(descending=True, stable=True)
    before_V = probabilities_V.cumsum(0) - probabilities_V
    kept_V = torch.where(before_V < rule.top_p, probabilities_V, 0.0)
    kept_V[0] = probabilities_V[0]  # also with top_p 0
    return int(order_V[torch.multinomial(kept_V, 1, generator=generator)])


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(np.array(ids, dtype=np.int64))
