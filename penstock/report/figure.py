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


def plotly_json(figure: Figure) -> dict[str, Any]:
    """The picture as Plotly reads it."""
    return {"data": list(figure.data), "layout": {**figure.layout, "height": figure.height}}
