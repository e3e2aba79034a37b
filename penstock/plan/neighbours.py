"""Layouts near another one, for a search that ends before its bounds prove a best (`penstock.plan.search`).

Bounds are loose by different factors, so layouts with the least bounds may be slow ones, and there are many. Layouts
that differ from a fast one in a part are few, and their bounds are about equally loose.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.plan.candidates import Experts, Saving
from penstock.plan.divisions import Divisions

GROUP, EXPERTS, LOOK, FIT, PLAY = range(5)
"""What comes next for layouts that wait: a bound by their experts, of each division, of inner stages, of all; play."""

NEAR = 2  # layouts of each other schedule and number of pipeline ranks, those with the least bound


class SearchNode(NamedTuple):
    """A layout by its indices: family, shape, saving, dense, experts, shard, rows, and its sync-free stage."""

    family: int
    shape: int
    saving: int
    dense: int
    experts: int
    shard: int
    rows: int
    sync_free: int


class Waiting(NamedTuple):
    """Layouts to look at: seconds that they cannot go below, and how closely these are known (`penstock.plan.search`).

    Before step `LOOK` the node stands for all divisions of dense ranks, shards and rows beside its experts.
    """

    bound: float
    step: int
    node: SearchNode


def neighbours(
    node: SearchNode,
    divisions: Sequence[Divisions],
    savings: Sequence[Saving],
    seconds_of: Callable[[Divisions, int, Saving], np.ndarray],
) -> Iterator[SearchNode]:
    """Layouts with another saving, way of the experts, dense ranks, schedule or pipeline ranks.

    Rows and shards change with the last three, because not all go together. `divisions` are those of each family,
    `seconds_of` gives bounds of them with a shape and a saving.
    """
    here = divisions[node.family].family
    yield from (node._replace(saving=saving) for saving in range(len(savings)))
    for number, experts in enumerate(here.experts):
        yield from (node._replace(experts=number, sync_free=stage) for stage in experts.stages)
    way, ranks = _way(here.experts[node.experts]), here.dense[node.dense]
    for f, every in enumerate(divisions):
        family = every.family
        for number, experts in enumerate(family.experts):
            if _way(experts) != way:
                continue
            stage = node.sync_free if node.sync_free in experts.stages else experts.stages[0]
            same = every.where(every.places[:, 1] == number)
            has_ranks = np.array([pair == ranks for pair in family.dense])[same.places[:, 0]]
            for shape in range(len(family.shapes)):
                is_here = (f, shape) == (node.family, node.shape)
                if not (asked := same.legal(shape) & (has_ranks | is_here)).any():
                    continue
                seconds = np.where(asked, seconds_of(same, shape, savings[node.saving]), math.inf)
                for at in seconds.argsort()[: int(asked.sum()) if is_here else NEAR].tolist():
                    if asked[at]:
                        dense, _, shard, rows = same.places[at].tolist()
                        yield SearchNode(f, shape, node.saving, dense, number, shard, rows, stage)


def _way(experts: Experts) -> tuple[int, int, str]:
    return experts.ep, experts.etp, experts.dispatcher
