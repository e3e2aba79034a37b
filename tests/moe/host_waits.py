"""Counts the calls of a training step at which the host would wait for a GPU, where the test has none.

On a CPU nothing waits, but the same calls are made: a number or a list is read (`item`, `tolist`, `bool`), a tensor is
copied to the host, or an operator's output has a size that depends on values. Operators are seen where PyTorch
dispatches them, what reads memory without an operator where Python calls it. Triton's kernels run interpreted here and
read memory on the host, so they run unwatched; compiled they cannot wait.

Not seen: what a C++ operator does inside, such as torch's grouped_mm (asynchronous on a GPU by its documentation).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from penstock.kernels import permute
from penstock.kernels.reference import RowOrder
from penstock.moe.dispatch.contract import Dispatcher, DispatchMetadata, ExpertRows
from penstock.moe.layer import MoE
from penstock.moe.routing import Routing

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
}
"""Operators whose result is read by the host, or has as many values as some input says."""

READING = {Tensor.tolist, Tensor.numpy, Tensor.cpu}
"""Methods that no operator shows."""

PHASES = ("router", "dispatch", "experts", "combine", "backward", "rest")


class HostWaits:
    """Counts by phase while `watching`: the parts of MoE layers in forward, any backward pass, and the rest."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._phase = "rest"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what happens inside."""
        with _Operators(self), _Methods(self):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside belongs to a part of a layer."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def add(self) -> None:
        """One wait more."""
        is_backward = torch._C._current_graph_task_id() != -1
        self.counts["backward" if is_backward else self._phase] += 1

    def follow(self, layer: MoE) -> None:
        """Tell the parts of a layer apart from now on."""
        for name, module in (("router", layer.router), ("experts", layer.experts)):
            self._follow_module(name, module)
        layer.dispatcher = _Followed(layer.dispatcher, self)

    def _follow_module(self, name: str, module: nn.Module) -> None:
        def enter(*_: object, **__: object) -> None:
            self._phase = name

        def leave(*_: object, **__: object) -> None:
            self._phase = "rest"

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


@dataclass(frozen=True)
class _Followed:
    """A dispatcher whose two halves are phases."""

    dispatcher: Dispatcher
    waits: HostWaits

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        with self.waits.phase("dispatch"):
            return self.dispatcher.dispatch(x_TD, routing)

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        with self.waits.phase("combine"):
            return self.dispatcher.combine(y_RD, metadata)


class _Operators(TorchDispatchMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = function is aten.index.Tensor and any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        if by_mask or (function in WAITING and not _has_output_size(function, kwargs)):
            self.waits.add()
        return function(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.backward:
            # PyTorch takes a mode away while it handles a call, and the whole pass is inside this one: what
            # `Tensor.backward` does in the end is done here, with the mode in place.
            with self:
                return _engine_run_backward(
                    args, (torch.ones_like(args[0]),), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        if function in READING:
            self.waits.add()
        return function(*args, **(kwargs or {}))


def _has_output_size(function: Any, kwargs: Any) -> bool:
    """Whether the caller said how many values come out."""
    return function is aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is not None


def unwatched_order_rows(experts_TK: Tensor, experts: int) -> RowOrder:
    """Our kernel for the order of rows, interpreted."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return permute.order_rows(experts_TK, experts)
