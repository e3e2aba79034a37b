"""A run on the fewest ranks and layers that show all that a stage of it holds: what it is rehearsed on.

What a layer holds depends on its kind (`penstock.plan.layer_kinds`), on who shares it (tensor, context, expert,
expert_tensor ranks), on the micro-batch and on what is done to activations; not on how many layers and stages there
are, and not on data-parallel ranks. So a run is cut down to one replica, and one stage of it is run, with one layer of
a kind. Which stage is its `View`; t t are all kinds, t those behind the first dense layers, or others if asked for:

    whole     E t t m L               no pipeline
    first     E t t |                 begins with the embedding
    last            | t m L           ends with the head
    middle    E | t | m L             has neither
    mixed     E | t t | m L           has neither, and first dense layers before others
    embed     E | | m L               the embedding alone
    head      E | | m L               the head alone
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType
from typing import Literal

from penstock.config.fit import SPLITTING_SCHEDULES, grid_of
from penstock.config.model import Model
from penstock.config.parallel import Graphs, Offload, Pipeline
from penstock.config.run import Run
from penstock.layout.stages import Stage
from penstock.models.build import needs_embedding
from penstock.parallel.axes import make_axes
from penstock.parallel.launch.rendezvous import start_fake_process_group, stop_process_group
from penstock.plan.layer_kinds import first_of_kinds, layers_in_order
from penstock.plan.meta_rank import MetaRank, Target, make_meta_rank

View = Literal["whole", "first", "last", "middle", "mixed", "embed", "head"]
"""See the top of the file."""


@dataclass(frozen=True)
class ReuseKey:
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


def reuse_key(run: Run) -> ReuseKey:
    """Of a run; runs of other models have nothing in common."""
    parallel, dispatch = run.parallel, run.dispatch
    is_cut = parallel.pipeline > 1
    return ReuseKey(
        sizes=(parallel.tensor, parallel.context, parallel.expert, parallel.expert_tensor, is_cut),
        micro_batch=run.training.micro_batch,
        recompute=run.recompute.modules,
        dispatch=(dispatch.method, dispatch.sync_free, dispatch.row_capacity_factor, dispatch.overlap),
        splits=is_cut and run.pipeline.schedule in SPLITTING_SCHEDULES,
        divides=parallel.shard == "full",
    )


@dataclass(frozen=True)
class _Cut:
    """How a view divides a proxy model: its stages, the stage that runs, and the layer kinds of that stage."""

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


def later_kinds(model: Model) -> dict[str, int]:
    """Kinds of the layers behind the first dense ones, and the first layer of each: what most stages hold."""
    return first_of_kinds(model, range(model.dense_layers if model.moe_layers else 0, model.layers))


def proxy_model(run: Run, view: View) -> Run:
    """The run cut down; it fits `ranks_of` it. Its model is the same, of which `stages_of_proxy` hold a part."""
    schedule = "zb-1f1b" if run.pipeline.schedule in SPLITTING_SCHEDULES else "1f1b"
    small = run.model_copy(
        update={
            "parallel": run.parallel.model_copy(update={"pipeline": _CUTS[view].stages, "shard_size": 0}),
            "pipeline": Pipeline().model_copy(update={"schedule": schedule} if _CUTS[view].stages > 1 else {}),
            "graphs": Graphs(),
            "offload": Offload(),
            # Few layers at both ends stay in 16 bits; here every layer stands for many.
            "float8": run.float8.model_copy(update={"first_layers": 0, "last_layers": 0}),
            "recompute": run.recompute.model_copy(update={"layers": (), "stages": ()}),
        }
    )
    # Rows of one pass of every rank: a replica more or less changes nothing.
    rows = run.training.micro_batch * ranks_of(small)
    return small.model_copy(update={"training": run.training.model_copy(update={"global_batch": rows})})


def kinds_of(model: Model, view: View) -> tuple[str, ...]:
    """Kinds of the layers that a view shows, in their order."""
    kinds = {"all": first_of_kinds(model, range(model.layers)), "later": later_kinds(model), "none": {}}
    return tuple(kinds[_CUTS[view].layers])


def stages_of_proxy(model: Model, view: View, kinds: Sequence[str]) -> tuple[Stage, ...]:
    """Stages of a view; only the one that is run holds layers, one of each kind."""
    cut = _CUTS[view]
    layers, last = layers_in_order(model, kinds), cut.stages - 1
    return tuple(
        Stage(
            embed=place == 0,
            layers=layers if place == cut.place else (),
            mtp=tuple(range(model.mtp_layers)) if place == last else (),
            norm_and_head=place == last,
        )
        for place in range(cut.stages)
    )


def ranks_of(small: Run) -> int:
    """Ranks that a proxy model needs; two that hold the same where weights are divided among such."""
    parallel = small.parallel
    dense, expert = parallel.tensor * parallel.context, parallel.expert * parallel.expert_tensor
    return parallel.pipeline * lcm(dense, expert) * (2 if parallel.shard == "full" else 1)


@contextmanager
def rank_of_proxy(run: Run, view: View, target: Target, kinds: Sequence[str] | None = None) -> Iterator[MetaRank]:
    """The first rank that holds the stage of a view. Starts and ends a process group.

    Args:
        run: whose proxy model it is.
        view: of it.
        target: where the run will be.
        kinds: of its layers, in the order of some stage of the run; None for those that the view shows.
    """
    kinds = kinds_of(run.model, view) if kinds is None else kinds
    small, stages = proxy_model(run, view), stages_of_proxy(run.model, view, kinds)
    world = ranks_of(small)
    rank = _CUTS[view].place * world // small.parallel.pipeline
    holders = tuple(place for place, stage in enumerate(stages) if needs_embedding(run.model, stage))
    if world > 1:
        start_fake_process_group(rank, world)
    try:
        axes = make_axes(grid_of(small, world), holders, 0, target.ranks_per_node)
        yield make_meta_rank(small, axes, target, stages)
    finally:
        stop_process_group()
