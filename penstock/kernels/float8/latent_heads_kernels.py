"""Kernels of the gradients of latent attention's heads, whose products are in 8 bits; see `latent_heads`.

A tile is one of 128 tokens x 128 columns of the matrix whose gradient is made, as in `quantize_kernels`. Its columns
come from one tensor, whose heads need not lie beside each other: queries of 192 columns a head have three tiles in two
heads.
"""

from penstock.kernels.float8.quantize_kernels import pair_neighbours, quantize_tile, tile_rows, transpose_tile
from penstock.kernels.float8.scaling import to_float32
from penstock.kernels.language import tl, triton
from penstock.kernels.rope import load_angles, rotate_pairs, token_offset


@triton.jit
def latent_heads_backward_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    rows_ptr,
    row_scales_ptr,
    columns_ptr,
    column_scales_ptr,
    R,
    positions,
    x_batch,
    x_position,
    x_head,
    cos_batch,
    cos_position,
    rows_stride,
    columns_stride,
    D,
    WIDTH: tl.constexpr,
    APART: tl.constexpr,
    FIRST: tl.constexpr,
    PLAIN: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RUN: tl.constexpr,
):
    """One tile of the gradients of R tokens, by rows and transposed.

    Of a head WIDTH columns are read, and written from column FIRST of APART columns on; with cosines those from PLAIN
    on are turned back. Example with WIDTH 2, APART 3 and FIRST 1: [a b][c d] becomes [- a b][- c d].
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
        # Rounded as it would leave the kernel that only turns it.
        turned = tl.reshape(turned, [BLOCK_R, BLOCK_D]).to(x_ptr.dtype.element_ty).to(tl.float32)
        x_RD = tl.where((inside_D >= PLAIN)[None, :], turned, x_RD)
    block = tl.program_id(0)
    if APART != WIDTH:
        # By tiles, so that compilers see that it is a multiple of their width.
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
    dk_ptr,
    cos_ptr,
    sin_ptr,
    dk_rope_ptr,
    dk_batch,
    dk_position,
    dk_head,
    cos_batch,
    cos_position,
    H: tl.constexpr,
    P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One token: the heads' rotary dk summed, then turned back, as in `penstock.kernels.rope`."""
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
