"""Simulates a schedule with given times: start and end of each action, idle time, held activations.

A rank runs its list in order, one action at a time. An action starts when its rank is free and its inputs have arrived:
at once from its own rank, `send` later from another one. Sending takes no time of the sender: communication overlaps
with computation, and links have no contention. Both actions of a pair have one start and one end; a pair takes the sum
of their times less the time that they hide.

Held activations follow the order of the list, not the clock: a forward adds the activations of its stage, the backward
(or the weight gradient) frees them. By default a rank's stages add up to 1, so that the first rank of 1F1B holds as
many as there are ranks.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from penstock.layout.actions import Action, Kind, Schedule, Unit


class DeadlockError(RuntimeError):
    """Ranks of a schedule wait for each other, or for an action that no rank runs."""


@dataclass(frozen=True, kw_only=True)
class ActionCosts:
    """Time of each kind of action, in seconds or any other unit, and activations, by stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]  # about `input` + `weight`
    input: tuple[float, ...]
    weight: tuple[float, ...]
    send: float = 0.0  # from the end of an action to the start of one on another rank that needs it
    activation: tuple[float, ...] = ()  # of a micro-batch; empty is 1 / stages_per_rank for every stage
    freed_by_input: float = 0.0  # share of the activations that the input gradient frees already
    hidden: tuple[tuple[float, float], ...] = ()  # time that (forward, backward) hide in a pair; empty for none

    def of(self, action: Action) -> float:
        match action.kind:
            case Kind.FORWARD:
                return self.forward[action.stage]
            case Kind.BACKWARD:
                return self.backward[action.stage]
            case Kind.INPUT:
                return self.input[action.stage]
            case Kind.WEIGHT:
                return self.weight[action.stage]

    def of_unit(self, unit: Unit) -> float:
        alone = sum(map(self.of, unit))
        if len(unit) == 1 or not self.hidden:
            return alone
        return alone - sum(self.hidden[action.stage][action.kind is not Kind.FORWARD] for action in unit)


def even_costs(stages: int, times: tuple[float, float, float] = (1.0, 1.0, 1.0), *, send: float = 0.0) -> ActionCosts:
    """Costs of equal stages: `times` of a forward, an input gradient and weight gradients."""
    forward, input_gradient, weight = times
    return ActionCosts(
        forward=(forward,) * stages,
        backward=(input_gradient + weight,) * stages,
        input=(input_gradient,) * stages,
        weight=(weight,) * stages,
        send=send,
    )


@dataclass(frozen=True, kw_only=True)
class TimedAction:
    """An action with its times."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Playback:
    """A simulated schedule."""

    schedule: Schedule
    costs: ActionCosts
    starts: tuple[float, ...]  # of each step of `schedule.execution_order`
    ends: tuple[float, ...]
    span: float  # from the first start to the last end
    busy: tuple[float, ...]  # of each rank

    @cached_property
    def events(self) -> tuple[TimedAction, ...]:
        """Every action, by start and then rank."""
        events = [
            TimedAction(rank=step.rank, action=action, start=start, end=end)
            for step, start, end in zip(self.schedule.execution_order.done, self.starts, self.ends, strict=True)
            for action in step.unit
        ]
        return tuple(sorted(events, key=lambda event: (event.start, event.rank)))

    @cached_property
    def peak_live(self) -> tuple[float, ...]:
        """Peak of held activations on each rank, in the unit of `ActionCosts.activation`."""
        return tuple(_peak_live(self.schedule, self.costs, rank) for rank in range(self.schedule.ranks))

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time."""
        return 1 - sum(self.busy) / (len(self.busy) * self.span) if self.span else 0.0


def play(schedule: Schedule, costs: ActionCosts) -> Playback:
    """Simulate a schedule, of `SCHEDULES` or any other. Raises a DeadlockError that names actions that never start."""
    assert len(costs.forward) == schedule.stages, f"costs of {len(costs.forward)} stages for {schedule.stages}"
    steps, blocked = schedule.execution_order.done, schedule.execution_order.blocked
    if blocked:
        waits = ", ".join(
            f"rank {rank} at {action} (needs {' and '.join(map(str, action.needs(schedule.stages)))})"
            for rank, unit in blocked.items()
            for action in unit
        )
        raise DeadlockError(f"{schedule.name} never ends: {waits}")
    # Looked up once, not for every micro-batch.
    alone = {(stage, kind): costs.of(Action(stage, kind, 0)) for stage in range(schedule.stages) for kind in Kind}
    starts: list[float] = []
    ends: list[float] = []
    free = [0.0] * schedule.ranks  # when each rank ends its last unit
    busy = [0.0] * schedule.ranks
    for rank, unit, after in steps:
        start = free[rank]
        for source in after:
            start = max(start, ends[source] + costs.send)
        takes = alone[unit[0].stage, unit[0].kind] if len(unit) == 1 else costs.of_unit(unit)
        free[rank] = start + takes
        busy[rank] += takes
        starts.append(start)
        ends.append(free[rank])
    times = {"starts": tuple(starts), "ends": tuple(ends), "busy": tuple(busy)}
    return Playback(schedule=schedule, costs=costs, span=max(free), **times)


def _peak_live(schedule: Schedule, costs: ActionCosts, rank: int) -> float:
    # Without sizes whole stages are counted and divided at the end: a sum of thirds is no whole number.
    sizes, unit = (costs.activation, 1) if costs.activation else ((1.0,) * schedule.stages, schedule.stages_per_rank)
    shares = {  # change in held activations of the stage
        Kind.FORWARD: 1.0,
        Kind.BACKWARD: -1.0,
        Kind.INPUT: -costs.freed_by_input,
        Kind.WEIGHT: costs.freed_by_input - 1.0,
    }
    changes = (shares[kind] * sizes[stage] for stage, kind, _ in schedule.actions[rank])
    return max(accumulate(changes), default=0.0) / unit
