"""The operator, span, layer, pipeline action and step that launched each GPU event.

The profiler writes host events as intervals on threads. `build_tree` turns them into parents: on one thread, the depth
of an event is the number of events that began before it minus those that ended by then, and its parent is the last
event before it that is one level higher. This is sorting only, without a stack or a loop over events.

`place` then gives, for every GPU event, what was open around the call that launched it:

- the innermost operator, and the innermost span that names a phase (penstock.base.spans) or a layer ("layer 3"); the
  annotations of other programs around dispatch and combine (`dispatch(...)`, `moe.combine`) are such spans too,
- in backward, the autograd node. Its sequence number leads to the forward operator, whose span and layer it takes;
  forward operators recorded inside a node, with a number of their own, are recomputation,
- step and pipeline action, by time: they cover autograd's threads as well.

An event without a launch in the trace has none of these, only its name (penstock.trace.kernel_names).

Dense products in 8 bits are an exception: penstock.models.linear launches a product after the autograd function
whose output it writes, and the first product of a network before its function, so no operator encloses their launches:

    _Float8Linear, product                              the function owns the product after it
    product, _Float8Network, activation, product        the function owns all three

On one thread and under one parent, a product that the preceding function does not own is the first of the next network.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from penstock.base.spans import Span
from penstock.trace.events import NONE, Flags, HostEvents, HostKind, Integers, Trace, as_gpu_events
from penstock.trace.kernel_names import COLLECTIVES, FLOAT8_GEMM, Category, generic_category, specific_category
from penstock.trace.timeline import STEP_NAMES

NODE = "autograd::engine::evaluate_function: "  # prefix of the names of autograd nodes
SPANS = tuple(Span)
CATEGORIES = tuple(Category)
FRAMES = frozenset({Span.STEP, Span.FORWARD, Span.BACKWARD, Span.RECOMPUTE, Span.REPLAY, Span.MTP})
"""Spans around many phases. A kernel without a more specific span is named by its category."""

ACTION = re.compile(r"\bof (virtual )?stage \d+|^micro-batch \d+$")
GRADIENTS = re.compile(r"^(backward|input gradient|weight gradient) of stage \d+")
LAYER = re.compile(r"\blayers?[ ._](\d+)\b")
EXCHANGE = re.compile(
    r"(?<![a-z0-9])(dispatch|combine)(?=$|\s*[(\[:#]|[ _.-](a2a|e2e|fwd|bwd|forward|backward|layer|tokens?|iter|\d))",
    re.IGNORECASE,
)
"""Names of annotations of other programs, such as `dispatch(...)` or `moe.combine`."""
GRAPH = re.compile(r"GraphLaunch")
_NOTHING = -2  # in an inherited column: inheritance ends here without a value
ROUNDING_US = 1e-3  # clocks count nanoseconds; sums of floating-point microseconds are off by less


@dataclass(frozen=True, kw_only=True, eq=False)
class HostTree:
    """Nested host events; arrays have one entry for each row of `Trace.host`."""

    parent: Integers  # row of the enclosing event, or NONE
    levels: tuple[Integers, ...]  # rows by depth; the parents of a level are in the level before

    def inherit(self, values: Integers) -> Integers:
        """The value of the nearest enclosing event, itself included, that has one; NONE where none has."""
        value = values.copy()
        for rows in self.levels[1:]:  # from the outside in: the value of a parent is final
            value[rows] = np.where(values[rows] == NONE, value[self.parent[rows]], values[rows])
        return value

    def above(self, row: int) -> list[int]:
        """A row and its ancestors, from the inside out."""
        rows = [row]
        while (up := int(self.parent[rows[-1]])) != NONE:
            rows.append(up)
        return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """The origin of each row of `Trace.gpu`."""

    # Row in `Trace.host` of the innermost operator, or NONE; the module's docstring has one exception.
    operator: Integers
    maker: Integers  # in backward, row of the forward operator that made the node, or NONE
    span: Integers  # index into `SPANS` of the innermost span that names a phase, or NONE
    layer: Integers  # its number, or NONE
    category: Integers  # index into `CATEGORIES`, from the operators around the launch, or NONE
    collective: Integers  # index into `CATEGORIES` of the collective that the operators call, or NONE
    action: Integers  # row in `Trace.host` of the pipeline action, or NONE
    step: Integers  # row in `Trace.host` of the step, or NONE
    # Launched by an autograd node, or inside a span or action that computes gradients only, because autograd adds
    # gradients up between nodes.
    is_backward: Flags
    is_recomputed: Flags  # forward work inside an autograd node
    is_replayed: Flags  # launched by a CUDA graph
    is_inferred: Flags  # the other fields of such an event were inferred (penstock.trace.graph_replays)


def build_tree(trace: Trace) -> HostTree:
    """Nest operators, spans and the runtime calls that started GPU events."""
    return tree_around(trace.host, trace.gpu.launch[trace.gpu.is_linked])


def tree_around(host: HostEvents, calls: Integers) -> HostTree:
    """Nest operators, spans and these rows of calls."""
    is_node: Flags = np.isin(host.kind, [HostKind.OPERATOR, HostKind.SPAN])
    is_node[calls] = True
    return nest(host, np.flatnonzero(is_node))


def nest(host: HostEvents, rows: Integers) -> HostTree:
    """Nest these rows of the host's events, each thread by itself."""
    parent, depth = np.full(len(host), NONE), np.zeros(len(host), dtype=np.int64)
    by_thread = rows[np.argsort(host.thread[rows], kind="stable")]  # stable: by start within a thread
    cuts = np.flatnonzero(np.diff(host.thread[by_thread])) + 1  # first row of each further thread
    for mine in np.split(by_thread, cuts):
        depth[mine], parent[mine] = _nested(host, mine)
    by_depth = rows[np.argsort(depth[rows], kind="stable")]
    sizes = np.bincount(depth[rows], minlength=1)  # rows of each depth
    return HostTree(parent=parent, levels=tuple(np.split(by_depth, np.cumsum(sizes)[:-1])))


def _nested(host: HostEvents, rows: Integers) -> tuple[Integers, Integers]:
    """Depth and parent of the events of one thread, sorted by start and then the longer first."""
    start, place_ = host.start_us[rows], np.arange(len(rows))
    # Rounding can move an end behind the start of a neighbour that only touches.
    end = np.maximum(host.end_us[rows] - ROUNDING_US, np.nextafter(start, np.inf))
    # Depth: events that began before, minus those that ended by then.
    depth = place_ - np.searchsorted(np.sort(end), start, side="right")
    # Sorted by (depth, place), the parent is the last event one level higher before this place.
    key = depth * len(rows) + place_
    order = np.argsort(key)
    indices = np.searchsorted(key[order], (depth - 1) * len(rows) + place_) - 1
    above = order[np.maximum(indices, 0)]  # index of the parent among `rows`
    # Events that overlap without nesting leave gaps between levels; an event without an open parent is a root.
    has_parent = (depth > 0) & (depth[above] == depth - 1) & (end[above] > start)
    above = np.where(has_parent, above, NONE)
    return _depths(above), np.where(has_parent, rows[above], NONE)


def _depths(above: Integers) -> Integers:
    """Number of ancestors of each event, from the index of its parent."""
    depth = np.zeros(len(above), dtype=np.int64)
    up = above  # one level higher in each round
    while (up != NONE).any():
        depth += up != NONE
        up = np.where(up == NONE, NONE, above[up])
    return depth


def place(trace: Trace, tree: HostTree | None = None) -> Placement:
    """The origin of every GPU event."""
    tree = build_tree(trace) if tree is None else tree
    host, gpu = trace.host, trace.gpu
    # NONE is -1: a row of the host that is NONE reads the value that is appended to a column of the host.
    action = open_at(trace, host.named(ACTION.search))
    gradients = np.append(host.named(GRADIENTS.match), False)[action]
    gradients |= open_at(trace, host.called(Span.BACKWARD)) != NONE
    facts = {name: np.append(values, NONE)[gpu.launch] for name, values in _facts(trace, tree).items()}
    is_recomputed = facts.pop("recomputed") != NONE
    is_in_node = facts.pop("node") != NONE
    operator = _with_float8_products(trace, tree.parent, facts.pop("operator"))
    by_profiler, by_span = (open_at(trace, host.named(names.fullmatch)) for names in STEP_NAMES)
    return Placement(
        operator=operator,
        action=action,
        step=by_profiler if (by_profiler != NONE).any() else by_span,
        is_backward=(is_in_node | gradients) & ~is_recomputed,
        is_recomputed=is_recomputed,
        is_replayed=np.append(host.named(GRAPH.search), False)[gpu.launch],
        is_inferred=np.zeros(len(gpu), dtype=bool),
        **facts,  # maker, span, layer, category, collective
    )


def _facts(trace: Trace, tree: HostTree) -> dict[str, Integers]:
    """For each row of the host, the operator, node, span, ... that encloses it, or NONE."""
    host, names = trace.host, trace.names
    row, is_operator, is_span = np.arange(len(host)), host.kind == HostKind.OPERATOR, host.kind == HostKind.SPAN
    is_node = is_operator & host.named(lambda name: name.startswith(NODE))
    node = tree.inherit(np.where(is_node, row, NONE))  # the innermost autograd node around each row
    in_name = np.full((len(names), 5), NONE)  # of each name: span, layer, category, collective, the span if it is ours
    for number in np.unique(host.name_id[is_operator | is_span]):
        in_name[number] = _parse_name(names[number])
    again = host.called(Span.RECOMPUTE) & is_span
    # Spans alone have a phase and a layer; operators have a category and a collective too.
    own_span, own_layer = (np.where(is_span, in_name[host.name_id, column], NONE) for column in (0, 1))
    own_part, own_collective = (
        np.where(is_operator | is_span, in_name[host.name_id, column], NONE) for column in (2, 3)
    )
    is_ours = is_span & (in_name[host.name_id, 4] != NONE)
    in_node = node != NONE
    is_call = host.named(lambda name: "::" in name and not name.startswith(NODE))
    numbered = is_operator & is_call & (host.sequence != NONE) & (host.sequence != host.sequence[node])
    # An operator with a number of its own, or a span of the model, inside a node is forward work: recomputation.
    # Other programs annotate backward too.
    recomputed = tree.inherit(np.where(in_node & (numbered | again | is_ours), row, NONE))
    made_by = np.where(is_node, _makers(host, is_node, in_node), NONE)
    maker = tree.inherit(np.where(is_node & (made_by == NONE), _NOTHING, made_by))  # not that of an outer node

    def inherited(values: Integers) -> Integers:
        """Inherited values; an autograd node without its own takes that of the operator that made it."""
        forward = np.append(tree.inherit(values), NONE)[made_by]  # of a node: the value around its forward operator
        begun = np.where(is_node & (values == NONE), np.where(forward == NONE, _NOTHING, forward), values)
        value = tree.inherit(begun)
        return np.where(value == _NOTHING, NONE, value)

    return {
        "operator": tree.inherit(np.where(is_operator, row, NONE)),
        "node": node,
        "maker": np.where(maker == _NOTHING, NONE, maker),
        "recomputed": recomputed,
        "span": inherited(own_span),
        "layer": inherited(own_layer),
        "category": inherited(own_part),
        "collective": tree.inherit(own_collective),
    }


def _parse_name(name: str) -> tuple[int, int, int, int, int]:
    """Span, layer, category, collective and own span in the name of an operator or span; NONE for what it lacks."""
    ours = SPANS.index(Span(name)) if name in SPANS and name not in FRAMES else NONE
    exchange = EXCHANGE.search(name)
    layer = LAYER.search(name)
    part = specific_category(name.removeprefix(NODE))
    does = generic_category(name)
    calls = does is not None and does in COLLECTIVES and does is not Category.COLLECTIVE
    return (
        ours if exchange is None else SPANS.index(Span(exchange[1].lower())),
        NONE if layer is None else int(layer[1]),
        NONE if part is None else CATEGORIES.index(part),
        CATEGORIES.index(does) if calls and does is not None else NONE,
        ours,
    )


def _makers(host: HostEvents, is_node: Flags, in_node: Flags) -> Integers:
    """For each autograd node, the row of the last operator that began before it with its sequence number."""
    candidates = (host.kind == HostKind.OPERATOR) & (host.sequence != NONE)
    made = np.full(len(host), NONE)
    wanted = np.flatnonzero(is_node & (host.sequence != NONE))  # nodes whose maker is looked for
    # Forward operators first; operators inside nodes made the nodes of double backward.
    for rows in (np.flatnonzero(candidates & ~in_node), np.flatnonzero(candidates & in_node & ~is_node)):
        if not len(rows):
            continue
        by_number = rows[np.argsort(host.sequence[rows], kind="stable")]  # equal numbers stay sorted by start
        numbers = host.sequence[by_number]
        indices = np.searchsorted(numbers, host.sequence[wanted], side="right") - 1
        maker = by_number[np.maximum(indices, 0)]  # the last operator with the number of the node
        fits = (host.sequence[maker] == host.sequence[wanted]) & (host.start_us[maker] < host.start_us[wanted])
        open_ = fits & (made[wanted] == NONE)
        made[wanted[open_]] = maker[open_]
    return made


def open_at(trace: Trace, chosen: Flags) -> Integers:
    """Row of the innermost of some spans (a mask) that was open when each GPU event was launched, or NONE."""
    host = trace.host
    rows = np.flatnonzero((host.kind == HostKind.SPAN) & (host.end_us > host.start_us) & chosen)
    if not len(rows):
        return np.full(len(trace.gpu), NONE)
    # The innermost span from each begin or end until the next; at equal times, ends come first.
    times = np.concatenate([host.start_us[rows], host.end_us[rows]])
    is_begin = np.repeat([True, False], len(rows))
    order = np.lexsort((is_begin, times))
    innermost, opened = np.empty(len(times), dtype=rows.dtype), list[int]()  # by index in `order`; rows from outside in
    for index, event in enumerate(order.tolist()):
        row = int(rows[event % len(rows)])
        if event < len(rows):
            opened.append(row)
        elif row in opened:
            opened.remove(row)
        innermost[index] = opened[-1] if opened else NONE
    # The last begin or end up to each launch; nan is behind all times, where no span is open.
    indices = np.searchsorted(times[order], trace.launched_us, side="right") - 1
    return np.where(indices >= 0, innermost[np.maximum(indices, 0)], NONE)


Stretch = tuple[int, float, float]
"""A row of the host, and a start and an end between which it is the innermost one of its thread."""


def stretches(host: HostEvents, rows: Integers) -> list[Stretch]:
    """Times in which each of these rows of one thread is the innermost one."""
    intervals: list[Stretch] = []
    open_: list[tuple[int, float]] = []  # open rows from the outside in, each with its end
    now = -np.inf  # all stretches before this time are found

    def until(time_us: float) -> None:
        nonlocal now
        while open_ and open_[-1][1] <= time_us:  # the innermost row ends: its last stretch is until its end
            row, end = open_.pop()
            if end > now:
                intervals.append((row, now, end))
                now = end
        if open_ and time_us > now:  # the innermost row is interrupted by the next one
            intervals.append((open_[-1][0], now, time_us))
        now = max(now, time_us)

    for row, start, end in zip(rows.tolist(), host.start_us[rows].tolist(), host.end_us[rows].tolist(), strict=True):
        until(start)
        # Rounded clocks: an operator ends at the latest with the one around it.
        open_.append((row, min(end, open_[-1][1]) if open_ else end))
    until(np.inf)
    return intervals


def as_launches(trace: Trace, rows: Integers) -> Trace:
    """The trace with rows of the host (ascending) in place of GPU events, so that `place` gives their origin."""
    return replace(trace, gpu=as_gpu_events(trace.host, rows, duration_us=np.zeros(len(rows))))


# ------------------------------------------------------------------------------------------------------ float8 products

LINEAR, NETWORK = "_Float8Linear", "_Float8Network"
_ACTIVATION = "swiglu_float8_kernel"


def _with_float8_products(trace: Trace, parent: Integers, operator: Integers) -> Integers:
    """The operators of GPU events, where dense products in 8 bits belong to their functions."""
    host, gpu = trace.host, trace.gpu
    launched_us = np.flatnonzero(gpu.called(FLOAT8_GEMM, _ACTIVATION) & gpu.is_linked)
    functions = np.flatnonzero(host.called(LINEAR, NETWORK) & (host.kind == HostKind.OPERATOR))
    if not len(launched_us) or not len(functions):
        return operator
    operators = operator.copy()
    # By thread and parent: start, row of the host, and GPU event (NONE for a function).
    by_place: dict[tuple[int, int], list[tuple[float, int, int]]] = defaultdict(list)
    for row in functions.tolist():
        by_place[int(host.thread[row]), int(parent[row])].append((float(host.start_us[row]), row, NONE))
    for event in launched_us.tolist():
        row = int(gpu.launch[event])
        by_place[int(host.thread[row]), int(parent[row])].append((float(host.start_us[row]), row, event))
    for met in by_place.values():
        for event, function in _claims(trace, sorted(met)):
            operators[event] = function
    return operators


def _claims(trace: Trace, met: list[tuple[float, int, int]]) -> list[tuple[int, int]]:
    """Pairs of GPU event and function. `met` is in the order of time: start, host row, event (NONE for a function)."""
    claims, before = list[tuple[int, int]](), NONE  # `before`: the last product that no function owns yet
    function, is_open = NONE, False  # the last function, and whether its last product is still to come
    for _, row, event in met:
        if event == NONE:
            is_network = trace.host.name(row) == NETWORK
            if is_network and before != NONE:
                claims.append((before, row))
            function, is_open, before = row, True, NONE
        elif trace.gpu.name(event) == FLOAT8_GEMM:
            if is_open:
                claims.append((event, function))
            before, is_open = (NONE if is_open else event), False
        elif is_open and trace.host.name(function) == NETWORK:
            claims.append((event, function))
    return claims
