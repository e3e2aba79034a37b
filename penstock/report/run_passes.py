"""The passes of a pipeline as they were measured: a lane for each rank, on the same axis as the plan's.

A pass lasts from the first kernel that its span started to the end of the last one; messages between stages are no part
of it, because a receive waits for its sender. A gap between passes is therefore what the plan calls one: waiting. Spans
of a pair lie within each other, and a kernel belongs to the innermost one that was open when it was launched.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.layout.actions import Kind
from penstock.report.run_evidence import RunEvidence
from penstock.report.run_steps import Clock, last_step
from penstock.report.timeline import Interval, Lane, Pass, Timeline, pass_interval
from penstock.trace.answer import RankAnswer
from penstock.trace.calls import Calls, Way
from penstock.trace.events import NONE, Flags, Floats, HostKind, Integers, Trace
from penstock.trace.kernel_names import Part
from penstock.trace.tree import PARTS, nest

PASS = re.compile(
    r"(?P<what>forward|backward|input gradient|weight gradient) of stage (?P<stage>\d+)"
    r", micro-batch (?P<micro_batch>\d+)"
)
"""Names of spans, as penstock/base/spans.py has them."""

KINDS: Mapping[str, Kind] = {
    "forward": Kind.FORWARD,
    "backward": Kind.BACKWARD,
    "input gradient": Kind.INPUT,
    "weight gradient": Kind.WEIGHT,
}

_ALLOCATES = "aten::empty"
"""Operators of a CPU that begin a receive, before there is anything to do."""


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """A pass of one rank, on the clock of its file."""

    what: Pass
    start_us: float
    end_us: float
    is_within: bool


def has_passes(one: RankAnswer) -> bool:
    """Whether a trace has spans of a pipeline."""
    return any(PASS.fullmatch(name) for name in one.trace.names)


def measured_passes(
    evidence: RunEvidence, ranks: Sequence[RankAnswer], clock: Clock, places: Mapping[int, int]
) -> Timeline:
    """The timeline of a recorded step.

    Args:
        evidence: of the run.
        ranks: to draw.
        clock: of them.
        places: of ranks on the pipeline.
    """
    step = last_step(ranks)
    assert evidence.answer is not None, "ranks have traces"
    calls = evidence.answer.collectives.calls
    found = {one.rank: _passes(one, calls, step) for one in ranks}
    starts = [each[0].start_us - clock.zero_us[rank] for rank, each in found.items() if each]
    begin = min(starts, default=0.0)
    lanes = []
    for rank, passes in found.items():
        stages = sorted({one.what.stage for one in passes})
        intervals = [_interval(one, clock.zero_us[rank] + begin, stages) for one in passes]
        lanes.append(Lane(name=f"rank {rank}", intervals=intervals, place=places.get(rank, rank)))
    return Timeline(name="measured", lanes=lanes)


def _interval(one: _Measured, zero_us: float, stages: Sequence[int]) -> Interval:
    times = ((one.start_us - zero_us) / 1e6, (one.end_us - zero_us) / 1e6)
    chunk = stages.index(one.what.stage)
    return pass_interval(one.what, times, (chunk, len(stages)), is_pair=one.is_within)


def _passes(one: RankAnswer, calls: Calls, step: int | None) -> list[_Measured]:
    """Every pass of a step, by start."""
    trace = one.trace
    span = _spans(trace)
    row = np.where(_is_work(one, calls), span.of(_asked(trace)), NONE)
    in_step = one.phases.placement.step
    wanted = next((found.start_us for found in one.steps if found.number == step), None)
    if wanted is not None:
        row = np.where(np.append(trace.host.start_us, np.nan)[in_step] == wanted, row, NONE)
    hulls: dict[Pass, list[float]] = {}
    within: defaultdict[Pass, bool] = defaultdict(bool)
    for number in np.unique(row[row != NONE]).tolist():
        mine = row == number
        what = span.passes[number]
        hull = hulls.setdefault(what, [np.inf, -np.inf])
        hull[0] = min(hull[0], float(trace.gpu.start_us[mine].min()))
        hull[1] = max(hull[1], float(trace.gpu.end_us[mine].max()))
        within[what] |= number in span.paired
    found = [_Measured(what=what, start_us=a, end_us=b, is_within=within[what]) for what, (a, b) in hulls.items()]
    return sorted(found, key=lambda each: each.start_us)


def _asked(trace: Trace) -> Floats:
    """When each event of the device was asked for; nan where that is not known."""
    gpu = trace.gpu
    return np.append(trace.host.start_us, np.nan)[np.where(gpu.is_linked, gpu.launch, len(trace.host))]


def _is_work(one: RankAnswer, calls: Calls) -> Flags:
    """Events of the device but for messages between stages, and what prepares them."""
    gpu, phases, placement = one.trace.gpu, one.phases, one.phases.placement
    is_work = placement.collective != PARTS.index(Part.POINT_TO_POINT)
    messages = [number for number, name in enumerate(phases.names) if name.startswith(Part.POINT_TO_POINT)]
    is_work[phases.event[np.isin(phases.name_id, messages)]] = False
    is_own = calls.rank == calls.ranks.index(one.rank)
    is_work[calls.gpu_row[is_own & (calls.way == Way.PAIR)]] = False
    prepares = np.array([name.startswith(_ALLOCATES) for name in one.trace.names], dtype=bool)
    return is_work & ~prepares[gpu.name_id]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Spans:
    """Spans of passes.

    Attributes:
        passes: by row of the host.
        paired: rows that lie within another, or have another within.
        rows: of the host, by start.
        parent: of each row of the host the span around it, or NONE.
        end_us: of each row of the host.
        start_us: of `rows`.
    """

    passes: Mapping[int, Pass]
    paired: frozenset[int]
    rows: Integers
    parent: Integers
    end_us: Floats
    start_us: Floats

    def of(self, asked_us: Floats) -> Integers:
        """The innermost span that was open at each time, or NONE."""
        if not len(self.rows):
            return np.full(len(asked_us), NONE)
        found = np.searchsorted(self.start_us, asked_us, side="right") - 1
        row = np.where((found >= 0) & ~np.isnan(asked_us), self.rows[np.maximum(found, 0)], NONE)
        while (closed := (row != NONE) & ~(asked_us < self.end_us[row])).any():
            row = np.where(closed, self.parent[row], row)
        return row


def _spans(trace: Trace) -> _Spans:
    """The spans of passes, nested."""
    host = trace.host
    named = {number: match for number, name in enumerate(trace.names) if (match := PASS.fullmatch(name))}
    is_pass = np.isin(host.name_id, list(named)) & (host.kind == HostKind.SPAN)
    rows = np.flatnonzero(is_pass)
    tree = nest(host, rows)
    inner = [row for row in rows.tolist() if tree.parent[row] != NONE]
    return _Spans(
        passes={row: _pass_of(named[int(host.name_id[row])]) for row in rows.tolist()},
        paired=frozenset(inner) | {int(tree.parent[row]) for row in inner},
        rows=rows,
        parent=tree.parent,
        end_us=host.end_us,
        start_us=host.start_us[rows],
    )


def _pass_of(match: re.Match[str]) -> Pass:
    return Pass(kind=KINDS[match["what"]], stage=int(match["stage"]), micro_batch=int(match["micro_batch"]))
