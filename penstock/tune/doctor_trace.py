"""Evidence from traces: costs of each rank, and what could not be told. Who was late, and why, tells `doctor_late`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from penstock.base.errors import ConfigError
from penstock.config.merge import settle
from penstock.config.run import Run
from penstock.config.schema import fields_of
from penstock.config.validation import build
from penstock.trace.answer import Answer, RankAnswer
from penstock.trace.calls import Calls
from penstock.trace.events import Flags, GpuKind, HostKind, Trace
from penstock.trace.host_table import host_table
from penstock.trace.kinds import OWN, library_of
from penstock.trace.launches import idle_behind_waits
from penstock.trace.phases import EXPERTS as EXPERT_SPANS
from penstock.trace.phases import PASSES
from penstock.tune.doctor_evidence import Evidence, Facts, Launches, RankCosts
from penstock.tune.doctor_late import AROUND_EXPERTS, EXPERTS, late_ranks

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
    if answer.is_host:
        told = replace(facts, world=facts.world or len(answer.loaded))
        return Evidence(source="none", ranks=(), facts=told, missing=tuple(missing), host=host_table(answer.ranks[0]))
    collectives = answer.collectives
    totals = collectives.totals_us() if len(answer.loaded) > 1 and len(collectives.meetings) else {}
    per_step = answer.per_step
    ranks = tuple(_costs(one, collectives.calls, totals).times(per_step) for one in answer.ranks)
    late = tuple(replace(one, caused_wait_us=one.caused_wait_us * per_step) for one in late_ranks(answer))
    caused_us = sum(one.caused_wait_us for one in collectives.stragglers()) * per_step
    return Evidence(
        source="trace",
        ranks=ranks,
        steps=answer.steps,
        late=late,
        other_wait_us=caused_us - sum(one.caused_wait_us for one in late),
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
    timeline = one.timelines["all"]
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
        sync_idle_us=idle_behind_waits(one.trace),
        counts_idle_us=idle_behind_waits(one.trace, EXPERT_SPANS) if _says_where(one.trace) else None,
        launched_idle_us=one.launches.gaps.devices_us,
        recompute_us=sum(row.exposed_us for row in one.phases.rows(by_layer=False) if row.pass_ == "recompute"),
        computing_us=_computing(one),
        communication_us=_by_kind(one, calls),
    )


def _says_where(trace: Trace) -> bool:
    """Whether spans stand around what is done with experts."""
    is_named = np.array([name in EXPERT_SPANS for name in trace.names], dtype=bool)
    return bool((is_named[trace.host.name_id] & (trace.host.kind == HostKind.SPAN)).any())


def _launches(ranks: Sequence[RankAnswer]) -> Launches:
    """Of all ranks together."""
    return Launches(
        kernels=sum(one.launches.kernel_count for one in ranks),
        small_kernels=sum(one.launches.short_count for one in ranks),
        from_graphs=sum(int(_is_replayed(one).sum()) for one in ranks),
        synchronizations=sum(_waited(one) for one in ranks),
    )


def _waited(one: RankAnswer) -> int:
    """How often the host waited: a copy and the call behind it that waits for it are one; a recorder's own are none."""
    times: dict[tuple[str, ...], int] = {}
    for wait in one.launches.waits:
        if wait.where or OWN not in one.trace.header:
            times[wait.where] = max(times.get(wait.where, 0), wait.count)
    return sum(times.values())


def _is_replayed(one: RankAnswer) -> Flags:
    """Kernels that a graph launched."""
    return one.phases.placement.is_replayed & one.trace.gpu.is_kernel


def _computing(one: RankAnswer) -> dict[str, float]:
    """What is computed, and not for the second time, by phase."""
    phases = one.phases
    computes = np.isin(one.trace.gpu.kind[phases.event], [GpuKind.COMPUTE, GpuKind.SET])
    computes &= phases.pass_id != PASSES.index("recompute")
    times = np.bincount(phases.name_id[computes], phases.exposed_us[computes], len(phases.names))
    found: dict[str, float] = {}
    for name, us in zip(phases.names, times.tolist(), strict=True):
        key = "experts" if name in AROUND_EXPERTS and EXPERTS & set(phases.names) else name
        found[key] = found.get(key, 0.0) + us
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
            f"collectives that match none of another rank: {len(unmatched)} ({unmatched[0].why}); "
            "no waiting is told of them"
        )
    if not any(one.steps for one in answer.ranks):
        told.append("no step is marked: figures are of all that was recorded")
    unlinked = sum(int((~one.trace.gpu.is_linked).sum()) for one in answer.ranks)
    if unlinked:
        told.append(f"{unlinked} events of the device were launched before the recording began; they are counted")
    return told
