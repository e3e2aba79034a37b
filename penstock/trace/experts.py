"""How evenly experts are loaded, in rows and in milliseconds, rank by rank.

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
from penstock.trace.collectives import Collectives
from penstock.trace.events import NONE, Flags, Floats, GpuEvents, HostEvents, HostKind, Trace
from penstock.trace.expert_rows import is_exchange, is_product, products_of

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


def expert_load(traces: Mapping[int, Trace], collectives: Collectives) -> ExpertLoad:
    """Loads of the experts of some ranks.

    Args:
        traces: by rank.
        collectives: of the same traces.
    """
    ranks = collectives.calls.ranks
    by_shape = _lists([products_of(traces[rank]).rows.tolist() for rank in ranks])
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


def _loads_of_exchanges(collectives: Collectives) -> tuple[Floats, Literal["rows", "bytes"]]:
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
