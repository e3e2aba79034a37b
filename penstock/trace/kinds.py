"""Which kernel talks to other ranks, and through which library: known by its name.

Only the name of the function counts. Arguments of its template and its parameters are cut off first, because a
reduction inside one block may name a type after an all-reduce. What counts as communication:

- NCCL and RCCL in all spellings of their history, MSCCL, Gloo's and vendors' own,
- DeepEP, MORI, NVSHMEM, rocSHMEM: kernels that write into other devices' memory themselves,
- PyTorch's symmetric memory and multimem kernels, custom all-reduces of inference engines, user buffers,
- our own: rows pushed, taken and returned through symmetric memory, sums over ranks, and the wait for flags.

Counting which rows go where (`deep_ep::layout`) stays on the device and is compute. Copies are copies even if they go
to another device, as in every other tool: the timeline has its own line for them.
"""

import re
from functools import lru_cache

from penstock.trace.events import GpuKind

OWN = "penstock"
"""The library of our own kernels."""

_LIBRARIES: tuple[tuple[str, str], ...] = (
    ("nccl", r"^(?:\w+::)*(?:nccl|rccl|mscclpp|msccl|hccl|oneccl)|nccldevkernel|ncclkernel|ncclsym|mscclkernel"),
    ("deep_ep", r"deep_ep(?!::layout|6layout)|hybrid_ep|uccl::"),
    ("mori", r"mori::|ep(?:dispatch|combine)\w*kernel"),
    ("nvshmem", r"nvshmem|rocshmem|roc_shmem|pplx"),
    (OWN, r"^(?:push_rows|take_rows|return_rows|sum_ranks|wait|hold|signal)_kernel$"),
    (
        "symmetric",
        r"multimem|symmetric_memory|symm_mem|(?:one|two)_?shot_all_?reduce"
        r"|(?:put|wait)_signal_kernel|exchangesplitandoffset|alltoallv",
    ),
    ("userbuffers", r"userbuffers"),
    ("custom", r"cross_device_reduce|lamport|(?<!block)(?<!warp)(?<!block_)(?<!warp_)all_?reduce"),
    ("custom", r"all_?gather|reduce_?scatter|all_?to_?all|moe_?a2a"),
)
"""Names of libraries, and what is found in the names of their functions in small letters."""

_LONGEST = 256
"""Letters of a name that are looked at: mangled names go on for thousands with the arguments of their templates."""

_PATTERNS = tuple((library, re.compile(pattern)) for library, pattern in _LIBRARIES)


def function_of(kernel: str) -> str:
    """The name of a kernel's function, with its namespaces, without return type, template and parameters.

    `void at::native::(anonymous namespace)::sum<float>(float*)` is `at::native::sum`.
    """
    bare = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    if bare.startswith("std::enable_if"):
        bare = bare.partition("::type ")[2]
    return re.split(r"[<(]", bare, maxsplit=1)[0][:_LONGEST].strip()


@lru_cache(maxsize=65536)
def library_of(kernel: str) -> str | None:
    """The library through which a kernel talks to other ranks, or None if it does not."""
    function = function_of(kernel).lower()
    if function.startswith("at::native::"):
        return None
    return next((library for library, pattern in _PATTERNS if pattern.search(function)), None)


def kind_of(category: str, name: str) -> GpuKind:
    """What an event on a GPU is, by the category (`kernel`, `gpu_memcpy`, once `Memcpy`) and name in the file."""
    if category.lower().endswith("memcpy"):
        return GpuKind.COPY
    if category.lower().endswith("memset"):
        return GpuKind.SET
    return GpuKind.COMPUTE if library_of(name) is None else GpuKind.COMMUNICATION
