"""Softmax attention with a sink: a logit for each head that takes part in the sum and has no value (gpt-oss).

With L the logarithm of a query's sum of exponentials and s the sink of its head, all probabilities shrink by the same
factor:

    log(exp L + exp s) = L'        o' = o exp(L - L')

So any fused kernel computes it, and one pass over the output follows. Backward needs no more: the kernel's own makes
probabilities from the logarithm that it is given and knows the softmax's sum rule by `do . o`, so given L' and o' it
returns the gradients of queries, keys and values with the sink in the softmax. The sink's is

    ds = - sum over the queries of exp(s - L') (do . o')

Rounded to bfloat16, o' was rounded twice. Where no fused backend runs, scores are written down (`_by_products`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from penstock.kernels.attention_backends import Scores, Softmax, backward, for_each_head, forward, with_own_keys


def attention_with_sinks(
    q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor, sinks_H: Tensor, scores: Scores, backend: str
) -> Tensor:
    """Attention whose softmax has one more logit for each head.

    Args:
        q_BHSN: queries.
        k_BGSN: keys; G divides H.
        v_BGSM: values.
        sinks_H: logits.
        scores: scale, and which keys a query looks at.
        backend: as of `penstock.kernels.attention.causal_attention`.

    Returns:
        o_BHSM in the dtype of q.
    """
    found, k_BGSN, v_BGSM = with_own_keys(q_BHSN, k_BGSN, v_BGSM, scores, backend)
    if found == SDPBackend.MATH:
        return _by_products(q_BHSN, k_BGSN, v_BGSM, sinks_H, scores)
    width = v_BGSM.shape[-1]
    if found == SDPBackend.FLASH_ATTENTION and q_BHSN.is_cuda:
        q_BHSN, k_BGSN, v_BGSM = (_in_eights(x) for x in (q_BHSN, k_BGSN, v_BGSM))
    o_BHSM: Tensor = _WithSinks.apply(q_BHSN, k_BGSN, v_BGSM, sinks_H, scores, found)
    return o_BHSM[..., :width]


def _in_eights(x: Tensor) -> Tensor:
    """Heads as wide as flash asks for; torch widens them too, and zeros change nothing."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


class _WithSinks(torch.autograd.Function):
    """See the top of the file. Keeps what the fused backend would, with the sink in it."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHSN: Tensor,
        k_BGSN: Tensor,
        v_BGSM: Tensor,
        sinks_H: Tensor,
        scores: Scores,
        backend: SDPBackend,
    ) -> Tensor:
        plain = forward(backend, q_BHSN, k_BGSN, v_BGSM, scores)
        log_sums = torch.logaddexp(plain.log_sums, _beside(sinks_H, plain.log_sums))
        o_BHSM = plain.o_BHSM.mul_(_by_query((plain.log_sums - log_sums).exp(), plain.o_BHSM))
        rest = [one if isinstance(one, Tensor) else None for one in plain.rest]
        ctx.save_for_backward(q_BHSN, k_BGSN, v_BGSM, sinks_H, o_BHSM, log_sums, scores.allowed, *rest)
        ctx.numbers = tuple(None if isinstance(one, Tensor) else one for one in plain.rest)
        ctx.how = backend, scores.scale
        return o_BHSM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BHSM: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSN, k_BGSN, v_BGSM, sinks_H, o_BHSM, log_sums, allowed, *rest = ctx.saved_tensors
        backend, scale = ctx.how
        together = tuple(number if tensor is None else tensor for tensor, number in zip(rest, ctx.numbers, strict=True))
        softmax = Softmax(o_BHSM, log_sums, together)
        operands = (q_BHSN, k_BGSN, v_BGSM)
        gradients = backward(backend, do_BHSM, operands, Scores(scale=scale, allowed=allowed), softmax)
        weights_BHS1 = _by_query((_beside(sinks_H, log_sums) - log_sums).exp(), o_BHSM)
        product_BHS1 = (do_BHSM.to(log_sums.dtype) * o_BHSM).sum(-1, keepdim=True)
        dsinks_H = -(weights_BHS1 * product_BHS1).sum((0, 2, 3))
        return *gradients, dsinks_H.to(sinks_H.dtype), None, None


def _beside(sinks_H: Tensor, log_sums: Tensor) -> Tensor:
    """Sinks in the dtype and dims of logarithms of sums, whose dim 1 is that of heads."""
    return sinks_H.to(log_sums.dtype).reshape(-1, *(1 for _ in log_sums.shape[2:]))


def _by_query(x: Tensor, o_BHSM: Tensor) -> Tensor:
    """A number of each query as B x H x S x 1, without what a backend has behind the last."""
    return x.reshape(*x.shape[:2], -1, 1)[:, :, : o_BHSM.shape[2]]


def _by_products(q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor, sinks_H: Tensor, scores: Scores) -> Tensor:
    """The same with all scores in memory, in float32 or wider."""
    heads, dtype = q_BHSN.shape[1], torch.promote_types(q_BHSN.dtype, torch.float32)
    k_BHSN, v_BHSM = (for_each_head(x, heads) for x in (k_BGSN, v_BGSM))
    scores_BHSS = (q_BHSN @ k_BHSN.transpose(-2, -1)).to(dtype) * scores.scale
    allowed = scores.allowed
    if allowed is None:
        allowed = torch.ones(scores_BHSS.shape[-2:], dtype=torch.bool, device=q_BHSN.device).tril()
    scores_BHSS = scores_BHSS.masked_fill(~allowed, float("-inf"))
    sinks_BHS1 = _beside(sinks_H, scores_BHSS).expand(*scores_BHSS.shape[:-1], 1)
    weights = torch.cat((scores_BHSS, sinks_BHS1), dim=-1).softmax(dim=-1)
    return weights[..., :-1].to(v_BHSM.dtype) @ v_BHSM
