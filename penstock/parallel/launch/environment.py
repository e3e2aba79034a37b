"""Environment variables: the only file that reads or sets any.

`READ` has the variables that are read, `RULES` those that are set; docs/environment.md shows both.

A process learns its rank from torchrun or Slurm. torchrun's variables (RANK, WORLD_SIZE, ...) come first; srun's count
only inside a step that srun started: a batch script has SLURM_PROCID too, and is no rank.

Libraries read some choices from the environment only. A rule sets a variable if the facts of a process ask for it and
the shell has not set it. Variables are set twice: before PyTorch is imported (so this file imports none) by the
machine, and before a GPU is used by the run. Job scripts of `penstock launch` write them out.

The machine: its cores, its GPUs' vendor, and the cores near each GPU (Linux).

Launches and copies from the socket that a GPU is not attached to are slower. So each process is bound to cores of its
GPU's NUMA node before it starts threads and touches memory; Linux places a page on the node that touches it first.

    /sys/bus/pci/devices/0000:1b:00.0/numa_node              the node of a GPU of any vendor; -1 if unknown
    /sys/devices/system/node/node0/cpulist                   its cores, such as 0-31,64-95
    /sys/devices/system/cpu/cpu0/topology/thread_siblings_list    the hardware threads of one core, such as 0,64

Processes whose GPUs share a node divide its cores evenly; hardware threads of a core stay together. A process gets only
cores that it may use already, so a container's or Slurm's choice stands. A machine with one node is left alone.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from penstock.base.errors import DeviceError

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


SPIN_COUNT = "20000"  # some tens of microseconds, about as long as a small operator; GNU OpenMP's default is 300,000


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """Facts of a process that the rules depend on."""

    vendor: Vendor = "cpu"
    world: int = 1
    local_world: int = 1  # processes of this machine
    cores: int = 0  # of the machine; 0 if unknown
    deterministic: bool = False
    computes: bool = True  # False for a process that only reads files and counts

    @property
    def has_gpu(self) -> bool:
        return self.vendor != "cpu"

    @property
    def cores_each(self) -> int:
        return max(1, self.cores // self.local_world)


@dataclass(frozen=True, kw_only=True)
class VariableRule:
    """One variable."""

    name: str
    value: str  # may have facts in braces
    shown: str = ""  # such a value in words
    applies: Callable[[LaunchFacts], bool]
    when: str  # `applies` in words
    why: str
    source: str
    also: tuple[str, ...] = ()  # variables of the same meaning: if the shell has set one, this one is left alone


RULES: tuple[VariableRule, ...] = (
    VariableRule(
        name="GOMP_SPINCOUNT",
        value=SPIN_COUNT,
        applies=lambda facts: True,
        when="always",
        why="Threads of CPU operators that spin for long hold up a machine that does anything else.",
        source="[measured](decisions/0011-threads.md)",
        also=("OMP_WAIT_POLICY",),
    ),
    VariableRule(
        name="OMP_NUM_THREADS",
        value="{facts.cores_each}",
        shown="cores / processes of the machine",
        applies=lambda facts: facts.local_world > 1 and facts.cores > 0,
        when="several processes on a machine",
        why="Else each process starts a thread for every core. torchrun has its own rule, 1, and comes first.",
        source="OpenMP specification",
    ),
    VariableRule(
        name="OPENBLAS_NUM_THREADS",
        value="1",
        applies=lambda facts: not facts.computes,
        when="`penstock trace`, `doctor`, `data`",
        why="Else numpy starts a thread for every core when it is imported, which takes longer than to read a small "
        "trace; nothing there multiplies matrices.",
        source="OpenBLAS, runtime variables",
    ),
    VariableRule(
        name="KINETO_LOG_LEVEL",
        value="6",
        applies=lambda facts: facts.computes,
        when="always, but for `penstock trace`, `doctor`, `data`",
        why="PyTorch's profiler prints lines of `USDT` between those of the run, at a level above its errors.",
        source="Kineto's log levels, seen with PyTorch 2.13",
    ),
    VariableRule(
        name="GLOO_SOCKET_IFNAME",
        value="lo",
        applies=lambda facts: 1 < facts.world == facts.local_world and not facts.has_gpu,
        when="several CPU processes, all on this machine",
        why="Else gloo looks up the machine's name, which fails or takes long on a laptop without network.",
        source="PyTorch, torch.distributed: choosing the network interface",
    ),
    VariableRule(
        name="PYTORCH_ALLOC_CONF",
        value="expandable_segments:True",
        applies=lambda facts: facts.has_gpu,
        when="GPU",
        why="Segments that grow leave fewer holes: MoE layers ask for blocks of another size at every step.",
        source="PyTorch, CUDA semantics: memory management; Megatron-LM MoE guide (an out-of-memory at 58.8 GB passed)",
        also=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    ),
    VariableRule(
        name="NCCL_GRAPH_REGISTER",
        value="0",
        applies=lambda facts: facts.vendor == "nvidia" and facts.world > 1,
        when="NVIDIA, several ranks",
        why="NCCL must not register buffers of captured graphs that lie in expandable segments.",
        source="Megatron-LM and Transformer Engine, CUDA graphs",
    ),
    VariableRule(
        name="NCCL_NVLS_ENABLE",
        value="0",
        applies=lambda facts: facts.vendor == "nvidia" and facts.world > 1,
        when="NVIDIA, several ranks",
        why="NVLink multicast takes memory for every group, and is not available on hosts that are shared.",
        source="NCCL user guide; Megatron-LM MoE guide",
    ),
    VariableRule(
        name="TORCH_NCCL_HIGH_PRIORITY",
        value="1",
        applies=lambda facts: facts.has_gpu and facts.world > 1,
        when="GPU, several ranks",
        why="Communication that others wait for starts before computation that is queued already.",
        source="PyTorch, ProcessGroupNCCL variables; ROCm MI300X workload guide",
    ),
    VariableRule(
        name="TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
        value="0",
        applies=lambda facts: facts.has_gpu and facts.world > 1,
        when="GPU, several ranks",
        why="The warning asks for groups that carry messages only. Those of a pipeline do, but PyTorch does not look.",
        source="the warning's own text; [pipeline messages](decisions/0015-pipeline-messages.md)",
    ),
    VariableRule(
        name="HSA_KERNARG_POOL_SIZE",
        value=str(12 << 20),  # bytes
        applies=lambda facts: facts.vendor == "amd",
        when="AMD",
        why="Arguments of launched kernels wait in this pool; with the default of 1 MiB the host waits for room when "
        "it runs far ahead, as it does with many small kernels.",
        source="HIP variables (default 1048576); Primus, MI300X",
    ),
    VariableRule(
        name="GPU_MAX_HW_QUEUES",
        value="2",
        applies=lambda facts: facts.vendor == "amd" and facts.world > 1,
        when="AMD, several ranks",
        why="Two queues for computation and two for RCCL are the four that the hardware runs best.",
        source="ROCm MI300X workload guide",
    ),
    VariableRule(
        name="CUBLAS_WORKSPACE_CONFIG",
        value=":4096:8",
        applies=lambda facts: facts.deterministic,
        when="`training.deterministic`",
        why="cuBLAS gives the same result twice only with workspaces of its own for each stream.",
        source="PyTorch, torch.use_deterministic_algorithms",
    ),
    VariableRule(
        name="NCCL_ALGO",
        value="Ring",
        applies=lambda facts: facts.deterministic and facts.has_gpu and facts.world > 1,
        when="`training.deterministic`, GPU, several ranks",
        why="Sums over ranks have one order; else NCCL chooses by size and topology.",
        source="Megatron-LM, deterministic mode",
    ),
)


def settings(facts: LaunchFacts) -> dict[str, str]:
    return {rule.name: rule.value.format(facts=facts) for rule in RULES if rule.applies(facts)}


READ = {
    "NO_COLOR": "no colors in the terminal (any value but empty)",
    "OMP_NUM_THREADS": "threads of a CPU operator; without it, the cores that the process may use",
    "RANK, WORLD_SIZE": "which rank a process is, and of how many; set by torchrun",
    "LOCAL_RANK, LOCAL_WORLD_SIZE": "the same among the ranks of this machine",
    "MASTER_ADDR, MASTER_PORT": "where ranks meet; set by torchrun, and by hand if srun's choice is wrong",
    "TORCHELASTIC_RUN_ID": "name of the launch (`torchrun --rdzv-id`): a restart goes on with the run of its launch",
    "TORCHELASTIC_USE_AGENT_STORE": "True where no rank holds the store: torchrun, `--processes`, trials of `tune`",
    "TORCHELASTIC_RESTART_COUNT": "how often torchrun has started these ranks before",
    "SLURM_PROCID, SLURM_STEP_NUM_TASKS": "rank and ranks, in a step of srun without torchrun",
    "SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_TASKS_PER_NODE": "the same on this machine",
    "SLURM_STEP_NODELIST": "its first machine is where ranks meet",
    "SLURM_JOB_ID, SLURM_STEP_ID": "name of the launch, also after Slurm has requeued the job; the port to meet at",
    "SLURM_CPUS_PER_TASK": "cores of a rank",
    "SLURM_JOB_START_TIME": "when the job began: the time before it was spent in the queue",
}
"""Variables that Penstock reads, for docs/environment.md."""

FIRST_PORT, PORTS = 20_000, 12_000
"""Ports at which jobs of Slurm meet, each at its own. Linux gives ports from 32768 on to outgoing connections."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Values of the environment variables."""

    color: bool
    threads: int | None  # of a CPU operator; None if unset
    world_size: int
    rank: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    started_by: Literal["", "torchrun", "srun"] = ""  # empty for a single process
    launch: str = ""  # name of the launch, the same after a restart; may be empty
    restarts: int = 0  # earlier starts of these ranks
    meeting_point: str = ""  # address of the rendezvous, `host:port`; empty for one process
    holds_store: bool = True  # rank 0 holds the store there; else a process that outlives the ranks
    cores_each: int | None = None  # cores of each rank according to the launcher
    job_begin: int | None = None  # seconds since 1970, of the job's present start; None without a scheduler


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Read every variable. Raises a DeviceError if one is no number, or if two contradict."""
    threads = _whole_number(variables, "OMP_NUM_THREADS")
    job_begin = _whole_number(variables, "SLURM_JOB_START_TIME")
    alone = Environment(color=not variables.get("NO_COLOR"), threads=threads, world_size=1, job_begin=job_begin)
    if variables.get("WORLD_SIZE", "").strip():
        return _from_torchrun(variables, alone)
    if variables.get("SLURM_STEP_NUM_TASKS", "1") != "1":  # set inside a step of srun only
        return _from_srun(variables, alone)
    return alone


def _from_torchrun(variables: Mapping[str, str], alone: Environment) -> Environment:
    world, rank = _whole_number(variables, "WORLD_SIZE") or 1, _whole_number(variables, "RANK", low=0) or 0
    local_world = _whole_number(variables, "LOCAL_WORLD_SIZE") or 1
    local_rank = _whole_number(variables, "LOCAL_RANK", low=0) or 0
    _check_below("RANK", rank, world)
    _check_below("LOCAL_RANK", local_rank, local_world)
    host, port = variables.get("MASTER_ADDR", ""), _whole_number(variables, "MASTER_PORT")
    if world > 1 and not (host and port):
        raise DeviceError(
            "several processes need MASTER_ADDR and MASTER_PORT to meet",
            got=f"WORLD_SIZE={world}",
            fix="start them with torchrun or srun, or one with `penstock train --processes`",
        )
    name = variables.get("TORCHELASTIC_RUN_ID", "")
    return replace(
        alone,
        world_size=world,
        rank=rank,
        local_rank=local_rank,
        local_world_size=local_world,
        started_by="torchrun",
        holds_store=_holds_store(variables),
        launch="" if name == "none" else name,  # torchrun's word for a launch without a name
        restarts=_whole_number(variables, "TORCHELASTIC_RESTART_COUNT", low=0) or 0,
        meeting_point=_address(host, port) if host and port else "",
    )


def _from_srun(variables: Mapping[str, str], alone: Environment) -> Environment:
    world, rank = _whole_number(variables, "SLURM_STEP_NUM_TASKS") or 1, _whole_number(variables, "SLURM_PROCID", low=0)
    job, step = _whole_number(variables, "SLURM_JOB_ID") or 1, _whole_number(variables, "SLURM_STEP_ID", low=0) or 0
    local_rank, node = (_whole_number(variables, name, low=0) or 0 for name in ("SLURM_LOCALID", "SLURM_NODEID"))
    tasks = _tasks_per_node(variables.get("SLURM_STEP_TASKS_PER_NODE", "")) or [world]
    _check_below("SLURM_PROCID", rank or 0, world)
    _check_below("SLURM_NODEID", node, len(tasks))
    _check_below("SLURM_LOCALID", local_rank, tasks[node])
    host = variables.get("MASTER_ADDR") or _first_host(variables.get("SLURM_STEP_NODELIST", "")) or "localhost"
    port = _whole_number(variables, "MASTER_PORT") or FIRST_PORT + (job + step) % PORTS
    return replace(
        alone,
        world_size=world,
        rank=rank or 0,
        local_rank=local_rank,
        local_world_size=tasks[node],
        started_by="srun",
        launch=variables.get("TORCHELASTIC_RUN_ID") or f"slurm-{job}.{step}",
        restarts=_whole_number(variables, "SLURM_RESTART_COUNT", low=0) or 0,
        meeting_point=_address(host, port),
        holds_store=_holds_store(variables),
        cores_each=_whole_number(variables, "SLURM_CPUS_PER_TASK"),
    )


def _holds_store(variables: Mapping[str, str]) -> bool:
    return variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _whole_number(variables: Mapping[str, str], name: str, *, low: int = 1) -> int | None:
    text = variables.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) < low:
        raise DeviceError(
            f"environment variable {name} must be a whole number", got=repr(text), allowed=f"{low} and up"
        )
    return int(text)


def _check_below(name: str, number: int, count: int) -> None:
    if number >= count:
        raise DeviceError(
            f"environment variable {name} contradicts the number of processes", got=number, allowed=f"0 to {count - 1}"
        )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"  # brackets around an IPv6 address


def _tasks_per_node(text: str) -> list[int]:
    """Tasks of each machine, from Slurm's short form: `4(x2),1` is 4, 4, 1."""
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    return tasks


def _first_host(nodes: str) -> str:
    """First machine of Slurm's short form: `gpu[03-05,9],login1` begins with gpu03."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def facts_of_machine(environment: Environment) -> LaunchFacts:
    """Facts that are known before there is a run."""
    each, local_world = environment.cores_each, environment.local_world_size
    return LaunchFacts(
        vendor=gpu_vendor(),
        world=environment.world_size,
        local_world=local_world,
        cores=each * local_world if each else usable_cores(),
    )


def prepare_environment(facts: LaunchFacts | None = None) -> None:
    """Set the variables that the facts ask for, before PyTorch is imported those of the machine; the shell's stand."""
    os.environ.update(_missing(facts_of_machine(read_environment()) if facts is None else facts))


def variables_of_rank(
    facts: LaunchFacts, rank: int, launch: str, restarts: int, host: str, port: int
) -> dict[str, str]:
    """All variables of a rank that is started on this machine: ours, the rules', and those that torchrun gives."""
    return {
        **os.environ,
        **_missing(facts),
        "RANK": str(rank),
        "WORLD_SIZE": str(facts.world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(facts.local_world),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": launch,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher holds the store
    }


def variables_of_trial(name: str) -> dict[str, str]:
    """All variables of a rank that is started beside this one, in a launch of this name that meets at our store."""
    started = {"TORCHELASTIC_RUN_ID": name, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**os.environ, **started}


def shell_variables(names: Iterable[str], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those of some variables that are set, for callers that only print them."""
    return {name: variables[name] for name in names if name in variables}


def _missing(facts: LaunchFacts) -> dict[str, str]:
    names = {rule.name: (rule.name, *rule.also) for rule in RULES}
    return {
        name: value for name, value in settings(facts).items() if not any(also in os.environ for also in names[name])
    }


def environment_line(facts: LaunchFacts, variables: Mapping[str, str] = os.environ) -> str:
    """Variables of the table in one line, after `prepare_environment`: those with our value, then the shell's."""
    wanted = settings(facts)
    ours = [f"{name}={value}" for name, value in wanted.items() if variables.get(name) == value]
    names = [name for rule in RULES for name in (rule.name, *rule.also)]
    known = shell_variables(names, variables)
    theirs = [f"{name}={value}" for name, value in known.items() if value != wanted.get(name)]
    return "; ".join(part for part in (" ".join(ours), f"from the shell: {' '.join(theirs)}" if theirs else "") if part)
