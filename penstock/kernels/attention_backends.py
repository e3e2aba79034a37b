"""The fused backends of torch's scaled_dot_product_attention by their own names, for who needs the log of their sums.

`F.scaled_dot_product_attention` chooses one of them, and its backward pass reads what forward kept: the output and, for
each query, the logarithm of the sum of the exponentials of its scores. Whoever changes the two between forward and
backward (penstock/kernels/attention.py) calls the operators here. Torch's own context parallelism merges partial
softmaxes in the same way, so the logarithm is a natural one in all of them.
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
    "auto": [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ],
}
"""What `kernels.attention` may say, and torch's backends in the order in which they are tried; none is torch's own."""

ORDERS[flash_4.NAME] = ORDERS["auto"]
"""For what the package does not take."""

BIAS_STRIDE = 16
"""The efficient backend reads rows of a bias that begin at multiples of so many numbers."""

_HIDDEN = {SDPBackend.CUDNN_ATTENTION: -65504.0}
"""Added to scores that are not looked at. cuDNN has trouble with infinity, so torch gives it float16's least number."""

_KNOW_SHARED = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
"""Backends that know heads with shared keys."""

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What becomes of products of queries and keys before the softmax.

    Attributes:
        scale: factor.
        allowed: boolean, B x 1 x queries x keys, True where a query looks at a key; None for plain causal.
    """

    scale: float
    allowed: Tensor | None = None

    @property
    def is_causal(self) -> bool:
        """Each query sees its own key and those before it; as many queries as keys."""
        return self.allowed is None


@dataclass(frozen=True)
class AttentionOutput:
    """What a fused backend gives.

    Attributes:
        o_BHSM: the output.
        log_sums: float32 or wider, of each query; B x H x S, perhaps with some more at the end of S, or a dim of 1.
        rest: what the backend's backward wants besides.
    """

    o_BHSM: Tensor
    log_sums: Tensor
    rest: tuple[Any, ...] = ()


def backend_order(backend: str) -> AbstractContextManager[None]:
    """While it is entered, torch tries the backends of a name in their order."""
    order = ORDERS[backend]
    return sdpa_kernel(order, set_priority=True) if order else nullcontext()


def backend_for(q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor, scores: ScoreOptions, backend: str) -> SDPBackend:
    """The backend that scaled_dot_product_attention would take; of the meta device, a GPU's.

    Args:
        q_BHSN: queries, with the gradient that they will have.
        k_BGSN: keys.
        v_BGSM: values.
        scores: of the call.
        backend: a name of `ORDERS`.

    Raises:
        KernelError: the one that is named cannot run.
        RuntimeError: the same, from torch.
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
    """Keys or values once for each query head."""
    groups = heads // x_BGSN.shape[1]
    return x_BGSN if groups == 1 else x_BGSN.repeat_interleave(groups, dim=1)


def backend_and_keys(
    q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor, scores: ScoreOptions, backend: str
) -> tuple[SDPBackend, Tensor, Tensor]:
    """The backend that runs, and keys and values as it wants them: for each head if it does not know shared ones.

    More keys rather than all scores: `math` runs only if it is asked for, or nothing else can.
    """
    heads = q_BHSN.shape[1]
    is_shared = k_BGSN.shape[1] != heads
    if not (is_shared and backend == "efficient"):
        found = backend_for(q_BHSN, k_BGSN, v_BGSM, scores, backend)
        if not is_shared or found in _KNOW_SHARED or backend == "math":
            return found, k_BGSN, v_BGSM
    k_BHSN, v_BHSM = repeat_kv(k_BGSN, heads), repeat_kv(v_BGSM, heads)
    return backend_for(q_BHSN, k_BHSN, v_BHSM, scores, backend), k_BHSN, v_BHSM


def bias_of(scores: ScoreOptions, q_BHSN: Tensor, backend: SDPBackend) -> Tensor | None:
    """What is added to the scores, in the dtype of the queries: 0 where a query looks, and far below elsewhere."""
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
    """Gradients of queries, keys and values.

    Args:
        backend: that gave the softmax.
        do_BHSM: gradient of the output.
        operands: q_BHSN, k_BGSN, v_BGSM.
        scores: as in forward.
        softmax: what forward gave. Probabilities are the exponentials of scores less `log_sums`.
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
