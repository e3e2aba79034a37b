"""Dense 8-bit products by torch's `scaled_mm`, which is cuBLASLt: a second backend on Hopper.

What it needs beyond our kernels, as torch 2.11 and later check it (aten/src/ATen/native/cuda/ScaledBlas.cpp; block-wise
scales need CUDA 12.9):

    row-wise   scales of a are M x 1, of b 1 x N, both contiguous
    1 x 128    scales are outer x depth blocks, outer contiguous, depth blocks `outer` apart
    128 x 128  scales of b are depth blocks x outer blocks, depth contiguous, padded to a multiple of 4 depth blocks
    values     the contracted dim and N are multiples of 16; with blocks of 128, of 128, and M is a multiple of 4

(CUDA takes a smaller last block, but the check on the meta device does not.) cuBLASLt cannot add to memory here, so a
sum takes a float32 product first. `F.scaled_mm` cannot write into given memory; the function below it can.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from penstock.kernels.float8.quantized import DEPTH, Quantized, Recipe
from penstock.kernels.language import record_launch

_PADDED = 4  # of so many depth blocks the scales of a 128 x 128 weight have a multiple

_KINDS = {
    (1, 0): ScalingType.RowWise,
    (1, DEPTH): ScalingType.BlockWise1x128,
    (DEPTH, DEPTH): ScalingType.BlockWise128x128,
}


def obstacle(recipe: Recipe, target: str, cuda: str | None) -> str | None:
    """Why torch's products cannot compute by a recipe on a chip, or None.

    `cuda` is the version that torch was built with, `torch.version.cuda`; None if the chip is not here.
    """
    if recipe.name not in ("blockwise", "blockwise-square", "rowwise"):
        return f"no product of torch takes the scales of {recipe.name} as they are quantized here"
    if target != "sm_90":
        return f"cuBLASLt has {recipe.name} scales on sm_90 only, this is {target}"
    if cuda is None:
        return None
    major, minor = (int(part) for part in cuda.split(".")[:2])
    if (major, minor) < (12, 9):
        return f"cuBLASLt has {recipe.name} scales from CUDA 12.9 on, this is {cuda}"
    return None


def shape_obstacle(a: Quantized, b: Quantized) -> str | None:
    """Why torch's products cannot take two operands of fitting shapes, or None."""
    (rows, depth), columns = a.values.shape, len(b.values)
    if a.block not in _KINDS or b.block not in _KINDS or a.block[0] != 1 or a.block[1] != b.block[1]:
        return f"blocks of {a.block} and {b.block}"
    if depth % 16 or columns % 16:
        return f"depth {depth} and width {columns} must be multiples of 16"
    if a.block[1] == DEPTH and (depth % DEPTH or rows % 4):
        return f"depth {depth} is no multiple of {DEPTH}, or {rows} rows are none of 4"
    if b.block[0] == DEPTH and columns % DEPTH:
        return f"width {columns} is no multiple of {DEPTH}"
    return None


def multiply(
    a: Quantized, b: Quantized, dtype: torch.dtype, *, out: Tensor | None = None, accumulate_into: Tensor | None = None
) -> Tensor:
    """`penstock.kernels.float8.reference.multiply`; `out` costs a copy unless it is contiguous and of `dtype`."""
    problem = shape_obstacle(a, b)
    assert problem is None, f"torch's scaled_mm cannot multiply these: {problem}"
    scales_a, scales_b = _scales(a, left=True), _scales(b, left=False)
    if out is not None and accumulate_into is None and out.is_contiguous() and out.dtype == dtype:
        return _write(a, b, scales_a, scales_b, out)
    given = (a.values, b.values.T, scales_a, _KINDS[a.block], scales_b, _KINDS[b.block])
    product = F.scaled_mm(*given, output_dtype=torch.float32 if accumulate_into is not None else dtype)
    if accumulate_into is not None:
        return accumulate_into.add_(product)
    return product if out is None else out.copy_(product)


def _write(a: Quantized, b: Quantized, scales_a: Tensor, scales_b: Tensor, out: Tensor) -> Tensor:
    """The product in the memory of `out`; scales as `_scales` gives them."""
    if out.is_meta:
        # On the meta device torch has only the form that allocates its result.
        record_launch("_scaled_mm_v2", a.values, b.values.T, scales_a, scales_b, out)
        return out
    left, right, no_swizzle = [_KINDS[a.block].value], [_KINDS[b.block].value], list[int]()
    operands = a.values, b.values.T, [scales_a], left, no_swizzle, [scales_b], right, no_swizzle
    return torch._scaled_mm_v2(*operands, bias=None, out_dtype=out.dtype, out=out)


def _scales(x: Quantized, *, left: bool) -> Tensor:
    """Scales of the left or right operand in the layout that cuBLASLt expects; copied only where they lie otherwise."""
    outer_blocks, depth_blocks = x.scales.shape
    if x.block == (1, 0):
        return x.scales.contiguous() if left else x.scales.reshape(1, outer_blocks)
    if x.block == (1, DEPTH):
        return x.scales.T.contiguous().T  # outer contiguous
    padding = -depth_blocks % _PADDED
    return F.pad(x.scales, (0, padding)).contiguous().T if padding else x.scales.contiguous().T
