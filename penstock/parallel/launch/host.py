"""The machine: its cores, its GPUs' vendor, and the cores near each GPU (Linux).

Launches and copies from the socket that a GPU is not attached to are slower. So each process is bound to cores of its
GPU's NUMA node before it starts threads and touches memory; Linux places a page on the node that touches it first.

    /sys/bus/pci/devices/0000:1b:00.0/numa_node              the node of a GPU of any vendor; -1 if unknown
    /sys/devices/system/node/node0/cpulist                   its cores, such as 0-31,64-95
    /sys/devices/system/cpu/cpu0/topology/thread_siblings_list    the hardware threads of one core, such as 0,64

Processes whose GPUs share a node divide its cores evenly; hardware threads of a core stay together. A process gets only
cores that it may use already, so a container's or Slurm's choice stands. A machine with one node is left alone.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Vendor = Literal["nvidia", "amd", "cpu"]

ROOT = Path("/")  # root of the system's files; tests have their own


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Cores of the GPU's NUMA `node` that a process is bound to; `sharers` processes divide the node."""

    node: int
    cores: tuple[int, ...]
    sharers: int

    def __str__(self) -> str:
        shared = f", divided by {self.sharers}" if self.sharers > 1 else ""
        return f"cores {ranges(self.cores)} of NUMA node {self.node}{shared}"


def gpu_vendor(root: Path = ROOT) -> Vendor:
    """Vendor of this machine's GPUs, by their driver; needs no PyTorch."""
    if (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists():
        return "nvidia"
    return "amd" if (root / "dev/kfd").exists() else "cpu"


def allowed_cores() -> frozenset[int]:
    # NOTE: sched_getaffinity is missing on macOS.
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def usable_cores(root: Path = ROOT) -> int:
    """Number of cores that this process may use: its affinity and its container's quota (cgroup v2)."""
    cores = len(allowed_cores())
    limit = root / "sys/fs/cgroup/cpu.max"  # `quota period` in microseconds, or `max period`
    if limit.exists():
        quota, period = limit.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def free_host_bytes(root: Path = ROOT) -> int | None:
    """Free memory, or what its container leaves of it; None if unknown."""
    free = _meminfo_bytes("MemAvailable", root)
    limit, used = (read_text(root / "sys/fs/cgroup" / name) for name in ("memory.max", "memory.current"))
    is_limited = limit.isdigit() and used.isdigit()  # cgroup v2 says `max` without a limit
    return free if free is None or not is_limited else min(free, int(limit) - int(used))


def host_bytes(root: Path = ROOT) -> int | None:
    """Memory of the machine, or the limit of its container; None if unknown."""
    limits = [read_text(root / "sys/fs/cgroup" / name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    known = [_meminfo_bytes("MemTotal", root), *(int(limit) for limit in limits if limit.isdigit())]
    return min((size for size in known if size is not None), default=None)


def _meminfo_bytes(name: str, root: Path) -> int | None:
    lines = dict(line.split(":", 1) for line in read_text(root / "proc/meminfo").splitlines() if ":" in line)
    return int(lines[name].split()[0]) * 1024 if name in lines else None  # the kernel prints KiB


def numa_nodes(root: Path = ROOT) -> int:
    """Number of NUMA nodes; 0 if unknown."""
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*")))


def parse_ranges(text: str) -> tuple[int, ...]:
    """Numbers of a list as the kernel writes it: `0-2,8` is 0, 1, 2, 8."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def ranges(numbers: Sequence[int]) -> str:
    """The inverse of `parse_ranges`, for ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def choose_binding(
    bus_ids: Sequence[str], local_rank: int, allowed: frozenset[int], root: Path = ROOT
) -> Binding | None:
    """Allowed cores for the process of `local_rank`; `bus_ids` are the GPUs of all processes, in order.

    None without a choice: one NUMA node, an unknown one, or none of its cores is allowed.
    """
    if numa_nodes(root) < 2:
        return None
    nodes = [read_text(root / "sys/bus/pci/devices" / bus_id.lower() / "numa_node") for bus_id in bus_ids]
    node = int(nodes[local_rank] or -1)
    if node < 0:
        return None
    sharers = [rank for rank, other in enumerate(nodes) if other == str(node)]
    listed = parse_ranges(read_text(root / f"sys/devices/system/node/node{node}/cpulist"))
    cores = _physical_cores(listed, allowed, root)
    position, count = sharers.index(local_rank), len(sharers)
    if len(cores) < count:  # a process without a core of its own stays where it is
        return None
    share = cores[len(cores) * position // count : len(cores) * (position + 1) // count]
    return Binding(node=node, cores=tuple(sorted(thread for core in share for thread in core)), sharers=count)


def bind(binding: Binding) -> None:
    """Bind every thread of this process, and all that they will start."""
    for thread in sorted(int(path.name) for path in Path("/proc/self/task").iterdir()):
        try:
            os.sched_setaffinity(thread, binding.cores)
        except ProcessLookupError:
            continue  # it ended since we looked


def _physical_cores(threads: Sequence[int], allowed: frozenset[int], root: Path) -> list[tuple[int, ...]]:
    cores: dict[tuple[int, ...], list[int]] = {}
    for thread in threads:
        if thread in allowed:
            text = read_text(root / f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
            cores.setdefault(parse_ranges(text) or (thread,), []).append(thread)
    return [tuple(core) for core in cores.values()]


def read_text(path: Path) -> str:
    """Text of a system's file without blanks around it; empty if there is none."""
    return path.read_text(errors="replace").strip() if path.is_file() else ""
