"""Schedules on a v that are one building block, repeated and squeezed: ZB-V, V-half, V-min (arXiv 2405.15362).

A block is the way of one micro-batch: down the ranks (F0), back up (F1), and the same two ways for the input gradients
(I1 down, I0 up). Time is cut into slots that fit a forward, an input gradient or a weight gradient. Each rank does six
things to a micro-batch, so a block starts every 6 slots, and a rank's six slots must differ modulo 6. V-min on 3 ranks:

    rank 0  F0 .  .  .  .  F1 .  .  I1 W1 .  .  .  I0 .  .  W0
    rank 1  .  F0 .  .  F1 .  .  .  .  I1 .  W1 I0 .  W0
    rank 2  .  .  F0 F1 .  .  .  .  .  .  I1 I0 W1 W0

The sooner a gradient comes back, the less a rank holds, and that is a matter of the slots between neighbours on the
four ways (`STRIDES`): if they add up to 12, a rank holds as much as with 1F1B, with 6 half, with 4, the least, a third.
If ways of opposite direction add up to 6, a rank's slots differ for any number of ranks, and no slot stays empty.
Otherwise the ways pause where they turn: two slots before I1 above.

Repeating makes a legal plan. `squeeze` plays it slot by slot without its gaps: while blocks repeat a rank follows the
plan, in the ramps it does the most urgent thing that can be done, and it never holds more than the repeated blocks do.
This is simpler than the published search: one pass, no costs. docs/schedules.md has both results.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from itertools import permutations, product

from penstock.layout.actions import Action, Kind

SLOTS = 6
"""Slots between two blocks: what a rank does to one micro-batch."""

STRIDES = {"zb-v": (4, 2, 4, 2), "v-half": (2, 1, 2, 1), "v-min": (1, 1, 1, 1)}
"""Slots between neighbouring ranks on the four ways of a block: F0, F1, I1, I0."""

Row = tuple[int, ...]
"""The slots of one rank in the first block, in the order of `_WORK`."""

_HOLDS = {Kind.FORWARD: 1, Kind.INPUT: 0, Kind.WEIGHT: -1}
"""(stage, micro-batch) pairs that an action adds to those that its rank holds."""

_URGENCY = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
_WORK = ((Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.INPUT, 1), (Kind.INPUT, 0), (Kind.WEIGHT, 1), (Kind.WEIGHT, 0))


@dataclass(frozen=True)
class Block:
    """A building block.

    Attributes:
        rows: slots of each rank.
        held: the most that a rank holds while blocks repeat, in (stage, micro-batch) pairs.
    """

    rows: tuple[Row, ...]
    held: int


def building_block(name: str, ranks: int) -> Block:
    """The block of a schedule that holds least, of all that pause up to 5 slots where the way turns.

    Among those that hold as little, it is the one that pauses least before F1 and I0, and longest before I1: that makes
    the shortest ramps.
    """
    blocks = {}
    for before_f1, before_i1, before_i0 in product(range(SLOTS), repeat=3):
        block = _block(STRIDES[name], ranks, (before_f1, before_i1, before_i0))
        if block is not None:
            blocks[block.held, before_f1 + before_i0, before_f1, -before_i1] = block
    return blocks[min(blocks)]


def _block(strides: tuple[int, int, int, int], ranks: int, pauses: tuple[int, int, int]) -> Block | None:
    """The block with these pauses before F1, I1 and I0, or None if two of a rank's slots collide."""
    rows = []
    for rank in range(ranks):
        slots, turn = [], 0
        for way, (stride, pause) in enumerate(zip(strides, (*pauses, 0), strict=True)):
            passed = rank if way % 2 == 0 else ranks - 1 - rank
            slots.append(turn + stride * passed)
            turn += stride * (ranks - 1) + 1 + pause
        if len({slot % SLOTS for slot in slots}) < len(slots):
            return None
        rows.append((*slots, *_weights(slots)))
    return Block(tuple(rows), max(map(_held, rows)))


def _weights(slots: list[int]) -> tuple[int, int]:
    """Slots of W1 and W0: the two that are free, each soon after its input gradient."""

    def after(slot: int, free: int) -> int:
        return slot + 1 + (free - slot - 1) % SLOTS

    free = set(range(SLOTS)) - {slot % SLOTS for slot in slots}
    return min(((after(slots[2], one), after(slots[3], other)) for one, other in permutations(free)), key=sum)


def _held(row: Row) -> int:
    """The most (stage, micro-batch) pairs that wait for their weight gradient in one slot, all blocks together."""
    forward0, forward1, _, _, weight1, weight0 = row
    spans = ((forward0, weight0), (forward1, weight1))
    return max(
        sum((slot - first) // SLOTS - (slot - last - 1) // SLOTS for first, last in spans) for slot in range(SLOTS)
    )


def repeat(block: Block, micro_batches: int) -> list[list[Action]]:
    """The block, started every 6 slots: what each rank does, in the order of the slots."""
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
    """The plans without their gaps: all ranks at once, slot by slot, each doing what `_Rank.choose` says.

    Args:
        plans: what each rank does, in a legal order.
        held: the most (stage, micro-batch) pairs that a rank may hold; no less than the plans need.
    """
    ranks = [_Rank(rank, 2 * len(plans), held, plan) for rank, plan in enumerate(plans)]
    given: Counter[tuple[int, Kind]] = Counter()
    while any(rank.left for rank in ranks):
        chosen = [action for rank in ranks if (action := rank.choose(given)) is not None]
        assert chosen, f"nothing can be done after {given.total()} actions"
        given.update((action.stage, action.kind) for action in chosen)
    return [tuple(rank.done) for rank in ranks]


class _Rank:
    """One rank while it is squeezed: what it has done, and what is left of its plan."""

    def __init__(self, rank: int, stages: int, held: int, plan: list[Action]) -> None:
        self.held = held
        self.holds = 0
        self.done: list[Action] = []
        self.left = deque(plan)
        self.turn = {action: turn for turn, action in enumerate(plan)}
        self.queues: defaultdict[tuple[int, Kind], deque[Action]] = defaultdict(deque)
        for action in plan:
            self.queues[action.stage, action.kind].append(action)
        self.needs = {what: [need[:2] for need in queue[0].needs(stages)] for what, queue in self.queues.items()}
        self.first_gradient = rank, Kind.INPUT
        self.first_forward = rank, Kind.FORWARD
        self.micro_batches = len(self.queues[self.first_forward])

    def choose(self, given: Counter[tuple[int, Kind]]) -> Action | None:
        """Do one action if any can be done: the next of the plan while blocks repeat, in the ramps the most urgent.

        A forward is more urgent than an input gradient, that more than a weight gradient; then the plan decides.

        Args:
            given: micro-batches of each stage and kind that all ranks have done, each in the order of its number.
        """
        is_ramp = given[self.first_gradient] == 0 or given[self.first_forward] == self.micro_batches
        nexts = [queue[0] for queue in self.queues.values() if queue] if is_ramp else [self.left[0]]
        ready = [action for action in nexts if self._has_all(action, given) and self._fits(action)]
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

    def _has_all(self, action: Action, given: Counter[tuple[int, Kind]]) -> bool:
        stage, kind, micro_batch = action
        return all(given[need] > micro_batch for need in self.needs[stage, kind])

    def _fits(self, action: Action) -> bool:
        """Doing it now, and the rest as planned, never makes the rank hold too much. What has its turn always fits."""
        if action.kind is not Kind.FORWARD or action == self.left[0]:
            return True
        holds = self.holds
        for planned in self.left:
            if holds >= self.held or planned == action:
                break
            holds += _HOLDS[planned.kind]
        return holds < self.held
