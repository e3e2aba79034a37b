"""The environment variables that Penstock sets: one table that says which, when and why.

Libraries read some choices from the environment and nowhere else. A rule gives a variable a value where the facts of a
process ask for it; `penstock.parallel.launch.environment` sets it unless the shell has chosen, the job scripts of
`penstock launch` write it down, and docs/environment.md is this table. So there is no list of exports to copy from a
guide, and what the shell says always stands.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.parallel.launch.host import Vendor

SPIN_COUNT = "20000"
"""Some tens of microseconds, about as long as a small operator takes; GNU OpenMP's default is 300,000."""

KERNARG_POOL_BYTES = 12 << 20


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules depend on.

    Attributes:
        vendor: of the GPUs that are used; cpu if none is.
        world: ranks of the run.
        local_world: ranks on this machine.
        cores: CPU cores that these ranks share; 0 if that is not known here.
        deterministic: operators whose result depends on timing are refused.
        computes: the process may multiply matrices; if not, it only reads files and counts.
    """

    vendor: Vendor = "cpu"
    world: int = 1
    local_world: int = 1
    cores: int = 0
    deterministic: bool = False
    computes: bool = True

    @property
    def has_gpu(self) -> bool:
        """Whether the run is on GPUs."""
        return self.vendor != "cpu"

    @property
    def cores_each(self) -> int:
        """Cores of one of the processes of this machine."""
        return max(1, self.cores // self.local_world)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One variable.

    Attributes:
        name: of the variable.
        value: what it is set to; a part in braces is taken from `facts`.
        shown: the value in words, where it depends on facts.
        applies: whether the facts of a process ask for it.
        when: the same in words.
        why: what goes wrong, or slow, without it.
        source: where that is written or measured.
        also: variables that say the same thing; if the shell has set one of them, this one is left alone.
    """

    name: str
    value: str
    shown: str = ""
    applies: Callable[[Facts], bool]
    when: str
    why: str
    source: str
    also: tuple[str, ...] = ()


RULES: tuple[Rule, ...] = (
    Rule(
        name="GOMP_SPINCOUNT",
        value=SPIN_COUNT,
        applies=lambda facts: True,
        when="always",
        why="Threads of CPU operators that spin for long hold up a machine that does anything else.",
        source="[measured](decisions/0011-threads.md)",
        also=("OMP_WAIT_POLICY",),
    ),
    Rule(
        name="OMP_NUM_THREADS",
        value="{facts.cores_each}",
        shown="cores / processes of the machine",
        applies=lambda facts: facts.local_world > 1 and facts.cores > 0,
        when="several processes on a machine",
        why="Else each process starts a thread for every core. torchrun has its own rule, 1, and comes first.",
        source="OpenMP specification",
    ),
    Rule(
        name="OPENBLAS_NUM_THREADS",
        value="1",
        applies=lambda facts: not facts.computes,
        when="`penstock trace`, `doctor`, `data`",
        why="Else numpy starts a thread for every core when it is imported, which takes longer than to read a small "
        "trace; nothing there multiplies matrices.",
        source="OpenBLAS, runtime variables",
    ),
    Rule(
        name="GLOO_SOCKET_IFNAME",
        value="lo",
        applies=lambda facts: 1 < facts.world == facts.local_world and not facts.has_gpu,
        when="several CPU processes, all on this machine",
        why="Else gloo looks up the machine's name, which fails or takes long on a laptop without network.",
        source="PyTorch, torch.distributed: choosing the network interface",
    ),
    Rule(
        name="PYTORCH_ALLOC_CONF",
        value="expandable_segments:True",
        applies=lambda facts: facts.has_gpu,
        when="GPU",
        why="Segments that grow leave fewer holes: MoE layers ask for blocks of another size at every step.",
        source="PyTorch, CUDA semantics: memory management; Megatron-LM MoE guide (an out-of-memory at 58.8 GB passed)",
        also=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    ),
    Rule(
        name="NCCL_GRAPH_REGISTER",
        value="0",
        applies=lambda facts: facts.vendor == "nvidia" and facts.world > 1,
        when="NVIDIA, several ranks",
        why="NCCL must not register buffers of captured graphs that lie in expandable segments.",
        source="Megatron-LM and Transformer Engine, CUDA graphs",
    ),
    Rule(
        name="NCCL_NVLS_ENABLE",
        value="0",
        applies=lambda facts: facts.vendor == "nvidia" and facts.world > 1,
        when="NVIDIA, several ranks",
        why="NVLink multicast takes memory for every group, and is not available on hosts that are shared.",
        source="NCCL user guide; Megatron-LM MoE guide",
    ),
    Rule(
        name="TORCH_NCCL_HIGH_PRIORITY",
        value="1",
        applies=lambda facts: facts.has_gpu and facts.world > 1,
        when="GPU, several ranks",
        why="Communication that others wait for starts before computation that is queued already.",
        source="PyTorch, ProcessGroupNCCL variables; ROCm MI300X workload guide",
    ),
    Rule(
        name="HSA_KERNARG_POOL_SIZE",
        value=str(KERNARG_POOL_BYTES),
        applies=lambda facts: facts.vendor == "amd",
        when="AMD",
        why="Arguments of launched kernels wait in this pool; with the default of 1 MiB the host waits for room when "
        "it runs far ahead, as it does with many small kernels.",
        source="HIP variables (default 1048576); Primus, MI300X",
    ),
    Rule(
        name="GPU_MAX_HW_QUEUES",
        value="2",
        applies=lambda facts: facts.vendor == "amd" and facts.world > 1,
        when="AMD, several ranks",
        why="Two queues for computation and two for RCCL are the four that the hardware runs best.",
        source="ROCm MI300X workload guide",
    ),
    Rule(
        name="CUBLAS_WORKSPACE_CONFIG",
        value=":4096:8",
        applies=lambda facts: facts.deterministic,
        when="`training.deterministic`",
        why="cuBLAS gives the same result twice only with workspaces of its own for each stream.",
        source="PyTorch, torch.use_deterministic_algorithms",
    ),
    Rule(
        name="NCCL_ALGO",
        value="Ring",
        applies=lambda facts: facts.deterministic and facts.has_gpu and facts.world > 1,
        when="`training.deterministic`, GPU, several ranks",
        why="Sums over ranks have one order; else NCCL chooses by size and topology.",
        source="Megatron-LM, deterministic mode",
    ),
)


def settings(facts: Facts) -> dict[str, str]:
    """Value of each variable that the facts of a process ask for."""
    return {rule.name: rule.value.format(facts=facts) for rule in RULES if rule.applies(facts)}
