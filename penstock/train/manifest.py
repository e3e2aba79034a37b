"""Content of a checkpoint folder: rectangles of tensors in files, and `manifest.json`, which is written last.

    tensors-00000-00000.safetensors    rectangles of tensors, by the rank that wrote them and a number
    tensors-00001-00000.safetensors
    facts.json                         all other state, as JSON
    manifest.json                      every tensor and file, and a checksum of itself

The manifest names every tensor with its type, whole shape and the file of each rectangle; the rectangles together are
exactly the tensor. A rectangle is called `NAME[0:2, 4:8]` in its file. So a checkpoint can be refused before it is
read, and ranks of another layout can read it:

    rank 0 wrote    w[0:4, 0:8]     tensors-00000-00000.safetensors
    rank 1 wrote    w[4:8, 0:8]     tensors-00001-00000.safetensors
    we hold         w[2:6, 0:4]     read rows 2 and 3 of the first and 0 and 1 of the second, columns 0 to 3

The manifest has the size and CRC-32 of every file, so a flipped bit or a truncated file is found. The checksums are
against accidents; against attackers, no file can hold code. CRC-32 reads 6.2 GB/s on one core, SHA-256 1.8.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock import __version__
from penstock.base.errors import CheckpointError, DamagedError
from penstock.base.files import read_json, write_whole
from penstock.layout.sharding import Rectangle, not_the_whole, parse_rectangle
from penstock.models.huggingface.tensor_file import (
    TensorEntry,
    TensorFile,
    fingerprint,
    in_files,
    tensor_entry,
    write_entries,
)
from penstock.parallel.shard import ShardedTensor

FORMAT = "penstock-checkpoint"
VERSION = 2
"""1: whole tensors, by one process. 2: rectangles of tensors, by many ranks; weights once, in float32."""

MANIFEST = "manifest.json"
FACTS = "facts.json"
TENSORS = "*.safetensors"


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint."""

    kind: str  # type and shape of the whole, such as `float32 [3, 4]`; a file may have float32 values as bfloat16
    rectangles: dict[str, str] = field(default_factory=dict)  # text of each -> name of its file

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor. Raises ValueError for a damaged `kind`."""
        return tuple(int(size) for size in json.loads(self.kind.partition(" ")[2]))

    def stored(self) -> list[tuple[Rectangle, str]]:
        """Rectangles and their files. Raises ValueError for a damaged text."""
        return [(parse_rectangle(text), file) for text, file in self.rectangles.items()]


@dataclass(frozen=True)
class WrittenFiles:
    """The output of one rank."""

    tensors: dict[str, SavedTensor]  # all that the rank holds, with the rectangles that it wrote, which may be none
    files: dict[str, str]  # name -> size and checksum, such as `120 bytes, crc32 0a1b2c3d`


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of `manifest.json`."""

    format: str = FORMAT
    version: int = VERSION
    penstock: str  # version of the program that wrote it
    step: int  # number of optimizer steps
    tensors: dict[str, SavedTensor]
    files: dict[str, str]  # as in `WrittenFiles`, without the manifest

    @property
    def kinds(self) -> dict[str, str]:
        """Type and shape of each tensor, by name."""
        return {name: tensor.kind for name, tensor in self.tensors.items()}


def describe(parts: Mapping[str, ShardedTensor]) -> dict[str, str]:
    """Type and whole shape of each tensor, by name."""
    return {name: f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}" for name, part in parts.items()}


def merge(ranks: Sequence[WrittenFiles]) -> WrittenFiles:
    """The output of all ranks together. Asserts that each tensor is written exactly once."""
    tensors: dict[str, SavedTensor] = {}
    files: dict[str, str] = {}
    for written in ranks:
        for name, tensor in written.tensors.items():
            known = tensors.setdefault(name, SavedTensor(tensor.kind))
            assert known.kind == tensor.kind, f"{name} is {known.kind} on one rank, {tensor.kind} on another"
            twice = known.rectangles.keys() & tensor.rectangles.keys()
            assert not twice, f"{name}{min(twice)} is written by two ranks"
            known.rectangles.update(tensor.rectangles)
        assert not files.keys() & written.files.keys(), f"ranks wrote the same files: {files.keys()}"
        files.update(written.files)
    for name, tensor in tensors.items():
        reason = not_the_whole(tensor.shape, (rectangle for rectangle, _ in tensor.stored()))
        assert reason is None, f"the ranks together do not write {name} once, {tensor.kind}: {reason}"
    return WrittenFiles(tensors, files)


def write_manifest(folder: Path, step: int, written: WrittenFiles) -> None:
    """Write the manifest of a folder whose other files are complete."""
    manifest = asdict(Manifest(step=step, tensors=written.tensors, files=written.files, penstock=__version__))
    write_whole(folder / MANIFEST, json.dumps({**manifest, "seal": _seal(manifest)}, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest. A CheckpointError: the folder is none of Penstock, of another version, or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        pickled = any(folder.glob("*.metadata"))
        raise DamagedError(
            f"{folder} is not a Penstock checkpoint",
            got="a pickled one, which is never loaded" if pickled else f"no {MANIFEST}",
            allowed=f"a folder with {MANIFEST}",
            fix=_FIX.format(folder=folder),
        )
    content = parse_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        what = f"{folder} is not a Penstock checkpoint: its {MANIFEST} is something else's"
        raise DamagedError(what, fix=_FIX.format(folder=folder))
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint {folder} has another format version",
            got=content.get("version"),
            allowed=VERSION,
            fix=f"use the Penstock that wrote it ({content.get('penstock')})",
        )
    if content.pop("seal", None) != _seal(content):
        raise _damaged(path, "a checksum that does not match")
    try:
        manifest = msgspec.convert(content, Manifest)
        fault = next(_faults(manifest), None)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise _damaged(path, f"not what a manifest holds: {error!r}") from error
    if fault is not None:
        raise _damaged(path, fault)
    return manifest


def _faults(manifest: Manifest) -> Iterator[str]:
    for name in manifest.files:
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            yield f"a file outside of the folder: {name}"
    if FACTS not in manifest.files:
        yield f"it does not list {FACTS}"
    for name, tensor in manifest.tensors.items():
        stored = tensor.stored()
        reason = not_the_whole(tensor.shape, (rectangle for rectangle, _ in stored))
        if reason is not None:
            yield f"{name}, {tensor.kind}, is not whole: {reason}"
        if any(file not in manifest.files for _, file in stored):
            yield f"{name} is in a file that the manifest does not list"


def check_files(folder: Path, files: Mapping[str, str]) -> None:
    """Compare files with their checksums, from all of their bytes; a CheckpointError names one that is not as saved."""
    check_there(folder, files)  # first, because it is fast
    for name, expected in files.items():
        if (read := fingerprint(folder / name)) != expected:
            raise _damaged(folder / name, f"{read} instead of {expected}")


def check_there(folder: Path, files: Iterable[str]) -> None:
    """Refuse files that are missing, or links, by a CheckpointError."""
    for name in files:
        if not (folder / name).is_file():
            raise _damaged(folder / name, "no such file")
        if (folder / name).is_symlink():
            raise _damaged(folder / name, "a link to another place")


def check_no_more_tensors(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder with tensor files that are not in the manifest, by a CheckpointError."""
    for path in folder.glob(TENSORS):
        if path.name not in manifest.files:
            what = f"checkpoint {folder} holds a file that was not saved with it"
            raise DamagedError(what, got=path.name, fix=_FIX.format(folder=folder))


def check_tensors(folder: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Refuse a checkpoint with tensors of other kinds than wanted, by a CheckpointError that names the first one."""
    names = list(dict.fromkeys(name for name in [*wanted, *saved] if saved.get(name) != wanted.get(name)))
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise CheckpointError(
            f"checkpoint {folder} is of another model or optimizer: tensor {names[0]}{more}",
            got=saved.get(names[0], "none") + " in the checkpoint",
            allowed=wanted.get(names[0], "none") + " in this run",
        )


def files_of(manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Files of some tensors, and of the facts, in a fixed order."""
    files = {file for name in names for file in manifest.tensors[name].rectangles.values()}
    return sorted(files | {FACTS})


def parse_json(path: Path) -> Any:
    """Content of a JSON file of a checkpoint; a CheckpointError if it is not JSON."""
    try:
        return read_json(path)
    except ValueError as error:  # of which UnicodeDecodeError and JSONDecodeError are kinds
        raise _damaged(path, f"no JSON: {error}") from error


_FIX = "delete {folder} to go on from the checkpoint before it"


def _damaged(path: Path, got: str) -> DamagedError:
    return DamagedError(f"{path} is damaged", got=got, fix=_FIX.format(folder=path.parent))


def _seal(manifest: Mapping[str, Any]) -> str:
    """CRC-32 of a manifest's values, independent of indentation."""
    return f"crc32 {zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"


FILE_BYTES = 1 << 30
"""Size of a file of tensors. Ranks divide the files among themselves to check a checkpoint."""


Piece: TypeAlias = tuple[str, Rectangle, TensorEntry]
"""Name of a tensor, a rectangle of it, and how the rectangle is written."""


def write_parts(folder: Path, parts: Mapping[str, ShardedTensor], rank: int) -> WrittenFiles:
    """Write the rectangles of a rank, and sync them to disk. Raises OSError if a file cannot be written."""
    written = WrittenFiles({name: SavedTensor(kind) for name, kind in describe(parts).items()}, {})
    write_pieces(written, folder, _pieces(parts), f"tensors-{rank:05d}")
    return written


def write_pieces(
    written: WrittenFiles, folder: Path, pieces: Iterable[Piece], prefix: str, *, threads: int = 0
) -> None:
    """Write rectangles to files `PREFIX-00000.safetensors`, synced to disk, and add them to `written`.

    `threads` are those of `write_entries`. Raises OSError if a file cannot be written.
    """
    blocks: list[np.ndarray] = []
    for number, group in enumerate(in_files(pieces, lambda piece: piece[2].nbytes, FILE_BYTES)):
        file = f"{prefix}-{number:05d}.safetensors"
        for name, rectangle, _ in group:
            written.tensors[name].rectangles[str(rectangle)] = file
        entries = (entry for *_, entry in group)
        written.files[file] = write_entries(folder / file, entries, blocks=blocks, threads=threads)


def _pieces(parts: Mapping[str, ShardedTensor]) -> Iterator[Piece]:
    """Every non-empty rectangle that this rank writes."""
    for name, part in parts.items():
        check_part(name, part)
        for piece, values in part.decoded().views() if part.writes else ():
            rectangle = Rectangle(piece.whole, piece.sizes)
            if rectangle.elements:
                yield name, rectangle, tensor_entry(f"{name}{rectangle}", values)


def files_to_read(saved: Mapping[str, SavedTensor], into: Mapping[str, ShardedTensor]) -> list[str]:
    """Files that `fill_parts` reads, in the order of their first use."""
    files: dict[str, None] = {}
    for name, part in into.items():
        stored = saved[name].stored()
        for ours in (Rectangle(piece.whole, piece.sizes) for piece in part.pieces):
            files.update((file, None) for theirs, file in stored if ours.overlap(theirs) is not None)
    return list(files)


def fill_parts(
    folder: Path,
    saved: Mapping[str, SavedTensor],
    into: Mapping[str, ShardedTensor],
    expected: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Fill this rank's parts, on any device, from the elements that they need, after a check of `expected` files.

    Raises OSError if a file cannot be read, and DamagedError if it is not what the manifest says.
    """
    with CheckpointFiles(folder, expected) as files:
        for name, part in into.items():
            files.fill(name, part, saved[name])


MOST_OPEN = 256
"""Files that are open at once."""


class CheckpointFiles:
    """Files of a checkpoint that are open. Several threads may read at once.

    A thread compares those of `expected` with their checksums: a file before it is used, and the next one meanwhile. So
    a file is read from the disk once: the second reader finds it in the page cache. With `along` a file is checked
    while it is used, before the next one is; then what was read counts only after `finish`.
    """

    def __init__(self, folder: Path, expected: Mapping[str, str], *, along: bool = False) -> None:
        self._folder = folder
        self._left = dict(expected)
        self._along = along
        self._thread = ThreadPoolExecutor(1)
        self._checks: dict[str, Future[None]] = {}
        self._open = lru_cache(MOST_OPEN)(self._opened)
        self._lock = Lock()

    def __enter__(self) -> "CheckpointFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def finish(self) -> None:
        """Check the files that are left, and wait. Raises OSError or DamagedError."""
        self._begin_checks([*self._left])
        self._wait_for([*self._checks])

    def fill(self, name: str, part: ShardedTensor, saved: SavedTensor) -> None:
        """Fill a rank's part of a tensor. Raises as `fill_parts`."""
        check_part(name, part)
        room, stored = part.room(), saved.stored()
        for piece, values in room.views():
            ours = Rectangle(piece.whole, piece.sizes)
            for theirs, file in stored:
                if (common := ours.overlap(theirs)) is not None:
                    target = values[common.within(ours.begin)]
                    self._read(file, f"{name}{theirs}", theirs.sizes, common.within(theirs.begin), target)
        part.fill(room.tensor)

    def _read(self, file: str, key: str, sizes: tuple[int, ...], source: tuple[slice, ...], target: Tensor) -> None:
        """Fill `target` from a part of the rectangle `key`, which must have these sizes."""
        with self._lock:
            self._begin_checks([file, *([] if self._along else [*self._left][:2])])
            self._wait_for([other for other in self._checks if self._along == (other != file)])
            opened = self._open(file)
        stored = opened.tensors.get(key)
        is_exact = stored is not None and (stored.dtype == target.dtype or {stored.dtype, target.dtype} == _WIDENED)
        if stored is None or not is_exact or stored.shape != sizes:
            got = "none" if stored is None else f"{stored.dtype} {list(stored.shape)}".removeprefix("torch.")
            kind = f"{target.dtype} {list(sizes)}".removeprefix("torch.")
            raise _damaged(self._folder / file, f"{key} gives {got} instead of {kind}")
        opened.fill(key, source, target)

    def _opened(self, file: str) -> TensorFile:
        try:
            return TensorFile(self._folder / file)
        except ValueError as error:
            raise _damaged(self._folder / file, f"{error}") from error

    def _begin_checks(self, files: Sequence[str]) -> None:
        for file in files:
            if (checksum := self._left.pop(file, None)) is not None:
                self._checks[file] = self._thread.submit(check_files, self._folder, {file: checksum})

    def _wait_for(self, files: Sequence[str]) -> None:
        for file in files:
            self._checks[file].result()


_WIDENED = {torch.float32, torch.bfloat16}


def check_part(name: str, part: ShardedTensor) -> None:
    """Assert that the rectangles of a part cover its tensor."""
    elements = sum(prod(piece.sizes) for piece in part.pieces)
    assert elements == part.tensor.numel(), f"{name}: rectangles of {elements} elements in {part.tensor.numel()}"
