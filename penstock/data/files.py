"""Data files: from names, folders and globs to a list of files, and decompression of compressed ones.

A folder means all files below it with a suffix of the source, a glob (`*`, `?`, `[...]`, `**`) the files that it
matches. Their files are sorted by path; names in a list keep the user's order, so the result is the same on every
machine. A file that is matched twice counts once, and hidden files and folders are skipped.

Compressed files are decompressed once, into a cache folder, because they have no random access. The alternative, an
index of decompressor states, would decompress half an interval again for every document: hundreds of times the work.
The cost is disk space. A copy is named by a hash of the compressed bytes, so a changed file gets a new copy. It is
written as a draft and renamed when it is complete; errors remove the draft. Ranks of a machine share the work: each
takes files that no other rank has locked.
"""

import bz2
import fcntl
import glob
import gzip
import lzma
import os
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from penstock.base.errors import DataError, did_you_mean_path
from penstock.base.files import draft_of, most_unpacked, open_file
from penstock.data.sources import require

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of files that are decompressed first."""


def matched(names: Sequence[str], suffixes: Sequence[str] = (), *, field: str = "data.files") -> list[Path]:
    """Returns the files of files, folders and globs. Raises a DataError if a folder or a glob has no such file.

    `suffixes` choose files in folders, with or without a compression suffix; empty takes every file. Errors name the
    setting `field`.
    """
    named_paths: dict[str, Path] = {}  # without links -> as named, so that a file counts once
    for name in names:
        files = list(_files(name, suffixes))
        if not files:
            kind = "folder" if os.path.isdir(name) else "glob"
            wanted = f" that ends in {' or '.join(suffixes)}" if suffixes and kind == "folder" else ""
            raise DataError(f"{field}: the {kind} {name} has no file{wanted}", fix=f"correct {field}")
        for path in files:
            named_paths.setdefault(os.path.realpath(path), path)  # `Path.resolve` fails where links form a loop
    return list(named_paths.values())


def uncompressed_name(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in COMPRESSED else path


def unreadable(path: Path, error: OSError) -> DataError:
    hint = None if path.exists() else did_you_mean_path(path)
    return DataError(
        f"cannot read data file {path}: {error.strerror or error}",
        fix=hint or "correct data.files or data.validation_files",
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns errors of the system while a data file is opened and read into a DataError."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


class EmptyFileError(DataError):
    """A file has no document; others of the same source may have some."""


def empty(path: Path, what: str = "is empty") -> EmptyFileError:
    return EmptyFileError(f"data file {path} {what}", fix="take it out of data.files and data.validation_files")


def _files(name: str, suffixes: Sequence[str]) -> Iterator[Path]:
    """Yields the files of one name. A missing file is reported when it is opened."""
    if os.path.isdir(name):
        yield from _below(Path(name), tuple(suffixes))
    elif glob.has_magic(name) and not os.path.exists(name):
        paths = [Path(path) for path in glob.glob(name, recursive=True) if os.path.isfile(path)]
        yield from sorted(paths, key=lambda path: path.parts)
    else:
        yield Path(name)


def _below(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    paths = []
    for folder, subfolders, names in os.walk(root, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]  # in place: os.walk reads the list
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    # By parts and not by the whole string, so that the separator of the operating system does not matter.
    for path in sorted(paths, key=lambda path: path.relative_to(root).parts):
        if not suffixes or uncompressed_name(path).suffix in suffixes:
            yield path


_CHUNK = 1 << 20  # bytes
_ZST_CHUNK = 1 << 12
"""Read together: 4 bytes may become a block of 128 KiB."""

_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def readable_copies(paths: Sequence[Path], cache: Path) -> list[Path]:
    """Returns the files to read: each file itself, or its decompressed copy in `cache`, which is made if it is missing.

    Raises a DataError if a file cannot be read or is damaged, a package is missing, or a copy cannot be written.
    """
    copies = {path: _copy_of(path, cache) for path in paths if path.suffix in COMPRESSED}
    missing = deque(path for path, copy in copies.items() if not copy.exists())
    busy = 0  # files in a row that other ranks have locked
    while missing:
        path = missing.popleft()
        # Take any free file; wait for a lock only once all that are left are locked.
        with _locked(copies[path], wait=busy > len(missing)) as is_ours:
            if is_ours and not copies[path].exists():  # another rank may have made it since
                _decompress(path, copies[path])
            busy = 0 if is_ours else busy + 1
        if not is_ours:
            missing.append(path)
    return [copies.get(path, path) for path in paths]


def _copy_of(path: Path, cache: Path) -> Path:
    digest = blake2b(digest_size=16)
    with reading(path), open_file(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return cache / f"{digest.hexdigest()}{uncompressed_name(path).suffix}"


@contextmanager
def _locked(copy: Path, *, wait: bool) -> Iterator[bool]:
    """Tries to lock a copy, and yields whether this rank has the lock; with `wait` it always does."""
    name = copy.with_suffix(".lock")
    made, lock = _open_lock(name)
    with lock:
        is_ours = _lock(lock, wait=wait)
        try:
            yield is_ours
        except DataError:
            name.unlink(missing_ok=True)
            with suppress(OSError):  # Remove the folders that this call made, if they are empty.
                for folder in made:
                    folder.rmdir()
            raise
        if is_ours:
            name.unlink(missing_ok=True)


def _open_lock(name: Path) -> tuple[list[Path], IO[bytes]]:
    """Returns (open lock file, folders that were made for it, the innermost first)."""
    made: list[Path] = []
    while True:
        try:
            missing = [folder for folder in name.parents if not folder.exists()]
            name.parent.mkdir(parents=True, exist_ok=True)
            made += [folder for folder in missing if folder not in made]
            return made, name.open("wb")
        except FileNotFoundError:  # Another rank failed and removed its folder.
            continue
        except OSError as error:
            raise _cache_error(name.parent, error) from error


def _lock(lock: IO[bytes], *, wait: bool) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # Without file locks, ranks do the same work, each into its own draft.
        return True
    return True


def _decompress(path: Path, copy: Path) -> None:
    """Writes the copy of a file, whole or not at all."""
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_of(copy)
        try:
            with draft.open("xb") as target:
                written, room = 0, most_unpacked(path.stat().st_size)
                for chunk in contents(path):
                    target.write(chunk)
                    if (written := written + len(chunk)) > room:
                        what = f"data file {path} becomes more than 100 times as large when it is decompressed"
                        raise DataError(what, got=f"more than {room} bytes", fix="decompress it yourself if it is text")
                target.flush()
                os.fsync(target.fileno())  # before the rename: a copy with its name is complete after a power cut
            os.replace(draft, copy)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:  # of the cache: errors of the source are DataErrors
        raise _cache_error(copy.parent, error) from error


def contents(path: Path) -> Iterator[bytes]:
    """Yields the decompressed content of a file, chunk by chunk. Raises a DataError if that is impossible."""
    zst = _zst(path) if path.suffix == ".zst" else None
    damage: list[type[Exception]] = [OSError, EOFError, ValueError, lzma.LZMAError, zlib.error]
    if zst is not None:
        damage.append(zst.ZstdError)
    with reading(path):
        raw = open_file(path)
    with raw:
        try:
            if zst is not None:
                yield from _frames(raw, zst)
            else:
                file = _OPEN[path.suffix](raw, "rb") if path.suffix in _OPEN else raw
                while chunk := file.read(_CHUNK):
                    yield chunk
        except tuple(damage) as error:
            raise DataError(
                f"data file {path} cannot be decompressed: {error}", fix="it is damaged or cut short: fetch it again"
            ) from error


def _frames(raw: IO[bytes], zst: ModuleType) -> Iterator[bytes]:
    """Yields the content of the frames of a Zstandard file. The package's readers accept truncated frames."""
    frame = None
    while chunk := raw.read(_ZST_CHUNK):
        while chunk:  # a chunk may hold the end of a frame and the begin of the next
            if frame is None:
                decompressor = zst.ZstdDecompressor()
                frame = decompressor if sys.version_info >= (3, 14) else decompressor.decompressobj()
            yield frame.decompress(chunk)
            chunk = b""
            if frame.eof:
                chunk, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("it ends inside of a frame")


def _zst(path: Path) -> ModuleType:
    if sys.version_info >= (3, 14):
        return import_module("compression.zstd")
    return require("zstandard", extra="zstd", purpose=f"data file {path}")


def _cache_error(cache: Path, error: OSError) -> DataError:
    return DataError(
        f"decompressed copies cannot be written to {cache}: {error.strerror or error}",
        fix="set data.cache to a folder with space",
    )
