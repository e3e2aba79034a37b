"""Hardware as data: data sheet figures of a chip and its node, measured figures, and the source of each.

In a hardware file (penstock/base/hardware_data, or a user's own), `memory`, `peaks` and `node` hold figures of data
sheets and drivers, the other tables figures that programs reach. Each table has a `source`, which begins with one word:

    measured:    by us, on this chip
    reported:    measured by others; the text names them
    datasheet:   from the vendor
    assumed:     not measured; the text says how it was estimated

`penstock.plan.hardware_file` reads and writes such files, `penstock.plan.rates` turns them into seconds. Nothing here
needs PyTorch. Bandwidths are in one direction. Fast links join the devices of a node: 8 GPUs, or 72 of an NVL72 rack.
The network joins the nodes of a pod (a row of racks, a scalable unit) at full bandwidth, and pods at a part of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType
from typing import Literal, get_args

from penstock.base.errors import HardwareError
from penstock.config.schema import Section, knob
from penstock.layout.grid import MOST_RANKS

Dtype = Literal["bf16", "fp8", "fp32"]

OperatorKind = Literal[
    "product",
    "grouped_forward",
    "grouped_forward_gathered",
    "grouped_input_gradient",
    "grouped_weight_gradient",
    "grouped_weight_gradient_gathered",
    "attention_forward",
    "attention_backward",
]
"""Operators with an efficiency of their own. Gathered: the kernel reads its rows through an index into the tokens."""

AccumulatedKind = Literal["grouped_weight_gradient_accumulated"]
"""A weight gradient that is added to a float32 sum: the same FLOP/s as the plain one, and more bytes."""

CollectiveKind = Literal["all-to-all", "all-gather", "reduce-scatter", "point-to-point", "symmetric", "deep-ep"]
"""Symmetric: our kernels write into other GPUs' memory. Deep-ep: the DeepEP library."""

ORIGINS = ("measured", "reported", "datasheet", "assumed")  # first words of a source

_SOURCE = "Where the figures come from; begins with measured:, reported:, datasheet: or assumed:."


class SourcedTable(Section):
    """A table with one source for its figures."""

    source: str = knob(doc=_SOURCE)

    @property
    def origin(self) -> str:
        """First word of the source."""
        return self.source.partition(":")[0]


class DeviceMemory(SourcedTable):
    """Memory of one device."""

    capacity_bytes: int = knob(doc="All of it, as the driver reports it.", unit="bytes", low=1)


class Peaks(SourcedTable):
    """Data sheet rates of a device."""

    bf16: float = knob(doc="Dense bfloat16 products.", unit="FLOP/s", low=1)
    fp8: float | None = knob(None, doc="Dense 8-bit products.", unit="FLOP/s", low=1)
    fp32: float | None = knob(None, doc="Dense float32 products.", unit="FLOP/s", low=1)
    memory_bytes_per_second: float = knob(doc="Bytes read and written.", unit="bytes/s", low=1)
    power_watts: float | None = knob(None, doc="Power limit of the device.", unit="W", low=1)
    compute_units: float | None = knob(
        None, doc="Units that share the tiles of a product; without them all are always busy.", low=1
    )

    def flops_per_second(self, dtype: Dtype) -> float | None:
        """Dense products in a type, or None where the rate is not known."""
        return {"bf16": self.bf16, "fp8": self.fp8, "fp32": self.fp32}[dtype]


class Node(SourcedTable):
    """Devices that fast links join, and their network to other nodes."""

    devices: int = knob(doc="Devices of a node.", unit="devices", low=1)
    links: Literal["switch", "mesh"] = knob(
        doc="switch: a device has all its bandwidth to any other. mesh: an equal share of it to each other one."
    )
    link_bytes_per_second: float | None = knob(None, doc="Out of one device, over all links.", unit="bytes/s", low=1)
    network_bytes_per_second: float | None = knob(None, doc="Out of one device, to other nodes.", unit="bytes/s", low=1)
    pod_nodes: int | None = knob(None, doc="Nodes that the network joins at full bandwidth; all if not said.", low=1)
    oversubscription: float = knob(1.0, doc="Bandwidth out of the devices of a pod over that out of the pod.", low=1)
    rails: bool = knob(False, doc="Device i of a node reaches devices i of other nodes only; others through its node.")


class MemoryOverhead(SourcedTable):
    """Memory that no tensor can have."""

    context_bytes: int = knob(doc="Driver context and libraries of one process.", unit="bytes", low=0)
    reserve_share: float = knob(doc="Share of the capacity for fragmentation and libraries' buffers.", low=0, high=0.9)


class LaunchOverhead(SourcedTable):
    """Time to start work."""

    launch_seconds: float = knob(
        doc="Host time of one operator outside of a graph, with Python and autograd.", unit="seconds", low=0
    )
    kernel_seconds: float = knob(doc="Device time that the smallest kernel takes.", unit="seconds", low=0)
    put_off_seconds: float = knob(
        0.36e-3, doc="More host time of a weight gradient that is put off: autograd runs twice.", unit="seconds", low=0
    )
    gap_seconds: float = knob(
        1.5e-6, doc="Device time between one kernel and the next, when both were launched.", unit="seconds", low=0
    )
    step_seconds: float = knob(
        5e-3, doc="Idle time of a step, while its figures are read and its rows are copied.", unit="seconds", low=0
    )


class HostLink(SourcedTable):
    """The link between a device and its host's memory, and how much of it the device can use."""

    bytes_per_second: float = knob(
        doc="Of large copies from pinned memory to one device, while as much goes back.", unit="bytes/s", low=1
    )
    memory_bytes: int = knob(
        275 * 10**9, doc="Of the host for one device; assumed if not said: 2 TiB for 8.", unit="bytes", low=1
    )


USUAL_HOST_LINK = HostLink(
    bytes_per_second=50e9, source="assumed: PCIe Gen5 x16, about 50 usable of the 64 GB/s of its data sheet"
)
"""For files without a `host_link` table."""


class Efficiency(SourcedTable):
    """Shares of the peak that operators of training size reach, far from measured points."""

    product: float = knob(doc="Matrix product.", low=0.001, high=1)
    grouped_forward: float = knob(doc="Grouped product, forward.", low=0.001, high=1)
    grouped_forward_gathered: float = knob(doc="The same, rows gathered.", low=0.001, high=1)
    grouped_input_gradient: float = knob(doc="Grouped product, gradient of the input.", low=0.001, high=1)
    grouped_weight_gradient: float = knob(doc="Grouped product, gradient of the weights.", low=0.001, high=1)
    grouped_weight_gradient_gathered: float = knob(doc="The same, rows gathered.", low=0.001, high=1)
    attention_forward: float = knob(doc="Attention, forward; causal counted as half of the square.", low=0.001, high=1)
    attention_backward: float = knob(doc="Attention, backward; 5 products where forward has 2.", low=0.001, high=1)
    memory: float = knob(doc="Of the bandwidth of the memory, by kernels that compute little.", low=0.001, high=1)
    optimizer: float = knob(
        0.72, doc="The same, by operators over many tensors: norm, optimizer, rounding.", low=0.001, high=1
    )
    float8: float = knob(
        0.8, doc="Share of the 8-bit peak of a product over its share of the 16-bit peak.", low=0.001, high=1
    )
    float8_grouped: float = knob(0.74, doc="The same of grouped products.", low=0.001, high=1)
    float8_by_rows: float = knob(
        0.52, doc="The same of either, where both operands have scales of single rows.", low=0.001, high=1
    )

    def of(self, operator: OperatorKind) -> float:
        return float(dict(self)[operator])


class CollectiveRate(SourcedTable):
    """Time of one collective: latency + peers x peer latency + rows x row time + bytes / (efficiency x bandwidth)."""

    kind: CollectiveKind = knob(doc="Which one.")
    reach: Literal["node", "cluster"] = knob(doc="Inside a node, or over several.")
    latency_seconds: float = knob(doc="Of the smallest one, between two ranks.", unit="seconds", low=0)
    peer_seconds: float = knob(0.0, doc="More for each further rank.", unit="seconds", low=0)
    row_seconds: float = knob(0.0, doc="More for each token that is sent by itself (deep-ep).", unit="seconds", low=0)
    efficiency: float = knob(doc="Share of the links' or the network's bandwidth.", low=0.001, high=1)


class MeasuredPoint(Section):
    """One measurement."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its sizes, in the order of the fields."""
        return tuple(value for _, value in self if isinstance(value, int))


class ComputePoint(MeasuredPoint):
    """Speed of a product."""

    dtype: Dtype = knob("bf16", doc="What it computes in.")
    flops_per_second: float = knob(doc="Useful ones.", unit="FLOP/s", low=1)


class ProductPoint(ComputePoint):
    """A matrix product: m x k times k x n."""

    m: int = knob(doc="Rows.", low=1)
    n: int = knob(doc="Columns.", low=1)
    k: int = knob(doc="What is summed over.", low=1)


class GroupedPoint(ComputePoint):
    """A product for each expert: in forward, rows x k times k x n."""

    groups: int = knob(doc="Experts.", low=1)
    rows: int = knob(doc="Rows of each.", low=1)
    n: int = knob(doc="Width of the output.", low=1)
    k: int = knob(doc="Width of the input.", low=1)


class AttentionPoint(ComputePoint):
    """Causal attention of some heads."""

    heads: int = knob(doc="Query heads of all rows of the batch.", low=1)
    queries: int = knob(doc="Positions that ask.", low=1)
    keys: int = knob(doc="Positions that are looked at.", low=1)
    width: int = knob(doc="Of a query and a key.", low=1)
    value_width: int = knob(doc="Of a value.", low=1)


class TransferPoint(MeasuredPoint):
    """Time of a collective."""

    ranks: int = knob(doc="That took part.", low=2)
    node_ranks: int = knob(doc="Of them in one node.", low=1)
    leaving_bytes: int = knob(doc="Out of each rank.", unit="bytes", low=1)
    seconds: float = knob(doc="Of all.", unit="seconds", low=1e-9)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks, nodes and bytes."""
        return self.ranks, self.ranks // self.node_ranks, self.leaving_bytes


POINTS: Mapping[str, type[MeasuredPoint]] = MappingProxyType(
    {
        "product": ProductPoint,
        **{
            name: GroupedPoint
            for name in (*get_args(OperatorKind), *get_args(AccumulatedKind))
            if name.startswith("grouped")
        },
        "attention_forward": AttentionPoint,
        "attention_backward": AttentionPoint,
        **dict.fromkeys(get_args(CollectiveKind), TransferPoint),
    }
)
"""Operators and collectives that can be measured, and the class of their points."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPoints:
    """Measurements of one operator or collective (a key of `POINTS`) from one source."""

    operator: str
    source: str
    points: tuple[MeasuredPoint, ...]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device and its node."""

    name: str
    vendor: Literal["nvidia", "amd", "cpu"]  # cpu for a machine without GPUs
    memory: DeviceMemory  # of one device
    peaks: Peaks
    node: Node
    overhead: MemoryOverhead  # measured, like all that follows
    host: LaunchOverhead  # time to start work
    efficiency: Efficiency  # far from measured points
    collectives: tuple[CollectiveRate, ...]  # at most one of a kind and reach
    measured: tuple[MeasuredPoints, ...]  # points; one operator may have several tables
    host_link: HostLink = USUAL_HOST_LINK
    kernels: str = ""  # compiler's name of the chip, whose launches its kernels take (`sm_90`); empty for a CPU
    driver: str = ""  # name that its driver gives it; empty for a user's file without one

    @property
    def bandwidth(self) -> float:
        """Bytes in a second that kernels which compute little read and write."""
        return self.peaks.memory_bytes_per_second * self.efficiency.memory

    @property
    def usable_bytes(self) -> int:
        """Memory of a device that tensors can have."""
        capacity = self.memory.capacity_bytes
        return int(capacity * (1 - self.overhead.reserve_share)) - self.overhead.context_bytes


@dataclass(frozen=True)
class RankGroup:
    """Ranks of one collective; `node_ranks` of them share a node and `pod_ranks` a pod, and each divides the next."""

    ranks: int
    node_ranks: int
    pod_ranks: int = 0  # 0 for all

    @property
    def nodes(self) -> int:
        return self.ranks // self.node_ranks

    @property
    def pods(self) -> int:
        return self.ranks // (self.pod_ranks or self.ranks)

    @property
    def between_nodes(self) -> "RankGroup":
        """One rank of each node."""
        return RankGroup(self.nodes, 1, self.pod_ranks // self.node_ranks)


def group_of(ranks: int, node: int, pod: int = 0, stride: int = 1) -> RankGroup:
    """Ranks that are `stride` apart, in nodes and pods of so many devices; 0 for no limit.

    The stride is the product of the axes that change faster. Groups follow each other without a gap, so where a node is
    no whole number of groups, some group has its smallest part in a node: the greatest common divisor of both sizes.
    All ranks wait for that group. 12 ranks on nodes of 8 are in parts of 8 and 4: as slow as with 4 in each node.
    """
    in_node, in_pod = (gcd(ranks, max(1, size // stride)) if size else ranks for size in (node, pod))
    in_pod = in_pod if in_pod % in_node == 0 else in_node
    return RankGroup(ranks, in_node, in_pod if in_pod < ranks else 0)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """So many devices of one kind."""

    devices: int
    hardware: Hardware

    @property
    def node_devices(self) -> int:
        """Devices of a node that take part, as many of each."""
        return self.devices // self.nodes

    @property
    def pod_devices(self) -> int:
        """Devices that the network joins at full bandwidth; 0 for all."""
        pod = self.hardware.node.pod_nodes
        return self.node_devices * pod if pod is not None and pod < self.nodes else 0

    @property
    def nodes(self) -> int:
        """Number of nodes: the fewest that share the devices evenly."""
        return _nodes_of(self.devices, self.hardware.node.devices)

    @property
    def speed_unit(self) -> str:
        return "tokens/s/CPU" if self.hardware.vendor == "cpu" else "tokens/s/GPU"

    def group(self, ranks: int, stride: int = 1) -> RankGroup:
        """Ranks that are `stride` apart, the first at the beginning of a node.

        The stride is the product of the axes that change faster; a node holds a whole part of every axis.
        """
        return group_of(ranks, self.node_devices, self.pod_devices, stride)


def with_host_memory(hardware: Hardware, memory_bytes: int) -> Hardware:
    """The hardware with so much memory of the host for each device."""
    link = hardware.host_link.model_copy(update={"memory_bytes": memory_bytes})
    return replace(hardware, host_link=link)


def cluster_of(devices: int, hardware: Hardware) -> Cluster:
    """So many devices: a part of one node, or as many of each of several nodes; else a HardwareError."""
    each = hardware.node.devices
    if devices > MOST_RANKS:
        raise HardwareError("the cluster is too large", got=f"{devices:,} devices", allowed=f"at most {MOST_RANKS:,}")
    nodes = _nodes_of(devices, each)
    if nodes > 1 and 2 * devices < nodes * each:
        low = devices // each * each
        raise HardwareError(
            f"{devices} {hardware.name} cannot be shared evenly among nodes of {each}, more than half of each",
            allowed=f"up to {each}, a multiple of it, or such as {3 * each // 4} of each node",
            fix=f"say {low}x{hardware.name} or {low + each}x{hardware.name}, or give a file with another node.devices",
        )
    return Cluster(devices=devices, hardware=hardware)


def _nodes_of(devices: int, each: int) -> int:
    """The fewest nodes of at most `each` devices that hold as many each: 4 nodes of 64 for 256 of NVL72 racks."""
    nodes = -(-devices // each)
    while devices % nodes:
        nodes += 1
    return nodes
