"""Fewer points of a long curve, honestly: neighbours become their mean, with the least and the most of them beside it.

A run has 100,000 steps and a screen 1,000 columns. Means alone would hide a spike of the loss, so a thinned curve is
drawn with a band from the least to the most of each bin, and `words` says how many steps a point stands for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from penstock.report.figure import rounded

POINTS = 1000
"""Of a curve at most."""

FEW = 60
"""Points up to which each is marked."""

SMOOTHED = 100
"""Points from which on a curve is noise: a mean that follows it is drawn over it."""

WINDOW = 50
"""The mean is over a so many-th part of the points."""


@dataclass(frozen=True, kw_only=True)
class Points:
    """A curve.

    Attributes:
        xs: steps; of a bin the last.
        ys: values; of a bin the mean.
        lows: least of each bin.
        highs: most of each bin.
        each: values of a bin.
    """

    xs: Sequence[float]
    ys: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]
    each: int = 1

    @property
    def words(self) -> str:
        """What a point stands for, if not for one step."""
        if self.each == 1:
            return ""
        return f"A point is the mean of {self.each} recorded steps, the band goes from the least to the most of them."


def thinned(xs: Sequence[float], ys: Sequence[float], most: int = POINTS) -> Points:
    """A curve with few points.

    Args:
        xs: where, ascending.
        ys: how much.
        most: points.
    """
    each = -(-len(xs) // most) or 1
    bins = [slice(start, start + each) for start in range(0, len(xs), each)]
    return Points(
        xs=[xs[one][-1] for one in bins],
        ys=[fmean(ys[one]) for one in bins],
        lows=[min(ys[one]) for one in bins],
        highs=[max(ys[one]) for one in bins],
        each=each,
    )


def extremes(xs: Sequence[float], ys: Sequence[float], most: int = POINTS) -> tuple[list[float], list[float]]:
    """Points of a staircase that keep its least and its most, in their order; for what is drawn as steps.

    Args:
        xs: where, ascending.
        ys: how much from there on.
        most: points.
    """
    if len(xs) <= most:
        return list(xs), list(ys)
    edges = [round(place * len(xs) / (most // 2)) for place in range(most // 2 + 1)]
    kept: list[int] = []
    for low, high in pairwise(edges):
        places = range(low, high)
        kept += sorted({min(places, key=lambda at: ys[at]), max(places, key=lambda at: ys[at])})
    return [xs[at] for at in kept], [ys[at] for at in kept]


def curve(points: Points, name: str, colour: str, hover: str, **more: Any) -> list[dict[str, Any]]:
    """A thinned curve as traces: its band, the curve, and over a noisy one its trailing mean.

    Args:
        points: of it.
        name: in the legend.
        colour: of it.
        hover: what is written there, for `%{x}` and `%{y}`.
        more: of all traces, such as the axis.
    """
    traces: list[dict[str, Any]] = []
    if points.each > 1:
        band = {"x": [*points.xs, *reversed(points.xs)], "y": _short([*points.highs, *reversed(points.lows)])}
        style = {"mode": "lines", "fill": "toself", "line": {"width": 0}, "fillcolor": colour, "opacity": 0.18}
        traces.append({"type": "scatter", **band, **style, "hoverinfo": "skip", "showlegend": False, **more})
    is_noisy = len(points.xs) >= SMOOTHED
    line = {
        "type": "scatter",
        "mode": "lines+markers" if len(points.xs) <= FEW else "lines",
        "name": name,
        "x": list(points.xs),
        "y": _short(points.ys),
        "line": {"color": colour, "width": 1 if is_noisy else 2},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": hover + "<extra></extra>",
        "legendgroup": name,
    }
    traces.append(line | ({"opacity": 0.4, "showlegend": False} if is_noisy else {}) | more)
    if is_noisy:
        mean = {"type": "scatter", "mode": "lines", "x": list(points.xs), "y": _short(_trailing(points.ys))}
        style = {"name": name, "line": {"color": colour, "width": 2.2}, "hoverinfo": "skip"}
        traces.append(mean | style | {"legendgroup": name} | more)
    return traces


def _trailing(values: Sequence[float]) -> list[float]:
    """The mean of each value and those shortly before it."""
    width = max(2, len(values) // WINDOW)
    return [fmean(values[max(0, at + 1 - width) : at + 1]) for at in range(len(values))]


def _short(values: Sequence[float]) -> list[float]:
    return [rounded(value, 5) for value in values]
