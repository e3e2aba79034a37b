"""The training process: device, cores, threads, seeds, memory."""

import platform
import random
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.base.errors import DeviceError
from penstock.parallel.launch.environment import (
    Binding,
    Environment,
    LaunchFacts,
    allowed_cores,
    bind,
    choose_binding,
    free_host_bytes,
    prepare_environment,
    usable_cores,
)

CPU_INFO = Path("/proc/cpuinfo")  # Linux: one `model name` line for each core


def count_gpus(fix: str = "device=auto or device=cpu") -> int:
    """GPUs of this machine that PyTorch can use. Raises a DeviceError with this fix if there is none."""
    if not torch.cuda.is_available():
        build = "without GPU support" if not (torch.version.cuda or torch.version.hip) else "which finds no GPU"
        raise DeviceError(
            "device is cuda, but there is no GPU to use",
            got=f"PyTorch {torch.__version__}, {build}",
            fix=f"{fix}, or a PyTorch build for this GPU's driver",
        )
    return torch.cuda.device_count()


def choose_device(kind: str, environment: Environment | None = None) -> torch.device:
    """The device of a run on this rank; a GPU becomes the current one. `kind` is `cpu`, `cuda` (AMD too) or `auto`.

    Raises a DeviceError without the GPU that was asked for, and for more ranks than GPUs.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count_gpus()
    if environment is None or environment.local_world_size == 1:
        return torch.device("cuda", torch.cuda.current_device())
    gpus, ranks = torch.cuda.device_count(), environment.local_world_size
    if gpus == 1 and environment.started_by == "srun":
        return torch.device("cuda", 0)  # Slurm shows each task its own GPU only
    if ranks > gpus:
        raise DeviceError(
            "more processes than GPUs on this machine", got=ranks, allowed=gpus, fix="one process for each GPU"
        )
    torch.cuda.set_device(environment.local_rank)
    return torch.device("cuda", environment.local_rank)


def device_name(device: torch.device) -> str:
    """The name that the driver or the system reports, such as `NVIDIA H200`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def bind_near(device: torch.device, environment: Environment) -> Binding | None:
    """Bind this process to the cores next to its GPU, before threads are started. Returns None if nothing was bound."""
    if device.type != "cuda" or sys.platform != "linux":
        return None
    sees_all = torch.cuda.device_count() >= environment.local_world_size > 1  # else Slurm shows one GPU to each task
    gpus = range(environment.local_world_size) if sees_all else [device.index]
    facts: list[Any] = [torch.cuda.get_device_properties(gpu) for gpu in gpus]  # PyTorch's stubs lack these three
    bus_ids = [f"{fact.pci_domain_id:04x}:{fact.pci_bus_id:02x}:{fact.pci_device_id:02x}.0" for fact in facts]
    binding = choose_binding(bus_ids, environment.local_rank if sees_all else 0, allowed_cores())
    if binding is not None:
        bind(binding)
    return binding


def prepare_process(environment: Environment, *, seed: int, deterministic: bool) -> None:
    """Set threads, seeds and determinism for the whole process. Call once, before anything is allocated on a GPU."""
    # PyTorch's default is the machine's physical cores; a container or `taskset` may leave fewer, never more.
    torch.set_num_threads(environment.threads or min(torch.get_num_threads(), usable_cores()))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    prepare_environment(LaunchFacts(deterministic=deterministic))
    if deterministic != torch.are_deterministic_algorithms_enabled():  # asking imports the compiler: over a second
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False


def free_memory_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None if unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory since the process began: PyTorch's on a GPU, the resident set of the whole process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_host_memory_bytes()


def peak_host_memory_bytes() -> int:
    """Largest resident set since the process began; pinned memory is a part of it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
