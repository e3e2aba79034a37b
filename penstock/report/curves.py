"""Curves: sweeps of a size, and scaling over devices.

The answers of what-ifs come from penstock/plan/what_if.py; a question without an answer leaves a gap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.base.numbers import gigabytes, rounded, time_text
from penstock.plan.projection import Projection
from penstock.plan.what_if import SweepPoint
from penstock.report.colours import SERIES
from penstock.report.figure import Figure, axis


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]  # None where there is no value, for instance because nothing fits
    notes: Sequence[str] = ()  # shown on hover, one for each point; can be empty


@dataclass(frozen=True, kw_only=True)
class CurveAxes:
    """Labels of the axes, and whether they are logarithmic."""

    x: str
    y: str
    is_x_log: bool = True
    is_y_log: bool = False


def curves_figure(name: str, title: str, caption: str, axes: CurveAxes, curves: Sequence[Curve]) -> Figure:
    """Curves of a sweep: context length, micro-batch, expert parallelism by dispatcher."""
    data = [_line(curve, SERIES[index % len(SERIES)], axes) for index, curve in enumerate(curves)]
    xs = [x for curve in curves for x in curve.xs]
    # An axis from 0 shows ratios; a logarithmic axis has no 0.
    y_axis = axis(axes.y, **({"type": "log"} if axes.is_y_log else {"rangemode": "tozero", "tickformat": ","}))
    layout = {"xaxis": _x_axis(axes, xs), "yaxis": y_axis, "hovermode": "closest", "showlegend": len(curves) > 1}
    return Figure(name=name, title=title, caption=caption, data=data, layout=layout)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A run on a growing number of devices."""

    name: str  # `weak` (the batch grows with the devices) or `strong` (it does not), or a published curve
    devices: Sequence[int]
    tokens_per_second_per_device: Sequence[float | None]  # of each; None where nothing fits

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
    """Tokens per second of a device, and efficiency below, over devices."""
    axes = CurveAxes(x="devices", y=unit)
    data: list[dict[str, Any]] = []
    for index, scaling in enumerate(scalings):
        colour = SERIES[index % len(SERIES)]
        speed = Curve(name=scaling.name, xs=scaling.devices, ys=scaling.tokens_per_second_per_device)
        share = Curve(name=scaling.name, xs=scaling.devices, ys=scaling.efficiency)
        data.append(_line(speed, colour, axes))
        # The name is in the legend once, with the speed.
        below = {"yaxis": "y2", "showlegend": False, "hovertemplate": _template(axes.x, "efficiency", ":.1%")}
        data.append(_line(share, colour, axes) | below)
    xs = [float(count) for scaling in scalings for count in scaling.devices]
    layout = {
        "xaxis": _x_axis(axes, xs) | {"anchor": "y2"},
        "yaxis": axis(axes.y, rangemode="tozero", domain=[0.52, 1], tickformat=","),
        "yaxis2": axis("efficiency", rangemode="tozero", domain=[0, 0.42], tickformat=".0%"),
        "hovermode": "closest",
    }
    return Figure(name=name, title=title, caption=caption, data=data, layout=layout, height=460)


def _x_axis(axes: CurveAxes, xs: Sequence[float]) -> dict[str, Any]:
    """The lower axis; few points get a tick each."""
    ticks = sorted(set(xs))
    kind = {"type": "log"} if axes.is_x_log else {}
    few = {"tickvals": ticks, "ticktext": [f"{tick:,.6g}" for tick in ticks]} if len(ticks) <= 12 else {}
    return axis(axes.x, tickformat=",", **kind, **few)


def _template(x: str, y: str, shape: str = ":,.4~g") -> str:
    return f"<b>%{{fullData.name}}</b><br>{x}: %{{x:,}}<br>{y}: %{{y{shape}}}%{{text}}<extra></extra>"


def _line(curve: Curve, colour: str, axes: CurveAxes) -> dict[str, Any]:
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


def scaling_pictures(kinds: Mapping[str, Sequence[SweepPoint]], base: Projection) -> list[Figure]:
    """Speed and efficiency over devices, by the points of `strong` and of `weak` scaling; `base` has their layout."""
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
    """Speed, and memory of the fullest rank, over the swept value; a curve for each dispatcher.

    `points` are from `penstock.plan.what_if.sweep`; values that are not numbers give no figure. `base` is the
    projection that the runs differ from.
    """
    name = next((name for point in points for name in point.asked if name != "dispatcher"), "")
    if not points or not all(point.asked[name].isdecimal() for point in points):
        return []
    groups: dict[str, list[SweepPoint]] = {}  # by dispatcher
    for point in points:
        groups.setdefault(point.asked.get("dispatcher", base.layout.dispatcher), []).append(point)
    label = name.rpartition(".")[2].replace("_", " ")
    caption = f"{base.run.name} on {base.cluster.devices:,} x {base.cluster.hardware.name}, {base.layout}. Projected."
    figures = []
    for what, unit, value_of in (
        ("speed", base.cluster.speed_unit, _speed),
        ("memory", "memory of the fullest rank (GB)", _memory_gb),
    ):
        curves = [
            Curve(
                name=dispatcher,
                xs=[float(point.asked[name]) for point in group],
                ys=[value_of(point) for point in group],
                notes=[_note(point) for point in group],
            )
            for dispatcher, group in groups.items()
        ]
        title, axes = f"{what.capitalize()} over {label}", CurveAxes(x=label, y=unit)
        figures.append(curves_figure(f"sweep-{what}", title, caption, axes, curves))
    return figures


def _speed(point: SweepPoint) -> float | None:
    return point.answer.time.tokens_per_second_per_device if isinstance(point.answer, Projection) else None


def _memory_gb(point: SweepPoint) -> float | None:
    return point.answer.memory.total / 1e9 if isinstance(point.answer, Projection) else None


def _note(point: SweepPoint) -> str:
    run = point.answer
    if not isinstance(run, Projection):
        return run.rule
    return f"step {time_text(run.time.step_seconds)}, {gigabytes(run.memory.total)}{'' if run.fits else ': too much'}"
