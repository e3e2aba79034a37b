"""Compile the kernels that a function launches, for a chip that is not present, and read the result.

    gate_up_RF = on_meta(8192, 2816)
    (compiled,) = compile_launches("gfx942", lambda: swiglu_forward(gate_up_RF))

The function runs on tensors of the meta device, where `start_kernel` is replaced and the chip is taken to be the given
one. So a kernel is compiled with the arguments, constants, warps and registers of its real launch, specialized by
Triton's own launcher: numbers that are 1 or multiples of 16, pointers that are multiples of 16 bytes, descriptors.

It needs no GPU. The tests of this process may run kernels in Triton's interpreter, whose functions cannot be compiled,
so one other process compiles for the whole session; results are cached.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class Target:
    """A chip to compile for."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    matrix_instruction: str  # regular expression
    shared_bytes: int  # most of one program


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("sm_90", "cuda", 90, 32, r"wgmma\.mma_async", 227 * 1024),
        Target("sm_100", "cuda", 100, 32, r"tcgen05\.mma", 227 * 1024),
        Target("gfx942", "hip", "gfx942", 64, r"v_mfma_", 64 * 1024),
        Target("gfx950", "hip", "gfx950", 64, r"v_mfma_", 160 * 1024),
    )
}
AMPERE = Target("sm_80", "cuda", 80, 32, r"mma\.sync", 163 * 1024)  # A100: launches of the grouped products only
CHIPS = {**TARGETS, AMPERE.name: AMPERE}


@dataclass(frozen=True)
class Compiled:
    """Result of compiling one kernel for one target."""

    kernel: str
    asm: str  # PTX, or AMD's assembly
    ttgir: str  # Triton's GPU dialect, which shows pipelining and layouts
    registers: int  # vector registers of a thread, with those of accumulation
    spills: int  # bytes of a thread that did not fit into registers; must be 0 for a launch table
    shared_bytes: int  # of one program
    matrix_instructions: int

    @property
    def summary(self) -> str:
        return (
            f"{self.kernel}: {self.registers} registers, {self.spills} bytes spilled, {self.shared_bytes} bytes "
            f"shared, {self.matrix_instructions} matrix instructions"
        )


@dataclass(frozen=True)
class _Pointer:
    """A tensor in the place of an argument, as far as Triton's launcher looks at it."""

    dtype: torch.dtype
    address: int  # modulo 16

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True)
class _Job:
    """One compilation as it is sent to the other process."""

    module: str
    kernel: str
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    target: Target


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory, whose address is a multiple of 16 bytes."""
    return torch.empty(shape, dtype=dtype, device="meta")


def compile_launches(target: str, call: Callable[[], object]) -> list[Compiled]:
    """Compile every kernel that `call` launches, in the order of the launches, for a chip of `CHIPS`."""
    jobs = []

    def start_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, notes: Any = (), **constants: Any) -> None:
        names = kernel.fn.__module__, kernel.fn.__name__
        jobs.append(_Job(*names, tuple(map(_without_memory, arguments)), constants, CHIPS[target]))

    with pytest.MonkeyPatch.context() as patch:
        for module in [one for name, one in sys.modules.items() if name.startswith("penstock.kernels.")]:
            for name, stand_in in (("start_kernel", start_kernel), ("target_of", lambda device: target)):
                if name in vars(module):
                    patch.setattr(module, name, stand_in)
        call()
    return [_compile_elsewhere(job) for job in jobs]


def compile_without_spills(target: str, call: Callable[[], object]) -> list[Compiled]:
    """`compile_launches`, and fail if registers spill, shared memory is too small, or nothing is launched."""
    found = compile_launches(target, call)
    assert found, "no kernel was launched"
    for compiled in found:
        assert compiled.spills == 0 and compiled.shared_bytes <= CHIPS[target].shared_bytes, compiled.summary
    return found


def _without_memory(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return _Pointer(argument.dtype, argument.data_ptr() % 16)
    if is_dataclass(argument):  # a descriptor
        return replace(argument, base=_without_memory(argument.base), shape=list(argument.shape))
    return argument


@cache
def _compiler_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"), initializer=_leave_the_interpreter)


def end_compiler() -> None:
    """End the process that compiles, if there is one."""
    if _compiler_process.cache_info().currsize:
        _compiler_process().shutdown()
        _compiler_process.cache_clear()


_COMPILED: dict[str, Compiled] = {}


def _compile_elsewhere(job: _Job) -> Compiled:
    key = repr(job)
    if key not in _COMPILED:
        _COMPILED[key] = _compiler_process().submit(_compile, job).result()
    return _COMPILED[key]


def _leave_the_interpreter() -> None:
    """Runs first in the other process, before Triton is imported there; without source lines for debuggers."""
    os.environ.update(TRITON_INTERPRET="0", TRITON_DISABLE_LINE_INFO="1")


@dataclass(frozen=True)
class _Driver:
    """The driver of a chip that is not there: what Triton's launcher asks before it compiles."""

    chip: Target

    def get_current_target(self) -> Any:
        target = import_module("triton.backends.compiler").GPUTarget
        return target(self.chip.backend, self.chip.arch, self.chip.warp_size)

    def get_current_device(self) -> str:
        return self.chip.name  # compiled kernels are kept by device

    def get_current_stream(self, device: str) -> int:
        return 0


def _compile(job: _Job) -> Compiled:
    """Compiles in the other process."""
    import_module("triton.runtime").driver.set_active(_Driver(job.target))
    kernel = getattr(import_module(job.module), job.kernel)
    built = kernel.warmup(*job.arguments, **job.constants, grid=(1,))
    asm = built.asm["ptx" if job.target.backend == "cuda" else "amdgcn"]
    registers, spills = (
        _resources_of_cubin(built.asm["cubin"]) if job.target.backend == "cuda" else _resources_of_amdgcn(asm)
    )
    return Compiled(
        kernel=job.kernel,
        asm=asm,
        ttgir=built.asm["ttgir"],
        registers=registers,
        spills=spills,
        shared_bytes=built.metadata.shared,
        matrix_instructions=len(re.findall(job.target.matrix_instruction, asm)),
    )


def _resources_of_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes by the disassembler in Triton's package; the stack of a kernel holds its spills."""
    tool = Path(import_module("triton").__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers = re.search(r"REG:(\d+)", report)
    stack = re.search(r"STACK:(\d+)", report)
    assert registers and stack, f"cuobjdump reported no resources: {report}"
    return int(registers[1]), int(stack[1])


def _resources_of_amdgcn(asm: str) -> tuple[int, int]:
    """Registers and scratch bytes from the metadata of the assembly; moves into vector lanes cost no memory."""
    fields = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", asm))
    return int(fields["vgpr_count"]), int(fields["private_segment_fixed_size"])
