"""The gradient of the loss' logits, between products in 8 bits.

These products alone read it, by rows and transposed. So one kernel reads logits in 16 bits and logsumexp of their rows,
and writes the gradient in 8 bits only, with the numbers that `quantize_rows` makes of the one that
`penstock.kernels.linear_cross_entropy` writes in 16 bits. Hopper has its own form (`penstock.kernels.gluon`), for
multiples of 128 tokens and columns.

A tile is 128 tokens x 128 columns, as in `quantize_kernels`.
"""

import torch
from torch import Tensor

from penstock.kernels.float8.quantize import (
    FUSED,
    FUSED_DEFAULT,
    empty_copy,
    hopper_obstacle,
    memories_of,
    register_limit,
    row_stride,
    run_of,
    warps_of,
)
from penstock.kernels.float8.quantize_kernels import (
    pair_neighbours,
    quantize_tile,
    store_scales,
    tile_rows,
    transpose_tile,
)
from penstock.kernels.float8.quantized import ALIGNMENT, Format, Recipe, RowColQuantized
from penstock.kernels.gluon.support import HAS_GLUON
from penstock.kernels.language import start_kernel, tl, triton
from penstock.kernels.linear_cross_entropy import logit_slopes
from penstock.kernels.reference import IGNORED_LABEL
from penstock.kernels.tuning import KernelLaunch

if HAS_GLUON:
    from penstock.kernels.gluon import float8_quantize_kernels as hopper


def logits_gradient(
    logits_TV: Tensor,
    labels_T: Tensor,
    logsumexp_T: Tensor,
    recipe: Recipe,
    form: Format,
    *,
    first_label: int = 0,
    z_weight: float = 0.0,
    launch: KernelLaunch | None = None,
) -> RowColQuantized:
    """`penstock.kernels.float8.operators.logits_gradient` in one kernel; logits are contiguous, labels int64.

    Rows that are not counted are not read. `launch` replaces the default, `FUSED_DEFAULT`.
    """
    tokens, width = logits_TV.shape
    shapes = (tokens, width), (width, tokens)
    rows, columns = (empty_copy(logits_TV, shape, recipe.rows, form, recipe.scaling) for shape in shapes)
    both = RowColQuantized(rows, columns)
    if tokens == 0:
        return both
    source, launch = (logits_TV, labels_T, logsumexp_T), launch or FUSED_DEFAULT
    if launch.engine == "gluon":
        problem = hopper_obstacle(logits_TV, width, (rows.block, columns.block), recipe.scaling, [form])
        if problem is None and tokens % ALIGNMENT == 0:
            eights = columns.values.view(torch.int64)
            start_kernel(
                hopper.logits_gradient_kernel, (width // ALIGNMENT, tokens // ALIGNMENT),
                *source, rows.values.view(torch.int8), rows.scales.T, eights, columns.scales.T,
                tokens, width, first_label, z_weight, rows.values.stride(0), eights.stride(0),
                IGNORED=IGNORED_LABEL, LARGEST=form.largest, num_warps=launch.warps, maxnreg=launch.registers,
            )  # fmt: skip
            return both
        launch = FUSED  # of Triton, where Hopper's kernel cannot run
    start_kernel(
        logits_gradient_kernel, (triton.cdiv(width, launch.block_columns), triton.cdiv(tokens, launch.block_rows)),
        *source, *memories_of(rows), *memories_of(columns),
        tokens, width, first_label, z_weight, row_stride(rows), row_stride(columns),
        IGNORED=IGNORED_LABEL, DEPTH=recipe.rows[1], LARGEST=form.largest, POWER=recipe.scaling != "float32",
        BLOCK_R=launch.block_rows, BLOCK_D=launch.block_columns, RUN=run_of(launch),
        num_warps=warps_of(launch, logits_TV.device), **register_limit(launch, logits_TV.device),
    )  # fmt: skip
    return both


@triton.jit
def logits_gradient_kernel(
    logits_ptr, labels_ptr, logsumexp_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr,
    R, V, first_label, z_weight, rows_stride, columns_stride,
    IGNORED: tl.constexpr, DEPTH: tl.constexpr, LARGEST: tl.constexpr, POWER: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of the gradient of R x V logits in blocks of 1 x DEPTH, by rows and transposed.

    Column 0 is label `first_label`. Example: with first_label = 4 the row of label 5 has a softmax less 1 in column 1,
    a row of label 2 the softmax alone, and a row of the label IGNORED is zero.
    """
    column_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_column_D = column_D < V
    row_R, is_row_R = tile_rows(None, R, BLOCK_R, RUN)
    label_R = tl.load(labels_ptr + row_R, mask=is_row_R, other=IGNORED)
    counted_R = label_R != IGNORED
    logsumexp_R = tl.load(logsumexp_ptr + row_R, mask=counted_R, other=0.0)
    own_R = label_R - first_label
    own_R = tl.where((own_R >= 0) & (own_R < V), own_R, -1).to(tl.int32)
    # What is not there has a softmax of zero.
    x_ptrs = logits_ptr + row_R.to(tl.int64)[:, None] * V + column_D[None, :]
    x_RD = tl.load(x_ptrs, mask=counted_R[:, None] & is_column_D[None, :], other=float("-inf")).to(tl.float32)
    factor_R = 1.0 + 2.0 * z_weight * logsumexp_R
    is_label = own_R[:, None] == column_D[None, :]
    x_RD = logit_slopes(x_RD, logsumexp_R[:, None], factor_R[:, None], is_label)
    # Rounded as the gradient in 16 bits.
    x_RD = x_RD.to(logits_ptr.dtype.element_ty).to(tl.float32)
    values_RD, scale_RQ = quantize_tile(x_RD, None, rows_ptr.dtype.element_ty, DEPTH, LARGEST, POWER)
    write_ptrs = rows_ptr + row_R.to(tl.int64)[:, None] * rows_stride + column_D[None, :]
    tl.store(write_ptrs, values_RD, mask=is_row_R[:, None] & is_column_D[None, :])
    store_scales(row_scales_ptr, scale_RQ, 0, row_R, is_row_R, tl.program_id(0), R, V, 1, DEPTH, BLOCK_D)
    x_DR = pair_neighbours(transpose_tile(x_RD, RUN))
    values_DR, scale_DQ = quantize_tile(x_DR, None, columns_ptr.dtype.element_ty, DEPTH, LARGEST, POWER)
    place_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    write_ptrs = columns_ptr + column_D.to(tl.int64)[:, None] * columns_stride + place_R[None, :]
    tl.store(write_ptrs, values_DR, mask=is_column_D[:, None] & (place_R < R)[None, :])
    store_scales(column_scales_ptr, scale_DQ, 0, column_D, is_column_D, tl.program_id(1), V, R, 1, DEPTH, BLOCK_R)
