"""Launches of Hopper's own kernels: products of 8-bit numbers whose scales are the recipe blockwise's, on Hopper.

`launch_rows` multiplies rows with a weight, or each expert's rows with its own; `launch_matrices` two operands that
are contracted over rows, for gradients of weights. `penstock.kernels.float8.products` checks operands, makes room
for results and comes here where a launch's engine is `gluon` and `obstacle` finds nothing.

Gluon is an experiment of Triton's: it changes from version to version. So it is imported only where the version is one
that these kernels have been compiled with, and never on AMD's chips.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from penstock.kernels.float8.launches import ProductLaunch
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.float8.recipes import BLOCKWISE, DEPTH
from penstock.kernels.language import create_ragged_descriptor, triton
from penstock.kernels.launching import start_kernel
from penstock.kernels.tile_table import BLOCK_SIZES, TileTable
from penstock.kernels.tuning import programs_of

VERSIONS = ("3.6", "3.9")
"""Of Triton, whose Gluon takes the kernels."""

PART = 64
"""Rows of a tile that one multiplier has."""

WIDTH = 128
"""Columns of a tile."""

REGISTERS = 168
"""Of a thread at the start: twelve warps share a multiprocessor, which then hand them from one to the other."""

TRIOS_REGISTERS = 128
"""The same of sixteen warps, where there are three multipliers."""

HAS_GLUON = (
    torch.version.hip is None
    and ".".join(triton.__version__.split(".")[:2]) in VERSIONS
    and find_spec("triton.experimental.gluon") is not None
)

if HAS_GLUON:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from penstock.kernels.float8.hopper_matrices import float8_matrices_kernel
    from penstock.kernels.float8.hopper_rows import float8_rows_kernel


def obstacle(a: Quantized, b: Quantized, target: str) -> str | None:
    """Why the kernels cannot multiply two operands that fit each other, or None.

    Args:
        a: rows.
        b: a weight, a stack of experts' weights, or rows.
        target: chip as compilers name it.
    """
    if target != "sm_90":
        return f"the kernels are Hopper's, this is {target}"
    if not HAS_GLUON:
        return f"Triton {triton.__version__} has no Gluon of the versions {', '.join(VERSIONS)}"
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
        _blocks_of(x.values, PART),
        _blocks_of(values, 1, WIDTH),
        _ragged_pieces_of(y, launch) if y.dtype == torch.bfloat16 else None,
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
        MULTIPLIERS=launch.block_rows // PART,
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
        _blocks_of(a.values, PART),
        _blocks_of(b.values, WIDTH),
        _pieces_of(c, launch) if accumulate else None,
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
        MULTIPLIERS=launch.block_rows // PART,
        SQUARE=is_square,
        WHOLE=rows % launch.block_rows == 0 and columns % WIDTH == 0,
        **_warps_of(launch),
    )


def _blocks_of(values: Tensor, *block: int) -> "TensorDescriptor":
    """Blocks of depth as matrix units want them in shared memory."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=values.ndim)
    return TensorDescriptor.from_tensor(values, [*block, DEPTH], layout)


def _ragged_pieces_of(y: Tensor, launch: ProductLaunch) -> "TensorDescriptor":
    """Pieces of a multiplier's part of a tile, of which rows past an expert's last are not written."""
    ragged = create_ragged_descriptor(y, [PART, WIDTH // launch.pieces])
    return TensorDescriptor(
        ragged.base, ragged.shape, ragged.strides, ragged.block_shape, _layout_of_pieces(y, launch, len(ragged.shape))
    )


def _pieces_of(c: Tensor, launch: ProductLaunch) -> "TensorDescriptor":
    """Pieces of a multiplier's part of a tile that are added to."""
    return TensorDescriptor.from_tensor(c, [1, PART, WIDTH // launch.pieces], _layout_of_pieces(c, launch, 3))


def _layout_of_pieces(memory: Tensor, launch: ProductLaunch, rank: int) -> "NVMMASharedLayout":
    width = min(128, WIDTH // launch.pieces * memory.itemsize)
    return NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * memory.itemsize, rank=rank)


def _warps_of(launch: ProductLaunch) -> dict[str, int]:
    """Warps of a multiplier, and registers of a thread before warps hand them on."""
    return {"num_warps": launch.warps, "maxnreg": REGISTERS if launch.block_rows == 2 * PART else TRIOS_REGISTERS}
