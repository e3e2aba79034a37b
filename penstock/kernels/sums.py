"""Sums of three tensors in one pass over memory, and three readers of one tensor, whose gradients are such a sum.

Two additions one after the other would write what is between them, read it again, and round twice.

    add_three      a layer's residual stream, its routed experts and its shared expert
    fan_out        the tokens of a mixture: for its router, for dispatch and for its shared expert
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.language import tl, triton
from penstock.kernels.launching import start_kernel

BLOCK = 2048
"""Numbers of a program of 4 warps: 16 of a thread, two loads of 16 bytes from each tensor of 16 bits."""


def add_three(x_TD: Tensor, y_TD: Tensor, z_TD: Tensor) -> Tensor:
    """`penstock.kernels.reference.add_three` in one kernel, and none backward: all three have the sum's gradient.

    Args:
        x_TD: of any shape.
        y_TD: in this shape.
        z_TD: likewise.

    Returns:
        Contiguous, in the widest of the three dtypes.

    Raises:
        KernelError: shapes differ.
    """
    if not x_TD.shape == y_TD.shape == z_TD.shape:
        raise KernelError(
            "add_three: all must have one shape", got=", ".join(f"{tuple(one.shape)}" for one in (x_TD, y_TD, z_TD))
        )
    sum_TD: Tensor = _AddThree.apply(x_TD, y_TD, z_TD)
    return sum_TD


def fan_out(x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`penstock.kernels.reference.fan_out` without a kernel, and one backward, which adds the three gradients.

    Args:
        x_TD: of any shape.

    Returns:
        Three views of it. What none of the readers differentiates costs nothing.
    """
    one_TD, other_TD, third_TD = _FanOut.apply(x_TD)
    return one_TD, other_TD, third_TD


class _AddThree(torch.autograd.Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, y_TD: Tensor, z_TD: Tensor) -> Tensor:
        ctx.dtypes = (x_TD.dtype, y_TD.dtype, z_TD.dtype)
        return _sum(x_TD, y_TD, z_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsum_TD: Tensor) -> tuple[Tensor, ...]:
        return tuple(dsum_TD.to(dtype) for dtype in ctx.dtypes)


class _FanOut(torch.autograd.Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x_TD.view_as(x_TD) for _ in range(3))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        found = [one for one in gradients if one is not None]
        if len(found) == 3:
            return _sum(*found)
        return sum(found[1:], found[0]) if found else None


def _sum(x_TD: Tensor, y_TD: Tensor, z_TD: Tensor) -> Tensor:
    """Without autograd."""
    dtype = torch.promote_types(torch.promote_types(x_TD.dtype, y_TD.dtype), z_TD.dtype)
    sum_TD = x_TD.new_empty(x_TD.shape, dtype=dtype)
    numbers = sum_TD.numel()
    start_kernel(
        add_three_kernel,
        (triton.cdiv(numbers, BLOCK),),
        x_TD.contiguous(),
        y_TD.contiguous(),
        z_TD.contiguous(),
        sum_TD,
        numbers,
        BLOCK=BLOCK,
    )
    return sum_TD


@triton.jit
def add_three_kernel(x_ptr, y_ptr, z_ptr, sum_ptr, numbers, BLOCK: tl.constexpr):
    """A block of the sum. Example: [1, 2] + [10, 20] + [100, 200] = [111, 222]."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(sum_ptr + place, (x + y + z).to(sum_ptr.dtype.element_ty), mask=inside)
