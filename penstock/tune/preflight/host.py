"""The form of a check; the machine around the GPUs, the disk of the runs, versions, and variables that do harm.

/proc/meminfo                           available memory
/sys/fs/cgroup/memory.max               memory limit of a container
/proc/sys/kernel/numa_balancing         the kernel moves pages to the cores that use them, which stops their threads
/sys/devices/system/cpu/cpu0/cpufreq    clock governor
/sys/class/infiniband                   whether memory is registered for the network
adjtimex(2)                             whether the clock is synchronized

The disk check writes a file of some megabytes, syncs it, drops it from the page cache, reads it back, and removes it.
Many ranks write checkpoints at once, and a shared file system has other users, so the speed is only a first estimate.

Required package versions are those of our own package metadata. An NVIDIA driver must be new enough for PyTorch's CUDA.
ROCm's driver is shown but not judged: AMD supports several releases back and forth, and PyTorch finds no GPU otherwise.
Variables that Penstock sets itself (docs/environment.md) are not checked here, because every run reports them.
"""

import ctypes
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import torch.cuda.nccl

from penstock.base.origin import version_of
from penstock.parallel.launch.environment import (
    ROOT,
    Vendor,
    free_host_bytes,
    gpu_vendor,
    numa_nodes,
    read_text,
    usable_cores,
)

Status = Literal["ok", "warning", "failed"]
"""A warning may cost speed, and the run starts. A failure ends or spoils the run."""

Area = Literal["versions", "environment", "host", "disk", "devices", "transfers"]


@dataclass(frozen=True)
class PreflightCheck:
    """Result of one check; what was expected and how to fix it are empty if it passed."""

    area: Area
    name: str
    status: Status
    got: str  # the state of the node
    expected: str = ""
    fix: str = ""


def fine(area: Area, name: str, got: str) -> PreflightCheck:
    return PreflightCheck(area, name, "ok", got)


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


OLDEST_PYTHON = (3, 11)
OLDEST_TRITON = "3.6"

DRIVERS = {13: 580, 12: 525}
"""Oldest NVIDIA driver for a CUDA major version (NVIDIA, CUDA compatibility, minor version compatibility)."""

_BOUND = re.compile(r"(?P<name>[\w.-]+)>=(?P<version>[\d.]+)$")


@dataclass(frozen=True, kw_only=True)
class Builds:
    """PyTorch and the layers below it; empty or None if missing."""

    torch: str
    cuda: str | None  # version of PyTorch's build
    hip: str | None  # version of PyTorch's build
    finds_gpus: bool
    collectives: str  # version of NCCL or RCCL
    triton: str
    vendor: Vendor
    driver: str


def check_versions() -> list[PreflightCheck]:
    return [_python(), *_packages(_requirements()), *judge_builds(read_builds())]


def read_builds(root: Path = ROOT) -> Builds:
    """The installed software; `root` is the root of the system's files."""
    on_gpu = torch.cuda.is_available()
    vendor = gpu_vendor(root)
    return Builds(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        finds_gpus=on_gpu,
        collectives=".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "",
        triton=version_of("triton") or version_of("pytorch-triton-rocm") or "" if find_spec("triton") else "",
        vendor=vendor,
        driver=_driver(vendor, root),
    )


def _driver(vendor: Vendor, root: Path) -> str:
    if vendor == "nvidia":
        match = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", read_text(root / "proc/driver/nvidia/version"))
        return match[1] if match else ""
    return read_text(root / "sys/module/amdgpu/version") if vendor == "amd" else ""


def _python() -> PreflightCheck:
    got, oldest = platform.python_version(), ".".join(map(str, OLDEST_PYTHON))
    if sys.version_info >= OLDEST_PYTHON:
        return fine("versions", "Python", got)
    return PreflightCheck("versions", "Python", "failed", got, f">= {oldest}", "make a new environment")


def _requirements() -> list[str]:
    """Requirements of the installed package; none if it runs from source."""
    try:
        return [line for line in requires("penstock") or [] if ";" not in line]
    except PackageNotFoundError:
        return []


def _packages(requirements: Sequence[str]) -> Iterator[PreflightCheck]:
    wrong = 0
    for requirement in requirements:
        bound = _BOUND.match(requirement.replace(" ", ""))
        if bound is None:
            continue
        got = version_of(bound["name"])
        if not got or is_older(got, bound["version"]):
            wrong += 1
            got, fix = got or "not installed", f"pip install '{requirement}'"
            yield PreflightCheck("versions", bound["name"], "failed", got, f">= {bound['version']}", fix)
    if requirements and not wrong:
        yield fine("versions", "packages", f"all {len(requirements)} that are needed")


def is_older(got: str, bound: str) -> bool:
    """Whether a version is below a bound; suffixes (`+cu130`, `rc1`) are ignored."""

    def numbers(text: str) -> list[int]:
        match = re.match(r"\d+(\.\d+)*", text)
        return [int(part) for part in match[0].split(".")] if match else []

    left, right = numbers(got), numbers(bound)
    width = max(len(left), len(right))
    return left + [0] * (width - len(left)) < right + [0] * (width - len(right))


def judge_builds(builds: Builds) -> list[PreflightCheck]:
    """All checks of PyTorch and the layers below it."""
    checks = [_torch(builds), *_cuda_driver(builds), _triton(builds)]
    if builds.finds_gpus:
        checks.append(fine("versions", "RCCL" if builds.hip else "NCCL", builds.collectives or "unknown"))
    return checks


def _torch(builds: Builds) -> PreflightCheck:
    built = f"CUDA {builds.cuda}" if builds.cuda else f"ROCm {builds.hip}" if builds.hip else "no GPU"
    got = f"{builds.torch} for {built}"
    wanted = {"nvidia": "a build for CUDA", "amd": "a build for ROCm", "cpu": ""}[builds.vendor]
    fits = {"nvidia": builds.cuda, "amd": builds.hip, "cpu": "any"}[builds.vendor]
    if not fits:
        fix = "install PyTorch for them (https://pytorch.org/get-started), then pip install penstock again"
        return PreflightCheck("versions", "PyTorch", "failed", got, f"{wanted}: this machine has such GPUs", fix)
    if builds.vendor != "cpu" and not builds.finds_gpus:
        got += ", which finds no GPU"
        fix = "look at CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES, at the container's devices, and at the driver"
        return PreflightCheck("versions", "PyTorch", "failed", got, "the GPUs of this machine", fix)
    return fine("versions", "PyTorch", got)


def _cuda_driver(builds: Builds) -> Iterator[PreflightCheck]:
    oldest = DRIVERS.get(int(builds.cuda.split(".")[0])) if builds.cuda else None
    if builds.driver and oldest is not None and is_older(builds.driver, str(oldest)):
        expected, fix = f">= {oldest} for CUDA {builds.cuda}", "a newer driver, or a PyTorch build for an older CUDA"
        yield PreflightCheck("versions", "driver", "failed", builds.driver, expected, fix)
    elif builds.driver:
        yield fine("versions", "driver", builds.driver)


def _triton(builds: Builds) -> PreflightCheck:
    """A CPU needs none; a GPU without it runs the slow reference operators."""
    if not builds.triton and builds.finds_gpus:
        expected = f">= {OLDEST_TRITON}: our kernels are written in it"
        fix = "install the Triton that belongs to this PyTorch; its GPU builds bring it"
        return PreflightCheck("versions", "Triton", "failed", "not installed", expected, fix)
    if builds.triton and is_older(builds.triton, OLDEST_TRITON):
        fix = "a newer PyTorch brings a newer Triton"
        return PreflightCheck("versions", "Triton", "warning", builds.triton, f">= {OLDEST_TRITON}", fix)
    return fine("versions", "Triton", builds.triton or "none, and a CPU needs none")


ON = r"1|true|on|yes|y"


@dataclass(frozen=True)
class HarmfulVariable:
    """A harmful variable."""

    name: str
    when: str  # pattern of harmful values, in any case
    what: str
    status: Status = "warning"


HARMFUL: tuple[HarmfulVariable, ...] = (
    HarmfulVariable("CUDA_LAUNCH_BLOCKING", ON, "the host waits for every kernel"),
    HarmfulVariable("HIP_LAUNCH_BLOCKING", ON, "the host waits for every kernel"),
    HarmfulVariable("AMD_SERIALIZE_KERNEL", "[1-3]", "the host waits for every kernel"),
    HarmfulVariable("AMD_SERIALIZE_COPY", "[1-3]", "the host waits for every copy"),
    HarmfulVariable("CUDA_DEVICE_MAX_CONNECTIONS", "1", "kernels that could overlap run one after the other"),
    HarmfulVariable("GPU_MAX_HW_QUEUES", "1", "kernels that could overlap run one after the other"),
    HarmfulVariable("NCCL_P2P_DISABLE", r"(?!0$).+", "GPUs of a node speak through host memory"),
    HarmfulVariable("NCCL_SHM_DISABLE", r"(?!0$).+", "GPUs without a direct link speak over the network"),
    HarmfulVariable("NCCL_IB_DISABLE", r"(?!0$).+", "nodes speak over TCP and not over InfiniBand or RoCE"),
    HarmfulVariable("NCCL_NET_GDR_LEVEL", "0|LOC", "what goes to other nodes is copied to host memory first"),
    HarmfulVariable("NCCL_DEBUG", "INFO|TRACE", "every collective is logged"),
    HarmfulVariable("NCCL_ALGO", ".+", "one algorithm for all sizes; right for training.deterministic only"),
    HarmfulVariable("NCCL_PROTO", ".+", "one protocol for all sizes"),
    HarmfulVariable("NCCL_LAUNCH_MODE", "GROUP", "collectives of different groups wait for each other"),
    HarmfulVariable("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "every collective is checked by another one"),
    HarmfulVariable("TORCH_NCCL_BLOCKING_WAIT", ON, "the host waits for every collective"),
    HarmfulVariable("PYTORCH_NO_CUDA_MEMORY_CACHING", ".+", "the driver is asked for every tensor"),
    HarmfulVariable("PYTORCH_NO_HIP_MEMORY_CACHING", ".+", "the driver is asked for every tensor"),
    HarmfulVariable("TRITON_INTERPRET", ON, "Triton's kernels are run by Python, number by number", status="failed"),
    HarmfulVariable("TRITON_ALWAYS_COMPILE", ON, "kernels are compiled anew in every process"),
    HarmfulVariable("PYTHONDEVMODE", ".+", "Python checks itself at every step"),
    HarmfulVariable("PYTHONMALLOC", ".*debug", "Python checks its memory at every step"),
)
"""Sources: NCCL, PyTorch, CUDA, HIP, Triton and Python, each on its own variables."""


def check_environment(variables: Mapping[str, str], *, has_gpu: bool) -> list[PreflightCheck]:
    """Harmful variables among those of `HARMFUL` that are set, or one passed check."""
    checks = []
    for variable in HARMFUL:
        value = variables.get(variable.name)
        if value is None or not re.fullmatch(variable.when, value.strip(), re.IGNORECASE):
            continue
        # Without a GPU, Triton's interpreter is how tests run kernels.
        status = variable.status if has_gpu or variable.status != "failed" else "warning"
        got, fix = f"{value.strip()}: {variable.what}", f"unset {variable.name}"
        checks.append(PreflightCheck("environment", variable.name, status, got, "not set", fix))
    return checks or [fine("environment", "variables", f"none of {len(HARMFUL)} that hurt is set")]
