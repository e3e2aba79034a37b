"""Documents in files on disk: one a file (plain text), or one a line (JSON Lines).

Opening reads every file once (see `index`) and finds what is missing, empty or not UTF-8 before a run starts. Then the
JSON of each file's first document is checked as well; a bad line further down is met when it is read, since parsing a
large corpus to look for one would cost more than it saves. Compressed files are read from decompressed copies.

A document is read and encoded whole. With a tokenizer that is slow and large for files of many megabytes: give such a
corpus as JSON Lines.
"""

import json
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.documents import CorruptRecords, TextDocuments, checked_text
from penstock.data.files import contents, empty, readable_copies, unreadable
from penstock.data.sources import DocumentPart, RecordError, SplitFilter, divided, fingerprint_of
from penstock.data.tokenizer import Tokenizer

_BLOCK = 512 << 10
"""Bytes that are looked at together: they stay in a core's cache."""

_USUAL = 4
"""White space at the end of a line that is looked for in all lines at once; of lines with more, one by one."""

_WHITESPACE = np.zeros(256, dtype=np.bool_)
_WHITESPACE[[*b" \t\n\r\x0b\x0c"]] = True


class FoundDocuments(NamedTuple):
    """Some documents of a file, one entry a document in each array.

    Attributes:
        lines: numbers of their lines, from 1.
        starts: first bytes.
        sizes: bytes, more than 0.
        checksums: CRC-32 of these bytes.
    """

    lines: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    checksums: NDArray[np.int64]


@dataclass(frozen=True)
class DocumentIndex:
    """Where documents lie. The arrays are parallel, one entry a document.

    Attributes:
        files: the files as a user knows them, in the order given.
        copies: what is read in place of each.
        file_of: number of the document's file.
        found: its line, first byte and bytes; checksums are not kept.
        fingerprint: hash of all documents, in order; file names do not count.
        stretch: the part of each document that belongs to the split, where they are too few to be told apart.
    """

    files: tuple[Path, ...]
    copies: tuple[Path, ...]
    file_of: NDArray[np.int64]
    found: FoundDocuments
    fingerprint: int
    stretch: DocumentPart | None = None

    @staticmethod
    def build(
        files: Sequence[Path],
        copies: Sequence[Path],
        documents_in: Callable[[Path, Path], Iterable[FoundDocuments]],
        keep: SplitFilter,
    ) -> "DocumentIndex":
        """Lists the documents that `documents_in` finds in each file, given its name and what to read in its place."""
        parts: list[FoundDocuments] = []
        numbers: list[NDArray[np.int64]] = []
        for number, (path, copy) in enumerate(zip(files, copies, strict=True)):
            for found in documents_in(path, copy):
                parts.append(found)
                numbers.append(np.full(len(found.sizes), number))
        found = (
            FoundDocuments(*(np.concatenate([_NONE, *columns]) for columns in zip(*parts, strict=True)))
            if parts
            else _NO
        )
        file_of = np.concatenate([_NONE, *numbers])
        kept = keep.each(found.checksums)
        stretch = divided(kept, keep)
        if stretch is None:
            found, file_of = FoundDocuments(*(column[kept] for column in found)), file_of[kept]
        digest = blake2b(found.checksums.tobytes(), digest_size=16)
        fingerprint = fingerprint_of(digest.digest(), found.sizes.tobytes(), *([] if stretch is None else [stretch]))
        found = found._replace(checksums=_NONE)
        return DocumentIndex(tuple(files), tuple(copies), file_of, found, fingerprint, stretch)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.file_of)

    def place(self, index: int) -> str:
        """Returns file and line of a document."""
        return f"{self.files[self.file_of[index]]}:{self.found.lines[index]}"

    def path(self, index: int) -> Path:
        """Returns the file that a document is in."""
        return self.files[self.file_of[index]]

    def content(self, index: int) -> bytes:
        """Reads a document.

        Raises:
            DataError: the file is gone, or has become shorter.
        """
        size = int(self.found.sizes[index])
        try:
            with self.copies[self.file_of[index]].open("rb") as file:
                file.seek(int(self.found.starts[index]))
                content = file.read(size)
        except OSError as error:
            raise unreadable(self.path(index), error) from error
        if len(content) != size:
            raise DataError(
                f"data file {self.path(index)} became shorter while it was in use", fix="put the file back, then resume"
            )
        return content


_NONE = np.zeros(0, dtype=np.int64)
_NO = FoundDocuments(_NONE, _NONE, _NONE, _NONE)


def lines_in(path: Path, copy: Path, check: Callable[[bytes, str], object]) -> Iterator[FoundDocuments]:
    """Yields the lines that are not blank, without the white space at their ends.

    Args:
        path: the file, for errors.
        copy: what is read in its place.
        check: is given a line that is not UTF-8, and its place.

    Raises:
        DataError: the file cannot be read.
    """
    start, number = 0, 1
    for block in _blocks(path, copy):
        codes = np.frombuffer(block, dtype=np.uint8)
        ends = np.flatnonzero(codes == ord("\n"))
        if len(ends) == 0 or ends[-1] != len(block) - 1:
            ends = np.append(ends, len(block))
        starts = np.append(0, ends[:-1] + 1)
        stops = _stripped(codes, starts, ends)
        filled = np.flatnonzero(stops > starts)
        bounds = list(zip(starts[filled].tolist(), stops[filled].tolist(), strict=True))
        if not _is_utf8(block, codes):
            for line, (first, last) in zip(filled.tolist(), bounds, strict=True):
                check(bytes(block[first:last]), f"{path}:{number + line}")
        checksums = np.array([crc32(block[first:last]) for first, last in bounds], dtype=np.int64)
        first_bytes = starts[filled]
        yield FoundDocuments(number + filled, start + first_bytes, stops[filled] - first_bytes, checksums)
        start += len(block)
        number += len(ends)


def require_utf8(content: bytes, place: str) -> str:
    """Returns the text of bytes; an error names `place`.

    Raises:
        RecordError: the bytes are not UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RecordError(
            f"{place} is not UTF-8: {error.reason} at byte {error.start}",
            got=f"0x{content[error.start]:02x}",
            fix="convert it to UTF-8",
        ) from error


def _is_utf8(block: memoryview, codes: NDArray[np.uint8]) -> bool:
    if codes.max() < 128:
        return True
    try:
        utf_8_decode(block, "strict", True)
    except UnicodeDecodeError:
        return False
    return True


def _stripped(codes: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns where each line ends without the white space at its end."""
    stops = ends.copy()
    left = np.arange(len(ends))
    for _ in range(_USUAL):
        left = left[stops[left] > starts[left]]
        left = left[_WHITESPACE[codes[stops[left] - 1]]]
        stops[left] -= 1
    for line in left.tolist():
        stops[line] = starts[line] + len(codes[starts[line] : stops[line]].tobytes().rstrip())
    return stops


def _blocks(path: Path, copy: Path) -> Iterator[memoryview]:
    """Yields a file in blocks of whole lines; each is gone when the next is asked for."""
    buffer, filled = bytearray(_BLOCK), 0
    try:
        with copy.open("rb", buffering=0) as file:
            while got := file.readinto(memoryview(buffer)[filled:]):
                stop = filled + got
                cut = buffer.rfind(b"\n", filled, stop) + 1
                if cut:
                    yield memoryview(buffer)[:cut]
                    buffer[: stop - cut] = buffer[cut:stop]
                filled = stop - cut
                if filled == len(buffer):  # The line is longer than a block.
                    buffer = buffer + bytes(len(buffer))
    except OSError as error:
        raise unreadable(path, error) from error
    if filled:
        yield memoryview(buffer)[:filled]


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
