"""What follows the passes of a step, as operators, counted from the bytes that there are instead of run.

As `penstock.plan.rehearsal` finds it by running the optimizer, but one operator stands for all of its kind that move
bytes of the device, and messages are full buckets. What is tiny is left out: the norm's sum over all ranks, gradients
that tensor-parallel ranks share.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.parallel.buckets import BUCKET_VALUES, ROW_VALUES
from penstock.plan.hardware import Group
from penstock.plan.held_state import SUM_BYTES, Fact, Shards
from penstock.plan.rehearsal import Update
from penstock.plan.tape import Operator, Work


@dataclass(frozen=True)
class Partners:
    """Ranks that hold the same.

    Attributes:
        shard: those that divide one copy.
        replicate: those that hold the same part of other copies.
    """

    shard: Group
    replicate: Group


def update_of(
    parts: Iterable[tuple[Iterable[Fact], int]],
    shards: Shards,
    dense: Partners,
    expert: Partners,
    embedding: tuple[Group, int] | None,
) -> Update:
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
    reduce: list[Operator] = []
    step: list[Operator] = []
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
    return Update(
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

    def add(self, fact: Fact, times: int, ranks: int) -> None:
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

    def sums(self, partners: Partners, shards: Shards) -> Work:
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

    def news(self, partners: Partners) -> Work:
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


def _moving(name: str, values: int, itemsizes: tuple[int, ...]) -> Operator:
    return Operator(
        name,
        shapes=((values,),) * len(itemsizes),
        sizes=tuple(values * size for size in itemsizes),
        itemsize=itemsizes[0],
    )


def _message(name: str, values: tuple[int, ...], sizes: tuple[int, ...], group: Group) -> Operator:
    return Operator(
        name, shapes=tuple((one,) for one in values), sizes=sizes, itemsize=sizes[0] // values[0], group=group
    )
