"""Curves over a size that is swept, scaling over devices, and what was measured beside what was projected.

Pictures of what-ifs: one layout on more devices, and one run with several values of one thing.

What was asked and answered comes from penstock/plan/what_if.py; a question that has no answer leaves a gap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from statistics import median
from typing import Any

from penstock.base.numbers import gigabytes, rounded, time_text
from penstock.plan.projection import Projection
from penstock.plan.what_if import SweepPoint
from penstock.report.colours import LIMIT, SERIES
from penstock.report.figure import Figure

BANDS = (0.05, 0.10)
"""Errors that are drawn around the line of no error."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line.

    Attributes:
        name: in the legend.
        xs: where.
        ys: how much; None where there is no value, for instance because nothing fits.
        notes: written on hover, one for each point; may be empty.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class CurveAxes:
    """What a picture of curves has on its axes.

    Attributes:
        x: label.
        y: label.
        is_x_log: each step to the right doubles.
        is_y_log: the same upwards.
    """

    x: str
    y: str
    is_x_log: bool = True
    is_y_log: bool = False


def curves_figure(name: str, title: str, caption: str, axes: CurveAxes, curves: Sequence[Curve]) -> Figure:
    """Curves of a sweep: context length, micro-batch, expert parallelism by dispatcher.

    Args:
        name: of the picture.
        title: of it.
        caption: what is held fixed.
        axes: their labels.
        curves: one or more.
    """
    data = [_line(curve, SERIES[place % len(SERIES)], axes) for place, curve in enumerate(curves)]
    xs = [x for curve in curves for x in curve.xs]
    # A curve that starts at 0 is honest about ratios; on a logarithmic axis there is no 0.
    y_axis = {
        "title": {"text": axes.y},
        **({"type": "log"} if axes.is_y_log else {"rangemode": "tozero", "tickformat": ","}),
    }
    layout = {"xaxis": _x_axis(axes, xs), "yaxis": y_axis, "hovermode": "closest", "showlegend": len(curves) > 1}
    return Figure(name=name, title=title, caption=caption, data=data, layout=layout)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A run on more and more devices.

    Attributes:
        name: `weak` (the batch grows with the devices) or `strong` (it does not), or a published curve.
        devices: how many, growing.
        tokens_per_second_per_device: of each; None where nothing fits.
    """

    name: str
    devices: Sequence[int]
    tokens_per_second_per_device: Sequence[float | None]

    @property
    def efficiency(self) -> list[float | None]:
        """Speed of a device over that at the fewest devices that the run fits on."""
        first = next((speed for speed in self.tokens_per_second_per_device if speed is not None), None)
        return [
            None if speed is None or first is None else speed / first for speed in self.tokens_per_second_per_device
        ]


def scaling_figure(
    name: str, title: str, caption: str, scalings: Sequence[Scaling], unit: str = "tokens/s/device"
) -> Figure:
    """Tokens per second of a device, and efficiency, over devices, one above the other.

    Args:
        name: of the picture.
        title: of it.
        caption: what is held fixed.
        scalings: weak, strong, or both.
        unit: of the speed.
    """
    axes = CurveAxes(x="devices", y=unit)
    data: list[dict[str, Any]] = []
    for place, scaling in enumerate(scalings):
        colour = SERIES[place % len(SERIES)]
        speed = Curve(name=scaling.name, xs=scaling.devices, ys=scaling.tokens_per_second_per_device)
        share = Curve(name=scaling.name, xs=scaling.devices, ys=scaling.efficiency)
        data.append(_line(speed, colour, axes))
        below = {"yaxis": "y2", "showlegend": False, "hovertemplate": _template(axes.x, "efficiency", ":.1%")}
        data.append(_line(share, colour, axes) | below)
    xs = [float(count) for scaling in scalings for count in scaling.devices]
    percent = {"title": {"text": "efficiency"}, "tickformat": ".0%", "rangemode": "tozero", "domain": [0, 0.42]}
    layout = {
        "xaxis": _x_axis(axes, xs) | {"anchor": "y2"},
        "yaxis": {"title": {"text": axes.y}, "rangemode": "tozero", "domain": [0.52, 1], "tickformat": ","},
        "yaxis2": percent,
        "hovermode": "closest",
    }
    return Figure(name=name, title=title, caption=caption, data=data, layout=layout, height=460)


def _x_axis(axes: CurveAxes, xs: Sequence[float]) -> dict[str, Any]:
    """The lower axis, with ticks where there are points."""
    ticks = sorted(set(xs))
    axis: dict[str, Any] = {"title": {"text": axes.x}, "tickformat": ","}
    if axes.is_x_log:
        axis["type"] = "log"
    if len(ticks) <= 12:
        axis |= {"tickvals": ticks, "ticktext": [f"{tick:,.6g}" for tick in ticks]}
    return axis


def _template(x: str, y: str, shape: str = ":,.4~g") -> str:
    """What is written on hover."""
    return f"<b>%{{fullData.name}}</b><br>{x}: %{{x:,}}<br>{y}: %{{y{shape}}}%{{text}}<extra></extra>"


def _line(curve: Curve, colour: str, axes: CurveAxes) -> dict[str, Any]:
    """A curve as a trace."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": curve.name,
        "x": list(curve.xs),
        "y": [None if y is None else rounded(y) for y in curve.ys],
        "text": [f"<br>{note}" for note in curve.notes] or [""] * len(curve.xs),
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 7},
        "hovertemplate": _template(axes.x, axes.y),
    }


@dataclass(frozen=True, kw_only=True)
class ProjectionCheck:
    """A run that was projected and measured.

    Attributes:
        name: of the run.
        group: runs of one group have one colour: `chosen before the freeze`, `chosen after it`.
        measured: in any unit.
        projected: in the same.
    """

    name: str
    group: str
    measured: float
    projected: float

    @property
    def error(self) -> float:
        """Of the projection; above 0 if it is too large."""
        return self.projected / self.measured - 1


def checks_figure(name: str, title: str, unit: str, checks: Sequence[ProjectionCheck]) -> Figure:
    """Projected over measured, and below it the error, with the bands of 5 % and 10 %.

    Args:
        name: of the picture.
        title: of it.
        unit: of both axes.
        checks: one point each; values above 0.
    """
    values = [value for check in checks for value in (check.measured, check.projected)]
    low, high = min(values) / 1.15, max(values) * 1.15
    groups = list(dict.fromkeys(check.group for check in checks))
    data = [shape for band in reversed(BANDS) for shape in _band(low, high, band)] + _lines_of_no_error(low, high)
    for place, group in enumerate(groups):
        data += _points([check for check in checks if check.group == group], unit, SERIES[place % len(SERIES)])
    errors = [abs(check.error) for check in checks]
    within = ", ".join(f"{sum(error <= band for error in errors)} within {band:.0%}" for band in BANDS)
    most = max(1.3 * BANDS[-1], 1.1 * max(errors))
    axis = {"type": "log", "range": [log10(low), log10(high)], **_ticks(low, high)}
    return Figure(
        name=name,
        title=title,
        caption=f"{len(checks)} runs: {within}; median error {median(errors):.1%}, largest {max(errors):.1%}.",
        data=data,
        layout={
            "xaxis": {"title": {"text": f"measured ({unit})"}, **axis, "anchor": "y2"},
            "yaxis": {"title": {"text": f"projected ({unit})"}, **axis, "domain": [0.4, 1]},
            "yaxis2": {"title": {"text": "error"}, "tickformat": "+.0%", "range": [-most, most], "domain": [0, 0.32]},
            "hovermode": "closest",
        },
        height=580,
    )


def _ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks of a logarithmic axis at 1, 2 and 5 of each power of ten."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in (1, 2, 5) if low <= step * 10.0**power <= high]
    return {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _band(low: float, high: float, share: float) -> list[dict[str, Any]]:
    """What is less than a share away from no error, in both panels."""
    xs = [low, high, high, low]
    shape: dict[str, Any] = {"type": "scatter", "mode": "lines", "fill": "toself", "x": xs, "hoverinfo": "skip"}
    shape |= {"fillcolor": "rgba(128,128,128,0.2)", "line": {"width": 0}, "name": f"\u00b1 {share:.0%}"}
    above = [low * (1 - share), high * (1 - share), high * (1 + share), low * (1 + share)]
    below = [-share, -share, share, share]
    return [shape | {"y": above}, shape | {"y": below, "yaxis": "y2", "showlegend": False}]


def _lines_of_no_error(low: float, high: float) -> list[dict[str, Any]]:
    """Where projected is measured, in both panels."""
    line: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "x": [low, high],
        "showlegend": False,
        "hoverinfo": "skip",
    }
    line |= {"line": {"color": LIMIT, "width": 1, "dash": "dash"}}
    return [line | {"y": [low, high]}, line | {"y": [0, 0], "yaxis": "y2"}]


def _points(checks: Sequence[ProjectionCheck], unit: str, colour: str) -> list[dict[str, Any]]:
    """Runs of one group, in both panels."""
    hover = (
        "<b>%{customdata[0]}</b><br>projected %{customdata[2]:.4~g} "
        f"{unit}, measured %{{x:.4~g}} {unit}: %{{customdata[1]}}<extra></extra>"
    )
    points = {
        "type": "scatter",
        "mode": "markers",
        "name": checks[0].group,
        "x": [rounded(check.measured) for check in checks],
        "customdata": [[check.name, f"{check.error:+.1%}", rounded(check.projected)] for check in checks],
        "marker": {"color": colour, "size": 9, "line": {"width": 1, "color": "rgba(255,255,255,0.8)"}},
        "hovertemplate": hover,
    }
    above = points | {"y": [rounded(check.projected) for check in checks]}
    below = points | {"y": [rounded(check.error) for check in checks], "yaxis": "y2", "showlegend": False}
    return [above, below]


# ------------------------------------------------------------------------------------------------------------- what ifs


def scaling_pictures(kinds: Mapping[str, Sequence[SweepPoint]], base: Projection) -> list[Figure]:
    """Speed and efficiency over devices.

    Args:
        kinds: points of `strong` and of `weak` scaling, as `penstock.plan.what_if.scale` gives them.
        base: whose layout it is.
    """
    scalings = [
        Scaling(
            name=kind,
            devices=[int(point.asked["devices"]) for point in points],
            tokens_per_second_per_device=[_speed(point) for point in points],
        )
        for kind, points in kinds.items()
    ]
    caption = f"{base.run.name} on {base.cluster.hardware.name}, {base.layout}. Projected."
    return [scaling_figure("scaling", "Scaling", caption, scalings, base.cluster.speed_unit)]


def sweep_pictures(points: Sequence[SweepPoint], base: Projection) -> list[Figure]:
    """Speed, and memory of the fullest rank, over what is swept; a curve for each dispatcher where they are asked for.

    Args:
        points: as `penstock.plan.what_if.sweep` gives them; none for values that are no numbers.
        base: from which the runs differ.
    """
    name = next((name for point in points for name in point.asked if name != "dispatcher"), "")
    if not points or not all(point.asked[name].isdecimal() for point in points):
        return []
    groups: dict[str, list[SweepPoint]] = {}
    for point in points:
        groups.setdefault(point.asked.get("dispatcher", base.layout.dispatcher), []).append(point)
    label = name.rpartition(".")[2].replace("_", " ")
    caption = f"{base.run.name} on {base.cluster.devices:,} x {base.cluster.hardware.name}, {base.layout}. Projected."
    speeds = [_curve(group, name, dispatcher, "speed") for dispatcher, group in groups.items()]
    memories = [_curve(group, name, dispatcher, "memory") for dispatcher, group in groups.items()]
    return [
        curves_figure(
            "sweep-speed", f"Speed over {label}", caption, CurveAxes(x=label, y=base.cluster.speed_unit), speeds
        ),
        curves_figure(
            "sweep-memory",
            f"Memory over {label}",
            caption,
            CurveAxes(x=label, y="memory of the fullest rank (GB)"),
            memories,
        ),
    ]


def _speed(point: SweepPoint) -> float | None:
    """Tokens per second of a device, or nothing."""
    return point.answer.time.tokens_per_second_per_device if isinstance(point.answer, Projection) else None


def _curve(points: Sequence[SweepPoint], name: str, dispatcher: str, what: str) -> Curve:
    """Answers as one curve."""
    ys: list[float | None] = []
    for point in points:
        memory = point.answer.memory.total / 1e9 if isinstance(point.answer, Projection) else None
        ys.append(_speed(point) if what == "speed" else memory)
    xs, notes = [float(point.asked[name]) for point in points], [_note(point) for point in points]
    return Curve(name=dispatcher, xs=xs, ys=ys, notes=notes)


def _note(point: SweepPoint) -> str:
    """What is written beside a point on hover."""
    one = point.answer
    if not isinstance(one, Projection):
        return one.rule
    return f"step {time_text(one.time.step_seconds)}, {gigabytes(one.memory.total)}{'' if one.fits else ': too much'}"
