"""Triton, or stand-ins where it is not installed. Modules of kernels import it from here.

A plan must give the same result on machines without Triton. It calls the wrappers of kernels with meta tensors, which
`penstock.kernels.launching` never launches; so wrappers need the functions that compute sizes, and of a kernel only its
name. A launch of a stand-in raises an error that says what to install.

Modules in Gluon's language import Triton directly: they are imported only where `HAS_GLUON` holds
(`penstock.kernels.gluon.support`), which needs Triton.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from penstock.base.errors import KernelError

__all__ = ["HAS_TRITON", "TensorDescriptor", "ceil_div", "create_ragged_descriptor", "power_of_two", "tl", "triton"]


# Triton's `cdiv` and `next_power_of_2` take several microseconds on the host, and every launch needs some.


def ceil_div(size: int, part: int) -> int:
    """Number of parts that hold `size`."""
    return -(-size // part)


def power_of_two(size: int) -> int:
    """Smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


class _Kernel:
    """Stand-in for `triton.JITFunction`: has the function's name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise KernelError("kernels need Triton, which is not installed", got=self.__name__, fix="pip install triton")


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Stand-in for `triton.jit`, with and without options."""
    return _Kernel if function is None else _Kernel(function)


def _no_descriptor(*arguments: Any) -> Any:
    """Stand-in for descriptors, which need the memory of a GPU."""
    raise KernelError("descriptors need Triton, which is not installed", fix="pip install triton")


try:
    import triton
    import triton.language as tl
    from triton.tools.ragged_tma import create_ragged_descriptor
    from triton.tools.tensor_descriptor import TensorDescriptor
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    HAS_TRITON = False
    triton = SimpleNamespace(
        __version__="0",
        JITFunction=_Kernel,
        cdiv=ceil_div,
        constexpr_function=lambda function: function,
        jit=_jit,
        knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)),
        next_power_of_2=power_of_two,
    )
    tl = SimpleNamespace(constexpr=lambda value: SimpleNamespace(value=value))
    create_ragged_descriptor, TensorDescriptor = _no_descriptor, SimpleNamespace(from_tensor=_no_descriptor)
else:
    HAS_TRITON = True
