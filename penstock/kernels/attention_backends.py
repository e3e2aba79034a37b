"""Torch's fused attention backends, called by name where their logsumexp is needed.

`F.scaled_dot_product_attention` chooses one of them; its backward pass reads the output and the logsumexp of each
query's scores that forward saved. Code that changes both between forward and backward (sinks,
penstock/kernels/attention.py) calls the operators here. All of them give the natural logarithm, since torch's context
parallelism merges partial softmaxes in the same way.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.base.errors import KernelError
from penstock.kernels import flash_4

ORDERS: dict[str, list[SDPBackend]] = {
    "default": [],
    "math": [SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "auto": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}
"""Values of `kernels.attention`, and torch's backends in the order in which they are tried; `default` leaves it to
torch."""

ORDERS[flash_4.NAME] = ORDERS["auto"]
"""For calls that the package does not support."""

BIAS_STRIDE = 16
"""Rows of a bias begin at multiples of so many numbers in the efficient backend."""

_HIDDEN = {SDPBackend.CUDNN_ATTENTION: -65504.0}
"""Added to masked scores. cuDNN does not accept infinity, so torch gives it the lowest float16."""

_KNOW_SHARED = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
"""Backends with grouped-query heads."""

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Operations on the products of queries and keys before the softmax.

    Attributes:
        scale: factor.
        allowed: boolean, B x 1 x queries x keys, True where a query attends to a key; None for plain causal.
    """

    scale: float
    allowed: Tensor | None = None

    @property
    def is_causal(self) -> bool:
        """Plain causal attention with as many queries as keys."""
        return self.allowed is None


@dataclass(frozen=True)
class AttentionOutput:
    """Results of a fused backend.

    Attributes:
        o_BHSM: the output.
        log_sums: logsumexp of each query, float32 or wider; B x H x S, in some backends padded along S or with a last
            dim of 1.
        rest: further arguments of the backend's backward.
    """

    o_BHSM: Tensor
    log_sums: Tensor
    rest: tuple[Any, ...] = ()


def backend_order(backend: str) -> AbstractContextManager[None]:
    """Context in which torch tries the backends of a name in their order."""
    order = ORDERS[backend]
    return sdpa_kernel(order, set_priority=True) if order else nullcontext()


def backend_for(q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor, scores: ScoreOptions, backend: str) -> SDPBackend:
    """The backend that scaled_dot_product_attention would choose; on the meta device, that of a GPU.

    Raises:
        KernelError: the backend that is asked for cannot run (or torch's RuntimeError).
    """
    if q_BHSN.is_meta:
        if backend == "math":
            return SDPBackend.MATH
        return SDPBackend.CUDNN_ATTENTION if q_BHSN.dtype.itemsize == 2 else SDPBackend.EFFICIENT_ATTENTION
    with backend_order(backend):
        number = torch._fused_sdp_choice(
            q_BHSN,
            k_BGSN,
            v_BGSM,
            scores.allowed,
            0.0,
            scores.is_causal,
            scale=scores.scale,
            enable_gqa=q_BHSN.shape[1] != k_BGSN.shape[1],
        )
    found = SDPBackend(number)
    if found == SDPBackend.ERROR:
        raise KernelError(f"attention: torch's backend {backend} cannot compute this", fix="set kernels.attention=auto")
    return found


def repeat_kv(x_BGSN: Tensor, heads: int) -> Tensor:
    """Keys or values repeated for each query head."""
    groups = heads // x_BGSN.shape[1]
    return x_BGSN if groups == 1 else x_BGSN.repeat_interleave(groups, dim=1)


def backend_and_keys(
    q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor, scores: ScoreOptions, backend: str
) -> tuple[SDPBackend, Tensor, Tensor]:
    """The backend, and keys and values in its form: repeated for each query head if it has no grouped-query heads.

    `math` runs only if it is asked for or nothing else can: repeated keys need less memory than all scores.
    """
    heads = q_BHSN.shape[1]
    is_shared = k_BGSN.shape[1] != heads
    # The efficient backend never has grouped-query heads, and asking torch would only fail.
    if not (is_shared and backend == "efficient"):
        found = backend_for(q_BHSN, k_BGSN, v_BGSM, scores, backend)
        if not is_shared or found in _KNOW_SHARED or backend == "math":
            return found, k_BGSN, v_BGSM
    k_BHSN, v_BHSM = repeat_kv(k_BGSN, heads), repeat_kv(v_BGSM, heads)
    return backend_for(q_BHSN, k_BHSN, v_BHSM, scores, backend), k_BHSN, v_BHSM


def bias_of(scores: ScoreOptions, q_BHSN: Tensor, backend: SDPBackend) -> Tensor | None:
    """Addend of the scores in the dtype of the queries: 0 where a query attends, a very low number elsewhere."""
    if scores.allowed is None:
        return None
    hidden = _HIDDEN.get(backend, float("-inf"))
    bias = torch.where(scores.allowed, 0.0, hidden).to(q_BHSN.dtype)
    if backend != SDPBackend.EFFICIENT_ATTENTION:
        return bias
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % BIAS_STRIDE))[..., :keys].expand(-1, q_BHSN.shape[1], -1, -1)


def forward(
    backend: SDPBackend, q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor, scores: ScoreOptions
) -> AttentionOutput:
    """Softmax attention by a fused backend."""
    operands, bias, causal = (q_BHSN, k_BGSN, v_BGSM), bias_of(scores, q_BHSN, backend), scores.is_causal
    scale = scores.scale
    if backend == SDPBackend.CUDNN_ATTENTION:
        results = aten._scaled_dot_product_cudnn_attention(*operands, bias, True, 0.0, causal, False, scale=scale)
    elif backend == SDPBackend.EFFICIENT_ATTENTION:
        results = aten._scaled_dot_product_efficient_attention(*operands, bias, True, 0.0, causal, scale=scale)
    elif q_BHSN.device.type == "cpu":
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        results = flash(*operands, 0.0, causal, attn_mask=bias, scale=scale)
    else:
        results = aten._scaled_dot_product_flash_attention(*operands, 0.0, causal, False, scale=scale)
    o_BHSM, log_sums, *rest = results
    return AttentionOutput(o_BHSM, log_sums, tuple(rest))


def backward(
    backend: SDPBackend,
    do_BHSM: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    scores: ScoreOptions,
    softmax: AttentionOutput,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values (`operands`), from the gradient and the saved results of forward.

    The backends compute probabilities as exp(scores - log_sums).
    """
    bias, causal, scale = bias_of(scores, operands[0], backend), scores.is_causal, scores.scale
    given = (do_BHSM, *operands)
    kept = (softmax.o_BHSM, softmax.log_sums)
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        wanted, (seed, offset) = [True, True, True, False], softmax.rest
        function = aten._scaled_dot_product_efficient_attention_backward
        found = function(*given, bias, *kept, seed, offset, 0.0, wanted, causal, scale=scale)
    elif backend == SDPBackend.CUDNN_ATTENTION:
        *lengths, seed, offset, _ = softmax.rest
        function = aten._scaled_dot_product_cudnn_attention_backward
        found = function(*given, *kept, seed, offset, bias, *lengths, 0.0, causal, scale=scale)
    elif do_BHSM.device.type == "cpu":
        function = aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = function(*given, *kept, 0.0, causal, attn_mask=bias, scale=scale)
    else:
        *lengths, seed, offset, _ = softmax.rest
        function = aten._scaled_dot_product_flash_attention_backward
        found = function(*given, *kept, *lengths, 0.0, causal, seed, offset, scale=scale)
    dq_BHSN, dk_BGSN, dv_BGSM = found[:3]
    return dq_BHSN, dk_BGSN, dv_BGSM
