"""Every launch of a Triton kernel goes through here, so that a step can be rehearsed without memory.

A tensor of the meta device has a shape, a dtype and a storage of so many bytes, and no memory. A kernel that is given
one is not launched: what its wrapper allocates is allocated all the same, so a count of storages is what a GPU
would hold. Therefore such a tensor is taken for one of a GPU wherever code chooses between a GPU's way and a CPU's.

Nothing stands behind a meta tensor that the host could read. Row counts are then taken to be even.

What is not launched, and where the host would have waited, is told to torch's dispatcher as an operator that does
nothing: `penstock::launched` and `penstock::waited`. So a mode of the dispatcher sees all of a rehearsed step.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("penstock", "DEF")
_LIBRARY.define("launched(str kernel, Tensor[] tensors, str[] switches) -> ()")
_LIBRARY.define("waited(Tensor counts) -> ()")


def _nothing(*arguments: Any) -> None:
    """What a rehearsed launch and a rehearsed wait do."""


_LIBRARY.impl("launched", _nothing, "Meta")
_LIBRARY.impl("waited", _nothing, "Meta")


class Kernel(Protocol):
    """What `triton.jit` makes of a function."""

    @property
    def __name__(self) -> str:
        """Of the function."""
        ...

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """What launches it with so many programs."""
        ...


def start_kernel(kernel: Kernel, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Put a kernel on the current stream, unless its tensors have no memory.

    Args:
        kernel: to launch.
        grid: programs in each dim.
        arguments: of the kernel; the first is a tensor, or a descriptor of one.
        constants: what it is compiled with, and its warps and stages.
    """
    first = arguments[0]
    if isinstance(first, Tensor) and first.is_meta:
        switches = [name for name, value in constants.items() if value is True]
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        torch.ops.penstock.launched(kernel.__name__, tensors, switches)
        return
    kernel[grid](*arguments, **constants)


def record_launch(name: str, *tensors: Tensor) -> None:
    """Say that an operator would have run here which makes no new tensor."""
    torch.ops.penstock.launched(name, list(tensors), [])


def record_wait(counts: Tensor) -> None:
    """Say that the host would have waited here for a tensor that has no memory."""
    torch.ops.penstock.waited(counts)


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is a GPU's, or stands for one."""
    return tensor.is_cuda or tensor.is_meta


def counts_on_host(counts_e: Tensor, rows: int) -> list[int]:
    """Read how many rows each expert has; the host waits.

    Args:
        counts_e: integers.
        rows: R, of the buffer that holds the experts' rows: even counts of a tensor without memory add up to it.
    """
    if not counts_e.is_meta:
        counts: list[int] = counts_e.tolist()
        return counts
    record_wait(counts_e)
    share, more = divmod(rows, counts_e.numel())
    return [share + (expert < more) for expert in range(counts_e.numel())]


def count_values(values: Tensor, bins: int) -> Tensor:
    """How often each number from 0 to `bins` - 1 stands in a tensor, int64; the host waits for a GPU.

    Args:
        values: int64, one dim.
        bins: more than the largest.
    """
    if not values.is_meta:
        return torch.bincount(values, minlength=bins)
    record_wait(values)
    return values.new_empty(bins)
