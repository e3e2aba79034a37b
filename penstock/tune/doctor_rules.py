"""What can be done about a wall: all rules, and the remedies that they offer, by what they win.

A rule looks at the evidence and the walls and offers a remedy or nothing. Its gain is what stands there times the share
of it that the same change was measured, or computed, to take away, and never more than what stands there. Gains do not
add up: two changes may take away the same time.

A change is an override of the run, as `penstock train` takes it. Where the run is known, a change that its config would
refuse, or that changes nothing, is not offered; neither is one that the plan refuses, where there is a plan
(`penstock.tune.doctor_changes`). Where times are those of the plan, no gain is more than it says. Where the run is not
known, a change is said in words, and `what` says it in words always, for whoever trains with something else. Rules that
a plan has too keep their names and sources (`penstock.plan.rules`).
"""

from dataclasses import replace

from penstock.tune import doctor_communication as communication
from penstock.tune import doctor_compute as compute
from penstock.tune import doctor_host as host
from penstock.tune import doctor_memory as memory
from penstock.tune.doctor_evidence import Evidence
from penstock.tune.doctor_remedy import Offer, Remedy
from penstock.tune.doctor_walls import Bottlenecks

WORTH_SAYING = 0.005
"""Share of the step below which a gain is lost in the noise from step to step."""

RULES: tuple[Offer, ...] = (
    communication.symmetric,
    communication.overlap,
    communication.even_experts,
    communication.late_rank,
    communication.gathers,
    communication.fewer_sums,
    communication.sums_in_two_bytes,
    communication.more_stages,
    host.graphs,
    host.larger_passes,
    host.sync_free,
    host.late_host,
    memory.recompute_less,
    memory.optimizer_on_device,
    memory.kernels,
    compute.float8,
)
"""In the order in which equal gains are told."""


def remedies(evidence: Evidence, walls: Bottlenecks) -> tuple[Remedy, ...]:
    """What is worth trying, the largest gain first; for a run that does not fit, what makes it smaller.

    Args:
        evidence: all that is known.
        walls: where the time went.
    """
    refused = evidence.facts.lacking_bytes
    found = [one for rule in RULES if (one := rule(evidence, walls)) is not None]
    offered = [_as_planned(one, evidence) for one in found if one.change not in refused]
    worth = [one for one in offered if walls.share(one.gain_us) >= WORTH_SAYING]
    fitting = [] if walls.fits else memory.make_it_fit(evidence)
    return (*fitting, *sorted(worth, key=lambda one: -one.gain_us))


def _as_planned(offered: Remedy, evidence: Evidence) -> Remedy:
    """With no larger gain than the plan's, where times are those of the plan; a trace knows better."""
    saved = evidence.facts.saved_seconds.get(offered.change)
    if evidence.source != "plan" or saved is None:
        return offered
    return replace(offered, gain_us=min(offered.gain_us, saved * 1e6))
