"""Work of a GPU, captured once as a graph (CUDA or HIP) and replayed: thousands of launches become one.

    work()                 runs Python; the device is told what to do, and does nothing
    graph.replay()         the device does it all, at the same addresses, with the values that are there by now

So `work` reads its inputs from tensors that stay where they are, and writes what outlives it to such tensors. What it
allocates besides comes from a pool that belongs to the graph: it is free between two replays, but for nobody else. The
first capture must come after the same work has run once: kernels are compiled then, libraries loaded, and collectives
have their communicators.

Capture is local to the thread, so that NCCL's watchdog and a checkpoint's writer may go on meanwhile. Autograd runs the
backward pass of captured work in a thread of its own, on the stream that is captured.

Graphs that hold collectives must be released before their process group ends, or its end waits for them.
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
    """Work that was captured."""

    @property
    def pool_bytes(self) -> int:
        """Device memory that it holds on to, whether it runs or not."""
        ...

    @property
    def seconds(self) -> float:
        """Time that the capture took."""
        ...

    def replay(self) -> None:
        """Put the work on the current stream."""

    def release(self) -> None:
        """Give the memory back; it cannot be replayed any more."""


Capture = Callable[[Callable[[], object]], Replayable]
"""Captures work: `capture`, or what a test puts in its place. What work returns is for tests."""


@dataclass(frozen=True)
class DeviceGraph:
    """Work of the current device, captured; see `Replayable`."""

    graph: torch.cuda.CUDAGraph
    pool_bytes: int
    seconds: float

    def replay(self) -> None:
        """See `Replayable.replay`."""
        self.graph.replay()

    def release(self) -> None:
        """See `Replayable.release`. Waits for the device."""
        torch.cuda.synchronize()
        self.graph.reset()
        torch.cuda.empty_cache()


def capture(work: Callable[[], object], pool: Any = None) -> DeviceGraph:
    """Capture work of the current device without running it there.

    Memory that nobody uses is given back to the driver first, so that the pool does not come on top of the same amount
    in the allocator's cache.

    Args:
        work: runs once in Python.
        pool: of several graphs that are always replayed one after another in the order of their capture, see
            `one_pool`; None for a pool of its own.

    Raises:
        torch.OutOfMemoryError: there is no memory for the pool; nothing is left of the attempt.
    """
    begin = time.perf_counter()
    torch.cuda.synchronize()
    if pool is None:
        gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with ExitStack() as undo:
        undo.callback(graph.reset)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        undo.pop_all()
    return DeviceGraph(graph, torch.cuda.memory_reserved() - before, time.perf_counter() - begin)


def one_pool() -> Capture:
    """Captures graphs that share a pool. What one of them has freed by the time of the next capture, the next may use.

    So they must be replayed in the order of their capture, none beside another; and a tensor that one gives stays its
    own for as long as somebody holds it.
    """
    gc.collect()
    return partial(capture, pool=torch.cuda.graph_pool_handle())


Function = Callable[..., tuple[Tensor, ...]]
"""Tensors -> tensors. It does the same to the same shapes, and the host never waits in it."""


class PartialGraphs:
    """The parts of one rank's layers; for one pass at a time.

    Args:
        capture: of one part in one direction; all share a pool.

    Attributes:
        obstacle: why there is no memory for a part; empty as long as there is.
    """

    def __init__(self, capture: Capture) -> None:
        self.obstacle = ""
        self._capture = capture
        self._graphs: list[Replayable] = []
        self._parts: dict[Hashable, _Part] = {}
        self._copies: dict[Hashable, Tensor] = {}
        self._facts: dict[str, object] = {}
        self._written: set[Hashable] = set()
        self._anchor = torch.empty(0, requires_grad=True)

    @property
    def pool_bytes(self) -> int:
        """Device memory that they keep: the pool, and what is copied for them."""
        own = sum(tensor.nbytes for tensor in self._copies.values())
        return sum(graph.pool_bytes for graph in self._graphs) + own

    @property
    def seconds(self) -> float:
        """Time that all captures took."""
        return sum(graph.seconds for graph in self._graphs)

    @property
    def count(self) -> int:
        """Graphs that there are."""
        return len(self._graphs)

    def run(self, key: Hashable, function: Function, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`function(*inputs)`, replayed from the first call on.

        Args:
            key: of the part; the same in every pass.
            function: what it closes over is the same in every pass, or is held here.
            inputs: their gradients are given back.
        """
        part = self._parts.get(key) or self._made(key, function, inputs)
        if part is None:
            return function(*inputs)
        outputs: tuple[Tensor, ...] = _Replay.apply(part, self._anchor, *inputs)
        return outputs

    @torch.no_grad()
    def hold(self, name: str, value: Tensor) -> Tensor:
        """The same values where every pass has them; for what has no gradient."""
        own = self._copies.get(name)
        if own is None:
            own = self._copies[name] = torch.empty_like(value)
        _check_geometry(name, own, value)
        return own.copy_(value)

    def check(self, name: str, fact: object) -> None:
        """Make sure that what became part of the graphs is the same in every pass."""
        captured = self._facts.setdefault(name, fact)
        assert captured == fact, f"{name} of a graph is {captured}, and {fact} came"

    def release(self) -> None:
        """Give all memory back; nothing can be replayed any more."""
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
        """Where a graph reads a tensor: where it is, if another graph has written it; else a copy.

        Args:
            given: of the first call.
            room: name of the memory for the copy.
        """
        if _place(given) in self._written:
            return _Inlet(given.detach(), is_copy=False)
        if room not in self._copies:
            self._copies[room] = torch.empty_like(given.detach())
        return _Inlet(self._copies[room], is_copy=True)

    def written(self, tensors: Iterable[Tensor]) -> None:
        """Graphs write these; somebody holds them from now on."""
        self._written.update(map(_place, tensors))

    def _made(self, key: Hashable, function: Function, inputs: tuple[Tensor, ...]) -> "_Part | None":
        if self.obstacle:
            return None
        part = _Part(self, key, function, inputs)
        if not part.is_captured:
            return None
        self._parts[key] = part
        return part


class _Part:
    """One part: its two graphs, and the tensors through which they are spoken with.

    Attributes:
        results: what the function gave: always the same addresses.
    """

    def __init__(self, parts: PartialGraphs, key: Hashable, function: Function, inputs: tuple[Tensor, ...]) -> None:
        self.results: tuple[Tensor, ...] = ()
        self._parts = parts
        self._function = function
        self._inlets = tuple(parts.inlet(one, (key, place)) for place, one in enumerate(inputs))
        pairs = zip(self._inlets, inputs, strict=True)
        # By `data`, because a copy to the inlet is no change to what was recorded: autograd must not count it as one.
        self._leaves = tuple(inlet.tensor.data.requires_grad_(given.requires_grad) for inlet, given in pairs)
        self._is_under_way = False
        self._gradient_inlets: tuple[_Inlet | None, ...] | None = None
        self._back: Replayable | None = None
        self._forth = parts.captured(self._run)

    @property
    def is_captured(self) -> bool:
        """Whether there was memory for the forward graph."""
        return self._forth is not None

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs; the next pass overwrites them."""
        assert not self._is_under_way, "a part that is a graph begins a pass before the last one was differentiated"
        assert self._forth is not None, "a part without a forward graph is no part"
        self._is_under_way = True
        _fill(self._inlets, inputs)
        self._forth.replay()
        if self._gradient_inlets is None:
            self._parts.written(self.results)
        return tuple(result.detach() for result in self.results)

    def backward(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs, from those of the outputs."""
        assert self._is_under_way, "a part that is a graph is differentiated once for each pass"
        self._is_under_way = False
        is_first = self._gradient_inlets is None
        if self._gradient_inlets is None:
            self._gradient_inlets = self._open(gradients)
        _fill(self._gradient_inlets, gradients)
        if is_first:
            self._back = self._parts.captured(self._run_back)
        if self._back is None:
            self._run_back()
        else:
            self._back.replay()
        found = tuple(leaf.grad for leaf in self._leaves)
        if is_first:  # What was recorded has served: its memory is for the graphs that come.
            self.results = tuple(result.detach() for result in self.results)
            self._parts.written(gradient for gradient in found if gradient is not None)
        return found

    def _open(self, gradients: tuple[Tensor | None, ...]) -> "tuple[_Inlet | None, ...]":
        return tuple(
            None if one is None else self._parts.inlet(one, ("gradient", place, one.shape, one.dtype))
            for place, one in enumerate(gradients)
        )

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
    """Where a graph reads a tensor.

    Attributes:
        tensor: there.
        is_copy: each call copies it there; else it is there.
    """

    tensor: Tensor
    is_copy: bool


class _Replay(torch.autograd.Function):
    """A part as one node; the anchor lets it have a way back if no input has one, because weights have."""

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
    """Bring tensors to where a graph reads them."""
    targets, sources = [], []
    for place, (inlet, one) in enumerate(zip(inlets, given, strict=True)):
        assert (inlet is None) == (one is None), f"tensor {place} of a graph was or was not there when it was captured"
        if inlet is None or one is None:
            continue
        _check_geometry(f"tensor {place}", inlet.tensor, one)
        if inlet.is_copy:
            targets.append(inlet.tensor)
            sources.append(one.detach())
        else:
            assert inlet.tensor.data_ptr() == one.data_ptr(), f"tensor {place} of a graph was another graph's"
    if targets:
        torch._foreach_copy_(targets, sources)


def _check_geometry(name: str, own: Tensor, given: Tensor) -> None:
    assert (given.shape, given.dtype) == (own.shape, own.dtype), (
        f"{name} of a graph is {own.dtype} {tuple(own.shape)}, and {given.dtype} {tuple(given.shape)} came"
    )


def _place(tensor: Tensor) -> Hashable:
    """Equal for tensors that are the same memory, read in the same way."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
