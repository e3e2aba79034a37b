"""Documents in files on disk: one a file (plain text), or one a line (JSON Lines).

Opening reads every file once and keeps four integers a document: file, line, first byte, bytes. The text is read again
when it is asked for. The first pass finds what is missing, empty or not UTF-8 before a run starts. The JSON of each
file's first document is checked then as well; a bad line further down is an error when it is read, since parsing a
large corpus to look for one would cost more than it saves.

A document is read and encoded whole. With a tokenizer that is slow and large for files of many megabytes: give such a
corpus as JSON Lines.
"""

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from penstock.base.errors import DataError
from penstock.data.sources import Tokens, fingerprint_of
from penstock.data.tokenizer import Tokenizer

Keep = Callable[[bytes], bool]
"""Tells from a document's bytes whether it belongs to this source."""


def keep_all(content: bytes) -> bool:
    """Keeps every document."""
    return True


@dataclass(frozen=True)
class DocumentIndex:
    """Where documents lie. The arrays are parallel, one entry a document.

    Attributes:
        files: the files, in the order given.
        file_of: number of the document's file.
        line_of: number of its line in that file, from 1.
        start_of: first byte in that file.
        size_of: bytes.
        fingerprint: hash of all documents, in order; file names do not count.
    """

    files: tuple[Path, ...]
    file_of: "array[int]"
    line_of: "array[int]"
    start_of: "array[int]"
    size_of: "array[int]"
    fingerprint: int

    @staticmethod
    def build(
        files: Sequence[Path], documents_in: Callable[[Path], Iterable[tuple[int, int, bytes]]]
    ) -> "DocumentIndex":
        """Lists the documents that `documents_in` finds in each file: their line, first byte and content."""
        file_of, line_of, start_of, size_of = array("q"), array("q"), array("q"), array("q")
        digest = blake2b(digest_size=16)
        for number, path in enumerate(files):
            for line, start, content in documents_in(path):
                file_of.append(number)
                line_of.append(line)
                start_of.append(start)
                size_of.append(len(content))
                digest.update(content)
        fingerprint = fingerprint_of(digest.digest(), size_of.tobytes())
        return DocumentIndex(tuple(files), file_of, line_of, start_of, size_of, fingerprint)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.size_of)

    def path(self, index: int) -> Path:
        """Returns the file that a document is in."""
        return self.files[self.file_of[index]]

    def content(self, index: int) -> bytes:
        """Reads a document.

        Raises:
            DataError: the file is gone, or has become shorter.
        """
        path = self.path(index)
        try:
            with path.open("rb") as file:
                file.seek(self.start_of[index])
                content = file.read(self.size_of[index])
        except OSError as error:
            raise unreadable(path, error) from error
        if len(content) != self.size_of[index]:
            raise DataError(
                f"data file {path} became shorter while it was in use", fix="put the file back, then resume"
            )
        return content


class TextFiles(ABC):
    """A source of documents in files. Subclasses say what one is."""

    def __init__(self, index: DocumentIndex, tokenizer: Tokenizer) -> None:
        """Takes the index of the documents and the tokenizer that encodes them."""
        self._index = index
        self._tokenizer = tokenizer
        self.vocabulary_size = tokenizer.vocabulary_size
        self.end_of_document = tokenizer.end_of_document
        self.fingerprint = fingerprint_of(index.fingerprint, tokenizer.fingerprint)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._index)

    @abstractmethod
    def text(self, index: int) -> str:
        """Returns the text of a document."""

    def read(self, index: int) -> Tokens:
        """Returns the token ids of a document."""
        return self._tokenizer.encode(self.text(index))

    def bytes_per_token(self, index: int) -> Tokens:
        """Returns the bytes of text behind each token of `read(index)`."""
        return self._tokenizer.bytes_per_token(self.text(index))


class PlainText(TextFiles):
    """One document a file, UTF-8, taken as it is."""

    def __init__(self, files: Sequence[Path], tokenizer: Tokenizer, keep: Keep = keep_all) -> None:
        """Reads all files once.

        Args:
            files: the files; they are the documents, in this order.
            tokenizer: what encodes their text.
            keep: which documents belong to this source.

        Raises:
            DataError: a file cannot be read, is empty, or is not UTF-8.
        """

        def documents_in(path: Path) -> Iterator[tuple[int, int, bytes]]:
            try:
                content = path.read_bytes()
            except OSError as error:
                raise unreadable(path, error) from error
            if not content:
                raise empty(path)
            require_utf8(content, str(path))
            if keep(content):
                yield 1, 0, content

        super().__init__(DocumentIndex.build(files, documents_in), tokenizer)

    def text(self, index: int) -> str:
        """Returns the content of a file."""
        return require_utf8(self._index.content(index), str(self._index.path(index)))


class JsonLines(TextFiles):
    """One document a line: a JSON object with the text in one of its fields. Blank lines are skipped."""

    def __init__(
        self, files: Sequence[Path], tokenizer: Tokenizer, *, text_field: str = "text", keep: Keep = keep_all
    ) -> None:
        """Reads all files once, line by line, and the first document of each as JSON.

        Args:
            files: the files, in this order.
            tokenizer: what encodes the text.
            text_field: name of the field that holds the text.
            keep: which lines belong to this source.

        Raises:
            DataError: a file cannot be read, holds no line, is not UTF-8, or does not begin with such an object.
        """
        self._text_field = text_field

        def documents_in(path: Path) -> Iterator[tuple[int, int, bytes]]:
            found = False
            for number, start, line in _lines(path):
                place = f"{path}:{number}"
                require_utf8(line, place)
                if not found:
                    self._parse(line, place)
                    found = True
                if keep(line):
                    yield number, start, line
            if not found:
                raise empty(path)

        super().__init__(DocumentIndex.build(files, documents_in), tokenizer)

    def text(self, index: int) -> str:
        """Returns the text field of a line."""
        return self._parse(self._index.content(index), f"{self._index.path(index)}:{self._index.line_of[index]}")

    def _parse(self, line: bytes, place: str) -> str:
        """Returns the text in a line; an error names `place`."""
        try:
            # Some editors put a byte-order mark before the first line; "utf-8-sig" drops it.
            record = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place} is not JSON: {error}", allowed="one JSON object a line") from error
        if not isinstance(record, dict):
            raise DataError(
                f"{place} is not a JSON object", got=type(record).__name__, allowed="one JSON object a line"
            )
        if self._text_field not in record:
            fields = ", ".join(map(ascii, islice(record, 10))) or "no field"
            raise DataError(
                f"{place} has no field {self._text_field!a}",
                got=fields,
                fix="set data.text_field to the field with the text",
            )
        text = record[self._text_field]
        if not isinstance(text, str):
            raise DataError(f"{place}: field {self._text_field!a} is not text", got=type(text).__name__)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{place}: field {self._text_field!a} holds half of a surrogate pair") from error
        return text


def unreadable(path: Path, error: OSError) -> DataError:
    """Returns the error for a file that the system does not let us read."""
    return DataError(
        f"cannot read data file {path}: {error.strerror}", fix="correct data.files or data.validation_files"
    )


def empty(path: Path) -> DataError:
    """Returns the error for a file without a document."""
    return DataError(f"data file {path} is empty", fix="take it out of data.files and data.validation_files")


def require_utf8(content: bytes, place: str) -> str:
    """Returns the text of bytes; an error names `place`.

    Raises:
        DataError: the bytes are not UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place} is not UTF-8: {error.reason} at byte {error.start}",
            got=f"0x{content[error.start]:02x}",
            fix="convert it to UTF-8",
        ) from error


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yields number (from 1), first byte and content, without the line's end, of each line that is not blank."""
    try:
        with path.open("rb") as file:
            start = 0
            for number, line in enumerate(file, start=1):
                content = line.rstrip()
                if content:
                    yield number, start, content
                start += len(line)
    except OSError as error:
        raise unreadable(path, error) from error
