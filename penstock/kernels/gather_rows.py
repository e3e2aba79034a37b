"""Rows, or columns, gathered into a copy of their own, as many as the device says that there are.

torch's `index_select` copies all of an index; where experts have room for more rows than came that is time for nothing.
"""

from torch import Tensor

from penstock.kernels.language import tl, triton
from penstock.kernels.launching import start_kernel
from penstock.kernels.tuning import Launch, turns_of

LAUNCH = Launch(block_rows=1, block_columns=2048, warps=4)
"""Sixteen bytes for each thread, load and store."""

SCALES = Launch(block_rows=16, block_columns=256, warps=4)
"""Of numbers that stand in columns, as scales do."""


def gather_rows(x_ND: Tensor, index_R: Tensor, used: Tensor, *, multiple: int = 1, launch: Launch = LAUNCH) -> Tensor:
    """x_ND[index_R], of which the first rows are copied and the others hold anything.

    Args:
        x_ND: source rows, each contiguous.
        index_R: integer source row of each place.
        used: int32, one number, on the device: rows that are copied.
        multiple: rows of the copy lie a multiple of so many numbers apart.
        launch: rows and columns that a program holds at a time.
    """
    (rows,), width = index_R.shape, x_ND.shape[1]
    gathered_RD = x_ND.new_empty(rows, triton.cdiv(width, multiple) * multiple)[:, :width]
    blocks = triton.cdiv(rows, launch.block_rows)
    start_kernel(
        gather_rows_kernel,
        (turns_of(blocks, x_ND.device), triton.cdiv(width, launch.block_columns)),
        x_ND,
        index_R,
        gathered_RD,
        used,
        rows,
        x_ND.stride(0),
        gathered_RD.stride(0),
        D=width,
        BLOCK_R=launch.block_rows,
        BLOCK_D=launch.block_columns,
        num_warps=launch.warps,
    )
    return gathered_RD


def gather_columns(x_DN: Tensor, index_R: Tensor, used: Tensor, *, launch: Launch = SCALES) -> Tensor:
    """x_DN[:, index_R], of which the first columns are copied and the others hold anything.

    Args:
        x_DN: contiguous; some rows that are much longer than there are of them.
        index_R: integer source column of each place.
        used: int32, one number, on the device: columns that are copied.
        launch: rows and columns that a program holds at a time.
    """
    (columns,), depth = index_R.shape, x_DN.shape[0]
    gathered_DR = x_DN.new_empty(depth, columns)
    start_kernel(
        gather_columns_kernel,
        (triton.cdiv(columns, launch.block_columns),),
        x_DN,
        index_R,
        gathered_DR,
        used,
        depth,
        x_DN.shape[1],
        columns,
        BLOCK_D=launch.block_rows,
        BLOCK_R=launch.block_columns,
        num_warps=launch.warps,
    )
    return gathered_DR


@triton.jit(do_not_specialize=["columns"])
def gather_columns_kernel(
    x_ptr, index_ptr, gathered_ptr, used_ptr, depth, x_columns, columns, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Some places of all rows."""
    place_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_place_R = place_R < tl.minimum(columns, tl.load(used_ptr))
    source_R = tl.load(index_ptr + place_R, mask=is_place_R, other=0)
    for first in range(0, depth, BLOCK_D):
        row_D = (first + tl.arange(0, BLOCK_D)).to(tl.int64)
        inside = (row_D < depth)[:, None] & is_place_R[None, :]
        numbers_DR = tl.load(x_ptr + row_D[:, None] * x_columns + source_R[None, :], mask=inside)
        tl.store(gathered_ptr + row_D[:, None] * columns + place_R[None, :], numbers_DR, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gather_rows_kernel(
    x_ptr,
    index_ptr,
    gathered_ptr,
    used_ptr,
    rows,
    x_stride,
    stride,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Blocks of rows and columns; programs take turns."""
    rows = tl.minimum(rows, tl.load(used_ptr))
    column_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R), tl.num_programs(0)):
        row_R = block * BLOCK_R + tl.arange(0, BLOCK_R)
        is_row_R = row_R < rows
        source_R = tl.load(index_ptr + row_R, mask=is_row_R, other=0).to(tl.int64)
        inside = is_row_R[:, None] & (column_D < D)[None, :]
        numbers_RD = tl.load(x_ptr + source_R[:, None] * x_stride + column_D[None, :], mask=inside)
        tl.store(gathered_ptr + row_R.to(tl.int64)[:, None] * stride + column_D[None, :], numbers_RD, mask=inside)
