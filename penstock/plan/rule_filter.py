"""Refusals of a search, put together so that tens of thousands stay readable: one line for one reason."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from penstock.plan.candidates import GRID, SearchSpace, with_recompute, worse_way
from penstock.plan.memory import RankMemory
from penstock.plan.projection import Layout, Refusal
from penstock.plan.rules.book import OrderKey, order_key, out_of_order
from penstock.plan.rules.rule import Rule, Sizes

MEMORY = "memory"
"""Name of what refuses a layout that does not fit."""

SLOWER = "slower"
"""Name of what refuses a layout that fits, or may fit, and is not among the fastest."""

_NAMES = tuple(field.name for field in fields(Layout))

COMPONENTS = (
    "parameters",
    "gradients",
    "master",
    "moments",
    "buffers",
    "libraries",
    "reserve",
    "gathered",
    "logits",
    "activations",
    "graph_pool",
    "communication",
)
"""In which order memory is filled when it is asked what overflows: first what stays, then what passes."""


def layout_of_sizes(sizes: Sizes, settled: tuple[str, ...]) -> dict[str, Any]:
    """A layout by the names of the JSON contract; None for what is not settled."""
    follows = ("dp", "edp") if {"tp", "cp", "pp", "ep", "etp"} <= set(settled) else ()
    values = {name: size_of(sizes, name) for name in (*settled, *follows)}
    return {name: values.get(name) for name in _NAMES}


def size_of(sizes: Sizes, name: str) -> Any:
    """A part of a layout by its name in the JSON contract."""
    match name:
        case "recompute":
            return "+".join(sizes.recompute) or "none"
        case "sync_free_stage":
            return sizes.sync_free
    return getattr(sizes, name)


@dataclass(frozen=True)
class _Group:
    refusal: Refusal
    weight: float


class Refusals:
    """Collects them."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group] = {}
        self.count = 0

    def by_rule(self, sizes: Sizes, refusal: tuple[Rule, str], count: int) -> None:
        """A rule has something against layouts.

        Args:
            sizes: one of them.
            refusal: the rule and its reason.
            count: of layouts.
        """
        rule, reason = refusal
        self.refuse(sizes, (*GRID, "schedule", "vpp", "micro_batch"), (rule.name, reason), count)

    def refuse(
        self, sizes: Sizes, settled: tuple[str, ...], why: tuple[str, str], count: int, weight: float = 0.0
    ) -> None:
        """Layouts are not among the candidates.

        Args:
            sizes: one of them.
            settled: parts that all of them have in common.
            why: rule and reason.
            count: of layouts.
            weight: the reason with the least is told of those that are told together.
        """
        rule, reason = why
        layout = layout_of_sizes(sizes, settled)
        # Layouts that do not fit, or are slow, are told by grid; those that a rule refuses by rule.
        grid = tuple(layout[name] for name in GRID) if rule in (MEMORY, SLOWER) else ()
        self.add(Refusal(layout=layout, rule=rule, reason=reason, count=count), (rule, grid), weight)

    def add(self, refusal: Refusal, key: Hashable, weight: float = 0.0) -> None:
        """One more.

        Args:
            refusal: with its count.
            key: refusals of one key become one; of their layouts stays what they agree on.
            weight: the reason with the least is told.
        """
        self.count += refusal.count
        held = self._groups.get(key)
        if held is None:
            self._groups[key] = _Group(refusal, weight)
            return
        told = refusal if weight < held.weight else held.refusal
        common = {name: value if refusal.layout[name] == value else None for name, value in held.refusal.layout.items()}
        both = replace(told, layout=common, count=refusal.count + held.refusal.count)
        self._groups[key] = _Group(both, min(weight, held.weight))

    def all(self) -> tuple[Refusal, ...]:
        """One for each key, those that stand for most first."""
        return tuple(sorted((one.refusal for one in self._groups.values()), key=lambda one: -one.count))


def overflow(memory: RankMemory, capacity: int) -> str:
    """Which component does not fit any more, and how much is missing."""
    filled = 0
    for name in COMPONENTS:
        filled += vars(memory)[name]
        if filled > capacity:
            break
    over, size = memory.total - capacity, vars(memory)[name]
    return (
        f"{name} ({size / 1e9:.1f} GB, {memory.moment}, rank {memory.rank}) overflow by {over / 1e9:.1f} GB: "
        f"{memory.total / 1e9:.1f} of {capacity / 1e9:.1f} GB"
    )


Judge = Callable[[Sizes], tuple[Rule, str] | None]
"""Which rule refuses a layout, and why."""


@dataclass(frozen=True)
class Candidate:
    """A slot, and the part of its ladder that has one place in the order of the workflow."""

    sizes: Sizes
    steps: tuple[tuple[str, ...], ...]

    def at(self, modules: tuple[str, ...]) -> Sizes:
        """With something computed twice."""
        return with_recompute(self.sizes, modules)


@dataclass(frozen=True)
class CandidateGroup:
    """The same with several ways of the tokens: dispatcher and sync-free stage."""

    pace: Sizes
    ways: tuple[tuple[str, int], ...]
    steps: tuple[tuple[str, ...], ...]

    @property
    def count(self) -> int:
        """Layouts."""
        return len(self.ways) * len(self.steps)

    def each(self) -> Iterator[Candidate]:
        """One for each way."""
        for dispatcher, sync_free in self.ways:
            yield Candidate(replace(self.pace, dispatcher=dispatcher, sync_free=sync_free), self.steps)


class RuleFilter:
    """Lets through what no rule refuses.

    Args:
        space: what there is.
        refusals: where all others go.
    """

    def __init__(self, space: SearchSpace, refusals: Refusals) -> None:
        self._space = space
        self._refusals = refusals

    def tries(self, refusal_of: Judge) -> dict[OrderKey, list[CandidateGroup]]:
        """What no rule refuses and whose state fits, by its place in the order."""
        tries: dict[OrderKey, list[CandidateGroup]] = defaultdict(list)
        for grid in self._space.grids():
            if (refusal := refusal_of(grid)) is not None:
                self._refusals.by_rule(grid, refusal, self._space.size_of_grid(grid))
                continue
            paces = [pace for order in self._space.orders(grid) for pace in self._space.paces(grid, order)]
            paces = [pace for pace in paces if not self._is_refused(pace, refusal_of)]
            if paces:
                self._sort(grid, paces, tries, refusal_of)
        return tries

    def _is_refused(self, pace: Sizes, refusal_of: Judge) -> bool:
        """Whether a rule has something against a schedule with its micro-batches, which is noted."""
        if (refusal := refusal_of(pace)) is None:
            return False
        self._refusals.by_rule(pace, refusal, len(self._space.ways(pace)) * len(self._space.ladder))
        return True

    def _sort(
        self, grid: Sizes, paces: Sequence[Sizes], tries: dict[OrderKey, list[CandidateGroup]], refusal_of: Judge
    ) -> None:
        """Cross paces with ways of the tokens, about which rules do not ask together, and steps of the ladder."""
        ladder = self._space.ladder
        ways = [way for way in self._space.with_ways(grid) if not self._is_no_way(way, len(paces), refusal_of)]
        if not ways:
            return
        ranks = [order_key(with_recompute(paces[0], modules)) for modules in ladder]
        named = tuple((way.dispatcher, way.sync_free) for way in ways)
        # What a ladder changes in the order, it changes alike on all schedules.
        changes = [{at: rank[at] for at in range(len(rank)) if rank[at] != ranks[0][at]} for rank in ranks]
        for pace in paces:
            steps: dict[OrderKey, list[tuple[str, ...]]] = defaultdict(list)
            own = order_key(pace)
            for modules, changed in zip(ladder, changes, strict=True):
                key = tuple([changed.get(at, rank) for at, rank in enumerate(own)]) if changed else own
                steps[key].append(modules)
            for key, found in steps.items():
                tries[key].append(CandidateGroup(pace, named, tuple(found)))

    def _is_no_way(self, way: Sizes, paces: int, refusal_of: Judge) -> bool:
        """Whether a rule has something against a way of the tokens, which is noted."""
        if (refusal := refusal_of(way)) is not None:
            self._refusals.by_rule(way, refusal, paces * len(self._space.ladder))
            return True
        if (worse := worse_way(way, self._space.ways(way))) is not None:
            count_ = paces * len(self._space.ladder)
            self._refusals.refuse(way, ("sync_free_stage", "dispatcher"), worse, count_)
            return True
        return False

    def refuse_later(self, tries: Sequence[CandidateGroup], fits: OrderKey) -> None:
        """What has one place in the order has one reason to be there."""
        first = with_recompute(tries[0].pace, tries[0].steps[0])
        refusal = out_of_order(first, fits)
        assert refusal is not None, f"{first} comes after what fits"
        agreed = tuple(name for name in GRID if len({size_of(one.pace, name) for one in tries}) == 1)
        self._refusals.refuse(first, agreed, (refusal[0].name, refusal[1]), sum(one.count for one in tries))
