"""Figures of ranks: waiting and bytes for each pair of ranks, and the load of the experts by layer and by rank.

Waiting comes from matched collectives (penstock/trace/collectives.py). Bytes come from all-to-alls whose kernels record
their splits, or have equal splits; kernels that write into other devices' memory record no destination, so they are not
included, and the caption says how many of the all-to-alls are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.base.numbers import rounded
from penstock.report.figure import Figure, axis
from penstock.report.run_evidence import RunEvidence
from penstock.trace.calls import CollectiveCalls
from penstock.trace.collectives import CollectiveTimes
from penstock.trace.events import NONE, Floats, Trace
from penstock.trace.experts import ExpertLoad

RANKS = 64  # largest number of rows and columns; beyond it neighbours are joined
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
    if len(ranks) > RANKS:
        each = -(-len(ranks) // RANKS)
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
    each = -(-len(load.ranks) // RANKS)
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
