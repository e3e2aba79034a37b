"""`penstock layout`: contents of each rank, on any number of ranks, without starting one.

    penstock layout deepseek-v3 parallel.pipeline=16 parallel.expert=64          the fewest ranks that fit
    penstock layout deepseek-v3 parallel.pipeline=16 parallel.expert=64 --world 2048

Parameters are counted on the meta model of each pipeline rank, so they are exact. The bubble is that of the schedule if
each stage takes as long as its matrix products, backward takes twice as long as forward, and messages take no time.
Ranks of one stage hold equal amounts, so one row stands for all of them.
"""

from collections.abc import Iterator
from typing import Annotated

import typer

from penstock.base.numbers import count_text, counted
from penstock.cli.output import print_next, print_table
from penstock.cli.verbs import Overrides, Target
from penstock.config.fit import context_method, grid_of, micro_batches, shard, smallest_world
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.config.size import stage_costs
from penstock.layout.actions import ActionCosts, Schedule, play
from penstock.layout.grid import DENSE_AXES, EXPERT_AXES, ExpertPlacement, Grid, SequenceLayout
from penstock.layout.schedules import schedule
from penstock.layout.stages import Stage, stages_text
from penstock.models.build import meta_stages
from penstock.models.rank_model import stages_of
from penstock.moe.experts import GroupedExperts
from penstock.parallel.axes import Axes, Axis
from penstock.parallel.launch.environment import ranges
from penstock.parallel.layer_context import LayerContext

_LABEL_WIDTH = 10
_SHOWN_RANKS = 6  # a longer group is shown by its first ranks and its last
_ROUNDS = 6  # micro-batches for each pipeline rank after which a schedule is periodic


def layout(
    target: Target,
    overrides: Overrides = None,
    world: Annotated[int | None, typer.Option("--world", min=1, help="Ranks; default: the fewest that fit.")] = None,
) -> None:
    """Show the stages, layers, experts, positions and parameters of each rank, and the groups of ranks."""
    run = load_run(target, overrides or ())
    grid = grid_of(run, world or smallest_world(run))  # refuses a layout that does not fit
    stages = stages_of(run)
    for label, text in _facts(run, grid, stages).items():
        print(f"{label:<{_LABEL_WIDTH}}{text}")
    print()
    print_table(("pipeline", "ranks", "stages", "holds", "dense", "experts"), list(_stage_rows(run, grid, stages)))
    print("dense, experts: parameters of one rank, before data-parallel ranks divide them")
    if groups := list(_group_rows(grid)):
        print()
        print_table(("axis", "size", "groups", "of rank 0", f"of rank {grid.world - 1}"), groups)
    print_next("train", target, *(overrides or ()), "--fake-world", grid.world, "--rank", 0)


def _schedule(run: Run, grid: Grid, count: int) -> Schedule:
    """The schedule of a step; without a pipeline, 1F1B with one stage."""
    name, stages_per_rank, pairs = run.pipeline.schedule, run.pipeline.stages_per_rank, run.dispatch.overlap == "passes"
    if grid.pipeline == 1:
        name, stages_per_rank = "1f1b", 1
    return schedule(name, ranks=grid.pipeline, stages_per_rank=stages_per_rank, micro_batches=count, pairs=pairs)


def _facts(run: Run, grid: Grid, stages: tuple[Stage, ...]) -> dict[str, str]:
    moe, training = run.model.moe, run.training
    rows = f"{training.global_batch} rows = data {grid.data} x {micro_batches(run, grid)} micro-batches"
    facts = {
        "run": f"{run.name} on {counted(grid.world, 'rank')}",
        "dense": f"{grid.world} = {_product(grid, DENSE_AXES)}",
        "experts": f"{grid.world} = {_product(grid, EXPERT_AXES)}",
        "batch": f"{rows} x {training.micro_batch}, of {training.sequence_length} positions",
        "shard": f"{shard(run)}: {_shard_text(run, grid)}",
    }
    if grid.context * grid.tensor > 1:
        facts["sequence"] = _sequence_text(run, grid)
    if moe is not None:
        placement = ExpertPlacement(experts=moe.experts, expert=grid.expert, expert_tensor=grid.expert_tensor)
        part = "" if grid.expert_tensor == 1 else f", 1/{grid.expert_tensor} of each"
        facts["routed"] = f"{placement.per_place} of {moe.experts} experts of a layer{part}"
    if grid.pipeline > 1:
        facts["stages"] = stages_text(stages)
        facts["schedule"] = _schedule_text(run, grid, stages)
    return facts


def _product(grid: Grid, axes: tuple[str, ...]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in zip(axes, grid.shape(axes), strict=True))


def _shard_text(run: Run, grid: Grid) -> str:
    """Number of ranks that hold the same parameters, and of those that divide one copy."""
    copies = {"dense matrices": grid.data * grid.context}  # ranks with the same parameters
    if run.model.moe is not None:
        copies["experts"] = grid.expert_data
    if shard(run) == "none":
        return ", ".join(f"{what} on {counted(ranks, 'rank')}" for what, ranks in copies.items())
    sizes = {what: min(run.parallel.shard_size or ranks, ranks) for what, ranks in copies.items()}
    return ", ".join(
        f"{what} by {counted(ranks, 'rank') if sizes[what] == ranks else f'{sizes[what]} of {ranks} ranks'}"
        for what, ranks in copies.items()
    )


def _sequence_text(run: Run, grid: Grid) -> str:
    """Positions of a row that a rank holds between two layers."""
    length, method = run.training.sequence_length, context_method(run)
    held = SequenceLayout(length=length, context=grid.context, tensor=grid.tensor, method=method).of_rank(0, 0)
    how = f" ({method})" if grid.context > 1 else ""
    return f"{len(held)} of {length} positions of a row, rank 0: {_numbers(held)}{how}"


def _schedule_text(run: Run, grid: Grid, stages: tuple[Stage, ...]) -> str:
    costs = stage_costs(run.model, run.training.sequence_length)
    once = tuple(costs.of(stage) for stage in stages)  # FLOPs of a forward pass
    twice = tuple(2 * time for time in once)
    bubble, live = step_figures(run, grid, ActionCosts(forward=once, backward=twice, input=once, weight=once))
    alive = f"{max(live):.4g}" if min(live) == max(live) else f"{min(live):.4g} to {max(live):.4g}"
    return f"{run.pipeline.schedule}, bubble {bubble:.1%}, {alive} micro-batches alive on a rank"


def step_figures(run: Run, grid: Grid, costs: ActionCosts) -> tuple[float, tuple[float, ...]]:
    """Bubble of a step, and peak live micro-batches of each rank.

    A step may have thousands of micro-batches, and after a while each further round of them, one for each rank, takes
    equally long. So a long step is extrapolated from two short ones that are a few rounds apart.
    """
    count, rounds = micro_batches(run, grid), _ROUNDS * grid.pipeline  # `rounds` is in micro-batches
    if count <= 2 * rounds or count % grid.pipeline:  # short enough, or not periodic
        played = play(_schedule(run, grid, count), costs)
        return played.bubble, played.peak_live
    short, longer = (play(_schedule(run, grid, few), costs) for few in (rounds, 2 * rounds))
    further = (count - 2 * rounds) / rounds  # periods beyond the longer schedule
    span = longer.span + (longer.span - short.span) * further
    live = zip(short.peak_live, longer.peak_live, strict=True)
    busy = sum(longer.busy) / (2 * rounds) * count  # of all ranks
    return 1 - busy / (grid.pipeline * span), tuple(after + (after - before) * further for before, after in live)


def _stage_rows(run: Run, grid: Grid, stages: tuple[Stage, ...]) -> Iterator[tuple[str, ...]]:
    plan = _schedule(run, grid, _ROUNDS * grid.pipeline)  # Where stages stand does not depend on the micro-batches.
    for position, ranks in enumerate(grid.groups(("data", "context", "tensor"))):  # the ranks of each pipeline rank
        numbers = plan.stages_of(position)
        dense, experts = _parameters(run, grid, ranks[0], {number: stages[number] for number in numbers})
        held = "; ".join(_stage_text(stages[number]) for number in numbers)
        shown = " ".join(f"{number}" for number in numbers)
        yield f"{position}", _numbers(ranks), shown, held, count_text(dense), count_text(experts)


def _stage_text(stage: Stage) -> str:
    """Contents of a stage, such as `embedding, layers 0-2`."""
    parts = [
        (stage.embed, "embedding"),
        (stage.layers, f"{'layer' if len(stage.layers) == 1 else 'layers'} {_numbers(stage.layers)}"),
        (stage.mtp, f"prediction {_numbers(stage.mtp)}"),
        (stage.norm_and_head, "head"),
    ]
    return ", ".join(text for is_held, text in parts if is_held)


def _parameters(run: Run, grid: Grid, rank: int, stages: dict[int, Stage]) -> tuple[int, int]:
    """Parameters of a rank outside and inside routed experts, counted on its meta model."""
    axes = Axes(
        grid=grid, rank=rank, tensor=_axis(grid, rank, "tensor"), expert=_axis(grid, rank, "expert", "expert_tensor")
    )
    decoders = meta_stages(run, LayerContext(axes=axes), stages)
    # By identity, because two stages of a rank share their embedding.
    modules = {id(module): module for decoder in decoders.values() for module in decoder.modules()}
    parameters = [
        (module, sum(parameter.numel() for parameter in module.parameters(recurse=False)))
        for module in modules.values()
    ]
    experts = sum(count for module, count in parameters if isinstance(module, GroupedExperts))
    return sum(count for _, count in parameters) - experts, experts


def _axis(grid: Grid, rank: int, *axes: str) -> Axis:
    """Position of a rank in a group without a process group, which is enough for a meta model."""
    ranks = grid.group(rank, axes)
    return Axis(name=axes[0], ranks=ranks, rank=ranks.index(rank))


def _group_rows(grid: Grid) -> Iterator[tuple[str, ...]]:
    """A row for each axis with several ranks: the groups of the first and the last rank."""
    for axis in (*DENSE_AXES, *EXPERT_AXES[1:]):  # both views begin with the pipeline
        group = grid.group(0, (axis,))
        if len(group) > 1:
            last = grid.group(grid.world - 1, (axis,))
            yield axis, f"{len(group)}", f"{grid.world // len(group)}", _members(group), _members(last)


def _members(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= _SHOWN_RANKS:
        return " ".join(f"{rank}" for rank in ranks)
    return f"{' '.join(f'{rank}' for rank in ranks[: _SHOWN_RANKS - 1])} ... {ranks[-1]}"


def _numbers(numbers: tuple[int, ...]) -> str:
    """Ascending numbers, neighbours joined: `0-3 12-15`."""
    return ranges(numbers).replace(",", " ")
