"""The whole analysis of some traces as one value, as the JSON of `penstock trace --json`, and as the sheets of `--csv`.

    traces  ->  each rank:    timelines, steps, phases, streams, annotations, roofline, launches, memory, counters
            ->  all together: collectives, stragglers, experts, critical path

Collectives are matched over the whole recording, which aligns clocks best; all else is of the events in marked steps.

Traces of one rank give a flat JSON object; of several, the fields of each rank are under `ranks`. Times are
microseconds, sizes bytes, shares of 1. An unknown value is null: it is never left out and never 0. Sums are over the
recorded steps; times `per_step` they are the mean of a step, which is what tables and the doctor show.

A sheet has a column for the rank, and means of a step: only `SINGLE` ones have single events or one step a row.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.errors import TraceError
from penstock.base.numbers import printable
from penstock.trace.calls import CollectiveCalls, SyncKind
from penstock.trace.collectives import CollectiveTimes, bandwidths, collectives_of, exchange_imbalances, timed
from penstock.trace.critical_path import CriticalPath, RankOfPath, critical_path
from penstock.trace.events import NONE, Floats, Trace
from penstock.trace.experts import ExpertLoad, RecordedLoad, UsedRows, expert_load, recorded_loads, used_rows
from penstock.trace.kernel_names import Category
from penstock.trace.launches import LaunchSummary, find_launches
from penstock.trace.load import load_ranks
from penstock.trace.matching import UnmatchedCollective
from penstock.trace.memory import AllocatorHistory, find_memory, memory_json
from penstock.trace.phases import Phases, find_phases, plain_row
from penstock.trace.recognize import PhaseNames, UnknownKernel, unknown_kernels
from penstock.trace.tables import (
    AnnotationRow,
    CounterRow,
    OperatorRow,
    StreamRow,
    annotation_rows,
    counter_rows,
    hierarchy,
    operator_rows,
    stream_rows,
)
from penstock.trace.timeline import (
    RecordedStep,
    TimeBreakdown,
    in_steps,
    is_earlier,
    lag_note,
    on_host_us,
    steps_of,
    timeline_of,
    timelines,
    together,
)
from penstock.trace.tree import place
from penstock.trace.work import Roofline, roofline


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Events of the device outside of all steps."""

    earlier: int  # launched before the recording began
    earlier_us: float
    others: int  # launched by no step, or by a step that was not asked for
    others_us: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RankAnalysis:
    """The analysis of one rank."""

    rank: int
    trace: Trace  # only the GPU events of the steps
    timelines: Mapping[str, TimeBreakdown]  # of the whole recording, or of the one step that was asked for
    spent: TimeBreakdown  # of the steps together, or of the recording if no step is marked
    left_out: LeftOut
    steps: tuple[RecordedStep, ...]
    phases: Phases
    unknown: tuple[UnknownKernel, ...]  # long kernels without a known phase
    streams: list[StreamRow]
    annotations: list[AnnotationRow]
    operators: list[OperatorRow]  # of a CPU; empty for a device
    counters: list[CounterRow]
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

    @property
    def is_host(self) -> bool:
        """CPU traces, in which operators take the place of kernels (penstock.trace.on_host)."""
        return self.ranks[0].trace.is_host

    @property
    def steps(self) -> int:
        """Number of recorded steps; 0 if none is marked."""
        return max((len(rank.steps) for rank in self.ranks), default=0)

    @property
    def per_step(self) -> float:
        """Factor from a sum over the recorded steps to the mean of a step; 1 if no step is marked."""
        return 1 / max(1, self.steps)

    @cached_property
    def path(self) -> CriticalPath:
        """The critical path of the last step that all ranks recorded, over the ranks whose clocks can be compared."""
        if self.is_host:
            return CriticalPath(step="", segments=())
        number, clocks = last_step(self.ranks), self.collectives.meetings.clocks
        indices = {rank: index for index, rank in enumerate(self.collectives.calls.ranks)}
        island = clocks.island[indices[self.ranks[0].rank]]
        ranks = [
            RankOfPath(
                rank=rank.rank,
                trace=rank.trace,
                phases=rank.phases,
                window_us=window_us(rank, number),
                ahead_us=float(clocks.ahead_us[indices[rank.rank]]),
            )
            for rank in self.ranks
            if clocks.island[indices[rank.rank]] == island
        ]
        name = next((step.name for step in self.ranks[0].steps if step.number == number), "")
        return critical_path(ranks, self.collectives, name)


def last_step(ranks: Sequence[RankAnalysis]) -> int | None:
    """The number of the last step in which all of these ranks have events, or None."""
    numbers = [{step.number for step in rank.steps if step.timeline.events} for rank in ranks]
    return max(set.intersection(*numbers), default=None) if numbers else None


def window_us(rank: RankAnalysis, number: int | None) -> tuple[float, float]:
    """Start and end of a step on the device; of all analysed events without steps."""
    for step in rank.steps:
        if step.number == number:
            return step.window_us
    gpu = rank.trace.gpu
    return float(gpu.start_us[0]), float(np.nextafter(gpu.end_us.max(), np.inf))  # behind an event without duration


def analyse_files(
    paths: Sequence[Path], *, step: int | None = None, rank: int | None = None, names: PhaseNames | None = None
) -> TraceAnalysis:
    """Read and analyse traces. Raises a TraceError if a file cannot be read, or there is no such rank or step.

    `step` limits the analysis to the device window of a step. `rank` limits the tables to one rank; the others are read
    for comparison. `names` are phases of kernels that the user names.
    """
    traces = load_ranks(paths, names=names)
    if rank is not None and rank not in traces:
        raise TraceError(f"no trace is of rank {rank}", allowed=", ".join(map(str, traces)))
    answer = analyse_traces(traces, rank=rank, step=step)
    seen = {step.number for analysis in answer.ranks for step in analysis.steps}
    recorded = [recorded_load for path in paths for recorded_load in recorded_loads(path) if recorded_load.step in seen]
    return replace(answer, recorded=tuple(recorded))


def analyse_traces(traces: Mapping[int, Trace], *, rank: int | None = None, step: int | None = None) -> TraceAnalysis:
    """Analyse loaded traces, all steps or one. Raises a TraceError if a trace has no such step."""
    steps = {number: _chosen(trace, step) for number, trace in traces.items()}
    is_kept = {number: in_steps(trace, steps[number]) for number, trace in traces.items()}
    cut = {
        number: trace if is_kept[number].all() else replace(trace, gpu=trace.gpu.take(is_kept[number]))
        for number, trace in traces.items()
    }
    collectives = collectives_of(traces)
    if not all(kept.all() for kept in is_kept.values()):
        collectives = timed(collectives.meetings.only(is_kept))
    waited_us = _waited(cut, collectives)
    return TraceAnalysis(
        ranks=tuple(
            _of_rank(trace, traces[trace], cut[trace], steps[trace], waited_us[trace], collectives.calls, step)
            for trace in (traces if rank is None else [rank])
        ),
        loaded=tuple(traces),
        collectives=collectives,
        experts=expert_load(cut, collectives),
    )


def _of_rank(
    rank: int,
    whole: Trace,
    trace: Trace,
    steps: tuple[RecordedStep, ...],
    waited_us: Floats,
    calls: CollectiveCalls,
    step: int | None,
) -> RankAnalysis:
    phases = find_phases(trace, place(trace), waited_us=waited_us if waited_us.any() else None)
    used = used_rows(trace, calls, rank, phases)
    spent = together([step.timeline for step in steps])
    if (note := lag_note(steps)) is not None:
        trace = replace(trace, notes=(*trace.notes, note))
    spent = spent if spent.total_us else timeline_of(trace.gpu)  # without a step on the device all events count
    return RankAnalysis(
        rank=rank,
        trace=trace,
        timelines=timelines(whole if step is None else trace),
        spent=spent,
        unknown=unknown_kernels(trace, phases.is_named(Category.OTHER.value), spent.total_us),
        streams=stream_rows(trace, phases),
        annotations=annotation_rows(trace, phases, steps),
        operators=operator_rows(trace, phases) if trace.is_host else [],
        counters=counter_rows(trace, steps),
        left_out=_left_out(whole, trace),
        steps=steps,
        phases=phases,
        used_rows=used,
        roofline=roofline(trace, phases.placement, used_rows=1.0 if used is None else used.share),
        launches=find_launches(trace, on_host_us(steps), whole.gpu),
        memory=find_memory(trace),
    )


def _chosen(trace: Trace, number: int | None) -> tuple[RecordedStep, ...]:
    steps = steps_of(trace)
    if number is None:
        return steps
    chosen = tuple(step for step in steps if step.number == number)
    if not chosen:
        some = ", ".join(f"{step.number}" for step in steps) or "none: no step is marked"
        raise TraceError(f"{trace.path} has no step {number}", allowed=some)
    if not chosen[0].timeline.events:
        raise TraceError(f"{trace.path}: step {number} started nothing on the device that was recorded")
    return chosen


def _left_out(whole: Trace, trace: Trace) -> LeftOut:
    earlier = is_earlier(whole.gpu)
    earlier_us = float(whole.gpu.duration_us[earlier].sum())
    return LeftOut(
        earlier=int(earlier.sum()),
        earlier_us=earlier_us,
        others=len(whole.gpu) - len(trace.gpu) - int(earlier.sum()),
        others_us=max(0.0, float(whole.gpu.duration_us.sum() - trace.gpu.duration_us.sum()) - earlier_us),
    )


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
        f"{rank.rank}": {
            "timeline": {name: asdict(timeline) for name, timeline in (*rank.timelines.items(), ("steps", rank.spent))},
            "left_out": asdict(rank.left_out),
            "steps": [asdict(step) for step in rank.steps],
            "phases": [plain_row(row) for row in rank.phases.rows()],
            "other_share": rank.phases.other_share,
            **{
                name: [asdict(row) for row in vars(rank)[name]]
                for name in ("unknown", "streams", "annotations", "operators", "counters")
            },
            "replays": None if rank.phases.replays is None else asdict(rank.phases.replays),
            "roofline": [plain_row(row) for row in rank.roofline.rows],
            "modelled_share": rank.roofline.modelled_share,
            "grouped_rows": None if rank.used_rows is None else asdict(rank.used_rows),
            "launches": asdict(rank.launches),
            "memory": [memory_json(memory, rank.steps) for memory in rank.memory],
            "device": "CPU" if rank.trace.is_host else rank.trace.device_name,
            "file": str(rank.trace.path),
            "notes": list(rank.trace.notes),
        }
        for rank in answer.ranks
    }
    collectives, shown = answer.collectives, {rank.rank for rank in answer.ranks}
    together = {
        "per_step": answer.per_step,
        "critical_path": answer.path.as_json(),
        "collectives": [row for row in _collectives_json(collectives) if row["rank"] in shown],
        "unmatched": [_unmatched_json(collectives.calls, collective) for collective in collectives.unmatched],
        "stragglers": [asdict(straggler) for straggler in collectives.stragglers()],
        "clocks": _clocks_json(collectives),
        "bandwidth": [_finite_values(asdict(bandwidth)) for bandwidth in bandwidths(collectives)],
        "uneven": [_finite_values(asdict(imbalance)) for imbalance in exchange_imbalances(collectives)],
        "experts": answer.experts.as_json() | {"recorded": [asdict(load) for load in answer.recorded] or None},
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


def _unmatched_json(calls: CollectiveCalls, collective: UnmatchedCollective) -> dict[str, Any]:
    kernels = [_call_json(calls, row, collective.seq) for row in collective.rows]
    return {
        "group": collective.group or None,
        "seq": collective.seq,
        "name": collective.name,
        "why": collective.why,
        "missing": list(collective.missing),
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


JsonRow = dict[str, Any]

SUMS = frozenset({"count", "events", "times_last"})
"""Columns that are counts over the recorded steps, like all that end in `_us`."""

SINGLE = frozenset({"steps", "counters", "gaps", "memory", "collectives", "bandwidth", "critical_path"})
"""Sheets whose rows are single events or one step; rows of the others are sums over steps."""


def _tables_of_rank(tree: JsonRow) -> dict[str, Iterable[JsonRow]]:
    return {
        "timeline": [{"of": "steps"} | tree["timeline"]["steps"]],
        "steps": [{"name": step["name"], "number": step["number"]} | step["timeline"] for step in tree["steps"]],
        **{name: tree[name] for name in ("phases", "unknown", "streams", "annotations", "counters", "roofline")},
        "own_time": tree["operators"],
        "waits": tree["launches"]["waits"],
        "gaps": tree["launches"]["gaps"]["longest"],
        "memory": [row for memory in tree["memory"] for row in memory["phases"]],
    }


def sheets(answer: TraceAnalysis) -> dict[str, list[JsonRow]]:
    """Rows by sheet; sheets without rows are left out."""
    tree, tables = analysis_json(answer), {"operators": _operator_table(answer)}
    for rank, of_rank in (tree.get("ranks") or {f"{answer.ranks[0].rank}": tree}).items():
        for name, rows in _tables_of_rank(of_rank).items():
            tables.setdefault(name, []).extend({"rank": int(rank)} | row for row in rows)
    tables |= {name: tree[name] for name in ("collectives", "bandwidth", "stragglers")}
    tables["critical_path"] = tree["critical_path"]["rows"]
    for name in tables.keys() - SINGLE - {"operators"}:
        tables[name] = [_scaled(row, answer.per_step) for row in tables[name]]
    return {name: rows for name, rows in tables.items() if rows}


def _operator_table(answer: TraceAnalysis) -> list[JsonRow]:
    """Kernels of each operator and shape, by layer, phase and pass, added up over steps."""
    sums: dict[tuple[Any, ...], list[float]] = {}
    for rank in answer.ranks:
        for leaf in hierarchy(rank.trace, rank.phases):
            key = (rank.rank, leaf.layer, leaf.phase, leaf.pass_, leaf.operator, leaf.shapes, leaf.kernel)
            row = sums.setdefault(key, [0.0, 0.0, 0.0])
            for index, value in enumerate((leaf.events, leaf.kernel_us, leaf.exposed_us)):
                row[index] += value * answer.per_step
    names = ("rank", "layer", "phase", "pass", "operator", "shapes", "kernel", "events", "kernel_us", "exposed_us")
    rows = [dict(zip(names, (*key, *values), strict=True)) for key, values in sums.items()]
    return sorted(rows, key=lambda row: (row["rank"], -row["kernel_us"]))


def _scaled(row: JsonRow, per: float) -> JsonRow:
    is_sum = {name: (name.endswith("_us") and name != "max_us") or name in SUMS for name in row}
    return {name: value * per if is_sum[name] and value is not None else value for name, value in row.items()}


def write_sheets(answer: TraceAnalysis, folder: Path) -> None:
    """Write a CSV file for each sheet into a new or empty folder. Raises a TraceError if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if next(folder.iterdir(), None) is not None:
            raise TraceError(f"--csv: {folder} is not empty", fix="name a new folder")
        for name, rows in sheets(answer).items():
            columns = list(dict.fromkeys(column for row in rows for column in row))
            with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    except OSError as error:
        raise TraceError(f"--csv: cannot write {folder}: {error.strerror}", fix="name another folder") from error


def _cell(value: Any) -> str | float | int:
    """A value as a spreadsheet shows it; text that would be a formula gets a quote."""
    if value is None:
        return ""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, bool | int):
        return value
    if isinstance(value, list | tuple):
        text = ", ".join("x".join(map(str, item)) if isinstance(item, list | tuple) else f"{item}" for item in value)
    else:
        text = printable(str(value))
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
