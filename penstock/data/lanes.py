"""Rows from lanes: several documents are read side by side, and rows take turns among them.

Rows of one document resemble each other, and a batch of them teaches little. So each lane reads a document of its own.
A lane that comes to the end of its document is dealt the next one of the order: everything is read once an epoch, in
one lane. Row g, counted from the first row of all, is the next S tokens of lane g mod lanes. With one lane the rows are
cut from one line of documents.

What is dealt is a document, where documents have numbers (`stream`), or a whole shard of them, where they can only be
read one after the other (`shards`). Each document is followed by one end-of-document token; a document without tokens
yields nothing, not even that. When all has been dealt an epoch is over, and the next begins in another order.

An example, two lanes, rows of 3, the documents `a b c d`, `e`, `f g h` and `i j k`, and `.` for the end-of-document
token. Lane 1 is the first that needs a third document:

    lane 0   a b c   d . i   ...     rows 0, 2, ...
    lane 1   e . f   g h .   ...     rows 1, 3, ...
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.base.errors import DataError
from penstock.data.rows import RowStream
from penstock.data.saved import LoaderState, damaged, number, numbers
from penstock.data.sources import Tokens


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
