"""All documents of a source, without end, read in lanes; with a position between any two rows.

Each document is followed by one end-of-document token; a document without tokens yields nothing, not even that. When
all documents have been dealt an epoch is over, and the next one begins in another order, which follows from (seed,
epoch) alone.

Rows of one document resemble each other, and a batch of them teaches little. So several documents are read side by
side, each by a lane. A lane that comes to the end of its document is dealt the next one of the order: every document is
read once an epoch, in one lane. Lanes take turns: row g, counted from the first row of all, is the next S tokens of
lane g mod lanes. With one lane the rows are cut from one line of documents.

An example, two lanes, rows of 3, the documents `a b c d`, `e`, `f g h` and `i j k`, and `.` for the end-of-document
token. Lane 1 is the first that needs a third document:

    lane 0   a b c   d . i   ...     rows 0, 2, ...
    lane 1   e . f   g h .   ...     rows 1, 3, ...
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.random import PCG64
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.sources import Source, Tokens


class Cursor(NamedTuple):
    """A place between two tokens of one document in one epoch.

    Attributes:
        epoch: how often all documents had been dealt before.
        place: number of the document in the order of this epoch.
        offset: tokens of the document that lie behind the cursor, its end token included.
    """

    epoch: int
    place: int
    offset: int = 0


class Position(NamedTuple):
    """A place between two rows of a stream.

    Attributes:
        undealt: the start of the first document that no lane has been dealt.
        lanes: before the next token of each lane.
        rows: how many rows lie behind.
    """

    undealt: Cursor
    lanes: tuple[Cursor, ...]
    rows: int


class Rows(NamedTuple):
    """B rows of S + 1 tokens; the last of a row is there to be the label of the one before.

    Attributes:
        tokens: the ids, of any integer type.
        documents: which document each token is of: equal inside a document, different in neighbouring ones of a row.
    """

    tokens: NDArray[np.integer[Any]]
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


class Stream:
    """Reads rows. It has no position of its own; it keeps the latest document of each lane and the latest orders.

    The cursor of a lane stands before the lane's next token, in that token's document. There is one such position for
    each row, so that readers that took other steps to the same row agree.
    """

    def __init__(self, source: Source, *, seed: int, shuffle: bool, lanes: int) -> None:
        """Takes the documents, the seed (>= 0) of their order, and whether they are put in that order at all.

        Args:
            source: the documents.
            seed: of their order, >= 0.
            shuffle: put them in that order; else they come by number.
            lanes: documents that are read side by side, 1 to the number of documents.
        """
        assert 1 <= lanes <= len(source), f"{lanes} lanes cannot read {len(source)} documents side by side"
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._lanes = lanes
        self._latest_orders: dict[int, NDArray[np.int64]] = {}
        self._latest_documents: dict[int, tuple[int, int, Tokens]] = {}

    def start(self) -> Position:
        """Returns the position before the first row: the first documents are dealt, one to each lane."""
        dealt = [Cursor(0, 0)]
        while len(dealt) <= self._lanes:
            dealt.append(self._document_after(dealt[-1]))
        return Position(undealt=dealt[-1], lanes=tuple(dealt[:-1]), rows=0)

    def read(self, position: Position, rows: int, sequence_length: int) -> tuple[Rows, Position]:
        """Returns `rows` rows of `sequence_length` tokens and the one after them, and the position behind the rows.

        Raises:
            DataError: a document cannot be read, or the whole source holds no token.
        """
        shape = rows, sequence_length + 1
        tokens = np.empty(shape, dtype=np.min_scalar_type(self._source.vocabulary_size))
        documents = np.zeros(shape, dtype=np.int64)
        for row in range(rows):
            parts, position = self._next_row(position, sequence_length)
            start = 0
            for number, part in enumerate(parts):
                tokens[row, start : start + len(part)] = part
                documents[row, start:] = number
                start += len(part)
        return Rows(tokens, documents), position

    def advance(self, position: Position, rows: int, sequence_length: int) -> Position:
        """Returns the position `rows` rows further on; reads the documents between, for their lengths.

        Raises:
            DataError: as `read`.
        """
        for _ in range(rows):
            _, position = self._next_row(position, sequence_length)
        return position

    def _next_row(self, position: Position, sequence_length: int) -> tuple[Sequence[Tokens], Position]:
        """Returns a row's tokens and the one after them, one part a document, and the position before that last one."""
        undealt, lanes, row = position
        lane = row % len(lanes)
        cursor = lanes[lane]
        parts: list[Tokens] = []
        missing = sequence_length + 1
        skipped = 0
        while missing > 0:
            part = self._document(lane, cursor)[cursor.offset : cursor.offset + missing]
            if len(part) > 0:
                parts.append(part)
                missing -= len(part)
                cursor = Cursor(cursor.epoch, cursor.place, cursor.offset + len(part))
                skipped = 0
            else:
                # The one document with tokens may be the first of this epoch and the last of the next.
                skipped += 1
                if skipped > 2 * len(self._source):
                    raise DataError(
                        "the data hold no text: every document is empty", got=f"{len(self._source)} documents"
                    )
                cursor, undealt = undealt, self._document_after(undealt)
        before_last = Cursor(cursor.epoch, cursor.place, cursor.offset - 1)
        return parts, Position(undealt, (*lanes[:lane], before_last, *lanes[lane + 1 :]), row + 1)

    def _document(self, lane: int, cursor: Cursor) -> Tokens:
        """Returns the document that a cursor stands in; the latest of each lane is kept."""
        if lane in self._latest_documents:
            epoch, place, tokens = self._latest_documents[lane]
            if (epoch, place) == (cursor.epoch, cursor.place):
                return tokens
        index = int(self._order(cursor.epoch)[cursor.place]) if self._shuffle else cursor.place
        tokens = with_end_token(self._source, index)
        self._latest_documents[lane] = cursor.epoch, cursor.place, tokens
        return tokens

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Returns the order of an epoch; the latest two are kept, for lanes that resume at the turn of an epoch."""
        if epoch not in self._latest_orders:
            if len(self._latest_orders) == 2:
                del self._latest_orders[min(self._latest_orders)]
            self._latest_orders[epoch] = document_order(len(self._source), seed=self._seed, epoch=epoch)
        return self._latest_orders[epoch]

    def _document_after(self, cursor: Cursor) -> Cursor:
        if cursor.place + 1 < len(self._source):
            return Cursor(cursor.epoch, cursor.place + 1)
        return Cursor(cursor.epoch + 1, 0)
