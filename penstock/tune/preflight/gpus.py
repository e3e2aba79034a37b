"""GPUs: number, kind, free memory and peer access; speed of devices and links, and correctness of sums over ranks.

PyTorch answers for NVIDIA and AMD alike; names and sizes are compared with the known chips (docs/hardware.md). For the
speed, every rank multiplies a large matrix, all ranks time the collectives of `penstock.plan.calibrate`, and add
numbers with a known sum, which detects links that lose or mix up data. Results are compared with the hardware model of
the plan, and devices with each other, because all ranks wait for the slowest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import TypeAdapter

from penstock.base.devices import chip_named
from penstock.base.errors import HardwareError
from penstock.kernels.tuning import Dtype, device_facts
from penstock.parallel.launch.environment import Vendor
from penstock.plan.calibrate import TORCH_DTYPES, DeviceBenchmark, measure_transfers
from penstock.plan.hardware import CollectiveKind, Hardware, RankGroup, TransferPoint
from penstock.plan.rates import Rates, TransferTimes
from penstock.tune.preflight.host import PreflightCheck, Status, fine

OTHERS_BYTES = 3 << 30  # memory of an idle GPU: driver, firmware and our context. More belongs to another process
WHOLE = 0.95  # share of a chip's memory below which the device is a partition (MIG, CPX)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    total_bytes: int
    free_bytes: int
    reaches: frozenset[int]  # numbers of the GPUs whose memory it can access directly


def read_gpus() -> list[Gpu]:
    numbers, gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0), []
    for number in numbers:
        free, total = torch.cuda.mem_get_info(number)
        reaches = {other for other in numbers if other != number and torch.cuda.can_device_access_peer(number, other)}
        name = torch.cuda.get_device_name(number)
        gpus.append(Gpu(name=name, total_bytes=total, free_bytes=free, reaches=frozenset(reaches)))
    return gpus


def judge_gpus(gpus: Sequence[Gpu], vendor: Vendor, known: Hardware | None) -> list[PreflightCheck]:
    """All checks of the GPUs. The vendor is that of the machine's driver; `known` is None for an unknown chip."""
    if not gpus and vendor == "cpu":
        return [fine("devices", "GPUs", "none; runs use the CPU")]
    if not gpus:
        got = f"none that PyTorch can use, though there is a driver of {vendor}"
        fix = "see the versions above, CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES, and the container's devices"
        return [PreflightCheck("devices", "GPUs", "failed", got, "the GPUs of this machine", fix)]
    return [*_kind(gpus, known), *_memory(gpus, known), *_reach(gpus)]


def _kind(gpus: Sequence[Gpu], known: Hardware | None) -> Iterator[PreflightCheck]:
    kinds = {gpu.name: sum(other.name == gpu.name for other in gpus) for gpu in gpus}
    got = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    if len(kinds) == 1:
        yield fine("devices", "GPUs", got)
    else:
        fix = "leave the others out: CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES"
        yield PreflightCheck("devices", "GPUs", "warning", got, "one kind: all wait for the slowest", fix)
    if known is None and chip_named(gpus[0].name) is None:
        got, expected = f"nothing is known of {gpus[0].name}", "its peak, for model FLOPs utilization and for plans"
        fix = "penstock calibrate --output mine.toml, and penstock preflight --hardware mine.toml"
        yield PreflightCheck("devices", "chip", "warning", got, expected, fix)


def _memory(gpus: Sequence[Gpu], known: Hardware | None) -> Iterator[PreflightCheck]:
    for number, gpu in enumerate(gpus):
        if known is not None and gpu.total_bytes < WHOLE * known.memory.capacity_bytes:
            got = f"{gpu.total_bytes / 1e9:.0f} GB of memory"
            expected = f"{known.memory.capacity_bytes / 1e9:.0f} GB: this is a part of an {known.name}"
            fix = "switch partitions off (nvidia-smi -mig 0, amd-smi set --compute-partition SPX), if you may"
            yield PreflightCheck("devices", f"GPU {number}", "warning", got, expected, fix)
    busy = {number: gpu for number, gpu in enumerate(gpus) if gpu.total_bytes - gpu.free_bytes > OTHERS_BYTES}
    for number, gpu in busy.items():
        used = gpu.total_bytes - gpu.free_bytes
        status: Status = "failed" if used > gpu.total_bytes / 2 else "warning"
        got = f"{used / 1e9:.1f} of {gpu.total_bytes / 1e9:.1f} GB are taken"
        expected = f"<= {OTHERS_BYTES / 1e9:.1f} GB: no other process"
        fix = "end it; nvidia-smi or amd-smi process names it"
        yield PreflightCheck("devices", f"GPU {number}", status, got, expected, fix)
    if not busy:
        yield fine("devices", "memory", f"{min(gpu.free_bytes for gpu in gpus) / 1e9:.1f} GB free on each")


def _reach(gpus: Sequence[Gpu]) -> Iterator[PreflightCheck]:
    pairs = [(number, other) for number in range(len(gpus)) for other in range(len(gpus)) if other != number]
    apart = [f"{number} to {other}" for number, other in pairs if other not in gpus[number].reaches]
    if apart:
        got = f"none from GPU {', '.join(apart[:4])}{f' and {len(apart) - 4} more' if len(apart) > 4 else ''}"
        expected = "every GPU reads and writes the others' memory; else all goes through the host's"
        fix = "nvidia-smi topo -m or amd-smi topology; IOMMU off or in passthrough (iommu=pt), ACS off"
        yield PreflightCheck("devices", "peer access", "warning", got, expected, fix)
    elif pairs:
        yield fine("devices", "peer access", f"all {len(pairs)} ways between {len(gpus)} GPUs")


GPU_SIDE, CPU_SIDE = 8192, 512  # side of the square matrices
GPU_BUFFERS, CPU_BUFFERS = (2**22, 2**28), (2**14, 2**22)  # bytes: one size dominated by latency, one by bandwidth

SLOW, VERY_SLOW = 1.5, 3.0
"""Factors on the planned time. Clocks, temperature and other jobs explain less than the first; a link that is down, or
a path through the host, explains the second.
"""

BEHIND = 0.9  # share of the fastest device; equal chips are within a few percent of each other
SUMMED = 1 << 20  # numbers that are summed over ranks


@dataclass(frozen=True, kw_only=True)
class NodeMeasurements:
    """Measurements of all ranks."""

    dtype: Dtype
    side: int  # of the square matrices that were multiplied
    flops: tuple[float, ...]  # FLOP per second of each rank's product
    transfers: Mapping[CollectiveKind, tuple[TransferPoint, ...]]  # empty for one rank
    wrong_sums: tuple[int, ...]  # of each rank, number of wrong sums over ranks


def measure(device: torch.device, node_ranks: int) -> NodeMeasurements:
    """Measure on all ranks at once, `node_ranks` of each machine; returns the same on all. Collective."""
    on_gpu = device.type == "cuda"
    dtype: Dtype = "bf16" if on_gpu else "fp32"
    side = GPU_SIDE if on_gpu else CPU_SIDE
    x, w = (torch.randn(side, side, device=device, dtype=TORCH_DTYPES[dtype]) for _ in range(2))
    seconds = DeviceBenchmark(device, device_facts(device, dtype), round_seconds=0.02).seconds(partial(F.linear, x, w))
    flops = 2 * side**3 / seconds  # a product and a sum for each of side^3 pairs
    if not dist.is_initialized():
        return NodeMeasurements(dtype=dtype, side=side, flops=(flops,), transfers={}, wrong_sums=(0,))
    transfers = measure_transfers(device, node_ranks, GPU_BUFFERS if on_gpu else CPU_BUFFERS)
    wrong = _of_every_rank(_wrong_sums(device), device)
    return NodeMeasurements(
        dtype=dtype,
        side=side,
        flops=_of_every_rank(flops, device),
        transfers=transfers,
        wrong_sums=tuple(round(count) for count in wrong),
    )


def _of_every_rank(number: float, device: torch.device) -> tuple[float, ...]:
    """A number of each rank, gathered and not summed, since sums may be broken."""
    local_number = torch.tensor([number], dtype=torch.float64, device=device)
    numbers_W = [torch.zeros_like(local_number) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers_W, local_number)
    return tuple(number.item() for number in numbers_W)


def _wrong_sums(device: torch.device) -> int:
    """Number of wrong results among a million sums of small integers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    small = torch.arange(SUMMED, device=device) % 64
    summed = (small + rank).float()  # exact: sums of thousands of ranks stay below 2^24
    dist.all_reduce(summed)
    return int((summed != small * world + world * (world - 1) // 2).sum().item())


MEASURED = TypeAdapter(NodeMeasurements)
"""Reads and writes measurements as text, for another process."""


def judge_measured(figures: NodeMeasurements, known: Hardware | None) -> list[PreflightCheck]:
    """All checks of the measurements; `known` is None for unknown hardware."""
    return [_products(figures, known), *_sums(figures), *_collectives(figures, known)]


def _products(figures: NodeMeasurements, known: Hardware | None) -> PreflightCheck:
    fastest, slowest = max(figures.flops), min(figures.flops)
    got = f"{slowest / 1e12:.3g} TFLOP/s in {figures.dtype}" + (" on the slowest" if len(figures.flops) > 1 else "")
    rate = None if known is None else _expected_flops(figures, known)
    behind = [f"rank {rank}" for rank, flops in enumerate(figures.flops) if flops < BEHIND * fastest]
    if rate is not None and rate > SLOW * slowest:
        status: Status = "failed" if rate > VERY_SLOW * slowest else "warning"
        fix = "look for other processes, power limits and temperature (nvidia-smi -q, amd-smi metric)"
        return PreflightCheck("transfers", "products", status, got, f"{rate / 1e12:.3g} TFLOP/s", fix)
    if behind and known is not None:
        got = f"{', '.join(behind)} below {BEHIND:.0%} of the fastest ({fastest / 1e12:.3g} TFLOP/s)"
        expected = "devices of one speed: all wait for the slowest"
        fix = "look for other processes, power limits and temperature there"
        return PreflightCheck("transfers", "products", "warning", got, expected, fix)
    return fine("transfers", "products", got)


def _expected_flops(figures: NodeMeasurements, known: Hardware) -> float | None:
    try:
        return (
            2 * figures.side**3 / Rates(known).product(figures.side, figures.side, figures.side, figures.dtype).seconds
        )
    except HardwareError:
        return None


def _sums(figures: NodeMeasurements) -> Iterator[PreflightCheck]:
    if len(figures.flops) == 1:
        return
    wrong = {rank: count for rank, count in enumerate(figures.wrong_sums) if count}
    if not wrong:
        yield fine("transfers", "sums over ranks", f"right on all {len(figures.flops)}")
        return
    got = ", ".join(f"{count:,} of {SUMMED:,} wrong on rank {rank}" for rank, count in wrong.items())
    fix = "IOMMU in passthrough (iommu=pt) and ACS off; NCCL_P2P_DISABLE=1 shows whether direct links are to blame"
    yield PreflightCheck("transfers", "sums over ranks", "failed", got, "none wrong", fix)


def _collectives(figures: NodeMeasurements, known: Hardware | None) -> Iterator[PreflightCheck]:
    for kind, points in figures.transfers.items():
        largest = points[-1]
        rate = largest.leaving_bytes / largest.seconds
        got = f"{rate / 1e9:.3g} GB/s out of each rank, {points[0].seconds * 1e6:,.0f} us for {_size(points[0])}"
        slow = [] if known is None else list(_slow(kind, points, known))
        if not slow:
            yield fine("transfers", kind, got)
            continue
        times = max(point.seconds / expected for point, expected in slow)
        status: Status = "failed" if times > VERY_SLOW else "warning"
        text = "; ".join(f"{expected * 1e6:,.0f} us for {_size(point)}" for point, expected in slow)
        fix = "NCCL_DEBUG=INFO shows which links are used; see peer access and the variables above"
        yield PreflightCheck("transfers", kind, status, got, f"{text}, which took up to {times:.1f} times that", fix)


def _slow(
    kind: CollectiveKind, points: Sequence[TransferPoint], known: Hardware
) -> Iterator[tuple[TransferPoint, float]]:
    """Points that took longer than planned, with the planned time."""
    if kind == "symmetric" or kind == "deep-ep":  # dispatch methods, which are not measured here
        return
    transfers = TransferTimes(known)
    for point in points:
        # A rank sends its buffer without its own part.
        share = 1 if kind == "point-to-point" else point.ranks / (point.ranks - 1)
        group = RankGroup(ranks=point.ranks, node_ranks=point.node_ranks)
        try:
            expected = transfers.collective(kind, point.leaving_bytes * share, group).seconds
        except HardwareError:
            return
        if point.seconds > SLOW * expected:
            yield point, expected


def _size(point: TransferPoint) -> str:
    return f"{point.leaving_bytes / 1e6:.3g} MB"
