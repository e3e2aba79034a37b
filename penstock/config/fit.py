"""What a run needs to know about its ranks: whether it fits a number of them, and what follows from that number.

Rules (`penstock.config.rules`) judge a run by itself; here it meets the ranks that there are. Everything that is left
over by the sizes of `parallel` is data parallelism, so the sizes must divide.
"""

from math import gcd, lcm, prod
from typing import Literal

from penstock.base.numbers import counted
from penstock.config.model import Attention, GroupedQueryAttention
from penstock.config.problem import Problem, divisors, refuse
from penstock.config.run import Run
from penstock.layout.grid import MOST_RANKS, Grid
from penstock.layout.schedules import SCHEDULES
from penstock.layout.sequence import Method

SPLITTING_SCHEDULES = ("zb-1f1b", "zb-v", "v-half", "v-min", "dualpipe-v")
"""Schedules that compute the gradients of inputs and of weights apart."""


def smallest_world(run: Run) -> int:
    """Fewest ranks that the sizes of `parallel` fit, one data-parallel replica or as many as folding needs."""
    parallel = run.parallel
    dense, expert = parallel.tensor * parallel.context, parallel.expert * parallel.expert_tensor
    return parallel.pipeline * lcm(dense, expert)


def grid_of(run: Run, world: int) -> Grid:
    """Both views of the ranks of a run.

    Args:
        run: a run that obeys the rules.
        world: ranks.

    Raises:
        ConfigError: the sizes do not divide the ranks, or what is left does not divide the batch or the shards.
    """
    refuse(_ranks(run, world) + _recording(run, world))
    parallel = run.parallel
    grid = Grid(
        world=world,
        tensor=parallel.tensor,
        context=parallel.context,
        pipeline=parallel.pipeline,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
    )
    refuse(_batch(run, grid) + _schedule(run, grid) + _shards(run, grid))
    return grid


def micro_batches(run: Run, grid: Grid) -> int:
    """Forward passes of each rank for one optimizer step."""
    return run.training.global_batch // (run.training.micro_batch * grid.data)


def stage_count(run: Run) -> int:
    """Stages of the pipeline, virtual ones counted; 1 without a pipeline."""
    return run.parallel.pipeline * run.pipeline.stages_per_rank if run.parallel.pipeline > 1 else 1


def shard(run: Run) -> Literal["none", "optimizer", "full"]:
    """What data-parallel ranks divide, `auto` settled."""
    return "optimizer" if run.parallel.shard == "auto" else run.parallel.shard


def context_method(run: Run) -> Method:
    """How ranks that share a row attend, `auto` settled: they exchange positions for heads where heads divide."""
    if run.parallel.context_method != "auto":
        return run.parallel.context_method
    ranks = run.parallel.tensor * run.parallel.context
    return "all-gather" if any(heads % ranks for heads in heads_of(run.model.attention).values()) else "ulysses"


def heads_of(attention: Attention) -> dict[str, int]:
    """Numbers of heads that ranks may have to divide, by the name of their field."""
    heads = {"heads": attention.heads}
    return heads | {"kv_heads": attention.kv_heads} if isinstance(attention, GroupedQueryAttention) else heads


def _ranks(run: Run, world: int) -> list[Problem]:
    """The sizes divide the ranks, in both views."""
    parallel, least = run.parallel, smallest_world(run)
    if max(world, least) > MOST_RANKS:
        return [
            Problem("parallel", "is for too many ranks", got=f"{max(world, least):,}", allowed=f"at most {MOST_RANKS}")
        ]
    dense = {"pipeline": parallel.pipeline, "tensor": parallel.tensor, "context": parallel.context}
    expert = {"pipeline": parallel.pipeline, "expert": parallel.expert, "expert_tensor": parallel.expert_tensor}
    if world < least:
        larger = max(prod(dense.values()), prod(expert.values()))
        which = "the larger of" if least == larger else "the least common multiple of"
        return [
            Problem(
                "parallel",
                f"needs more ranks: {which} {_product(dense)} and {_product(expert)}",
                got=counted(world, "rank"),
                allowed=f"a multiple of {least}",
                fix=f"start {least} processes: penstock train ... --processes {least}",
            )
        ]
    for sizes in (dense, expert):
        if world % prod(sizes.values()):
            below = world - world % least
            return [
                Problem(
                    "parallel",
                    f"does not divide the ranks: {_product(sizes)}",
                    got=counted(world, "rank"),
                    allowed=f"a multiple of {least}",
                    fix=f"run on {below} or {below + least} ranks, or change these sizes",
                )
            ]
    return []


def _recording(run: Run, world: int) -> list[Problem]:
    """If steps are recorded, then on a rank that there is."""
    ranks = run.profile.ranks
    if run.profile.start == 0 or not ranks or min(ranks) < world:
        return []
    got = ", ".join(map(str, ranks))
    return [Problem("profile.ranks", "names no rank that there is", got=got, allowed=f"0 to {world - 1}")]


def _product(sizes: dict[str, int]) -> str:
    return f"{' x '.join(f'{name} {size}' for name, size in sizes.items())} = {prod(sizes.values())}"


def _batch(run: Run, grid: Grid) -> list[Problem]:
    """Every data-parallel rank gets whole micro-batches, the same number."""
    training = run.training
    least = training.micro_batch * grid.data
    if training.global_batch % least == 0:
        return []
    below = training.global_batch - training.global_batch % least
    near = " or ".join(f"{batch}" for batch in (below, below + least) if batch)
    return [
        Problem(
            "training.global_batch",
            f"must be a multiple of training.micro_batch x data-parallel ranks ({training.micro_batch} x {grid.data})",
            got=f"{training.global_batch} on {counted(grid.world, 'rank')}",
            fix=f"set training.global_batch to {near}{_smaller_micro_batch(run, grid)}",
        )
    ]


def _smaller_micro_batch(run: Run, grid: Grid) -> str:
    """What else helps if the batch is right."""
    rows, left = divmod(run.training.global_batch, grid.data)
    size = gcd(rows, run.training.micro_batch)
    return f", or training.micro_batch to {size}" if rows and not left else ""


def _schedule(run: Run, grid: Grid) -> list[Problem]:
    """A step has the micro-batches that its schedule needs."""
    least = SCHEDULES[run.pipeline.schedule].micro_batches_per_rank * grid.pipeline
    count = micro_batches(run, grid)
    if grid.pipeline == 1 or count >= least:
        return []
    return [
        Problem(
            "pipeline.schedule",
            f"{run.pipeline.schedule} on {grid.pipeline} pipeline ranks has too few micro-batches",
            got=f"{count}",
            allowed=f"{least} or more",
            fix=f"set training.global_batch={least * run.training.micro_batch * grid.data}, or pipeline.schedule=zb-v",
        )
    ]


def _shards(run: Run, grid: Grid) -> list[Problem]:
    """Copies that are divided are divided among as many ranks each; fewer ranks than that divide one among all."""
    size = run.parallel.shard_size
    for ranks, what in ((grid.data * grid.context, "dense matrices"), (grid.expert_data, "experts")):
        if 0 < size < ranks and ranks % size:
            return [
                Problem(
                    "parallel.shard_size",
                    f"must divide the ranks that hold the same {what} ({ranks})",
                    got=f"{size} on {counted(grid.world, 'rank')}",
                    allowed=f"{divisors(ranks)}, or 0 for all",
                )
            ]
    return []
