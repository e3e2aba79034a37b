"""The process that trains: its environment, device, threads, seeds and memory.

This is the only file that reads environment variables, so everything that a shell can change about a run is said here:

    NO_COLOR         no colors in the terminal (any value but empty)
    OMP_NUM_THREADS  threads of a CPU operator; without it, the cores that this process may use
    WORLD_SIZE       set by torchrun and by Slurm wrappers; more than 1 is refused

Deterministic mode also writes one variable, CUBLAS_WORKSPACE_CONFIG, because cuBLAS reads its workspace rule nowhere
else.
"""

import os
import platform
import random
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.base.errors import DeviceError

CGROUP_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""Linux, cgroup v2: `quota period` in microseconds, or `max period`. This limits a container, not its affinity."""

CPU_INFO = Path("/proc/cpuinfo")
"""Linux: one `model name` line for each core."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the environment variables say.

    Attributes:
        color: terminal output may have colors.
        threads: threads of a CPU operator, or None if nobody chose.
        world_size: processes that were started together.
    """

    color: bool
    threads: int | None
    world_size: int


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Read every variable that Penstock listens to.

    Raises:
        DeviceError: a variable that should be a number is none, or several processes were started.
    """
    world_size = _whole_number(variables, "WORLD_SIZE") or 1
    if world_size > 1:
        raise DeviceError(
            "a run trains on one device, in one process",
            got=f"WORLD_SIZE={world_size}",
            fix="start `penstock train` once, without torchrun",
        )
    return Environment(
        color=not variables.get("NO_COLOR"),
        threads=_whole_number(variables, "OMP_NUM_THREADS"),
        world_size=world_size,
    )


def _whole_number(variables: Mapping[str, str], name: str) -> int | None:
    """Value of a variable, or None if it is unset or empty."""
    text = variables.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise DeviceError(f"environment variable {name} must be a whole number", got=repr(text), allowed="1 and up")
    return int(text)


def choose_device(kind: str) -> torch.device:
    """The device of a run.

    Args:
        kind: `cpu`, `cuda` (also the name of AMD GPUs in PyTorch), or `auto`: a GPU if there is one.

    Raises:
        DeviceError: a GPU was asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if kind == "cuda" and not has_gpu:
        build = "without GPU support" if not (torch.version.cuda or torch.version.hip) else "which finds no GPU"
        raise DeviceError(
            "device is cuda, but there is no GPU to use",
            got=f"PyTorch {torch.__version__}, {build}",
            fix="device=auto or device=cpu, or a PyTorch build for this GPU's driver",
        )
    if kind == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def device_name(device: torch.device) -> str:
    """The name that the driver or the system reports, such as `NVIDIA H200`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """CPU cores that this process may use: its affinity, and the quota of its container."""
    # NOTE: sched_getaffinity is missing on macOS.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if CGROUP_CPU_LIMIT.exists():
        quota, period = CGROUP_CPU_LIMIT.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def prepare_process(environment: Environment, *, seed: int, deterministic: bool) -> None:
    """Set threads, seeds and determinism for the whole process. Call once, before anything is allocated on a GPU.

    Args:
        environment: what the user chose in the shell.
        seed: of every generator that nobody seeds otherwise.
        deterministic: refuse operators whose result depends on timing.
    """
    # PyTorch's default is the machine's physical cores; a container or `taskset` may leave fewer, never more.
    torch.set_num_threads(environment.threads or min(torch.get_num_threads(), usable_cores()))
    random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use at once since the process began.

    On a GPU: what PyTorch's allocator handed out on that device. On a CPU: the resident set of the whole process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
