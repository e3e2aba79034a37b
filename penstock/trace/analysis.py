"""The whole analysis of some traces as one value, and as the JSON that `penstock trace --json` prints.

    traces  ->  each rank:    timelines, steps, phases, roofline, launches, memory
            ->  all together: collectives, stragglers, experts

Traces of one rank give a flat JSON object; of several, the fields of each rank are under `ranks`. Times are
microseconds, sizes bytes, shares of 1. An unknown value is null: it is never left out and never 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.errors import TraceError
from penstock.trace.calls import CollectiveCalls, SyncKind
from penstock.trace.collectives import CollectiveTimes, bandwidths, collectives_of, exchange_imbalances
from penstock.trace.events import NONE, Floats, Trace
from penstock.trace.experts import ExpertLoad, RecordedLoad, UsedRows, expert_load, recorded_loads, used_rows
from penstock.trace.launches import LaunchSummary, find_launches
from penstock.trace.load import read_traces
from penstock.trace.matching import UnmatchedCollective
from penstock.trace.memory import AllocatorHistory, find_memory, memory_json
from penstock.trace.phases import Phases, find_phases
from penstock.trace.roofline import Roofline, roofline
from penstock.trace.timeline import RecordedStep, TimeBreakdown, steps_of, timelines
from penstock.trace.tree import place


@dataclass(frozen=True, kw_only=True, eq=False)
class RankAnalysis:
    """The analysis of one rank."""

    rank: int
    trace: Trace
    timelines: Mapping[str, TimeBreakdown]
    steps: tuple[RecordedStep, ...]
    phases: Phases
    used_rows: UsedRows | None  # rows of grouped products that held tokens; None without grouped products
    roofline: Roofline
    launches: LaunchSummary
    memory: tuple[AllocatorHistory, ...]  # of each device's allocator, if it was recorded


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceAnalysis:
    """The analysis of all traces."""

    ranks: tuple[RankAnalysis, ...]  # one for each requested rank, in ascending order
    loaded: tuple[int, ...]  # ranks that were compared; more than `ranks` if one was requested
    collectives: CollectiveTimes
    experts: ExpertLoad
    recorded: tuple[RecordedLoad, ...] = ()  # expert loads from the run's metrics, for the steps in the traces
    is_host: bool = False  # CPU traces, in which operators take the place of kernels (penstock/trace/load.py)

    @property
    def steps(self) -> int:
        """Number of recorded steps; 0 if none is marked."""
        return max((len(one.steps) for one in self.ranks), default=0)

    @property
    def per_step(self) -> float:
        """Factor from a sum over the recording to the mean of a step; 1 if no step is marked."""
        return 1 / max(1, self.steps)


def analyse_files(paths: Sequence[Path], *, step: int | None = None, rank: int | None = None) -> TraceAnalysis:
    """Read and analyse traces.

    `step` limits the analysis to the device window of a step. `rank` limits the tables to one rank; the others are read
    for comparison.

    Raises:
        TraceError: a file cannot be read, or there is no such rank or step.
    """
    traces, is_host = read_traces(paths)
    if rank is not None and rank not in traces:
        raise TraceError(f"no trace is of rank {rank}", allowed=", ".join(map(str, traces)))
    if step is not None:
        traces = {one: _only_step(trace, step) for one, trace in traces.items()}
    answer = analyse_traces(traces, rank=rank, step=step, is_host=is_host)
    seen = {one.number for found in answer.ranks for one in found.steps}
    recorded = [one for path in paths for one in recorded_loads(path) if one.step in seen]
    return replace(answer, recorded=tuple(recorded))


def analyse_traces(
    traces: Mapping[int, Trace], *, rank: int | None = None, step: int | None = None, is_host: bool = False
) -> TraceAnalysis:
    """Analyse loaded traces.

    `step` is the step that the traces were cut to; None if they were not.
    """
    collectives = collectives_of(traces)
    waited_us = _waited(traces, collectives)
    shown = traces if rank is None else {rank: traces[rank]}
    return TraceAnalysis(
        ranks=tuple(_of_rank(one, trace, waited_us[one], collectives.calls, step) for one, trace in shown.items()),
        loaded=tuple(traces),
        collectives=collectives,
        experts=expert_load(traces, collectives),
        is_host=is_host,
    )


def _of_rank(rank: int, trace: Trace, waited_us: Floats, calls: CollectiveCalls, step: int | None) -> RankAnalysis:
    steps = tuple(one for one in steps_of(trace) if step in (None, one.number))
    within = None if step is None else (steps[0].start_us, steps[0].start_us + steps[0].duration_us)
    phases = find_phases(trace, place(trace), waited_us=waited_us if waited_us.any() else None)
    used = used_rows(trace, calls, rank, phases)
    return RankAnalysis(
        rank=rank,
        trace=trace,
        timelines=timelines(trace),
        steps=steps,
        phases=phases,
        used_rows=used,
        roofline=roofline(trace, phases.placement, used_rows=1.0 if used is None else used.share),
        launches=find_launches(trace, within),
        memory=find_memory(trace),
    )


def _only_step(trace: Trace, number: int) -> Trace:
    """The trace with only the GPU events in the window of one step."""
    steps = {one.number: one for one in steps_of(trace)}
    if number not in steps:
        some = ", ".join(map(str, steps)) or "none: no step is marked"
        raise TraceError(f"{trace.path} has no step {number}", allowed=some)
    start_us, end_us = steps[number].window_us
    linked = trace.gpu.take(trace.gpu.is_linked)  # others were launched before the recording, so in another step
    gpu = linked.take(linked.starting_in(start_us, end_us))
    if not len(gpu):
        raise TraceError(f"{trace.path}: step {number} started nothing on the device that was recorded")
    return replace(trace, gpu=gpu)


def _waited(traces: Mapping[int, Trace], collectives: CollectiveTimes) -> dict[int, Floats]:
    """For each rank and GPU event the time that it waited for other ranks; 0 where that is not known."""
    calls, rows_MR = collectives.calls, collectives.meetings.met
    waited = {rank: np.zeros(len(trace.gpu)) for rank, trace in traces.items()}
    for number, rank in enumerate(calls.ranks):
        met = rows_MR[:, number] != NONE  # collectives that the rank took part in
        waited[rank][calls.gpu_row[rows_MR[met, number]]] = np.nan_to_num(collectives.wait_us[met, number])
    return waited


# -------------------------------------------------------------------------------------------------------------- JSON


def analysis_json(answer: TraceAnalysis) -> dict[str, Any]:
    """The JSON contract of `penstock trace --json`."""
    of_ranks = {
        f"{one.rank}": {
            "timeline": {name: asdict(timeline) for name, timeline in one.timelines.items()},
            "steps": [asdict(step) for step in one.steps],
            "phases": [row.as_json() for row in one.phases.rows()],
            "other_share": one.phases.other_share,
            "replays": None if one.phases.replays is None else asdict(one.phases.replays),
            "roofline": one.roofline.as_json(),
            "modelled_share": one.roofline.modelled_share,
            "grouped_rows": None if one.used_rows is None else asdict(one.used_rows),
            "launches": asdict(one.launches),
            "memory": [memory_json(memory, one.steps) for memory in one.memory],
            "device": one.trace.device_name,
            "file": str(one.trace.path),
            "notes": list(one.trace.notes),
        }
        for one in answer.ranks
    }
    collectives, shown = answer.collectives, {one.rank for one in answer.ranks}
    together = {
        "collectives": [row for row in _collectives_json(collectives) if row["rank"] in shown],
        "unmatched": [_unmatched_json(collectives.calls, one) for one in collectives.unmatched],
        "stragglers": [asdict(one) for one in collectives.stragglers()],
        "clocks": _clocks_json(collectives),
        "bandwidth": [_finite_values(asdict(one)) for one in bandwidths(collectives)],
        "uneven": [_finite_values(asdict(one)) for one in exchange_imbalances(collectives)],
        "experts": answer.experts.as_json() | {"recorded": [asdict(one) for one in answer.recorded] or None},
    }
    if len(answer.loaded) == 1:
        (only,) = of_ranks.values()
        return only | together
    return {"ranks": of_ranks} | together


def _collectives_json(collectives: CollectiveTimes) -> list[dict[str, Any]]:
    """A row for each matched collective and rank, and for sends and receives, of which only the duration is known."""
    calls, meetings = collectives.calls, collectives.meetings
    rows = []
    for meeting, rank in np.argwhere(meetings.met != NONE).tolist():
        times = {"pure_us": collectives.pure_us[meeting], "wait_us": collectives.wait_us[meeting, rank]}
        call = _call_json(calls, int(meetings.met[meeting, rank]), int(meetings.seq[meeting]))
        rows.append(call | _finite_values(times))
    pairs = np.flatnonzero(calls.sync == SyncKind.PAIR).tolist()
    return rows + [_call_json(calls, row, int(calls.seq[row])) | {"pure_us": None, "wait_us": None} for row in pairs]


def _call_json(calls: CollectiveCalls, row: int, seq: int) -> dict[str, Any]:
    group, size = calls.group[row], np.fmax(calls.sent_bytes[row], calls.received_bytes[row])
    return {
        "rank": calls.ranks[calls.rank[row]],
        "group": None if group == NONE else calls.groups[group].name,
        "seq": None if seq == NONE else seq,
        "name": calls.name(row),
        "bytes": int(size) if math.isfinite(size) else None,
        "start_us": float(calls.start_us[row]),
        "duration_us": float(calls.duration_us[row]),
    }


def _unmatched_json(calls: CollectiveCalls, one: UnmatchedCollective) -> dict[str, Any]:
    kernels = [_call_json(calls, row, one.seq) for row in one.rows]
    return {
        "group": one.group or None,
        "seq": one.seq,
        "name": one.name,
        "why": one.why,
        "missing": list(one.missing),
        "kernels": [{name: kernel[name] for name in ("rank", "start_us", "duration_us")} for kernel in kernels],
    }


def _clocks_json(collectives: CollectiveTimes) -> list[dict[str, Any]]:
    clocks = collectives.meetings.clocks
    columns = {
        "rank": list(collectives.calls.ranks),
        "ahead_us": clocks.ahead_us.tolist(),
        "island": clocks.island.tolist(),
        "moments": clocks.shared.tolist(),
        "spread_us": clocks.spread_us.tolist(),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _finite_values(row: dict[str, Any]) -> dict[str, Any]:
    """The row with null for nan and infinity, which JSON does not have."""
    return {
        name: (float(value) if math.isfinite(value) else None) if isinstance(value, float) else value
        for name, value in row.items()
    }
