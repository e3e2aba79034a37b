"""Triton: the activation of feed-forward networks, and its gradients, from a tile in registers to 8 bits.

A tile of 128 places by 128 columns is quantized along both of its sides, and nothing is written in 16 bits. Numbers are
rounded to 16 bits in between all the same, as the definition does. In which order its rows are loaded, and where the
experts' rows stand, is told in `penstock.kernels.float8.quantize_kernels`. Backward makes of a tile of gate, up and dh

    h          transposed                      for the weight of the second product
    dgate      as it is, and transposed        for the rows, and for the weight of the first product
    dup        likewise

one after the other, each from loads of its own: of all three at once a thread would hold more than it has registers.
Only the first loads reach memory, the others find the tile near by.
"""

import triton
import triton.language as tl

from penstock.kernels.float8.quantize_kernels import quantize_tile, store_scales, tile_rows, transpose_tile
from penstock.kernels.swiglu import activated, activation_gradients


@triton.jit
def swiglu_float8_kernel(
    gate_up_ptr,
    weights_ptr,
    counts_ptr,
    rows_ptr,
    row_scales_ptr,
    columns_ptr,
    column_scales_ptr,
    R,
    rows_stride,
    columns_stride,
    experts,
    F: tl.constexpr,
    DEPTH: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    RUN: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    WEIGHS_INPUT: tl.constexpr,
):
    """One tile of h, by rows, and transposed if there is a pointer to that. Rows past the counts are left alone."""
    used = R
    if counts_ptr is not None:
        expert_E = tl.arange(0, BLOCK_E)
        used = tl.minimum(tl.sum(tl.load(counts_ptr + expert_E, mask=expert_E < experts, other=0), 0).to(tl.int32), R)
        if tl.program_id(1) * BLOCK_R >= used:
            return
    row_R, is_row_R = tile_rows(None, used, BLOCK_R, RUN)
    column_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    is_column_F = column_F < F
    inside = is_row_R[:, None] & is_column_F[None, :]
    start_R1 = row_R.to(tl.int64)[:, None]
    gate_ptrs = gate_up_ptr + start_R1 * (2 * F) + column_F[None, :]
    gate_RF = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up_RF = tl.load(gate_ptrs + F, mask=inside, other=0.0).to(tl.float32)
    weight_R1 = None
    if weights_ptr is not None:
        weight_R1 = tl.load(weights_ptr + row_R, mask=is_row_R, other=0.0)[:, None]
    h_RF = activated(gate_RF, up_RF, weight_R1, LIMIT, ALPHA, WEIGHS_INPUT)
    # Where nothing was loaded gate is zero, and so is h.
    h_RF = h_RF.to(gate_up_ptr.dtype.element_ty)
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    values_RF, scale_RQ = quantize_tile(h_RF.to(tl.float32), None, dtype, DEPTH, LARGEST, POWER)
    tl.store(rows_ptr + start_R1 * rows_stride + column_F[None, :], values_RF, mask=inside)
    store_scales(row_scales_ptr, scale_RQ, 0, row_R, is_row_R, tl.program_id(0), R, F, 1, DEPTH, BLOCK_F)
    if columns_ptr is not None:
        store_columns(
            columns_ptr, column_scales_ptr, h_RF, column_F, is_column_F, R, F, columns_stride,
            DEPTH, LARGEST, POWER, BLOCK_R, RUN,
        )  # fmt: skip


@triton.jit
def swiglu_backward_float8_kernel(
    gate_up_ptr,
    weights_ptr,
    dh_ptr,
    tiles_ptr,
    d_rows_ptr,
    d_row_scales_ptr,
    d_columns_ptr,
    d_column_scales_ptr,
    h_columns_ptr,
    h_column_scales_ptr,
    products_ptr,
    R,
    places,
    rows_stride,
    columns_stride,
    F: tl.constexpr,
    DEPTH: tl.constexpr,
    LARGEST: tl.constexpr,
    H_LARGEST: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    RUN: tl.constexpr,
    WEIGHS_INPUT: tl.constexpr,
):
    """One tile of all five copies, and its part of the weights' gradient.

    What the tile's rows do not fill is zero in the transposed copies: gate, up and dh are zero there.
    """
    row_R, is_row_R = tile_rows(tiles_ptr, R, BLOCK_R, RUN)
    column_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    is_column_F = column_F < F
    inside = is_row_R[:, None] & is_column_F[None, :]
    start_R1 = row_R.to(tl.int64)[:, None]
    wide = start_R1 * (2 * F) + column_F[None, :]
    weight_R1 = None
    if weights_ptr is not None:
        weight_R1 = tl.load(weights_ptr + row_R, mask=is_row_R, other=0.0)[:, None]
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    narrow = start_R1 * F + column_F[None, :]
    for copy in tl.static_range(3):
        gate_RF = tl.load(gate_up_ptr + wide, mask=inside, other=0.0).to(tl.float32)
        up_RF = tl.load(gate_up_ptr + wide + F, mask=inside, other=0.0).to(tl.float32)
        dh_RF = tl.load(dh_ptr + narrow, mask=inside, other=0.0).to(tl.float32)
        h_RF, dgate_RF, dup_RF, product_RF = activation_gradients(
            gate_RF, up_RF, dh_RF, weight_R1, None, 1.0, WEIGHS_INPUT
        )
        if copy == 0:
            if weights_ptr is not None:
                tl.store(products_ptr + tl.program_id(0) * R + row_R, tl.sum(product_RF, 1), mask=is_row_R)
            store_columns(
                h_columns_ptr, h_column_scales_ptr, h_RF.to(dtype), column_F, is_column_F, places, F, columns_stride,
                DEPTH, H_LARGEST, POWER, BLOCK_R, RUN,
            )  # fmt: skip
        else:
            half = copy - 1
            d_RF = (dgate_RF if half == 0 else dup_RF).to(dtype)
            values_RF, scale_RQ = quantize_tile(
                d_RF.to(tl.float32), None, d_rows_ptr.dtype.element_ty, DEPTH, LARGEST, POWER
            )
            d_column_F = half * F + column_F
            tl.store(d_rows_ptr + start_R1 * rows_stride + d_column_F[None, :], values_RF, mask=inside)
            store_scales(
                d_row_scales_ptr + half * (F // DEPTH) * R, scale_RQ, 0, row_R, is_row_R, tl.program_id(0), R, F, 1,
                DEPTH, BLOCK_F,
            )  # fmt: skip
            store_columns(
                d_columns_ptr, d_column_scales_ptr, d_RF, d_column_F, is_column_F, places, 2 * F, columns_stride,
                DEPTH, LARGEST, POWER, BLOCK_R, RUN,
            )  # fmt: skip


@triton.jit
def store_columns(
    columns_ptr,
    scales_ptr,
    x_RF,
    column_F,
    is_column_F,
    places,
    width,
    stride,
    DEPTH: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RUN: tl.constexpr,
):
    """The transposed copy of a tile, quantized along its places: `columns` is width x places."""
    dtype: tl.constexpr = columns_ptr.dtype.element_ty
    x_FR = transpose_tile(x_RF, RUN).to(tl.float32)
    values_FR, scale_FQ = quantize_tile(x_FR, None, dtype, DEPTH, LARGEST, POWER)
    place_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    pointers = columns_ptr + column_F.to(tl.int64)[:, None] * stride + place_R[None, :]
    tl.store(pointers, values_FR, mask=is_column_F[:, None] & (place_R < places)[None, :])
    store_scales(scales_ptr, scale_FQ, 0, column_F, is_column_F, tl.program_id(1), width, places, 1, DEPTH, BLOCK_R)
