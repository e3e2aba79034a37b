"""The transposed copy of a weight from its 8-bit numbers: one pass over bytes, by tiles, so both sides move in rows.

Quantizing the weight again would read two bytes for each and write both copies; here one is read and one written.
"""

import torch

from penstock.base.errors import KernelError
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.language import tl, triton
from penstock.kernels.launching import start_kernel

BLOCK = 128
"""Rows and columns of a tile."""

WARPS = 8


def transpose_weight(weight: Quantized, into: Quantized) -> None:
    """`penstock.kernels.float8.reference.transpose_weight`.

    Args:
        weight: ... F x D, contiguous.
        into: ... D x F, contiguous.

    Raises:
        KernelError: either lies otherwise.
    """
    if not (weight.values.is_contiguous() and into.values.is_contiguous()):
        raise KernelError("transpose_weight takes contiguous matrices", got=f"strides {weight.values.stride()}")
    rows, columns = weight.values.shape[-2:]
    matrices = weight.values[..., 0, 0].numel()
    grid = (triton.cdiv(columns, BLOCK), triton.cdiv(rows, BLOCK), matrices)
    source, target = weight.values.view(torch.uint8), into.values.view(torch.uint8)
    start_kernel(transpose_kernel, grid, source, target, rows, columns, BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    """One tile of one matrix: x is rows x columns, out is columns x rows."""
    row_R = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column_C = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    is_row_R, is_column_C = row_R < rows, column_C < columns
    x_RC = tl.load(
        x_ptr + matrix + row_R[:, None] * columns + column_C[None, :], mask=is_row_R[:, None] & is_column_C[None, :]
    )
    tl.store(
        out_ptr + matrix + column_C[:, None] * rows + row_R[None, :],
        tl.trans(x_RC),
        mask=is_column_C[:, None] & is_row_R[None, :],
    )
