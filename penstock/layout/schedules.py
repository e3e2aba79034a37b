"""The schedules of `pipeline.schedule` by name, as plain lists of actions. docs/schedules.md compares them.

`schedule("1f1b", ranks=4, stages_per_rank=1, micro_batches=8)` is a training step, `forward_only` of it an evaluation.
The code that runs, times or draws a schedule reads only the `Schedule`. There are two ways to make one:

1. Phrases, in DualPipe's notation (GPipe, 1F1B, interleaved, zero-bubble 1F1B, DualPipeV): `(3, "F0 B0")` is three
  times a forward and a backward of a rank's first stage. A word is a kind and one of the rank's stages, counted from 0.
  Each stage takes its micro-batches in order. A word without a number (`F`, `B`) iterates over all stages of the rank,
  one group of micro-batches through each before the next (`grouped`). `W` is the oldest deferred weight gradient. 1F1B
  with 4 micro-batches on the second of 4 ranks:

    (2, "F0") (2, "F0 B0") (2, "B0")      1F0 1F1 | 1F2 1B0 1F3 1B1 | 1B2 1B3

2. A building block on a v, repeated and squeezed (ZB-V, V-half, V-min, arXiv 2405.15362), see `building_block`.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations, product
from typing import Literal

from penstock.base.errors import ConfigError
from penstock.layout.actions import Action, Kind, Schedule, pair_up, stages_of

Phrase = tuple[int, str]  # (repetitions, words)


def gpipe(ranks: int, rank: int, chunks: int, micro_batches: int) -> list[Phrase]:
    """GPipe (arXiv 1811.06965): all forwards, then all backwards. With several stages, breadth first (2211.05953)."""
    del ranks, rank
    return [(chunks * micro_batches, "F"), (chunks * micro_batches, "B")]


def one_forward_one_backward(ranks: int, rank: int, chunks: int, micro_batches: int) -> list[Phrase]:
    """1F1B with a flush (PipeDream-flush, arXiv 2006.09503): a rank starts with one forward per rank behind it."""
    del chunks
    ahead = min(ranks - 1 - rank, micro_batches)
    return [(ahead, "F0"), (micro_batches - ahead, "F0 B0"), (ahead, "B0")]


def interleaved(ranks: int, rank: int, chunks: int, micro_batches: int, more: int = 0) -> list[Phrase]:
    """Interleaved 1F1B (Megatron, arXiv 2104.04473): several stages per rank, for a shorter ramp.

    Any number of micro-batches works, because the groups are even: one short group at the end could deadlock. With
    `more` forwards ahead, a forward beside a backward belongs to a later micro-batch.
    """
    steps = chunks * micro_batches
    group = -(-micro_batches // groups_to_fill(ranks, micro_batches))
    # Forwards until the first backward arrives: the way to the last rank and back, through all earlier stages.
    ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * group + more, steps)
    return [(ahead, "F"), (steps - ahead, "F B"), (ahead, "B")]


def zero_bubble_1f1b(ranks: int, rank: int, chunks: int, micro_batches: int) -> list[Phrase]:
    """ZB-H1 (arXiv 2401.10241): 1F1B with deferred weight gradients, so that every rank holds as much as the first."""
    del chunks
    ahead = min(ranks - 1 - rank, micro_batches)
    waiting = min(rank, micro_batches)  # deferred weight gradients, which fill the bubble at the end
    paired = min(waiting, micro_batches - ahead)
    return [
        (ahead, "F0"),
        (paired, "F0 I0"),
        (micro_batches - ahead - paired, "F0 I0 W"),
        (waiting - paired, "I0"),
        (ahead - waiting + paired, "I0 W"),
        (waiting, "W"),
    ]


def dualpipe_v(ranks: int, rank: int, chunks: int, micro_batches: int) -> list[Phrase]:
    """DualPipeV (DeepSeek's DualPipe cut in half): both directions on one v, forwards beside backwards of the other.

    A backward right after a forward of the other stage is meant to overlap with it.
    """
    del chunks
    behind = ranks - 1 - rank  # ranks behind this one
    whole = (rank + 1) // 2  # micro-batches at the end whose backwards on both stages are whole
    mixed = 1 - rank % 2  # one more with an even rank: whole on the second stage, split on the first
    return [
        (2 * behind, "F0"),
        (rank + 1, "F0 F1"),
        (behind, "I1 W F1"),
        (micro_batches - ranks - behind, "F0 B1 F1 B0"),
        (behind, "B1 F1 B0"),
        (whole, "B1 B0"),
        (mixed, "B1 I0"),
        (rank + 1 - whole - mixed, "I1 I0"),
        (behind, "W I0"),
        (rank + 1, "W"),
    ]


Grammar = Callable[[int, int, int, int], list[Phrase]]
"""(ranks, rank, stages of a rank, micro-batches) -> the phrases of that rank."""

GRAMMARS: dict[str, Grammar] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-1f1b": zero_bubble_1f1b,
    "dualpipe-v": dualpipe_v,
}

PAIRED_GRAMMARS: dict[str, Grammar] = {"interleaved": partial(interleaved, more=1), "dualpipe-v": dualpipe_v}
"""Grammars of schedules that support pairs of a forward and a backward."""


def groups_to_fill(ranks: int, micro_batches: int) -> int:
    """The largest number of groups with at least one micro-batch per rank."""
    return max(1, micro_batches // ranks)


def grouped(stages: Sequence[int], micro_batches: int, groups: int) -> Iterator[tuple[int, int]]:
    """Yields (stage, micro-batch), group by group through all stages; sizes of groups differ by one at most."""
    for group in range(groups):
        members = range(group * micro_batches // groups, (group + 1) * micro_batches // groups)
        for stage in stages:
            for micro_batch in members:
                yield stage, micro_batch


def spell(phrases: list[Phrase], stages: Sequence[int], micro_batches: int, groups: int) -> tuple[Action, ...]:
    """The actions of a rank's phrases; words without a number go by `groups` of micro-batches."""
    orders = {"F": grouped(stages, micro_batches, groups), "B": grouped(stages[::-1], micro_batches, groups)}
    for chunk, stage in enumerate(stages):
        orders[f"F{chunk}"] = grouped([stage], micro_batches, 1)
        orders[f"B{chunk}"] = orders[f"I{chunk}"] = grouped([stage], micro_batches, 1)
    kinds = {word: Kind(word[0]) for word in orders}
    waiting: deque[Action] = deque()
    actions = []
    for count, phrase in phrases:
        for word in phrase.split() * count:
            if word == Kind.WEIGHT:  # the oldest deferred one
                actions.append(waiting.popleft())
                continue
            stage, micro_batch = next(orders[word])
            actions.append(Action(stage, kinds[word], micro_batch))
            if kinds[word] is Kind.INPUT:
                waiting.append(Action(stage, Kind.WEIGHT, micro_batch))
    return tuple(actions)


SLOTS = 6  # slots between the starts of two blocks: the actions of one rank on one micro-batch

STRIDES = {"zb-v": (4, 2, 4, 2), "v-half": (2, 1, 2, 1), "v-min": (1, 1, 1, 1)}
"""Slots between neighbouring ranks on the four ways of a block: F0, F1, I1, I0."""

RankSlots = tuple[int, ...]  # the slots of one rank in the first block, in the order of `_WORK`
_HOLDS = {Kind.FORWARD: 1, Kind.INPUT: 0, Kind.WEIGHT: -1}  # change in held (stage, micro-batch) pairs by an action

_URGENCY = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
_WORK = ((Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.INPUT, 1), (Kind.INPUT, 0), (Kind.WEIGHT, 1), (Kind.WEIGHT, 0))


@dataclass(frozen=True)
class BuildingBlock:
    """The first block of a schedule (`building_block`)."""

    rows: tuple[RankSlots, ...]  # of each rank
    held: int  # peak of (stage, micro-batch) pairs that a rank holds while blocks repeat


def building_block(name: str, ranks: int) -> BuildingBlock:
    """The building block of a schedule that holds least.

    A block is the way of one micro-batch: down the ranks (F0), back up (F1), and the same ways for the input gradients
    (I1 down, I0 up). A slot fits a forward, an input gradient or a weight gradient. Each rank runs six actions on a
    micro-batch, so a block starts every 6 slots, and a rank's six slots must differ modulo 6. V-min on 3 ranks:

        rank 0  F0 .  .  .  .  F1 .  .  I1 W1 .  .  .  I0 .  .  W0
        rank 1  .  F0 .  .  F1 .  .  .  .  I1 .  W1 I0 .  W0
        rank 2  .  .  F0 F1 .  .  .  .  .  .  I1 I0 W1 W0

    The slots between neighbours on the four ways (`STRIDES`) decide how much a rank holds: with a sum of 12 as much as
    with 1F1B, with 6 half, with 4, the minimum, a third. If opposite ways add up to 6, a rank's slots differ for any
    number of ranks and no slot stays empty. Otherwise the ways pause at the turns: two slots before I1 above.

    This searches pauses of up to 5 slots. Of blocks with equal held pairs it takes the least pauses before F1 and I0,
    and the longest before I1: that gives the shortest ramps.
    """
    blocks = {}
    for before_f1, before_i1, before_i0 in product(range(SLOTS), repeat=3):
        block = _block(STRIDES[name], ranks, (before_f1, before_i1, before_i0))
        if block is not None:
            blocks[block.held, before_f1 + before_i0, before_f1, -before_i1] = block  # the order of preference
    return blocks[min(blocks)]


def _block(strides: tuple[int, int, int, int], ranks: int, pauses: tuple[int, int, int]) -> BuildingBlock | None:
    """The block with these pauses before F1, I1 and I0; None if two of a rank's slots collide."""
    rows = []
    for rank in range(ranks):
        slots, turn = [], 0
        for way, (stride, pause) in enumerate(zip(strides, (*pauses, 0), strict=True)):
            passed = rank if way % 2 == 0 else ranks - 1 - rank  # ranks that this way has passed: down, up, down, up
            slots.append(turn + stride * passed)
            turn += stride * (ranks - 1) + 1 + pause  # the first slot of the next way
        if len({slot % SLOTS for slot in slots}) < len(slots):  # repeated blocks would collide
            return None
        rows.append((*slots, *_weights(slots)))
    return BuildingBlock(tuple(rows), max(map(_held, rows)))


def _weights(slots: list[int]) -> tuple[int, int]:
    """Slots of W1 and W0: the two free ones, each soon after its input gradient."""

    def after(slot: int, free: int) -> int:
        return slot + 1 + (free - slot - 1) % SLOTS

    free = set(range(SLOTS)) - {slot % SLOTS for slot in slots}
    return min(((after(slots[2], slot), after(slots[3], other)) for slot, other in permutations(free)), key=sum)


def _held(row: RankSlots) -> int:
    """Peak of (stage, micro-batch) pairs that wait for their weight gradient in one slot, over all blocks."""
    forward0, forward1, _, _, weight1, weight0 = row
    spans = ((forward0, weight0), (forward1, weight1))
    return max(  # blocks that have begun by this slot, less those whose weight gradient ran before it
        sum((slot - first) // SLOTS - (slot - last - 1) // SLOTS for first, last in spans) for slot in range(SLOTS)
    )


def repeat(block: BuildingBlock, micro_batches: int) -> list[list[Action]]:
    """The actions of each rank, in the order of slots, with a block started every 6 slots."""
    plans = []
    for rank, row in enumerate(block.rows):
        stages = (rank, 2 * len(block.rows) - 1 - rank)
        slots = {
            slot + SLOTS * micro_batch: Action(stages[chunk], kind, micro_batch)
            for slot, (kind, chunk) in zip(row, _WORK, strict=True)
            for micro_batch in range(micro_batches)
        }
        plans.append([slots[slot] for slot in sorted(slots)])
    return plans


def squeeze(plans: list[list[Action]], held: int) -> list[tuple[Action, ...]]:
    """Remove the gaps of a plan: all ranks run slot by slot, each doing the action of `_Rank.choose`.

    While blocks repeat, a rank follows the plan; in the ramps it runs the most urgent possible action, and it never
    holds more than the repeated blocks do. This is one pass without costs, simpler than the published search. `plans`
    are the actions of each rank in a legal order, `held` limits a rank's (stage, micro-batch) pairs.
    """
    ranks = [_Rank(rank, 2 * len(plans), held, plan) for rank, plan in enumerate(plans)]
    given: Counter[tuple[int, Kind]] = Counter()
    while any(rank.left for rank in ranks):
        chosen = [action for rank in ranks if (action := rank.choose(given)) is not None]
        assert chosen, f"nothing can be done after {given.total()} actions"
        given.update((action.stage, action.kind) for action in chosen)
    return [tuple(rank.done) for rank in ranks]


class _Rank:
    """A rank during `squeeze`: its finished actions and the rest of its plan."""

    def __init__(self, rank: int, stages: int, held: int, plan: list[Action]) -> None:
        self.held = held  # the limit
        self.holds = 0
        self.done: list[Action] = []
        self.left = deque(plan)
        self.turn = {action: turn for turn, action in enumerate(plan)}
        self.queues: defaultdict[tuple[int, Kind], deque[Action]] = defaultdict(deque)  # by micro-batch
        for action in plan:
            self.queues[action.stage, action.kind].append(action)
        self.needs = {what: [need[:2] for need in queue[0].needs(stages)] for what, queue in self.queues.items()}
        self.first_gradient = rank, Kind.INPUT
        self.first_forward = rank, Kind.FORWARD
        self.micro_batches = len(self.queues[self.first_forward])

    def choose(self, given: Counter[tuple[int, Kind]]) -> Action | None:
        """Run one action if possible: the next of the plan while blocks repeat, the most urgent one in the ramps.

        A forward is more urgent than an input gradient, that more than a weight gradient; then the plan decides.
        `given` counts the micro-batches of each stage and kind that are finished on all ranks, in order.
        """
        # Before the first gradient returns, and after the last forward starts.
        is_ramp = given[self.first_gradient] == 0 or given[self.first_forward] == self.micro_batches
        nexts = [queue[0] for queue in self.queues.values() if queue] if is_ramp else [self.left[0]]
        ready = [action for action in nexts if self._has_inputs(action, given) and self._fits(action)]
        if not ready:
            return None
        action = ready[0]
        if len(ready) > 1:
            action = min(ready, key=lambda action: (_URGENCY.index(action.kind), self.turn[action]))
        self.queues[action.stage, action.kind].popleft()
        self.left.remove(action)
        self.done.append(action)
        self.holds += _HOLDS[action.kind]
        return action

    def _has_inputs(self, action: Action, given: Counter[tuple[int, Kind]]) -> bool:
        stage, kind, micro_batch = action
        for need in self.needs[stage, kind]:  # noqa: SIM110 (`all` would take twice the time)
            if given[need] <= micro_batch:
                return False
        return True

    def _fits(self, action: Action) -> bool:
        """Whether the limit holds if it runs now and the rest as planned; always true for the next planned action."""
        if action.kind is not Kind.FORWARD or action == self.left[0]:
            return True
        holds = self.holds
        for planned in self.left:
            if holds >= self.held or planned == action:
                break
            holds += _HOLDS[planned.kind]
        return holds < self.held


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Constraints of a schedule on its sizes."""

    placement: Literal["loop", "v"] = "loop"
    fewest: int = 1  # stages of a rank
    most: int | None = 1  # None for any
    micro_batches_per_rank: int = 0  # least micro-batches of a step per rank of the pipeline


_V = Shape(placement="v", fewest=2, most=2)

SCHEDULES: dict[str, Shape] = {
    "gpipe": Shape(most=None),
    "1f1b": Shape(),
    "interleaved": Shape(fewest=2, most=None),
    "zb-1f1b": Shape(),
    "zb-v": _V,
    "v-half": _V,
    "v-min": _V,
    "dualpipe-v": Shape(placement="v", fewest=2, most=2, micro_batches_per_rank=2),
}
"""Every schedule by its name in `pipeline.schedule`."""


def schedule(name: str, *, ranks: int, stages_per_rank: int, micro_batches: int, pairs: bool = False) -> Schedule:
    """The actions of one training step. Raises a ConfigError for an unknown schedule and for sizes it does not support.

    `pairs` pairs each forward with the backward of another micro-batch; only for PAIRED_GRAMMARS.
    """
    shape = _checked(name, ranks, stages_per_rank, micro_batches)
    if name in STRIDES:
        block = building_block(name, ranks)
        actions = squeeze(repeat(block, micro_batches), block.held)
    else:
        # GPipe takes the whole batch through a stage before the next one; there is nothing to alternate with.
        groups = 1 if name == "gpipe" else groups_to_fill(ranks, micro_batches)
        actions = []
        for rank in range(ranks):
            stages = stages_of(rank, ranks=ranks, stages_per_rank=stages_per_rank, placement=shape.placement)
            phrases = (PAIRED_GRAMMARS if pairs else GRAMMARS)[name](ranks, rank, stages_per_rank, micro_batches)
            actions.append(spell(phrases, stages, micro_batches, groups))
    plan = Schedule(
        name=name,
        ranks=ranks,
        stages_per_rank=stages_per_rank,
        placement=shape.placement,
        micro_batches=micro_batches,
        actions=tuple(actions),
    )
    return pair_up(plan) if pairs else plan


def _checked(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> Shape:
    if name not in SCHEDULES:
        raise ConfigError("pipeline.schedule is unknown", got=name, allowed=", ".join(SCHEDULES))
    shape = SCHEDULES[name]
    if ranks < 1:
        raise ConfigError("parallel.pipeline is too small", got=ranks, allowed="1 or more")
    if stages_per_rank < shape.fewest or (shape.most is not None and stages_per_rank > shape.most):
        other = "interleaved" if stages_per_rank > 1 else "1f1b"
        raise ConfigError(
            f"pipeline.stages_per_rank does not suit pipeline.schedule={name}",
            got=stages_per_rank,
            allowed=f"{shape.fewest}" if shape.most else f"{shape.fewest} or more",
            fix=f"pipeline.stages_per_rank={shape.fewest}, or pipeline.schedule={other}",
        )
    least = max(1, shape.micro_batches_per_rank * ranks)
    if micro_batches < least:
        raise ConfigError(
            f"pipeline.schedule={name} on {ranks} ranks has too few micro-batches",
            got=micro_batches,
            allowed=f"{least} or more (training.global_batch over training.micro_batch and the data-parallel ranks)",
            fix="raise training.global_batch, or pipeline.schedule=zb-v" if shape.micro_batches_per_rank else None,
        )
    return shape


def forward_only(training: Schedule, micro_batches: int) -> Schedule:
    """Forwards only of the same stages on the same ranks as in training, for evaluation."""
    assert micro_batches >= 1, f"{micro_batches} micro-batches"
    groups = groups_to_fill(training.ranks, micro_batches)
    actions = []
    for rank in range(training.ranks):
        phrases = [(training.stages_per_rank * micro_batches, "F")]
        if training.placement == "v":  # a rank works ahead until its first micro-batch is back from the ranks behind it
            ahead = min(2 * (training.ranks - 1 - rank), micro_batches)
            phrases = [(ahead, "F0"), (micro_batches - ahead, "F0 F1"), (ahead, "F1")]
        actions.append(spell(phrases, training.stages_of(rank), micro_batches, groups))
    return replace(training, micro_batches=micro_batches, actions=tuple(actions), trains=False, pairs=())
