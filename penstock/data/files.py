"""From what a user writes, files, folders and globs, to a list of files that is the same on every machine.

A folder stands for all files below it that the source reads, a glob (`*`, `?`, `[...]`, `**`) for the files that it
matches. Their files come in the order of their paths; what the user lists comes in the user's order. A file that is
matched twice counts once, and hidden files and folders are passed over.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.base.errors import DataError, did_you_mean_path

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
