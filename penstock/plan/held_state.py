"""State of a rank from lists of its parameters: weights, sums, masters, moments, and what the update passes through.

The numbers are those of the optimizer (`MasterAdamW.memory`) and of its buckets, without making either: a search asks
for tens of thousands of ranks that hold the same parameters in other numbers, divided among others. What a parameter is
comes from the modules themselves (`facts_of`); only how many rows fall to the first rank is said again here, and tests
hold it to the optimizer.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from penstock.config.parallel import Parallel
from penstock.layout.sharding import rows_of_shard
from penstock.models.parameters import copy_bytes, param_shards
from penstock.parallel.buckets import BUCKET_VALUES, IN_FLIGHT, ROW_VALUES
from penstock.plan.layer_kinds import layer_kind
from penstock.plan.meta_rank import MetaRank

MOMENT_BYTES = 8
"""Of one value: two float32 moments."""

SUM_BYTES = 4
"""Of one value of a float32 sum or master."""


@dataclass(frozen=True)
class Fact:
    """A parameter, as a rank holds it.

    Attributes:
        rows: of its first dim.
        width: values of a row.
        itemsize: bytes of a value between steps.
        is_expert: it is held by ranks of `expert_data`, not of `dense_data`.
        is_divided: FSDP2 gathers it.
        is_partial: tensor-parallel ranks sum its gradient.
        copy_bytes: of what is kept of it in 8 bits besides.
    """

    rows: int
    width: int
    itemsize: int
    is_expert: bool
    is_divided: bool
    is_partial: bool
    copy_bytes: int = 0

    @property
    def values(self) -> int:
        """All of it."""
        return self.rows * self.width

    def own(self, ranks: int) -> int:
        """Values that the first of so many ranks updates."""
        begin, end = rows_of_shard(self.rows, 0, ranks)
        return (end - begin) * self.width


OTHERS = ("embed", "mtp", "head")
"""Parts that are no decoder layers; these are called by their kind (`penstock.plan.layer_kinds`)."""

Facts = Mapping[str, tuple[Fact, ...]]
"""Parameters of each kind of part: embed, each kind of layer, mtp, head."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Who divides what.

    Attributes:
        dense: ranks that divide a dense matrix.
        expert: ranks that divide an expert.
        divides: what FSDP2 does not gather is divided when it is updated.
        reduce_bytes: of a value on its way.
    """

    dense: int
    expert: int
    divides: bool
    reduce_bytes: int

    def of(self, fact: Fact) -> int:
        """Ranks that divide a parameter."""
        if not (self.divides or fact.is_divided):
            return 1
        return self.expert if fact.is_expert else self.dense


def shards_of(parallel: Parallel, dense_ranks: int, expert_ranks: int) -> Shards:
    """Of a run.

    Args:
        parallel: its layout.
        dense_ranks: ranks that hold the same dense matrices.
        expert_ranks: ranks that hold the same experts.
    """
    size = parallel.shard_size

    def within(ranks: int) -> int:
        return size if 0 < size < ranks else ranks

    return Shards(
        dense=within(dense_ranks),
        expert=within(expert_ranks),
        divides=parallel.shard in ("auto", "optimizer"),
        reduce_bytes=SUM_BYTES if parallel.reduce == "fp32" else 2,
    )


@dataclass(frozen=True)
class PartState:
    """Bytes of the parameters of one part, or of several.

    Attributes:
        weights: between steps.
        gradients: float32 sums.
        master: where a weight is not its own.
        moments: both.
        whole: of weights that FSDP2 gathers, when they are whole.
    """

    weights: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0
    whole: int = 0

    @property
    def total(self) -> int:
        """What stays from step to step."""
        return self.weights + self.gradients + self.master + self.moments


def part_state(facts: Iterable[Fact], shards: Shards) -> PartState:
    """Of one part."""
    weights = gradients = master = moments = whole = 0
    for fact in facts:
        own = fact.own(shards.of(fact))
        if fact.is_divided:
            # Its own float32 master; gradients are reduced as soon as they are there.
            weights, gradients = weights + SUM_BYTES * own, gradients + SUM_BYTES * own
            whole += fact.values * fact.itemsize
        else:
            weights += fact.values * fact.itemsize + fact.copy_bytes
            gradients += fact.values * SUM_BYTES
            master += 0 if fact.itemsize >= SUM_BYTES else SUM_BYTES * own
        moments += MOMENT_BYTES * own
    return PartState(weights, gradients, master, moments, whole)


def together(parts: Iterable[tuple[PartState, int]]) -> PartState:
    """Several parts of one rank, each so many times."""
    found = list(parts)
    return PartState(
        weights=sum(count * one.weights for one, count in found),
        gradients=sum(count * one.gradients for one, count in found),
        master=sum(count * one.master for one, count in found),
        moments=sum(count * one.moments for one, count in found),
        whole=sum(count * one.whole for one, count in found),
    )


def update_bytes(parts: Iterable[tuple[Iterable[Fact], int]], shards: Shards) -> int:
    """The most that sums over ranks, and new weights on their way, take.

    Args:
        parts: parameters, and how often the rank has their like.
        shards: who divides them.
    """
    columns: Counter[tuple[str, bool, int]] = Counter()
    for facts, times in parts:
        for fact in facts:
            ranks, alike = shards.of(fact), shards.expert if fact.is_expert else shards.dense
            if fact.is_divided or alike == 1:
                continue
            width = -(-fact.rows // ranks) * fact.width
            columns["sum", fact.is_expert, ranks] += times * width
            if ranks > 1:
                columns[f"new {fact.itemsize}", fact.is_expert, ranks] += times * width
            if fact.is_partial:
                columns["part", False, 1] += times * fact.own(ranks)
    return max((_most(what, ranks, width, shards) for (what, _, ranks), width in columns.items()), default=0)


def _most(what: str, ranks: int, width: int, shards: Shards) -> int:
    """Of the buckets that are in memory at once; to a sum belongs our row of it."""
    most = IN_FLIGHT * max(BUCKET_VALUES // ranks, ROW_VALUES)
    if what.startswith("new"):
        return min(width, most) * ranks * int(what.split()[1])
    return min(width, most) * (ranks + (ranks > 1)) * shards.reduce_bytes


def facts_of(rank: MetaRank) -> Facts:
    """Parameters of the parts of a rank that holds everything."""
    found: dict[str, dict[str, Fact]] = {}
    kind_of, copied = _kinds(rank), _copied(rank)
    for one in param_shards(rank.decoders.values(), rank.axes):
        kind, path = kind_of(one.name)
        facts = found.setdefault(kind, {})
        # One layer of each kind is enough.
        if kind not in OTHERS and any(not name.startswith(path) for name in facts):
            continue
        shape = one.parameter.shape
        rows = shape[0] if shape else 1
        facts[one.name] = Fact(
            rows=rows,
            width=one.parameter.numel() // rows,
            itemsize=one.parameter.dtype.itemsize,
            is_expert=one.data is rank.axes.expert_data,
            is_divided=one.name in rank.divided,
            is_partial=any(axis.name == "tensor" for axis in one.partial),
            copy_bytes=copied.get(one.name, 0),
        )
    return {kind: tuple(facts.values()) for kind, facts in found.items()}


def _copied(rank: MetaRank) -> dict[str, int]:
    """Bytes of copies in 8 bits, by the name of the weight; FSDP2 leaves none from step to step."""
    if rank.divided:
        return {}
    return {
        f"{path}.{name}": size
        for decoder in rank.decoders.values()
        for path, module in decoder.named_modules()
        for name, size in copy_bytes(module).items()
    }


def _kinds(rank: MetaRank) -> Callable[[str], tuple[str, str]]:
    """From a parameter's name to its part, and what begins the names of that part."""
    blocks = {
        f"blocks.{layer}.": layer_kind(decoder.config, int(layer))
        for decoder in rank.decoders.values()
        for layer in decoder.blocks
    }

    def kind_of(name: str) -> tuple[str, str]:
        first, rest = name.split(".")[:2]
        if first == "blocks":
            path = f"{first}.{rest}."
            return blocks[path], path
        return (first if first in ("embed", "mtp") else "head"), first

    return kind_of
