"""Which wall stands: the loss that takes most of a step, by one rule for every run.

    communication   exposed communication, but for what is waited for a rank whose host was late
    host            the device is idle, and that waiting; without what the recording itself costs
    memory          what is paid for room: computing again what forward had computed, copies that nothing hides
    compute         the rest

The first three are losses. The largest is the wall if it takes `STANDS` of the step; if none does, the device computes
most of the time, and computing is the wall. A run that does not fit its device at all stands before memory, whatever
its times would be. Costs are means over ranks: all steps are as long as that of the slowest rank, and what a rank does
not compute or send it waits.

A profiler writes down every operator, so it slows the host. Where the metrics know the steps beside the traced ones,
what these take longer than the longest of them is taken off the host's and is no wall: neither a profiler nor a stall
that other steps do not have is what a step usually waits for.
"""

from dataclasses import dataclass
from typing import Literal

from penstock.tune.doctor_evidence import Evidence

Wall = Literal["memory", "communication", "host", "compute"]

STANDS = 0.2
"""Share of the step from which a loss is the wall. The rules of a plan let a pipeline wait as much without a word, and
below it a step is computing that is faster by the kernel and not by the layout."""

ALSO = 0.1
"""Share from which a loss is told beside the wall: without the wall it would be an eighth of the step or more."""


@dataclass(frozen=True, kw_only=True)
class Bottlenecks:
    """Where the time went, in microseconds; the four walls and `recording_us` add up to `total_us`.

    Attributes:
        total_us: of a rank, as a mean over ranks; so are all others.
        communication_us: exposed, without `late_host_us`.
        host_us: idle, and `late_host_us`, without `recording_us`.
        memory_us: computed again, and exposed copies.
        compute_us: all other computing.
        waiting_us: part of `communication_us` that waits for ranks that come later; 0 if nobody knows.
        late_host_us: waiting for ranks whose device was idle when it should have come.
        recording_us: that the host is later than in the steps beside; 0 if nobody knows.
        fits: as far as anybody knows.
    """

    total_us: float
    communication_us: float
    host_us: float
    memory_us: float
    compute_us: float
    waiting_us: float
    late_host_us: float
    recording_us: float
    fits: bool

    @property
    def transfer_us(self) -> float:
        """Of the communication, what is not known to be waiting."""
        return self.communication_us - self.waiting_us

    @property
    def usual_host(self) -> float:
        """Share of what the host costs that is not the recording's."""
        return self.host_us / (self.host_us + self.recording_us) if self.host_us else 0.0

    @property
    def losses(self) -> dict[Wall, float]:
        """The largest first."""
        found: dict[Wall, float] = {
            "communication": self.communication_us,
            "host": self.host_us,
            "memory": self.memory_us,
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def share(self, time_us: float) -> float:
        """Of the step."""
        return time_us / self.total_us if self.total_us else 0.0

    @property
    def wall(self) -> Wall:
        """The one that stands."""
        if not self.fits:
            return "memory"
        largest, time_us = next(iter(self.losses.items()))
        return largest if self.share(time_us) >= STANDS else "compute"

    @property
    def then(self) -> tuple[Wall, ...]:
        """What else stands, the largest first."""
        return tuple(name for name, time_us in self.losses.items() if name != self.wall and self.share(time_us) >= ALSO)


def walls_of(evidence: Evidence) -> Bottlenecks:
    """Divide the time of a step among the four."""
    exposed = evidence.mean("exposed_communication_us")
    waiting = min(evidence.mean("wait_us"), exposed)
    caused = evidence.caused_wait_us
    by_host = sum(one.caused_wait_us for one in evidence.late if one.cause == "host")
    late_host = waiting * by_host / caused if caused else 0.0
    recompute = min(evidence.mean("recompute_us"), evidence.mean("compute_us"))
    host = evidence.mean("idle_us") + late_host
    recording = min(host, _longer_than_beside(evidence))
    return Bottlenecks(
        total_us=evidence.mean("total_us"),
        communication_us=exposed - late_host,
        host_us=host - recording,
        memory_us=recompute + evidence.mean("exposed_copies_us"),
        compute_us=evidence.mean("compute_us") - recompute,
        waiting_us=waiting - late_host,
        late_host_us=late_host,
        recording_us=recording,
        fits=_fits(evidence),
    )


def _longer_than_beside(evidence: Evidence) -> float:
    """What a traced step took longer than steps beside it, in microseconds."""
    beside = evidence.facts.beside_seconds
    if evidence.source != "trace" or not evidence.steps or beside is None:
        return 0.0
    return max(0.0, evidence.mean("total_us") - beside * 1e6)


def _fits(evidence: Evidence) -> bool:
    """A run that has made a step fits, whatever a plan says of it."""
    facts = evidence.facts
    if facts.has_steps or facts.planned_bytes is None or facts.capacity_bytes is None:
        return True
    return facts.planned_bytes <= facts.capacity_bytes
