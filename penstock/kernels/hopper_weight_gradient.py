"""Launch of Hopper's own kernel for gradients of experts' weights in 16 bits; see `hopper_weight_gradient_kernel`.

`penstock.kernels.grouped_gemm` checks operands, makes room for the result and comes here where the launch is a
`RingLaunch` and `obstacle` finds nothing.
"""

import torch
from torch import Tensor

from penstock.kernels.float8.hopper_products import HAS_GLUON, REGISTERS
from penstock.kernels.hopper_launching import PIECE_ROWS, blocks_of, ragged_blocks_of, unavailable
from penstock.kernels.launching import start_kernel
from penstock.kernels.tile_table import TileTable
from penstock.kernels.tuning import RingLaunch, programs_of

if HAS_GLUON:
    from penstock.kernels.hopper_weight_gradient_kernel import weight_gradient_kernel


def obstacle(dy: Tensor, index: Tensor | None, target: str) -> str | None:
    """Why the kernel cannot multiply operands that fit each other, or None.

    Args:
        dy: gradient of the output.
        index: rows of x that are gathered while they are loaded, or None.
        target: chip as compilers name it.
    """
    if (reason := unavailable(target)) is not None:
        return reason
    if dy.dtype != torch.bfloat16:
        return f"operands are {dy.dtype}, not bfloat16"
    if index is not None:
        return "rows are gathered while they are loaded"
    return None


def launch_weights(
    dy: Tensor, x: Tensor, dw: Tensor, tiles: TileTable, launch: RingLaunch, *, accumulate: bool
) -> None:
    """Write or add the transpose of each expert's rows of dy times its rows of x.

    Args:
        dy: R x M, bfloat16, contiguous; rows past the last expert's may hold anything.
        x: R x N likewise.
        dw: e x M x N, contiguous; bfloat16 or float32.
        tiles: of the experts' counts.
        launch: how it is cut.
        accumulate: add to what dw, then float32, holds.
    """
    experts, rows, columns = dw.shape
    # A result of 16 bits in pieces twice as wide, of as many bytes.
    piece_columns = launch.block_rows * launch.block_columns // launch.pieces // PIECE_ROWS * 4 // dw.itemsize
    start_kernel(
        weight_gradient_kernel,
        (programs_of(launch, dw.device),),
        ragged_blocks_of(dy, launch.block_depth, launch.block_rows),
        ragged_blocks_of(x, launch.block_depth, launch.block_columns),
        blocks_of(dw, 1, PIECE_ROWS, piece_columns),
        tiles.starts_e,
        rows,
        columns,
        experts,
        STAGES=launch.stages,
        GROUP=launch.group,
        ACCUMULATE=accumulate,
        num_warps=launch.warps,
        maxnreg=REGISTERS,
    )
