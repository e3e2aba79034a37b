"""Tokens on disk as Megatron keeps them: a pair of files, memory-mapped.

    PREFIX.bin          the ids of all sequences one behind the other, in one type of number
    PREFIX.idx          "MMIDIDX" and two zeros, version 1 (u64), code of the type (u8), sequences S (u64), documents
                        and one more (u64); then of each sequence its tokens (int32) and first byte in .bin (int64),
                        and of each document its first sequence, S behind the last one (int64); little-endian
    PREFIX.packed.json  ours, and optional: which tokenizer made the ids, and of how many bytes of text

Nothing is copied when a pair is opened, and its numbers are checked once, so that each document is where they say. A
pair is written under hidden names and renamed when it is whole, `.idx` last: without it nobody reads the others.
"""

import json
import os
import struct
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.base.files import read_json
from penstock.data.sources import Tokens, fingerprint_of

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _TYPES.items()}
_SMALL_VOCABULARY = 65500
"""Megatron keeps ids of a vocabulary below this in uint16, others in int32."""

_LONGEST = 2**31 - 1
_AT_ONCE = 2**20
_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, kw_only=True)
class PackedMetadata:
    """What the ids of a pair stand for.

    Attributes:
        tokenizer: the name that it was opened under.
        fingerprint: of the tokenizer.
        vocabulary_size: of the tokenizer.
        end_of_document: the id that stands at the end of each document.
        end_of_document_name: as whoever packed it named that token; empty takes what the tokenizer says.
        documents: of the pair.
        tokens: of the pair, the ends of documents too.
        text_bytes: of the text.
        left_out: corrupt documents, each with its place and fault.
    """

    tokenizer: str
    fingerprint: int
    vocabulary_size: int
    end_of_document: int
    documents: int
    tokens: int
    text_bytes: int
    end_of_document_name: str = ""
    left_out: tuple[str, ...] = ()


class IndexedDataset:
    """One `.bin` with its `.idx`."""

    def __init__(self, prefix: Path) -> None:
        """Maps and checks a pair.

        Args:
            prefix: the path of the two files without `.bin` and `.idx`.

        Raises:
            DataError: one of them is missing, damaged, empty, or does not go with the other.
        """
        self.prefix = prefix
        self._index = _mapped(_beside(prefix, ".idx"))
        self._content = _mapped(_beside(prefix, ".bin"))
        self.type, sequences, bounds = self._read_header()
        places = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences])
        self._lengths = np.frombuffer(self._index, "<i4", sequences, places[0])
        self._starts = np.frombuffer(self._index, "<i8", sequences, places[1])
        self._bounds = np.frombuffer(self._index, "<i8", bounds, places[2])
        self._check()

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._bounds) - 1

    def document(self, index: int) -> Tokens:
        """Returns the ids of a document, all its sequences, as they stand in the file; read-only.

        Raises:
            DataError: the file holds numbers with a fraction.
        """
        first, last = int(self._bounds[index]), int(self._bounds[index + 1])
        parts = [self._sequence(sequence) for sequence in range(first, last)]
        tokens = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, self.type), *parts])
        if self.type.kind != "f":
            return tokens
        whole = tokens.astype(np.int64)
        if not np.array_equal(whole, tokens):
            raise DataError(f"document {index} of {self.prefix}.bin is no tokens: its numbers have fractions")
        return whole

    def fingerprint(self) -> int:
        """Returns a number of 56 bits that changes with the index and, as far as samples see it, with the tokens."""
        digest = blake2b(self._index.data, digest_size=16)
        size = len(self._content)
        for start in np.linspace(0, max(0, size - _SAMPLE_BYTES), _SAMPLES).astype(np.int64).tolist():
            digest.update(self._content[start : start + _SAMPLE_BYTES].tobytes())
        return fingerprint_of(digest.digest(), size)

    def origin(self) -> PackedMetadata | None:
        """Returns what PREFIX.packed.json says, None if there is no such file.

        Raises:
            DataError: it is damaged.
        """
        path = _beside(self.prefix, ".packed.json")
        try:
            values = read_json(path)
            return PackedMetadata(**{**values, "left_out": tuple(values.get("left_out", ()))})
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} does not describe packed tokens: {error}", fix="pack the text again, or take the file away"
            ) from error

    def _sequence(self, sequence: int) -> Tokens:
        return np.frombuffer(self._content, self.type, int(self._lengths[sequence]), int(self._starts[sequence]))

    def _read_header(self) -> tuple["np.dtype[Any]", int, int]:
        """Returns the type of the ids, and how many sequences and bounds of documents there are."""
        path = _beside(self.prefix, ".idx")
        if len(self._index) < _HEADER.size or self._index[: len(_MAGIC)].tobytes() != _MAGIC:
            raise DataError(f"{path} is no index of packed tokens", allowed="an .idx file as Megatron writes it")
        _, version, code, sequences, bounds = _HEADER.unpack(self._index[: _HEADER.size].tobytes())
        if version != 1 or code not in _TYPES:
            raise DataError(
                f"{path} is of another version",
                got=f"version {version}, type {code}",
                allowed="version 1, types 1 to 8",
            )
        size = _HEADER.size + 12 * sequences + 8 * bounds
        if len(self._index) == size + sequences > size:
            raise DataError(f"{path} is of images and text; only text can be read")
        if len(self._index) != size:
            raise _damaged(path, f"{len(self._index)} bytes where {size} belong")
        return np.dtype(_TYPES[code]), sequences, bounds

    def _check(self) -> None:
        """Refuses documents that are not there; in parts, since an index may be larger than memory."""
        path = _beside(self.prefix, ".idx")
        if len(self._bounds) < 2:
            raise DataError(f"{path} holds no document", fix="take it out of data.files and data.validation_files")
        sequences = len(self._lengths)
        if self._bounds[0] != 0 or self._bounds[-1] != sequences or not _rises(self._bounds):
            raise _damaged(path, "documents that do not follow each other")
        for start in range(0, sequences, _AT_ONCE):
            lengths = self._lengths[start : start + _AT_ONCE].astype(np.int64)
            starts = self._starts[start : start + _AT_ONCE]
            if min(lengths.min(), starts.min()) < 0 or (starts + lengths * self.type.itemsize).max() > len(
                self._content
            ):
                raise _damaged(
                    path, f"sequences outside {self.prefix}.bin", "the two files are not of one pair, or cut"
                )


class IndexedDatasetWriter:
    """Writes a pair: used in a `with`, at whose end the files are there whole, or not at all."""

    def __init__(self, prefix: Path, vocabulary_size: int) -> None:
        """Opens a hidden file beside where the pair will be.

        Args:
            prefix: the path of the files without `.bin` and `.idx`; folders on the way are made.
            vocabulary_size: every id is below it.

        Raises:
            DataError: there is such a pair, or the folder cannot be written to.
        """
        self.type: np.dtype[Any] = np.dtype("<u2" if vocabulary_size < _SMALL_VOCABULARY else "<i4")
        self._finals = {suffix: _beside(prefix, suffix) for suffix in (".bin", ".packed.json", ".idx")}
        self._drafts = {
            suffix: path.with_name(f".{path.name}.{os.getpid()}.draft") for suffix, path in self._finals.items()
        }
        for path in self._finals.values():
            if path.exists():
                raise DataError(f"{path} is there already", fix="give another name, or remove it")
        self._lengths = array("i")
        with _disk_errors(prefix):
            prefix.parent.mkdir(parents=True, exist_ok=True)
            self._content: BinaryIO = self._drafts[".bin"].open("wb")

    def write(self, tokens: Tokens, lengths: NDArray[np.integer[Any]]) -> None:
        """Appends documents.

        Args:
            tokens: their ids, one document behind the other, each with its end.
            lengths: tokens of each.

        Raises:
            DataError: the disk is full, or a document is too long.
        """
        if len(lengths) and lengths.max() > _LONGEST:
            raise DataError(
                "a document is too long for an .idx file", got=int(lengths.max()), allowed=f"{_LONGEST} tokens"
            )
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        with _disk_errors(self._finals[".bin"]):
            self._content.write(np.ascontiguousarray(tokens, dtype=self.type).data)

    def finish(self, origin: PackedMetadata) -> None:
        """Writes the other files and gives all their names.

        Raises:
            DataError: the disk is full.
        """
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        starts = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
        starts *= self.type.itemsize
        header = _HEADER.pack(_MAGIC, 1, _CODES[self.type], len(lengths), len(lengths) + 1)
        bounds = np.arange(len(lengths) + 1, dtype="<i8")
        with _disk_errors(self._finals[".idx"]):
            _settle(self._content)
            with self._drafts[".idx"].open("wb") as file:
                for part in (header, lengths.astype("<i4").data, starts.data, bounds.data):
                    file.write(part)
                _settle(file)
            with self._drafts[".packed.json"].open("wb") as file:
                file.write(_json_text(asdict(origin)).encode())
                _settle(file)
            for suffix, draft in self._drafts.items():
                draft.replace(self._finals[suffix])

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Takes away what was not finished."""
        self._content.close()
        for draft in self._drafts.values():
            draft.unlink(missing_ok=True)


def prefix_of(path: Path) -> Path:
    """Returns the prefix of a pair from that, or from the path of one of its files."""
    for suffix in (".packed.json", ".bin", ".idx"):
        if path.name.endswith(suffix):
            return path.with_name(path.name.removesuffix(suffix))
    return path


def _beside(prefix: Path, suffix: str) -> Path:
    # Not with_suffix: a prefix may have dots of its own.
    return prefix.with_name(prefix.name + suffix)


def _mapped(path: Path) -> NDArray[np.uint8]:
    """Returns the bytes of a file, memory-mapped."""
    try:
        if path.stat().st_size == 0:
            raise DataError(f"data file {path} is empty", fix="take it out of data.files and data.validation_files")
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise DataError(
            f"cannot read data file {path}: {error.strerror}",
            fix="give the path of a .bin file with its .idx beside it, or of both without the ending",
        ) from error


def _rises(numbers: NDArray[np.int64]) -> bool:
    """Tells whether no number is smaller than the one before it; in parts."""
    ends = [*range(0, len(numbers) - 1, _AT_ONCE), len(numbers) - 1]
    return all(bool((np.diff(numbers[start : stop + 1]) >= 0).all()) for start, stop in pairwise(ends))


def _damaged(path: Path, got: str, why: str = "it is damaged or cut") -> DataError:
    return DataError(f"{path} cannot be used: {why}", got=got, fix="copy or pack the files again")


def _json_text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1) + "\n"


def _settle(file: BinaryIO) -> None:
    """Makes what was written survive a power cut."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Says what the system refuses (no space, no permission, ...) as an error of the user's."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
