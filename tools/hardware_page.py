"""docs/hardware.md: the hardware files that come with the package, as tables with the kind of each source."""

from collections.abc import Sequence
from typing import get_args

from penstock.plan.hardware import CollectiveKind, Efficiency, Hardware, OperatorKind
from penstock.plan.hardware_file import known_hardware, load_hardware

KINDS = get_args(CollectiveKind)

TABLES = ("memory", "peaks", "node", "overhead", "host", "host_link", "efficiency")
"""Tables of a file that have one source each."""


def hardware_page() -> str:
    """The whole page."""
    chips = [load_hardware(name) for name in known_hardware()]
    shares = table(("share of the peak", *(chip.name for chip in chips)), _shares(chips))
    reached = [chip for chip in chips if chip.measured]
    return "\n".join(
        [
            _HEAD,
            *table(_PROMISED, [_promised(chip) for chip in chips]),
            _REACHED,
            *shares,
            "",
            *table(("", *(chip.name for chip in chips)), _overheads(chips)),
            _COLLECTIVES,
            *table(("in a", "collective", "latency, us", "share", "source", "chips"), _collectives(chips)),
            _POINTS,
            *table(("chip", "operator", "points", "source"), [row for chip in reached for row in _points(chip)]),
            _SOURCES,
            *table(("chip", "table", "source"), [row for chip in chips for row in _sources(chip)]),
            "",
        ]
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


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
    return [
        ("host time of an operator, us", *(f"{chip.host.launch_seconds * 1e6:g}" for chip in chips)),
        ("smallest kernel, us", *(f"{chip.host.kernel_seconds * 1e6:g}" for chip in chips)),
        (
            "additional host time of a deferred weight gradient, us",
            *(f"{chip.host.put_off_seconds * 1e6:g}" for chip in chips),
        ),
        ("gap between two kernels, us", *(f"{chip.host.gap_seconds * 1e6:g}" for chip in chips)),
        ("idle time of a step, ms", *(f"{chip.host.step_seconds * 1e3:g}" for chip in chips)),
        ("source", *(chip.host.origin for chip in chips)),
        ("to or from host memory, GB/s", *(_gigabytes(chip.host_link.bytes_per_second) for chip in chips)),
        ("host memory for a device, GB", *(_gigabytes(chip.host_link.memory_bytes) for chip in chips)),
        ("source", *(chip.host_link.origin for chip in chips)),
        ("memory available to tensors, GB", *(f"{chip.usable_bytes / 1e9:.1f}" for chip in chips)),
        ("source", *(chip.overhead.origin for chip in chips)),
    ]


def _collectives(chips: Sequence[Hardware]) -> list[tuple[str, ...]]:
    """A row for each way to behave, with the chips that share it."""
    named: dict[tuple[str, ...], list[str]] = {}
    for chip in chips:
        for one in chip.collectives:
            peers = f" + {one.peer_seconds * 1e6:g} for each rank" if one.peer_seconds else ""
            latency = f"{one.latency_seconds * 1e6:g}{peers}"
            row = (one.reach, one.kind, latency, f"{one.efficiency:.2f}", one.origin)
            named.setdefault(row, []).append(chip.name)
    rows = sorted(named.items(), key=lambda item: (item[0][0] != "node", KINDS.index(item[0][1])))
    return [(*row, "all" if len(names) == len(chips) else ", ".join(names)) for row, names in rows]


def _points(chip: Hardware) -> list[tuple[str, ...]]:
    return [(chip.name, _words(one.operator), f"{len(one.points)}", one.source) for one in chip.measured]


def _sources(chip: Hardware) -> list[tuple[str, ...]]:
    rows = [(chip.name, name, vars(chip)[name].source) for name in TABLES]
    by_source: dict[str, list[str]] = {}
    for one in chip.collectives:
        by_source.setdefault(one.source, []).append(f"{one.kind} ({one.reach})")
    return [*rows, *((chip.name, ", ".join(kinds), source) for source, kinds in by_source.items())]


def _words(name: str) -> str:
    return name.replace("_", " ")


_HEAD = """# Hardware

Written by `make docs` from the files in `penstock/base/hardware_data/`; change them there.

The planner describes a machine by a hardware file. This page shows the files that come with Penstock, and how to
measure your own machine:

```bash
penstock calibrate --output mine.toml                  # one device; some seconds on a laptop, about a minute on a GPU
penstock calibrate --output eight.toml --processes 8   # also the links between eight devices
penstock plan deepseek-v3 --on 16xmine.toml            # a plan for this machine
```

A hardware file has data sheet values and reached values in separate tables, and the source of each table: *measured* by
us on this chip, *reported* by others, *datasheet*, or *assumed*. **H200 is the only chip that we have measured.** All
values of other chips, and all values of links between nodes, are from data sheets, reported or assumed.

A file may name any chip. `like = "H200"` takes everything that it does not say itself from another file, marked as
assumed, and `kernels = "sm_90"` names the chip whose kernels and launches are used; a plan prints that it assumes
them. The world need not fill its last nodes: `256xGB200` are 4 racks of 72 with 64 used of each. A new chip
is one file: [the recipe](../CONTRIBUTING.md#add-a-chip).

Capacity is in bytes as drivers report it. A *node* is a group of GPUs with fast links: 8 GPUs, or the 72 GPUs of an
NVL72 rack. In a *mesh* each GPU divides its links equally among the other GPUs, so a group of fewer ranks uses only a
part of them. Bandwidths are of one direction. How nodes are joined (pods, oversubscription, rails) is that of a cluster
and not of its chip: `penstock plan --network` or `[node]` of a file says it ([plan.md](plan.md#the-network)).

## Data sheet values
"""

_REACHED = """
## Reached values

The first table has shares of the peak that operators of training size reach. A *grouped* product is that of a layer's
experts; a *gathered* one reads its rows from the tokens while it loads them. Causal attention counts half of the
square, and its backward counts 5 products where forward has 2. The rows *memory* and *optimizer* are shares of the
memory bandwidth, reached by memory-bound kernels and by the optimizer update. The rows *float8* are the share of the
8-bit peak relative to the share of the 16-bit peak. In the second table, the bandwidth *to or from host memory* is
that of one device in one direction while both directions are in use; it determines the cost of
[`offload`](plan.md#host-memory).
"""

_COLLECTIVES = """
The time of a collective is a latency, an additional latency for each rank, and the time of its bytes at a share of the
bandwidth: that of the links inside a node, or that of the network in a cluster of several nodes.
"""

_POINTS = """
## Measured points

For some operators a file has measured points. The planner corrects the roofline by its error at these points,
weighted by their distance from the shape ([rates.py](../penstock/plan/rates.py),
[transfers.py](../penstock/plan/transfers.py)).
"""

_SOURCES = """
## Sources
"""
