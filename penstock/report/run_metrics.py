"""Figures of a run's metrics over its steps: loss, gradients, speed, phases; and memory, planned and measured.

A run has 100,000 steps and a screen 1,000 columns, so long curves are thinned: neighbours become their mean. Means
alone would hide a spike of the loss, so a band shows the least and the most of each bin, and `words` says how many
steps a point stands for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from penstock.base.numbers import (
    counted,
    duration_text,
    gigabytes,
    rounded,
    share_text,
    three_digits,
    time_text,
    time_unit,
)
from penstock.config.run import Run
from penstock.plan.projection import Projection
from penstock.report.figure import LIMIT, MEMORY_PARTS, PHASES, SERIES, WALL_PARTS, Figure, axis, evenly, part_colours
from penstock.report.run_evidence import RunEvidence
from penstock.report.stacks import StackedBars, memory_bar
from penstock.trace.analysis import RankAnalysis, last_step
from penstock.train.goodput import goodput
from penstock.tune.doctor.run_facts import USUAL

POINTS = 1000  # largest number of points of a curve
FEW = 60  # points up to which each has a marker
SMOOTHED = 100  # points from which a trailing mean is drawn over the noisy curve
WALL_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
WINDOW = 50  # the window of the trailing mean is this fraction of the points


@dataclass(frozen=True, kw_only=True)
class ThinnedCurve:
    """A curve over steps: for each bin of `each` values its last step, and the mean, least and most of its values."""

    xs: Sequence[float]
    ys: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]
    each: int = 1

    @property
    def words(self) -> str:
        """The meaning of a point, unless it is one step."""
        if self.each == 1:
            return ""
        return f"A point is the mean of {self.each} recorded steps, the band goes from the least to the most of them."


def thinned(xs: Sequence[float], ys: Sequence[float], limit: int = POINTS) -> ThinnedCurve:
    """A curve with at most `limit` points; `xs` are ascending."""
    each = -(-len(xs) // limit) or 1  # values in a bin, rounded up; 1 without values
    bins = [slice(start, start + each) for start in range(0, len(xs), each)]
    return ThinnedCurve(
        xs=[xs[section][-1] for section in bins],
        ys=[fmean(ys[section]) for section in bins],
        lows=[min(ys[section]) for section in bins],
        highs=[max(ys[section]) for section in bins],
        each=each,
    )


def extremes(xs: Sequence[float], ys: Sequence[float], limit: int = POINTS) -> tuple[list[float], list[float]]:
    """At most `limit` points of a staircase, which keep the least and the most of each bin in their order."""
    if len(xs) <= limit:
        return list(xs), list(ys)
    edges = [round(index * len(xs) / (limit // 2)) for index in range(limit // 2 + 1)]  # a bin keeps two points
    kept: list[int] = []
    for low, high in pairwise(edges):
        places = range(low, high)
        kept += sorted({min(places, key=lambda at: ys[at]), max(places, key=lambda at: ys[at])})
    return [xs[at] for at in kept], [ys[at] for at in kept]


def curve(points: ThinnedCurve, name: str, colour: str, hover: str, **more: Any) -> list[dict[str, Any]]:
    """A thinned curve as Plotly traces: its band, the curve, and over a noisy one its trailing mean.

    `hover` is a template with `%{x}` and `%{y}`.
    """
    line = {"type": "scatter", "mode": "lines", "x": list(points.xs), **more}  # common to all three
    traces: list[dict[str, Any]] = []
    if points.each > 1:
        # The outline runs along the highs and back along the lows.
        band = {"x": [*points.xs, *reversed(points.xs)], "y": _short([*points.highs, *reversed(points.lows)])}
        style = {"fill": "toself", "line": {"width": 0}, "fillcolor": colour, "opacity": 0.18}
        traces.append(line | band | style | {"hoverinfo": "skip", "showlegend": False})
    is_noisy = len(points.xs) >= SMOOTHED
    trace = {
        "mode": "lines+markers" if len(points.xs) <= FEW else "lines",
        "name": name,
        "y": _short(points.ys),
        "line": {"color": colour, "width": 1 if is_noisy else 2},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": hover + "<extra></extra>",
        "legendgroup": name,
    }
    traces.append(line | trace | ({"opacity": 0.4, "showlegend": False} if is_noisy else {}))
    if is_noisy:
        # The mean over the window that ends at each value.
        values, width = points.ys, max(2, len(points.ys) // WINDOW)
        mean = _short([fmean(values[max(0, at + 1 - width) : at + 1]) for at in range(len(values))])
        style = {"line": {"color": colour, "width": 2.2}, "hoverinfo": "skip"}
        traces.append(line | style | {"name": name, "legendgroup": name, "y": mean})
    return traces


def _short(values: Sequence[float]) -> list[float]:
    return [rounded(value, 5) for value in values]


# ----------------------------------------------------------------------------------------------------------- run curves

Line = Mapping[str, Any]
DECADES = 100.0  # ratio of the most to the least from which an axis is logarithmic
TOP, BOTTOM = (0.56, 1.0), (0.0, 0.42)  # domains of two panels of one figure


def loss_figure(lines: Sequence[Line]) -> Figure | None:
    """Loss in training, of each depth of multi-token prediction, and on held-out text; None without a recorded loss."""
    train = _points(lines, "loss")
    if train is None:
        return None
    hover = "step %{x:,}<br>{} %{y:.4f}"
    data = curve(train, "train", SERIES[0], hover.replace("{}", "train"))
    for depth in range(max(len(line.get("mtp_losses") or ()) for line in lines)):
        steps = [line for line in lines if len(line.get("mtp_losses") or ()) > depth]
        points = thinned([line["step"] for line in steps], [line["mtp_losses"][depth] for line in steps])
        name = f"multi-token prediction {depth + 1}"
        data += curve(points, name, SERIES[4 + depth % 3], hover.replace("{}", name))
    held_out = _points(lines, "evaluation_loss")
    last = f"Last: {train.ys[-1]:.4f} in training"
    if held_out is not None:
        traces = curve(held_out, "held out", SERIES[1], hover.replace("{}", "held out"))
        marks = {"mode": "lines+markers", "marker": {"color": SERIES[1], "size": 7}, "opacity": 1.0}
        data += [*traces[:-1], traces[-1] | marks]
        last += f", {held_out.ys[-1]:.4f} on held-out text"
    return Figure(
        name="loss",
        title="Loss",
        caption=f"nats per token. {last}. {train.words}".strip(),
        data=data,
        layout={"xaxis": _steps(), "yaxis": axis("loss (nats/token)"), "hovermode": "closest"},
    )


def gradient_figure(lines: Sequence[Line], run: Run | None) -> Figure | None:
    """Norm of the gradient above, learning rate below; the configuration has the clipping norm."""
    norm, rate = _points(lines, "gradient_norm"), _points(lines, "learning_rate")
    if norm is None or rate is None:
        return None
    data = curve(norm, "gradient norm", SERIES[0], "step %{x:,}<br>gradient norm %{y:.4~g}")
    data += curve(rate, "learning rate", SERIES[2], "step %{x:,}<br>learning rate %{y:.3~e}", yaxis="y2")
    shapes, clipped = [], ""
    if run is not None and run.training.clip_norm:
        shapes = [_level(run.training.clip_norm, "y")]
        above = sum(line["gradient_norm"] > run.training.clip_norm for line in _having(lines, "gradient_norm"))
        clipped = f" Dashed: clipped to {run.training.clip_norm:g}, in {above / len(lines):.0%} of the recorded steps."
    least, largest = min(norm.lows), max(norm.highs)
    has_decades = least > 0 and largest / least > DECADES
    scale = {"type": "log", "dtick": 1} if has_decades else {"rangemode": "tozero"}
    return Figure(
        name="gradient",
        title="Gradient norm and learning rate",
        caption=f"The norm is of all gradients together, before clipping.{clipped} {norm.words}".strip(),
        data=data,
        layout={
            "xaxis": _steps() | {"anchor": "y2"},
            "yaxis": axis("gradient norm", domain=TOP, **scale),
            "yaxis2": axis("learning rate", rangemode="tozero", domain=BOTTOM, tickformat="~g"),
            "shapes": shapes,
            "showlegend": False,
            "hovermode": "closest",
        },
    )


def speed_figure(lines: Sequence[Line], planned: Projection | None, unit: str = "tokens/s/device") -> Figure | None:
    """Tokens per second of a device, and model FLOPs utilization below it if known; the plan is dashed."""
    speed, mfu = _points(lines, "tokens_per_second_per_device"), _points(lines, "model_flops_utilization")
    if speed is None:
        return None
    data = curve(speed, unit, SERIES[0], f"step %{{x:,}}<br>%{{y:,.0f}} {unit}")
    usual = usual_of(lines, "tokens_per_second_per_device")
    texts = [f"{three_digits(usual)} {unit}" if usual is not None else ""]
    shapes = []
    layout: dict[str, Any] = {"xaxis": _steps(), "yaxis": axis(unit, rangemode="tozero", tickformat=",")}
    if mfu is not None:  # a panel of its own below
        data += curve(mfu, "MFU", SERIES[2], "step %{x:,}<br>MFU %{y:.1%}", yaxis="y2")
        layout["xaxis"]["anchor"] = "y2"
        layout["yaxis"]["domain"] = TOP
        layout["yaxis2"] = axis("MFU", rangemode="tozero", domain=BOTTOM, tickformat=".2~%")
        texts.append(f"MFU {share_text(usual_of(lines, 'model_flops_utilization') or 0.0)}")
    plan = ""
    if planned is not None:
        shapes.append(_level(planned.time.tokens_per_second_per_device, "y"))
        plan = f" Dashed, the plan: {three_digits(planned.time.tokens_per_second_per_device)} {unit}"
        if mfu is not None:
            shapes.append(_level(planned.time.model_flops_utilization, "y2"))
            plan += f", MFU {share_text(planned.time.model_flops_utilization)}"
        plan += "."
    unknown = "" if mfu is not None else " No MFU: the peak of the device is not known."
    return Figure(
        name="speed",
        title="Throughput",
        caption=f"Usual (median of the last half): {', '.join(filter(None, texts))}.{plan}{unknown} {speed.words}",
        data=data,
        layout={**layout, "shapes": shapes, "showlegend": False, "hovermode": "closest"},
    )


def step_figure(lines: Sequence[Line], planned: Projection | None) -> Figure | None:
    """Time of the step, with stacked phases where they were timed; the projection is a dashed line."""
    usual = usual_of(lines, "step_seconds")
    if usual is None:
        return None
    size, unit = time_unit(usual)  # seconds of the unit, and its name
    whole = _points(lines, "step_seconds", size)
    assert whole is not None, "the time of a step is recorded"
    timed = [line for line in lines if isinstance(line.get("phase_seconds"), Mapping)]  # null in the first step
    names = list(dict.fromkeys(name for line in timed for name in line["phase_seconds"]))
    colours = part_colours(names, PHASES)
    data: list[dict[str, Any]] = []
    xs = [line["step"] - 1 for line in timed]  # a line of metrics has the phases of the previous step
    for name in names:
        points = thinned(xs, [line["phase_seconds"].get(name, 0.0) / size for line in timed])
        trace = {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "phases",
            "name": name,
            "x": list(points.xs),
            "y": [float(f"{value:.4g}") for value in points.ys],
            "line": {"width": 0.5, "color": colours[name]},
            "fillcolor": colours[name],
            "hovertemplate": f"%{{y:.3~g}} {unit}",
        }
        data.append(trace)
    data += curve(whole, "step", SERIES[4], f"step %{{x:,}}<br>%{{y:.4~g}} {unit}")
    caption = [f"Usual (median of the last half): {time_text(usual)}."]
    caption.append("Stacked: phases on the first rank's device." if names else "Phases were not timed.")
    shapes = []
    if planned is not None:
        shapes.append(_level(planned.time.step_seconds / size, "y"))
        caption.append(f"Dashed, the plan: {time_text(planned.time.step_seconds)}.")
    return Figure(
        name="step",
        title="Time of a step",
        caption=" ".join([*caption, whole.words]).strip(),
        data=data,
        layout={
            "xaxis": _steps(),
            "yaxis": axis(f"time of a step ({unit})", rangemode="tozero", tickformat=","),
            "shapes": shapes,
            "hovermode": "x unified" if names else "closest",
            "showlegend": bool(names),
        },
    )


def goodput_figure(evidence: RunEvidence) -> Figure | None:
    """The wall clock of the run by kind, over all its processes, as one bar."""
    seconds, share = evidence.wall_seconds, goodput(evidence.wall_seconds)
    if share is None:
        return None
    whole = sum(seconds.values())
    size, unit = next(((size, unit) for size, unit in WALL_UNITS if whole >= 2 * size), WALL_UNITS[-1])
    bar = {kind: value / size for kind, value in seconds.items()}
    starts = counted(max(1, len(evidence.starts)), "start")
    caption = f"Goodput {share_text(share)}: training of steps that are kept, over {duration_text(whole)} "
    caption += f"since the first of {starts}. docs/metrics.md describes the kinds."
    notes = ["on the first rank"]
    bars = StackedBars(axis="wall clock", unit=unit, bars={"": bar}, notes=notes, colours=WALL_PARTS)
    return bars.figure("goodput", "Where the wall clock went", caption, is_wide=True)


def usual_of(lines: Sequence[Line], name: str) -> float | None:
    """The median of a field over the last half of the lines that have it; the first half has the warm-up."""
    values = [float(line[name]) for line in _having(lines, name)]
    return median(values[int(len(values) * USUAL) :]) if values else None


def _having(lines: Sequence[Line], name: str) -> list[Line]:
    return [line for line in lines if isinstance(line.get(name), int | float)]


def _points(lines: Sequence[Line], name: str, size: float = 1.0) -> ThinnedCurve | None:
    """A field over the steps, in units of `size`; None if no line has it."""
    matches = _having(lines, name)
    return thinned([line["step"] for line in matches], [line[name] / size for line in matches]) if matches else None


def _steps() -> dict[str, Any]:
    return axis("step", tickformat=",d")


def _level(at: float, axis: str) -> dict[str, Any]:
    shape = {"type": "line", "xref": "x domain", "yref": axis, "x0": 0, "x1": 1}
    return shape | {"y0": at, "y1": at, "line": {"color": LIMIT, "width": 1.5, "dash": "dash"}}


# ----------------------------------------------------------------------------------------------------------- run memory

PLACES = 16  # largest number of pipeline places in the figure
CURVES = 4  # largest number of ranks with a memory curve
STAIRS = 1600  # points of a memory curve
MEASURED = "measured"  # the part of a bar without a plan


def memory_figure(evidence: RunEvidence) -> Figure | None:
    """Bars of planned memory with marks of measured peaks, or bars of measured peaks alone; None without either."""
    peaks = measured_peaks(evidence)
    planned = evidence.projection
    if planned is None and not peaks:
        return None
    if planned is None:
        return _only_measured(evidence, peaks)
    shown = _places(planned)
    world, count = planned.cluster.devices, planned.layout.pp
    names = {position: place_name(planned, position) for position in shown}
    at = {rank: rank * count // world for rank in peaks}  # place of each rank: those of a place are consecutive
    marks = _marks({rank: peak for rank, peak in peaks.items() if at[rank] in names}, lambda rank: names[at[rank]])
    capacity = planned.capacity_bytes / 1e9
    bars = StackedBars(
        axis="memory of a rank",
        unit="GB",
        bars={names[position]: memory_bar(planned.memories[position]) for position in shown},
        notes=[f"planned, in {planned.memories[position].moment}" for position in shown],
        colours=MEMORY_PARTS,
        limit=capacity,
        marks=[size / 1e9 for sizes in peaks.values() for size in sizes if size is not None],
    )
    hidden = len(planned.memories) - len(shown)
    left = f" {hidden} places between these are left out." if hidden else ""
    caption = f"Bars: the plan, at the fullest moment of a step. {_measured_words(evidence)} "
    caption += f"Dashed: the capacity of {planned.cluster.hardware.name}, {capacity:.0f} GB.{left}"
    height = 380 if any(rank.memory for rank in evidence.ranks) else 240
    return bars.figure("memory", "Memory planned and measured", caption, more=marks, height=height)


def measured_peaks(evidence: RunEvidence) -> dict[int, tuple[int, int | None]]:
    """For each rank the most allocated bytes, and the most bytes reserved by its allocator (None if unknown)."""
    peaks: dict[int, tuple[int, int | None]] = {
        rank.rank: (_peak_bytes(rank), max(int(memory.reserved.max()) for memory in rank.memory))
        for rank in evidence.ranks
        if rank.memory
    }
    recorded = [line["peak_memory_bytes"] for line in evidence.lines if isinstance(line.get("peak_memory_bytes"), int)]
    if recorded:  # rank 0 writes the metrics
        traced, reserved = peaks.get(0, (0, None))
        peaks[0] = (max(*recorded, traced), reserved)
    return dict(sorted(peaks.items()))


def _peak_bytes(rank: RankAnalysis) -> int:
    return max(int(memory.allocated.max()) for memory in rank.memory)


def _places(planned: Projection) -> list[int]:
    """Places to draw: all, or evenly spaced ones and the fullest."""
    count = len(planned.memories)
    if count <= PLACES:
        return list(range(count))
    fullest = max(range(count), key=lambda position: planned.memories[position].total)
    return sorted({fullest, *evenly(count, PLACES - 1)})


def place_name(planned: Projection, position: int) -> str:
    each = planned.cluster.devices // planned.layout.pp  # ranks at each place
    first = position * each
    return f"rank {first}" if each == 1 else f"ranks {first} to {first + each - 1}"


def _measured_words(evidence: RunEvidence) -> str:
    if not measured_peaks(evidence):
        return "Nothing was measured."
    if evidence.is_cpu:
        return "Diamonds: the most that a rank's process held (resident set)."
    return "Diamonds: the peak memory that a rank's allocator had allocated; libraries and reserve are not in it."


def _marks(peaks: Mapping[int, tuple[int, int | None]], row: Callable[[int], str]) -> list[dict[str, Any]]:
    """A filled diamond for allocated, an open one for reserved memory."""
    traces = []
    for index, (name, symbol) in enumerate(((MEASURED, "diamond"), ("held by the allocator", "diamond-open"))):
        known = {rank: size for rank, sizes in peaks.items() if (size := sizes[index]) is not None}
        trace = {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [rounded(size / 1e9) for size in known.values()],
            "y": [row(rank) for rank in known],
            "customdata": list(known),
            "marker": {"symbol": symbol, "size": 11, "color": LIMIT, "line": {"width": 1.5, "color": LIMIT}},
            "hovertemplate": f"<b>{name}</b> %{{x:.4g}} GB<br>rank %{{customdata}}<extra></extra>",
        }
        traces += [trace] if known else []
    return traces


def _only_measured(evidence: RunEvidence, peaks: Mapping[int, tuple[int, int | None]]) -> Figure:
    ranks = sorted(sorted(peaks, key=lambda rank: -peaks[rank][0])[:PLACES])
    bars = StackedBars(
        axis="memory of a rank",
        unit="GB",
        bars={f"rank {rank}": {MEASURED: peaks[rank][0] / 1e9} for rank in ranks},
        notes=["the most so far"] * len(ranks),
        colours={MEASURED: SERIES[0]},
    )
    of = "the process held (resident set)" if evidence.is_cpu else "the allocator allocated"
    left = f" The fullest {PLACES} of {len(peaks)} ranks." if len(peaks) > PLACES else ""
    return bars.figure("memory", "Memory measured", f"The most that {of} so far.{left}", height=240)


def memory_over_time(evidence: RunEvidence) -> Figure | None:
    """Allocator memory over the last recorded step, of the fullest ranks; None if no trace recorded memory."""
    with_memory = [rank for rank in evidence.ranks if rank.memory]
    if not with_memory:
        return None
    fullest = sorted(with_memory, key=lambda rank: -_peak_bytes(rank))[:CURVES]
    step = last_step(fullest)
    data: list[dict[str, Any]] = []
    for index, rank in enumerate(sorted(fullest, key=lambda rank: rank.rank)):
        for kind, style in (("allocated", "solid"), ("reserved", "dot")):
            xs, ys = _over_step(rank, step, kind)
            line = {"color": SERIES[index], "width": 1.5, "shape": "hv", "dash": style}  # hv: stairs
            hover = f"rank {rank.rank}, {kind}<br>%{{x:.4~g}} ms: %{{y:.4~g}} GB<extra></extra>"
            trace = {"type": "scatter", "mode": "lines", "name": f"rank {rank.rank} {kind}", "x": xs, "y": ys}
            data.append(trace | {"line": line, "hovertemplate": hover})
    some = f" Of the fullest {CURVES} of {len(with_memory)} ranks." if len(with_memory) > CURVES else ""
    peak = gigabytes(max(map(_peak_bytes, fullest)))
    return Figure(
        name="memory-over-time",
        title=f"Memory over {'the trace' if step is None else f'step {step}'}",
        caption=f"By the time at which the host asked for it; at most {peak} were allocated.{some}",
        data=data,
        layout={
            "xaxis": axis("time in the step (ms)", rangemode="tozero"),
            "yaxis": axis("memory (GB)", rangemode="tozero"),
            "hovermode": "closest",
        },
    )


def _over_step(rank: RankAnalysis, step: int | None, kind: str) -> tuple[list[float], list[float]]:
    memory = rank.memory[0]  # of the first device; a rank of Penstock has one
    sizes = memory.allocated if kind == "allocated" else memory.reserved
    begin, end = float(memory.time_us[0]), float(memory.time_us[-1])
    for traced_step in rank.steps:
        if traced_step.number == step:  # the host's part of the step, because the times are the host's
            begin, end = traced_step.start_us, traced_step.start_us + traced_step.duration_us
    low, high = np.searchsorted(memory.time_us, [begin, end])
    times: Sequence[float] = ((memory.time_us[low:high] - begin) / 1e3).tolist()
    xs, ys = extremes(times, (sizes[low:high] / 1e9).tolist(), STAIRS)
    return [rounded(x) for x in xs], _short(ys)
