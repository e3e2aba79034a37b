"""Colours, chosen so that neighbours differ for colour-blind readers, on white and on black.

Forward passes are blue and backward passes warm; the stages of one rank are shades of one hue. A part of a stack has
the same colour in every figure.
"""

from collections.abc import Mapping, Sequence

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
