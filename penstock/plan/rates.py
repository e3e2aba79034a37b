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
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple, cast

from penstock.base.errors import HardwareError
from penstock.plan.hardware import AccumulatedKind, ComputePoint, Dtype, Hardware, OperatorKind

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
