"""How kernels are timed and judged: by events of the device, in turns, from graphs, in decibels, beside a copy.

Ways that are compared take turns on a GPU that is kept warm: a cold one runs a fifth faster for a moment, which would
favour the first. Times are medians over all turns.

A launch from Python takes longer than a small kernel runs, so such kernels are captured in a CUDA graph and replayed. A
graph holds several calls, for what a replay takes by itself not to count. What cannot be captured, because it waits for
the host, is timed launch by launch, and `Times` says so.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

LARGE = 2**30
"""Bytes of the copy that stands for the peak, read and written."""

ROTATION = 2**28
"""Bytes over which calls rotate: several times the L2 cache."""

CALLS_OF_A_GRAPH = 4
REPLAYS_OF_A_TURN = 2
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # Triton's interpreter multiplies no bfloat16

Call = Callable[[], object]
grad = functools.partial(torch.autograd.grad, allow_unused=True)
Ways = dict[str, Callable[[], Tensor]]


class Times(NamedTuple):
    """What ways to compute one thing take.

    Attributes:
        milliseconds: median of one call, of each way.
        not_captured: of ways that were timed launch by launch, why.
    """

    milliseconds: dict[str, float]
    not_captured: dict[str, str]


def decibels(values: Tensor, expected: Tensor) -> float:
    """Signal to noise of what should be `expected`; at most some 300, of equal values."""
    expected = expected.double()
    noise = (values.double() - expected).square().sum().clamp(min=1e-30)
    return 10 * torch.log10(expected.square().sum() / noise).item()


def burn(seconds: float) -> None:
    """Keep the matrix units busy, so that clocks are those of a long run."""
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(math.ceil(seconds / 0.0017)):
        square @ square


def timed(*calls: Call, busy: bool = True) -> list[float]:
    """Milliseconds of each of some calls in a row.

    Args:
        calls: what is timed.
        busy: keep the device busy while the host queues them, so that launches are not what is measured.
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    if busy:
        torch.cuda._sleep(20_000_000)
    marks[0].record()
    for call, mark in zip(calls, marks[1:], strict=True):
        call()
        mark.record()
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def passes_in_turns(
    ways: Mapping[str, Callable[[], Tensor]], leaves: Sequence[Tensor], dy: Tensor, rounds: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of forward, of backward and of both of each way, and GiB of memory, from leaves to an output.

    `kept_gib` is what forward leaves allocated for backward, without the output; `peak_gib` is what a step allocates
    beyond its inputs, gradients included.
    """

    def step(way: Callable[[], Tensor]) -> list[float]:
        outputs: list[Tensor] = []
        return timed(lambda: outputs.append(way()), lambda: grad(outputs.pop(), leaves, dy))

    results = {}
    for name, way in ways.items():
        for _ in range(3):
            step(way)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = way()
        kept = torch.cuda.memory_allocated() - before - y.nbytes
        gradients = grad(y, leaves, dy)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        results[name] = {"kept_gib": kept / 2**30, "peak_gib": peak / 2**30}
        del y, gradients
    pairs: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            pairs[name].append(step(way))
    for name, times in pairs.items():
        forward, backward = (median(column) for column in zip(*times, strict=True))
        results[name] |= {"forward_ms": forward, "backward_ms": backward, "ms": median(map(sum, times))}
    return results


def take_turns(contenders: Mapping[str, Call], rounds: int, calls: int = 4) -> dict[str, float]:
    """Median milliseconds of each contender, in another order each round; the first call of a turn is not counted."""
    burn(seconds=0.05)
    names = list(contenders)
    marks: dict[str, list[list[torch.cuda.Event]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            contenders[name]()
            marks[name].append([torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)])
            marks[name][-1][0].record()
            for mark in marks[name][-1][1:]:
                contenders[name]()
                mark.record()
    torch.cuda.synchronize()
    return {
        name: median(start.elapsed_time(end) for turn in turns for start, end in itertools.pairwise(turn))
        for name, turns in marks.items()
    }


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
        captured = _capture(way, calls)
        if isinstance(captured, str):
            not_captured[name] = captured
        contenders[name] = way if isinstance(captured, str) else captured
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


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large device-to-device copy."""
    source, target = torch.randn(2, LARGE // 8, device="cuda")
    return LARGE / median(timed(lambda: target.copy_(source), busy=False)[0] / 1e3 for _ in range(20))


def time_calls(make: Callable[[], Call], moved: int, repeats: int = 7) -> float:
    """Seconds of one call: `make` makes as many as the rotation needs, one graph runs them in turn.

    Results are kept while the graph is captured, so that every call writes to memory of its own.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls = [make() for _ in range(min(max(2, math.ceil(ROTATION / moved)), 64))]
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]
    replays = max(2, round(1e10 / (moved * len(calls))))
    graph.replay()

    def replay() -> None:
        for _ in range(replays):
            graph.replay()

    times = [timed(replay, busy=False)[0] / 1e3 / replays / len(calls) for _ in range(repeats)]
    del kept
    return median(times)


def row_of_bytes(make: Callable[[], Call], moved: int, peak: float | None) -> dict[str, float | None]:
    """Bytes that must move, microseconds, and the share of a copy's bandwidth; on a CPU without times, run once."""
    if peak is None:
        make()()
        return {"bytes": moved, "us": None, "share_of_copy": None}
    seconds = time_calls(make, moved)
    return {"bytes": moved, "us": seconds * 1e6, "share_of_copy": moved / seconds / peak}
