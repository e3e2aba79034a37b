"""Figures of operators: where a recorded step went, as an icicle, and each call under the device's roofline.

The levels of the icicle are step, pipeline action or pass, layer, phase, operator, kernel. The width of a block is the
busy time that is charged to it, every moment once: to compute before communication before copies. So neighbours add up
to the block above, with idle time beside them, and hidden communication has no width; hovering shows kernel time too.
Micro-batches of one action are added up. Blocks below `SMALL` of the step are joined.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from penstock.base.devices import Chip
from penstock.base.numbers import counted, rounded, time_text
from penstock.layout.actions import Kind
from penstock.report.colours import HUES, KERNELS, LIMIT, ink_on, kernel_group
from penstock.report.figure import Figure, axis, evenly, left_out
from penstock.report.run_evidence import RunEvidence, step_name
from penstock.trace.analysis import RankAnalysis, last_step, window_us
from penstock.trace.kernel_names import generic_category, specific_category
from penstock.trace.operators import Leaf, hierarchy
from penstock.trace.work import RooflineRow

RANKS = 8  # largest number of ranks to choose from: each is a figure of its own
SMALL = 0.0008  # share of the step below which blocks are joined
NAME_LETTERS = 90  # characters of a kernel's name

_PASSES: Mapping[str, str] = {
    "forward": HUES[Kind.FORWARD],
    "backward": HUES[Kind.BACKWARD],
    "recompute": "#d9ab2b",
    "update": "#b55fb0",
    "input": HUES[Kind.INPUT],
    "weight": HUES[Kind.WEIGHT],
}
_GROUND, _IDLE, _LAYER = "#8a939f", "#5c636d", "#a9b1bc"
_ORDER = ("forward", "recompute", "backward", "input", "weight", "update")


@dataclass
class _Block:
    colour: str
    exposed_us: float = 0.0
    kernel_us: float = 0.0
    events: int = 0
    inside: dict[str, "_Block"] = field(default_factory=dict)

    def add(self, leaf: Leaf) -> None:
        self.exposed_us += leaf.exposed_us
        self.kernel_us += leaf.kernel_us
        self.events += leaf.events


def flame_figure(evidence: RunEvidence) -> Figure | None:
    """The icicle of the last recorded step, for a rank that the reader chooses; None without a trace."""
    if not evidence.ranks:
        return None
    ranks = [evidence.ranks[at] for at in evenly(len(evidence.ranks), RANKS)]
    number = last_step(ranks)
    idle = "outside of operators" if evidence.is_host else "idle"
    data = [_icicle(rank, number, idle) | {"visible": rank is ranks[0]} for rank in ranks]
    some = left_out(len(ranks), len(evidence.ranks), "recorded ranks can be chosen")
    unit = "operators of the process" if evidence.is_host else "the device"
    return Figure(
        name="flame",
        title="Where the time went" if number is None else f"Where step {number} went",
        caption=f"Width: busy time of {unit}, every moment charged once; blocks add up to the one above.{some}",
        data=data,
        layout={
            "uniformtext": {"minsize": 10, "mode": "hide"},
            "meta": {"role": "choice", "choices": [f"rank {rank.rank}" for rank in ranks]},
            "hovermode": "closest",
        },
        height=430,
        is_wide=True,
        hint="Click a block to open it, the bar above it to go back.",
    )


def _icicle(rank: RankAnalysis, number: int | None, idle: str) -> dict[str, Any]:
    root = _blocks(rank, number, idle)
    table: dict[str, list[Any]] = defaultdict(list)  # columns with one entry for each block
    _write(root, step_name(rank, number) or "recorded", "", (root.exposed_us, table))
    colours = table.pop("colours")
    return {
        "type": "icicle",
        "name": f"rank {rank.rank}",
        **table,  # ids, labels, parents, values, customdata
        "branchvalues": "remainder",
        "sort": False,
        "marker": {"colors": colours, "line": {"width": 0.6, "color": "rgba(0,0,0,0.35)"}},
        "tiling": {"orientation": "v", "pad": 0},
        "pathbar": {"visible": True, "thickness": 20},
        "leaf": {"opacity": 1},
        "insidetextfont": {"color": [ink_on(colour) for colour in colours]},
        "texttemplate": "%{label}",
        "hovertemplate": "<b>%{label}</b><br>%{customdata[0]}<extra></extra>",
    }


def _blocks(rank: RankAnalysis, number: int | None, idle: str) -> _Block:
    """The tree of a step, with the remaining time as `idle`."""
    name = step_name(rank, number)
    leaves = [leaf for leaf in hierarchy(rank.trace, rank.phases) if name is None or leaf.step == name]
    root = _Block(colour=_GROUND)
    for leaf in leaves:
        block = root
        block.add(leaf)
        for label, colour in _path(leaf):
            block = block.inside.setdefault(label, _Block(colour=colour))
            block.add(leaf)
    start, end = window_us(rank, number)
    idle_us = max(0.0, end - start - root.exposed_us)  # the remaining time of the step
    if idle_us:
        root.inside[idle] = _Block(colour=_IDLE, exposed_us=idle_us)
        root.exposed_us += idle_us
    return root


def _path(leaf: Leaf) -> list[tuple[str, str]]:
    """Labels and colours from below the step down to the kernel."""
    action = leaf.action.partition(", micro-batch")[0]
    is_pass = not action or action.startswith("micro-batch")
    top = (leaf.pass_ or "not launched in the trace") if is_pass else action
    colour = KERNELS[kernel_group(leaf.phase)]
    path = [(top, _PASSES.get(top.split(" ")[0], _GROUND))]  # `input gradient of stage 2` has the colour of `input`
    if leaf.layer is not None:
        path.append((f"layer {leaf.layer}", _LAYER))
    phase = leaf.phase if is_pass or not leaf.pass_ or leaf.pass_ in top else f"{leaf.phase}, {leaf.pass_}"
    path.append((phase, colour))
    if leaf.operator:
        path.append((leaf.operator[:NAME_LETTERS], colour))
    if leaf.kernel != leaf.operator:
        path.append((leaf.kernel[:NAME_LETTERS], colour))
    return path


def _write(block: _Block, label: str, parent: str, into: tuple[float, dict[str, list[Any]]]) -> None:
    """Append a block and its children to a table, joining small ones."""
    whole_us, table = into
    identifier = f"{len(table['ids'])}"
    kept = _without_small(block, SMALL * whole_us)
    # Values are remainders without children: Plotly rejects totals below the sum of the rounded children.
    rest_us = max(0.0, block.exposed_us - sum(child.exposed_us for child in kept.values()))
    table["ids"].append(identifier)
    table["labels"].append(label)
    table["parents"].append(parent)
    table["values"].append(rounded(rest_us))
    table["colours"].append(block.colour)
    share = block.exposed_us / whole_us if whole_us else 0.0
    text = f"{time_text(block.exposed_us / 1e6)}, {share:.1%} of the step"
    if block.events:
        text += f"<br>{block.events:,} events of {time_text(block.kernel_us / 1e6)}"
    table["customdata"].append([text])
    for name, child in _in_order(kept):
        _write(child, name, identifier, into)


def _without_small(block: _Block, least_us: float) -> dict[str, _Block]:
    """The children of a block; small ones are joined, unless they are small together."""
    kept = {name: child for name, child in block.inside.items() if child.exposed_us >= least_us}
    small = [child for name, child in block.inside.items() if name not in kept]
    rest = _Block(
        colour=_GROUND,
        exposed_us=sum(child.exposed_us for child in small),
        kernel_us=sum(child.kernel_us for child in small),
        events=sum(child.events for child in small),
    )
    return kept | ({f"{len(small)} small ones": rest} if kept and rest.exposed_us >= least_us else {})


def _in_order(blocks: Mapping[str, _Block]) -> list[tuple[str, _Block]]:
    """Passes in the order of a step, then layers by number, then all others by size."""

    def key(entry: tuple[str, _Block]) -> tuple[int, float, float]:
        label, block = entry
        first, last = label.partition(" ")[0], label.rpartition(" ")[2]
        number = float(last) if last.isdecimal() else 0.0  # of the stage or the layer
        if first in _ORDER:
            return (0, _ORDER.index(first), number)
        return (1, number, 0.0) if first == "layer" else (2, -block.exposed_us, 0.0)

    return sorted(blocks.items(), key=key)


# --------------------------------------------------------------------------------------------------------- run roofline

POINTS = 400  # largest number of drawn calls; the longest are drawn
LEAST = 1e-5  # share of the peak below which calls are only counted, because they would stretch the axes
UNITS = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"))

SHAPE_LETTERS = 110


def roofline_figure(evidence: RunEvidence) -> Figure | None:
    """Every different call with known work, of the first recorded rank that has any; None without one."""
    rank = next((each for each in evidence.ranks if _known(each)), None)
    if rank is None:
        return None
    known, chip = _known(rank), rank.roofline.chip
    peak = chip.bf16 if chip is not None else max(row.flops_per_second or 0.0 for row in known)
    rows = [row for row in known if (row.flops_per_second or 0.0) >= LEAST * peak][:POINTS]  # the longest
    largest = chip.bf16 if chip is not None else max(row.flops_per_second or 0.0 for row in rows)
    size, unit = next((unit for unit in UNITS if largest >= unit[0]), UNITS[-1])  # FLOP/s of the unit, and its name
    per = 1.0 if evidence.answer is None else evidence.answer.per_step
    data = _points(rows, (size, unit), per)
    roofs = "The peaks of this device are not known, so no roofs are drawn."
    if chip is not None:
        reach = [row.flops / row.bytes for row in rows if row.flops and row.bytes]  # FLOPs for each byte
        data = [*_roofs(chip, size, (min(reach), max(reach))), *data]
        roofs = f"Lines: what {chip.name} could do ({chip.source})."
    where = f"rank {rank.rank}" if len(evidence.ranks) > 1 else "the trace"
    return Figure(
        name="roofline",
        title="Roofline",
        caption=f"Each different call of {where}, larger where it takes longer; work is known of "
        f"{rank.roofline.modelled_share:.0%} of the time. {roofs}{_left_out_text(rows, known)}",
        data=data,
        layout={
            "xaxis": axis("FLOPs for each byte", type="log", dtick=1),
            "yaxis": axis(unit, type="log", dtick=1, exponentformat="none"),
            "hovermode": "closest",
            "legend": {"itemsizing": "constant"},
        },
        height=520,
        is_wide=True,
    )


def _left_out_text(rows: Sequence[RooflineRow], known: Sequence[RooflineRow]) -> str:
    count = len(known) - len(rows)
    if count == 0:
        return ""
    rest = 1 - sum(row.kernel_us for row in rows) / sum(row.kernel_us for row in known)
    verb = "reaches almost nothing and is" if count == 1 else "reach almost nothing and are"
    return f" {counted(count, 'call')}, {rest:.1%} of their time, {verb} left out."


def _known(rank: RankAnalysis) -> list[RooflineRow]:
    """Calls whose work and speed are known, the longest first."""
    return [row for row in rank.roofline.rows if row.flops and row.bytes and row.flops_per_second]


def _points(rows: Sequence[RooflineRow], of: tuple[float, str], per: float) -> list[dict[str, Any]]:
    (size, unit), groups = of, dict[str, list[RooflineRow]]()
    for row in rows:
        part = specific_category(row.operator) or generic_category(row.operator)
        groups.setdefault("other" if part is None else kernel_group(part.value), []).append(row)
    longest = max(row.kernel_us for row in rows)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [rounded((row.flops or 0.0) / (row.bytes or 1.0), 4) for row in members],
            "y": [rounded((row.flops_per_second or 0.0) / size, 4) for row in members],
            "customdata": [_facts(row, per) for row in members],
            "marker": {
                "color": colour,
                "opacity": 0.8,
                # The area of a point grows with its time.
                "size": [round(5 + 25 * sqrt(row.kernel_us / longest), 1) for row in members],
                "line": {"width": 0.7, "color": "rgba(255,255,255,0.7)"},
            },
            "hovertemplate": f"<b>%{{customdata[0]}}</b><br>%{{y:.3~g}} {unit} at %{{x:.3~g}} FLOPs/byte"
            "<br>%{customdata[1]}<br>%{customdata[2]}<extra></extra>",
        }
        for name, colour in KERNELS.items()
        if (members := groups.get(name))
    ]


def _facts(row: RooflineRow, per: float) -> list[str]:
    per_step = f"{row.count * per:,.4g} calls and {row.kernel_us * per / 1e3:,.3f} ms per step"
    time = f"{per_step}, {row.share:.1%} of the computing"
    if row.reached is not None and row.bound is not None:
        time += f"; {row.reached:.0%} of its roof ({row.bound})"
    shapes = ", ".join("x".join(map(str, shape)) for shape in row.shapes if shape)
    if len(shapes) > SHAPE_LETTERS:
        shapes = f"{shapes[:SHAPE_LETTERS].rpartition(', ')[0]} ..."
    return [row.operator, time, shapes]


def _roofs(chip: Chip, size: float, reach: tuple[float, float]) -> list[dict[str, Any]]:
    """The slope of the memory up to the highest peak, and each peak from there on."""
    peaks = {name: peak for name, peak in (("fp8", chip.fp8), ("bf16", chip.bf16), ("fp32", chip.fp32)) if peak}
    ridge = max(peaks.values()) / chip.memory  # FLOPs for each byte at which the slope meets the highest peak
    left, right = min(reach[0] / 2, ridge / 100), max(reach[1] * 3, ridge * 5)
    slope = _roof([left, ridge], [left * chip.memory / size, ridge * chip.memory / size], "solid")
    label = {"text": [f"  {chip.memory / 1e12:.3g} TB/s", ""], "textposition": "bottom right"}
    flat = [
        _roof([peak / chip.memory, right], [peak / size] * 2, "solid" if name == "bf16" else "dot")
        | {"text": ["", f"{name} {peak / size:,.0f} "], "textposition": "top left" if name == "fp8" else "bottom left"}
        for name, peak in peaks.items()
    ]
    return [slope | label, *flat]


def _roof(xs: Sequence[float], ys: Sequence[float], dash: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+text",
        "x": [rounded(x) for x in xs],
        "y": [rounded(y) for y in ys],
        "textfont": {"size": 11, "color": LIMIT},
        "line": {"color": LIMIT, "width": 1.5, "dash": dash},
        "hoverinfo": "skip",
        "showlegend": False,
    }
