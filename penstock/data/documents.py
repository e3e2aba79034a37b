"""What sources of text have in common: a record is read as text, and text is encoded.

A record that cannot be read is met as `data.corrupt` says. What is skipped, or belongs to the other split, is a
document without tokens, which a stream passes over: numbers of documents do not depend on it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from penstock.data.sources import DocumentPart, RecordError, SplitFilter, Tokens, fingerprint_of
from penstock.data.tokenizer import Tokenizer

Policy: TypeAlias = Literal["stop", "skip"]
Value = TypeVar("Value")

NAMED = 5
"""Skipped records that are told by name; of the others every tenth, hundredth, ... is told as a number."""

NOTHING: Tokens = np.zeros(0, dtype=np.int64)
"""The tokens of a skipped record."""


class CorruptRecords:
    """Meets records that cannot be read.

    Attributes:
        skipped: how many were skipped; whoever goes on with a saved place sets it.
    """

    def __init__(self, policy: Policy = "stop") -> None:
        """Takes what to do with them."""
        self.skips = policy == "skip"
        self.skipped = 0
        self._named = 0
        self._notices: list[str] = []

    def survived(self, read: Callable[[], Value], otherwise: Value) -> Value:
        """Returns what `read` makes of a record; something else if it cannot be read and is skipped.

        Raises:
            RecordError: it cannot be read, and the run shall stop.
        """
        try:
            return read()
        except RecordError as error:
            if not self.skips:
                raise
            self._count(error)
            return otherwise

    def _count(self, error: RecordError) -> None:
        self.skipped += 1
        self._named += 1
        if self._named <= NAMED:
            self._notices.append(f"data: skipped a record: {' '.join(error.what.split())}")
        elif self.skipped == 10 ** (len(str(self.skipped)) - 1):
            self._notices.append(f"data: {self.skipped:,} records were skipped so far")

    def take_notices(self) -> tuple[str, ...]:
        """Returns what there is to tell since the last call."""
        notices, self._notices = tuple(self._notices), []
        return notices


class TextDocuments(ABC):
    """A source of documents of text. Subclasses say what one is."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        content: int,
        *,
        corrupt: CorruptRecords,
        keep: SplitFilter,
        stretch: DocumentPart | None = None,
    ) -> None:
        """Takes what encodes the text.

        Args:
            tokenizer: what encodes the text.
            content: fingerprint of all documents.
            corrupt: what to do with records that cannot be read.
            keep: which documents belong to this source, where that is not known before they are read.
            stretch: which part of each belongs to it; None takes them whole. `content` knows it.
        """
        self._tokenizer = tokenizer
        self._corrupt = corrupt
        self._keep = keep
        self._stretch = stretch
        self.vocabulary_size = tokenizer.vocabulary_size
        self.end_of_document = tokenizer.end_of_document
        self.fingerprint = fingerprint_of(content, tokenizer.fingerprint, keep)

    @abstractmethod
    def __len__(self) -> int:
        """Number of documents."""

    @abstractmethod
    def record(self, index: int) -> str:
        """Returns the text of a document.

        Raises:
            RecordError: this one cannot be read.
            DataError: nothing can be read any more.
        """

    def read(self, index: int) -> Tokens:
        """Returns the token ids of a document; none if it was skipped, or belongs to the other split."""
        return self.encoded(index, self._tokenizer.encode)

    def bytes_per_token(self, index: int) -> Tokens:
        """Returns the bytes of text behind each token of `read(index)`."""
        return self.encoded(index, self._tokenizer.bytes_per_token)

    def encoded(self, index: int, encode: Callable[[str], Tokens]) -> Tokens:
        """Returns what `encode` makes of the text of a document; nothing of one that was skipped, or is not ours."""
        return self._corrupt.survived(lambda: self._encoded(self.record(index), encode), NOTHING)

    def _encoded(self, text: str, encode: Callable[[str], Tokens]) -> Tokens:
        if not text or not self._keep.document(text):
            return NOTHING
        ours = text if self._stretch is None else self._stretch.of(text)
        return encode(ours) if ours else NOTHING


def checked_text(value: object, place: str) -> str:
    """Returns the value of a record, if it is a text that can be written as UTF-8.

    Raises:
        RecordError: it is something else; the error names `place`.
    """
    if not isinstance(value, str):
        raise RecordError(f"{place} is not text", got=type(value).__name__)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{place} holds half of a surrogate pair") from error
    return value
