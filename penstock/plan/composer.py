"""Compose runs from stages of a proxy model: the memory and time of thousands of layouts for a search.

What a layer holds depends on its kind (`penstock.plan.liveness.layer_kind`), on the ranks that share it (tensor,
context, expert, expert_tensor), on the micro-batch and on recomputation; not on the number of layers and stages, nor on
data-parallel ranks. So a run is cut down to one replica (its proxy model), of which one stage runs on the meta device,
with one layer of each kind. A `View` names the stage; t t are all kinds of layers, t those after the first dense ones:

    whole     E t t m L               no pipeline
    first     E t t |                 begins with the embedding
    last            | t m L           ends with the head
    middle    E | t | m L             has neither
    mixed     E | t t | m L           has neither, and first dense layers before others
    embed     E | | m L               the embedding alone
    head      E | | m L               the head alone

Pieces are kept by the settings that they depend on (`ReuseKey`). Tests compare a `ComposedRun` with the whole run: half
a percent of memory. Settings that make layers of one kind differ cannot be composed: `is_composable`.
"""

import gc
import importlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import lcm
from multiprocessing.pool import Pool
from types import MappingProxyType
from typing import Literal

from penstock.base.errors import KernelError
from penstock.config.fit import SPLITTING_SCHEDULES, grid_of
from penstock.config.parallel import Graphs, Offload, Pipeline
from penstock.config.run import Run, with_values
from penstock.layout.grid import Grid
from penstock.layout.stages import Stage
from penstock.models.build import needs_embedding
from penstock.models.rank_model import stages_of
from penstock.parallel.axes import make_axes
from penstock.parallel.launch.environment import usable_cores
from penstock.parallel.launch.rendezvous import start_fake_process_group, stop_process_group
from penstock.plan.composed_run import ComposedRun, ProxyStage, RankState, StageContents, contents_of
from penstock.plan.liveness import StageActivations, first_of_kinds, layers_in_order, shape_of
from penstock.plan.memory import NO_OVERHEADS, Overheads
from penstock.plan.meta_rank import MetaRank, Target, make_meta_rank
from penstock.plan.meta_run import activations_of, micro_batch_bytes
from penstock.plan.param_state import ParamsByKind, PartState, ShardCounts, facts_of, part_state, shards_of

FEWEST_CORES, MOST_WORKERS = 4, 8
"""Two processors are often one core, where workers beside the search gain nothing."""

View = Literal["whole", "first", "last", "middle", "mixed", "embed", "head"]  # see the top of the file


@dataclass(frozen=True)
class ReuseKey:
    """Settings that pieces depend on; runs of one model with equal keys have equal pieces."""

    sizes: tuple[int, int, int, int, bool]  # tensor, context, expert, expert_tensor, and whether there is a pipeline
    micro_batch: int
    recompute: tuple[str, ...]  # `recompute.modules`
    dispatch: tuple[str, int, float, str]  # method, sync-free stage, row capacity factor, overlap
    splits: bool  # weight gradients are put off
    gathers: tuple[bool, bool]  # FSDP2 gathers dense weights, and experts


def gathers_of(run: Run, world: int) -> tuple[bool, bool]:
    """Whether FSDP2 gathers dense weights, and experts: those that several of `world` ranks hold; 0 for many ranks."""
    parallel = run.parallel
    if parallel.shard != "full" or not world:
        return (parallel.shard == "full",) * 2
    stage = world // parallel.pipeline
    return stage > parallel.tensor, stage > parallel.expert * parallel.expert_tensor


def reuse_key(run: Run, world: int) -> ReuseKey:
    """The key of a run on so many ranks."""
    parallel, dispatch = run.parallel, run.dispatch
    has_pipeline = parallel.pipeline > 1
    return ReuseKey(
        sizes=(parallel.tensor, parallel.context, parallel.expert, parallel.expert_tensor, has_pipeline),
        micro_batch=run.training.micro_batch,
        recompute=run.recompute.modules,
        dispatch=(dispatch.method, dispatch.sync_free_stage, dispatch.row_capacity_factor, dispatch.overlap),
        splits=has_pipeline and run.pipeline.schedule in SPLITTING_SCHEDULES,
        gathers=gathers_of(run, world),
    )


@dataclass(frozen=True)
class _Cut:
    """How a view cuts a proxy model: number of stages, the stage that runs, and the layer kinds of that stage."""

    stages: int
    place: int
    layers: Literal["all", "later", "none"]


_CUTS: Mapping[View, _Cut] = MappingProxyType(
    {
        "whole": _Cut(1, 0, "all"),
        "first": _Cut(2, 0, "all"),
        "last": _Cut(2, 1, "later"),
        "middle": _Cut(3, 1, "later"),
        "mixed": _Cut(3, 1, "all"),
        "embed": _Cut(3, 0, "none"),
        "head": _Cut(3, 2, "none"),
    }
)

_COMMON: Mapping[View, View] = MappingProxyType({"mixed": "middle", "embed": "first", "head": "last"})
"""Views of rare stages, and a view that shows nearly the same."""


def later_kinds(run: Run) -> dict[str, int]:
    """Kinds of the layers after the first dense ones, and the first layer of each kind."""
    return first_of_kinds(run, range(run.model.dense_layers if run.model.moe_layers else 0, run.model.layers))


def kinds_of(run: Run, view: View) -> tuple[str, ...]:
    """Kinds of layers that a view shows, in order."""
    kinds = {"all": first_of_kinds(run, range(run.model.layers)), "later": later_kinds(run), "none": {}}
    return tuple(kinds[_CUTS[view].layers])


def proxy_model(run: Run, view: View, gathers: tuple[bool, bool]) -> Run:
    """The run with the pipeline of a view and as few data-parallel ranks as it needs; `gathers` as of `ReuseKey`."""
    schedule = "zb-1f1b" if run.pipeline.schedule in SPLITTING_SCHEDULES else "1f1b"
    pipeline = Pipeline(schedule=schedule) if _CUTS[view].stages > 1 else Pipeline()
    small = run.model_copy(update={"pipeline": pipeline, "graphs": Graphs(), "offload": Offload()})
    parallel = {"pipeline": _CUTS[view].stages, "shard_size": 0}
    small = with_values(small, parallel=parallel, recompute={"layers": (), "stages": ()})
    # One pass of every rank: more replicas change nothing.
    rows = run.training.micro_batch * proxy_ranks(small, gathers)
    return with_values(small, training={"global_batch": rows})


def proxy_stages(run: Run, view: View, kinds: Sequence[str]) -> tuple[Stage, ...]:
    """Stages of a view; only the one that runs has layers, one of each kind."""
    cut = _CUTS[view]
    layers, last = layers_in_order(run, kinds), cut.stages - 1
    return tuple(
        Stage(
            embed=position == 0,
            layers=layers if position == cut.place else (),
            mtp=tuple(range(run.model.mtp_layers)) if position == last else (),
            norm_and_head=position == last,
        )
        for position in range(cut.stages)
    )


def proxy_ranks(small: Run, gathers: tuple[bool, bool]) -> int:
    """Ranks of a proxy model; where FSDP2 gathers all weights, two that shard the same experts."""
    parallel = small.parallel
    dense, expert = parallel.tensor * parallel.context, parallel.expert * parallel.expert_tensor
    return parallel.pipeline * lcm(dense, expert) * (1 + all(gathers))


@contextmanager
def rank_of_proxy(
    run: Run, view: View, target: Target, kinds: Sequence[str] | None = None, gathers: tuple[bool, bool] | None = None
) -> Iterator[MetaRank]:
    """The first rank with the stage of a view. Starts and ends a process group.

    `kinds` of the layers are in the order of some stage of the run; None takes those that the view shows. `gathers` are
    of the run whose part this one is; None for those of itself.
    """
    gathers = gathers_of(run, target.world) if gathers is None else gathers
    kinds = kinds_of(run, view) if kinds is None else kinds
    small, stages = proxy_model(run, view, gathers), proxy_stages(run, view, kinds)
    world = proxy_ranks(small, gathers)
    rank = _CUTS[view].place * world // small.parallel.pipeline
    holders = tuple(position for position, stage in enumerate(stages) if needs_embedding(run.model, stage))
    if world > 1:
        start_fake_process_group(rank, world)
    try:
        axes = make_axes(grid_of(small, world), holders, 0, target.ranks_per_node, is_dry=True)
        yield make_meta_rank(small, axes, target, stages)
    finally:
        stop_process_group()


def run_proxy(run: Run, view: View, target: Target, kinds: Sequence[str]) -> ProxyStage:
    with rank_of_proxy(run, view, target, kinds) as rank:
        (stage,) = activations_of(rank)
        return ProxyStage(
            stage=stage,
            symmetric_bytes=rank.symmetric_bytes,
            batch_bytes=micro_batch_bytes(rank),
            dispatcher=rank.dispatcher,
        )


def _run_or_refuse(run: Run, view: View, target: Target, kinds: Sequence[str]) -> ProxyStage | KernelError:
    """`run_proxy`, or the error of a layout that cannot run: one bad layout ends no search."""
    try:
        return run_proxy(run, view, target, kinds)
    except KernelError as error:
        return error


@contextmanager
def meta_workers(cores: int | None = None) -> Iterator[Pool | None]:
    """Processes for `Composer.prefetch`, one for each core; None with few cores, or where none can be forked.

    `cores` is their number; None takes those of the machine. To be called before other threads are started: a forked
    process has none of them.
    """
    cores = cores or (usable_cores() if hasattr(os, "sched_getaffinity") else 1)
    if cores < FEWEST_CORES:
        yield None
        return
    # Torch imports it for the first shape that it computes in Python, which would be once in each process.
    importlib.import_module("torch._dynamo")
    with multiprocessing.get_context("fork").Pool(min(cores, MOST_WORKERS), gc.freeze) as pool:
        yield pool


_Sharing = tuple[int, int, int, tuple[bool, bool]]


def _sharing(run: Run, world: int) -> _Sharing:
    """Settings that the parameters of a layer depend on."""
    parallel = run.parallel
    return parallel.tensor, parallel.expert, parallel.expert_tensor, gathers_of(run, world)


def is_composable(run: Run) -> bool:
    """Whether layers of one kind hold the same in this run, and no activation or gradient is on the host."""
    if run.dispatch.overlap == "passes" or run.offload.activations or run.offload.gradients:
        return False
    return not run.recompute.layers and not run.recompute.stages


class Composer:
    """Composes runs of one model, sequence length and precision for one target; remembers the pieces.

    `run` is any run of the model.
    """

    def __init__(
        self, run: Run, target: Target, overheads: Overheads = NO_OVERHEADS, workers: Pool | None = None
    ) -> None:
        self.run = run
        self.workers = workers
        self.target = target
        self.overheads = overheads
        # Kinds of layers that occur at the beginning of the model only.
        self.leading = frozenset(first_of_kinds(run, range(run.model.layers))) - later_kinds(run).keys()
        self.meta_runs = 0  # stages that ran so far
        self._kinds = cache(partial(kinds_of, run))
        self._proxies: dict[tuple[ReuseKey, View, tuple[str, ...]], ProxyStage | KernelError] = {}
        self._facts: dict[_Sharing, ParamsByKind] = {}
        self._states: dict[tuple[_Sharing, ShardCounts], dict[str, PartState]] = {}
        self._contents: dict[tuple[str, int, int], tuple[StageContents, ...]] = {}
        self._activations: dict[tuple[ReuseKey, StageContents, bool], StageActivations] = {}

    def contents(self, run: Run) -> tuple[StageContents, ...]:
        key = run.pipeline.layout, run.parallel.pipeline, run.pipeline.stages_per_rank
        if key not in self._contents:
            self._contents[key] = tuple(contents_of(stage, self.run) for stage in stages_of(run))
        return self._contents[key]

    def composed(self, run: Run, grid: Grid, *, closely: bool = True) -> ComposedRun:
        """A composable run of the composer's model, composed of its pieces.

        Only `closely` are rare stages run on the meta device too. Otherwise they are composed of pieces of other
        stages, which differ by the memory of one message.
        """
        assert is_composable(run), f"{run.name} has layers that differ from others of their kind"
        if closely:
            self.prefetch((run, *self._shown_by(content)) for content in set(self.contents(run)))
        return self._compose(run, grid, closely=closely)

    def _compose(self, run: Run, grid: Grid, *, closely: bool) -> ComposedRun:
        key, contents = reuse_key(run, self.target.world), self.contents(run)
        return ComposedRun(
            run=run,
            grid=grid,
            contents=contents,
            # Stages are run when they are asked for: of a layout that does not fit one may be enough.
            stage_of=partial(self._stage, run, key, closely),
            proxy=self.proxy(run, "whole" if grid.pipeline == 1 else "middle"),
            state=self.state(run, grid),
            shape=shape_of(run, grid),
            overheads=self.overheads,
            reuse_key=(key, closely),
        )

    def facts(self, run: Run) -> ParamsByKind:
        """Parameters of the parts of a run's ranks."""
        key = _sharing(run, self.target.world)
        if key not in self._facts:
            # Context and pipeline ranks change nothing about the parameters of a layer.
            part = with_values(run, parallel={"context": 1, "pipeline": 1})
            with rank_of_proxy(part, "whole", self.target, gathers=key[-1]) as rank:
                self._facts[key] = facts_of(rank)
        return self._facts[key]

    def state(self, run: Run, grid: Grid) -> RankState:
        """Model state of the parts of a run's ranks."""
        key, facts = _sharing(run, self.target.world), self.facts(run)
        shards = shards_of(run, grid)
        if (key, shards) not in self._states:
            self._states[key, shards] = {kind: part_state(parameters, shards) for kind, parameters in facts.items()}
        return RankState(run, facts, shards, self._states[key, shards])

    def proxy(self, run: Run, view: View, kinds: tuple[str, ...] = ()) -> ProxyStage:
        """A stage of the run's proxy model, run once for all runs with equal keys.

        `kinds` of the layers are in the order of some stage of the run; empty takes those that the view shows.
        Raises a KernelError if that stage cannot run.
        """
        key = reuse_key(run, self.target.world), view, kinds or self._kinds(view)
        if key not in self._proxies:
            self.meta_runs += 1
            self._proxies[key] = _run_or_refuse(run, view, self.target, key[2])
        proxy = self._proxies[key]
        if isinstance(proxy, KernelError):
            raise proxy
        return proxy

    def prefetch(self, wanted: Iterable[tuple[Run, View] | tuple[Run, View, tuple[str, ...]]]) -> None:
        """Run stages that will be asked for side by side, if there are workers; arguments as of `proxy`."""
        if self.workers is None:
            return
        missing = {}
        for run, view, *order in wanted:
            (kinds,) = order or [()]
            key = reuse_key(run, self.target.world), view, kinds or self._kinds(view)
            if key not in self._proxies:
                missing[key] = run, view, self.target, key[2]
        if len(missing) > 1:
            self.meta_runs += len(missing)
            self._proxies.update(zip(missing, self.workers.starmap(_run_or_refuse, missing.values()), strict=True))

    def ends(self, run: Run) -> Iterator[tuple[Run, View]]:
        """What `composed` runs of the first and the last stage of a pipeline, if not `closely`."""
        contents = self.contents(run)
        for content in (contents[0], contents[-1]):
            view = view_of(content, self.leading)
            view = _COMMON.get(view, view)
            yield (self._at_end(run, view) if self._is_like_middle(content, view) else run), view

    def _stage(self, run: Run, key: ReuseKey, closely: bool, contents: StageContents) -> StageActivations:
        if (key, contents, closely) not in self._activations:
            self._activations[key, contents, closely] = self._compose_stage(run, contents, closely)
        return self._activations[key, contents, closely]

    def _compose_stage(self, run: Run, contents: StageContents, closely: bool) -> StageActivations:
        view, order = self._shown_by(contents)
        if not closely:
            view, order = _COMMON.get(view, view), ()
        if not closely and self._is_like_middle(contents, view):
            # The piece before the layers, or behind them, is that of a rank with all experts.
            inner, outer = self.proxy(run, "middle").stage, self.proxy(self._at_end(run, view), view).stage
            begin, end = (outer.pieces[0], inner.pieces[-1]) if view == "first" else (inner.pieces[0], outer.pieces[-1])
            stage = replace(inner, pieces=(begin, *inner.pieces[1:-1], end))
        else:
            stage = self.proxy(run, view, order).stage
        if len(stage.pieces) == 1:
            return stage
        begin, *layers, end = stage.pieces
        by_kind = {piece.name: piece for piece in layers}
        for kind in contents.kinds:
            if kind not in by_kind:
                # Leading layers do not depend on the experts.
                first = self.proxy(run if closely else self._alone(run), "first").stage
                by_kind[kind] = next(piece for piece in first.pieces if piece.name == kind)
        middle = [by_kind[kind] for kind, count in contents.layers for _ in range(count)]
        return StageActivations(pieces=(begin, *middle, end), weight=stage.weight)

    def _shown_by(self, contents: StageContents) -> tuple[View, tuple[str, ...]]:
        """The view that shows a stage, and its kinds of layers where they are in another order than in that view."""
        view = view_of(contents, self.leading)
        usual, order = self._kinds(view), contents.kinds
        return view, () if order == usual[: len(order)] or not set(order) <= set(usual) else order

    def _is_like_middle(self, contents: StageContents, view: View) -> bool:
        """Whether a first or last stage differs from a middle one by its ends and leading layers only."""
        is_end = view == "first" or (view == "last" and not self.run.model.mtp_layers)
        return is_end and len(contents.kinds) > 0

    def _at_end(self, run: Run, view: View) -> Run:
        """A run with the same piece before the first layer, or behind the last: that does not depend on recomputation.

        Leading layers, which are read of the same run, do.
        """
        alone = self._alone(run)
        if alone is run or (view == "first" and self.leading):
            return alone
        return with_values(alone, recompute={"modules": ()})

    def _alone(self, run: Run) -> Run:
        """The run with all experts on each rank; the run itself with FSDP2, whose gradients of experts wait there."""
        if run.parallel.shard == "full":
            return run
        alone = {"expert": 1, "expert_tensor": 1}
        return with_values(run, parallel=alone, dispatch={"method": "auto", "sync_free": 0})


def view_of(contents: StageContents, leading: frozenset[str]) -> View:
    """The view that shows a stage; `leading` are kinds of layers that occur at the beginning of the model only."""
    if contents.embed and contents.head:
        return "whole"
    if contents.embed:
        return "first" if contents.layers else "embed"
    if contents.head:
        return "last" if contents.layers else "head"
    return "mixed" if len({kind in leading for kind, _ in contents.layers}) > 1 else "middle"
