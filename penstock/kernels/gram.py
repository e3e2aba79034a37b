"""Orthogonalization by the quintic Newton-Schulz iteration of Muon (https://kellerjordan.github.io/posts/muon).

For a matrix with singular values U S V^T, the result is about U V^T. After division by the Frobenius norm, each step is

    X <- a X + (b G + c G G) X        G = X X^T

which maps singular values by a s + b s^3 + c s^5. The coefficients raise small values fast and keep all of them
between 0.68 and 1.14 at the end; they do not converge to 1. A matrix with more rows than columns is transposed first.

Two of the three products are of a matrix with its own transpose. On GPUs a kernel computes one half of them: tiles on
and above the diagonal, each of which is written twice, the second time transposed.

    gram(x)                                scale x x^T
    gram(g, addend=g, ...)                 scale g g^T + addend_scale g       g symmetric
"""

import torch
from torch import Tensor

from penstock.kernels.language import HAS_TRITON, TensorDescriptor, ceil_div, on_gpu, start_kernel, tl, triton
from penstock.kernels.tuning import GemmLaunch, programs_of, target_of

LAUNCH = GemmLaunch(block_rows=128, block_columns=128, block_depth=64, warps=8, stages=5, pieces=4)
POINTERS = GemmLaunch(block_rows=128, block_columns=128, block_depth=64, warps=8, stages=2, descriptors=False)
LINE = 8  # numbers of 16 bits, of which rows of a descriptor are multiples


def has_kernel(x_EFD: Tensor) -> bool:
    """Whether the kernel takes these matrices: 16 bits, on a GPU."""
    return on_gpu(x_EFD) and x_EFD.dtype.itemsize == 2 and (HAS_TRITON or x_EFD.is_meta)


def gram(
    x_EFD: Tensor,
    *,
    addend_EFF: Tensor | None = None,
    scale: float = 1.0,
    addend_scale: float = 1.0,
) -> Tensor:
    """Returns scale x x^T + addend_scale addend, E x F x F in the dtype of x; the addend is symmetric."""
    x_EFD = x_EFD.contiguous()
    count, rows, depth = x_EFD.shape
    y_EFF = x_EFD.new_empty(count, rows, rows)
    launch = _launch_for(x_EFD)
    source, target, turned = x_EFD, y_EFF, y_EFF
    if launch.descriptors:
        piece = launch.block_columns // launch.pieces
        source = TensorDescriptor.from_tensor(x_EFD, [1, launch.block_rows, launch.block_depth])
        target = TensorDescriptor.from_tensor(y_EFF, [1, launch.block_rows, piece])
        turned = TensorDescriptor.from_tensor(y_EFF, [1, piece, launch.block_rows])
    tiles = ceil_div(rows, launch.block_rows)
    start_kernel(
        gram_kernel, (min(count * tiles * (tiles + 1) // 2, programs_of(launch, x_EFD.device)),),
        source, target, turned, addend_EFF, count, rows, depth, scale, addend_scale,
        BLOCK=launch.block_rows, DEPTH=launch.block_depth, PIECES=launch.pieces, DESCRIPTORS=launch.descriptors,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return y_EFF


def _launch_for(x_EFD: Tensor) -> GemmLaunch:
    """The launch with descriptors where the chip has a copy engine and rows are whole lines of it."""
    target = target_of(x_EFD.device)
    has_engine = target.startswith("sm_") and int(target.removeprefix("sm_")) >= 90
    return LAUNCH if has_engine and not any(size % LINE for size in x_EFD.shape[1:]) else POINTERS


@triton.jit
def gram_kernel(
    x, y, turned,  # E x F x D, and E x F x F twice: descriptors of a piece of a tile and of its transpose, or pointers
    addend_ptr, count, rows, depth, scale, addend_scale,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, PIECES: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Compute tiles on and above the diagonal, by columns: of 3 x 3 tiles (0, 0), (0, 1), (1, 1), (0, 2), ..."""
    across = tl.cdiv(rows, BLOCK)
    half = across * (across + 1) // 2
    steps = tl.cdiv(depth, DEPTH)
    tl.assume(steps > 0)
    for tile in tl.range(tl.program_id(0), count * half, tl.num_programs(0), flatten=True):
        matrix = tile // half
        index = tile % half
        column = ((tl.sqrt_rn(8.0 * index + 1.0) - 1.0) / 2).to(tl.int32)
        row = index - column * (column + 1) // 2
        sums = tl.zeros((BLOCK, BLOCK), tl.float32)
        for step in range(steps):
            left = _load(x, matrix, row * BLOCK, step * DEPTH, rows, depth, BLOCK, DEPTH, DESCRIPTORS)
            right = _load(x, matrix, column * BLOCK, step * DEPTH, rows, depth, BLOCK, DEPTH, DESCRIPTORS)
            sums = tl.dot(left, right.T, sums, input_precision="ieee")
        factors = scale, addend_scale
        row, column = row * BLOCK, column * BLOCK
        _store(y, turned, addend_ptr, matrix, row, column, rows, sums, factors, PIECES, DESCRIPTORS)


@triton.jit
def _load(
    x, matrix, row, column, rows, depth, BLOCK: tl.constexpr, DEPTH: tl.constexpr, DESCRIPTORS: tl.constexpr
):  # fmt: skip
    """Load BLOCK rows and DEPTH columns of a matrix; zeros outside of it."""
    if DESCRIPTORS:
        block = x.load([matrix, row, column]).reshape(BLOCK, DEPTH)
    else:
        down, along = row + tl.arange(0, BLOCK), column + tl.arange(0, DEPTH)
        x_ptrs = x + matrix.to(tl.int64) * rows * depth + down[:, None] * depth + along[None, :]
        block = tl.load(x_ptrs, mask=(down < rows)[:, None] & (along < depth)[None, :], other=0)
    return block


@triton.jit
def _store(
    y, turned, addend_ptr, matrix, row, column, rows, sums, factors, PIECES: tl.constexpr, DESCRIPTORS: tl.constexpr
):  # fmt: skip
    """Write a tile and its transpose, in PIECES."""
    down: tl.constexpr = sums.shape[0]
    along: tl.constexpr = sums.shape[1]
    if PIECES > 1:
        HALF: tl.constexpr = PIECES // 2
        left, right = sums.reshape(down, 2, along // 2).permute(0, 2, 1).split()
        _store(y, turned, addend_ptr, matrix, row, column, rows, left, factors, HALF, DESCRIPTORS)
        column += along // 2
        _store(y, turned, addend_ptr, matrix, row, column, rows, right, factors, HALF, DESCRIPTORS)
    else:
        position, across = row + tl.arange(0, down), column + tl.arange(0, along)
        inside = (position < rows)[:, None] & (across < rows)[None, :]
        start = matrix.to(tl.int64) * rows * rows
        sums *= factors[0]
        if addend_ptr is not None:
            addend_ptrs = addend_ptr + start + position[:, None] * rows + across[None, :]
            sums += factors[1] * tl.load(addend_ptrs, mask=inside, other=0).to(tl.float32)
        if DESCRIPTORS:
            result = sums.to(y.dtype)
            y.store([matrix, row, column], result.reshape(1, down, along))
            turned.store([matrix, column, row], result.T.reshape(1, along, down))
        else:
            result = sums.to(y.dtype.element_ty)
            tl.store(y + start + position[:, None] * rows + across[None, :], result, mask=inside)
            tl.store(y + start + across[:, None] * rows + position[None, :], result.T, mask=inside.T)


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7  # least norm that a matrix is divided by


@torch.no_grad()
def orthogonalize(x_EFD: Tensor, steps: int) -> Tensor:
    """Orthogonalize each F x D matrix of a stack, in the dtype of x."""
    if x_EFD.shape[-2] > x_EFD.shape[-1]:
        return orthogonalize(x_EFD.mT, steps).mT
    if x_EFD.device.type == "cpu" and len(x_EFD) > 1:  # bits of a result do not depend on the rest of the stack
        return torch.cat([orthogonalize(matrix[None], steps) for matrix in x_EFD])
    a, b, c = COEFFICIENTS
    norm_E = torch.linalg.vector_norm(x_EFD, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x_EFD = x_EFD / norm_E.clamp(min=EPSILON).to(x_EFD.dtype)
    for _ in range(steps):
        if has_kernel(x_EFD):
            gram_EFF = gram(x_EFD)
            factor_EFF = gram(gram_EFF, addend_EFF=gram_EFF, scale=c, addend_scale=b)
        else:
            gram_EFF = x_EFD @ x_EFD.mT
            factor_EFF = torch.baddbmm(gram_EFF, gram_EFF, gram_EFF, beta=b, alpha=c)
        x_EFD = torch.baddbmm(x_EFD, factor_EFF, x_EFD, beta=a)
    return x_EFD
