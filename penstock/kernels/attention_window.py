"""Attention windows, and the blocks of keys that blocks of queries need. No torch: the config imports this file.

    window of 3    a position sees itself and the 2 before it
    chunk of 3     a position sees those of its own chunk up to itself: 0 1 2 | 3 4 5 | 6 7

Attention over the whole square would compute scores that are masked. So queries are cut into equal blocks, and each
block gets the keys that end with its last query. Blocks of one shape are computed together, as rows of a batch:

    chunks, row of 8     2 blocks of 3 queries with their own 3 keys; 1 block of 2 with 2: plain causal attention
    window, row of 8     3 blocks of 3 queries with 6 keys; padding before the first and after the last position

A block of a window reads the block before it too. In a row of several documents chunks are counted from the beginning
of each document, so they may begin anywhere and need the blocks of a window. Positions are those of the row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AttentionWindow:
    """Sliding window or chunk of a layer with local attention.

    A query sees the last `size` positions, its own included, or its own chunk of `size`, counted from the beginning of
    the row, or of its document.
    """

    kind: Literal["window", "chunk"]
    size: int  # positions that a query sees at most

    def first_seen(self, position: int) -> int:
        """First position that a query at `position` sees."""
        return max(0, position - self.size + 1) if self.kind == "window" else position - position % self.size

    def pairs(self, length: int) -> float:
        """Pairs of query and key in a row of this length; the pair of a position with itself counts half."""
        if self.kind == "window":
            seen = min(self.size, length)
            return seen**2 / 2 + (length - seen) * (seen - 0.5)  # the triangle at the beginning, and full windows
        chunks, rest = divmod(length, self.size)
        return chunks * self.size**2 / 2 + rest**2 / 2


@dataclass(frozen=True)
class QueryBlocks:
    """`count` consecutive blocks of one size, from position `first` on."""

    first: int
    count: int
    queries: int  # of a block
    keys: int  # of a block; the last one has the position of the block's last query

    @property
    def end(self) -> int:
        """Position after the last query; it may lie after the end of the row."""
        return self.first + self.count * self.queries

    @property
    def is_square(self) -> bool:
        """The queries of a block need no keys of other blocks: plain causal attention."""
        return self.keys == self.queries


def blocks_of(window: AttentionWindow, first: int, count: int, *, by_document: bool = False) -> tuple[QueryBlocks, ...]:
    """Blocks for the `count` queries from position `first` on; `by_document` for rows of several documents."""
    if window.kind == "window" or by_document:
        return (_of_window(window.size, first, count),)
    return tuple(_of_chunks(window, first, count))


def _of_window(size: int, first: int, count: int) -> QueryBlocks:
    if count <= size:
        return QueryBlocks(first, 1, count, min(first, size - 1) + count)
    return QueryBlocks(first, -(-count // size), size, 2 * size)  # each block reads the one before it too


def _of_chunks(window: AttentionWindow, first: int, count: int) -> Iterator[QueryBlocks]:
    """The rest of a chunk that began before the range, whole chunks, the beginning of one more."""
    end = first + count
    before = min(-first % window.size, count)
    whole = (count - before) // window.size
    behind = count - before - whole * window.size
    if before:
        yield QueryBlocks(first, 1, before, first + before - window.first_seen(first))
    if whole:
        yield QueryBlocks(first + before, whole, window.size, window.size)
    if behind:
        yield QueryBlocks(end - behind, 1, behind, behind)
