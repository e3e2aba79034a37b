"""What a source is: numbered documents of token ids, each of which can be read by itself.

Random access is the whole contract. It makes shuffling a permutation of numbers, and resuming a matter of a few
integers, with no document read twice and no buffer to save. A source never adds the end-of-document token; the stream
does. (A dataset that is read over the network has no random access: see `shards`.)

Training and validation documents are told apart by a hash of the document (its text, or its name where names are
stable), not by its number, so that the split stays the same when documents are added, removed or moved. A source either
looks at every document when it is opened and leaves out those of the other split, or, where that would take too long,
holds them as documents without tokens. Where documents are so few that one split would have none, such as the one file
of a book, each document is divided instead: its end is held out (`DocumentPart`).
"""

from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, Protocol, TypeAlias, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import DataError


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Returns a module of a package that may be missing.

    Args:
        module: its dotted name.
        extra: name of the extra of Penstock that installs it.
        purpose: what needs it, as the beginning of a sentence.

    Raises:
        DataError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise DataError(
            f"{purpose} needs the package {module.partition('.')[0]}, which is not installed",
            fix=f"pip install 'penstock[{extra}]'",
        ) from error


Tokens: TypeAlias = NDArray[np.integer[Any]]
"""Token ids of one document, one dimension, of any integer type."""

Split = Literal["train", "validation"]

Document = TypeVar("Document", str, Tokens)

_LEAST_HELD_OUT = 256
"""Characters or tokens of a document that are held out at least, where that is no more than a quarter of it."""


class Source(Protocol):
    """Documents that can be read in any order. Reading the same number twice gives the same tokens."""

    @property
    def vocabulary_size(self) -> int:
        """Every token id, the end-of-document id too, is below this."""

    @property
    def end_of_document(self) -> int:
        """The id that the stream puts after each document."""

    @property
    def fingerprint(self) -> int:
        """A number of 56 bits that changes when a document, their order or the tokens change."""

    def __len__(self) -> int:
        """Number of documents, at least 1."""

    def read(self, index: int) -> Tokens:
        """Returns the token ids of a document, without the end-of-document token; may be empty; not to be written to.

        Raises:
            DataError: the document cannot be read or is not text.
        """

    def bytes_per_token(self, index: int) -> Tokens:
        """Returns the bytes of UTF-8 text that each token of `read(index)` stands for; their sum is the document."""


class RecordError(DataError):
    """One record cannot be read; others of the same source can."""


@dataclass(frozen=True)
class SplitFilter:
    """Which documents belong to a split, by a hash of their content.

    Attributes:
        split: the split; None keeps every document.
        validation_share: share of all documents that is held out, 0 <= share < 1.
    """

    split: Split | None = None
    validation_share: float = 0.0

    def document(self, text: str) -> bool:
        """Tells whether a document belongs to the split, by its text."""
        return self.split is None or bool(self.each(np.array([crc32(text.encode())]))[0])

    def each(self, checksums: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Tells the same of many documents by their CRC-32."""
        if self.split is None:
            return np.ones(len(checksums), dtype=np.bool_)
        is_held_out = _mixed(checksums.astype(np.uint64)) < self.validation_share * 2.0**64
        return is_held_out == (self.split == "validation")


@dataclass(frozen=True)
class DocumentPart:
    """The part of every document that belongs to a split: the end of each is held out, what is before it trains.

    Attributes:
        split: the split.
        validation_share: share of each document that is held out, 0 < share < 1; short documents give more.
    """

    split: Split
    validation_share: float

    def of(self, document: Document) -> Document:
        """Returns our part of a document, of its characters or tokens."""
        size = len(document)
        held_out = max(round(size * self.validation_share), min(_LEAST_HELD_OUT, size // 4))
        cut = size - held_out
        return document[:cut] if self.split == "train" else document[cut:]


def divided(kept: NDArray[np.bool_], keep: SplitFilter) -> DocumentPart | None:
    """Returns how documents are divided if they are too few to be told apart as wholes; None if each has its split.

    Args:
        kept: which documents `keep` keeps.
        keep: of one split.
    """
    if keep.split is None or keep.validation_share == 0 or len(kept) == 0 or 0 < kept.sum() < len(kept):
        return None
    return DocumentPart(keep.split, keep.validation_share)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns words that look random, one for each: the end of SplitMix64, which maps no two words to one."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def in_split(split: Split, key: bytes, validation_share: float) -> bool:
    """Tells whether the document that `key` names belongs to `split`.

    Args:
        split: the split that is being opened.
        key: what names the document for good: its path, where that never changes.
        validation_share: the share of all documents that is held out, 0 <= share < 1.
    """
    hashed = int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
    return (hashed < validation_share * 2.0**64) == (split == "validation")


def fingerprint_of(*parts: object) -> int:
    """Returns 56 bits of hash of the parts; bytes count by content, everything else by its `repr`."""
    digest = blake2b(digest_size=7)
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(content).to_bytes(8, "big"))
        digest.update(content)
    return int.from_bytes(digest.digest(), "big")
