"""The values of a plan, which the search ranks, the command line prints and the report draws.

    Layout        sizes and choices of a run, with the names of tables and other tools
    Projection    a run on a cluster: memory of each place on the pipeline, and times
    Refusal       a layout that was not projected, or does not fit, and why
    Advice        a rule's hint about a layout that is kept
    Plan          the result of a search

Below them is how far projections were off (`memory_margin`, ranges of speed).

Bytes, seconds, and shares of 1. The first rank of a place on the pipeline stands for all: they need the same.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from penstock.config.run import Run
from penstock.layout.actions import Playback, Schedule
from penstock.layout.grid import Grid
from penstock.plan.hardware import Cluster
from penstock.plan.memory import STATE, RankMemory, fullest_rank


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a run on its ranks. Names are those of the JSON contract, `pp` to `edp` numbers of ranks."""

    pp: int
    vpp: int  # stages of each pipeline rank
    ep: int
    etp: int
    cp: int
    tp: int
    dp: int
    edp: int
    schedule: str  # of the pipeline; `none` without one
    micro_batch: int  # rows of a pass
    recompute: str  # `none`, `layer`, or other modules of `recompute.modules`, joined by +
    sync_free_stage: int  # `dispatch.sync_free`
    dispatcher: str  # the one that runs; `local` where a rank has all experts
    shard: str  # what data-parallel ranks shard: none, optimizer, full
    offload: str = "none"  # what is in host memory: none, optimizer

    def __str__(self) -> str:
        stages = f"PP{self.pp} x {self.vpp}" if self.vpp > 1 else f"PP{self.pp}"
        named = (("TP", self.tp), ("CP", self.cp), (stages, self.pp), ("EP", self.ep), ("ETP", self.etp))
        sizes = [name if name == stages else f"{name}{size}" for name, size in named if size > 1]
        schedule = f"{self.schedule}, " if self.pp > 1 else ""
        what = f"{schedule}mb {self.micro_batch}, {self.dispatcher}, recompute {self.recompute}"
        what += ", full shards" if self.shard == "full" else ""
        what += ", optimizer on the host" if self.offload == "optimizer" else ""
        return f"{' '.join(sizes) or 'data parallel'}, {what}"


def layout_of(run: Run, grid: Grid, dispatcher: str, shard: str) -> Layout:
    """The layout of a run; `dispatcher` and `shard` are those that run, after `auto` is resolved."""
    has_pipeline = grid.pipeline > 1
    return Layout(
        pp=grid.pipeline,
        vpp=run.pipeline.stages_per_rank if has_pipeline else 1,
        ep=grid.expert,
        etp=grid.expert_tensor,
        cp=grid.context,
        tp=grid.tensor,
        dp=grid.data,
        edp=grid.expert_data,
        schedule=run.pipeline.schedule if has_pipeline else "none",
        micro_batch=run.training.micro_batch,
        recompute="+".join(run.recompute.modules) or "none",
        sync_free_stage=run.dispatch.sync_free_stage,
        dispatcher=dispatcher,
        shard=shard,
        offload="optimizer" if run.offload.optimizer else "none",
    )


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """The step of one place on the pipeline, in seconds."""

    rank: int
    passes: float  # forward and backward, without waits for other stages
    waiting: float  # for other stages, between the first pass of the step and its last on any rank
    update: float  # gradient sums over ranks, norm, optimizer, new weights
    compute: float
    communication: float
    exposed_communication: float  # communication without compute beside it
    host: float  # the device waits for launches; part of `passes` and `update`
    host_link: float = 0.0  # only copies to or from host memory run; part of `passes` and `update`
    terms: Mapping[str, float] = field(default_factory=dict)  # `attention`, `experts`, ...; they add up to the step


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step, in seconds."""

    step_seconds: float
    tokens_per_second_per_device: float
    model_flops_utilization: float  # the model's FLOPs over the devices' bf16 peak
    bubble: float  # share of the passes' time, over all places, that waits for other stages
    exposed_communication_seconds: float
    ranks: tuple[RankTime, ...]  # one for each place on the pipeline
    schedule: Schedule | None = None
    playback: Playback | None = None  # of the schedule by the clock; None without a pipeline, as is `schedule`
    kept_bytes: tuple[int, ...] = ()  # of each stage, from a micro-batch's forward to its backward

    @property
    def host_link_seconds(self) -> float:
        """Of the place that waits most for copies to or from host memory."""
        return max(rank.host_link for rank in self.ranks)


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A run on a cluster; `memories` has one entry for each place on the pipeline."""

    run: Run
    cluster: Cluster
    layout: Layout
    memories: tuple[RankMemory, ...]
    time: StepTime

    @property
    def memory(self) -> RankMemory:
        return fullest_rank(self.memories)

    @property
    def capacity_bytes(self) -> int:
        return self.cluster.hardware.memory.capacity_bytes

    @property
    def host_over_bytes(self) -> int:
        """Bytes that a rank's share of the host's memory lacks; at most 0 if it is enough."""
        return max(memory.host for memory in self.memories) - self.cluster.hardware.host_link.memory_bytes

    @property
    def over_bytes(self) -> int:
        """Bytes that the fullest rank lacks, or else those of the host; at most 0 if the run fits."""
        over, host = self.memory.total - self.capacity_bytes, self.host_over_bytes
        return host if over <= 0 < host else over

    @property
    def fits(self) -> bool:
        """Every rank's memory is enough, and the host's."""
        return self.over_bytes <= 0


MEMORY, MARGIN, SLOWER, FAILED = "does-not-fit", "within-margin", "slower", "fails"
"""Why a legal layout is no candidate, in the place of a rule's name."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Layouts that are not among the candidates."""

    layout: Mapping[str, Any]  # of one of them; parts that were not settled are left out
    rule: str  # name of the rule (penstock/plan/rules) of illegal ones, else `MEMORY`, `MARGIN`, `SLOWER` or `FAILED`
    reason: str
    count: int = 1  # layouts that this refusal stands for


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a rule of thumb has against a layout, and overrides to try, if they are known."""

    rule: str
    reason: str
    source: str
    changes: tuple[str, ...] = ()
    without: float | None = None  # tokens/s on a device of the fastest layout that was found without it


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of a search."""

    model: str
    cluster: Cluster
    candidates: tuple[Projection, ...]  # that fit, fastest first; a single requested layout even if it does not fit
    refused: tuple[Refusal, ...]
    considered: int  # number of layouts, refused ones included
    advice: tuple[Advice, ...] = ()  # about the first candidate
    close: tuple[Projection, ...] = ()  # faster than the first candidate, if they fit: the projection's error decides
    nearest: Projection | None = None  # the layout that lacks the least memory, where nothing fits
    helps: tuple[str, ...] = ()  # changes with which `nearest` fits, in words
    margin: float = 0.0  # share of the memory that candidates leave free for the error of the projection
    gap: float = 0.0  # share by which a layout could be faster by its bound; 0 if the best is proved


_TIMES = (
    *("step_seconds", "tokens_per_second_per_device", "model_flops_utilization", "bubble"),
    *("exposed_communication_seconds", "host_link_seconds"),
)


def candidate_json(projection: Projection) -> dict[str, Any]:
    """One candidate of the JSON contract: bytes and seconds, of the fullest rank."""
    memory, time = projection.memory, projection.time
    return {
        "layout": asdict(projection.layout),
        "fits": projection.fits,
        "memory": {
            **{name: vars(memory)[name] for name in (*STATE, "activations")},
            "buffers": memory.buffers + memory.gathered + memory.communication + memory.graph_pool,
            "logits": memory.logits,
            "reserve": memory.reserve + memory.libraries,
            "total": memory.total,
            "rank": memory.rank,
        },
        **{name: getattr(time, name) for name in _TIMES},
    }


def plan_json(plan: Plan) -> dict[str, Any]:
    """The JSON contract of `penstock plan --json`."""
    return {
        "model": plan.model,
        "hardware": plan.cluster.hardware.name,
        "world": plan.cluster.devices,
        "candidates": [candidate_json(candidate) for candidate in plan.candidates],
        "close": [candidate_json(candidate) for candidate in plan.close],
        "nearest": None if plan.nearest is None else candidate_json(plan.nearest),
        "helps": list(plan.helps),
        "margin": plan.margin,
        "gap": plan.gap,
        "refused": [asdict(refusal) for refusal in plan.refused],
        "advice": [asdict(advice) for advice in plan.advice],
    }


# How far projections were off, against runs that were measured: here, and by others.
#
# A search leaves room for the error of the memory, so that a layout that it calls the best does not overflow. A plan's
# speed is a range: that of 80 % of the runs that are most like it. known_errors.json has the runs; `make docs` writes
# it from benchmarks/results/projection-h200.json and plan-published.json.


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
