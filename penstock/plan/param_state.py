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
from penstock.plan.hardware import RankGroup
from penstock.plan.liveness import layer_kind
from penstock.plan.meta_rank import MetaRank
from penstock.plan.meta_run import UpdateOps
from penstock.plan.op_recorder import RecordedOp, RecordedOps

MOMENT_BYTES = 8
"""Of one value: two float32 moments."""

SUM_BYTES = 4
"""Of one value of a float32 sum or master."""


@dataclass(frozen=True)
class ParamFacts:
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
"""Parts that are no decoder layers; these are called by their kind (`penstock.plan.liveness`)."""

ParamsByKind = Mapping[str, tuple[ParamFacts, ...]]
"""Parameters of each kind of part: embed, each kind of layer, mtp, head."""


@dataclass(frozen=True, kw_only=True)
class ShardCounts:
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

    def of(self, fact: ParamFacts) -> int:
        """Ranks that divide a parameter."""
        if not (self.divides or fact.is_divided):
            return 1
        return self.expert if fact.is_expert else self.dense


def shards_of(parallel: Parallel, dense_ranks: int, expert_ranks: int) -> ShardCounts:
    """Of a run.

    Args:
        parallel: its layout.
        dense_ranks: ranks that hold the same dense matrices.
        expert_ranks: ranks that hold the same experts.
    """
    size = parallel.shard_size

    def within(ranks: int) -> int:
        return size if 0 < size < ranks else ranks

    return ShardCounts(
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


def part_state(facts: Iterable[ParamFacts], shards: ShardCounts) -> PartState:
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


def update_bytes(parts: Iterable[tuple[Iterable[ParamFacts], int]], shards: ShardCounts) -> int:
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


def _most(what: str, ranks: int, width: int, shards: ShardCounts) -> int:
    """Of the buckets that are in memory at once; to a sum belongs our row of it."""
    most = IN_FLIGHT * max(BUCKET_VALUES // ranks, ROW_VALUES)
    if what.startswith("new"):
        return min(width, most) * ranks * int(what.split()[1])
    return min(width, most) * (ranks + (ranks > 1)) * shards.reduce_bytes


def facts_of(rank: MetaRank) -> ParamsByKind:
    """Parameters of the parts of a rank that holds everything."""
    found: dict[str, dict[str, ParamFacts]] = {}
    kind_of, copied = _kinds(rank), _copied(rank)
    for one in param_shards(rank.decoders.values(), rank.axes):
        kind, path = kind_of(one.name)
        facts = found.setdefault(kind, {})
        # One layer of each kind is enough.
        if kind not in OTHERS and any(not name.startswith(path) for name in facts):
            continue
        shape = one.parameter.shape
        rows = shape[0] if shape else 1
        facts[one.name] = ParamFacts(
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


@dataclass(frozen=True)
class Partners:
    """Ranks that hold the same.

    Attributes:
        shard: those that divide one copy.
        replicate: those that hold the same part of other copies.
    """

    shard: RankGroup
    replicate: RankGroup


def update_of(
    parts: Iterable[tuple[Iterable[ParamFacts], int]],
    shards: ShardCounts,
    dense: Partners,
    expert: Partners,
    embedding: tuple[RankGroup, int] | None,
) -> UpdateOps:
    """The update of a rank.

    Args:
        parts: its parameters, and how often it has their like.
        shards: who divides them.
        dense: ranks that hold the same dense matrices.
        expert: ranks that hold the same experts.
        embedding: stages that hold the embedding too, and values of it that this rank updates; None without such.
    """
    loads = {False: _Load(), True: _Load()}
    for facts, times in parts:
        for fact in facts:
            loads[fact.is_expert].add(fact, times, shards.of(fact))
    reduce: list[RecordedOp] = []
    step: list[RecordedOp] = []
    for is_expert, load in loads.items():
        partners = expert if is_expert else dense
        reduce += load.sums(partners, shards)
        step += load.news(partners)
    if embedding is not None:
        group, values = embedding
        reduce += [_moving("copy_", 2 * values, (SUM_BYTES, shards.reduce_bytes))]
        reduce += [
            _message("allreduce_", (columns,), (columns * shards.reduce_bytes,), group)
            for columns, times in _buckets(values, 1)
            for _ in range(times)
        ]
    sums = sum(load.values for load in loads.values())
    own = sum(load.own for load in loads.values())
    copied = sum(load.copied for load in loads.values())
    moments = _moving("_fused_adamw_", own, (SUM_BYTES,) * 4)
    rounded = _moving("_foreach_copy_", copied, (2, SUM_BYTES))
    # Each weight in 8 bits is read in 16 and written twice.
    quantized = sum(load.quantized for load in loads.values()) // 2
    step += [_moving("quantize_kernel", quantized, (2, 1, 1))] if quantized else []
    return UpdateOps(
        zero=(_moving("_foreach_zero_", sums, (SUM_BYTES,)),),
        reduce=tuple(reduce),
        norm=(_moving("_foreach_norm", own, (SUM_BYTES,)),),
        step=(moments, rounded, *step),
    )


class _Load:
    """Parameters of one kind of holder, added up.

    Attributes:
        values: that have a float32 sum on this rank.
        own: that this rank updates.
        copied: of those, with a master of their own.
        width: values of a row of buckets, of what is not gathered anyway.
        itemsize: bytes of a weight.
        quantized: bytes of copies in 8 bits.
    """

    def __init__(self) -> None:
        self.values = self.own = self.copied = self.width = self.own_sent = self.quantized = 0
        self.itemsize = SUM_BYTES

    def add(self, fact: ParamFacts, times: int, ranks: int) -> None:
        """So many of a parameter."""
        own = fact.own(ranks)
        self.own += times * own
        if fact.is_divided:
            self.values += times * own
            return
        self.values += times * fact.values
        self.quantized += times * fact.copy_bytes
        self.width += times * -(-fact.rows // ranks) * fact.width
        self.own_sent += times * own
        if fact.itemsize < SUM_BYTES:
            self.copied += times * own
            self.itemsize = fact.itemsize

    def sums(self, partners: Partners, shards: ShardCounts) -> RecordedOps:
        """Sums over ranks."""
        ranks = partners.shard.ranks if shards.divides else 1
        group = partners.shard if shards.divides else None
        if not self.width or partners.shard.ranks * partners.replicate.ranks == 1:
            return ()
        found = [_moving("copy_", self.width * ranks, (SUM_BYTES, shards.reduce_bytes))]
        for columns, times in _buckets(self.width, ranks):
            sizes = columns * shards.reduce_bytes, columns * ranks * shards.reduce_bytes
            if group is not None and ranks > 1:
                found += [_message("_reduce_scatter_base_", (columns, columns * ranks), sizes, group)] * times
            others = partners.replicate if group is not None else partners.shard
            if others.ranks > 1:
                found += [_message("allreduce_", (columns,), sizes[:1], others)] * times
        found.append(_moving("copy_", self.own_sent, (SUM_BYTES, shards.reduce_bytes)))
        return tuple(found)

    def news(self, partners: Partners) -> RecordedOps:
        """New weights for the other ranks."""
        ranks = partners.shard.ranks
        if not self.width or ranks == 1 or self.own_sent == self.values:
            return ()
        found = [_moving("copy_", self.own_sent, (self.itemsize,) * 2)]
        for columns, times in _buckets(self.width, ranks):
            sizes = columns * ranks * self.itemsize, columns * self.itemsize
            found += [_message("_allgather_base_", (columns * ranks, columns), sizes, partners.shard)] * times
        found.append(_moving("copy_", self.width * ranks, (self.itemsize,) * 2))
        return tuple(found)


def _buckets(width: int, ranks: int) -> list[tuple[int, int]]:
    """Columns of buckets, and how many have so many."""
    most = max(BUCKET_VALUES // ranks, ROW_VALUES)
    return [(columns, times) for columns, times in ((most, width // most), (width % most, 1)) if columns and times]


def _moving(name: str, values: int, itemsizes: tuple[int, ...]) -> RecordedOp:
    return RecordedOp(
        name,
        shapes=((values,),) * len(itemsizes),
        sizes=tuple(values * size for size in itemsizes),
        itemsize=itemsizes[0],
    )


def _message(name: str, values: tuple[int, ...], sizes: tuple[int, ...], group: RankGroup) -> RecordedOp:
    return RecordedOp(
        name, shapes=tuple((one,) for one in values), sizes=sizes, itemsize=sizes[0] // values[0], group=group
    )
