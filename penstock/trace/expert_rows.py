"""How many of the rows that experts were given held tokens, and which expert had how many, as far as a trace says.

A dispatcher that does not wait for the host gives experts a buffer for the worst case, and so the shapes of grouped
products say how large the buffer is. What was in it is told, in this order, by

    all-to-all      the rows that came by the exchange before, from its recorded splits
    configuration   tokens of a micro-batch times choices of each: what a rank gets in the mean over ranks

Not every all-to-all in dispatch brings rows: counts go before them, and the weights of routing behind them. Rows are
what has the type and the width of what experts multiply, or is of 8 bits. A dispatcher that waits for the host hands
over the rows that came and no others, so all of them count.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from penstock.base.spans import Span
from penstock.trace.calls import Calls
from penstock.trace.events import NONE, Floats, HostEvents, HostKind, Integers, Trace
from penstock.trace.kernel_names import Part, telling
from penstock.trace.phases import PASSES, Phases

AGREE = 0.005
"""Shares that differ by less are the same."""

_PRODUCTS = (Part.GROUPED, Part.GROUPED_WEIGHTS)
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
class Products:
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
    return telling(name) in _PRODUCTS


def products_of(trace: Trace) -> Products:
    """The grouped products whose shapes were recorded."""
    host = trace.host
    is_named = np.array([is_product(name) for name in trace.names], dtype=bool)[host.name_id]
    found = []
    for row in np.flatnonzero(is_named & (host.kind == HostKind.OPERATOR)).tolist():
        rows, width, row_bytes = _sizes(host, row)
        if rows != NONE:
            found.append((row, rows, width, row_bytes))
    columns = np.array(found, dtype=np.int64).reshape(-1, 4)
    return Products(row=columns[:, 0], rows=columns[:, 1], width=columns[:, 2], row_bytes=columns[:, 3])


def packed_row_bytes(width: Integers) -> Integers:
    """Bytes of a row that travels in 8 bits with its scales, by the numbers of it.

    As penstock.kernels.float8.packed_rows lays it out. Four bytes for 128 numbers and one for 32 come to the same.
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


def used_rows(trace: Trace, calls: Calls, rank: int, phases: Phases) -> UsedRows | None:
    """Which share of the rows of grouped products held tokens; None if the trace has no grouped product.

    Args:
        trace: of one rank.
        calls: what ranks sent each other, this one among them.
        rank: its number.
        phases: of the trace.
    """
    products = products_of(trace)
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


def _came(trace: Trace, calls: Calls, rank: int, phases: Phases, products: Products) -> float | None:
    """Mean rows that exchanges in dispatch brought, forward; None if they do not say."""
    mine = np.flatnonzero((calls.rank == calls.ranks.index(rank)) & is_exchange(calls))
    names = phases.name_id[calls.gpu_row[mine]]
    is_dispatch = np.array([name == Span.DISPATCH for name in phases.names], dtype=bool)[names]
    forward = mine[is_dispatch & (phases.pass_id[calls.gpu_row[mine]] == PASSES.index("forward"))]
    came = received_rows(trace, calls, forward, products)
    came = came[np.isfinite(came)]
    return float(came.mean()) if len(came) else None


def is_exchange(calls: Calls) -> Any:
    """Which calls are all-to-alls."""
    named = [("all_to_all" in name or "alltoall" in name) for name in calls.names]
    return np.array(named, dtype=bool)[calls.name_id]


def received_rows(trace: Trace, calls: Calls, rows: Integers, products: Products) -> Floats:
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


def _launched_us(trace: Trace, calls: Calls, rows: Integers) -> Floats:
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
