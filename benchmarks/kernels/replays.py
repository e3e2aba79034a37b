"""Milliseconds as the device takes them: calls are captured in a CUDA graph, and graphs are replayed in turns.

A launch from Python takes longer than a small kernel runs, and products in 8 bits have several. Runs that want 8 bits
replay graphs of their passes, so that is what is timed. A graph holds several calls, for what a replay takes by itself
not to count. What cannot be captured, because it waits for the host, is timed launch by launch, and `Times` says so.
"""

import functools
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.grouped_gemm import take_turns

CALLS_OF_A_GRAPH = 4
REPLAYS_OF_A_TURN = 2


class Times(NamedTuple):
    """What ways to compute one thing take.

    Attributes:
        milliseconds: median of one call, of each way.
        not_captured: of ways that were timed launch by launch, why.
    """

    milliseconds: dict[str, float]
    not_captured: dict[str, str]


def replay_in_turns(ways: Mapping[str, Callable[[], Tensor]], rounds: int, calls: int = CALLS_OF_A_GRAPH) -> Times:
    """Capture each way and replay the graphs in turns; on a CPU each runs once, by the clock.

    Args:
        ways: each allocates what it gives, or writes it where it was last time.
        rounds: turns that each takes.
        calls: of a graph.
    """
    if not torch.cuda.is_available():
        return Times({name: _by_the_clock(way) for name, way in ways.items()}, {})
    contenders, not_captured = {}, {}
    for name, way in ways.items():
        found = _capture(way, calls)
        if isinstance(found, str):
            not_captured[name] = found
        contenders[name] = way if isinstance(found, str) else found
    times = take_turns(contenders, rounds, REPLAYS_OF_A_TURN)
    return Times({name: ms if name in not_captured else ms / calls for name, ms in times.items()}, not_captured)


def _capture(way: Callable[[], Tensor], calls: int) -> Callable[[], Tensor] | str:
    """A function that replays so many calls and gives what the last one gives; or why there is none."""
    stream, graph = _stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    # A failure inside a capture leaves its stream current; this restores ours.
    with torch.cuda.stream(stream):
        way()  # Compiles, and looks up what is looked up once.
        stream.synchronize()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(calls):
                    result = way().detach()
        except RuntimeError as error:
            return str(error).partition("\n")[0]

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


@functools.cache
def _stream() -> torch.cuda.Stream:
    """Of all captures: cuBLAS keeps a workspace for each stream that it has seen."""
    return torch.cuda.Stream()


def _by_the_clock(way: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    way()
    return (time.perf_counter() - start) * 1e3
