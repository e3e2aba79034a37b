"""A rough step time of a layout from its sizes alone: in which order a search looks, and when it may stop.

Products at the stated share of the peak, tokens on their way, what tensor and context ranks exchange, the ramp of the
pipeline, sums of gradients. Kernels that are bound by memory, launches and waits are left out, so a step takes longer
than this; layouts of one question are off by much the same factor, which the search reads off those that it has
projected.
"""

import gc
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from penstock.plan.rule_filter import MEMORY, SLOWER, Candidate, CandidateGroup, Refusals, RuleFilter, overflow
from penstock.plan.rules.book import first_refusal, illegal, order_key
from penstock.plan.rules.rule import Sizes, facts_of, sizes_of
from penstock.plan.transfers import DispatchMethod, TokenTraffic, TransferTimes

AGAIN: Mapping[str, float] = MappingProxyType(
    {"norm": 0.01, "expert-activation": 0.01, "latent-up": 0.05, "moe": 0.6, "layer": 1.0}
)
"""Share of a forward pass that is computed twice; a guess."""

EXCHANGES = 4
"""Of a layer's tokens between tensor-parallel, and between context-parallel, ranks; in each direction of a pass."""


class RoughTimes:
    """Rough times of one question.

    Args:
        cluster: where.
        hidden: width of a token.
        dtype: what is computed in.
    """

    def __init__(self, cluster: Cluster, hidden: int, dtype: Dtype) -> None:
        self._cluster = cluster
        self._transfers = TransferTimes(cluster.hardware)
        peak = cluster.hardware.peaks.flops_per_second(dtype) or cluster.hardware.peaks.bf16
        self._rate = peak * cluster.hardware.efficiency.product
        self._token_bytes = hidden * BYTES[dtype]

    def seconds(self, sizes: Sizes, load: PlaceLoad, state: PartState) -> float:
        """Of a step.

        Args:
            sizes: the layout.
            load: of the place on the pipeline that has most to do.
            state: of the place that has most.
        """
        tokens = sizes.micro_batch * sizes.sequence_length / (sizes.cp * sizes.tp)
        again = max((AGAIN.get(name, 0.0) for name in sizes.recompute), default=0.0)
        compute = (3 + again) * load.flops * tokens / self._rate
        travel = (4 + 2 * (again >= AGAIN["moe"])) * load.moe * self._way(sizes, tokens)
        exchange = 2 * EXCHANGES * load.layers * self._exchange(sizes, tokens)
        micro_batch = compute + travel + exchange
        ramp = RAMP[sizes.schedule] * (sizes.pp - 1) / (3 * sizes.vpp)
        return (sizes.micro_batches + ramp) * micro_batch + self._update(sizes, state)

    def _way(self, sizes: Sizes, tokens: float) -> float:
        """Of tokens to their experts, or back."""
        if sizes.expert_ranks == 1:
            return 0.0
        travel = TokenTraffic(
            tokens=max(1, round(tokens)),
            copy_bytes=self._token_bytes,
            experts=sizes.model.experts,
            top_k=sizes.model.top_k * sizes.etp,
        )
        method: DispatchMethod = sizes.dispatcher  # type: ignore[assignment]
        return self._transfers.dispatch(method, "dispatch", travel, self._cluster.group(sizes.expert_ranks)).seconds

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
        """Sums of gradients, and new weights: as if all were shared like the experts, who have most."""
        group = self._cluster.group(max(1, sizes.edp), sizes.expert_ranks)
        if group.ranks == 1:
            return 0.0
        sums = self._transfers.collective("reduce-scatter", state.gradients, group).seconds
        return sums + self._transfers.collective("all-gather", state.weights, group).seconds


class EstimateRatio:
    """How long steps took that were promised to take less.

    Attributes:
        least: of their ratios; 1 before the first.
    """

    def __init__(self) -> None:
        self.least = 1.0
        self._is_new = True

    def note(self, promised: float, seconds: float) -> None:
        """One that is known now."""
        ratio = seconds / promised
        self.least = ratio if self._is_new else min(self.least, ratio)
        self._is_new = False


Progress = Callable[[str], None]
"""Told what a search is doing, in a few words."""

MORE_PLAYED = 2
"""Layouts beyond the asked-for number whose schedules are played, because rough times are a little off."""

SURE = 1.03
"""A layout that is only known about is refused if it needs so much more than there is, and fits if so much less."""

ALL = ("pp", "vpp", "ep", "etp", "cp", "tp", "schedule", "micro_batch", "recompute", "sync_free_stage", "dispatcher")
"""What makes a layout, by its names in the JSON contract."""


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What is sought.

    Attributes:
        run: what is trained; its own layout is not looked at where the search chooses.
        cluster: where.
        global_batch: rows of a step; None takes the run's.
        fixed: texts by names of a layout (penstock/plan/asked_layout.py): sizes that are not chosen.
        top: layouts that are wanted.
        assumptions: of what the configuration does not say.
    """

    run: Run
    cluster: Cluster
    global_batch: int | None = None
    fixed: Mapping[str, str] = field(default_factory=dict)
    top: int = 10
    assumptions: Assumptions = DEFAULT_ASSUMPTIONS


def search(question: SearchRequest, progress: Progress | None = None) -> Plan:
    """Answer a question.

    Args:
        question: what is sought. If every part of the layout is fixed, the plan is of that one, whether it fits or not.
        progress: told from time to time.

    Raises:
        ConfigError: a layout with every part fixed is illegal, or a fixed value is not one.
        HardwareError: the hardware file says nothing of something that the run does.
    """
    run = _prepared(question)
    if set(ALL) <= set(question.fixed) and (one := _one(question, run)) is not None:
        return one
    with _no_collection():
        return _Search(question, run, progress or (lambda _: None)).plan()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python does not look for garbage in cycles, which takes a sixth of a search and finds next to nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _prepared(question: SearchRequest) -> Run:
    """The run without what the search decides."""
    check_fixed(question.fixed)
    rows = question.global_batch
    run = question.run if rows is None else _with(question.run, "training", global_batch=rows)
    if question.assumptions.saving == "conventional":
        run = conventional(run)
    shard = question.fixed.get("shard")
    return run if shard is None else _with(run, "parallel", shard=shard)


def _with(run: Run, section: str, **values: object) -> Run:
    return run.model_copy(update={section: dict(run)[section].model_copy(update=values)})


def _one(question: SearchRequest, run: Run) -> Plan | None:
    """A plan of one layout; None if its sizes do not fill the cluster."""
    space = SearchSpace(_neutral(question, run), run, question.fixed)
    if (grid := next(space.grids(), None)) is None:
        return None
    (order,), (way,) = space.orders(grid), space.with_ways(grid)
    (pace,), (modules,) = space.paces(grid, order), space.ladder
    sizes = replace(pace, dispatcher=way.dispatcher, sync_free=way.sync_free)
    asked = run_of(run, with_recompute(sizes, modules))
    check(asked)
    found = project(asked, question.cluster, question.assumptions)
    return Plan(model=run.name, cluster=question.cluster, candidates=(found,), refused=(), considered=1)


def _neutral(question: SearchRequest, run: Run) -> Sizes:
    """One rank for everything."""
    counted = count(run.model, run.training.sequence_length)
    facts = facts_of(
        run.model,
        total_parameters=counted.parameters,
        active_parameters=counted.active_parameters,
        most_sync_free=most_sync_free(run, device_of(question.cluster.hardware, run)),
    )
    sizes = sizes_of(run, question.cluster, facts)
    return replace(
        sizes, tp=1, cp=1, pp=1, vpp=1, ep=1, etp=1, micro_batch=1, schedule="none", recompute=(), sync_free=0,
        dispatcher="local", overlap=searched_overlap(run), capture="none",
    )  # fmt: skip


CAUTION, TICK = 0.95, 1e-9
"""Rough promises are taken for so much more than they are known to be off, and are never looked at twice the same."""

ROUGH = "rough"
"""Promises that are made of sizes alone."""


class _Waiting(NamedTuple):
    """A layout that is to be looked at.

    Attributes:
        promise: seconds that a step takes at least, but for a factor of this kind of promises.
        number: of the try.
        step: of its ladder.
        kind: of the promise.
    """

    promise: float
    number: int
    step: int
    kind: str


@dataclass(frozen=True)
class _Found:
    """A layout that fits, and roughly how long its step takes."""

    sizes: Sizes
    composed: ComposedRun
    seconds: float


@dataclass(frozen=True)
class _Frame:
    """What all slots of a schedule on a grid share.

    Attributes:
        load: of the place on the pipeline that has most to do.
        memory: of the place that holds most state, nothing else counted.
        state: the same.
    """

    load: PlaceLoad
    memory: RankMemory
    state: PartState


class _Search:
    def __init__(self, question: SearchRequest, run: Run, progress: Progress) -> None:
        cluster, assumptions = question.cluster, question.assumptions
        self._question = question
        self._run = run
        self._progress = progress
        self._capacity = cluster.hardware.memory.capacity_bytes
        self._composer = Composer(run, target_of(run, cluster, assumptions), overheads_of(cluster.hardware))
        self._times = ComposedTimes(cluster, assumptions.imbalance)
        self._bound = RoughTimes(cluster, run.model.hidden_size, run.training.precision)
        self._space = SearchSpace(_neutral(question, run), run, question.fixed)
        self._refusals = Refusals()
        self._sieve = RuleFilter(self._space, self._refusals)
        self._frames: dict[tuple[object, ...], _Frame] = {}
        self._too_many: dict[Sizes, int] = {}
        self._promises: defaultdict[str, EstimateRatio] = defaultdict(EstimateRatio)
        self._found: list[_Found] = []

    def plan(self) -> Plan:
        """Search."""
        tries = self._sieve.tries(first_refusal)
        if not tries and self._question.fixed:
            # What is asked for by name need not be worth it.
            self._refusals = Refusals()
            self._sieve = RuleFilter(self._space, self._refusals)
            tries = self._sieve.tries(illegal)
        self._progress(f"{self._refusals.count} layouts refused by rules")
        for key in sorted(tries):
            if self._found:
                self._sieve.refuse_later(tries[key], min(order_key(one.sizes) for one in self._found))
            else:
                self._walk(tries[key])
        best = self._best()
        return Plan(
            model=self._run.name,
            cluster=self._question.cluster,
            candidates=tuple(best),
            refused=self._refusals.all(),
            considered=self._refusals.count + len(best),
        )

    def _is_hopeless(self, tries: CandidateGroup) -> bool:
        """Whether the state alone is too much, which is noted."""
        memory = self._frame(tries.pace).memory
        if memory.total <= self._capacity:
            return False
        reason = f"{overflow(memory, self._capacity)} before any activation"
        self._refusals.refuse(tries.pace, GRID, (MEMORY, reason), tries.count, memory.total)
        return True

    def _frame(self, sizes: Sizes) -> _Frame:
        placement = "none" if sizes.pp == 1 else SCHEDULES[sizes.schedule].placement
        key = (sizes.tp, sizes.cp, sizes.pp, sizes.ep, sizes.etp, placement, sizes.vpp)
        if key not in self._frames:
            run, grid = run_of(self._run, sizes), _grid_of(sizes)
            state, places = self._composer.state(run, grid), self._composer.places(run)
            held = {place: state.of(contents) for place, (contents, _) in enumerate(places)}
            fullest = max(held, key=lambda place: held[place].total)
            rank = fullest * grid.world // grid.pipeline
            parts = MemoryParts(rank=rank, state=held[fullest], passes=PassPeak(name="state", bytes=0, terms={}))
            memory = assemble(parts, self._composer.overheads)
            self._frames[key] = _Frame(
                max((load for _, load in places), key=lambda load: load.flops), memory, held[fullest]
            )
        return self._frames[key]

    def _walk(self, group: Sequence[CandidateGroup]) -> None:
        """Look at layouts of one place in the order, those first that promise most.

        A promise is first rough, then made of pieces that are nearly the layout's own. A layout that does not fit goes
        back with the next step of its ladder.
        """
        tries = [one for several in group if not self._is_hopeless(several) for one in several.each()]
        rough = [self._promise(one.at(one.steps[0])) for one in tries]
        waiting = [_Waiting(promise, number, 0, ROUGH) for number, promise in enumerate(rough)]
        heapq.heapify(waiting)
        while waiting:
            promise, number, step, kind = heapq.heappop(waiting)
            one, ratio = tries[number], self._promises[kind].least
            if kind == ROUGH and promise == rough[number]:
                # Back to its place by what such promises are known to be off; then it is looked at.
                heapq.heappush(waiting, _Waiting(max(promise * ratio * CAUTION, promise + TICK), number, 0, ROUGH))
            elif self._is_enough(promise if kind == ROUGH else promise * ratio):
                self._refuse_unseen(one, step, promise if kind == ROUGH else promise * ratio)
            elif kind == ROUGH:
                near = self._times.rough(self._nearly(one.at(one.steps[0])))
                self._promises[ROUGH].note(rough[number], near)
                heapq.heappush(waiting, _Waiting(near, number, 0, _kind_of(one.sizes)))
            elif self._fits(one, step):
                found = self._keep(one, step)
                self._promises[kind].note(promise, found.seconds)
            elif step + 1 < len(one.steps):
                near = self._times.rough(self._nearly(one.at(one.steps[step + 1])))
                heapq.heappush(waiting, _Waiting(near, number, step + 1, kind))

    def _nearly(self, sizes: Sizes) -> ComposedRun:
        return next(iter(self._composer.closer_and_closer(run_of(self._run, sizes), _grid_of(sizes))))

    def _promise(self, sizes: Sizes) -> float:
        frame = self._frame(sizes)
        return self._bound.seconds(sizes, frame.load, frame.state)

    def _is_enough(self, seconds: float) -> bool:
        """Whether what takes so long, or longer, cannot be among the best."""
        top = self._question.top
        return len(self._found) >= top and seconds > heapq.nsmallest(top, (one.seconds for one in self._found))[-1]

    def _fits(self, one: Candidate, step: int) -> bool:
        """Whether a step of a ladder fits; if not, it is refused."""
        sizes = one.at(one.steps[step])
        key = replace(sizes, micro_batch=1)
        if self._too_many.get(key, sizes.micro_batch) < sizes.micro_batch:
            reason = f"{self._too_many[key]} rows of a micro-batch are too many already"
            self._refusals.refuse(sizes, GRID, (MEMORY, reason), 1, math.inf)
            return False
        overflowing = self._overflow(sizes)
        if overflowing is None:
            return True
        self._refusals.refuse(sizes, GRID, (MEMORY, overflowing[0]), 1, overflowing[1])
        self._too_many[key] = sizes.micro_batch
        return False

    def _keep(self, one: Candidate, step: int) -> _Found:
        """A layout fits."""
        sizes, more = one.at(one.steps[step]), len(one.steps) - step - 1
        composed = self._composer.composed(run_of(self._run, sizes), _grid_of(sizes), closely=False)
        found = _Found(sizes, composed, self._times.rough(composed))
        self._found.append(found)
        if more:
            done = "+".join(sizes.recompute) or "none"
            reason = f"fits with recompute {done}, and computing more twice takes longer"
            self._refusals.refuse(one.at(one.steps[-1]), GRID, ("least-recompute", reason), more)
        return found

    def _overflow(self, sizes: Sizes) -> tuple[str, int] | None:
        """What does not fit of a layout, and what it needs; None if all does."""
        run, grid = run_of(self._run, sizes), _grid_of(sizes)
        for composed in self._composer.closer_and_closer(run, grid):
            place = composed.fullest
            total = composed.total(place)
            if total > self._capacity * SURE:
                about = "" if composed.is_exact else "about "
                return about + overflow(composed.memory(place), self._capacity), total
        if total * SURE <= self._capacity:
            return None
        # So near the capacity it matters what rare stages hold.
        memory = max(self._composer.memories(run, grid), key=lambda one: one.total)
        return (overflow(memory, self._capacity), memory.total) if memory.total > self._capacity else None

    def _best(self) -> list[Projection]:
        """The fastest, their schedules played; all others are refused."""
        found = sorted(self._found, key=lambda one: one.seconds)
        played = [(one, self._projection(one)) for one in found[: self._question.top + MORE_PLAYED]]
        played.sort(key=lambda one: (one[1].time.step_seconds, one[1].memory.total))
        best, others = played[: self._question.top], [one for one, _ in played[self._question.top :]]
        last = played[: self._question.top][-1][1].time.tokens_per_second_per_device if played else 0.0
        for one in (*others, *found[self._question.top + MORE_PLAYED :]):
            tokens = self._tokens(one.seconds)
            reason = f"fits, with {tokens:.0f} tokens/s on a device at best; the last of the best has {last:.0f}"
            self._refusals.refuse(one.sizes, GRID, (SLOWER, reason), 1, -tokens)
        return [projection for _, projection in best]

    def _projection(self, one: _Found) -> Projection:
        run = one.composed.run
        composed = self._composer.composed(run, one.composed.grid)
        return Projection(
            run=run,
            cluster=self._question.cluster,
            layout=layout_of(run, composed.grid, one.sizes.dispatcher, shard_of(run)),
            memories=tuple(composed.memory(place) for place in range(composed.grid.pipeline)),
            time=self._times.exact(composed),
        )

    def _tokens(self, seconds: float) -> float:
        """Trained in a second by a device."""
        return self._run.tokens_per_step / seconds / self._question.cluster.devices

    def _refuse_unseen(self, one: Candidate, step: int, seconds: float) -> None:
        tokens = self._tokens(seconds)
        others = f"{self._question.top} others have more"
        reason = f"promises {tokens:.0f} tokens/s on a device at most, and {others}"
        self._refusals.refuse(one.sizes, GRID, (SLOWER, reason), len(one.steps) - step, -tokens)


def _kind_of(sizes: Sizes) -> str:
    """Promises of what kind are made to a layout: passes in two halves take longer than their pieces are known to."""
    return "split" if sizes.schedule in SPLITTING_SCHEDULES else "whole"


def _grid_of(sizes: Sizes) -> Grid:
    return Grid(
        world=sizes.world,
        tensor=sizes.tp,
        context=sizes.cp,
        pipeline=sizes.pp,
        expert=sizes.ep,
        expert_tensor=sizes.etp,
    )
