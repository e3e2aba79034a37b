"""Times collectives between the processes that were started: what a hardware file should say of links and network.

Every rank calls all of these in the same order. A time is that of the slowest rank, and the median of some rounds; each
collective has a buffer for each size, the larger of its two as `penstock.plan.transfers` counts it. With processes on
one machine the links are measured, with processes on several the way between machines.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.parallel.collectives import gather_flat, reduce_flat
from penstock.plan.hardware import CollectiveKind, TransferPoint

ROUNDS = 5

LARGE_BYTES = (2**18, 2**20, 2**22, 2**24, 2**26, 2**28)
"""Buffers on GPUs."""

SMALL_BYTES = (2**14, 2**17, 2**20, 2**23)
"""Buffers on CPUs."""

Call = Callable[[], object]


def measure_transfers(
    device: torch.device, node_ranks: int, buffers: Sequence[int]
) -> Mapping[CollectiveKind, tuple[TransferPoint, ...]]:
    """Measure each collective between all ranks, and a message from the first rank to the last.

    Args:
        device: of this rank; the process group is started.
        node_ranks: ranks of each machine.
        buffers: sizes in bytes.

    Returns:
        The same on all ranks.
    """
    world, found = dist.get_world_size(), {}
    kinds: tuple[CollectiveKind, ...] = ("all-to-all", "all-gather", "reduce-scatter", "point-to-point")
    for kind in kinds:
        points = []
        for size in buffers:
            numbers = size // 4 // world * world
            call = _calls(kind, torch.zeros(numbers, device=device))
            leaving = 4 * numbers if kind == "point-to-point" else 4 * numbers * (world - 1) // world
            seconds = _seconds(call, device, times=4 if size < 2**24 else 1)
            points.append(TransferPoint(ranks=world, node_ranks=node_ranks, leaving_bytes=leaving, seconds=seconds))
        found[kind] = tuple(points)
    return found


def _calls(kind: CollectiveKind, whole: Tensor) -> Call:
    """One collective on a buffer of its own; what a rank does in it may be nothing."""
    world, rank = dist.get_world_size(), dist.get_rank()
    part = whole.new_zeros(len(whole) // world)
    if kind == "all-to-all":
        target = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(target, whole)
    if kind == "all-gather":
        return lambda: gather_flat(whole, part)
    if kind == "reduce-scatter":
        return lambda: reduce_flat(part, whole)
    if rank == 0:
        return lambda: dist.send(whole, world - 1)
    return (lambda: dist.recv(whole, 0)) if rank == world - 1 else (lambda: None)


def _seconds(call: Call, device: torch.device, times: int) -> float:
    """Seconds of one call on the slowest rank."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    rounds = []
    for number in range(ROUNDS + 2):
        wait()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            call()
        wait()
        slowest = torch.tensor((time.perf_counter() - began) / times, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if number >= 2:
            rounds.append(slowest.item())
    return statistics.median(rounds)
