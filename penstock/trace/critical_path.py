"""The critical path of a step: the chain of work, on the device and on the host, that determined its duration.

The path is walked backwards, from the end of the last event of the step on the rank that ended last, to its begin:

    a collective    that waited for a later rank: the path is its transfer, and goes on at the later rank's arrival
    another event   waited for the device: the path goes on at the event that ended last before it, on its own stream if
                    that ended within `BACK_TO_BACK_US`
    a late launch   came after that end: the path is the launch, and before it the host since the device became idle,
                    by the innermost operator on the launching thread

So the segments follow each other without gaps on the clock that the ranks share, and add up to the step. Shortening a
segment shortens the step by at most as much, because another chain may become the longest. What a kernel waited for on
another stream is in no trace; that it was the last event to end is an assumption.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.trace.collectives import CollectiveTimes
from penstock.trace.events import NONE, GpuKind, HostKind, Trace
from penstock.trace.phases import Phases
from penstock.trace.tree import stretches

BACK_TO_BACK_US = 5.0  # longest time between two kernels of a stream that is only the start of the second
BETWEEN, OUTSIDE = "between kernels", "outside of operators"

SegmentKind = Literal["compute", "communication", "copy", "gap", "launch", "host"]
_KINDS: Mapping[GpuKind, SegmentKind] = {
    GpuKind.COMPUTE: "compute",
    GpuKind.COMMUNICATION: "communication",
    GpuKind.COPY: "copy",
    GpuKind.SET: "compute",
}


class PathSegment(NamedTuple):
    """A part of the path. Times are on the common clock of the ranks."""

    rank: int
    kind: SegmentKind
    name: str  # phase of a GPU event, or operator of the host
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class PathRow:
    """Segments of one rank, kind and name."""

    rank: int
    kind: SegmentKind
    name: str
    total_us: float
    share: float  # of the path
    count: int


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """The path of one step, in the order of time."""

    step: str  # name of its region; empty without steps
    segments: tuple[PathSegment, ...]

    @property
    def total_us(self) -> float:
        """Duration of the step on the common clock."""
        return self.segments[-1].end_us - self.segments[0].start_us if self.segments else 0.0

    def rows(self) -> list[PathRow]:
        """The table, longest first."""
        sums: dict[tuple[int, SegmentKind, str], tuple[float, int]] = {}
        for rank, kind, name, start_us, end_us in self.segments:
            total_us, count = sums.get((rank, kind, name), (0.0, 0))
            sums[rank, kind, name] = (total_us + end_us - start_us, count + 1)
        whole_us = self.total_us or 1.0
        rows = [
            PathRow(rank=rank, kind=kind, name=name, total_us=us, share=us / whole_us, count=count)
            for (rank, kind, name), (us, count) in sums.items()
        ]
        return sorted(rows, key=lambda row: (-row.total_us, row.rank, row.kind, row.name))

    def by_kind(self) -> dict[SegmentKind, float]:
        """Microseconds of each kind, the longest first."""
        sums: dict[SegmentKind, float] = {}
        for row in self.rows():
            sums[row.kind] = sums.get(row.kind, 0.0) + row.total_us
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "total_us": self.total_us,
            "kinds": self.by_kind(),
            "rows": [asdict(row) for row in self.rows()],
        }


class RankOfPath:
    """The events of one rank in the step, on the common clock, as lists: the walk visits one at a time.

    `window_us` is that of the step on the clock of the rank's file, which is ahead by `ahead_us`.
    """

    def __init__(
        self, *, rank: int, trace: Trace, phases: Phases, window_us: tuple[float, float], ahead_us: float
    ) -> None:
        self.rank, self.trace, self.phases, self.ahead_us = rank, trace, phases, ahead_us
        gpu = trace.gpu
        rows = gpu.starting_in(*window_us)
        self.first = rows.start
        self.start: list[float] = (gpu.start_us[rows] - ahead_us).tolist()
        self.end: list[float] = (gpu.end_us[rows] - ahead_us).tolist()
        self.launch: list[int] = gpu.launch[rows].tolist()
        self.kind: list[int] = gpu.kind[rows].tolist()
        self.name: list[int] = phases.name_id[: len(gpu)][rows].tolist()
        # The event before each on its stream, or NONE.
        stream = gpu.stream[rows]
        order = np.argsort(stream, kind="stable")
        before = np.full(len(order), NONE)
        same = stream[order][1:] == stream[order][:-1]
        before[order[1:][same]] = order[:-1][same]
        self.before: list[int] = before.tolist()
        by_end = np.argsort(np.array(self.end), kind="stable")
        self.by_end: list[int] = by_end.tolist()
        self.ends = [self.end[row] for row in self.by_end]
        self.launched: list[float] = (trace.launched_us[rows] - ahead_us).tolist()

    def cause(self, event: int) -> int:
        """The event whose end let this one start, as far as the device decides; NONE for the first."""
        start = self.start[event]
        before = self.before[event]
        if before != NONE and start - self.end[before] <= BACK_TO_BACK_US:
            return before
        position = bisect_right(self.ends, start) - 1
        last = self.by_end[position] if position >= 0 else NONE  # the event that ended last by then
        return before if last == event else last  # an event of zero duration ends when it starts

    def phase(self, event: int) -> str:
        return self.phases.names[self.name[event]]

    def operators(self, thread: int) -> "_Operators":
        """The innermost operators of a thread of the host over time."""
        host = self.trace.host
        rows = np.flatnonzero((host.kind == HostKind.OPERATOR) & (host.thread == thread))
        intervals = sorted(stretches(host, rows), key=itemgetter(1))
        return [(host.name(row), start - self.ahead_us, end - self.ahead_us) for row, start, end in intervals]


_Operators = list[tuple[str, float, float]]
"""Names, starts and ends on the common clock; they do not overlap."""


_Meetings = Mapping[tuple[int, int], tuple[int, int]]
"""Rank and GPU row of a collective that waited -> rank that came last, and its row."""


def critical_path(ranks: Sequence[RankOfPath], collectives: CollectiveTimes, step: str = "") -> CriticalPath:
    """The path of a step of some ranks; empty if none has an event in it."""
    tables = {rank.rank: rank for rank in ranks if rank.start}
    if not tables:
        return CriticalPath(step=step, segments=())
    begin_us = min(table.start[0] for table in tables.values())
    last = max(tables, key=lambda rank: tables[rank].ends[-1])
    path, hosts = _walk(tables, _meetings(collectives), last, begin_us)
    threads: dict[tuple[int, int], _Operators] = {}
    segments: list[PathSegment] = []
    for segment in reversed(path):
        launch = hosts.get((segment.rank, segment.start_us)) if segment.kind == "host" else None
        if launch is None:
            segments.append(segment)
            continue
        rank = tables[segment.rank]
        key = (segment.rank, int(rank.trace.host.thread[launch]))
        if key not in threads:
            threads[key] = rank.operators(key[1])
        segments += _by_operator(segment, threads[key])
    return CriticalPath(step=step, segments=tuple(segments))


def _meetings(collectives: CollectiveTimes) -> _Meetings:
    calls, meetings = collectives.calls, {}
    for meeting in np.flatnonzero(collectives.last != NONE).tolist():
        rows, last = collectives.meetings.met[meeting], int(collectives.last[meeting])
        to = (calls.ranks[last], int(calls.gpu_row[rows[last]]))
        for rank in np.flatnonzero(rows != NONE).tolist():
            if rank != last:
                meetings[calls.ranks[rank], int(calls.gpu_row[rows[rank]])] = to
    return meetings


_Hosts = dict[tuple[int, float], int]  # host segments by rank and begin, with the launch that followed


def _walk(
    tables: Mapping[int, RankOfPath], meetings: _Meetings, rank: int, begin_us: float
) -> tuple[list[PathSegment], _Hosts]:
    """Segments from the last to the first."""
    segments: list[PathSegment] = []
    hosts: _Hosts = {}
    event = tables[rank].by_end[-1]
    now = tables[rank].end[event]
    seen: set[tuple[int, int]] = set()

    def add(kind: SegmentKind, name: str, until: float) -> float:
        """A segment from `until` to now, if it is one; the new now."""
        until = max(min(until, now), begin_us)
        if now > until:
            segments.append(PathSegment(rank, kind, name, until, now))
        return until

    while now > begin_us and event != NONE and (rank, event) not in seen:
        seen.add((rank, event))
        table = tables[rank]
        to = meetings.get((rank, event + table.first))
        if to is not None and to[0] in tables:
            other, row = to[0], to[1] - tables[to[0]].first
            if 0 <= row < len(tables[other].start) and table.start[event] < tables[other].start[row] <= now:
                now = add("communication", table.phase(event), tables[other].start[row])
                rank, event, table = other, row, tables[other]
                seen.add((rank, event))
        now = add(_KINDS[GpuKind(table.kind[event])], table.phase(event), table.start[event])
        cause, launched = table.cause(event), table.launched[event]
        freed = table.end[cause] if cause != NONE else begin_us
        if launched > freed:  # False where the launch is not in the trace
            now = add("launch", table.phase(event), launched)
            hosts[rank, max(freed, begin_us)] = table.launch[event]
            now = add("host", OUTSIDE, freed)
        else:
            now = add("gap", BETWEEN, freed)
        event = cause
    if now > begin_us:
        add("gap", BETWEEN, begin_us)
    return segments, hosts


def _by_operator(host: PathSegment, operators: _Operators) -> list[PathSegment]:
    segments, now = list[PathSegment](), host.start_us
    index = bisect_right(operators, now, key=itemgetter(2))
    while index < len(operators) and operators[index][1] < host.end_us:
        name, start, end = operators[index]
        start, end = max(start, now), min(end, host.end_us)
        if start > now:
            segments.append(host._replace(start_us=now, end_us=start))
        if end > start:
            segments.append(host._replace(name=name, start_us=start, end_us=end))
        now, index = max(end, now), index + 1
    return [*segments, host._replace(start_us=now)] if now < host.end_us else segments
