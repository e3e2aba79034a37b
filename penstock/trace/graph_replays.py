"""Layers and passes of kernels that a CUDA graph launched. They are inferred, because the host records one launch only.

No operator and no span stands around the kernels of a graph. Three sources are tried in this order:

    eager pass        the same pass without a graph is in the trace (the first step of a run). The kernels of both are
                      aligned by name, and each takes the placement of its partner.
    capture           the trace contains the capture: launches that started nothing between the begin and the end of a
                      capture. If their number, copies and fills agree with the replay, they are the same.
    repeating layers  the number of layers is known (a recording of Penstock has it), and the names of the kernels
                      repeat as often, forward and then backward. This gives layers and passes, but no operators.

Otherwise nothing is inferred, and `GraphReplays.told` says why. Graphs of parts of a layer are launched inside the
layer's spans and need none of this. With repeating layers alone, recomputation counts as backward.

Repeating layers, in a list of kernel names:

    embed  0  1 1 1 1  2 2 2 2  3 3 3 3  loss   3' 3' 3'  2' 2' 2'  1' 1' 1'  0'  embed
           `dense      `--- three times ---'    `---- three times ----'

A period of p names repeats where name i equals name i + p. Kernels at the ends of the stretch can match by chance (the
last norm looks like the first norm of a layer), so the begin of a layer is decided by category: a layer begins with a
norm; backward it ends with that norm's gradients and the kernels that add these up.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from penstock.trace.events import NONE, Flags, GpuKind, HostKind, Integers, Trace
from penstock.trace.kernel_names import Category, generic_category, is_gradient, specific_category
from penstock.trace.tree import Placement, as_launches, place

SHORTEST = 6  # least number of kernels in a layer
LONGEST = 4_096  # largest number of kernels in a layer that is searched for
_OF_A_LAYER = frozenset({Category.ATTENTION, Category.ROUTE, Category.GROUPED, Category.GROUPED_WEIGHTS})
_AFTER_A_NORM = frozenset({Category.ELEMENTWISE, Category.REDUCTION, Category.COPY, Category.LOOK_UP})


@dataclass(frozen=True, kw_only=True)
class LayerRegion:
    """A slice of the kernel list."""

    begin: int
    end: int  # index behind its last name
    layer: int | None  # its number, or None outside of layers
    is_backward: bool


@dataclass(frozen=True)
class _Stretch:
    """Names from `begin` to before `end` that repeat every `period`; `slack` of them are beyond the last period."""

    begin: int
    end: int
    period: int
    slack: int


def layers_of(names: Sequence[str], *, layers: int, dense_layers: int) -> list[LayerRegion]:
    """The layers of one or both passes in a list of kernels; empty if the names do not repeat accordingly.

    `dense_layers` is the number of first layers that differ from the others.
    """
    times = layers - dense_layers  # equal layers, which must repeat as often
    if times < 2:
        return []
    codes = {name: number for number, name in enumerate(dict.fromkeys(names))}
    ids = np.array([codes[name] for name in names], dtype=np.int64)
    # A layer has a kernel that only layers have, and more than two kinds of kernels.
    stretches = [
        stretch
        for stretch in _stretches(ids, times)
        if len(period := {*names[stretch.begin : stretch.begin + stretch.period]}) > 2
        and any(specific_category(name) in _OF_A_LAYER for name in period)
    ]
    regions: list[LayerRegion] = []
    for stretch, is_backward in _passes(stretches, names):
        norms = _norms(names, stretch.begin, stretch.begin + stretch.slack + 1)
        begin = norms[0] if norms else stretch.begin  # the first norm that can be the first kernel of a layer
        begin = _backward_begin(stretch, names) if is_backward else begin
        numbers = range(layers - 1, dense_layers - 1, -1) if is_backward else range(dense_layers, layers)
        for index, number in enumerate(numbers):
            low = begin + index * stretch.period
            regions.append(LayerRegion(begin=low, end=low + stretch.period, layer=number, is_backward=is_backward))
    return regions + _around(regions, names, has_one=dense_layers == 1)


def _stretches(ids: Integers, times: int) -> list[_Stretch]:
    """Stretches with this number of periods, the longest first; of overlapping ones only the longest.

    `ids` are the names of the kernels as numbers, in the order of time.
    """
    stretches = []
    for period in range(SHORTEST, min(len(ids) // times, LONGEST) + 1):
        # Runs of names that equal the name one period later, as pairs of edges.
        same = np.concatenate([[False], ids[:-period] == ids[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
        for begin, end in edges[edges[:, 1] - edges[:, 0] >= period * (times - 1)].tolist():
            slack = end - begin - period * (times - 1)
            if slack < period:  # else there is one more period
                stretches.append(_Stretch(begin, end + period, period, slack))
    kept: list[_Stretch] = []
    for stretch in sorted(stretches, key=lambda stretch: (stretch.begin - stretch.end, stretch.begin)):
        if all(stretch.end <= other.begin or other.end <= stretch.begin for other in kept):
            kept.append(stretch)
    return kept


def _passes(stretches: Sequence[_Stretch], names: Sequence[str]) -> list[tuple[_Stretch, bool]]:
    """The longest two stretches in the order of time are forward and backward; a single one is decided by its names."""
    two = sorted(stretches[:2], key=lambda stretch: stretch.begin)
    if len(two) == 2:
        return [(two[0], False), (two[1], True)]
    return [
        (stretch, any(is_gradient(name) or specific_category(name) is Category.GROUPED_WEIGHTS for name in period))
        for stretch in two
        for period in [names[stretch.begin : stretch.begin + stretch.period]]
    ]


def _norms(names: Sequence[str], begin: int, end: int) -> list[int]:
    """Indices of the norms, and of their gradients, from `begin` to before `end`."""
    return [at for at in range(begin, end) if specific_category(names[at]) is Category.NORM]


def _backward_begin(stretch: _Stretch, names: Sequence[str]) -> int:
    """Behind the last norm that can belong to the layer before, and behind the kernels that add up its gradients."""
    last = stretch.begin + stretch.slack
    norms = _norms(names, stretch.begin, last)
    at = norms[-1] + 1 if norms else stretch.begin
    while at < last and specific_category(names[at]) is None and generic_category(names[at]) in _AFTER_A_NORM:
        at += 1
    return at


def _around(regions: Sequence[LayerRegion], names: Sequence[str], *, has_one: bool) -> list[LayerRegion]:
    """Regions before all layers forward and behind them backward.

    With `has_one`, one dense layer lies between the norms there.
    """
    outer_regions = []
    forward, backward = ([region for region in regions if region.is_backward == side] for side in (False, True))
    if forward:
        first = forward[0].begin
        norms = _norms(names, 0, first) if has_one else []
        cut = norms[0] if norms else first  # the dense layer begins with its first norm
        outer_regions.append(LayerRegion(begin=0, end=cut, layer=None, is_backward=False))
        outer_regions.append(LayerRegion(begin=cut, end=first, layer=0, is_backward=False))
    if backward:
        begin, last = backward[-1].begin, backward[-1].end
        norms = _norms(names, last, len(names)) if has_one else []
        # As many kernels as the other layers have behind the gradients of their first norm belong to the dense layer.
        behind = last - 1 - max(_norms(names, begin, last), default=last - 1)
        cut = norms[-1] + 1 + behind if norms else last
        outer_regions.append(LayerRegion(begin=last, end=cut, layer=0, is_backward=True))
        outer_regions.append(LayerRegion(begin=cut, end=len(names), layer=None, is_backward=True))
    return [region for region in outer_regions if region.begin < region.end]


# ------------------------------------------------------------------------------------------------------------- replayed

Source = Literal["eager pass", "capture", "repeating layers"]
MATCHED = 0.9  # share of a replay's events that must have a partner in the eager pass, or agree with the capture
LEAST = 16  # least number of events of a graph: shorter ones match anything
MOST = 20_000  # largest number of events that are aligned; longer graphs must be equal
_CAPTURE_BEGINS, _CAPTURE_ENDS = re.compile("StreamBeginCapture"), re.compile("StreamEndCapture")
_LAUNCHES = re.compile("Launch(Cooperative)?Kernel|Mem(cpy|set)(2D)?Async")
_COPIED = ("operator", "maker", "span", "layer", "category", "collective", "is_backward", "is_recomputed")
"""Fields of a placement that an event takes from its partner."""


@dataclass(frozen=True, kw_only=True)
class GraphReplays:
    """Summary of the CUDA graph replays of a trace."""

    graphs: int
    events: int
    placed: int  # events with a known layer or pass
    source: Source | None  # of the placement; None without one, or if spans around the launches give it
    told: str  # a sentence for users


@dataclass(frozen=True, kw_only=True, eq=False)
class _Inferred:
    """Inferred fields of a placement for the events of one graph, in their order."""

    source: Source
    known: Flags
    values: Mapping[str, Any]


def infer_replays(trace: Trace, placement: Placement) -> tuple[Placement, GraphReplays | None]:
    """The placement with kernels of CUDA graphs as far as they can be placed, and a summary; None without replays."""
    rows = np.flatnonzero(placement.is_replayed)
    if not len(rows):
        return placement, None
    launches = np.unique(trace.gpu.launch[rows])
    open_ = rows[(placement.layer[rows] == NONE) & ~placement.is_backward[rows]]  # spans around the launch gave nothing
    # Events by the launch of their graph, in the order of time.
    graphs = [graph for graph in _split(open_, trace.gpu.launch) if len(graph) >= LEAST]
    columns = {name: vars(placement)[name].copy() for name in _COPIED}
    is_inferred = placement.is_inferred.copy()
    sources: dict[Source, int] = {}
    answers: dict[bytes, _Inferred | None] = {}
    for graph in graphs:
        key = trace.gpu.name_id[graph].tobytes()
        if key not in answers:  # equal graphs are inferred once
            answers[key] = _by_eager(trace, placement, graph) or _by_capture(trace, graph) or _by_repeats(trace, graph)
        answer = answers[key]
        if answer is None:
            continue
        sources[answer.source] = sources.get(answer.source, 0) + int(answer.known.sum())
        is_inferred[graph[answer.known]] = True
        for name, values in answer.values.items():
            columns[name][graph[answer.known]] = values[answer.known]
    placed = replace(placement, is_inferred=is_inferred, **columns)
    replays = _summary(trace, len(launches), len(rows), len(rows) - len(open_), sources)
    return placed, replays


def _split(rows: Integers, marks: Integers) -> list[Integers]:
    """These rows in groups of one mark each (`marks` of all rows), in the order of marks; within a group as before."""
    order = rows[np.argsort(marks[rows], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(marks[order])) + 1)


def _summary(trace: Trace, graphs: int, events: int, by_spans: int, sources: Mapping[Source, int]) -> GraphReplays:
    inferred = sum(sources.values())
    source = max(sources.items(), key=lambda item: item[1])[0] if sources else None
    head = f"{graphs:,} {'replay' if graphs == 1 else 'replays'} of graphs with {events:,} events"
    if source is not None:
        ways = {
            "eager pass": "from a pass without graphs in this trace",
            "capture": "from the capture, which is in this trace",
            "repeating layers": "from names that repeat as often as the model has layers",
        }
        sentence = f"{head}; layers and passes of {inferred:,} are inferred {ways[source]}"
    elif by_spans == events:
        sentence = f"{head}, placed by the spans around the launches"
    else:
        why = "no pass without graphs, no capture and no number of layers is in this trace"
        if _model(trace) is not None:
            why = "no pass without graphs and no capture is in this trace"
            why += ", and names do not repeat as often as layers should"
        sentence = f"{head}; layers and passes are not told: {why}"
    return GraphReplays(graphs=graphs, events=events, placed=by_spans + inferred, source=source, told=sentence)


# -------------------------------------------------------------------------------------------------------- eager pass


def _by_eager(trace: Trace, placement: Placement, graph: Integers) -> _Inferred | None:
    """From the eager pass whose kernels match best."""
    mine = trace.gpu.name_id[graph]
    best = np.full(len(graph), NONE)  # for each event of the graph its partner, a row of `Trace.gpu`
    for segment in _eager_passes(trace, placement, len(graph)):
        partner = aligned(mine, trace.gpu.name_id[segment])
        if (partner != NONE).sum() > (best != NONE).sum():
            best = np.where(partner == NONE, NONE, segment[partner])
        if (best != NONE).all():
            break
    if (best != NONE).mean() < MATCHED:
        return None
    values = {
        name: np.append(vars(placement)[name], False if name.startswith("is_") else NONE)[best] for name in _COPIED
    }
    # Events with a partner are known, and those between two partners with the same placement.
    known = best != NONE
    for low, high in pairwise(np.flatnonzero(known).tolist()):
        same = all(values[name][low] == values[name][high] for name in ("span", "layer", "is_backward"))
        if high - low > 1 and same:
            known[low + 1 : high] = True
            for name in ("span", "layer", "category", "is_backward", "is_recomputed"):
                values[name][low + 1 : high] = values[name][low]
    return _Inferred(source="eager pass", known=known, values=values)


def _eager_passes(trace: Trace, placement: Placement, size: int) -> list[Integers]:
    """Events of passes without graphs and of similar length: by micro-batch, or by step if none is marked."""
    is_eager = trace.gpu.is_linked & ~placement.is_replayed
    for marks in (placement.action, placement.step, np.where(is_eager, 0, NONE)):
        rows = np.flatnonzero(is_eager & (marks != NONE))
        passes = [events for events in _split(rows, marks) if MATCHED * size <= len(events) <= 3 * size]
        if passes:
            return sorted(passes, key=lambda events: abs(len(events) - size))[:3]  # aligning takes long: the best three
    return []


def aligned(mine: Integers, theirs: Integers) -> Integers:
    """For each element of `mine` the index of its partner in `theirs`, or NONE; both have equal blocks of partners."""
    if len(mine) == len(theirs) and (mine == theirs).all():
        return np.arange(len(mine))
    partner = np.full(len(mine), NONE)
    if max(len(mine), len(theirs)) > MOST or not _are_alike(mine, theirs):
        return partner
    matcher = SequenceMatcher(None, mine.tolist(), theirs.tolist(), autojunk=False)
    for block in matcher.get_matching_blocks():
        partner[block.a : block.a + block.size] = np.arange(block.b, block.b + block.size)
    return partner


def _are_alike(mine: Integers, theirs: Integers) -> bool:
    """Most of mine is among theirs in any order; aligning different lists takes long and fails."""
    size = int(max(mine.max(initial=0), theirs.max(initial=0))) + 1
    shared = np.minimum(np.bincount(mine, minlength=size), np.bincount(theirs, minlength=size)).sum()
    return bool(shared >= MATCHED * len(mine))


# ----------------------------------------------------------------------------------------------------------- capture


def _by_capture(trace: Trace, graph: Integers) -> _Inferred | None:
    """From launches that only recorded a graph, if their number and kinds agree."""
    kinds = trace.gpu.kind[graph]
    launch_kinds = np.where(kinds == GpuKind.COMMUNICATION, GpuKind.COMPUTE, kinds)  # both are launched as kernels
    for launches in _captured(trace):
        if len(launches) != len(graph):
            continue
        calls = trace.host.take(launches)
        copies, fills = calls.named(lambda name: "Memcpy" in name), calls.named(lambda name: "Memset" in name)
        expected = np.select([copies, fills], [GpuKind.COPY, GpuKind.SET], GpuKind.COMPUTE)
        if (launch_kinds == expected).mean() >= MATCHED:
            placement = place(as_launches(trace, launches))
            values = {name: vars(placement)[name] for name in _COPIED}
            return _Inferred(source="capture", known=np.ones(len(graph), dtype=bool), values=values)
    return None


def _captured(trace: Trace) -> list[Integers]:
    """For each capture in the trace, the launches in it that started nothing."""
    host = trace.host
    begins, ends, launches = (
        np.flatnonzero((host.kind == HostKind.RUNTIME) & host.named(names.search))
        for names in (_CAPTURE_BEGINS, _CAPTURE_ENDS, _LAUNCHES)
    )
    rows = np.setdiff1d(launches, trace.gpu.launch)  # launches that started nothing, sorted
    captures = []
    for begin in begins.tolist():
        later = ends[ends > begin]
        if len(later):
            low, high = np.searchsorted(host.start_us[rows], [host.start_us[begin], host.start_us[later[0]]])
            captures.append(rows[low:high])
    return captures


# -------------------------------------------------------------------------------------------------- repeating layers


def _by_repeats(trace: Trace, graph: Integers) -> _Inferred | None:
    """From names that repeat once for each layer."""
    model = _model(trace)
    if model is None:
        return None
    names = [trace.gpu.name(int(row)) for row in graph]
    regions = layers_of(names, layers=model[0], dense_layers=model[1])
    if not regions:
        return None
    layer, known, is_backward = np.full(len(graph), NONE), np.zeros(len(graph), bool), np.zeros(len(graph), bool)
    for region in regions:
        part = slice(region.begin, region.end)
        known[part], is_backward[part] = True, region.is_backward
        layer[part] = NONE if region.layer is None else region.layer
    return _Inferred(source="repeating layers", known=known, values={"layer": layer, "is_backward": is_backward})


def _model(trace: Trace) -> tuple[int, int] | None:
    """Layers and dense layers of the model, if the recording has them and all other layers are MoE layers."""
    layers, dense = trace.setting("model", "layers"), trace.setting("model", "dense_layers") or 0
    if not isinstance(layers, int) or not isinstance(dense, int) or not 0 <= dense <= layers:
        return None
    if trace.setting("model", "moe") is None:
        return layers, 0
    return (layers, dense) if trace.setting("model", "moe", "moe_layer_freq") in (None, 1) else None
