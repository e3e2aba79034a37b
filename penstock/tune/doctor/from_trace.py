"""Evidence from traces: costs of each rank, late ranks, and the reason why each was late.

Between two collectives every rank works alone, so the work between them shows why a rank came late to the second, by
comparison with the median of the other ranks:

    idle longer, for at least half of the delay    its host was late
    computed longer                                its experts, if they explain most of the additional computing beyond
                                                   a general slowness of the rank; otherwise its computing

A kernel that writes to other ranks without waiting counts as work, not as a collective. Only the work before
collectives that the rank joined last is compared: over a whole step, a rank with full experts in one layer and empty
experts in the next computes as long as the others, although they wait for it. A rank that was late by its host in some
collectives and by its work in others appears twice, each time with its own cost.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.base.errors import ConfigError
from penstock.base.spans import Span
from penstock.config.run import Run
from penstock.config.schema import fields_of
from penstock.config.tree import build, settle
from penstock.trace.analysis import RankAnalysis, TraceAnalysis
from penstock.trace.calls import CollectiveCalls, SyncKind
from penstock.trace.collectives import any_row
from penstock.trace.events import NONE, Flags, Floats, GpuKind, HostKind, Integers, Trace
from penstock.trace.intervals import Intervals, union
from penstock.trace.kernel_names import EXPERT_PARALLEL, OWN, Category, generic_category, library_of, specific_category
from penstock.trace.launches import HostCalls, call_during, idle_behind_waits, longest_calls
from penstock.trace.on_host import CALLS, GLOO
from penstock.trace.phases import EXPERTS as EXPERT_SPANS
from penstock.trace.phases import PASSES, WAITING
from penstock.trace.timeline import busy_of, on_host_us
from penstock.tune.doctor.evidence import ALSO, Evidence, KernelLaunches, LateRank, RankCosts, RunFacts, SingleStall

MATCHED = 0.5  # share of the collectives that must be matched across ranks before a rank is called late

TELLS = 0.01
"""Share of the step that others must wait for a rank before it is reported: some rank is always last by chance."""

IDLE_DECIDES = 0.5  # share of a delay that idle time must explain for the host to be the cause
HALF = 0.5
NOTES = 4  # remarks of the readers of the traces, at most
SINGLE = 2.0  # times all idle time of the median step, from which an idle time is no property of every step
LEAST_STEPS = 3  # steps from which a median tells a single stall from what every step has
MATTERS = 1e-3  # share of the steps from which events outside of them are missing
TELLS_TOO = 0.1  # share by which launches, or all work besides experts, must take longer to be reported with the cause
EXPERTS = frozenset({"experts", "experts input gradient", "experts weight gradient"})

AROUND_EXPERTS = EXPERTS | {"activation", "permute"}
"""Phases whose time grows with the rows of a rank's experts, where there are experts."""

DATA = re.compile(rf"{Span.DATA}|enumerate\(DataLoader\).*")
"""Spans in which the host fetches rows: Penstock's, and PyTorch's."""

_KINDS = {
    "all-to-all": re.compile("all_?to_?all"),
    "reduce-scatter": re.compile("reduce_?scatter"),
    "all-gather": re.compile("all_?gather"),
    "all-reduce": re.compile("all_?reduce"),
    "broadcast": re.compile("broadcast"),
    "send-recv": re.compile("send|recv"),
}
"""Kinds of communication by parts of the names of collectives and kernels; the first match counts."""


def evidence_of(answer: TraceAnalysis, facts: RunFacts, missing: Sequence[str] = ()) -> Evidence:
    """Evidence from the traces of all ranks that were read, and what other sources know of the run or miss."""
    collectives = answer.collectives
    totals = collectives.totals_us() if len(answer.loaded) > 1 and len(collectives.meetings) else {}
    per_step = answer.per_step
    stood = {rank.rank: _stood_still(rank) for rank in answer.ranks}
    calls = {rank.rank: _calls(rank, stood[rank.rank]) for rank in answer.ranks}
    alone_us = {rank: 0.0 if call is None else call.alone_us for rank, call in calls.items()}
    calling = max(alone_us, key=lambda rank: alone_us[rank])  # the rank with the most expensive calls
    stalls = [stall for rank in answer.ranks for stall in rank.launches.stalls]
    ranks = tuple(
        replace(_costs(rank, collectives.calls, totals, stood[rank.rank]), host_call_us=alone_us[rank.rank]).times(
            per_step
        )
        for rank in answer.ranks
    )
    late = tuple(
        replace(late_rank, caused_wait_us=late_rank.caused_wait_us * per_step) for late_rank in late_ranks(answer)
    )
    caused_us = sum(straggler.caused_wait_us for straggler in collectives.stragglers()) * per_step
    return Evidence(
        source="trace",
        ranks=ranks,
        steps=answer.steps,
        late=late,
        other_wait_us=caused_us - sum(rank.caused_wait_us for rank in late),
        unmatched=len(collectives.unmatched),
        launches=None if answer.is_host else _launches(answer.ranks),
        host_call=calls[calling],
        host_call_rank=calling,
        single_stalls=tuple(
            sorted(
                (stall for rank in answer.ranks for stall in _named_stalls(rank, stood[rank.rank])),
                key=lambda stall: -stall.duration_us,
            )
        ),
        stall=max(stalls, key=lambda stall: stall.duration_us, default=None),
        max_over_mean=answer.experts.max_over_mean,
        trains=any(row.pass_ == "backward" for rank in answer.ranks for row in rank.phases.rows(by_layer=False)),
        facts=_facts(answer, facts),
        missing=(*missing, *_missing(answer)),
        notes=tuple(dict.fromkeys(note for rank in answer.ranks for note in rank.trace.notes))[:NOTES],
        operators=tuple(row for row in answer.ranks[0].operators if not row.name.startswith((GLOO, CALLS))),
        is_cpu=answer.is_host,
    )


def _facts(answer: TraceAnalysis, facts: RunFacts) -> RunFacts:
    trace = answer.ranks[0].trace
    device = facts.device if trace.is_host else trace.device_name
    sizes = [properties.get("totalGlobalMem") for properties in trace.devices if properties.get("name") == device]
    peaks = [int(memory.allocated.max()) for rank in answer.ranks for memory in rank.memory]
    return replace(
        facts,
        run=facts.run or _run(trace),
        device=device,
        world=facts.world or _world(answer) or None,
        peak_bytes=facts.peak_bytes or max(peaks, default=None),
        capacity_bytes=next((size for size in sizes if isinstance(size, int)), facts.capacity_bytes),
    )


def _run(trace: Trace) -> Run | None:
    """The configuration in a recording of ours; None in others, and if this version does not accept it."""
    config = trace.setting()
    if not isinstance(config, Mapping):
        return None
    try:
        return build(Run, settle(fields_of(Run), config))
    except ConfigError:
        return None


def _world(answer: TraceAnalysis) -> int:
    """Number of ranks of the run by the traces; 0 if they do not tell."""
    groups = [group.size for group in answer.collectives.calls.groups]
    worlds = [rank.trace.world for rank in answer.ranks if rank.trace.world is not None]
    return max([*groups, *worlds], default=0)


def _stood_still(rank: RankAnalysis) -> Intervals:
    """Idle times that are longer by far than all idle time of the median step: they are no property of every step."""
    gpu = rank.trace.gpu
    if len(rank.steps) < LEAST_STEPS or rank.trace.is_host:
        return union(gpu.start_us[:0], gpu.end_us[:0])
    gaps = union(*np.array([step.window_us for step in rank.steps]).T) - union(gpu.start_us, gpu.end_us)
    idle_us, total_us = (
        np.median([vars(step.timeline)[name] for step in rank.steps]) for name in ("idle_us", "total_us")
    )
    is_single = gaps.end_us - gaps.start_us > max(SINGLE * idle_us, ALSO * total_us)
    return Intervals(gaps.start_us[is_single], gaps.end_us[is_single])


def _named_stalls(rank: RankAnalysis, stood: Intervals) -> Iterator[SingleStall]:
    for start_us, end_us in zip(stood.start_us.tolist(), stood.end_us.tolist(), strict=True):
        queued = [stall.queued for stall in rank.launches.stalls if start_us <= stall.start_us < end_us]
        yield SingleStall(
            rank=rank.rank,
            step=next(step.number for step in rank.steps if step.window_us[1] > start_us),
            duration_us=end_us - start_us,
            queued=max(queued, default=0),
            call=call_during(rank.trace, start_us, end_us),
        )


def _costs(
    rank: RankAnalysis, calls: CollectiveCalls, totals: Mapping[int, tuple[float, float]], stood: Intervals
) -> RankCosts:
    """The costs of a rank, without the times `stood` in which its device stood still once."""
    timeline, computing_us = rank.spent, _computing(rank)
    waiting_us, computed_us = _data_wait_us(rank, stood), computing_us.pop(Span.DATA, 0.0)
    idle_us = timeline.idle_us - stood.length_us
    stalls = rank.launches.stalls
    stalled = union(
        np.array([stall.start_us for stall in stalls]),
        np.array([stall.start_us + stall.duration_us for stall in stalls]),
    )
    pure_us, wait_us = totals.get(rank.rank, (None, None))
    is_expert_span = np.array([name in EXPERT_SPANS for name in rank.trace.names], dtype=bool)
    host = rank.trace.host
    pointwise_us, pointwise_kernels, fusable_us = _pointwise(rank)
    has_expert_spans = bool((is_expert_span[host.name_id] & (host.kind == HostKind.SPAN)).any())
    return RankCosts(
        rank=rank.rank,
        total_us=timeline.total_us - stood.length_us,
        compute_us=timeline.compute_us - computed_us,
        exposed_communication_us=timeline.exposed_communication_us,
        exposed_copies_us=timeline.exposed_memcpy_us,
        idle_us=idle_us - waiting_us,
        data_us=waiting_us + computed_us,
        wait_us=wait_us,
        pure_us=pure_us,
        sync_idle_us=min(idle_us, idle_behind_waits(rank.trace)),
        counts_idle_us=idle_behind_waits(rank.trace, EXPERT_SPANS) if has_expert_spans else None,
        launched_idle_us=min(idle_us, rank.launches.gaps.devices_us),
        stalled_us=(stalled - stood).length_us,
        pointwise_us=pointwise_us,
        pointwise_kernels=pointwise_kernels,
        fusable_us=fusable_us,
        recompute_us=sum(row.exposed_us for row in rank.phases.rows(by_layer=False) if row.pass_ == "recompute"),
        computing_us=computing_us,
        communication_us=_by_kind(rank, calls),
    )


def _data_wait_us(rank: RankAnalysis, stood: Intervals) -> float:
    """Idle time in the steps while the host fetches rows, without the times in which the device stood still once."""
    host, gpu = rank.trace.host, rank.trace.gpu
    rows = (host.kind == HostKind.SPAN) & host.named(DATA.fullmatch)
    idle = union(host.start_us[rows], host.end_us[rows]) - union(gpu.start_us, gpu.end_us) - stood
    return float((idle & _recorded(rank)).length_us)


def _calls(rank: RankAnalysis, stood: Intervals) -> HostCalls | None:
    busy = busy_of(rank.trace.gpu)
    idle = _recorded(rank) - busy.compute - busy.communication - stood
    return longest_calls(rank.trace, idle, on_host_us(rank.steps))


def _recorded(rank: RankAnalysis) -> Intervals:
    """Time of the steps on the device, or from its first event to its last."""
    gpu = rank.trace.gpu
    windows = [step.window_us for step in rank.steps] or [(gpu.start_us[0], gpu.end_us.max())]
    return union(*np.array(windows).T)


def _pointwise(rank: RankAnalysis) -> tuple[float, float, float]:
    """Elementwise kernels: exposed time, number, and the time beyond the longest kernel of each run on a stream."""
    gpu = rank.trace.gpu
    exposed_us = np.bincount(rank.phases.event, rank.phases.exposed_us, len(gpu))
    is_pointwise = (gpu.kind == GpuKind.COMPUTE) & gpu.named(_is_pointwise)
    order = np.argsort(gpu.stream, kind="stable")  # by stream, then by start
    flags, streams = is_pointwise[order], gpu.stream[order]
    begins = np.append(True, (flags[1:] != flags[:-1]) | (streams[1:] != streams[:-1]))[: len(flags)]
    run = np.cumsum(begins) - 1
    longest_us = np.zeros(int(run.max(initial=-1)) + 1)
    np.maximum.at(longest_us, run[flags], exposed_us[order][flags])
    total_us = float(exposed_us[is_pointwise].sum())
    return total_us, float(is_pointwise.sum()), total_us - float(longest_us.sum())


def _is_pointwise(kernel: str) -> bool:
    category = specific_category(kernel) or generic_category(kernel)
    return category in (Category.ELEMENTWISE, Category.ACTIVATION, Category.COPY)


def _launches(ranks: Sequence[RankAnalysis]) -> KernelLaunches:
    return KernelLaunches(
        kernels=sum(rank.launches.kernel_count for rank in ranks),
        small_kernels=sum(rank.launches.short_count for rank in ranks),
        from_graphs=sum(int((rank.phases.placement.is_replayed & rank.trace.gpu.is_kernel).sum()) for rank in ranks),
        synchronizations=sum(_waited(rank) for rank in ranks),
    )


def _waited(rank: RankAnalysis) -> int:
    """Number of waits of the host; a copy and the call that waits for it are one wait, the recorder's own are none."""
    times: dict[tuple[str, ...], int] = {}
    for wait in rank.launches.waits:
        if wait.where or OWN not in rank.trace.header:
            times[wait.where] = max(times.get(wait.where, 0), wait.count)
    return sum(times.values())


def _computing(rank: RankAnalysis) -> dict[str, float]:
    """Exposed computing by phase, without recomputation."""
    phases = rank.phases
    computes = np.isin(rank.trace.gpu.kind[phases.event], [GpuKind.COMPUTE, GpuKind.SET])
    computes &= phases.pass_id != PASSES.index("recompute")
    times = np.bincount(phases.name_id[computes], phases.exposed_us[computes], len(phases.names))
    sums: dict[str, float] = {}
    for name, us in zip(phases.names, times.tolist(), strict=True):
        key = "experts" if name in AROUND_EXPERTS and EXPERTS & set(phases.names) else name
        sums[key] = sums.get(key, 0.0) + us
    return sums


def _by_kind(rank: RankAnalysis, calls: CollectiveCalls) -> dict[str, float]:
    gpu = rank.trace.gpu
    exposed_us = np.bincount(rank.phases.event, rank.phases.exposed_us, len(gpu))
    mine = np.flatnonzero(calls.rank == calls.ranks.index(rank.rank))
    collective = {int(calls.gpu_row[row]): calls.name(int(row)) for row in mine}
    sums: dict[str, float] = {}
    for event in np.flatnonzero(gpu.kind == GpuKind.COMMUNICATION).tolist():
        phase = rank.phases.names[rank.phases.name_id[event]]  # the first entries of phases are the events
        kind = kind_of(collective.get(event, ""), gpu.name(event), phase)
        sums[kind] = sums.get(kind, 0.0) + float(exposed_us[event])
    return sums


def kind_of(collective: str, kernel: str, phase: str = "") -> str:
    """Kind of a collective by its name or its kernel's; for kernels that carry tokens their library.

    `phase` tells kernels that are known by what is around them only, and gathers of tokens from those of weights.
    """
    named = phase.removesuffix(WAITING)
    carries_tokens = named in (Span.DISPATCH, Span.COMBINE)
    library = library_of(kernel)
    if library == OWN:
        return "symmetric"
    if library in EXPERT_PARALLEL:
        return library.replace("_", "-")
    if library is None and carries_tokens:
        return "expert-parallel"
    texts = (collective.lower(), kernel.lower())
    kind = next((kind for text in texts for kind, part in _KINDS.items() if part.search(text)), "without a name")
    if kind == "send-recv" and named in _KINDS:
        return named  # the annotation around it knows more than the kernel's name
    return "gathered tokens" if carries_tokens and kind in ("all-gather", "reduce-scatter") else kind


def _missing(answer: TraceAnalysis) -> list[str]:
    notes = []
    world, loaded = _world(answer), len(answer.loaded)
    has_communication = len(answer.collectives.calls) > 0
    if loaded == 1 and has_communication:
        of = f" of {world}" if world > 1 else ""
        notes.append(f"one rank{of}: waiting for others and slow links look the same; give the traces of all ranks")
    elif loaded < world:
        notes.append(f"{loaded} of {world} ranks: others may have come later still, so waiting is a lower bound")
    if unmatched := answer.collectives.unmatched:
        notes.append(
            f"collectives that match none of another rank: {len(unmatched)} ({unmatched[0].why}); "
            "their waiting is unknown"
        )
    if not any(rank.steps for rank in answer.ranks):
        notes.append("no step is marked: figures are of all that was recorded")
    left = sum(rank.left_out.earlier + rank.left_out.others for rank in answer.ranks)
    us = sum(rank.left_out.earlier_us + rank.left_out.others_us for rank in answer.ranks)
    if us > MATTERS * sum(rank.spent.total_us for rank in answer.ranks):
        where = "launched before the recording began or outside of the judged steps"
        notes.append(f"{left} events ({us / 1e3:,.1f} ms), {where}, are left out")
    for row in answer.ranks[0].unknown:
        time = f"{row.kernel_us * answer.per_step / 1e3:,.2f} ms, {row.share:.1%} of the step"
        notes.append(f"the phase of {row.name[:80]} ({time}); --names FILE gives it one")
    return notes


def late_ranks(answer: TraceAnalysis) -> tuple[LateRank, ...]:
    """Late ranks and their causes, the most expensive first; waiting is of the whole recording."""
    collectives = answer.collectives
    if len(collectives.meetings) < MATCHED * (len(collectives.meetings) + len(collectives.unmatched)):
        return ()
    others = max(1, len(answer.loaded) - 1)
    least_us = others * TELLS * float(np.mean([rank.spent.total_us for rank in answer.ranks]))
    between = _between(answer)
    ranks = [
        late
        for straggler in collectives.stragglers()
        if straggler.caused_wait_us >= least_us
        for late in _by_cause(answer, between, straggler.rank)
        if late.caused_wait_us >= least_us
    ]
    return tuple(sorted(ranks, key=lambda late: late.caused_wait_us, reverse=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Between:
    """Microseconds of each rank between the end of the previous collective and the start of collective M."""

    idle_MR: Floats  # without device work
    busy_MR: Floats  # with device work
    # For each rank in the order of `TraceAnalysis.ranks`, the collective after each entry of its phases; NONE for an
    # entry after the last collective or concurrent with one.
    before: tuple[Integers, ...]


def _between(answer: TraceAnalysis) -> _Between:
    calls, rows_MR = answer.collectives.calls, answer.collectives.meetings.met
    idle_MR, busy_MR = np.full(rows_MR.shape, np.nan), np.full(rows_MR.shape, np.nan)  # nan: the rank had no part
    waits_M = calls.sync[any_row(rows_MR)] != SyncKind.ALONE  # a kernel that never waits counts as work
    first_us, before = _first_work(answer), []
    for rank in answer.ranks:
        number = calls.ranks.index(rank.rank)
        met = np.flatnonzero((rows_MR[:, number] != NONE) & waits_M)
        rows = rows_MR[met, number]
        order = np.argsort(calls.start_us[rows], kind="stable")
        met, rows = met[order], rows[order]
        starts_us = calls.start_us[rows]
        # The previous collective may end after this one starts, on another stream.
        ends_us = np.append(first_us[rank.rank], np.maximum.accumulate(calls.end_us[rows]))[: len(rows)]
        begins_us = np.minimum(ends_us, starts_us)  # then the interval is empty, never negative
        busy = busy_of(rank.trace.gpu)
        working = (busy.compute | busy.communication | busy.copies).covered_us(begins_us, starts_us)
        busy_MR[met, number] = working
        idle_MR[met, number] = np.maximum(starts_us - begins_us, 0.0) - working
        before.append(_collective_after(rank, met, begins_us, starts_us))
    return _Between(idle_MR=idle_MR, busy_MR=busy_MR, before=tuple(before))


def _first_work(answer: TraceAnalysis) -> dict[int, float]:
    """By rank and on its clock, the first device work of any rank whose clock can be compared with it."""
    calls, clocks = answer.collectives.calls, answer.collectives.meetings.clocks
    number = {rank.rank: calls.ranks.index(rank.rank) for rank in answer.ranks}
    firsts = {
        rank.rank: float(rank.trace.gpu.start_us[0] - clocks.ahead_us[number[rank.rank]]) for rank in answer.ranks
    }
    return {
        rank: float(clocks.ahead_us[index])
        + min(firsts[other] for other in firsts if clocks.island[number[other]] == clocks.island[index])
        for rank, index in number.items()
    }


def _collective_after(rank: RankAnalysis, met: Integers, begins_us: Floats, starts_us: Floats) -> Integers:
    """For each entry of a rank's phases, the collective that follows its middle, if it is between two."""
    gpu = rank.trace.gpu
    middle_us = (gpu.start_us + gpu.duration_us / 2)[rank.phases.event]
    position = np.searchsorted(starts_us, middle_us)
    inside = position < len(met)
    inside[inside] = middle_us[inside] >= begins_us[position[inside]]
    meeting = np.full(len(middle_us), NONE)
    meeting[inside] = met[position[inside]]
    return meeting


def _by_cause(answer: TraceAnalysis, between: _Between, rank: int) -> Iterator[LateRank]:
    """The cost of a rank's host, and the cost of its work."""
    collectives = answer.collectives
    number = collectives.calls.ranks.index(rank)
    mine = np.flatnonzero(collectives.last == number)
    cost_M = np.nansum(collectives.wait_us[mine], axis=1)
    is_host, idle_us = _is_host(between, mine, number)
    for of_host in (True, False):
        chosen = is_host == of_host
        if not chosen.any():
            continue
        late = LateRank(rank=rank, times_last=int(chosen.sum()), caused_wait_us=float(cost_M[chosen].sum()))
        if of_host:
            yield replace(late, cause="host", detail=_idle_text(answer, rank, idle_us[chosen] * answer.per_step))
        else:
            yield _with_work(late, answer, _computed(answer, between, mine[chosen]))


def _is_host(between: _Between, mine: Integers, number: int) -> tuple[Flags, Floats]:
    """For collectives that a rank joined last, whether idle time explains it, and the rank's additional idle time."""
    others = np.arange(between.idle_MR.shape[1]) != number  # medians are of the other ranks
    idle = between.idle_MR[mine, number] - np.nanmedian(between.idle_MR[mine][:, others], axis=1)
    busy = between.busy_MR[mine, number] - np.nanmedian(between.busy_MR[mine][:, others], axis=1)
    idle, busy = np.maximum(idle, 0.0), np.maximum(busy, 0.0)
    by_host: Flags = idle > IDLE_DECIDES * (idle + busy)
    return by_host, idle


def _with_work(late: LateRank, answer: TraceAnalysis, times: dict[int, dict[str, float]]) -> LateRank:
    """Find the cause in the work that took longer than on the median rank.

    The experts of a generally slow rank are slow too, so they are the cause only if they exceed that slowness. `times`
    are those of each rank before the collectives that the late rank joined last, by phase, per step.
    """
    if len(answer.ranks) == 1:
        return replace(late, detail="others were not read")
    mine, others = _usual(times, late.rank)
    rest_us, rest_usual_us = _sum(mine, of_experts=False), _sum(others, of_experts=False)
    expert_us, expert_usual_us = _sum(mine, of_experts=True), _sum(others, of_experts=True)
    rest_more_us = max(rest_us - rest_usual_us, 0.0)
    experts_more_us = expert_us - expert_usual_us * _slowness(answer, late.rank)  # beyond the rank's own slowness
    more_us = rest_more_us + expert_us - expert_usual_us  # all additional computing
    if experts_more_us > more_us - experts_more_us:
        rest = f", all else {rest_more_us / 1e3:.2f} ms" if rest_more_us > TELLS_TOO * more_us else ""
        detail = f"its experts take {_longer_text(expert_us, expert_usual_us)}{rest}"
        return replace(late, cause="experts", detail=detail, share=experts_more_us / more_us)
    longer = {name: us - others[name] for name, us in mine.items() if name not in AROUND_EXPERTS}
    name = max(longer, key=lambda phase: longer[phase], default="")
    if not name or min(longer[name], more_us) <= 0:
        return replace(late, detail="it computes no longer than others")
    portion = "most of that" if longer[name] > HALF * more_us else "the most"
    took = _longer_text(rest_us + expert_us, rest_usual_us + expert_usual_us)
    return replace(late, cause="compute", detail=f"it computes {took}, {portion} in {name}")


def _longer_text(mine_us: float, usual_us: float) -> str:
    ratio = f", {mine_us / usual_us - 1:+.0%}" if usual_us else ""
    return f"{(mine_us - usual_us) / 1e3:.2f} ms per step longer than on the median rank{ratio}"


def _idle_text(answer: TraceAnalysis, rank: int, idle_us: Floats) -> str:
    """The additional idle time, and its possible origin: one stall, or slow launches."""
    text = f"its device was idle {idle_us.sum() / 1e3:.2f} ms per step longer than others' before it came"
    if idle_us.max() > HALF * idle_us.sum():
        text += f", {idle_us.max() / 1e3:.2f} ms of it at once"
    calls = {rank.rank: _launch_us(rank.trace) for rank in answer.ranks}
    usual_us = float(np.median([us for number, us in calls.items() if number != rank] or [np.nan]))
    if calls[rank] > (1 + TELLS_TOO) * usual_us:
        text += f"; a launch takes its host {calls[rank]:.1f} us, {calls[rank] / usual_us - 1:.0%} longer than others'"
    return text


def _launch_us(trace: Trace) -> float:
    """Median time of a kernel launch on the host; nan without a launch in the trace."""
    launches = trace.gpu.launch[trace.gpu.is_linked & trace.gpu.is_kernel]
    return float(np.median(trace.host.duration_us[launches])) if len(launches) else float("nan")


def _slowness(answer: TraceAnalysis, rank: int) -> float:
    """Factor by which a rank is slower in work that does not depend on expert rows, in the whole trace; at least 1."""
    mine, others = _usual({rank.rank: _computed_by_phase(rank) for rank in answer.ranks}, rank)
    usual_us = _sum(others, of_experts=False)
    return max(_sum(mine, of_experts=False) / usual_us, 1.0) if usual_us else 1.0


def _usual(times: dict[int, dict[str, float]], rank: int) -> tuple[dict[str, float], dict[str, float]]:
    """Times of a rank by phase, and the median of the other ranks for each of its phases."""
    mine = times[rank]
    return mine, {
        name: float(np.median([times[time].get(name, 0.0) for time in times if time != rank])) for name in mine
    }


def _sum(times: dict[str, float], *, of_experts: bool) -> float:
    return sum(us for name, us in times.items() if (name in AROUND_EXPERTS) == of_experts)


def _computed(answer: TraceAnalysis, between: _Between, meetings: Integers) -> dict[int, dict[str, float]]:
    """Computing per step before some collectives, by rank and phase.

    Only ranks that took part in most of these collectives count, and of these collectives the ones that they share.
    """
    calls, rows_MR = answer.collectives.calls, answer.collectives.meetings.met
    present_MR = rows_MR[meetings] != NONE
    shared = present_MR.sum(axis=0) == present_MR.sum(axis=0).max()  # by rank: in as many as any other
    common = meetings[present_MR[:, shared].all(axis=1)]
    return {
        rank.rank: {
            name: us * answer.per_step for name, us in _computed_by_phase(rank, np.isin(before, common)).items()
        }
        for rank, before in zip(answer.ranks, between.before, strict=True)
        if shared[calls.ranks.index(rank.rank)]
    }


def _computed_by_phase(rank: RankAnalysis, chosen: Flags | None = None) -> dict[str, float]:
    """Exposed time of all, or of chosen, entries of a rank's phases; without communication, which contains waiting."""
    computes = rank.trace.gpu.kind[rank.phases.event] != GpuKind.COMMUNICATION
    if chosen is not None:
        computes = computes & chosen
    sums = np.bincount(rank.phases.name_id[computes], rank.phases.exposed_us[computes], len(rank.phases.names))
    return dict(zip(rank.phases.names, sums.tolist(), strict=True))
