"""The machine around the GPUs: cores, NUMA nodes, memory, limits of the process, clock (elsewhere than on Linux, less).

/proc/meminfo                           memory that programs can have
/sys/fs/cgroup/memory.max               and what a container may have of it
/proc/sys/kernel/numa_balancing         pages move after the cores that touch them, which stops those who touch them
/sys/devices/system/cpu/cpu0/cpufreq    how fast cores may be
/sys/class/infiniband                   whether memory is registered for the network
adjtimex(2)                             whether anything keeps the clock right
"""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.parallel.launch.host import ROOT, free_host_bytes, usable_cores
from penstock.tune.preflight.check import Check, fine

CORES_EACH = 4
"""Of a rank: one runs the model, one its backward pass, and data and collectives want the others."""

OPEN_FILES, FEWEST_OPEN_FILES = 65_536, 1024
"""A rank of a large cluster holds a socket to many others beside its data files; with fewer than the second a node's
own ranks and files are too many. What has no GPU is no part of a cluster, and the second will do."""

SHARED_BYTES, LEAST_SHARED_BYTES = 8 << 30, 1 << 30
"""NCCL's buffers between ranks that have no direct link. A container has 64 MiB if nobody asked for more."""

MEMORY_SHARE = 0.5
"""Of the GPUs' memory that the host should have free: a checkpoint that is written meanwhile is copied there first."""

LEAST_BYTES = 4 << 30
"""A rank's libraries, with a GPU or without."""

CLOCK_ERROR = 5
"""What adjtimex returns for a clock that nobody keeps right."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What the machine is like.

    Attributes:
        gpus: that it has.
        gpu_bytes: memory of all of them.
        cores: that this process may use.
        numa_nodes: of the machine.
        numa_balancing: pages move by themselves.
        free_bytes: of memory, as far as this process may have it; None if that is not known.
        open_files: how many this process may have; None is any number.
        locked_bytes: of memory that it may keep in place; None is any number.
        has_infiniband: there is a network that reads memory by itself.
        shared_bytes: of /dev/shm; None if there is none.
        governor: how the speed of the first core is chosen, or empty.
        clock_is_kept: somebody keeps the clock right; None if that is not known.
    """

    gpus: int
    gpu_bytes: int
    cores: int
    numa_nodes: int
    numa_balancing: bool
    free_bytes: int | None
    open_files: int | None
    locked_bytes: int | None
    has_infiniband: bool
    shared_bytes: int | None
    governor: str
    clock_is_kept: bool | None


def read_host(gpus: int, gpu_bytes: int, root: Path = ROOT) -> HostFacts:
    """Facts of this machine.

    Args:
        gpus: that it has.
        gpu_bytes: memory of all of them.
        root: of the system's files.
    """
    shared = root / "dev/shm"
    governor = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return HostFacts(
        gpus=gpus,
        gpu_bytes=gpu_bytes,
        cores=usable_cores(root),
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))),
        numa_balancing=_read(root / "proc/sys/kernel/numa_balancing") not in ("", "0"),
        free_bytes=free_host_bytes(root),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        has_infiniband=any((root / "sys/class/infiniband").glob("*")),
        shared_bytes=_size(shared) if shared.is_dir() else None,
        governor=governor,
        clock_is_kept=_clock_is_kept(),
    )


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _size(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


def _clock_is_kept() -> bool | None:
    """Ask the kernel whether its clock is synchronized; nothing is changed."""
    if sys.platform != "linux":
        return None
    ask = ctypes.CDLL(None, use_errno=True).adjtimex
    state = ask(ctypes.create_string_buffer(512))  # struct timex, all zeros: modes = 0 only reads
    return None if state < 0 else state != CLOCK_ERROR


def judge_host(facts: HostFacts) -> list[Check]:
    """Everything about the machine."""
    return [
        _cores(facts),
        *_numa(facts),
        *_memory(facts),
        _open_files(facts),
        *_locked(facts),
        *_shared(facts),
        *_governor(facts),
        *_clock(facts),
    ]


def _cores(facts: HostFacts) -> Check:
    ranks = max(1, facts.gpus)
    each = facts.cores / ranks
    if facts.gpus == 0 or each >= CORES_EACH:
        return fine("host", "cores", f"{facts.cores}")
    return Check(
        area="host",
        name="cores",
        status="failed" if each < 1 else "warning",
        got=f"{facts.cores} for {facts.gpus} GPUs",
        expected=f">= {CORES_EACH * facts.gpus}",
        fix="ask for more: --cpus-per-task of Slurm, limits of the container, taskset",
    )


def _numa(facts: HostFacts) -> Iterator[Check]:
    if facts.numa_nodes > 1 and facts.numa_balancing and facts.gpus:
        yield Check(
            area="host",
            name="NUMA balancing",
            status="warning",
            got=f"on, with {facts.numa_nodes} nodes",
            expected="off: ranks keep to their node already, and pages that move stop who touches them",
            fix="sysctl kernel.numa_balancing=0",
        )
    elif facts.numa_nodes:
        yield fine("host", "NUMA nodes", f"{facts.numa_nodes}")


def _memory(facts: HostFacts) -> Iterator[Check]:
    if facts.free_bytes is None:
        return
    got = f"{facts.free_bytes / 1e9:.0f} GB free"
    wanted = max(LEAST_BYTES * max(1, facts.gpus), MEMORY_SHARE * facts.gpu_bytes)
    if facts.free_bytes >= wanted:
        yield fine("host", "memory", got)
        return
    reason = "half of the GPUs' memory, for checkpoints on their way to disk" if facts.gpus else "for a rank"
    yield Check(
        area="host",
        name="memory",
        status="failed" if facts.free_bytes < LEAST_BYTES / 4 else "warning",
        got=got,
        expected=f">= {wanted / 1e9:.0f} GB: {reason}",
        fix="end other programs, ask for more, or checkpoint.asynchronous=false"
        if facts.gpus
        else "end other programs",
    )


def _open_files(facts: HostFacts) -> Check:
    files, wanted = facts.open_files, OPEN_FILES if facts.gpus else FEWEST_OPEN_FILES
    if files is None or files >= wanted:
        return fine("host", "open files", "any number" if files is None else f"{files:,}")
    return Check(
        area="host",
        name="open files",
        status="failed" if facts.gpus and files < FEWEST_OPEN_FILES else "warning",
        got=f"{files:,}",
        expected=f">= {wanted:,}",
        fix=f"ulimit -n {wanted}, or nofile in /etc/security/limits.conf, or --ulimit nofile of the container",
    )


def _locked(facts: HostFacts) -> Iterator[Check]:
    if facts.locked_bytes is None:
        yield fine("host", "locked memory", "any amount")
    elif facts.has_infiniband:
        yield Check(
            area="host",
            name="locked memory",
            status="failed",
            got=f"{facts.locked_bytes / 1e6:.3g} MB",
            expected="any amount: InfiniBand and RoCE read memory that stays in place",
            fix="ulimit -l unlimited, or memlock in /etc/security/limits.conf, or --ulimit memlock=-1 of the container",
        )


def _shared(facts: HostFacts) -> Iterator[Check]:
    shared = facts.shared_bytes
    if shared is None:
        return
    got = f"{shared / 1e9:.3g} GB"
    if facts.gpus < 2 or shared >= SHARED_BYTES:
        yield fine("host", "shared memory", got)
        return
    yield Check(
        area="host",
        name="shared memory",
        status="failed" if shared < LEAST_SHARED_BYTES else "warning",
        got=f"{got} in /dev/shm",
        expected=f">= {SHARED_BYTES / 1e9:.3g} GB",
        fix="--shm-size=16g or --ipc=host of the container, or an emptyDir of medium Memory at /dev/shm",
    )


def _governor(facts: HostFacts) -> Iterator[Check]:
    if not facts.governor:
        return
    if facts.governor == "performance" or not facts.gpus:
        yield fine("host", "clock of cores", facts.governor)
        return
    yield Check(
        area="host",
        name="clock of cores",
        status="warning",
        got=facts.governor,
        expected="performance: a host that is slow to wake starts kernels late",
        fix="cpupower frequency-set -g performance",
    )


def _clock(facts: HostFacts) -> Iterator[Check]:
    if facts.clock_is_kept is None:
        return
    if facts.clock_is_kept:
        yield fine("host", "time", "kept right")
        return
    yield Check(
        area="host",
        name="time",
        status="warning",
        got="nobody keeps the clock right",
        expected="chrony, systemd-timesyncd or the like: machines are compared by their times",
        fix="timedatectl set-ntp true",
    )
