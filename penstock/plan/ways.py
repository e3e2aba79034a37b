"""Ways of dividing a model, so that the rows of a plan differ: it shows the fastest layout that was found of each."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np

from penstock.plan.candidates import Divisions, Experts, Saving, SearchSpace
from penstock.plan.rules import Sizes
from penstock.plan.space_bounds import SpaceBounds

# Layouts near another one, for a search that ends before its bounds prove a best (`penstock.plan.search`).
#
# Bounds are loose by different factors, so layouts with the least bounds may be slow ones, and there are many. Layouts
# that differ from a fast one in a part are few, and their bounds are about equally loose.


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


FEW, SHAPES, TRIES = 100, 8, 4
"""Of each way: divisions of each family, schedules of all families, and layouts for each guess of their activations."""

CAUTION = 1.3  # activations are this many times their bound in the first guess, which may not fit

Item = TypeVar("Item")


class Way(NamedTuple):
    """What cuts a model. One without experts is cut by tensor and context ranks."""

    cuts: tuple[bool, bool]  # by expert and expert_tensor ranks, or by tensor and context ranks
    has_pipeline: bool
    recomputes: bool


def way_of(sizes: Sizes) -> Way:
    cuts = (sizes.ep > 1, sizes.etp > 1) if sizes.model.experts else (sizes.tp > 1, sizes.cp > 1)
    return Way(cuts, sizes.pp > 1, bool(sizes.recompute))


def first_of_each(items: Sequence[Item], way: Callable[[Item], Way], count: int) -> list[Item]:
    """So many items in their order: the first of each way, and then others."""
    firsts: dict[Way, int] = {}
    for at, item in enumerate(items):
        firsts.setdefault(way(item), at)
    places = dict.fromkeys((*firsts.values(), *range(len(items))))
    return [items[at] for at in sorted(list(places)[:count])]


def promising(
    bounds: SpaceBounds, some: Divisions, indices: tuple[int, int, int], saving: Saving, room: int, caution: float
) -> Iterator[tuple[float, SearchNode]]:
    """Of some divisions the layout with the least bound for each micro-batch, of those that seem to fit.

    `indices` are those of family, shape and saving; activations are `caution` times their bound.
    """
    if not some.legal(indices[1]).any():
        return
    memory = bounds.bytes(some, indices[1], saving, kept_times=caution)
    seconds = np.where(memory <= room, bounds.seconds(some, indices[1], saving), np.inf)
    for size in np.unique(some.places[:, 3]):
        at = int(np.where(some.places[:, 3] == size, seconds, np.inf).argmin())
        if math.isfinite(seconds[at]):
            dense, experts, shard, rows = some.places[at].tolist()
            stage = some.family.experts[experts].stages[0]
            yield float(seconds[at]), SearchNode(*indices, dense, experts, shard, rows, stage)


def promising_of_ways(
    bounds: SpaceBounds, space: SearchSpace, divisions: Sequence[Divisions], room: int, caution: float
) -> Iterator[list[SearchNode]]:
    """Layouts of each way that seem to fit, those with the least bounds by a first guess and by `caution`."""
    shapes: dict[tuple[bytes, bool], list[tuple[float, int, int, Divisions]]] = {}
    for f, every in enumerate(divisions):
        for cuts, same in _by_cuts(every):
            some = bounds.fastest(every, FEW, room, same)
            for shape in range(len(every.family.shapes)):
                if some.legal(shape).any():
                    least = float(bounds.seconds(some, shape, space.savings[0]).min())
                    shapes.setdefault((cuts, every.family.pp > 1), []).append((least, f, shape, some))
    for of_cuts in shapes.values():
        few = heapq.nsmallest(SHAPES, of_cuts, key=lambda entry: entry[:3])
        for recomputes in (False, True):
            savings = [v for v, saving in enumerate(space.savings) if bool(saving.recompute) == recomputes]
            nodes: dict[SearchNode, None] = {}
            for guess in (CAUTION, caution):
                tries = [
                    entry
                    for (_, f, shape, some), v in product(few, savings)
                    for entry in promising(bounds, some, (f, shape, v), space.savings[v], room, guess)
                ]
                nodes |= dict.fromkeys(node for _, node in heapq.nsmallest(TRIES, tries))
            yield list(nodes)


def _by_cuts(divisions: Divisions) -> list[tuple[bytes, np.ndarray]]:
    """Which divisions of one family have the same `Way.cuts`, each with a key of it."""
    family, (dense, experts, *_) = divisions.family, divisions.places.T
    has_experts = any(expert.dispatcher != "local" for expert in family.experts)
    pairs = [(expert.ep, expert.etp) for expert in family.experts] if has_experts else family.dense
    cuts = (np.array(pairs).reshape(-1, 2) > 1)[experts if has_experts else dense]
    return [(cut.tobytes(), (cuts == cut).all(1)) for cut in np.unique(cuts, axis=0)]
