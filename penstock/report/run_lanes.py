"""What devices did in a recorded step without a pipeline: a lane for each rank, coloured by what the time was for.

Kernels that compute lie in the upper half of a lane, what is sent and copied in the lower one; where nothing is sent,
lanes are whole. Neighbouring kernels of one phase are one box. Where even these are more than a page can hold,
the step is cut into equal slots, and each is coloured by what took most of it; `Lanes.slot_us` says how wide they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.report.colours import KERNELS, kernel_group
from penstock.report.run_steps import Clock
from penstock.report.timeline import Interval, Lane, Timeline
from penstock.trace.answer import RankAnswer
from penstock.trace.events import NONE, Flags, Floats, GpuKind, Integers
from penstock.trace.intervals import union
from penstock.trace.phases import PASSES, WAITING

BOXES = 10_000
"""Of all lanes together."""

TOUCHING_US = 2.0
"""Kernels of one phase that are less than this apart are one box."""

FINER = (16, 8, 4, 2, 1)
"""Slots for each box that a lane may have: many slots are alike, so the finest that fits is taken."""

LAYERS = 4096
"""More than any model has."""

_GROUPS = tuple(KERNELS)


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """A step in phases.

    Attributes:
        timeline: of it.
        slot_us: width of the slots that some lanes had to be cut into; 0 if every box is exact.
        has_halves: what is sent and copied has a half of its own.
    """

    timeline: Timeline
    slot_us: float
    has_halves: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class _Boxes:
    """Boxes of one half of a lane: times in microseconds from zero, and what each is."""

    start_us: Floats
    end_us: Floats
    what: Sequence[tuple[str, str]]


def measured_phases(ranks: Sequence[RankAnswer], clock: Clock, boxes: int = BOXES) -> Lanes:
    """The lanes of some ranks over a step.

    Args:
        ranks: with a trace.
        clock: of them.
        boxes: at most, of all lanes together.
    """
    sends = any((one.trace.gpu.kind == GpuKind.COMMUNICATION)[_in_window(one, clock)].any() for one in ranks)
    each = max(10, boxes // (len(ranks) * (2 if sends else 1)))
    slots, lanes = 0.0, []
    for one in ranks:
        intervals: list[Interval] = []
        for is_sent in (False, True) if sends else (False,):
            found, slot_us = _half(one, clock, (_is_sent(one) == is_sent) if sends else None, each)
            part = (0.0, 1.0) if not sends else (0.0, 0.46) if is_sent else (0.5, 1.0)
            slots = max(slots, slot_us)
            intervals += _intervals(found, part)
        lanes.append(Lane(name=f"rank {one.rank}", intervals=sorted(intervals, key=lambda box: box.start)))
    timeline = Timeline(name="measured", lanes=lanes, ground="idle", has_edges=False)
    return Lanes(timeline=timeline, slot_us=slots, has_halves=sends)


def _is_sent(one: RankAnswer) -> Flags:
    """Events that do not compute."""
    return ~np.isin(one.trace.gpu.kind, [GpuKind.COMPUTE, GpuKind.SET])


def _in_window(one: RankAnswer, clock: Clock) -> Flags:
    """Events that begin in the step."""
    start, end = clock.windows_us[one.rank]
    begun: Flags = (one.trace.gpu.start_us >= start) & (one.trace.gpu.start_us < end)
    return begun


def _half(one: RankAnswer, clock: Clock, chosen: Flags | None, most: int) -> tuple[_Boxes, float]:
    """Boxes of the chosen events of a rank in the step, and the width of their slots."""
    phases = one.phases
    wanted = _in_window(one, clock) & (True if chosen is None else chosen)
    entry = np.flatnonzero(wanted[phases.event])
    start, end = _times(one)
    entry = entry[np.argsort(start[entry], kind="stable")]
    zero = clock.zero_us[one.rank]
    start, end = start[entry] - zero, end[entry] - zero
    key = (phases.name_id[entry] * len(PASSES) + phases.pass_id[entry]) * LAYERS + phases.layer[entry] + 1
    exact = _merged(start, end, key)
    if len(exact[0]) <= most:
        return _Boxes(start_us=exact[0], end_us=exact[1], what=[_words(one, int(code)) for code in exact[2]]), 0.0
    window = clock.windows_us[one.rank]
    groups = np.array([_GROUPS.index(kernel_group(name)) for name in phases.names])[phases.name_id[entry]]
    for finer in FINER:
        slotted = _slotted(start, end, groups, np.linspace(window[0] - zero, window[1] - zero, finer * most + 1))
        if len(slotted.what) <= most:
            break
    return slotted, (window[1] - window[0]) / (finer * most)


def _times(one: RankAnswer) -> tuple[Floats, Floats]:
    """Start and end of every entry: an event that waits for other ranks does so first, and is two of them."""
    phases, gpu = one.phases, one.trace.gpu
    waits = np.array([name.endswith(WAITING) for name in phases.names], dtype=bool)[phases.name_id]
    split = waits & (np.bincount(phases.event, minlength=len(gpu))[phases.event] > 1)
    waited = np.bincount(phases.event[split], phases.kernel_us[split], len(gpu))
    start = gpu.start_us[phases.event] + np.where(split, 0.0, waited[phases.event])
    return start, start + phases.kernel_us


def _merged(start: Floats, end: Floats, key: Integers) -> tuple[Floats, Floats, Integers]:
    """Neighbours of one key that touch, as one."""
    if not len(start):
        return start, end, key
    reached = np.maximum.accumulate(end)
    begins = np.ones(len(start), dtype=bool)
    begins[1:] = (key[1:] != key[:-1]) | (start[1:] > reached[:-1] + TOUCHING_US)
    at = np.flatnonzero(begins)
    return start[at], np.maximum.reduceat(end, at), key[at]


def _slotted(start: Floats, end: Floats, group: Integers, edges: Floats) -> _Boxes:
    """Slots between edges, by what took most of each; neighbours are one. Less than half of a slot is left as idle."""
    kinds = np.unique(group)
    covered = [union(start[group == one], end[group == one]).covered_us(edges[:-1], edges[1:]) for one in kinds]
    busy = union(start, end).covered_us(edges[:-1], edges[1:]) >= (edges[1] - edges[0]) / 2
    of_slot = np.where(busy, kinds[np.stack(covered).argmax(axis=0)], NONE)
    begins = np.ones(len(of_slot), dtype=bool)
    begins[1:] = of_slot[1:] != of_slot[:-1]
    at = np.flatnonzero(begins)
    ends = np.append(at[1:], len(of_slot))
    kept = of_slot[at] != NONE
    names = [_GROUPS[one] for one in of_slot[at][kept]]
    what = [(name, f"mostly {name}") for name in names]
    return _Boxes(start_us=edges[at][kept], end_us=edges[ends][kept], what=what)


def _words(one: RankAnswer, code: int) -> tuple[str, str]:
    """Group and name of an entry."""
    rest, layer = divmod(code, LAYERS)
    name, pass_ = divmod(rest, len(PASSES))
    phase = one.phases.names[name]
    words = [phase, *([PASSES[pass_]] if PASSES[pass_] else []), *([f"layer {layer - 1}"] if layer else [])]
    return kernel_group(phase), ", ".join(words)


def _intervals(boxes: _Boxes, part: tuple[float, float]) -> list[Interval]:
    return [
        Interval(
            start=start / 1e6,
            end=end / 1e6,
            name=words,
            colour=KERNELS[group],
            group=group,
            part=part,
        )
        for start, end, (group, words) in zip(boxes.start_us.tolist(), boxes.end_us.tolist(), boxes.what, strict=True)
    ]
