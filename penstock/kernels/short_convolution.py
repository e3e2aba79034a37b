"""The short causal convolution of linear attention with its SiLU, in one kernel forward and two backward.

A program has some features and walks over positions. At each it loads the J positions that meet there, of which all but
one are in the cache. Backward computes the sums before the SiLU again, writes their gradients, and sums those of the
weights in registers; a second kernel correlates them with the weights.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.language import ceil_div, power_of_two, tl, triton
from penstock.kernels.launching import start_kernel

BLOCK_D = 256  # features of a program of one warp, 16 bytes for each thread and load
WARPS = 1
RUN = 32  # positions of a program
SUMMED = 128  # of a program that sums gradients of weights


def short_convolution(x_BSD: Tensor, weight_DJ: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """`penstock.kernels.delta_rule.short_convolution`. Raises KernelError if there is not one row for each feature."""
    if weight_DJ.ndim != 2 or weight_DJ.shape[0] != x_BSD.shape[-1]:
        got = f"{tuple(weight_DJ.shape)} for {tuple(x_BSD.shape)}"
        raise KernelError("short_convolution: weights must have a row for each feature", got=got)
    y_BSD: Tensor = _ShortConvolution.apply(x_BSD, weight_DJ, documents_BS)
    return y_BSD


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_DJ: Tensor, documents_BS: Tensor | None) -> Tensor:
        x_BSD, weight_DJ = x_BSD.contiguous(), weight_DJ.contiguous()
        (rows, positions, width), size = x_BSD.shape, weight_DJ.shape[1]
        y_BSD = torch.empty_like(x_BSD)
        start_kernel(
            convolution_kernel, (ceil_div(positions, RUN), ceil_div(width, BLOCK_D), rows),
            x_BSD, weight_DJ, documents_BS, y_BSD, positions, RUN=RUN, IS_GRADIENT=False, **_sizes(width, size),
        )  # fmt: skip
        ctx.save_for_backward(x_BSD, weight_DJ, documents_BS)
        return y_BSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BSD: Tensor) -> tuple[Tensor | None, ...]:
        x_BSD, weight_DJ, documents_BS = ctx.saved_tensors
        (rows, positions, width), size = x_BSD.shape, weight_DJ.shape[1]
        dz_BSD, dx_BSD = torch.empty_like(x_BSD), torch.empty_like(x_BSD)
        programs = ceil_div(positions, SUMMED)
        partial_PDJ = x_BSD.new_empty(rows * programs, width, size, dtype=torch.float32)  # by program
        start_kernel(
            convolution_gradient_kernel, (programs, ceil_div(width, BLOCK_D), rows),
            x_BSD, weight_DJ, documents_BS, dy_BSD.contiguous(), dz_BSD, partial_PDJ, positions,
            RUN=SUMMED, **_sizes(width, size),
        )  # fmt: skip
        start_kernel(
            convolution_kernel, (ceil_div(positions, RUN), ceil_div(width, BLOCK_D), rows),
            dz_BSD, weight_DJ, documents_BS, dx_BSD, positions, RUN=RUN, IS_GRADIENT=True, **_sizes(width, size),
        )  # fmt: skip
        return dx_BSD, partial_PDJ.sum(0).to(weight_DJ.dtype), None


def _sizes(width: int, size: int) -> dict[str, int]:
    """Constants of both kernels."""
    return {"D": width, "J": size, "BLOCK_J": power_of_two(size), "BLOCK_D": BLOCK_D, "num_warps": WARPS}


@triton.jit
def _weights(weight_ptr, column_D, D: tl.constexpr, J: tl.constexpr, BLOCK_J: tl.constexpr):
    """Weights by the distance of positions, J x D, float32; 0 beyond."""
    back_J = tl.arange(0, BLOCK_J)
    inside = (back_J < J)[:, None] & (column_D < D)[None, :]
    weight_ptrs = weight_ptr + column_D[None, :] * J + (J - 1 - back_J)[:, None]
    return tl.load(weight_ptrs, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _near(
    ptr, documents_ptr, position, column_D, positions, SIGN: tl.constexpr,
    D: tl.constexpr, J: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The J positions from one on, back (SIGN -1) or ahead, J x D in float32; 0 for those of other documents."""
    distance_J = tl.arange(0, BLOCK_J)
    other_J = position + SIGN * distance_J
    is_there_J = (distance_J < J) & (other_J >= 0) & (other_J < positions) & (position < positions)
    if documents_ptr is not None:
        document = tl.load(documents_ptr + tl.minimum(position, positions - 1))
        is_there_J &= tl.load(documents_ptr + other_J, mask=is_there_J, other=-1) == document
    inside = is_there_J[:, None] & (column_D < D)[None, :]
    return tl.load(ptr + other_J.to(tl.int64)[:, None] * D + column_D[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def convolution_kernel(
    x_ptr, weight_ptr, documents_ptr, y_ptr, positions,  # x and y B x S x D, weights D x J
    D: tl.constexpr, J: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Some positions of a row. Example with weights [1, 10]: x = [1, 2, 3] gives SiLU of [10, 21, 32].

    A gradient goes from each position to the J - 1 before it, without SiLU: [1, 2, 3] gives [12, 23, 30].
    """
    row = tl.program_id(2).to(tl.int64)
    column_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    x_ptr += row * positions * D
    y_ptr += row * positions * D
    if documents_ptr is not None:
        documents_ptr += row * positions
    weight_JD = _weights(weight_ptr, column_D, D, J, BLOCK_J)
    SIGN: tl.constexpr = 1 if IS_GRADIENT else -1
    for number in range(RUN):
        position = tl.program_id(0) * RUN + number
        x_JD = _near(x_ptr, documents_ptr, position, column_D, positions, SIGN, D, J, BLOCK_J)
        y_D = tl.sum(x_JD * weight_JD, 0)
        if not IS_GRADIENT:
            y_D *= tl.sigmoid(y_D)
        y_ptrs = y_ptr + position.to(tl.int64) * D + column_D
        tl.store(y_ptrs, y_D.to(y_ptr.dtype.element_ty), mask=(column_D < D) & (position < positions))


@triton.jit
def convolution_gradient_kernel(
    x_ptr, weight_ptr, documents_ptr, dy_ptr, dz_ptr, partial_ptr, positions,
    D: tl.constexpr, J: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Some positions of a row: gradients of the sums before the SiLU, and a row of the table of weights' gradients."""
    row = tl.program_id(2).to(tl.int64)
    column_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    x_ptr += row * positions * D
    dy_ptr += row * positions * D
    dz_ptr += row * positions * D
    if documents_ptr is not None:
        documents_ptr += row * positions
    weight_JD = _weights(weight_ptr, column_D, D, J, BLOCK_J)
    dweight_JD = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    for number in range(RUN):
        position = tl.program_id(0) * RUN + number
        inside_D = (column_D < D) & (position < positions)
        place_D = position.to(tl.int64) * D + column_D
        x_JD = _near(x_ptr, documents_ptr, position, column_D, positions, -1, D, J, BLOCK_J)
        z_D = tl.sum(x_JD * weight_JD, 0)
        gate_D = tl.sigmoid(z_D)
        dz_D = tl.load(dy_ptr + place_D, mask=inside_D, other=0.0).to(tl.float32)
        dz_D *= gate_D * (1.0 + z_D * (1.0 - gate_D))
        tl.store(dz_ptr + place_D, dz_D.to(dz_ptr.dtype.element_ty), mask=inside_D)
        dweight_JD += dz_D[None, :] * x_JD
    partial_ptr += (row * tl.num_programs(0) + tl.program_id(0)) * (D * J)
    back_J = tl.arange(0, BLOCK_J)
    inside = (back_J < J)[:, None] & (column_D < D)[None, :]
    tl.store(partial_ptr + column_D[None, :] * J + (J - 1 - back_J)[:, None], dweight_JD, mask=inside)
