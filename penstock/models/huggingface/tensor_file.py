"""Reads and writes safetensors files by offset: whole tensors or parts of them, of any device.

A file is a length (8 bytes, little-endian), a JSON header of that length, and the bytes of the tensors without gaps:

    {"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

The `safetensors` library maps files: their pages count as memory of the process, and each is a fault when it is first
used. Reads of many megabytes run at the speed of the disk, in any number of threads. A file that is read once is read
past the page cache (`direct`), unless it is there already: making pages costs more processor time than all else.

Unlike the library's writer, this one needs no second pass for the checksum, syncs the open file, raises the system's
errors unchanged, and gives others read permission (docs/decisions/0012-any-layout.md). A few blocks of host memory are
enough for tensors of any size: threads sum and write blocks while the next one is filled. Large files are written past
the page cache (docs/decisions/0167-checkpoints-at-size.md).
"""

import errno
import fcntl
import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from math import prod
from mmap import mmap
from pathlib import Path
from threading import local
from types import MappingProxyType
from typing import TypeAlias, TypeVar

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

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

READ_BYTES = 16 << 20  # read at once where values need another type, device or order

PAGE_BYTES = 4096
"""Past the page cache, sizes are multiples of it. A written file of another size is cut after its last block."""

_MOST_HEADER_BYTES = 100_000_000
_DIRECT, _CACHED = vars(os).get("O_DIRECT", 0), vars(os).get("RWF_NOWAIT", 0)  # Linux only
_ROOM = local()
_SAMPLES = 16


Item = TypeVar("Item")

ALIGNMENT = 64  # bytes. Spaces pad the header, so that tensors are aligned in a mapped file

_SUMMED_BYTES = 4 << 20  # read and summed at once; fits the cache
BLOCK_BYTES = 16 << 20  # written at once
WRITES = 3  # blocks: one is filled while the others are summed and written
DIRECT_BYTES = 64 << 20  # size of a file from which on it is written past the page cache
PART_BYTES = 16 << 20  # of a tensor that is read and written in parts (`parts_of`)
AHEAD_BYTES = 64 << 20  # made before they are written, unless one part is larger

Make: TypeAlias = Callable[[], Tensor]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
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
        ahead = offset % PAGE_BYTES
        length = min(READ_BYTES, ahead + len(room) + -(ahead + len(room)) % PAGE_BYTES)
        count = os.preadv(self._direct.fileno(), [memoryview(buffer)[:length]], offset - ahead) - ahead
        count = min(max(count, 0), len(room))
        np.copyto(np.frombuffer(room, np.uint8)[:count], np.frombuffer(buffer, np.uint8)[ahead : ahead + count])
        return count


def _opened_directly(path: Path) -> FileIO | None:
    """The file past the page cache; None if it is there, or its file system has no such reads."""
    file: FileIO = open_file(path, buffering=0)
    page = memoryview(mmap(-1, PAGE_BYTES))
    size = os.fstat(file.fileno()).st_size
    try:
        if all(_is_cached(file, page, sample * size // _SAMPLES) for sample in range(_SAMPLES)):
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


# --------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor of a file; `parts` compute its values, some rows each, when they are written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Sequence[Make]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


def tensor_entry(name: str, tensor: Tensor) -> TensorEntry:
    """A tensor that is in memory, on any device; it is copied to the host block by block when it is written."""
    return TensorEntry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), parts=(tensor.detach,))


def write_entries(
    path: Path,
    entries: Iterable[TensorEntry],
    metadata: Mapping[str, str] | None = None,
    blocks: list[np.ndarray] | None = None,
    threads: int = 0,
    summed: bool = True,
) -> str:
    """Write tensors, which need not be in memory together, to a new file, and sync it to disk.

    `metadata` stands in the header. `blocks` is the memory of the file before, to be used again, at first an empty
    list. So many `threads` make the next parts while others are written; 0 makes each when it is needed. Returns the
    `fingerprint` of the intended content; without `summed` the checksum is that of no bytes, for readers that have
    none. Raises OSError if the file cannot be written.
    """
    entries = list(entries)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        described = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape)}
        header[entry.name] = described | {"data_offsets": [offset, offset + entry.nbytes]}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    begin = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    written, size, checksum = 0, begin.numel() + offset, [0]
    with (
        path.open("xb", buffering=0) as file,
        ThreadPoolExecutor(WRITES) as writers,
        ThreadPoolExecutor(1) as summing,  # one thread, because each sum begins with the one before
    ):
        if size >= DIRECT_BYTES:
            _set_direct(file, True)
        is_direct = _is_direct(file)
        running = deque[list[Future[None]]]()
        for block in _blocks(chain([begin], _made(entries, threads)), size, blocks):
            padding = -len(block) % PAGE_BYTES if is_direct else 0
            whole = memoryview(block.obj)[: len(block) + padding]
            tasks = [_start(writers, _write, file, whole, written)]
            tasks += [_start(summing, _sum, block, checksum)] if summed else []
            running.append(tasks)
            written += len(block)
            if len(running) == WRITES:
                _wait(running.popleft())
        for tasks in running:
            _wait(tasks)
        if is_direct:
            file.truncate(size)
        assert written == size, f"{path} has {written} of {size} bytes"
        os.fsync(file.fileno())
    return describe_file(size, checksum[0])


def _sum(block: memoryview, checksum: list[int]) -> None:
    checksum[0] = zlib.crc32(block, checksum[0])


def _wait(tasks: Iterable[Future[None]]) -> None:
    for task in tasks:
        task.result()


def _blocks(parts: Iterable[Tensor], size: int, blocks: list[np.ndarray] | None) -> Iterator[memoryview]:
    """Bytes of tensors in blocks of host memory. `WRITES` blocks later a block is overwritten."""
    blocks, block_bytes = [] if blocks is None else blocks, min(BLOCK_BYTES, size + -size % PAGE_BYTES)
    if not blocks or blocks[0].size < block_bytes:
        blocks[:] = [np.frombuffer(mmap(-1, block_bytes), np.uint8) for _ in range(WRITES)]
    number = filled = 0
    for part in parts:
        while part.numel():
            room = blocks[number][filled : filled + part.numel()]
            _copy(part[: room.size], room)
            part, filled = part[room.size :], filled + room.size
            if filled == blocks[number].size:
                yield blocks[number].data
                number, filled = (number + 1) % WRITES, 0
    if filled:
        yield blocks[number].data[:filled]


def _copy(source: Tensor, target: np.ndarray) -> None:
    """Copy bytes to host memory.

    By NumPy, because an operator of PyTorch starts OpenMP threads of its own in each thread that calls it, after which
    those of the training thread wait asleep: steps took twice as long (docs/decisions/0167-checkpoints-at-size.md).
    """
    if source.device.type == "cpu":
        np.copyto(target, source.numpy())
    else:
        torch.from_numpy(target).copy_(source)


def _start(threads: ThreadPoolExecutor, task: Callable[..., None], *arguments: object) -> Future[None]:
    """Do a task in a thread, or here if no thread can start any more, because the interpreter ends."""
    with suppress(RuntimeError):
        return threads.submit(task, *arguments)
    done = Future[None]()
    task(*arguments)
    done.set_result(None)
    return done


def _write(file: FileIO, block: memoryview, offset: int) -> None:
    while block:
        is_direct = _is_direct(file)  # before the write: another thread's failure may end it meanwhile
        try:
            count = os.pwrite(file.fileno(), block, offset)  # which may write a part only
            block, offset = block[count:], offset + count
        except OSError as error:  # of a file system that takes other sizes past the page cache, or none
            if error.errno != errno.EINVAL or not is_direct:
                raise
            _set_direct(file, False)


def _is_direct(file: FileIO) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & _DIRECT)


def _set_direct(file: FileIO, direct: bool) -> None:
    """Write past the page cache, which not every file system allows, or not."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, flags | _DIRECT if direct else flags & ~_DIRECT)


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
    block = memoryview(bytearray(_SUMMED_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            checksum = zlib.crc32(block[:count], checksum)
            size += count
    return describe_file(size, checksum)


def describe_file(size: int, checksum: int) -> str:
    """Such as `120 bytes, crc32 0a1b2c3d`."""
    return f"{size} bytes, crc32 {checksum:08x}"


def parts_of(sizes: Sequence[int], itemsize: int) -> list[tuple[int, int]]:
    """(first, end) of dim 0 for parts of about `PART_BYTES`."""
    rows, *rest = sizes
    step = max(1, PART_BYTES // max(1, itemsize * prod(rest)))
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _made(entries: Iterable[TensorEntry], threads: int) -> Iterator[Tensor]:
    parts = ((entry, part) for entry in entries for part in entry.parts)
    if not threads:
        yield from (_bytes_of(*part) for part in parts)
        return
    of_process = torch.get_num_threads()
    # Each thread computes alone: OpenMP teams of several threads would wait for each other on the same cores.
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as makers:
        ahead = deque[tuple[int, Future[Tensor]]]()
        try:
            for entry, part in parts:
                nbytes = entry.nbytes // len(entry.parts)
                while ahead and sum(size for size, _ in ahead) + nbytes > AHEAD_BYTES:
                    yield ahead.popleft()[1].result()
                ahead.append((nbytes, makers.submit(_bytes_of, entry, part)))
            while ahead:
                yield ahead.popleft()[1].result()
        finally:
            makers.shutdown(cancel_futures=True)
            torch.set_num_threads(of_process)


def _bytes_of(entry: TensorEntry, part: Make) -> Tensor:
    """Values of a part, row by row, on its device."""
    tensor = part().detach()
    assert tensor.dtype == entry.dtype, f"{entry.name} is not what it said"
    if tensor.device.type == "cpu" and not tensor.is_contiguous():
        tensor = torch.from_numpy(np.ascontiguousarray(tensor.view(_INTEGERS[tensor.itemsize]).numpy()))
    return tensor.contiguous().view(-1).view(torch.uint8)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes; NumPy knows no bfloat16
