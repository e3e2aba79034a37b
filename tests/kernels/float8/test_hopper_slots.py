"""How slots of shared memory change hands between a loader and multipliers, in every order that may happen."""

import random
from collections.abc import Iterator

import pytest

from penstock.kernels.float8 import hopper_products

pytestmark = pytest.mark.skipif(not hopper_products.HAS_GLUON, reason="no Gluon that the kernels know")

if hopper_products.HAS_GLUON:
    from penstock.kernels.hopper_ring import ring


class Barrier:
    """As the hardware has it: so many arrivals end a phase; who waits for a parity goes on once that phase is over."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.phase = 0

    def arrive(self) -> None:
        self.pending -= 1
        if self.pending == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals

    def is_over(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Program:
    """One program's loader and multipliers, each a generator that gives what it waits for, by the kernels' order.

    A tile is its number of blocks and how many multipliers have rows of it. A block and its scales land apart.
    """

    def __init__(self, tiles: list[tuple[int, int]], stages: int, steps: int, multipliers: int) -> None:
        self.tiles, self.stages, self.steps = tiles, stages, steps
        self.full = [Barrier(2) for _ in range(stages)]
        self.empty = [Barrier(multipliers) for _ in range(stages)]
        self.slots = {(slot, what): -1 for slot in range(stages) for what in ("block", "scales")}
        self.finished = [0] * multipliers
        self.flying: list[tuple[int, str, int]] = []

    def load(self) -> Iterator[tuple[Barrier, int]]:
        step = 0
        for blocks, _ in self.tiles:
            for _ in range(blocks):
                slot, phase = ring.fn(step, self.stages)
                yield self.empty[slot], phase ^ 1
                assert min(self.finished) > step - self.stages, "a slot is filled that somebody still needs"
                self.flying += [(slot, "block", step), (slot, "scales", step)]
                step += 1

    def land(self, which: int) -> None:
        slot, what, step = self.flying.pop(which)
        self.slots[slot, what] = step
        self.full[slot].arrive()

    def multiply(self, place: int) -> Iterator[tuple[Barrier, int]]:
        step = 0
        for blocks, busy in self.tiles:
            turns = [self.steps] * (blocks // self.steps) + [1] * (blocks % self.steps)
            for turn in turns if place < busy else [1] * blocks:
                places = [ring.fn(step + ahead, self.stages) for ahead in range(turn)]
                for slot, phase in places:
                    yield self.full[slot], phase
                for slot, _ in places:
                    held = {self.slots[slot, what] for what in ("block", "scales")}
                    assert held == {step}, "a slot holds another step's blocks or scales"
                    self.finished[place] = step + 1
                    self.empty[slot].arrive()
                    step += 1

    def run(self, chance: random.Random) -> None:
        """Let whoever may go on do so, in any order, until all are done."""
        workers = [self.load(), *(self.multiply(place) for place in range(len(self.finished)))]
        waits = {worker: next(worker, None) for worker in workers}
        while self.flying or any(waits.values()):
            ready = [worker for worker, wait in waits.items() if wait and wait[0].is_over(wait[1])]
            assert ready or self.flying, "everybody waits"
            if self.flying and (not ready or chance.random() < 0.3):
                self.land(chance.randrange(len(self.flying)))
            else:
                worker = chance.choice(ready)
                waits[worker] = next(worker, None)


@pytest.mark.parametrize("multipliers", [2, 3])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_slots_change_hands_without_a_deadlock_and_without_being_overwritten(
    stages: int, steps: int, multipliers: int
) -> None:
    chance = random.Random(stages * 10 + steps)
    for _ in range(40):
        tiles = [
            (chance.choice([0, 1, 2, 3, 5, 16]), chance.randint(1, multipliers)) for _ in range(chance.randrange(9))
        ]
        program = Program(tiles, stages, steps, multipliers)
        program.run(chance)
        assert program.finished == [sum(blocks for blocks, _ in tiles)] * multipliers
