"""Search the layouts of a run on a cluster: the fastest that fits by the projection itself, with proof.

    1. legal      rules of the configuration leave out what cannot run (`penstock.plan.candidates`)
    2. bounds     every legal layout gets a time and a memory that it cannot go below (`penstock.plan.bounds`), as arrays
    3. first fit  some promising layouts are projected until one fits: what is bounded slower is out
    4. best first the layout with the least bound is looked at: its pieces run on the meta device once for all layouts
                  that share them (`penstock.plan.composer`), which gives its memory and a closer bound; a layout whose
                  closer bound is the least is projected

The search ends when the least bound is slower than the last layout that is wanted. No rule of thumb leaves anything
out, and how many layouts are shown does not decide which one is the best.

A layout needs room for the projection's own error (`penstock.plan.projection.KnownError`). One that fits only without
that room is within the margin: it is shown apart.
"""

import gc
import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.pool import Pool
from typing import NamedTuple

import numpy as np

from penstock.config.fit import NO_PIPELINE, SPLITTING_SCHEDULES
from penstock.config.rules import check
from penstock.config.run import Run
from penstock.layout.grid import Grid
from penstock.models.count import count
from penstock.models.kernels import most_sync_free
from penstock.plan.candidates import (
    Family,
    Saving,
    SearchSpace,
    check_fixed,
    run_of,
    searched_overlap,
    with_saving,
)
from penstock.plan.composed_run import ComposedRun, ComposedTimes
from penstock.plan.composer import Composer, View
from penstock.plan.costs import HardwareTimes
from penstock.plan.hardware import Cluster
from penstock.plan.meta_rank import conventional
from penstock.plan.project import DEFAULT_ASSUMPTIONS, Assumptions, device_of, overheads_of, project, target_of
from penstock.plan.projection import Plan
from penstock.plan.rules.book import illegal
from penstock.plan.rules.rule import Sizes, facts_of, sizes_of
from penstock.plan.space_bounds import Divisions, SpaceBounds

Progress = Callable[[str], None]
"""Told what the search is doing, in a few words."""

SURE = 1.03
"""Memory of approximate pieces decides if it is this factor above or below the limit."""

ALL = ("pp", "vpp", "ep", "etp", "cp", "tp", "schedule", "micro_batch", "recompute", "sync_free_stage", "dispatcher")
"""The parts of a layout that decide it, by their names in the JSON contract."""

CAUTION = 2.2
"""Activations are this many times their bound, as a guess for a first layout that fits."""

BATCH = 16
"""Layouts that are looked at side by side."""

TOLERANCE = 0.003
"""A layout that cannot be faster by this share is not looked at."""

FIRST_SHAPES = ((NO_PIPELINE, 1), ("1f1b", 1), ("interleaved", 2))
FEW, FIRST_TRIES = 2000, 40
"""Layouts that are projected to find a first one that fits."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """A search.

    Attributes:
        run: to train; the search ignores the parts of its layout that it chooses.
        global_batch: rows of a step; None for the run's.
        fixed: texts by names of a layout (penstock/plan/asked_layout.py): parts that the search does not choose.
        top: candidates that are wanted.
    """

    run: Run
    cluster: Cluster
    global_batch: int | None = None
    fixed: Mapping[str, str] = field(default_factory=dict)
    top: int = 10
    assumptions: Assumptions = DEFAULT_ASSUMPTIONS


def search(request: SearchRequest, progress: Progress | None = None, workers: Pool | None = None) -> Plan:
    """Answer a request; `progress` is told from time to time.

    With every part of the layout fixed, the plan has that layout, whether it fits or not.

    Raises:
        ConfigError: a layout with every part fixed is illegal, or a fixed value is not one.
        HardwareError: the hardware file lacks a figure that the run needs.
    """
    run = _prepared(request)
    if set(ALL) <= set(request.fixed) and (one := _one(request, run)) is not None:
        return one
    # The garbage collection of cycles takes a sixth of a search and finds next to nothing.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _Search(request, run, progress or (lambda _: None), workers).plan()
    finally:
        if was_enabled:
            gc.enable()


def _prepared(request: SearchRequest) -> Run:
    """The run without the parts that the search decides."""
    check_fixed(request.fixed)
    rows = request.global_batch
    run = request.run if rows is None else _with(request.run, "training", global_batch=rows)
    if request.assumptions.saving == "conventional":
        run = conventional(run)
    if (shard := request.fixed.get("shard")) is not None:
        run = _with(run, "parallel", shard=shard)
    if (offload := request.fixed.get("offload")) is not None:
        run = _with(run, "offload", optimizer=offload == "optimizer")
    return run


def _with(run: Run, section: str, **values: object) -> Run:
    return run.model_copy(update={section: dict(run)[section].model_copy(update=values)})


def _one(request: SearchRequest, run: Run) -> Plan | None:
    """A plan of one layout; None if its sizes do not fill the cluster."""
    fixed, world = request.fixed, request.cluster.devices
    tp, cp, pp, ep, etp = (int(fixed[name]) for name in ("tp", "cp", "pp", "ep", "etp"))
    if world % (tp * cp * pp) or world % (ep * etp * pp):
        return None
    recompute = () if fixed["recompute"] == "none" else tuple(fixed["recompute"].split("+"))
    sizes = replace(
        _neutral(request, run), tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=int(fixed["vpp"]), schedule=fixed["schedule"],
        micro_batch=int(fixed["micro_batch"]), dispatcher=fixed["dispatcher"], sync_free=int(fixed["sync_free_stage"]),
    )  # fmt: skip
    asked = run_of(run, with_saving(sizes, Saving(recompute, run.offload.optimizer)))
    check(asked)
    found = project(asked, request.cluster, request.assumptions)
    return Plan(model=run.name, cluster=request.cluster, candidates=(found,), refused=(), considered=1)


def _neutral(request: SearchRequest, run: Run) -> Sizes:
    """One rank for everything."""
    counted = count(run.model, run.training.sequence_length)
    facts = facts_of(
        run.model,
        total_parameters=counted.parameters,
        active_parameters=counted.active_parameters,
        most_sync_free=most_sync_free(run, device_of(request.cluster.hardware, run)),
    )
    sizes = sizes_of(run, request.cluster, facts)
    return replace(
        sizes, tp=1, cp=1, pp=1, vpp=1, ep=1, etp=1, micro_batch=1, schedule=NO_PIPELINE, recompute=(), sync_free=0,
        dispatcher="local", overlap=searched_overlap(run), capture=run.graphs.capture, offloads_optimizer=False,
    )  # fmt: skip


def margin_of(cluster):
    return 0.04


class _Node(NamedTuple):
    """A layout by its indices: family, shape, saving, dense, experts, shard, rows, and its sync-free stage."""

    family: int
    shape: int
    saving: int
    dense: int
    experts: int
    shard: int
    rows: int
    sync_free: int


class _Waiting(NamedTuple):
    """A layout to look at: seconds that it cannot go below, how closely, and itself."""

    bound: float
    step: int
    node: _Node


@dataclass(frozen=True)
class _Fitting:
    """A layout that was looked at, and fits the device."""

    sizes: Sizes
    composed: ComposedRun
    bytes: int
    seconds: float


class _Search:
    def __init__(self, request: SearchRequest, run: Run, progress: Progress, workers: Pool | None = None) -> None:
        import time
        self.t = time.perf_counter()
        cluster, assumptions = request.cluster, request.assumptions
        self._request = request
        self._run = run
        self._progress = progress
        self._capacity = cluster.hardware.memory.capacity_bytes
        self._limit = int(self._capacity * (1 - margin_of(cluster)))
        self._neutral = _neutral(request, run)
        self._overheads = overheads_of(cluster.hardware)
        self._composer = Composer(run, target_of(run, cluster, assumptions), self._overheads, workers)
        times = HardwareTimes.of(cluster.hardware)
        self._times = ComposedTimes(cluster, assumptions.imbalance, times)
        self._space = SearchSpace(self._neutral, run, request.fixed)
        self._families = list(self._space.families())
        print("space", time.perf_counter() - self.t)
        self._bounds = SpaceBounds(run, cluster, assumptions.imbalance, self._composer, self._neutral, times)
        self._divisions = [self._bounds.divisions(family) for family in self._families]
        print("divisions", time.perf_counter() - self.t, [len(d) for d in self._divisions])
        self._scaled: dict[tuple[int, int, tuple[str, ...], bool], tuple[Divisions, np.ndarray]] = {}
        self._rows_over: dict[_Node, int] = {}
        self._looked: dict[_Node, _Fitting] = {}
        self._fitting: list[_Fitting] = []
        self._close: list[_Fitting] = []

    def plan(self) -> Plan:
        """Search."""
        import time
        t = self.t
        first = self._first_fit()
        print("first", self._tokens(first), time.perf_counter() - t, "legal", self._space.count, self._composer.meta_runs)
        kept = []
        for divisions in self._divisions:
            ideal = self._bounds.ideal_seconds(divisions)
            kept.append(divisions.where(ideal < first))
        print("kept", [len(d) for d in kept], time.perf_counter() - t)
        waiting: list[_Waiting] = [one for f in range(len(kept)) for one in self._groups(f, kept[f], first)]
        print("groups", len(waiting), time.perf_counter() - t)
        heapq.heapify(waiting)
        looked = [0, 0, 0, 0]
        while waiting and waiting[0].bound < self._cutoff():
            batch = [heapq.heappop(waiting) for _ in range(min(BATCH, len(waiting)))]
            batch = [one for one in batch if one.step == 0 or not self._is_dominated(one.node)]
            self._composer.prefetch(run for one in batch for run in self._runs_of(one))
            for bound, step, node in batch:
                if bound >= self._cutoff():
                    continue
                looked[step] += 1
                if step == 0:
                    for one in self._members(kept[node.family], node, bound):
                        heapq.heappush(waiting, one)
                elif step == 3:
                    self._play(node)
                elif (closer := (self._look, self._fit)[step - 1](node)) < math.inf:
                    heapq.heappush(waiting, _Waiting(max(bound, closer), step + 1, node))
        print("looked", looked, time.perf_counter() - t, "runs", self._composer.meta_runs, "left", len(waiting))
        for one in sorted(self._fitting, key=lambda one: one.seconds)[:5]:
            print(one.sizes.pp, one.sizes.vpp, one.sizes.schedule, "tp", one.sizes.tp, "cp", one.sizes.cp, "ep", one.sizes.ep, one.sizes.etp, one.sizes.micro_batch, one.sizes.recompute, one.sizes.dispatcher, one.sizes.sync_free, one.sizes.shard, one.sizes.offloads_optimizer, one.bytes / 1e9, self._tokens(one.seconds))

    def _runs_of(self, one: _Waiting) -> Iterator[tuple[Run, View]]:
        """Stages that a look at a layout will ask for."""
        if one.step == 0:
            family, saving = self._families[one.node.family], self._space.savings[one.node.saving]
            splits = family.shapes[one.node.shape][0] in SPLITTING_SCHEDULES
            yield self._bounds.reference_run(family.experts[one.node.experts], (1, 1), saving.recompute, splits), "middle"
        elif one.step < 3:
            run = run_of(self._run, self._sizes(one.node))
            views: tuple[View, ...] = ("middle",) if one.step == 1 else ("first", "last")
            yield from ((run, view) for view in (views if run.parallel.pipeline > 1 else ("whole",)))

    def _first_fit(self) -> float:
        """Seconds of a layout that fits; infinite if none of the most promising does."""
        # Of each family the divisions with the least ideal time that need little memory by a cautious count.
        tries: list[_Waiting] = []
        for f, every in enumerate(self._divisions):
            divisions = self._bounds.fastest(every, FEW, self._limit)
            for saving in range(len(self._space.savings)):
                tries += self._promising(f, divisions, saving)
        tries.sort()
        for one in tries[:FIRST_TRIES]:
            if self._look(one.node) < math.inf and self._fit(one.node) < math.inf:
                return self._play(one.node)
        return math.inf

    def _promising(self, f: int, divisions: Divisions, saving: int) -> list[_Waiting]:
        """The layout of a family and a saving with the least bound, of those that seem to fit; of few shapes."""
        best = []
        for shape, name in enumerate(divisions.family.shapes):
            if name not in FIRST_SHAPES or not divisions.legal(shape).any():
                continue
            seconds = self._bounds.seconds(divisions, shape, self._space.savings[saving])
            memory = self._bounds.bytes(divisions, shape, self._space.savings[saving], kept_times=CAUTION)
            seconds = np.where(memory + self._overheads.context <= self._limit, seconds, np.inf)
            at = int(seconds.argmin())
            if math.isfinite(seconds[at]):
                best.append(_Waiting(float(seconds[at]), 0, self._node(f, divisions, at, shape, saving)))
        return [min(best)] if best else []

    def _node(self, family: int, divisions: Divisions, at: int, shape: int, saving: int, stage: int | None = None) -> _Node:
        dense, experts, shard, rows = divisions.places[at].tolist()
        stage = divisions.family.experts[experts].stages[0] if stage is None else stage
        return _Node(family, shape, saving, dense, experts, shard, rows, stage)

    def _groups(self, f: int, divisions: Divisions, below: float) -> Iterator[_Waiting]:
        """Layouts of a family with one shape, saving and division of the experts, by the least bound of those."""
        experts = divisions.places[:, 1]
        for shape in range(len(divisions.family.shapes)):
            if not divisions.legal(shape).any():
                continue
            for v, saving in enumerate(self._space.savings):
                seconds = self._bounds.seconds(divisions, shape, saving)
                memory = self._bounds.bytes(divisions, shape, saving) + self._overheads.context
                least = np.full(len(divisions.family.experts), math.inf)
                np.minimum.at(least, experts, np.where(memory <= self._limit, seconds, math.inf))
                for number in np.flatnonzero(least < below).tolist():
                    yield _Waiting(float(least[number]), 0, _Node(f, shape, v, 0, number, 0, 0, 0))

    def _members(self, divisions: Divisions, group: _Node, bound: float) -> Iterator[_Waiting]:
        """The layouts of a group that may fit and be faster than what was found, by closer bounds."""
        saving, family = self._space.savings[group.saving], divisions.family
        splits = family.shapes[group.shape][0] in SPLITTING_SCHEDULES
        key = group.family, group.experts, saving.recompute, splits
        if key not in self._scaled:
            same = divisions.where(divisions.places[:, 1] == group.experts)
            self._scaled[key] = self._bounds.scaled(same, saving.recompute, splits)
        scaled = self._scaled[key]
        seconds, memory = self._bounds.closer(scaled, group.shape, saving)
        may_win = (memory + self._overheads.context <= self._limit) & (seconds < self._cutoff())
        for at in np.flatnonzero(may_win).tolist():
            dense, _, shard, rows = scaled[0].places[at].tolist()
            for stage in family.experts[group.experts].stages:
                node = group._replace(dense=dense, shard=shard, rows=rows, sync_free=stage)
                yield _Waiting(max(bound, float(seconds[at])), 1, node)

    def _is_dominated(self, node: _Node) -> bool:
        """Whether the layout fits with less recomputation, or without the host: that is faster."""
        steps = len(self._space.savings) // self._space.offloads
        host, recompute = divmod(node.saving, steps)
        lighter = (a * steps + b for a in range(host + 1) for b in range(recompute + 1))
        return any(
            node._replace(saving=one) in self._looked for one in lighter if one != node.saving
        )

    def _cutoff(self) -> float:
        """Seconds that a layout must be below to be looked at."""
        best = min((one.seconds for one in self._fitting), default=math.inf)
        return best * (1 - TOLERANCE)

    def _sizes(self, node: _Node) -> Sizes:
        family = self._families[node.family]
        (tp, cp), experts, (schedule, vpp) = family.dense[node.dense], family.experts[node.experts], family.shapes[node.shape]
        sizes = replace(
            self._neutral, pp=family.pp, tp=tp, cp=cp, ep=experts.ep, etp=experts.etp, dispatcher=experts.dispatcher,
            sync_free=node.sync_free, shard=family.shards[node.shard], micro_batch=family.rows[node.rows],
            schedule=schedule, vpp=vpp, capture="none" if family.pp > 1 else self._neutral.capture,
        )  # fmt: skip
        return with_saving(sizes, self._space.savings[node.saving])

    def _look(self, node: _Node) -> float:
        """A closer bound of a layout, from the pieces of its inner places; infinite if these do not fit."""
        # More rows never need less memory, so one overflow refuses all larger micro-batches.
        key = node._replace(rows=0)
        if self._rows_over.get(key, node.rows) < node.rows:
            return math.inf
        sizes = self._sizes(node)
        assert illegal(sizes) is None, f"{sizes} is illegal"
        composed = self._composer.composed(run_of(self._run, sizes), _grid_of(sizes), closely=False)
        inner = composed.inner_places
        if composed.fullest_of(inner) > self._limit * SURE:
            self._rows_over[key] = node.rows
            return math.inf
        return self._times.bound(composed, inner)

    def _fit(self, node: _Node) -> float:
        """A bound of a layout from all of its pieces; infinite if it does not fit."""
        sizes = self._sizes(node)
        run, grid = run_of(self._run, sizes), _grid_of(sizes)
        composed = self._composer.composed(run, grid, closely=False)
        size = composed.fullest_of(range(grid.pipeline))
        if size <= self._limit * SURE and size * SURE > self._limit:
            # So near the limit rare stages matter.
            size = max(one.total for one in self._composer.memories(run, grid))
        if size > self._limit:
            key = node._replace(rows=0)
            self._rows_over[key] = min(node.rows, self._rows_over.get(key, node.rows))
            if size <= self._capacity:
                self._close.append(_Fitting(sizes, composed, size, 0.0))
            return math.inf
        seconds = self._times.bound(composed, range(grid.pipeline))
        self._looked[node] = _Fitting(sizes, composed, size, seconds)
        return seconds

    def _play(self, node: _Node) -> float:
        """Seconds of a layout that fits by its schedule."""
        found = self._looked[node]
        exact = replace(found, seconds=self._times.seconds(found.composed))
        self._fitting.append(exact)
        return exact.seconds

    def _tokens(self, seconds: float) -> float:
        return self._run.tokens_per_step / seconds / self._request.cluster.devices


def _grid_of(sizes: Sizes) -> Grid:
    return Grid(
        world=sizes.world,
        tensor=sizes.tp,
        context=sizes.cp,
        pipeline=sizes.pp,
        expert=sizes.ep,
        expert_tensor=sizes.etp,
    )
