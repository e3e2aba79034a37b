"""A run put together from pieces: which stages hold what, which places hold which stages, and the memory of each.

`penstock.plan.composer` finds the pieces. Here they are added up: the state of a rank from its parameters
(penstock/plan/param_state.py), its passes from what its schedule holds (penstock/plan/liveness.py), as
`penstock.plan.memory` does it with a rank that was built.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType

from penstock.config.fit import micro_batches
from penstock.config.model import Model
from penstock.config.parallel import Pipeline
from penstock.config.run import Run
from penstock.layout.actions import Kind, Schedule
from penstock.layout.grid import Grid
from penstock.layout.stages import Stage
from penstock.models.rank_model import schedule_of
from penstock.parallel.axes import Axes, Axis
from penstock.plan.hardware import Cluster, RankGroup
from penstock.plan.liveness import PeakPoint, PipelineShape, StageActivations, has_experts, layer_kind, peak_points
from penstock.plan.memory import LOSS, Overheads, RankMemory
from penstock.plan.meta_rank import MetaRank, Target
from penstock.plan.meta_run import MetaRun, UpdateOps
from penstock.plan.param_state import (
    OTHERS,
    ParamsByKind,
    Partners,
    PartState,
    ShardCounts,
    together,
    update_bytes,
    update_of,
)
from penstock.plan.projection import StepTime
from penstock.plan.step_time import StageTime, StageTimer, step_time

RAMP: Mapping[str, float] = MappingProxyType(
    {
        "none": 0.0,
        "gpipe": 3.0,
        "1f1b": 3.0,
        "interleaved": 3.0,
        "zb-1f1b": 1.0,
        "zb-v": 1.0,
        "dualpipe-v": 1.0,
        "v-half": 2.43,
        "v-min": 3.29,
    }
)
"""Forwards of one stage that ranks wait for, for each rank but one of the pipeline (docs/schedules.md)."""


@dataclass(frozen=True)
class PlaceLoad:
    """What a place on the pipeline does.

    Attributes:
        flops: of a token's forward pass.
        moe: layers with experts.
        layers: all.
    """

    flops: float
    moe: int
    layers: int


@dataclass(frozen=True, kw_only=True)
class ProxyStage:
    """What a proxy model showed.

    Attributes:
        rank: without memory; of the proxy model.
        stage: of it, that was run.
        shared_bytes: of memory that GPUs of a node write into.
        batch_bytes: of the rows of one micro-batch.
    """

    rank: MetaRank
    stage: StageActivations
    shared_bytes: int
    batch_bytes: int


@dataclass(frozen=True)
class StageContents:
    """Of a stage, what decides its size.

    Attributes:
        embed: it begins with the embedding.
        layers: kinds of its layers as they stand, and how many of each stand together.
        head: it ends with norm, prediction layers, output projection and loss.
    """

    embed: bool
    layers: tuple[tuple[str, int], ...]
    head: bool

    @property
    def moe(self) -> int:
        """Layers with experts."""
        return sum(count for kind, count in self.layers if has_experts(kind))

    @property
    def count(self) -> int:
        """Layers."""
        return sum(count for _, count in self.layers)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of its layers, in the order in which they come first."""
        return tuple(dict.fromkeys(kind for kind, _ in self.layers))


def contents_of(stage: Stage, model: Model) -> StageContents:
    """Of a stage of a model."""
    together = groupby(layer_kind(model, layer) for layer in stage.layers)
    return StageContents(stage.embed, tuple((kind, len(list(same))) for kind, same in together), stage.norm_and_head)


@dataclass(frozen=True)
class StageBytes:
    """A stage in bytes; see `StageActivations` for what they are."""

    kept: int
    left: int
    forward: int
    backward: int
    weight: int

    def of(self, kind: Kind) -> int:
        """What an action takes over what was held before; a backward pass finds its own share there."""
        if kind is Kind.FORWARD:
            return self.forward
        return self.weight if kind is Kind.WEIGHT else self.backward - self.kept

    def times(self, count: int) -> "StageBytes":
        """With so many times the rows."""
        if count == 1:
            return self
        return StageBytes(*(count * size for size in (self.kept, self.left, self.forward, self.backward, self.weight)))

    def most(self, kind: Kind) -> int:
        """The most of a pass of one micro-batch alone."""
        return self.forward if kind is Kind.FORWARD else self.backward


@dataclass(frozen=True)
class RankState:
    """What ranks of a run hold from step to step."""

    run: Run
    facts: ParamsByKind
    shards: ShardCounts
    states: Mapping[str, PartState]

    def parts(self, stages: Sequence[StageContents]) -> dict[str, int]:
        """Parts of a rank that holds some stages, and how many of each; an embedding is never held twice."""
        mtp = self.run.model.mtp_layers
        has_head = any(one.head for one in stages)
        needs_embedding = any(one.embed for one in stages) or (
            has_head and (mtp > 0 or self.run.model.tie_word_embeddings)
        )
        counts = Counter({"embed": int(needs_embedding), "mtp": int(has_head and mtp > 0), "head": int(has_head)})
        for one in stages:
            for kind, count in one.layers:
                counts[kind] += count
        return {kind: count for kind, count in counts.items() if count}

    def of(self, stages: Sequence[StageContents]) -> PartState:
        """All together."""
        return together([(self.states[kind], count) for kind, count in self.parts(stages).items()])

    def update_bytes(self, stages: Sequence[StageContents]) -> int:
        """What the update passes through."""
        return update_bytes([(self.facts[kind], count) for kind, count in self.parts(stages).items()], self.shards)

    def gathered(self, stages: Sequence[StageContents]) -> int:
        """Whole weights with FSDP2, and gradients on their way, as `penstock.plan.memory` counts them."""
        parts = self.parts(stages)
        if not any(self.states[kind].whole for kind in parts):
            return 0
        layers = [self.states[kind].whole for kind in parts if kind not in OTHERS]
        depths = self.states["mtp"].whole // self.run.model.mtp_layers if "mtp" in parts else 0
        most = max(*layers, depths, 0)
        always = sum(self.states[kind].whole for kind in parts if kind in ("embed", "head"))
        values = most // (2 if self.run.training.precision == "bf16" else 4)
        return always + most * (2 + self.run.parallel.prefetch) + 4 * values


@dataclass(frozen=True, kw_only=True)
class ComposedRun:
    """A run put together from its pieces.

    Attributes:
        run: which.
        grid: of its ranks.
        contents: of every stage.
        activations: of stages by their contents; their numbers are not set.
        sizes: the same in bytes.
        shown: by a proxy model.
        times: rows of a micro-batch for each of the proxy model.
        state: of its ranks.
        shape: of its pipeline; None without one.
        target: where it will run.
        overheads: of the hardware.
        played: run whose proxy model showed the pieces: the run itself, or one that is nearly like it.
    """

    run: Run
    grid: Grid
    contents: tuple[StageContents, ...]
    activations: Mapping[StageContents, StageActivations]
    sizes: Mapping[StageContents, StageBytes]
    shown: ProxyStage
    times: int
    state: RankState
    shape: PipelineShape | None
    target: Target
    overheads: Overheads
    played: Run
    alike: Hashable

    @property
    def is_exact(self) -> bool:
        """Pieces are the run's own."""
        return self.played is self.run

    def stage(self, number: int) -> StageActivations:
        """A stage by its number."""
        return replace(self.activations[self.contents[number]], number=number)

    def size(self, number: int) -> StageBytes:
        """Of a stage by its number."""
        return self.sizes[self.contents[number]]

    def gathers(self, number: int) -> tuple[int, ...]:
        """Bytes of whole weights that FSDP2 fetches for a stage; empty without it."""
        if self.run.parallel.shard != "full":
            return ()
        parts = self.state.parts([self.contents[number]])
        sizes = tuple(self.state.states[kind].whole for kind, count in parts.items() for _ in range(count))
        return sizes if any(sizes) else ()

    def stages_of(self, place: int) -> tuple[int, ...]:
        """Stages at a place on the pipeline."""
        return (0,) if self.shape is None else self.shape.stages_of(place)

    @property
    def buffers(self) -> int:
        """Memory that GPUs write into, and the rows of the step."""
        rows = micro_batches(self.run, self.grid) * self.shown.batch_bytes
        return self.times * (self.shown.shared_bytes + rows)

    @property
    def fullest(self) -> int:
        """The place on the pipeline that needs most."""
        places = range(self.grid.pipeline)
        if self.shape is None or not self.shape.holds_most_first:
            return max(places, key=self.total)
        first: dict[tuple[StageContents, ...], int] = {}
        for place in places:
            first.setdefault(tuple(self.contents[number] for number in self.stages_of(place)), place)
        return max(first.values(), key=self.total)

    def passing(self, place: int) -> int:
        """The most that forward and backward hold at a place."""
        return max(size for size, _ in self._moments(place))

    def memory(self, place: int) -> RankMemory:
        """Of the first rank at a place on the pipeline."""
        held = [self.contents[number] for number in self.stages_of(place)]
        state, gathered, update = self.state.of(held), self.state.gathered(held), self.state.update_bytes(held)
        size, standing = max(self._moments(place), key=lambda moment: moment[0])
        terms = self._terms(size, standing)
        logits, is_captured = terms[LOSS], self.run.graphs.capture == "full"
        is_update = update > size + gathered and not is_captured
        memory = RankMemory(
            rank=place * self.grid.world // self.grid.pipeline,
            parameters=state.weights,
            gradients=state.gradients,
            master=state.master,
            moments=state.moments,
            gathered=0 if is_update else gathered,
            activations=0 if is_update else size - logits,
            buffers=self.buffers,
            logits=0 if is_update else logits,
            communication=update if is_update else 0,
            graph_pool=update if is_captured else 0,
            libraries=self.overheads.libraries,
            reserve=0,
            host=0,
            moment="update" if is_update else _name_of(standing, is_alone=self.shape is None),
            terms={} if is_update else dict(terms),
        )
        return replace(memory, reserve=self.overheads.context + round(self.overheads.unused * memory.allocated))

    def total(self, place: int) -> int:
        """`memory(place).total`, without its terms."""
        held = [self.contents[number] for number in self.stages_of(place)]
        update, passing = self.state.update_bytes(held), self.passing(place) + self.state.gathered(held)
        most = passing + update if self.run.graphs.capture == "full" else max(passing, update)
        allocated = self.state.of(held).total + most + self.buffers + self.overheads.libraries
        return allocated + self.overheads.context + round(self.overheads.unused * allocated)

    def _moments(self, place: int) -> Iterator[tuple[int, PeakPoint]]:
        if self.shape is None:
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                yield self.size(0).most(kind), PeakPoint(((0, kind),), (int(kind is Kind.BACKWARD),), (0,))
            return
        own = [self.size(number) for number in self.stages_of(place)]
        of = {stage: self.size(stage) for stage in self.stages_of(place)}
        for standing in peak_points(self.shape, place):
            held = sum(count * size.kept for count, size in zip(standing.kept, own, strict=True))
            held += sum(count * size.left for count, size in zip(standing.left, own, strict=True))
            yield held + sum(of[stage].of(kind) for stage, kind in standing.work), standing

    def _terms(self, size: int, standing: PeakPoint) -> Counter[str]:
        """What is held at a moment, by the module that allocated it; `held` are other micro-batches."""
        terms: Counter[str] = Counter()
        for stage, kind in standing.work:
            activations = self.activations[self.contents[stage]]
            if kind is Kind.WEIGHT:
                terms["put off"] += activations.weight
            else:
                terms.update((activations.forward if kind is Kind.FORWARD else activations.backward).terms)
        if self.shape is not None:
            terms["held"] = size - sum(terms.values())
        return terms


def _name_of(standing: PeakPoint, *, is_alone: bool) -> str:
    if is_alone:
        return "forward" if standing.work[0][1] is Kind.FORWARD else "backward"
    return " and ".join(f"{kind} of stage {stage}" for stage, kind in standing.work)


def memory_of_state(state: PartState, rank: int, overheads: Overheads) -> RankMemory:
    """Of a rank that does nothing.

    Args:
        state: what it holds.
        rank: its number.
        overheads: of the hardware.
    """
    memory = RankMemory(
        rank=rank,
        parameters=state.weights,
        gradients=state.gradients,
        master=state.master,
        moments=state.moments,
        gathered=0,
        activations=0,
        buffers=0,
        logits=0,
        communication=0,
        graph_pool=0,
        libraries=overheads.libraries,
        reserve=0,
        host=0,
        moment="state",
    )
    return replace(memory, reserve=overheads.context + round(overheads.unused * memory.allocated))


class ComposedTimes:
    """Times of composed runs of one model on one cluster; remembers those of stages, and schedules.

    Args:
        cluster: where.
        imbalance: rows of the fullest rank's experts over the even share.
    """

    def __init__(self, cluster: Cluster, imbalance: float) -> None:
        self._cluster = cluster
        self._imbalance = imbalance
        self._clockworks: dict[Hashable, StageTimer] = {}
        self._updates: dict[tuple[Grid, tuple[StageContents, ...], ShardCounts], float] = {}
        self._stages: dict[tuple[Hashable, StageContents], StageTime] = {}
        self._schedules: dict[tuple[Pipeline, int, int, bool], Schedule | None] = {}

    def rough(self, composed: ComposedRun) -> float:
        """Seconds of a step; the busiest place on the pipeline decides."""
        run, grid = composed.run, composed.grid
        # Pieces of one row take their time for each row of a micro-batch.
        first = {one: number for number, one in reversed(list(enumerate(composed.contents)))}
        seconds = {one: composed.times * self._stage(composed, number).all.seconds for one, number in first.items()}
        stages = [seconds[one] for one in composed.contents]
        if composed.shape is None:
            return micro_batches(run, grid) * stages[0] + self._update(composed, 0)
        places = [sum(stages[number] for number in composed.stages_of(place)) for place in range(grid.pipeline)]
        mean = sum(stages) / len(stages)
        ramp = RAMP[run.pipeline.schedule] / 3 * (grid.pipeline - 1) * mean
        return micro_batches(run, grid) * max(places) + ramp + self._update(composed, 0)

    def exact(self, composed: ComposedRun) -> StepTime:
        """As `penstock.plan.step_time` has it."""
        return step_time(composed.run, self._cluster, self.rehearsals(composed), self._imbalance)

    def rehearsals(self, composed: ComposedRun) -> tuple[MetaRun, ...]:
        """What `penstock.plan.meta_run` would have found at each place, as far as time depends on it."""
        grid = composed.grid
        axes = Axes(
            grid=grid,
            pipeline=Axis(name="pipeline", ranks=tuple(range(grid.pipeline))),
            sequence=Axis(name="sequence", ranks=tuple(range(grid.context * grid.tensor))),
        )
        schedule = self._schedule(composed.run, axes)
        # A rank of the proxy model speaks for all; how much they hold is not asked here.
        rank = replace(composed.shown.rank, run=composed.run, axes=axes, schedule=schedule)
        found = []
        for place in range(grid.pipeline):
            numbers = composed.stages_of(place)
            found.append(
                MetaRun(
                    rank=rank,
                    first_rank=place * grid.world // grid.pipeline,
                    place=place,
                    stages=tuple(composed.stage(number) for number in numbers),
                    batch_bytes=0,
                    gathered_bytes=0,
                    gathers={number: composed.gathers(number) for number in numbers if composed.gathers(number)},
                    update=self.update(composed, place),
                )
            )
        return tuple(found)

    def _schedule(self, run: Run, axes: Axes) -> Schedule | None:
        """Layouts that differ in what they compute twice, or in how tokens travel, share it."""
        key = run.pipeline, axes.grid.pipeline, micro_batches(run, axes.grid), run.dispatch.overlap == "passes"
        if key not in self._schedules:
            self._schedules[key] = schedule_of(run, axes)
        return self._schedules[key]

    def update(self, composed: ComposedRun, place: int) -> UpdateOps:
        """What follows the passes at a place."""
        grid, shards, cluster = composed.grid, composed.state.shards, self._cluster
        held = [composed.contents[number] for number in composed.stages_of(place)]
        parts = [(composed.state.facts[kind], count) for kind, count in composed.state.parts(held).items()]
        dense, experts = grid.data * grid.context, grid.expert * grid.expert_tensor
        return update_of(
            parts,
            shards,
            Partners(
                cluster.group(shards.dense, grid.tensor),
                cluster.group(dense // shards.dense, grid.tensor * shards.dense),
            ),
            Partners(
                cluster.group(shards.expert, experts),
                cluster.group(grid.expert_data // shards.expert, experts * shards.expert),
            ),
            self._embedding(composed, place),
        )

    def _embedding(self, composed: ComposedRun, place: int) -> tuple[RankGroup, int] | None:
        """Who shares the embedding's gradient with a place, and how much of it."""
        grid, state = composed.grid, composed.state
        holders = [
            other
            for other in range(grid.pipeline)
            if "embed" in state.parts([composed.contents[number] for number in composed.stages_of(other)])
        ]
        if place not in holders or len(holders) == 1:
            return None
        between = (holders[-1] - holders[0]) * grid.world // grid.pipeline
        own = sum(fact.own(state.shards.of(fact)) for fact in state.facts["embed"])
        return self._cluster.group(len(holders), between), own

    def _update(self, composed: ComposedRun, place: int) -> float:
        grid, held = composed.grid, tuple(composed.contents[number] for number in composed.stages_of(place))
        key = grid, held, composed.state.shards
        if key not in self._updates:
            timings = self._clockwork(composed).update(self.update(composed, place))
            self._updates[key] = sum(timing.seconds for timing in timings)
        return self._updates[key]

    def _clockwork(self, composed: ComposedRun) -> StageTimer:
        alike = composed.alike
        if alike not in self._clockworks:
            works = [piece.forward_work for stage in composed.activations.values() for piece in stage.pieces]
            self._clockworks[alike] = StageTimer(composed.played, self._cluster, self._imbalance, works)
        return self._clockworks[alike]

    def _stage(self, composed: ComposedRun, number: int) -> StageTime:
        alike, contents = composed.alike, composed.contents[number]
        gathers = composed.gathers(number)
        key = alike, contents
        if not gathers and key in self._stages:
            return self._stages[key]
        shards = self._cluster.group(composed.state.shards.dense)
        if gathers:  # Who divides weights depends on the whole layout.
            return self._clockwork(composed).stage(composed.stage(number), gathers, shards)
        self._stages[key] = self._clockwork(composed).stage(composed.stage(number), (), shards)
        return self._stages[key]
