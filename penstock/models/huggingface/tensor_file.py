"""Reads safetensors files by offset: whole tensors, or parts of them straight into other tensors.

A file is a length (8 bytes, little-endian), a JSON header of that length, and the bytes of the tensors without gaps:

    {"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

The `safetensors` library maps files: their pages count as memory of the process, and each is a fault when it is first
used. Reads of many megabytes run at the speed of the disk, in any number of threads. A file that is read once is read
past the page cache (`direct`), unless it is there already: making pages costs more processor time than all else.
"""

import errno
import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from math import prod
from mmap import mmap
from pathlib import Path
from threading import local
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from penstock.base.files import open_file, parse_json

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
"""Types by their names in the format."""

READ_BYTES = 16 << 20
"""Read at once where values need another type, device or order."""

_MOST_HEADER_BYTES = 100_000_000
_PAGE_BYTES = 4096
_DIRECT, _CACHED = vars(os).get("O_DIRECT", 0), vars(os).get("RWF_NOWAIT", 0)  # Linux only
_ROOM = local()
_SAMPLES = 16


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.dtype.itemsize * prod(self.shape)


class TensorFile:
    """An open file; `tensors` are those of its header. Several threads may read at once, `direct` if it is read once.

    Raises OSError if the file cannot be read, and ValueError if it is not what the format says.
    """

    def __init__(self, path: Path, *, direct: bool = False) -> None:
        self._file = open_file(path, buffering=0)
        self._direct = _opened_directly(path) if direct and _DIRECT and _CACHED else None
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
        self.tensors = _tensors_of(parse_json(self._file.read(length)), 8 + length, size)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or rows [first, end) of its dim 0. Raises OSError, also for a file that is cut."""
        stored = self.tensors[name]
        first, end = rows or (0, stored.shape[0] if stored.shape else 1)
        shape = (end - first, *stored.shape[1:]) if stored.shape else ()
        values = torch.empty(shape, dtype=stored.dtype)
        self.fill(name, (slice(first, end), *(slice(0, size) for size in stored.shape[1:])), values)
        return values

    @torch.no_grad()
    def fill(self, name: str, index: tuple[slice, ...], target: Tensor) -> None:
        """Fill a tensor of any type and device from a part of a stored one; `index` has begin and end for each dim."""
        stored = self.tensors[name]
        shape, offset = stored.shape or (1,), stored.offset
        if target.numel() == 0:
            return
        index, target = (index, target) if stored.shape else ((slice(0, 1),), target.view(1))
        while len(shape) > 1 and index[0].stop - index[0].start == 1:  # the part lies within one index of this dim
            offset += index[0].start * prod(shape[1:]) * stored.dtype.itemsize
            shape, index, target = shape[1:], index[1:], target[0]
        row_bytes = prod(shape[1:]) * stored.dtype.itemsize
        offset += index[0].start * row_bytes
        whole_rows = tuple(target.shape[1:]) == shape[1:]
        if whole_rows and target.is_cpu and target.dtype == stored.dtype and target.is_contiguous():
            self._read_into(target, offset)
            return
        count = max(1, READ_BYTES // row_bytes)
        for part in target.split(count):
            block = torch.empty((len(part), *shape[1:]), dtype=stored.dtype)
            self._read_into(block, offset)
            part.copy_(block[(slice(None), *index[1:])])
            offset += len(part) * row_bytes

    def _read_into(self, target: Tensor, offset: int) -> None:
        room = target.detach().view(-1).view(torch.uint8).numpy().data
        while room:
            count = self._read_some(room, offset)
            if count == 0:
                raise OSError(errno.EIO, "it is shorter than its header says")
            room, offset = room[count:], offset + count

    def _read_some(self, room: memoryview, offset: int) -> int:
        """Read as the file is read: past the page cache by way of a buffer, at whole pages. Returns bytes."""
        if self._direct is None:
            return os.preadv(self._file.fileno(), [room], offset)
        buffer: mmap = vars(_ROOM).setdefault("buffer", mmap(-1, READ_BYTES))
        ahead = offset % _PAGE_BYTES
        most = min(READ_BYTES, ahead + len(room) + -(ahead + len(room)) % _PAGE_BYTES)
        count = os.preadv(self._direct.fileno(), [memoryview(buffer)[:most]], offset - ahead) - ahead
        count = min(max(count, 0), len(room))
        np.copyto(np.frombuffer(room, np.uint8)[:count], np.frombuffer(buffer, np.uint8)[ahead : ahead + count])
        return count


def _opened_directly(path: Path) -> FileIO | None:
    """The file past the page cache; None if it is there, or its file system has no such reads."""
    file: FileIO = open_file(path, buffering=0)
    page = memoryview(mmap(-1, _PAGE_BYTES))
    size = os.fstat(file.fileno()).st_size
    try:
        if all(_is_cached(file, page, place * size // _SAMPLES) for place in range(_SAMPLES)):
            file.close()
            return None
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | _DIRECT)
        os.preadv(file.fileno(), [page], 0)
    except OSError:
        file.close()
        return None
    return file


def _is_cached(file: FileIO, page: memoryview, offset: int) -> bool:
    with suppress(BlockingIOError):
        return os.preadv(file.fileno(), [page], offset, _CACHED) > 0
    return False


def _tensors_of(header: object, begin: int, size: int) -> dict[str, StoredTensor]:
    """The tensors of a header, whose bytes fill the file from `begin` to its `size`."""
    if not isinstance(header, dict):
        raise ValueError("a header that is no table")
    header.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    ends: list[tuple[int, int]] = []
    for name, entry in header.items():
        try:
            shape, (first, end) = tuple(entry["shape"]), entry["data_offsets"]
            stored = StoredTensor(DTYPES[entry["dtype"]], shape, begin + first)
            is_sound = all(type(number) is int and number >= 0 for number in (*shape, first, end))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"a header whose {name} is no tensor of a known type: {error!r}") from error
        if not is_sound or end - first != stored.nbytes:
            raise ValueError(f"a header whose {name} has bytes {first} to {end} for {entry['dtype']} {list(shape)}")
        tensors[name] = stored
        ends.append((stored.offset, begin + end))
    position = begin
    for first, end in sorted(ends):
        if first != position:
            raise ValueError(f"a header with a gap or an overlap at byte {position}")
        position = end
    if position != size:
        raise ValueError(f"tensors up to byte {position:,} in a file of {size:,}")
    return tensors
