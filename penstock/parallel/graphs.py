"""CUDA or HIP graphs: GPU work that is captured once and replayed, so that thousands of launches become one.

A graph reads inputs from fixed addresses and writes results to such. Its other memory is from its own pool, free
between replays but for no one else. Run the work once before the first capture, so that kernels are compiled and
communicators made. Release graphs with collectives before their process group ends, or its end waits for them.

`PartialGraphs` captures parts of layers between eager work: a forward and a backward graph for each part, which is one
node for autograd. Inside, the function is recorded once as its own graph over fixed leaves; the backward graph is the
walk through it. Meters and sums of weight gradients are written where they always are, so parameters are no inputs.

Each call copies its inputs to the graph's own memory in one launch, except tensors that another graph has written.
Values that all parts read are copied once (`hold`). Incoming gradients of one shape share memory over all parts.

All parts share one pool, and only one pass is under way. A capture may reuse blocks that are free at that time:
    saved tensors are held by the recorded graph until its backward graph is captured, so only later graphs reuse them
    outputs and input gradients are held for good, so no graph reuses them
    everything else is free at the end of its graph, and the next graph overwrites it
Captures follow the order of a pass, forward from the first part and backward from the last, and so do replays.

A part without memory for its forward graph runs eagerly, and without memory for its backward graph walks eagerly
through the saved tensors. The pass is right; `obstacle` says why, and the owner gives the parts up.
"""

import gc
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Replayable(Protocol):
    """Captured work."""

    @property
    def pool_bytes(self) -> int:
        """Device memory that it holds, running or not."""
        ...

    @property
    def seconds(self) -> float: ...

    def replay(self) -> None:
        """Put the work on the current stream."""

    def release(self) -> None:
        """Free the memory, after the device has finished; no replay after that."""


Capture = Callable[[Callable[[], object]], Replayable]
"""Captures work: `capture`, or a test's stand-in. The work's result is for tests."""


@dataclass(frozen=True)
class DeviceGraph:
    """Captured work of the current device."""

    graph: torch.cuda.CUDAGraph
    pool_bytes: int
    seconds: float

    def replay(self) -> None:
        self.graph.replay()

    def release(self) -> None:
        """See `Replayable.release`. Waits for the device."""
        torch.cuda.synchronize()
        self.graph.reset()
        torch.cuda.empty_cache()


def capture(work: Callable[[], object], pool: Any = None) -> DeviceGraph:
    """Capture work of the current device without running it; Python runs `work` once.

    Cached memory is returned to the driver first, so that the pool does not come on top of it. Graphs with one `pool`
    are replayed in the order of their capture. Without memory it raises, and nothing is left of the attempt.
    """
    begin = time.perf_counter()
    torch.cuda.synchronize()
    if pool is None:
        gc.collect()  # `one_pool` has done it for all of its graphs
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with ExitStack() as undo:
        undo.callback(graph.reset)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may call CUDA
            work()
        undo.pop_all()
    return DeviceGraph(graph, torch.cuda.memory_reserved() - before, time.perf_counter() - begin)


def one_pool() -> Capture:
    """Captures graphs that share a pool, which are replayed in the order of their capture and never concurrently."""
    gc.collect()
    return partial(capture, pool=torch.cuda.graph_pool_handle())


Function = Callable[..., tuple[Tensor, ...]]
"""Tensors -> tensors; does the same to the same shapes, and the host never waits in it."""


class PartialGraphs:
    """Captured parts of one rank's layers, for one pass at a time; `obstacle` is why a part found no memory."""

    def __init__(self, capture: Capture) -> None:
        self.obstacle = ""
        self._capture = capture
        self._graphs: list[Replayable] = []  # in the order of their capture
        self._parts: dict[Hashable, _Part] = {}
        self._copies: dict[Hashable, Tensor] = {}  # copied inputs and held values, at fixed addresses
        self._facts: dict[str, object] = {}  # of the first pass
        self._written: set[Hashable] = set()  # places (`_place`) that graphs write and that are held for good
        self._anchor = torch.empty(0, requires_grad=True)

    @property
    def pool_bytes(self) -> int:
        """Device memory of the pool and of copied inputs."""
        copies = sum(tensor.nbytes for tensor in self._copies.values())
        return sum(graph.pool_bytes for graph in self._graphs) + copies

    @property
    def seconds(self) -> float:
        return sum(graph.seconds for graph in self._graphs)

    @property
    def count(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, function: Function, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`function(*inputs)`, replayed from the first call on; other tensors stay the same or are from `hold`."""
        part = self._parts.get(key)
        if part is None:
            part = None if self.obstacle else _Part(self, key, function, inputs)
            if part is None or not part.is_captured:
                return function(*inputs)
            self._parts[key] = part
        outputs: tuple[Tensor, ...] = _Replay.apply(part, self._anchor, *inputs)
        return outputs

    @torch.no_grad()
    def hold(self, name: str, value: Tensor) -> Tensor:
        """Copy a value without gradient to a fixed address."""
        copy = self._copies.get(name)
        if copy is None:
            copy = self._copies[name] = torch.empty_like(value)
        _check_geometry(name, copy, value)
        return copy.copy_(value)

    def check(self, name: str, fact: object) -> None:
        """Assert that a fact that the graphs depend on is the same in every pass."""
        captured = self._facts.setdefault(name, fact)
        assert captured == fact, f"{name} of a graph is {captured}, and {fact} came"

    def release(self) -> None:
        """Free all memory; no replay after that."""
        self._parts.clear()
        self._copies.clear()
        self._written.clear()
        for graph in self._graphs:
            graph.release()
        self._graphs.clear()

    def captured(self, work: Callable[[], object]) -> Replayable | None:
        """A graph of some work; None if there is no memory for it."""
        try:
            graph = self._capture(work)
        except torch.OutOfMemoryError as error:
            self.obstacle = str(error).partition(". ")[0]
            return None
        self._graphs.append(graph)
        return graph

    def inlet(self, given: Tensor, room: Hashable) -> "_Inlet":
        """The address at which a graph reads a tensor: its own if another graph wrote it, else a copy (key `room`)."""
        if _place(given) in self._written:
            return _Inlet(given.detach(), is_copy=False)
        if room not in self._copies:
            self._copies[room] = torch.empty_like(given.detach())
        return _Inlet(self._copies[room], is_copy=True)

    def written(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors that graphs write and that are held for good."""
        self._written.update(map(_place, tensors))


class _Part:
    def __init__(self, parts: PartialGraphs, key: Hashable, function: Function, inputs: tuple[Tensor, ...]) -> None:
        self.results: tuple[Tensor, ...] = ()
        self._parts = parts
        self._function = function
        self._inlets = tuple(parts.inlet(tensor, (key, index)) for index, tensor in enumerate(inputs))
        pairs = zip(self._inlets, inputs, strict=True)
        # By `data`, because a copy to the inlet is no change to what was recorded: autograd must not count it as one.
        self._leaves = tuple(inlet.tensor.data.requires_grad_(given.requires_grad) for inlet, given in pairs)
        self._is_under_way = False
        self._gradient_inlets: tuple[_Inlet | None, ...] | None = None
        self._back: Replayable | None = None
        self._forth = parts.captured(self._run)

    @property
    def is_captured(self) -> bool:
        return self._forth is not None

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert not self._is_under_way, "a part that is a graph begins a pass before the last one was differentiated"
        assert self._forth is not None, "a part without a forward graph is no part"
        self._is_under_way = True
        _fill(self._inlets, inputs)
        self._forth.replay()  # also the first time: a capture runs nothing
        if self._gradient_inlets is None:
            self._parts.written(self.results)
        return tuple(result.detach() for result in self.results)

    def backward(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        assert self._is_under_way, "a part that is a graph is differentiated once for each pass"
        self._is_under_way = False
        is_first = self._gradient_inlets is None
        if self._gradient_inlets is None:
            self._gradient_inlets = tuple(
                None if tensor is None else self._parts.inlet(tensor, ("gradient", index, tensor.shape, tensor.dtype))
                for index, tensor in enumerate(gradients)
            )
        _fill(self._gradient_inlets, gradients)
        if is_first:
            self._back = self._parts.captured(self._run_back)
        if self._back is None:  # no memory for the graph
            self._run_back()
        else:
            self._back.replay()
        leaf_gradients = tuple(leaf.grad for leaf in self._leaves)
        if is_first:  # What was recorded has served: its memory is for the graphs that come.
            self.results = tuple(result.detach() for result in self.results)
            self._parts.written(gradient for gradient in leaf_gradients if gradient is not None)
        return leaf_gradients

    def _run(self) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            self.results = self._function(*self._leaves)
        return self.results

    def _run_back(self) -> tuple[Tensor, ...]:
        assert self._gradient_inlets is not None, "gradients come before the way back"
        for leaf in self._leaves:
            leaf.grad = None
        known = [
            (result, inlet.tensor)
            for result, inlet in zip(self.results, self._gradient_inlets, strict=True)
            if inlet is not None
        ]
        # A capture that ends in the middle must leave all of it for another walk.
        torch.autograd.backward([result for result, _ in known], [value for _, value in known], retain_graph=True)
        return tuple(leaf.grad for leaf in self._leaves if leaf.grad is not None)


@dataclass(frozen=True)
class _Inlet:
    """The address at which a graph reads a tensor; with `is_copy` each call copies its input there."""

    tensor: Tensor
    is_copy: bool


class _Replay(torch.autograd.Function):
    """A part as one node. The anchor makes it differentiable even if no input is, because weights are."""

    @staticmethod
    def forward(ctx: Any, part: _Part, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        del anchor
        ctx.part = part
        ctx.set_materialize_grads(False)
        outputs = part.forward(inputs)
        pairs = zip(outputs, part.results, strict=True)
        ctx.mark_non_differentiable(*(output for output, result in pairs if not result.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.part.backward(gradients)


def _fill(inlets: "tuple[_Inlet | None, ...]", given: tuple[Tensor | None, ...]) -> None:
    targets, sources = [], []
    for index, (inlet, tensor) in enumerate(zip(inlets, given, strict=True)):
        assert (inlet is None) == (tensor is None), (
            f"tensor {index} of a graph was or was not there when it was captured"
        )
        if inlet is None or tensor is None:
            continue
        _check_geometry(f"tensor {index}", inlet.tensor, tensor)
        if inlet.is_copy:
            targets.append(inlet.tensor)
            sources.append(tensor.detach())
        else:
            assert inlet.tensor.data_ptr() == tensor.data_ptr(), f"tensor {index} of a graph was another graph's"
    if targets:
        torch._foreach_copy_(targets, sources)


def _check_geometry(name: str, held: Tensor, given: Tensor) -> None:
    assert (given.shape, given.dtype) == (held.shape, held.dtype), (
        f"{name} of a graph is {held.dtype} {tuple(held.shape)}, and {given.dtype} {tuple(given.shape)} came"
    )


def _place(tensor: Tensor) -> Hashable:
    """Equal for tensors with the same memory and geometry."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
