"""Which wall stands: the loss that takes most of a step, by one rule for every run.

    communication   exposed communication, but for what is waited for a rank whose host was late
    host            the device is idle, and that waiting
    memory          what is paid for room: computing again what forward had computed, copies that nothing hides
    compute         the rest

The first three are losses. The largest is the wall if it takes `STANDS` of the step; if none does, the device computes
most of the time, and computing is the wall. A run that does not fit its device at all stands before memory, whatever
its times would be. Costs are means over ranks: all steps are as long as that of the slowest rank, and what a rank does
not compute or send it waits.
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
class Walls:
    """Where the time went, in microseconds; the four walls add up to `total_us`.

    Attributes:
        total_us: of a rank, as a mean over ranks; so are all others.
        communication_us: exposed, without `late_host_us`.
        host_us: idle, and `late_host_us`.
        memory_us: computed again, and exposed copies.
        compute_us: all other computing.
        waiting_us: part of `communication_us` that waits for ranks that come later; 0 if nobody knows.
        late_host_us: waiting for ranks whose device was idle when it should have come.
        fits: as far as anybody knows.
    """

    total_us: float
    communication_us: float
    host_us: float
    memory_us: float
    compute_us: float
    waiting_us: float
    late_host_us: float
    fits: bool

    @property
    def transfer_us(self) -> float:
        """Of the communication, what is not known to be waiting."""
        return self.communication_us - self.waiting_us

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


def walls_of(evidence: Evidence) -> Walls:
    """Divide the time of a step among the four."""
    exposed = evidence.mean("exposed_communication_us")
    waiting = min(evidence.mean("wait_us"), exposed)
    caused = evidence.caused_wait_us
    by_host = sum(one.caused_wait_us for one in evidence.late if one.cause == "host")
    late_host = waiting * by_host / caused if caused else 0.0
    recompute = min(evidence.mean("recompute_us"), evidence.mean("compute_us"))
    return Walls(
        total_us=evidence.mean("total_us"),
        communication_us=exposed - late_host,
        host_us=evidence.mean("idle_us") + late_host,
        memory_us=recompute + evidence.mean("exposed_copies_us"),
        compute_us=evidence.mean("compute_us") - recompute,
        waiting_us=waiting - late_host,
        late_host_us=late_host,
        fits=_fits(evidence),
    )


def _fits(evidence: Evidence) -> bool:
    """A run that has made a step fits, whatever a plan says of it."""
    facts = evidence.facts
    if facts.has_steps or facts.planned_bytes is None or facts.capacity_bytes is None:
        return True
    return facts.planned_bytes <= facts.capacity_bytes
