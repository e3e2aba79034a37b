"""Streams: endless rows of tokens with a position between any two rows, read from lanes of documents side by side.

Positions are values. For each number of rows there is exactly one position, however a reader got there, and a saved
position is a few integers.

Rows of one document resemble each other, and a batch of them teaches little. So each lane reads its own document. At
its end the lane gets the next document of the epoch's order: each is read once per epoch, in one lane. Row g, counted
over the whole run, is the next S tokens of lane g mod lanes. With one lane, rows are cut from one line of documents.

The unit that a lane gets is a document where documents have random access (`Stream`), else a shard of them (`shards`).
One end-of-document token follows each document; a document without tokens gives nothing, not even that. When all units
have been assigned, the next epoch begins in another order.

Example: two lanes, rows of 3, the documents `a b c d`, `e`, `f g h` and `i j k`, and `.` for the end-of-document token.
Lane 1 is the first that needs a third document:

    lane 0   a b c   d . i   ...     rows 0, 2, ...
    lane 1   e . f   g h .   ...     rows 1, 3, ...
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.documents import FillInMiddle, TextDocuments
from penstock.data.sources import Source, TokenIds, Tokens, fingerprint_of, order_of

LANES = 32
"""Documents, or shards, that a shuffled stream reads side by side; each lane holds its current one in memory."""

LoaderState: TypeAlias = "dict[str, int | list[int] | LoaderState]"
"""A position in the data, and the identity of the data, as a checkpoint stores it. A mixture has one per part."""

PositionT = TypeVar("PositionT")


def read_count(state: LoaderState, name: str) -> int:
    """Returns a whole number >= 0 of a state. Raises a DamagedPositionError if it is something else."""
    value = state[name]
    if not isinstance(value, int) or value < 0:
        raise damaged(f"{name} {value}")
    return value


def read_counts(state: LoaderState, name: str, length: int) -> list[int]:
    """Returns `length` whole numbers >= 0 of a state. Raises a DamagedPositionError if they are something else."""
    values = state[name]
    if not isinstance(values, list) or len(values) != length:
        raise damaged(f"{name} {values}")
    return [read_count({name: value}, name) for value in values]


def check_names(state: LoaderState, expected: LoaderState) -> None:
    """Raises DataError if a state has other names than a newly taken one."""
    if state.keys() != expected.keys():
        what = "the saved position in the data is damaged"
        raise DataError(what, got=", ".join(state) or "nothing", allowed=", ".join(expected))


class DamagedPositionError(DataError):
    """A saved position that no run can have saved."""


def damaged(got: str) -> DamagedPositionError:
    return DamagedPositionError("the saved position in the data is damaged", got=got)


class Rows(NamedTuple):
    """B rows of S + 1 tokens; the last token of a row is only the label of the one before."""

    tokens: NDArray[np.integer[Any]]
    documents: NDArray[np.int64]  # number of each token's document: neighbouring documents of a row have different ones


class RowStream(ABC, Generic[PositionT]):
    """Reads rows from given positions; it has no position of its own. Any change of a row changes the fingerprint."""

    vocab_size: int
    fingerprint: int

    @abstractmethod
    def start(self) -> PositionT:
        """Returns the position before the first row."""

    @abstractmethod
    def next_row(self, position: PositionT, sequence_length: int) -> tuple[Sequence[Tokens], PositionT]:
        """Returns (S + 1 tokens of the next row, one part per document; the position after S of them).

        Raises a DataError if a document cannot be read, or all documents are empty.
        """

    @abstractmethod
    def save(self, position: PositionT) -> LoaderState:
        """Returns a position as plain integers; `rows` counts the rows before it."""

    @abstractmethod
    def restore(self, state: LoaderState) -> PositionT:
        """Returns the position of a state, which may have more entries; a DataError if no stream here has it."""

    def changed(self, state: LoaderState) -> str:
        """Returns what differs, in words, for a state of a stream with another fingerprint."""
        return "its documents"

    def read(self, position: PositionT, rows: int, sequence_length: int) -> tuple[Rows, PositionT]:
        """Returns `rows` rows of `sequence_length` + 1 tokens, and the position after them; errors as `next_row`."""
        shape = rows, sequence_length + 1
        tokens = np.empty(shape, dtype=np.min_scalar_type(self.vocab_size))
        documents = np.zeros(shape, dtype=np.int64)
        for row in range(rows):
            parts, position = self.next_row(position, sequence_length)
            start = 0
            for number, part in enumerate(parts):
                tokens[row, start : start + len(part)] = part
                documents[row, start:] = number  # the next part overwrites the rest of the row
                start += len(part)
        return Rows(tokens, documents), position

    def advance(self, position: PositionT, rows: int, sequence_length: int) -> PositionT:
        """Returns the position `rows` rows further on; reads the documents between, for their lengths."""
        for _ in range(rows):
            _, position = self.next_row(position, sequence_length)
        return position


class Cursor(NamedTuple):
    """A place between two tokens of one document in one epoch."""

    epoch: int  # completed epochs before this one
    place: int  # index of the unit (document or shard) in the order of this epoch
    offset: int = 0  # tokens of the document before the cursor, its end token included
    document: int = 0  # index of the document in its shard's reading order; 0 where units are documents


class Position(NamedTuple):
    """A place between two rows."""

    next_unit: Cursor  # start of the first unit that no lane has got yet
    lanes: tuple[Cursor, ...]
    rows: int  # before this place


class Units(TokenIds, Sized, Protocol):
    """Documents, or shards of them."""


class LaneStream(RowStream[Position]):
    """Reads rows lane by lane; the latest document of each lane is cached. Subclasses read the units, 1 or more a lane.

    With `shuffle` the units have another order in each epoch, else they come by number. Errors call them `counted`.
    """

    saved: tuple[str, ...] = ("epoch", "place", "offset")
    """Cursor fields of the saved state; the others are 0."""

    def __init__(
        self, documents: Units, counted: str, *, seed: int, shuffle: bool, lanes: int, middle: FillInMiddle | None
    ) -> None:
        self._units = len(documents)
        self._counted = f"{self._units} {counted}"
        assert 1 <= lanes <= self._units, f"{lanes} lanes cannot read {self._counted} side by side"
        self._seed = seed
        self._shuffle = shuffle
        self._lanes = lanes
        self._middle = middle
        self.vocab_size = documents.vocab_size
        fingerprint = documents.fingerprint
        self.fingerprint = fingerprint if middle is None else fingerprint_of(fingerprint, middle.fingerprint)
        self._latest: dict[int, tuple[Cursor, Tokens]] = {}  # by lane: the start of a document, and its tokens

    @abstractmethod
    def read_document(self, lane: int, cursor: Cursor) -> Tokens:
        """Returns the document of a cursor, its end token included."""

    def following(self, lane: int, cursor: Cursor) -> Cursor | None:
        """Returns the start of the next document of the same unit, None at its end; here a unit is one document."""
        return None

    def start(self) -> Position:
        cursors = [Cursor(0, 0)]
        while len(cursors) <= self._lanes:
            cursors.append(self._after(cursors[-1]))
        return Position(next_unit=cursors[-1], lanes=tuple(cursors[:-1]), rows=0)

    def next_row(self, position: Position, sequence_length: int) -> tuple[Sequence[Tokens], Position]:
        """Returns (S + 1 tokens of the next row, one part per document; the position after S of them)."""
        next_unit = position.next_unit
        lane = position.rows % self._lanes
        cursor = position.lanes[lane]
        parts: list[Tokens] = []
        missing = sequence_length + 1
        last_epoch = next_unit.epoch + 2
        while missing > 0:
            start = cursor._replace(offset=0)
            if lane not in self._latest or self._latest[lane][0] != start:
                self._latest[lane] = start, self.read_document(lane, start)
            part = self._latest[lane][1][cursor.offset : cursor.offset + missing]
            if len(part) > 0:
                parts.append(part)
                missing -= len(part)
                cursor = cursor._replace(offset=cursor.offset + len(part))
                last_epoch = next_unit.epoch + 2
            elif (following := self.following(lane, cursor)) is not None:
                cursor = following
            else:
                cursor, next_unit = next_unit, self._after(next_unit)
                if next_unit.epoch > last_epoch:  # a whole epoch without a token
                    raise DataError("the data hold no text: every document is empty", got=self._counted)
        # The last token is only a label: the next row of the lane begins with it.
        cursor = cursor._replace(offset=cursor.offset - 1)
        lanes = (*position.lanes[:lane], cursor, *position.lanes[lane + 1 :])
        return parts, Position(next_unit, lanes, position.rows + 1)

    def save(self, position: Position) -> LoaderState:
        """Returns a position as plain integers, that of the next unit and a list with an entry for each lane."""
        columns = zip(*position.lanes, strict=True)
        by_name = dict(zip(Cursor._fields, columns, strict=True))
        lanes = {f"lane_{name}s": list(by_name[name]) for name in self.saved}
        return {"epoch": position.next_unit.epoch, "place": position.next_unit.place, **lanes, "rows": position.rows}

    def restore(self, state: LoaderState) -> Position:
        """Returns the position of a state; raises DataError if no stream over these units has it."""
        next_unit = Cursor(read_count(state, "epoch"), read_count(state, "place"))
        columns = [read_counts(state, f"lane_{name}s", self._lanes) for name in self.saved]
        lanes = tuple(Cursor(**dict(zip(self.saved, entries, strict=True))) for entries in zip(*columns, strict=True))
        units = {cursor[:2] for cursor in lanes}  # (epoch, place); those before the next unit have been assigned
        if max(cursor.place for cursor in (next_unit, *lanes)) >= self._units:
            raise damaged(f"places in more than {self._counted}")
        if len(units) != len(lanes) or max(units) >= next_unit[:2]:
            raise damaged("one document in two lanes")
        return Position(next_unit, lanes, read_count(state, "rows"))

    def _after(self, cursor: Cursor) -> Cursor:
        if cursor.place + 1 < self._units:
            return Cursor(cursor.epoch, cursor.place + 1)
        return Cursor(cursor.epoch + 1, 0)


def with_end(tokens: Tokens, end_of_document: int, vocab_size: int) -> Tokens:
    """Returns the tokens of a document with its end token; nothing for a document without tokens."""
    if len(tokens) == 0:
        return tokens
    # In the smallest type that holds the ids, because a document may be a file of a gigabyte.
    document = np.empty(len(tokens) + 1, dtype=np.min_scalar_type(vocab_size))
    document[:-1] = tokens
    document[-1] = end_of_document
    return document


class Stream(LaneStream):
    """Rows of a source. Args as for `LaneStream`."""

    def __init__(
        self, source: Source, *, seed: int, shuffle: bool, lanes: int, middle: FillInMiddle | None = None
    ) -> None:
        super().__init__(source, "documents", seed=seed, shuffle=shuffle, lanes=lanes, middle=middle)
        self._source = source
        # Two orders stay: at the turn of an epoch, lanes read from both.
        self._order = lru_cache(2)(partial(order_of, source, seed=seed))

    def read_document(self, lane: int, cursor: Cursor) -> Tokens:
        epoch = cursor.epoch
        index = int(self._order(epoch=epoch)[cursor.place]) if self._shuffle else cursor.place
        if self._middle is None:
            tokens = self._source.read(index)
        else:
            assert isinstance(self._source, TextDocuments), "fill-in-the-middle needs text"
            tokens = self._source.encoded(index, partial(self._middle.encode, document=(epoch, index)))
        return with_end(tokens, self._source.end_of_document, self.vocab_size)
