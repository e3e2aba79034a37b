"""Text files: one document per file (plain text), or one per line (JSON Lines).

Opening reads every file once and finds missing, empty or non-UTF-8 files before a run starts. It looks for line ends
and takes a checksum of every document; the index has four integers per document. Checksums decide the split, and all of
them together are the fingerprint of the corpus. The JSON of each file's first document is checked as well; a later bad
line is reported when it is read, because parsing a large corpus would take too long. Compressed files are read from
decompressed copies.

A document is read and encoded whole. With a tokenizer that is slow and needs much memory for files of many megabytes:
give such a corpus as JSON Lines.
"""

import json
from abc import abstractmethod
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
from penstock.base.files import open_file
from penstock.data.documents import CorruptRecords, TextDocuments, checked_text, with_cure
from penstock.data.files import contents, readable_copies, reading
from penstock.data.sources import DocumentPart, RecordError, SplitFilter, document_part, fingerprint_of
from penstock.data.tokenizer_rules import Tokenizer

_BLOCK = 512 << 10
"""Bytes that are scanned together; they fit into a core's cache."""

_COMMON_TRAILING = 4
"""Trailing white space that is stripped from all lines at once; lines with more are stripped one by one."""

_WHITESPACE = np.zeros(256, dtype=np.bool_)
_WHITESPACE[[*b" \t\n\r\x0b\x0c"]] = True


class FoundDocuments(NamedTuple):
    """Some documents of a file, one entry per document in each array."""

    lines: NDArray[np.int64]  # number of its line, from 1
    starts: NDArray[np.int64]  # first byte
    sizes: NDArray[np.int64]  # bytes
    checksums: NDArray[np.int64]  # CRC-32 of the content


@dataclass(frozen=True)
class DocumentIndex:
    """Locations of documents. The arrays are parallel, one entry per document."""

    files: tuple[Path, ...]  # as the user named them, in order
    copies: tuple[Path, ...]  # to read, some of them decompressed
    file_of: NDArray[np.int64]  # number of the document's file
    found: FoundDocuments  # without checksums, which are needed only to build the index
    fingerprint: int  # of all documents, in order; independent of file names
    part: DocumentPart | None = None  # of each document, if they are too few to split whole ones

    @staticmethod
    def build(
        files: Sequence[Path],
        copies: Sequence[Path],
        documents_in: Callable[[Path, Path], Iterable[FoundDocuments]],
        keep: SplitFilter,
    ) -> "DocumentIndex":
        """Builds the index from `documents_in(file, file to read)`."""
        parts: list[FoundDocuments] = []
        numbers: list[NDArray[np.int64]] = []
        for number, (path, copy) in enumerate(zip(files, copies, strict=True)):
            for documents in documents_in(path, copy):
                parts.append(documents)
                numbers.append(np.full(len(documents.sizes), number))
        documents = FoundDocuments(*(np.concatenate(columns) for columns in zip(_NO, *parts, strict=True)))
        file_of = np.concatenate([_NONE, *numbers])
        kept = keep.each(documents.checksums)  # by content: the split does not depend on names or order
        part = document_part(kept, keep)
        if part is None:
            documents, file_of = FoundDocuments(*(column[kept] for column in documents)), file_of[kept]
        digest = blake2b(documents.checksums.tobytes(), digest_size=16)
        identity = [] if part is None else [part.identity()]  # saved positions of whole documents have none
        fingerprint = fingerprint_of(digest.digest(), documents.sizes.tobytes(), *identity)
        documents = documents._replace(checksums=_NONE)
        return DocumentIndex(tuple(files), tuple(copies), file_of, documents, fingerprint, part)

    def __len__(self) -> int:
        return len(self.file_of)

    def place(self, index: int) -> str:
        return f"{self.files[self.file_of[index]]}:{self.found.lines[index]}"

    def path(self, index: int) -> Path:
        return self.files[self.file_of[index]]

    def content(self, index: int) -> bytes:
        """Reads a document. Raises a DataError if the file is gone, or has become shorter."""
        size = int(self.found.sizes[index])
        with reading(self.path(index)), open_file(self.copies[self.file_of[index]]) as file:
            file.seek(int(self.found.starts[index]))
            content = file.read(size)
        if len(content) != size:
            raise DataError(
                f"data file {self.path(index)} became shorter while it was in use", fix="put the file back, then resume"
            )
        return content


_NONE = np.zeros(0, dtype=np.int64)
_NO = FoundDocuments(_NONE, _NONE, _NONE, _NONE)


def lines_in(path: Path, copy: Path, check: Callable[[bytes, str], object]) -> Iterator[FoundDocuments]:
    """Yields the lines of `copy` that are not blank, without trailing white space.

    `check` is called with each line that is not UTF-8, and its place in `path`. Raises a DataError if the file cannot
    be read.
    """
    start, number = 0, 1  # first byte and first line of the block
    for block in _blocks(path, copy):
        codes = np.frombuffer(block, dtype=np.uint8)
        ends = np.flatnonzero(codes == ord("\n"))
        if len(ends) == 0 or ends[-1] != len(block) - 1:  # the last line of a file without a line end
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


def require_utf8(content: bytes, location: str) -> str:
    """Decodes bytes. Raises RecordError, which names `location`, if they are not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RecordError(
            f"{location} is not UTF-8: {error.reason} at byte {error.start}",
            got=f"0x{content[error.start]:02x}",
            fix="convert it to UTF-8",
        ) from error


def _is_utf8(block: memoryview, codes: NDArray[np.uint8]) -> bool:
    if codes.max() < 128:  # ASCII is UTF-8, and the common case
        return True
    try:
        utf_8_decode(block, "strict", True)  # takes a memoryview, without a copy
    except UnicodeDecodeError:
        return False
    return True


def _stripped(codes: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the end of each line without trailing white space."""
    stops = ends.copy()
    left = np.arange(len(ends))  # lines that may still end in white space
    for _ in range(_COMMON_TRAILING):
        left = left[stops[left] > starts[left]]
        left = left[_WHITESPACE[codes[stops[left] - 1]]]
        stops[left] -= 1
    for line in left.tolist():
        stops[line] = starts[line] + len(codes[starts[line] : stops[line]].tobytes().rstrip())
    return stops


def _blocks(path: Path, copy: Path) -> Iterator[memoryview]:
    """Yields a file in blocks of whole lines; a block is valid until the next one is requested."""
    buffer, filled = bytearray(_BLOCK), 0
    with reading(path), open_file(copy, buffering=0) as file:
        while got := file.readinto(memoryview(buffer)[filled:]):
            stop = filled + got
            cut = buffer.rfind(b"\n", filled, stop) + 1  # behind the last whole line; 0 if there is none
            if cut:
                yield memoryview(buffer)[:cut]
                buffer[: stop - cut] = buffer[cut:stop]  # the begin of the next line
            filled = stop - cut
            if filled == len(buffer):  # The line is longer than a block.
                buffer = buffer + bytes(len(buffer))
    if filled:
        yield memoryview(buffer)[:filled]


KEEP_ALL = SplitFilter()
CACHE = Path("cache")
"""Default folder of decompressed copies."""

MOST_LINE_BYTES = 64 * 2**20
"""Limit for lines at the beginning of a file; a longer one is no JSON document."""

_ONE_OBJECT = "one JSON object a line"
_CHECKED_LINES = 100
"""First lines of a file of which one must be valid if corrupt records are skipped; else the file has another format."""


class IndexedText(TextDocuments):
    """Documents that are byte ranges of files. Files without a document are left out.

    Raises a DataError if a file cannot be read or is not UTF-8 (without a `corrupt` policy), or all are empty.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Tokenizer,
        *,
        keep: SplitFilter = KEEP_ALL,
        corrupt: CorruptRecords | None = None,
        cache: Path = CACHE,
    ) -> None:
        corrupt = corrupt or CorruptRecords()
        empties: list[Path] = []

        def documents_in(path: Path, copy: Path) -> Iterator[FoundDocuments]:
            is_empty = True
            for entries in self.documents_in(path, copy, is_checked=not corrupt.skips):
                is_empty &= len(entries.lines) == 0
                yield entries
            if is_empty:
                empties.append(path)

        self._index = DocumentIndex.build(files, readable_copies(files, cache), documents_in, keep)
        part = self._index.part
        super().__init__(tokenizer, self._index.fingerprint, corrupt=corrupt, keep=KEEP_ALL, part=part)
        corrupt.leave_out(empties, files)

    @abstractmethod
    def documents_in(self, path: Path, copy: Path, *, is_checked: bool) -> Iterator[FoundDocuments]:
        """Yields the documents of a file, whose text is in `copy`, after a check that they are UTF-8."""

    def __len__(self) -> int:
        return len(self._index)

    def sample(self, limit: int) -> NDArray[np.int64]:
        """Returns numbers of documents at even distances, and that of the last one of each file, which may be cut."""
        ends = np.flatnonzero(np.append(np.diff(self._index.file_of), 1))
        return np.union1d(super().sample(limit), ends[:: 1 + len(ends) // limit])


class PlainText(IndexedText):
    """One document per file, unchanged."""

    def documents_in(self, path: Path, copy: Path, *, is_checked: bool) -> Iterator[FoundDocuments]:
        with reading(path), open_file(copy) as file:
            content = file.read()
        if is_checked:
            require_utf8(content, str(path))
        if content:
            yield FoundDocuments(*(np.array([value]) for value in (1, 0, len(content), crc32(content))))

    def record(self, index: int) -> str:
        return require_utf8(self._index.content(index), str(self._index.path(index)))


class JsonLines(IndexedText):
    """One document per line that is not blank: a JSON object with the text in one of its fields.

    Raises a DataError also if a file does not begin with such an object.
    """

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
        corrupt = corrupt or CorruptRecords()
        self._text_field = text_field
        for path in files:  # before decompression, which may take long
            self._check_beginning(path, _CHECKED_LINES if corrupt.skips else 1)
        super().__init__(files, tokenizer, keep=keep, corrupt=corrupt, cache=cache)

    def documents_in(self, path: Path, copy: Path, *, is_checked: bool) -> Iterator[FoundDocuments]:
        # Where records are skipped, a line that is not UTF-8 is reported when it is read.
        return lines_in(path, copy, require_utf8 if is_checked else lambda content, location: None)

    def record(self, index: int) -> str:
        return self._parse(self._index.content(index), self._index.place(index))

    def _check_beginning(self, path: Path, lines: int) -> None:
        """Raises the error of the first line if none of a file's first lines is valid."""
        first: RecordError | None = None
        for number, line in islice(_filled_lines(path), lines):
            try:
                self._parse(line, f"{path}:{number}")
            except RecordError as error:
                first = first or error
            else:
                return
        if first is not None:
            shown = with_cure(first) if lines == 1 and first.fix is None else first
            raise DataError(shown.what, got=shown.got, allowed=shown.allowed, fix=shown.fix) from first

    def _parse(self, line: bytes, location: str) -> str:
        text = require_utf8(line, location)
        try:
            # Some editors put a byte-order mark before the first line.
            record = json.loads(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{location} is not JSON: {error}", allowed=_ONE_OBJECT) from error
        if not isinstance(record, dict):
            raise RecordError(f"{location} is not a JSON object", got=type(record).__name__, allowed=_ONE_OBJECT)
        if self._text_field not in record:
            fields = ", ".join(map(ascii, islice(record, 10))) or "no field"
            fix = "set data.text_field to the field with the text"
            raise RecordError(f"{location} has no field {self._text_field!a}", got=fields, fix=fix)
        return checked_text(record[self._text_field], f"{location}: field {self._text_field!a}")


def _filled_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number, content) of the lines that are not blank, decompressed."""
    rest, number = b"", 1  # the begin of a line whose end is in the next chunk, and its number
    for chunk in contents(path):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield number, line
            number += 1
        if len(rest) > MOST_LINE_BYTES:
            what = f"{path}:{number} is a line of more than {MOST_LINE_BYTES / 2**20:.0f} MiB"
            raise DataError(what, allowed=_ONE_OBJECT, fix="a text file is data.source text")
    if rest.strip():
        yield number, rest
