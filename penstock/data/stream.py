"""All documents of a source as one endless line of tokens, with a cursor that can stand at any token.

Each document is followed by one end-of-document token; a document without tokens yields nothing, not even that. When
all documents have been read an epoch is over, and the next one begins in another order. The order of an epoch follows
from (seed, epoch) alone, so three integers name a token for good: epoch, place in that epoch's order, offset in the
document.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.random import PCG64
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.sources import Source, Tokens


class Cursor(NamedTuple):
    """A place between two tokens of a stream.

    Attributes:
        epoch: passes over all documents that are complete.
        place: number of the document in the order of this epoch.
        offset: tokens of the document that lie behind the cursor, its end token included.
    """

    epoch: int = 0
    place: int = 0
    offset: int = 0


class Span(NamedTuple):
    """Neighbouring tokens of a stream: one line, or rows of it.

    Attributes:
        tokens: the ids; the last one is there to be the label of the one before.
        documents: which document each token is of: 0 for the first, and one more for each document that begins.
    """

    tokens: Tokens
    documents: NDArray[np.int64]


def document_order(documents: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns a permutation of 0..documents-1 that depends on nothing but the arguments.

    Raw generator output is sorted: NumPy promises that this output never changes, but not that its own shuffle does
    not.
    """
    return np.argsort(PCG64([seed, epoch]).random_raw(documents), kind="stable")


def with_end_token(source: Source, index: int) -> Tokens:
    """Returns the tokens of a document and its end token; nothing for a document without tokens."""
    tokens = source.read(index)
    if len(tokens) == 0:
        return tokens
    # The smallest type that holds the ids: a file of a gigabyte is one document, too.
    document = np.empty(len(tokens) + 1, dtype=np.min_scalar_type(source.vocabulary_size))
    document[:-1] = tokens
    document[-1] = source.end_of_document
    return document


def joined(parts: Sequence[Tokens]) -> Span:
    """Returns one line made of parts that are each of another document."""
    return Span(np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts]))


class Stream:
    """Reads the line of tokens. It has no position of its own; it keeps the latest document and the latest order.

    The cursors that it returns stand before their next token, in that token's document. There is one such cursor for
    each token, so that two readers that took other steps to the same token agree.
    """

    def __init__(self, source: Source, *, seed: int, shuffle: bool) -> None:
        """Takes the documents, the seed (>= 0) of their order, and whether they are put in that order at all."""
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._latest_order: tuple[int, NDArray[np.int64]] | None = None
        self._latest_document: tuple[int, Tokens] | None = None

    def read(self, cursor: Cursor, count: int) -> tuple[Span, Cursor]:
        """Returns `count` tokens from the cursor on and the one after them, and the cursor that is `count` further on.

        Raises:
            DataError: a document cannot be read, or the whole source holds no token.
        """
        parts, behind = self._parts(cursor, count)
        return joined(parts), behind

    def advance(self, cursor: Cursor, count: int) -> Cursor:
        """Returns the cursor that is `count` tokens further on; reads the documents between, for their lengths.

        Raises:
            DataError: as `read`.
        """
        return self._parts(cursor, count)[1]

    def _parts(self, cursor: Cursor, count: int) -> tuple[list[Tokens], Cursor]:
        """Returns `count` tokens and the one after them, one part a document, and the cursor before that last one."""
        parts: list[Tokens] = []
        missing = count + 1
        skipped = 0
        while missing > 0:
            part = self._document(cursor)[cursor.offset : cursor.offset + missing]
            if len(part) > 0:
                parts.append(part)
                missing -= len(part)
                cursor = cursor._replace(offset=cursor.offset + len(part))
                skipped = 0
            else:
                # The one document with tokens may be the first of this epoch and the last of the next.
                skipped += 1
                if skipped > 2 * len(self._source):
                    raise DataError(
                        "the data hold no text: every document is empty", got=f"{len(self._source)} documents"
                    )
                cursor = self._next_document(cursor)
        return parts, cursor._replace(offset=cursor.offset - 1)

    def _document(self, cursor: Cursor) -> Tokens:
        index = cursor.place
        if self._shuffle:
            if self._latest_order is None or self._latest_order[0] != cursor.epoch:
                self._latest_order = (
                    cursor.epoch,
                    document_order(len(self._source), seed=self._seed, epoch=cursor.epoch),
                )
            index = int(self._latest_order[1][cursor.place])
        if self._latest_document is None or self._latest_document[0] != index:
            self._latest_document = index, with_end_token(self._source, index)
        return self._latest_document[1]

    def _next_document(self, cursor: Cursor) -> Cursor:
        if cursor.place + 1 < len(self._source):
            return Cursor(cursor.epoch, cursor.place + 1)
        return Cursor(cursor.epoch + 1)
