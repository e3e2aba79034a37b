"""The process that trains: device, threads, seeds and memory. What the shell says about them is in `environment`."""

import os
import platform
import random
import resource
import sys
from pathlib import Path

import torch

from penstock.base.errors import DeviceError
from penstock.parallel.environment import Environment, make_cublas_deterministic

CGROUP_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""Linux, cgroup v2: `quota period` in microseconds, or `max period`. This limits a container, not its affinity."""

CPU_INFO = Path("/proc/cpuinfo")
"""Linux: one `model name` line for each core."""


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
        make_cublas_deterministic()
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
