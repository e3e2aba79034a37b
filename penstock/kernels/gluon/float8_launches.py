"""Launches of the Hopper kernels in 8 bits, for the recipes blockwise and blockwise-square.

`penstock.kernels.float8` checks operands, allocates results and calls a launch here where a launch's engine is `gluon`
and its obstacle is None: `launch_rows` and `launch_matrices` multiply, the others quantize tiles along both sides.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.float8.launches import BackwardLaunch, ProductLaunch
from penstock.kernels.float8.quantized import Quantized, RowColQuantized
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, DEPTH, E4M3, E5M2, Block, Format, Scaling
from penstock.kernels.gluon import support
from penstock.kernels.gluon.support import HAS_GLUON, PIECE_ROWS, REGISTERS, blocks_of, ragged_blocks_of
from penstock.kernels.launching import start_kernel
from penstock.kernels.reference import IGNORED_LABEL
from penstock.kernels.tile_table import BLOCK_SIZES, TileTable
from penstock.kernels.tuning import KernelLaunch, programs_of

if HAS_GLUON:
    from penstock.kernels.gluon import float8_quantize_kernels as kernels
    from penstock.kernels.gluon.float8_gemm_kernels import float8_matrices_kernel, float8_rows_kernel

WIDTH = 128  # columns of a tile of a product
TRIOS_REGISTERS = 128  # as `REGISTERS`, for sixteen warps, where there are three consumers
TILE = 128  # rows and columns of a tile that is quantized
RECIPE = BLOCKWISE_SQUARE  # has all blocks that the kernels know


def gemm_obstacle(a: Quantized, b: Quantized, target: str) -> str | None:
    """Why the kernels cannot multiply rows by rows or weights (b) that fit each other, or None."""
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
    """Write rows times the transpose of their expert's matrix, and zeros behind the last expert's rows.

    x is R x K, w e x N x K, or N x K for all rows without `tiles`; y is R x N, bfloat16 or float32. With `first`, int64
    [1], y is a larger buffer, of which only the experts' rows are written, from that row on.
    """
    (rows, depth), columns = x.values.shape, y.shape[1]
    values = w.values if tiles is not None else w.values[None]
    size = BLOCK_SIZES.index(launch.block_rows)
    table = (None,) * 3 if tiles is None else (tiles.tails, tiles.owners[size], tiles.block_counts[size:])
    # Results in float32 are written through pointers.
    pieces = ragged_blocks_of(y, PIECE_ROWS, WIDTH // launch.pieces) if y.dtype == torch.bfloat16 else None
    start_kernel(
        float8_rows_kernel, (programs_of(launch, y.device),),
        blocks_of(x.values, PIECE_ROWS, DEPTH), blocks_of(values, 1, WIDTH, DEPTH), pieces, y, x.scales, w.scales,
        *table, first, rows, columns, depth, len(values), *x.scales.stride(),
        w.scales.stride(0) if tiles is not None else 0, *w.scales.stride()[-2:],
        STAGES=launch.stages, STEPS=launch.steps, GROUP=launch.group, CONSUMERS=launch.block_rows // PIECE_ROWS,
        ONLY_LAST=tiles is not None and tiles.only_last, **_warps_of(launch),
    )  # fmt: skip


def launch_matrices(
    a: Quantized, b: Quantized, c: Tensor, starts: Tensor | None, launch: ProductLaunch, *, accumulate: bool
) -> None:
    """Write or add a times the transpose of b, contracted over each expert's columns.

    a (M x R) has a scale for each row, b (N x R) for each row or for 128 rows; c is e x M x N, contiguous, and float32
    to `accumulate`. `starts`, int32, has the first column of each expert, multiples of 128, and the end of the last
    one; None is for one matrix, contracted over all.
    """
    experts, rows, columns = c.shape
    is_square = b.block[0] == WIDTH
    start_kernel(
        float8_matrices_kernel, (programs_of(launch, c.device),),
        blocks_of(a.values, PIECE_ROWS, DEPTH), blocks_of(b.values, WIDTH, DEPTH),
        blocks_of(c, 1, PIECE_ROWS, WIDTH // launch.pieces) if accumulate else None, c, a.scales, b.scales, starts,
        rows, columns, a.values.shape[1], experts, *a.scales.stride(), *b.scales.stride(),
        STAGES=launch.stages, STEPS=launch.steps if is_square else 1, GROUP=launch.group,
        CONSUMERS=launch.block_rows // PIECE_ROWS, SQUARE=is_square,
        WHOLE=rows % launch.block_rows == 0 and columns % WIDTH == 0, **_warps_of(launch),
    )  # fmt: skip


def _warps_of(launch: ProductLaunch) -> dict[str, int]:
    """Warps of a consumer, and registers of a thread before warps exchange them."""
    return {"num_warps": launch.warps, "maxnreg": REGISTERS if launch.block_rows == 2 * PIECE_ROWS else TRIOS_REGISTERS}


def quantize_obstacle(
    blocks: Sequence[Block], scaling: Scaling, forms: Sequence[Format], width: int, target: str
) -> str | None:
    """Why the kernels cannot write copies of `width` columns, or None.

    `blocks` are those of numbers by rows, written or read in 8 bits, if there are any; last, of transposed ones.
    """
    if (reason := support.obstacle(target)) is not None:
        return reason
    *by_row, by_column = blocks
    fits = {*by_row} <= {RECIPE.rows} and by_column in (RECIPE.rows, RECIPE.columns)
    if not fits or scaling != RECIPE.scaling or not {*forms} <= {E4M3, E5M2}:
        return "copies are not those of a blockwise recipe"
    if width % TILE:
        return f"a width of {width} is no multiple of {TILE}"
    return None


def launch_quantize(
    x_RD: Tensor | Quantized,
    index_R: Tensor | None,
    tiles: Tensor | None,
    copies: tuple[Quantized | None, Quantized],
    form: Format,
    launch: KernelLaunch,
) -> None:
    """Write rows and their transpose; of rows in 8 bits only the transpose.

    x is bfloat16; or E4M3 or E5M2 by blocks of 1 x 128, without a first copy. `index_R` has the source row of each row.
    `tiles` are those of `group_tiles`, or None if the rows are a multiple of 128. Both copies have blocks of 1 x 128,
    the second also squares.
    """
    by_row, by_column = copies
    values, scales = (x_RD.values, x_RD.scales) if isinstance(x_RD, Quantized) else (x_RD, None)
    columns = by_column.values.view(torch.int64)  # 8 numbers at a time
    places = by_column.values.shape[1]
    if columns.numel() == 0:
        return
    start_kernel(
        kernels.quantize_kernel, (values.shape[1] // TILE, places // TILE),
        values, scales, *((0, 0) if scales is None else scales.stride()), index_R, tiles,
        None if by_row is None else by_row.values.view(torch.int8), None if by_row is None else by_row.scales.T,
        columns, by_column.scales.T, len(values) if index_R is None else len(index_R), values.stride(0),
        0 if by_row is None else by_row.values.stride(0), columns.stride(0), values.shape[1],
        LARGEST=form.largest, SQUARE=by_column.block == RECIPE.columns, num_warps=launch.warps,
        maxnreg=launch.registers,
    )  # fmt: skip


def launch_logits_gradient(
    source: tuple[Tensor, Tensor, Tensor],
    both: RowColQuantized,
    first_label: int,
    z_weight: float,
    form: Format,
    launch: KernelLaunch,
) -> None:
    """Write the gradient of logits by rows and transposed, in blocks of 1 x 128.

    `source` is logits (bfloat16, T x V, both multiples of 128), labels and logsumexp of each row.
    """
    by_row, by_column = both
    assert by_column is not None, "both are written"
    columns = by_column.values.view(torch.int64)
    tokens, width = source[0].shape
    start_kernel(
        kernels.logits_gradient_kernel, (width // TILE, tokens // TILE),
        *source, by_row.values.view(torch.int8), by_row.scales.T, columns, by_column.scales.T,
        tokens, width, first_label, z_weight, by_row.values.stride(0), columns.stride(0),
        IGNORED=IGNORED_LABEL, LARGEST=form.largest, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip


def launch_swiglu_backward(
    sources: tuple[Tensor, Tensor | None, Tensor | None, Tensor],
    tiles: Tensor,
    copies: Sequence[Quantized],
    products_PR: Tensor | None,
    forms: tuple[Format, Format],
    launch: BackwardLaunch,
    *,
    weighs_input: bool,
) -> None:
    """Write the gradients of gate and up by rows and by columns, h by columns, and parts of the weights' gradients.

    `sources` are gate and up (bfloat16), the number of their first row on the device or None, the weights or None, and
    dh (bfloat16). `copies` have blocks of 1 x 128, that of h also squares. `products_PR` (float32) takes the parts of
    each 128 columns; None without weights. `forms` are those of h and of the gradients.
    """
    by_row, by_column, h_by_column = copies
    rows, width = sources[3].shape
    columns, h_columns = by_column.values.view(torch.int64), h_by_column.values.view(torch.int64)
    if h_columns.numel() == 0:
        return
    start_kernel(
        kernels.swiglu_backward_float8_kernel, (programs_of(launch, tiles.device),),
        *sources, tiles, by_row.values.view(torch.int8), by_row.scales.T, columns, by_column.scales.T, h_columns,
        h_by_column.scales.T, products_PR, rows, by_row.values.stride(0), columns.stride(0), width, len(tiles) - 1,
        LARGEST=forms[1].largest, H_LARGEST=forms[0].largest, WEIGHS_INPUT=weighs_input,
        SQUARE=h_by_column.block == RECIPE.columns, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
