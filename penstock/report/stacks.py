"""Stacked bars: memory by component against the capacity, and the time of a step by term.

One horizontal bar for each layout; its name has only the settings in which the layouts differ (`names_of`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.base.numbers import rounded, three_digits, time_unit
from penstock.plan.memory import RankMemory, components
from penstock.plan.projection import Layout, Projection, RankTime
from penstock.plan.what_if import slowest
from penstock.report.figure import LIMIT, MEMORY_PARTS, TIME_PARTS, Figure, axis, part_colours

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


@dataclass(frozen=True, kw_only=True)
class StackedBars:
    """Horizontal bars of stacked parts, with the sum of each bar beside it."""

    axis: str
    unit: str
    bars: Mapping[str, Mapping[str, float]]  # by name: values by part; a part that a bar lacks is 0
    notes: Sequence[str]  # of each bar, shown below its name on hover
    colours: Mapping[str, str]  # of parts that have one of their own
    limit: float | None = None  # a line across the bars; sums above it are marked `over`
    marks: Sequence[float] = ()  # further values in the figure

    def figure(
        self,
        name: str,
        title: str,
        caption: str,
        *,
        more: Sequence[Mapping[str, Any]] = (),
        height: int = 0,
        is_wide: bool = False,
    ) -> Figure:
        """The figure, at least `height` high; `more` are traces over the bars."""
        totals = {bar: sum(parts.values()) for bar, parts in self.bars.items()}
        dashes = {"color": LIMIT, "width": 2, "dash": "dash"}
        line = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "line": dashes}
        sums, margin = [], 62  # pixels, which the longest text of a sum needs
        beside = {"xref": "paper", "x": 1, "xanchor": "left", "yref": "y", "showarrow": False, "font": {"size": 11}}
        for bar, total in totals.items():
            text = f"{three_digits(total)} {self.unit}"
            if self.limit is not None and total > self.limit:
                text, margin = f"<b>{text} over</b>", 84
            sums.append(beside | {"y": bar, "text": text})
        layout = {  # the range ends behind the line and the longest bar
            "xaxis": axis(
                f"{self.axis} ({self.unit})", range=[0, 1.03 * max(self.limit or 0.0, *self.marks, *totals.values())]
            ),
            "shapes": [] if self.limit is None else [line | {"x0": self.limit, "x1": self.limit}],
            "annotations": sums,
            "margin": {"r": margin},
            "barmode": "stack",
            "bargap": 0.32 if len(totals) > 1 else 0.75,  # a single bar would be too thick
            "hovermode": "closest",
            "yaxis": {"autorange": "reversed", "showgrid": False, "fixedrange": True, "tickfont": {"size": 11}},
        }
        height, data = max(height, 130 + 38 * len(totals)), [*self._traces(totals), *more]
        return Figure(name=name, title=title, caption=caption, data=data, layout=layout, height=height, is_wide=is_wide)

    def _traces(self, totals: Mapping[str, float]) -> list[dict[str, Any]]:
        """One trace for each part."""
        bars = _without_small(list(self.bars.values()))
        # Parts with a colour come first, in the order of their colours; the others in the order of appearance.
        names = dict.fromkeys(name for bar in bars for name in bar)
        parts = [name for name in self.colours if name in names]
        parts += [name for name in names if name not in self.colours]
        colours = part_colours(parts, self.colours)
        return [
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "y": list(totals),
                "x": [rounded(bar.get(part, 0.0)) for bar in bars],
                "customdata": [
                    [note, f"{bar.get(part, 0.0) / total:.1%}" if total else "", rounded(total, 4)]
                    for bar, note, total in zip(bars, self.notes, totals.values(), strict=True)
                ],
                "marker": {"color": colours[part], "line": {"width": 0}},
                "hovertemplate": f"<b>{part}</b> %{{x:.4g}} {self.unit}, %{{customdata[1]}} of %{{customdata[2]}} "
                f"{self.unit}<br>%{{y}}<br>%{{customdata[0]}}<extra></extra>",
            }
            for part in parts
        ]


def memory_bar(memory: RankMemory) -> dict[str, float]:
    """GB by component."""
    return {name: size / 1e9 for name, size in memory_parts(memory).items()}


def memory_figure(projections: Sequence[Projection], names: Sequence[str] = ()) -> Figure:
    """Memory of the fullest rank of each layout, by component, and the capacity of their cluster's devices.

    `names` are those of the bars; by default those of their layouts.
    """
    names, first = names or names_of([projection.layout for projection in projections]), projections[0]
    capacity = first.capacity_bytes / 1e9
    bars = StackedBars(
        axis="memory of a rank",
        unit="GB",
        bars={name: memory_bar(projection.memory) for name, projection in zip(names, projections, strict=True)},
        notes=[f"rank {projection.memory.rank}, in {projection.memory.moment}" for projection in projections],
        colours=MEMORY_PARTS,
        limit=capacity,
    )
    caption = f"At the fullest moment of a step. Dashed: the capacity of {first.cluster.hardware.name}, "
    return bars.figure("memory", "Memory of the fullest rank", f"{caption}{capacity:.0f} GB.")


def time_figure(projections: Sequence[Projection]) -> Figure:
    """The time of a step of each layout by term, on the pipeline rank that waits least."""
    names, ranks = names_of([projection.layout for projection in projections]), list(map(slowest, projections))
    size, unit = time_unit(max(projection.time.step_seconds for projection in projections))
    bars = StackedBars(
        axis="time of a step",
        unit=unit,
        bars={
            name: {term: seconds / size for term, seconds in time_parts(rank).items()}
            for name, rank in zip(names, ranks, strict=True)
        },
        notes=[f"rank {rank.rank}" for rank in ranks],
        colours=TIME_PARTS,
    )
    caption = "By what is done, on the pipeline rank that waits least for the others."
    return bars.figure("step-time", "Time of a step", caption)


def _without_small(bars: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The bars, with parts that are too small in every bar joined to `other`."""
    least, joined = SMALL * max(sum(bar.values()) for bar in bars), []
    large = {name for bar in bars for name, value in bar.items() if value >= least}  # in any bar
    for bar in bars:
        rest = sum(value for name, value in bar.items() if name not in large)
        kept = {name: value for name, value in bar.items() if name in large}
        joined.append(kept | ({"other": rest} if rest else {}))
    return joined
