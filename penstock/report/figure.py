"""What a picture is: Plotly's own JSON, made as plain values.

Python's half of Plotly is not imported: it takes half a second to load and checks what our tests check. A picture says
nothing of background, text and grid; these come from `THEMES` when it is drawn, so that one picture serves a light
page, a dark one, and an image for print.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
"""Of the page and of all pictures."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture.

    Attributes:
        name: short, of letters, digits and hyphens; a file that it is saved in is called so.
        title: above it.
        caption: below the title: what is seen, and what it rests on.
        data: Plotly's traces.
        layout: Plotly's layout, without what a theme says.
        height: in pixels.
        is_wide: it needs the whole width of a page.
        hint: what the reader can do, behind the caption.
    """

    name: str
    title: str
    caption: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    height: int = 380
    is_wide: bool = False
    hint: str = ""


def _theme(ink: str, faint: str, grid: str, paper: str, raised: str, hues: Sequence[str]) -> dict[str, Any]:
    """What a theme says, as the layout of a Plotly template.

    Args:
        ink: of text.
        faint: of what stands beside.
        grid: of lines.
        paper: of the ground.
        raised: ground of what lies above it.
        hues: of heat maps: nothing, half and all of a scale that begins at nothing, and what is below nothing.
    """
    axis = {
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
        "xaxis": axis,
        "yaxis": axis,
        "hoverlabel": {"bgcolor": raised, "bordercolor": grid, "font": {"family": FONT, "color": ink}},
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


THEMES: dict[str, dict[str, Any]] = {
    "light": _theme(
        ink="#1f2328",
        faint="#59636e",
        grid="#e4e7eb",
        paper="#ffffff",
        raised="#ffffff",
        hues=("#f1f3f6", "#e0812c", "#8c1d2f", "#3579c8"),
    ),
    "dark": _theme(
        ink="#e6e8eb",
        faint="#9aa4b0",
        grid="#2e343c",
        paper="#171a1f",
        raised="#22272e",
        hues=("#22272e", "#e0812c", "#ffd9b0", "#3579c8"),
    ),
}
"""What a picture does not say itself."""


def rounded(value: float, digits: int = 6) -> float:
    """A number with so many significant digits: more are never seen, and make a page large."""
    return float(f"{value:.{digits}g}")


def plotly_json(figure: Figure) -> dict[str, Any]:
    """The picture as Plotly reads it."""
    return {"data": list(figure.data), "layout": {**figure.layout, "height": figure.height}}


def three_digits(value: float) -> str:
    """A number with at least three digits: `28.0`, `326`, `8,421`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "\u00b5s"))
"""Seconds, and how they are written."""


def time_unit(span: float) -> tuple[float, str]:
    """The unit in which a time is at least 1; of shorter ones the smallest.

    Args:
        span: the longest time, in seconds.

    Returns:
        Seconds of the unit, and its name.
    """
    return next((unit for unit in TIME_UNITS if span >= unit[0]), TIME_UNITS[-1])


def time_text(seconds: float) -> str:
    """A time with three digits: `1.24 s`, `38.2 ms`."""
    size, name = time_unit(seconds)
    return f"{three_digits(seconds / size)} {name}"


def share_text(share: float) -> str:
    """A share with one decimal: `28.3%`; a small one is not written as nothing."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def bytes_text(size: float) -> str:
    """Bytes in the unit in which they are at least 1: `14.9 MB`, `45.7 GB`."""
    unit, name = next((one for one in BYTE_UNITS if size >= one[0]), (1.0, "B"))
    return f"{three_digits(size / unit)} {name}"


BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
"""Bytes, and how they are written."""


def counted(number: int, thing: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def gigabytes(size: float) -> str:
    """Bytes in units of 1e9."""
    return f"{size / 1e9:.1f} GB"
