"""Curves: sweeps of a size, and scaling over devices.

The answers of what-ifs come from penstock/plan/what_if.py; a question without an answer leaves a gap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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


def curves_figure(name: str, title: str, caption: str, curves: Sequence[Curve], *, x: str, y: str) -> Figure:
    """Curves of a sweep: context length, micro-batch, expert parallelism by dispatcher."""
    data = [_line(curve, SERIES[index % len(SERIES)], x, y) for index, curve in enumerate(curves)]
    layout = {
        "xaxis": _x_axis(x, curves),
        "yaxis": axis(y, rangemode="tozero", tickformat=","),  # an axis from 0 shows ratios
        "hovermode": "closest",
        "showlegend": len(curves) > 1,
    }
    return Figure(name=name, title=title, caption=caption, data=data, layout=layout)


def scaling_figure(
    name: str, title: str, caption: str, curves: Sequence[Curve], unit: str = "tokens/s/device"
) -> Figure:
    """Tokens per second of a device over devices, and below it over that at the fewest devices that a run fits on.

    A curve is of `weak` scaling (the batch grows with the devices), of `strong` scaling, or published.
    """
    data: list[dict[str, Any]] = []
    for index, speed in enumerate(curves):
        colour, first = SERIES[index % len(SERIES)], next((y for y in speed.ys if y is not None), 1.0)
        data.append(_line(speed, colour, "devices", unit))
        efficiency = replace(speed, ys=[None if y is None else y / first for y in speed.ys])
        # The name is in the legend once, with the speed.
        data.append(_line(efficiency, colour, "devices", "efficiency", ":.1%") | {"yaxis": "y2", "showlegend": False})
    layout = {
        "xaxis": _x_axis("devices", curves) | {"anchor": "y2"},
        "yaxis": axis(unit, rangemode="tozero", domain=[0.52, 1], tickformat=","),
        "yaxis2": axis("efficiency", rangemode="tozero", domain=[0, 0.42], tickformat=".0%"),
        "hovermode": "closest",
    }
    return Figure(name=name, title=title, caption=caption, data=data, layout=layout, height=460)


def _x_axis(label: str, curves: Sequence[Curve]) -> dict[str, Any]:
    """The lower axis; few points get a tick each."""
    ticks = sorted({float(x) for curve in curves for x in curve.xs})
    few = {"tickvals": ticks, "ticktext": [f"{tick:,.6g}" for tick in ticks]} if len(ticks) <= 12 else {}
    return axis(label, tickformat=",", type="log", **few)


def _line(curve: Curve, colour: str, x: str, y: str, shape: str = ":,.4~g") -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": curve.name,
        "x": list(curve.xs),
        "y": [None if value is None else rounded(value) for value in curve.ys],
        "text": [f"<br>{note}" for note in curve.notes] or [""] * len(curve.xs),
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 7},
        "hovertemplate": f"<b>%{{fullData.name}}</b><br>{x}: %{{x:,}}<br>{y}: %{{y{shape}}}%{{text}}<extra></extra>",
    }


def scaling_pictures(kinds: Mapping[str, Sequence[SweepPoint]], base: Projection) -> list[Figure]:
    """Speed and efficiency over devices, by the points of `strong` and of `weak` scaling; `base` has their layout."""
    curves = [
        Curve(name=kind, xs=[int(point.asked["devices"]) for point in points], ys=list(map(_speed, points)))
        for kind, points in kinds.items()
    ]
    caption = f"{base.run.name} on {base.cluster.hardware.name}, {base.layout}. Projected."
    return [scaling_figure("scaling", "Scaling", caption, curves, base.cluster.speed_unit)]


def sweep_pictures(points: Sequence[SweepPoint], base: Projection, *, is_search: bool = False) -> list[Figure]:
    """Speed, and memory of the fullest rank, over the swept value; a curve for each dispatcher.

    `points` are from `penstock.plan.what_if.sweep`; values that are not numbers give no figure. `base` is the
    projection that the runs differ from; with `is_search` each point is the fastest layout of its value.
    """
    name = next((name for point in points for name in point.asked if name != "dispatcher"), "")
    if not points or not all(point.asked[name].isdecimal() for point in points):
        return []
    groups: dict[str, list[SweepPoint]] = {}  # by dispatcher
    for point in points:
        curve = "fastest layout" if is_search else point.asked.get("dispatcher", base.layout.dispatcher)
        groups.setdefault(curve, []).append(point)
    label = name.rpartition(".")[2].replace("_", " ")
    layout = "the fastest layout of each" if is_search else f"{base.layout}"
    caption = f"{base.run.name} on {base.cluster.devices:,} x {base.cluster.hardware.name}, {layout}. Projected."
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
        title = f"{what.capitalize()} over {label}"
        figures.append(curves_figure(f"sweep-{what}", title, caption, curves, x=label, y=unit))
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
