"""Parts of tensors to files and back: what a rank writes, and what another rank, of any layout, reads of it.

    rank 0 wrote    w[0:4, 0:8]     tensors-00000-00000.safetensors
    rank 1 wrote    w[4:8, 0:8]     tensors-00001-00000.safetensors
    we hold         w[2:6, 0:4]     so we read rows 2 and 3 of the first and 0 and 1 of the second, columns 0 to 3

A file is opened once, and of a rectangle only what is needed is read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.layout.rectangles import Rectangle
from penstock.parallel.shard import ShardedTensor
from penstock.train.manifest import SavedTensor, Written, describe
from penstock.train.tensor_files import write_tensors

FILE_BYTES = 1 << 30
"""Tensors that share a file. Files are what ranks divide among themselves to check a checkpoint."""


@dataclass(frozen=True)
class Read:
    """What one of our rectangles gets from one in a file.

    Attributes:
        key: of the rectangle in the file.
        source: the index of what is needed, in it.
        target: where that goes: a view of our tensor.
    """

    key: str
    source: tuple[slice, ...]
    target: Tensor


def write_parts(folder: Path, parts: Mapping[str, ShardedTensor], rank: int) -> Written:
    """Write what this rank has to write, and sync it to disk.

    Args:
        folder: of the checkpoint.
        parts: all that the rank holds.
        rank: part of the names of files.

    Raises:
        OSError: a file cannot be written.
    """
    written = Written({name: SavedTensor(kind) for name, kind in describe(parts).items()}, {})
    file: dict[str, Tensor] = {}

    def flush() -> None:
        name = _file_name(rank, len(written.files))
        written.files[name] = write_tensors(folder / name, file)
        file.clear()

    for name, rectangle, tensor in _rectangles(parts):
        if file and sum(other.nbytes for other in file.values()) + tensor.nbytes > FILE_BYTES:
            flush()
        written.tensors[name].rectangles[str(rectangle)] = _file_name(rank, len(written.files))
        file[f"{name}{rectangle}"] = tensor
    if file:
        flush()
    return written


def _file_name(rank: int, number: int) -> str:
    return f"tensors-{rank:05d}-{number:05d}.safetensors"


def _rectangles(parts: Mapping[str, ShardedTensor]) -> Iterator[tuple[str, Rectangle, Tensor]]:
    """Name, place in the whole and values of every rectangle that we write; empty ones are left out."""
    for name, part in parts.items():
        check_part(name, part)
        for piece in part.pieces:
            rectangle = Rectangle(piece.whole, piece.sizes)
            if part.writes and rectangle.elements:
                yield name, rectangle, part.tensor[Rectangle(piece.here, piece.sizes).within((0,) * len(piece.here))]


@torch.no_grad()
def fill_parts(folder: Path, saved: Mapping[str, SavedTensor], into: Mapping[str, ShardedTensor]) -> None:
    """Read what this rank holds.

    Args:
        folder: of the checkpoint.
        saved: every tensor of `into`, and where its rectangles are.
        into: filled in place, on any device.

    Raises:
        OSError: a file cannot be read.
        SafetensorError: a file is not what it should be.
    """
    files: dict[str, list[Read]] = {}
    for name, part in into.items():
        check_part(name, part)
        for file, read in _reads(name, part, saved[name]):
            files.setdefault(file, []).append(read)
    for file, reads in files.items():
        with safe_open(folder / file, framework="pt") as content:
            for read in reads:
                read.target.copy_(content.get_slice(read.key)[read.source])


def _reads(name: str, part: ShardedTensor, saved: SavedTensor) -> Iterator[tuple[str, Read]]:
    """Files, and what is to be read of them, for one tensor."""
    places = saved.places()
    for piece in part.pieces:
        ours = Rectangle(piece.whole, piece.sizes)
        # Where the whole tensor begins, as seen from the first element of ours.
        origin = tuple(whole - here for whole, here in zip(piece.whole, piece.here, strict=True))
        for theirs, file in places:
            common = ours.overlap(theirs)
            if common is not None:
                target = part.tensor.detach()[common.within(origin)]
                yield file, Read(f"{name}{theirs}", common.within(theirs.begin), target)


def check_part(name: str, part: ShardedTensor) -> None:
    """Assert that the rectangles of a part are as many elements as it has."""
    elements = sum(prod(piece.sizes) for piece in part.pieces)
    assert elements == part.tensor.numel(), f"{name}: rectangles of {elements} elements in {part.tensor.numel()}"
