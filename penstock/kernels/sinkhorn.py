"""Sinkhorn's steps: small matrices whose columns and rows are divided by their sums in turn, until both sum to 1.

The matrices that carry residual streams to residual streams (penstock/models/residual.py) start as a softmax of each
row. As eager operators 20 iterations are some 100 launches, and as many again twice in backward; a kernel keeps the
matrices of some positions in registers. Backward has the logits alone, and computes the matrix before each step anew:
with n iterations n squared steps, of a few numbers each.
"""

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.language import HAS_TRITON, ceil_div, on_gpu, power_of_two, start_kernel, tl, triton

_TILE_VALUES = 1024  # of a program's matrices: 8 for each of 128 threads


def balanced(logits_AA: Tensor, iterations: int, epsilon: float) -> Tensor:
    """Matrices whose columns sum to 1, and nearly so their rows; differentiable.

    Args:
        logits_AA: ... x A x A, float32 (float64 by the definition).
        iterations: divisions by the sums of columns; one less by those of rows.
        epsilon: added to the softmax, and to each sum.
    """
    if on_gpu(logits_AA) and HAS_TRITON:
        return balanced_triton(logits_AA, iterations, epsilon)
    x_AA = logits_AA.softmax(-1) + epsilon
    for step in range(2 * iterations - 1):  # columns first, and last
        x_AA = x_AA / (x_AA.sum(-2 + step % 2, keepdim=True) + epsilon)
    return x_AA


def balanced_triton(logits_AA: Tensor, iterations: int, epsilon: float) -> Tensor:
    """`balanced` by one kernel in each direction."""
    balanced_AA: Tensor = _Balanced.apply(logits_AA, iterations, epsilon)
    return balanced_AA


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_AA: Tensor, iterations: int, epsilon: float) -> Tensor:
        ctx.save_for_backward(logits_AA)
        ctx.constants = iterations, epsilon
        return _launch(sinkhorn_kernel, (logits_AA,), iterations, epsilon)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _launch(sinkhorn_backward_kernel, (*ctx.saved_tensors, *gradients), *ctx.constants), None, None


def _launch(kernel: Any, inputs: tuple[Tensor, ...], iterations: int, epsilon: float) -> Tensor:
    inputs = tuple(matrices.contiguous() for matrices in inputs)
    result, streams = torch.empty_like(inputs[0]), inputs[0].shape[-1]
    width = power_of_two(streams)
    tile = max(1, _TILE_VALUES // width**2)
    if positions := result.numel() // streams**2:
        start_kernel(
            kernel, (ceil_div(positions, tile),), *inputs, result, positions, iterations, epsilon,
            STREAMS=streams, WIDTH=width, TILE=tile, num_warps=4,
        )  # fmt: skip
    return result


@triton.jit
def sinkhorn_kernel(
    logits_ptr,
    balanced_ptr,
    positions,
    iterations,
    epsilon,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Balance the matrices of some positions."""
    place_TAA, inside = _places(positions, STREAMS, WIDTH, TILE)
    x_TAA = tl.where(inside, _softmax(logits_ptr, place_TAA, inside) + epsilon, 0.0)
    tl.store(balanced_ptr + place_TAA, _stepped(x_TAA, iterations - 1, inside, epsilon), mask=inside)


@triton.jit
def sinkhorn_backward_kernel(
    logits_ptr,
    gradient_ptr,
    result_ptr,
    positions,
    iterations,
    epsilon,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """The gradient of the logits, from the last step to the first."""
    place_TAA, inside = _places(positions, STREAMS, WIDTH, TILE)
    softmax_TAA = _softmax(logits_ptr, place_TAA, inside)
    first_TAA = tl.where(inside, softmax_TAA + epsilon, 0.0)
    d_TAA = tl.load(gradient_ptr + place_TAA, mask=inside, other=0.0)
    for step in range(1, iterations):
        x_TAA = _stepped(first_TAA, iterations - 1 - step, inside, epsilon)
        d_TAA = _backward(d_TAA, _divided(x_TAA, 2, inside, epsilon), 1, inside, epsilon)
        d_TAA = _backward(d_TAA, x_TAA, 2, inside, epsilon)
    d_TAA = _backward(d_TAA, first_TAA, 1, inside, epsilon)
    d_TAA = softmax_TAA * (d_TAA - tl.sum(d_TAA * softmax_TAA, 2, keep_dims=True))
    tl.store(result_ptr + place_TAA, d_TAA, mask=inside)


@triton.jit
def _places(positions, STREAMS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Where the values of this program's matrices are, and which are there."""
    position = (tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE))[:, None, None]
    row, column = tl.arange(0, WIDTH)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
    inside = (position < positions) & (row < STREAMS) & (column < STREAMS)
    return position * STREAMS * STREAMS + row * STREAMS + column, inside


@triton.jit
def _softmax(logits_ptr, place_TAA, inside):
    """Of each row; 0 outside."""
    logits_TAA = tl.load(logits_ptr + place_TAA, mask=inside, other=0.0)
    largest = tl.max(tl.where(inside, logits_TAA, -3.0e38), 2, keep_dims=True)
    x_TAA = tl.where(inside, tl.exp(tl.where(inside, logits_TAA - largest, 0.0)), 0.0)
    total = tl.sum(x_TAA, 2, keep_dims=True)
    return x_TAA / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _divided(x_TAA, DIM: tl.constexpr, inside, epsilon):
    return tl.where(inside, x_TAA / (tl.sum(x_TAA, DIM, keep_dims=True) + epsilon), 0.0)


@triton.jit
def _stepped(x_TAA, pairs, inside, epsilon):
    """After a division of columns, and `pairs` of rows and columns."""
    x_TAA = _divided(x_TAA, 1, inside, epsilon)
    for _ in range(pairs):
        x_TAA = _divided(_divided(x_TAA, 2, inside, epsilon), 1, inside, epsilon)
    return x_TAA


@triton.jit
def _backward(d_TAA, x_TAA, DIM: tl.constexpr, inside, epsilon):
    """The gradient of x, by that of x over its sums."""
    total = tl.sum(x_TAA, DIM, keep_dims=True) + epsilon
    y_TAA = tl.where(inside, x_TAA / total, 0.0)
    return tl.where(inside, (d_TAA - tl.sum(d_TAA * y_TAA, DIM, keep_dims=True)) / total, 0.0)
