"""A figure as Plotly's own JSON, made of plain values, and the colours of all figures.

Plotly's Python package is not imported: it takes half a second to load and validates what our tests validate. A figure
does not contain background, text and grid colours; these come from `THEMES` when it is drawn, so that one figure serves
a light page, a dark page, and an image for print.

Neighbouring colours differ for colour-blind readers, on white and on black. Forward passes are blue and backward passes
warm; the stages of one rank are shades of one hue. A part of a stack has the same colour in every figure.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.layout.actions import Kind
from penstock.trace.kernel_names import COLLECTIVES

HUES: dict[Kind, str] = {
    Kind.FORWARD: "#3579c8",
    Kind.BACKWARD: "#e0812c",
    Kind.INPUT: "#cf5446",
    Kind.WEIGHT: "#d9ab2b",
}
"""Of each kind of action."""

IDLE = "rgba(128,128,128,0.22)"  # time in which a rank waits

HELD = "#7a6fb3"
"""Memory that a rank holds."""

LIMIT = "#d64550"
"""A line that must not be crossed."""

SERIES = ("#3579c8", "#e0812c", "#2f9e77", "#b55fb0", "#7f8896", "#cf5446", "#d9ab2b", "#4cb3d4")
"""Of curves, and of parts of a stack without a colour of their own."""

MEMORY_PARTS: dict[str, str] = {
    "parameters": "#2c5f9e",
    "gradients": "#4f93d6",
    "master": "#8ab8e6",
    "moments": "#b9d3ec",
    "gathered": "#5a6fc0",
    "activations": "#e0812c",
    "logits": "#efb671",
    "buffers": "#2f9e77",
    "communication": "#7cc4a8",
    "graph pool": "#b55fb0",
    "libraries": "#a9afb9",
    "reserve": "#7f8896",
    "other": "#5c636d",
}
"""Of memory components: state is blue, memory held by passes is warm, communication is green."""

TIME_PARTS: dict[str, str] = {
    "passes": "#3579c8",
    "attention": "#3579c8",
    "products": "#7fb2e5",
    "elementwise": "#bcd3ea",
    "experts": "#e0812c",
    "quantize": "#f6cda6",
    "loss": "#efb671",
    "route": "#d9ab2b",
    "dispatch": "#2f9e77",
    "exchange": "#56b891",
    "gradients": "#93d1b8",
    "optimizer": "#b55fb0",
    "update": "#b55fb0",
    "host": "#cf5446",
    "host link": "#7f8896",
    "bubble": "#a9afb9",
    "waiting": "#a9afb9",
    "other": "#5c636d",
}
"""Of the terms of a step: dense work is blue, experts are warm, communication is green, waiting is grey."""

PHASES: dict[str, str] = {
    "data": "#7f8896",
    "forward": HUES[Kind.FORWARD],
    "backward": HUES[Kind.BACKWARD],
    "replay": "#4cb3d4",
    "reduce": "#2f9e77",
    "optimizer": "#b55fb0",
}
"""Of phases of a step that are always timed."""

WALL_PARTS: dict[str, str] = {
    "training": "#2f9e77",
    "data": "#d9ab2b",
    "compile": "#b55fb0",
    "evaluation": "#4cb3d4",
    "checkpoint": "#3579c8",
    "start": "#7f8896",
    "other": "#5c636d",
    "lost": "#cf5446",
    "queued": "#c9ced6",
    "down": "#a9afb9",
}
"""Of the wall clock of a run: training is green, lost steps are red, time without a process is grey."""

KERNELS: dict[str, str] = {
    "attention": "#3579c8",
    "dense": "#7fb2e5",
    "norm": "#bcd3ea",
    "route": "#d9ab2b",
    "permute": "#efd27a",
    "experts": "#e0812c",
    "activation": "#f6cda6",
    "dispatch": "#2f9e77",
    "combine": "#7cc4a8",
    "collectives": "#1d6b50",
    "waiting": "#cf5446",
    "loss": "#efb671",
    "optimizer": "#b55fb0",
    "copies": "#7f8896",
    "other": "#5c636d",
}
"""Of groups of phases on a device: hues as in `TIME_PARTS`; waiting for other ranks is red."""

_KERNEL_GROUPS = {
    phase: group
    for group, phases in {
        "attention": ("positions", "key-value cache"),
        "dense": ("shared", "matrix products", "convolution"),
        "norm": ("embed", "residual", "elementwise", "reductions", "quantize", "pooling"),
        "route": ("index", "sort"),
        "permute": ("gather and scatter",),
        "experts": ("grouped products", "grouped products of weight gradients"),
        "collectives": (*COLLECTIVES, "reduce"),
        "optimizer": ("clip", "zero", "balance", "gradient sums"),
        "copies": ("copy", "fill"),
    }.items()
    for phase in phases
}
"""Groups of the phases of a trace that are not groups themselves."""

_SHADE_RANGE = 0.55  # the last of many shades is this far towards white


def kernel_group(phase: str) -> str:
    """The group of a phase of a trace: `experts weight gradient` is `experts`."""
    if phase.endswith("waiting"):
        return "waiting"
    group = _KERNEL_GROUPS.get(phase, phase)  # a phase without an entry is a group, or begins with the name of one
    return next((name for name in KERNELS if group.startswith(name)), "other")


def shade(colour: str, index: int, count: int) -> str:
    """Shade `index` of `count` shades of a colour `#rrggbb`: the first is the colour itself, the last the lightest."""
    share = _SHADE_RANGE * index / max(count - 1, 2)  # of two shades the second is only half as light
    return "#" + "".join(f"{round(value + (255 - value) * share):02x}" for value in channels(colour))


def ink_on(colour: str) -> str:
    """Black or white, whichever is more readable on a colour. Luma of ITU-R BT.601."""
    red, green, blue = channels(colour)
    return "#1a1d21" if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "#ffffff"


def part_colours(names: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """A colour for each part of a stack: its own in `known`, else one that no other part of the stack has."""
    taken = {known[name] for name in names if name in known}
    free = [colour for colour in SERIES if colour not in taken]
    strange = [name for name in names if name not in known]
    # If there are more parts than colours, lighter shades of the same colours follow.
    colours = {name: shade(free[index % len(free)], index // len(free), 4) for index, name in enumerate(strange)}
    return {name: known.get(name) or colours[name] for name in names}


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of a colour `#rrggbb`, 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


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
