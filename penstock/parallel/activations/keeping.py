"""What becomes of the tensors that backward needs: one chain of keepers.

autograd shows every tensor that it saves to the innermost pair of saved-tensor hooks only. Freed and computed again
(`recompute`), moved to the host (`offload`), kept plainly: more than one of them may want the same tensor, so each is a
keeper, a function from a tensor to itself or to a `Saved` that brings it back, and a keeper that does not want a tensor
asks the one around it.

    with keeping(outer):             outer: Tensor -> Tensor | Kept
        with keeping(inner):         inner may call what `current()` gave when it was made, which is outer
            y = f(x)                 inner sees what f saves

autograd holds on to a keeper for as long as any tensor that passed it, so a keeper must not hold large tensors itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@runtime_checkable
class Saved(Protocol):
    """Stands in the graph for a tensor that is not there."""

    def bring(self) -> Tensor:
        """The tensor, ready for the current stream. Called from autograd's threads, any number of times."""
        ...


Saver = Callable[[Tensor], Tensor | Saved]


def save_plainly(tensor: Tensor) -> Tensor:
    """The keeper of those who want nothing: the tensor stays. Detached, or its graph would hold itself."""
    return tensor.detach()


_keeper: ContextVar[Saver] = ContextVar("keeper", default=save_plainly)


def current() -> Saver:
    """The innermost keeper."""
    return _keeper.get()


def bring(kept: Tensor | Saved) -> Tensor:
    """The tensor that a keeper took."""
    return kept if isinstance(kept, Tensor) else kept.bring()


@contextmanager
def saving(keeper: Saver) -> Iterator[None]:
    """Show what is saved for backward to `keeper`."""
    token = _keeper.set(keeper)
    try:
        with saved_tensors_hooks(keeper, bring):
            yield
    finally:
        _keeper.reset(token)


@dataclass(frozen=True)
class Geometry:
    """How a tensor lies in its storage; enough to have it again from another storage with the same bytes."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        """That of a strided tensor."""
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """A tensor that lies like this in `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)
