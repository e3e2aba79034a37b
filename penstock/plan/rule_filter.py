"""What of a search's layouts no rule refuses, by its place in the order of the workflow.

Rules are asked of grids first, then of paces and of ways on a grid, each alone: no rule looks at both. What is left is
kept in groups (`Tries`), because there are tens of thousands, and most are never looked at.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.plan.candidates import GRID, Space, with_recompute, worse_way
from penstock.plan.refusals import Refusals, size_of
from penstock.plan.rules.book import OrderKey, order_key, out_of_order
from penstock.plan.rules.rule import Rule
from penstock.plan.rules.sizes import Sizes

Judge = Callable[[Sizes], tuple[Rule, str] | None]
"""Which rule refuses a layout, and why."""


@dataclass(frozen=True)
class Try:
    """A slot, and the part of its ladder that has one place in the order of the workflow."""

    sizes: Sizes
    steps: tuple[tuple[str, ...], ...]

    def at(self, modules: tuple[str, ...]) -> Sizes:
        """With something computed twice."""
        return with_recompute(self.sizes, modules)


@dataclass(frozen=True)
class Tries:
    """The same with several ways of the tokens: dispatcher and sync-free stage."""

    pace: Sizes
    ways: tuple[tuple[str, int], ...]
    steps: tuple[tuple[str, ...], ...]

    @property
    def count(self) -> int:
        """Layouts."""
        return len(self.ways) * len(self.steps)

    def each(self) -> Iterator[Try]:
        """One for each way."""
        for dispatcher, sync_free in self.ways:
            yield Try(replace(self.pace, dispatcher=dispatcher, sync_free=sync_free), self.steps)


class RuleFilter:
    """Lets through what no rule refuses.

    Args:
        space: what there is.
        refusals: where all others go.
    """

    def __init__(self, space: Space, refusals: Refusals) -> None:
        self._space = space
        self._refusals = refusals

    def tries(self, refusal_of: Judge) -> dict[OrderKey, list[Tries]]:
        """What no rule refuses and whose state fits, by its place in the order."""
        tries: dict[OrderKey, list[Tries]] = defaultdict(list)
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

    def _sort(self, grid: Sizes, paces: Sequence[Sizes], tries: dict[OrderKey, list[Tries]], refusal_of: Judge) -> None:
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
                tries[key].append(Tries(pace, named, tuple(found)))

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

    def refuse_later(self, tries: Sequence[Tries], fits: OrderKey) -> None:
        """What has one place in the order has one reason to be there."""
        first = with_recompute(tries[0].pace, tries[0].steps[0])
        refusal = out_of_order(first, fits)
        assert refusal is not None, f"{first} comes after what fits"
        agreed = tuple(name for name in GRID if len({size_of(one.pace, name) for one in tries}) == 1)
        self._refusals.refuse(first, agreed, (refusal[0].name, refusal[1]), sum(one.count for one in tries))
