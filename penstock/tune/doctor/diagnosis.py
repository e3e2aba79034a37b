"""The diagnosis of a run: its bottleneck, the evidence as lines of text, and the remedies by gain."""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from penstock.base.errors import TraceError
from penstock.tune.doctor.evidence import ALSO, Bottleneck, Bottlenecks, Evidence, LateRank, bottlenecks_of
from penstock.tune.doctor.remedies import remedies
from penstock.tune.doctor.remedy import Remedy, between_steps_us, imbalance_us, least_even

NAMED_LATE, LISTED_LATE = 4, 8  # late ranks, by cause, at most in the conclusion and in the evidence
PART = 0.05  # share of the step from which a compute phase is evidence
LEAST = 0.005  # share of the step below which a part of a loss is noise
WORTH_NAMING = 0.2  # share of the most expensive late rank's cost from which the conclusion names another one


@dataclass(frozen=True)
class EvidenceLine:
    """One line of evidence; time or size are None in lines about something else."""

    what: str
    bottleneck: Bottleneck
    _: KW_ONLY
    time_us: float | None = None  # per step
    share: float | None = None  # of the step
    size: int | None = None  # bytes


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Result of the doctor."""

    bottleneck: Bottleneck
    others: tuple[Bottleneck, ...]  # further losses that are worth a look, the largest first
    sentence: str
    times: Bottlenecks
    lines: tuple[EvidenceLine, ...]  # starting with the bottleneck's
    remedies: tuple[Remedy, ...]  # the largest gain first
    missing: tuple[str, ...]  # unavailable inputs and how to get them
    notes: tuple[str, ...] = ()  # remarks for the reader


def diagnose(evidence: Evidence) -> Diagnosis:
    """The diagnosis of a run. Raises a TraceError without times, unless the run is known to exceed the memory."""
    if not evidence.ranks and evidence.fits:
        raise TraceError(
            "there is neither a trace nor a plan to judge by", fix="record one, or say what the run is on: --on 8xH200"
        )
    times = bottlenecks_of(evidence)
    order = (times.largest, *times.losses, "compute")  # `index` takes the first of two equal names
    return Diagnosis(
        bottleneck=times.largest,
        others=times.others,
        sentence=_sentence(evidence, times),
        times=times,
        lines=tuple(sorted(_lines(evidence, times), key=lambda line: order.index(line.bottleneck))),
        remedies=remedies(evidence, times),
        missing=evidence.missing,
        notes=evidence.notes,
    )


def ms_text(time_us: float) -> str:
    """Milliseconds, as the command line and the page of a run print them."""
    return f"{time_us / 1e3:,.2f}"


def spent_text(diagnosis: Diagnosis, evidence: Evidence) -> str:
    """The source of the times, and what they are means of."""
    source = {"trace": "the traces", "plan": "the plan", "none": "nothing"}[evidence.source]
    mean = f"the mean of {evidence.steps} steps and of ranks" if evidence.steps > 1 else "the mean of ranks"
    per = "per step" if evidence.steps else "of all that was recorded"
    apart = ", without single stalls" if evidence.single_stalls else ""
    return f"times are of {source}, {per}: {ms_text(diagnosis.times.total_us)} ms, {mean}{apart}"


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The JSON contract of `penstock doctor --json`. Times are per step."""
    return {
        "wall": diagnosis.bottleneck,
        "then": list(diagnosis.others),
        "verdict": diagnosis.sentence,
        "total_us": diagnosis.times.total_us,
        "evidence": [
            {
                "what": line.what,
                "wall": line.bottleneck,
                "milliseconds": None if line.time_us is None else line.time_us / 1e3,
                "share": line.share,
                "bytes": line.size,
            }
            for line in diagnosis.lines
        ],
        "remedies": [
            {
                "change": remedy.change,
                "what": remedy.what,
                "gain_us": remedy.gain_us,
                "gain_share": diagnosis.times.share(remedy.gain_us),
                "gain_bytes": remedy.gain_bytes,
                "rule": remedy.rule,
                "source": remedy.source,
                "how": remedy.how or None,
            }
            for remedy in diagnosis.remedies
        ],
        "missing": list(diagnosis.missing),
        "notes": list(diagnosis.notes),
    }


def _sentence(evidence: Evidence, times: Bottlenecks) -> str:
    """One line: the bottleneck, its size, the late ranks and the other losses."""
    facts = evidence.facts
    if not times.fits:
        assert facts.planned_bytes is not None and facts.capacity_bytes is not None, "a plan found that it does not fit"
        over = facts.planned_bytes - facts.capacity_bytes
        return f"memory: the fullest rank lacks {over / 1e9:.1f} GB of {facts.capacity_bytes / 1e9:.1f} GB, by the plan"
    late: list[LateRank] = []
    if evidence.late and times.largest in ("communication", "host"):
        least_us = WORTH_NAMING * evidence.late[0].caused_wait_us
        late = [late_rank for late_rank in evidence.late[:NAMED_LATE] if late_rank.caused_wait_us >= least_us]
    named = f"; late: {_late_text(late)}" if late else ""
    then = f"; then {', '.join(f'{name} {times.share(times.losses[name]):.1%}' for name in times.others)}"
    text = f"{times.largest}: {_size_text(evidence, times)}{named}{then if times.others else ''}"
    return text if evidence.steps or evidence.source != "trace" else text.replace("of the step", "of the recording")


def _size_text(evidence: Evidence, times: Bottlenecks) -> str:
    match times.largest:
        case "communication":
            text = f"exposed communication takes {times.share(times.communication_us):.1%} of the step"
            text += _waiting_text(evidence, times)
        case "host":
            idle = "no operator runs in" if evidence.is_cpu else "the device is idle"
            text = f"{idle} {times.share(evidence.mean('idle_us') - times.stall_us):.1%} of the step"
            if times.late_host_us:
                text += f", and others wait {times.share(times.late_host_us):.1%} for ranks whose host is late"
            if times.share(times.recording_us) >= LEAST:
                text += f"; of both, {times.share(times.recording_us):.1%} is the recording's"
        case "stall":
            text = (
                f"queued work did not start in {times.share(times.stall_us):.1%} of the step, and no call of the host "
            )
            text += "explains it: power state, another process, driver, or events that are missing"
        case "data":
            text = f"rows are fetched in {times.share(times.data_us):.1%} of the step, with nothing else to compute"
        case "memory":
            text = f"computing again and copying take {times.share(times.memory_us):.1%} of the step"
        case "power":
            power = evidence.facts.power
            assert power is not None, "a loss of power has facts"
            text = f"power holds the clock at {power.clock_mhz:,.0f} of {power.limit_mhz:,.0f} MHz, "
            text += f"{power.watts:,.0f} of {power.limit_watts:,.0f} W"
            text += f": up to {times.share(times.power_us):.1%} of the step"
        case "compute":
            who = "operators compute" if evidence.is_cpu else "the device computes"
            text = f"{who} {times.share(times.compute_us):.1%} of the step"
    return text


def _waiting_text(evidence: Evidence, times: Bottlenecks) -> str:
    waits = {rank.rank: rank.wait_us / rank.total_us for rank in evidence.ranks if rank.wait_us is not None}
    if not waits:
        return "; the part that waits for other ranks is unknown"
    rank = max(waits, key=lambda number: waits[number])
    mean = times.share(times.waiting_us)
    return f"; {mean:.1%} of the step is waiting for late ranks ({waits[rank]:.1%} on rank {rank}, which waits most)"


def _late_text(late: Sequence[LateRank]) -> str:
    why = {"host": "its host", "experts": "its experts", "compute": "its computing", "unknown": "unknown why"}
    causes: dict[int, list[str]] = {}
    for late_rank in late:
        causes.setdefault(late_rank.rank, []).append(why[late_rank.cause])
    return ", ".join(f"rank {rank} ({' and '.join(reasons)})" for rank, reasons in causes.items())


def _lines(evidence: Evidence, times: Bottlenecks) -> Iterator[EvidenceLine]:
    if evidence.ranks:
        yield from _communication(evidence, times)
        yield from _host(evidence, times)
        yield from _memory_times(evidence, times)
        yield from _power(evidence, times)
        yield _time("computing, each thing once", "compute", times.compute_us + times.power_us, times)
        pointwise = evidence.mean("pointwise_us")
        if times.share(pointwise) >= PART:
            number = evidence.mean("pointwise_kernels")
            kernels = "operators" if evidence.is_cpu else "kernels"
            yield _time(f"of it in {number:,.0f} elementwise {kernels}, of all phases", "compute", pointwise, times)
        labels = {"experts": "experts, activations and permuting", "shared": "shared experts"}
        for name, time_us in evidence.computing.items():
            if times.share(time_us) >= PART:
                yield _time(f"of it {labels.get(name, name)}", "compute", time_us, times)
        steps = max(1, evidence.steps)
        for row in evidence.operators:
            if times.share(row.own_us / steps) >= PART:
                what = f"the operator {row.name}, {row.count / steps:,.0f} times, by itself, first rank"
                yield _time(what, "compute", row.own_us / steps, times)
    yield from _memory_sizes(evidence)
    yield from _steps(evidence)


def _communication(evidence: Evidence, times: Bottlenecks) -> Iterator[EvidenceLine]:
    exposed = evidence.mean("exposed_communication_us")
    yield _time("exposed communication, mean of ranks", "communication", exposed, times)
    if times.share(times.late_host_us) >= LEAST:
        what = "of it waiting for ranks whose host is late, which counts as the host's"
        yield _time(what, "communication", times.late_host_us, times)
    for kind in evidence.kinds:
        if times.share(evidence.communication(kind)) >= 0.01:
            yield _time(f"of it {kind}", "communication", evidence.communication(kind), times)
    waits = [(rank.wait_us, rank) for rank in evidence.ranks if rank.wait_us is not None]
    if waits:
        waiting = times.waiting_us + times.late_host_us
        yield _time("of it waiting for ranks that come later", "communication", waiting, times)
        longest_us, rank = max(waits, key=lambda item: item[0])
        what = f"waiting for ranks that come later, on rank {rank.rank}, which waits most"
        yield EvidenceLine(what, "communication", time_us=longest_us, share=longest_us / rank.total_us)
        if rank.pure_us is not None:
            what = f"bytes under way (computed beside or not), on rank {rank.rank}"
            yield EvidenceLine(what, "communication", time_us=rank.pure_us, share=rank.pure_us / rank.total_us)
    for late in evidence.late[:LISTED_LATE]:
        what = f"that each other rank waits for rank {late.rank}, last {late.times_last} times ({late.detail})"
        each_us = late.caused_wait_us / max(1, len(evidence.ranks) - 1)
        yield _time(what, "host" if late.cause == "host" else "communication", each_us, times)
    loads = [load for load in (evidence.max_over_mean, evidence.facts.expert_load) if load is not None]
    if loads:  # a trace shows no imbalance if rows are padded to a bound
        yield EvidenceLine(f"rows of the fullest rank's experts: {max(loads):.2f} times the mean", "communication")
    yield from _imbalance(evidence, times)
    if evidence.unmatched:
        yield EvidenceLine(f"collectives whose waiting is unknown: {evidence.unmatched}", "communication")


def _imbalance(evidence: Evidence, times: Bottlenecks) -> Iterator[EvidenceLine]:
    lost, run = imbalance_us(evidence), evidence.facts.run
    if times.share(lost) < LEAST:
        return
    what = f"tax of imbalance, rows beyond the mean on each layer's fullest rank: {least_even(evidence)}"
    yield _time(what, "communication", lost, times)
    if run is not None and run.dispatch.balance == "none":
        bound = 1 + run.dispatch.balance_tolerance
        what = f"of it rows over {bound:g} times the mean: dispatch.balance=bounded returns these, less its copies"
        yield _time(what, "communication", imbalance_us(evidence, bound), times)
    what = "of it in the loads of whole steps: a bias of the router or an auxiliary loss returns these at most"
    yield _time(what, "communication", between_steps_us(evidence), times)
    yield _time("of it all: the limit, forced balance (benchmarks only)", "communication", lost, times)


def _host(evidence: Evidence, times: Bottlenecks) -> Iterator[EvidenceLine]:
    idle = "outside of operators and transfers (Python, waiting)" if evidence.is_cpu else "the device idle"
    yield _time(f"{idle}, mean of ranks", "host", evidence.mean("idle_us") - times.stall_us, times)
    yield from _stalls(evidence, times)
    if times.share(times.data_us) >= LEAST:
        yield _time("fetching rows, with nothing else to compute, mean of ranks", "data", times.data_us, times)
    behind = evidence.mean("sync_idle_us")
    if times.share(behind) >= LEAST:
        yield _time("of it because the host had waited for the device", "host", behind, times)
    if times.share(times.recording_us) >= LEAST:
        why = "the traced steps take longer than those beside them, by the metrics"
        yield _time(f"taken off: {why}; recording slows the host", "host", times.recording_us, times)
    copy, alone = evidence.host_call, evidence.mean("host_call_us")
    if copy is not None and times.share(alone) >= LEAST:
        where = f" from {copy.where}" if copy.where else ""
        what = f"the device with nothing to do while the host is in {copy.call}{where}, {copy.count} times"
        yield _time(what, "host", alone, times)
    launches = evidence.launches
    if launches is not None and launches.kernels:
        many = max(1, evidence.steps) * len(evidence.ranks)  # launches are counts over the whole recording
        small = launches.small_kernels / launches.kernels
        graphs = f", {launches.from_graphs / launches.kernels:.0%} from graphs" if launches.from_graphs else ""
        waits = f"; waits of the host: {launches.synchronizations / many:,.0f}"
        of = "a rank's step" if evidence.steps else "a rank"
        what = f"{of}: {launches.kernels / many:,.0f} kernels{graphs}, {small:.0%} under 10 us{waits}"
        yield EvidenceLine(what, "host")


def _stalls(evidence: Evidence, times: Bottlenecks) -> Iterator[EvidenceLine]:
    """Queued work that did not start, and single stalls, which the times are without."""
    stall = evidence.stall
    if stall is not None and times.share(times.stall_us) >= LEAST:
        call = f" while the host was in {stall.call}" if stall.call else ""
        what = f"queued work did not start, at most {ms_text(stall.duration_us)} ms at once: {stall.queued} launched"
        yield _time(f"{what} events, the first {stall.after[:60]}, waited{call}", "stall", times.stall_us, times)
    for single in evidence.single_stalls[:NAMED_LATE]:
        why = f"{single.queued} launched events did not start" if single.queued else "the host launched nothing"
        call = f", in {single.call}" if single.call else ""
        where = f"in step {single.step} on rank {single.rank}"
        what = f"apart, a single stall: {ms_text(single.duration_us)} ms {where} ({why}{call})"
        yield EvidenceLine(what, "stall" if single.queued else "host")


def _power(evidence: Evidence, times: Bottlenecks) -> Iterator[EvidenceLine]:
    power = evidence.facts.power
    if power is None:
        return
    clock = f"the clock at {power.clock_mhz:,.0f} of {power.limit_mhz:,.0f} MHz"
    what = f"{clock}, at {power.watts:,.0f} of {power.limit_watts:,.0f} W, first rank"
    if power.is_limit:
        yield _time(f"{what}: computing that the highest clock would save, at most", "power", times.power_us, times)
    else:
        yield EvidenceLine(what, "compute")


def _memory_times(evidence: Evidence, times: Bottlenecks) -> Iterator[EvidenceLine]:
    if times.share(evidence.mean("recompute_us")) >= LEAST:
        yield _time("computing what forward had computed", "memory", evidence.mean("recompute_us"), times)
    if times.share(evidence.mean("exposed_copies_us")) >= LEAST:
        yield _time("copies with nothing beside them", "memory", evidence.mean("exposed_copies_us"), times)


def _memory_sizes(evidence: Evidence) -> Iterator[EvidenceLine]:
    facts = evidence.facts
    if facts.peak_bytes is not None:
        of = "" if facts.capacity_bytes is None else f", {facts.peak_bytes / facts.capacity_bytes:.0%} of the device"
        yield EvidenceLine(f"most memory allocated{of}", "memory", size=facts.peak_bytes)
    if facts.planned_bytes is not None:
        yield EvidenceLine("memory of the fullest rank, by the plan", "memory", size=facts.planned_bytes)
    for name, size in sorted(facts.planned_terms.items(), key=lambda item: -item[1])[:3]:
        yield EvidenceLine(f"of it {name}", "memory", size=size)
    for change, size in facts.lacking_bytes.items():
        if size > 0:
            yield EvidenceLine(f"{change} is not offered: the fullest rank lacks, by the plan", "memory", size=size)
    if facts.repeated_steps:
        what = f"{facts.repeated_steps} recorded steps ran twice (dispatch.row_capacity_factor is too small)"
        yield EvidenceLine(what, "memory")


def _steps(evidence: Evidence) -> Iterator[EvidenceLine]:
    facts = evidence.facts
    if facts.step_seconds is None:
        return
    plan = ""
    if facts.planned_step_seconds is not None:
        ratio = facts.step_seconds / facts.planned_step_seconds
        plan = f"; the plan says {facts.planned_step_seconds * 1e3:,.1f} ms, so it takes {ratio:.2f} times as long"
    yield EvidenceLine(f"the usual step, by the metrics{plan}", "compute", time_us=facts.step_seconds * 1e6)
    for name, seconds in facts.phase_seconds.items():
        share = seconds / facts.step_seconds
        if share >= ALSO:
            yield EvidenceLine(f"of it {name}, first rank", "compute", time_us=seconds * 1e6, share=share)


def _time(what: str, bottleneck: Bottleneck, time_us: float, times: Bottlenecks) -> EvidenceLine:
    return EvidenceLine(what, bottleneck, time_us=time_us, share=times.share(time_us))
