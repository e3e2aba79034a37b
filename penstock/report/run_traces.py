"""Figures of traces: a step as an icicle, calls under the roofline, waiting and bytes between ranks, loads of experts.

The levels of the icicle are step, pipeline action or pass, layer, phase, operator, kernel. The width of a block is the
busy time that is charged to it, every moment once: to compute before communication before copies. So neighbours add up
to the block above, with idle time beside them, and hidden communication has no width; hovering shows kernel time too.
Micro-batches of one action are added up. Blocks below `SMALL` of the step are joined.

Waiting comes from matched collectives (penstock/trace/collectives.py). Bytes come from all-to-alls whose kernels record
their splits, or have equal splits; kernels that write into other devices' memory record no destination, so they are not
included, and the caption says how many of the all-to-alls are.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np

from penstock.base.devices import Chip
from penstock.base.numbers import counted, rounded, time_text
from penstock.layout.actions import Kind
from penstock.report.figure import HUES, KERNELS, LIMIT, Figure, axis, evenly, ink_on, kernel_group, left_out
from penstock.report.run_evidence import RunEvidence, step_name
from penstock.trace.analysis import RankAnalysis, last_step, window_us
from penstock.trace.calls import CollectiveCalls
from penstock.trace.collectives import CollectiveTimes
from penstock.trace.events import NONE, Floats, Trace
from penstock.trace.experts import ExpertLoad
from penstock.trace.kernel_names import generic_category, specific_category
from penstock.trace.tables import Leaf, hierarchy
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


SQUARES = 64  # largest number of rows and columns; beyond it neighbours are joined
GAPS = 24  # rows up to which there is a gap between squares
LISTED = "[]"  # recorded splits that are all equal


def rank_pictures(evidence: RunEvidence) -> tuple[list[Figure], list[str]]:
    """The figures with evidence, and what is missing."""
    answer = evidence.answer
    if answer is None:
        return [], [f"Nothing is known of what ranks did to each other: {evidence.lacks.trace}."]
    if len(answer.loaded) < 2:
        world = evidence.facts.world or 1
        if world == 1:
            return [], ["The run has one rank."]
        return [], ["Only one rank was traced, and one rank cannot tell: record all (profile.ranks=[])."]
    no_waiting = "No collective could be matched across ranks, so no waiting is known."
    no_bytes = "No bytes from rank to rank are known: no all-to-all says the sizes of its parts."
    per = answer.per_step
    sent = bytes_figure(answer.collectives, {rank.rank: rank.trace for rank in answer.ranks}, per)
    return _drawn((waiting_figure(answer.collectives, per), no_waiting), (sent, no_bytes))


def _drawn(*entries: tuple[Figure | None, str]) -> tuple[list[Figure], list[str]]:
    return [figure for figure, _ in entries if figure is not None], [why for figure, why in entries if figure is None]


def waiting_figure(collectives: CollectiveTimes, per: float = 1.0) -> Figure | None:
    """Waiting of each rank for each other rank, per step (`per`: from all steps to one); None if none is known."""
    known = np.isfinite(collectives.wait_us).any(axis=1)
    if not known.any():
        return None
    cost_ms = collectives.cost_us * per / 1e3
    worst = collectives.stragglers()
    text = f"{known.sum():,} collectives were matched"
    if collectives.unmatched:
        text += f", {len(collectives.unmatched):,} were not and are not in it"
    if worst:
        first = worst[0]  # the most expensive one
        text += f". Rank {first.rank} came last in {first.times_last:,} of them, and others waited"
        text += f" {first.caused_wait_us * per / 1e3:,.1f} ms per step for it"
    return _square(
        "waiting",
        "Waiting between ranks",
        f"Time that a rank (row) waited for the one that came last (column), per step. {text}.",
        (cost_ms, "ms"),
        collectives.calls.ranks,
        ("waited for", "rank that waited"),
    )


def bytes_figure(collectives: CollectiveTimes, traces: dict[int, Trace], per: float = 1.0) -> Figure | None:
    """Bytes per step that all-to-alls sent from rank to rank, or None if no all-to-all records them."""
    calls = collectives.calls
    ranks = calls.ranks
    sent = np.zeros((len(ranks), len(ranks)))  # bytes, [from rank, to rank]
    exchanges = np.flatnonzero(calls.is_exchange).tolist()
    recorded = {row: parts for row in exchanges if (parts := _parts(calls, row, traces[ranks[calls.rank[row]]]))}
    for row, parts in recorded.items():
        for member, size in parts:
            if member in ranks:  # others have no trace
                sent[calls.rank[row], ranks.index(member)] += size
    if not sent.any():
        return None
    sent *= per
    size, unit = (1e9, "GB") if sent.max() >= 1e9 else (1e6, "MB")
    text = f"{len(recorded):,} of {len(exchanges):,} all-to-alls say the sizes of their parts"
    return _square(
        "bytes",
        "Bytes between ranks",
        f"By all-to-alls, from rank (row) to rank (column), per step; {text}.",
        (sent / size, unit),
        ranks,
        ("to rank", "from rank"),
    )


def _parts(calls: CollectiveCalls, row: int, trace: Trace) -> list[tuple[int, float]] | None:
    """Ranks of the group and the bytes that one all-to-all sent to each, or None if not recorded."""
    group, total = calls.group[row], float(calls.sent_bytes[row])
    if group == NONE or not calls.groups[group].members or not np.isfinite(total):
        return None
    members = calls.groups[group].members
    listed = trace.gpu.args(int(calls.gpu_row[row])).get("In split size")
    if listed == LISTED:
        return [(member, total / len(members)) for member in members]
    try:
        shares = [int(word) for word in str(listed).strip("[] ").split(",")]
    except ValueError:
        return None
    whole = sum(shares)
    if len(shares) != len(members) or not whole:
        return None
    return [(member, total * share / whole) for member, share in zip(members, shares, strict=True)]


def _square(
    name: str, title: str, caption: str, values: tuple[Floats, str], ranks: Sequence[int], axes: tuple[str, str]
) -> Figure:
    table, unit = values
    names = [str(rank) for rank in ranks]
    if len(ranks) > SQUARES:
        each = -(-len(ranks) // SQUARES)
        at = np.arange(0, len(table), each)
        joined: Floats = np.add.reduceat(np.add.reduceat(table, at, axis=0), at, axis=1)  # sums of squares of ranks
        table, names = joined, names[::each]
        caption += f" A square is {each} by {each} ranks, added up, under the name of the first."
    gap = int(len(names) <= GAPS)
    hover = f"{axes[1]} %{{y}}, {axes[0]} %{{x}}<br><b>%{{z:,.4~g}} {unit}</b>"
    trace = _heat(table, names, hover, unit)
    trace |= {"x": names, "zmin": 0, "zmax": float(table.max()) or 1.0, "xgap": gap, "ygap": gap}
    if len(names) <= 10:
        trace["texttemplate"] = "%{z:.3~g}"
    layout = {"xaxis": axis(axes[0], type="category", showgrid=False), "yaxis": _categories(axes[1])}
    return Figure(name=name, title=title, caption=caption, data=[trace], layout=layout, height=420)


# ---------------------------------------------------------------------------------------------------------- run experts

ROWS = 400  # layers of steps in the figure of ranks


def expert_pictures(evidence: RunEvidence) -> tuple[list[Figure], list[str]]:
    """The figures with evidence, and what is missing."""
    run = evidence.run
    if run is not None and run.model.moe is None:
        return [], ["The model has no experts."]
    by_rank, why = None, evidence.lacks.trace
    if evidence.answer is not None:
        by_rank, why = rank_figure(evidence.answer.experts), "that takes traces of several ranks"
        if len(evidence.answer.loaded) > 1:
            why = "neither grouped products nor all-to-alls in the traces tell"
    no_layers = f"No loads of layers are recorded: {evidence.lacks.steps or 'metrics.jsonl has no layer'}."
    return _drawn((load_figure(evidence.lines), no_layers), (by_rank, f"No loads of ranks are known: {why}."))


def load_figure(lines: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Load of the fullest expert over the mean, by layer and step; None if no line of metrics.jsonl has layers."""
    recorded = [line for line in lines if line.get("layers")]
    layers = sorted({layer["layer"] for line in recorded for layer in line["layers"]})
    if not layers:
        return None
    table = np.full((len(layers), len(recorded)), np.nan)  # [layer, recorded step]
    for column, line in enumerate(recorded):
        for layer in line["layers"]:
            table[layers.index(layer["layer"]), column] = layer["max_over_mean"]
    steps, last = [line["step"] for line in recorded], table[:, -1]
    worst = int(np.nanargmax(last))
    thin = ""
    if len(recorded) < len(lines):
        thin = f" Of {len(lines):,} recorded steps {len(recorded):,} are drawn, evenly."
    hover = "layer %{y}, step %{x:,}<br><b>%{z:.3f}</b> x the mean"
    trace = _heat(table, [str(layer) for layer in layers], hover, "x mean")
    return Figure(
        name="experts",
        title="Expert load by layer and step",
        caption="Load of a layer's fullest expert over the mean of its experts; 1 is even. "
        f"In the last step layer {layers[worst]} is least even: {last[worst]:.2f}.{thin} "
        "Loads of single experts are not recorded.",
        data=[trace | {"x": steps, "zmin": 1, "zmax": max(1.01, float(np.nanmax(table)))}],
        layout={"xaxis": axis("step", showgrid=False, tickformat=",d"), "yaxis": _categories("layer")},
        height=_height(len(layers)),
    )


def rank_figure(load: ExpertLoad) -> Figure | None:
    """Load of each rank's experts over the mean of ranks, by layer and traced step; None without several ranks."""
    if len(load.ranks) < 2 or not len(load.loads):
        return None
    loads = load.loads[:ROWS]
    mean = loads.mean(axis=1, keepdims=True)
    share = (np.divide(loads, mean, out=np.ones_like(loads), where=mean > 0) - 1).T * 100  # [rank, layer of a step], %
    each = -(-len(load.ranks) // SQUARES)
    at = range(0, len(load.ranks), each)
    share = np.stack([share[start : start + each].mean(axis=0) for start in at])  # neighbours as one row
    names = [str(load.ranks[start]) for start in at]
    largest = float(np.abs(share).max()) or 1.0
    xs = [str(number + 1) for number in range(share.shape[1])]
    hover = "rank %{y}, forward pass %{x} of a layer<br><b>%{z:+.1f} %</b> against the mean rank"
    trace = _heat(share, names, hover, "%") | {"x": xs, "zmin": -largest, "zmax": largest}
    uneven = f"; the fullest has {load.max_over_mean:.2f} x the mean, as a mean of layers" if load.max_over_mean else ""
    joined = f" A row is the mean of {each} ranks, under the name of the first." if each > 1 else ""
    left = f" The first {ROWS} of {len(load.loads)}." if len(load.loads) > ROWS else ""
    return Figure(
        name="expert-ranks",
        title="Expert load by rank",
        caption=f"{load.unit.capitalize()} of a rank's experts against the mean of ranks, in the order of time, "
        f"from {load.source}{uneven}.{joined}{left}",
        data=[trace],
        layout={"xaxis": _categories("layer of a traced step") | {"autorange": True}, "yaxis": _categories("rank")},
        height=_height(len(names)),
    )


def _height(rows: int) -> int:
    return min(620, max(280, 130 + 22 * rows))


def _heat(table: Floats, names: Sequence[str], hover: str, unit: str) -> dict[str, Any]:
    return {
        "type": "heatmap",
        "autocolorscale": True,
        "z": [[None if np.isnan(value) else rounded(value, 4) for value in row] for row in table.tolist()],
        "y": list(names),
        "ygap": 1,
        "colorbar": {"title": {"text": unit}, "thickness": 12, "outlinewidth": 0},
        "hovertemplate": hover + "<extra></extra>",
    }


def _categories(title: str) -> dict[str, Any]:
    return axis(title, type="category", autorange="reversed", showgrid=False)
