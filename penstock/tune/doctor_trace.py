"""Evidence from traces: costs of each rank, and why a rank was late.

Between two collectives every rank works for itself, so why a rank came late to the second is told by what it did since
the first ended, against the median of the others:

    idle longer, for at least half of the delay    its host was late
    computed longer                                its experts, if they took most of what it computed longer than
                                                   by being slow at everything, or else its computing

A rank that lets others wait again and again has one cause here, the one that cost most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.base.errors import ConfigError
from penstock.config.merge import settle
from penstock.config.run import Run
from penstock.config.schema import fields_of
from penstock.config.validation import build
from penstock.trace.answer import Answer, RankAnswer
from penstock.trace.calls import Calls
from penstock.trace.collectives import Collectives, Straggler
from penstock.trace.events import NONE, Flags, Floats, GpuKind, HostKind, Integers, Trace
from penstock.trace.intervals import union
from penstock.trace.kinds import OWN, library_of
from penstock.trace.launches import WAITS
from penstock.trace.timeline import busy_of
from penstock.tune.doctor_evidence import Cause, Evidence, Facts, Late, Launches, RankCosts

MATCHED = 0.5
"""Share of the collectives that must be matched before a rank is called late: below, too little of it is known."""

TELLS = 0.01
"""Share of the step that the others wait for a rank, from which it is named: someone is always last, by chance."""

IDLE_DECIDES = 0.5
"""Share of a delay that idle time must explain for the host to be the cause."""

MOMENT_US = 5.0
"""A gap that begins so long before a wait of the host still began with it: clocks of host and device differ."""

EXPERTS = frozenset({"experts", "experts input gradient", "experts weight gradient"})
"""Phases that are experts."""

AROUND_EXPERTS = EXPERTS | {"activation", "permute"}
"""Phases whose time grows with the rows of a rank's experts, where there are experts."""

_KINDS: tuple[tuple[str, str], ...] = (
    ("all_to_all", "all-to-all"),
    ("alltoall", "all-to-all"),
    ("reduce_scatter", "reduce-scatter"),
    ("reducescatter", "reduce-scatter"),
    ("all_gather", "all-gather"),
    ("allgather", "all-gather"),
    ("all_reduce", "all-reduce"),
    ("allreduce", "all-reduce"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send-recv"),
    ("send", "send-recv"),
    ("recv", "send-recv"),
)
"""Parts of names of collectives and kernels; the first that is found counts."""


def evidence_of(answer: Answer, facts: Facts, missing: Sequence[str] = ()) -> Evidence:
    """Evidence from what was said of traces.

    Args:
        answer: of all ranks that were read.
        facts: known of the run besides.
        missing: what is known not to be there.
    """
    collectives = answer.collectives
    totals = collectives.totals_us() if len(answer.loaded) > 1 and len(collectives.meetings) else {}
    ranks = tuple(_costs(one, collectives.calls, totals) for one in answer.ranks)
    late = _late(answer)
    return Evidence(
        source="trace",
        ranks=ranks,
        steps=max(len(one.steps) for one in answer.ranks),
        late=late,
        other_wait_us=sum(one.caused_wait_us for one in collectives.stragglers())
        - sum(one.caused_wait_us for one in late),
        unmatched=len(collectives.unmatched),
        launches=_launches(answer.ranks),
        max_over_mean=answer.experts.max_over_mean,
        trains=any(row.pass_ == "backward" for one in answer.ranks for row in one.phases.rows(by_layer=False)),
        facts=_facts(answer, facts),
        missing=(*missing, *_missing(answer)),
    )


def _facts(answer: Answer, facts: Facts) -> Facts:
    """With what the traces say of device, ranks and memory, where the run does not."""
    trace = answer.ranks[0].trace
    device = trace.device_name
    sizes = [one.get("totalGlobalMem") for one in trace.devices if one.get("name") == device]
    peaks = [int(memory.allocated.max()) for one in answer.ranks for memory in one.memory]
    return replace(
        facts,
        run=facts.run or _run(trace),
        device=device,
        world=facts.world or _world(answer) or None,
        peak_bytes=facts.peak_bytes or max(peaks, default=None),
        capacity_bytes=next((size for size in sizes if isinstance(size, int)), facts.capacity_bytes),
    )


def _run(trace: Trace) -> Run | None:
    """The configuration that a recording of ours carries; None in other traces, and where it is another version's."""
    told = trace.header.get(OWN)
    config = told.get("config") if isinstance(told, Mapping) else None
    if not isinstance(config, Mapping):
        return None
    try:
        return build(Run, settle(fields_of(Run), config))
    except ConfigError:
        return None


def _world(answer: Answer) -> int:
    """Ranks of the run, as far as traces say; 0 if they do not."""
    groups = [group.size for group in answer.collectives.calls.groups]
    told = [one.trace.world for one in answer.ranks if one.trace.world is not None]
    return max([*groups, *told], default=0)


def _costs(one: RankAnswer, calls: Calls, totals: Mapping[int, tuple[float, float]]) -> RankCosts:
    timeline, phases = one.timelines["all"], _exposed_by_phase(one)
    pure_us, wait_us = totals.get(one.rank, (None, None))
    return RankCosts(
        rank=one.rank,
        total_us=timeline.total_us,
        compute_us=timeline.compute_us,
        exposed_communication_us=timeline.exposed_communication_us,
        exposed_copies_us=timeline.exposed_memcpy_us,
        idle_us=timeline.idle_us,
        wait_us=wait_us,
        pure_us=pure_us,
        sync_idle_us=_sync_idle(one.trace),
        launched_idle_us=one.launches.gaps.devices_us,
        recompute_us=sum(row.exposed_us for row in one.phases.rows(by_layer=False) if row.pass_ == "recompute"),
        expert_us=sum(time for name, time in phases.items() if name in AROUND_EXPERTS)
        if EXPERTS & set(phases)
        else 0.0,
        communication_us=_by_kind(one, calls),
    )


def _sync_idle(trace: Trace) -> float:
    """Idle time that began while the host waited for the device: nothing could be launched before it did."""
    is_wait = np.array([WAITS.match(name) is not None for name in trace.names], dtype=bool)[trace.host.name_id]
    calls = trace.host.take(is_wait & (trace.host.kind == HostKind.RUNTIME))
    waits, gaps = union(calls.start_us, calls.end_us), union(trace.gpu.start_us, trace.gpu.end_us).gaps()
    began = waits.covered_us(gaps.start_us, np.minimum(gaps.start_us + MOMENT_US, gaps.end_us)) > 0
    return float((gaps.end_us - gaps.start_us)[began].sum())


def _launches(ranks: Sequence[RankAnswer]) -> Launches:
    """Of all ranks together."""
    return Launches(
        kernels=sum(one.launches.kernel_count for one in ranks),
        small_kernels=sum(one.launches.short_count for one in ranks),
        from_graphs=sum(int(_is_replayed(one).sum()) for one in ranks),
        synchronizations=sum(wait.count for one in ranks for wait in one.launches.waits),
    )


def _is_replayed(one: RankAnswer) -> Flags:
    """Kernels that a graph launched."""
    return one.phases.placement.is_replayed & one.trace.gpu.is_kernel


def _exposed_by_phase(one: RankAnswer) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in one.phases.rows(by_layer=False):
        found[row.name] = found.get(row.name, 0.0) + row.exposed_us
    return found


def _by_kind(one: RankAnswer, calls: Calls) -> dict[str, float]:
    """Exposed communication by what it is."""
    exposed_us = np.bincount(one.phases.event, one.phases.exposed_us, len(one.trace.gpu))
    found: dict[str, float] = {}
    for row in np.flatnonzero(calls.rank == calls.ranks.index(one.rank)):
        event = int(calls.gpu_row[row])
        kind = kind_of(calls.name(int(row)), one.trace.gpu.name(event))
        found[kind] = found.get(kind, 0.0) + float(exposed_us[event])
    return found


def kind_of(collective: str, kernel: str) -> str:
    """What a collective is, by its name, or by that of its kernel; for kernels of our own the dispatcher."""
    library = library_of(kernel)
    if library == OWN:
        return "symmetric"
    if library == "deep_ep":
        return "deep-ep"
    texts = (collective.lower(), kernel.lower())
    return next((kind for text in texts for part, kind in _KINDS if part in text), "without a name")


def _missing(answer: Answer) -> list[str]:
    """What traces could not tell."""
    told = []
    world, loaded = _world(answer), len(answer.loaded)
    has_communication = len(answer.collectives.calls) > 0
    if loaded == 1 and has_communication:
        of = f" of {world}" if world > 1 else ""
        told.append(f"one rank{of}: waiting for others and slow links look the same; give the traces of all ranks")
    elif loaded < world:
        told.append(f"{loaded} of {world} ranks: others may have come later still, so waiting is a lower bound")
    if unmatched := answer.collectives.unmatched:
        told.append(
            f"{len(unmatched)} collectives match none of another rank ({unmatched[0].why}): no waiting is told of them"
        )
    if not any(one.steps for one in answer.ranks):
        told.append("no step is marked: figures are of all that was recorded")
    unlinked = sum(int((~one.trace.gpu.is_linked).sum()) for one in answer.ranks)
    if unlinked:
        told.append(f"{unlinked} events of the device were launched before the recording began; they are counted")
    return told


# -------------------------------------------------------------------------------------------------------------- late


@dataclass(frozen=True, kw_only=True, eq=False)
class _Between:
    """What each rank did before each meeting, since the one before had ended; microseconds.

    Attributes:
        idle_MR: the device had nothing to do.
        busy_MR: it worked.
    """

    idle_MR: Floats
    busy_MR: Floats


def _late(answer: Answer) -> tuple[Late, ...]:
    """Ranks that others waited for, the most expensive first."""
    collectives = answer.collectives
    if len(collectives.meetings) < MATCHED * (len(collectives.meetings) + len(collectives.unmatched)):
        return ()
    others = max(1, len(answer.loaded) - 1)
    step_us = TELLS * float(np.mean([one.timelines["all"].total_us for one in answer.ranks]))
    named = [one for one in collectives.stragglers() if one.caused_wait_us / others >= step_us]
    between = _between(answer)
    return tuple(_with_cause(one, answer, between) for one in named)


def _with_cause(one: Straggler, answer: Answer, between: _Between) -> Late:
    number = answer.collectives.calls.ranks.index(one.rank)
    is_host, idle_us = _is_host(answer.collectives, between, number)
    cause: Cause
    if is_host:
        cause, detail = "host", f"its device was idle {idle_us / 1e3:.2f} ms longer than others' before it came"
    else:
        cause, detail = _slowest_phase(answer, one.rank)
    return Late(rank=one.rank, times_last=one.times_last, caused_wait_us=one.caused_wait_us, cause=cause, detail=detail)


def _is_host(collectives: Collectives, between: _Between, number: int) -> tuple[bool, float]:
    """Whether idle time explains most of what a rank cost, and how much of it there was."""
    mine = collectives.last == number
    cost_M = np.nansum(collectives.wait_us[mine], axis=1)
    others = np.arange(between.idle_MR.shape[1]) != number
    idle = between.idle_MR[mine, number] - np.nanmedian(between.idle_MR[mine][:, others], axis=1)
    busy = between.busy_MR[mine, number] - np.nanmedian(between.busy_MR[mine][:, others], axis=1)
    delay = np.maximum(idle, 0.0) + np.maximum(busy, 0.0)
    by_host = cost_M[np.maximum(idle, 0.0) > IDLE_DECIDES * delay].sum()
    return bool(by_host > IDLE_DECIDES * cost_M.sum()), float(np.maximum(idle, 0.0).sum())


def _between(answer: Answer) -> _Between:
    """Idle and busy time of each rank before each meeting."""
    calls, rows_MR = answer.collectives.calls, answer.collectives.meetings.met
    idle_MR, busy_MR = np.full(rows_MR.shape, np.nan), np.full(rows_MR.shape, np.nan)
    for one in answer.ranks:
        number = calls.ranks.index(one.rank)
        met = np.flatnonzero(rows_MR[:, number] != NONE)
        rows = rows_MR[met, number]
        order = np.argsort(calls.start_us[rows], kind="stable")
        met, rows = met[order], rows[order]
        begins = _ends_before(calls, rows, float(one.trace.gpu.start_us[0]))
        busy = busy_of(one.trace.gpu)
        working = (busy.compute | busy.communication | busy.copies).covered_us(begins, calls.start_us[rows])
        busy_MR[met, number] = working
        idle_MR[met, number] = np.maximum(calls.start_us[rows] - begins, 0.0) - working
    return _Between(idle_MR=idle_MR, busy_MR=busy_MR)


def _ends_before(calls: Calls, rows: Integers, first_us: float) -> Floats:
    """For meetings of one rank in order of their start, when the one before had ended; at most its own start."""
    ends = np.append(first_us, np.maximum.accumulate(calls.end_us[rows]))[: len(rows)]
    return np.minimum(ends, calls.start_us[rows])


def _slowest_phase(answer: Answer, rank: int) -> tuple[Cause, str]:
    """What a rank computed longer than the median of the others, over all that was traced.

    A rank that is slow at everything is slow in its experts too, so these are the cause only if they take longer than
    by the factor that everything else does.
    """
    times = {one.rank: _computed_by_phase(one) for one in answer.ranks}
    if rank not in times or len(times) == 1:
        return "unknown", "others were not read"
    mine = times[rank]
    others = {name: float(np.median([times[one].get(name, 0.0) for one in times if one != rank])) for name in mine}
    longer = {name: mine[name] - others[name] for name in mine}
    is_expert = {name: name in AROUND_EXPERTS for name in mine}
    expert_us, expert_usual_us = (sum(us for name, us in one.items() if is_expert[name]) for one in (mine, others))
    rest_us, rest_usual_us = (sum(us for name, us in one.items() if not is_expert[name]) for one in (mine, others))
    slower = rest_us / rest_usual_us if rest_usual_us else 1.0
    cause: Cause = "compute"
    if expert_us - expert_usual_us * max(slower, 1.0) > max(rest_us - rest_usual_us, 0.0):
        cause = "experts"
    asked = [name for name in mine if is_expert[name] == (cause == "experts")]
    name = max(asked, key=lambda one: longer[one], default="")
    if not name or longer[name] <= 0:
        return "unknown", "it computes no longer than others"
    ratio = f"{mine[name] / others[name] - 1:.0%} longer" if others[name] else "and no other rank does"
    return cause, f"{name} takes {longer[name] / 1e3:.2f} ms more than on the median rank, {ratio}"


def _computed_by_phase(one: RankAnswer) -> dict[str, float]:
    """Without communication, which is as long as it waits."""
    computes = one.trace.gpu.kind[one.phases.event] != GpuKind.COMMUNICATION
    sums = np.bincount(one.phases.name_id[computes], one.phases.exposed_us[computes], len(one.phases.names))
    return dict(zip(one.phases.names, sums.tolist(), strict=True))
