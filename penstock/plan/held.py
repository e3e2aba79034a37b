"""What a pipeline rank holds of its stages whenever it does something, found once for all sizes of stages.

Memory of the passes is the most of `held + what the action takes`, over the actions of the rank's list. Which counts of
micro-batches are held at an action depends on the schedule only, and of counts that are nowhere above others at an
action of the same kind nobody need know. So a list of thousands of actions comes down to a few `PeakPoint`s.

A step of many micro-batches repeats itself in the middle, so a step of fewer holds as much: see `enough`.
"""

from dataclasses import dataclass
from functools import cache
from operator import ge

from penstock.config.fit import SPLITTING_SCHEDULES
from penstock.layout.actions import Kind, Schedule, stages_of
from penstock.layout.phrases import GRAMMARS, groups_to_fill, spell
from penstock.layout.schedules import SCHEDULES, schedule

REPEATED = 2
"""So many micro-batches for each rank of the pipeline, and from there on every schedule repeats itself."""

_KEPT = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: -1, Kind.WEIGHT: 0}
_LEFT = {Kind.FORWARD: 0, Kind.BACKWARD: 0, Kind.INPUT: 1, Kind.WEIGHT: -1}

Work = tuple[tuple[int, Kind], ...]
"""An action, or a pair: stages and what is done with them."""


@dataclass(frozen=True)
class PeakPoint:
    """A rank at the beginning of an action.

    Attributes:
        work: what it begins.
        kept: micro-batches between forward and backward, of each of its stages.
        left: micro-batches whose weight gradients are put off.
    """

    work: Work
    kept: tuple[int, ...]
    left: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """All that it holds."""
        return (*self.kept, *self.left)


@dataclass(frozen=True)
class Shape:
    """A schedule and its sizes, as far as memory depends on them.

    Attributes:
        name: of the schedule.
        ranks: of the pipeline.
        stages_per_rank: stages of each.
        micro_batches: of a step, or as many as hold the same.
        pairs: as `penstock.layout.schedules.schedule` has it.
    """

    name: str
    ranks: int
    stages_per_rank: int
    micro_batches: int
    pairs: bool = False

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank, in the order of the model."""
        placement = SCHEDULES[self.name].placement
        return stages_of(rank, ranks=self.ranks, stages_per_rank=self.stages_per_rank, placement=placement)

    @property
    def splits_backward(self) -> bool:
        """Some weight gradients are put off."""
        return self.name in SPLITTING_SCHEDULES

    @property
    def holds_most_first(self) -> bool:
        """Of ranks with stages of the same sizes an earlier one needs no less than a later one.

        In a loop it starts further ahead. This is not so on a v, where each rank is far from one end of the model and
        near the other; where weight gradients are put off, of which later ranks put off more; and where passes are done
        in pairs, which are of other stages on other ranks.
        """
        return SCHEDULES[self.name].placement == "loop" and not self.splits_backward and not self.pairs


def enough(name: str, ranks: int, micro_batches: int) -> int:
    """Micro-batches that hold as much as `micro_batches`, if those are more."""
    repeated = REPEATED * ranks
    is_even = micro_batches % ranks == 0 or name != "interleaved"
    return micro_batches if name == "gpipe" or not is_even else min(micro_batches, repeated)


@cache
def peak_points(shape: Shape, rank: int) -> tuple[PeakPoint, ...]:
    """Where the most may be held on a rank, for any sizes of stages."""
    place = {stage: number for number, stage in enumerate(shape.stages_of(rank))}
    kept, left = [0] * len(place), [0] * len(place)
    seen: dict[Work, dict[PeakPoint, None]] = {}
    for work in _works(shape, rank):
        seen.setdefault(work, {})[PeakPoint(work, tuple(kept), tuple(left))] = None
        for stage, kind in work:
            at = place[stage]
            kept[at] += _KEPT[kind]
            left[at] += _LEFT[kind]
    return tuple(one for found in seen.values() for one in _highest(list(found)))


def _works(shape: Shape, rank: int) -> list[Work]:
    if shape.pairs or shape.name not in GRAMMARS:
        return [tuple((one.stage, one.kind) for one in unit) for unit in _plan(shape).units(rank)]
    # One rank's list alone: the whole plan of a long pipeline takes its time.
    phrases = GRAMMARS[shape.name](shape.ranks, rank, shape.stages_per_rank, shape.micro_batches)
    groups = 1 if shape.name == "gpipe" else groups_to_fill(shape.ranks, shape.micro_batches)
    actions = spell(phrases, shape.stages_of(rank), shape.micro_batches, groups)
    return [((one.stage, one.kind),) for one in actions]


@cache
def _plan(shape: Shape) -> Schedule:
    return schedule(
        shape.name,
        ranks=shape.ranks,
        stages_per_rank=shape.stages_per_rank,
        micro_batches=shape.micro_batches,
        pairs=shape.pairs,
    )


def _highest(found: list[PeakPoint]) -> list[PeakPoint]:
    """Those, all of one work, beside which no other holds as much everywhere; in their order."""
    highest: dict[tuple[int, ...], None] = {}
    # What another covers comes behind it, for it holds less in all.
    for counts in sorted((one.counts for one in found), key=sum, reverse=True):
        if not any(all(map(ge, other, counts)) for other in highest):
            highest[counts] = None
    return [one for one in found if one.counts in highest]
