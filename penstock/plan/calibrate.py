"""Measure this machine, and describe it as a hardware file.

`measure_device` times the operators of a training step. Sizes are those of training on a GPU, and small on a CPU. A
figure is a median of rounds of calls on the same inputs, so small inputs stay in a cache. Inputs are random: a product
of zeros needs less power and runs faster than training.

`measure_transfers` times collectives between the processes of a process group; a time is that of the slowest rank.

`measured_hardware` makes a hardware description of both. A chip of the package keeps its data sheet's peaks and every
figure that was not measured. For another chip the fastest product of each type, the copy and the fastest transfer are
the peaks, and figures that were not measured are left out.
"""

import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import sysconf
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from penstock.config.schema import Section
from penstock.kernels import reference
from penstock.kernels.attention import causal_attention
from penstock.kernels.expert_kernels import TRITON as TRITON_EXPERTS
from penstock.kernels.tuning import GROUPED_GEMM, DeviceFacts
from penstock.parallel.collectives import gather_flat, reduce_flat
from penstock.plan.hardware import (
    USUAL_HOST_LINK,
    AttentionPoint,
    CollectiveKind,
    CollectiveRate,
    ComputePoint,
    DeviceMemory,
    Dtype,
    Efficiency,
    GroupedPoint,
    Hardware,
    HostLink,
    LaunchOverhead,
    MeasuredPoint,
    MeasuredPoints,
    MemoryOverhead,
    Node,
    OperatorKind,
    Peaks,
    ProductPoint,
    TransferPoint,
)

Call = Callable[[], object]

ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class BenchmarkSizes:
    """Sizes to measure."""

    products: tuple[tuple[int, int, int], ...]  # (m, n, k) each
    grouped: tuple[tuple[int, int, int, int], ...]  # (groups, rows, n, k) each
    attention: tuple[tuple[int, int, int, int, int], ...]  # (rows, heads, positions, width, value width) each
    copy_bytes: int  # of a tensor that is copied
    round_seconds: float  # of a round of calls, at least


GPU_SIZES = BenchmarkSizes(
    products=(
        (8192, 8192, 8192),
        (8192, 2048, 2048),
        (8192, 3072, 2048),
        (4096, 7168, 7168),
        (4096, 1536, 7168),
        (16384, 8192, 2048),
        (2048, 4096, 16384),
        (1024, 4096, 4096),
    ),
    grouped=(
        (8, 4096, 4096, 7168),
        (8, 4096, 7168, 2048),
        (16, 3072, 2816, 2048),
        (16, 3072, 2048, 1408),
        (64, 384, 2816, 2048),
        (32, 512, 1536, 2048),
    ),
    attention=((4, 16, 4096, 192, 128), (1, 64, 4096, 128, 128), (1, 16, 16384, 192, 128)),
    copy_bytes=2**30,
    round_seconds=0.01,
)

CPU_SIZES = BenchmarkSizes(
    products=((256, 256, 256), (512, 384, 128), (512, 1024, 512)),
    grouped=((8, 64, 256, 128), (8, 64, 128, 128)),
    attention=((4, 4, 128, 48, 32), (1, 4, 512, 64, 64)),
    copy_bytes=2**25,
    round_seconds=0.01,
)


@dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """Measurements of one device."""

    points: Mapping[str, tuple[ComputePoint, ...]]
    capacity_bytes: int
    context_bytes: int  # used before the first tensor
    memory_bytes_per_second: float  # read and written by a large copy
    kernel_seconds: float
    launch_seconds: float  # of the host, for one operator with autograd


def measure_device(device: torch.device, facts: DeviceFacts, sizes: BenchmarkSizes) -> DeviceFigures:
    """Measure the device of this process, in `facts.dtype`."""
    torch.manual_seed(0)
    before = device_memory(device)
    bench = DeviceBenchmark(device, facts, sizes.round_seconds)
    points: dict[str, list[ComputePoint]] = defaultdict(list)
    for name, point in (*bench.products(sizes), *bench.grouped(sizes), *bench.attention(sizes)):
        points[name].append(point)
    # A GPU's context grows with the kernels that are loaded; a CPU's process with the tensors that were measured.
    capacity, context = device_memory(device) if device.type == "cuda" else before
    source = torch.randn(sizes.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    return DeviceFigures(
        points={name: tuple(curve) for name, curve in points.items()},
        capacity_bytes=capacity,
        context_bytes=context,
        memory_bytes_per_second=2 * source.nbytes / bench.seconds(lambda: target.copy_(source)),
        kernel_seconds=bench.smallest_kernel(),
        launch_seconds=bench.host_of_an_operator(),
    )


class DeviceBenchmark:
    """Times calls on one device, in rounds of at least `round_seconds`."""

    def __init__(self, device: torch.device, facts: DeviceFacts, round_seconds: float) -> None:
        self._device = device
        self._facts = facts
        self._round_seconds = round_seconds

    def seconds(self, call: Call) -> float:
        """Seconds of one call; the host's part is hidden where calls are long enough."""
        call()
        once = self._round(call, 1)
        times = max(1, round(self._round_seconds / max(once, 1e-7)))
        self._round(call, times)
        return statistics.median(self._round(call, times) for _ in range(ROUNDS)) / times

    def _round(self, call: Call, times: int) -> float:
        _synchronize(self._device)
        began = time.perf_counter()
        for _ in range(times):
            call()
        _synchronize(self._device)
        return time.perf_counter() - began

    def _normal(self, *size: int, dtype: Dtype | None = None) -> Tensor:
        return torch.randn(*size, device=self._device, dtype=TORCH_DTYPES[dtype or self._facts.dtype])

    def products(self, sizes: BenchmarkSizes) -> Iterator[tuple[str, ProductPoint]]:
        """PyTorch's matrix products; on a CPU also in bfloat16, for which some CPUs have units."""
        dtypes: tuple[Dtype, ...] = ("fp32", "bf16") if self._device.type == "cpu" else (self._facts.dtype,)
        for dtype in dtypes:
            for m, n, k in sizes.products:
                x, w = self._normal(m, k, dtype=dtype), self._normal(n, k, dtype=dtype)
                rate = 2 * m * n * k / self.seconds(partial(F.linear, x, w))
                yield "product", ProductPoint(dtype=dtype, flops_per_second=rate, m=m, n=n, k=k)

    def grouped(self, sizes: BenchmarkSizes) -> Iterator[tuple[str, GroupedPoint]]:
        """The experts' products, with the same number of rows for each expert."""
        has_kernels = self._facts.target in GROUPED_GEMM and self._facts.has_triton
        make = self._by_kernels if has_kernels else self._by_definition
        for groups, rows, n, k in sizes.grouped:
            x_RD, w_eFD, dy_RF = (
                self._normal(groups * rows, k),
                self._normal(groups, n, k),
                self._normal(groups * rows, n),
            )
            counts_e = torch.full((groups,), rows, dtype=torch.int32, device=self._device)
            for name, call in make(x_RD, w_eFD, dy_RF, counts_e).items():
                rate = 2 * groups * rows * n * k / self.seconds(call)
                dtype = self._facts.dtype
                point = GroupedPoint(dtype=dtype, flops_per_second=rate, groups=groups, rows=rows, n=n, k=k)
                yield f"grouped_{name}", point

    def _by_kernels(self, x_RD: Tensor, w_eFD: Tensor, dy_RF: Tensor, counts_e: Tensor) -> dict[str, Call]:
        kernels = TRITON_EXPERTS
        tiles = kernels.tile_table(counts_e, len(x_RD))
        index_R = torch.randperm(len(x_RD), device=self._device)
        sum_eFD = torch.zeros_like(w_eFD, dtype=torch.float32)
        weight_gradient = partial(kernels.weight_gradient, dy_RF, x_RD, counts_e, tiles=tiles)
        return {
            "forward": lambda: kernels.forward(x_RD, w_eFD, counts_e, None, tiles=tiles),
            "forward_gathered": lambda: kernels.forward(x_RD, w_eFD, counts_e, index_R, tiles=tiles),
            "input_gradient": lambda: kernels.input_gradient(dy_RF, w_eFD, counts_e, tiles=tiles),
            "weight_gradient": lambda: weight_gradient(None),
            "weight_gradient_gathered": lambda: weight_gradient(index_R),
            "weight_gradient_accumulated": lambda: weight_gradient(None, accumulate_into=sum_eFD),
        }

    def _by_definition(self, x_RD: Tensor, w_eFD: Tensor, dy_RF: Tensor, counts_e: Tensor) -> dict[str, Call]:
        x_RD, w_eFD = x_RD.requires_grad_(), w_eFD.requires_grad_()
        y_RF = reference.grouped_gemm(x_RD, w_eFD, counts_e)
        return {
            "forward": torch.no_grad()(partial(reference.grouped_gemm, x_RD, w_eFD, counts_e)),
            "input_gradient": lambda: torch.autograd.grad(y_RF, x_RD, dy_RF, retain_graph=True),
            "weight_gradient": lambda: torch.autograd.grad(y_RF, w_eFD, dy_RF, retain_graph=True),
        }

    def attention(self, sizes: BenchmarkSizes) -> Iterator[tuple[str, AttentionPoint]]:
        """Causal attention over whole rows."""
        backend = "default" if self._device.type == "cpu" else "auto"
        for batch, heads, length, width, value_width in sizes.attention:
            q, k = (self._normal(batch, length, heads, width).requires_grad_() for _ in range(2))
            v = self._normal(batch, length, heads, value_width).requires_grad_()
            attend = partial(causal_attention, q, k, v, scale=width**-0.5, allowed_BSS=None, backend=backend)
            o_BSHM = attend()
            do_BSHM = torch.randn_like(o_BSHM)
            calls: dict[str, Call] = {
                "forward": torch.no_grad()(attend),
                "backward": partial(torch.autograd.grad, o_BSHM, (q, k, v), do_BSHM, retain_graph=True),
            }
            products = {"forward": width + value_width, "backward": 3 * width + 2 * value_width}
            for direction, call in calls.items():
                flops = batch * heads * length**2 * products[direction]
                yield (
                    f"attention_{direction}",
                    AttentionPoint(
                        dtype=self._facts.dtype,
                        flops_per_second=flops / self.seconds(call),
                        heads=batch * heads,
                        queries=length,
                        keys=length,
                        width=width,
                        value_width=value_width,
                    ),
                )

    def smallest_kernel(self) -> float:
        """Seconds of a kernel that adds 1 to a few numbers; on a GPU in a graph, without the host."""
        few, times = torch.zeros(64, device=self._device), 200
        if self._device.type != "cuda":
            return self.seconds(lambda: few.add_(1))
        graph = torch.cuda.CUDAGraph()
        few.add_(1)
        _synchronize(self._device)
        with torch.cuda.graph(graph):
            for _ in range(times):
                few.add_(1)
        return self.seconds(graph.replay) / times

    def host_of_an_operator(self) -> float:
        """Host seconds of one operator of a small network, forward and backward, while the device keeps up."""
        layers = 32
        x = torch.zeros(8, 16, device=self._device)
        weights = [torch.zeros(16, 16, device=self._device, requires_grad=True) for _ in range(layers)]

        def step() -> None:
            y = x
            for weight in weights:
                y = F.silu(F.linear(y, weight))
            torch.autograd.grad(y.sum(), weights)

        # forward: product and activation; backward: the activation's gradient and two products
        return self.seconds(step) / (5 * layers)


TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of a device, and those that no tensor can have: on a CPU, the peak of this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free - torch.cuda.memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return sysconf("SC_PHYS_PAGES") * sysconf("SC_PAGE_SIZE"), peak if sys.platform == "darwin" else peak * 1024


GPU_BUFFERS = (2**18, 2**20, 2**22, 2**24, 2**26, 2**28)  # buffer sizes on GPUs
CPU_BUFFERS = (2**14, 2**17, 2**20, 2**23)  # buffer sizes on CPUs


def measure_transfers(
    device: torch.device, node_ranks: int, buffers: Sequence[int], group: dist.ProcessGroup | None = None
) -> Mapping[CollectiveKind, tuple[TransferPoint, ...]]:
    """Measure each collective in a group, and a message from its first rank to its last; all ranks get the same.

    `device` is that of this rank, each machine has `node_ranks` ranks, `buffers` are sizes in bytes. The group is that
    of all ranks, or one of several of the same size which measure together.
    """
    ranks, transfers = dist.get_world_size(group), {}
    kinds: tuple[CollectiveKind, ...] = ("all-to-all", "all-gather", "reduce-scatter", "point-to-point")
    for kind in kinds:
        points = []
        for size in buffers:
            numbers = size // 4 // ranks * ranks
            call = _calls(kind, torch.zeros(numbers, device=device), group)
            leaving = 4 * numbers if kind == "point-to-point" else 4 * numbers * (ranks - 1) // ranks
            seconds = _seconds(call, device, times=4 if size < 2**24 else 1)
            points.append(TransferPoint(ranks=ranks, node_ranks=node_ranks, leaving_bytes=leaving, seconds=seconds))
        transfers[kind] = tuple(points)
    return transfers


def _calls(kind: CollectiveKind, whole: Tensor, group: dist.ProcessGroup | None) -> Call:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    part = whole.new_zeros(len(whole) // ranks)
    if kind == "all-to-all":
        target = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(target, whole, group=group)
    if kind == "all-gather":
        return lambda: gather_flat(whole, part, group=group)
    if kind == "reduce-scatter":
        return lambda: reduce_flat(part, whole, group=group)
    if rank == 0:
        return lambda: dist.send(whole, group=group, group_dst=ranks - 1)
    return (lambda: dist.recv(whole, group=group, group_src=0)) if rank == ranks - 1 else (lambda: None)


def _seconds(call: Call, device: torch.device, times: int) -> float:
    rounds = []
    for number in range(ROUNDS + 2):
        _synchronize(device)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            call()
        _synchronize(device)
        slowest = torch.tensor((time.perf_counter() - began) / times, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if number >= 2:
            rounds.append(slowest.item())
    return statistics.median(rounds)


AnySection = TypeVar("AnySection", bound=Section)

TransferPoints = Mapping[CollectiveKind, tuple[TransferPoint, ...]]

RESERVE_SHARE = 0.03  # of a chip that the package does not know; one process cannot measure it


def measured_hardware(
    name: str,
    vendor: Literal["nvidia", "amd", "cpu"],
    findings: DeviceFigures,
    transfers: TransferPoints,
    *,
    in_node: TransferPoints | None = None,
    known: Hardware | None,
    where: str,
    kernels: str = "",
) -> Hardware:
    """The hardware that was measured.

    `vendor`, `name` and `findings` describe one device, `transfers` the links between all devices, if any, `in_node`
    those of each of several nodes. `known` is the packaged description of the chip, `where` names device and versions
    for the sources, `kernels` the compiler's name of the chip.
    """
    measured = f"measured: {where}"
    peaks = Peaks(**_peaks(findings), source=f"{measured}; the fastest that was seen") if known is None else known.peaks
    links = [*(in_node or {}).items(), *transfers.items()]
    node = _node(transfers, in_node or {}, measured) if known is None else known.node
    collectives = tuple(_collective_rate(kind, points, node, measured) for kind, points in links)
    fresh = {(collective.kind, collective.reach) for collective in collectives}
    kept = () if known is None else known.collectives
    reserve = RESERVE_SHARE if known is None else known.overhead.reserve_share
    # A CPU's host memory is its own; the link of a GPU is not measured.
    quarter = f"{measured}; of the memory a quarter, as a copy reads and writes and both ways share it"
    own_link = HostLink(
        bytes_per_second=findings.memory_bytes_per_second / 4, memory_bytes=findings.capacity_bytes, source=quarter
    )
    link = own_link if vendor == "cpu" else USUAL_HOST_LINK
    points: list[tuple[str, tuple[MeasuredPoint, ...]]] = [*findings.points.items(), *links]
    return Hardware(
        name=name,
        vendor=vendor,
        memory=DeviceMemory(capacity_bytes=findings.capacity_bytes, source=measured),
        peaks=peaks,
        node=node,
        overhead=MemoryOverhead(
            context_bytes=findings.context_bytes, reserve_share=reserve, source=f"{measured}; the reserve is assumed"
        ),
        host=LaunchOverhead(
            launch_seconds=findings.launch_seconds,
            kernel_seconds=findings.kernel_seconds,
            source=f"{measured}; the launch of operators of a small network",
        ),
        efficiency=_efficiency(findings, peaks, measured),
        host_link=link if known is None else known.host_link,
        kernels=kernels,
        collectives=(*collectives, *(rate for rate in kept if (rate.kind, rate.reach) not in fresh)),
        measured=tuple(MeasuredPoints(operator=operator, source=measured, points=curve) for operator, curve in points),
    )


def fit(points: Sequence[TransferPoint]) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second that minimize the sum of squared relative errors.

    The latency is at least 0.
    """
    ones = [1 / point.seconds for point in points]
    sizes = [point.leaving_bytes / point.seconds for point in points]
    a, b = sum(ones), sum(sizes)
    # Normal equations of latency * ones + per_byte * sizes = 1.
    aa, bb = (sum(x * x for x in values) for values in (ones, sizes))
    ab = sum(x * y for x, y in zip(ones, sizes, strict=True))
    determinant = aa * bb - ab * ab
    latency = (a * bb - b * ab) / determinant if determinant > 0 else 0.0
    per_byte = (b - latency * ab) / bb
    if latency < 0 or per_byte <= 0:
        latency, per_byte = 0.0, b / bb
    return latency, 1 / per_byte


def _collective_rate(kind: CollectiveKind, points: Sequence[TransferPoint], node: Node, source: str) -> CollectiveRate:
    latency, bandwidth = fit(points)
    reach: Literal["node", "cluster"] = "node" if points[0].ranks == points[0].node_ranks else "cluster"
    peak = node.link_bytes_per_second if reach == "node" else node.network_bytes_per_second
    if reach == "node" and node.links == "mesh" and peak is not None:
        peak *= (1 if kind == "point-to-point" else points[0].ranks - 1) / (node.devices - 1)
    share = 1.0 if peak is None else max(0.001, min(1.0, bandwidth / peak))
    return CollectiveRate(
        kind=kind, reach=reach, latency_seconds=latency, efficiency=share, source=f"{source}; fitted to its points"
    )


def _node(transfers: TransferPoints, in_node: TransferPoints, source: str) -> Node:
    """The node of an unknown chip: its fastest transfer is its bandwidth."""
    points = [point for curve in transfers.values() for point in curve]
    fastest, inside = (max((fit(curve)[1] for curve in table.values()), default=None) for table in (transfers, in_node))
    if points and points[0].ranks > points[0].node_ranks:
        links = "the links too" if in_node else "the links not measured"
        return Node(
            devices=points[0].node_ranks,
            links="switch",
            link_bytes_per_second=inside,
            network_bytes_per_second=fastest,
            source=f"{source}; the network as fast as its fastest transfer, {links}",
        )
    text = f"{source}; links as fast as their fastest transfer, the network not measured"
    devices = points[0].ranks if points else 1
    return Node(devices=devices, links="switch", link_bytes_per_second=fastest, source=text)


def _peaks(findings: DeviceFigures) -> dict[str, float]:
    rates: dict[str, float] = {"memory_bytes_per_second": findings.memory_bytes_per_second}
    for points in findings.points.values():
        for point in points:
            rates[point.dtype] = max(point.flops_per_second, rates.get(point.dtype, 0.0))
    rates.setdefault("bf16", max(rate for name, rate in rates.items() if name in get_args(Dtype)))
    return rates


def _efficiency(findings: DeviceFigures, peaks: Peaks, source: str) -> Efficiency:
    """Medians of the points' shares; an operator without points takes the share of a similar one."""

    def share(operator: str) -> float:
        points = findings.points.get(operator)
        if not points:
            return share(_LIKE[operator])
        shares = [point.flops_per_second / (peaks.flops_per_second(point.dtype) or 1) for point in points]
        return max(0.001, min(1.0, statistics.median(shares)))

    memory = min(1.0, findings.memory_bytes_per_second / peaks.memory_bytes_per_second)
    return Efficiency(
        **{operator: share(operator) for operator in get_args(OperatorKind)},
        memory=memory,
        source=f"{source}; medians of its points",
    )


_LIKE = {"grouped_forward_gathered": "grouped_forward", "grouped_weight_gradient_gathered": "grouped_weight_gradient"}
"""Operators that are measured on GPUs with our kernels only, and a similar one."""


def rounded(hardware: Hardware) -> Hardware:
    """The hardware with four digits of every figure: more are noise."""
    names = ("peaks", "node", "overhead", "host", "efficiency")
    return replace(
        hardware,
        **{name: _short(vars(hardware)[name]) for name in names},
        collectives=tuple(map(_short, hardware.collectives)),
        measured=tuple(replace(entry, points=tuple(map(_short, entry.points))) for entry in hardware.measured),
    )


def _short(section: AnySection) -> AnySection:
    return section.model_copy(
        update={name: float(f"{value:.4g}") for name, value in section if isinstance(value, float)}
    )
