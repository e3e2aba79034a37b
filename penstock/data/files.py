"""Compressed files are decompressed once, into a folder of copies, and read from there.

A compressed file has no place that one could begin to read at, and documents are read in any order. The other way, an
index of states of the decompressor, would decompress half a stretch again for every document: hundreds of times the
work. The price is the disk that the text takes.

A copy is named by a hash of the compressed bytes, so that a file that has changed gets another, and it comes to its
name whole: until then it is a draft, which is removed if anything goes wrong. Ranks of a machine share the work: each
takes files that no other has locked.
"""

import bz2
import fcntl
import glob
import gzip
import lzma
import os
import sys
import tempfile
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
from penstock.data.sources import require

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of files that are decompressed before they are read."""


def matched(names: Sequence[str], suffixes: Sequence[str] = (), *, field: str = "data.files") -> list[Path]:
    """Returns the files that names stand for.

    Args:
        names: files, folders and globs.
        suffixes: what the name of a file in a folder must end in, with a suffix of compression or without; none takes
            every file. A file that is named, or that a glob matches, may be called anything.
        field: where the names were written, for errors.

    Raises:
        DataError: a folder or a glob has no such file.
    """
    found: dict[Path, Path] = {}
    for name in names:
        files = list(_files(name, suffixes))
        if not files:
            kind = "folder" if os.path.isdir(name) else "glob"
            wanted = f" that ends in {' or '.join(suffixes)}" if suffixes and kind == "folder" else ""
            raise DataError(f"{field}: the {kind} {name} has no file{wanted}", fix=f"correct {field}")
        for path in files:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def stem(path: Path) -> Path:
    """Returns the path without its suffix of compression, if it has one."""
    return path.with_suffix("") if path.suffix in COMPRESSED else path


def unreadable(path: Path, error: OSError) -> DataError:
    """Returns the error for a file that the system does not let us read."""
    told = None if path.exists() else did_you_mean_path(path)
    return DataError(
        f"cannot read data file {path}: {error.strerror or error}",
        fix=told or "correct data.files or data.validation_files",
    )


def empty(path: Path) -> DataError:
    """Returns the error for a file without a document."""
    return DataError(f"data file {path} is empty", fix="take it out of data.files and data.validation_files")


def _files(name: str, suffixes: Sequence[str]) -> Iterator[Path]:
    """Yields the files that one name stands for. A file that is not there is found out by whoever opens it."""
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
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    # By parts and not by the whole string, so that the separator of the operating system does not matter.
    for path in sorted(paths, key=lambda path: path.relative_to(root).parts):
        if not suffixes or stem(path).suffix in suffixes:
            yield path


_CHUNK = 1 << 20
_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def readable_copies(paths: Sequence[Path], cache: Path) -> list[Path]:
    """Returns what to read in place of each file: the file, or its decompressed copy, which is made if it is missing.

    Args:
        paths: files; those that end in a suffix of compression are decompressed.
        cache: folder of the copies.

    Raises:
        DataError: a file cannot be read or is damaged, a package is missing, or the copies find no place.
    """
    copies = {path: _copy_of(path, cache) for path in paths if path.suffix in COMPRESSED}
    missing = deque(path for path, copy in copies.items() if not copy.exists())
    busy = 0
    while missing:
        path = missing.popleft()
        with _locked(copies[path], wait=busy > len(missing)) as is_ours:
            if is_ours and not copies[path].exists():
                _decompress(path, copies[path])
            busy = 0 if is_ours else busy + 1
        if not is_ours:
            missing.append(path)
    return [copies.get(path, path) for path in paths]


def _copy_of(path: Path, cache: Path) -> Path:
    """Returns where the copy of a file is, or will be."""
    digest = blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise unreadable(path, error) from error
    return cache / f"{digest.hexdigest()}{stem(path).suffix}"


@contextmanager
def _locked(copy: Path, *, wait: bool) -> Iterator[bool]:
    """Holds the lock of a copy, and tells whether it does; it may be another's if nobody waits."""
    name = copy.with_suffix(".lock")
    made, lock = _open_lock(name)
    with lock:
        is_ours = _lock(lock, wait=wait)
        try:
            yield is_ours
        except DataError:
            name.unlink(missing_ok=True)
            with suppress(OSError):  # Nothing is left behind, if nothing else is in it.
                for folder in made:
                    folder.rmdir()
            raise
        if is_ours:
            name.unlink(missing_ok=True)


def _open_lock(name: Path) -> tuple[list[Path], IO[bytes]]:
    """Returns the open file of a lock, and the folders that were made for it, the innermost first."""
    made: list[Path] = []
    while True:
        try:
            missing = [folder for folder in name.parents if not folder.exists()]
            name.parent.mkdir(parents=True, exist_ok=True)
            made += [folder for folder in missing if folder not in made]
            return made, name.open("wb")
        except FileNotFoundError:  # Another rank has failed and taken its folder away.
            continue
        except OSError as error:
            raise _no_place(name.parent, error) from error


def _lock(lock: IO[bytes], *, wait: bool) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # A file system without locks: then ranks do the same work, each into a draft of its own.
        return True
    return True


def _decompress(path: Path, copy: Path) -> None:
    """Writes the copy of a file, whole or not at all."""
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=copy.parent, prefix=".draft-")
    except OSError as error:
        raise _no_place(copy.parent, error) from error
    try:
        with os.fdopen(descriptor, "wb") as target:
            for content in contents(path):
                _write(target, content, copy.parent)
            _write(target, b"", copy.parent)
        os.replace(draft, copy)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)


def _write(target: IO[bytes], content: bytes, cache: Path) -> None:
    """Writes; nothing to write means that what was written shall reach the disk."""
    try:
        target.write(content)
        if not content:
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:
        raise _no_place(cache, error) from error


def contents(path: Path) -> Iterator[bytes]:
    """Yields what a file holds, chunk by chunk, decompressed if need be.

    Raises:
        DataError: it cannot be read, or is damaged, or a package is missing.
    """
    zst = _zst(path) if path.suffix == ".zst" else None
    damage: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error)
    if zst is not None:
        damage = (*damage, zst.ZstdError)
    try:
        raw = path.open("rb")
    except OSError as error:
        raise unreadable(path, error) from error
    with raw:
        try:
            if zst is not None:
                yield from _frames(raw, zst)
            else:
                file = _OPEN[path.suffix](raw, "rb") if path.suffix in _OPEN else raw
                while chunk := file.read(_CHUNK):
                    yield chunk
        except damage as error:
            raise DataError(
                f"data file {path} cannot be decompressed: {error}", fix="it is damaged or cut short: fetch it again"
            ) from error


def _frames(raw: IO[bytes], zst: ModuleType) -> Iterator[bytes]:
    """Yields what the frames of a Zstandard file hold. The readers of the package do not notice that one is cut."""
    frame = None
    while chunk := raw.read(_CHUNK >> 4):
        while chunk:
            frame = frame or _new_frame(zst)
            yield frame.decompress(chunk)
            chunk = b""
            if frame.eof:
                chunk, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("it ends inside of a frame")


def _new_frame(zst: ModuleType) -> Any:
    decompressor = zst.ZstdDecompressor()
    return decompressor if sys.version_info >= (3, 14) else decompressor.decompressobj()


def _zst(path: Path) -> ModuleType:
    """Returns the module that reads Zstandard: Python's own from 3.14 on, before that a package."""
    if sys.version_info >= (3, 14):
        return import_module("compression.zstd")
    return require("zstandard", extra="zstd", purpose=f"data file {path}")


def _no_place(cache: Path, error: OSError) -> DataError:
    return DataError(
        f"decompressed copies find no place in {cache}: {error.strerror or error}",
        fix="set data.cache to a folder with space",
    )
