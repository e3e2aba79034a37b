"""Step time of a composed run: `penstock.plan.step_time` over pieces that were run once.

Passes of a stage depend on its pieces only, so they are played once for all runs that have such a stage. From them
comes a rough time of a step, which takes the pipeline's ramp from a table; `exact` plays the schedule's own actions.
"""

from dataclasses import replace

from penstock.config.fit import micro_batches
from penstock.config.parallel import Pipeline
from penstock.config.run import Run
from penstock.layout.actions import Schedule
from penstock.layout.grid import Grid
from penstock.models.rank_model import schedule_of
from penstock.parallel.axes import Axes, Axis
from penstock.plan.bound import RAMP
from penstock.plan.composed import Composed, Contents
from penstock.plan.composed_update import Partners, update_of
from penstock.plan.hardware import Cluster, Group
from penstock.plan.held_state import Shards
from penstock.plan.projection import StepTime
from penstock.plan.proxy_model import ReuseKey
from penstock.plan.rehearsal import Rehearsal, Update
from penstock.plan.step_time import Clockwork, StageTime, step_time


class Timekeeper:
    """Times of composed runs of one model on one cluster; remembers those of stages, and schedules.

    Args:
        cluster: where.
        imbalance: rows of the fullest rank's experts over the even share.
    """

    def __init__(self, cluster: Cluster, imbalance: float) -> None:
        self._cluster = cluster
        self._imbalance = imbalance
        self._clockworks: dict[ReuseKey, Clockwork] = {}
        self._updates: dict[tuple[Grid, tuple[Contents, ...], Shards], float] = {}
        self._stages: dict[tuple[ReuseKey, Contents], StageTime] = {}
        self._schedules: dict[tuple[Pipeline, int, int, bool], Schedule | None] = {}

    def rough(self, composed: Composed) -> float:
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

    def exact(self, composed: Composed) -> StepTime:
        """As `penstock.plan.step_time` has it."""
        return step_time(composed.run, self._cluster, self.rehearsals(composed), self._imbalance)

    def rehearsals(self, composed: Composed) -> tuple[Rehearsal, ...]:
        """What `penstock.plan.rehearsal` would have found at each place, as far as time depends on it."""
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
                Rehearsal(
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

    def update(self, composed: Composed, place: int) -> Update:
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

    def _embedding(self, composed: Composed, place: int) -> tuple[Group, int] | None:
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

    def _update(self, composed: Composed, place: int) -> float:
        grid, held = composed.grid, tuple(composed.contents[number] for number in composed.stages_of(place))
        key = grid, held, composed.state.shards
        if key not in self._updates:
            timings = self._clockwork(composed).update(self.update(composed, place))
            self._updates[key] = sum(timing.seconds for timing in timings)
        return self._updates[key]

    def _clockwork(self, composed: Composed) -> Clockwork:
        alike = composed.alike
        if alike not in self._clockworks:
            works = [piece.forward_work for stage in composed.activations.values() for piece in stage.pieces]
            self._clockworks[alike] = Clockwork(composed.played, self._cluster, self._imbalance, works)
        return self._clockworks[alike]

    def _stage(self, composed: Composed, number: int) -> StageTime:
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
