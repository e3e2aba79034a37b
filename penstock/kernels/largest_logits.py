"""The largest attention logit of each head, for QK-clip (penstock/models/qk_clip.py): its definition, and a kernel.

The kernel makes half of attention's forward products and keeps one number for each block of queries of a head.
"""

import torch
from torch import Tensor

from penstock.kernels.language import HAS_TRITON, ceil_div, tl, triton
from penstock.kernels.launching import on_gpu, start_kernel

SCORES = 1 << 26  # that the definition computes at a time
BLOCK, DEPTH = 128, 64  # queries and keys of a tile, and features that are multiplied at a time


@torch.no_grad()
def largest_logits(q_BSHN: Tensor, k_BSGN: Tensor, scale: float, allowed_BSS: Tensor | None) -> Tensor:
    """The largest scaled product of a query of each head and a key that it may see, float32; None: the causal mask."""
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
