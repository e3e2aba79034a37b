"""Launches of the Hopper kernels for grouped products in 16 bits (`grouped_gemm_kernels`).

`penstock.kernels.grouped_gemm` checks the operands, allocates the result and calls a launch here where the launch
table names one of these kernels and its obstacle is None.
"""

import torch
from torch import Tensor

from penstock.kernels.gluon.support import HAS_GLUON, PIECE_ROWS, REGISTERS, blocks_of, obstacle, ragged_blocks_of
from penstock.kernels.launching import start_kernel
from penstock.kernels.tile_table import BLOCK_SIZES, TileTable
from penstock.kernels.tuning import GemmLaunch, programs_of

if HAS_GLUON:
    from penstock.kernels.gluon.grouped_gemm_kernels import expert_rows_kernel, weight_gradient_kernel


def rows_obstacle(
    x: Tensor,
    y: Tensor,
    launch: GemmLaunch,
    target: str,
    *,
    bias: Tensor | None = None,
    index: Tensor | None = None,
) -> str | None:
    """Why `launch_rows` cannot multiply operands that fit each other, or None."""
    if (reason := weights_obstacle(x, None if launch.copy_gathered else index, target)) is not None:
        return reason
    if y.dtype != x.dtype:
        return f"the result is {y.dtype}, not bfloat16"
    return None if bias is None else "a bias is added"


def launch_rows(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    tiles: TileTable,
    launch: GemmLaunch,
    *,
    depth_first: bool,
    first: Tensor | None = None,
) -> None:
    """Write each row times the matrix of its expert, and zeros behind the last expert's rows.

    x (R x K), w (e x N x K, or with `depth_first` e x K x N) and y (R x N) are bfloat16 and contiguous; rows of x past
    the last expert's may hold anything. With `first`, int64 [1], y is a larger buffer, of which only the experts' rows
    are written, from that row on.
    """
    (rows, depth), experts, columns = x.shape, len(w), y.shape[1]
    size = BLOCK_SIZES.index(launch.block_rows)
    w_block = (launch.block_depth, launch.block_columns) if depth_first else (launch.block_columns, launch.block_depth)
    piece_columns = launch.block_rows * launch.block_columns // launch.pieces // PIECE_ROWS
    start_kernel(
        expert_rows_kernel, (programs_of(launch, y.device),),
        blocks_of(x, launch.block_rows, launch.block_depth), blocks_of(w, 1, *w_block),
        ragged_blocks_of(y, PIECE_ROWS, piece_columns), y, tiles.tails, tiles.owners[size],
        tiles.block_counts[size:], first, rows, columns, depth, experts,
        DEPTH_FIRST=depth_first, STAGES=launch.stages, GROUP=launch.group, ONLY_LAST=tiles.only_last,
        num_warps=launch.warps, maxnreg=REGISTERS,
    )  # fmt: skip


def weights_obstacle(dy: Tensor, index: Tensor | None, target: str) -> str | None:
    """Why `launch_weights` cannot multiply operands that fit each other, or None; `index` gathers rows of x."""
    if (reason := obstacle(target)) is not None:
        return reason
    if dy.dtype != torch.bfloat16:
        return f"operands are {dy.dtype}, not bfloat16"
    if index is not None:
        return "rows are gathered while they are loaded"
    return None


def launch_weights(
    dy: Tensor, x: Tensor, dw: Tensor, tiles: TileTable, launch: GemmLaunch, *, accumulate: bool
) -> None:
    """Write the transpose of each expert's rows of dy times its rows of x, or add it to dw in float32.

    dy (R x M) and x (R x N) are bfloat16; rows past the last expert's may hold anything. dw is e x M x N, bfloat16 or
    float32. All are contiguous.
    """
    experts, rows, columns = dw.shape
    # Pieces of a 16-bit result are twice as wide, so they have as many bytes.
    piece_columns = launch.block_rows * launch.block_columns // launch.pieces // PIECE_ROWS * 4 // dw.itemsize
    start_kernel(
        weight_gradient_kernel, (programs_of(launch, dw.device),),
        ragged_blocks_of(dy, launch.block_depth, launch.block_rows),
        ragged_blocks_of(x, launch.block_depth, launch.block_columns), blocks_of(dw, 1, PIECE_ROWS, piece_columns),
        tiles.starts_e, rows, columns, experts,
        STAGES=launch.stages, GROUP=launch.group, ACCUMULATE=accumulate, num_warps=launch.warps, maxnreg=REGISTERS,
    )  # fmt: skip
