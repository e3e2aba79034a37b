"""Code that computes in float32, ours and that of libraries, computes in float64 instead.

Two correct programs that sum in another order differ by rounding, and how far depends on the processor and on how much
a model enlarges it: the gated delta rule by 30,000. A bound on the rounding of float32 that holds on every processor
lets faults through. In float64 rounding is 2^29 times smaller, and a fault is as large as before:

    rounding of float64, enlarged 30,000 times     7e-12
    EXACT                                          1e-10
    one value that stays in float32                6e-8

Rounding to 16 and 8 bits stays as it is.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

EXACT = 1e-10
"""Largest relative difference of two programs that compute the same in float64."""


@contextmanager
def in_float64() -> Iterator[None]:
    """Casts to float32 give float64, as do new tensors whose dtype is float32 or not given; backward passes too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)


class _Widened(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        function = Tensor.double if function is Tensor.float else function
        if len(args) == 1 and not kwargs:  # nine of ten calls: properties, and what has no dtype to give
            return function(*args)
        if function is Tensor.view and args[1:] == (torch.int32,) and args[0].dtype == torch.float64:
            return args[0].to(torch.float32).view(torch.int32)  # their order, in which equal float32 values are equal
        # Lists and not generators: a step of a small model makes ten thousand calls.
        args = tuple([torch.float64 if value is torch.float32 else value for value in args])
        if not kwargs:
            return function(*args)
        named = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return function(*args, **named)
