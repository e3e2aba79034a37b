"""What launches of Hopper's own kernels in 16 bits share: when they can be had, and blocks for the copy engine.

When Gluon is there at all, `penstock.kernels.float8.hopper_products` says.
"""

from torch import Tensor

from penstock.kernels.float8.hopper_products import HAS_GLUON, VERSIONS
from penstock.kernels.language import create_ragged_descriptor, triton

if HAS_GLUON:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PIECE_ROWS = 64
"""Rows of a tile that are written at a time: those of one instruction of the matrix unit."""

SWIZZLE = 128
"""Bytes of shared memory in a row, at most, that are shuffled together so that neighbours lie in different banks."""


def unavailable(target: str) -> str | None:
    """Why there are no such kernels, or None.

    Args:
        target: chip as compilers name it.
    """
    if target != "sm_90":
        return f"the kernel is Hopper's, this is {target}"
    return None if HAS_GLUON else f"Triton {triton.__version__} has no Gluon of the versions {', '.join(VERSIONS)}"


def blocks_of(memory: Tensor, *block: int) -> "TensorDescriptor":
    """Blocks as the matrix unit wants them in shared memory.

    Args:
        memory: contiguous.
        block: its shape.
    """
    return TensorDescriptor.from_tensor(memory, list(block), _layout(memory, block[-1], len(block)))


def ragged_blocks_of(rows: Tensor, *block: int) -> "TensorDescriptor":
    """Blocks that end with the rows of an expert (`penstock.kernels.grouped_gemm_kernels`).

    Args:
        rows: R x columns, contiguous.
        block: rows and columns of one.
    """
    ragged = create_ragged_descriptor(rows, list(block))
    layout = _layout(rows, block[-1], len(ragged.shape))
    return TensorDescriptor(ragged.base, ragged.shape, ragged.strides, ragged.block_shape, layout)


def _layout(memory: Tensor, columns: int, rank: int) -> "NVMMASharedLayout":
    """How blocks of so many columns lie in shared memory."""
    width = min(SWIZZLE, columns * memory.itemsize)
    return NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * memory.itemsize, rank=rank)
