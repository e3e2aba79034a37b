"""Launches of Hopper's own kernels: products of 8-bit numbers whose scales are the recipe blockwise's, on Hopper.

`launch_rows` multiplies rows with a weight, or each expert's rows with its own; `launch_matrices` two operands that
are contracted over rows, for gradients of weights. `penstock.kernels.float8.products` checks operands, makes room
for results and comes here where a launch's engine is `gluon` and `obstacle` finds nothing.

Gluon is an experiment of Triton's: it changes from version to version. So it is imported only where the version is one
that these kernels have been compiled with, and never on AMD's chips.
"""

import torch
from torch import Tensor

from penstock.kernels.float8.launches import ProductLaunch
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.float8.recipes import BLOCKWISE, DEPTH
from penstock.kernels.gluon import support
from penstock.kernels.gluon.support import HAS_GLUON, PIECE_ROWS, REGISTERS, blocks_of, ragged_blocks_of
from penstock.kernels.launching import start_kernel
from penstock.kernels.tile_table import BLOCK_SIZES, TileTable
from penstock.kernels.tuning import programs_of

WIDTH = 128
"""Columns of a tile."""

TRIOS_REGISTERS = 128
"""The same of sixteen warps, where there are three multipliers."""

if HAS_GLUON:
    from penstock.kernels.gluon.float8_gemm_kernels import float8_matrices_kernel, float8_rows_kernel


def obstacle(a: Quantized, b: Quantized, target: str) -> str | None:
    """Why the kernels cannot multiply two operands that fit each other, or None.

    Args:
        a: rows.
        b: a weight, a stack of experts' weights, or rows.
        target: chip as compilers name it.
    """
    if (reason := support.obstacle(target)) is not None:
        return reason
    if a.block != BLOCKWISE.rows or b.block not in (BLOCKWISE.rows, BLOCKWISE.weights):
        return f"scales of {a.block} and {b.block} are not those of the recipe {BLOCKWISE.name}"
    if a.values.shape[-1] == 0:
        return "nothing is contracted"
    return None


def launch_rows(
    x: Quantized,
    w: Quantized,
    y: Tensor,
    tiles: TileTable | None,
    launch: ProductLaunch,
    *,
    first: Tensor | None = None,
) -> None:
    """Write rows times the transpose of their expert's matrix; zeros behind the last expert's rows.

    Args:
        x: R x K.
        w: e x N x K; or N x K without `tiles`, for all rows.
        y: R x N, bfloat16 or float32; with `first` it has other rows besides.
        tiles: of the experts' counts.
        launch: how it is cut.
        first: int64 [1], the first row of y that is ours; then nothing but the experts' rows is written.
    """
    (rows, depth), columns = x.values.shape, y.shape[1]
    values = w.values if tiles is not None else w.values[None]
    size = BLOCK_SIZES.index(launch.block_rows)
    start_kernel(
        float8_rows_kernel,
        (programs_of(launch, y.device),),
        blocks_of(x.values, PIECE_ROWS, DEPTH),
        blocks_of(values, 1, WIDTH, DEPTH),
        ragged_blocks_of(y, PIECE_ROWS, WIDTH // launch.pieces) if y.dtype == torch.bfloat16 else None,
        y,
        x.scales,
        w.scales,
        None if tiles is None else tiles.starts_e,
        None if tiles is None else tiles.owners[size],
        None if tiles is None else tiles.block_counts[size:],
        first,
        rows,
        columns,
        depth,
        len(values),
        *x.scales.stride(),
        w.scales.stride(0) if tiles is not None else 0,
        *w.scales.stride()[-2:],
        STAGES=launch.stages,
        STEPS=launch.steps,
        GROUP=launch.group,
        MULTIPLIERS=launch.block_rows // PIECE_ROWS,
        ONLY_LAST=tiles is not None and tiles.only_last,
        **_warps_of(launch),
    )


def launch_matrices(
    a: Quantized, b: Quantized, c: Tensor, starts: Tensor | None, launch: ProductLaunch, *, accumulate: bool
) -> None:
    """Write or add a times the transpose of b, contracted over each expert's columns.

    Args:
        a: M x R, each row with scales of its own.
        b: N x R likewise, or 128 rows with one.
        c: e x M x N, contiguous.
        starts: int32 columns at which experts begin, multiples of 128, and where the last one ends; None for one
            matrix, contracted over all.
        launch: how it is cut.
        accumulate: add to what c, then float32, holds.
    """
    experts, rows, columns = c.shape
    is_square = b.block[0] == WIDTH
    start_kernel(
        float8_matrices_kernel,
        (programs_of(launch, c.device),),
        blocks_of(a.values, PIECE_ROWS, DEPTH),
        blocks_of(b.values, WIDTH, DEPTH),
        blocks_of(c, 1, PIECE_ROWS, WIDTH // launch.pieces) if accumulate else None,
        c,
        a.scales,
        b.scales,
        starts,
        rows,
        columns,
        a.values.shape[1],
        experts,
        *a.scales.stride(),
        *b.scales.stride(),
        STAGES=launch.stages,
        STEPS=launch.steps if is_square else 1,
        GROUP=launch.group,
        MULTIPLIERS=launch.block_rows // PIECE_ROWS,
        SQUARE=is_square,
        WHOLE=rows % launch.block_rows == 0 and columns % WIDTH == 0,
        **_warps_of(launch),
    )


def _warps_of(launch: ProductLaunch) -> dict[str, int]:
    """Warps of a multiplier, and registers of a thread before warps hand them on."""
    return {"num_warps": launch.warps, "maxnreg": REGISTERS if launch.block_rows == 2 * PIECE_ROWS else TRIOS_REGISTERS}
