"""All documents of a source, without end, dealt to lanes one by one (see `lanes`).

Each epoch has an order of its own, which follows from (seed, epoch) alone (see `order`); without shuffling documents
come by number.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.documents import TextDocuments
from penstock.data.fill_in_middle import FillInMiddle
from penstock.data.order import Order, order_of
from penstock.data.sources import Source, Tokens, fingerprint_of

LoaderState: TypeAlias = "dict[str, int | list[int] | LoaderState]"
"""A place in the data, and what it is a place in, as a checkpoint stores it. Of a mixture, places are by part."""


def number(state: LoaderState, name: str) -> int:
    """Returns a whole number >= 0 of a state.

    Raises:
        DataError: it is something else.
    """
    value = state[name]
    if not isinstance(value, int) or value < 0:
        raise damaged(f"{name} {value}")
    return value


def numbers(state: LoaderState, name: str, count: int) -> list[int]:
    """Returns `count` whole numbers >= 0 of a state.

    Raises:
        DataError: it is something else.
    """
    values = state[name]
    if not isinstance(values, list) or len(values) != count:
        raise damaged(f"{name} {values}")
    return [number({name: value}, name) for value in values]


def check_names(state: LoaderState, expected: LoaderState) -> None:
    """Refuses a state that has other names than one that was just taken.

    Raises:
        DataError: as said.
    """
    if state.keys() != expected.keys():
        raise damaged(", ".join(state) or "nothing", allowed=", ".join(expected))


def damaged(got: str, *, allowed: str | None = None) -> DataError:
    """Returns the error for a state that nobody can have saved."""
    return DataError("the saved place in the data is damaged", got=got, allowed=allowed)


LANES = 32
"""Documents, or shards, that a shuffled stream reads side by side; each lane keeps the one that it is in."""

PositionT = TypeVar("PositionT")


class Rows(NamedTuple):
    """B rows of S + 1 tokens; the last of a row is there to be the label of the one before.

    Attributes:
        tokens: the ids, of any integer type.
        documents: which document each token is of: equal inside a document, different in neighbouring ones of a row.
    """

    tokens: NDArray[np.integer[Any]]
    documents: NDArray[np.int64]


class RowStream(ABC, Generic[PositionT]):
    """Reads rows. It has no position of its own.

    Attributes:
        vocabulary_size: every token id is below this.
        fingerprint: a number of 56 bits that changes when any row may be another one.
    """

    vocabulary_size: int
    fingerprint: int

    @abstractmethod
    def start(self) -> PositionT:
        """Returns the position before the first row."""

    @abstractmethod
    def next_row(self, position: PositionT, sequence_length: int) -> tuple[Sequence[Tokens], PositionT]:
        """Returns a row's tokens and the one after them, one part a document, and the position before that last one.

        Raises:
            DataError: a document cannot be read, or the whole text holds no token.
        """

    @abstractmethod
    def save(self, position: PositionT) -> LoaderState:
        """Returns a position as plain integers, the number of rows behind it among them as `rows`."""

    @abstractmethod
    def restore(self, state: LoaderState) -> PositionT:
        """Returns the position in a state, which may hold more.

        Raises:
            DataError: no stream over this text can be there.
        """

    def changed(self, state: LoaderState) -> str:
        """Returns in words what is another text, given the state of a stream with another fingerprint."""
        return "its documents"

    def read(self, position: PositionT, rows: int, sequence_length: int) -> tuple[Rows, PositionT]:
        """Returns `rows` rows of `sequence_length` tokens and the one after them, and the position behind the rows.

        Raises:
            DataError: as `next_row`.
        """
        shape = rows, sequence_length + 1
        tokens = np.empty(shape, dtype=np.min_scalar_type(self.vocabulary_size))
        documents = np.zeros(shape, dtype=np.int64)
        for row in range(rows):
            parts, position = self.next_row(position, sequence_length)
            start = 0
            for number, part in enumerate(parts):
                tokens[row, start : start + len(part)] = part
                documents[row, start:] = number
                start += len(part)
        return Rows(tokens, documents), position

    def advance(self, position: PositionT, rows: int, sequence_length: int) -> PositionT:
        """Returns the position `rows` rows further on; reads the documents between, for their lengths.

        Raises:
            DataError: as `next_row`.
        """
        for _ in range(rows):
            _, position = self.next_row(position, sequence_length)
        return position


class Cursor(NamedTuple):
    """A place between two tokens of one document in one epoch.

    Attributes:
        epoch: how often everything had been dealt before.
        place: number of the document, or shard, in the order of this epoch.
        offset: tokens of the document that lie behind the cursor, its end token included.
        document: number of the document in the order in which its shard is read; 0 where documents are dealt.
    """

    epoch: int
    place: int
    offset: int = 0
    document: int = 0


class Position(NamedTuple):
    """A place between two rows.

    Attributes:
        undealt: the start of the first document, or shard, that no lane has been dealt.
        lanes: before the next token of each lane.
        rows: how many rows lie behind.
    """

    undealt: Cursor
    lanes: tuple[Cursor, ...]
    rows: int


class LaneStream(RowStream[Position]):
    """Reads rows lane by lane. Subclasses say what is dealt.

    The cursor of a lane stands before the lane's next token, in that token's document.
    """

    saved: tuple[str, ...] = ("epoch", "place", "offset")
    """Fields of a cursor that a checkpoint holds; the others are 0."""

    def __init__(self, *, units: int, lanes: int, counted: str) -> None:
        """Takes what is dealt.

        Args:
            units: documents, or shards, that are dealt in an epoch.
            lanes: of them that are read side by side, 1 to all.
            counted: the units with their number, for errors.
        """
        assert 1 <= lanes <= units, f"{lanes} lanes cannot read {counted} side by side"
        self._units = units
        self._lanes = lanes
        self._counted = counted

    @abstractmethod
    def document(self, lane: int, cursor: Cursor) -> Tokens:
        """Returns the document that a cursor stands in, its end token included."""

    @abstractmethod
    def following(self, lane: int, cursor: Cursor) -> Cursor | None:
        """Returns the start of the next document that belongs to the same lane, None if it must be dealt another."""

    def start(self) -> Position:
        """Returns the position before the first row: each lane has been dealt its first."""
        dealt = [Cursor(0, 0)]
        while len(dealt) <= self._lanes:
            dealt.append(self._after(dealt[-1]))
        return Position(undealt=dealt[-1], lanes=tuple(dealt[:-1]), rows=0)

    def next_row(self, position: Position, sequence_length: int) -> tuple[Sequence[Tokens], Position]:
        """Returns a row's tokens and the one after them, one part a document, and the position before that last one."""
        undealt = position.undealt
        lane = position.rows % self._lanes
        cursor = position.lanes[lane]
        parts: list[Tokens] = []
        missing = sequence_length + 1
        last_epoch = undealt.epoch + 2
        while missing > 0:
            part = self.document(lane, cursor)[cursor.offset : cursor.offset + missing]
            if len(part) > 0:
                parts.append(part)
                missing -= len(part)
                cursor = cursor._replace(offset=cursor.offset + len(part))
                last_epoch = undealt.epoch + 2
            elif (following := self.following(lane, cursor)) is not None:
                cursor = following
            else:
                cursor, undealt = undealt, self._after(undealt)
                if undealt.epoch > last_epoch:  # A whole epoch lies between, and nothing was in it.
                    raise DataError("the data hold no text: every document is empty", got=self._counted)
        before_last = cursor._replace(offset=cursor.offset - 1)
        lanes = (*position.lanes[:lane], before_last, *position.lanes[lane + 1 :])
        return parts, Position(undealt, lanes, position.rows + 1)

    def save(self, position: Position) -> LoaderState:
        """Returns a position as plain integers.

        `epoch` and `place` are of what is dealt next; the lists have one entry a lane.
        """
        columns = zip(*position.lanes, strict=True)
        by_name = dict(zip(Cursor._fields, columns, strict=True))
        lanes = {f"lane_{name}s": list(by_name[name]) for name in self.saved}
        return {"epoch": position.undealt.epoch, "place": position.undealt.place, **lanes, "rows": position.rows}

    def restore(self, state: LoaderState) -> Position:
        """Returns the position in a state; an error if no stream over these documents can be there."""
        undealt = Cursor(number(state, "epoch"), number(state, "place"))
        columns = [numbers(state, f"lane_{name}s", self._lanes) for name in self.saved]
        lanes = tuple(Cursor(**dict(zip(self.saved, entries, strict=True))) for entries in zip(*columns, strict=True))
        dealt = {cursor[:2] for cursor in lanes}
        if max(cursor.place for cursor in (undealt, *lanes)) >= self._units:
            raise damaged(f"places in more than {self._counted}")
        if len(dealt) != len(lanes) or max(dealt) >= undealt[:2]:
            raise damaged("a document dealt twice")
        return Position(undealt, lanes, number(state, "rows"))

    def _after(self, cursor: Cursor) -> Cursor:
        if cursor.place + 1 < self._units:
            return Cursor(cursor.epoch, cursor.place + 1)
        return Cursor(cursor.epoch + 1, 0)


def with_end(tokens: Tokens, end_of_document: int, vocabulary_size: int) -> Tokens:
    """Returns the tokens of a document and its end token; nothing for a document without tokens."""
    if len(tokens) == 0:
        return tokens
    # The smallest type that holds the ids: a file of a gigabyte is one document, too.
    document = np.empty(len(tokens) + 1, dtype=np.min_scalar_type(vocabulary_size))
    document[:-1] = tokens
    document[-1] = end_of_document
    return document


class Stream(LaneStream):
    """Reads the rows of a source. It keeps the latest document of each lane and the latest orders."""

    def __init__(
        self, source: Source, *, seed: int, shuffle: bool, lanes: int, middle: FillInMiddle | None = None
    ) -> None:
        """Takes the documents, the seed (>= 0) of their order, and whether they are put in that order at all.

        Args:
            source: the documents.
            seed: of their order, >= 0.
            shuffle: put them in that order; else they come by number.
            lanes: documents that are read side by side, 1 to the number of documents.
            middle: encodes documents in place of the source, which must have text; None reads them as they are.
        """
        super().__init__(units=len(source), lanes=lanes, counted=f"{len(source)} documents")
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._middle = middle
        self.vocabulary_size = source.vocabulary_size
        self.fingerprint = (
            source.fingerprint if middle is None else fingerprint_of(source.fingerprint, middle.fingerprint)
        )
        self._latest_orders: dict[int, Order] = {}
        self._latest_documents: dict[int, tuple[int, int, Tokens]] = {}

    def document(self, lane: int, cursor: Cursor) -> Tokens:
        """Returns the document that a cursor stands in; the latest of each lane is kept."""
        if lane in self._latest_documents:
            epoch, place, tokens = self._latest_documents[lane]
            if (epoch, place) == (cursor.epoch, cursor.place):
                return tokens
        index = self._order(cursor.epoch)[cursor.place] if self._shuffle else cursor.place
        tokens = with_end(self._read(index, cursor.epoch), self._source.end_of_document, self.vocabulary_size)
        self._latest_documents[lane] = cursor.epoch, cursor.place, tokens
        return tokens

    def following(self, lane: int, cursor: Cursor) -> Cursor | None:
        """Returns None: each document is dealt."""
        return None

    def _read(self, index: int, epoch: int) -> Tokens:
        if self._middle is None:
            return self._source.read(index)
        middle = self._middle
        assert isinstance(self._source, TextDocuments), "only text can be cut"
        return self._source.encoded(index, lambda text: middle.encode(text, (epoch, index)))

    def _order(self, epoch: int) -> Order:
        """Returns the order of an epoch; the latest two are kept, for lanes that resume at the turn of an epoch."""
        if epoch not in self._latest_orders:
            if len(self._latest_orders) == 2:
                del self._latest_orders[min(self._latest_orders)]
            self._latest_orders[epoch] = order_of(self._source, seed=self._seed, epoch=epoch)
        return self._latest_orders[epoch]
