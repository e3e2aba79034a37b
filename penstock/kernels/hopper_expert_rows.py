"""Launch of Hopper's own kernel for products of experts' rows in 16 bits; see `hopper_expert_rows_kernel`.

`penstock.kernels.grouped_gemm` checks operands, makes room for the result and comes here where the launch is a
`RowsRingLaunch` and `obstacle` finds nothing.
"""

import torch
from torch import Tensor

from penstock.kernels.float8.hopper_products import HAS_GLUON, REGISTERS
from penstock.kernels.hopper_launching import PIECE_ROWS, blocks_of, ragged_blocks_of, unavailable
from penstock.kernels.launching import start_kernel
from penstock.kernels.tile_table import BLOCK_SIZES, TileTable
from penstock.kernels.tuning import RowsRingLaunch, programs_of

if HAS_GLUON:
    from penstock.kernels.hopper_expert_rows_kernel import expert_rows_kernel


def obstacle(
    x: Tensor,
    y: Tensor,
    launch: RowsRingLaunch,
    target: str,
    *,
    bias: Tensor | None = None,
    index: Tensor | None = None,
) -> str | None:
    """Why the kernel cannot multiply operands that fit each other, or None.

    Args:
        x: rows.
        y: what the result is written to.
        launch: how the product is cut.
        target: chip as compilers name it.
        bias: what is added to the rows of each expert, or None.
        index: where rows are gathered from, or None.
    """
    if (reason := unavailable(target)) is not None:
        return reason
    if not x.dtype == y.dtype == torch.bfloat16:
        return f"operands are {x.dtype} and the result is {y.dtype}, not bfloat16"
    if bias is not None:
        return "a bias is added"
    if index is not None and not launch.copy_gathered:
        return "rows are gathered while they are loaded"
    return None


def launch_rows(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    tiles: TileTable,
    launch: RowsRingLaunch,
    *,
    depth_first: bool,
    first: Tensor | None = None,
) -> None:
    """Write rows times their expert's matrix; zeros behind the last expert's rows.

    Args:
        x: R x K, bfloat16, contiguous; rows past the last expert's may hold anything.
        w: e x N x K likewise, or e x K x N if depth_first.
        y: R x N likewise; with `first` it has other rows besides.
        tiles: of the experts' counts.
        launch: how it is cut.
        depth_first: the dim of w that is contracted is the first of a matrix.
        first: int64 [1], the first row of y that is ours; then nothing but the experts' rows is written.
    """
    (rows, depth), experts, columns = x.shape, len(w), y.shape[1]
    size = BLOCK_SIZES.index(launch.block_rows)
    w_block = (launch.block_depth, launch.block_columns) if depth_first else (launch.block_columns, launch.block_depth)
    piece_columns = launch.block_rows * launch.block_columns // launch.pieces // PIECE_ROWS
    start_kernel(
        expert_rows_kernel,
        (programs_of(launch, y.device),),
        blocks_of(x, launch.block_rows, launch.block_depth),
        blocks_of(w, 1, *w_block),
        ragged_blocks_of(y, PIECE_ROWS, piece_columns),
        y,
        tiles.starts_e,
        tiles.owners[size],
        tiles.block_counts[size:],
        first,
        rows,
        columns,
        depth,
        experts,
        DEPTH_FIRST=depth_first,
        STAGES=launch.stages,
        GROUP=launch.group,
        ONLY_LAST=tiles.only_last,
        num_warps=launch.warps,
        maxnreg=REGISTERS,
    )
