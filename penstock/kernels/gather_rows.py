"""Rows gathered into a copy of their own, as many as the device says that there are.

torch's `index_select` copies all of an index; where experts have room for more rows than came that is time for nothing.
"""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.launching import start_kernel
from penstock.kernels.tuning import Launch, turns_of

LAUNCH = Launch(block_rows=1, block_columns=2048, warps=4)
"""Sixteen bytes for each thread, load and store."""


def gather_rows(x_ND: Tensor, index_R: Tensor, used: Tensor, *, launch: Launch = LAUNCH) -> Tensor:
    """x_ND[index_R], of which the first rows are copied and the others hold anything.

    Args:
        x_ND: contiguous source rows.
        index_R: integer source row of each place.
        used: int32, one number, on the device: rows that are copied.
        launch: rows and columns that a program holds at a time.
    """
    (rows,), width = index_R.shape, x_ND.shape[1]
    gathered_RD = x_ND.new_empty(rows, width)
    blocks = triton.cdiv(rows, launch.block_rows)
    start_kernel(
        gather_rows_kernel,
        (turns_of(blocks, x_ND.device), triton.cdiv(width, launch.block_columns)),
        x_ND,
        index_R,
        gathered_RD,
        used,
        rows,
        D=width,
        BLOCK_R=launch.block_rows,
        BLOCK_D=launch.block_columns,
        num_warps=launch.warps,
    )
    return gathered_RD


@triton.jit(do_not_specialize=["rows"])
def gather_rows_kernel(
    x_ptr, index_ptr, gathered_ptr, used_ptr, rows, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Blocks of rows and columns; programs take turns."""
    rows = tl.minimum(rows, tl.load(used_ptr))
    column_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R), tl.num_programs(0)):
        row_R = block * BLOCK_R + tl.arange(0, BLOCK_R)
        is_row_R = row_R < rows
        source_R = tl.load(index_ptr + row_R, mask=is_row_R, other=0).to(tl.int64)
        inside = is_row_R[:, None] & (column_D < D)[None, :]
        numbers_RD = tl.load(x_ptr + source_R[:, None] * D + column_D[None, :], mask=inside)
        tl.store(gathered_ptr + row_R.to(tl.int64)[:, None] * D + column_D[None, :], numbers_RD, mask=inside)
