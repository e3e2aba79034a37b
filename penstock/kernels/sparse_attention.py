"""Trainable sparse attention (DeepSeek-V3.2, arXiv 2512.02556 section 2): definitions in PyTorch.

    score[s, t] = sum over index heads of w[s, h] relu(q[s, h] k[t])          one key for all heads
    a query attends to the keys with the highest scores, as many as `top_k`, among those that it may see
    loss[s] = KL(p[s] || softmax(score[s])) over the same keys, p the sum of the attention of all heads, normalized

The choice has no gradient: the loss alone trains the indexer, and its inputs are detached from the rest of the model.
Everything here holds whole squares of positions; there is no kernel yet that computes the chosen keys only.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

HEADS_AT_ONCE = 8  # of attention, whose squares of positions exist at once


def index_scores(q_BSHN: Tensor, k_BSN: Tensor, weights_BSH: Tensor) -> Tensor:
    """Float32 scores B x S x S of each key (last dim) for each query; scales are in the weights."""
    pairs_BHSS = torch.einsum("bshn,btn->bhst", q_BSHN.float(), k_BSN.float()).relu()
    return torch.einsum("bsh,bhst->bst", weights_BSH.float(), pairs_BHSS)


def seen_keys(allowed_BSS: Tensor | None, positions: int, device: torch.device) -> Tensor:
    """The mask as it is, or the plain causal one, 1 x S x S."""
    if allowed_BSS is not None:
        return allowed_BSS
    return torch.ones(1, positions, positions, dtype=torch.bool, device=device).tril()


@torch.no_grad()
def best_keys(scores_BSS: Tensor, allowed_BSS: Tensor, top_k: int) -> Tensor:
    """Boolean B x S x S: the `top_k` allowed keys with the highest scores, or all allowed ones if they are fewer.

    Scores [3, 1, 2] of keys that are all allowed and top_k = 2 choose keys 0 and 2.
    """
    hidden = scores_BSS.masked_fill(~allowed_BSS, float("-inf"))
    best = hidden.topk(min(top_k, scores_BSS.shape[-1]), dim=-1).indices
    return torch.zeros_like(hidden, dtype=torch.bool).scatter_(-1, best, True) & allowed_BSS


@torch.no_grad()
def attention_mass(q_BSHN: Tensor, k_BSHN: Tensor, keys_BSS: Tensor, scale: float) -> Tensor:
    """Mean over the heads of the attention of each query over `keys_BSS`: float32, rows sum to 1."""
    heads = q_BSHN.shape[2]
    total_BSS = torch.zeros(q_BSHN.shape[0], *keys_BSS.shape[1:], device=q_BSHN.device)
    for first in range(0, heads, HEADS_AT_ONCE):
        some = slice(first, first + HEADS_AT_ONCE)
        logits = torch.einsum("bshn,bthn->bhst", q_BSHN[:, :, some].float(), k_BSHN[:, :, some].float()) * scale
        total_BSS += logits.masked_fill(~keys_BSS[:, None], float("-inf")).softmax(-1).sum(1)
    return total_BSS / heads


def index_loss(scores_BSS: Tensor, mass_BSS: Tensor, keys_BSS: Tensor) -> Tensor:
    """KL divergence of the indexer's softmax over `keys_BSS` from the attention's mass, summed over queries."""
    logs_BSS = scores_BSS.masked_fill(~keys_BSS, float("-inf")).log_softmax(-1)
    terms_BSS = torch.where(keys_BSS & (mass_BSS > 0), mass_BSS * (mass_BSS.clamp(min=1e-30).log() - logs_BSS), 0)
    return terms_BSS.sum()


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        return carrier.view_as(carrier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones((), dtype=torch.float32)  # whatever the carrier's gradient is


def attach_loss(carrier: Tensor, loss: Tensor) -> Tensor:
    """Return `carrier` unchanged, and add a float32 scalar to the loss that is differentiated through it."""
    attached: Tensor = _Attach.apply(carrier, loss)
    return attached
