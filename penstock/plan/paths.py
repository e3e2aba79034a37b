"""Longest paths through schedules whose order costs more than the work of the busiest place.

In V-Half and V-Min a place waits for others in every round if a forward pass, an input gradient and weight gradients
take different times. Any path through the actions of a schedule bounds a step by the sum of their times, whatever these
are. The longest path for about the same times gives a close bound, and many layouts share it.
"""

from functools import cache

import numpy as np

from penstock.layout.actions import Kind, Schedule, even_costs, play
from penstock.layout.schedules import schedule

PASSES: dict[Kind, tuple[int, int, int]] = {
    Kind.FORWARD: (1, 0, 0),
    Kind.BACKWARD: (0, 1, 1),
    Kind.INPUT: (0, 1, 0),
    Kind.WEIGHT: (0, 0, 1),
}
"""Forward passes, input gradients and weight gradients of an action."""


SCHEDULES = ("v-half", "v-min")

ROUNDS = 3
"""Micro-batches for each rank of the longest schedule that is played: a longer one repeats its last round."""


def path_counts(
    name: str, ranks: int, stages_per_rank: int, micro_batches: int, times: tuple[float, float, float]
) -> np.ndarray:
    """[stages, 3]: forward passes, input gradients and weight gradients on the longest path of equal stages.

    `times` are those of the three.
    """
    shape, played = (name, ranks, stages_per_rank), min(micro_batches, ROUNDS * ranks)
    path = _longest(shape, played, times)
    if played < micro_batches:
        path = path + (micro_batches - played) / ranks * (path - _longest(shape, played - ranks, times))
    return path


@cache
def _longest(shape: tuple[str, int, int], micro_batches: int, times: tuple[float, float, float]) -> np.ndarray:
    plan = _schedule(*shape, micro_batches)
    ends, steps = play(plan, even_costs(plan.stages, times)).ends, plan.execution_order.done
    last: dict[int, int] = {}  # the step before on each rank
    before = []
    for number, step in enumerate(steps):
        before.append([source for source in (last.get(step.rank), *step.after) if source is not None])
        last[step.rank] = number
    counts = np.zeros((plan.stages, 3))
    path = [max(range(len(ends)), key=ends.__getitem__)]
    while path:
        for action in steps[path[-1]].unit:
            counts[action.stage] += PASSES[action.kind]
        path = sorted(before[path[-1]], key=ends.__getitem__)[-1:]
    return counts


@cache
def _schedule(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> Schedule:
    return schedule(name, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)
