"""Pipeline schedules as data: actions, the rules that make a schedule legal, and its time.

A model is cut into stages, a batch into micro-batches. An action is one kind of work of one stage on one micro-batch. A
schedule is one ordered list of actions per pipeline rank. The start of an action follows from its rank's list and from
its inputs (`Action.needs`).

    3F0  forward of stage 3 on micro-batch 0          needs 2F0
    3B0  its whole backward                           needs 3F0 and the input gradient of stage 4
    3I0  its input gradient only ...                  needs the same
    3W0  ... and its weight gradients, any time later needs 3I0

Ranks hold stages in one of two ways. With 4 ranks and 8 stages:

    loop   rank 0: 0 4    rank 1: 1 5    rank 2: 2 6    rank 3: 3 7
    v      rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4

A rank may run a forward and the next backward as a pair, interleaved step by step (`pair_up`): one computes during the
token transfers of the other. A pair starts when both could start, and its outputs are available when it ends.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Literal, NamedTuple


class Kind(StrEnum):
    """The kind of work. BACKWARD is INPUT and WEIGHT in one."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


class Action(NamedTuple):
    """One kind of work of one stage on one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def output(self) -> "Action":
        """The action that others wait for: a whole backward counts as the input gradient that it contains."""
        return self._replace(kind=Kind.INPUT) if self.kind is Kind.BACKWARD else self

    def needs(self, stages: int) -> tuple["Action", ...]:
        """The outputs that must exist before this action starts, in a pipeline of so many stages."""
        stage, kind, micro_batch = self
        if kind is Kind.FORWARD:
            return (Action(stage - 1, kind, micro_batch),) if stage > 0 else ()
        if kind is Kind.WEIGHT:
            return (Action(stage, Kind.INPUT, micro_batch),)
        forward = Action(stage, Kind.FORWARD, micro_batch)
        return (forward, Action(stage + 1, Kind.INPUT, micro_batch)) if stage + 1 < stages else (forward,)


Unit = tuple[Action, ...]  # an action, or a pair of actions that a rank runs together


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The ordered actions of every rank."""

    name: str
    ranks: int
    stages_per_rank: int
    placement: Literal["loop", "v"]  # see the module docstring; a v has 2 stages on each rank
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    trains: bool = True  # every forward has its backward; False for evaluation, with forwards only
    pairs: tuple[frozenset[int], ...] = ()  # for each rank the indices at which a pair begins; empty without pairs

    def units(self, rank: int) -> tuple[Unit, ...]:
        """The list of a rank, with its pairs."""
        actions, begins = self.actions[rank], self.pairs[rank] if self.pairs else frozenset()
        if not begins:
            return tuple((action,) for action in actions)
        return tuple(
            actions[index : index + 1 + (index in begins)] for index in range(len(actions)) if index - 1 not in begins
        )

    @cached_property
    def execution_order(self) -> "ExecutionOrder":
        return execution_order(self)

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        """Whether some stage computes weight gradients apart from input gradients."""
        return any(action.kind is Kind.WEIGHT for actions in self.actions for action in actions)

    def rank_of(self, stage: int) -> int:
        rank = stage % self.ranks
        return self.ranks - 1 - rank if self.placement == "v" and stage >= self.ranks else rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return stages_of(rank, ranks=self.ranks, stages_per_rank=self.stages_per_rank, placement=self.placement)


def stages_of(rank: int, *, ranks: int, stages_per_rank: int, placement: Literal["loop", "v"]) -> tuple[int, ...]:
    """The stages of a rank, in the order of the model."""
    if placement == "v":
        assert stages_per_rank == 2, f"a v has two stages on each rank, not {stages_per_rank}"
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * stages_per_rank, ranks))


def text(schedule: Schedule, rank: int) -> str:
    """The list of one rank in one line: `0F0 0F1 0B0 0B1`."""
    return " ".join(map(str, schedule.actions[rank]))


class Step(NamedTuple):
    """A unit in an `ExecutionOrder`."""

    rank: int
    unit: Unit
    after: tuple[int, ...]  # indices of the steps on other ranks that produce its inputs


@dataclass(frozen=True)
class ExecutionOrder:
    """A topological order of a schedule's units."""

    done: tuple[Step, ...]  # each after the steps that produce its inputs
    blocked: Mapping[int, Unit]  # for each deadlocked rank the unit that never starts


def execution_order(schedule: Schedule) -> ExecutionOrder:
    """Order the units by their dependencies: each runs as soon as its rank's list and its inputs allow."""
    done: list[Step] = []
    links = _links(schedule)
    lists = [deque(schedule.units(rank)) for rank in range(len(schedule.actions))]
    awake = deque(range(schedule.ranks))  # ranks that may have a unit to run
    while awake:
        rank = awake.popleft()
        while lists[rank]:
            unit = lists[rank][0]
            sources, missing = _sources(unit, links)
            if missing is not None:
                missing.append(rank)  # woken when this input exists
                break
            lists[rank].popleft()
            for stage, kind, micro_batch in unit:
                output = links[stage, kind].output
                output.steps[micro_batch] = len(done)  # the index of this step
                awake.extend(output.waiting.pop(micro_batch, ()))
            done.append(Step(rank, unit, tuple([source for source in sources if done[source].rank != rank])))
    return ExecutionOrder(tuple(done), {rank: units[0] for rank, units in enumerate(lists) if units})


class _Outputs:
    """Outputs of one stage and kind, by micro-batch: the step that produced each, and the ranks that wait for it."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        self.waiting: defaultdict[int, list[int]] = defaultdict(list)


class _Link(NamedTuple):
    """Inputs and output of the actions of one stage and kind; all are of the action's own micro-batch."""

    needs: tuple[_Outputs, ...]
    output: _Outputs


def _links(schedule: Schedule) -> dict[tuple[int, Kind], _Link]:
    outputs: defaultdict[tuple[int, Kind], _Outputs] = defaultdict(_Outputs)
    links = {}
    for stage, kind in {(action.stage, action.kind) for actions in schedule.actions for action in actions}:
        start = Action(stage, kind, 0)
        needs = tuple(outputs[need.stage, need.kind] for need in start.needs(schedule.stages))
        links[stage, kind] = _Link(needs, outputs[stage, start.output.kind])
    return links


def _sources(unit: Unit, links: Mapping[tuple[int, Kind], _Link]) -> tuple[list[int], list[int] | None]:
    """Returns (steps that produced the inputs of a unit, waiting list of its first missing input or None)."""
    steps: list[int] = []
    for stage, kind, micro_batch in unit:
        for need in links[stage, kind].needs:
            if micro_batch not in need.steps:
                return steps, need.waiting[micro_batch]
            steps.append(need.steps[micro_batch])
    return steps, None


def pair_up(schedule: Schedule) -> Schedule:
    """The same lists, with a pair wherever a forward directly precedes a backward that does not depend on it.

    A dependency may be direct (on the last stage) or through another rank's list. Such actions stay single.
    """
    pairs = tuple(
        frozenset(
            index
            for index, (action, other) in enumerate(pairwise(actions))
            if (action.kind, other.kind) == (Kind.FORWARD, Kind.BACKWARD) and action not in other.needs(schedule.stages)
        )
        for actions in schedule.actions
    )
    paired = replace(schedule, pairs=pairs)
    while blocked := execution_order(paired).blocked:
        # Split the pair of the lowest blocked rank, and try again.
        rank, (begin, *_) = min((rank, unit) for rank, unit in blocked.items() if len(unit) > 1)
        rank_pairs = pairs[rank] - {schedule.actions[rank].index(begin)}
        pairs = (*pairs[:rank], rank_pairs, *pairs[rank + 1 :])
        paired = replace(schedule, pairs=pairs)
    return paired


def problems(schedule: Schedule) -> list[str]:
    """Violations in a schedule, one line each; empty for a legal schedule.

    Each stage runs one forward per micro-batch and, if the schedule trains, either one backward or one input gradient
    and one weight gradient, all on the rank that holds it; no rank deadlocks.
    """
    if len(schedule.actions) != schedule.ranks:
        return [f"{len(schedule.actions)} lists for {schedule.ranks} ranks"]
    misplaced = [
        f"rank {rank} does stage {stage}, and holds {schedule.stages_of(rank)}"
        for rank, actions in enumerate(schedule.actions)
        for stage in sorted({action.stage for action in actions} - set(schedule.stages_of(rank)))
    ]
    blocked = []
    for rank, unit in execution_order(schedule).blocked.items():
        needs = " and ".join(str(need) for action in unit for need in action.needs(schedule.stages))
        blocked.append(f"rank {rank} never starts {' with '.join(map(str, unit))}: it needs {needs}")
    return [*misplaced, *_miscounted(schedule), *blocked]


def _miscounted(schedule: Schedule) -> Iterator[str]:
    counts = Counter(action for actions in schedule.actions for action in actions)
    expected = ("FB", "FIW") if schedule.trains else ("F",)  # letters of `Kind`, in its order
    places = set(product(range(schedule.stages), range(schedule.micro_batches)))
    for stage, micro_batch in sorted(places | {(action.stage, action.micro_batch) for action in counts}):
        done = "".join(kind * counts[Action(stage, kind, micro_batch)] for kind in Kind)
        if (stage, micro_batch) not in places:
            yield f"stage {stage}, micro-batch {micro_batch}: not of this schedule"
        elif done not in expected:
            yield f"stage {stage}, micro-batch {micro_batch}: does {done or 'nothing'}, not {' or '.join(expected)}"


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
    """A simulated schedule.

    A rank runs its list in order, one action at a time. An action starts when its rank is free and its inputs have
    arrived: at once from its own rank, `send` later from another one. Sending takes no time of the sender:
    communication overlaps with computation, and links have no contention. Both actions of a pair have one start and one
    end; a pair takes the sum of their times less the time that they hide.

    Held activations follow the order of the list, not the clock: a forward adds the activations of its stage, the
    backward (or the weight gradient) frees them. By default a rank's stages add up to 1, so that the first rank of 1F1B
    holds as many as there are ranks.
    """

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
    send = costs.send
    for rank, unit, after in steps:
        start = free[rank]
        for source in after:
            if (arrival := ends[source] + send) > start:  # `max` would take half of the time
                start = arrival
        takes = alone[unit[0][:2]] if len(unit) == 1 else costs.of_unit(unit)
        end = free[rank] = start + takes
        busy[rank] += takes
        starts.append(start)
        ends.append(end)
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
