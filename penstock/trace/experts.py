"""Load of the experts: rows that held tokens, and how evenly ranks are loaded, in rows and in milliseconds.

A dispatcher that does not wait for the host gives the experts a buffer for the worst case, so the shapes of grouped
products are the size of the buffer. The number of rows that held tokens comes, in this order, from

    all-to-all      the recorded splits of the preceding exchange
    configuration   tokens of a micro-batch times experts per token: the mean over ranks

Not every all-to-all in dispatch carries rows: counts precede them, routing weights follow. Rows have the dtype and
width of the experts' input, or 8 bits. A dispatcher that waits for the host passes exactly the received rows.

The load of each rank's experts comes, in this order, from

    the shapes of grouped products    [rows, in] x [experts, in, out]
    the sizes of all-to-alls          rows arrive unevenly and return evenly (in backward the opposite), so the less
                                      even side of each all-to-all is that of the experts

The less even of the two is used, because padded buffers have even shapes. Backward and recomputation repeat the loads
of forward, so each list of loads counts once. Milliseconds are those of the grouped products' kernels, which padding
does not hide. The run's metrics have every expert, not only ranks: `recorded_loads` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from penstock.base.errors import TraceError
from penstock.base.spans import Span
from penstock.trace.calls import CollectiveCalls
from penstock.trace.collectives import CollectiveTimes
from penstock.trace.events import NONE, Floats, HostEvents, HostKind, Integers, Trace, decoded_or
from penstock.trace.kernel_names import Category, specific_category
from penstock.trace.phases import PASSES, Phases
from penstock.trace.work import BYTES

AGREE = 0.005  # shares that differ by less are equal
EVEN = 1.001  # a load of the fullest rank over the mean up to this is even
_PRODUCTS = (Category.GROUPED, Category.GROUPED_WEIGHTS)
_MOST_ROWS = 2**40  # larger sizes are damage
_INDEX = {"_GroupedGemm": 3, "_ExpertFfn": 5, "_Float8ExpertFfn": 5}
"""Of Penstock's functions: the argument that selects rows of the first argument, if present."""

_COUNTS_STAY = 2  # first `dispatch.sync_free` at which row counts stay on the device (penstock.config.dispatcher)

PACKED_ITEM = 8
"""Element size in bytes in which packed rows are sent (penstock.moe.dispatch.contract); other rows never have it."""


RowSource = Literal["all-to-all", "configuration", "shapes"]


@dataclass(frozen=True, kw_only=True)
class UsedRows:
    """Rows of grouped products that held tokens."""

    share: float  # of all their rows, as a mean
    source: RowSource  # of the share; `shapes` if there is none, and then all rows count

    @property
    def told(self) -> str:
        if self.source == "shapes":
            return "grouped products: every row that they were given counts; nothing says how many held tokens"
        by = "the all-to-alls before them" if self.source == "all-to-all" else "the configuration (mean rank)"
        return f"grouped products: {self.share:.1%} of their rows held tokens, by {by}"


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedProducts:
    """Grouped products of a matrix and a stack of weights, in the order of time."""

    row: Integers  # in `Trace.host`
    rows: Integers
    width: Integers  # elements of one row
    row_bytes: Integers  # bytes of one row; 0 if the dtype is unknown


class _Shapes(msgspec.Struct, gc=False):
    dims: list[Any] = msgspec.field(name="Input Dims", default_factory=list)
    types: list[Any] = msgspec.field(name="Input type", default_factory=list)


_SHAPES = msgspec.json.Decoder(_Shapes)


def is_product(name: str) -> bool:
    """The name is that of a kernel or operator that multiplies rows of experts."""
    return specific_category(name) in _PRODUCTS


def grouped_products(trace: Trace) -> GroupedProducts:
    host = trace.host
    products = np.flatnonzero(host.named(is_product) & (host.kind == HostKind.OPERATOR)).tolist()
    table = [(row, *sizes) for row in products if (sizes := _sizes(host, row)) is not None]
    row, rows, width, row_bytes = np.array(table, dtype=np.int64).reshape(-1, 4).T
    return GroupedProducts(row=row, rows=rows, width=width, row_bytes=row_bytes)


def packed_row_bytes(width: Integers) -> Integers:
    """Bytes of a row in 8 bits with its scales, as penstock.kernels.float8.quantized packs it.

    Four bytes per 128 elements and one byte per 32 elements take the same space.
    """
    values = -(-width // 16) * 16  # one byte per element, up to the next 16
    return -(-(values + -(-width // 32)) // 32) * 32  # and one per 32 elements for the scales, up to the next 32


def _sizes(host: HostEvents, row: int) -> tuple[int, int, int] | None:
    """Rows of a grouped product, elements and bytes of a row; None for other inputs (weight gradients)."""
    shapes = decoded_or(_Shapes(), _SHAPES, host.raw[row])
    match shapes.dims:
        case [[int(rows), int(width)], [_, _, _], *_] if 0 <= rows < _MOST_ROWS and 0 <= width < _MOST_ROWS:
            kind = shapes.types[0] if shapes.types and isinstance(shapes.types[0], str) else ""
        case _:
            return None
    position = _INDEX.get(host.name(row), NONE)
    index = shapes.dims[position] if 0 < position < len(shapes.dims) else None
    if isinstance(index, list) and len(index) == 1 and isinstance(index[0], int):
        (rows,) = index  # the product reads these rows of its first argument
    return (rows, width, width * BYTES.get(kind, 0)) if 0 <= rows < _MOST_ROWS else None


def used_rows(trace: Trace, calls: CollectiveCalls, rank: int, phases: Phases) -> UsedRows | None:
    """The share of the rows of grouped products that held tokens; None without any. `calls` are those of all ranks."""
    products = grouped_products(trace)
    if not len(products.rows):
        return None
    given = float(products.rows.mean())  # rows of the buffers, a mean over products
    received = _mean_received_rows(trace, calls, rank, phases, products) if rows_travel(trace) else None
    if rows_are_exact(trace):
        return UsedRows(share=1.0, source="shapes" if received is None else "all-to-all")
    configured = configured_rows(trace)
    sources: tuple[tuple[RowSource, float | None], ...] = (("all-to-all", received), ("configuration", configured))
    for source, rows in sources:
        if rows is not None and given and rows / given < 1 + AGREE:  # more rows than the buffer has: not these rows
            return UsedRows(share=1.0 if rows / given > 1 - AGREE else rows / given, source=source)
    return UsedRows(share=1.0, source="shapes")


def _mean_received_rows(
    trace: Trace, calls: CollectiveCalls, rank: int, phases: Phases, products: GroupedProducts
) -> float | None:
    """Mean rows received by all-to-alls in dispatch, forward; None if unknown."""
    mine = np.flatnonzero((calls.rank == calls.ranks.index(rank)) & calls.is_exchange)
    event = calls.gpu_row[mine]  # the first entries of `phases` are the GPU events; waiting parts follow
    is_dispatch = np.array([name == Span.DISPATCH for name in phases.names], dtype=bool)[phases.name_id[event]]
    forward = mine[is_dispatch & (phases.pass_id[event] == PASSES.index("forward"))]
    received = received_rows(trace, calls, forward, products)
    received = received[np.isfinite(received)]
    return float(received.mean()) if len(received) else None


def received_rows(trace: Trace, calls: CollectiveCalls, rows: Integers, products: GroupedProducts) -> Floats:
    """Expert rows that all-to-alls received, by their splits or by bytes; nan where they carried something else.

    Messages with another dtype than the product's rows (and not 8 bits), or whose size the row width does not divide,
    are counts or routing weights. Where dtypes are unknown, splits that count rows are accepted. The first
    product after an exchange consumes its rows and gives their width. `rows` are of one rank in `calls`.
    """
    launched_us = trace.launched_us[calls.gpu_row[rows]]
    # The first product after each exchange; the appended 0 stands for none (nan sorts behind all times).
    behind = np.searchsorted(trace.host.start_us[products.row], launched_us)
    width, operand_bytes = np.append(products.width, 0)[behind], np.append(products.row_bytes, 0)[behind]
    # Bytes of a row in messages with this element size, scales included for 8 bits; 0 if they do not carry rows.
    item_bytes = calls.item_bytes[rows]
    is_plain = (item_bytes * width == operand_bytes) | (item_bytes == 1)
    plain = np.where(is_plain, item_bytes * width, 0.0)
    is_packed = (trace.setting("float8", "dispatch") not in (None, "none")) & (item_bytes == PACKED_ITEM)
    row_bytes = np.where(is_packed, packed_row_bytes(width), np.nan_to_num(plain)).astype(np.float64)
    came_bytes = calls.received_bytes[rows]
    by_bytes = np.divide(came_bytes, row_bytes, out=np.full(len(rows), np.nan), where=row_bytes > 0)
    by_bytes[by_bytes != np.floor(by_bytes)] = np.nan  # a fraction of rows: the message carries something else
    parts = np.where(calls.received_rows[rows] == NONE, np.nan, calls.received_rows[rows])  # sum of the splits
    is_known = (operand_bytes > 0) & np.isfinite(item_bytes)
    # Splits count where no dtype contradicts them.
    counts: Floats = np.where(np.isnan(parts) | (is_known & np.isnan(by_bytes)), by_bytes, parts)
    # Routing weights of the rows' dtype can pass by chance: they have one element per row of the exchange before.
    fits = np.flatnonzero(np.isfinite(counts))
    fits = fits[np.argsort(launched_us[fits], kind="stable")]
    before, after = fits[:-1], fits[1:]  # neighbours in time
    are_weights = (behind[before] == behind[after]) & (came_bytes[before] == came_bytes[after] * width[after])
    counts[after[are_weights & np.isnan(parts[after])]] = np.nan
    return counts


def configured_rows(trace: Trace) -> float | None:
    """Mean rows of a rank and layer, by the configuration in Penstock's recording; None if rows are dropped."""
    of = trace.setting
    widths = (of("parallel", "tensor"), of("parallel", "expert_tensor"))
    if widths != (1, 1) or of("model", "moe", "balance", "capacity_factor") != 0:
        return None
    try:
        tokens = of("training", "micro_batch") * of("training", "sequence_length") / of("parallel", "context")
        return float(tokens * of("model", "moe", "top_k"))
    except (TypeError, ArithmeticError):
        return None


def rows_travel(trace: Trace) -> bool:
    """All-to-alls carry rows of experts, as far as a recorded configuration does not contradict.

    Other dispatchers send a token once for several experts, and padding is sent like rows.
    """
    method, pads = trace.setting("dispatch", "method"), trace.setting("model", "moe", "balance", "pad_to_capacity")
    return not trace.setting() or (method == "all-to-all" and pads is False)


def rows_are_exact(trace: Trace) -> bool:
    """The recorded configuration gives the experts exactly the received rows."""
    stage = trace.setting("dispatch", "sync_free")
    return rows_travel(trace) and (stage == "auto" or (isinstance(stage, int) and stage < _COUNTS_STAY))


# -------------------------------------------------------------------------------------------------------------- experts

METRICS = "metrics.jsonl"  # in the folder of a run


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLoad:
    """Load of the ranks' experts."""

    ranks: tuple[int, ...]
    loads: Floats  # [layer of a step, rank], in the order of time, without repetitions; empty if unknown
    # Rows are (token, expert) pairs, or tokens once per rank; bytes if the row width is unknown.
    unit: Literal["rows", "bytes"]
    source: Literal["grouped products", "all-to-all", "none"]
    kernel_us: Floats  # [rank], time of grouped products

    @property
    def max_over_mean(self) -> float | None:
        """Load of the fullest rank over the mean, as a mean of layers and steps; 1 is even."""
        if len(self.ranks) < 2 or not len(self.loads):
            return None
        return float(_unevenness(self.loads).mean())

    @property
    def kernel_max_over_mean(self) -> float | None:
        """The same of kernel time, over all layers and steps."""
        mean = self.kernel_us.mean()
        return float(self.kernel_us.max() / mean) if len(self.ranks) > 1 and mean > 0 else None

    @property
    def fullest_rank(self) -> int | None:
        """The rank with the highest load, by rows, else by time; None if all are even."""
        for share, load in ((self.max_over_mean, self.loads.sum(axis=0)), (self.kernel_max_over_mean, self.kernel_us)):
            if (share or 0.0) > EVEN:
                return self.ranks[int(load.argmax())]
        return None

    def as_json(self) -> dict[str, Any]:
        """JSON values; unknown ones are null."""
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
    ranks = collectives.calls.ranks
    by_rank = [grouped_products(traces[rank]).rows for rank in ranks]
    # Ranks whose numbers of products differ cannot be compared.
    has_shapes = len({len(rows) for rows in by_rank}) == 1
    by_shape = np.stack(by_rank, axis=1).astype(np.float64) if has_shapes else np.empty((0, len(ranks)))
    by_bytes, unit = _loads_of_exchanges(collectives)
    is_by_shape = len(by_shape) > 0 and (
        not len(by_bytes) or _unevenness(by_shape).mean() >= _unevenness(by_bytes).mean() * 0.999
    )
    loads = by_shape if is_by_shape else by_bytes
    _, first = np.unique(loads, axis=0, return_index=True)
    return ExpertLoad(
        ranks=ranks,
        loads=loads[np.sort(first)],  # each list of loads once, at its first place: backward repeats those of forward
        unit="rows" if is_by_shape else unit,
        source="grouped products" if is_by_shape else "all-to-all" if len(by_bytes) else "none",
        kernel_us=np.array([_product_us(traces[rank]) for rank in ranks]),
    )


def _unevenness(loads: Floats) -> Floats:
    """Load of the fullest rank over the mean, for each row of [layer of a step, rank]."""
    mean = loads.mean(axis=1)
    return np.divide(loads.max(axis=1), mean, out=np.ones(len(loads)), where=mean > 0)


def _product_us(trace: Trace) -> float:
    """Time of the kernels of grouped products, by their own name or that of the operator that launched them."""
    host, kernels = trace.host, trace.gpu.take(trace.gpu.is_kernel)
    operators = host.named(is_product) & (host.kind == HostKind.OPERATOR) & (host.external_id != NONE)
    chosen = kernels.named(is_product) | np.isin(kernels.external_id, host.external_id[operators])
    return float(kernels.duration_us[chosen].sum())


def _loads_of_exchanges(collectives: CollectiveTimes) -> tuple[Floats, Literal["rows", "bytes"]]:
    """Loads by the sizes of all-to-alls that all ranks took part in."""
    calls, met = collectives.calls, collectives.meetings.met
    rows = met[(met != NONE).all(axis=1) & (len(calls.ranks) > 1)]  # [collective, rank]
    rows = rows[calls.is_exchange[rows[:, 0]]]
    in_rows = len(rows) > 0 and bool(((calls.sent_rows[rows] != NONE) & (calls.received_rows[rows] != NONE)).all())
    sent = (calls.sent_rows[rows] if in_rows else calls.sent_bytes[rows]).astype(np.float64)
    received = (calls.received_rows[rows] if in_rows else calls.received_bytes[rows]).astype(np.float64)
    is_known = np.isfinite(sent).all(axis=1) & np.isfinite(received).all(axis=1)
    sent, received = sent[is_known], received[is_known]
    # Forward, the experts receive unevenly; backward, they send unevenly.
    less_even = _unevenness(received) >= _unevenness(sent)
    return np.where(less_even[:, None], received, sent), "rows" if in_rows else "bytes"


# ----------------------------------------------------------------------------------------------------------- metrics


@dataclass(frozen=True, kw_only=True)
class RecordedLoad:
    """Loads in the metrics of one step."""

    step: int
    layers: dict[int, float]  # for each MoE layer, load of the fullest expert over the mean
    # Load of the fullest expert rank over the mean, as a mean of layers; None without expert parallelism.
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
    """Loads of all steps of a run; empty without metrics. A last line that was cut off is skipped.

    Raises a TraceError if the metrics cannot be read.
    """
    path = folder / METRICS
    if not path.is_file():
        return ()
    try:
        lines = _LINE.decode_lines(path.read_bytes().rpartition(b"\n")[0])  # the last one may be cut off
    except (OSError, msgspec.DecodeError) as error:
        raise TraceError(f"cannot read {path} as metrics", got=error) from error
    return tuple(
        RecordedLoad(
            step=line.step,
            layers={layer.layer: layer.max_over_mean for layer in line.layers},
            ranks=line.expert_rank_load_max_over_mean,
        )
        for line in lines
    )
