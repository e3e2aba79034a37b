"""Search the layouts of a run on a cluster: which fit, which of them are fastest, and why the others are refused.

    1. rules        refuse grids of ranks by whole numbers alone (penstock/plan/rules)
    2. state        the model state of the fullest rank refuses pipelines on a grid, without activations
    3. order        the rest is walked through in the order of the workflow: least model parallelism first, little
                    recomputation first, experts inside the fast links, up to the first place where a layout fits
    4. estimate     within a place, layouts with the lowest estimated time come first (`RoughTimes`). A layout is
                    composed (penstock/plan/composed_run.py) with as little recomputation as fits
    5. clock        the actions of the best schedules are played, and the layouts ranked by tokens/s

A place ends when every layout that was not looked at is estimated slower than the last of the best; the lowest ratio of
real to estimated time so far corrects an estimate. Every layout is counted once: as a candidate, or in a refusal.
"""

import gc
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from penstock.config.fit import SPLITTING_SCHEDULES
from penstock.config.fit import shard as shard_of
from penstock.config.rules import check
from penstock.config.run import Run
from penstock.layout.grid import Grid
from penstock.layout.schedules import SCHEDULES
from penstock.models.count import count
from penstock.models.kernels import most_sync_free
from penstock.plan.candidates import GRID, SearchSpace, check_fixed, run_of, searched_overlap, with_recompute
from penstock.plan.composed_run import RAMP, ComposedRun, ComposedTimes, PlaceLoad
from penstock.plan.composer import Composer
from penstock.plan.hardware import Cluster, Dtype
from penstock.plan.memory import MemoryParts, PassPeak, RankMemory, assemble
from penstock.plan.meta_rank import conventional
from penstock.plan.param_state import PartState
from penstock.plan.project import DEFAULT_ASSUMPTIONS, Assumptions, device_of, overheads_of, project, target_of
from penstock.plan.projection import Plan, Projection, layout_of
from penstock.plan.rates import BYTES
from penstock.plan.rule_filter import MEMORY, SLOWER, Candidate, Candidates, Refusals, RuleFilter, overflow
from penstock.plan.rules.book import first_refusal, illegal, order_key
from penstock.plan.rules.rule import Sizes, facts_of, sizes_of
from penstock.plan.transfers import DispatchMethod, TokenTraffic, TransferTimes

AGAIN: Mapping[str, float] = MappingProxyType(
    {"norm": 0.01, "expert-activation": 0.01, "latent-up": 0.05, "moe": 0.6, "layer": 1.0}
)
"""Share of a forward pass that is recomputed; a guess."""

EXCHANGES = 4
"""Exchanges of a layer's tokens between tensor-parallel, and between context-parallel ranks, in a pass."""


class RoughTimes:
    """Rough step times of layouts from their sizes alone.

    Products at the stated share of the peak, dispatch, exchanges of tensor and context ranks, the ramp of the pipeline
    and gradient sums. Memory-bound kernels, launches and waits are left out, so a step takes longer; layouts of one
    request are off by much the same factor, which the search learns from the layouts that it has timed.
    """

    def __init__(self, cluster: Cluster, hidden: int, dtype: Dtype) -> None:
        self._cluster = cluster
        self._transfers = TransferTimes(cluster.hardware)
        peak = cluster.hardware.peaks.flops_per_second(dtype) or cluster.hardware.peaks.bf16
        self._rate = peak * cluster.hardware.efficiency.product
        self._token_bytes = hidden * BYTES[dtype]

    def seconds(self, sizes: Sizes, load: PlaceLoad, state: PartState) -> float:
        """Seconds of a step, from the load of the busiest place and the state of the place with most state."""
        tokens = sizes.micro_batch * sizes.sequence_length / (sizes.cp * sizes.tp)
        again = max((AGAIN.get(name, 0.0) for name in sizes.recompute), default=0.0)
        compute = (3 + again) * load.flops * tokens / self._rate
        dispatch = (4 + 2 * (again >= AGAIN["moe"])) * load.moe * self._dispatch(sizes, tokens)
        exchange = 2 * EXCHANGES * load.layers * self._exchange(sizes, tokens)
        micro_batch = compute + dispatch + exchange
        ramp = RAMP[sizes.schedule] * (sizes.pp - 1) / (3 * sizes.vpp)
        return (sizes.micro_batches + ramp) * micro_batch + self._update(sizes, state)

    def _dispatch(self, sizes: Sizes, tokens: float) -> float:
        if sizes.expert_ranks == 1:
            return 0.0
        traffic = TokenTraffic(
            tokens=max(1, round(tokens)),
            copy_bytes=self._token_bytes,
            experts=sizes.model.experts,
            top_k=sizes.model.top_k,
            expert_tensor=sizes.etp,
        )
        method: DispatchMethod = sizes.dispatcher  # type: ignore[assignment]
        return self._transfers.dispatch(method, "dispatch", traffic, self._cluster.group(sizes.expert_ranks)).seconds

    def _exchange(self, sizes: Sizes, tokens: float) -> float:
        found = 0.0
        if sizes.tp > 1:
            whole = tokens * sizes.tp * self._token_bytes
            found += self._transfers.collective("all-gather", whole, self._cluster.group(sizes.tp)).seconds
        if sizes.cp > 1:
            group = self._cluster.group(sizes.cp, sizes.tp)
            found += self._transfers.collective("all-to-all", tokens * self._token_bytes, group).seconds
        return found

    def _update(self, sizes: Sizes, state: PartState) -> float:
        """Gradient sums and new weights, as if all parameters were shared like the experts, which are the most."""
        group = self._cluster.group(max(1, sizes.edp), sizes.expert_ranks)
        if group.ranks == 1:
            return 0.0
        sums = self._transfers.collective("reduce-scatter", state.gradients, group).seconds
        return sums + self._transfers.collective("all-gather", state.weights, group).seconds


Progress = Callable[[str], None]
"""Told what the search is doing, in a few words."""

MORE_PLAYED = 2
"""Layouts beyond the requested number whose schedules are played, because rough times are a little off."""

SURE = 1.03
"""An approximate memory decides if it is this factor above or below the capacity."""

ALL = ("pp", "vpp", "ep", "etp", "cp", "tp", "schedule", "micro_batch", "recompute", "sync_free_stage", "dispatcher")
"""The parts of a layout, by their names in the JSON contract."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """A search.

    Attributes:
        run: to train; the search ignores the parts of its layout that it chooses.
        global_batch: rows of a step; None for the run's.
        fixed: texts by names of a layout (penstock/plan/asked_layout.py): parts that the search does not choose.
    """

    run: Run
    cluster: Cluster
    global_batch: int | None = None
    fixed: Mapping[str, str] = field(default_factory=dict)
    top: int = 10
    assumptions: Assumptions = DEFAULT_ASSUMPTIONS


def search(request: SearchRequest, progress: Progress | None = None) -> Plan:
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
        return _Search(request, run, progress or (lambda _: None)).plan()
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
    shard = request.fixed.get("shard")
    return run if shard is None else _with(run, "parallel", shard=shard)


def _with(run: Run, section: str, **values: object) -> Run:
    return run.model_copy(update={section: dict(run)[section].model_copy(update=values)})


def _one(request: SearchRequest, run: Run) -> Plan | None:
    """A plan of one layout; None if its sizes do not fill the cluster."""
    space = SearchSpace(_neutral(request, run), run, request.fixed)
    if (grid := next(space.grids(), None)) is None:
        return None
    (pipeline,), (dispatch,), (modules,) = space.pipelines(grid), space.with_dispatches(grid), space.ladder
    sizes = replace(pipeline, dispatcher=dispatch.dispatcher, sync_free=dispatch.sync_free)
    asked = run_of(run, with_recompute(sizes, modules))
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
        sizes, tp=1, cp=1, pp=1, vpp=1, ep=1, etp=1, micro_batch=1, schedule="none", recompute=(), sync_free=0,
        dispatcher="local", overlap=searched_overlap(run), capture="none"
    )  # fmt: skip


CAUTION, TICK = 0.95, 1e-9
"""A rough estimate counts as this share of its corrected value; TICK keeps two looks at one layout apart."""

ROUGH = "rough"
"""Kind of the estimates from sizes alone."""


class _Waiting(NamedTuple):
    """A layout to look at: estimated seconds, number of the candidate, step of its ladder, kind of the estimate."""

    estimate: float
    number: int
    step: int
    kind: str


@dataclass(frozen=True)
class _Found:
    """A layout that fits, and its rough step time."""

    sizes: Sizes
    composed: ComposedRun
    seconds: float


@dataclass(frozen=True)
class _PlaceState:
    """Shared by all pipelines of a grid: work of the busiest place; memory and state of the place with most state."""

    load: PlaceLoad
    memory: RankMemory
    state: PartState


class _Search:
    def __init__(self, request: SearchRequest, run: Run, progress: Progress) -> None:
        cluster, assumptions = request.cluster, request.assumptions
        self._request = request
        self._run = run
        self._progress = progress
        self._capacity = cluster.hardware.memory.capacity_bytes
        self._composer = Composer(run, target_of(run, cluster, assumptions), overheads_of(cluster.hardware))
        self._times = ComposedTimes(cluster, assumptions.imbalance)
        self._rough_times = RoughTimes(cluster, run.model.hidden_size, run.training.precision)
        self._space = SearchSpace(_neutral(request, run), run, request.fixed)
        self._refusals = Refusals()
        self._filter = RuleFilter(self._space, self._refusals)
        self._place_states: dict[tuple[object, ...], _PlaceState] = {}
        self._rows_over: dict[Sizes, int] = {}
        self._ratios: dict[str, float] = {}
        """The lowest ratio of real to estimated seconds, by kind of the estimate."""
        self._found: list[_Found] = []

    def plan(self) -> Plan:
        """Search."""
        candidates = self._filter.candidates(first_refusal)
        if not candidates and self._request.fixed:
            # A part that is fixed by name may be legal and slow.
            self._refusals = Refusals()
            self._filter = RuleFilter(self._space, self._refusals)
            candidates = self._filter.candidates(illegal)
        self._progress(f"{self._refusals.count} layouts refused by rules")
        for key in sorted(candidates):
            if self._found:
                self._filter.refuse_later(candidates[key], min(order_key(one.sizes) for one in self._found))
            else:
                self._walk(candidates[key])
        best = self._best()
        return Plan(
            model=self._run.name,
            cluster=self._request.cluster,
            candidates=tuple(best),
            refused=self._refusals.all(),
            considered=self._refusals.count + len(best),
        )

    def _state_overflows(self, candidates: Candidates) -> bool:
        memory = self._place_state(candidates.pipeline).memory
        if memory.total <= self._capacity:
            return False
        reason = f"{overflow(memory, self._capacity)} before any activation"
        self._refusals.refuse(candidates.pipeline, GRID, (MEMORY, reason), candidates.count, memory.total)
        return True

    def _place_state(self, sizes: Sizes) -> _PlaceState:
        placement = "none" if sizes.pp == 1 else SCHEDULES[sizes.schedule].placement
        key = (sizes.tp, sizes.cp, sizes.pp, sizes.ep, sizes.etp, placement, sizes.vpp)
        if key not in self._place_states:
            run, grid = run_of(self._run, sizes), _grid_of(sizes)
            state, places = self._composer.state(run, grid), self._composer.places(run)
            held = {place: state.of(contents) for place, (contents, _) in enumerate(places)}
            fullest = max(held, key=lambda place: held[place].total)
            rank = fullest * grid.world // grid.pipeline
            parts = MemoryParts(rank=rank, state=held[fullest], passes=PassPeak(name="state", bytes=0, terms={}))
            memory = assemble(parts, self._composer.overheads)
            self._place_states[key] = _PlaceState(
                max((load for _, load in places), key=lambda load: load.flops), memory, held[fullest]
            )
        return self._place_states[key]

    def _walk(self, group: Sequence[Candidates]) -> None:
        """Look at layouts of one place in the order, those with the lowest estimate first.

        An estimate is first rough, then made of pieces that are nearly the layout's own. A layout that does not fit
        waits again with the next step of its ladder.
        """
        candidates = [one for several in group if not self._state_overflows(several) for one in several.each()]
        firsts = [one.with_recompute(one.steps[0]) for one in candidates]
        rough = [
            self._rough_times.seconds(one, self._place_state(one).load, self._place_state(one).state) for one in firsts
        ]
        waiting = [_Waiting(estimate, number, 0, ROUGH) for number, estimate in enumerate(rough)]
        heapq.heapify(waiting)
        while waiting:
            estimate, number, step, kind = heapq.heappop(waiting)
            # Estimates of one kind are off by much the same factor; the least one seen corrects them.
            one, ratio = candidates[number], self._ratios.get(kind, 1.0)
            if kind == ROUGH and estimate == rough[number]:
                # Back in the queue, corrected by the known ratio; then it is looked at.
                heapq.heappush(waiting, _Waiting(max(estimate * ratio * CAUTION, estimate + TICK), number, 0, ROUGH))
            elif self._is_too_slow(seconds := estimate if kind == ROUGH else estimate * ratio):
                tokens = self._tokens(seconds)
                others = f"{self._request.top} others have more"
                reason = f"estimated at most {tokens:.0f} tokens/s on a device, and {others}"
                self._refusals.refuse(one.sizes, GRID, (SLOWER, reason), len(one.steps) - step, -tokens)
            elif kind == ROUGH:
                near = self._times.rough(self._nearly(one.with_recompute(one.steps[0])))
                self._ratios[ROUGH] = min(self._ratios.get(ROUGH, math.inf), near / rough[number])
                # The approximation of split passes is further off.
                kind = "split" if one.sizes.schedule in SPLITTING_SCHEDULES else "whole"
                heapq.heappush(waiting, _Waiting(near, number, 0, kind))
            elif self._fits(one, step):
                seconds = self._keep(one, step).seconds
                self._ratios[kind] = min(self._ratios.get(kind, math.inf), seconds / estimate)
            elif step + 1 < len(one.steps):
                near = self._times.rough(self._nearly(one.with_recompute(one.steps[step + 1])))
                heapq.heappush(waiting, _Waiting(near, number, step + 1, kind))

    def _nearly(self, sizes: Sizes) -> ComposedRun:
        return next(iter(self._composer.closer_and_closer(run_of(self._run, sizes), _grid_of(sizes))))

    def _is_too_slow(self, seconds: float) -> bool:
        """Whether a layout that takes at least `seconds` cannot be among the best."""
        top = self._request.top
        return len(self._found) >= top and seconds > heapq.nsmallest(top, (one.seconds for one in self._found))[-1]

    def _fits(self, one: Candidate, step: int) -> bool:
        """Whether a step of a ladder fits; if not, it is refused."""
        sizes = one.with_recompute(one.steps[step])
        # More rows never need less memory, so one overflow refuses all larger micro-batches.
        key = replace(sizes, micro_batch=1)
        if self._rows_over.get(key, sizes.micro_batch) < sizes.micro_batch:
            reason = f"{self._rows_over[key]} rows of a micro-batch are too many already"
            self._refusals.refuse(sizes, GRID, (MEMORY, reason), 1, math.inf)
            return False
        overflowing = self._overflow(sizes)
        if overflowing is None:
            return True
        self._refusals.refuse(sizes, GRID, (MEMORY, overflowing[0]), 1, overflowing[1])
        self._rows_over[key] = sizes.micro_batch
        return False

    def _keep(self, one: Candidate, step: int) -> _Found:
        sizes, more = one.with_recompute(one.steps[step]), len(one.steps) - step - 1
        composed = self._composer.composed(run_of(self._run, sizes), _grid_of(sizes), closely=False)
        found = _Found(sizes, composed, self._times.rough(composed))
        self._found.append(found)
        if more:
            done = "+".join(sizes.recompute) or "none"
            reason = f"fits with recompute {done}, and computing more twice takes longer"
            self._refusals.refuse(one.with_recompute(one.steps[-1]), GRID, ("least-recompute", reason), more)
        return found

    def _overflow(self, sizes: Sizes) -> tuple[str, int] | None:
        """The component of a layout that overflows and its total memory; None if the layout fits."""
        run, grid = run_of(self._run, sizes), _grid_of(sizes)
        for composed in self._composer.closer_and_closer(run, grid):
            total = composed.total(composed.fullest)
            if total > self._capacity * SURE:
                about = "" if composed.is_exact else "about "
                return about + overflow(composed.memory(composed.fullest), self._capacity), total
        if total * SURE <= self._capacity:
            return None
        # So near the capacity the rare stages matter.
        memory = max(self._composer.memories(run, grid), key=lambda one: one.total)
        return (overflow(memory, self._capacity), memory.total) if memory.total > self._capacity else None

    def _best(self) -> list[Projection]:
        """The fastest layouts, their schedules played; the others are refused."""
        found = sorted(self._found, key=lambda one: one.seconds)
        played = [(one, self._projection(one)) for one in found[: self._request.top + MORE_PLAYED]]
        played.sort(key=lambda one: (one[1].time.step_seconds, one[1].memory.total))
        best, others = played[: self._request.top], [one for one, _ in played[self._request.top :]]
        last = played[: self._request.top][-1][1].time.tokens_per_second_per_device if played else 0.0
        for one in (*others, *found[self._request.top + MORE_PLAYED :]):
            tokens = self._tokens(one.seconds)
            reason = f"fits, with {tokens:.0f} tokens/s on a device at best; the last of the best has {last:.0f}"
            self._refusals.refuse(one.sizes, GRID, (SLOWER, reason), 1, -tokens)
        return [projection for _, projection in best]

    def _projection(self, one: _Found) -> Projection:
        run = one.composed.run
        composed = self._composer.composed(run, one.composed.grid)
        return Projection(
            run=run,
            cluster=self._request.cluster,
            layout=layout_of(run, composed.grid, one.sizes.dispatcher, shard_of(run)),
            memories=tuple(composed.memory(place) for place in range(composed.grid.pipeline)),
            time=self._times.exact(composed),
        )

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
