"""A run as plain numbers, and whether it fits a number of ranks.

`LayoutSizes` is what rules between sizes read. The same rule judges a run when it is loaded and a candidate of a
search, which makes tens of thousands of `LayoutSizes` and no `Run`; `rule_of_sizes` lets it take either. All ranks
beyond the sizes of `parallel` are data parallelism, so the sizes must divide the ranks (`grid_of`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from math import gcd, lcm, prod
from typing import Literal

from penstock.base.numbers import counted
from penstock.config.model import Attention, GroupedQueryAttention, Model
from penstock.config.parallel import Overlap
from penstock.config.run import Run
from penstock.config.schema import Problem, divisors, multiples_near, refuse
from penstock.layout.grid import MOST_RANKS, Grid, Method
from penstock.layout.schedules import SCHEDULES

# Schedules that compute the gradients of inputs and of weights apart.
SPLITTING_SCHEDULES = ("zb-1f1b", "zb-v", "v-half", "v-min", "dualpipe-v")

NO_PIPELINE = "none"  # `LayoutSizes.schedule` of a run without a pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Sizes of a model that layouts divide."""

    layers: int
    dense_layers: int
    vocab_size: int
    head_counts: tuple[int, ...]  # heads, then key/value heads of grouped-query attention
    key_heads: int = 0  # of linear attention; 0 without
    experts: int  # routed experts of a layer; 0 in a dense model
    expert_width: int
    shared_width: int  # features of the shared expert; 0 for none
    dense_width: int  # features of a dense network; 0 if no layer is dense
    is_latent: bool  # queries at least come from a latent
    has_indexer: bool = False
    pads: bool  # every expert gets exactly its capacity of rows


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutSizes:
    """Sizes and choices of a layout, and its model."""

    model: ModelSizes
    global_batch: int  # rows of a step over all ranks
    sequence_length: int
    tp: int = 1  # ranks that share a dense matrix
    cp: int = 1  # a row of tokens
    pp: int = 1  # the layers
    vpp: int = 1  # stages of each pipeline rank; 1 without a pipeline
    ep: int = 1  # ranks that share the experts of a layer
    etp: int = 1  # an expert
    micro_batch: int = 1
    schedule: str = NO_PIPELINE
    recompute: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    sync_free: int = 0
    dispatcher: str = (
        "local"  # `dispatch.method`; in a plan the dispatcher that runs, `local` if a rank has all experts
    )
    shard: str = "optimizer"  # or none, full; never auto
    overlap: Overlap = "none"
    context_method: Literal["auto", "all-gather", "ulysses"] = "auto"  # `settled_context_method` settles auto
    capture: str = "none"

    @property
    def expert_ranks(self) -> int:
        """Ranks between which tokens travel."""
        return self.ep * self.etp

    @property
    def stages(self) -> int:
        """Stages of the pipeline, virtual ones counted."""
        return self.pp * self.vpp

    @property
    def settled_context_method(self) -> Method:
        """`context_method` with `auto` settled: ulysses if the ranks that share a row divide all heads."""
        if self.context_method != "auto":
            return self.context_method
        return "all-gather" if any(heads % (self.tp * self.cp) for heads in self.model.head_counts) else "ulysses"


def model_sizes(model: Model) -> ModelSizes:
    """The sizes that layouts divide."""
    moe = model.moe
    return ModelSizes(
        layers=model.layers,
        dense_layers=model.layers - model.moe_layers,
        vocab_size=model.vocab_size,
        head_counts=tuple(heads_of(model.attention).values()),
        key_heads=0 if model.linear_attention is None else model.linear_attention.key_heads,
        experts=0 if moe is None else moe.experts,  # so that rules need not ask whether there are any
        expert_width=0 if moe is None else moe.moe_intermediate_size,
        shared_width=0 if moe is None else moe.shared_expert_intermediate_size,
        dense_width=model.intermediate_size if model.moe_layers < model.layers else 0,
        is_latent=not isinstance(model.attention, GroupedQueryAttention),
        has_indexer=not isinstance(model.attention, GroupedQueryAttention) and model.attention.indexer is not None,
        pads=moe is not None and moe.balance.pad_to_capacity,
    )


def layout_sizes(run: Run) -> LayoutSizes:
    """The sizes of a run, which may break any rule."""
    parallel, has_pipeline = run.parallel, run.parallel.pipeline > 1
    return LayoutSizes(
        model=model_sizes(run.model),
        global_batch=run.training.global_batch,
        sequence_length=run.training.sequence_length,
        tp=parallel.tensor,
        cp=parallel.context,
        pp=parallel.pipeline,
        vpp=run.pipeline.stages_per_rank if has_pipeline else 1,
        ep=parallel.expert,
        etp=parallel.expert_tensor,
        micro_batch=run.training.micro_batch,
        schedule=run.pipeline.schedule if has_pipeline else NO_PIPELINE,
        recompute=run.recompute.modules,
        offloaded=run.offload.activations,
        sync_free=run.dispatch.sync_free_stage,
        dispatcher=run.dispatch.method,  # rules read what is asked for
        shard=shard(run),
        overlap=run.dispatch.overlap,
        context_method=parallel.context_method,
        capture=run.graphs.capture,
    )


def rule_of_sizes(rule: Callable[[LayoutSizes], Problem | None]) -> Callable[[Run | LayoutSizes], Problem | None]:
    """A rule between sizes, which can be asked about a run too."""

    @wraps(rule)
    def asked(subject: Run | LayoutSizes) -> Problem | None:
        return rule(layout_sizes(subject) if isinstance(subject, Run) else subject)  # a search has no `Run`

    return asked


def heads_of(attention: Attention) -> dict[str, int]:
    """Numbers of heads that ranks may have to divide, by the name of their field."""
    heads = {"heads": attention.heads}
    return heads | {"kv_heads": attention.kv_heads} if isinstance(attention, GroupedQueryAttention) else heads


def shard(run: Run) -> Literal["none", "optimizer", "full"]:
    """`parallel.shard` with `auto` settled."""
    return "optimizer" if run.parallel.shard == "auto" else run.parallel.shard


def context_method(run: Run) -> Method:
    """`parallel.context_method` with `auto` settled."""
    return layout_sizes(run).settled_context_method


def stage_count(run: Run) -> int:
    """Stages of the pipeline, virtual ones counted; 1 without a pipeline."""
    return layout_sizes(run).stages


def micro_batches(run: Run, grid: Grid) -> int:
    """Forward passes of each rank for one optimizer step."""
    return run.training.global_batch // (run.training.micro_batch * grid.data)  # whole, or the rules refuse the grid


def smallest_world(subject: Run | LayoutSizes) -> int:
    """Fewest ranks that the sizes of `parallel` fit: one data-parallel replica of both views."""
    sizes = layout_sizes(subject) if isinstance(subject, Run) else subject
    # Both views divide the same ranks, so a stage needs a common multiple of the two.
    return sizes.pp * lcm(sizes.tp * sizes.cp, sizes.expert_ranks)


def grid_of(run: Run, world: int) -> Grid:
    """Both views of the `world` ranks. Raises a ConfigError if the sizes, the batch or the shards do not divide."""
    sizes = layout_sizes(run)
    refuse([problem for problem in (sizes_divide_the_ranks(sizes, world), _recording(run, world)) if problem])
    grid = Grid(
        world=world, tensor=sizes.tp, context=sizes.cp, pipeline=sizes.pp, expert=sizes.ep, expert_tensor=sizes.etp
    )
    batch, order = micro_batches_are_whole(sizes, world), schedule_has_its_micro_batches(sizes, world)
    # Rules of the batch come last: they divide by the data-parallel ranks of a grid that exists.
    refuse([problem for problem in (batch, order, _shards(run, grid), _host_gradients(run, world)) if problem])
    return grid


def sizes_divide_the_ranks(sizes: LayoutSizes, world: int) -> Problem | None:
    """PP x CP x TP divides the ranks, and so does PP x EP x ETP: two views of the same ranks."""
    least = smallest_world(sizes)
    if max(world, least) > MOST_RANKS:  # also of sizes whose multiple is absurd
        got = f"{max(world, least):,}"
        return Problem("parallel", "is for too many ranks", got=got, allowed=f"at most {MOST_RANKS}")
    dense = {"pipeline": sizes.pp, "tensor": sizes.tp, "context": sizes.cp}
    expert = {"pipeline": sizes.pp, "expert": sizes.ep, "expert_tensor": sizes.etp}
    if world < least:
        larger = max(prod(dense.values()), prod(expert.values()))  # the common multiple is it, or more
        which = "the larger of" if least == larger else "the least common multiple of"
        return Problem.from_line(
            f"parallel needs more ranks: {which} {_product(dense)} and {_product(expert)}; "
            f"got {counted(world, 'rank')}; allowed: a multiple of {least}; "
            f"fix: start {least} processes: --processes {least}; --fake-world {least} shows one of them and starts none"
        )
    for view in (dense, expert):
        if world % prod(view.values()):
            below = world - world % least  # the nearest number of ranks that works
            return Problem.from_line(
                f"parallel does not divide the ranks: {_product(view)}; got {counted(world, 'rank')}; "
                f"allowed: a multiple of {least}; fix: run on {below} or {below + least} ranks, or change these sizes"
            )
    return None


def _product(sizes: dict[str, int]) -> str:
    return f"{' x '.join(f'{name} {size}' for name, size in sizes.items())} = {prod(sizes.values())}"


def _recording(run: Run, world: int) -> Problem | None:
    """Steps are recorded on a rank that exists."""
    ranks = run.profile.ranks
    if run.profile.start == 0 or not ranks or min(ranks) < world:
        return None
    got = ", ".join(map(str, ranks))
    return Problem("profile.ranks", "names no rank of this run", got=got, allowed=f"0 to {world - 1}")


def micro_batches_are_whole(sizes: LayoutSizes, world: int) -> Problem | None:
    """Micro-batch x DP divides the global batch: every data-parallel rank gets the same number of micro-batches."""
    rows, data = sizes.global_batch, world // (sizes.tp * sizes.cp * sizes.pp)
    least = sizes.micro_batch * data  # 0 where a search asks about too few ranks
    if least and rows % least == 0:
        return None
    near = multiples_near(rows, least) if least else ""
    # A smaller micro-batch helps only if the data-parallel ranks divide the rows.
    each, left = divmod(rows, data) if data else (0, 0)
    smaller = f", or training.micro_batch to {gcd(each, sizes.micro_batch)}" if each and not left else ""
    return Problem.from_line(
        f"training.global_batch must be a multiple of training.micro_batch x data-parallel ranks ({sizes.micro_batch} "
        f"x {data}); got {rows} on {counted(world, 'rank')}; fix: set training.global_batch to {near}{smaller}"
    )


def schedule_has_its_micro_batches(sizes: LayoutSizes, world: int) -> Problem | None:
    """dualpipe-v needs two micro-batches for each pipeline rank."""
    if sizes.pp == 1 or sizes.schedule not in SCHEDULES:
        return None
    rows = sizes.micro_batch * (world // (sizes.tp * sizes.cp * sizes.pp))  # of one micro-batch on all ranks
    least, count = SCHEDULES[sizes.schedule].micro_batches_per_rank * sizes.pp, sizes.global_batch // max(1, rows)
    if count >= least:
        return None
    return Problem.from_line(
        f"pipeline.schedule {sizes.schedule} on {sizes.pp} pipeline ranks has too few micro-batches; got {count}; "
        f"allowed: {least} or more; fix: set training.global_batch={least * rows}, or pipeline.schedule=zb-v"
    )


def _host_gradients(run: Run, world: int) -> Problem | None:
    """Gradients in host memory are not summed over ranks."""
    if not run.offload.gradients or world == 1:
        return None
    fix = "set it to false: ranks divide the optimizer's state (parallel.shard)"
    return Problem("offload.gradients", "is for one rank", got=counted(world, "rank"), fix=fix)


def _shards(run: Run, grid: Grid) -> Problem | None:
    """`parallel.shard_size` divides the ranks that hold the same parameters, unless they are fewer."""
    size = run.parallel.shard_size
    for ranks, what in ((grid.data * grid.context, "dense matrices"), (grid.expert_data, "experts")):
        if 0 < size < ranks and ranks % size:  # more than there are means all
            wrong = f"must divide the ranks that hold the same {what} ({ranks})"
            got = f"{size} on {counted(grid.world, 'rank')}"
            return Problem("parallel.shard_size", wrong, got=got, allowed=f"{divisors(ranks)}, or 0 for all")
    return None
