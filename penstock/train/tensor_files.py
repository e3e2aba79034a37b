"""Writes safetensors files tensor by tensor, with a checksum; the `safetensors` library reads them.

A file is a length (8 bytes, little-endian), a JSON header of that length, and the bytes of the tensors:

    {"weight[0:2, 0:3]": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

Unlike the library's writer, this needs no second pass for the checksum, syncs the open file, raises the system's errors
unchanged, and gives others read permission (docs/decisions/0012-any-layout.md).
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in the format."""

Item = TypeVar("Item")

ALIGNMENT = 64
"""Bytes. Spaces pad the header, so that tensors are aligned in a mapped file."""

BLOCK_BYTES = 4 << 20
"""Written and summed at once; fits the cache."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor of a file that `make` computes when it is written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.dtype.itemsize * prod(self.shape)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors of any device to a new file, and sync it to disk; they are copied to the host one by one.

    Returns the `fingerprint` of the intended content. Raises OSError if the file cannot be written.
    """
    return write_entries(
        path, [TensorEntry(name=n, dtype=x.dtype, shape=tuple(x.shape), make=x.detach) for n, x in tensors.items()]
    )


def write_entries(path: Path, entries: Iterable[TensorEntry], metadata: Mapping[str, str] | None = None) -> str:
    """`write_tensors` for tensors that are never in memory together, with `metadata` in the header."""
    entries = list(entries)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        described = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape)}
        header[entry.name] = described | {"data_offsets": [offset, offset + entry.nbytes]}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    checksum = size = 0
    with path.open("xb", buffering=0) as file:
        begin_of_file = memoryview(len(text).to_bytes(8, "little") + text)
        for view in chain([begin_of_file], map(_bytes_of, entries)):  # one tensor at a time is in memory
            for begin in range(0, len(view), BLOCK_BYTES):
                part = view[begin : begin + BLOCK_BYTES]
                checksum = zlib.crc32(part, checksum)
                size += len(part)
                while part:  # an unbuffered write may write a part only
                    part = part[file.write(part) :]
        os.fsync(file.fileno())
    return describe_file(size, checksum)


def in_files(items: Iterable[Item], nbytes: Callable[[Item], int], most_bytes: int) -> Iterator[list[Item]]:
    """Items grouped into files of at most this size, in order; a larger item has its own file."""
    group: list[Item] = []
    size = 0
    for item in items:
        if group and size + nbytes(item) > most_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes(item)
    if group:
        yield group


def fingerprint(path: Path) -> str:
    """Size and checksum of a file, from all of its bytes. Raises OSError if it cannot be read."""
    checksum = size = 0
    block = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            checksum = zlib.crc32(block[:count], checksum)
            size += count
    return describe_file(size, checksum)


def describe_file(size: int, checksum: int) -> str:
    """Such as `120 bytes, crc32 0a1b2c3d`."""
    return f"{size} bytes, crc32 {checksum:08x}"


def _bytes_of(entry: TensorEntry) -> memoryview:
    """Values of a tensor, row by row."""
    tensor = entry.make()
    assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), f"{entry.name} is not what it said"
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
