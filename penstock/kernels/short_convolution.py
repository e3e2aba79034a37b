"""The short causal convolution of linear attention with its SiLU, in one kernel forward and two backward.

A program walks over blocks of positions of some features. Backward computes the sums before the SiLU again, writes
their gradients, and sums those of the weights in registers; a second kernel correlates them with the weights.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.language import ceil_div, power_of_two, start_kernel, tl, triton

BLOCK_S, BLOCK_D = 32, 64  # positions and features that a program holds at a time
TILES = 16  # blocks of positions of a program that sums gradients of weights


def short_convolution(x_BSD: Tensor, weight_DJ: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """`penstock.kernels.delta_rule.short_convolution`. Raises KernelError if there is not one row for each feature."""
    if weight_DJ.ndim != 2 or weight_DJ.shape[0] != x_BSD.shape[-1]:
        got = f"{tuple(weight_DJ.shape)} for {tuple(x_BSD.shape)}"
        raise KernelError("short_convolution: weights must have a row for each feature", got=got)
    return _ShortConvolution.apply(x_BSD, weight_DJ, documents_BS)


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_DJ: Tensor, documents_BS: Tensor | None) -> Tensor:
        x_BSD, weight_DJ = x_BSD.contiguous(), weight_DJ.contiguous()
        (rows, positions, width), size = x_BSD.shape, weight_DJ.shape[1]
        y_BSD = torch.empty_like(x_BSD)
        start_kernel(
            convolution_kernel, (ceil_div(positions, BLOCK_S), ceil_div(width, BLOCK_D), rows),
            x_BSD, weight_DJ, documents_BS, y_BSD, positions, D=width, J=size, BLOCK_S=BLOCK_S, BLOCK_D=BLOCK_D,
        )  # fmt: skip
        ctx.save_for_backward(x_BSD, weight_DJ, documents_BS)
        return y_BSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BSD: Tensor) -> tuple[Tensor | None, ...]:
        x_BSD, weight_DJ, documents_BS = ctx.saved_tensors
        (rows, positions, width), size = x_BSD.shape, weight_DJ.shape[1]
        dz_BSD, dx_BSD = torch.empty_like(x_BSD), torch.empty_like(x_BSD)
        programs = ceil_div(positions, BLOCK_S * TILES)
        partial_PDJ = x_BSD.new_empty(rows * programs, width, size, dtype=torch.float32)  # by program
        sizes = {"D": width, "J": size, "BLOCK_S": BLOCK_S, "BLOCK_D": BLOCK_D}
        start_kernel(
            convolution_gradient_kernel, (programs, ceil_div(width, BLOCK_D), rows),
            x_BSD, weight_DJ, documents_BS, dy_BSD.contiguous(), dz_BSD, partial_PDJ, positions, TILES,
            BLOCK_J=power_of_two(size), **sizes,
        )  # fmt: skip
        start_kernel(
            convolution_input_gradient_kernel, (ceil_div(positions, BLOCK_S), ceil_div(width, BLOCK_D), rows),
            dz_BSD, weight_DJ, documents_BS, dx_BSD, positions, **sizes,
        )  # fmt: skip
        return dx_BSD, partial_PDJ.sum(0).to(weight_DJ.dtype), None


@triton.jit
def _shifted(ptr, documents_ptr, position_S, column_D, shift, positions, D: tl.constexpr):
    """Rows of other positions of the same document, `shift` further on, in float32; 0 where there are none."""
    other_S = position_S + shift
    is_there_S = (position_S < positions) & (other_S >= 0) & (other_S < positions)
    if documents_ptr is not None:
        document_S = tl.load(documents_ptr + position_S, mask=is_there_S, other=0)
        is_there_S &= document_S == tl.load(documents_ptr + other_S, mask=is_there_S, other=-1)
    inside = is_there_S[:, None] & (column_D < D)[None, :]
    return tl.load(ptr + other_S.to(tl.int64)[:, None] * D + column_D[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _sums(x_ptr, weight_ptr, documents_ptr, position_S, column_D, positions, D: tl.constexpr, J: tl.constexpr):
    """What the SiLU reads, S x D."""
    z_SD = tl.zeros([position_S.shape[0], column_D.shape[0]], tl.float32)
    for back in tl.static_range(J):
        weight_D = tl.load(weight_ptr + column_D * J + (J - 1 - back), mask=column_D < D, other=0.0).to(tl.float32)
        z_SD += _shifted(x_ptr, documents_ptr, position_S, column_D, -back, positions, D) * weight_D[None, :]
    return z_SD


@triton.jit
def convolution_kernel(
    x_ptr, weight_ptr, documents_ptr, y_ptr, positions,  # x and y B x S x D, weights D x J
    D: tl.constexpr, J: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A block of a row. Example with weights [1, 10]: x = [1, 2, 3] gives SiLU of [10, 21, 32]."""
    row = tl.program_id(2).to(tl.int64)
    position_S = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    column_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    x_ptr += row * positions * D
    y_ptr += row * positions * D
    if documents_ptr is not None:
        documents_ptr += row * positions
    z_SD = _sums(x_ptr, weight_ptr, documents_ptr, position_S, column_D, positions, D, J)
    inside = (position_S < positions)[:, None] & (column_D < D)[None, :]
    y_ptrs = y_ptr + position_S.to(tl.int64)[:, None] * D + column_D[None, :]
    tl.store(y_ptrs, (z_SD * tl.sigmoid(z_SD)).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def convolution_gradient_kernel(
    x_ptr, weight_ptr, documents_ptr, dy_ptr, dz_ptr, partial_ptr, positions, tiles,
    D: tl.constexpr, J: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Some blocks of a row: gradients of the sums before the SiLU, and a row of the table of weights' gradients."""
    row = tl.program_id(2).to(tl.int64)
    column_D, weight_J = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_J)
    x_ptr += row * positions * D
    dy_ptr += row * positions * D
    dz_ptr += row * positions * D
    if documents_ptr is not None:
        documents_ptr += row * positions
    dweight_DJ = tl.zeros([BLOCK_D, BLOCK_J], tl.float32)
    for tile in range(tiles):
        position_S = (tl.program_id(0) * tiles + tile) * BLOCK_S + tl.arange(0, BLOCK_S)
        inside = (position_S < positions)[:, None] & (column_D < D)[None, :]
        place_SD = position_S.to(tl.int64)[:, None] * D + column_D[None, :]
        z_SD = _sums(x_ptr, weight_ptr, documents_ptr, position_S, column_D, positions, D, J)
        gate_SD = tl.sigmoid(z_SD)
        dz_SD = tl.load(dy_ptr + place_SD, mask=inside, other=0.0).to(tl.float32)
        dz_SD *= gate_SD * (1.0 + z_SD * (1.0 - gate_SD))
        tl.store(dz_ptr + place_SD, dz_SD.to(dz_ptr.dtype.element_ty), mask=inside)
        for back in tl.static_range(J):
            x_SD = _shifted(x_ptr, documents_ptr, position_S, column_D, -back, positions, D)
            dweight_DJ += tl.where(weight_J[None, :] == J - 1 - back, tl.sum(dz_SD * x_SD, 0)[:, None], 0.0)
    partial_ptr += (row * tl.num_programs(0) + tl.program_id(0)) * (D * J)
    inside = (column_D < D)[:, None] & (weight_J < J)[None, :]
    tl.store(partial_ptr + column_D[:, None] * J + weight_J[None, :], dweight_DJ, mask=inside)


@triton.jit
def convolution_input_gradient_kernel(
    dz_ptr, weight_ptr, documents_ptr, dx_ptr, positions,
    D: tl.constexpr, J: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A block of a row: each position gets gradients from itself and the J - 1 positions behind it."""
    row = tl.program_id(2).to(tl.int64)
    position_S = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    column_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    dz_ptr += row * positions * D
    dx_ptr += row * positions * D
    if documents_ptr is not None:
        documents_ptr += row * positions
    dx_SD = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for ahead in tl.static_range(J):
        weight_D = tl.load(weight_ptr + column_D * J + (J - 1 - ahead), mask=column_D < D, other=0.0).to(tl.float32)
        dx_SD += _shifted(dz_ptr, documents_ptr, position_S, column_D, ahead, positions, D) * weight_D[None, :]
    inside = (position_S < positions)[:, None] & (column_D < D)[None, :]
    dx_ptrs = dx_ptr + position_S.to(tl.int64)[:, None] * D + column_D[None, :]
    tl.store(dx_ptrs, dx_SD.to(dx_ptr.dtype.element_ty), mask=inside)
