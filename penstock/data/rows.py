"""What a stream of rows is: endless text cut into rows, with a position between any two of them.

Positions are values. There is one position for each number of rows, so that readers that took other steps to the same
row agree, and a saved position is a few integers.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.data.saved import LoaderState
from penstock.data.sources import Tokens

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
