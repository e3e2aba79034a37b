"""Search the layouts of a run on a cluster: the fastest that fits by the projection itself, with proof.

    1. legal      rules of the configuration leave out what cannot run (`penstock.plan.candidates`)
    2. bounds     every legal layout gets a time and a memory that it cannot go below (`penstock.plan.space_bounds`)
    3. first fit  some promising layouts are projected until one fits: what is bounded slower is out; if none does,
                  those that save most memory are looked at
    4. best first groups with the least bound get the bound of a run of their experts, then each of their divisions that
                  of a run with its saving. The layout with the least bound is looked at: its pieces run on the meta
                  device once for all layouts that share them (`penstock.plan.composer`), which gives its memory and a
                  closer bound; a layout whose closer bound is the least is projected

The search ends when the least bound is no faster than the best, or after `MOST_LOOKED` layouts: then the plan says by
how much others could be faster by their bounds. No rule of thumb leaves anything out. The other rows are the fastest
that were found of each way of dividing the model (`penstock.plan.ways`), then the fastest that were looked at.

A layout needs room for the projection's own error (`penstock.plan.projection`). One that fits only without that room
is shown apart, because it may not fit.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from multiprocessing.pool import Pool

import numpy as np

from penstock.base.errors import KernelError
from penstock.base.garbage import no_collection
from penstock.config.fit import NO_PIPELINE, SPLITTING_SCHEDULES
from penstock.config.run import Run, with_values
from penstock.plan.assumptions import overheads_of, target_of
from penstock.plan.candidates import Divisions, Fitting, Scaled, SearchSpace, layout_text, layout_words, run_of
from penstock.plan.composed_run import ComposedRun, ComposedTimes
from penstock.plan.composer import Composer, View
from penstock.plan.costs import HardwareTimes
from penstock.plan.hardware import cluster_of
from penstock.plan.project import composed_projection
from penstock.plan.projection import FAILED, MARGIN, MEMORY, SLOWER, Advice, Plan, Projection, Refusal, memory_margin
from penstock.plan.rules import Rule, Sizes, advice
from penstock.plan.search_request import SearchRequest, neutral_sizes, plan_of_fixed, prepared_run
from penstock.plan.space_bounds import SpaceBounds
from penstock.plan.ways import (
    EXPERTS,
    GROUP,
    LOOK,
    PLAY,
    SearchNode,
    Waiting,
    Way,
    first_of_each,
    neighbours,
    promising,
    promising_of_ways,
    way_of,
)

Progress = Callable[[str], None]  # told what the search is doing, in a few words

ALL = ("pp", "vpp", "ep", "etp", "cp", "tp", "schedule", "micro_batch", "recompute", "sync_free_stage", "dispatcher")
"""The parts of a layout that decide it, by their names in the JSON contract."""

SURE = 1.03  # memory of approximate pieces decides if it is this factor above or below the limit
TOLERANCE = 0.003  # a layout that cannot be faster by this share is not looked at
CAUTION = 2.2  # activations are this many times their bound, as a guess for a first layout that fits
FIRST_SHAPES = ((NO_PIPELINE, 1), ("1f1b", 1), ("interleaved", 2))  # schedules of a first layout that fits
FEW, FIRST_TRIES = 2000, 40  # divisions of each family, and layouts, that are tried for a first layout that fits

WAY_PLAYED = 2  # layouts of each way of dividing the model that are played at least, of those that seem to fit

MOST_SAVING, HOPELESS = 400, 1.1
"""Layouts that save most memory which are looked at where no first layout fits; and the factor above the limit from
which one shows that none with less saving fits: of 872 drawn pairs, the most saving needed 1.04 times as much at worst.
"""

BATCH = 16  # layouts that are looked at side by side

MOST_LOOKED, DEEP = 5000, 5
"""Layouts that are looked at before a search ends without proof, and how many of them one counts as whose stages run:
bounds of small models are far from their times."""

FINISHED, WIDE = 100, 1.1
"""Layouts that are projected when a search ends without proof, and how much slower than a bound a best is too slow."""

TELLS = 64  # layouts that are looked at between lines of progress
PLAYED, FINALISTS = 20, 4  # layouts whose schedule is played at the end, and that are projected with their rare stages
CLOSE_TRIED, CLOSE_SHOWN = 8, 3  # layouts within the margin of the memory that are projected, and shown

MORE_DEVICES, SMALLER_MOMENTS, SHORTER_ROWS, HELP_TRIES = (2, 4, 8), ("bf16", "int8"), (2, 4), 20
"""Times and types that are tried where nothing fits, and layouts of each."""

OTHERS_TRIED = 3  # layouts that are projected to say how fast a run is without something that a rule advises against


def search(request: SearchRequest, progress: Progress | None = None, workers: Pool | None = None) -> Plan:
    """Answer a request; `progress` is told from time to time, `workers` help (`penstock.plan.composer.meta_workers`).

    With every part of the layout fixed, the plan has that layout, whether it fits or not, or a ConfigError.
    Raises a HardwareError if the hardware file lacks a figure.
    """
    run = prepared_run(request)
    if set(ALL) <= set(request.fixed) and (plan := plan_of_fixed(request, run)) is not None:
        return plan
    with no_collection():
        return _Search(request, run, progress or (lambda _: None), workers).plan()


def _unless_it_fails(bound: Callable[["_Search", SearchNode], float]) -> Callable[["_Search", SearchNode], float]:
    """A bound that is infinite for a layout that cannot run on the meta device, which ends no search."""

    @wraps(bound)
    def guarded(self: "_Search", node: SearchNode) -> float:
        try:
            return bound(self, node)
        except KernelError as error:
            self._failed[node] = f"{error}", int(node not in self._refused)
            return math.inf

    return guarded


class _Search:
    """One search. `_fitting` are layouts that fit, `_exact` seconds of those that were played by their schedule."""

    def __init__(self, request: SearchRequest, run: Run, progress: Progress, workers: Pool | None) -> None:
        cluster, assumptions = request.cluster, request.assumptions
        self._request = request
        self._run = run
        self._progress = progress
        self._capacity = cluster.hardware.memory.capacity_bytes
        self._margin = memory_margin(cluster)
        self._limit = int(self._capacity * (1 - self._margin))
        self._host_limit = cluster.hardware.host_link.memory_bytes
        neutral = neutral_sizes(request, run)
        self._overheads = overheads_of(cluster.hardware)
        self._composer = Composer(run, target_of(run, cluster, assumptions), self._overheads, workers)
        times = HardwareTimes.of(cluster.hardware)
        self._times = ComposedTimes(cluster, assumptions, times)
        self._space = SearchSpace(neutral, run, request.fixed)
        self._families = list(self._space.families())
        progress(f"{self._space.count:,} legal layouts")
        self._bounds = SpaceBounds(run, cluster, assumptions.imbalance, self._composer, neutral, times)
        self._scaled: dict[tuple[int, int, tuple[str, ...], bool], Scaled] = {}
        self._tight: dict[tuple[int, int], tuple[np.ndarray, Divisions]] = {}
        """Of a family and a way of the experts: which divisions have it, and these with closer times."""
        self._may_fit: dict[tuple[int, int, int], np.ndarray] = {}
        """Which divisions of a family may fit and win with a shape and a saving."""
        self._rows_over: dict[SearchNode, int] = {}
        self._refused: set[SearchNode] = set()
        self._hopeless: set[SearchNode] = set()  # too large with any saving and rows, which are 0 here
        self._fitting: dict[SearchNode, Fitting] = {}
        self._exact: dict[SearchNode, float] = {}
        self._best = math.inf
        self._bound = math.inf  # seconds that no layout is below, of a search that ended early
        self._close: list[Fitting] = []
        self._too_large: Counter[str] = Counter()
        self._failed: dict[SearchNode, tuple[str, int]] = {}
        """Layouts and groups of them that cannot run on the meta device: why, and how many."""
        self._large_in_group: dict[SearchNode, int] = {}
        self._nearly: dict[bool, tuple[float, SearchNode]] = {}
        """The least memory over the limit with its layout, by whether it was composed or is a bound."""

    def plan(self) -> Plan:
        divisions = [self._bounds.divisions(family) for family in self._families]
        tries = self._tries(divisions)
        if self._first_fit(tries) is None:
            self._save_most(divisions)
        kept = [division.where(self._bounds.ideal_seconds(division) < self._cutoff()) for division in divisions]
        waiting = [group for f in range(len(kept)) for group in self._groups(f, kept[f])]
        self._best_first(kept, waiting)
        if self._request.top > 1 and self._exact:
            self._progress("other ways of dividing the model")
            self._try_ways(divisions)
        best = self._candidates()
        nearest = None if best else self._nearest()
        return Plan(
            model=self._run.name,
            cluster=self._request.cluster,
            candidates=tuple(best),
            close=tuple(self._within_margin(best)),
            nearest=nearest,
            helps=() if nearest is None else tuple(self._helps()),
            refused=(*self._space.illegal.values(), *self._legal_refusals(best)),
            considered=self._space.count + sum(refusal.count for refusal in self._space.illegal.values()),
            advice=tuple(self._advice(best[0], tries)) if best else (),
            margin=self._margin,
            gap=max(0.0, self._best / self._bound - 1) if self._exact else 0.0,
        )

    def _best_first(self, kept: Sequence[Divisions], waiting: list[Waiting]) -> None:
        """Look at layouts, those with the least bound first, until no bound is below the best."""
        heapq.heapify(waiting)
        looked, work = 0, 0
        while waiting and waiting[0].bound < self._cutoff():
            if work >= MOST_LOOKED and self._exact:
                self._end_early(kept, waiting)
                return
            batch = [heapq.heappop(waiting) for _ in range(min(BATCH, len(waiting)))]
            batch = [entry for entry in batch if entry.step < LOOK or not self._is_dominated(entry.node)]
            self._composer.prefetch(run for entry in batch for run in self._stages_of(entry))
            for entry in batch:
                if entry.bound < self._cutoff():
                    for more in self._look_at(entry, kept[entry.node.family]):
                        heapq.heappush(waiting, more)
            looked += len(batch)
            work += sum(1 if entry.step < LOOK else DEEP for entry in batch)
            if looked % TELLS < BATCH:
                status = f"best {self._tokens(self._best):,.0f}" if self._exact else "none fits yet"
                bound = f", at most {self._tokens(waiting[0].bound):,.0f}" if waiting else ""
                self._progress(f"{looked:,} of {self._space.count:,} layouts looked at: {status}{bound} tokens/s")

    def _end_early(self, kept: Sequence[Divisions], waiting: Sequence[Waiting]) -> None:
        """Play the layouts that were looked at closely, because one of them may be the best, and note the gap.

        Where it is wide, the most promising of those that wait for a first look are played as well, then layouts near
        the best until none is faster: bounds are loose by different factors, so they lead to some layouts too late.
        """
        for _, step, node in sorted(entry for entry in waiting if entry.step > LOOK)[:FINISHED]:
            if step == PLAY or self._fit(node) < math.inf:
                self._play(node)
        if self._best > WIDE * waiting[0].bound:
            self._play_those(sorted(entry for entry in waiting if entry.step == LOOK)[:FINISHED])
            known, best = set(self._exact), math.inf
            while self._best < best:
                best = self._best
                fastest = min(self._exact, key=self._exact.__getitem__)
                near = set(neighbours(fastest, kept, self._space.savings, self._bounds.seconds)) - known
                known |= near
                self._play_those([Waiting(0.0, LOOK, node) for node in sorted(near)])
        self._bound = waiting[0].bound

    def _play_those(self, waiting: Sequence[Waiting]) -> None:
        """Play layouts that wait for a first look, as far as they may be the best."""
        for entry in self._prefetched(waiting):
            if max(entry.bound, self._look(entry.node)) < self._cutoff() and self._fit(entry.node) < math.inf:
                self._play(entry.node)

    def _prefetched(self, waiting: Sequence[Waiting], size: int = BATCH) -> Iterator[Waiting]:
        """Layouts whose stages are run before a look at them, `size` side by side."""
        for number, entry in enumerate(waiting):
            if number % size == 0:
                several = waiting[number : number + size]
                self._composer.prefetch(run for entry in several for run in self._stages_of(entry))
            yield entry

    def _look_at(self, entry: Waiting, divisions: Divisions) -> Iterator[Waiting]:
        """The same layouts with closer bounds, as far as they may be the best."""
        bound, step, node = entry
        if step < LOOK:
            closer = self._by_experts if step == GROUP else self._members
            try:
                yield from closer(divisions, node, bound)
            except KernelError as error:
                same = divisions.where(divisions.places[:, 1] == node.experts)
                stages = len(divisions.family.experts[node.experts].stages)
                self._failed[node] = f"{error}", len(same) * stages - self._large_in_group[node]
        elif step == PLAY:
            self._play(node)
        elif (seconds := (self._look if step == LOOK else self._fit)(node)) < math.inf:
            yield Waiting(max(bound, seconds), step + 1, node)

    def _stages_of(self, entry: Waiting) -> Iterator[tuple[Run, View]]:
        """Stages that a look at a layout will ask for."""
        if entry.step < LOOK:
            family, saving = self._families[entry.node.family], self._space.savings[entry.node.saving]
            splits = family.shapes[entry.node.shape][0] in SPLITTING_SCHEDULES
            way = ((), False) if entry.step == GROUP else (saving.recompute, splits)
            yield self._bounds.reference_run(family.experts[entry.node.experts], (1, 1), *way), "middle"
        elif entry.step < PLAY:
            run = run_of(self._run, self._sizes(entry.node))
            if run.parallel.pipeline == 1 or entry.step == LOOK:
                yield run, "middle" if run.parallel.pipeline > 1 else "whole"
            else:
                yield from self._composer.ends(run)

    def _tries(self, divisions: Sequence[Divisions]) -> list[Waiting]:
        """Of each family and saving the most promising layout, the one with the least bound first."""
        entries, room = [], self._limit - self._overheads.context
        for f, every in enumerate(divisions):
            some = self._bounds.fastest(every, FEW, self._limit)
            shapes = [shape for shape, name in enumerate(every.family.shapes) if name in FIRST_SHAPES]
            for v, saving in enumerate(self._space.savings):
                best = [
                    Waiting(seconds, LOOK, node)
                    for shape in shapes
                    for seconds, node in promising(self._bounds, some, (f, shape, v), saving, room, CAUTION)
                ]
                entries += [min(best)] if best else []
        return sorted(entries)

    def _try_ways(self, divisions: Sequence[Divisions]) -> None:
        """Play a few promising layouts of each way of dividing the model, which are rows of the plan."""
        room = self._limit - self._overheads.context
        known = Counter(map(self._way, self._exact))
        for nodes in promising_of_ways(self._bounds, self._space, divisions, room, CAUTION):
            if not nodes or (played := known[self._way(nodes[0])]) >= WAY_PLAYED:
                continue
            for entry in self._prefetched([Waiting(0.0, LOOK, node) for node in nodes], size=WAY_PLAYED):
                if self._fits(entry.node):
                    self._play(entry.node)
                    played += 1
                if played == WAY_PLAYED:
                    break

    def _first_fit(self, tries: Sequence[Waiting], rule: Rule | None = None) -> float | None:
        """Seconds of the first try that fits, and that a rule has nothing against; None if none does."""
        for entry in tries[:FIRST_TRIES]:
            if rule is not None and rule.check(self._sizes(entry.node)) is not None:
                continue
            if self._fits(entry.node):
                return self._play(entry.node)
        return None

    def _save_most(self, divisions: Sequence[Divisions]) -> None:
        """Look at the smallest micro-batches with most saving, the least memory first.

        Where memory is scarce, the layouts with the least bounds of time do not fit, one after the other. Those that
        fit here are a best to beat. Less saving needs hardly less memory, and more rows no less, so a division that is
        far too large with both (`HOPELESS`) has no layout that fits.
        """
        saving, entries = len(self._space.savings) - 1, list[tuple[float, SearchNode]]()
        for f, every in enumerate(divisions):
            for shape in range(len(every.family.shapes)):
                room = self._limit - self._overheads.context
                for memory, indices in self._bounds.smallest(every, shape, self._space.savings[saving], room):
                    dense, experts, shard, rows = indices
                    stages = every.family.experts[experts].stages
                    entries += [
                        (memory, SearchNode(f, shape, saving, dense, experts, shard, rows, stage)) for stage in stages
                    ]
        smallest = [Waiting(0.0, LOOK, node) for _, node in heapq.nsmallest(MOST_SAVING, entries)]
        for number, (*_, node) in enumerate(self._prefetched(smallest)):
            if number % TELLS == 0:
                self._progress(f"{number:,} of {len(entries):,} layouts that save most memory looked at")
            if self._fits(node):
                self._play(node)
                continue
            if node in self._failed:
                continue
            sizes = self._sizes(node)
            composed = self._composer.composed(run_of(self._run, sizes), sizes.grid, closely=False)
            if composed.fullest_of(range(sizes.pp)) > max(self._limit * HOPELESS, self._capacity):
                self._hopeless.add(node._replace(saving=0, rows=0))

    def _groups(self, f: int, divisions: Divisions) -> Iterator[Waiting]:
        """Layouts of a family with one shape, saving and division of the experts, by the least bound of those."""
        family, savings = divisions.family, self._space.savings
        stages = np.array([len(expert.stages) for expert in family.experts])
        for shape in range(len(family.shapes)):
            if not divisions.legal(shape).any():
                continue
            # Nothing is faster than with the least saving.
            may_win = self._bounds.seconds(divisions, shape, savings[0]) < self._cutoff()
            some = divisions.where(may_win)
            if not len(some):
                continue
            for v, saving in enumerate(savings):
                memory = self._bounds.bytes(some, shape, saving) + self._overheads.context
                experts, is_large = some.places[:, 1], memory > self._limit
                large = np.bincount(experts, is_large * stages[experts], len(stages)).astype(int)
                at = int(memory.argmin())
                dense, expert, shard, rows = some.places[at].tolist()
                nearly = SearchNode(f, shape, v, dense, expert, shard, rows, family.experts[expert].stages[0])
                self._note_over(float(memory[at]) - self._limit, nearly, is_composed=False)
                self._too_large[MEMORY] += int(large.sum())
                self._may_fit[f, shape, v] = may_win.copy()
                self._may_fit[f, shape, v][may_win] = ~is_large
                least = np.full(len(stages), math.inf)
                if not is_large.all():
                    seconds = self._bounds.seconds(some, shape, saving)
                    np.minimum.at(least, experts, np.where(is_large, math.inf, seconds))
                for number in np.flatnonzero(least < self._cutoff()).tolist():
                    node = SearchNode(f, shape, v, 0, number, 0, 0, 0)
                    self._large_in_group[node] = int(large[number])
                    yield Waiting(float(least[number]), GROUP, node)

    def _by_experts(self, divisions: Divisions, group: SearchNode, bound: float) -> Iterator[Waiting]:
        """The group with a bound by a run of its experts without recomputation, which many groups share."""
        f, shape, v, _, experts, *_ = group
        if (f, experts) not in self._tight:
            same = divisions.places[:, 1] == experts
            self._tight[f, experts] = same, self._bounds.scaled(divisions.where(same), (), splits=False).divisions
        same, tight = self._tight[f, experts]
        fits = self._may_fit[f, shape, v][same]
        seconds = self._bounds.seconds(tight, shape, self._space.savings[v])
        if (least := float(seconds[fits].min())) < self._cutoff():
            yield Waiting(max(bound, least), EXPERTS, group)

    def _members(self, divisions: Divisions, group: SearchNode, bound: float) -> Iterator[Waiting]:
        """The layouts of a group that may fit and be faster than what was found, by closer bounds."""
        saving, family = self._space.savings[group.saving], divisions.family
        splits = family.shapes[group.shape][0] in SPLITTING_SCHEDULES
        key = group.family, group.experts, saving.recompute, splits
        if key not in self._scaled:
            same = divisions.where(divisions.places[:, 1] == group.experts)
            self._scaled[key] = self._bounds.scaled(same, saving.recompute, splits)
        scaled, stages = self._scaled[key], family.experts[group.experts].stages
        seconds, memory = self._bounds.closer(scaled, group.shape, saving)
        fits = memory + self._overheads.context <= self._limit
        may_win = seconds < self._cutoff()
        large = int((~fits & may_win).sum()) * len(stages)
        self._too_large[MEMORY] += max(0, large - self._large_in_group[group])
        for at in np.flatnonzero(fits & may_win).tolist():
            dense, _, shard, rows = scaled.divisions.places[at].tolist()
            for stage in stages:
                node = group._replace(dense=dense, shard=shard, rows=rows, sync_free=stage)
                yield Waiting(max(bound, float(seconds[at])), LOOK, node)

    def _is_dominated(self, node: SearchNode) -> bool:
        """Whether the layout fits with less recomputation, or without the host: that is faster."""
        steps = len(self._space.savings) // self._space.offloads
        host, recompute = divmod(node.saving, steps)
        lighter = (a * steps + b for a in range(host + 1) for b in range(recompute + 1))
        return any(node._replace(saving=saving) in self._fitting for saving in lighter if saving != node.saving)

    def _cutoff(self) -> float:
        """Seconds that a layout must be below to be looked at."""
        return self._best * (1 - TOLERANCE)

    def _sizes(self, node: SearchNode) -> Sizes:
        indices = node.dense, node.experts, node.shard, node.rows
        saving = self._space.savings[node.saving]
        return self._space.sizes(self._families[node.family], indices, node.shape, saving, node.sync_free)

    def _fits(self, node: SearchNode) -> bool:
        return node in self._fitting or (self._look(node) < math.inf and self._fit(node) < math.inf)

    @_unless_it_fails
    def _look(self, node: SearchNode) -> float:
        """A closer bound of a layout, from the pieces of its inner places; infinite if these do not fit."""
        # More rows never need less memory, so one overflow refuses all larger micro-batches.
        key = node._replace(rows=0)
        if self._rows_over.get(key, node.rows) < node.rows or key._replace(saving=0) in self._hopeless:
            self._count_large(node, MEMORY)
            return math.inf
        sizes = self._sizes(node)
        composed = self._composer.composed(run_of(self._run, sizes), sizes.grid, closely=False)
        inner = composed.inner_places
        size = composed.fullest_of(inner)
        if size > self._limit * SURE:
            return self._refuse_large(node, sizes, composed, size)
        return self._times.bound(composed, inner)

    @_unless_it_fails
    def _fit(self, node: SearchNode) -> float:
        """A bound of a layout from all of its pieces; infinite if it does not fit."""
        sizes = self._sizes(node)
        run, grid = run_of(self._run, sizes), sizes.grid
        composed = self._composer.composed(run, grid, closely=False)
        size = composed.fullest_of(range(grid.pipeline))
        if size <= self._limit * SURE and size * SURE > self._limit:
            # So near the limit rare stages matter.
            size = self._composer.composed(run, grid).fullest_of(range(grid.pipeline))
        if size > self._limit:
            return self._refuse_large(node, sizes, composed, size)
        if (over := composed.most_host_bytes - self._host_limit) > 0:
            return self._refuse(node, over)
        seconds = self._times.bound(composed, range(grid.pipeline))
        self._fitting[node] = Fitting(sizes, composed, size, seconds)
        return seconds

    def _refuse_large(self, node: SearchNode, sizes: Sizes, composed: ComposedRun, size: int) -> float:
        key = node._replace(rows=0)
        self._rows_over[key] = min(node.rows, self._rows_over.get(key, node.rows))
        if size <= self._capacity:
            if node not in self._refused:
                self._close.append(Fitting(sizes, composed, size, self._times.bound(composed, composed.inner_places)))
            self._count_large(node, MARGIN)
            return math.inf
        return self._refuse(node, size - self._limit)

    def _refuse(self, node: SearchNode, over: float) -> float:
        self._count_large(node, MEMORY)
        self._note_over(over, node, is_composed=True)
        return math.inf

    def _count_large(self, node: SearchNode, rule: str) -> None:
        """Count a layout that was composed; the first tries of a search are looked at again."""
        self._too_large[rule] += node not in self._refused
        self._refused.add(node)

    def _note_over(self, over: float, node: SearchNode, *, is_composed: bool) -> None:
        if over > 0:
            self._nearly[is_composed] = min(self._nearly.get(is_composed, (math.inf, node)), (over, node))

    def _play(self, node: SearchNode) -> float:
        """Seconds of a layout that fits by its schedule."""
        if node not in self._exact:
            self._exact[node] = self._times.seconds(self._fitting[node].composed)
            self._best = min(self._best, self._exact[node])
        return self._exact[node]

    def _candidates(self) -> list[Projection]:
        """The fastest layouts of each way of dividing the model, then others; the first is the same with any `top`."""
        for node in sorted(self._fitting, key=lambda node: self._fitting[node].seconds)[:PLAYED]:
            self._play(node)
        # Of layouts that take the same time the one with less memory comes first.
        nodes = sorted(self._exact, key=lambda node: (self._exact[node], self._fitting[node].bytes))
        rows = first_of_each(nodes, self._way, self._request.top)
        projected = {node: self._projection(self._fitting[node]) for node in (*nodes[:FINALISTS], *rows)}
        order = sorted(projected, key=lambda node: (projected[node].time.step_seconds, projected[node].memory.total))
        return [projected[node] for node in first_of_each(order, self._way, self._request.top)]

    def _way(self, node: SearchNode) -> Way:
        return way_of(self._sizes(node))

    def _projection(self, fitting: Fitting) -> Projection:
        composed = self._composer.composed(fitting.composed.run, fitting.composed.grid)
        return composed_projection(composed, self._times)

    def _within_margin(self, best: Sequence[Projection]) -> list[Projection]:
        """Layouts that are faster than the best and fit only if the projection's memory is right."""
        tried = sorted(self._close, key=lambda fitting: fitting.seconds)[:CLOSE_TRIED]
        slowest = best[0].time.step_seconds if best else math.inf
        layouts = [self._projection(fitting) for fitting in tried if fitting.seconds < slowest]
        layouts = [layout for layout in layouts if layout.fits and layout.time.step_seconds < slowest]
        return sorted(layouts, key=lambda layout: layout.time.step_seconds)[:CLOSE_SHOWN]

    def _nearest(self) -> Projection | None:
        """The layout that lacks the least memory, of those that were looked at."""
        if not self._nearly:
            return None
        _, node = self._nearly.get(True) or self._nearly[False]
        if True not in self._nearly:
            # Bounds say little of activations: most saving and fewest rows need no more.
            node = node._replace(saving=len(self._space.savings) - 1, rows=0)
        sizes = self._sizes(node)
        composed = self._composer.composed(run_of(self._run, sizes), sizes.grid, closely=False)
        return self._projection(Fitting(sizes, composed, 0, 0.0))

    def _helps(self) -> Iterator[str]:
        """What makes the run fit where nothing does: more devices, smaller moments, shorter rows; each alone."""
        request, training, cluster = self._request, self._run.training, self._request.cluster
        for times in MORE_DEVICES:
            there = replace(request, cluster=cluster_of(times * cluster.devices, cluster.hardware))
            if (sizes := self._fits_if(there, self._run)) is not None:
                yield f"{there.cluster.devices:,} devices, such as {layout_text(self._run, sizes)}"
                break
        for moments in SMALLER_MOMENTS:
            run = with_values(self._run, optimizer={"moment_dtype": moments})
            if (sizes := self._fits_if(request, run)) is not None:
                yield f"optimizer.moment_dtype={moments}, such as {layout_text(run, sizes)}"
                break
        for times in SHORTER_ROWS:
            length = training.sequence_length // times
            rows = times * training.global_batch
            run = with_values(self._run, training={"sequence_length": length, "global_batch": rows})
            if (sizes := self._fits_if(request, run)) is not None:
                yield f"training.sequence_length={length}, such as {layout_text(run, sizes)}"
                break

    def _fits_if(self, request: SearchRequest, run: Run) -> Sizes | None:
        other = _Search(request, run, self._progress, None)
        tries = other._tries([other._bounds.divisions(family) for family in other._families])
        other._first_fit(tries[:HELP_TRIES])
        return next((fitting.sizes for fitting in other._fitting.values()), None)

    def _legal_refusals(self, best: Sequence[Projection]) -> list[Refusal]:
        """Legal layouts that are no candidates: that do not fit, fit within the margin, or are slower."""
        failed = [
            Refusal(layout=layout_words(self._sizes(node)), rule=FAILED, reason=why, count=count)
            for node, (why, count) in self._failed.items()
        ]
        slower = self._space.count - self._too_large.total() - sum(refusal.count for refusal in failed) - len(best)
        self._too_large[MEMORY] += min(0, slower)  # a first layout may be counted again with its group
        reasons = {
            MEMORY: "more than the memory of a device or its host, by its bound or its projection",
            MARGIN: f"leaves less than {self._margin:.1%} of the memory, which the projection may be off by",
            SLOWER: f"no faster than the best by its bound; {self._tokens(self._best):,.0f} tokens/s on a device",
        }
        counts = self._too_large | Counter({SLOWER: max(0, slower)})
        legal = (Refusal(layout={}, rule=rule, reason=reasons[rule], count=counts[rule]) for rule in reasons)
        return [*(refusal for refusal in legal if refusal.count), *failed]

    def _advice(self, best: Projection, tries: Sequence[Waiting]) -> Iterator[Advice]:
        """What rules have against the best, each with the speed of the best layout that was found without it."""
        sizes = next(fitting.sizes for fitting in self._fitting.values() if fitting.composed.run == best.run)
        for rule, reason in advice(sizes):
            others = [node for node, fitting in self._fitting.items() if rule.check(fitting.sizes) is None]
            others = sorted(others, key=lambda node: self._fitting[node].seconds)[:OTHERS_TRIED]
            seconds = min(map(self._play, others)) if others else self._first_fit(tries, rule)
            without = None if seconds is None else self._tokens(seconds)
            yield Advice(rule=rule.name, reason=reason, source=rule.source, changes=rule.fix, without=without)

    def _tokens(self, seconds: float) -> float:
        return self._run.tokens_per_step / seconds / self._request.cluster.devices
