"""Variables of the shell that slow a run down or break it, each left over from a debugging session or another program.

What Penstock sets itself (docs/environment.md) is not here: a shell's choice against that is told by every run.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.tune.preflight.check import Check, Status, fine

ON = r"1|true|on|yes|y"


@dataclass(frozen=True, kw_only=True)
class Hurtful:
    """A variable that hurts.

    Attributes:
        name: of it.
        when: values that do, as a pattern of the whole, in any case.
        what: that they do.
        status: how bad that is.
    """

    name: str
    when: str
    what: str
    status: Status = "warning"


HURTFUL: tuple[Hurtful, ...] = (
    Hurtful(name="CUDA_LAUNCH_BLOCKING", when=ON, what="the host waits for every kernel"),
    Hurtful(name="HIP_LAUNCH_BLOCKING", when=ON, what="the host waits for every kernel"),
    Hurtful(name="AMD_SERIALIZE_KERNEL", when="[1-3]", what="the host waits for every kernel"),
    Hurtful(name="AMD_SERIALIZE_COPY", when="[1-3]", what="the host waits for every copy"),
    Hurtful(name="CUDA_DEVICE_MAX_CONNECTIONS", when="1", what="kernels that could overlap run one after the other"),
    Hurtful(name="GPU_MAX_HW_QUEUES", when="1", what="kernels that could overlap run one after the other"),
    Hurtful(name="NCCL_P2P_DISABLE", when=r"(?!0$).+", what="GPUs of a node speak through host memory"),
    Hurtful(name="NCCL_SHM_DISABLE", when=r"(?!0$).+", what="GPUs without a direct link speak over the network"),
    Hurtful(name="NCCL_IB_DISABLE", when=r"(?!0$).+", what="nodes speak over TCP and not over InfiniBand or RoCE"),
    Hurtful(name="NCCL_NET_GDR_LEVEL", when="0|LOC", what="what goes to other nodes is copied to host memory first"),
    Hurtful(name="NCCL_DEBUG", when="INFO|TRACE", what="every collective is logged"),
    Hurtful(name="NCCL_ALGO", when=".+", what="one algorithm for all sizes; right for training.deterministic only"),
    Hurtful(name="NCCL_PROTO", when=".+", what="one protocol for all sizes"),
    Hurtful(name="NCCL_LAUNCH_MODE", when="GROUP", what="collectives of different groups wait for each other"),
    Hurtful(name="TORCH_DISTRIBUTED_DEBUG", when="DETAIL", what="every collective is checked by another one"),
    Hurtful(name="TORCH_NCCL_BLOCKING_WAIT", when=ON, what="the host waits for every collective"),
    Hurtful(name="PYTORCH_NO_CUDA_MEMORY_CACHING", when=".+", what="the driver is asked for every tensor"),
    Hurtful(name="PYTORCH_NO_HIP_MEMORY_CACHING", when=".+", what="the driver is asked for every tensor"),
    Hurtful(
        name="TRITON_INTERPRET", when=ON, what="Triton's kernels are run by Python, number by number", status="failed"
    ),
    Hurtful(name="TRITON_ALWAYS_COMPILE", when=ON, what="kernels are compiled anew in every process"),
    Hurtful(name="PYTHONDEVMODE", when=".+", what="Python checks itself at every step"),
    Hurtful(name="PYTHONMALLOC", when=".*debug", what="Python checks its memory at every step"),
)
"""Sources: NCCL, PyTorch, CUDA, HIP, Triton and Python, each on its own variables."""


def check_environment(variables: Mapping[str, str], *, has_gpu: bool) -> list[Check]:
    """Variables that hurt, or that there is none.

    Args:
        variables: those of `HURTFUL` that are set.
        has_gpu: the run would be on GPUs; without one, Triton's interpreter is how tests run kernels.
    """
    found = []
    for one in HURTFUL:
        value = variables.get(one.name)
        if value is None or not re.fullmatch(one.when, value.strip(), re.IGNORECASE):
            continue
        found.append(
            Check(
                area="environment",
                name=one.name,
                status=one.status if has_gpu or one.status != "failed" else "warning",
                got=f"{value.strip()}: {one.what}",
                expected="not set",
                fix=f"unset {one.name}",
            )
        )
    return found or [fine("environment", "variables", f"none of {len(HURTFUL)} that hurt is set")]
