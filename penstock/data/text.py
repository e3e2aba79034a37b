"""Documents in files on disk: one a file (plain text), or one a line (JSON Lines).

Opening reads every file once (see `index`) and finds what is missing, empty or not UTF-8 before a run starts. Then the
JSON of each file's first document is checked as well; a bad line further down is met when it is read, since parsing a
large corpus to look for one would cost more than it saves. Compressed files are read from decompressed copies.

A document is read and encoded whole. With a tokenizer that is slow and large for files of many megabytes: give such a
corpus as JSON Lines.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from zlib import crc32

import numpy as np

from penstock.base.errors import DataError
from penstock.data.corrupt import CorruptRecords
from penstock.data.decompress import contents, readable_copies
from penstock.data.documents import TextDocuments, checked_text
from penstock.data.files import empty, unreadable
from penstock.data.index import DocumentIndex, FoundDocuments, lines_in, require_utf8
from penstock.data.sources import RecordError, SplitFilter
from penstock.data.tokenizer import Tokenizer

KEEP_ALL = SplitFilter()
CACHE = Path("cache")
"""Where decompressed copies go if nobody says where."""

MOST_LINE_BYTES = 64 * 2**20
"""Of a line at the beginning of a file; a longer one is no document."""

_TRIED = 100
"""Lines of a file of which one must be readable where corrupt records are skipped: else it is another kind of file."""


class IndexedText(TextDocuments):
    """Documents that are stretches of files."""

    def __init__(self, index: DocumentIndex, tokenizer: Tokenizer, corrupt: CorruptRecords) -> None:
        """Takes the index of the documents."""
        super().__init__(tokenizer, index.fingerprint, corrupt=corrupt, keep=KEEP_ALL, stretch=index.stretch)
        self._index = index

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._index)


class PlainText(IndexedText):
    """One document a file, UTF-8, taken as it is. Empty files are left out."""

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Tokenizer,
        *,
        keep: SplitFilter = KEEP_ALL,
        corrupt: CorruptRecords | None = None,
        cache: Path = CACHE,
    ) -> None:
        """Reads all files once.

        Args:
            files: the files; they are the documents, in this order.
            tokenizer: what encodes their text.
            keep: which documents belong to this source.
            corrupt: what to do with a file that is not UTF-8; None stops.
            cache: folder of decompressed copies.

        Raises:
            DataError: a file cannot be read or is not UTF-8, or all are empty.
        """
        corrupt = corrupt or CorruptRecords()
        is_filled = False

        def documents_in(path: Path, copy: Path) -> Iterator[FoundDocuments]:
            nonlocal is_filled
            try:
                content = copy.read_bytes()
            except OSError as error:
                raise unreadable(path, error) from error
            if content:
                is_filled = True
                if not corrupt.skips:
                    require_utf8(content, str(path))
                yield FoundDocuments(*(np.array([value]) for value in (1, 0, len(content), crc32(content))))

        super().__init__(
            DocumentIndex.build(files, readable_copies(files, cache), documents_in, keep), tokenizer, corrupt
        )
        if files and not is_filled:
            raise empty(files[0])

    def record(self, index: int) -> str:
        """Returns the content of a file."""
        return require_utf8(self._index.content(index), str(self._index.path(index)))


class JsonLines(IndexedText):
    """One document a line: a JSON object with the text in one of its fields. Blank lines are left out."""

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Tokenizer,
        *,
        text_field: str = "text",
        keep: SplitFilter = KEEP_ALL,
        corrupt: CorruptRecords | None = None,
        cache: Path = CACHE,
    ) -> None:
        """Reads all files once, line by line, and the first document of each as JSON.

        Args:
            files: the files, in this order.
            tokenizer: what encodes the text.
            text_field: name of the field that holds the text.
            keep: which lines belong to this source.
            corrupt: what to do with lines that cannot be read; None stops.
            cache: folder of decompressed copies.

        Raises:
            DataError: a file cannot be read, holds no line, is not UTF-8, or does not begin with such an object.
        """
        corrupt = corrupt or CorruptRecords()
        self._text_field = text_field

        def documents_in(path: Path, copy: Path) -> Iterator[FoundDocuments]:
            is_filled = False
            for found in lines_in(path, copy, _ignore if corrupt.skips else require_utf8):
                is_filled |= len(found.lines) > 0
                yield found
            if not is_filled:
                raise empty(path)

        # Before anything is decompressed, which may take long.
        for path in files:
            self._check_beginning(path, _TRIED if corrupt.skips else 1)

        super().__init__(
            DocumentIndex.build(files, readable_copies(files, cache), documents_in, keep), tokenizer, corrupt
        )

    def record(self, index: int) -> str:
        """Returns the text field of a line."""
        return self._parse(self._index.content(index), self._index.place(index))

    def _check_beginning(self, path: Path, lines: int) -> None:
        """Refuses a file if none of its first lines can be read, with the error of the first."""
        first: RecordError | None = None
        for number, line in islice(_filled_lines(path), lines):
            try:
                self._parse(line, f"{path}:{number}")
            except RecordError as error:
                first = first or error
            else:
                return
        if first is not None:
            raise DataError(first.what, got=first.got, allowed=first.allowed, fix=first.fix) from first

    def _parse(self, line: bytes, place: str) -> str:
        """Returns the text in a line; an error names `place`."""
        text = require_utf8(line, place)
        try:
            # Some editors put a byte-order mark before the first line.
            record = json.loads(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{place} is not JSON: {error}", allowed="one JSON object a line") from error
        if not isinstance(record, dict):
            raise RecordError(
                f"{place} is not a JSON object", got=type(record).__name__, allowed="one JSON object a line"
            )
        if self._text_field not in record:
            fields = ", ".join(map(ascii, islice(record, 10))) or "no field"
            raise RecordError(
                f"{place} has no field {self._text_field!a}",
                got=fields,
                fix="set data.text_field to the field with the text",
            )
        return checked_text(record[self._text_field], f"{place}: field {self._text_field!a}")


def _ignore(content: bytes, place: str) -> None:
    """Leaves a line that is not UTF-8 for when it is read."""


def _filled_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields number and content of the lines of a file that are not blank, decompressed if need be."""
    rest, number = b"", 1
    for chunk in contents(path):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield number, line
            number += 1
        if len(rest) > MOST_LINE_BYTES:
            raise DataError(
                f"{path}:{number} is a line of more than {MOST_LINE_BYTES / 2**20:.0f} MiB",
                allowed="one JSON object a line",
                fix="a text file is data.source text",
            )
    if rest.strip():
        yield number, rest
