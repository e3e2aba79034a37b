"""Seconds of the operators of a step on a device, from a hardware file.

An answer starts as a roofline: the longer of the FLOPs at the operator's stated share of the peak and its bytes at the
memory's rate. Each measured point of the operator tells how far the roofline is off at its sizes, and the answer is
corrected by their mean, weighted by nearness:

    roofline x product of (measured_i / roofline_i) ^ weight_i,      weight_i = d_i^-4 / (sum of d^-4 + log(4)^-4)

with d_i the sum of |log(size / measured size)|. At a measured point the answer is the measurement; far from all points
it is the roofline, as if a point that agrees with it were always a factor of 4 away. `Estimate.basis` names the case.

FLOPs of attention are those of its products, half of them if causal: 2 products in forward, 5 in backward, which
computes the scores again. A weight gradient that is added to a float32 sum reads and writes that sum.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal, NamedTuple, cast

from penstock.base.errors import HardwareError
from penstock.config.parallel import NamedDispatcher
from penstock.plan.hardware import (
    AccumulatedKind,
    CollectiveKind,
    CollectiveRate,
    ComputePoint,
    Dtype,
    Hardware,
    OperatorKind,
    RankGroup,
    TransferPoint,
)

TILE = 256  # rows and columns of a product that a unit computes at once
SPLIT = 4096  # of the depth of a product whose tiles are divided again
SPARE = 1.2  # rate with all units at work, if power did not limit it, over the stated rate

NEAR = math.log(4)  # a measured point farther away counts less than the roofline

EXACT = 1e-9

BYTES: dict[Dtype, int] = {"bf16": 2, "fp8": 1, "fp32": 4}  # of one factor
RESULT_BYTES: dict[Dtype, int] = {"bf16": 2, "fp8": 2, "fp32": 4}  # of one number of a product's result
ACCUMULATED_BYTES = 8  # of one number of a float32 sum that is read and written

GroupedProduct = Literal[
    "forward",
    "forward_gathered",
    "input_gradient",
    "weight_gradient",
    "weight_gradient_gathered",
    "weight_gradient_accumulated",
]
"""Products of experts, with the names of `penstock.kernels.tuning.GemmProduct`."""

Pass = Literal["forward", "backward"]
OpSizes = tuple[int, ...]


class Estimate(NamedTuple):
    """Seconds of device time, and the source of the measured point that is near, or else of the share of the peak."""

    seconds: float
    basis: Literal["measured", "roofline"]
    source: str


class MeasuredRatio(NamedTuple):
    """A measured point over the roofline: logarithms of its sizes and of the ratio, and its source."""

    logs: tuple[float, ...]
    log_ratio: float
    source: str


def corrected(seconds: float, sizes: Sequence[int], points: Sequence[MeasuredRatio], source: str) -> Estimate:
    """A roofline in seconds, corrected by measured points; `sizes` are above 0 and in the points' order."""
    logs = [math.log(size) for size in sizes]
    nearest, from_where = math.inf, source
    total, weights = 0.0, NEAR**-4
    for point in points:
        distance = sum(abs(a - b) for a, b in zip(logs, point.logs, strict=True))
        if distance < nearest:
            nearest, from_where = distance, point.source
        if distance < EXACT:
            return Estimate(seconds * math.exp(point.log_ratio), "measured", point.source)
        # The roofline itself is a point at distance NEAR with ratio 1: it adds NEAR**-4 to the weights.
        weight = distance**-4
        total, weights = total + weight * point.log_ratio, weights + weight
    basis: Literal["measured", "roofline"] = "measured" if nearest < NEAR else "roofline"
    return Estimate(seconds * math.exp(total / weights), basis, from_where if basis == "measured" else source)


class Rates:
    """Estimates of operators on one kind of hardware; each is computed once.

    All raise a HardwareError if the peak of a type is not known.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.product = cache(self._product)
        self.grouped = cache(self._grouped)
        self.attention = cache(self._attention)
        self._points: dict[tuple[str, Dtype], tuple[MeasuredRatio, ...]] = {}

    def by_chunks(self, direction: Pass, flops: float, moved_bytes: float, dtype: Dtype = "bf16") -> Estimate:
        """A kernel of linear attention, at the stated share of the peak that attention reaches; none is measured."""
        seconds = self._roofline(flops, moved_bytes, cast(OperatorKind, f"attention_{direction}"), dtype)
        return Estimate(seconds, "roofline", self.hardware.efficiency.source)

    def memory_bound(self, moved_bytes: float, *, is_update: bool = False) -> Estimate:
        """A kernel that computes little, such as a norm; `is_update` is the optimizer over many tensors."""
        efficiency = self.hardware.efficiency
        moving = self._moving(moved_bytes)
        if is_update:
            moving *= efficiency.memory / efficiency.optimizer
        return Estimate(self.hardware.host.kernel_seconds + moving, "roofline", efficiency.source)

    def _moving(self, moved_bytes: float) -> float:
        return moved_bytes / self.hardware.bandwidth

    def _roofline(
        self,
        flops: float,
        moved_bytes: float,
        operator: OperatorKind,
        dtype: Dtype,
        *,
        by_rows: bool = False,
        busy: float = 1.0,
    ) -> float:
        """Seconds by the stated share of the peak, of which a kernel with few tiles reaches `busy`."""
        peak = self.hardware.peaks.flops_per_second(dtype)
        if peak is None:
            raise HardwareError(
                f"nothing is known of {dtype} products on {self.hardware.name}",
                fix=f"write peaks.{dtype} into a hardware file of your own",
            )
        efficiency = self.hardware.efficiency
        share = efficiency.of(operator)
        if dtype == "fp8":
            of_squares = efficiency.float8_grouped if operator.startswith("grouped") else efficiency.float8
            share *= efficiency.float8_by_rows if by_rows else of_squares
        computing = flops / (peak * share * busy)
        return max(computing, self._moving(moved_bytes) + self.hardware.host.kernel_seconds)

    def _busy(self, groups: int, rows: int, columns: int, depth: int) -> float:
        """Share of a chip's rate that so many products of rows x columns reach, summed over `depth`.

        All units work as long as the one with most tiles. They reach the stated rate, which power limits, with
        1 / SPARE of the units at work. A product with few tiles and a large depth divides the depth as well.
        """
        units = self.hardware.peaks.compute_units
        if units is None:
            return 1.0
        tiles: float = groups * -(-rows // TILE) * -(-columns // TILE) * max(1, depth // SPLIT)
        return min(1.0, SPARE * tiles / (-(-tiles // units) * units))

    def _corrections(
        self, name: str, dtype: Dtype, flops: Callable[[OpSizes], float], roofline: Callable[[OpSizes], float]
    ) -> tuple[MeasuredRatio, ...]:
        """Ratios of the measured points of an operator, computed once."""
        if (name, dtype) not in self._points:
            self._points[name, dtype] = tuple(
                MeasuredRatio(
                    tuple(map(math.log, point.sizes)),
                    math.log(flops(point.sizes) / point.flops_per_second / roofline(point.sizes)),
                    measured.source,
                )
                for measured in self.hardware.measured
                if measured.operator == name
                for point in cast(tuple[ComputePoint, ...], measured.points)
                if point.dtype == dtype
            )
        return self._points[name, dtype]

    def _product(self, m: int, n: int, k: int, dtype: Dtype = "bf16", *, by_rows: bool = False) -> Estimate:
        """A matrix product: m x k times k x n. In 8 bits, `by_rows`: both operands have scales of single rows."""

        def roofline(sizes: OpSizes) -> float:
            m, n, k = sizes
            moved = BYTES[dtype] * (m * k + n * k) + RESULT_BYTES[dtype] * m * n
            busy = self._busy(1, m, n, k)
            return self._roofline(2.0 * m * n * k, moved, "product", dtype, by_rows=by_rows, busy=busy)

        points = self._corrections("product", dtype, lambda sizes: 2.0 * math.prod(sizes), roofline)
        return corrected(roofline((m, n, k)), (m, n, k), points, self.hardware.efficiency.source)

    def _grouped(
        self,
        product: GroupedProduct,
        groups: int,
        rows: int,
        n: int,
        k: int,
        dtype: Dtype = "bf16",
        *,
        by_rows: bool = False,
    ) -> Estimate:
        """A product for each expert, each with `rows` rows, the mean of uneven loads.

        `n` and `k` are the widths of the forward product's output and input.
        """
        is_sum = product == "weight_gradient_accumulated"
        operator = cast(OperatorKind, "grouped_weight_gradient" if is_sum else f"grouped_{product}")
        name = cast("OperatorKind | AccumulatedKind", f"grouped_{product}")

        def roofline(sizes: OpSizes) -> float:
            groups, rows, n, k = sizes
            weights, given, results = groups * n * k, groups * rows * k, groups * rows * n
            if product in ("forward", "forward_gathered", "input_gradient"):
                moved = BYTES[dtype] * (weights + given) + RESULT_BYTES[dtype] * results
                tiles = (groups, rows, k, n) if product == "input_gradient" else (groups, rows, n, k)
            else:
                moved = BYTES[dtype] * (given + results) + RESULT_BYTES[dtype] * weights
                tiles = groups, n, k, rows
            # An accumulated gradient reads and writes the float32 sum instead of writing a result.
            extra = (ACCUMULATED_BYTES - RESULT_BYTES[dtype]) * weights if is_sum else 0
            busy = self._busy(*tiles)
            computing = self._roofline(2.0 * rows * weights, moved, operator, dtype, by_rows=by_rows, busy=busy)
            return computing + self._moving(extra)

        sizes = (groups, rows, n, k)
        points = self._corrections(name, dtype, lambda sizes: 2.0 * math.prod(sizes), roofline)
        return corrected(roofline(sizes), sizes, points, self.hardware.efficiency.source)

    def _attention(
        self,
        direction: Pass,
        heads: int,
        queries: int,
        keys: int,
        widths: tuple[int, int],
        *,
        causal: bool = True,
        dtype: Dtype = "bf16",
    ) -> Estimate:
        """Attention of the query heads of all rows of a micro-batch on a device.

        `queries` are the last positions of the keys, if causal. `widths` are those of a query or key, and of a value.
        """
        operator = cast(OperatorKind, f"attention_{direction}")

        def flops(sizes: OpSizes, causal: bool = True) -> float:
            heads, queries, keys, width, value_width = sizes
            products = width + value_width if direction == "forward" else 3 * width + 2 * value_width
            return 2.0 * heads * pairs(queries, keys, causal) * products

        def roofline(sizes: OpSizes, causal: bool = True) -> float:
            heads, queries, keys, width, value_width = sizes
            rows = heads * (queries + keys) * (width + value_width)
            moved = BYTES[dtype] * rows * (1 if direction == "forward" else 2)
            return self._roofline(flops(sizes, causal), moved, operator, dtype)

        sizes = (heads, queries, keys, *widths)
        points = self._corrections(operator, dtype, flops, roofline)
        return corrected(roofline(sizes, causal), sizes, points, self.hardware.efficiency.source)


def pairs(queries: int, keys: int, causal: bool) -> float:
    """Pairs of positions that attention computes; if causal, the triangle of the last queries counts as half."""
    return queries * (keys - queries / 2) if causal else float(queries * keys)


# Seconds of collectives, and of the tokens of a layer to their experts by each dispatcher.
#
# A collective takes a latency, a latency for each further rank, and its bytes at a share of the bandwidth of its ranks.
# In a node with a switch that is all of a device's links; in a mesh only the links to ranks that take part. Over
# several nodes, bytes inside and between nodes travel at the same time, and the slower counts:
#
#     all-to-all      of a rank's W parts, W - L cross and L - 1 go to its own node               (W ranks, L in a node)
#     all-gather,     every part enters each other node once, through one of its L ranks, and is spread inside from
#     reduce-scatter  there; so a rank takes 1/L of the crossing bytes
#     all-reduce      a reduce-scatter and an all-gather
#
# Bytes that leave a pod take the network's bandwidth over its oversubscription: of an all-to-all those to ranks of
# other pods; of an all-gather and a reduce-scatter every part once for each other pod, over the ranks of the pod; a
# message whole. Where the network has rails, an all-to-all moves what crosses to the right device of its node first,
# over links.
#
# Measured points correct this as those above. docs/dispatch.md explains how many copies of a token each dispatcher
# sends. Routing is taken as even; the caller adds the surplus of a busier rank.


CollectiveName = Literal["all-to-all", "all-gather", "reduce-scatter", "all-reduce", "point-to-point"]

COLLECTIVES: Mapping[str, CollectiveName] = MappingProxyType(
    {
        "alltoall_base_": "all-to-all",
        "alltoall_": "all-to-all",
        "_allgather_base_": "all-gather",
        "allgather_": "all-gather",
        "_reduce_scatter_base_": "reduce-scatter",
        "reduce_scatter_": "reduce-scatter",
    }
)
"""Torch's collectives; others are all-reduces, or cost as much."""

DispatchMethod = Literal[NamedDispatcher, "deep-ep"]

DispatchDirection = Literal["dispatch", "combine"]

NOTHING = Estimate(0.0, "measured", "measured: one rank sends nothing")


@dataclass(frozen=True, kw_only=True)
class TokenTraffic:
    """Tokens that go to the experts of a layer.

    `stride` is of benchmarks that force balance: the k-th choice of token t is expert (t * top_k + k) * stride, modulo
    their number. 1 takes the experts in turn. 0 is for a router, whose choices are equally likely.
    """

    tokens: int
    copy_bytes: int  # of one token: hidden size times bytes of a number
    experts: int
    top_k: int
    expert_tensor: int = 1  # neighbouring ranks that share the matrices of each expert; each of them gets the token
    n_group: int = 1  # equal groups of neighbouring experts, of which a token chooses from `topk_group`
    topk_group: int = 1
    stride: int = 0


class TransferTimes:
    """Estimates of transfers on one kind of hardware; each is computed once.

    All raise a HardwareError if the hardware file has no such collective.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self.collective = cache(self._collective)
        self.dispatch = cache(self._dispatch)
        self._rate = cache(self._find)
        self._corrections = cache(self._make_corrections)

    def _collective(self, kind: CollectiveName, buffer_bytes: float, group: RankGroup) -> Estimate:
        """One collective; point-to-point is from one rank of the group to another.

        `buffer_bytes` is the larger buffer of a rank: the result of an all-gather, the input of a reduce-scatter or
        all-reduce, the input of an all-to-all with the rank's own part, or the message.
        """
        ranks, inside, nodes = group.ranks, group.node_ranks, group.nodes
        if ranks == 1:
            return NOTHING
        if kind == "all-reduce":
            both = [self.collective(part, buffer_bytes, group) for part in ("reduce-scatter", "all-gather")]
            return Estimate(both[0].seconds + both[1].seconds, both[0].basis, both[0].source)
        if kind == "point-to-point":
            near, far = (buffer_bytes, 0.0) if nodes == 1 else (0.0, buffer_bytes)
            return self._carry(kind, near, far, group)
        if kind == "all-to-all":
            return self._carry(
                kind, buffer_bytes * (inside - 1) / ranks, buffer_bytes * (ranks - inside) / ranks, group
            )
        return self._carry(kind, buffer_bytes * (ranks - 1) / ranks, buffer_bytes * (nodes - 1) / nodes / inside, group)

    def _carry(
        self, kind: CollectiveKind, near: float, far: float, group: RankGroup, far_rows: float = 0.0
    ) -> Estimate:
        """`near` bytes leave each rank for its own node and `far` bytes for others, at the same time.

        `far_rows` are the tokens of the `far` bytes, where each is sent by itself.
        """
        if group.nodes == 1:
            seconds = self._inside(kind, near, group)
            sizes = (group.ranks, 1, max(1, round(near)))
            return corrected(seconds, sizes, self._corrections(kind), self._rate(kind, "node").source)
        rate = self._rate(kind, "cluster")
        if kind == "all-to-all" and self._hardware.node.rails:
            near += far * (group.node_ranks - 1) / group.node_ranks
        # Bytes inside a node travel at the same time as bytes between nodes, and those between pods.
        slower = max(1.0, self._hardware.node.oversubscription * _leaves_pod(kind, group))
        crossing = slower * far / (self._network() * rate.efficiency) + far_rows * rate.row_seconds
        staying = self._inside(kind, near, group, starts=False) if near else 0.0
        start = rate.latency_seconds + rate.peer_seconds * (group.ranks - 2)
        sizes = (group.ranks, group.nodes, max(1, round(near + far)))
        return corrected(start + max(crossing, staying), sizes, self._corrections(kind), rate.source)

    def _inside(self, kind: CollectiveKind, leaving: float, group: RankGroup, *, starts: bool = True) -> float:
        """Seconds of bytes inside a node; without the latency if a slower transfer has it."""
        rate, node = self._rate(kind, "node"), self._hardware.node
        links = self._known(node.link_bytes_per_second, "link")
        if node.links == "mesh" and node.devices > 1:
            peers = 1 if kind == "point-to-point" else max(1, group.node_ranks - 1)
            # A mesh gives each other device an equal share of the links.
            links *= min(1.0, peers / (node.devices - 1))
        start = rate.latency_seconds + rate.peer_seconds * (group.node_ranks - 2) if starts else 0.0
        return start + leaving / (links * rate.efficiency)

    def _network(self) -> float:
        return self._known(self._hardware.node.network_bytes_per_second, "network")

    def _known(self, bandwidth: float | None, what: str) -> float:
        if bandwidth is None:
            raise HardwareError(
                f"the {what} bandwidth of {self._hardware.name} is not known",
                fix=f"write node.{what}_bytes_per_second into a hardware file of your own",
            )
        return bandwidth

    def _find(self, kind: CollectiveKind, reach: Literal["node", "cluster"]) -> CollectiveRate:
        for collective in self._hardware.collectives:
            if (collective.kind, collective.reach) == (kind, reach):
                return collective
        raise HardwareError(
            f"nothing is known of {kind} in a {reach} of {self._hardware.name}",
            fix="measure it with `penstock calibrate --processes N`, or write a [[collective]] into a file of your own",
        )

    def _make_corrections(self, kind: CollectiveKind) -> tuple[MeasuredRatio, ...]:
        ratios = []
        for measured in self._hardware.measured:
            for point in measured.points if measured.operator == kind else ():
                transfer = cast(TransferPoint, point)
                seconds = self._model(kind, transfer)
                logs = tuple(map(math.log, transfer.sizes))
                ratios.append(MeasuredRatio(logs, math.log(transfer.seconds / seconds), measured.source))
        return tuple(ratios)

    def _model(self, kind: CollectiveKind, point: TransferPoint) -> float:
        """The uncorrected seconds of a point; all of its leaving bytes go the point's way."""
        group = RankGroup(point.ranks, point.node_ranks)
        if group.nodes == 1:
            return self._inside(kind, point.leaving_bytes, group)
        rate = self._rate(kind, "cluster")
        share = (group.ranks - group.node_ranks) / (group.ranks - 1) if kind == "all-to-all" else 1.0
        crossing = share * point.leaving_bytes / (self._network() * rate.efficiency)
        return rate.latency_seconds + rate.peer_seconds * (group.ranks - 2) + crossing

    def _dispatch(
        self, method: DispatchMethod, direction: DispatchDirection, traffic: TokenTraffic, group: RankGroup
    ) -> Estimate:
        """Tokens to their experts, which `group` shares evenly, or the sums back.

        Backward does the same in the other order. The dispatcher symmetric stays inside a node.
        """
        if group.ranks == 1:
            return NOTHING
        token_bytes = float(traffic.tokens * traffic.copy_bytes)
        if method == "all-to-all":
            return self.collective("all-to-all", token_bytes * traffic.top_k * traffic.expert_tensor, group)
        if method == "all-gather":
            kind: CollectiveName = "all-gather" if direction == "dispatch" else "reduce-scatter"
            return self.collective(kind, token_bytes * group.ranks, group)
        if group.nodes == 1:
            kind_inside: CollectiveKind = "deep-ep" if method == "deep-ep" else "symmetric"
            return self._carry(
                kind_inside, token_bytes * copies(traffic, group.ranks, traffic.expert_tensor), 0.0, group
            )
        assert method != "symmetric", "symmetric dispatch stays inside a node"
        return self._over_nodes(method, traffic, group)

    def spread(self, traffic: TokenTraffic, group: RankGroup) -> Estimate:
        """Tokens that came to a node, to the ranks of the node that need them; `group` shares the experts."""
        inside = RankGroup(group.node_ranks, group.node_ranks)
        kind: CollectiveKind = "all-to-all" if self._hardware.vendor == "cpu" else "symmetric"  # CPUs share no memory
        return self._carry(kind, _spread_bytes(traffic, group), 0.0, inside)

    def _over_nodes(self, method: DispatchMethod, traffic: TokenTraffic, group: RankGroup) -> Estimate:
        """Once to each node, and from there to its ranks: one after the other, or at the same time (DeepEP)."""
        tokens = traffic.tokens * copies(traffic, group.nodes, -(-traffic.expert_tensor // group.node_ranks))
        crossing = tokens * traffic.copy_bytes
        if method == "deep-ep":
            return self._carry("deep-ep", _spread_bytes(traffic, group), crossing, group, tokens)
        between = self._carry("all-to-all", 0.0, crossing, group.between_nodes)
        if group.node_ranks == 1:
            return between
        inside = self.spread(traffic, group)
        return Estimate(between.seconds + inside.seconds, between.basis, between.source)


def _leaves_pod(kind: CollectiveKind, group: RankGroup) -> float:
    """Of the bytes that leave nodes, the share that leaves pods."""
    if group.pods == 1:
        return 0.0
    if kind in ("all-gather", "reduce-scatter"):
        pod_nodes = group.nodes // group.pods
        return (group.pods - 1) / group.pods / ((group.nodes - 1) / group.nodes * pod_nodes)
    if kind == "point-to-point":
        return 1.0
    return (group.ranks - group.pod_ranks) / (group.ranks - group.node_ranks)


def _spread_bytes(traffic: TokenTraffic, group: RankGroup) -> float:
    """Bytes of copies inside nodes that leave a rank, which has as many tokens of its own node as of each other one."""
    copied = copies(traffic, group.ranks, traffic.expert_tensor)
    # L - 1 of the W - 1 other ranks are in a token's node, and the ranks of a node copy for all of the nodes.
    return traffic.tokens * traffic.copy_bytes * copied * (group.node_ranks - 1) / (group.ranks - 1) * group.nodes


def copies(traffic: TokenTraffic, places: int, sharers: int = 1) -> float:
    """Ranks or nodes other than its own that a token needs, with experts evenly on `places` of them.

    `sharers` neighbouring places hold parts of the same experts.
    """
    # Where more ranks share an expert than there are places, all of them need every token.
    return (places - 1) * reached(traffic, max(1, places // sharers))


@cache
def reached(traffic: TokenTraffic, places: int) -> float:
    """The probability that one of `places` that share the experts holds an expert of a token, or a part of one."""
    places = min(places, traffic.experts)
    if traffic.stride:
        return _needed_by_stride(traffic.experts, traffic.top_k, places, traffic.stride) / places
    groups, kept = traffic.n_group, min(traffic.topk_group, traffic.n_group)
    held, size = traffic.experts // places, traffic.experts // groups
    # A place holds whole groups, or a part of one. Of its groups some are kept, and of those no expert may be chosen.
    local_groups, each = max(1, held // size), min(held, size)
    missed = sum(
        math.comb(local_groups, some)
        * math.comb(groups - local_groups, kept - some)
        * math.comb(kept * size - some * each, traffic.top_k)
        for some in range(min(local_groups, kept) + 1)
        if groups - local_groups >= kept - some
    )
    return 1 - missed / math.comb(groups, kept) / math.comb(kept * size, traffic.top_k)


@cache
def _needed_by_stride(experts: int, top_k: int, places: int, stride: int) -> float:
    """Places of a token's experts: the mean over the tokens until the experts repeat."""
    each, tokens = experts // places, experts // math.gcd(experts, top_k)
    chosen = (((token * top_k + choice) * stride for choice in range(top_k)) for token in range(tokens))
    return sum(len({expert % experts // each for expert in token_experts}) for token_experts in chosen) / tokens
