"""Causal attention through torch's scaled_dot_product_attention, or flash-attn-4, with the backend chosen by name.

On Hopper only cuDNN's backend is fast for the heads of latent attention (192 wide for query and key, 128 for value);
flash needs equal widths and would pad the value. `auto` therefore tries cuDNN first. The package flash-attn-4
(penstock/kernels/flash_4.py) is faster where it is installed; calls that it does not support go to torch's backends in
the order of `auto`.

A mask rules flash out, and the efficient backend does not support grouped-query heads. Where torch would therefore
materialize all scores, keys and values are repeated for each query head instead. On the meta device the operator of a
fused backend is called by name, because torch would choose the backend that materializes the scores.

Sinks (gpt-oss): each head has a logit s that takes part in the softmax and has no value. With L the logsumexp of a
query's scores, a fused kernel and one pass over its output suffice:

    log(exp L + exp s) = L'        o' = o exp(L - L')

A fused backward kernel recomputes probabilities from the logsumexp and needs `do . o`, so with L' and o' it returns the
gradients of queries, keys and values of the softmax with the sink. The gradient of the sink is

    ds = - sum over the queries of exp(s - L') (do . o')

In bfloat16, o' is rounded twice. Without a fused backend the scores are materialized (`_by_products`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from penstock.kernels import flash_4
from penstock.kernels.attention_backends import (
    AttentionOutput,
    ScoreOptions,
    aten,
    backend_and_keys,
    backend_order,
    backward,
    forward,
    repeat_kv,
)


def causal_attention(
    q_BSHN: Tensor,
    k_BSGN: Tensor,
    v_BSGM: Tensor,
    *,
    scale: float,
    allowed_BSS: Tensor | None,
    backend: str,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Softmax attention of each position over itself and the positions before it.

    Args:
        q_BSHN: queries.
        k_BSGN: keys; G divides H, and each key/value head serves H / G query heads.
        v_BSGM: values; their width may differ from that of the keys.
        scale: factor on the scores before the softmax.
        allowed_BSS: boolean mask, query position by key position; it must be causal already. None means causal over the
            whole row.
        backend: `auto`, `default` (torch's own choice), `flash-4`, or one of torch's backends by name; a named backend
            that cannot run raises torch's RuntimeError.
        sinks_H: sink logit of each query head; None for a plain softmax.

    Returns:
        o_BSHM in the dtype of q.
    """
    if backend == flash_4.NAME and allowed_BSS is None and sinks_H is None and flash_4.takes(q_BSHN, v_BSGM):
        return flash_4.attention(q_BSHN, k_BSGN, v_BSGM, scale=scale)
    q_BHSN, k_BGSN, v_BGSM = q_BSHN.transpose(1, 2), k_BSGN.transpose(1, 2), v_BSGM.transpose(1, 2)
    scores = ScoreOptions(scale=scale, allowed=None if allowed_BSS is None else allowed_BSS[:, None])
    if sinks_H is not None:
        return attention_with_sinks(q_BHSN, k_BGSN, v_BGSM, sinks_H, scores, backend).transpose(1, 2)
    if q_BHSN.is_meta:
        return _without_memory(q_BHSN, k_BGSN, v_BGSM, scale, allowed_BSS, backend).transpose(1, 2)
    # Grouped-query heads with a mask: torch would fall back to the backend that materializes scores.
    if q_BHSN.is_cuda and scores.allowed is not None and q_BHSN.shape[1] != k_BGSN.shape[1]:
        _, k_BGSN, v_BGSM = backend_and_keys(q_BHSN, k_BGSN, v_BGSM, scores, backend)
    with backend_order(backend):
        o_BHSM = F.scaled_dot_product_attention(
            q_BHSN,
            k_BGSN,
            v_BGSM,
            attn_mask=scores.allowed,
            is_causal=scores.is_causal,
            scale=scale,
            enable_gqa=q_BHSN.shape[1] != k_BGSN.shape[1],
        )
    return o_BHSM.transpose(1, 2)


def _without_memory(
    q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor, scale: float, allowed_BSS: Tensor | None, backend: str
) -> Tensor:
    """Attention on the meta device, as a GPU's fused backend computes it; `math` runs only if it is asked for."""
    mask, is_causal = None, allowed_BSS is None
    if allowed_BSS is not None:  # The fused backends add a mask of the queries' dtype.
        mask = torch.where(allowed_BSS[:, None], 0.0, float("-inf")).to(q_BHSN.dtype)
    o_BHSM: Tensor
    if backend != "math" and q_BHSN.dtype.itemsize == 2:
        operands = (q_BHSN, k_BGSN, v_BGSM)
        o_BHSM = aten._scaled_dot_product_cudnn_attention(*operands, mask, True, 0.0, is_causal, False, scale=scale)[0]
        return o_BHSM
    own = (q_BHSN, *(repeat_kv(x, q_BHSN.shape[1]) for x in (k_BGSN, v_BGSM)))
    if backend == "math":
        o_BHSM = aten._scaled_dot_product_attention_math(*own, mask, 0.0, is_causal, scale=scale)[0]
    else:
        o_BHSM = aten._scaled_dot_product_efficient_attention(*own, mask, True, 0.0, is_causal, scale=scale)[0]
    return o_BHSM


def attention_with_sinks(
    q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor, sinks_H: Tensor, scores: ScoreOptions, backend: str
) -> Tensor:
    """Attention with a sink logit for each head; arguments as in `causal_attention`, with heads before positions."""
    found, k_BGSN, v_BGSM = backend_and_keys(q_BHSN, k_BGSN, v_BGSM, scores, backend)
    if found == SDPBackend.MATH:
        return _by_products(q_BHSN, k_BGSN, v_BGSM, sinks_H, scores)
    width = v_BGSM.shape[-1]
    if found == SDPBackend.FLASH_ATTENTION and q_BHSN.is_cuda:
        q_BHSN, k_BGSN, v_BGSM = (_in_eights(x) for x in (q_BHSN, k_BGSN, v_BGSM))
    o_BHSM: Tensor = _WithSinks.apply(q_BHSN, k_BGSN, v_BGSM, sinks_H, scores, found)
    return o_BHSM[..., :width]


def _in_eights(x: Tensor) -> Tensor:
    """Pad heads to a multiple of 8 columns, as flash requires; zeros do not change the scores."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


class _WithSinks(torch.autograd.Function):
    """Saves the tensors of the fused backend's backward, with the sink in output and logsumexp."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHSN: Tensor,
        k_BGSN: Tensor,
        v_BGSM: Tensor,
        sinks_H: Tensor,
        scores: ScoreOptions,
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
        softmax = AttentionOutput(o_BHSM, log_sums, together)
        operands = (q_BHSN, k_BGSN, v_BGSM)
        gradients = backward(backend, do_BHSM, operands, ScoreOptions(scale=scale, allowed=allowed), softmax)
        weights_BHS1 = _by_query((_beside(sinks_H, log_sums) - log_sums).exp(), o_BHSM)
        product_BHS1 = (do_BHSM.to(log_sums.dtype) * o_BHSM).sum(-1, keepdim=True)
        dsinks_H = -(weights_BHS1 * product_BHS1).sum((0, 2, 3))
        return *gradients, dsinks_H.to(sinks_H.dtype), None, None


def _beside(sinks_H: Tensor, log_sums: Tensor) -> Tensor:
    """Sinks in the dtype and number of dims of `log_sums`, in which heads are dim 1."""
    return sinks_H.to(log_sums.dtype).reshape(-1, *(1 for _ in log_sums.shape[2:]))


def _by_query(x: Tensor, o_BHSM: Tensor) -> Tensor:
    """One number for each query as B x H x S x 1, without the padding that a backend appends."""
    return x.reshape(*x.shape[:2], -1, 1)[:, :, : o_BHSM.shape[2]]


def _by_products(q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor, sinks_H: Tensor, scores: ScoreOptions) -> Tensor:
    """Attention with sinks with all scores in memory, in float32 or wider."""
    heads, dtype = q_BHSN.shape[1], torch.promote_types(q_BHSN.dtype, torch.float32)
    k_BHSN, v_BHSM = (repeat_kv(x, heads) for x in (k_BGSN, v_BGSM))
    scores_BHSS = (q_BHSN @ k_BHSN.transpose(-2, -1)).to(dtype) * scores.scale
    allowed = scores.allowed
    if allowed is None:
        allowed = torch.ones(scores_BHSS.shape[-2:], dtype=torch.bool, device=q_BHSN.device).tril()
    scores_BHSS = scores_BHSS.masked_fill(~allowed, float("-inf"))
    sinks_BHS1 = _beside(sinks_H, scores_BHSS).expand(*scores_BHSS.shape[:-1], 1)
    weights = torch.cat((scores_BHSS, sinks_BHS1), dim=-1).softmax(dim=-1)
    return weights[..., :-1].to(v_BHSM.dtype) @ v_BHSM
