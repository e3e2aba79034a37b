"""Norms of single heads in linear attention: queries and keys of unit length, and the gated norm of the output.

    y = x s r                        r = 1 / sqrt(sum(x**2) + epsilon), s a scale
    y = x r weight act(gate)         r = 1 / sqrt(mean(x**2) + epsilon), act SiLU or the sigmoid

Each is one kernel forward and one backward, with all arithmetic in float32; a program holds some heads. Backward
computes r again. A gradient of the weight is a row of a table for each program, whose rows are summed after it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels.delta_rule import LENGTH_EPSILON
from penstock.kernels.language import ceil_div, power_of_two, start_kernel, tl, triton

NUMBERS = 4096  # of a tile of a program
TILES = 8  # of a program that sums gradients of weights


def unit_length(x_BSHN: Tensor, scale: float = 1.0) -> Tensor:
    """`penstock.kernels.delta_rule.unit_length`."""
    return _UnitLength.apply(x_BSHN, scale)


def gated_norm(o_BSHM: Tensor, gate_BSHM: Tensor, weight_M: Tensor, epsilon: float, *, is_silu: bool) -> Tensor:
    """`penstock.kernels.delta_rule.gated_norm`."""
    return _GatedNorm.apply(o_BSHM, gate_BSHM, weight_M, epsilon, is_silu)


class _UnitLength(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHN: Tensor, scale: float) -> Tensor:
        x_BSHN = x_BSHN.contiguous()
        y_BSHN = torch.empty_like(x_BSHN)
        ctx.save_for_backward(x_BSHN)
        ctx.scale = scale
        grid, heads, sizes = _tiles(x_BSHN, 1)
        start_kernel(unit_length_kernel, grid, x_BSHN, y_BSHN, heads, scale, LENGTH_EPSILON, **sizes)
        return y_BSHN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BSHN: Tensor) -> tuple[Tensor, None]:
        (x_BSHN,) = ctx.saved_tensors
        dx_BSHN, tensors = torch.empty_like(x_BSHN), (x_BSHN, dy_BSHN.contiguous())
        grid, heads, sizes = _tiles(x_BSHN, 1)
        start_kernel(unit_length_backward_kernel, grid, *tensors, dx_BSHN, heads, ctx.scale, LENGTH_EPSILON, **sizes)
        return dx_BSHN, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o_BSHM: Tensor, gate_BSHM: Tensor, weight_M: Tensor, epsilon: float, is_silu: bool) -> Tensor:
        o_BSHM, gate_BSHM = o_BSHM.contiguous(), gate_BSHM.contiguous()
        y_BSHM = torch.empty_like(o_BSHM)
        ctx.save_for_backward(o_BSHM, gate_BSHM, weight_M)
        ctx.epsilon, ctx.is_silu = epsilon, is_silu
        grid, heads, sizes = _tiles(o_BSHM, 1)
        tensors = o_BSHM, gate_BSHM, weight_M, y_BSHM
        start_kernel(gated_norm_kernel, grid, *tensors, heads, epsilon, IS_SILU=is_silu, **sizes)
        return y_BSHM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BSHM: Tensor) -> tuple[Tensor | None, ...]:
        o_BSHM, gate_BSHM, weight_M = ctx.saved_tensors
        do_BSHM, dgate_BSHM = torch.empty_like(o_BSHM), torch.empty_like(gate_BSHM)
        grid, heads, sizes = _tiles(o_BSHM, TILES)
        partial_PM = o_BSHM.new_empty(grid[0], o_BSHM.shape[-1], dtype=torch.float32)
        start_kernel(
            gated_norm_backward_kernel, grid,
            o_BSHM, gate_BSHM, weight_M, dy_BSHM.contiguous(), do_BSHM, dgate_BSHM, partial_PM, heads, ctx.epsilon,
            TILES=TILES, IS_SILU=ctx.is_silu, **sizes,
        )  # fmt: skip
        return do_BSHM, dgate_BSHM, partial_PM.sum(0).to(weight_M.dtype), None, None


def _tiles(x_BSHN: Tensor, tiles: int) -> tuple[tuple[int], int, dict[str, int]]:
    """The grid, the number of heads, and constants, where a program has some `tiles`."""
    width = x_BSHN.shape[-1]
    heads, columns = x_BSHN.numel() // max(width, 1), power_of_two(width)
    rows = max(1, NUMBERS // columns)
    return (ceil_div(heads, rows * tiles),), heads, {"D": width, "BLOCK_T": rows, "BLOCK_D": columns}


@triton.jit
def _tile(tile, heads, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Places of a tile's numbers, and whether they exist."""
    row_T, column_D = tile * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    inside = (row_T < heads)[:, None] & (column_D < D)[None, :]
    return row_T.to(tl.int64)[:, None] * D + column_D[None, :], inside


@triton.jit
def unit_length_kernel(
    x_ptr, y_ptr, heads, scale, epsilon, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Some heads. Example: [3, 4] with scale 2 gives [1.2, 1.6]."""
    offset, inside = _tile(tl.program_id(0), heads, D, BLOCK_T, BLOCK_D)
    x_TD = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    factor_T = scale * tl.rsqrt(tl.sum(x_TD * x_TD, 1) + epsilon)
    tl.store(y_ptr + offset, (x_TD * factor_T[:, None]).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def unit_length_backward_kernel(
    x_ptr, dy_ptr, dx_ptr, heads, scale, epsilon, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Some heads: dx = s r (dy - x r**2 sum(x dy))."""
    offset, inside = _tile(tl.program_id(0), heads, D, BLOCK_T, BLOCK_D)
    x_TD = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    dy_TD = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    inverse_T = tl.rsqrt(tl.sum(x_TD * x_TD, 1) + epsilon)
    along_T = inverse_T * inverse_T * tl.sum(x_TD * dy_TD, 1)
    dx_TD = (scale * inverse_T)[:, None] * (dy_TD - x_TD * along_T[:, None])
    tl.store(dx_ptr + offset, dx_TD.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_norm_kernel(
    o_ptr, gate_ptr, weight_ptr, y_ptr, heads, epsilon,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    """Some heads. Example: [3, 4] with gates of 0 for a sigmoid and weights of 1 gives half of [3, 4] / sqrt(12.5)."""
    offset, inside = _tile(tl.program_id(0), heads, D, BLOCK_T, BLOCK_D)
    column_D = tl.arange(0, BLOCK_D)
    weight_D = tl.load(weight_ptr + column_D, mask=column_D < D, other=0.0).to(tl.float32)
    o_TD = tl.load(o_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    gate_TD = tl.load(gate_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    inverse_T = tl.rsqrt(tl.sum(o_TD * o_TD, 1) / D + epsilon)
    active_TD = tl.sigmoid(gate_TD)
    if IS_SILU:
        active_TD *= gate_TD
    y_TD = o_TD * inverse_T[:, None] * weight_D[None, :] * active_TD
    tl.store(y_ptr + offset, y_TD.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_norm_backward_kernel(
    o_ptr, gate_ptr, weight_ptr, dy_ptr, do_ptr, dgate_ptr, partial_ptr, heads, epsilon,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, TILES: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    """Some tiles of heads: gradients of the output and the gate, and a row of the table for the weight."""
    column_D = tl.arange(0, BLOCK_D)
    weight_D = tl.load(weight_ptr + column_D, mask=column_D < D, other=0.0).to(tl.float32)
    dweight_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for number in range(TILES):
        offset, inside = _tile(tl.program_id(0) * TILES + number, heads, D, BLOCK_T, BLOCK_D)
        o_TD = tl.load(o_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        gate_TD = tl.load(gate_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        dy_TD = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        inverse_T = tl.rsqrt(tl.sum(o_TD * o_TD, 1) / D + epsilon)
        normed_TD = o_TD * inverse_T[:, None]
        sigmoid_TD = tl.sigmoid(gate_TD)
        if IS_SILU:
            active_TD = sigmoid_TD * gate_TD
            slope_TD = sigmoid_TD * (1.0 + gate_TD * (1.0 - sigmoid_TD))
        else:
            active_TD = sigmoid_TD
            slope_TD = sigmoid_TD * (1.0 - sigmoid_TD)
        dgate_TD = dy_TD * normed_TD * weight_D[None, :] * slope_TD
        tl.store(dgate_ptr + offset, dgate_TD.to(dgate_ptr.dtype.element_ty), mask=inside)
        dy_TD *= active_TD
        dweight_TD += dy_TD * normed_TD
        dy_TD *= weight_D[None, :]
        mean_T = tl.sum(dy_TD * normed_TD, 1) / D
        do_TD = (dy_TD - normed_TD * mean_T[:, None]) * inverse_T[:, None]
        tl.store(do_ptr + offset, do_TD.to(do_ptr.dtype.element_ty), mask=inside)
    partial_ptrs = partial_ptr + tl.program_id(0).to(tl.int64) * D + column_D
    tl.store(partial_ptrs, tl.sum(dweight_TD, 0), mask=column_D < D)
