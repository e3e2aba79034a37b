"""Filter candidate layouts by the rules, and collect the refusals of a search: one line for one reason.

Rules are asked about grids first, then about pipelines and dispatches on a grid, each alone: no rule reads both. The
rest is grouped by place in the order of the workflow (`Candidates`), because there are tens of thousands of layouts and
most are never looked at.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from penstock.plan.candidates import GRID, SearchSpace, with_recompute, worse_dispatch
from penstock.plan.memory import FIXED, STATE, RankMemory
from penstock.plan.projection import Layout, Refusal
from penstock.plan.rules.book import OrderKey, order_key, out_of_order
from penstock.plan.rules.rule import Rule, Sizes

MEMORY = "memory"
"""Rule of a layout that does not fit."""

SLOWER = "slower"
"""Rule of a layout that fits, or may fit, and is not among the fastest."""

_NAMES = tuple(field.name for field in fields(Layout))

_FILLED = (*STATE, "buffers", *FIXED, "gathered", "logits", "activations", "graph_pool", "communication")
"""The order in which memory is filled to find the component that overflows: state first, then the passes."""


def size_of(sizes: Sizes, name: str) -> Any:
    """A part of a layout by its name in the JSON contract."""
    if name == "recompute":
        return "+".join(sizes.recompute) or "none"
    return getattr(sizes, "sync_free" if name == "sync_free_stage" else name)


class Refusals:
    """Refused layouts, grouped by reason."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, tuple[Refusal, float]] = {}
        self.count = 0

    def by_rule(self, sizes: Sizes, refusal: tuple[Rule, str], count: int) -> None:
        """A rule and its reason refuse `count` layouts like this one."""
        rule, reason = refusal
        self.refuse(sizes, (*GRID, "schedule", "vpp", "micro_batch"), (rule.name, reason), count)

    def refuse(
        self, sizes: Sizes, settled: tuple[str, ...], why: tuple[str, str], count: int, weight: float = 0.0
    ) -> None:
        """`count` layouts that agree in the parts `settled` are not candidates; `why` is the rule and its reason.

        Of refusals in one group, the reason with the least `weight` is shown.
        """
        rule, reason = why
        follows = ("dp", "edp") if set(GRID) <= set(settled) else ()
        values = {name: size_of(sizes, name) for name in (*settled, *follows)}
        # By the names of the JSON contract; None for parts that are not settled.
        layout = {name: values.get(name) for name in _NAMES}
        # Layouts that do not fit, or are slow, are grouped by grid; those that a rule refuses by rule.
        grid = tuple(layout[name] for name in GRID) if rule in (MEMORY, SLOWER) else ()
        self.add(Refusal(layout=layout, rule=rule, reason=reason, count=count), (rule, grid), weight)

    def add(self, refusal: Refusal, key: Hashable, weight: float = 0.0) -> None:
        """Add a refusal to the group of a key: the layout keeps the parts that all agree on."""
        self.count += refusal.count
        held, least = self._groups.get(key, (None, weight))
        if held is not None:
            told = refusal if weight < least else held
            common = {name: value if refusal.layout[name] == value else None for name, value in held.layout.items()}
            refusal = replace(told, layout=common, count=refusal.count + held.count)
        self._groups[key] = refusal, min(weight, least)

    def all(self) -> tuple[Refusal, ...]:
        """One refusal for each group, the largest first."""
        return tuple(sorted((one for one, _ in self._groups.values()), key=lambda one: -one.count))


def overflow(memory: RankMemory, capacity: int) -> str:
    """The component that overflows, and by how much."""
    filled = 0
    for name in _FILLED:
        filled += vars(memory)[name]
        if filled > capacity:
            break
    over, size = memory.total - capacity, vars(memory)[name]
    return (
        f"{name} ({size / 1e9:.1f} GB, {memory.moment}, rank {memory.rank}) overflow by {over / 1e9:.1f} GB: "
        f"{memory.total / 1e9:.1f} of {capacity / 1e9:.1f} GB"
    )


Judge = Callable[[Sizes], tuple[Rule, str] | None]
"""The rule that refuses a layout and its reason, or None."""


@dataclass(frozen=True)
class Candidate:
    """A layout, and the steps of its ladder that have one place in the order of the workflow."""

    sizes: Sizes
    steps: tuple[tuple[str, ...], ...]

    def with_recompute(self, modules: tuple[str, ...]) -> Sizes:
        """The layout with these modules recomputed."""
        return with_recompute(self.sizes, modules)


@dataclass(frozen=True)
class Candidates:
    """A pipeline with several dispatches, each a dispatcher and its sync-free stage; see `Candidate`."""

    pipeline: Sizes
    dispatches: tuple[tuple[str, int], ...]
    steps: tuple[tuple[str, ...], ...]

    @property
    def count(self) -> int:
        """Layouts."""
        return len(self.dispatches) * len(self.steps)

    def each(self) -> Iterator[Candidate]:
        """One candidate for each dispatch."""
        for dispatcher, sync_free in self.dispatches:
            yield Candidate(replace(self.pipeline, dispatcher=dispatcher, sync_free=sync_free), self.steps)


class RuleFilter:
    """Passes on the layouts of a space that no rule refuses, and notes the others in `refusals`."""

    def __init__(self, space: SearchSpace, refusals: Refusals) -> None:
        self._space = space
        self._refusals = refusals

    def candidates(self, refusal_of: Judge) -> dict[OrderKey, list[Candidates]]:
        """The layouts that no rule refuses, by their place in the order."""
        candidates: dict[OrderKey, list[Candidates]] = defaultdict(list)
        for grid in self._space.grids():
            if (refusal := refusal_of(grid)) is not None:
                self._refusals.by_rule(grid, refusal, self._space.size_of_grid(grid))
                continue
            pipelines, each = [], len(self._space.dispatches(grid)) * len(self._space.ladder)
            for pipeline in self._space.pipelines(grid):
                if (refusal := refusal_of(pipeline)) is None:
                    pipelines.append(pipeline)
                else:
                    self._refusals.by_rule(pipeline, refusal, each)
            if pipelines:
                self._sort(grid, pipelines, candidates, refusal_of)
        return candidates

    def _sort(
        self, grid: Sizes, pipelines: Sequence[Sizes], candidates: dict[OrderKey, list[Candidates]], refusal_of: Judge
    ) -> None:
        """Cross pipelines, dispatches and steps of the ladder."""
        ladder = self._space.ladder
        dispatches = [
            dispatch
            for dispatch in self._space.with_dispatches(grid)
            if not self._is_refused_dispatch(dispatch, len(pipelines), refusal_of)
        ]
        if not dispatches:
            return
        ranks = [order_key(with_recompute(pipelines[0], modules)) for modules in ladder]
        named = tuple((dispatch.dispatcher, dispatch.sync_free) for dispatch in dispatches)
        # The ladder changes the order alike on all schedules.
        changes = [{at: rank[at] for at in range(len(rank)) if rank[at] != ranks[0][at]} for rank in ranks]
        for pipeline in pipelines:
            steps: dict[OrderKey, list[tuple[str, ...]]] = defaultdict(list)
            own = order_key(pipeline)
            for modules, changed in zip(ladder, changes, strict=True):
                key = tuple([changed.get(at, rank) for at, rank in enumerate(own)]) if changed else own
                steps[key].append(modules)
            for key, found in steps.items():
                candidates[key].append(Candidates(pipeline, named, tuple(found)))

    def _is_refused_dispatch(self, dispatch: Sizes, pipelines: int, refusal_of: Judge) -> bool:
        count = pipelines * len(self._space.ladder)
        if (refusal := refusal_of(dispatch)) is not None:
            self._refusals.by_rule(dispatch, refusal, count)
        elif (worse := worse_dispatch(dispatch, self._space.dispatches(dispatch))) is not None:
            self._refusals.refuse(dispatch, ("sync_free_stage", "dispatcher"), worse, count)
        else:
            return False
        return True

    def refuse_later(self, candidates: Sequence[Candidates], fits: OrderKey) -> None:
        """Refuse candidates of one place in the order, because layouts before them fit."""
        first = with_recompute(candidates[0].pipeline, candidates[0].steps[0])
        refusal = out_of_order(first, fits)
        assert refusal is not None, f"{first} comes after what fits"
        agreed = tuple(name for name in GRID if len({size_of(one.pipeline, name) for one in candidates}) == 1)
        self._refusals.refuse(first, agreed, (refusal[0].name, refusal[1]), sum(one.count for one in candidates))
