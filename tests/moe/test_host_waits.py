"""Each sync-free stage takes away what it says: the waits of a training step, counted by phase."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from penstock.kernels import permute
from penstock.kernels.reference import RowOrder
from penstock.moe.balance import Routing
from penstock.moe.dispatch.collective import HierarchicalDispatcher
from penstock.moe.dispatch.contract import Dispatcher, DispatchMetadata, ExpertRows
from penstock.moe.layer import MoE
from penstock.train.step import train_step
from tests.distributed.one_loss import RATE, layout, start_session
from tests.distributed.pool import Pool

RANKS, LAYERS = 2, 3
SMALL = layout(
    f"expert={RANKS}",
    f"model.layers={LAYERS}",
    "training.global_batch=2",
    "evaluation.rows=0",
    "model.moe.balance.aux_loss=micro-batch",
)
REFERENCE = ("kernels.all=reference",)
"""Counts rows on the host in the permutation and in every product of the experts."""

PADDED = ("model.moe.balance.capacity_factor=1.0", "model.moe.balance.pad_to_capacity=true")


def _waits(overrides: tuple[str, ...]) -> Counter[str]:
    """Of the second step of a rank with one micro-batch: the first may warm up."""
    session = start_session(SMALL + overrides)
    waits = HostWaits()
    layers = [module for decoder in session.model.modules for module in decoder.modules() if isinstance(module, MoE)]
    assert len(layers) == LAYERS  # one is dense, and the prediction depth has one
    for layer in layers:
        if session.run.kernels.all != "reference":
            # What a GPU takes by itself; a CPU takes the reference.
            layer.dispatcher = _with_our_order(layer.dispatcher)
        waits.follow(layer)
    batches = [session.state.batches.next_batch() for _ in range(2)]
    session.state.batches.close()
    train_step(session.model, session.state.optimizer, batches[0], session.rule, RATE)
    with waits.watching():
        waits.counts.clear()
        train_step(session.model, session.state.optimizer, batches[1], session.rule, RATE)
    return waits.counts


def _with_our_order(dispatcher: Dispatcher) -> Dispatcher:
    if isinstance(dispatcher, HierarchicalDispatcher):
        dispatcher = replace(dispatcher, inner=_with_our_order(dispatcher.inner))
    operators = replace(dispatcher.operators, order_rows=unwatched_order_rows)
    return replace(dispatcher, operators=operators)


EXPECTED = {
    "all-to-all, 0": (REFERENCE, {"dispatch": 2, "experts": 2}),
    "all-to-all, 1": ((), {"dispatch": 1}),
    "all-gather, 0": (REFERENCE, {"dispatch": 2, "experts": 2}),
    "all-gather, 1": ((), {"dispatch": 1}),
    "all-gather, 2": ((), {}),
    "all-gather, 3": ((), {}),
    "hierarchical, 1": ((), {"dispatch": 2}),
    "hierarchical, 2": ((), {}),
    "hierarchical, 3": ((), {}),
    "auto, 2": ((), {}),
    "auto, 3": ((), {}),
    "padded, 3": (PADDED, {}),
}
"""By dispatcher and stage: overrides, and waits of each MoE layer by phase of one forward and backward pass."""


@pytest.mark.often(
    "all-to-all, 1", "all-gather, 0", "all-gather, 2", "all-gather, 3", "hierarchical, 3", "padded, 3", "auto, 2"
)
@pytest.mark.parametrize("case", EXPECTED)
def test_a_stage_leaves_only_the_waits_that_it_says(ranks: Pool, case: str) -> None:
    (method, stage), (overrides, expected) = case.split(", "), EXPECTED[case]
    how = (f"dispatch.method={method.replace('padded', 'auto')}", f"dispatch.sync_free={stage}", *overrides)
    for counts in ranks.run(RANKS, _waits, how):
        found = {phase: counts[phase] / LAYERS for phase in PHASES[:-1] if counts[phase]}
        assert found == expected, dict(counts)
        # All figures of the step are read in one copy. Before it the labels were counted, of the batch and of the one
        # prediction depth, but these are on the CPU everywhere.
        assert counts["rest"] == 1 + 2, dict(counts)


def test_what_reads_a_value_is_counted() -> None:
    waits, numbers = HostWaits(), torch.tensor([1, 0, 2], requires_grad=False)
    with waits.watching():
        numbers.tolist()
        numbers.cpu()
        int(numbers.sum())
        bool(numbers[0] > 0)
        numbers.nonzero()
        numbers.bincount()
        numbers[numbers > 0]
        numbers.repeat_interleave(numbers)
    assert waits.counts == {"rest": 8}
    with waits.watching():
        numbers.repeat_interleave(numbers, output_size=3)
        torch.where(numbers > 0, numbers, 0).sort().values.cumsum(0)
    assert waits.counts == {"rest": 8}


def test_what_a_backward_pass_reads_is_counted_apart() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            gradients[0].tolist()
            gradients[0].sum().item()
            return gradients[0]

    waits = HostWaits()
    with waits.watching():
        Reads.apply(torch.zeros(3, requires_grad=True)).sum().backward()
    assert waits.counts == {"backward": 2}


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
        with _Operators(self), _Methods(self):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def add(self) -> None:
        is_backward = torch._C._current_graph_task_id() != -1
        self.counts["backward" if is_backward else self._phase] += 1

    def follow(self, layer: MoE) -> None:
        for name, module in (("router", layer.router), ("experts", layer.experts)):
            module.register_forward_pre_hook(partial(self._enter, name))
            module.register_forward_hook(partial(self._enter, "rest"))
        layer.dispatcher = _Followed(layer.dispatcher, self)

    def _enter(self, phase: str, *_: object) -> None:
        self._phase = phase


@dataclass(frozen=True)
class _Followed:
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
    return function is aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is not None


def unwatched_order_rows(experts_TK: Tensor, experts: int) -> RowOrder:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return permute.order_rows(experts_TK, experts)
