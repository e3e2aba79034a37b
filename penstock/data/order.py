"""The order of documents in an epoch: a permutation that depends on (seed, epoch) alone.

Documents with random access are permuted freely. Where they are in blocks that are read whole (row groups of a table),
that would read one block per document. There, blocks are permuted, consecutive blocks that fit into memory form a pool,
and the documents of a pool are permuted. Each block is read once per epoch, and only block numbers and one pool's
permutation are held.

Example: blocks `a b`, `c d`, `e f` and `g h`, pools of two blocks: `f a e b`, then `h c d g`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.random import PCG64
from numpy.typing import NDArray

from penstock.data.sources import Source

KEPT_POOLS = 2
"""Cached permutations of pools: readers of neighbouring documents may be on both sides of a border."""


class InBlocks:
    """Documents that are read one block at a time."""

    block_sizes: NDArray[np.int64]  # documents of each block; document numbers count through the blocks
    pool: int  # blocks that are held at a time, at least 1


def document_order(documents: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns a permutation of 0..documents-1 that depends on nothing but the arguments."""
    return permutation(documents, [seed, epoch])


def permutation(count: int, key: Sequence[int]) -> NDArray[np.int64]:
    """Returns a permutation of 0..count-1 that depends on nothing but the key."""
    # Sorts raw generator output: NumPy guarantees that this output never changes, but not its own shuffle.
    return np.argsort(PCG64(list(key)).random_raw(count), kind="stable")


class BlockOrder:
    """Documents in random order inside pools of blocks; the latest pools are cached."""

    def __init__(self, block_sizes: NDArray[np.int64], pool: int, *, seed: int, epoch: int) -> None:
        self._key = [seed, epoch]
        self._sizes = block_sizes
        self._firsts = np.cumsum(block_sizes) - block_sizes  # number of the first document of each block
        self._blocks = permutation(len(block_sizes), self._key)
        self._pool = pool
        pools = range(0, len(block_sizes), pool)
        # Place behind the last document of each pool.
        self._ends = np.cumsum([block_sizes[self._blocks[start : start + pool]].sum() for start in pools])
        self._pool_documents = lru_cache(KEPT_POOLS)(self._permuted)

    def __getitem__(self, position: int) -> int:
        number = int(np.searchsorted(self._ends, position, side="right"))
        documents = self._pool_documents(number)
        return int(documents[position - (int(self._ends[number]) - len(documents))])

    def _permuted(self, number: int) -> NDArray[np.int64]:
        blocks = self._blocks[number * self._pool : (number + 1) * self._pool]
        inside = [np.arange(self._firsts[block], self._firsts[block] + self._sizes[block]) for block in blocks]
        documents = np.concatenate(inside)
        return documents[permutation(len(documents), [*self._key, number + 1])]  # the key of the blocks has no number


Order: TypeAlias = NDArray[np.int64] | BlockOrder
"""Document numbers by their place in an epoch."""


def order_of(source: Source, *, seed: int, epoch: int) -> Order:
    if isinstance(source, InBlocks):
        return BlockOrder(source.block_sizes, source.pool, seed=seed, epoch=epoch)
    return document_order(len(source), seed=seed, epoch=epoch)
