"""How far projections were off, against runs that were measured: here, and by others.

A search leaves room for the error of the memory, so that a layout that it calls the best does not overflow.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.plan.hardware import Cluster


@dataclass(frozen=True, kw_only=True)
class KnownError:
    """Error of projections against measured runs, as shares of the measurement: median and largest.

    `memory` is that of the fullest rank's allocator, `step` the time of a step.
    """

    runs: str
    memory: tuple[float, float]
    step: tuple[float, float]

    def __str__(self) -> str:
        sizes = (f"{median:.1%} (median) to {largest:.1%}" for median, largest in (self.memory, self.step))
        return f"error against {self.runs}: memory {next(sizes)}, step {next(sizes)}"


KNOWN_ERROR = KnownError(runs="45 runs on H200", memory=(0.001, 0.039), step=(0.025, 0.086))
"""From benchmarks/results/projection-h200.json, as docs/plan.md quotes it; one node."""

UNMEASURED_MARGIN = 0.05
"""Share of the memory that a search leaves free where no projection was compared with a measurement: more than the
largest error that was measured."""

PUBLISHED_ERRORS: Mapping[tuple[str, bool], tuple[int, float, float]] = {
    ("sm_90", False): (7, 0.044, 0.200),
    ("sm_90", True): (22, 0.074, 0.410),
    ("sm_100", False): (7, 0.111, 0.296),
    ("sm_100", True): (14, 0.097, 0.277),
    ("sm_103", False): (6, 0.061, 0.164),
    ("sm_103", True): (12, 0.074, 0.575),
    ("gfx950", False): (4, 0.082, 0.146),
    ("gfx950", True): (4, 0.012, 0.015),
}
"""Runs of others, median and largest error of their speed, by kernels of the chip and whether they span nodes: from
benchmarks/results/plan-published.json."""


def is_measured(cluster: Cluster) -> bool:
    """Whether projections were compared with runs on such a cluster: this chip, one node."""
    return (cluster.hardware.name, cluster.nodes) == ("H200", 1)


def memory_margin(cluster: Cluster) -> float:
    """Share of a device's memory that a projection may be off by at most."""
    return KNOWN_ERROR.memory[1] if is_measured(cluster) else UNMEASURED_MARGIN


def error_text(cluster: Cluster) -> str:
    """The error of projections that are comparable: of this chip, on one node or on many."""
    chip, spans = cluster.hardware, cluster.nodes > 1
    if is_measured(cluster):
        return f"{KNOWN_ERROR} (docs/projection.md)"
    text = f"not measured here: {chip.name} {'over nodes' if spans else 'in one node'}"
    if (chip.kernels, spans) not in PUBLISHED_ERRORS:
        return f"{text}, nor compared with a run of others (docs/plan-published.md)"
    runs, middle, largest = PUBLISHED_ERRORS[chip.kernels, spans]
    error = f"{middle:.1%} (median) to {largest:.1%}"
    return (
        f"{text}; error against {runs} published runs of such chips by others: speed {error} (docs/plan-published.md)"
    )
