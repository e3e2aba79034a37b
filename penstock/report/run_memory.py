"""Memory planned and measured: by component and place on the pipeline, and over a recorded step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.plan.projection import Projection
from penstock.report.colours import LIMIT, MEMORY_PARTS, SERIES
from penstock.report.figure import Figure, gigabytes, rounded
from penstock.report.run_evidence import RunEvidence
from penstock.report.run_steps import last_step
from penstock.report.stacks import height_of, memory_layout, memory_parts, part_bars, stacked
from penstock.report.thin import extremes
from penstock.trace.answer import RankAnswer

PLACES = 16
"""On the pipeline that are drawn at most."""

CURVES = 4
"""Ranks whose memory is drawn over time at most."""

STAIRS = 1600
"""Points of such a curve."""

MEASURED = "measured"
"""The part of a bar that no plan divides."""


def memory_figure(evidence: RunEvidence) -> Figure | None:
    """Bars of what was planned, with marks of what was measured; without a plan bars of what was measured.

    Returns:
        The picture, or None where neither is known.
    """
    peaks = measured_peaks(evidence)
    planned = evidence.projection
    if planned is None and not peaks:
        return None
    if planned is None:
        return _only_measured(evidence, peaks)
    shown = _places(planned)
    world, count = planned.cluster.devices, planned.layout.pp
    names = {place: place_name(planned, place) for place in shown}
    bars = [{name: size / 1e9 for name, size in memory_parts(planned.memories[place]).items()} for place in shown]
    notes = [f"planned, in {planned.memories[place].moment}" for place in shown]
    rows = [names[place] for place in shown]
    data = part_bars(rows, bars, notes, "GB", MEMORY_PARTS)
    at = {rank: rank * count // world for rank in peaks}
    data += _marks({rank: peak for rank, peak in peaks.items() if at[rank] in names}, lambda rank: names[at[rank]])
    capacity = planned.capacity_bytes / 1e9
    marks = [size / 1e9 for sizes in peaks.values() for size in sizes if size is not None]
    hidden = len(planned.memories) - len(shown)
    left = f" {hidden} places between these are left out." if hidden else ""
    return stacked(
        Figure(
            name="memory",
            title="Memory planned and measured",
            caption=f"Bars: the plan, at the fullest moment of a step. {_measured_words(evidence)} "
            f"Dashed: the capacity of {planned.cluster.hardware.name}, {capacity:.0f} GB.{left}",
            data=data,
            layout=memory_layout(rows, bars, capacity, marks),
            height=max(380 if any(one.memory for one in evidence.ranks) else 240, height_of(len(bars))),
        )
    )


def measured_peaks(evidence: RunEvidence) -> dict[int, tuple[int, int | None]]:
    """For each rank that says so the most bytes that were handed out, and that the allocator held at that time."""
    found: dict[int, tuple[int, int | None]] = {}
    for one in evidence.ranks:
        if one.memory:
            found[one.rank] = (
                max(int(memory.allocated.max()) for memory in one.memory),
                max(int(memory.reserved.max()) for memory in one.memory),
            )
    recorded = [line["peak_memory_bytes"] for line in evidence.lines if isinstance(line.get("peak_memory_bytes"), int)]
    if recorded:
        traced, reserved = found.get(0, (0, None))
        found[0] = (max(*recorded, traced), reserved)
    return dict(sorted(found.items()))


def _places(planned: Projection) -> list[int]:
    """Places to draw: all, or evenly many with the fullest among them."""
    count = len(planned.memories)
    if count <= PLACES:
        return list(range(count))
    fullest = max(range(count), key=lambda place: planned.memories[place].total)
    return sorted({fullest, *(round(step * (count - 1) / (PLACES - 2)) for step in range(PLACES - 1))})


def place_name(planned: Projection, place: int) -> str:
    """The ranks that stand at a place on the pipeline."""
    each = planned.cluster.devices // planned.layout.pp
    first = place * each
    return f"rank {first}" if each == 1 else f"ranks {first} to {first + each - 1}"


def _measured_words(evidence: RunEvidence) -> str:
    """What a mark is."""
    if not measured_peaks(evidence):
        return "Nothing was measured."
    if evidence.is_cpu:
        return "Diamonds: the most that a rank's process held (resident set)."
    return "Diamonds: the most that a rank's allocator handed out; libraries and reserve are not in it."


def _marks(peaks: Mapping[int, tuple[int, int | None]], row: Callable[[int], str]) -> list[dict[str, Any]]:
    """A filled diamond for what was handed out, an open one for what the allocator held."""
    traces = []
    for index, (name, symbol) in enumerate(((MEASURED, "diamond"), ("held by the allocator", "diamond-open"))):
        known = {rank: sizes[index] for rank, sizes in peaks.items() if sizes[index] is not None}
        if not known:
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [rounded((size or 0) / 1e9) for size in known.values()],
                "y": [row(rank) for rank in known],
                "customdata": list(known),
                "marker": {"symbol": symbol, "size": 11, "color": LIMIT, "line": {"width": 1.5, "color": LIMIT}},
                "hovertemplate": f"<b>{name}</b> %{{x:.4g}} GB<br>rank %{{customdata}}<extra></extra>",
            }
        )
    return traces


def _only_measured(evidence: RunEvidence, peaks: Mapping[int, tuple[int, int | None]]) -> Figure:
    """One bar for each rank that was looked at."""
    ranks = sorted(peaks, key=lambda rank: -peaks[rank][0])[:PLACES]
    ranks.sort()
    names = [f"rank {rank}" for rank in ranks]
    bars = [{MEASURED: peaks[rank][0] / 1e9} for rank in ranks]
    of = "the process held (resident set)" if evidence.is_cpu else "the allocator handed out"
    data = part_bars(names, bars, ["the most so far"] * len(names), "GB", {MEASURED: SERIES[0]})
    left = f" The fullest {PLACES} of {len(peaks)} ranks." if len(peaks) > PLACES else ""
    return stacked(
        Figure(
            name="memory",
            title="Memory measured",
            caption=f"The most that {of} so far.{left}",
            data=[trace | {"showlegend": False} for trace in data],
            layout=memory_layout(names, bars, None),
            height=max(240, height_of(len(bars))),
        )
    )


def memory_over_time(evidence: RunEvidence) -> Figure | None:
    """What allocators held over the last recorded step, of the fullest ranks.

    Returns:
        The picture, or None if no trace has the allocator's events.
    """
    with_memory = [one for one in evidence.ranks if one.memory]
    if not with_memory:
        return None
    fullest = sorted(with_memory, key=lambda one: -max(int(memory.allocated.max()) for memory in one.memory))[:CURVES]
    step = last_step(fullest)
    data: list[dict[str, Any]] = []
    for place, one in enumerate(sorted(fullest, key=lambda one: one.rank)):
        for kind, style in (("allocated", "solid"), ("reserved", "dot")):
            xs, ys = _over_step(one, step, kind)
            line = {"color": SERIES[place], "width": 1.5, "shape": "hv", "dash": style}
            hover = f"rank {one.rank}, {kind}<br>%{{x:.4~g}} ms: %{{y:.4~g}} GB<extra></extra>"
            data.append(
                {"type": "scatter", "mode": "lines", "name": f"rank {one.rank} {kind}", "x": xs, "y": ys}
                | {"line": line, "hovertemplate": hover}
            )
    some = f" Of the fullest {CURVES} of {len(with_memory)} ranks." if len(with_memory) > CURVES else ""
    peak = max(int(memory.allocated.max()) for one in fullest for memory in one.memory)
    return Figure(
        name="memory-over-time",
        title=f"Memory over {'the trace' if step is None else f'step {step}'}",
        caption=f"By the time at which the host asked for it; at most {gigabytes(peak)} were handed out.{some}",
        data=data,
        layout={
            "xaxis": {"title": {"text": "time in the step (ms)"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "memory (GB)"}, "rangemode": "tozero"},
            "hovermode": "closest",
        },
    )


def _over_step(one: RankAnswer, step: int | None, kind: str) -> tuple[list[float], list[float]]:
    """Milliseconds and GB of one rank's curve."""
    memory = one.memory[0]
    sizes = memory.allocated if kind == "allocated" else memory.reserved
    begin, end = float(memory.time_us[0]), float(memory.time_us[-1])
    for found in one.steps:
        if found.number == step:
            begin, end = found.start_us, found.start_us + found.duration_us
    low, high = np.searchsorted(memory.time_us, [begin, end])
    times: Sequence[float] = ((memory.time_us[low:high] - begin) / 1e3).tolist()
    xs, ys = extremes(times, (sizes[low:high] / 1e9).tolist(), STAIRS)
    return [rounded(x) for x in xs], [rounded(y, 5) for y in ys]
