"""A timeline: a lane for each rank, with boxes for its passes, gaps where it waits, and the memory that it holds below.

A timeline is a list of lanes of named intervals. `planned` makes one from a schedule and its playback; a measured one
is drawn with it by giving both to `timeline_figure`, which puts lanes of one rank below each other on one axis of time.

A large step has 8,192 passes (16 ranks, 4 stages each, 64 micro-batches, forward and backward). As bars of Plotly each
would be an element of the page; here all boxes of a colour are one outline with gaps, which draws and zooms at once.
Plotly does not know the boxes then, so page.js finds the one under the pointer, and writes labels where there is room.
The `meta` of a trace has their names. The outline of each box has `BOX_POINTS` points, the last one empty.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from penstock.base.numbers import BYTE_UNITS, rounded, time_text, time_unit
from penstock.layout.actions import Kind, Playback, Schedule
from penstock.plan.projection import Projection
from penstock.report.figure import HELD, HUES, IDLE, KERNELS, Figure, axis, evenly, ink_on, left_out, shade

BOX_POINTS = 6

BOX_TOP, BOX_BOTTOM, HELD_TOP, HELD_BOTTOM = 0.46, -0.16, -0.2, -0.42
"""Geometry of a lane that is 1 high with its middle at 0: its boxes, and below them the held memory."""

MOST_BOXES = 16_000  # with more boxes some ranks are left out, because each box takes 200 bytes of a page
ZOOM = "Drag to zoom, double-click to see all again."  # hint of a figure with details below a pixel

KIND_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "input", Kind.WEIGHT: "weight"}
"""As in legends. Input and weight are the two halves of a backward pass."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A box."""

    start: float  # in seconds from the start of the step
    end: float
    name: str
    colour: str
    group: str
    label: str = ""  # written into the box if there is room
    part: tuple[float, float] = (0.0, 1.0)  # bottom and top of the box within the lane, 0 to 1


@dataclass(frozen=True, kw_only=True)
class TimelineLane:
    """One rank."""

    name: str
    intervals: Sequence[Interval]
    held: Sequence[tuple[float, float]] = ()  # (time, held amount) from that time on, by time; empty if unknown
    place: int | None = None  # lanes of several timelines with one place are drawn together; None is the lane's number


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step, planned or measured."""

    name: str
    lanes: Sequence[TimelineLane]
    held_unit: str = "micro-batches"  # unit of the held amounts
    gaps: str = "idle"  # word for the share of time without an interval
    ground: str = "waiting"  # word for time without an interval
    has_edges: bool = True  # boxes have edges where there is room; those of kernels are too many

    @property
    def span(self) -> float:
        return max((interval.end for lane in self.lanes for interval in lane.intervals), default=0.0)


@dataclass(frozen=True, kw_only=True)
class ActivationShares:
    """Memory that stages hold of a micro-batch, as in `layout.clock.Costs`."""

    activation: tuple[float, ...] = ()  # of each stage; empty is 1 / stages_per_rank for every stage
    unit: str = "micro-batches"  # of `activation`


WHOLE_MICRO_BATCHES = ActivationShares()


def activation_shares(projection: Projection) -> ActivationShares:
    """Memory that stages hold of a micro-batch, in the unit in which the most is at least 1."""
    largest = max(projection.time.kept_bytes, default=0)
    size, unit = next((byte_unit for byte_unit in BYTE_UNITS if largest >= byte_unit[0]), (1.0, "B"))
    return ActivationShares(activation=tuple(kept / size for kept in projection.time.kept_bytes), unit=unit)


def planned(schedule: Schedule, playback: Playback, shares: ActivationShares = WHOLE_MICRO_BATCHES) -> Timeline:
    """The timeline of a schedule and its playback; by default a rank holds micro-batches."""
    # By rank; `held` are changes of the held memory: time and amount.
    intervals: defaultdict[int, list[Interval]] = defaultdict(list)
    held: defaultdict[int, list[tuple[float, float]]] = defaultdict(lambda: [(0.0, 0.0)])
    paired = {
        (rank, action)
        for rank in range(schedule.ranks)
        for unit in schedule.units(rank)
        if len(unit) > 1
        for action in unit
    }
    sizes = shares.activation or (1 / schedule.stages_per_rank,) * schedule.stages
    # Change of the held memory by a pass, as a multiple of the stage's share.
    changes = {Kind.FORWARD: 1.0, Kind.BACKWARD: -1.0, Kind.INPUT: 0.0, Kind.WEIGHT: -1.0}
    for event in playback.events:
        stage, kind, micro_batch = event.action
        stages = schedule.stages_of(event.rank)
        times, chunk = (event.start, event.end), (stages.index(stage), len(stages))
        what = PipelinePass(kind=kind, stage=stage, micro_batch=micro_batch)
        is_pair = (event.rank, event.action) in paired
        intervals[event.rank].append(pass_interval(what, times, chunk, is_pair=is_pair))
        # A forward allocates at its start; a backward frees at its end.
        held[event.rank].append((event.start if kind is Kind.FORWARD else event.end, changes[kind] * sizes[stage]))
    lanes = [
        TimelineLane(name=f"rank {rank}", intervals=tuple(intervals[rank]), held=_summed(held[rank]))
        for rank in range(schedule.ranks)
    ]
    return Timeline(name="planned", lanes=lanes, held_unit=shares.unit)


@dataclass(frozen=True, kw_only=True)
class PipelinePass:
    """A pass of a pipeline, planned or measured."""

    kind: Kind
    stage: int
    micro_batch: int


def pass_interval(what: PipelinePass, times: tuple[float, float], chunk: tuple[int, int], *, is_pair: bool) -> Interval:
    """A pass as an interval.

    `times` are in seconds; `chunk` is the index of the stage among those of the rank, and their number. With `is_pair`
    another pass runs at the same time.
    """
    number, count = chunk
    group = KIND_NAMES[what.kind]
    # The forward of a pair is drawn above its backward.
    part = ((0.5, 1.0) if what.kind is Kind.FORWARD else (0.0, 0.5)) if is_pair else (0.0, 1.0)
    return Interval(
        start=times[0],
        end=times[1],
        name=f"{group} of stage {what.stage}, micro-batch {what.micro_batch}",
        colour=shade(HUES[what.kind], number, count),
        group=group if count == 1 else f"{group}, chunk {number}",
        label=str(what.micro_batch),
        part=part,
    )


def _summed(changes: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Held memory after each change; at equal times, freeing comes first."""
    total, result = 0.0, []
    for time, change in sorted(changes):
        total += change
        result.append((time, round(total, 9)))
    return tuple(result)


def timeline_figure(name: str, title: str, timelines: Sequence[Timeline]) -> Figure:
    """Draw timelines of the same ranks, such as planned and measured, over one axis of time."""
    rows, left = _few(_rows(timelines))
    span = max(timeline.span for timeline in timelines)
    size, _ = time_unit(span)
    largest = max((held for row in rows for _, held in row.lane.held), default=0.0)
    # Without held memory the boxes take the whole lane.
    bottom = BOX_BOTTOM if largest else HELD_BOTTOM
    ground = _ground(rows, size, bottom) | {"name": timelines[0].ground}
    boxes = _boxes(rows, size, bottom, has_edges=timelines[0].has_edges)
    data = [ground, *boxes, *_held(rows, size, (largest, timelines[0].held_unit))]
    lane_height = 44 if len(rows) <= 8 else 30 if len(rows) <= 24 else 22
    numbers = [
        f"{timeline.name} {time_text(timeline.span)}, {_idle_share(timeline.lanes, timeline.span):.1%} {timeline.gaps}"
        for timeline in timelines
    ]
    below = f"Below each lane: {timelines[0].held_unit} held, at most {largest:.3g}." if largest else ""
    return Figure(
        name=name,
        title=title,
        caption=f"Passes: {'; '.join(numbers)}. Grey is {timelines[0].ground}. {below} {left}".strip(),
        data=data,
        layout=_layout(rows, span),
        height=96 + max(lane_height, 240 // len(rows)) * len(rows),
        is_wide=True,
        hint=ZOOM,
    )


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A drawn lane; its step ends at `span` seconds."""

    name: str
    place: int
    lane: TimelineLane
    span: float
    gaps: str

    @property
    def idle(self) -> float:
        return _idle_share([self.lane], self.span)


def _rows(timelines: Sequence[Timeline]) -> list[_Row]:
    """Lanes of all timelines, those of one place below each other."""
    several = len(timelines) > 1
    rows = [
        _Row(
            name=f"{lane.name} {timeline.name}" if several else lane.name,
            place=number if lane.place is None else lane.place,
            lane=lane,
            span=span,
            gaps=timeline.gaps,
        )
        for timeline in timelines
        for span in [timeline.span]
        for number, lane in enumerate(timeline.lanes)
    ]
    return sorted(rows, key=lambda row: row.place)  # stable: of one place in the order of the timelines


def _few(rows: list[_Row]) -> tuple[list[_Row], str]:
    """The rows, limited to evenly spaced places if there are too many boxes for a page; and a sentence about it."""
    boxes = sum(len(row.lane.intervals) for row in rows)
    places = sorted({row.place for row in rows})
    limit = max(2, len(places) * MOST_BOXES // max(boxes, 1))
    if boxes <= MOST_BOXES or len(places) <= limit:
        return rows, ""
    kept = {places[at] for at in evenly(len(places), limit)}
    return [row for row in rows if row.place in kept], left_out(len(kept), len(places), "ranks are drawn").strip()


def _idle_share(lanes: Sequence[TimelineLane], span: float) -> float:
    covered = 0.0
    for lane in lanes:
        until = 0.0  # the sweep has come to here
        for interval in sorted(lane.intervals, key=lambda interval: interval.start):
            covered += max(0.0, interval.end - max(interval.start, until))
            until = max(until, interval.end)
    return 1 - covered / (span * len(lanes)) if span and lanes else 0.0


def _rectangle(left: float, right: float, bottom: float, top: float) -> tuple[list[float | None], list[float | None]]:
    left, right = rounded(left), rounded(right)
    return [left, right, right, left, left, None], [bottom, bottom, top, top, bottom, None]


def _outlines(boxes: list[tuple[list[float | None], list[float | None]]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "fill": "toself",
        "x": [value for x, _ in boxes for value in x],
        "y": [value for _, y in boxes for value in y],
        "hoverinfo": "skip",
    }


def _ground(rows: list[_Row], size: float, bottom: float) -> dict[str, Any]:
    """The background of every lane: time without a box is waiting."""
    boxes = [_rectangle(0.0, row.span / size, bottom - index, BOX_TOP - index) for index, row in enumerate(rows)]
    trace = _outlines(boxes) | {"fillcolor": IDLE, "line": {"width": 0}}
    return trace | {"legendrank": 2000, "meta": {"role": "waiting"}}


def _boxes(rows: list[_Row], size: float, bottom: float, *, has_edges: bool) -> list[dict[str, Any]]:
    """One trace for each group, with the names of its boxes."""
    groups: dict[str, list[tuple[int, Interval]]] = defaultdict(list)
    for index, row in enumerate(rows):
        for interval in row.lane.intervals:
            groups[interval.group].append((index, interval))
    traces = []
    for name, members in sorted(groups.items(), key=lambda entry: _group_order(entry[0])):
        high = BOX_TOP - bottom
        boxes = [
            _rectangle(
                interval.start / size,
                interval.end / size,
                round(bottom + high * interval.part[0] - index, 3),
                round(bottom + high * interval.part[1] - index, 3),
            )
            for index, interval in members
        ]
        colour = members[0][1].colour
        edge = {"width": 0.5 if has_edges else 0, "color": "rgba(0,0,0,0.35)"}
        meta = {
            "role": "boxes",
            "lanes": [index for index, _ in members],
            "names": [interval.name for _, interval in members],
            "labels": [interval.label for _, interval in members],
            "ink": ink_on(colour),
            "edges": has_edges,
        }
        traces.append(_outlines(boxes) | {"name": name, "fillcolor": colour, "line": edge, "meta": meta})
    return traces


def _group_order(name: str) -> tuple[int, str]:
    """Forward, backward, input, weight; then groups of kernels in their order; then all others by name."""
    kinds = [*KIND_NAMES.values(), *KERNELS]
    kind = name.partition(",")[0]
    return (kinds.index(kind) if kind in kinds else len(kinds)), name


def _held(rows: list[_Row], size: float, held: tuple[float, str]) -> list[dict[str, Any]]:
    """Held memory as steps below the boxes, all on one scale.

    `size` is seconds per unit of the axis; `held` is the most that a lane holds, and its unit.
    """
    largest, unit = held
    if not largest:
        return []
    high = (HELD_TOP - HELD_BOTTOM) / largest
    xs: list[float | None] = []
    ys: list[float | None] = []
    for index, row in enumerate(rows):
        bottom = HELD_BOTTOM - index
        for (time, value), (until, _) in pairwise([*row.lane.held, (row.span, 0.0)]):
            xs += [rounded(time / size), rounded(until / size)]
            ys += [round(bottom + value * high, 4)] * 2
        xs += [rounded(row.span / size), 0.0, None]  # back along the bottom; None ends the outline
        ys += [bottom, bottom, None]
    trace = {"type": "scatter", "mode": "lines", "fill": "toself", "x": xs, "y": ys, "hoverinfo": "skip"}
    style = {"name": "held", "fillcolor": HELD, "opacity": 0.9, "line": {"width": 0}, "legendrank": 2001}
    return [trace | style | {"meta": {"role": "held", "bottom": HELD_BOTTOM, "scale": high, "unit": unit}}]


def _layout(rows: list[_Row], span: float) -> Mapping[str, Any]:
    size, unit = time_unit(span)
    return {
        "xaxis": axis(f"time in the step ({unit})", range=[0, span / size], showgrid=False),
        "yaxis": {
            "tickvals": [-index for index in range(len(rows))],  # the first lane is on top
            "ticktext": [f"{row.name} \u00b7 {row.idle:.0%} {row.gaps}" for row in rows],
            "range": [0.5 - len(rows), 0.5],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
        },
        "hovermode": False,
        "dragmode": "zoom",
        "meta": {"role": "timeline", "unit": unit},
    }
