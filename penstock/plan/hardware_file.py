"""Read, check and write hardware files.

The tables are those of `penstock.plan.hardware.Hardware`. Lists are arrays of tables:

    [[collective]]
    kind = "all-to-all"
    ...
    [[measured]]
    operator = "product"
    source = "measured: ..."
    points = [{m = 8192, n = 8192, k = 8192, flops_per_second = 793e12}]

A file with `like = "H200"` has only what differs from that chip: tables that it leaves out are that chip's, with
"assumed: as on H200" before their source, and so are the measured products of a chip with the same kernels and peak.
`kernels = "sm_90"` names the compiler's target, whose launches the kernels take; without it, the file's name does.

An error is one line that begins with the file and the place in it.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w

from penstock.base.devices import PACKAGED, chip_named, chips
from penstock.base.errors import ConfigError, HardwareError, asked, did_you_mean, did_you_mean_path
from penstock.base.files import read_toml, write_whole
from penstock.config.schema import Section, fields_of, knob
from penstock.config.tree import build, parse_overrides, settle
from penstock.plan.hardware import (
    ORIGINS,
    POINTS,
    USUAL_HOST_LINK,
    Cluster,
    CollectiveRate,
    DeviceMemory,
    Efficiency,
    Hardware,
    HostLink,
    LaunchOverhead,
    MeasuredPoints,
    MemoryOverhead,
    Node,
    Peaks,
    SourcedTable,
    TransferPoint,
    cluster_of,
    with_host_memory,
)

_LISTS = ("collective", "measured")

AnySection = TypeVar("AnySection", bound=Section)


class _Head(Section):
    """A file without its lists."""

    name: str = knob(doc="By which people know it.")
    vendor: Literal["nvidia", "amd", "cpu"] = knob(doc="Whose it is.")
    driver: str = knob("", doc="Name that its driver gives it; packaged files have one.")
    memory: DeviceMemory = knob(doc="Memory of a device.")
    peaks: Peaks = knob(doc="What it can do at most.")
    node: Node = knob(doc="What fast links join.")
    overhead: MemoryOverhead = knob(doc="Memory that no tensor can have.")
    host: LaunchOverhead = knob(doc="What starting work costs.")
    efficiency: Efficiency = knob(doc="Shares of the peak.")
    host_link: HostLink = knob(USUAL_HOST_LINK, doc="The way to the host's memory.")
    kernels: str = knob("", doc="Compiler's name of the chip, whose launches the kernels take: sm_90, gfx942.")


def known_hardware() -> tuple[str, ...]:
    """Names of the packaged hardware, in alphabetical order."""
    return tuple(sorted(path.stem.upper() for path in PACKAGED.glob("*.toml")))


def load_hardware(name_or_path: str) -> Hardware:
    """Hardware by name (`H200` in any case, or the driver's `NVIDIA H200`), or by the path of a TOML file."""
    path = Path(name_or_path)
    if path.suffix == ".toml" or os.sep in name_or_path:
        return read_hardware(path)
    known = known_hardware()
    chip = chip_named(name_or_path)
    name = name_or_path.upper() if chip is None else chip.pattern
    if name not in known:
        raise HardwareError(
            f"no hardware is called {name_or_path!r}",
            allowed=f"{', '.join(known)}, or a file that ends in .toml",
            fix=did_you_mean(name, known)
            or "describe it in a file: `penstock calibrate --output mine.toml` on such a machine",
        )
    return read_hardware(PACKAGED / f"{name.lower()}.toml")


def parse_cluster(text: str, network: str | None = None, host_gb: float | None = None) -> Cluster:
    """A cluster from a text such as `768xMI300X` or `8xmine.toml`; a HardwareError if it is none.

    `network` is that of `with_network`, `host_gb` a device's share of host memory in GB; None for the file's.
    """
    match = re.fullmatch(r"\s*(?P<devices>[0-9]{1,40})\s*[xX]\s*(?P<hardware>\S.*?)\s*", text)
    if match is None or int(match["devices"]) < 1:
        loose = re.fullmatch(r"\s*(\d+)[\s*]*(\w.*)", text)
        raise HardwareError(
            "a cluster is a number of devices, x, and their name",
            got=repr(text),
            allowed="768xMI300X, 8xmine.toml",
            fix=asked([f"{loose[1]}x{loose[2]}"]) if loose is not None and int(loose[1]) else None,
        )
    hardware = load_hardware(match["hardware"])
    if host_gb is not None:
        hardware = with_host_memory(hardware, int(host_gb * 1e9))
    cluster = cluster_of(int(match["devices"]), hardware)
    return cluster if network is None else with_network(cluster, network)


NETWORK = ("pod_nodes", "oversubscription", "rails")
"""Fields of `Node` that say how nodes are joined, which one chip has in as many ways as there are clusters."""


def with_network(cluster: Cluster, text: str) -> Cluster:
    """The cluster with another network, such as `pod_nodes=32,oversubscription=4`; a HardwareError if it is none."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part.partition("=")[0] not in NETWORK or "=" not in part:
            allowed = "pod_nodes=32, oversubscription=4, rails=true"
            raise HardwareError("the network has no such part", got=repr(part), allowed=allowed)
    try:
        tree = parse_overrides(Node, parts)
    except ConfigError as error:
        raise HardwareError(f"network: {error.what}", got=error.got, allowed=error.allowed, fix=error.fix) from error
    said = _built(Node, _as_table(cluster.hardware.node) | tree, "network: ")
    if said.oversubscription > 1 and said.pod_nodes is None:
        raise HardwareError("oversubscription is between pods, and there are none", fix="say pod_nodes=N as well")
    return replace(cluster, hardware=replace(cluster.hardware, node=said))


def read_hardware(path: Path) -> Hardware:
    """Hardware from a file; a HardwareError if it cannot be read, or a key is missing, unknown or wrong."""
    tree = _read_tables(path)
    lists = {name: tree.pop(name, []) for name in _LISTS}
    for name, tables in lists.items():
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise HardwareError(f"{path}: {name} is no list of tables", fix=f"write [[{name}]]")
    like = _relative(tree.pop("like", None), path)
    if like is not None:
        tree = _as_tree(_assumed_as(like)) | tree
    head = _built(_Head, tree, f"{path}: ")
    for name, table in head:
        if isinstance(table, SourcedTable):
            _check_source(table.source, f"{path}: {name}.source")
    kernels = head.kernels or _target_of(head.name) or ("" if like is None else like.kernels)
    _check_kernels(kernels, head, path)
    collectives = _collectives(lists["collective"], path)
    measured = [_measured(table, f"{path}: measured {at}") for at, table in enumerate(lists["measured"], start=1)]
    if like is not None:
        keys = {(collective.kind, collective.reach) for collective in collectives}
        theirs = _assumed_as(like)
        collectives += [other for other in theirs.collectives if (other.kind, other.reach) not in keys]
        if (kernels, head.peaks.bf16) == (like.kernels, like.peaks.bf16):
            measured += [entry for entry in theirs.measured if POINTS[entry.operator] is not TransferPoint]
    fields = dict(head) | {"kernels": kernels}
    return Hardware(**fields, collectives=tuple(collectives), measured=tuple(measured))


def _read_tables(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except FileNotFoundError as error:
        raise HardwareError(f"there is no hardware file {path}", fix=did_you_mean_path(path)) from error
    except OSError as error:
        raise HardwareError(f"cannot read hardware file {path}: {error.strerror}") from error
    except ValueError as error:
        raise HardwareError(f"{path} is not TOML: {error}") from error


def _relative(like: str | None, path: Path) -> Hardware | None:
    """The chip that a file refers to; itself cannot refer to that file."""
    if like is None:
        return None
    if like not in known_hardware() or path == PACKAGED / f"{like.lower()}.toml":
        raise HardwareError(
            f"{path}: like is no other chip of the package", got=repr(like), allowed=", ".join(known_hardware())
        )
    return load_hardware(like)


def _assumed_as(other: Hardware) -> Hardware:
    """The hardware as an assumption about one that resembles it."""

    def source(text: str) -> str:
        return text if text.startswith("assumed: as on ") else f"assumed: as on {other.name} ({text})"

    fields: dict[str, Any] = {
        name: value.model_copy(update={"source": source(value.source)})
        for name, value in vars(other).items()
        if isinstance(value, SourcedTable)
    }
    collectives = tuple(
        collective.model_copy(update={"source": source(collective.source)}) for collective in other.collectives
    )
    measured = tuple(replace(entry, source=source(entry.source)) for entry in other.measured)
    return replace(other, **fields, collectives=collectives, measured=measured)


def _as_tree(hardware: Hardware) -> dict[str, Any]:
    """The tables of a file, without its name, target and lists."""
    return {name: _as_table(value) for name, value in vars(hardware).items() if isinstance(value, SourcedTable)} | {
        "vendor": hardware.vendor
    }


def _target_of(name: str) -> str:
    chip = chip_named(name)
    return "" if chip is None else chip.target


def _check_kernels(kernels: str, head: _Head, path: Path) -> None:
    """A GPU has kernels of a chip that is known."""
    known = sorted({chip.target for chip in chips()})
    if head.vendor != "cpu" and kernels not in known:
        raise HardwareError(
            f"{path}: no chip is called {head.name}, so the file has to say whose kernels it takes",
            got=f"kernels = {kernels!r}",
            allowed=", ".join(known),
            fix=f'write kernels = "{known[0] if head.vendor == "amd" else "sm_90"}"',
        )


def write_hardware(path: Path, hardware: Hardware, comment: Sequence[str] = ()) -> None:
    """Write a file that reads back as the same hardware, whole or not at all; `comment` are its first lines."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, hardware_text(hardware, comment))
    except OSError as error:
        raise HardwareError(f"hardware cannot be written to {path}", got=error.strerror) from error


def hardware_text(hardware: Hardware, comment: Sequence[str] = ()) -> str:
    """The text of a file that reads back as the same hardware."""
    head = {name: vars(hardware)[name] for name in _Head.model_fields if vars(hardware)[name] != ""}
    tree = {name: _as_table(value) if isinstance(value, Section) else value for name, value in head.items()}
    if hardware.collectives:
        tree["collective"] = [_as_table(collective) for collective in hardware.collectives]
    if hardware.measured:
        tree["measured"] = [
            {"operator": entry.operator, "source": entry.source, "points": [_as_table(point) for point in entry.points]}
            for entry in hardware.measured
        ]
    return "".join(f"# {line}\n" for line in comment) + tomli_w.dumps(tree)


def _as_table(section: Section) -> dict[str, Any]:
    return {name: value for name, value in section if value is not None}


def _built(section: type[AnySection], tree: Mapping[str, Any], location: str) -> AnySection:
    try:
        return build(section, settle(fields_of(section), tree))
    except ConfigError as error:
        raise HardwareError(f"{location}{error.what}", got=error.got, allowed=error.allowed, fix=error.fix) from error


def _check_source(source: str, location: str) -> None:
    if source.partition(":")[0] not in ORIGINS or not source.partition(":")[2].strip():
        raise HardwareError(
            f"{location} does not say what kind of source it is",
            got=repr(source[:60]),
            allowed=", ".join(f"{origin}: ..." for origin in ORIGINS),
        )


def _collectives(tables: Sequence[Mapping[str, Any]], path: Path) -> list[CollectiveRate]:
    collectives: list[CollectiveRate] = []
    for number, table in enumerate(tables, start=1):
        location = f"{path}: collective {number}"
        rate = _built(CollectiveRate, table, f"{location}: ")
        _check_source(rate.source, f"{location}: source")
        if any((rate.kind, rate.reach) == (other.kind, other.reach) for other in collectives):
            raise HardwareError(f"{location}: {rate.kind} in a {rate.reach} comes twice", fix="leave one out")
        collectives.append(rate)
    return collectives


def _measured(table: Mapping[str, Any], location: str) -> MeasuredPoints:
    keys = ("operator", "source", "points")
    if (strange := next((key for key in table if key not in keys), None)) is not None:
        raise HardwareError(f"{location}: {strange} is an unknown key", allowed=", ".join(keys))
    if (missing := next((key for key in keys if key not in table), None)) is not None:
        raise HardwareError(f"{location}: {missing} is missing")
    operator, source, points = (table[key] for key in keys)
    if operator not in POINTS:
        raise HardwareError(f"{location}: operator has an unknown value", got=repr(operator), allowed=", ".join(POINTS))
    _check_source(str(source), f"{location}: source")
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        raise HardwareError(f"{location}: points is no list of tables")
    built = (_built(POINTS[operator], point, f"{location}, point {at}: ") for at, point in enumerate(points, start=1))
    return MeasuredPoints(operator=operator, source=source, points=tuple(built))
