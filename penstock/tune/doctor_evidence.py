"""What the doctor looks at: where the time of a step went, as plain numbers, whoever measured or projected them.

    RankCosts   one rank: computed, communicated, copied, waited, idle; in microseconds per step
    Late        a rank for which others waited, and why it was late
    Facts       what is known of the configuration, the memory and the metrics of the run
    Evidence    all of it, with what is missing

Nothing here judges (penstock/tune/doctor.py does) and nothing here reads a file (doctor_trace.py and doctor_run.py do),
so a test writes evidence by hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from penstock.config.run import Run
from penstock.trace.host_table import HostTable

Cause = Literal["host", "experts", "compute", "unknown"]
"""Why a rank is late: its device had nothing to do, its experts had more rows, or it computes more slowly."""

NO_TIMES: Mapping[str, float] = MappingProxyType({})
NO_BYTES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class RankCosts:
    """Of one rank, microseconds per step, the mean of traced steps; the first four and `idle_us` make up `total_us`.

    Attributes:
        rank: which one.
        total_us: from the first event of the device to the end of the last.
        compute_us: kernels that compute.
        exposed_communication_us: communication with nothing computed beside it.
        exposed_copies_us: copies with neither beside them.
        idle_us: nothing runs.
        wait_us: part of the communication that waits for ranks that come later; None if nobody compared ranks.
        pure_us: the rest of it, which moves bytes; None if nobody compared ranks.
        sync_idle_us: part of the idle time that would not be there had the host not waited for the device.
        counts_idle_us: the same of waits around experts only, where the host reads how many rows come; None if no span
            says where it waited.
        launched_idle_us: part of the idle time in which the host had launched what came next.
        recompute_us: part of the computing that forward had done before.
        computing_us: computing that is no recomputing, by phase; all around experts is `experts`.
        communication_us: exposed communication by what it is (`all-to-all`, `all-reduce`, ...).
    """

    rank: int
    total_us: float
    compute_us: float
    exposed_communication_us: float
    exposed_copies_us: float
    idle_us: float
    wait_us: float | None = None
    pure_us: float | None = None
    sync_idle_us: float = 0.0
    counts_idle_us: float | None = None
    launched_idle_us: float = 0.0
    recompute_us: float = 0.0
    computing_us: Mapping[str, float] = field(default_factory=lambda: NO_TIMES)
    communication_us: Mapping[str, float] = field(default_factory=lambda: NO_TIMES)

    def times(self, factor: float) -> "RankCosts":
        """The same with every time multiplied."""
        scaled: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Mapping):
                scaled[name] = {key: us * factor for key, us in value.items()}
            elif name != "rank" and value is not None:
                scaled[name] = value * factor
        return replace(self, **scaled)


@dataclass(frozen=True, kw_only=True)
class Late:
    """A rank for which others waited.

    Attributes:
        rank: which one.
        times_last: collectives to which it came last.
        caused_wait_us: what all other ranks together waited for it, per step.
        cause: why it was late.
        detail: the number that says so, in words.
        share: of what others waited, that goes away with the cause.
    """

    rank: int
    times_last: int
    caused_wait_us: float
    cause: Cause = "unknown"
    detail: str = ""
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Launches:
    """How the host fed the device.

    Attributes:
        kernels: that ran.
        small_kernels: of them, under 10 us.
        from_graphs: kernels that a graph launched.
        synchronizations: times that the host waited for the device inside of steps.
    """

    kernels: int
    small_kernels: int
    from_graphs: int = 0
    synchronizations: int = 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the run besides times.

    Attributes:
        run: its configuration, if there is a run folder.
        device: name of the device.
        world: ranks.
        peak_bytes: most that the allocator has handed out.
        capacity_bytes: of the device.
        step_seconds: of the usual step, as the metrics say; not of one that was recorded.
        beside_seconds: of the longest of the steps beside the recorded ones, as the metrics say; None if none is known.
        phase_seconds: of the usual step, as the metrics say, by phase on the first rank's device.
        repeated_steps: recorded steps that were made twice because rows found no room.
        expert_load: rows of the fullest expert rank over the mean.
        planned_bytes: that the plan says the fullest rank needs, context and reserve included.
        planned_terms: of these, by component.
        freed_bytes: by change, what the plan says it frees on the fullest rank; only where the run does not fit.
        lacking_bytes: by change that the plan refuses, what the fullest rank would lack; 0 if it would change nothing.
        planned_step_seconds: that the plan says a step takes.
        saved_seconds: by change, what the plan says the changed run takes less for the tokens of a step.
        has_steps: the run made at least one step.
    """

    run: Run | None = None
    device: str | None = None
    world: int | None = None
    peak_bytes: int | None = None
    capacity_bytes: int | None = None
    step_seconds: float | None = None
    beside_seconds: float | None = None
    phase_seconds: Mapping[str, float] = field(default_factory=lambda: NO_TIMES)
    repeated_steps: int = 0
    expert_load: float | None = None
    planned_bytes: int | None = None
    planned_terms: Mapping[str, int] = field(default_factory=lambda: NO_BYTES)
    freed_bytes: Mapping[str, int] = field(default_factory=lambda: NO_BYTES)
    lacking_bytes: Mapping[str, int] = field(default_factory=lambda: NO_BYTES)
    planned_step_seconds: float | None = None
    saved_seconds: Mapping[str, float] = field(default_factory=lambda: NO_TIMES)
    has_steps: bool = True


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known.

    Attributes:
        source: where the times come from: `trace`, `plan`, or `none`.
        ranks: their costs, by rank.
        steps: that the times are the mean of; 0 if none is marked, and then times are of the whole recording.
        late: ranks for which others waited, the one that cost most first.
        other_wait_us: what ranks waited for others that are not worth a name.
        unmatched: collectives of which nobody knows for whom they waited.
        launches: of the device, if the times are a trace's.
        max_over_mean: rows of the fullest expert rank over the mean, as the trace says.
        trains: gradients are computed.
        facts: of the run.
        missing: what could not be looked at, and what would mend that; a line each.
        notes: what must be known to read the rest, a line each.
        host: what a CPU did, if the traces are of one; there are no costs then, unless a plan gives them.
    """

    source: Literal["trace", "plan", "none"]
    ranks: tuple[RankCosts, ...]
    steps: int = 0
    late: tuple[Late, ...] = ()
    other_wait_us: float = 0.0
    unmatched: int = 0
    launches: Launches | None = None
    max_over_mean: float | None = None
    trains: bool = True
    facts: Facts = Facts()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    host: HostTable | None = None

    @property
    def has_experts(self) -> bool:
        """Products of experts are computed, as the configuration says, or else the trace."""
        run = self.facts.run
        return "experts" in self.computing if run is None else run.model.moe is not None

    @property
    def waits_are_known(self) -> bool:
        """Several ranks were compared."""
        return any(one.wait_us is not None for one in self.ranks)

    def mean(self, name: str) -> float:
        """The mean over ranks of a cost; what nobody knows counts as nothing."""
        values = [vars(one)[name] or 0.0 for one in self.ranks]
        return sum(values) / len(values) if values else 0.0

    def communication(self, kind: str) -> float:
        """The mean over ranks of the exposed communication of a kind."""
        values = [one.communication_us.get(kind, 0.0) for one in self.ranks]
        return sum(values) / len(values) if values else 0.0

    @property
    def computing(self) -> dict[str, float]:
        """The mean over ranks of computing by phase, the longest first."""
        names = {name for one in self.ranks for name in one.computing_us}
        found = {name: sum(one.computing_us.get(name, 0.0) for one in self.ranks) / len(self.ranks) for name in names}
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    @property
    def caused_wait_us(self) -> float:
        """What all ranks waited for each other."""
        return sum(one.caused_wait_us for one in self.late) + self.other_wait_us

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of communication, the most expensive first."""
        names = {name for one in self.ranks for name in one.communication_us}
        return tuple(sorted(names, key=lambda name: (-self.communication(name), name)))
