"""A figure as Plotly's own JSON, made of plain values.

Plotly's Python package is not imported: it takes half a second to load and validates what our tests validate. A figure
does not contain background, text and grid colours; these come from `THEMES` when it is drawn, so that one figure serves
a light page, a dark page, and an image for print.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"  # of the page and of all figures


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure."""

    name: str  # letters, digits and hyphens; also the name of an exported file
    title: str
    caption: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]  # Plotly's layout, without the theme
    height: int = 380
    is_wide: bool = False
    hint: str = ""  # how to interact with it, after the caption


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def _theme(ink: str, faint: str, grid: str, paper: str, raised: str, hues: Sequence[str]) -> dict[str, Any]:
    """A theme as the layout of a Plotly template.

    `raised` is the background of hover labels; `hues` are those of heat maps: zero, half, full, and below zero.
    """
    lines = {
        "gridcolor": grid,
        "linecolor": grid,
        "zerolinecolor": grid,
        "ticklabelstandoff": 4,
        "tickfont": {"color": faint},
        "automargin": True,
        "title": {"font": {"color": faint, "size": 12}, "standoff": 10},
    }
    return {
        "font": {"family": FONT, "size": 12, "color": ink},
        "paper_bgcolor": paper,
        "plot_bgcolor": paper,
        "xaxis": lines,
        "yaxis": lines,
        "hoverlabel": {"bgcolor": raised, "bordercolor": grid, "font": {"family": FONT, "color": ink}},
        # Above the figure, from the left, in the order of the traces.
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "colorscale": {
            "sequential": [[0, hues[0]], [0.5, hues[1]], [1, hues[2]]],
            "diverging": [[0, hues[3]], [0.5, hues[0]], [1, hues[1]]],
        },
        "margin": {"l": 14, "r": 16, "t": 8, "b": 8},
    }


_LIGHT_HUES, _DARK_HUES = ("#f1f3f6", "#e0812c", "#8c1d2f", "#3579c8"), ("#22272e", "#e0812c", "#ffd9b0", "#3579c8")

THEMES: dict[str, dict[str, Any]] = {  # colours as in assets/page.css: ink, faint, line, paper, raised
    "light": _theme("#1f2328", "#59636e", "#e4e7eb", "#ffffff", "#ffffff", _LIGHT_HUES),
    "dark": _theme("#e6e8eb", "#9aa4b0", "#2e343c", "#171a1f", "#22272e", _DARK_HUES),
}
"""Layouts by theme."""


def evenly(count: int, limit: int) -> list[int]:
    """At most `limit` indices below `count`, evenly spaced, the first and the last included."""
    if count <= limit:
        return list(range(count))
    return sorted({round(at * (count - 1) / max(1, limit - 1)) for at in range(limit)})


def left_out(shown: int, count: int, what: str) -> str:
    """The sentence of a caption that says how many are shown; empty if all are."""
    return f" {shown} of {count} {what}." if shown < count else ""


_FOREIGN = re.compile(r"<(?!/?(?:b|i|br|extra)>)")
"""Begins of tags that we do not write; Plotly would draw links and styles of names that others have written."""


def plotly_json(figure: Figure) -> dict[str, Any]:
    return {"data": _as_text(figure.data), "layout": _as_text({**figure.layout, "height": figure.height})}


def _as_text(value: Any) -> Any:
    """A value without foreign tags; `meta` is never drawn by Plotly."""
    if isinstance(value, str):
        return _FOREIGN.sub("&lt;", value)
    if isinstance(value, Mapping):
        return {key: inner if key == "meta" else _as_text(inner) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return list(value) if value and isinstance(value[0], (int, float)) else [_as_text(inner) for inner in value]
    return value
