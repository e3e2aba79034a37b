"""How far projections were off, against runs that were measured: here, and by others.

A search leaves room for the error of the memory, so that a layout that it calls the best does not overflow. A plan's
speed is a range: that of 80 % of the runs that are most like it. known_errors.json has the runs; `make docs` writes it
from benchmarks/results/projection-h200.json and plan-published.json.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from penstock.config.run import Run
from penstock.plan.hardware import Cluster

COVERED = 0.8  # share of runs that a range of speeds covers, if they are like those that it was made from

UNMEASURED_MARGIN = 0.05
"""Share of the memory that a search leaves free where no projection was compared with a measurement: more than the
largest error that was measured."""

MEASURED_CHIP = "H200"


@dataclass(frozen=True, kw_only=True)
class RunKind:
    """What the error of a projection depends on."""

    kernels: str  # of the chip
    is_8_bit: bool
    spans_nodes: bool
    is_dense: bool

    @property
    def vendor(self) -> str:
        return "AMD" if self.kernels.startswith("gfx") else "NVIDIA"


@dataclass(frozen=True, kw_only=True)
class KnownErrors:
    """Runs beside their projections."""

    speeds: tuple[float, ...]  # measured over projected, of runs that were measured here, on one node
    memories: tuple[float, ...]  # projected over measured, of the same runs
    published: tuple[tuple[RunKind, float], ...]  # published over projected speeds of others' runs


@dataclass(frozen=True, kw_only=True)
class SpeedRange:
    """Speeds of `COVERED` of the runs that are most like a projection, over their projected ones."""

    low: float
    high: float
    runs: str
    is_comparable: bool = True

    def text(self, speed: float, unit: str) -> str:
        """Around a projected speed."""
        lead = "" if self.is_comparable else "nothing comparable was measured; "
        return f"{lead}{speed * self.low:,.0f} to {speed * self.high:,.0f} {unit}, as {COVERED:.0%} of {self.runs}"


@cache
def known_errors() -> KnownErrors:
    """The runs of the package's file."""
    recorded = json.loads(Path(__file__).with_name("known_errors.json").read_text(encoding="utf-8"))
    return KnownErrors(
        speeds=tuple(recorded["measured"]["speeds"]),
        memories=tuple(recorded["measured"]["memories"]),
        published=tuple((RunKind(**row["kind"]), row["speed"]) for row in recorded["published"]),
    )


def is_measured(cluster: Cluster) -> bool:
    """Whether projections were compared with runs on such a cluster: this chip, one node."""
    return (cluster.hardware.name, cluster.nodes) == (MEASURED_CHIP, 1)


def memory_margin(cluster: Cluster) -> float:
    """Share of a device's memory that a projection may be off by at most."""
    return max(_sizes(known_errors().memories)) if is_measured(cluster) else UNMEASURED_MARGIN


def kind_of(run: Run, cluster: Cluster) -> RunKind:
    """What the error of the run's projection depends on."""
    return RunKind(
        kernels=cluster.hardware.kernels,
        is_8_bit=run.float8.dense != "none" or run.float8.experts != "none",
        spans_nodes=cluster.nodes > 1,
        is_dense=run.model.moe is None,
    )


def speed_range(run: Run, cluster: Cluster) -> SpeedRange | None:
    """The range of a projection's speed; None for CPUs.

    The runs are those of the closest kind of which there are enough: of n runs, the lowest k and the highest k left
    out, a further one is inside with a probability of (n - 1 - 2 k) / (n + 1), if they are exchangeable.
    """
    if cluster.hardware.vendor == "cpu":
        return None
    if is_measured(cluster):
        speeds = known_errors().speeds
        return _range(speeds, f"the {len(speeds)} runs that were measured on {MEASURED_CHIP}")
    return published_range(kind_of(run, cluster), known_errors().published)


def published_range(kind: RunKind, published: Sequence[tuple[RunKind, float]]) -> SpeedRange:
    """The range of a kind of runs, from others' runs."""
    extent = "over nodes" if kind.spans_nodes else "in one node"
    model = "dense models" if kind.is_dense else "MoE models"
    width = f"{8 if kind.is_8_bit else 16} bits"
    levels = [
        (("kernels", "spans_nodes", "is_dense", "is_8_bit"), f"{model} {extent} on {kind.kernels}, {width}"),
        (("kernels", "spans_nodes", "is_dense"), f"{model} {extent} on {kind.kernels}"),
        (("kernels", "is_dense"), f"{model} on {kind.kernels}"),
        (("vendor", "is_dense"), f"{model} on {kind.vendor}"),
        (("vendor",), f"all on {kind.vendor}"),
        ((), "all"),
    ]
    recorded = [
        (
            names,
            of_what,
            [speed for other, speed in published if all(getattr(other, n) == getattr(kind, n) for n in names)],
        )
        for names, of_what in levels
    ]
    names, of_what, speeds = next(level for level in recorded if _dropped(len(level[2])) >= 0)
    return _range(speeds, f"{len(speeds)} published runs ({of_what})", is_comparable="is_dense" in names)


def error_text(cluster: Cluster) -> str:
    """The error of projections that are comparable: of this chip, on one node or on many."""
    chip, spans, known = cluster.hardware, cluster.nodes > 1, known_errors()
    if is_measured(cluster):
        times = _sizes(1 / speed for speed in known.speeds)
        memory, step = (_error(sizes) for sizes in (_sizes(known.memories), times))
        text = f"error against {len(known.speeds)} runs on {MEASURED_CHIP}"
        return f"{text}: memory {memory}, step {step} (docs/projection.md)"
    text = f"not measured here: {chip.name} {'over nodes' if spans else 'in one node'}"
    asked = chip.kernels, spans
    of_kind = [speed for kind, speed in known.published if (kind.kernels, kind.spans_nodes) == asked]
    if not of_kind:
        return f"{text}, nor compared with a run of others (docs/plan-published.md)"
    error = _error(_sizes(1 / speed for speed in of_kind))
    return (
        f"{text}; error against {len(of_kind)} published runs of such chips by others: speed {error} "
        f"(docs/plan-published.md)"
    )


def _dropped(runs: int) -> int:
    """How many of the lowest and of the highest runs a range leaves out; below 0 if there are too few."""
    return math.floor((runs - 1 - COVERED * (runs + 1)) / 2 + 1e-9)


def _range(speeds: Sequence[float], runs: str, is_comparable: bool = True) -> SpeedRange:
    ordered, dropped = sorted(speeds), _dropped(len(speeds))
    return SpeedRange(low=ordered[dropped], high=ordered[-1 - dropped], runs=runs, is_comparable=is_comparable)


def _sizes(ratios: Iterable[float]) -> list[float]:
    """Errors of projections over measurements."""
    return [abs(ratio - 1) for ratio in ratios]


def _error(sizes: Sequence[float]) -> str:
    return f"{median(sizes):.1%} (median) to {max(sizes):.1%}"
