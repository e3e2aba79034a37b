"""Latent attention's heads, as `penstock.kernels.rope.mla_heads` assembles them, between products in 8 bits.

The gradients of queries, and of keys and values, are read by products alone. So backward reads the gradients of
attention once and writes them in 8 bits only, by rows and transposed like `quantize_rows`, into side channels. One
kernel does it for each of dq, dk and dv, another one sums the gradient of the shared rotary key. Hopper has its own
form of the first (`penstock.kernels.gluon`), for a multiple of 128 tokens in each sequence.

A tile is 128 tokens x 128 columns, as in `quantize_kernels`; queries of 192 columns have three tiles in two heads.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels import rope
from penstock.kernels.float8.gradient_side_channel import LatentHeadChannels, carrier_of
from penstock.kernels.float8.launches import FUSED, FUSED_DEFAULT, TRANSPOSING, TRANSPOSING_DEFAULT, TileLaunch
from penstock.kernels.float8.quantize import empty_copy, memories_of, register_limit, row_stride, run_of, warps_of
from penstock.kernels.float8.quantize_kernels import pair_neighbours, quantize_tile, tile_rows, transpose_tile
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.kernels.float8.recipes import BLOCKWISE, DEPTH, Format
from penstock.kernels.float8.scaling import to_float32
from penstock.kernels.gluon import float8_launches
from penstock.kernels.language import tl, triton
from penstock.kernels.launching import start_kernel
from penstock.kernels.rope import load_angles, rotate_pairs, token_offset
from penstock.kernels.tuning import target_of

Angles = tuple[Tensor, Tensor]  # cosines and sines, (B or 1) x S x P / 2, float32, contiguous


def mla_heads(
    q_BSHN: Tensor,
    kv_BSHN: Tensor,
    k_rope_BSP: Tensor,
    cos_BSP: Tensor,
    sin_BSP: Tensor,
    channels: LatentHeadChannels,
    form: Format,
    *,
    launch: TileLaunch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`penstock.kernels.rope.mla_heads` whose gradients of queries, keys and values go into side channels in 8 bits.

    See `latent_heads_obstacle` for the widths of heads. The gradient of `k_rope_BSP` has its own dtype. `launch`
    replaces the default of the kernel that quantizes. Errors are those of that function.
    """
    angles = cos_BSP.contiguous(), sin_BSP.contiguous()
    return _LatentHeads.apply(q_BSHN, kv_BSHN, k_rope_BSP, *angles, channels, form, launch)


class _LatentHeads(torch.autograd.Function):
    """Saves the angles."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BSHN: Tensor,
        kv_BSHN: Tensor,
        k_rope_BSP: Tensor,
        cos_BSP: Tensor,
        sin_BSP: Tensor,
        channels: LatentHeadChannels,
        form: Format,
        launch: TileLaunch | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_out_BSHN, k_out_BSHN, v_BSHM = rope.mla_heads(q_BSHN, kv_BSHN, k_rope_BSP, cos_BSP, sin_BSP)
        ctx.save_for_backward(cos_BSP, sin_BSP)
        ctx.how = channels, form, launch
        return q_out_BSHN, k_out_BSHN, kv_BSHN[..., -v_BSHM.shape[-1] :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_BSHN: Tensor, dk_BSHN: Tensor, dv_BSHM: Tensor) -> tuple[Tensor | None, ...]:
        channels, form, launch = ctx.how
        assert channels.q is not None and channels.kv is not None, "gradients are handed over"
        cos_BSP, sin_BSP = ctx.saved_tensors
        q, kv, dk_rope_BSP = mla_heads_backward(dq_BSHN, dk_BSHN, dv_BSHM, cos_BSP, sin_BSP, form, launch=launch)
        channels.q.put(q)
        channels.kv.put(kv)
        wide = kv.rows.values.shape[1] // dk_BSHN.shape[2]
        dkv_BSHN = carrier_of((*dk_BSHN.shape[:-1], wide), dk_BSHN)
        return carrier_of(dq_BSHN.shape, dq_BSHN), dkv_BSHN, dk_rope_BSP, None, None, None, None, None


class LatentHeadGradients(NamedTuple):
    """Gradients of the inputs of `mla_heads`."""

    q: RowColQuantized  # tokens x (H N)
    kv: RowColQuantized  # tokens x (H (plain + M))
    k_rope_BSP: Tensor


def mla_heads_backward(
    dq_BSHN: Tensor,
    dk_BSHN: Tensor,
    dv_BSHM: Tensor,
    cos_BSP: Tensor,
    sin_BSP: Tensor,
    form: Format,
    *,
    launch: TileLaunch | None = None,
) -> LatentHeadGradients:
    """Gradients of the inputs of `mla_heads` from those of its outputs, whose dims have any memory order."""
    angles = cos_BSP, sin_BSP
    plain, value = dq_BSHN.shape[-1] - 2 * cos_BSP.shape[-1], dv_BSHM.shape[-1]
    q, kv = _room(dq_BSHN, dq_BSHN.shape[-1], form), _room(dk_BSHN, plain + value, form)
    _fill(q, dq_BSHN, 0, angles, form, launch)
    _fill(kv, dk_BSHN[..., :plain], 0, None, form, launch)  # columns of each head: [key | value]
    _fill(kv, dv_BSHM, plain, None, form, launch)
    return LatentHeadGradients(q, kv, _shared_key(dk_BSHN[..., plain:], angles))


def _room(like_BSHN: Tensor, width: int, form: Format) -> RowColQuantized:
    """Memory for a gradient of heads of so many columns, by rows and transposed."""
    batch, positions, heads, _ = like_BSHN.shape
    outer, depth = batch * positions, heads * width
    shapes = (outer, depth), (depth, outer)
    return RowColQuantized(*(empty_copy(like_BSHN, shape, BLOCKWISE.rows, form, BLOCKWISE.scaling) for shape in shapes))


def _fill(
    both: RowColQuantized, x_BSHN: Tensor, first: int, angles: Angles | None, form: Format, launch: TileLaunch | None
) -> None:
    """Write some columns of each head, from column `first` of a head on; with angles the last are rotated back."""
    x_BSHN = rope.with_contiguous_rows(x_BSHN)
    batch, positions, heads, width = x_BSHN.shape
    rows, columns = both
    assert columns is not None, "both are written"
    tokens, whole = rows.values.shape
    if tokens == 0:
        return
    cos_BSP, sin_BSP = angles or (None, None)
    sizes = {"WIDTH": width, "APART": whole // heads, "FIRST": first, "LARGEST": form.largest}
    sizes["PLAIN"] = width if cos_BSP is None else width - 2 * cos_BSP.shape[-1]
    # Of batch, position and head, and of the angles' batch and position.
    strides = *x_BSHN.stride()[:3], *((0, 0) if cos_BSP is None else rope.angle_strides(cos_BSP, batch))
    source = x_BSHN, cos_BSP, sin_BSP
    launch = launch or (TRANSPOSING_DEFAULT if angles is None else FUSED_DEFAULT)
    if launch.engine == "gluon":
        copies, target = ([BLOCKWISE.rows] * 2, BLOCKWISE.scaling, [form]), target_of(x_BSHN.device)
        problem = float8_launches.quantize_obstacle(*copies, heads * width, target)
        if problem is None and x_BSHN.dtype == torch.bfloat16 and positions % DEPTH == 0:
            float8_launches.launch_latent_heads(source, both, positions, strides, sizes, launch)
            return
        launch = TRANSPOSING if angles is None else FUSED  # of Triton, where Hopper's kernel cannot run
    start_kernel(
        latent_heads_backward_kernel, (heads * width // DEPTH, -(-tokens // DEPTH)),
        *source, *memories_of(rows), *memories_of(columns),
        tokens, positions, *strides, row_stride(rows), row_stride(columns), whole,
        **sizes, BLOCK_R=DEPTH, BLOCK_D=DEPTH, RUN=run_of(launch), num_warps=warps_of(launch, x_BSHN.device),
        **register_limit(launch, x_BSHN.device),
    )  # fmt: skip


def _shared_key(dk_BSHP: Tensor, angles: Angles) -> Tensor:
    """The gradient of the rotary key that all heads share, from those of the heads."""
    batch, positions, heads, rotary = dk_BSHP.shape
    dk_BSHP = rope.with_contiguous_rows(dk_BSHP)
    dk_rope_BSP = dk_BSHP.new_empty(batch, positions, rotary)
    start_kernel(
        shared_key_backward_kernel, (positions, batch),
        dk_BSHP, *angles, dk_rope_BSP, *dk_BSHP.stride()[:3], *rope.angle_strides(angles[0], batch),
        H=heads, P=rotary, BLOCK_P=1 << (rotary - 1).bit_length(), **rope.heads_at_a_time(heads, rope.LAUNCH),
    )  # fmt: skip
    return dk_rope_BSP


@triton.jit
def latent_heads_backward_kernel(
    x_ptr, cos_ptr, sin_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr,
    R, positions, x_batch, x_position, x_head, cos_batch, cos_position, rows_stride, columns_stride, D,
    WIDTH: tl.constexpr, APART: tl.constexpr, FIRST: tl.constexpr, PLAIN: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of the gradient of R tokens, by rows and transposed.

    Of a head WIDTH columns are read, and written from column FIRST of APART columns on; with cosines those from PLAIN
    on are rotated back. Example with WIDTH 2, APART 3 and FIRST 1: [a b][c d] becomes [- a b][- c d].
    """
    column_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    head_D, inside_D = column_D // WIDTH, column_D % WIDTH
    row_R, is_row_R = tile_rows(None, R, BLOCK_R, RUN)
    batch_R, position_R = (row_R // positions).to(tl.int64), (row_R % positions).to(tl.int64)
    token_R = batch_R * x_batch + position_R * x_position
    x_ptrs = x_ptr + token_R[:, None] + (head_D * x_head + inside_D)[None, :]
    x_RD = to_float32(tl.load(x_ptrs, mask=is_row_R[:, None], other=0.0), x_ptr.dtype.element_ty)
    if cos_ptr is not None:
        pair_P = tl.program_id(0) * (BLOCK_D // 2) + tl.arange(0, BLOCK_D // 2)
        pair_P = pair_P % (WIDTH // 2) - PLAIN // 2
        angle = (batch_R * cos_batch + position_R * cos_position)[:, None] + pair_P[None, :]
        is_turned = is_row_R[:, None] & (pair_P >= 0)[None, :]
        cos = tl.load(cos_ptr + angle, mask=is_turned, other=0.0)
        sin = -tl.load(sin_ptr + angle, mask=is_turned, other=0.0)
        even, odd = tl.split(tl.reshape(x_RD, [BLOCK_R, BLOCK_D // 2, 2]))
        turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        # Rounded as the output of the 16-bit kernel.
        turned = tl.reshape(turned, [BLOCK_R, BLOCK_D]).to(x_ptr.dtype.element_ty).to(tl.float32)
        x_RD = tl.where((inside_D >= PLAIN)[None, :], turned, x_RD)
    block = tl.program_id(0)
    if APART != WIDTH:
        # In units of tiles, so that the compiler sees a multiple of their width.
        block = block // (WIDTH // BLOCK_D) * (APART // BLOCK_D) + block % (WIDTH // BLOCK_D) + FIRST // BLOCK_D
    out_D = block * BLOCK_D + tl.arange(0, BLOCK_D)
    values_RD, scale_R1 = quantize_tile(x_RD, None, rows_ptr.dtype.element_ty, BLOCK_D, LARGEST, True)
    write_ptrs = rows_ptr + row_R.to(tl.int64)[:, None] * rows_stride + out_D[None, :]
    tl.store(write_ptrs, values_RD, mask=is_row_R[:, None])
    tl.store(row_scales_ptr + (block.to(tl.int64) * R + row_R)[:, None], scale_R1, mask=is_row_R[:, None])
    x_DR = pair_neighbours(transpose_tile(x_RD, RUN))
    values_DR, scale_D1 = quantize_tile(x_DR, None, columns_ptr.dtype.element_ty, BLOCK_R, LARGEST, True)
    place_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    write_ptrs = columns_ptr + out_D.to(tl.int64)[:, None] * columns_stride + place_R[None, :]
    tl.store(write_ptrs, values_DR, mask=(place_R < R)[None, :])
    tl.store(column_scales_ptr + (tl.program_id(1).to(tl.int64) * D + out_D)[:, None], scale_D1)


@triton.jit
def shared_key_backward_kernel(
    dk_ptr, cos_ptr, sin_ptr, dk_rope_ptr,
    dk_batch, dk_position, dk_head, cos_batch, cos_position,
    H: tl.constexpr, P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Sum the heads' rotary dk of one token, and rotate the sum back, as in `penstock.kernels.rope`."""
    cos_P, sin_P = load_angles(cos_ptr, sin_ptr, cos_batch, cos_position, P, BLOCK_P)
    dk_ptr += token_offset(dk_batch, dk_position)
    dk_rope_ptr += token_offset(tl.num_programs(0).to(tl.int64) * P, P)
    rotary_1P = tl.arange(0, BLOCK_P)[None, :]
    shared_HP = tl.zeros([BLOCK_H, BLOCK_P], tl.float32)
    for start in range(0, H, BLOCK_H):
        head_H1 = start + tl.arange(0, BLOCK_H)[:, None]
        is_rotary = (head_H1 < H) & (rotary_1P < P)
        dk_HP = tl.load(dk_ptr + head_H1 * dk_head + rotary_1P, mask=is_rotary, other=0.0)
        shared_HP += dk_HP.to(tl.float32)
    shared_1P = rotate_pairs(tl.sum(shared_HP, 0)[None, :], cos_P, -sin_P, 1, BLOCK_P)
    tl.store(dk_rope_ptr + rotary_1P, shared_1P.to(dk_rope_ptr.dtype.element_ty), mask=rotary_1P < P)
