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
        ("host time of what is put off, us", *(f"{chip.host.put_off_seconds * 1e6:g}" for chip in chips)),
        ("between two kernels, us", *(f"{chip.host.gap_seconds * 1e6:g}" for chip in chips)),
        ("still in a step, ms", *(f"{chip.host.step_seconds * 1e3:g}" for chip in chips)),
        ("source", *(chip.host.origin for chip in chips)),
        ("to the host's memory, or from it, GB/s", *(_gigabytes(chip.host_link.bytes_per_second) for chip in chips)),
        ("source", *(chip.host_link.origin for chip in chips)),
        ("memory that tensors can have, GB", *(f"{chip.usable_bytes / 1e9:.1f}" for chip in chips)),
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

Written by `make docs` from the files in `penstock/plan/hardware_data/`; change them there.

A plan knows a machine by a hardware file. What data sheets promise and what programs reach are kept apart, and each
table of a file says where its figures come from: *measured* by us on this chip, *reported* by others that measured it,
*datasheet*, or *assumed*. **H200 is the only chip that we have measured.** What stands for the others is promised,
reported or assumed, and so is everything that crosses nodes.

```bash
penstock calibrate --output mine.toml                  # one device; a laptop takes some seconds, a GPU about a minute
penstock calibrate --output eight.toml --processes 8   # and the links between eight
```

A file of one's own goes wherever a chip's name goes: `penstock plan deepseek-v3 --on 16xmine.toml` ([plan](plan.md)).
Capacity is in bytes as drivers report it. A node is what fast links join: 8 GPUs, or the 72 of an NVL72 rack. In a
*mesh* a GPU has an equal share of its links to each other one, so fewer ranks have less. Bandwidths are of one
direction.

## Promised
"""

_REACHED = """
## Reached

Shares of the peak by operators of training size. A grouped product is that of a layer's experts; *gathered* looks its
rows up among the tokens while it loads them. Attention counts half of the square where it is causal, and 5 products in
backward where forward has 2. The rows *memory* and *optimizer* are shares of the
memory's bandwidth: by kernels that compute little, and by those of the update. The way *to the host's memory* is of one
device and one direction, while as much goes in the other: it decides what [`offload`](plan.md#host-memory) costs.
"""

_COLLECTIVES = """
Collectives take a latency, something more for each further rank, and their bytes at a share of the links' bandwidth (in
a node) or the network's (in a cluster, which is over several nodes).
"""

_POINTS = """
## Measured points

Where a point is near, it counts more than the share: the roofline is corrected by how far it is off at the points,
weighted by nearness ([rates.py](../penstock/plan/rates.py), [transfers.py](../penstock/plan/transfers.py)). Every
answer says whether a measured point stood near.
"""

_SOURCES = """
## Sources
"""
