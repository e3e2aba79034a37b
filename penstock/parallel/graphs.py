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
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch


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
