"""The timeline of a run: one lane per rank over a recorded step.

With a pipeline, the planned and the measured passes share one axis. A measured pass lasts from the first kernel that
its span launched to the end of the last one. Messages between stages are left out, because a receive waits for its
sender; a gap between passes is therefore waiting, as in the plan. Spans of a pair are nested, and a kernel belongs to
the innermost span that was open at its launch.

Without a pipeline, lanes are coloured by phase. Kernels that compute are in the upper half of a lane, communication and
copies in the lower half; without communication a lane has one part. Neighbouring kernels of one phase are one box. If
there are still too many boxes for a page, the step is cut into equal slots, each coloured by the group that took most
of it; `PhaseLanes.slot_us` is their width.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.base.numbers import three_digits
from penstock.layout.actions import Kind
from penstock.plan.projection import Projection
from penstock.report.figure import KERNELS, Figure, evenly, kernel_group, left_out
from penstock.report.run_evidence import RunEvidence, StepClock, clock_of, sentence
from penstock.report.run_metrics import place_name
from penstock.report.timeline import (
    Interval,
    PipelinePass,
    Timeline,
    TimelineLane,
    activation_shares,
    pass_interval,
    planned,
    timeline_figure,
)
from penstock.trace.analysis import RankAnalysis, last_step
from penstock.trace.calls import CollectiveCalls, SyncKind
from penstock.trace.events import NONE, Flags, Floats, GpuKind, HostKind, Integers
from penstock.trace.intervals import union
from penstock.trace.kernel_names import Category
from penstock.trace.phases import PASSES, WAITING
from penstock.trace.tree import CATEGORIES, nest, open_at

PASS = re.compile(
    r"(?P<what>forward|backward|input gradient|weight gradient) of stage (?P<stage>\d+)"
    r", micro-batch (?P<micro_batch>\d+)"
)
"""Names of spans, as in penstock/base/spans.py."""

KINDS: Mapping[str, Kind] = {
    "forward": Kind.FORWARD,
    "backward": Kind.BACKWARD,
    "input gradient": Kind.INPUT,
    "weight gradient": Kind.WEIGHT,
}

_ALLOCATES = "aten::empty"  # CPU operators that prepare a receive


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """A pass of one rank, on the clock of its file."""

    what: PipelinePass
    start_us: float
    end_us: float
    is_within: bool


def measured_passes(
    evidence: RunEvidence, ranks: Sequence[RankAnalysis], clock: StepClock, places: Mapping[int, int]
) -> Timeline:
    step = last_step(ranks)
    assert evidence.answer is not None, "ranks have traces"
    calls = evidence.answer.collectives.calls
    passes_by_rank = {rank.rank: _passes(rank, calls, step) for rank in ranks}
    starts = [each[0].start_us - clock.zero_us[rank] for rank, each in passes_by_rank.items() if each]
    begin = min(starts, default=0.0)  # the first pass of any rank
    lanes = []
    for rank, passes in passes_by_rank.items():
        stages, zero_us = sorted({measured.what.stage for measured in passes}), clock.zero_us[rank] + begin
        intervals = [
            pass_interval(
                measured.what,
                ((measured.start_us - zero_us) / 1e6, (measured.end_us - zero_us) / 1e6),
                (stages.index(measured.what.stage), len(stages)),
                is_pair=measured.is_within,
            )
            for measured in passes
        ]
        lanes.append(TimelineLane(name=f"rank {rank}", intervals=intervals, place=places.get(rank, rank)))
    return Timeline(name="measured", lanes=lanes)


def _passes(rank: RankAnalysis, calls: CollectiveCalls, step: int | None) -> list[_Measured]:
    trace, host = rank.trace, rank.trace.host
    is_pass = host.named(PASS.fullmatch) & (host.kind == HostKind.SPAN)
    parent = nest(host, np.flatnonzero(is_pass)).parent
    row = np.where(_is_pass_work(rank, calls), open_at(trace, is_pass), NONE)  # span of each GPU event
    wanted = next((traced_step.start_us for traced_step in rank.steps if traced_step.number == step), None)
    if wanted is not None:
        begun_us = np.append(host.start_us, np.nan)[rank.phases.placement.step]  # of each event's step
        row = np.where(begun_us == wanted, row, NONE)
    hulls: dict[PipelinePass, list[float]] = {}
    within: defaultdict[PipelinePass, bool] = defaultdict(bool)
    for number in np.unique(row[row != NONE]).tolist():
        mine = row == number
        match = PASS.fullmatch(host.name(number))
        assert match is not None, "the name of a pass"
        stage, micro_batch = int(match["stage"]), int(match["micro_batch"])
        what = PipelinePass(kind=KINDS[match["what"]], stage=stage, micro_batch=micro_batch)
        # A pass lasts from its first kernel to its last.
        hull = hulls.setdefault(what, [np.inf, -np.inf])
        hull[0] = min(hull[0], float(trace.gpu.start_us[mine].min()))
        hull[1] = max(hull[1], float(trace.gpu.end_us[mine].max()))
        within[what] |= bool(parent[number] != NONE or (parent == number).any())
    measured = [_Measured(what=what, start_us=a, end_us=b, is_within=within[what]) for what, (a, b) in hulls.items()]
    return sorted(measured, key=lambda each: each.start_us)


def _is_pass_work(rank: RankAnalysis, calls: CollectiveCalls) -> Flags:
    """Mask of the GPU events that are not messages between stages or their preparation."""
    gpu, phases, placement = rank.trace.gpu, rank.phases, rank.phases.placement
    is_work = placement.collective != CATEGORIES.index(Category.POINT_TO_POINT)
    messages = [number for number, name in enumerate(phases.names) if name.startswith(Category.POINT_TO_POINT)]
    is_work[phases.event[np.isin(phases.name_id, messages)]] = False
    is_own = calls.rank == calls.ranks.index(rank.rank)
    is_work[calls.gpu_row[is_own & (calls.sync == SyncKind.PAIR)]] = False
    return is_work & ~gpu.named(lambda name: name.startswith(_ALLOCATES))


# ------------------------------------------------------------------------------------------------------------ run lanes

BOXES = 10_000  # largest number of boxes, over all lanes
TOUCHING_US = 2.0  # kernels of one phase with a smaller distance are one box

FINER = (16, 8, 4, 2, 1)
"""Slots for each box of a lane: equal neighbours are joined, so the finest division that fits is used."""

LAYERS = 4096  # more than any model has
_GROUPS = tuple(KERNELS)


@dataclass(frozen=True, kw_only=True)
class PhaseLanes:
    """A step by phases."""

    timeline: Timeline
    slot_us: float  # width of the slots that some lanes are divided into; 0 if every box is exact
    has_halves: bool  # communication and copies have the lower half of a lane


@dataclass(frozen=True, kw_only=True, eq=False)
class _Boxes:
    """Boxes of one half of a lane: microseconds from zero, and (group, name) of each."""

    start_us: Floats
    end_us: Floats
    what: Sequence[tuple[str, str]]


def measured_phases(ranks: Sequence[RankAnalysis], clock: StepClock, boxes: int = BOXES) -> PhaseLanes:
    """The lanes of some ranks over a step, with at most `boxes` boxes in all."""
    sends = any((rank.trace.gpu.kind == GpuKind.COMMUNICATION)[_in_window(rank, clock)].any() for rank in ranks)
    each = max(10, boxes // (len(ranks) * (2 if sends else 1)))
    slots, lanes = 0.0, []
    for rank in ranks:
        intervals: list[Interval] = []
        computes = np.isin(rank.trace.gpu.kind, [GpuKind.COMPUTE, GpuKind.SET])
        # Events and the part of the lane that they have, from its bottom to its top.
        halves = [(computes, (0.5, 1.0)), (~computes, (0.0, 0.46))] if sends else [(None, (0.0, 1.0))]
        for chosen, part in halves:
            half, slot_us = _half(rank, clock, chosen, each)
            slots = max(slots, slot_us)
            intervals += [
                Interval(start=start / 1e6, end=end / 1e6, name=text, colour=KERNELS[group], group=group, part=part)
                for start, end, (group, text) in zip(
                    half.start_us.tolist(), half.end_us.tolist(), half.what, strict=True
                )
            ]
        lanes.append(TimelineLane(name=f"rank {rank.rank}", intervals=sorted(intervals, key=lambda box: box.start)))
    timeline = Timeline(name="measured", lanes=lanes, ground="idle", has_edges=False)
    return PhaseLanes(timeline=timeline, slot_us=slots, has_halves=sends)


def _in_window(rank: RankAnalysis, clock: StepClock) -> Flags:
    start, end = clock.windows_us[rank.rank]
    begun: Flags = (rank.trace.gpu.start_us >= start) & (rank.trace.gpu.start_us < end)
    return begun


def _half(rank: RankAnalysis, clock: StepClock, chosen: Flags | None, limit: int) -> tuple[_Boxes, float]:
    """Boxes of the chosen events of a rank in the step, and the width of their slots."""
    phases, zero = rank.phases, clock.zero_us[rank.rank]
    wanted = _in_window(rank, clock) & (True if chosen is None else chosen)
    entry = np.flatnonzero(wanted[phases.event])  # rows of `phases`
    start, end = _times(rank)
    entry = entry[np.argsort(start[entry], kind="stable")]
    start, end = start[entry] - zero, end[entry] - zero
    # One number for phase, pass and layer, which `_words` takes apart; no layer (-1) becomes 0.
    key = (phases.name_id[entry] * len(PASSES) + phases.pass_id[entry]) * LAYERS + phases.layer[entry] + 1
    begins, ends, codes = _merged(start, end, key)
    if len(begins) <= limit:
        return _Boxes(start_us=begins, end_us=ends, what=[_words(rank, code) for code in codes.tolist()]), 0.0
    low, high = (edge - zero for edge in clock.windows_us[rank.rank])
    groups = np.array([_GROUPS.index(kernel_group(name)) for name in phases.names])[phases.name_id[entry]]
    for finer in FINER:
        slotted = _slotted(start, end, groups, np.linspace(low, high, finer * limit + 1))
        if len(slotted.what) <= limit:
            break
    return slotted, (high - low) / (finer * limit)


def _times(rank: RankAnalysis) -> tuple[Floats, Floats]:
    """Start and end of every entry. An event that waited has two entries, the waiting one first."""
    phases, gpu = rank.phases, rank.trace.gpu
    waits = np.array([name.endswith(WAITING) for name in phases.names], dtype=bool)[phases.name_id]
    split = waits & (np.bincount(phases.event, minlength=len(gpu))[phases.event] > 1)
    waited = np.bincount(phases.event[split], phases.kernel_us[split], len(gpu))  # of each event, its waiting part
    start = gpu.start_us[phases.event] + np.where(split, 0.0, waited[phases.event])
    return start, start + phases.kernel_us


def _merged(start: Floats, end: Floats, key: Integers) -> tuple[Floats, Floats, Integers]:
    if not len(start):
        return start, end, key
    reached = np.maximum.accumulate(end)  # latest end so far
    is_new = (key[1:] != key[:-1]) | (start[1:] > reached[:-1] + TOUCHING_US)  # another key, or a gap
    at = np.flatnonzero(np.append(True, is_new))
    return start[at], np.maximum.reduceat(end, at), key[at]


def _slotted(start: Floats, end: Floats, group: Integers, edges: Floats) -> _Boxes:
    """Slots between edges, each with the group that took most of it; a slot that is less than half busy is idle."""
    kinds = np.unique(group)
    # [group, slot]: time of each group in each slot.
    covered = [union(start[group == kind], end[group == kind]).covered_us(edges[:-1], edges[1:]) for kind in kinds]
    busy = union(start, end).covered_us(edges[:-1], edges[1:]) >= (edges[1] - edges[0]) / 2
    of_slot = np.where(busy, kinds[np.stack(covered).argmax(axis=0)], NONE)
    at = np.flatnonzero(np.append(True, of_slot[1:] != of_slot[:-1]))  # first slot of each run of one group
    ends = np.append(at[1:], len(of_slot))
    kept = of_slot[at] != NONE
    names = [_GROUPS[kind] for kind in of_slot[at][kept]]
    return _Boxes(start_us=edges[at][kept], end_us=edges[ends][kept], what=[(name, f"mostly {name}") for name in names])


def _words(rank: RankAnalysis, code: int) -> tuple[str, str]:
    rest, layer = divmod(code, LAYERS)
    name, pass_ = divmod(rest, len(PASSES))
    phase = rank.phases.names[name]
    texts = [phase, *([PASSES[pass_]] if PASSES[pass_] else []), *([f"layer {layer - 1}"] if layer else [])]
    return kernel_group(phase), ", ".join(texts)


# --------------------------------------------------------------------------------------------------------- run timeline

LANES = 64  # largest number of lanes in a figure
LATE = 4  # ranks that others wait for most, always drawn


def timeline_pictures(evidence: RunEvidence) -> tuple[list[Figure], list[str]]:
    has_pipeline = any(PASS.fullmatch(name) for rank in evidence.ranks for name in rank.trace.names)
    plan = _planned(evidence.projection)
    if not evidence.ranks:
        figures = [] if plan is None else [timeline_figure("timeline", "Pipeline, planned", [plan])]
        return figures, [sentence(evidence.lacks.trace)]
    if has_pipeline:
        return _pipeline(evidence, plan)
    return [_phases(evidence)], []


def _planned(projection: Projection | None) -> Timeline | None:
    """The plan's passes, if the run has a pipeline."""
    if projection is None or projection.time.schedule is None or projection.time.playback is None:
        return None
    timeline = planned(projection.time.schedule, projection.time.playback, activation_shares(projection))
    lanes = [replace(lane, name=place_name(projection, position)) for position, lane in enumerate(timeline.lanes)]
    return replace(timeline, lanes=lanes, gaps="bubble")


def _pipeline(evidence: RunEvidence, plan: Timeline | None) -> tuple[list[Figure], list[str]]:
    """Measured passes below the planned passes of the same place."""
    places = _places_of(evidence)
    count = len(plan.lanes) if plan is not None else max(places.values()) + 1
    recorded = sorted(set(places.values()))
    limit = LANES // (1 if plan is None else 2)  # places: each has a planned lane too
    first = {recorded[at] for at in evenly(len(recorded), limit)}  # those with a recorded rank
    rest = [position for position in range(count) if position not in first]
    kept = sorted(first | {rest[at] for at in evenly(len(rest), limit - len(first))})
    ranks = _ranks_of_places(evidence.ranks, places, kept, LANES - (len(kept) if plan is not None else 0))
    clock = clock_of(evidence, ranks)
    measured = replace(measured_passes(evidence, ranks, clock, places), gaps="bubble")
    timelines = [measured]
    if plan is not None:
        timelines.insert(0, replace(plan, lanes=[replace(plan.lanes[position], place=position) for position in kept]))
    step = last_step(ranks)
    title = "Pipeline, planned and measured" if plan is not None else "Pipeline, measured"
    figure = timeline_figure("timeline", title if step is None else f"{title} in step {step}", timelines)
    some = left_out(len(ranks), len(evidence.ranks), "recorded ranks are drawn")
    caption = f"{figure.caption} {clock.words}{some}{left_out(len(kept), count, 'places are drawn')}"
    return [replace(figure, caption=caption)], [] if plan is not None else [sentence(evidence.lacks.plan)]


def _places_of(evidence: RunEvidence) -> Mapping[int, int]:
    """The pipeline place of each rank with a trace; ranks of a place are consecutive."""
    traced_world = max((rank.trace.world or 0 for rank in evidence.ranks), default=0)
    world = traced_world or evidence.facts.world or max(rank.rank for rank in evidence.ranks) + 1
    places = evidence.run.parallel.pipeline if evidence.run is not None else world
    return {rank.rank: rank.rank * places // world for rank in evidence.ranks}


def _ranks_of_places(
    ranks: Sequence[RankAnalysis], places: Mapping[int, int], kept: Sequence[int], limit: int
) -> list[RankAnalysis]:
    """Equally many ranks of each drawn place."""
    each = max(1, limit // max(1, len(kept)))
    chosen = []
    for position in kept:
        of_place = [rank for rank in ranks if places[rank.rank] == position]
        chosen += [of_place[at] for at in evenly(len(of_place), each)]
    return chosen


def _phases(evidence: RunEvidence) -> Figure:
    # The ranks to draw: all, or the stragglers and evenly spaced others.
    late = (
        [straggler.rank for straggler in evidence.answer.collectives.stragglers()]
        if evidence.answer is not None
        else []
    )
    first = [rank for rank in evidence.ranks if rank.rank in late[:LATE]]  # the most expensive stragglers
    rest = [rank for rank in evidence.ranks if rank not in first]
    chosen = [*first, *(rest[at] for at in evenly(len(rest), LANES - len(first)))]
    ranks = sorted(chosen, key=lambda rank: rank.rank)
    clock = clock_of(evidence, ranks)
    lanes = measured_phases(ranks, clock)
    step = last_step(ranks)
    notes = [f"What {'operators of each process' if evidence.is_host else 'kernels of each device'} were for."]
    if lanes.has_halves:
        notes.append("Upper half of a lane: computing; lower half: communication and copies.")
    if lanes.slot_us:
        notes.append(f"Cut into slots of {three_digits(lanes.slot_us)} \u00b5s, each coloured by what took most of it.")
    if len(ranks) < len(evidence.ranks):
        notes.append(f"{len(ranks)} of {len(evidence.ranks)} recorded ranks, with those that others wait for most.")
    title = "The trace" if step is None else f"Step {step}, measured"
    figure = timeline_figure("timeline", title, [lanes.timeline])
    return replace(figure, caption=" ".join(note for note in [*notes, "Grey is idle.", clock.words] if note))
