"""Differences between two traces: GPU time by span, operator and shape, in sums that are exact.

The time of a step is the time of its GPU events, minus their overlap, plus idle time:

    step = events - overlap + idle

This is exact for every step. A row of the comparison is one (span, operator, shape); its time is the median over the
steps of the sum of its events in a step. Medians do not add up to the median of the steps; the difference is a row of
its own, `(uneven)`. So the changes of all rows add up to the change of the total:

1. Times are rounded to 2^-20 us. Sums of such numbers below an hour are exact in float64, in any order.
2. A step lasts from the end of the steps before it to its own last event, so no time between steps is left out.
3. Rows are matched by span, operator and shape. Shapes that come and go between steps (rows of an expert), and shapes
   of one operator that only one trace has while both have such, are one row.
4. If the traces share no span, spans are not compared; if one has no steps, each is taken as one step.

An event without an operator has the name of its kernel's function. Layers are not distinguished: differences between
equal layers are noise, and shapes distinguish layers of different kinds.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from penstock.trace.events import NONE, Floats, Integers, Trace
from penstock.trace.intervals import union
from penstock.trace.kernel_names import function_of
from penstock.trace.phases import PASSES, find_phases, grouped
from penstock.trace.tables import calls_made


class EventKey(NamedTuple):
    """The key that events are matched by; `shape` and `span` can be empty."""

    span: str
    operator: str
    shape: str


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedEvents:
    """Events of one trace; a column has an entry for each."""

    keys: Sequence[EventKey]
    key_of: Integers  # index into `keys`
    start_us: Floats
    duration_us: Floats
    step_of: Integers  # index of the step in the order of time; NONE outside of steps
    steps: int  # number of steps, 0 if the trace marks none


def named_events(trace: Trace) -> NamedEvents:
    phases = find_phases(trace)
    made = calls_made(trace, phases.placement)
    kernel = np.where(made.call_of == NONE, trace.gpu.name_id, NONE)
    groups, key_of = grouped(phases.name_id, phases.pass_id, made.call_of, kernel)
    keys = []
    for phase, pass_, call, name in groups:
        span = f"{phases.names[phase]} {PASSES[pass_]}".strip()
        if call == NONE:
            keys.append(EventKey(span, function_of(trace.names[name]), ""))
        else:
            keys.append(EventKey(span, made.calls[call].name, shape_text(made.calls[call].shapes)))
    steps, step_of = np.unique(phases.placement.step, return_inverse=True)
    has_strays = bool(len(steps)) and int(steps[0]) == NONE  # NONE sorts first; without it, steps count from 0
    return NamedEvents(
        keys=keys,
        key_of=key_of,
        start_us=trace.gpu.start_us,
        duration_us=trace.gpu.duration_us,
        step_of=step_of.astype(np.int64) - has_strays,
        steps=len(steps) - has_strays,
    )


def shape_text(shapes: Sequence[Any]) -> str:
    """Sizes of tensors as `888x2880 2880x640`, lists in brackets; entries without dims are left out."""
    return " ".join(filter(None, map(_size_text, shapes)))


def _size_text(size: Any) -> str:
    if not isinstance(size, Sequence) or isinstance(size, str) or not size:
        return ""
    if isinstance(size[0], Sequence):
        return f"[{shape_text(size)}]"
    return "x".join(map(str, size))


# -------------------------------------------------------------------------------------------------------------- compare

GRID_US = 2.0**-20  # times are multiples of this, so that float64 adds them without error
SPREAD = 0.5  # a shape has a row of its own if more than this share of the steps has it
IDLE = EventKey("", "(idle)", "")
OVERLAP = EventKey("", "(overlap)", "")
UNEVEN = EventKey("", "(uneven)", "")
"""Rows that are not events: idle time, concurrent time, and the remainder of the medians."""

CLOSING = (OVERLAP, IDLE, UNEVEN)


class ChangeKind(StrEnum):
    """The kind of change of a row."""

    FASTER = "faster"
    SLOWER = "slower"
    NEW = "new"
    GONE = "gone"
    SAME = "same"


TITLES: Mapping[ChangeKind, str] = {
    ChangeKind.SLOWER: "slower",
    ChangeKind.NEW: "new in B",
    ChangeKind.FASTER: "faster",
    ChangeKind.GONE: "gone from A",
}
"""Of the tables of changed rows, in their order."""


@dataclass(frozen=True, kw_only=True)
class RowTime:
    """Time of a row in a typical step of one trace."""

    time_us: float = 0.0  # median over steps; negative for `(overlap)`
    least_us: float = 0.0
    most_us: float = 0.0
    events: float = 0.0


ABSENT = RowTime()  # the time of a row that the trace does not have; compared by identity


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """One line of a comparison."""

    key: EventKey
    a: RowTime
    b: RowTime

    @property
    def change_us(self) -> float:
        """Time of B minus time of A, exact."""
        return self.b.time_us - self.a.time_us

    @property
    def verdict(self) -> ChangeKind:
        """By presence first, by time second; rows that are not events are never new or gone."""
        if self.key not in CLOSING and self.a is ABSENT:
            return ChangeKind.NEW
        if self.key not in CLOSING and self.b is ABSENT:
            return ChangeKind.GONE
        if not self.change_us:
            return ChangeKind.SAME
        return ChangeKind.FASTER if self.change_us < 0 else ChangeKind.SLOWER

    @property
    def is_clear(self) -> bool:
        """Every step of one trace took less than every step of the other."""
        return self.a.most_us < self.b.least_us or self.b.most_us < self.a.least_us


@dataclass(frozen=True, kw_only=True)
class TraceComparison:
    """Two traces side by side."""

    a_us: float  # a typical step of A (or all of it if steps are not compared), from start to end
    b_us: float
    a_steps: int  # number of compared steps, 0 if the whole traces were compared
    b_steps: int
    a_outside_us: float  # GPU time of A's events outside of steps, which rows leave out
    b_outside_us: float
    by_span: bool
    rows: tuple[ComparedRow, ...]

    @property
    def change_us(self) -> float:
        """Time of B minus time of A: exactly the sum of the changes of all rows."""
        return self.b_us - self.a_us

    def rows_of(self, kind: ChangeKind) -> list[ComparedRow]:
        """Rows of events with this change, the largest first."""
        return [row for row in self.rows if row.verdict is kind and row.key not in CLOSING]

    @property
    def closing(self) -> list[ComparedRow]:
        """Overlap, idle time, and the rest of the medians, with which all changes add up."""
        return [row for row in self.rows if row.key in CLOSING]


def compare(a: NamedEvents, b: NamedEvents) -> TraceComparison:
    by_span = not {key.span for key in a.keys if key.span}.isdisjoint(key.span for key in b.keys)
    by_step = a.steps > 0 and b.steps > 0
    sides = [_Side.of(work, by_span=by_span, by_step=by_step) for work in (a, b)]
    pools = _pools([side.present() for side in sides])
    costs_a, costs_b = (side.costs(pools) for side in sides)
    rows = [
        ComparedRow(key=key, a=costs_a.get(key, ABSENT), b=costs_b.get(key, ABSENT))
        for key in dict.fromkeys([*costs_a, *costs_b])
    ]
    a_us, b_us = (float(np.median(side.steps_us)) if len(side.steps_us) else 0.0 for side in sides)
    a_rest, b_rest = (
        RowTime(time_us=total - sum(cost.time_us for cost in costs.values()))
        for total, costs in ((a_us, costs_a), (b_us, costs_b))
    )
    rows.append(ComparedRow(key=UNEVEN, a=a_rest, b=b_rest))
    return TraceComparison(
        a_us=a_us,
        b_us=b_us,
        a_steps=a.steps if by_step else 0,
        b_steps=b.steps if by_step else 0,
        a_outside_us=sides[0].outside_us,
        b_outside_us=sides[1].outside_us,
        by_span=by_span,
        rows=tuple(sorted(rows, key=lambda row: (-abs(row.change_us), -max(row.a.time_us, row.b.time_us), row.key))),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Side:
    """One trace, its times on the grid; a cell is one key in one step that has events of it."""

    keys: tuple[EventKey, ...]  # without spans if those are not compared
    key_of: Integers  # of each cell, index into `keys`; cells are sorted by key, then by step
    step_of: Integers  # of each cell
    cells_us: Floats  # sum of the durations in each cell
    cells_events: Floats  # number of events in each cell
    steps_us: Floats  # duration of each step
    busy_us: Floats  # of each step, time with any event
    outside_us: float  # durations of the events outside of steps

    @classmethod
    def of(cls, work: NamedEvents, *, by_span: bool, by_step: bool) -> "_Side":
        index: dict[EventKey, int] = {}
        indices = [index.setdefault(key if by_span else key._replace(span=""), len(index)) for key in work.keys]
        count = len(work.start_us)
        step_of = work.step_of if by_step else np.zeros(count, dtype=np.int64)
        steps = work.steps if by_step else min(1, count)
        inside = step_of != NONE
        # From 0, because times since 1970 leave no bits for the grid.
        start_us = _on_grid(work.start_us - (work.start_us.min() if count else 0.0))[inside]
        duration_us = _on_grid(work.duration_us)
        end_us = start_us + duration_us[inside]
        cells, cell_of = grouped(np.array(indices, dtype=np.int64)[work.key_of[inside]], step_of[inside])
        cell_key, cell_step = np.array(cells, dtype=np.int64).reshape(-1, 2).T
        edges = _step_edges(start_us, end_us, step_of[inside], steps)
        return cls(
            keys=tuple(index),
            key_of=cell_key,
            step_of=cell_step,
            cells_us=_summed(cell_of, duration_us[inside], len(cells)),
            cells_events=_summed(cell_of, np.ones(len(cell_of)), len(cells)),
            steps_us=np.diff(edges),
            busy_us=np.diff(union(start_us, end_us).before_us(edges)),
            outside_us=float(duration_us[~inside].sum()),
        )

    def present(self) -> dict[EventKey, int]:
        """Number of steps that contain each key; 0 if few do, so the key comes and goes."""
        rows, counts = np.unique(self.key_of, return_counts=True)
        few = SPREAD * len(self.steps_us)
        return {self.keys[row]: int(count if count > few else 0) for row, count in zip(rows, counts, strict=True)}

    def costs(self, pools: Mapping[EventKey, EventKey]) -> dict[EventKey, RowTime]:
        """Time of each row, overlap and idle included."""
        steps = len(self.steps_us)
        index: dict[EventKey, int] = {}
        row_of = np.zeros(len(self.keys), dtype=np.int64)  # of each key: several keys can be pooled in a row
        for key in np.unique(self.key_of).tolist():
            row_of[key] = index.setdefault(pools.get(self.keys[key], self.keys[key]), len(index))
        names = list(index)
        cell = row_of[self.key_of] * steps + self.step_of  # in a table of [row, step]
        times, events = (
            _summed(cell, weights, len(names) * steps).reshape(len(names), steps)
            for weights in (self.cells_us, self.cells_events)
        )
        costs = _costs(names, times, events)
        if steps:
            # The two terms that turn the sum of the events into the duration of a step.
            overlap_us, idle_us = times.sum(axis=0) - self.busy_us, self.steps_us - self.busy_us
            costs |= _costs([OVERLAP, IDLE], np.stack([-overlap_us, idle_us]), np.zeros((2, steps)))
        return costs


def _summed(cell: Integers, values: Floats, size: int) -> Floats:
    return np.bincount(cell, weights=values, minlength=size).astype(np.float64)


def _on_grid(times_us: Floats) -> Floats:
    return np.round(times_us / GRID_US) * GRID_US


def _step_edges(start_us: Floats, end_us: Floats, step_of: Integers, steps: int) -> Floats:
    """Begin of each step, and end of the last: each at the latest end so far."""
    if not len(start_us):
        return np.zeros(steps + 1)
    ends_us = np.full(steps, start_us.min())  # latest end of the events of each step
    np.maximum.at(ends_us, step_of, end_us)
    return np.concatenate([[start_us.min()], np.maximum.accumulate(ends_us)])


def _costs(keys: Sequence[EventKey], times: Floats, events: Floats) -> dict[EventKey, RowTime]:
    if not times.size:
        return {}
    columns = (np.median(times, axis=1), times.min(axis=1), times.max(axis=1), np.median(events, axis=1))
    return {
        key: RowTime(time_us=time, least_us=least, most_us=largest, events=number)
        for key, time, least, largest, number in zip(keys, *(column.tolist() for column in columns), strict=True)
    }


def _pools(present: Sequence[Mapping[EventKey, int]]) -> dict[EventKey, EventKey]:
    """Keys that are merged into another: shapes of one operator without a steady partner.

    `present` has for each trace the number of steps that contain each key, 0 if few do.
    """
    # By key without shape: for either trace, the steps that contain each shape.
    shapes: dict[EventKey, tuple[dict[str, int], dict[str, int]]] = defaultdict(lambda: ({}, {}))
    for side, keys in enumerate(present):
        for key, steps in keys.items():
            shapes[key._replace(shape="")][side][key.shape] = steps
    pools: dict[EventKey, EventKey] = {}
    for key, sides in shapes.items():
        pooled = {shape for side in sides for shape, steps in side.items() if not steps}  # they come and go
        lonely = [sides[0].keys() - sides[1].keys(), sides[1].keys() - sides[0].keys()]
        if all(lonely):  # either trace has shapes that the other one lacks: the same work on other sizes
            pooled |= lonely[0] | lonely[1]
        name = key._replace(shape=_pool_name(*(sorted(pooled & side.keys()) for side in sides)))
        pools |= {key._replace(shape=shape): name for shape in pooled}
    return pools


def _pool_name(a: Sequence[str], b: Sequence[str]) -> str:
    """`[8, 16] -> [9, 16]`, or the number of shapes if there are several."""
    texts = [shapes[0] if len(shapes) == 1 else f"{len(shapes)} shapes" for shapes in (a, b) if shapes]
    return " -> ".join(texts) if len(texts) == 2 and a != b else "".join(texts[:1])
