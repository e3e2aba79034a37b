"""Stacked bars: memory by component against the capacity, and the time of a step by term.

One horizontal bar for each layout; its name has only the settings in which the layouts differ (`names_of`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from penstock.base.numbers import rounded, three_digits, time_unit
from penstock.plan.memory import RankMemory, components
from penstock.plan.projection import Layout, Projection, RankTime
from penstock.plan.what_if import slowest
from penstock.report.colours import LIMIT, MEMORY_PARTS, TIME_PARTS, part_colours
from penstock.report.figure import Figure, axis

SMALL = 0.004  # parts below this share of the longest bar in every bar are drawn as `other`
SIZES = ("pp", "vpp", "ep", "etp", "cp", "tp", "dp")  # settings of a layout that are written as PP8


def memory_parts(memory: RankMemory) -> dict[str, int]:
    """The components of a rank's memory in bytes, in the order of a bar; they add up to its total."""
    return {name.replace("_", " "): size for name, size in components(memory).items()}


def time_parts(time: RankTime) -> dict[str, float]:
    """The terms of a step in seconds; without terms its phases."""
    if time.terms:
        return dict(time.terms)
    return {"passes": time.passes, "waiting": time.waiting, "update": time.update}


def names_of(layouts: Sequence[Layout]) -> list[str]:
    """A short name for each layout: its place, its sizes, and the other settings that differ."""
    tables = [asdict(layout) for layout in layouts]
    differ = {name for table in tables for name, value in table.items() if value != tables[0][name]}
    return [f"{number} \u00b7 {_short(table, differ)}" for number, table in enumerate(tables, start=1)]


def _short(table: Mapping[str, Any], differ: set[str]) -> str:
    """A layout without common settings; sizes are above the other settings."""
    sizes = [f"{name.upper()}{table[name]}" for name in SIZES if name in differ or (table[name] > 1 and name != "dp")]
    settings = [str(table[name]) for name in ("schedule", "dispatcher", "shard") if name in differ]
    if "micro_batch" in differ:
        settings.append(f"mb {table['micro_batch']}")
    if "recompute" in differ and table["recompute"] != "none":
        settings.append(f"recompute {table['recompute']}")
    if "sync_free_stage" in differ:
        settings.append(f"sync-free {table['sync_free_stage']}")
    return "<br>".join([" ".join(sizes) or "one rank", *([f"<i>{', '.join(settings)}</i>"] if settings else [])])


def memory_figure(projections: Sequence[Projection]) -> Figure:
    """Memory of the fullest rank of each layout, by component, and the capacity of their cluster's devices."""
    names = names_of([projection.layout for projection in projections])
    bars = [{name: size / 1e9 for name, size in memory_parts(projection.memory).items()} for projection in projections]
    capacity = projections[0].capacity_bytes / 1e9
    ranks = [f"rank {projection.memory.rank}, in {projection.memory.moment}" for projection in projections]
    hardware = projections[0].cluster.hardware.name
    return stacked(
        Figure(
            name="memory",
            title="Memory of the fullest rank",
            caption=f"At the fullest moment of a step. Dashed: the capacity of {hardware}, {capacity:.0f} GB.",
            data=part_bars(names, bars, ranks, "GB", MEMORY_PARTS),
            layout=memory_layout(names, bars, capacity),
            height=height_of(len(bars)),
        )
    )


def time_figure(projections: Sequence[Projection]) -> Figure:
    """The time of a step of each layout by term, on the pipeline rank that waits least."""
    ranks = [slowest(projection) for projection in projections]
    size, unit = time_unit(max(projection.time.step_seconds for projection in projections))
    bars = [{name: seconds / size for name, seconds in time_parts(rank).items()} for rank in ranks]
    names, notes = names_of([projection.layout for projection in projections]), [f"rank {rank.rank}" for rank in ranks]
    return stacked(
        Figure(
            name="step-time",
            title="Time of a step",
            caption="By what is done, on the pipeline rank that waits least for the others.",
            data=part_bars(names, bars, notes, unit, TIME_PARTS),
            layout={"xaxis": axis(f"time of a step ({unit})"), **sums_beside(names, bars, unit)},
            height=height_of(len(bars)),
        )
    )


def memory_layout(
    names: Sequence[str], bars: Sequence[Mapping[str, float]], capacity: float | None, marks: Sequence[float] = ()
) -> dict[str, Any]:
    """Layout of memory figures: axis, line of the capacity, sums beside the bars, all in GB; `marks`: further sizes."""
    largest = max(capacity or 0.0, *marks, *(sum(bar.values()) for bar in bars))
    dashes = {"color": LIMIT, "width": 2, "dash": "dash"}
    limit = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "line": dashes}
    return {  # the range ends behind the line and the longest bar
        "xaxis": axis("memory of a rank (GB)", range=[0, largest * 1.03]),
        "shapes": [] if capacity is None else [limit | {"x0": capacity, "x1": capacity}],
        **sums_beside(names, bars, "GB", capacity),
    }


def sums_beside(
    names: Sequence[str], bars: Sequence[Mapping[str, float]], unit: str, limit: float | None = None
) -> dict[str, Any]:
    """The sum of each bar, in the margin to the right; sums above `limit` are marked `over`."""
    annotation = {"xref": "paper", "x": 1, "xanchor": "left", "yref": "y", "showarrow": False, "font": {"size": 11}}
    sums, margin = [], 62  # pixels, which the longest text of a sum needs
    for name, bar in zip(names, bars, strict=True):
        total = sum(bar.values())
        text = f"{three_digits(total)} {unit}"
        if limit is not None and total > limit:
            text, margin = f"<b>{text} over</b>", 84
        sums.append(annotation | {"y": name, "text": text})
    return {"annotations": sums, "margin": {"r": margin}}


def height_of(bars: int) -> int:
    """Height in pixels of a figure with so many bars."""
    return 130 + 38 * bars


def part_bars(
    names: Sequence[str], bars: Sequence[Mapping[str, float]], notes: Sequence[str], unit: str, known: Mapping[str, str]
) -> list[dict[str, Any]]:
    """One trace for each part; a part that a bar lacks is 0. `notes` are shown below a bar's name on hover."""
    bars = _without_small(bars)
    # Parts with a colour come first, in the order of their colours; the others in the order of appearance.
    part_names = dict.fromkeys(name for bar in bars for name in bar)
    parts = [*(name for name in known if name in part_names), *(name for name in part_names if name not in known)]
    colours = part_colours(parts, known)
    totals = [sum(bar.values()) for bar in bars]
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": list(names),
            "x": [rounded(bar.get(part, 0.0)) for bar in bars],
            "customdata": [
                [note, f"{bar.get(part, 0.0) / total:.1%}" if total else "", rounded(total, 4)]
                for bar, note, total in zip(bars, notes, totals, strict=True)
            ],
            "marker": {"color": colours[part], "line": {"width": 0}},
            "hovertemplate": f"<b>{part}</b> %{{x:.4g}} {unit}, %{{customdata[1]}} of %{{customdata[2]}} {unit}"
            "<br>%{y}<br>%{customdata[0]}<extra></extra>",
        }
        for part in parts
    ]


def _without_small(bars: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The bars, with parts that are too small in every bar joined to `other`."""
    least, joined = SMALL * max(sum(bar.values()) for bar in bars), []
    large = {name for bar in bars for name, value in bar.items() if value >= least}  # in any bar
    for bar in bars:
        rest = sum(value for name, value in bar.items() if name not in large)
        kept = {name: value for name, value in bar.items() if name in large}
        joined.append(kept | ({"other": rest} if rest else {}))
    return joined


def stacked(figure: Figure) -> Figure:
    """The figure with the common layout of bars."""
    layout = {
        **figure.layout,
        "barmode": "stack",
        "bargap": 0.32 if len(figure.data[0]["y"]) > 1 else 0.75,  # a single bar would be too thick
        "hovermode": "closest",
        "yaxis": {"autorange": "reversed", "showgrid": False, "fixedrange": True, "tickfont": {"size": 11}},
    }
    return replace(figure, layout=layout)
