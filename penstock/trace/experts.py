"""How many of the rows that experts were given held tokens, and which expert had how many, as far as a trace says.

A dispatcher that does not wait for the host gives experts a buffer for the worst case, and so the shapes of grouped
products say how large the buffer is. What was in it is told, in this order, by

    all-to-all      the rows that came by the exchange before, from its recorded splits
    configuration   tokens of a micro-batch times choices of each: what a rank gets in the mean over ranks

Not every all-to-all in dispatch brings rows: counts go before them, and the weights of routing behind them. Rows are
what has the type and the width of what experts multiply, or is of 8 bits. A dispatcher that waits for the host hands
over the rows that came and no others, so all of them count.

How evenly experts are loaded, in rows and in milliseconds, rank by rank.

Rows of a rank's experts are told, in this order, by

    the shapes of grouped products    [rows, in] x [experts, in, out]: what the experts computed
    the sizes of all-to-alls          rows come unevenly to the experts and go home evenly, or the other way round on
                                      the way back, so the less even side of each is that of the experts

Where rows are padded to a bound (a dispatch that the host does not wait for), shapes are even and say nothing;
whichever of the two is less even is believed. A layer's backward pass and its recompute repeat the loads of its forward
pass, so each list of loads counts once. Milliseconds are those of the kernels of grouped products, and padding does not
hide in them. A run's own metrics know every expert, not only ranks: `recorded_loads` reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from penstock.base.errors import TraceError
from penstock.base.spans import Span
from penstock.trace.calls import CollectiveCalls
from penstock.trace.collectives import CollectiveTimes
from penstock.trace.events import NONE, Flags, Floats, GpuEvents, HostEvents, HostKind, Integers, Trace
from penstock.trace.kernel_names import Category, specific_category
from penstock.trace.phases import PASSES, Phases

AGREE = 0.005
"""Shares that differ by less are the same."""

_PRODUCTS = (Category.GROUPED, Category.GROUPED_WEIGHTS)
_MOST_ROWS = 2**40
_INDEX = {"_GroupedGemm": 3, "_ExpertFfn": 5, "_Float8ExpertFfn": 5}
"""Of our own: the argument that says which rows of the first are taken, if it is there."""

_COUNTS_STAY = 2
"""The first `dispatch.sync_free` at which row counts stay on the device (penstock.config.dispatch_rules)."""

PACKED_ITEM = 8
"""Bytes that packed rows are moved by (penstock.moe.dispatch.payload); no other rows are of such numbers."""

_WIDTHS = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "c10::Float8_e4m3fn": 1, "c10::Float8_e4m3fnuz": 1}


@dataclass(frozen=True, kw_only=True)
class UsedRows:
    """Rows of grouped products that held tokens.

    Attributes:
        share: of the rows that they were given, as a mean over all.
        source: what says so; `shapes` if nothing does: then all rows count.
    """

    share: float
    source: Literal["all-to-all", "configuration", "shapes"]

    @property
    def told(self) -> str:
        """A line for people."""
        match self.source:
            case "all-to-all":
                return f"grouped products: {self.share:.1%} of their rows held tokens, by the all-to-alls before them"
            case "configuration":
                return f"grouped products: {self.share:.1%} of their rows held tokens, by the configuration (mean rank)"
            case "shapes":
                return "grouped products: every row that they were given counts; nothing says how many held tokens"


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedProducts:
    """Grouped products of a matrix and a stack of weights, in the order of time.

    Attributes:
        row: in `Trace.host`.
        rows: of the matrix.
        width: numbers of one row of it.
        row_bytes: of one row of it; 0 if its type is not known.
    """

    row: Integers
    rows: Integers
    width: Integers
    row_bytes: Integers


class _Shapes(msgspec.Struct, gc=False):
    dims: list[Any] = msgspec.field(name="Input Dims", default_factory=list)
    types: list[Any] = msgspec.field(name="Input type", default_factory=list)


_SHAPES = msgspec.json.Decoder(_Shapes)


def is_product(name: str) -> bool:
    """Whether a kernel or operator multiplies rows of experts."""
    return specific_category(name) in _PRODUCTS


def grouped_products(trace: Trace) -> GroupedProducts:
    """The grouped products whose shapes were recorded."""
    host = trace.host
    is_named = np.array([is_product(name) for name in trace.names], dtype=bool)[host.name_id]
    found = []
    for row in np.flatnonzero(is_named & (host.kind == HostKind.OPERATOR)).tolist():
        rows, width, row_bytes = _sizes(host, row)
        if rows != NONE:
            found.append((row, rows, width, row_bytes))
    columns = np.array(found, dtype=np.int64).reshape(-1, 4)
    return GroupedProducts(row=columns[:, 0], rows=columns[:, 1], width=columns[:, 2], row_bytes=columns[:, 3])


def packed_row_bytes(width: Integers) -> Integers:
    """Bytes of a row that travels in 8 bits with its scales, by the numbers of it.

    As penstock.kernels.float8.quantized lays it out. Four bytes for 128 numbers and one for 32 come to the same.
    """
    values = -(-width // 16) * 16
    return -(-(values + -(-width // 32)) // 32) * 32


def _sizes(host: HostEvents, row: int) -> tuple[int, int, int]:
    """Rows of a grouped product, numbers and bytes of one; NONE if its inputs are others (gradients of weights)."""
    shapes = _shapes(host.raw[row])
    if shapes is None:
        return NONE, 0, 0
    rows, width = shapes.dims[0]
    kind = shapes.types[0] if shapes.types and isinstance(shapes.types[0], str) else ""
    place = _INDEX.get(host.name(row), NONE)
    index = shapes.dims[place] if 0 < place < len(shapes.dims) else None
    if isinstance(index, list) and len(index) == 1 and isinstance(index[0], int):
        (rows,) = index
    return (rows if 0 <= rows < _MOST_ROWS else NONE), width, width * _WIDTHS.get(kind, 0)


def _shapes(raw: bytes | None) -> _Shapes | None:
    """Inputs of an operator, if the first two are rows and matrices of groups."""
    try:
        shapes = _SHAPES.decode(raw or b"{}")
        first, second, *_ = shapes.dims
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
    is_grouped = isinstance(first, list) and isinstance(second, list) and (len(first), len(second)) == (2, 3)
    are_sizes = is_grouped and all(isinstance(one, int) and 0 <= one < _MOST_ROWS for one in first)
    return shapes if are_sizes else None


def used_rows(trace: Trace, calls: CollectiveCalls, rank: int, phases: Phases) -> UsedRows | None:
    """Which share of the rows of grouped products held tokens; None if the trace has no grouped product.

    Args:
        trace: of one rank.
        calls: what ranks sent each other, this one among them.
        rank: its number.
        phases: of the trace.
    """
    products = grouped_products(trace)
    if not len(products.rows):
        return None
    given = float(products.rows.mean())
    came = _came(trace, calls, rank, phases, products) if rows_travel(trace.header) else None
    if rows_are_exact(trace.header):
        return UsedRows(share=1.0, source="shapes" if came is None else "all-to-all")
    configured = configured_rows(trace.header)
    for source, rows in (("all-to-all", came), ("configuration", configured)):
        if rows is not None and given and rows / given < 1 + AGREE:
            share = 1.0 if rows / given > 1 - AGREE else rows / given
            return UsedRows(share=share, source="all-to-all" if source == "all-to-all" else "configuration")
    return UsedRows(share=1.0, source="shapes")


def _came(trace: Trace, calls: CollectiveCalls, rank: int, phases: Phases, products: GroupedProducts) -> float | None:
    """Mean rows that exchanges in dispatch brought, forward; None if they do not say."""
    mine = np.flatnonzero((calls.rank == calls.ranks.index(rank)) & is_exchange(calls))
    names = phases.name_id[calls.gpu_row[mine]]
    is_dispatch = np.array([name == Span.DISPATCH for name in phases.names], dtype=bool)[names]
    forward = mine[is_dispatch & (phases.pass_id[calls.gpu_row[mine]] == PASSES.index("forward"))]
    came = received_rows(trace, calls, forward, products)
    came = came[np.isfinite(came)]
    return float(came.mean()) if len(came) else None


def is_exchange(calls: CollectiveCalls) -> Any:
    """Which calls are all-to-alls."""
    named = [("all_to_all" in name or "alltoall" in name) for name in calls.names]
    return np.array(named, dtype=bool)[calls.name_id]


def received_rows(trace: Trace, calls: CollectiveCalls, rows: Integers, products: GroupedProducts) -> Floats:
    """Rows of experts that exchanges brought: as they count their parts, or by bytes; nan where they brought none.

    What is not of the type of the product's rows, nor of 8 bits, or does not divide by their width is something else
    that travels: counts, weights of routing. Where types are not known, an exchange that counts its parts in rows is
    believed.

    Args:
        trace: of one rank.
        calls: with those of that rank.
        rows: of `calls`, all of that rank.
        products: of the trace. The first one behind an exchange takes what it brought, and says how wide a row is.
    """
    launched_us = _launched_us(trace, calls, rows)
    behind = np.searchsorted(trace.host.start_us[products.row], launched_us)
    width, operand_bytes = np.append(products.width, 0)[behind], np.append(products.row_bytes, 0)[behind]
    row_bytes = _row_bytes(trace, calls.item_bytes[rows], width, operand_bytes)
    came_bytes = calls.received_bytes[rows]
    by_bytes = np.divide(came_bytes, row_bytes, out=np.full(len(rows), np.nan), where=row_bytes > 0)
    by_bytes[by_bytes != np.floor(by_bytes)] = np.nan
    parts = np.where(calls.received_rows[rows] == NONE, np.nan, calls.received_rows[rows])
    is_known = (operand_bytes > 0) & np.isfinite(calls.item_bytes[rows])
    found: Floats = np.where(np.isnan(parts) | (is_known & np.isnan(by_bytes)), by_bytes, parts)
    # In one type, weights may divide by the width by chance: one number for each row of the exchange before.
    fits = np.flatnonzero(np.isfinite(found))
    fits = fits[np.argsort(launched_us[fits], kind="stable")]
    before, after = fits[:-1], fits[1:]
    are_weights = (behind[before] == behind[after]) & (came_bytes[before] == came_bytes[after] * width[after])
    found[after[are_weights & np.isnan(parts[after])]] = np.nan
    return found


def _row_bytes(trace: Trace, item_bytes: Floats, width: Integers, operand_bytes: Integers) -> Floats:
    """Bytes of a row in messages of such numbers; 0 if they are not rows. Of ours in 8 bits it has scales behind it."""
    is_plain = (item_bytes * width == operand_bytes) | (item_bytes == 1)
    plain = np.where(is_plain, item_bytes * width, 0.0)
    is_packed = _packs(trace.header) & (item_bytes == PACKED_ITEM)
    return np.where(is_packed, packed_row_bytes(width), np.nan_to_num(plain)).astype(np.float64)


def _launched_us(trace: Trace, calls: CollectiveCalls, rows: Integers) -> Floats:
    """When the host launched some calls of one rank; infinite if that is not in the trace."""
    launch = trace.gpu.launch[calls.gpu_row[rows]]
    found: Floats = np.append(trace.host.start_us, np.inf)[launch]
    return found


def configured_rows(header: Mapping[str, Any]) -> float | None:
    """Rows of a rank and layer in the mean, by the configuration in a recording of ours; None if rows are dropped."""
    config = _config(header)
    try:
        training, parallel, moe = config["training"], config["parallel"], config["model"]["moe"]
        is_plain = parallel["tensor"] == parallel["expert_tensor"] == 1 and not moe["balance"]["capacity_factor"]
        tokens = training["micro_batch"] * training["sequence_length"] / parallel["context"]
        return float(tokens * moe["top_k"]) if is_plain else None
    except (KeyError, TypeError, ArithmeticError):
        return None


def rows_travel(header: Mapping[str, Any]) -> bool:
    """Whether what all-to-alls bring are rows of experts, as they are without a configuration of ours that says else.

    Other dispatchers send tokens once to several experts, and padding travels like rows.
    """
    config = _config(header)
    try:
        pads = config["model"]["moe"]["balance"]["pad_to_capacity"]
        return not config or (config["dispatch"]["method"] == "all-to-all" and not pads)
    except (KeyError, TypeError):
        return not config


def rows_are_exact(header: Mapping[str, Any]) -> bool:
    """Whether experts are given the rows that came and no more room, by the configuration in a recording of ours."""
    try:
        return rows_travel(header) and bool(_config(header)["dispatch"]["sync_free"] < _COUNTS_STAY)
    except (KeyError, TypeError):
        return False


def _packs(header: Mapping[str, Any]) -> bool:
    """Whether rows of some layers travel in 8 bits, by the configuration in a recording of ours."""
    try:
        return bool(_config(header)["float8"]["dispatch"] != "none")
    except (KeyError, TypeError):
        return False


def _config(header: Mapping[str, Any]) -> Any:
    """The configuration in a recording of ours, or nothing."""
    told = header.get("penstock")
    return (told.get("config") if isinstance(told, Mapping) else None) or {}


# -------------------------------------------------------------------------------------------------------------- experts

METRICS = "metrics.jsonl"
"""In the folder of a run."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLoad:
    """Loads of ranks' experts.

    Attributes:
        ranks: the columns.
        loads: [layer of a step, rank], in the order of time, repetitions left out; empty if unknown.
        unit: of `loads`: (token, expert) pairs, or tokens once for each rank; bytes if the width is not known.
        source: where the loads come from.
        kernel_us: [rank], time of grouped products.
    """

    ranks: tuple[int, ...]
    loads: Floats
    unit: Literal["rows", "bytes"]
    source: Literal["grouped products", "all-to-all", "none"]
    kernel_us: Floats

    @property
    def max_over_mean(self) -> float | None:
        """Load of the fullest rank over the mean, as a mean of layers and steps; 1 is even."""
        if len(self.ranks) < 2 or not len(self.loads):
            return None
        return float(_unevenness(self.loads).mean())

    @property
    def kernel_max_over_mean(self) -> float | None:
        """The same of time, all layers and steps together."""
        mean = self.kernel_us.mean()
        return float(self.kernel_us.max() / mean) if len(self.ranks) > 1 and mean > 0 else None

    @property
    def fullest_rank(self) -> int | None:
        """Whose experts have most to do, by rows, else by time; None if nobody's have."""
        even = 1.001
        if (self.max_over_mean or 0.0) > even:
            return self.ranks[int(self.loads.sum(axis=0).argmax())]
        if (self.kernel_max_over_mean or 0.0) > even:
            return self.ranks[int(self.kernel_us.argmax())]
        return None

    def as_json(self) -> dict[str, Any]:
        """JSON values; what is not known is null."""
        loads = self.loads.astype(np.int64).tolist() if len(self.loads) else None
        return {
            "max_over_mean": self.max_over_mean,
            "tokens": loads if self.unit == "rows" else None,
            "bytes": loads if self.unit == "bytes" else None,
            "source": self.source,
            "fullest_rank": self.fullest_rank,
            "kernel_us": {str(rank): float(us) for rank, us in zip(self.ranks, self.kernel_us, strict=True)},
            "kernel_max_over_mean": self.kernel_max_over_mean,
        }


def expert_load(traces: Mapping[int, Trace], collectives: CollectiveTimes) -> ExpertLoad:
    """Loads of the experts of some ranks.

    Args:
        traces: by rank.
        collectives: of the same traces.
    """
    ranks = collectives.calls.ranks
    by_shape = _lists([grouped_products(traces[rank]).rows.tolist() for rank in ranks])
    by_bytes, unit = _loads_of_exchanges(collectives)
    is_by_shape = len(by_shape) > 0 and (not len(by_bytes) or _mean(by_shape) >= _mean(by_bytes) * 0.999)
    return ExpertLoad(
        ranks=ranks,
        loads=_distinct(by_shape if is_by_shape else by_bytes),
        unit="rows" if is_by_shape else unit,
        source="grouped products" if is_by_shape else "all-to-all" if len(by_bytes) else "none",
        kernel_us=np.array([_product_us(traces[rank]) for rank in ranks]),
    )


def _unevenness(loads: Floats) -> Floats:
    mean = loads.mean(axis=1)
    return np.divide(loads.max(axis=1), mean, out=np.ones(len(loads)), where=mean > 0)


def _mean(loads: Floats) -> float:
    return float(_unevenness(loads).mean())


def _distinct(loads: Floats) -> Floats:
    """Each list of loads once, where it comes first."""
    if not len(loads):
        return loads
    _, first = np.unique(loads, axis=0, return_index=True)
    return loads[np.sort(first)]


def _lists(rows: Sequence[list[int]]) -> Floats:
    """Lists of all ranks side by side; nothing if they do not have equally many."""
    if len({len(one) for one in rows}) != 1:
        return np.empty((0, len(rows)))
    return np.array(rows, dtype=np.float64).T


def _product_us(trace: Trace) -> float:
    """Time of the kernels of grouped products, known by their own names or by the operator that launched them."""
    kernels = trace.gpu.take(trace.gpu.is_kernel)
    multiplies = np.array([is_product(name) for name in trace.names], dtype=bool)
    chosen = multiplies[kernels.name_id] | _launched_by(kernels, trace.host, multiplies)
    return float(kernels.duration_us[chosen].sum())


def _launched_by(kernels: GpuEvents, host: HostEvents, wanted: Flags) -> Flags:
    """Kernels that an operator of a wanted name launched."""
    operators = np.flatnonzero(wanted[host.name_id] & (host.kind == HostKind.OPERATOR) & (host.external_id != NONE))
    launched: Flags = np.isin(kernels.external_id, host.external_id[operators])
    return launched


def _loads_of_exchanges(collectives: CollectiveTimes) -> tuple[Floats, Literal["rows", "bytes"]]:
    """What ranks' experts had, by the sizes of all-to-alls that all ranks took part in."""
    calls, met = collectives.calls, collectives.meetings.met
    exchanges = is_exchange(calls)
    whole = (met != NONE).all(axis=1) & (len(calls.ranks) > 1)
    rows = met[whole]
    rows = rows[exchanges[rows[:, 0]]]
    in_rows = len(rows) > 0 and bool(((calls.sent_rows[rows] != NONE) & (calls.received_rows[rows] != NONE)).all())
    sent = (calls.sent_rows[rows] if in_rows else calls.sent_bytes[rows]).astype(np.float64)
    received = (calls.received_rows[rows] if in_rows else calls.received_bytes[rows]).astype(np.float64)
    told = np.isfinite(sent).all(axis=1) & np.isfinite(received).all(axis=1)
    sent, received = sent[told], received[told]
    less_even = _unevenness(received) >= _unevenness(sent)
    return np.where(less_even[:, None], received, sent), "rows" if in_rows else "bytes"


# ----------------------------------------------------------------------------------------------------------- metrics


@dataclass(frozen=True, kw_only=True)
class RecordedLoad:
    """What a run wrote down about one step.

    Attributes:
        layers: for each MoE layer, load of the fullest expert over the mean.
        ranks: load of the fullest expert rank over the mean, as a mean of layers; None if ranks do not share experts.
    """

    step: int
    layers: dict[int, float]
    ranks: float | None


class _Layer(msgspec.Struct, gc=False):
    layer: int
    max_over_mean: float


class _Line(msgspec.Struct, gc=False):
    step: int
    layers: list[_Layer] = []
    expert_rank_load_max_over_mean: float | None = None


_LINE = msgspec.json.Decoder(_Line)


def recorded_loads(folder: Path) -> tuple[RecordedLoad, ...]:
    """Loads of all steps of a run; none if it has no metrics. A last line that is cut, by a kill, is left out.

    Args:
        folder: of the run.

    Raises:
        TraceError: its metrics cannot be read.
    """
    path = folder / METRICS
    if not path.is_file():
        return ()
    try:
        lines = _lines(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise TraceError(f"cannot read {path} as metrics", got=error) from error
    return tuple(
        RecordedLoad(
            step=line.step,
            layers={one.layer: one.max_over_mean for one in line.layers},
            ranks=line.expert_rank_load_max_over_mean,
        )
        for line in lines
    )


def _lines(text: bytes) -> list[_Line]:
    """All lines; whether the last one is whole is told by the newline behind it."""
    whole, _, cut = text.rpartition(b"\n")
    lines = [_LINE.decode(line) for line in whole.splitlines() if line.strip()]
    try:
        return [*lines, _LINE.decode(cut)] if cut.strip() else lines
    except msgspec.DecodeError:
        return lines
