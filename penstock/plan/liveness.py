"""What a stage holds, piece by piece, and which micro-batches a pipeline rank holds whenever it starts an action.

A piece is one layer, the part before the layers, or the part after them (penstock/plan/meta_run.py finds pieces). It
has its operators, and three numbers of bytes:

    kept        from its forward until its backward
    forward     the most in its forward, over the memory before it
    backward    the most in its backward, over the memory before its forward

Layers of one kind have equal pieces: experts or none (`model.dense_layers`, `model.moe.moe_layer_freq`), attention to
the whole row or a window (`model.attention.local`), and 8 bits or 16 (`float8.first_layers`). So the peak of a pass in
piece i is the sum of `kept` of the pieces before i and the most of piece i, for any number of layers.

Memory of a pipeline rank is the most of `held + the action's own`, over the rank's actions. How many micro-batches of
each stage are held depends on the schedule alone, and a count below another one at an action of the same kind cannot
be the peak. So thousands of actions reduce to a few `PeakPoint`s. A long step repeats itself: see `enough`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from operator import ge

from penstock.config.fit import SPLITTING_SCHEDULES, micro_batches
from penstock.config.model import CompressedAttention, GroupedQueryAttention, Model
from penstock.config.run import Run
from penstock.layout.actions import Kind, Schedule, stages_of
from penstock.layout.grid import Grid
from penstock.layout.schedules import GRAMMARS, SCHEDULES, groups_to_fill, schedule, spell
from penstock.models.build import is_in_8_bits
from penstock.plan.op_recorder import RecordedOps

MOE = "moe"  # last word of the kinds of layers with experts
PUT_OFF = "put off"  # label of memory that waits for weight gradients
REPEATED = 2  # from so many micro-batches per pipeline rank on, every schedule repeats itself


def layer_kind(run: Run, layer: int) -> str:
    """`dense`, `moe` or `hashed moe`, after `local`, `linear`, `unrotated` or a kind of compressed attention, if so.

    Layers that stay in 16 bits in a run in 8 bits have `16-bit` before it.
    """
    kind = _kind_in_model(run.model, layer)
    return f"16-bit {kind}" if run.float8.is_used and not is_in_8_bits(run, layer) else kind


def _kind_in_model(model: Model, layer: int) -> str:
    ffn = "dense" if model.is_dense(layer) else f"hashed {MOE}" if model.is_hashed(layer) else MOE
    if model.is_linear(layer):
        return f"linear {ffn}"
    attention = model.attention
    if isinstance(attention, CompressedAttention):
        return f"{attention.kind_of(layer)} {ffn}"
    if not isinstance(attention, GroupedQueryAttention):
        return ffn
    kind = ffn if attention.is_global(layer) else f"local {ffn}"
    return f"unrotated {kind}" if attention.nope_every and not attention.rotates(layer) else kind


def has_experts(kind: str) -> bool:
    return kind.endswith(MOE)


def layers_in_order(run: Run, kinds: Iterable[str]) -> tuple[int, ...]:
    """One layer of each of these kinds, in ascending order."""
    layers: list[int] = []
    for kind in kinds:
        rest = range(layers[-1] + 1 if layers else 0, run.model.layers)
        layers.append(next(layer for layer in rest if layer_kind(run, layer) == kind))
    return tuple(layers)


def first_of_kinds(run: Run, layers: Iterable[int]) -> dict[str, int]:
    """The first layer of each kind, in the order in which the kinds first occur."""
    first_layers: dict[str, int] = {}
    for layer in layers:
        first_layers.setdefault(layer_kind(run, layer), layer)
    return first_layers


@dataclass(frozen=True, kw_only=True)
class StagePiece:
    """A piece of a stage, in bytes; see the top of the file."""

    name: str  # `embed`, a layer's kind, or `head`
    kept: Mapping[str, int]  # from forward to backward, by the label of the allocating module
    forward: int
    backward: int
    at_forward: Mapping[str, int]  # memory at the peak of forward by label, less the memory before it
    at_backward: Mapping[str, int]  # the same at the peak of backward
    left: int = 0  # waits for weight gradients after a backward pass that puts them off
    forward_ops: RecordedOps = ()
    backward_ops: RecordedOps = ()  # without the weight gradients that are put off
    weight_ops: RecordedOps = ()

    @property
    def kept_bytes(self) -> int:
        """Sum of `kept`."""
        return sum(self.kept.values())


@dataclass(frozen=True, kw_only=True)
class ActivationPeak:
    """Peak of a pass over the memory before its micro-batch began; `terms` are its bytes by label."""

    bytes: int
    terms: Counter[str]


@dataclass(frozen=True, kw_only=True)
class StageActivations:
    """One stage of a rank."""

    pieces: tuple[StagePiece, ...]  # first to last; one for each layer
    weight: int = 0  # peak of the put-off weight gradients, over the memory that waits for them

    @cached_property
    def kept(self) -> Counter[str]:
        """From a micro-batch's forward to its backward, by label."""
        total: Counter[str] = Counter()
        for piece in self.pieces:
            total.update(piece.kept)
        return total

    @cached_property
    def kept_bytes(self) -> int:
        """Sum of `kept`."""
        return sum(piece.kept_bytes for piece in self.pieces)

    @cached_property
    def left(self) -> int:
        """From the gradient of a micro-batch's input to its weight gradients."""
        return sum(piece.left for piece in self.pieces)

    @cached_property
    def forward(self) -> ActivationPeak:
        return self._peak([piece.forward for piece in self.pieces], [piece.at_forward for piece in self.pieces])

    @cached_property
    def backward(self) -> ActivationPeak:
        # Backward runs from the last piece to the first: what later pieces left behind is still there.
        lefts = [sum(piece.left for piece in self.pieces[index + 1 :]) for index in range(len(self.pieces))]
        sizes = [piece.backward + left for piece, left in zip(self.pieces, lefts, strict=True)]
        return self._peak(sizes, [piece.at_backward for piece in self.pieces])

    def over_held(self, kind: Kind) -> int:
        """Peak of an action over the memory before it, which holds the kept memory of a backward pass."""
        if kind is Kind.FORWARD:
            return self.forward.bytes
        return self.weight if kind is Kind.WEIGHT else self.backward.bytes - self.kept_bytes

    def _peak(self, sizes: Sequence[int], terms: Sequence[Mapping[str, int]]) -> ActivationPeak:
        # bases[i]: memory that the pieces before piece i keep.
        bases = list(accumulate((piece.kept_bytes for piece in self.pieces), initial=0))
        index = max(range(len(sizes)), key=lambda index: bases[index] + sizes[index])
        labels = Counter(terms[index])
        for piece in self.pieces[:index]:
            labels.update(piece.kept)
        # The labels of the peak sum to it, but for weight gradients of later pieces.
        labels[PUT_OFF] = bases[index] + sizes[index] - sum(labels.values())
        return ActivationPeak(
            bytes=bases[index] + sizes[index], terms=Counter({name: size for name, size in labels.items() if size})
        )


_KEPT = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: -1, Kind.WEIGHT: 0}
_LEFT = {Kind.FORWARD: 0, Kind.BACKWARD: 0, Kind.INPUT: 1, Kind.WEIGHT: -1}

ActionUnit = tuple[tuple[int, Kind], ...]  # an action, or two actions of a pair: stage and kind of each


@dataclass(frozen=True)
class PeakPoint:
    """A rank at the start of an action."""

    work: ActionUnit
    kept: tuple[int, ...]  # micro-batches between forward and backward, for each stage of the rank
    left: tuple[int, ...]  # micro-batches with weight gradients that are put off, for each stage

    @property
    def counts(self) -> tuple[int, ...]:
        """`kept` and `left`."""
        return (*self.kept, *self.left)


@dataclass(frozen=True)
class PipelineShape:
    """A schedule and its sizes, as far as memory depends on them."""

    name: str
    ranks: int
    stages_per_rank: int
    micro_batches: int  # of a step, or a smaller number that holds the same (`enough`)
    pairs: bool = False  # as in `penstock.layout.schedules.schedule`

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
        """Of ranks with equal stages, an earlier one needs at least as much memory as a later one.

        This is so in a loop, where an earlier rank starts further ahead. It is not so on a v, with weight gradients
        that are put off, of which later ranks have more, nor with paired passes, which belong to different stages on
        different ranks.
        """
        return SCHEDULES[self.name].placement == "loop" and not self.splits_backward and not self.pairs


def shape_of(run: Run, grid: Grid) -> PipelineShape | None:
    """A run's schedule, as far as memory depends on it; None without a pipeline."""
    if grid.pipeline == 1:
        return None
    name, ranks = run.pipeline.schedule, grid.pipeline
    return PipelineShape(
        name=name,
        ranks=ranks,
        stages_per_rank=run.pipeline.stages_per_rank,
        micro_batches=enough(name, ranks, micro_batches(run, grid)),
        pairs=run.dispatch.overlap == "passes",
    )


def enough(name: str, ranks: int, micro_batches: int) -> int:
    """The fewest micro-batches known to hold as much as `micro_batches`."""
    # GPipe holds every micro-batch; an uneven interleaved step has another order.
    is_even = micro_batches % ranks == 0 or name != "interleaved"
    return micro_batches if name == "gpipe" or not is_even else min(micro_batches, REPEATED * ranks)


@cache
def held_counts(shape: PipelineShape, rank: int) -> Mapping[ActionUnit, tuple[tuple[int, ...], ...]]:
    """What a rank holds at the starts of each unit: `PeakPoint.counts`, each once, in the order of the schedule.

    Stages of the units count from 0 on the rank.
    """
    indices = {stage: number for number, stage in enumerate(shape.stages_of(rank))}
    counts = [0] * (2 * len(indices))
    seen: dict[ActionUnit, dict[tuple[int, ...], None]] = {}
    for unit in _units(shape, rank):
        here = tuple([(indices[stage], kind) for stage, kind in unit])
        # A dict as an ordered set: most points repeat in every round of the schedule.
        seen.setdefault(here, {})[tuple(counts)] = None
        for at, kind in here:
            counts[at] += _KEPT[kind]
            counts[at + len(indices)] += _LEFT[kind]
    return {unit: tuple(points) for unit, points in seen.items()}


@cache
def peak_points(shape: PipelineShape, rank: int) -> tuple[PeakPoint, ...]:
    """The points at which a rank's memory may peak, for any sizes of its stages."""
    stages = shape.stages_of(rank)
    return tuple(
        PeakPoint(tuple((stages[at], kind) for at, kind in unit), counts[: len(stages)], counts[len(stages) :])
        for unit, points in held_counts(shape, rank).items()
        for counts in _highest(points)
    )


def _units(shape: PipelineShape, rank: int) -> list[ActionUnit]:
    if shape.pairs or shape.name not in GRAMMARS:
        return [tuple((action.stage, action.kind) for action in unit) for unit in _schedule(shape).units(rank)]
    # The list of one rank alone: building the whole schedule of a long pipeline is slow.
    phrases = GRAMMARS[shape.name](shape.ranks, rank, shape.stages_per_rank, shape.micro_batches)
    groups = 1 if shape.name == "gpipe" else groups_to_fill(shape.ranks, shape.micro_batches)
    actions = spell(phrases, shape.stages_of(rank), shape.micro_batches, groups)
    return [((action.stage, action.kind),) for action in actions]


@cache
def _schedule(shape: PipelineShape) -> Schedule:
    return schedule(
        shape.name,
        ranks=shape.ranks,
        stages_per_rank=shape.stages_per_rank,
        micro_batches=shape.micro_batches,
        pairs=shape.pairs,
    )


def _highest(points: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The counts of one unit that no others reach everywhere, in their order."""
    highest: dict[tuple[int, ...], None] = {}
    # Covered counts have a smaller sum, so they come after those that cover them.
    for counts in sorted(points, key=sum, reverse=True):
        if not any(all(map(ge, other, counts)) for other in highest):
            highest[counts] = None
    return [counts for counts in points if counts in highest]


PlaceStages = Mapping[int, StageActivations]
"""Stages of a place on the pipeline by their number, in the order of the model."""


@dataclass(frozen=True)
class PassPeak:
    """The fullest moment of the passes: its name, bytes, and bytes by label; `held` are other micro-batches."""

    name: str
    bytes: int
    terms: Mapping[str, int]


def most_bytes(stages: PlaceStages, shape: PipelineShape | None, position: int) -> int:
    """Memory of the passes of a place at its fullest moment."""
    return max(size for size, _ in _peaks(stages, shape, position))


def fullest_pass(stages: PlaceStages, shape: PipelineShape | None, position: int) -> PassPeak:
    """The moment of `most_bytes`; approximate pieces count the rows beyond the first as held."""
    size, point = max(_peaks(stages, shape, position), key=lambda peak: peak[0])
    terms: Counter[str] = Counter()
    for number, kind in point.work:
        if kind is Kind.WEIGHT:
            terms[PUT_OFF] += stages[number].weight
        else:
            terms.update((stages[number].forward if kind is Kind.FORWARD else stages[number].backward).terms)
    if shape is None:
        return PassPeak("forward" if point.work[0][1] is Kind.FORWARD else "backward", size, terms)
    terms["held"] = size - sum(terms.values())
    return PassPeak(" and ".join(f"{kind} of stage {number}" for number, kind in point.work), size, terms)


def _peaks(stages: PlaceStages, shape: PipelineShape | None, position: int) -> Iterator[tuple[int, PeakPoint]]:
    if shape is None:
        yield stages[0].forward.bytes, PeakPoint(((0, Kind.FORWARD),), (0,), (0,))
        yield stages[0].backward.bytes, PeakPoint(((0, Kind.BACKWARD),), (1,), (0,))
        return
    for point in peak_points(shape, position):
        held = sum(count * stage.kept_bytes for count, stage in zip(point.kept, stages.values(), strict=True))
        held += sum(count * stage.left for count, stage in zip(point.left, stages.values(), strict=True))
        yield held + sum(stages[number].over_held(kind) for number, kind in point.work), point
