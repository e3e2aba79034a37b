"""What causal attention in 8 bits is, in eager PyTorch with all scores in memory; for CPUs and tests. Experimental.

Queries, keys, values and the gradient of the output have one scale, a power of two, for each head and block of `BLOCK`
positions, so their transposed copies, which other products take, hold the same numbers. Probabilities are below one and
have a fixed scale forward; backward, where long rows make them tiny, they and dS have a scale for each 1 x `BLOCK`, in
the direction that is contracted. All seven products are of 8-bit numbers:

    forward     S = Q K^T       O = P V
    backward    S again         dV = P^T dO     dP = dO V^T     dS = P (dP - delta)     dQ = dS K     dK = dS^T Q

Scores, sums and delta are float32, and two choices keep dS right. It is a small difference of large numbers whose sum
over a row is zero, and what keeps that sum from zero is multiplied with whatever all keys have in common. So the output
is divided by the sum of the probabilities that were multiplied, the rounded ones; and delta is the product of this
output with the gradient as it was quantized, which dP is made of too. With the usual form of either, gradients of rows
that look at one key almost alone were lost in noise: 4 dB where this has 23.

A block's scale is also that of its earlier positions. So within `BLOCK` positions a later token can move the rounding
of an earlier one, though only of numbers that are subnormal beside it, as scales are powers of two. What comes out of
earlier blocks it cannot change.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels.float8.formats import Format
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.float8.reference import dequantize, quantize

BLOCK = 128
"""Positions that share a scale."""

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """What a call computes besides its tensors.

    Attributes:
        scale: factor on the scores.
        forward: format of queries, keys, values and probabilities.
        gradient: format of the gradients of the output and of the scores.
    """

    scale: float
    forward: Format
    gradient: Format


class Softmax(NamedTuple):
    """What forward gives.

    Attributes:
        o_BHSM: output, float32.
        log_sums_BHS: log2 of the sum of a row's exponentials, of scores in units of log2.
    """

    o_BHSM: Tensor
    log_sums_BHS: Tensor


def attention(
    q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, *, scale: float, forward: Format, gradient: Format
) -> Tensor:
    """Softmax attention of each position over itself and the positions before it; differentiable.

    Args:
        q_BSHN: queries.
        k_BSGN: keys; G divides H.
        v_BSGM: values.
        scale: factor on the scores before the softmax.
        forward: format of activations.
        gradient: format of gradients.

    Returns:
        o_BSHM in the dtype of q.
    """
    o_BSHM: Tensor = _Float8Attention.apply(
        q_BSHN, k_BSGN, v_BSGM, AttentionRule(scale=scale, forward=forward, gradient=gradient)
    )
    return o_BSHM


def quantize_heads(x_BSHN: Tensor, form: Format) -> Quantized:
    """B x H x S x N, a scale for each block of positions."""
    return quantize(x_BSHN.transpose(1, 2), (BLOCK, 0), form, "power-of-two")


def attention_forward(q: Quantized, k: Quantized, v: Quantized, rule: AttentionRule) -> Softmax:
    """Output and sums, of operands as `quantize_heads` makes them."""
    scores_BHSS = _scores(q, k, rule)
    # An integer, so that it changes no rounding: kernels find it tile by tile.
    top_BHS1 = scores_BHSS.amax(-1, keepdim=True).ceil()
    p_BHSS = (scores_BHSS - top_BHS1).exp2()
    fixed = 2.0 ** math.floor(math.log2(rule.forward.largest))
    rounded_BHSS = (p_BHSS * fixed).to(rule.forward.dtype).float()
    o_BHSM = rounded_BHSS @ _for_each_head(v, q) / rounded_BHSS.sum(-1, keepdim=True)
    return Softmax(o_BHSM, (top_BHS1 + p_BHSS.sum(-1, keepdim=True).log2())[..., 0])


def attention_backward(
    do_BSHM: Tensor, operands: tuple[Quantized, Quantized, Quantized], softmax: Softmax, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, B x S x heads x width, float32.

    Args:
        do_BSHM: gradient of the output.
        operands: queries, keys, values.
        softmax: what forward gave, the output as it was returned.
        rule: as in forward.
    """
    q, k, v = operands
    do = quantize_heads(do_BSHM, rule.gradient)
    do_BHSM, heads = dequantize(do), k.values.shape[1]
    delta_BHS1 = (do_BHSM * softmax.o_BHSM.float()).sum(-1, keepdim=True)
    p_BHSS = (_scores(q, k, rule) - softmax.log_sums_BHS[..., None]).exp2()
    ds_BHSS = p_BHSS * (do_BHSM @ _for_each_head(v, q).transpose(-1, -2) - delta_BHS1)
    dq_BHSN = _rounded(ds_BHSS, rule.gradient) @ _for_each_head(k, q) * rule.scale
    dk_BHSN = _rounded(ds_BHSS.transpose(-1, -2), rule.gradient) @ dequantize(q) * rule.scale
    dv_BHSM = _rounded(p_BHSS.transpose(-1, -2), rule.forward) @ do_BHSM
    dk_BGSN, dv_BGSM = (x.unflatten(1, (heads, -1)).sum(2) for x in (dk_BHSN, dv_BHSM))
    return dq_BHSN.transpose(1, 2), dk_BGSN.transpose(1, 2), dv_BGSM.transpose(1, 2)


class _Float8Attention(torch.autograd.Function):
    """Keeps what was quantized, and the output."""

    @staticmethod
    def forward(ctx: Any, q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, rule: AttentionRule) -> Tensor:
        q, k, v = (quantize_heads(x, rule.forward) for x in (q_BSHN, k_BSGN, v_BSGM))
        softmax = attention_forward(q, k, v, rule)
        o_BSHM = softmax.o_BHSM.transpose(1, 2).to(q_BSHN.dtype).contiguous()
        parts = [tensor for one in (q, k, v) for tensor in (one.values, one.scales)]
        ctx.save_for_backward(o_BSHM, softmax.log_sums_BHS, *parts)
        ctx.rule, ctx.dtypes = rule, (q_BSHN.dtype, k_BSGN.dtype, v_BSGM.dtype)
        return o_BSHM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BSHM: Tensor) -> tuple[Tensor | None, ...]:
        o_BSHM, log_sums_BHS, *parts = ctx.saved_tensors
        q, k, v = (Quantized(*pair, (BLOCK, 0)) for pair in zip(parts[::2], parts[1::2], strict=True))
        softmax = Softmax(o_BSHM.transpose(1, 2), log_sums_BHS)
        gradients = attention_backward(do_BSHM, (q, k, v), softmax, ctx.rule)
        return *(one.to(dtype) for one, dtype in zip(gradients, ctx.dtypes, strict=True)), None


def _scores(q: Quantized, k: Quantized, rule: AttentionRule) -> Tensor:
    """B x H x S x S in units of log2, minus infinity where a query does not look."""
    scores_BHSS = dequantize(q) @ _for_each_head(k, q).transpose(-1, -2) * (rule.scale * LOG2_E)
    later = torch.ones(scores_BHSS.shape[-2:], dtype=torch.bool, device=scores_BHSS.device).triu(1)
    return scores_BHSS.masked_fill(later, float("-inf"))


def _for_each_head(x: Quantized, q: Quantized) -> Tensor:
    """Keys or values once for each query head, float32."""
    x_BGSN = dequantize(x)
    return x_BGSN.repeat_interleave(q.values.shape[1] // x_BGSN.shape[1], dim=1)


def _rounded(x_BHSS: Tensor, form: Format) -> Tensor:
    return dequantize(quantize(x_BHSS, (1, BLOCK), form, "power-of-two"))
