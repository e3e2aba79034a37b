"""RMSNorm whose rows leave in 8 bits, by rows and by columns, from one tile.

A row's scale needs the whole row, a column's scale 128 rows: no tile holds both. So there are two passes over the
input, with these bytes of memory for each number of 16 bits:

    scales of rows     read x (and the residual, and write their sum)                2   (6)
    tiles              read x again, write both copies, and 16 bits if asked for     4 + 2

These are as many as a norm followed by quantization needs if the 16 bits are read too, and a quarter fewer if not. Then
the normed rows are a carrier of gradients: a tensor of their shape and dtype with one element of memory. Recipes whose
scales reach over whole rows or columns are a norm followed by quantization.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels import norm
from penstock.kernels.float8.quantize import (
    TRANSPOSING,
    empty_copy,
    memories_of,
    quantize_rows,
    register_limit,
    row_stride,
    warps_of,
)
from penstock.kernels.float8.quantize_kernels import quantize_tile, store_columns, store_scales, tile_rows
from penstock.kernels.float8.quantized import DEPTH, Format, Quantized, Recipe, RowColQuantized
from penstock.kernels.language import start_kernel, tl, triton


def rms_norm(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    epsilon: float,
    recipe: Recipe,
    form: Format,
    *,
    columns: bool,
    keep_plain: bool = True,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, RowColQuantized]:
    """`penstock.kernels.float8.operators.rms_norm` in two kernels, and two more in backward.

    Rows of x may lie apart, but each must be contiguous. `columns` also quantizes the transposed rows, in the blocks of
    activations. Without `keep_plain` the normed rows are not written in 16 bits, but are a carrier. Returns (normed
    rows or their carrier, x + residual or x itself, both 8-bit copies); backward adds the gradients of the first two.
    Raises KernelError where shapes do not fit.
    """
    norm.check_weight(x_TD, weight_D)
    if x_TD.ndim != 2:
        raise KernelError("rms_norm in 8 bits takes a matrix of rows", got=tuple(x_TD.shape))
    if residual_TD is not None and x_TD.shape != residual_TD.shape:
        given = f"{tuple(x_TD.shape)} and {tuple(residual_TD.shape)}"
        raise KernelError("rms_norm: x and residual must have one shape", got=given)
    if not _fits(recipe):
        if residual_TD is None:
            normed_TD, sum_TD = norm.rms_norm_beside(x_TD, weight_D, epsilon, offset)
        else:
            normed_TD, sum_TD = norm.add_rms_norm(x_TD, residual_TD, weight_D, epsilon, offset)
        block = recipe.columns if columns else None
        return normed_TD, sum_TD, quantize_rows(normed_TD.detach(), recipe, form, columns=block)
    how = _How(recipe, form, columns, keep_plain, offset)
    normed_TD, sum_TD, *copies = _Float8Norm.apply(x_TD, residual_TD, weight_D, epsilon, how)
    by_row = Quantized(copies[0], copies[1], recipe.rows)
    by_column = Quantized(copies[2], copies[3], recipe.columns) if columns else None
    return normed_TD, sum_TD, RowColQuantized(by_row, by_column)


# Rows that a thread has of a tile of 128 x 128: of 16 bits it loads and stores 8 numbers at once. So two programs with
# 128 registers a thread share a multiprocessor, and neither Triton 3.6 nor 3.9 spills; with 4 rows, which 8-bit stores
# alone would want, 3.6 does. Blocks of 32 take more registers in any case.
RUN = 8


class _How(NamedTuple):
    """Which copies are written; see `rms_norm`."""

    recipe: Recipe
    form: Format
    columns: bool
    keep_plain: bool
    offset: float


class _Float8Norm(torch.autograd.Function):
    """Outputs the normed rows, their sum (or x), and the 8-bit copies, which have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, epsilon: float, how: _How
    ) -> tuple[Tensor | None, ...]:
        dtype = norm.normed_dtype(x_TD, residual_TD, weight_D)
        sum_TD, scale_T = norm.normalize(ctx, x_TD, residual_TD, weight_D, epsilon, None, how.offset)
        if how.keep_plain:
            normed_TD = x_TD.new_empty(x_TD.shape, dtype=dtype)
        else:  # a carrier
            normed_TD = x_TD.new_empty((), dtype=dtype).expand(x_TD.shape)
        copies = _quantize(x_TD if sum_TD is None else sum_TD, scale_T, weight_D, normed_TD, how)
        ctx.mark_non_differentiable(*copies)
        return normed_TD, x_TD.view_as(x_TD) if sum_TD is None else sum_TD, *copies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dnormed_TD: Tensor | None, dsum_TD: Tensor | None, *of_copies: None
    ) -> tuple[Tensor | None, ...]:
        return *norm.normalized_gradients(ctx, dnormed_TD, dsum_TD), None, None


def _quantize(x_TD: Tensor, scale_T: Tensor, weight_D: Tensor, normed_TD: Tensor, how: _How) -> list[Tensor]:
    """Launch the second kernel. Returns values and scales by rows, and by columns if asked for."""
    recipe, form = how.recipe, how.form
    x_rows = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    tokens, width = x_rows.shape
    rows = empty_copy(x_rows, (tokens, width), recipe.rows, form, recipe.scaling)
    columns = empty_copy(x_rows, (width, tokens), recipe.columns, form, recipe.scaling) if how.columns else None
    start_kernel(
        norm_quantize_kernel,
        (triton.cdiv(width, TRANSPOSING.block_columns), triton.cdiv(tokens, TRANSPOSING.block_rows)),
        x_rows, scale_T, weight_D, normed_TD if how.keep_plain else None, *memories_of(rows), *memories_of(columns),
        tokens, x_rows.stride(0), row_stride(rows), row_stride(columns),
        D=width, OFFSET=how.offset, OUTER=recipe.columns[0], DEPTH=recipe.rows[1], LARGEST=form.largest,
        POWER=recipe.scaling != "float32", IN_BF16=normed_TD.dtype == torch.bfloat16,
        BLOCK_T=TRANSPOSING.block_rows, BLOCK_D=TRANSPOSING.block_columns, RUN=RUN,
        num_warps=warps_of(TRANSPOSING, x_rows.device),
        **(register_limit(TRANSPOSING, x_rows.device) if recipe.rows[1] == DEPTH else {}),
    )  # fmt: skip
    copies = [rows.values, rows.scales]
    return copies if columns is None else [*copies, columns.values, columns.scales]


def _fits(recipe: Recipe) -> bool:
    """Whether a tile contains all numbers of its scales."""
    # A transposed tile has blocks of single columns, or is one block.
    is_tiled = recipe.columns[0] == 1 or recipe.columns == (TRANSPOSING.block_columns, TRANSPOSING.block_rows)
    return recipe.rows[0] == 1 and recipe.rows[1] > 0 and is_tiled


@triton.jit
def norm_quantize_kernel(
    x_ptr, scale_ptr, weight_ptr, normed_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr,
    tokens, x_stride, rows_stride, columns_stride,
    D: tl.constexpr, OFFSET: tl.constexpr, OUTER: tl.constexpr, DEPTH: tl.constexpr, LARGEST: tl.constexpr,
    POWER: tl.constexpr, IN_BF16: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of normed rows; write it in 16 bits and by columns as far as there are pointers.

    OUTER columns share a scale in the transposed copy, 1 or all of the tile's. With IN_BF16 the numbers are rounded to
    bfloat16 before, as the rows are.
    """
    column_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_column_D = column_D < D
    token_T, is_token_T = tile_rows(None, tokens, BLOCK_T, RUN)
    row_T1 = token_T.to(tl.int64)[:, None]
    inside = is_token_T[:, None] & is_column_D[None, :]
    x_TD = tl.load(x_ptr + row_T1 * x_stride + column_D[None, :], mask=inside, other=0.0)
    scale_T = tl.load(scale_ptr + token_T, mask=is_token_T, other=0.0)
    weight_D = tl.load(weight_ptr + column_D, mask=is_column_D, other=0.0).to(tl.float32)
    if OFFSET != 0.0:  # no instruction without an offset
        weight_D += OFFSET
    normed_TD = (x_TD.to(tl.float32) * scale_T[:, None]).to(x_TD.dtype).to(tl.float32) * weight_D[None, :]
    if IN_BF16:
        normed_TD = normed_TD.to(tl.bfloat16).to(tl.float32)
    if normed_ptr is not None:
        tl.store(normed_ptr + row_T1 * D + column_D[None, :], normed_TD.to(normed_ptr.dtype.element_ty), mask=inside)
    values_TD, scale_TQ = quantize_tile(normed_TD, None, rows_ptr.dtype.element_ty, DEPTH, LARGEST, POWER)
    tl.store(rows_ptr + row_T1 * rows_stride + column_D[None, :], values_TD, mask=inside)
    store_scales(row_scales_ptr, scale_TQ, 0, token_T, is_token_T, tl.program_id(0), tokens, D, 1, DEPTH, BLOCK_D)
    if columns_ptr is not None:
        store_columns(
            columns_ptr, column_scales_ptr, normed_TD, column_D, is_column_D, tokens, D, columns_stride,
            OUTER, DEPTH, LARGEST, POWER, BLOCK_T, RUN,
        )  # fmt: skip
