"""The machine around the GPUs: cores, NUMA nodes, memory, limits, clock, and the disk of the runs.

/proc/meminfo                           available memory
/sys/fs/cgroup/memory.max               memory limit of a container
/proc/sys/kernel/numa_balancing         the kernel moves pages to the cores that use them, which stops their threads
/sys/devices/system/cpu/cpu0/cpufreq    clock governor
/sys/class/infiniband                   whether memory is registered for the network
adjtimex(2)                             whether the clock is synchronized

The disk check writes a file of some megabytes, syncs it, drops it from the page cache, reads it back, and removes it.
Many ranks write checkpoints at once, and a shared file system has other users, so the speed is only a first estimate.
"""

import ctypes
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.parallel.launch.host import ROOT, free_host_bytes, numa_nodes, read_text, usable_cores
from penstock.tune.preflight.check import PreflightCheck, Status, fine

CORES_EACH = 4  # of a rank: one for the model, one for its backward pass, the others for data and collectives

OPEN_FILES, FEWEST_OPEN_FILES = 65_536, 1024
"""A rank of a large cluster has sockets to many others beside its data files; the second number is too small for a
node's own ranks and files. It suffices without GPUs.
"""

SHARED_BYTES, LEAST_SHARED_BYTES = 8 << 30, 1 << 30
"""NCCL's buffers between ranks without a direct link. A container has 64 MiB by default."""

MEMORY_SHARE = 0.5  # of the GPUs' memory that the host should have free, because checkpoints are copied there first
LEAST_BYTES = 4 << 30  # a rank's libraries
CLOCK_ERROR = 5  # result of adjtimex for an unsynchronized clock


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """State of the machine."""

    gpus: int
    gpu_bytes: int  # memory of all GPUs
    cores: int  # available to this process
    numa_nodes: int
    numa_balancing: bool  # the kernel moves pages
    free_bytes: int | None  # of memory, within the limits of this process; None if unknown
    open_files: int | None  # limit; None is unlimited
    locked_bytes: int | None  # limit; None is unlimited
    has_infiniband: bool  # the network reads memory directly
    shared_bytes: int | None  # of /dev/shm; None without one
    governor: str  # of the first core's clock, or empty
    clock_is_kept: bool | None  # the clock is synchronized; None if unknown


def read_host(gpus: int, gpu_bytes: int, root: Path = ROOT) -> HostFacts:
    """Facts of this machine; `root` is the root of the system's files."""
    shared = root / "dev/shm"
    return HostFacts(
        gpus=gpus,
        gpu_bytes=gpu_bytes,
        cores=usable_cores(root),
        numa_nodes=numa_nodes(root),
        numa_balancing=read_text(root / "proc/sys/kernel/numa_balancing") not in ("", "0"),
        free_bytes=free_host_bytes(root),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        has_infiniband=any((root / "sys/class/infiniband").glob("*")),
        shared_bytes=shutil.disk_usage(shared).total if shared.is_dir() else None,
        governor=read_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        clock_is_kept=_clock_is_kept(),
    )


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _clock_is_kept() -> bool | None:
    """Ask the kernel whether its clock is synchronized; nothing is changed."""
    if sys.platform != "linux":
        return None
    ask = ctypes.CDLL(None, use_errno=True).adjtimex
    state = ask(ctypes.create_string_buffer(512))  # struct timex, all zeros: modes = 0 only reads
    return None if state < 0 else state != CLOCK_ERROR


def judge_host(facts: HostFacts) -> list[PreflightCheck]:
    judges = (_cores, _numa, _memory, _open_files, _locked, _shared, _governor, _clock)
    return [check for judge in judges if (check := judge(facts)) is not None]


def _cores(facts: HostFacts) -> PreflightCheck:
    each = facts.cores / max(1, facts.gpus)
    if facts.gpus == 0 or each >= CORES_EACH:
        return fine("host", "cores", f"{facts.cores}")
    got, expected = f"{facts.cores} for {facts.gpus} GPUs", f">= {CORES_EACH * facts.gpus}"
    fix = "ask for more: --cpus-per-task of Slurm, limits of the container, taskset"
    return PreflightCheck("host", "cores", "failed" if each < 1 else "warning", got, expected, fix)


def _numa(facts: HostFacts) -> PreflightCheck | None:
    if facts.numa_nodes > 1 and facts.numa_balancing and facts.gpus:
        got = f"on, with {facts.numa_nodes} nodes"
        expected = "off: ranks stay on their node already, and moving pages stops the threads that use them"
        return PreflightCheck("host", "NUMA balancing", "warning", got, expected, "sysctl kernel.numa_balancing=0")
    return fine("host", "NUMA nodes", f"{facts.numa_nodes}") if facts.numa_nodes else None


def _memory(facts: HostFacts) -> PreflightCheck | None:
    if facts.free_bytes is None:
        return None
    got = f"{facts.free_bytes / 1e9:.0f} GB free"
    wanted = max(LEAST_BYTES * max(1, facts.gpus), MEMORY_SHARE * facts.gpu_bytes)
    if facts.free_bytes >= wanted:
        return fine("host", "memory", got)
    reason, fix = "for a rank", "end other programs"
    if facts.gpus:
        reason, fix = "half of the GPUs' memory, for checkpoints on their way to disk", f"{fix}, ask for more, or "
        fix += "checkpoint.asynchronous=false"
    status: Status = "failed" if facts.free_bytes < LEAST_BYTES / 4 else "warning"
    return PreflightCheck("host", "memory", status, got, f">= {wanted / 1e9:.0f} GB: {reason}", fix)


def _open_files(facts: HostFacts) -> PreflightCheck:
    files, wanted = facts.open_files, OPEN_FILES if facts.gpus else FEWEST_OPEN_FILES
    if files is None or files >= wanted:
        return fine("host", "open files", "any number" if files is None else f"{files:,}")
    status: Status = "failed" if facts.gpus and files < FEWEST_OPEN_FILES else "warning"
    fix = f"ulimit -n {wanted}, or nofile in /etc/security/limits.conf, or --ulimit nofile of the container"
    return PreflightCheck("host", "open files", status, f"{files:,}", f">= {wanted:,}", fix)


def _locked(facts: HostFacts) -> PreflightCheck | None:
    if facts.locked_bytes is None:
        return fine("host", "locked memory", "any amount")
    if not facts.has_infiniband:
        return None
    got = f"{facts.locked_bytes / 1e6:.3g} MB"
    expected = "any amount: InfiniBand and RoCE read memory that stays in place"
    fix = "ulimit -l unlimited, or memlock in /etc/security/limits.conf, or --ulimit memlock=-1 of the container"
    return PreflightCheck("host", "locked memory", "failed", got, expected, fix)


def _shared(facts: HostFacts) -> PreflightCheck | None:
    shared = facts.shared_bytes
    if shared is None:
        return None
    got = f"{shared / 1e9:.3g} GB"
    if facts.gpus < 2 or shared >= SHARED_BYTES:
        return fine("host", "shared memory", got)
    status: Status = "failed" if shared < LEAST_SHARED_BYTES else "warning"
    fix = "--shm-size=16g or --ipc=host of the container, or an emptyDir of medium Memory at /dev/shm"
    return PreflightCheck("host", "shared memory", status, f"{got} in /dev/shm", f">= {SHARED_BYTES / 1e9:.3g} GB", fix)


def _governor(facts: HostFacts) -> PreflightCheck | None:
    if not facts.governor or facts.governor == "performance" or not facts.gpus:
        return fine("host", "clock of cores", facts.governor) if facts.governor else None
    expected = "performance: a host that is slow to wake starts kernels late"
    fix = "cpupower frequency-set -g performance"
    return PreflightCheck("host", "clock of cores", "warning", facts.governor, expected, fix)


def _clock(facts: HostFacts) -> PreflightCheck | None:
    if facts.clock_is_kept is None or facts.clock_is_kept:
        return fine("host", "time", "kept right") if facts.clock_is_kept else None
    expected = "chrony, systemd-timesyncd or the like: machines are compared by their times"
    got, fix = "the clock is not synchronized", "timedatectl set-ntp true"
    return PreflightCheck("host", "time", "warning", got, expected, fix)


FILE_BYTES = 256 << 20
PIECE_BYTES = 8 << 20
LONGEST_SECONDS = 2.0  # time limit of the write
FREE_BYTES = 10_000_000_000  # space for a small run, if the run is unknown
SLOW = 100e6  # bytes per second below which a checkpoint of a few billion parameters takes minutes
APART_SECONDS = 2.0  # a larger difference of the clocks makes files look newer than they are


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """State of the disk."""

    folder: Path
    trouble: str = ""  # reason why it cannot be written, or empty
    free_bytes: int = 0
    written: float = 0.0  # bytes per second, synced
    read: float = 0.0  # bytes per second, from disk if the page cache could be dropped
    ahead_seconds: float = 0.0  # of the file system's clock over ours


def read_disk(folder: Path, size: int = FILE_BYTES) -> DiskFacts:
    """Facts of the disk of a folder, which may not exist yet; writes a file of `size` bytes."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".penstock-preflight-", buffering=0) as file:
            began, before = time.perf_counter(), time.time()
            size = _write_file(file.fileno(), size)
            written = size / (time.perf_counter() - began)
            stamp, after = os.fstat(file.fileno()).st_mtime, time.time()  # the file server sets the stamp
            return DiskFacts(
                folder=there,
                free_bytes=shutil.disk_usage(there).free,
                written=written,
                read=_read_rate(file.fileno(), size),
                ahead_seconds=max(0.0, stamp - after) + min(0.0, stamp - before),  # 0 in between
            )
    except OSError as error:
        return DiskFacts(folder=there, trouble=error.strerror or str(error))


def _write_file(file: int, size: int) -> int:
    """Number of bytes that were written and synced."""
    piece, done, began = os.urandom(PIECE_BYTES), 0, time.perf_counter()
    while done < size and time.perf_counter() - began < LONGEST_SECONDS:
        done += os.write(file, piece[: size - done])
    os.fsync(file)
    return done


def _read_rate(file: int, size: int) -> float:
    """Bytes per second."""
    if sys.platform == "linux":
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # drops only what is synced
    os.lseek(file, 0, os.SEEK_SET)
    began = time.perf_counter()
    while os.read(file, PIECE_BYTES):
        pass
    return size / (time.perf_counter() - began)


def judge_disk(facts: DiskFacts, checkpoint_bytes: int = 0, kept: int = 0) -> list[PreflightCheck]:
    """All checks of the disk, for a run with checkpoints of this size (0 without a run) that keeps so many of them."""
    if facts.trouble:
        expected, fix = "a folder that can be written", "record.folder=ANOTHER, or its permissions"
        return [PreflightCheck("disk", f"{facts.folder}", "failed", facts.trouble, expected, fix)]
    return [_room(facts, checkpoint_bytes, kept), _speed(facts, checkpoint_bytes), *_clocks(facts)]


def _room(facts: DiskFacts, checkpoint_bytes: int, kept: int) -> PreflightCheck:
    wanted = max(FREE_BYTES, checkpoint_bytes * (kept + 1))  # an old one goes after the new one is whole
    got = f"{facts.free_bytes / 1e9:,.0f} GB free in {facts.folder}"
    if facts.free_bytes >= wanted:
        return fine("disk", "room", got)
    status: Status = "failed" if facts.free_bytes < checkpoint_bytes else "warning"
    reason = f": {kept + 1} checkpoints of {checkpoint_bytes / 1e9:,.1f} GB" if checkpoint_bytes else ""
    expected, fix = f">= {wanted / 1e9:,.0f} GB{reason}", "record.folder=ANOTHER, or checkpoint.keep=1"
    return PreflightCheck("disk", "room", status, got, expected, fix)


def _speed(facts: DiskFacts, checkpoint_bytes: int) -> PreflightCheck:
    got = f"writes {facts.written / 1e6:,.0f} MB/s, reads {facts.read / 1e6:,.0f} MB/s"
    if checkpoint_bytes:
        seconds = checkpoint_bytes / facts.written
        got += f"; a checkpoint of {checkpoint_bytes / 1e9:,.1f} GB by one writer in {seconds:,.0f} s"
    if min(facts.written, facts.read) >= SLOW:
        return fine("disk", "speed", got)
    fix = "record.folder on a faster file system, or a larger checkpoint.every"
    return PreflightCheck("disk", "speed", "warning", got, f">= {SLOW / 1e6:.0f} MB/s", fix)


def _clocks(facts: DiskFacts) -> Iterator[PreflightCheck]:
    if abs(facts.ahead_seconds) > APART_SECONDS:
        got = f"{abs(facts.ahead_seconds):.1f} s {'ahead of' if facts.ahead_seconds > 0 else 'behind'} this machine's"
        fix = "let the file server and this machine keep their clocks by the same source"
        yield PreflightCheck("disk", "its clock", "warning", got, "the same time", fix)
