"""The values of a plan, which the search ranks, the command line prints and the report draws.

    Layout        sizes and choices of a run, with the names of tables and other tools
    Projection    a run on a cluster: memory of each place on the pipeline, and times
    Refusal       a layout that was not projected, or does not fit, and why
    Advice        a rule's hint about a layout that is kept
    Plan          the result of a search

Bytes, seconds, and shares of 1. The first rank of a place on the pipeline stands for all: they need the same.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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
        sync_free_stage=run.dispatch.sync_free,
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
