"""The doctor: which wall stands before a run, by what evidence, and what each remedy would win.

    evidence  ->  walls_of    which loss takes most of the step        (doctor_walls.py)
              ->  remedies    what each rule would take away of it     (doctor_rules.py)
              ->  Verdict

Nothing is weighed by feeling: the same evidence gives the same verdict, each number in it stands in the trace, the
metrics or the plan, and every threshold is a constant with its reason. What could not be looked at is told.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.base.errors import TraceError
from penstock.tune.doctor_evidence import Evidence, Late
from penstock.tune.doctor_remedy import Remedy
from penstock.tune.doctor_rules import remedies
from penstock.tune.doctor_walls import ALSO, Bottlenecks, Wall, walls_of

NAMED_LATE, TOLD_LATE = 4, 8
"""Causes of lateness at most in the conclusion, and in the evidence."""

PART = 0.05
"""Share of the step from which a phase of computing is evidence."""

LEAST = 0.005
"""Share of the step below which a part of a loss is not told: noise from step to step."""

WORTH_NAMING = 0.2
"""Share of what the most expensive rank costs, from which the conclusion names others; the evidence names them all."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A line of evidence.

    Attributes:
        what: in words.
        wall: for which one.
        time_us: that it takes per step; None if it is none.
        share: of the step; None if it is no time.
        size: bytes; None if it is no size.
    """

    what: str
    wall: Wall
    time_us: float | None = None
    share: float | None = None
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the doctor says.

    Attributes:
        wall: the one that stands.
        then: other losses that are worth a look, the largest first.
        sentence: the conclusion.
        walls: where the time went.
        facts: evidence, that of the wall first.
        remedies: changes, the largest gain first.
        missing: what could not be looked at, and what would mend that.
        notes: what must be known to read the rest.
    """

    wall: Wall
    then: tuple[Wall, ...]
    sentence: str
    walls: Bottlenecks
    facts: tuple[Fact, ...]
    remedies: tuple[Remedy, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...] = ()


def diagnose(evidence: Evidence) -> Verdict:
    """The verdict on a run.

    Args:
        evidence: all that is known of it.

    Raises:
        TraceError: nothing is known about where its time goes.
    """
    if not evidence.ranks and _fits_or_unknown(evidence):
        raise TraceError(
            "there is neither a trace nor a plan to judge by",
            fix="record one, or say what the run is on: --on 8xH200",
        )
    walls = walls_of(evidence)
    facts = sorted(_facts(evidence, walls), key=lambda fact: _place(fact, walls))
    return Verdict(
        wall=walls.wall,
        then=walls.then,
        sentence=_sentence(evidence, walls),
        walls=walls,
        facts=tuple(facts),
        remedies=remedies(evidence, walls),
        missing=evidence.missing,
        notes=evidence.notes,
    )


def ms_text(time_us: float) -> str:
    """Milliseconds per step, as the command line and the page of a run print them."""
    return f"{time_us / 1e3:,.2f}"


def spent_text(verdict: Verdict, evidence: Evidence) -> str:
    """Of what the times of a verdict are, for the command line and for the page of a run."""
    source = {"trace": "the traces", "plan": "the plan", "none": "nothing"}[evidence.source]
    mean = f"the mean of {evidence.steps} steps and of ranks" if evidence.steps > 1 else "the mean of ranks"
    per = "per step" if evidence.steps else "of all that was recorded"
    return f"times are of {source}, {per}: {ms_text(verdict.walls.total_us)} ms, {mean}"


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The JSON contract of `penstock doctor --json`. Times are per step."""
    return {
        "wall": verdict.wall,
        "then": list(verdict.then),
        "verdict": verdict.sentence,
        "total_us": verdict.walls.total_us,
        "evidence": [
            {
                "what": fact.what,
                "wall": fact.wall,
                "milliseconds": None if fact.time_us is None else fact.time_us / 1e3,
                "share": fact.share,
                "bytes": fact.size,
            }
            for fact in verdict.facts
        ],
        "remedies": [
            {
                "change": one.change,
                "what": one.what,
                "gain_us": one.gain_us,
                "gain_share": verdict.walls.share(one.gain_us),
                "gain_bytes": one.gain_bytes,
                "rule": one.rule,
                "source": one.source,
            }
            for one in verdict.remedies
        ],
        "missing": list(verdict.missing),
        "notes": list(verdict.notes),
    }


def _fits_or_unknown(evidence: Evidence) -> bool:
    return walls_of(evidence).fits


def _place(fact: Fact, walls: Bottlenecks) -> int:
    """Evidence of the wall that stands comes first, then that of the others by size."""
    order = (walls.wall, *(name for name in walls.losses if name != walls.wall))
    return order.index(fact.wall) if fact.wall in order else len(order)


def _sentence(evidence: Evidence, walls: Bottlenecks) -> str:
    """One line: the wall, how high it is, and who is late."""
    facts = evidence.facts
    if not walls.fits:
        assert facts.planned_bytes is not None and facts.capacity_bytes is not None, "who does not fit was weighed"
        over = facts.planned_bytes - facts.capacity_bytes
        return f"memory: the fullest rank lacks {over / 1e9:.1f} GB of {facts.capacity_bytes / 1e9:.1f} GB, by the plan"
    late = _worth_naming(evidence.late[:NAMED_LATE]) if walls.wall in ("communication", "host") else []
    named = f"; late: {_late_text(late)}" if late else ""
    then = f"; then {', '.join(f'{name} {walls.share(walls.losses[name]):.1%}' for name in walls.then)}"
    return f"{walls.wall}: {_height(evidence, walls)}{named}{then if walls.then else ''}"


def _height(evidence: Evidence, walls: Bottlenecks) -> str:
    """How high the wall is, and of what."""
    match walls.wall:
        case "communication":
            head = f"exposed communication takes {walls.share(walls.communication_us):.1%} of the step"
            head += _waiting_text(evidence, walls)
        case "host":
            head = f"the device is idle {walls.share(evidence.mean('idle_us')):.1%} of the step"
            if walls.late_host_us:
                head += f", and others wait {walls.share(walls.late_host_us):.1%} for ranks whose host is late"
            if walls.share(walls.recording_us) >= LEAST:
                head += f"; of both, {walls.share(walls.recording_us):.1%} is the recording's"
        case "memory":
            head = f"computing again and copying take {walls.share(walls.memory_us):.1%} of the step"
        case "compute":
            head = f"the device computes {walls.share(walls.compute_us):.1%} of the step"
    return head


def _worth_naming(late: Sequence[Late]) -> list[Late]:
    """In the conclusion: those that cost not much less than the first."""
    return [one for one in late if one.caused_wait_us >= WORTH_NAMING * late[0].caused_wait_us]


def _waiting_text(evidence: Evidence, walls: Bottlenecks) -> str:
    """How much of it is waiting: of the mean rank, and of the one that waits most."""
    waits = {one.rank: one.wait_us / one.total_us for one in evidence.ranks if one.wait_us is not None}
    if not waits:
        return ", transfers and waiting not told apart"
    most = max(waits, key=lambda rank: waits[rank])
    mean = walls.share(walls.waiting_us)
    return f"; {mean:.1%} of the step is waiting for late ranks ({waits[most]:.1%} on rank {most}, which waits most)"


def _late_text(late: Sequence[Late]) -> str:
    """Each rank once, with all its causes."""
    why = {"host": "its host", "experts": "its experts", "compute": "its computing", "unknown": "unknown why"}
    causes: dict[int, list[str]] = {}
    for one in late:
        causes.setdefault(one.rank, []).append(why[one.cause])
    return ", ".join(f"rank {rank} ({' and '.join(told)})" for rank, told in causes.items())


def _facts(evidence: Evidence, walls: Bottlenecks) -> Iterator[Fact]:
    """All that is known, wall by wall."""
    if evidence.ranks:
        yield from _communication(evidence, walls)
        yield from _host(evidence, walls)
        yield from _memory_times(evidence, walls)
        yield _time("computing, each thing once", "compute", walls.compute_us, walls)
        words = {"experts": "experts, activations and permuting", "shared": "shared experts"}
        for name, time_us in evidence.computing.items():
            if walls.share(time_us) >= PART:
                yield _time(f"of it {words.get(name, name)}", "compute", time_us, walls)
    yield from _memory_sizes(evidence)
    yield from _steps(evidence)


def _communication(evidence: Evidence, walls: Bottlenecks) -> Iterator[Fact]:
    exposed = evidence.mean("exposed_communication_us")
    yield _time("exposed communication, mean of ranks", "communication", exposed, walls)
    if walls.share(walls.late_host_us) >= LEAST:
        what = "of it waiting for ranks whose host is late, which counts as the host's"
        yield _time(what, "communication", walls.late_host_us, walls)
    for kind in evidence.kinds:
        if walls.share(evidence.communication(kind)) >= 0.01:
            yield _time(f"of it {kind}", "communication", evidence.communication(kind), walls)
    waits = [(one.wait_us, one) for one in evidence.ranks if one.wait_us is not None]
    if waits:
        waiting = walls.waiting_us + walls.late_host_us
        yield _time("of it waiting for ranks that come later", "communication", waiting, walls)
        most, rank = max(waits, key=lambda item: item[0])
        share = most / rank.total_us
        yield Fact(
            what=f"waiting for ranks that come later, on rank {rank.rank}, which waits most",
            wall="communication",
            time_us=most,
            share=share,
        )
        if rank.pure_us is not None:
            what = f"bytes under way (computed beside or not), on rank {rank.rank}"
            yield Fact(what=what, wall="communication", time_us=rank.pure_us, share=rank.pure_us / rank.total_us)
    for one in evidence.late[:TOLD_LATE]:
        others = max(1, len(evidence.ranks) - 1)
        yield _time(
            f"that each other rank waits for rank {one.rank}, last {one.times_last} times ({one.detail})",
            "host" if one.cause == "host" else "communication",
            one.caused_wait_us / others,
            walls,
        )
    loads = [one for one in (evidence.max_over_mean, evidence.facts.expert_load) if one is not None]
    if loads:  # rows that are padded to a bound look even in a trace
        yield Fact(what=f"rows of the fullest rank's experts: {max(loads):.2f} times the mean", wall="communication")
    if evidence.unmatched:
        yield Fact(what=f"collectives of which no waiting is told: {evidence.unmatched}", wall="communication")


def _host(evidence: Evidence, walls: Bottlenecks) -> Iterator[Fact]:
    yield _time("the device idle, mean of ranks", "host", evidence.mean("idle_us"), walls)
    behind = evidence.mean("sync_idle_us")
    if walls.share(behind) >= LEAST:
        yield _time("of it because the host had waited for the device", "host", behind, walls)
    if walls.share(walls.recording_us) >= LEAST:
        what = (
            "taken off: the traced steps take longer than those beside them, by the metrics; recording slows the host"
        )
        yield _time(what, "host", walls.recording_us, walls)
    launches = evidence.launches
    if launches is not None and launches.kernels:
        many = max(1, evidence.steps) * len(evidence.ranks)  # launches are counted over all of the recording
        small = launches.small_kernels / launches.kernels
        graphs = f", {launches.from_graphs / launches.kernels:.0%} from graphs" if launches.from_graphs else ""
        waits = f"; waits of the host: {launches.synchronizations / many:,.0f}"
        of = "a rank's step" if evidence.steps else "a rank"
        yield Fact(
            what=f"{of}: {launches.kernels / many:,.0f} kernels{graphs}, {small:.0%} under 10 us{waits}", wall="host"
        )


def _memory_times(evidence: Evidence, walls: Bottlenecks) -> Iterator[Fact]:
    if walls.share(evidence.mean("recompute_us")) >= LEAST:
        yield _time("computing what forward had computed", "memory", evidence.mean("recompute_us"), walls)
    if walls.share(evidence.mean("exposed_copies_us")) >= LEAST:
        yield _time("copies with nothing beside them", "memory", evidence.mean("exposed_copies_us"), walls)


def _memory_sizes(evidence: Evidence) -> Iterator[Fact]:
    facts = evidence.facts
    if facts.peak_bytes is not None:
        of = "" if facts.capacity_bytes is None else f", {facts.peak_bytes / facts.capacity_bytes:.0%} of the device"
        yield Fact(what=f"most memory handed out{of}", wall="memory", size=facts.peak_bytes)
    if facts.planned_bytes is not None:
        yield Fact(what="memory of the fullest rank, by the plan", wall="memory", size=facts.planned_bytes)
    for name, size in sorted(facts.planned_terms.items(), key=lambda item: -item[1])[:3]:
        yield Fact(what=f"of it {name}", wall="memory", size=size)
    for change, size in facts.lacking_bytes.items():
        if size > 0:
            yield Fact(what=f"{change} is not offered: the fullest rank lacks, by the plan", wall="memory", size=size)
    if facts.repeated_steps:
        yield Fact(
            what=f"{facts.repeated_steps} recorded steps were made twice (dispatch.row_capacity_factor is too small)",
            wall="memory",
        )


def _steps(evidence: Evidence) -> Iterator[Fact]:
    """The usual step of the metrics, beside that of the plan."""
    facts = evidence.facts
    if facts.step_seconds is None:
        return
    plan = ""
    if facts.planned_step_seconds is not None:
        ratio = facts.step_seconds / facts.planned_step_seconds
        plan = f"; the plan says {facts.planned_step_seconds * 1e3:,.1f} ms, so it takes {ratio:.2f} times as long"
    yield Fact(what=f"the usual step, by the metrics{plan}", wall="compute", time_us=facts.step_seconds * 1e6)
    for name, seconds in facts.phase_seconds.items():
        share = seconds / facts.step_seconds
        if share >= ALSO:
            yield Fact(what=f"of it {name}, first rank", wall="compute", time_us=seconds * 1e6, share=share)


def _time(what: str, wall: Wall, time_us: float, walls: Bottlenecks) -> Fact:
    return Fact(what=what, wall=wall, time_us=time_us, share=walls.share(time_us))
