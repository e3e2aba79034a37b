"""Whether Gluon can be used, and tensor descriptors for its kernels.

Gluon is an experimental part of Triton and changes from version to version. Its kernels are therefore used only with
versions of Triton that they have been compiled with, and never on AMD's chips.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from penstock.kernels.language import create_ragged_descriptor, triton

VERSIONS = ("3.6", "3.9")  # of Triton, whose Gluon compiles these kernels
HAS_GLUON = (
    torch.version.hip is None
    and ".".join(triton.__version__.split(".")[:2]) in VERSIONS
    and find_spec("triton.experimental.gluon") is not None
)

if HAS_GLUON:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

REGISTERS = 168  # of a thread when a kernel of twelve warps starts; `setmaxnreg` then moves them from warp to warp
PIECE_ROWS = 64  # rows of a tile that one instruction of the matrix unit makes, and that are written at a time
SWIZZLE = 128  # most bytes of a row of shared memory swizzled together, so that neighbours lie in different banks


def obstacle(target: str) -> str | None:
    """Why the kernels cannot run on a chip, or None."""
    if target != "sm_90":
        return f"the kernel is Hopper's, this is {target}"
    return None if HAS_GLUON else f"Triton {triton.__version__} has no Gluon of the versions {', '.join(VERSIONS)}"


def blocks_of(memory: Tensor, *block: int) -> "TensorDescriptor":
    """A descriptor of blocks, laid out as the matrix unit reads them, of rows a multiple of 16 bytes apart."""
    return TensorDescriptor.from_tensor(memory, list(block), _layout(memory, block[-1], len(block)))


def ragged_blocks_of(rows: Tensor, *block: int) -> "TensorDescriptor":
    """A descriptor of blocks of R x columns that end with an expert (`penstock.kernels.grouped_gemm_kernels`)."""
    ragged = create_ragged_descriptor(rows, list(block))
    layout = _layout(rows, block[-1], len(ragged.shape))
    return TensorDescriptor(ragged.base, ragged.shape, ragged.strides, ragged.block_shape, layout)


def _layout(memory: Tensor, columns: int, rank: int) -> "NVMMASharedLayout":
    width = min(SWIZZLE, columns * memory.itemsize)
    return NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * memory.itemsize, rank=rank)
