"""The schedules of `pipeline.schedule` by name, as plain lists of actions.

Two ways to make one: from phrases (`penstock/layout/phrases.py`: GPipe, 1F1B, interleaved, zero-bubble 1F1B, DualPipeV)
and from a building block that is repeated and squeezed (`penstock/layout/blocks.py`: ZB-V, V-half, V-min). Both end in
a `Schedule`, and whoever runs, times or draws one knows nothing else. docs/schedules.md compares them.

A step needs no more than: `schedule("1f1b", ranks=4, stages_per_rank=1, micro_batches=8)`, and for evaluation
`forward_only` of it. Every number of ranks and micro-batches works, except where `schedule` says no.
"""

from dataclasses import dataclass
from typing import Literal

from penstock.base.errors import ConfigError
from penstock.layout.actions import Action, Kind, Schedule, pair_up, problems, stages_of, text
from penstock.layout.blocks import STRIDES, building_block, repeat, squeeze
from penstock.layout.phrases import BESIDE, GRAMMARS, forwards, forwards_on_v, groups_to_fill, spell

__all__ = ["BESIDE", "SCHEDULES", "Action", "Kind", "Schedule", "Shape", "forward_only", "problems", "schedule", "text"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a schedule asks of its sizes.

    Attributes:
        placement: how ranks hold stages.
        fewest: stages of a rank.
        most: the same; None for any.
        micro_batches_per_rank: a step has at least so many for each rank of the pipeline.
    """

    placement: Literal["loop", "v"] = "loop"
    fewest: int = 1
    most: int | None = 1
    micro_batches_per_rank: int = 0


_V = Shape(placement="v", fewest=2, most=2)

SCHEDULES: dict[str, Shape] = {
    "gpipe": Shape(most=None),
    "1f1b": Shape(),
    "interleaved": Shape(fewest=2, most=None),
    "zb-1f1b": Shape(),
    "zb-v": _V,
    "v-half": _V,
    "v-min": _V,
    "dualpipe-v": Shape(placement="v", fewest=2, most=2, micro_batches_per_rank=2),
}
"""Every schedule by its name in `pipeline.schedule`."""


def schedule(name: str, *, ranks: int, stages_per_rank: int, micro_batches: int, pairs: bool = False) -> Schedule:
    """The actions of one training step.

    Args:
        name: of SCHEDULES.
        ranks: of the pipeline.
        stages_per_rank: stages that each rank holds.
        micro_batches: of a step.
        pairs: let ranks do a forward together with the backward of another micro-batch; of schedules in BESIDE.

    Raises:
        ConfigError: there is no such schedule, or it cannot have these sizes.
    """
    shape = _checked(name, ranks, stages_per_rank, micro_batches)
    if name in STRIDES:
        block = building_block(name, ranks)
        actions = squeeze(repeat(block, micro_batches), block.held)
    else:
        # GPipe takes the whole batch through a stage before the next one; there is nothing to alternate with.
        groups = 1 if name == "gpipe" else groups_to_fill(ranks, micro_batches)
        actions = []
        for rank in range(ranks):
            stages = stages_of(rank, ranks=ranks, stages_per_rank=stages_per_rank, placement=shape.placement)
            phrases = (BESIDE if pairs else GRAMMARS)[name](ranks, rank, stages_per_rank, micro_batches)
            actions.append(spell(phrases, stages, micro_batches, groups))
    plan = Schedule(
        name=name,
        ranks=ranks,
        stages_per_rank=stages_per_rank,
        placement=shape.placement,
        micro_batches=micro_batches,
        actions=tuple(actions),
    )
    return pair_up(plan) if pairs else plan


def _checked(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> Shape:
    """What the schedule asks for, or the first thing that it does not get."""
    if name not in SCHEDULES:
        raise ConfigError("pipeline.schedule is unknown", got=name, allowed=", ".join(SCHEDULES))
    shape = SCHEDULES[name]
    if ranks < 1:
        raise ConfigError("parallel.pipeline is too small", got=ranks, allowed="1 or more")
    if stages_per_rank < shape.fewest or (shape.most is not None and stages_per_rank > shape.most):
        allowed = f"{shape.fewest}" if shape.most else f"{shape.fewest} or more"
        raise ConfigError(
            f"pipeline.stages_per_rank does not suit pipeline.schedule={name}",
            got=stages_per_rank,
            allowed=allowed,
            fix=f"pipeline.stages_per_rank={shape.fewest}, or {_suits(stages_per_rank)}",
        )
    least = max(1, shape.micro_batches_per_rank * ranks)
    if micro_batches < least:
        raise ConfigError(
            f"pipeline.schedule={name} on {ranks} ranks has too few micro-batches",
            got=micro_batches,
            allowed=f"{least} or more (training.global_batch over training.micro_batch and the data-parallel ranks)",
            fix="raise training.global_batch, or pipeline.schedule=zb-v" if shape.micro_batches_per_rank else None,
        )
    return shape


def _suits(stages_per_rank: int) -> str:
    """A schedule that takes this number of stages."""
    return f"pipeline.schedule={'interleaved' if stages_per_rank > 1 else '1f1b'}"


def forward_only(training: Schedule, micro_batches: int) -> Schedule:
    """The same stages on the same ranks, forwards only, for evaluation.

    Args:
        training: the schedule of a training step.
        micro_batches: how many, at least 1; need not be those of training.
    """
    assert micro_batches >= 1, f"{micro_batches} micro-batches"
    grammar = forwards_on_v if training.placement == "v" else forwards
    groups = groups_to_fill(training.ranks, micro_batches)
    actions = []
    for rank in range(training.ranks):
        phrases = grammar(training.ranks, rank, training.stages_per_rank, micro_batches)
        actions.append(spell(phrases, training.stages_of(rank), micro_batches, groups))
    return Schedule(
        name=training.name,
        ranks=training.ranks,
        stages_per_rank=training.stages_per_rank,
        placement=training.placement,
        micro_batches=micro_batches,
        actions=tuple(actions),
        trains=False,
    )
