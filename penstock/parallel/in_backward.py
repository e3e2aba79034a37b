"""A place in the graph of autograd at which a function is called."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def in_backward(x: Tensor, function: Callable[[], None]) -> Tensor:
    """`x`; the backward pass calls `function` when the gradient of `x` is there, before it goes on."""
    y: Tensor = _Place.apply(x, function)
    return y


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return dx, None
