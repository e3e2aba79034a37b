"""What a source is: numbered documents of token ids, each of which can be read by itself.

Random access is the whole contract. It makes shuffling a permutation of numbers, and resuming a matter of a few
integers, with no document read twice and no buffer to save. A source never adds the end-of-document token; the stream
does.

Training and validation documents are told apart by a hash of the document (its text, or its name where names are
stable), not by its number, so that the split stays the same when documents are added, removed or moved.
"""

from hashlib import blake2b
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = NDArray[np.integer[Any]]
"""Token ids of one document, one dimension, of any integer type."""

Split = Literal["train", "validation"]


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


def in_split(split: Split, key: bytes, validation_share: float) -> bool:
    """Tells whether the document that `key` names belongs to `split`.

    Args:
        split: the split that is being opened.
        key: what names the document for good: its text, or its path where that never changes.
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
