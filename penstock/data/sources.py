"""Sources: numbered documents of token ids with random access.

Random access makes shuffling a permutation of numbers, and a resumable position a few integers: no document is read
twice, and no buffer is saved. A source never adds the end-of-document token; the stream does. (A dataset on the network
has no random access: see `shards`.)

A hash of the document decides whether it trains or validates: of its text, or of its name where names are stable. So
the split does not change when documents are added, removed or moved. A source either filters all documents when it is
opened or, where that would take too long, treats those of the other split as documents without tokens. If documents are
so few that one split would be empty, such as the one file of a book, each document is divided (`DocumentPart`).

The order of documents in an epoch is a permutation that depends on (seed, epoch) alone. Where documents are in blocks
that are read whole (row groups of a table), a free permutation would read one block per document. There, blocks are
permuted, consecutive blocks that fit into memory form a pool, and the documents of a pool are permuted. Each block is
read once per epoch, and only block numbers and one pool's permutation are held.

Example: blocks `a b`, `c d`, `e f` and `g h`, pools of two blocks: `f a e b`, then `h c d g`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, Protocol, TypeAlias, TypeVar
from zlib import crc32

import numpy as np
from numpy.random import PCG64
from numpy.typing import NDArray

from penstock.base.errors import DataError

Tokens: TypeAlias = NDArray[np.integer[Any]]
"""Token ids of one document, one dimension, of any integer type."""

Split = Literal["train", "validation"]

Document = TypeVar("Document", str, Tokens)

_LEAST_HELD_OUT = 256
"""Least held-out characters or tokens of a divided document, up to a quarter of it."""


class TokenIds(Protocol):
    """Facts about the ids that a source or a tokenizer gives."""

    @property
    def vocab_size(self) -> int:
        """Every token id, the end-of-document id included, is below this."""

    @property
    def end_of_document(self) -> int:
        """The id that ends a document; the stream puts it there."""

    @property
    def fingerprint(self) -> int:
        """A number of 56 bits that changes when any token may change."""


class Source(TokenIds, Protocol):
    """Documents that can be read in any order. The same number always gives the same tokens."""

    def __len__(self) -> int:
        """Number of documents, at least 1."""

    def read(self, index: int) -> Tokens:
        """Returns the ids of a document without its end; may be empty or read-only. Or raises a DataError."""

    def bytes_per_token(self, index: int) -> Tokens:
        """Returns the bytes of UTF-8 text of each token of `read(index)`; their sum is the size of the document."""


class RecordError(DataError):
    """One record cannot be read; others of the same source can."""

    resume_with = ("data.corrupt=skip",)


@dataclass(frozen=True)
class SplitFilter:
    """Selects the documents of a split by a hash of their content; a split of None keeps every document."""

    split: Split | None = None
    validation_share: float = 0.0

    def identity(self) -> bytes:
        """Its contribution to fingerprints. Saved positions contain them, so this text never changes."""
        return f"Keep(split={self.split!r}, validation_share={self.validation_share!r})".encode()

    def document(self, text: str) -> bool:
        return self.split is None or bool(self.each(np.array([crc32(text.encode())]))[0])

    def each(self, checksums: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """The same for many documents by their CRC-32."""
        if self.split is None:
            return np.ones(len(checksums), dtype=np.bool_)
        # The finalizer of SplitMix64: a bijection whose results look random. uint64 wraps around.
        hashes = checksums.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        is_held_out = hashes ^ (hashes >> np.uint64(31)) < self.validation_share * 2.0**64
        return is_held_out == (self.split == "validation")


@dataclass(frozen=True)
class DocumentPart:
    """The part of every document that belongs to a split: the end validates, the rest trains.

    The share, 0 < share < 1, is of each document; short documents hold out more.
    """

    split: Split
    validation_share: float  # of each document

    def identity(self) -> bytes:
        """Its contribution to fingerprints, see `SplitFilter.identity`."""
        return f"Stretch(split={self.split!r}, validation_share={self.validation_share!r})".encode()

    def of(self, document: Document) -> Document:
        size = len(document)
        # A short document holds out a larger share, up to a quarter.
        held_out = max(round(size * self.validation_share), min(_LEAST_HELD_OUT, size // 4))
        cut = size - held_out
        return document[:cut] if self.split == "train" else document[cut:]


def document_part(kept: NDArray[np.bool_], keep: SplitFilter) -> DocumentPart | None:
    """Returns how to divide documents if one split would have none of them; None if whole documents are assigned."""
    if keep.split is None or keep.validation_share == 0 or len(kept) == 0 or 0 < kept.sum() < len(kept):
        return None
    return DocumentPart(keep.split, keep.validation_share)


def in_split(split: Split, key: bytes, validation_share: float) -> bool:
    """Whether a document belongs to a split, by a stable name `key`, such as a path that never changes."""
    hashed = int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
    return (hashed < validation_share * 2.0**64) == (split == "validation")


def fingerprint_of(*parts: object) -> int:
    """Returns a hash of 56 bits; bytes count by content, all else by its `repr`."""
    digest = blake2b(digest_size=7)
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(content).to_bytes(8, "big"))  # so that "ab", "c" and "a", "bc" differ
        digest.update(content)
    return int.from_bytes(digest.digest(), "big")


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Imports a module of an optional package, which an extra of Penstock installs, or raises a DataError.

    `purpose` is the feature that needs it, as the beginning of a sentence.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise DataError(
            f"{purpose} needs the package {module.partition('.')[0]}, which is not installed",
            fix=f"pip install 'penstock[{extra}]'",
        ) from error


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
