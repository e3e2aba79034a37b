"""Measured or projected costs of a run, and how they divide into bottlenecks.

    communication   exposed communication, without the waiting for ranks that were late because of their host
    host            idle time of the device, and that waiting; without the cost of recording, data and stalls
    stall           the device runs nothing although work is queued: no call of the host explains it
    data            the device has nothing to compute while the host fetches rows, and computing for it
    memory          recomputation, and copies that no other work hides
    power           computing beyond what the highest clock would take, where the board's power holds the clock down
    compute         the rest

The largest of the first six is the bottleneck if it takes `STANDS` of the step; otherwise computing is. If the plan
says that the run does not fit its device, memory is the bottleneck. Costs are means over ranks: every rank's step takes
as long as the slowest rank's.

A profiler records every operator, so it slows the host. If the metrics hold steps near the traced ones, the time by
which the traced steps exceed the longest of them is subtracted from the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from penstock.config.run import Run
from penstock.trace.launches import DeviceStall, HostCalls
from penstock.trace.tables import OperatorRow

Bottleneck = Literal["memory", "communication", "host", "stall", "data", "power", "compute"]

Cause = Literal["host", "experts", "compute", "unknown"]
"""Why a rank is late: its device was idle, its experts had more rows, or it computes more slowly."""

STANDS = 0.2
"""Share of the step from which a loss is the bottleneck. The rules of a plan accept as much pipeline waiting without a
warning; below it, faster kernels help more than another layout."""

ALSO = 0.1  # share of the step from which a loss is reported beside the bottleneck

AT_LIMIT = 0.9
"""Share of the power limit from which power holds the clock down. An H200 with a limit of 700 W drew 664 W, the median
of 17 steps, while its clock was at 1,463 of 1,980 MHz (power-h200.json, 16 bits)."""

NO_TIMES: Mapping[str, float] = MappingProxyType({})
NO_BYTES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class RankCosts:
    """Microseconds per step of one rank, as means of the traced steps.

    `compute_us`, `exposed_communication_us`, `exposed_copies_us`, `data_us` and `idle_us` add up to `total_us`.
    """

    rank: int
    total_us: float  # from the start of the first device event to the end of the last
    compute_us: float  # compute kernels, recomputation included
    exposed_communication_us: float  # communication without concurrent computing
    exposed_copies_us: float  # copies without concurrent computing or communication
    idle_us: float  # the device runs nothing, besides `data_us`
    data_us: float = 0.0  # the device runs nothing while the host fetches rows, or computes only for it
    wait_us: float | None = None  # part of all communication that waits for later ranks; None: ranks not compared
    pure_us: float | None = None  # part of all communication that moves bytes; None: ranks not compared
    sync_idle_us: float = 0.0  # idle time caused by the host's waits for the device
    counts_idle_us: float | None = None  # its part at waits for the experts' row counts; None: no span shows these
    launched_idle_us: float = 0.0  # idle time before kernels that the host had launched already
    stalled_us: float = 0.0  # its part in stalls: 100 us or more in which launched work did not start
    host_call_us: float = 0.0  # `HostCalls.alone_us` of the rank's most expensive calls
    pointwise_us: float = 0.0  # elementwise kernels
    pointwise_kernels: float = 0.0  # their number
    fusable_us: float = 0.0  # time beyond the longest kernel of each run of elementwise kernels on a stream
    recompute_us: float = 0.0  # part of `compute_us` that repeats the forward pass
    # Computing without recomputation, by phase (all expert phases are `experts`); exposed communication by kind
    # (`all-to-all`, `all-reduce`, ...).
    computing_us: Mapping[str, float] = field(default_factory=lambda: NO_TIMES)
    communication_us: Mapping[str, float] = field(default_factory=lambda: NO_TIMES)

    def times(self, factor: float) -> "RankCosts":
        """The same costs with every time multiplied."""
        scaled: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Mapping):
                scaled[name] = {key: us * factor for key, us in value.items()}
            elif name != "rank" and value is not None:
                scaled[name] = value * factor
        return replace(self, **scaled)


@dataclass(frozen=True, kw_only=True)
class LateRank:
    """A rank for which other ranks waited."""

    rank: int
    times_last: int  # collectives that this rank joined last
    caused_wait_us: float  # sum of the other ranks' waiting for it, per step
    cause: Cause = "unknown"
    detail: str = ""  # the measurement that shows the cause, in words
    share: float = 1.0  # of `caused_wait_us` that disappears with the cause


@dataclass(frozen=True, kw_only=True)
class KernelLaunches:
    """Counts over all traced steps and ranks."""

    kernels: int
    small_kernels: int  # under 10 us
    from_graphs: int = 0  # launched by a CUDA or HIP graph
    synchronizations: int = 0  # waits of the host for the device inside of steps


@dataclass(frozen=True, kw_only=True)
class SingleStall:
    """An idle time that is more than twice as long as all idle time of the rank's median step."""

    rank: int
    step: int
    duration_us: float
    queued: int  # events that were launched and did not start; 0: the host had launched nothing
    call: str  # of the host meanwhile; empty if none


@dataclass(frozen=True, kw_only=True)
class PowerFacts:
    """Medians of the metrics."""

    watts: float
    limit_watts: float
    clock_mhz: float
    limit_mhz: float

    @property
    def is_limit(self) -> bool:
        """The power holds the clock down."""
        return self.watts >= AT_LIMIT * self.limit_watts and self.clock_mhz < self.limit_mhz

    @property
    def lost(self) -> float:
        """Share of computing that the highest clock would save, if it follows the clock; 0 without a limit of power."""
        return 1 - self.clock_mhz / self.limit_mhz if self.is_limit else 0.0


@dataclass(frozen=True, kw_only=True)
class LayerLoads:
    """Rows of a layer's fullest rank over the mean, as medians of the metrics."""

    layer: int
    step: float  # of the slots of a whole step, without replicas
    computed: float  # with replicas, of each pass, if the run has any; else `step`


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Configuration, metrics and plan of a run; None and empty where they are unknown."""

    run: Run | None = None
    device: str | None = None
    world: int | None = None
    peak_bytes: int | None = None  # the allocator's highest figure
    capacity_bytes: int | None = None  # device memory
    step_seconds: float | None = None  # median step by the metrics, recorded steps excluded
    beside_seconds: float | None = None  # the longest of the steps nearest to the recorded ones, by the metrics
    phase_seconds: Mapping[str, float] = field(default_factory=lambda: NO_TIMES)  # medians on the first rank's device
    repeated_steps: int = 0  # steps that ran twice because the rows exceeded their buffers
    expert_load: float | None = None  # rows of the fullest expert rank over the mean
    layer_loads: tuple[LayerLoads, ...] = ()  # of the layers with experts, if ranks share these
    power: PowerFacts | None = None
    planned_bytes: int | None = None  # need of the fullest rank by the plan, context and reserve included
    planned_terms: Mapping[str, int] = field(default_factory=lambda: NO_BYTES)
    # By change, on the fullest rank: memory that it frees, known only if the run does not fit; and memory that is
    # missing if the plan refuses the change, 0 for a change without effect.
    freed_bytes: Mapping[str, int] = field(default_factory=lambda: NO_BYTES)
    lacking_bytes: Mapping[str, int] = field(default_factory=lambda: NO_BYTES)
    planned_step_seconds: float | None = None
    saved_seconds: Mapping[str, float] = field(default_factory=lambda: NO_TIMES)  # by change, for one step's tokens
    has_steps: bool = True  # at least one step of the run completed


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All input of a diagnosis."""

    source: Literal["trace", "plan", "none"]  # of the times in `ranks`
    ranks: tuple[RankCosts, ...]
    steps: int = 0  # that times are means of; 0 if the trace marks none: times are sums over the whole recording
    late: tuple[LateRank, ...] = ()  # the most expensive first
    other_wait_us: float = 0.0  # waiting for ranks that are too cheap to be in `late`
    unmatched: int = 0  # collectives without a partner on another rank
    launches: KernelLaunches | None = None
    host_call: HostCalls | None = None  # the most expensive calls from one place, and their rank
    host_call_rank: int = 0
    single_stalls: tuple[SingleStall, ...] = ()  # the longest first; the times of `ranks` are without them
    stall: DeviceStall | None = None  # the longest time in which launched work did not start
    max_over_mean: float | None = None  # rows of the fullest expert rank over the mean, by the trace
    trains: bool = True
    facts: RunFacts = RunFacts()
    missing: tuple[str, ...] = ()  # unavailable inputs and how to get them, one line each
    notes: tuple[str, ...] = ()  # remarks for the reader, one line each
    operators: tuple[OperatorRow, ...] = ()  # of a CPU's first rank, the longest first, sums over the recording
    is_cpu: bool = False  # the traces are of a CPU, whose operators take the place of kernels

    @property
    def has_experts(self) -> bool:
        """By the configuration, or else by the trace."""
        run = self.facts.run
        return "experts" in self.computing if run is None else run.model.moe is not None

    def mean(self, name: str) -> float:
        """Mean over ranks of a field of `RankCosts`; None counts as 0."""
        return sum(vars(rank)[name] or 0.0 for rank in self.ranks) / max(1, len(self.ranks))

    def communication(self, kind: str) -> float:
        """Mean over ranks of the exposed communication of a kind."""
        return sum(rank.communication_us.get(kind, 0.0) for rank in self.ranks) / max(1, len(self.ranks))

    @property
    def computing(self) -> dict[str, float]:
        """Mean over ranks of the computing by phase, the longest first."""
        names = {name for rank in self.ranks for name in rank.computing_us}
        means = {name: sum(rank.computing_us.get(name, 0.0) for rank in self.ranks) / len(self.ranks) for name in names}
        return dict(sorted(means.items(), key=lambda item: (-item[1], item[0])))

    @property
    def caused_wait_us(self) -> float:
        """Sum of all ranks' waiting for other ranks."""
        return sum(rank.caused_wait_us for rank in self.late) + self.other_wait_us

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of communication, the most expensive first."""
        names = {name for rank in self.ranks for name in rank.communication_us}
        return tuple(sorted(names, key=lambda name: (-self.communication(name), name)))

    @property
    def fits(self) -> bool:
        """A run that completed a step fits; any other fits unless the plan says otherwise."""
        facts = self.facts
        if facts.has_steps or facts.planned_bytes is None or facts.capacity_bytes is None:
            return True
        return facts.planned_bytes <= facts.capacity_bytes


@dataclass(frozen=True, kw_only=True)
class Bottlenecks:
    """Mean microseconds of a rank; the seven bottlenecks and `recording_us` add up to `total_us`."""

    total_us: float
    communication_us: float  # exposed, without `late_host_us`
    host_us: float  # idle time without stalls, and `late_host_us`, without `recording_us`
    stall_us: float  # queued work did not start
    data_us: float  # fetching rows, with nothing else to compute
    memory_us: float  # recomputation and exposed copies
    compute_us: float
    power_us: float  # further computing that the highest clock would save; 0 if unknown
    waiting_us: float  # part of `communication_us` that waits for later ranks; 0 if unknown
    late_host_us: float  # waiting for ranks whose device was idle before they came
    recording_us: float  # time by which recording delays the host; 0 if unknown
    fits: bool  # see `Evidence.fits`

    @property
    def transfer_us(self) -> float:
        """Communication that is not known to be waiting."""
        return self.communication_us - self.waiting_us

    @property
    def usual_host(self) -> float:
        """Share of the host's cost that recording does not explain."""
        return self.host_us / (self.host_us + self.recording_us) if self.host_us else 0.0

    @property
    def losses(self) -> dict[Bottleneck, float]:
        """All but computing, the largest first."""
        losses: dict[Bottleneck, float] = {
            "communication": self.communication_us,
            "host": self.host_us,
            "stall": self.stall_us,
            "data": self.data_us,
            "memory": self.memory_us,
            "power": self.power_us,
        }
        return dict(sorted(losses.items(), key=lambda item: -item[1]))

    def share(self, time_us: float) -> float:
        return time_us / self.total_us if self.total_us else 0.0

    @property
    def largest(self) -> Bottleneck:
        if not self.fits:
            return "memory"
        name, time_us = next(iter(self.losses.items()))
        return name if self.share(time_us) >= STANDS else "compute"

    @property
    def others(self) -> tuple[Bottleneck, ...]:
        """Other losses from `ALSO` of the step on, the largest first."""
        return tuple(name for name, us in self.losses.items() if name != self.largest and self.share(us) >= ALSO)


def bottlenecks_of(evidence: Evidence) -> Bottlenecks:
    """Divide the step time among the seven bottlenecks."""
    exposed = evidence.mean("exposed_communication_us")
    waiting = min(evidence.mean("wait_us"), exposed)  # computing may hide a part of all waiting
    caused = evidence.caused_wait_us
    # Waiting is divided by its causes: the mean rank's share for late hosts moves from communication to the host.
    by_host = sum(rank.caused_wait_us for rank in evidence.late if rank.cause == "host")
    late_host = waiting * by_host / caused if caused else 0.0
    recompute = min(evidence.mean("recompute_us"), evidence.mean("compute_us"))
    host = evidence.mean("idle_us") - evidence.mean("stalled_us") + late_host
    recording = 0.0
    beside = evidence.facts.beside_seconds
    if evidence.source == "trace" and evidence.steps and beside is not None:
        recording = min(host, max(0.0, evidence.mean("total_us") - beside * 1e6))
    computing, power = evidence.mean("compute_us") - recompute, evidence.facts.power
    lost = 0.0 if power is None else power.lost * computing
    return Bottlenecks(
        total_us=evidence.mean("total_us"),
        communication_us=exposed - late_host,
        host_us=host - recording,
        stall_us=evidence.mean("stalled_us"),
        data_us=evidence.mean("data_us"),
        memory_us=recompute + evidence.mean("exposed_copies_us"),
        compute_us=computing - lost,
        power_us=lost,
        waiting_us=waiting - late_host,
        late_host_us=late_host,
        recording_us=recording,
        fits=evidence.fits,
    )
