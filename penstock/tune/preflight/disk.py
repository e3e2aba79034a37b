"""The disk where runs are kept: is it writable, is there room, how fast is it, and does its clock agree with ours.

A file of some megabytes is written, put on disk, dropped from the page cache and read back, and then removed.
Checkpoints are written by many ranks at once and a shared file system is busy with others, so the speed is a first look
only.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.tune.preflight.check import Check, fine

FILE_BYTES = 256 << 20
PIECE_BYTES = 8 << 20
LONGEST_SECONDS = 2.0
"""Writing ends here however little was written."""

FREE_BYTES = 10_000_000_000
"""Room for a small run, where nobody has said which run it will be."""

SLOW = 100e6
"""Bytes per second below which the checkpoint of a model of a few billion parameters takes minutes."""

APART_SECONDS = 2.0
"""Clocks that differ by more make files look newer than they are."""


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """What the disk is like.

    Attributes:
        folder: that was looked at.
        trouble: why it cannot be written, or empty.
        free_bytes: of it.
        written: bytes per second, until they are on disk.
        read: bytes per second, from disk where the page cache could be dropped.
        ahead_seconds: how far the file system's clock is ahead of ours.
    """

    folder: Path
    trouble: str = ""
    free_bytes: int = 0
    written: float = 0.0
    read: float = 0.0
    ahead_seconds: float = 0.0


def read_disk(folder: Path, size: int = FILE_BYTES) -> DiskFacts:
    """Facts of the disk that holds a folder, or will hold it; what is not there yet is not made.

    Args:
        folder: where runs are kept.
        size: bytes of the file that is written.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".penstock-preflight-", buffering=0) as file:
            began, before = time.perf_counter(), time.time()
            size = _write(file.fileno(), size)
            written = size / (time.perf_counter() - began)
            stamp, after = os.fstat(file.fileno()).st_mtime, time.time()
            return DiskFacts(
                folder=there,
                free_bytes=shutil.disk_usage(there).free,
                written=written,
                read=_read(file.fileno(), size),
                ahead_seconds=max(0.0, stamp - after) + min(0.0, stamp - before),
            )
    except OSError as error:
        return DiskFacts(folder=there, trouble=error.strerror or str(error))


def _write(file: int, size: int) -> int:
    """Bytes that were written and are on disk."""
    piece, done, began = os.urandom(PIECE_BYTES), 0, time.perf_counter()
    while done < size and time.perf_counter() - began < LONGEST_SECONDS:
        done += os.write(file, piece[: size - done])
    os.fsync(file)
    return done


def _read(file: int, size: int) -> float:
    """Bytes per second."""
    if sys.platform == "linux":
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(file, 0, os.SEEK_SET)
    began = time.perf_counter()
    while os.read(file, PIECE_BYTES):
        pass
    return size / (time.perf_counter() - began)


def judge_disk(facts: DiskFacts, checkpoint_bytes: int = 0, kept: int = 0) -> list[Check]:
    """Everything about the disk.

    Args:
        facts: of it.
        checkpoint_bytes: of one checkpoint of the run that is meant; 0 if none is.
        kept: checkpoints that the run keeps, beside the one that it writes.
    """
    if facts.trouble:
        return [
            Check(
                area="disk",
                name=f"{facts.folder}",
                status="failed",
                got=facts.trouble,
                expected="a folder that can be written",
                fix="record.folder=ANOTHER, or its permissions",
            )
        ]
    return [_room(facts, checkpoint_bytes, kept), _speed(facts, checkpoint_bytes), *_clocks(facts)]


def _room(facts: DiskFacts, checkpoint_bytes: int, kept: int) -> Check:
    wanted = max(FREE_BYTES, checkpoint_bytes * (kept + 1))
    got = f"{facts.free_bytes / 1e9:,.0f} GB free in {facts.folder}"
    if facts.free_bytes >= wanted:
        return fine("disk", "room", got)
    return Check(
        area="disk",
        name="room",
        status="failed" if facts.free_bytes < checkpoint_bytes else "warning",
        got=got,
        expected=f">= {wanted / 1e9:,.0f} GB"
        + (f": {kept + 1} checkpoints of {checkpoint_bytes / 1e9:,.1f} GB" if checkpoint_bytes else ""),
        fix="record.folder=ANOTHER, or checkpoint.keep=1",
    )


def _speed(facts: DiskFacts, checkpoint_bytes: int) -> Check:
    got = f"writes {facts.written / 1e6:,.0f} MB/s, reads {facts.read / 1e6:,.0f} MB/s"
    if checkpoint_bytes:
        seconds = checkpoint_bytes / facts.written
        got += f"; a checkpoint of {checkpoint_bytes / 1e9:,.1f} GB by one writer in {seconds:,.0f} s"
    if min(facts.written, facts.read) >= SLOW:
        return fine("disk", "speed", got)
    return Check(
        area="disk",
        name="speed",
        status="warning",
        got=got,
        expected=f">= {SLOW / 1e6:.0f} MB/s",
        fix="record.folder on a faster file system, or a larger checkpoint.every",
    )


def _clocks(facts: DiskFacts) -> Iterator[Check]:
    if abs(facts.ahead_seconds) <= APART_SECONDS:
        return
    way = "ahead of" if facts.ahead_seconds > 0 else "behind"
    yield Check(
        area="disk",
        name="its clock",
        status="warning",
        got=f"{abs(facts.ahead_seconds):.1f} s {way} this machine's",
        expected="the same time",
        fix="let the file server and this machine keep their clocks by the same source",
    )
