"""How evenly experts were loaded: each layer over the steps of a run, and each rank in the recorded steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.report.figure import Figure, rounded
from penstock.report.run_evidence import RunEvidence
from penstock.trace.experts import ExpertLoad

RANKS = 64
"""Rows of the picture of ranks; neighbours become their mean."""

ROWS = 400
"""Layers of steps of that picture."""


def expert_pictures(evidence: RunEvidence) -> tuple[list[Figure], list[str]]:
    """The pictures that there is evidence for, and what is missing."""
    run = evidence.run
    if run is not None and run.model.moe is None:
        return [], ["The model has no experts."]
    figures, missing = [], []
    by_layer = load_figure(evidence.lines)
    if by_layer is not None:
        figures.append(by_layer)
    else:
        missing.append(f"No loads of layers are recorded: {evidence.lacks.steps or 'metrics.jsonl has no layer'}.")
    by_rank = None if evidence.answer is None else rank_figure(evidence.answer.experts)
    if by_rank is not None:
        figures.append(by_rank)
    else:
        missing.append(f"No loads of ranks are known: {_why_not(evidence)}.")
    return figures, missing


def _why_not(evidence: RunEvidence) -> str:
    """Why the loads of ranks are not known."""
    if evidence.answer is None:
        return evidence.lacks.trace
    if len(evidence.answer.loaded) < 2:
        return "that takes traces of several ranks"
    return "neither grouped products nor all-to-alls in the traces tell"


def load_figure(lines: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Load of the fullest expert over the mean, by layer and step.

    Args:
        lines: of metrics.jsonl; those without layers are passed over.

    Returns:
        The picture, or None if no line has layers.
    """
    told = [line for line in lines if line.get("layers")]
    layers = sorted({one["layer"] for line in told for one in line["layers"]})
    if not layers:
        return None
    table = np.full((len(layers), len(told)), np.nan)
    for column, line in enumerate(told):
        for one in line["layers"]:
            table[layers.index(one["layer"]), column] = one["max_over_mean"]
    steps, last = [line["step"] for line in told], table[:, -1]
    worst = int(np.nanargmax(last))
    thin = f" Of {len(lines):,} recorded steps {len(told):,} are drawn, evenly." if len(told) < len(lines) else ""
    trace = _heat(table, [str(layer) for layer in layers], "layer %{y}, step %{x:,}<br><b>%{z:.3f}</b> x the mean")
    return Figure(
        name="experts",
        title="Expert load by layer and step",
        caption="Load of a layer's fullest expert over the mean of its experts; 1 is even. "
        f"In the last step layer {layers[worst]} is least even: {last[worst]:.2f}.{thin} "
        "Loads of single experts are not recorded.",
        data=[trace | {"x": steps, "zmin": 1, "zmax": max(1.01, float(np.nanmax(table)))}],
        layout={
            "xaxis": {"title": {"text": "step"}, "showgrid": False, "tickformat": ",d"},
            "yaxis": _categories("layer"),
        },
        height=min(620, max(280, 130 + 22 * len(layers))),
    )


def rank_figure(load: ExpertLoad) -> Figure | None:
    """Load of each rank's experts over the mean of ranks, for each layer of each traced step.

    Returns:
        The picture, or None without loads of several ranks.
    """
    if len(load.ranks) < 2 or not len(load.loads):
        return None
    loads = load.loads[:ROWS]
    mean = loads.mean(axis=1, keepdims=True)
    share = (np.divide(loads, mean, out=np.ones_like(loads), where=mean > 0) - 1).T * 100
    each = -(-len(load.ranks) // RANKS)
    at = range(0, len(load.ranks), each)
    share = np.stack([share[start : start + each].mean(axis=0) for start in at])
    names = [str(load.ranks[start]) for start in at]
    most = float(np.abs(share).max()) or 1.0
    xs = [str(number + 1) for number in range(share.shape[1])]
    hover = "rank %{y}, forward pass %{x} of a layer<br><b>%{z:+.1f} %</b> against the mean rank"
    trace = _heat(share, names, hover) | {"x": xs, "zmin": -most, "zmax": most}
    trace["colorbar"] = {"title": {"text": "%"}, "thickness": 12, "outlinewidth": 0}
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
        height=min(620, max(280, 130 + 22 * len(names))),
    )


def _heat(table: Any, names: Sequence[str], hover: str) -> dict[str, Any]:
    """A heat map with a name for each row."""
    return {
        "type": "heatmap",
        "autocolorscale": True,
        "z": [[None if np.isnan(value) else rounded(value, 4) for value in row] for row in table.tolist()],
        "y": list(names),
        "ygap": 1,
        "colorbar": {"title": {"text": "x mean"}, "thickness": 12, "outlinewidth": 0},
        "hovertemplate": hover + "<extra></extra>",
    }


def _categories(title: str) -> dict[str, Any]:
    return {"title": {"text": title}, "type": "category", "autorange": "reversed", "showgrid": False}
