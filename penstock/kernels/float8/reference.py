"""Definitions of quantization and of products of quantized numbers, in eager PyTorch, for CPUs and tests.

The scale of a block is its largest magnitude divided by the format's largest number, so nothing overflows; NaN and
infinity stay visible. Scales that are powers of two are rounded up. Sums are float32.
"""

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.expert_parts import SlottedWeight, add_or_return, used
from penstock.kernels.float8.quantized import (
    ALIGNMENT,
    Block,
    Format,
    Quantized,
    Recipe,
    RowColQuantized,
    Scaling,
    WeightCopies,
    as_quantized,
    row_bytes,
    scale_dtype,
)
from penstock.kernels.language import counts_on_host

LEAST_SCALE = 2.0**-126  # of a block of zeros: below it 1 / scale would overflow; a power of two that E8M0 has


def quantize(x: Tensor, block: Block, form: Format, scaling: Scaling) -> Quantized:
    """Quantize the last two dims of a tensor (... x outer x depth, any floating dtype) by blocks."""
    outer, depth = x.shape[-2:]
    rows, columns = block[0] or max(outer, 1), block[1] or max(depth, 1)  # 0 stands for the whole dim
    padded = F.pad(x.float(), (0, -depth % columns, 0, -outer % rows))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))  # ... blocks x rows x blocks x columns
    amax = blocks.abs().amax(dim=(-3, -1))
    # Divide by a tensor: by a number a GPU multiplies with its inverse, which is less exact.
    scales = _scales(amax / torch.full_like(amax, form.largest), scaling)
    values = (blocks / scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    values = values[..., :outer, :depth].clamp(-form.largest, form.largest)
    return Quantized(values.to(form.dtype), scales.to(scale_dtype(scaling)), block)


def dequantize(x: Quantized) -> Tensor:
    """The numbers, float32."""
    outer, depth = x.values.shape[-2:]
    rows, columns = x.block[0] or max(outer, 1), x.block[1] or max(depth, 1)
    scales = x.scales.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return x.values.float() * scales[..., :outer, :depth]


def quantize_rows(
    x_RD: Tensor, recipe: Recipe, form: Format, *, columns: Block | None = None, counts_e: Tensor | None = None
) -> RowColQuantized:
    """Quantize activations or gradients.

    `columns` is the block of a transposed copy, `recipe.columns` of activations and `recipe.rows` of gradients; None
    makes no such copy. With counts, rows past the last expert's may hold anything, in the row-wise copy too, and the
    transposed copy is that of `quantize_groups`.
    """
    if counts_e is not None:
        x_RD = used(x_RD, counts_e)
    rows = quantize(x_RD, recipe.rows, form, recipe.scaling)
    if columns is None:
        return RowColQuantized(rows, None)
    if counts_e is not None:
        return RowColQuantized(rows, quantize_groups(x_RD, counts_e, recipe, form, block=columns))
    return RowColQuantized(rows, quantize(x_RD.T, columns, form, recipe.scaling))


def quantize_weight(w_FD: Tensor, recipe: Recipe, form: Format, into: WeightCopies | None = None) -> WeightCopies:
    """Quantize a weight (F x D) or a stack (e x F x D) for the output and for the gradient of the input.

    Copies in `into` are filled in place, because captured graphs read them.
    """
    copies = WeightCopies(
        quantize(w_FD, recipe.weights, form, recipe.scaling),
        quantize(w_FD.transpose(-1, -2), recipe.weights, form, recipe.scaling),
    )
    return copies if into is None else into.fill(copies)


def transpose_weight(weight: Quantized, into: Quantized) -> None:
    """Fill the transposed copy (... D x F) of a contiguous weight with square blocks; its scales are filled already."""
    into.values.view(torch.uint8).copy_(weight.values.view(torch.uint8).transpose(-1, -2))


def aligned_rows(rows: int, experts: int) -> int:
    """Columns of a transposed copy of `rows` rows in which each expert begins at a multiple of `ALIGNMENT`."""
    return -(-(rows + experts * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT


def quantize_groups(
    x_RD: Tensor | Quantized,
    counts_e: Tensor,
    recipe: Recipe,
    form: Format,
    index_R: Tensor | None = None,
    *,
    block: Block | None = None,
) -> Quantized:
    """Rows in the order of the experts, transposed and quantized along the rows: D x `aligned_rows(R, e)`.

    Slots between an expert's last row and the next expert's first are zero. A block never holds rows of two experts,
    but a scale for all rows (`rowwise`, `tensorwise`) is one for all rows of all experts. With `index_R`, the source
    row of each row, `x_RD` is the source. `block` is as `columns` in `quantize_rows`; None takes `recipe.columns`.
    """
    source = dequantize(x_RD) if isinstance(x_RD, Quantized) else x_RD.float()
    rows_RD = source if index_R is None else source[index_R]
    counts = counts_on_host(counts_e, len(rows_RD))
    pieces = rows_RD[: sum(counts)].split(counts)
    padded = torch.cat([F.pad(piece, (0, 0, 0, -len(piece) % ALIGNMENT)) for piece in pieces])  # rows, not columns
    padded = F.pad(padded, (0, 0, 0, aligned_rows(len(rows_RD), len(counts)) - len(padded)))  # the tail
    return quantize(padded.T, block or recipe.columns, form, recipe.scaling)


def multiply(
    a: Quantized, b: Quantized, dtype: torch.dtype, *, out: Tensor | None = None, accumulate_into: Tensor | None = None
) -> Tensor:
    """The dense product a @ b^T of M x K and N x K.

    `out` is memory of the result, contiguous and of that dtype; `accumulate_into` has float32 sums that the product is
    added to. Either is returned.
    """
    product = dequantize(a) @ dequantize(b).T
    if accumulate_into is not None:
        return accumulate_into.add_(product)
    return product.to(dtype) if out is None else out.copy_(product)


def multiply_groups(
    x: Quantized,
    w: Quantized | SlottedWeight,
    counts_e: Tensor,
    index_R: Tensor | None = None,
    *,
    dtype: torch.dtype,
    tiles: object = None,
) -> Tensor:
    """Each expert's rows (R x K) times the transpose of its matrix (N x K): R x N, zero past the last expert's.

    With `index_R`, the source row of each row, x is the rows' source. Only kernels use `tiles`.
    """
    x_RK = dequantize(x)
    w_eNK = dequantize(w) if isinstance(w, Quantized) else torch.cat([dequantize(part) for part in w[:2]])
    rows_RK = x_RK if index_R is None else x_RK[index_R]
    counts = counts_on_host(counts_e, len(rows_RK))
    pieces = rows_RK[: sum(counts)].split(counts)
    products = torch.cat([rows @ w_NK.T for rows, w_NK in zip(pieces, w_eNK, strict=True)])
    return F.pad(products, (0, 0, 0, len(rows_RK) - len(products))).to(dtype)


def multiply_columns(
    dy: Quantized,
    x: Quantized,
    counts_e: Tensor,
    *,
    dtype: torch.dtype,
    accumulate_into: Tensor | SlottedWeight | None = None,
    tiles: object = None,
) -> Any:
    """Gradients of the experts' weights, e x M x N, from M x R and N x R of `quantize_groups`.

    `accumulate_into` has float32 sums that the gradients are added to; they are returned.
    """
    counts = counts_on_host(counts_e, max(dy.values.shape[1] - counts_e.numel() * (ALIGNMENT - 1), 0))
    starts = [0, *accumulate(-(-count // ALIGNMENT) * ALIGNMENT for count in counts)]  # first column of each expert
    dy_MR, x_NR = dequantize(dy), dequantize(x)
    pieces = [slice(first, first + count) for first, count in zip(starts, counts, strict=False)]
    products = torch.stack([dy_MR[:, piece] @ x_NR[:, piece].T for piece in pieces])
    if accumulate_into is None:
        return products.to(dtype)
    if isinstance(accumulate_into, SlottedWeight) and accumulate_into.own is None:
        sums = add_or_return(products, accumulate_into)
        return sums._replace(own=sums.own.to(dtype))
    return add_or_return(products, accumulate_into)


def _scales(ratio: Tensor, scaling: Scaling) -> Tensor:
    scales = ratio.clamp(min=LEAST_SCALE)
    if scaling == "float32":
        return scales
    mantissa, exponent = torch.frexp(scales)  # mantissa in [0.5, 1): 0.5 for a power of two, which stays as it is
    rounded = torch.ldexp(torch.ones_like(scales), torch.where(mantissa == 0.5, exponent - 1, exponent))
    return torch.where(scales.isfinite(), rounded, scales)


def pack_rows(x_TD: Tensor, recipe: Recipe, form: Format) -> Tensor:
    """Quantize rows into messages of values and scales: uint8, T x `row_bytes`."""
    tokens, width = x_TD.shape
    packed = torch.zeros(tokens, row_bytes(width, recipe), dtype=torch.uint8, device=x_TD.device)
    as_quantized(packed, width, recipe, form).fill(quantize_rows(x_TD, recipe, form).rows)
    return packed


def unpack_rows(packed: Tensor, width: int, recipe: Recipe, form: Format, dtype: torch.dtype) -> Tensor:
    """The numbers of packed rows, rows x D."""
    return dequantize(as_quantized(packed, width, recipe, form)).to(dtype)
