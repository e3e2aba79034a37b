"""Ranks that hold parts of tensors in any layout, simulated in one process."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from penstock.layout.sharding import Cut, local_shape, local_slices, row_width, rows_of_shard
from penstock.parallel.shard import ShardedTensor, by_rows
from penstock.train.manifest import WrittenFiles, merge, write_parts


@dataclass(frozen=True)
class Layout:
    """How ranks divide one tensor."""

    counts: tuple[int, ...]  # parts that each dim is cut into
    blocks: tuple[int, ...]  # equal blocks that each dim is made of, each cut by itself
    shards: int = 1  # ranks that divide the rows of what the cuts leave
    copies: int = 1  # ranks that hold the same; the first one writes

    def parts(self, whole: Tensor) -> Iterator[ShardedTensor]:
        shape = tuple(whole.shape)
        for indexes in product(*(range(count) for count in self.counts)):
            cuts = tuple(
                Cut(dim, index, count, blocks)
                for dim, (index, count, blocks) in enumerate(zip(indexes, self.counts, self.blocks, strict=True))
                if count > 1
            )
            for shard, copy in product(range(self.shards), range(self.copies)):
                local = local_shape(shape, cuts)
                yield _part(whole, cuts, rows_of_shard(prod(local) // row_width(local), shard, self.shards), copy)


def _part(whole: Tensor, cuts: tuple[Cut, ...], rows: tuple[int, int], copy: int) -> ShardedTensor:
    local = whole
    for cut in cuts:
        blocks = local.chunk(cut.blocks, cut.dim)
        local = torch.cat([block.chunk(cut.count, cut.dim)[cut.index] for block in blocks], cut.dim)
    shape = tuple(whole.shape)
    if not shape:  # a scalar is not divided: the first rank writes it
        pieces, writes = local_slices(shape, ()), copy == 0 and rows == (0, 1)
        return ShardedTensor(tensor=whole.clone(), shape=shape, pieces=pieces, writes=writes)
    pieces = local_slices(shape, cuts, rows)
    return ShardedTensor(tensor=by_rows(local)[slice(*rows)].clone(), shape=shape, pieces=pieces, writes=copy == 0)


def ranks_of(
    tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], ranks: int
) -> list[dict[str, ShardedTensor]]:
    """What each of some ranks holds of several tensors: parts are dealt out, one after another."""
    held: list[dict[str, ShardedTensor]] = [{} for _ in range(ranks)]
    for name, tensor in tensors.items():
        for number, part in enumerate(layouts[name].parts(tensor)):
            assert name not in held[number % ranks], f"{name} has more parts than there are ranks"
            held[number % ranks][name] = part
    return held


def write_ranks(folder: Path, ranks: list[dict[str, ShardedTensor]]) -> WrittenFiles:
    return merge([write_parts(folder, parts, rank) for rank, parts in enumerate(ranks)])
