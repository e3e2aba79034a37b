"""docs/hardware.md: the hardware files that come with the package, as tables with the kind of each source."""

from collections.abc import Callable, Sequence
from typing import get_args

from penstock.plan.hardware import CollectiveKind, Efficiency, Hardware, OperatorKind
from penstock.plan.hardware_file import known_hardware, load_hardware
from tools.pages import page, table

KINDS = get_args(CollectiveKind)

TABLES = ("memory", "peaks", "node", "overhead", "host", "host_link", "efficiency")
"""Tables of a file that have one source each."""


def hardware_page() -> str:
    """The whole page."""
    chips = [load_hardware(name) for name in known_hardware()]
    names = [chip.name for chip in chips]
    return page(
        "hardware",
        promised=table(_PROMISED, map(_promised, chips)),
        shares=table(("share of the peak", *names), _shares(chips)),
        overheads=table(("", *names), _overheads(chips)),
        collectives=table(("in a", "collective", "latency, us", "share", "source", "chips"), _collectives(chips)),
        points=table(("chip", "operator", "points", "source"), _points(chips)),
        sources=table(("chip", "table", "source"), [row for chip in chips for row in _sources(chip)]),
    )


_PROMISED = (
    "chip",
    "memory, GB",
    "memory, TB/s",
    "bf16, TFLOP/s",
    "fp8",
    "fp32",
    "node",
    "links, GB/s",
    "network, GB/s",
)


def _promised(chip: Hardware) -> tuple[str, ...]:
    peaks, node = chip.peaks, chip.node
    return (
        chip.name,
        f"{chip.memory.capacity_bytes / 1e9:.1f} ({chip.memory.origin})",
        f"{peaks.memory_bytes_per_second / 1e12:g}",
        f"{peaks.bf16 / 1e12:,g}",
        "" if peaks.fp8 is None else f"{peaks.fp8 / 1e12:,g}",
        "" if peaks.fp32 is None else f"{peaks.fp32 / 1e12:,g}",
        f"{node.devices}, {node.links}",
        _gigabytes(node.link_bytes_per_second),
        _gigabytes(node.network_bytes_per_second),
    )


def _gigabytes(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e9:g}"


def _shares(chips: Sequence[Hardware]) -> list[tuple[str, ...]]:
    names = (*get_args(OperatorKind), "memory", "optimizer", "float8", "float8_grouped", "float8_by_rows")
    rows = [(_words(name), *(f"{dict(iter(chip.efficiency))[name]:.2f}" for chip in chips)) for name in names]
    assert {name for name in Efficiency.model_fields if name != "source"} == set(names), "every share has a row"
    return [*rows, ("source", *(chip.efficiency.origin for chip in chips))]


def _overheads(chips: Sequence[Hardware]) -> list[tuple[str, ...]]:
    rows: dict[str, Callable[[Hardware], str]] = {
        "host time of an operator, us": lambda chip: f"{chip.host.launch_seconds * 1e6:g}",
        "smallest kernel, us": lambda chip: f"{chip.host.kernel_seconds * 1e6:g}",
        "additional host time of a deferred weight gradient, us": lambda chip: f"{chip.host.put_off_seconds * 1e6:g}",
        "gap between two kernels, us": lambda chip: f"{chip.host.gap_seconds * 1e6:g}",
        "idle time of a step, ms": lambda chip: f"{chip.host.step_seconds * 1e3:g}",
        "source": lambda chip: chip.host.origin,
        "to or from host memory, GB/s": lambda chip: _gigabytes(chip.host_link.bytes_per_second),
        "host memory for a device, GB": lambda chip: _gigabytes(chip.host_link.memory_bytes),
        " source": lambda chip: chip.host_link.origin,
        "memory available to tensors, GB": lambda chip: f"{chip.usable_bytes / 1e9:.1f}",
        "  source": lambda chip: chip.overhead.origin,
    }
    return [(name.strip(), *map(shown, chips)) for name, shown in rows.items()]


def _collectives(chips: Sequence[Hardware]) -> list[tuple[str, ...]]:
    """A row for each way to behave, with the chips that share it."""
    named: dict[tuple[str, ...], list[str]] = {}
    for chip in chips:
        for link in chip.collectives:
            peers = f" + {link.peer_seconds * 1e6:g} for each rank" if link.peer_seconds else ""
            latency = f"{link.latency_seconds * 1e6:g}{peers}"
            row = (link.reach, link.kind, latency, f"{link.efficiency:.2f}", link.origin)
            named.setdefault(row, []).append(chip.name)
    rows = sorted(named.items(), key=lambda item: (item[0][0] != "node", KINDS.index(item[0][1])))
    return [(*row, "all" if len(names) == len(chips) else ", ".join(names)) for row, names in rows]


def _points(chips: Sequence[Hardware]) -> list[tuple[str, ...]]:
    curves = [(chip.name, curve) for chip in chips for curve in chip.measured]
    return [(name, _words(curve.operator), f"{len(curve.points)}", curve.source) for name, curve in curves]


def _sources(chip: Hardware) -> list[tuple[str, ...]]:
    rows = [(chip.name, name, vars(chip)[name].source) for name in TABLES]
    by_source: dict[str, list[str]] = {}
    for link in chip.collectives:
        by_source.setdefault(link.source, []).append(f"{link.kind} ({link.reach})")
    return [*rows, *((chip.name, ", ".join(kinds), source) for source, kinds in by_source.items())]


def _words(name: str) -> str:
    return name.replace("_", " ")
