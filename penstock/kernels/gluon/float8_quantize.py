"""Launches of Hopper's own kernels that quantize tiles along both of their sides, as the blockwise recipes have it.

`penstock.kernels.float8.quantize`, `swiglu` and `latent_heads` make room for copies, and come here where a launch's
engine is `gluon` and nothing stands in the way.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.kernels.float8.formats import E4M3, E5M2, Format
from penstock.kernels.float8.quantized import Quantized, RowColQuantized
from penstock.kernels.float8.recipes import BLOCKWISE_SQUARE, Block, Scaling
from penstock.kernels.float8.tile_launches import BackwardLaunch, TileLaunch
from penstock.kernels.gluon import support
from penstock.kernels.gluon.support import HAS_GLUON
from penstock.kernels.launching import start_kernel
from penstock.kernels.tuning import programs_of

if HAS_GLUON:
    from penstock.kernels.gluon import float8_quantize_kernels as kernels

TILE = 128

RECIPE = BLOCKWISE_SQUARE
"""Has all blocks that the kernels know."""


def obstacle(blocks: Sequence[Block], scaling: Scaling, forms: Sequence[Format], width: int, target: str) -> str | None:
    """Why the kernels cannot write copies, or None.

    Args:
        blocks: of numbers by rows, whether they are written or read in 8 bits, if there are any; last, of transposed
            ones.
        scaling: of their scales.
        forms: of their values.
        width: columns of what is quantized.
        target: chip as compilers name it.
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
    launch: TileLaunch,
) -> None:
    """Write rows as they are, and transposed; of rows in 8 bits the second only.

    Args:
        x_RD: bfloat16; or E4M3 or E5M2 by blocks of 1 x 128, without a first copy.
        index_R: source row of each place, or None.
        tiles: of `group_tiles`; or None if the rows are a multiple of 128.
        copies: of the same width; blocks of 1 x 128, of the second also squares.
        form: of both.
        launch: warps and registers.
    """
    by_row, by_column = copies
    values, scales = (x_RD.values, x_RD.scales) if isinstance(x_RD, Quantized) else (x_RD, None)
    columns = by_column.values.view(torch.int64)
    places = by_column.values.shape[1]
    if columns.numel() == 0:
        return
    start_kernel(
        kernels.quantize_kernel,
        (values.shape[1] // TILE, places // TILE),
        values,
        scales,
        *((0, 0) if scales is None else scales.stride()),
        index_R,
        tiles,
        None if by_row is None else by_row.values.view(torch.int8),
        None if by_row is None else by_row.scales.T,
        columns,
        by_column.scales.T,
        len(values) if index_R is None else len(index_R),
        values.stride(0),
        0 if by_row is None else by_row.values.stride(0),
        columns.stride(0),
        values.shape[1],
        LARGEST=form.largest,
        SQUARE=by_column.block == RECIPE.columns,
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )


def launch_latent_heads(
    source: tuple[Tensor, Tensor | None, Tensor | None],
    both: RowColQuantized,
    positions: int,
    strides: Sequence[int],
    sizes: Mapping[str, float],
    launch: TileLaunch,
) -> None:
    """Write some columns of the heads' gradients, by rows and transposed, as `latent_heads` tells them.

    Args:
        source: in bfloat16, B x S x H x N; cosines and sines by which its last columns are turned back, or None twice.
        both: of all columns; blocks of 1 x 128.
        positions: S, a multiple of 128.
        strides: of batch, position and head, and of the angles' batch and position.
        sizes: constants of the kernel.
        launch: warps and registers.
    """
    by_row, by_column = both
    assert by_column is not None, "both are written"
    columns = by_column.values.view(torch.int64)
    batch, _, heads, width = source[0].shape
    start_kernel(
        kernels.latent_heads_backward_kernel,
        (heads * width // TILE, batch * positions // TILE),
        *source,
        by_row.values.view(torch.int8),
        by_row.scales.T,
        columns,
        by_column.scales.T,
        len(by_row.values),
        positions,
        *strides,
        by_row.values.stride(0),
        columns.stride(0),
        by_row.values.shape[1],
        **sizes,
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )


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

    Args:
        sources: gate and up, and dh, in bfloat16; between them the number of the first row of gate and up, on the
            device, or None for 0, and the weights.
        tiles: of `group_tiles`.
        copies: the three, in this order; blocks of 1 x 128, of h also squares.
        products_PR: float32, the parts of each 128 columns; None without weights.
        forms: of h, and of the gradients.
        launch: how it is cut.
        weighs_input: where the weights stand.
    """
    by_row, by_column, h_by_column = copies
    rows, width = sources[3].shape
    columns, h_columns = by_column.values.view(torch.int64), h_by_column.values.view(torch.int64)
    if h_columns.numel() == 0:
        return
    start_kernel(
        kernels.swiglu_backward_float8_kernel,
        (programs_of(launch, tiles.device),),
        *sources,
        tiles,
        by_row.values.view(torch.int8),
        by_row.scales.T,
        columns,
        by_column.scales.T,
        h_columns,
        h_by_column.scales.T,
        products_PR,
        rows,
        by_row.values.stride(0),
        columns.stride(0),
        width,
        len(tiles) - 1,
        LARGEST=forms[1].largest,
        H_LARGEST=forms[0].largest,
        WEIGHS_INPUT=weighs_input,
        AHEAD=launch.ahead,
        SQUARE=h_by_column.block == RECIPE.columns,
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )
