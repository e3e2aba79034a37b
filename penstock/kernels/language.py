"""Triton, or what stands in its place where it is not installed: modules of kernels import it from here.

A plan runs on machines without Triton, and must say the same there. It calls the wrappers of kernels with tensors that
have no memory, which `penstock.kernels.launching` never launches; so a wrapper needs what its sizes are computed with,
and of a kernel only the name. The stand-ins have that and no more. A launch of one says what to install.

Modules in Gluon's language import Triton itself: they are imported only where `HAS_GLUON`
(`penstock.kernels.gluon.support`), which is never without Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Constant:
    """For `tl.constexpr`."""

    value: Any


class _Kernel:
    """For `triton.JITFunction`: has the function's name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Refuses to launch."""
        raise KernelError("kernels need Triton, which is not installed", got=self.__name__, fix="pip install triton")


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """For `triton.jit`, with and without options."""
    return _Kernel if function is None else _Kernel(function)


def _no_descriptor(*arguments: Any) -> Any:
    """For descriptors, which only memory of a GPU has."""
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
    tl = SimpleNamespace(constexpr=_Constant)
    create_ragged_descriptor, TensorDescriptor = _no_descriptor, SimpleNamespace(from_tensor=_no_descriptor)
else:
    HAS_TRITON = True
