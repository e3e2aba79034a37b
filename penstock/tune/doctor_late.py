"""Who was late, and why: by what each rank did between two collectives.

Between two collectives every rank works for itself, so why a rank came late to the second is told by what it did since
the first ended, against the median of the others:

    idle longer, for at least half of the delay    its host was late
    computed longer                                its experts, if they took most of what it computed longer than
                                                   by being slow at everything, or else its computing

A kernel that writes to other ranks and waits for nobody is work here, and no collective. Only the work before those to
which a rank was late is compared: over a whole step, a rank whose experts are full in one layer and empty in the next
computes as long as all others, and lets them wait all the same. A rank whose host was late to some and whose work to
others is told twice, each with what it cost.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from penstock.trace.answer import Answer, RankAnswer
from penstock.trace.calls import Calls, Way
from penstock.trace.collectives import any_row
from penstock.trace.events import NONE, Flags, Floats, GpuKind, Integers, Trace
from penstock.trace.timeline import busy_of
from penstock.tune.doctor_evidence import Late

MATCHED = 0.5
"""Share of the collectives that must be matched before a rank is called late: below, too little of it is known."""

TELLS = 0.01
"""Share of the step that the others wait for a rank, from which it is named: someone is always last, by chance."""

IDLE_DECIDES = 0.5
"""Share of a delay that idle time must explain for the host to be the cause."""

HALF = 0.5
"""Share of a sum from which a part of it is most of it."""

TELLS_TOO = 0.1
"""Share by which a launch must take longer, or all else besides experts, to be told with the cause."""

EXPERTS = frozenset({"experts", "experts input gradient", "experts weight gradient"})
"""Phases that are experts."""

AROUND_EXPERTS = EXPERTS | {"activation", "permute"}
"""Phases whose time grows with the rows of a rank's experts, where there are experts."""


def late_ranks(answer: Answer) -> tuple[Late, ...]:
    """Ranks that others waited for and why, the most expensive first.

    Args:
        answer: of all ranks that were read.
    """
    collectives = answer.collectives
    if len(collectives.meetings) < MATCHED * (len(collectives.meetings) + len(collectives.unmatched)):
        return ()
    others = max(1, len(answer.loaded) - 1)
    least_us = others * TELLS * float(np.mean([one.timelines["all"].total_us for one in answer.ranks]))
    between = _between(answer)
    found = [
        late
        for one in collectives.stragglers()
        if one.caused_wait_us >= least_us
        for late in _by_cause(answer, between, one.rank)
        if late.caused_wait_us >= least_us
    ]
    return tuple(sorted(found, key=lambda one: one.caused_wait_us, reverse=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Between:
    """What each rank did before each meeting, since the one before had ended; microseconds.

    Attributes:
        idle_MR: the device had nothing to do.
        busy_MR: it worked.
        before: for each rank, in the order of `Answer.ranks`, and each entry of its phases: the meeting that it was
            work for; NONE if none came after it, or it ran beside one.
    """

    idle_MR: Floats
    busy_MR: Floats
    before: tuple[Integers, ...]


def _between(answer: Answer) -> _Between:
    """Idle and busy time of each rank before each meeting, and which events that was."""
    calls, rows_MR = answer.collectives.calls, answer.collectives.meetings.met
    idle_MR, busy_MR = np.full(rows_MR.shape, np.nan), np.full(rows_MR.shape, np.nan)
    waits_M = calls.way[any_row(rows_MR)] != Way.ALONE
    begun_us, before = _begun(answer), []
    for one in answer.ranks:
        number = calls.ranks.index(one.rank)
        met = np.flatnonzero((rows_MR[:, number] != NONE) & waits_M)
        rows = rows_MR[met, number]
        order = np.argsort(calls.start_us[rows], kind="stable")
        met, rows = met[order], rows[order]
        begins_us, starts_us = _ends_before(calls, rows, begun_us[one.rank]), calls.start_us[rows]
        busy = busy_of(one.trace.gpu)
        working = (busy.compute | busy.communication | busy.copies).covered_us(begins_us, starts_us)
        busy_MR[met, number] = working
        idle_MR[met, number] = np.maximum(starts_us - begins_us, 0.0) - working
        before.append(_meeting_after(one, met, begins_us, starts_us))
    return _Between(idle_MR=idle_MR, busy_MR=busy_MR, before=tuple(before))


def _begun(answer: Answer) -> dict[int, float]:
    """By rank and on its clock, when the first device began to work, of those with which it can be compared."""
    calls, clocks = answer.collectives.calls, answer.collectives.meetings.clocks
    number = {one.rank: calls.ranks.index(one.rank) for one in answer.ranks}
    firsts = {one.rank: float(one.trace.gpu.start_us[0] - clocks.ahead_us[number[one.rank]]) for one in answer.ranks}
    return {
        rank: float(clocks.ahead_us[own])
        + min(firsts[other] for other in firsts if clocks.island[number[other]] == clocks.island[own])
        for rank, own in number.items()
    }


def _ends_before(calls: Calls, rows: Integers, first_us: float) -> Floats:
    """For meetings of one rank in order of their start, when the one before had ended; at most its own start."""
    ends = np.append(first_us, np.maximum.accumulate(calls.end_us[rows]))[: len(rows)]
    return np.minimum(ends, calls.start_us[rows])


def _meeting_after(one: RankAnswer, met: Integers, begins_us: Floats, starts_us: Floats) -> Integers:
    """For each entry of a rank's phases, the meeting before which its middle lies, if it lies between two."""
    gpu = one.trace.gpu
    middle_us = (gpu.start_us + gpu.duration_us / 2)[one.phases.event]
    place = np.searchsorted(starts_us, middle_us)
    inside = place < len(met)
    inside[inside] = middle_us[inside] >= begins_us[place[inside]]
    meeting = np.full(len(middle_us), NONE)
    meeting[inside] = met[place[inside]]
    return meeting


def _by_cause(answer: Answer, between: _Between, rank: int) -> Iterator[Late]:
    """What a rank cost by its host, and what it cost by its work."""
    collectives = answer.collectives
    number = collectives.calls.ranks.index(rank)
    mine = np.flatnonzero(collectives.last == number)
    cost_M = np.nansum(collectives.wait_us[mine], axis=1)
    is_host, idle_us = _is_host(between, mine, number)
    for of_host in (True, False):
        chosen = is_host == of_host
        if not chosen.any():
            continue
        found = Late(rank=rank, times_last=int(chosen.sum()), caused_wait_us=float(cost_M[chosen].sum()))
        if of_host:
            yield replace(found, cause="host", detail=_idle_text(answer, rank, idle_us[chosen] * answer.per_step))
        else:
            computed = _computed(answer, between, mine[chosen])
            per_step = {
                one: {name: us * answer.per_step for name, us in times.items()} for one, times in computed.items()
            }
            yield _with_work(found, answer, per_step)


def _is_host(between: _Between, mine: Integers, number: int) -> tuple[Flags, Floats]:
    """For meetings that a rank was last in, whether idle time explains that, and how much more of it there was."""
    others = np.arange(between.idle_MR.shape[1]) != number
    idle = between.idle_MR[mine, number] - np.nanmedian(between.idle_MR[mine][:, others], axis=1)
    busy = between.busy_MR[mine, number] - np.nanmedian(between.busy_MR[mine][:, others], axis=1)
    idle, busy = np.maximum(idle, 0.0), np.maximum(busy, 0.0)
    by_host: Flags = idle > IDLE_DECIDES * (idle + busy)
    return by_host, idle


def _with_work(late: Late, answer: Answer, times: dict[int, dict[str, float]]) -> Late:
    """What a rank computed longer than the median of the others, before the meetings that it was late to.

    A rank that is slow at everything is slow in its experts too, so these are the cause only if they take longer than
    by the factor that everything else does, in all that was traced.

    Args:
        late: who, and what it cost.
        answer: of all ranks.
        times: what each rank computed before these meetings, by phase, per step.
    """
    if len(answer.ranks) == 1:
        return replace(late, detail="others were not read")
    mine, others = _usual(times, late.rank)
    rest_us, rest_usual_us = _sum(mine, of_experts=False), _sum(others, of_experts=False)
    expert_us, expert_usual_us = _sum(mine, of_experts=True), _sum(others, of_experts=True)
    rest_more_us = max(rest_us - rest_usual_us, 0.0)
    experts_more_us = expert_us - expert_usual_us * _slowness(answer, late.rank)
    more_us = rest_more_us + expert_us - expert_usual_us
    if experts_more_us > more_us - experts_more_us:
        rest = f", all else {rest_more_us / 1e3:.2f} ms" if rest_more_us > TELLS_TOO * more_us else ""
        detail = f"its experts take {_longer_text(expert_us, expert_usual_us)}{rest}"
        return replace(late, cause="experts", detail=detail, share=experts_more_us / more_us)
    longer = {name: us - others[name] for name, us in mine.items() if name not in AROUND_EXPERTS}
    name = max(longer, key=lambda one: longer[one], default="")
    if not name or longer[name] <= 0:
        return replace(late, detail="it computes no longer than others")
    most = "most of that" if longer[name] > HALF * more_us else "the most"
    took = _longer_text(rest_us + expert_us, rest_usual_us + expert_usual_us)
    return replace(late, cause="compute", detail=f"it computes {took}, {most} in {name}")


def _longer_text(mine_us: float, usual_us: float) -> str:
    ratio = f", {mine_us / usual_us - 1:+.0%}" if usual_us else ""
    return f"{(mine_us - usual_us) / 1e3:.2f} ms per step longer than on the median rank{ratio}"


def _idle_text(answer: Answer, rank: int, idle_us: Floats) -> str:
    """How much longer a device was idle, and what it may come from: one stall, or launches that take long."""
    text = f"its device was idle {idle_us.sum() / 1e3:.2f} ms per step longer than others' before it came"
    if idle_us.max() > HALF * idle_us.sum():
        text += f", {idle_us.max() / 1e3:.2f} ms of it at once"
    calls = {one.rank: _launch_us(one.trace) for one in answer.ranks}
    usual_us = float(np.median([us for one, us in calls.items() if one != rank] or [np.nan]))
    if calls[rank] > (1 + TELLS_TOO) * usual_us:
        text += f"; a launch takes its host {calls[rank]:.1f} us, {calls[rank] / usual_us - 1:.0%} longer than others'"
    return text


def _launch_us(trace: Trace) -> float:
    """How long the call takes that launches a kernel; nan if none is in the trace."""
    launches = trace.gpu.launch[trace.gpu.is_linked & trace.gpu.is_kernel]
    return float(np.median(trace.host.duration_us[launches])) if len(launches) else float("nan")


def _slowness(answer: Answer, rank: int) -> float:
    """The factor by which a rank is slower at what does not depend on experts' rows, over all traced; at least 1."""
    mine, others = _usual({one.rank: _computed_by_phase(one) for one in answer.ranks}, rank)
    usual_us = _sum(others, of_experts=False)
    return max(_sum(mine, of_experts=False) / usual_us, 1.0) if usual_us else 1.0


def _usual(times: dict[int, dict[str, float]], rank: int) -> tuple[dict[str, float], dict[str, float]]:
    """Times of a rank by phase, and of each of its phases the median of all others."""
    mine = times[rank]
    return mine, {name: float(np.median([times[one].get(name, 0.0) for one in times if one != rank])) for name in mine}


def _sum(times: dict[str, float], *, of_experts: bool) -> float:
    return sum(us for name, us in times.items() if (name in AROUND_EXPERTS) == of_experts)


def _computed(answer: Answer, between: _Between, meetings: Integers) -> dict[int, dict[str, float]]:
    """By rank, what it computed before these meetings; ranks that had the most of them, of what all of these had."""
    calls, rows_MR = answer.collectives.calls, answer.collectives.meetings.met
    present_MR = rows_MR[meetings] != NONE
    shared = present_MR.sum(axis=0) == present_MR.sum(axis=0).max()
    common = meetings[present_MR[:, shared].all(axis=1)]
    return {
        one.rank: _computed_by_phase(one, np.isin(before, common))
        for one, before in zip(answer.ranks, between.before, strict=True)
        if shared[calls.ranks.index(one.rank)]
    }


def _computed_by_phase(one: RankAnswer, chosen: Flags | None = None) -> dict[str, float]:
    """Of some entries of its phases, or all; without communication, which is as long as it waits."""
    computes = one.trace.gpu.kind[one.phases.event] != GpuKind.COMMUNICATION
    if chosen is not None:
        computes = computes & chosen
    sums = np.bincount(one.phases.name_id[computes], one.phases.exposed_us[computes], len(one.phases.names))
    return dict(zip(one.phases.names, sums.tolist(), strict=True))
