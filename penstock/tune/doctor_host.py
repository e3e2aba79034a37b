"""Remedies of the host wall: fewer launches, no waits, nobody's host late."""

from penstock.tune.doctor_evidence import Evidence
from penstock.tune.doctor_remedy import DOUBLED, Remedy, first_accepted, named
from penstock.tune.doctor_walls import Bottlenecks

LAUNCHES_OF_PASSES = 0.81
"""Launches that captured passes spare: 2,541 became 477 (graphs-h200.json), the least of three cases; 0.92 the most."""

LAUNCHES_OF_PARTS = 0.55
"""The same of captured parts of layers: 4,021 became 1,805 (graphs-parts-h200.json)."""

WAITS_OF_STAGE_2 = 6 / 7
"""Waits of the host that sync-free stage 2 spares: 7 of a step became 1 (host-waits-h200x2.json)."""

_PASSES = (
    'graphs.capture="full"',
    'graphs.capture="full" dispatch.sync_free=2',
    'graphs.capture="full" dispatch.sync_free=2 dispatch.method="auto"',
)
_PARTS = 'graphs.capture="partial"'


def graphs(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """Kernels of a pass are launched in one call."""
    run, launches = evidence.facts.run, evidence.launches
    if launches is not None and launches.from_graphs > DOUBLED * launches.kernels:
        return None
    change = first_accepted(evidence, *_PASSES, _PARTS, words="graphs of whole passes")
    if change is None or (run is not None and run.graphs.capture != "none"):
        return None
    gain = LAUNCHES_OF_PARTS * _late_launches(evidence, walls)
    if change != _PARTS:  # what is one launch waits for nothing
        gain = LAUNCHES_OF_PASSES * _late_launches(evidence, walls) + _behind_counts(evidence, walls)
    return Remedy(
        change=change,
        what="launch the kernels of a pass in one call (CUDA or HIP graphs), if memory allows; a compiler that fuses "
        "them spares a part",
        gain_us=gain,
        rule="launches-in-one-call",
        source="G1 (Megatron Bridge, CUDA graphs); docs/graphs.md",
    )


def larger_passes(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """A pass has more rows, so a step has fewer launches."""
    facts = evidence.facts
    if facts.peak_bytes is not None and facts.capacity_bytes and facts.peak_bytes > DOUBLED * facts.capacity_bytes:
        return None
    if facts.run is None and not evidence.trains:  # a server does not choose how many ask
        return None
    changes = () if facts.run is None else (f"training.micro_batch={2 * facts.run.training.micro_batch}",)
    change = first_accepted(evidence, *changes, words="twice the rows in a pass")
    if change is None:
        return None
    return Remedy(
        change=change,
        what="twice the rows in a pass: half as many launches for the same tokens, if memory allows",
        gain_us=DOUBLED * _late_launches(evidence, walls),
        rule="larger-passes",
        source="launches of a pass do not depend on rows",
    )


def sync_free(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """The host does not wait for the device."""
    run = evidence.facts.run
    if not evidence.has_experts or (run is not None and run.dispatch.sync_free >= 2):
        return None
    changes = ("dispatch.sync_free=2", 'dispatch.sync_free=2 dispatch.method="auto"')
    change = first_accepted(evidence, *changes, words="buffers of the experts with a bound")
    if change is None:
        return None
    return Remedy(
        change=change,
        what="bound the buffers of the experts, so that the host need not read how many rows come",
        gain_us=_behind_counts(evidence, walls),
        rule="host-never-waits",
        source="the trace, idle time behind waits; docs/dispatch.md, Sync-free stages; host-waits-h200x2.json",
    )


def late_host(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """The host of a rank is late, and all others wait."""
    late = [one for one in evidence.late if one.cause == "host"]
    if not late:
        return None
    change = None
    if evidence.facts.run is not None:
        change = first_accepted(evidence, "host.numa=true", "training.collect_garbage_every=50")
    return Remedy(
        change=change or f"mend the host of {named(late)}",
        what=f"find out what the host of {named(late)} does meanwhile ({late[0].detail}): other processes, data, "
        "garbage, cores far from the device",
        gain_us=walls.usual_host * walls.late_host_us,
        rule="no-host-is-late",
        source="waiting that these ranks caused",
    )


def _late_launches(evidence: Evidence, walls: Bottlenecks) -> float:
    """Idle time before work that the host had not launched yet, without what its waits for the device explain."""
    other = evidence.mean("sync_idle_us") + evidence.mean("launched_idle_us")
    return walls.usual_host * max(0.0, evidence.mean("idle_us") - other)


def _behind_counts(evidence: Evidence, walls: Bottlenecks) -> float:
    """Idle time behind waits for the counts of rows, and what others wait for late hosts by it.

    Where no span says which waits these are, the share that was measured of all waits.
    """
    behind = {
        one.rank: WAITS_OF_STAGE_2 * one.sync_idle_us if one.counts_idle_us is None else one.counts_idle_us
        for one in evidence.ranks
    }
    idle = {one.rank: one.idle_us for one in evidence.ranks}
    late = [one for one in evidence.late if one.cause == "host" and idle.get(one.rank)]
    caused = sum(one.caused_wait_us for one in late)
    explained = sum(one.caused_wait_us * min(1.0, behind[one.rank] / idle[one.rank]) for one in late)
    waited = walls.late_host_us * explained / caused if caused else 0.0
    return walls.usual_host * (sum(behind.values()) / max(1, len(behind)) + waited)
