"""From what was measured on a machine to the hardware that describes it: fits, shares of peaks, sources.

A chip that the package knows keeps what data sheets say, and everything that was not measured. For another chip the
fastest product of each type, the copy and the fastest transfer stand for the peaks, so its shares are of those; what
was not measured is left out, and a plan that needs it says so.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar, get_args

from penstock.config.schema import Section
from penstock.plan.calibrate import Findings
from penstock.plan.hardware import (
    USUAL_HOST_LINK,
    Collective,
    CollectiveKind,
    Dtype,
    Efficiency,
    Hardware,
    Host,
    HostLink,
    Measured,
    Memory,
    Node,
    Operator,
    Overhead,
    Peaks,
    Point,
    TransferPoint,
)

AnySection = TypeVar("AnySection", bound=Section)

Transfers = Mapping[CollectiveKind, tuple[TransferPoint, ...]]

RESERVE_SHARE = 0.03
"""Of a chip that is not known; no single process can measure it."""


def calibrated(
    name: str,
    vendor: Literal["nvidia", "amd", "cpu"],
    findings: Findings,
    transfers: Transfers,
    *,
    known: Hardware | None,
    where: str,
) -> Hardware:
    """The hardware that was measured.

    Args:
        name: that the file shall have.
        vendor: of the device.
        findings: of one device.
        transfers: between devices; may be empty.
        known: the same chip as the package knows it, or None.
        where: device and versions, for the sources.
    """
    measured = f"measured: {where}"
    peaks = Peaks(**_peaks(findings), source=f"{measured}; the fastest that was seen") if known is None else known.peaks
    node = _node(transfers, measured) if known is None else known.node
    collectives = tuple(_collective(kind, points, node, measured) for kind, points in transfers.items())
    fresh = {(one.kind, one.reach) for one in collectives}
    kept = () if known is None else known.collectives
    reserve = RESERVE_SHARE if known is None else known.overhead.reserve_share
    points: list[tuple[str, tuple[Point, ...]]] = [*findings.points.items(), *transfers.items()]
    return Hardware(
        name=name,
        vendor=vendor,
        memory=Memory(capacity_bytes=findings.capacity_bytes, source=measured),
        peaks=peaks,
        node=node,
        overhead=Overhead(
            context_bytes=findings.context_bytes,
            reserve_share=reserve,
            source=f"{measured}; the reserve is assumed",
        ),
        host=Host(
            launch_seconds=findings.launch_seconds,
            kernel_seconds=findings.kernel_seconds,
            source=f"{measured}; the launch of operators of a small network",
        ),
        efficiency=_efficiency(findings, peaks, measured),
        host_link=_host_link(vendor, findings, measured) if known is None else known.host_link,
        collectives=(*collectives, *(one for one in kept if (one.kind, one.reach) not in fresh)),
        measured=tuple(Measured(operator=operator, source=measured, points=found) for operator, found in points),
    )


def _host_link(vendor: str, findings: Findings, source: str) -> HostLink:
    """Nobody measures that of a GPU; a CPU's host memory is its own."""
    if vendor != "cpu":
        return USUAL_HOST_LINK
    return HostLink(
        bytes_per_second=findings.memory_bytes_per_second / 4,
        source=f"{source}; of the memory a quarter, as a copy reads and writes and both ways share it",
    )


def fit(points: Sequence[TransferPoint]) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second that the points agree with best, by relative error.

    Minimizes the sum of ((latency + bytes / bandwidth) / seconds - 1)^2 with no latency below 0.
    """
    ones = [1 / point.seconds for point in points]
    sizes = [point.leaving_bytes / point.seconds for point in points]
    a, b = sum(ones), sum(sizes)
    aa, bb = (sum(x * x for x in values) for values in (ones, sizes))
    ab = sum(x * y for x, y in zip(ones, sizes, strict=True))
    determinant = aa * bb - ab * ab
    latency = (a * bb - b * ab) / determinant if determinant > 0 else 0.0
    per_byte = (b - latency * ab) / bb
    if latency < 0 or per_byte <= 0:
        latency, per_byte = 0.0, b / bb
    return latency, 1 / per_byte


def _collective(kind: CollectiveKind, points: Sequence[TransferPoint], node: Node, source: str) -> Collective:
    latency, bandwidth = fit(points)
    reach: Literal["node", "cluster"] = "node" if points[0].ranks == points[0].node_ranks else "cluster"
    peak = node.link_bytes_per_second if reach == "node" else node.network_bytes_per_second
    if reach == "node" and node.links == "mesh" and peak is not None:
        peak *= (1 if kind == "point-to-point" else points[0].ranks - 1) / (node.devices - 1)
    share = 1.0 if peak is None else max(0.001, min(1.0, bandwidth / peak))
    return Collective(
        kind=kind, reach=reach, latency_seconds=latency, efficiency=share, source=f"{source}; fitted to its points"
    )


def _node(transfers: Transfers, source: str) -> Node:
    """The machine of an unknown chip: its fastest transfer stands for what it promises."""
    points = [point for found in transfers.values() for point in found]
    fastest = max((fit(found)[1] for found in transfers.values()), default=None)
    if points and points[0].ranks > points[0].node_ranks:
        text = f"{source}; the network as fast as its fastest transfer, the links not measured"
        return Node(devices=points[0].node_ranks, links="switch", network_bytes_per_second=fastest, source=text)
    text = f"{source}; links as fast as their fastest transfer, the network not measured"
    devices = points[0].ranks if points else 1
    return Node(devices=devices, links="switch", link_bytes_per_second=fastest, source=text)


def _peaks(findings: Findings) -> dict[str, float]:
    rates: dict[str, float] = {"memory_bytes_per_second": findings.memory_bytes_per_second}
    for found in findings.points.values():
        for point in found:
            rates[point.dtype] = max(point.flops_per_second, rates.get(point.dtype, 0.0))
    rates.setdefault("bf16", max(rate for name, rate in rates.items() if name in get_args(Dtype)))
    return rates


def _efficiency(findings: Findings, peaks: Peaks, source: str) -> Efficiency:
    """Medians of the points' shares; what was not measured takes the share of what is most like it."""

    def share(operator: str) -> float:
        found = findings.points.get(operator)
        if not found:
            return share(_LIKE[operator])
        shares = [point.flops_per_second / (peaks.flops_per_second(point.dtype) or 1) for point in found]
        return max(0.001, min(1.0, statistics.median(shares)))

    memory = min(1.0, findings.memory_bytes_per_second / peaks.memory_bytes_per_second)
    return Efficiency(
        **{operator: share(operator) for operator in get_args(Operator)},
        memory=memory,
        source=f"{source}; medians of its points",
    )


_LIKE = {
    "grouped_forward_gathered": "grouped_forward",
    "grouped_weight_gradient_gathered": "grouped_weight_gradient",
}
"""Measured on GPUs with our kernels only."""


def rounded(hardware: Hardware) -> Hardware:
    """The same with four digits of every figure: more are noise, and a file should be read."""
    names = ("peaks", "node", "overhead", "host", "efficiency")
    return replace(
        hardware,
        **{name: _short(vars(hardware)[name]) for name in names},
        collectives=tuple(map(_short, hardware.collectives)),
        measured=tuple(replace(one, points=tuple(map(_short, one.points))) for one in hardware.measured),
    )


def _short(section: AnySection) -> AnySection:
    """A section with four digits of its numbers; whole ones are kept."""
    return section.model_copy(
        update={name: float(f"{value:.4g}") for name, value in section if isinstance(value, float)}
    )
