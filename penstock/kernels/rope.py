"""Rotary position embedding, and the assembly of latent attention's heads, each in one kernel forward and one backward.

The inverse of a rotation is the rotation by the negative angle, so backward is forward with the sine negated. A program
handles one token: it loads cosines and sines once for all heads, which it walks over in blocks.

`mla_heads` writes the rotated query and the assembled key where attention reads them, without slices and
concatenations. The value is a view of `kv`, because attention kernels accept any strides with a contiguous last dim; in
backward one kernel writes both halves of the gradient of `kv`.

Inputs and incoming gradients may have any order of batch, position and head; only the last dim must be contiguous.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.language import start_kernel, tl, triton
from penstock.kernels.tuning import KernelLaunch

# Rows are heads: 16 heads of 128 in bfloat16 are one 16-byte load for each of 256 threads.
LAUNCH = KernelLaunch(block_rows=16, block_columns=0, warps=8)


def rotate(x_BSHN: Tensor, cos_BSP: Tensor, sin_BSP: Tensor) -> Tensor:
    """`penstock.kernels.reference.rotate`; the result is contiguous. Raises KernelError if angles do not fit."""
    _check(x_BSHN, cos_BSP, sin_BSP, min(2 * cos_BSP.shape[-1], x_BSHN.shape[-1]))
    return _Rotate.apply(x_BSHN, cos_BSP.contiguous(), sin_BSP.contiguous())


def mla_heads(
    q_BSHN: Tensor, kv_BSHN: Tensor, k_rope_BSP: Tensor, cos_BSP: Tensor, sin_BSP: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`penstock.kernels.reference.mla_heads` in one kernel, and one kernel backward.

    Queries and keys are contiguous; the value is a view of kv, which must not be changed in place. Raises KernelError
    where angles do not fit the rotary part, or widths do not fit each other.
    """
    _check(q_BSHN, cos_BSP, sin_BSP, k_rope_BSP.shape[-1])
    if q_BSHN.shape[-1] <= k_rope_BSP.shape[-1] or kv_BSHN.shape[-1] <= q_BSHN.shape[-1] - k_rope_BSP.shape[-1]:
        what = "mla_heads: a query must be wider than its rotary part, and kv wider than the rest of it"
        got = f"query {q_BSHN.shape[-1]}, kv {kv_BSHN.shape[-1]}, rotary {k_rope_BSP.shape[-1]}"
        raise KernelError(what, got=got)
    return _MlaHeads.apply(q_BSHN, kv_BSHN, k_rope_BSP, cos_BSP.contiguous(), sin_BSP.contiguous())


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHN: Tensor, cos_BSP: Tensor, sin_BSP: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BSP, sin_BSP)
        return _turn(x_BSHN, cos_BSP, sin_BSP, direction=1.0)  # by the angles; -1 is back

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BSHN: Tensor) -> tuple[Tensor, None, None]:
        cos_BSP, sin_BSP = ctx.saved_tensors
        return _turn(dout_BSHN, cos_BSP, sin_BSP, direction=-1.0), None, None


def _turn(x_BSHN: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, direction: float) -> Tensor:
    batch, positions, heads, width = x_BSHN.shape
    rotary = 2 * cos_BSP.shape[-1]
    x_BSHN = _with_contiguous_rows(x_BSHN)
    out_BSHN = torch.empty_like(x_BSHN, memory_format=torch.contiguous_format)
    start_kernel(
        rotate_kernel, (positions, batch),
        x_BSHN, cos_BSP, sin_BSP, out_BSHN, *x_BSHN.stride()[:3], *_angle_strides(cos_BSP, batch),
        H=heads, P=rotary, PLAIN=width - rotary, DIRECTION=direction, BLOCK_P=triton.next_power_of_2(rotary),
        BLOCK_N=triton.next_power_of_2(max(1, width - rotary)), **_heads_at_a_time(heads),
    )  # fmt: skip
    return out_BSHN


class _MlaHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BSHN: Tensor, kv_BSHN: Tensor, k_rope_BSP: Tensor, cos_BSP: Tensor, sin_BSP: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        (batch, positions, heads, width), rotary = q_BSHN.shape, k_rope_BSP.shape[-1]
        q_BSHN, kv_BSHN, k_rope_BSP = map(_with_contiguous_rows, (q_BSHN, kv_BSHN, k_rope_BSP))
        q_out_BSHN, k_out_BSHN = (torch.empty_like(q_BSHN, memory_format=torch.contiguous_format) for _ in range(2))
        start_kernel(
            mla_heads_kernel, (positions, batch),
            q_BSHN, kv_BSHN, k_rope_BSP, cos_BSP, sin_BSP, q_out_BSHN, k_out_BSHN, *q_BSHN.stride()[:3],
            *kv_BSHN.stride()[:3], *k_rope_BSP.stride()[:2], *_angle_strides(cos_BSP, batch),
            H=heads, PLAIN=width - rotary, P=rotary, BLOCK_N=triton.next_power_of_2(width - rotary),
            BLOCK_P=triton.next_power_of_2(rotary), **_heads_at_a_time(heads),
        )  # fmt: skip
        ctx.save_for_backward(cos_BSP, sin_BSP)
        return q_out_BSHN, k_out_BSHN, kv_BSHN[..., width - rotary :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_BSHN: Tensor, dk_BSHN: Tensor, dv_BSHM: Tensor) -> tuple[Tensor | None, ...]:
        cos_BSP, sin_BSP = ctx.saved_tensors
        batch, positions, heads, width = dq_BSHN.shape
        rotary, value = 2 * cos_BSP.shape[-1], dv_BSHM.shape[-1]
        dq_BSHN, dk_BSHN, dv_BSHM = map(_with_contiguous_rows, (dq_BSHN, dk_BSHN, dv_BSHM))
        dq_in_BSHN = torch.empty_like(dq_BSHN, memory_format=torch.contiguous_format)
        dkv_BSHN = dk_BSHN.new_empty(batch, positions, heads, width - rotary + value)  # [key | value]
        dk_rope_BSP = dk_BSHN.new_empty(batch, positions, rotary)
        start_kernel(
            mla_heads_backward_kernel, (positions, batch),
            dq_BSHN, dk_BSHN, dv_BSHM, cos_BSP, sin_BSP, dq_in_BSHN, dkv_BSHN, dk_rope_BSP, *dq_BSHN.stride()[:3],
            *dk_BSHN.stride()[:3], *dv_BSHM.stride()[:3], *_angle_strides(cos_BSP, batch),
            H=heads, PLAIN=width - rotary, P=rotary, M=value, BLOCK_N=triton.next_power_of_2(width - rotary),
            BLOCK_P=triton.next_power_of_2(rotary), BLOCK_M=triton.next_power_of_2(value),
            **_heads_at_a_time(heads),
        )  # fmt: skip
        return dq_in_BSHN, dkv_BSHN, dk_rope_BSP, None, None


def _angle_strides(cos_BSP: Tensor, batch: int) -> tuple[int, int]:
    """Strides of batch and position of cosine and sine; a stride of 0 if one row serves every batch."""
    return 0 if cos_BSP.shape[0] < batch else cos_BSP.stride(0), cos_BSP.stride(1)


def _heads_at_a_time(heads: int) -> dict[str, int]:
    """Heads of a block, and fewer warps where there are fewer heads."""
    block = min(LAUNCH.block_rows, triton.next_power_of_2(heads))
    return {"BLOCK_H": block, "num_warps": max(1, LAUNCH.warps * block // LAUNCH.block_rows)}


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(x_BSHP: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, rotary: int) -> None:
    batch, positions = x_BSHP.shape[:2]
    fits = cos_BSP.shape[0] in (1, batch) and cos_BSP.shape[1:] == (positions, rotary // 2) and rotary % 2 == 0
    if not fits or sin_BSP.shape != cos_BSP.shape:
        what = "rotate: cosine and sine must have one row for each position and one column for each pair"
        got = f"{tuple(cos_BSP.shape)} and {tuple(sin_BSP.shape)} for {rotary} columns of {tuple(x_BSHP.shape)}"
        raise KernelError(what, got=got)


@triton.jit
def _rotate_pairs(x_HP, cos_P, sin_P, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr):
    """Neighbours (a, b) become (a cos - b sin, a sin + b cos); a thread holds both, so no data is exchanged."""
    even, odd = tl.split(tl.reshape(x_HP.to(tl.float32), [BLOCK_H, BLOCK_P // 2, 2]))
    cos, sin = cos_P[None, :], sin_P[None, :]
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [BLOCK_H, BLOCK_P])


@triton.jit
def _load_angles(cos_ptr, sin_ptr, cos_batch, cos_position, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Cosines and sines of this program's token."""
    pair_P = tl.arange(0, BLOCK_P // 2)
    start = tl.program_id(1) * cos_batch + tl.program_id(0) * cos_position
    cos_P = tl.load(cos_ptr + start + pair_P, mask=pair_P < P // 2, other=0.0)
    return cos_P, tl.load(sin_ptr + start + pair_P, mask=pair_P < P // 2, other=0.0)


@triton.jit
def _token_offset(batch_stride, position_stride):
    """Offset of this program's token in a tensor with these strides."""
    return tl.program_id(1).to(tl.int64) * batch_stride + tl.program_id(0).to(tl.int64) * position_stride


@triton.jit
def rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr,  # x and out B x S x H x (P + PLAIN)
    x_batch, x_position, x_head, cos_batch, cos_position,  # strides; out is contiguous
    H: tl.constexpr, P: tl.constexpr, PLAIN: tl.constexpr, DIRECTION: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One token; PLAIN columns are copied. With P = 2, PLAIN = 1 and a quarter turn [1, 0, 5] becomes [0, 1, 5]."""
    N: tl.constexpr = P + PLAIN
    cos_P, sin_P = _load_angles(cos_ptr, sin_ptr, cos_batch, cos_position, P, BLOCK_P)
    sin_P *= DIRECTION  # -1 in backward: the inverse rotation
    x_ptr += _token_offset(x_batch, x_position)
    out_ptr += _token_offset(tl.num_programs(0).to(tl.int64) * (H * N), H * N)
    column_1P = tl.arange(0, BLOCK_P)[None, :]
    plain_1N = tl.arange(0, BLOCK_N)[None, :]
    for start in range(0, H, BLOCK_H):
        head_H1 = start + tl.arange(0, BLOCK_H)[:, None]
        inside = (head_H1 < H) & (column_1P < P)
        x_HP = tl.load(x_ptr + head_H1 * x_head + column_1P, mask=inside, other=0.0)
        out_HP = _rotate_pairs(x_HP, cos_P, sin_P, BLOCK_H, BLOCK_P)
        tl.store(out_ptr + head_H1 * N + column_1P, out_HP.to(out_ptr.dtype.element_ty), mask=inside)
        if PLAIN > 0:
            is_plain = (head_H1 < H) & (plain_1N < PLAIN)
            x_HN = tl.load(x_ptr + head_H1 * x_head + P + plain_1N, mask=is_plain)
            tl.store(out_ptr + head_H1 * N + P + plain_1N, x_HN, mask=is_plain)


@triton.jit
def mla_heads_kernel(
    q_ptr, kv_ptr, k_rope_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,  # q, kv: B x S x H; k_rope: B x S x P
    q_batch, q_position, q_head, kv_batch, kv_position, kv_head, k_rope_batch, k_rope_position, cos_batch,
    cos_position,
    H: tl.constexpr, PLAIN: tl.constexpr, P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One token: q = [q plain | rotated q rotary] and k = [kv plain | rotated shared key] for each head.

    With PLAIN = 1, P = 2 and a quarter turn q [5 | 1, 0], kv [6 | 7] and k_rope [0, 1] give [5, 0, 1] and [6, -1, 0].
    """
    N: tl.constexpr = PLAIN + P
    cos_P, sin_P = _load_angles(cos_ptr, sin_ptr, cos_batch, cos_position, P, BLOCK_P)
    q_ptr += _token_offset(q_batch, q_position)
    kv_ptr += _token_offset(kv_batch, kv_position)
    k_rope_ptr += _token_offset(k_rope_batch, k_rope_position)
    out = _token_offset(tl.num_programs(0).to(tl.int64) * (H * N), H * N)
    plain_1N = tl.arange(0, BLOCK_N)[None, :]
    rotary_1P = tl.arange(0, BLOCK_P)[None, :]
    shared_1P = tl.load(k_rope_ptr + rotary_1P, mask=rotary_1P < P, other=0.0)
    # All heads share the rotary key: it is rotated once for each token.
    turned_1P = _rotate_pairs(shared_1P, cos_P, sin_P, 1, BLOCK_P).to(k_out_ptr.dtype.element_ty)
    for start in range(0, H, BLOCK_H):
        head_H1 = start + tl.arange(0, BLOCK_H)[:, None]
        is_plain = (head_H1 < H) & (plain_1N < PLAIN)
        is_rotary = (head_H1 < H) & (rotary_1P < P)
        plain_out = out + head_H1 * N + plain_1N
        rotary_out = out + head_H1 * N + PLAIN + rotary_1P
        q_HN = tl.load(q_ptr + head_H1 * q_head + plain_1N, mask=is_plain)
        q_HP = tl.load(q_ptr + head_H1 * q_head + PLAIN + rotary_1P, mask=is_rotary, other=0.0)
        k_HN = tl.load(kv_ptr + head_H1 * kv_head + plain_1N, mask=is_plain)
        q_HP = _rotate_pairs(q_HP, cos_P, sin_P, BLOCK_H, BLOCK_P)
        tl.store(q_out_ptr + plain_out, q_HN, mask=is_plain)
        tl.store(q_out_ptr + rotary_out, q_HP.to(q_out_ptr.dtype.element_ty), mask=is_rotary)
        tl.store(k_out_ptr + plain_out, k_HN, mask=is_plain)
        tl.store(k_out_ptr + rotary_out, tl.broadcast_to(turned_1P, [BLOCK_H, BLOCK_P]), mask=is_rotary)


@triton.jit
def mla_heads_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, dq_in_ptr, dkv_ptr, dk_rope_ptr,  # dkv = [dk | dv]
    dq_batch, dq_position, dq_head, dk_batch, dk_position, dk_head, dv_batch, dv_position, dv_head, cos_batch,
    cos_position,
    H: tl.constexpr, PLAIN: tl.constexpr, P: tl.constexpr, M: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One token: dq rotated back, dkv = [dk plain | dv], dk_rope = the sum of the heads' rotary dk, rotated back."""
    N: tl.constexpr = PLAIN + P
    WIDE: tl.constexpr = PLAIN + M
    cos_P, sin_P = _load_angles(cos_ptr, sin_ptr, cos_batch, cos_position, P, BLOCK_P)
    positions = tl.num_programs(0).to(tl.int64)
    dq_ptr += _token_offset(dq_batch, dq_position)
    dk_ptr += _token_offset(dk_batch, dk_position)
    dv_ptr += _token_offset(dv_batch, dv_position)
    dq_in_ptr += _token_offset(positions * (H * N), H * N)
    dkv_ptr += _token_offset(positions * (H * WIDE), H * WIDE)
    dk_rope_ptr += _token_offset(positions * P, P)
    plain_1N = tl.arange(0, BLOCK_N)[None, :]
    rotary_1P = tl.arange(0, BLOCK_P)[None, :]
    value_1M = tl.arange(0, BLOCK_M)[None, :]
    shared_HP = tl.zeros([BLOCK_H, BLOCK_P], tl.float32)
    for start in range(0, H, BLOCK_H):
        head_H1 = start + tl.arange(0, BLOCK_H)[:, None]
        is_plain = (head_H1 < H) & (plain_1N < PLAIN)
        is_rotary = (head_H1 < H) & (rotary_1P < P)
        is_value = (head_H1 < H) & (value_1M < M)
        dq_HN = tl.load(dq_ptr + head_H1 * dq_head + plain_1N, mask=is_plain)
        dq_HP = tl.load(dq_ptr + head_H1 * dq_head + PLAIN + rotary_1P, mask=is_rotary, other=0.0)
        dk_HN = tl.load(dk_ptr + head_H1 * dk_head + plain_1N, mask=is_plain)
        dk_HP = tl.load(dk_ptr + head_H1 * dk_head + PLAIN + rotary_1P, mask=is_rotary, other=0.0)
        dv_HM = tl.load(dv_ptr + head_H1 * dv_head + value_1M, mask=is_value)
        shared_HP += dk_HP.to(tl.float32)  # summed over blocks of heads here, over heads below
        dq_HP = _rotate_pairs(dq_HP, cos_P, -sin_P, BLOCK_H, BLOCK_P)
        tl.store(dq_in_ptr + head_H1 * N + plain_1N, dq_HN, mask=is_plain)
        tl.store(dq_in_ptr + head_H1 * N + PLAIN + rotary_1P, dq_HP.to(dq_in_ptr.dtype.element_ty), mask=is_rotary)
        tl.store(dkv_ptr + head_H1 * WIDE + plain_1N, dk_HN, mask=is_plain)
        tl.store(dkv_ptr + head_H1 * WIDE + PLAIN + value_1M, dv_HM, mask=is_value)
    shared_1P = _rotate_pairs(tl.sum(shared_HP, 0)[None, :], cos_P, -sin_P, 1, BLOCK_P)
    tl.store(dk_rope_ptr + rotary_1P, shared_1P.to(dk_rope_ptr.dtype.element_ty), mask=rotary_1P < P)
