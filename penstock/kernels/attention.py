"""Causal attention through torch's scaled_dot_product_attention or flash-attn-4, with the backend chosen by name.

On Hopper, of torch's backends only cuDNN is fast for the heads of latent attention (192 wide for query and key, 128 for
value), so `auto` tries it first. flash-attn-4, which `auto` takes where it is installed,
is faster; calls that it does not support go to torch's backends in the order of `auto`. Where torch would materialize
all scores (a mask with grouped-query heads), keys and values are repeated for each query head instead. On the meta
device the operator of a fused backend is called by name, because torch would choose the one that materializes the
scores.

Sinks (gpt-oss): each head has a logit s that takes part in the softmax and has no value. With L the logsumexp of a
query's scores, a fused kernel and one pass over its output suffice:

    log(exp L + exp s) = L'        o' = o exp(L - L')

Forward of a fused backend returns L, and its backward recomputes probabilities from it and needs `do . o`. So both are
called by name, and given L' and o' backward returns the gradients of the softmax with the sink. The gradient of the
sink is

    ds = - sum over the queries of exp(s - L') (do . o')

In bfloat16, o' is rounded twice. Without a fused backend the scores are materialized (`_by_products`).
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.base.errors import KernelError
from penstock.kernels.language import HAS_TRITON, ceil_div, on_gpu, start_kernel, tl, triton
from penstock.kernels.tuning import target_of

FLASH_4_NAME = "flash-4"  # value of `kernels.attention`

# Widest heads of keys and of values, by chip; `FLASH_4_LATENT` runs on all.
FLASH_4_WIDEST: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"sm_90": (256, 256), "sm_100": (128, 128), "sm_103": (128, 128)}
)
FLASH_4_LATENT = (192, 128)
FLASH_4_MULTIPLE = 8  # of which head widths are multiples: 16 bytes
# Chips on which `auto` takes it, because it was faster there (benchmarks/results/attention-h200.json).
FLASH_4_MEASURED = ("sm_90",)


def flash_4_takes(q_BSHN: Tensor, v_BSGM: Tensor) -> bool:
    """Whether the package has a kernel for these heads on their device."""
    if not q_BSHN.is_cuda or q_BSHN.dtype.itemsize != 2:
        return False
    return flash_4_has_kernel(q_BSHN.shape[-1], v_BSGM.shape[-1], target_of(q_BSHN.device))


def flash_4_has_kernel(keys: int, values: int, target: str) -> bool:
    """Whether the package has a kernel for heads of these widths on a chip."""
    if target not in FLASH_4_WIDEST or keys % FLASH_4_MULTIPLE or values % FLASH_4_MULTIPLE:
        return False
    widest = FLASH_4_WIDEST[target]
    return (keys, values) == FLASH_4_LATENT or (keys <= widest[0] and values <= widest[1])


def flash_4_attention(q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor, *, scale: float) -> Tensor:
    """`penstock.kernels.attention.causal_attention` without mask and sinks. Returns o_BSHM.

    The kernels read queries, keys and values with positions before heads, as the models have them, and take heads whose
    keys are wider than their values (latent attention). Masks and sinks stay with torch's backends. The package
    compiles a kernel at the first call for its head widths, a few seconds for each direction.

    Gradients of queries are summed in no fixed order, so a repeated step may differ in its last bits. With
    `training.deterministic` the package sums in a fixed order, which is slower.
    """
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    how = {"softmax_scale": scale, "causal": True, "deterministic": is_deterministic}
    o_BSHM: Tensor = _flash_4_package().flash_attn_func(q_BSHN, k_BSGN, v_BSGM, **how)[0]
    return o_BSHM


@cache
def _flash_4_package() -> Any:
    # The package's compiler warns about its own code at every kernel.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"cutlass\.")
    return import_module("flash_attn.cute")


# Values of `kernels.attention`, and torch's backends in the order in which they are tried.
ORDERS: dict[str, list[SDPBackend]] = {
    "default": [],  # torch's own order
    "math": [SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "auto": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}
ORDERS[FLASH_4_NAME] = ORDERS["auto"]  # for calls that it does not support

BIAS_STRIDE = 16  # numbers, at multiples of which rows of a bias begin in the efficient backend
# Added to masked scores. cuDNN does not accept infinity, so torch gives it the lowest float16.
_HIDDEN = {SDPBackend.CUDNN_ATTENTION: -65504.0}
_NONE_CAN_RUN = ("No available kernel", "No viable backend")  # how torch's errors begin
_KNOW_SHARED = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)  # backends with grouped-query heads

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Operations on the products of queries and keys before the softmax."""

    scale: float
    allowed: Tensor | None = None  # boolean, B x 1 x queries x keys: a query attends to a key; None for plain causal

    @property
    def is_causal(self) -> bool:
        """Plain causal attention with as many queries as keys."""
        return self.allowed is None


@dataclass(frozen=True)
class AttentionOutput:
    """Results of a fused backend."""

    o_BHSM: Tensor
    log_sums: Tensor  # of each query, float32 or wider: B x H x S, in some backends padded along S or x 1
    rest: tuple[Any, ...] = ()  # further arguments of the backend's backward: seeds and lengths


@contextmanager
def backend_order(backend: str, q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor) -> Iterator[None]:
    """Context in which torch tries the backends of a name in their order; raises KernelError if none can run."""
    order = ORDERS[backend]
    try:
        with sdpa_kernel(order, set_priority=True) if order else nullcontext():
            yield
    except RuntimeError as error:
        if not str(error).startswith(_NONE_CAN_RUN):
            raise
        got = f"{q_BHSN.dtype}, {q_BHSN.shape[1]} heads of queries and {k_BGSN.shape[1]} of keys"
        got += f", {q_BHSN.shape[-1]} columns wide, values {v_BGSM.shape[-1]}"
        got += ", training.deterministic" if torch.are_deterministic_algorithms_enabled() else ""
        what = f"torch's attention backend {backend} cannot compute this"
        raise KernelError(what, got=got.removeprefix("torch."), fix="kernels.attention=auto") from error


def backend_for(q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor, scores: ScoreOptions, backend: str) -> SDPBackend:
    """The backend that scaled_dot_product_attention would choose; on the meta device, that of a GPU.

    Raises KernelError if the backend that is asked for cannot run.
    """
    if q_BHSN.is_meta:
        if backend == "math":
            return SDPBackend.MATH
        return SDPBackend.CUDNN_ATTENTION if q_BHSN.dtype.itemsize == 2 else SDPBackend.EFFICIENT_ATTENTION
    how: dict[str, Any] = {"scale": scores.scale, "enable_gqa": q_BHSN.shape[1] != k_BGSN.shape[1]}
    with backend_order(backend, q_BHSN, k_BGSN, v_BGSM):
        return SDPBackend(torch._fused_sdp_choice(q_BHSN, k_BGSN, v_BGSM, scores.allowed, 0.0, scores.is_causal, **how))


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
        chosen_backend = backend_for(q_BHSN, k_BGSN, v_BGSM, scores, backend)
        if not is_shared or chosen_backend in _KNOW_SHARED or backend == "math":
            return chosen_backend, k_BGSN, v_BGSM
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
    if keys % BIAS_STRIDE:
        bias = F.pad(bias, (0, -keys % BIAS_STRIDE))[..., :keys]
    return bias.expand(-1, q_BHSN.shape[1], -1, -1)  # one for all heads


def forward(
    backend: SDPBackend, q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor, scores: ScoreOptions
) -> AttentionOutput:
    operands, bias = (q_BHSN, k_BGSN, v_BGSM), bias_of(scores, q_BHSN, backend)
    causal, scale = scores.is_causal, scores.scale
    # Everywhere: logsumexp is computed, there is no dropout (0.0), and no mask of dropped scores is returned (False).
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
    """Gradients of `operands` (queries, keys, values). The backends compute probabilities as exp(scores - log_sums)."""
    bias, causal, scale = bias_of(scores, operands[0], backend), scores.is_causal, scores.scale
    given = (do_BHSM, *operands)
    kept = (softmax.o_BHSM, softmax.log_sums)
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        wanted, (seed, offset) = [True, True, True, False], softmax.rest
        function = aten._scaled_dot_product_efficient_attention_backward
        gradients = function(*given, bias, *kept, seed, offset, 0.0, wanted, causal, scale=scale)
    elif backend == SDPBackend.CUDNN_ATTENTION:
        *lengths, seed, offset, _ = softmax.rest
        function = aten._scaled_dot_product_cudnn_attention_backward
        gradients = function(*given, *kept, seed, offset, bias, *lengths, 0.0, causal, scale=scale)
    elif do_BHSM.device.type == "cpu":
        function = aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = function(*given, *kept, 0.0, causal, attn_mask=bias, scale=scale)
    else:
        *lengths, seed, offset, _ = softmax.rest
        function = aten._scaled_dot_product_flash_attention_backward
        gradients = function(*given, *kept, *lengths, 0.0, causal, seed, offset, scale=scale)
    dq_BHSN, dk_BGSN, dv_BGSM = gradients[:3]
    return dq_BHSN, dk_BGSN, dv_BGSM


def causal_attention(
    q_BSHN: Tensor,
    k_BSGN: Tensor,
    v_BSGM: Tensor,
    *,
    scale: float,
    allowed_BSS: Tensor | None,
    backend: str,  # a key of `ORDERS`
    sinks_H: Tensor | None = None,  # a logit of each query head; None for a plain softmax
) -> Tensor:
    """Softmax attention of each position over itself and the positions before it: o_BSHM in the dtype of q.

    Each head of keys and values serves H / G heads of queries; values may be narrower or wider than keys. `scale` is a
    factor on the scores before the softmax. `allowed_BSS` is a boolean mask, query position by key position, causal
    already; None is causal over the whole row. Raises as `backend_for` if a named backend cannot run.
    """
    is_plain = allowed_BSS is None and sinks_H is None
    if is_plain and backend == FLASH_4_NAME and flash_4_takes(q_BSHN, v_BSGM):
        return flash_4_attention(q_BSHN, k_BSGN, v_BSGM, scale=scale)
    q_BHSN, k_BGSN, v_BGSM = q_BSHN.transpose(1, 2), k_BSGN.transpose(1, 2), v_BSGM.transpose(1, 2)
    scores = ScoreOptions(scale=scale, allowed=None if allowed_BSS is None else allowed_BSS[:, None])
    if sinks_H is not None:
        return attention_with_sinks(q_BHSN, k_BGSN, v_BGSM, sinks_H, scores, backend).transpose(1, 2)
    if q_BHSN.is_meta and backend != "math":
        chosen_backend, k_BGSN, v_BGSM = backend_and_keys(q_BHSN, k_BGSN, v_BGSM, scores, backend)
        return forward(chosen_backend, q_BHSN, k_BGSN, v_BGSM, scores).o_BHSM.transpose(1, 2)
    if q_BHSN.is_cuda and may_need_own_keys(q_BHSN, k_BGSN, scores, backend):
        _, k_BGSN, v_BGSM = backend_and_keys(q_BHSN, k_BGSN, v_BGSM, scores, backend)
    how: dict[str, Any] = {"scale": scale, "enable_gqa": q_BHSN.shape[1] != k_BGSN.shape[1]}
    operands = (q_BHSN, k_BGSN, v_BGSM)
    with backend_order(backend, *operands):
        o_BHSM = F.scaled_dot_product_attention(*operands, scores.allowed, is_causal=scores.is_causal, **how)
    return o_BHSM.transpose(1, 2)


def may_need_own_keys(q_BHSN: Tensor, k_BGSN: Tensor, scores: ScoreOptions, backend: str) -> bool:
    """Whether a GPU's fused backends with grouped-query heads may refuse: they take no mask, or no float32."""
    if q_BHSN.shape[1] == k_BGSN.shape[1] or backend == "math":
        return False
    return backend == "efficient" or not scores.is_causal or q_BHSN.dtype.itemsize > 2


def attention_with_sinks(
    q_BHSN: Tensor, k_BGSN: Tensor, v_BGSM: Tensor, sinks_H: Tensor, scores: ScoreOptions, backend: str
) -> Tensor:
    """Attention with a sink logit for each head; arguments as in `causal_attention`, with heads before positions."""
    chosen_backend, k_BGSN, v_BGSM = backend_and_keys(q_BHSN, k_BGSN, v_BGSM, scores, backend)
    if chosen_backend == SDPBackend.MATH:
        return _by_products(q_BHSN, k_BGSN, v_BGSM, sinks_H, scores)
    heads: tuple[Tensor, ...] = (q_BHSN, k_BGSN, v_BGSM)
    if chosen_backend == SDPBackend.FLASH_ATTENTION and q_BHSN.is_cuda:
        # Flash requires heads of a multiple of 8 columns; zeros do not change the scores.
        heads = tuple(F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in heads)
    return _WithSinks.apply(*heads, sinks_H, scores, chosen_backend)[..., : v_BGSM.shape[-1]]


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
        log_sums = torch.logaddexp(plain.log_sums, _beside(sinks_H, plain.log_sums))  # L'
        o_BHSM = plain.o_BHSM.mul_(_by_query((plain.log_sums - log_sums).exp(), plain.o_BHSM))  # o' = o exp(L - L')
        ctx.save_for_backward(q_BHSN, k_BGSN, v_BGSM, sinks_H, o_BHSM, log_sums, scores.allowed)
        ctx.how = backend, scores.scale, plain.rest
        return o_BHSM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BHSM: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSN, k_BGSN, v_BGSM, sinks_H, o_BHSM, log_sums, allowed = ctx.saved_tensors
        backend, scale, rest = ctx.how
        scores, softmax = ScoreOptions(scale=scale, allowed=allowed), AttentionOutput(o_BHSM, log_sums, rest)
        gradients = backward(backend, do_BHSM, (q_BHSN, k_BGSN, v_BGSM), scores, softmax)
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


SCORES = 1 << 26  # that the definition computes at a time
BLOCK, DEPTH = 128, 64  # queries and keys of a tile, and features that are multiplied at a time


@torch.no_grad()
def largest_logits(q_BSHN: Tensor, k_BSGN: Tensor, scale: float, allowed_BSS: Tensor | None) -> Tensor:
    """The largest scaled product of a query of each head and a key that it may see, float32; None: the causal mask.

    The kernel makes half of attention's forward products and keeps one number for each block of queries of a head.
    """
    if on_gpu(q_BSHN) and q_BSHN.dtype.itemsize == 2 and (HAS_TRITON or q_BSHN.is_meta):
        return logits_by_kernel(q_BSHN, k_BSGN, allowed_BSS) * scale
    batch, length, heads, _ = q_BSHN.shape
    k_BHNS = k_BSGN.repeat_interleave(heads // k_BSGN.shape[2], dim=2).permute(0, 2, 3, 1)
    places_S = torch.arange(length, device=q_BSHN.device)
    peaks = []
    size = max(1, SCORES // (batch * heads * length))
    for first in range(0, length, size):
        rows = slice(first, first + size)
        scores_BHSS = q_BSHN[:, rows].transpose(1, 2) @ k_BHNS
        mask = places_S[rows, None] >= places_S if allowed_BSS is None else allowed_BSS[:, None, rows]
        peaks.append(scores_BHSS.float().masked_fill(~mask, -torch.inf).amax(dim=(0, 2, 3)))
    return torch.stack(peaks).amax(0) * scale


def logits_by_kernel(q_BSHN: Tensor, k_BSGN: Tensor, allowed_BSS: Tensor | None) -> Tensor:
    """`largest_logits` with a scale of 1, in the kernel."""
    q_BSHN, k_BSGN = q_BSHN.contiguous(), k_BSGN.contiguous()
    batch, length, heads, width = q_BSHN.shape
    blocks = ceil_div(length, BLOCK)
    peaks = torch.empty(batch, blocks, heads, dtype=torch.float32, device=q_BSHN.device)
    keys = BLOCK if allowed_BSS is None else BLOCK // 2  # of a tile: masks take registers
    start_kernel(
        largest_logits_kernel, (blocks, heads, batch),
        q_BSHN, k_BSGN, None if allowed_BSS is None else allowed_BSS.contiguous(), peaks, length,
        H=heads, G=k_BSGN.shape[2], N=width, BLOCK=BLOCK, KEYS=keys, DEPTH=DEPTH, num_warps=8,
    )  # fmt: skip
    return peaks.amax((0, 1))


@triton.jit(do_not_specialize=["length"])
def largest_logits_kernel(
    q_ptr, k_ptr, allowed_ptr, largest_ptr, length,  # q B x S x H x N, k B x S x G x N, largest B x blocks x H
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One block of queries of a head, and all keys up to its last one."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    place_S, place_K, column_N = tl.arange(0, BLOCK), tl.arange(0, KEYS), tl.arange(0, DEPTH)
    query_S = block * BLOCK + place_S
    q_ptr += ((row * length + block * BLOCK) * H + head) * N
    k_ptr += (row * length * G + head // (H // G)) * N
    if allowed_ptr is not None:
        allowed_ptr += (row * length + block * BLOCK) * length
    largest_S = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, tl.minimum((block + 1) * BLOCK, length), KEYS):
        key_S = first + place_K
        logits_SS = tl.zeros([BLOCK, KEYS], tl.float32)
        for start in range(0, N, DEPTH):
            inside_N = start + column_N < N
            q_ptrs = q_ptr + place_S[:, None] * (H * N) + (start + column_N)[None, :]
            k_ptrs = k_ptr + place_K[None, :] * (G * N) + (start + column_N)[:, None]
            q_SN = tl.load(q_ptrs, mask=(query_S < length)[:, None] & inside_N[None, :], other=0.0)
            k_NS = tl.load(k_ptrs, mask=(key_S < length)[None, :] & inside_N[:, None], other=0.0)
            logits_SS = tl.dot(q_SN, k_NS, logits_SS, input_precision="ieee")
        seen_SS = (query_S[:, None] >= key_S[None, :]) & (query_S < length)[:, None]
        if allowed_ptr is not None:
            allowed_SS = tl.load(allowed_ptr + place_S[:, None] * length + key_S[None, :], mask=seen_SS, other=0)
            seen_SS = seen_SS & (allowed_SS != 0)
        largest_S = tl.maximum(largest_S, tl.max(tl.where(seen_SS, logits_SS, float("-inf")), 1))
        k_ptr += KEYS * G * N
    tl.store(largest_ptr + (row * tl.num_programs(0) + block) * H + head, tl.max(largest_S, 0))
