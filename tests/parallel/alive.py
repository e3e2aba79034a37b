"""Counts the bytes of the tensors that operators made and that are still referenced."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Sees every storage that is made while it is active; `bytes()` is what of them is not freed yet."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {StorageWeakRef(leaf.untyped_storage()) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if StorageWeakRef(storage) not in inputs:  # a view of an input allocates nothing
                    self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def bytes(self) -> int:
        return sum(size for storage, size in self._sizes.items() if not storage.expired())
