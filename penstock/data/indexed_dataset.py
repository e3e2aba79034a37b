"""Megatron's indexed datasets: tokens in a pair of memory-mapped files.

    PREFIX.bin          the ids of all sequences one after another, in one number type
    PREFIX.idx          "MMIDIDX" and two zeros, version 1 (u64), code of the type (u8), sequences S (u64), documents
                        + 1 (u64); then of each sequence its tokens (int32) and first byte in .bin (int64), and of
                        each document its first sequence, S behind the last one (int64); little-endian
    PREFIX.packed.json  Penstock's own, optional: tokenizer of the ids, counts, and bytes of text

Modes of sequences, one more byte each, may follow the index, if all are 0: text. An index that names no document, as
parts do that were never merged, has a document in each sequence.

Opening a pair copies nothing and checks the numbers of the index once. A pair is written under hidden names and renamed
when it is complete, `.idx` last: readers need it first.
"""

import json
import os
import struct
from array import array
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import DataError, system_errors
from penstock.base.files import draft_of, open_file, read_json
from penstock.data.files import empty
from penstock.data.sources import Tokens, fingerprint_of

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _TYPES.items()}
_SMALL_VOCABULARY = 65500
"""Megatron stores ids of a vocabulary below this in uint16, others in int32."""

_MOST_TOKENS = 2**31 - 1  # of a sequence: its length is an int32
_CHECKED_TOGETHER = 2**20  # numbers of the index
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # parts of the tokens that the fingerprint reads


@dataclass(frozen=True, kw_only=True)
class PackedMetadata:
    """The content of PREFIX.packed.json."""

    tokenizer: str  # the setting that opened it
    fingerprint: int  # of the tokenizer
    vocabulary_size: int
    end_of_document: int  # id
    documents: int
    tokens: int  # end tokens included
    text_bytes: int
    end_of_document_name: str = ""  # in the settings; empty for the tokenizer's own
    left_out: tuple[str, ...] = ()  # corrupt documents, each with its place and fault


class IndexedDataset:
    """One `.bin` with its `.idx`, memory-mapped and checked; `prefix` is their path without these endings.

    `notes` are lines for the user about what is unusual. Raises an EmptyFileError if there is no sequence, and a
    DataError if a file is missing, damaged, or does not match the other.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.notes: list[str] = []
        self._index = _mapped(_beside(prefix, ".idx"))
        self.type, sequences, bounds = self._read_header()
        self._content = _mapped(_beside(prefix, ".bin"))
        places = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences])  # bytes at which the three arrays begin
        self._lengths = np.frombuffer(self._index, "<i4", sequences, places[0])  # tokens of each sequence
        self._starts = np.frombuffer(self._index, "<i8", sequences, places[1])  # its first byte in .bin
        self._bounds = np.frombuffer(self._index, "<i8", bounds, places[2])  # first sequence of each document
        if self._bounds.tolist() == [0]:
            self._bounds = np.arange(sequences + 1)
            path = _beside(prefix, ".idx")
            self.notes.append(f"{path} names no document: each of its {sequences:,} sequences is read as one")
        self._check()

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def document(self, index: int) -> Tokens:
        """Returns the ids of a document (all its sequences) as stored; read-only. Fractions are a DataError."""
        first, last = int(self._bounds[index]), int(self._bounds[index + 1])
        bounds = zip(self._lengths[first:last].tolist(), self._starts[first:last].tolist(), strict=True)
        parts = [np.frombuffer(self._content, self.type, length, start) for length, start in bounds]
        tokens = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, self.type), *parts])
        if self.type.kind != "f":
            return tokens
        whole = tokens.astype(np.int64)
        if not np.array_equal(whole, tokens):
            raise DataError(f"document {index} of {self.prefix}.bin is no tokens: its numbers have fractions")
        return whole

    def fingerprint(self) -> int:
        """Returns a number of 56 bits that changes with the index and with sampled parts of the tokens."""
        digest = blake2b(self._index.data, digest_size=16)
        size = len(self._content)
        for start in np.linspace(0, max(0, size - _SAMPLE_BYTES), _SAMPLES).astype(np.int64).tolist():
            digest.update(self._content[start : start + _SAMPLE_BYTES].tobytes())
        return fingerprint_of(digest.digest(), size)

    def _read_header(self) -> tuple["np.dtype[Any]", int, int]:
        """Type of the ids, and numbers of sequences and of document bounds."""
        path = _beside(self.prefix, ".idx")
        if len(self._index) < _HEADER.size or self._index[: len(_MAGIC)].tobytes() != _MAGIC:
            raise DataError(f"{path} is no index of packed tokens", allowed="an .idx file as Megatron writes it")
        _, version, code, sequences, bounds = _HEADER.unpack(self._index[: _HEADER.size].tobytes())
        if version != 1 or code not in _TYPES:
            got = f"version {version}, type {code}"
            raise DataError(f"{path} is of another version", got=got, allowed="version 1, types 1 to 8")
        size = _HEADER.size + 12 * sequences + 8 * bounds
        if len(self._index) == size + sequences:  # one more byte a sequence: its mode
            if self._index[size:].any():
                raise DataError(f"{path} is of images and text; only text can be read")
        elif len(self._index) != size:
            raise _damaged(path, f"{len(self._index)} bytes where {size} belong")
        if sequences == 0:
            raise empty(path, "holds no document")
        return np.dtype(_TYPES[code]), sequences, bounds

    def _check(self) -> None:
        """Raises DataError for documents or sequences out of range; in parts: an index may be larger than memory."""
        path = _beside(self.prefix, ".idx")
        sequences = len(self._lengths)
        if not len(self._bounds) or self._bounds[0] != 0 or self._bounds[-1] != sequences or not _rises(self._bounds):
            raise _damaged(path, "documents that do not follow each other")
        last = 0  # byte of .bin behind the last sequence
        for start in range(0, sequences, _CHECKED_TOGETHER):
            lengths = self._lengths[start : start + _CHECKED_TOGETHER].astype(np.int64)
            starts = self._starts[start : start + _CHECKED_TOGETHER]
            ends = starts + lengths * self.type.itemsize  # bytes in .bin
            if min(lengths.min(), starts.min()) < 0 or ends.max() > len(self._content):
                why = "the two files are not of one pair, or cut"
                raise _damaged(path, f"sequences outside {self.prefix}.bin", why)
            last = max(last, int(ends.max()))
        if behind := len(self._content) - last:
            self.notes.append(f"{self.prefix}.bin has {behind:,} bytes behind its last sequence, which are not read")


class IndexedDatasetWriter:
    """Writes a pair as a context manager: at its end the files are complete, or do not exist.

    Missing folders are made. Raises a DataError if the pair exists, or the folder cannot be written to.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.type: np.dtype[Any] = np.dtype("<u2" if vocab_size < _SMALL_VOCABULARY else "<i4")
        self._finals = {suffix: _beside(prefix, suffix) for suffix in (".bin", ".packed.json", ".idx")}
        for path in self._finals.values():
            if path.exists():
                raise DataError(f"{path} is there already", fix="give another name, or remove it")
        self._lengths = array("i")
        with system_errors(DataError, f"cannot write {prefix}"):
            prefix.parent.mkdir(parents=True, exist_ok=True)
            self._drafts = {suffix: draft_of(path) for suffix, path in self._finals.items()}
            self._content: BinaryIO = self._drafts[".bin"].open("xb")

    def write(self, tokens: Tokens, lengths: NDArray[np.integer[Any]]) -> None:
        """Appends the tokens of documents, one after another and each with its end, and the length of each.

        Raises a DataError if the disk is full, or a document is too long.
        """
        if len(lengths) and lengths.max() > _MOST_TOKENS:
            raise DataError(
                "a document is too long for an .idx file", got=int(lengths.max()), allowed=f"{_MOST_TOKENS} tokens"
            )
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        with system_errors(DataError, f"cannot write {self._finals['.bin']}"):
            self._content.write(np.ascontiguousarray(tokens, dtype=self.type).data)

    def finish(self, origin: PackedMetadata) -> None:
        """Writes the other files and renames all of them. Raises a DataError if the disk is full."""
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        starts = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
        starts *= self.type.itemsize  # tokens to bytes
        header = _HEADER.pack(_MAGIC, 1, _CODES[self.type], len(lengths), len(lengths) + 1)
        bounds = np.arange(len(lengths) + 1, dtype="<i8")
        with system_errors(DataError, f"cannot write {self._finals['.idx']}"):
            _sync(self._content)  # every file is on disk before the first rename
            with self._drafts[".idx"].open("xb") as file:
                file.writelines((header, lengths.astype("<i4").data, starts.data, bounds.data))
                _sync(file)
            with self._drafts[".packed.json"].open("xb") as file:
                file.write((json.dumps(asdict(origin), indent=1) + "\n").encode())
                _sync(file)
            for suffix, draft in self._drafts.items():  # .idx is the last
                draft.replace(self._finals[suffix])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._content.close()
        for draft in self._drafts.values():
            draft.unlink(missing_ok=True)


def origin_of(prefix: Path) -> PackedMetadata | None:
    """Returns the content of PREFIX.packed.json, None if there is no such file; a DataError if it is damaged."""
    path = _beside(prefix, ".packed.json")
    try:
        values: dict[str, Any] = read_json(path)
        return PackedMetadata(**values | {"left_out": tuple(values.get("left_out", ()))})
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} does not describe packed tokens: {error}", fix="pack the text again, or take the file away"
        ) from error


def prefix_of(path: Path) -> Path:
    """Returns the prefix of a pair from a prefix, or from the path of one of its files."""
    for suffix in (".packed.json", ".bin", ".idx"):
        if path.name.endswith(suffix):
            return path.with_name(path.name.removesuffix(suffix))
    return path


def _beside(prefix: Path, suffix: str) -> Path:
    # Not with_suffix: a prefix may have dots of its own.
    return prefix.with_name(prefix.name + suffix)


def _mapped(path: Path) -> NDArray[np.uint8]:
    try:
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size == 0:  # which cannot be mapped
                raise empty(path) if path.name.endswith(".idx") else _damaged(path, "no byte")
            return np.memmap(file, dtype=np.uint8, mode="r")
    except OSError as error:
        raise DataError(
            f"cannot read data file {path}: {error.strerror}",
            fix="give the path of a .bin file with its .idx beside it, or of both without the ending",
        ) from error


def _rises(numbers: NDArray[np.int64]) -> bool:
    """Whether numbers never decrease; computed in parts."""
    ends = [*range(0, len(numbers) - 1, _CHECKED_TOGETHER), len(numbers) - 1]
    return all(bool((np.diff(numbers[start : stop + 1]) >= 0).all()) for start, stop in pairwise(ends))


def _damaged(path: Path, got: str, why: str = "it is damaged or cut") -> DataError:
    return DataError(f"{path} cannot be used: {why}", got=got, fix="copy or pack the files again")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
