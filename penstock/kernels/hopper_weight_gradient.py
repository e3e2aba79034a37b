"""Launch of Hopper's own kernel for gradients of experts' weights in 16 bits; see `hopper_weight_gradient_kernel`.

`penstock.kernels.grouped_gemm` checks operands, makes room for the result and comes here where the launch is a
`RingLaunch` and `obstacle` finds nothing. When Gluon is there at all, `penstock.kernels.float8.hopper_products` says.
"""

import torch
import triton
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor

from penstock.kernels.float8.hopper_products import HAS_GLUON, REGISTERS, VERSIONS
from penstock.kernels.launching import start_kernel
from penstock.kernels.tile_table import TileTable
from penstock.kernels.tuning import RingLaunch, programs_of

if HAS_GLUON:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from penstock.kernels.hopper_weight_gradient_kernel import weight_gradient_kernel

PIECE_ROWS = 64
"""Rows of a tile that are written at a time: those of one instruction of the matrix unit."""

SWIZZLE = 128
"""Bytes of shared memory in a row, at most, that are shuffled together so that neighbours lie in different banks."""


def obstacle(dy: Tensor, index: Tensor | None, target: str) -> str | None:
    """Why the kernel cannot multiply operands that fit each other, or None.

    Args:
        dy: gradient of the output.
        index: rows of x that are gathered while they are loaded, or None.
        target: chip as compilers name it.
    """
    if target != "sm_90":
        return f"the kernel is Hopper's, this is {target}"
    if not HAS_GLUON:
        return f"Triton {triton.__version__} has no Gluon of the versions {', '.join(VERSIONS)}"
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
        _blocks_of_rows(dy, launch.block_depth, launch.block_rows),
        _blocks_of_rows(x, launch.block_depth, launch.block_columns),
        TensorDescriptor.from_tensor(dw, [1, PIECE_ROWS, piece_columns], _layout(dw, piece_columns, 3)),
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


def _blocks_of_rows(rows: Tensor, *block: int) -> "TensorDescriptor":
    """Blocks that end with the rows of an expert."""
    ragged = create_ragged_descriptor(rows, block)
    layout = _layout(rows, block[-1], len(ragged.shape))
    return TensorDescriptor(ragged.base, ragged.shape, ragged.strides, ragged.block_shape, layout)


def _layout(memory: Tensor, columns: int, rank: int) -> "NVMMASharedLayout":
    """How blocks of so many columns lie in shared memory."""
    width = min(SWIZZLE, columns * memory.itemsize)
    return NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * memory.itemsize, rank=rank)
