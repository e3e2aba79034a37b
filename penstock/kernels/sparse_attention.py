"""Trainable sparse attention (DeepSeek-V3.2, arXiv 2512.02556 section 2): definitions in PyTorch.

    score[s, t] = sum over index heads of w[s, h] relu(q[s, h] k[t])          one key for all heads
    a query attends to the keys with the highest scores, as many as `top_k`, among those that it may see
    loss[s] = KL(p[s] || softmax(score[s])) over the same keys, p the sum of the attention of all heads, normalized

The choice has no gradient: the loss alone trains the indexer, and its inputs are detached from the rest of the model.
Definitions hold whole squares of positions; `penstock.kernels.sparse_attention_launches` has kernels that do not. These
multiply in the absorbed form: the matrix that expands keys from the latent is applied to the queries instead, so that
all heads read the same rows, which are the values too.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

HEADS_AT_ONCE = 8  # of attention, whose squares of positions exist at once
FLOATS_AT_ONCE = 1 << 27  # in 32 bits, of a product of queries and keys that backward of the dense loss makes


class IndexLoss(NamedTuple):
    """Inputs of the loss of the chosen keys, which is multiplied by `factor`."""

    q_BSGN: Tensor
    k_BSN: Tensor
    weights_BSG: Tensor  # float32, with scales
    factor: float


def index_scores(q_BSHN: Tensor, k_BSN: Tensor, weights_BSH: Tensor) -> Tensor:
    """Scores B x S x S of each key (last dim) for each query, in float32 or wider; scales are in the weights."""
    dtype = torch.promote_types(q_BSHN.dtype, torch.float32)
    pairs_BHSS = torch.einsum("bshn,btn->bhst", q_BSHN.to(dtype), k_BSN.to(dtype)).relu()
    return torch.einsum("bsh,bhst->bst", weights_BSH.to(dtype), pairs_BHSS)


def seen_keys(allowed_BSS: Tensor | None, positions: int, device: torch.device) -> Tensor:
    """The mask as it is, or the plain causal one, 1 x S x S."""
    if allowed_BSS is not None:
        return allowed_BSS
    return torch.ones(1, positions, positions, dtype=torch.bool, device=device).tril()


@torch.no_grad()
def best_keys(scores_BSS: Tensor, allowed_BSS: Tensor, top_k: int) -> Tensor:
    """Boolean B x S x S: the `top_k` allowed keys with the highest scores, or all allowed ones if they are fewer."""
    hidden = scores_BSS.masked_fill(~allowed_BSS, float("-inf"))
    best = hidden.topk(min(top_k, scores_BSS.shape[-1]), dim=-1).indices
    return torch.zeros_like(hidden, dtype=torch.bool).scatter_(-1, best, True) & allowed_BSS


@torch.no_grad()
def attention_mass(q_BSHN: Tensor, k_BSHN: Tensor, keys_BSS: Tensor, scale: float) -> Tensor:
    """Mean over the heads of the attention of each query over `keys_BSS`: float32 or wider, rows sum to 1."""
    heads, dtype = q_BSHN.shape[2], torch.promote_types(q_BSHN.dtype, torch.float32)
    total_BSS = torch.zeros(q_BSHN.shape[0], *keys_BSS.shape[1:], dtype=dtype, device=q_BSHN.device)
    for first in range(0, heads, HEADS_AT_ONCE):
        some = slice(first, first + HEADS_AT_ONCE)
        logits = torch.einsum("bshn,bthn->bhst", q_BSHN[:, :, some].to(dtype), k_BSHN[:, :, some].to(dtype)) * scale
        total_BSS += logits.masked_fill(~keys_BSS[:, None], float("-inf")).softmax(-1).sum(1)
    return total_BSS / heads


def index_loss(scores_BSS: Tensor, mass_BSS: Tensor, keys_BSS: Tensor) -> Tensor:
    """KL divergence of the indexer's softmax over `keys_BSS` from the attention's mass, summed over queries."""
    logs_BSS = scores_BSS.masked_fill(~keys_BSS, float("-inf")).log_softmax(-1)
    terms_BSS = torch.where(keys_BSS & (mass_BSS > 0), mass_BSS * (mass_BSS.clamp(min=1e-30).log() - logs_BSS), 0)
    return terms_BSS.sum()


def choose_keys(q_BSGN: Tensor, k_BSN: Tensor, weights_BSG: Tensor, first_BS: Tensor, top_k: int) -> Tensor:
    """Int32 B x S x top_k: keys with the highest scores from the query's `first_BS` to itself, -1 where they are fewer.

    They ascend; of equal scores the first keys are chosen. Scores [3, 1, 3, 2, 3] of the keys that a query sees and
    top_k = 2 choose keys 0 and 2.
    """
    allowed_BSS = between(first_BS)
    scores_BSS = index_scores(q_BSGN, k_BSN, weights_BSG).masked_fill(~allowed_BSS, float("-inf"))
    best_BSK = scores_BSS.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    none = scores_BSS.shape[-1]
    numbers_BSK = torch.where(allowed_BSS.gather(-1, best_BSK), best_BSK, none).sort(-1).values
    return F.pad(numbers_BSK.masked_fill(numbers_BSK == none, -1), (0, top_k - numbers_BSK.shape[-1]), value=-1).int()


def between(first_BS: Tensor, queries: slice = slice(None)) -> Tensor:
    """Boolean B x queries x S: the keys from each query's first one to itself."""
    position_S = torch.arange(first_BS.shape[1], device=first_BS.device)
    return (position_S >= first_BS[:, queries, None]) & (position_S <= position_S[queries, None])


def keys_mask(keys_BSK: Tensor) -> Tensor:
    """Boolean B x S x S of the numbers of keys, of which -1 is none."""
    rows, positions, _ = keys_BSK.shape
    mask = torch.zeros(rows, positions, positions + 1, dtype=torch.bool, device=keys_BSK.device)
    return mask.scatter_(-1, keys_BSK.long() % (positions + 1), True)[..., :positions]  # -1 is the last column


def sparse_attention(
    q_HBSC: Tensor,
    q_rope_BSHP: Tensor,
    latent_BSC: Tensor,
    rope_BSP: Tensor,
    keys_BSK: Tensor,
    first_BS: Tensor,
    *,
    scale: float,
    index: IndexLoss | None = None,
) -> Tensor:
    """Softmax attention of all heads over the chosen rows of the latent, which are the values; float32 or wider.

    `keys_BSK` are those of `choose_keys` for the same `first_BS`. Heads come first, as in a batched product. The loss
    of `index` is attached to the output.
    """
    dtype = torch.promote_types(q_HBSC.dtype, torch.float32)
    q_HBSW = torch.cat((q_HBSC, q_rope_BSHP.permute(2, 0, 1, 3)), -1).to(dtype)
    k_BSW = torch.cat((latent_BSC, rope_BSP), -1).to(dtype)
    keys_BSS = keys_mask(keys_BSK)
    logits = torch.einsum("hbsw,btw->bhst", q_HBSW, k_BSW) * scale
    p_BHSS = logits.masked_fill(~keys_BSS[:, None], float("-inf")).softmax(-1)
    o_HBSC = torch.einsum("bhst,btc->hbsc", p_BHSS, latent_BSC.to(dtype)).to(q_HBSC.dtype)
    if index is None:
        return o_HBSC
    *of_index, factor = index
    return attach_loss(o_HBSC, index_loss(index_scores(*of_index), p_BHSS.detach().mean(1), keys_BSS) * factor)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        return carrier.view_as(carrier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones((), dtype=torch.float32)  # whatever the carrier's gradient is


class _AttachDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, *inputs: Tensor | float) -> Tensor:
        *tensors, ctx.scale, ctx.factor = inputs
        ctx.save_for_backward(*tensors)
        return carrier.view_as(carrier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        index_q_BSGN, index_k_BSN, weights_BSG, q_BSHN, k_BSHN, first_BS = ctx.saved_tensors
        (rows, positions, heads, _), of_index = q_BSHN.shape, (index_q_BSGN, index_k_BSN, weights_BSG)
        totals = tuple(torch.zeros_like(tensor, dtype=torch.float32) for tensor in of_index)
        floats = rows * positions * max(index_q_BSGN.shape[2], min(heads, HEADS_AT_ONCE))
        chunk = max(1, FLOATS_AT_ONCE // floats)
        for first in range(0, positions, chunk):
            queries, seen = slice(first, first + chunk), slice(min(first + chunk, positions))
            allowed_BQS = between(first_BS, queries)[..., seen]
            mass_BQS = attention_mass(q_BSHN[:, queries], k_BSHN[:, seen], allowed_BQS, ctx.scale)
            places = queries, seen, queries
            with torch.enable_grad():
                leaves = [leaf[:, part].detach().requires_grad_() for leaf, part in zip(of_index, places, strict=True)]
                loss = index_loss(index_scores(*leaves), mass_BQS, allowed_BQS) * ctx.factor
            for total, span, leaf_gradient in zip(totals, places, torch.autograd.grad(loss, leaves), strict=True):
                total[:, span] += leaf_gradient
        of_leaves = (total.to(tensor.dtype) for total, tensor in zip(totals, of_index, strict=True))
        return gradient, *of_leaves, None, None, None, None, None


def attach_dense_loss(
    carrier: Tensor, index: IndexLoss, q_BSHN: Tensor, k_BSHN: Tensor, first_BS: Tensor, scale: float
) -> Tensor:
    """`attach_loss` of the loss over all keys a query may see; backward computes it by chunks of queries."""
    *of_index, factor = index
    return _AttachDense.apply(carrier, *of_index, q_BSHN.detach(), k_BSHN.detach(), first_BS, scale, factor)


def attach_loss(carrier: Tensor, loss: Tensor) -> Tensor:
    """Return `carrier` unchanged, and add a float32 scalar to the loss that is differentiated through it."""
    return _Attach.apply(carrier, loss)
