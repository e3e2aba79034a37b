"""Triton, or stand-ins where it is not installed, and launches of kernels: so a step can run on the meta device.

A plan must give the same result on machines without Triton. It calls the wrappers of kernels with meta tensors, which
`start_kernel` never launches; so wrappers need the functions that compute sizes, and of a kernel only its
name. A launch of a stand-in raises an error that says what to install.

Modules in Gluon's language import Triton directly: they are imported only where `HAS_GLUON` holds
(`penstock.kernels.gluon.support`), which needs Triton.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

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


_LIBRARY = torch.library.Library("penstock", "DEF")
_LIBRARY.define("launched(str kernel, Tensor[] tensors, str[] switches) -> ()")
_LIBRARY.define("waited(Tensor counts) -> ()")
_LAUNCHED, _WAITED = torch.ops.penstock.launched.default, torch.ops.penstock.waited.default


def _nothing(*arguments: Any) -> None:
    """Implementation of both operators."""


_LIBRARY.impl("launched", _nothing, "Meta")
_LIBRARY.impl("waited", _nothing, "Meta")


def start_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the current stream, or report the launch if its tensors are on the meta device.

    A tensor of the meta device has shape, dtype and a storage size, and no memory. A kernel with such an argument is
    not launched, but its wrapper allocates outputs as usual, so the storages add up to the memory of a GPU. Code that
    chooses between GPU and CPU therefore treats meta tensors as a GPU's. Their values cannot be read: row counts are
    taken to be even.

    Skipped launches and waits of the host are reported to torch's dispatcher as the operators `penstock::launched` and
    `penstock::waited`, which do nothing. So a dispatch mode sees every event of such a dry run.

    `kernel` is a `triton.jit` function, and its first argument a tensor or a descriptor of one. `constants` are
    compile-time constants, warps and stages. A sequence `notes` among them is for the report alone, which has it beside
    the names of constants that are true.
    """
    notes = constants.pop("notes", ())
    first = arguments[0]
    if isinstance(first, Tensor) and first.is_meta:
        switches = [name for name, value in constants.items() if value is True]
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        _LAUNCHED(kernel.__name__, tensors, [*switches, *notes])
        return
    kernel[grid](*arguments, **constants)


def record_launch(name: str, *tensors: Tensor, switches: Sequence[str] = ()) -> None:
    """Report, in a dry run, an operator that would have run here and allocates no tensor."""
    _LAUNCHED(name, list(tensors), list(switches))


def record_wait(counts: Tensor) -> None:
    """Report, in a dry run, that the host would have waited for this tensor."""
    _WAITED(counts)


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU, or on the meta device in its place."""
    return tensor.is_cuda or tensor.is_meta


def counts_on_host(counts_e: Tensor, rows: int) -> list[int]:
    """Copy the rows of each expert to the host, which waits; even counts that sum to `rows` in a dry run."""
    if not counts_e.is_meta:
        counts: list[int] = counts_e.tolist()
        return counts
    record_wait(counts_e)
    share, more = divmod(rows, counts_e.numel())
    return [share + (expert < more) for expert in range(counts_e.numel())]


def count_values(values: Tensor, bins: int) -> Tensor:
    """How often each number below `bins` occurs in an int64 vector. The host waits for a GPU."""
    if not values.is_meta:
        return torch.bincount(values, minlength=bins)
    record_wait(values)
    return values.new_empty(bins)
