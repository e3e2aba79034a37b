"""A run composed of pieces: its memory at every place of the pipeline, and its step time.

`penstock.plan.composer` finds the pieces. Model state is a sum over parameters (penstock/plan/param_state.py), passes
follow from the peak points of the schedule (penstock/plan/liveness.py). `ComposedTimes` times each stage once for all
runs that have it. `rough` takes the ramp of the pipeline from a table; `exact` plays the schedule's own actions.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.config.fit import micro_batches
from penstock.config.model import Model
from penstock.config.parallel import Pipeline
from penstock.config.rules import capture_on
from penstock.config.run import Run
from penstock.layout.actions import Schedule, play
from penstock.layout.grid import Grid
from penstock.layout.stages import Stage
from penstock.models.rank_model import schedule_of
from penstock.parallel.axes import Axes, Axis
from penstock.plan.assumptions import DEFAULT_ASSUMPTIONS, Assumptions
from penstock.plan.costs import HardwareTimes
from penstock.plan.hardware import Cluster, RankGroup
from penstock.plan.liveness import (
    PassPeak,
    PipelineShape,
    StageActivations,
    fullest_pass,
    layer_kind,
    most_bytes,
)
from penstock.plan.memory import Overheads, RankMemory, assemble
from penstock.plan.meta_run import UpdateOps, gathered_bytes
from penstock.plan.param_state import (
    OTHERS,
    ParamCounts,
    ParamsByKind,
    Partners,
    PartState,
    ShardCounts,
    together,
    update_bytes,
    update_of,
)
from penstock.plan.projection import StepTime
from penstock.plan.step_time import StageTime, StageTimer, clock_costs, send_seconds, step_time
from penstock.plan.streams import OVERLAP_GAIN, Timing


@dataclass(frozen=True, kw_only=True)
class ProxyStage:
    """A stage of a proxy model that ran on the meta device."""

    stage: StageActivations
    symmetric_bytes: int  # of memory that GPUs of a node write into
    batch_bytes: int  # of the rows of one micro-batch
    dispatcher: str  # of its layers with experts; `none` without any


@dataclass(frozen=True)
class StageContents:
    """The parts of a stage that decide its size."""

    embed: bool  # it begins with the embedding
    layers: tuple[tuple[str, int], ...]  # kinds of its layers in order, and how many of each follow each other
    head: bool  # it ends with norm, prediction layers, output projection and loss

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of its layers, in the order in which they first occur."""
        return tuple(dict.fromkeys(kind for kind, _ in self.layers))


def contents_of(stage: Stage, run: Run) -> StageContents:
    rows = groupby(layer_kind(run, layer) for layer in stage.layers)
    return StageContents(stage.embed, tuple((kind, len(list(same))) for kind, same in rows), stage.norm_and_head)


def parts_of(model: Model, stages: Sequence[StageContents]) -> Counter[str]:
    """Parts of a rank with these stages, and how many of each; an embedding is never held twice."""
    has_head = any(stage.head for stage in stages)
    shares_embedding = has_head and (model.mtp_layers > 0 or model.tie_word_embeddings)
    needs_embedding = shares_embedding or any(stage.embed for stage in stages)
    parts = {"embed": needs_embedding, "mtp": has_head and model.mtp_layers > 0, "head": has_head}
    counts = Counter({name: int(is_held) for name, is_held in parts.items()})
    for stage in stages:
        for kind, count in stage.layers:
            counts[kind] += count
    return counts


@dataclass(frozen=True)
class RankState:
    """Model state of the ranks of a run: their parameters, the ranks that shard them, and bytes by kind of part."""

    run: Run
    facts: ParamsByKind
    shards: ShardCounts
    states: Mapping[str, PartState]

    def parts(self, stages: Sequence[StageContents]) -> dict[str, int]:
        """Parts of a rank with these stages, and how many of each; an embedding is never held twice."""
        return {kind: count for kind, count in parts_of(self.run.model, stages).items() if count}

    def of(self, stages: Sequence[StageContents]) -> PartState:
        return together([(self.states[kind], count) for kind, count in self.parts(stages).items()])

    def params(self, stages: Sequence[StageContents]) -> ParamCounts:
        return [(self.facts[kind], count) for kind, count in self.parts(stages).items()]

    def gathered(self, stages: Sequence[StageContents]) -> int:
        """Whole weights with FSDP2, and gradients that are being reduced."""
        parts = self.parts(stages)
        if not any(self.states[kind].whole for kind in parts):
            return 0
        layers = [self.states[kind].whole for kind in parts if kind not in OTHERS]
        depths = self.states["mtp"].whole // self.run.model.mtp_layers if "mtp" in parts else 0
        always = sum(self.states[kind].whole for kind in parts if kind in ("embed", "head"))
        return gathered_bytes(self.run, always, max(*layers, depths, 0))


@dataclass(frozen=True, kw_only=True)
class ComposedRun:
    """A run composed of pieces."""

    run: Run
    grid: Grid
    contents: tuple[StageContents, ...]
    stage_of: Callable[[StageContents], StageActivations]  # activations by contents, without a number
    proxy: ProxyStage  # a stage of the proxy model
    state: RankState
    shape: PipelineShape | None  # of its pipeline; None without one
    overheads: Overheads
    reuse_key: Hashable  # equal for runs with the same pieces, composed as closely

    @property
    def axes(self) -> Axes:
        """Axes of the first rank, as far as times depend on them."""
        grid = self.grid
        return Axes(
            grid=grid,
            pipeline=Axis(name="pipeline", ranks=tuple(range(grid.pipeline))),
            sequence=Axis(name="sequence", ranks=tuple(range(grid.context * grid.tensor))),
        )

    def gathers(self, number: int) -> tuple[int, ...]:
        """Bytes of whole weights that FSDP2 gathers for a stage; empty without it."""
        if self.run.parallel.shard != "full":
            return ()
        parts = self.state.parts([self.contents[number]])
        sizes = tuple(self.state.states[kind].whole for kind, count in parts.items() for _ in range(count))
        return sizes if any(sizes) else ()

    def stages_of(self, position: int) -> tuple[int, ...]:
        return (0,) if self.shape is None else self.shape.stages_of(position)

    def contents_at(self, position: int) -> tuple[StageContents, ...]:
        return tuple(self.contents[number] for number in self.stages_of(position))

    @property
    def inner_places(self) -> Sequence[int]:
        """Places without the embedding and the head, whose stages are quickly known; all if there are none."""
        inner = [
            position
            for position in range(self.grid.pipeline)
            if not any(content.embed or content.head for content in self.contents_at(position))
        ]
        return inner or range(self.grid.pipeline)

    def fullest_of(self, places: Sequence[int]) -> int:
        """Bytes of the place that needs most."""
        if self.shape is not None and self.shape.holds_most_first:
            first: dict[tuple[StageContents, ...], int] = {}
            for position in places:
                first.setdefault(self.contents_at(position), position)
            places = tuple(first.values())
        return max(map(self.total, places))

    def memory(self, position: int) -> RankMemory:
        return self._memory(position, fullest_pass(self._stages(position), self.shape, position))

    def total(self, position: int) -> int:
        """`memory(position).total`, faster: without terms."""
        size = most_bytes(self._stages(position), self.shape, position)
        return self._memory(position, PassPeak("", size, {})).total

    @property
    def most_host_bytes(self) -> int:
        """Host memory of the rank that keeps most there."""
        largest = max(self.state.of(self.contents_at(position)).host for position in range(self.grid.pipeline))
        return largest + self.overheads.process if largest else 0

    def _stages(self, position: int) -> dict[int, StageActivations]:
        return {number: self.stage_of(self.contents[number]) for number in self.stages_of(position)}

    def _memory(self, position: int, passes: PassPeak) -> RankMemory:
        held, state = self.contents_at(position), self.state
        # The rows of the whole step are on the device.
        batch_bytes = micro_batches(self.run, self.grid) * self.proxy.batch_bytes
        return assemble(
            position * self.grid.world // self.grid.pipeline,
            state.of(held),
            passes,
            gathered=state.gathered(held),
            update=update_bytes(state.params(held), state.shards),
            buffers=self.proxy.symmetric_bytes + batch_bytes,
            is_captured=self.run.graphs.capture == "full",
            overheads=self.overheads,
        )


class ComposedTimes:
    """Step times of composed runs of one model on one cluster; remembers stages, updates and schedules."""

    def __init__(
        self, cluster: Cluster, assumptions: Assumptions = DEFAULT_ASSUMPTIONS, times: HardwareTimes | None = None
    ) -> None:
        self.cluster = cluster
        self.assumptions = assumptions
        self._hardware_times = times or HardwareTimes.of(cluster.hardware)
        self._timers: dict[Hashable, StageTimer] = {}
        self._updates: dict[tuple[Grid, tuple[StageContents, ...], ShardCounts], tuple[Timing, Timing]] = {}
        self._stages: dict[tuple[Hashable, StageContents], StageTime] = {}
        self._schedules: dict[tuple[Pipeline, int, int, bool], Schedule | None] = {}

    def bound(self, composed: ComposedRun, places: Sequence[int]) -> float:
        """Seconds that a step cannot go below, whatever the order of its actions, by the work of some places.

        A place starts after the first micro-batch has passed the stages before it, and behind its last gradient these
        still compute theirs, unless its backward passes are split. Stages of other places count as nothing.
        """
        run, grid = composed.run, composed.grid
        known: dict[StageContents, StageTime] = {}
        for position in places:
            for number in composed.stages_of(position):
                if composed.contents[number] not in known:
                    known[composed.contents[number]] = self._stage(composed, number)
        update = self._longest_update(composed, places)
        longest = 0.0
        for position in places:
            numbers = composed.stages_of(position)
            before = [known[content] for content in composed.contents[: min(numbers)] if content in known]
            ramp = sum(stage.forward.seconds for stage in before)
            if composed.shape is None or not composed.shape.splits_backward:
                ramp += sum(stage.backward.seconds for stage in before)
            work = sum(known[composed.contents[number]].all.seconds for number in numbers)
            longest = max(longest, ramp + micro_batches(run, grid) * work)
        return longest + update

    def seconds(self, composed: ComposedRun) -> float:
        """Seconds of a step by the schedule's own actions: `exact`, faster."""
        run = composed.run
        known = {content: self._stage(composed, number) for number, content in enumerate(composed.contents)}
        update = self._longest_update(composed, range(composed.grid.pipeline))
        if composed.shape is None:
            return micro_batches(run, composed.grid) * known[composed.contents[0]].all.seconds + update
        axes = composed.axes
        schedule = self._schedule(run, axes)
        assert schedule is not None, "a pipeline has a schedule"
        stages = dict(enumerate(known[content] for content in composed.contents))
        send = send_seconds(run, self.cluster, axes, self._hardware_times.transfers)
        costs = clock_costs(stages, send, (0,) * len(stages), OVERLAP_GAIN)
        return play(schedule, costs).span + update

    def exact(self, composed: ComposedRun) -> StepTime:
        """Step time by the schedule's own actions."""
        run, axes = composed.run, composed.axes
        return step_time(
            run,
            self.cluster,
            {number: self._stage(composed, number) for number in range(len(composed.contents))},
            [self._update(composed, position) for position in range(composed.grid.pipeline)],
            kept=tuple(composed.stage_of(content).kept_bytes for content in composed.contents),
            schedule=self._schedule(run, axes),
            send=send_seconds(run, self.cluster, axes, self._hardware_times.transfers),
            software=self.assumptions.software,
        )

    def _schedule(self, run: Run, axes: Axes) -> Schedule | None:
        """Layouts that differ in recomputation or dispatch share a schedule."""
        key = run.pipeline, axes.grid.pipeline, micro_batches(run, axes.grid), run.dispatch.overlap == "passes"
        if key not in self._schedules:
            self._schedules[key] = schedule_of(run, axes)
        return self._schedules[key]

    def _update_ops(self, composed: ComposedRun, position: int) -> UpdateOps:
        grid, shards, cluster = composed.grid, composed.state.shards, self.cluster
        dense, experts = grid.data * grid.context, grid.expert * grid.expert_tensor
        return update_of(
            composed.state.params(composed.contents_at(position)),
            shards,
            Partners(
                cluster.group(shards.dense, grid.tensor),
                cluster.group(dense // shards.dense, grid.tensor * shards.dense),
            ),
            Partners(
                cluster.group(shards.expert, experts),
                cluster.group(grid.expert_data // shards.expert, experts * shards.expert),
            ),
            self._embedding(composed, position),
            cluster.group(grid.world // grid.pipeline),
        )

    def _embedding(self, composed: ComposedRun, position: int) -> tuple[RankGroup, int] | None:
        """Places that share the embedding's gradient with a place, and values of it that this one updates."""
        grid, state = composed.grid, composed.state
        holders = [other for other in range(grid.pipeline) if "embed" in state.parts(composed.contents_at(other))]
        if position not in holders or len(holders) == 1:
            return None
        # Ranks of the embedding's group are as far apart as their places on the pipeline.
        between = (holders[-1] - holders[0]) * grid.world // grid.pipeline
        values = sum(fact.own(state.shards.of(fact)) for fact in state.facts["embed"])
        return self.cluster.group(len(holders), between), values

    def _update(self, composed: ComposedRun, position: int) -> tuple[Timing, Timing]:
        key = composed.grid, composed.contents_at(position), composed.state.shards
        if key not in self._updates:
            self._updates[key] = self._timer(composed).update(self._update_ops(composed, position))
        return self._updates[key]

    def _longest_update(self, composed: ComposedRun, places: Sequence[int]) -> float:
        updates = (self._update(composed, position) for position in places)
        return max(sums.seconds + rest.seconds for sums, rest in updates)

    def _key(self, composed: ComposedRun) -> Hashable:
        """What the times of a stage depend on: pieces do not tell what graphs launch."""
        return composed.reuse_key, capture_on(self.cluster.hardware.vendor, composed.run)

    def _timer(self, composed: ComposedRun) -> StageTimer:
        key = self._key(composed)
        if key not in self._timers:
            ops = [piece.forward_ops for piece in composed.proxy.stage.pieces]
            assumed = self.assumptions
            self._timers[key] = StageTimer(
                composed.run,
                self.cluster,
                assumed.in_time,
                ops,
                software=assumed.software,
                in_turn=assumed.in_turn,
                times=self._hardware_times,
            )
        return self._timers[key]

    def _stage(self, composed: ComposedRun, number: int) -> StageTime:
        key, gathers = (self._key(composed), composed.contents[number]), composed.gathers(number)
        if not gathers and key in self._stages:
            return self._stages[key]
        shards = self.cluster.group(composed.state.shards.dense)
        stage_time = self._timer(composed).stage(composed.stage_of(composed.contents[number]), gathers, shards)
        if not gathers:  # The ranks that shard weights depend on the whole layout, so such a stage is not kept.
            self._stages[key] = stage_time
        return stage_time
