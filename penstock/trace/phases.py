"""The time of a trace by phase, layer and pass.

A phase is named by the span around the launch. Inside the spans of a mixture of experts the kernel is more specific:
indices, permutation, activation, products forward and both gradients, waiting. Quantization is a phase of its own in
all spans, except in a norm kernel and in attention heads. Without a span, the categories of kernels and operators
(penstock.trace.kernel_names) use the same words, so that tables of both kinds join. All other time is "other", and
`Phases.other_share` is its share.

Each row has two times. `kernel_us` is the sum of the durations. `exposed_us` is the device's busy time that is charged
to the phase: every moment is charged once, to compute before communication before copies, and among equals to the event
that began first. So exposed times add up to the busy time, and those of communication to the timeline's exposed
communication.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.base.spans import Span
from penstock.trace.calls import is_point_to_point
from penstock.trace.events import NONE, Flags, Floats, GpuKind, Integers, Trace
from penstock.trace.graph_replays import GraphReplays, infer_replays
from penstock.trace.intervals import union
from penstock.trace.kernel_names import (
    ATEN,
    COLLECTIVES,
    FLOAT8_GEMM,
    Category,
    generic_category,
    is_gradient,
    specific_category,
)
from penstock.trace.tree import CATEGORIES, SPANS, Placement, place

PASSES = ("", "forward", "backward", "recompute", "update")
"""Passes of a training step. Empty: unknown, because the launch is not in the trace and the name does not say."""

EXPERTS = frozenset({Span.ROUTE, Span.DISPATCH, Span.EXPERTS, Span.COMBINE})
"""Spans in which the category of a kernel decides."""

UPDATES = frozenset({Span.ZERO, Span.REDUCE, Span.CLIP, Span.READ, Span.OPTIMIZER, Span.BALANCE})
"""Spans and phases of the update, which is not a pass through the model."""

PHASE_NAMES = {Span.SORT: Category.INDEX.value}
"""Spans with another phase name: a sort outside of a span can be anything."""

TOKENS = frozenset({Category.DISPATCH, Category.COMBINE})  # operators around the launch of a kernel that carries tokens

_SENT = frozenset({Category.DISPATCH, Category.COMBINE, Category.WAIT, *COLLECTIVES})
"""Categories of kernels that communicate."""

PRODUCTS = frozenset({Category.GROUPED, Category.GROUPED_WEIGHTS})
WAITING = " waiting"

_RAN = ("forward", "backward", "recompute", "")
_NAMED = {Category.POSITIONS: Category.ATTENTION.value, Category.CACHE: Category.ATTENTION.value}
_WITHIN = frozenset({Category.INDEX, Category.PERMUTE, Category.ACTIVATION, Category.ROUTE, Category.QUANTIZE})
_PRIORITY = {GpuKind.COMPUTE: 0, GpuKind.SET: 0, GpuKind.COMMUNICATION: 1, GpuKind.COPY: 2}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One row of the table."""

    name: str
    layer: int | None
    pass_: str  # one of `PASSES`
    kernel_us: float
    exposed_us: float  # busy time of the device that is charged to it
    share: float  # of all `kernel_us`
    count: int
    inferred: bool  # layer and pass of some events were inferred, because a CUDA graph launched them


@dataclass(frozen=True, kw_only=True, eq=False)
class Phases:
    """All GPU events of a trace, named. An event that partly waited has two entries."""

    names: tuple[str, ...]
    event: Integers  # row in `Trace.gpu`
    name_id: Integers  # index into `names`
    pass_id: Integers  # index into `PASSES`
    layer: Integers  # number, or NONE
    kernel_us: Floats
    exposed_us: Floats
    placement: Placement  # of the events, one entry for each row of `Trace.gpu`
    replays: GraphReplays | None  # summary of CUDA graph replays, or None without any

    @property
    def other_share(self) -> float:
        """Share of all time on the device without a name."""
        total = self.kernel_us.sum()
        is_other = np.array([name == Category.OTHER for name in self.names], dtype=bool)[self.name_id]
        return float(self.kernel_us[is_other].sum() / total) if total else 0.0

    def is_named(self, name: str) -> Flags:
        """Mask of the GPU events of a phase."""
        mask = np.zeros(len(self.placement.span), dtype=bool)
        mask[self.event[np.array([phase == name for phase in self.names], dtype=bool)[self.name_id]]] = True
        return mask

    def rows(self, *, by_layer: bool = True) -> list[Phase]:
        """The table, longest first; layers are added up unless `by_layer`."""
        layer = self.layer if by_layer else np.full(len(self.layer), NONE)
        groups, group = grouped(self.name_id, layer, self.pass_id)
        kernel_us = np.bincount(group, self.kernel_us, len(groups))
        exposed_us = np.bincount(group, self.exposed_us, len(groups))
        counts, total = np.bincount(group, minlength=len(groups)), self.kernel_us.sum()
        inferred = np.bincount(group, self.placement.is_inferred[self.event], len(groups)) > 0
        phases = [
            Phase(
                name=self.names[name],
                layer=None if number == NONE else number,
                pass_=PASSES[pass_],
                kernel_us=float(kernel_us[index]),
                exposed_us=float(exposed_us[index]),
                share=float(kernel_us[index] / total) if total else 0.0,
                count=int(counts[index]),
                inferred=bool(inferred[index]),
            )
            for index, (name, number, pass_) in enumerate(groups)
        ]
        return sorted(phases, key=lambda row: (-row.kernel_us, row.name, row.pass_, row.layer or 0))


def plain_row(row: object) -> dict[str, Any]:
    """The fields of a row of a table, with the key `pass` for `pass_`."""
    return {name.rstrip("_"): value for name, value in vars(row).items()}


def grouped(*columns: Integers) -> tuple[list[tuple[int, ...]], Integers]:
    """The distinct rows of some integer columns (values from NONE up), and the index of each row among them.

    A row is packed into one integer first, because sorting integers is much faster than sorting rows.
    """
    widths = [int(column.max(initial=NONE)) + 2 for column in columns]  # values from NONE, which is -1, up
    assert math.prod(widths) < 2**62, "the columns hold too many different values for one number"
    packed = np.zeros(len(columns[0]), dtype=np.int64)
    for column, width in zip(columns, widths, strict=True):
        packed = packed * width + (column - NONE)
    _, first, group = np.unique(packed, return_index=True, return_inverse=True)
    distinct = np.stack([column[first] for column in columns], axis=1)
    return [tuple(row) for row in distinct.tolist()], group


def find_phases(trace: Trace, placement: Placement | None = None, *, waited_us: Floats | None = None) -> Phases:
    """Name every GPU event.

    The part of an event's duration in which it waited for other ranks, `waited_us`, gets an entry of its own.
    """
    placement, replays = infer_replays(trace, place(trace) if placement is None else placement)
    names, name_id, pass_id = _named_events(trace, placement)
    phases = Phases(
        names=names,
        event=np.arange(len(trace.gpu)),
        name_id=name_id,
        pass_id=pass_id,
        layer=placement.layer,
        kernel_us=trace.gpu.duration_us,
        exposed_us=charge(trace),
        placement=placement,
        replays=replays,
    )
    return phases if waited_us is None else _with_waiting(phases, waited_us)


def _with_waiting(phases: Phases, waited_us: Floats) -> Phases:
    """Splits entries that waited in two; exposed time is split in the same proportion."""
    waited = np.clip(waited_us, 0.0, phases.kernel_us)
    some = np.flatnonzero((waited > 0) & ~np.char.endswith(np.array(phases.names), WAITING)[phases.name_id])
    share = np.zeros(len(waited))  # of each entry's time that it waited
    share[some] = waited[some] / phases.kernel_us[some]
    names = list(phases.names)
    of_waiting = {
        number: _index_in(names, names[number] + WAITING) for number in np.unique(phases.name_id[some]).tolist()
    }
    return replace(
        phases,
        names=tuple(names),
        event=np.append(phases.event, some),  # the waiting parts follow the entries of all events
        name_id=np.append(phases.name_id, [of_waiting[number] for number in phases.name_id[some].tolist()]).astype(
            np.int64
        ),
        pass_id=np.append(phases.pass_id, phases.pass_id[some]),
        layer=np.append(phases.layer, phases.layer[some]),
        kernel_us=np.append(phases.kernel_us * (1 - share), waited[some]),
        exposed_us=np.append(phases.exposed_us * (1 - share), (phases.exposed_us * share)[some]),
    )


def _index_in(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def charge(trace: Trace) -> Floats:
    """The busy time that is charged to each GPU event: compute first, then communication, then copies."""
    gpu = trace.gpu
    level_of = np.array([_PRIORITY[kind] for kind in GpuKind])[gpu.kind]
    charged, taken = np.zeros(len(gpu)), union(np.zeros(0), np.zeros(0))
    for level in range(3):
        rows = np.flatnonzero(level_of == level)  # sorted by start, as the table
        end = gpu.end_us[rows]
        before = np.append(-np.inf, np.maximum.accumulate(end))[: len(end)]  # latest end of the rows before each
        start = np.minimum(np.maximum(gpu.start_us[rows], before), end)  # what they cover is charged to them
        charged[rows] = (end - start) - taken.covered_us(start, end)  # without moments of earlier levels
        taken = taken | union(start, end)
    return charged


def _named_events(trace: Trace, placement: Placement) -> tuple[tuple[str, ...], Integers, Integers]:
    """Phase names, and the name and pass of each event; computed once for each distinct kind of event."""
    gpu = trace.gpu
    operator = np.append(trace.host.name_id, NONE)[placement.operator]  # name of the innermost operator, or NONE
    ran = np.where(placement.is_recomputed, 2, np.where(placement.is_backward, 1, 0))  # index into `_RAN`
    is_told = ~placement.is_replayed | placement.is_inferred | placement.is_backward | (placement.layer != NONE)
    ran = np.where(gpu.is_linked & is_told, ran, 3)
    communicates = gpu.kind == GpuKind.COMMUNICATION
    # A collective is that of the operators around it; other transports carry the tokens of a dispatch or combine.
    is_token = np.array([category in TOKENS for category in CATEGORIES] + [False])[placement.category]
    carried = np.where((placement.collective == NONE) & is_token, placement.category, placement.collective)
    categories = np.where(communicates, carried, placement.category)
    # NCCL has one kernel for an all-to-all and for messages of a pipeline; only the args distinguish them.
    is_exchange = gpu.named(lambda name: generic_category(name) is Category.ALL_TO_ALL)
    for row in np.flatnonzero(communicates & (placement.span == NONE) & is_exchange).tolist():
        if is_point_to_point(gpu.raw[row]):
            categories[row] = CATEGORIES.index(Category.POINT_TO_POINT)
    kinds, kind = grouped(gpu.name_id, communicates.astype(np.int64), operator, placement.span, categories, ran)
    names: list[str] = []
    indices = []  # of each kind of event: index of its phase's name, index of its pass
    for name, is_communication, operator_name, span, part, how in kinds:
        event = _Event(
            kernel=trace.names[name],
            is_communication=bool(is_communication),
            operator="" if operator_name == NONE else trace.names[operator_name],
            span=None if span == NONE else SPANS[span],
            category=None if part == NONE else CATEGORIES[part],
            ran=_RAN[how],
        )
        phase, pass_ = _name(event)
        phase = trace.mapped.get(event.kernel, phase)
        indices.append((_index_in(names, phase), PASSES.index(pass_)))
    name_id, pass_id = np.array(indices, dtype=np.int64).reshape(-1, 2)[kind].T
    return _exchanges(names, name_id, pass_id)


def _exchanges(names: list[str], name_id: Integers, pass_id: Integers) -> tuple[tuple[str, ...], Integers, Integers]:
    """An all-to-all without a span is dispatch if products of experts follow before the next all-to-all, else combine.

    In backward it is the opposite: gradients reach the experts through the combine.
    """
    products = np.array([name.startswith(Span.EXPERTS) for name in names], dtype=bool)[name_id]
    exchange = name_id == (names.index(Category.ALL_TO_ALL) if Category.ALL_TO_ALL in names else NONE)
    if not exchange.any() or not products.any():
        return tuple(names), name_id, pass_id
    marks = np.flatnonzero(products | exchange)  # in the order of time
    rows = marks[exchange[marks]]
    to_experts = np.append(products[marks[1:]], False)[exchange[marks]]  # the next mark is a product
    is_dispatch = to_experts ^ (pass_id[rows] == PASSES.index("backward"))
    named = name_id.copy()
    named[rows] = np.where(is_dispatch, _index_in(names, Span.DISPATCH.value), _index_in(names, Span.COMBINE.value))
    return tuple(names), named, pass_id


@dataclass(frozen=True, kw_only=True)
class _Event:
    """Facts of a kind of event. `category` is from the operators around it, `ran` is the pass from the tree."""

    kernel: str
    is_communication: bool
    operator: str
    span: Span | None
    category: Category | None
    ran: str


def _name(event: _Event) -> tuple[str, str]:
    category = _kernel_category(event)
    operation, pass_ = _operation(event, category), _pass(event, category)
    name = _phase(event, category, operation, pass_)
    # The phase of a collective is its own name, so only its span shows that it belongs to the update.
    is_update = event.span in UPDATES or name in UPDATES
    return name, "update" if is_update and pass_ in ("", "forward") else pass_


def _operation(event: _Event, category: Category | None) -> Category:
    """The operation of the event: by its kernel first, then by its surroundings."""
    operation = category or generic_category(event.kernel) or generic_category(event.operator) or Category.OTHER
    if event.is_communication and event.category is Category.POINT_TO_POINT:
        return event.category  # the kernel of a message has the name of an all-to-all
    if event.is_communication and operation is Category.ALL_TO_ALL and event.category in COLLECTIVES:
        return event.category  # NCCL has named kernels of every collective after one of them
    if event.is_communication and operation in {Category.COLLECTIVE, Category.OTHER}:
        return event.category or Category.COLLECTIVE
    return operation


def _pass(event: _Event, category: Category | None) -> str:
    is_named = category is Category.GROUPED_WEIGHTS or is_gradient(event.kernel) or is_gradient(event.operator)
    return "backward" if is_named and event.ran in ("", "forward") else event.ran


def _phase(event: _Event, category: Category | None, operation: Category, pass_: str) -> str:
    """The phase: by the span, unless the kernel is more specific."""
    if event.span is None:
        named = operation if event.is_communication else category or event.category or operation
        return _experts(named, pass_) if named in PRODUCTS else _NAMED.get(named, named.value)
    if event.span in EXPERTS:
        return _inside_experts(event.span, category, operation, pass_)
    is_collective = event.is_communication and operation in COLLECTIVES
    if is_collective or (category is Category.QUANTIZE and event.span != Span.NORM):
        return operation.value
    return PHASE_NAMES.get(event.span, event.span.value)


def _kernel_category(event: _Event) -> Category | None:
    """The part of the model, by an operator of PyTorch before the kernel's name, which can name what is fused to it.

    The span decides where several categories share a kernel.
    """
    if event.kernel == FLOAT8_GEMM and (event.span is Span.EXPERTS or event.category is Category.GROUPED):
        return Category.GROUPED_WEIGHTS
    named = specific_category(event.kernel)
    if event.is_communication and named not in _SENT:
        return None  # a part of a namespace, as in `flashinfer::trtllm_alltoall`
    if event.operator.startswith(ATEN):
        made = specific_category(event.operator)
        is_product = generic_category(event.operator) is Category.PRODUCTS
        return made or (None if is_product and named not in PRODUCTS else named)
    return named


def _inside_experts(span: Span, category: Category | None, operation: Category, pass_: str) -> str:
    if category is Category.WAIT:
        return span.value + WAITING
    if category in _WITHIN:
        return category.value
    if operation is Category.LOOK_UP and span is not Span.ROUTE:
        return Category.PERMUTE.value
    if span is Span.EXPERTS and operation in PRODUCTS | {Category.PRODUCTS}:
        return _experts(operation, pass_)
    return span.value


def _experts(part: Category, pass_: str) -> str:
    if part is Category.GROUPED_WEIGHTS:
        return "experts weight gradient"
    return "experts input gradient" if pass_ == "backward" and part is Category.GROUPED else Span.EXPERTS.value
