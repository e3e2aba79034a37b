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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from penstock.trace.events import NONE, Flags, GpuKind, HostKind, Integers, Trace
from penstock.trace.kernel_names import Category, generic_category, is_gradient, specific_category
from penstock.trace.tree import Placement, as_launches, place

SHORTEST = 6
"""Least number of kernels in a layer."""

LONGEST = 4_096
"""Largest number of kernels in a layer that is searched for."""

_OF_A_LAYER = frozenset({Category.ATTENTION, Category.ROUTE, Category.GROUPED, Category.GROUPED_WEIGHTS})
_AFTER_A_NORM = frozenset({Category.ELEMENTWISE, Category.REDUCTION, Category.COPY, Category.LOOK_UP})


@dataclass(frozen=True, kw_only=True)
class LayerRegion:
    """A slice of the kernel list.

    Attributes:
        end: index behind its last name.
        layer: its number, or None outside of layers.
    """

    begin: int
    end: int
    layer: int | None
    is_backward: bool


@dataclass(frozen=True)
class _Stretch:
    """Names from `begin` that repeat every `period`; `slack` more names continue the pattern."""

    begin: int
    period: int
    slack: int


def layers_of(names: Sequence[str], *, layers: int, dense_layers: int) -> list[LayerRegion]:
    """The layers of one or both passes in a list of kernels; empty if the names do not repeat accordingly.

    `dense_layers` is the number of first layers that differ from the others.
    """
    times = layers - dense_layers
    if times < 2:
        return []
    codes = {name: number for number, name in enumerate(dict.fromkeys(names))}
    ids = np.array([codes[name] for name in names], dtype=np.int64)
    # A layer has a kernel that only layers have, and more than one kind of kernel.
    found = [
        one
        for one in _stretches(ids, times)
        if len(period := {*names[one.begin : one.begin + one.period]}) > 2
        and any(specific_category(name) in _OF_A_LAYER for name in period)
    ]
    passes = _passes(found, times, names)
    regions: list[LayerRegion] = []
    for stretch, is_backward in passes:
        begin = _backward_begin(stretch, names) if is_backward else _forward_begin(stretch, names)
        numbers = range(layers - 1, dense_layers - 1, -1) if is_backward else range(dense_layers, layers)
        for index, number in enumerate(numbers):
            low = begin + index * stretch.period
            regions.append(LayerRegion(begin=low, end=low + stretch.period, layer=number, is_backward=is_backward))
    return regions + _around(regions, names, has_one=dense_layers == 1)


def _stretches(ids: Integers, times: int) -> list[_Stretch]:
    """Stretches with this number of periods, the longest first; of overlapping ones only the longest."""
    found = []
    for period in range(SHORTEST, min(len(ids) // times, LONGEST) + 1):
        # Runs of names that equal the name one period later, as pairs of edges.
        same = np.concatenate([[False], ids[:-period] == ids[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
        for begin, end in edges[edges[:, 1] - edges[:, 0] >= period * (times - 1)].tolist():
            slack = end - begin - period * (times - 1)
            if slack < period:
                found.append(_Stretch(begin, period, slack))
    found.sort(key=lambda one: (-one.period * times - one.slack, one.begin))
    kept: list[_Stretch] = []
    for one in found:
        high = one.begin + one.period * times + one.slack
        if all(high <= two.begin or two.begin + two.period * times + two.slack <= one.begin for two in kept):
            kept.append(one)
    return kept


def _passes(found: Sequence[_Stretch], times: int, names: Sequence[str]) -> list[tuple[_Stretch, bool]]:
    """The longest two stretches in the order of time are forward and backward; a single one is decided by its names."""
    two = sorted(found[:2], key=lambda one: one.begin)
    if len(two) == 2:
        return [(two[0], False), (two[1], True)]
    return [
        (one, any(is_gradient(name) or specific_category(name) is Category.GROUPED_WEIGHTS for name in period))
        for one in two
        for period in [names[one.begin : one.begin + one.period]]
    ]


def _forward_begin(stretch: _Stretch, names: Sequence[str]) -> int:
    """The first norm that can be the first kernel of a layer."""
    could = range(stretch.begin, stretch.begin + stretch.slack + 1)
    return next((at for at in could if specific_category(names[at]) is Category.NORM), stretch.begin)


def _backward_begin(stretch: _Stretch, names: Sequence[str]) -> int:
    """Behind the last norm that can belong to the layer before, and behind the kernels that add up its gradients."""
    last = stretch.begin + stretch.slack
    norms = [at for at in range(stretch.begin, last) if specific_category(names[at]) is Category.NORM]
    at = norms[-1] + 1 if norms else stretch.begin
    while at < last and specific_category(names[at]) is None and generic_category(names[at]) in _AFTER_A_NORM:
        at += 1
    return at


def _around(regions: Sequence[LayerRegion], names: Sequence[str], *, has_one: bool) -> list[LayerRegion]:
    """Regions before all layers forward and behind them backward.

    With `has_one`, one dense layer lies between the norms there.
    """
    found = []
    forward = [one.begin for one in regions if not one.is_backward]
    if forward:
        first = min(forward)
        norms = [at for at in range(first) if specific_category(names[at]) is Category.NORM] if has_one else []
        cut = norms[0] if norms else first
        found.append(LayerRegion(begin=0, end=cut, layer=None, is_backward=False))
        found.append(LayerRegion(begin=cut, end=first, layer=0, is_backward=False))
    backward = [one.end for one in regions if one.is_backward]
    if backward:
        last = max(backward)
        norms = (
            [at for at in range(last, len(names)) if specific_category(names[at]) is Category.NORM] if has_one else []
        )
        cut = norms[-1] + 1 + _behind_norm(regions, names) if norms else last
        found.append(LayerRegion(begin=last, end=cut, layer=0, is_backward=True))
        found.append(LayerRegion(begin=cut, end=len(names), layer=None, is_backward=True))
    return [one for one in found if one.begin < one.end]


def _behind_norm(regions: Sequence[LayerRegion], names: Sequence[str]) -> int:
    """Number of kernels that the other layers have behind the gradients of their first norm."""
    ends = [(one.begin, one.end) for one in regions if one.is_backward]
    begin, end = ends[-1]
    return (
        end
        - 1
        - max((at for at in range(begin, end) if specific_category(names[at]) is Category.NORM), default=end - 1)
    )


# ------------------------------------------------------------------------------------------------------------- replayed

Source = Literal["eager pass", "capture", "repeating layers"]

MATCHED = 0.9
"""Share of a replay's events that must have a partner in the eager pass, or agree with the capture."""

LEAST = 16
"""Least number of events of a graph: shorter ones match anything."""

MOST = 20_000
"""Largest number of events that are aligned; longer graphs must be equal."""

_CAPTURES = ("StreamBeginCapture", "StreamEndCapture")
_LAUNCHES = ("LaunchKernel", "LaunchCooperativeKernel", "MemcpyAsync", "MemsetAsync", "Memset2DAsync", "Memcpy2DAsync")
_COPIED = ("operator", "maker", "span", "layer", "category", "collective", "is_backward", "is_recomputed")
"""Fields of a placement that an event takes from its partner."""


@dataclass(frozen=True, kw_only=True)
class GraphReplays:
    """Summary of the CUDA graph replays of a trace.

    Attributes:
        placed: events with a known layer or pass.
        source: of the placement; None without one, or if spans around the launches give it.
        told: a sentence for users.
    """

    graphs: int
    events: int
    placed: int
    source: Source | None
    told: str


@dataclass(frozen=True, kw_only=True, eq=False)
class _Inferred:
    """Inferred fields of a placement for the events of one graph, in their order."""

    source: Source
    known: Flags
    values: Mapping[str, Any]


def infer_replays(trace: Trace, placement: Placement) -> tuple[Placement, GraphReplays | None]:
    """Place the kernels of CUDA graphs, as far as that can be inferred.

    Returns:
        The completed placement, and a summary; None without graph replays.
    """
    rows = np.flatnonzero(placement.is_replayed)
    if not len(rows):
        return placement, None
    launches = np.unique(trace.gpu.launch[rows])
    open_ = rows[(placement.layer[rows] == NONE) & ~placement.is_backward[rows]]
    # Events by the launch of their graph, in the order of time.
    order = open_[np.argsort(trace.gpu.launch[open_], kind="stable")]
    cuts = np.flatnonzero(np.diff(trace.gpu.launch[order])) + 1
    graphs = [graph for graph in np.split(order, cuts) if len(graph) >= LEAST]
    columns = {name: vars(placement)[name].copy() for name in _COPIED}
    is_inferred = placement.is_inferred.copy()
    sources: dict[Source, int] = {}
    answers: dict[bytes, _Inferred | None] = {}
    for graph in graphs:
        # Equal graphs are inferred once.
        key = trace.gpu.name_id[graph].tobytes()
        if key not in answers:
            answers[key] = _by_eager(trace, placement, graph) or _by_capture(trace, graph) or _by_repeats(trace, graph)
        found = answers[key]
        if found is None:
            continue
        sources[found.source] = sources.get(found.source, 0) + int(found.known.sum())
        is_inferred[graph[found.known]] = True
        for name, values in found.values.items():
            columns[name][graph[found.known]] = values[found.known]
    placed = replace(placement, is_inferred=is_inferred, **columns)
    replays = _summary(trace, len(launches), len(rows), len(rows) - len(open_), sources)
    return placed, replays


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
        told = f"{head}; layers and passes of {inferred:,} are inferred {ways[source]}"
    elif by_spans == events:
        told = f"{head}, placed by the spans around the launches"
    else:
        why = "no pass without graphs, no capture and no number of layers is in this trace"
        if _model(trace) is not None:
            why = "no pass without graphs and no capture is in this trace"
            why += ", and names do not repeat as often as layers should"
        told = f"{head}; layers and passes are not told: {why}"
    return GraphReplays(graphs=graphs, events=events, placed=by_spans + inferred, source=source, told=told)


# -------------------------------------------------------------------------------------------------------- eager pass


def _by_eager(trace: Trace, placement: Placement, graph: Integers) -> _Inferred | None:
    """From the eager pass whose kernels match best."""
    mine = trace.gpu.name_id[graph]
    best = np.full(len(graph), NONE)
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
    # Mask of the events with a partner, and of those between two partners with the same placement.
    known = best != NONE
    have = np.flatnonzero(known)
    for low, high in pairwise(have.tolist()):
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
        order = rows[np.argsort(marks[rows], kind="stable")]
        cuts = np.flatnonzero(np.diff(marks[order])) + 1
        passes = [one for one in np.split(order, cuts) if MATCHED * size <= len(one) <= 3 * size]
        if passes:
            return sorted(passes, key=lambda one: abs(len(one) - size))[:3]
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
    for launches in _captured(trace):
        if len(launches) != len(graph):
            continue
        names = [trace.host.name(int(row)) for row in launches]
        expected = np.array(
            [
                GpuKind.COPY if "Memcpy" in name else GpuKind.SET if "Memset" in name else GpuKind.COMPUTE
                for name in names
            ]
        )
        told = np.where(kinds == GpuKind.COMMUNICATION, GpuKind.COMPUTE, kinds)
        if (told == expected).mean() >= MATCHED:
            found = place(as_launches(trace, launches))
            values = {name: vars(found)[name] for name in _COPIED}
            return _Inferred(source="capture", known=np.ones(len(graph), dtype=bool), values=values)
    return None


def _captured(trace: Trace) -> list[Integers]:
    """For each capture in the trace, the launches in it that started nothing."""
    host = trace.host
    called = [np.array([part in name for name in trace.names], dtype=bool)[host.name_id] for part in _CAPTURES]
    begins, ends = (np.flatnonzero(one & (host.kind == HostKind.RUNTIME)) for one in called)
    if not len(begins) or not len(ends):
        return []
    is_launch = np.array([any(part in name for part in _LAUNCHES) for name in trace.names], dtype=bool)[host.name_id]
    is_launch &= host.kind == HostKind.RUNTIME
    is_launch[trace.gpu.launch[trace.gpu.is_linked]] = False
    rows = np.flatnonzero(is_launch)
    found = []
    for begin in begins.tolist():
        later = ends[ends > begin]
        if len(later):
            low, high = np.searchsorted(host.start_us[rows], [host.start_us[begin], host.start_us[later[0]]])
            found.append(rows[low:high])
    return found


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
    layer, known, is_backward = np.full(len(graph), NONE), np.zeros(len(graph), dtype=bool), np.zeros(len(graph), bool)
    for region in regions:
        part = slice(region.begin, region.end)
        known[part], is_backward[part] = True, region.is_backward
        layer[part] = NONE if region.layer is None else region.layer
    return _Inferred(source="repeating layers", known=known, values={"layer": layer, "is_backward": is_backward})


def _model(trace: Trace) -> tuple[int, int] | None:
    """Layers and dense layers of the model, if the recording has them and all other layers are MoE layers."""
    told: Any = trace.header
    for key in ("penstock", "config", "model"):
        told = told.get(key) if isinstance(told, Mapping) else None
    if not isinstance(told, Mapping):
        return None
    moe = told.get("moe")
    layers, dense = told.get("layers"), told.get("dense_layers", 0)
    is_regular = not isinstance(moe, Mapping) or moe.get("moe_layer_freq", 1) == 1
    if not isinstance(layers, int) or not isinstance(dense, int) or not is_regular or not 0 <= dense <= layers:
        return None
    return layers, dense if isinstance(moe, Mapping) else 0
