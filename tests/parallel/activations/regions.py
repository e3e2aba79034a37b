"""Small functions and checks of the tests of regions."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T, D = 64, 32
ONE = T * D * 4
"""Bytes of one float32 activation."""


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, *arguments: Tensor) -> Tensor:
        self.calls += 1
        return self.function(*arguments)


def linear(rows: int = D, columns: int = D, dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(columns, rows, dtype=dtype)


def norm(x_TD: Tensor) -> Tensor:
    return F.rms_norm(x_TD, (x_TD.shape[-1],))


def source(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(T, D, dtype=dtype, requires_grad=True)


def gradients(loss: Tensor, *of: Tensor | nn.Module) -> list[Tensor]:
    tensors = [t for one in of for t in (one.parameters() if isinstance(one, nn.Module) else [one])]
    return list(torch.autograd.grad(loss, tensors))


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
