"""A run on the fewest ranks and layers that show all that a stage of it holds: what it is rehearsed on.

What a layer holds depends on who shares it (tensor, context, expert, expert_tensor ranks), on the micro-batch and on
what is done to activations; not on how many layers and stages there are, and not on data-parallel ranks. So a run is
cut down to one replica and one layer of a kind, and one stage of it is run. Which one is its `View`:

    whole     E t t m L               no pipeline
    first     E t t | t m L           begins with the embedding; t t are a dense layer and one with experts
    last      E t t | t m L           ends with the head
    middle    E t | t | m L           has neither
    mixed     E t | t t | m L         has neither, and dense layers before others
    embed     E | t t | m L           the embedding alone
    head      E | t t | m L           the head alone
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType
from typing import Literal

from penstock.config.fit import SPLITTING_SCHEDULES, grid_of
from penstock.config.parallel import Graphs, Offload, Pipeline
from penstock.config.run import Run
from penstock.models.rank_model import embedding_places
from penstock.parallel.axes import make_axes
from penstock.parallel.launch.meeting import start_fake_process_group, stop_process_group
from penstock.plan.stand_in import StandIn, Target, stand_in

View = Literal["whole", "first", "last", "middle", "mixed", "embed", "head"]
"""See the top of the file."""


@dataclass(frozen=True)
class Likeness:
    """What two runs of one model have in common if a layer of either holds the same.

    Attributes:
        sizes: tensor, context, expert, expert_tensor, and whether there is a pipeline.
        micro_batch: rows.
        recompute: `recompute.modules`.
        dispatch: method, stage, bound, overlap.
        splits: whether weight gradients are put off.
        divides: whether weights are gathered (`parallel.shard` full).
    """

    sizes: tuple[int, int, int, int, bool]
    micro_batch: int
    recompute: tuple[str, ...]
    dispatch: tuple[str, int, float, str]
    splits: bool
    divides: bool


def likeness(run: Run) -> Likeness:
    """Of a run; runs of other models have nothing in common."""
    parallel, dispatch = run.parallel, run.dispatch
    is_cut = parallel.pipeline > 1
    return Likeness(
        sizes=(parallel.tensor, parallel.context, parallel.expert, parallel.expert_tensor, is_cut),
        micro_batch=run.training.micro_batch,
        recompute=run.recompute.modules,
        dispatch=(dispatch.method, dispatch.sync_free, dispatch.bound, dispatch.overlap),
        splits=is_cut and run.pipeline.schedule in SPLITTING_SCHEDULES,
        divides=parallel.shard == "full",
    )


@dataclass(frozen=True)
class _Cut:
    """How a view divides a miniature: dense layers and layers with experts of each stage, and the stage that is run."""

    stages: tuple[tuple[int, int], ...]
    place: int


_CUTS: Mapping[View, _Cut] = MappingProxyType(
    {
        "whole": _Cut(((1, 1),), 0),
        "first": _Cut(((1, 1), (0, 1)), 0),
        "last": _Cut(((1, 1), (0, 1)), 1),
        "middle": _Cut(((1, 0), (0, 1), (0, 0)), 1),
        "mixed": _Cut(((1, 0), (1, 1), (0, 0)), 1),
        "embed": _Cut(((0, 0), (1, 1), (0, 0)), 0),
        "head": _Cut(((0, 0), (1, 1), (0, 0)), 2),
    }
)


def miniature(run: Run, view: View) -> Run:
    """The run cut down; it fits `ranks_of` it."""
    model, count = run.model, len(_CUTS[view].stages)
    has_dense, has_moe = model.dense_layers > 0, model.moe is not None
    # A dense model has no other layers, so they stand in for those with experts.
    layers = [dense * has_dense + moe if has_moe else max(dense, moe) for dense, moe in _CUTS[view].stages]
    dense_layers = sum(dense * has_dense for dense, _ in _CUTS[view].stages) if has_moe else sum(layers)
    ends = ["E", *[""] * (count - 1)], [*[""] * (count - 1), f"{'m' * model.mtp_layers}L"]
    texts = [begin + "t" * number + end for number, begin, end in zip(layers, *ends, strict=True)]
    schedule = "zb-1f1b" if run.pipeline.schedule in SPLITTING_SCHEDULES else "1f1b"
    order = {"schedule": schedule, "layout": "|".join(texts)} if count > 1 else {}
    small = run.model_copy(
        update={
            "model": model.model_copy(update={"layers": sum(layers), "dense_layers": dense_layers}),
            "parallel": run.parallel.model_copy(update={"pipeline": count, "shard_size": 0}),
            "pipeline": Pipeline().model_copy(update=order),
            "graphs": Graphs(),
            "offload": Offload(),
            "recompute": run.recompute.model_copy(update={"layers": (), "stages": ()}),
        }
    )
    # Rows of one pass of every rank: a replica more or less changes nothing.
    rows = run.training.micro_batch * ranks_of(small)
    return small.model_copy(update={"training": run.training.model_copy(update={"global_batch": rows})})


def ranks_of(small: Run) -> int:
    """Ranks that a miniature needs; two that hold the same where weights are divided among such."""
    parallel = small.parallel
    dense, expert = parallel.tensor * parallel.context, parallel.expert * parallel.expert_tensor
    return parallel.pipeline * lcm(dense, expert) * (2 if parallel.shard == "full" else 1)


@contextmanager
def rank_of_miniature(run: Run, view: View, target: Target) -> Iterator[StandIn]:
    """The first rank that holds the stage of a view. Starts and ends a process group.

    Args:
        run: whose miniature it is.
        view: of it.
        target: where the run will be.
    """
    small = miniature(run, view)
    world = ranks_of(small)
    rank = _CUTS[view].place * world // small.parallel.pipeline
    if world > 1:
        start_fake_process_group(rank, world)
    try:
        axes = make_axes(grid_of(small, world), embedding_places(small), 0, target.ranks_per_node)
        yield stand_in(small, axes, target)
    finally:
        stop_process_group()
