"""Kinds of decoder layers, each in a word or two: layers of one kind hold the same and do the same.

What lets layers of one model differ is experts or none (`model.dense_layers`, `model.moe.moe_layer_freq`) and whether
attention sees the whole row (`model.attention.local`). What `recompute.layers` adds, `penstock.plan.meta_run` sees.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import ge

from penstock.config.fit import SPLITTING_SCHEDULES
from penstock.config.model import GroupedQueryAttention, Model
from penstock.layout.actions import Kind, Schedule, stages_of
from penstock.layout.schedules import GRAMMARS, SCHEDULES, groups_to_fill, schedule, spell
from penstock.plan.op_recorder import RecordedOps

MOE = "moe"
"""End of the words of layers with experts."""


def layer_kind(model: Model, layer: int) -> str:
    """`dense`, `moe`, `local dense` or `local moe`.

    Args:
        model: whose.
        layer: its number, from 0.
    """
    ffn = "dense" if model.is_dense(layer) else MOE
    attention = model.attention
    is_local = isinstance(attention, GroupedQueryAttention) and not attention.is_global(layer)
    return f"local {ffn}" if is_local else ffn


def has_experts(kind: str) -> bool:
    """Whether layers of a kind have experts."""
    return kind.endswith(MOE)


def layers_in_order(model: Model, kinds: Iterable[str]) -> tuple[int, ...]:
    """One layer of each of some kinds, ascending, where a stage has them in this order."""
    found: list[int] = []
    for kind in kinds:
        behind = range(found[-1] + 1 if found else 0, model.layers)
        found.append(next(layer for layer in behind if layer_kind(model, layer) == kind))
    return tuple(found)


def first_of_kinds(model: Model, layers: Iterable[int]) -> dict[str, int]:
    """The kinds of some layers in the order in which they come first, and the first layer of each."""
    found: dict[str, int] = {}
    for layer in layers:
        found.setdefault(layer_kind(model, layer), layer)
    return found


PUT_OFF = "put off"
"""Name of what waits for weight gradients."""


@dataclass(frozen=True, kw_only=True)
class StagePiece:
    """A part of a stage: what stands before its layers, a layer, or what stands behind them. All in bytes.

    Attributes:
        name: `embed`, a layer's kind, or `head`.
        kept: from forward to backward, by the name of the module that allocated it.
        forward: see the top of the file.
        backward: likewise.
        at_forward: what the ledger held at the peak of forward, less what was held before.
        at_backward: the same of backward.
        left: what waits for weight gradients after a backward pass that puts them off.
        forward_work: operators of its forward.
        backward_work: of its backward, but for weight gradients that are put off.
        weight_work: those of the weight gradients that are.
    """

    name: str
    kept: Mapping[str, int]
    forward: int
    backward: int
    at_forward: Mapping[str, int]
    at_backward: Mapping[str, int]
    left: int = 0
    forward_work: RecordedOps = ()
    backward_work: RecordedOps = ()
    weight_work: RecordedOps = ()

    @property
    def kept_bytes(self) -> int:
        """All that is kept."""
        return sum(self.kept.values())


@dataclass(frozen=True, kw_only=True)
class ActivationPeak:
    """The most that a pass holds, over what was held before its micro-batch began.

    Attributes:
        bytes: all.
        terms: by name of who allocated them; together all.
    """

    bytes: int
    terms: Counter[str]


@dataclass(frozen=True, kw_only=True)
class StageActivations:
    """One stage of a rank.

    Attributes:
        number: of the stage.
        pieces: first to last; one for each layer.
        weight: the most that put-off weight gradients take, over what waits for them.
    """

    number: int
    pieces: tuple[StagePiece, ...]
    weight: int = 0

    @property
    def kept(self) -> Counter[str]:
        """From a micro-batch's forward to its backward."""
        total: Counter[str] = Counter()
        for piece in self.pieces:
            total.update(piece.kept)
        return total

    @property
    def kept_bytes(self) -> int:
        """All of `kept`."""
        return sum(piece.kept_bytes for piece in self.pieces)

    @property
    def left(self) -> int:
        """From the gradient of a micro-batch's input to its weight gradients."""
        return sum(piece.left for piece in self.pieces)

    @property
    def forward(self) -> ActivationPeak:
        """Of a forward pass."""
        return self._peak([piece.forward for piece in self.pieces], [piece.at_forward for piece in self.pieces])

    @property
    def backward(self) -> ActivationPeak:
        """Of a backward pass."""
        lefts = [sum(piece.left for piece in self.pieces[place + 1 :]) for place in range(len(self.pieces))]
        sizes = [piece.backward + left for piece, left in zip(self.pieces, lefts, strict=True)]
        return self._peak(sizes, [piece.at_backward for piece in self.pieces])

    def _peak(self, sizes: Sequence[int], terms: Sequence[Mapping[str, int]]) -> ActivationPeak:
        bases = list(accumulate((piece.kept_bytes for piece in self.pieces), initial=0))
        place = max(range(len(sizes)), key=lambda place: bases[place] + sizes[place])
        found = Counter(terms[place])
        for piece in self.pieces[:place]:
            found.update(piece.kept)
        found[PUT_OFF] = bases[place] + sizes[place] - sum(found.values())
        return ActivationPeak(
            bytes=bases[place] + sizes[place], terms=Counter({name: size for name, size in found.items() if size})
        )


REPEATED = 2
"""So many micro-batches for each rank of the pipeline, and from there on every schedule repeats itself."""

_KEPT = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: -1, Kind.WEIGHT: 0}
_LEFT = {Kind.FORWARD: 0, Kind.BACKWARD: 0, Kind.INPUT: 1, Kind.WEIGHT: -1}

ActionUnit = tuple[tuple[int, Kind], ...]
"""An action, or a pair: stages and what is done with them."""


@dataclass(frozen=True)
class PeakPoint:
    """A rank at the beginning of an action.

    Attributes:
        work: what it begins.
        kept: micro-batches between forward and backward, of each of its stages.
        left: micro-batches whose weight gradients are put off.
    """

    work: ActionUnit
    kept: tuple[int, ...]
    left: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """All that it holds."""
        return (*self.kept, *self.left)


@dataclass(frozen=True)
class PipelineShape:
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
def peak_points(shape: PipelineShape, rank: int) -> tuple[PeakPoint, ...]:
    """Where the most may be held on a rank, for any sizes of stages."""
    place = {stage: number for number, stage in enumerate(shape.stages_of(rank))}
    kept, left = [0] * len(place), [0] * len(place)
    seen: dict[ActionUnit, dict[PeakPoint, None]] = {}
    for work in _works(shape, rank):
        seen.setdefault(work, {})[PeakPoint(work, tuple(kept), tuple(left))] = None
        for stage, kind in work:
            at = place[stage]
            kept[at] += _KEPT[kind]
            left[at] += _LEFT[kind]
    return tuple(one for found in seen.values() for one in _highest(list(found)))


def _works(shape: PipelineShape, rank: int) -> list[ActionUnit]:
    if shape.pairs or shape.name not in GRAMMARS:
        return [tuple((one.stage, one.kind) for one in unit) for unit in _plan(shape).units(rank)]
    # One rank's list alone: the whole plan of a long pipeline takes its time.
    phrases = GRAMMARS[shape.name](shape.ranks, rank, shape.stages_per_rank, shape.micro_batches)
    groups = 1 if shape.name == "gpipe" else groups_to_fill(shape.ranks, shape.micro_batches)
    actions = spell(phrases, shape.stages_of(rank), shape.micro_batches, groups)
    return [((one.stage, one.kind),) for one in actions]


@cache
def _plan(shape: PipelineShape) -> Schedule:
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
