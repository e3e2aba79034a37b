"""Compile a Triton kernel for a chip that is not present, and read the result.

`compile_for(kernel, signature, constexprs, target, ...)` gives a `Compiled`: assembly, registers, spills, shared
memory, matrix instructions. It needs no GPU. The tests of this process may run kernels in Triton's interpreter, whose
functions cannot be compiled, so one other process compiles for the whole session; results are cached.

    TYPES = {"*bf16:16": "x_ptr out_ptr", "i32": "rows"}
    compile_without_spills(swiglu_kernel, TYPES, {"BLOCK": 1024}, TARGETS["gfx942"])

Types: `*bf16` pointer, `i32` number, `tensordesc<bf16[128,64]>` host-made descriptor; `:16` after a type means that the
pointer or number is a multiple of 16, which the launcher finds out at run time and which wide loads need. Arguments
that have no type and are no constants are `i32:16`, or None for a pointer (`*_ptr`).
"""

import inspect
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from penstock.kernels.tuning import GROUPED_GEMM, GemmLaunch

Constant = int | float | bool | str | None


@dataclass(frozen=True)
class Target:
    """A chip to compile for; `matrix_instruction` is a regular expression, `shared_bytes` the limit of one program."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    matrix_instruction: str
    shared_bytes: int


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("sm_90", "cuda", 90, 32, r"wgmma\.mma_async", 227 * 1024),
        Target("sm_100", "cuda", 100, 32, r"tcgen05\.mma", 227 * 1024),
        Target("gfx942", "hip", "gfx942", 64, r"v_mfma_", 64 * 1024),
        Target("gfx950", "hip", "gfx950", 64, r"v_mfma_", 160 * 1024),
    )
}

AMPERE = Target("sm_80", "cuda", 80, 32, r"mma\.sync", 163 * 1024)
"""A100: only the grouped products have launches for it."""


ONE_OF_EACH_MAKER = [
    pytest.param(name, marks=() if name in ("sm_90", "gfx942") else pytest.mark.slow, id=name) for name in TARGETS
]
"""Targets for variants of a kernel whose plain form other tests compile for all of them: those of the newer chips are
slow."""


@dataclass(frozen=True)
class Compiled:
    """Result of compiling one kernel for one target."""

    asm: str  # PTX, or AMD's assembly
    ttgir: str  # Triton's GPU dialect, which shows pipelining and layouts
    registers: int  # vector registers of a thread, with those of accumulation
    spills: int  # bytes of a thread that did not fit into registers; must be 0 for a launch table
    shared_bytes: int  # of one program
    matrix_instructions: int

    @property
    def summary(self) -> str:
        return (
            f"{self.registers} registers, {self.spills} bytes spilled, {self.shared_bytes} bytes shared, "
            f"{self.matrix_instructions} matrix instructions"
        )


@dataclass(frozen=True)
class _Job:
    """One compilation as it is sent to the other process: names and numbers only."""

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Constant], ...]
    target: Target
    options: tuple[tuple[str, int], ...]


def compile_for(
    kernel: Any,
    types: Mapping[str, str] | Sequence[tuple[str, str]],
    constexprs: Mapping[str, Constant],
    target: Target,
    num_warps: int = 4,
    num_stages: int = 3,
    **options: int,
) -> Compiled:
    """Compile a module-level `@triton.jit` function for `target`.

    `types` has names of arguments by type, `constexprs` the values of constants (a dtype as a string,
    "tl.bfloat16"), `options` further options of the backend, such as `waves_per_eu`.
    """
    options = {"num_warps": num_warps, "num_stages": num_stages, **options}
    names = kernel.fn.__module__, kernel.fn.__name__
    signature = {
        name: kind for kind, group in (types.items() if isinstance(types, Mapping) else types) for name in group.split()
    }
    for name, parameter in inspect.signature(kernel.fn).parameters.items():
        if name in signature or name in constexprs or "constexpr" in str(parameter.annotation):
            continue
        if name.endswith("_ptr"):
            constexprs = {**constexprs, name: None}
        else:
            signature[name] = "i32:16"
    return _compile_elsewhere(
        _Job(*names, tuple(signature.items()), tuple(constexprs.items()), target, tuple(options.items()))
    )


def compile_without_spills(*arguments: Any, **options: int) -> Compiled:
    """`compile_for`, and fail if registers spill."""
    compiled = compile_for(*arguments, **options)
    assert compiled.spills == 0, f"{arguments[0].fn.__name__}: {compiled.summary}"
    return compiled


@cache
def _compiler_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"), initializer=_leave_the_interpreter)


@cache
def _compile_elsewhere(job: _Job) -> Compiled:
    return _compiler_process().submit(_compile, job).result()


def _leave_the_interpreter() -> None:
    """Runs first in the other process, before Triton is imported there; without source lines for debuggers."""
    os.environ.update(TRITON_INTERPRET="0", TRITON_DISABLE_LINE_INFO="1")


def _compile(job: _Job) -> Compiled:
    """Compiles in the other process."""
    triton = import_module("triton")
    compiler = import_module("triton.compiler")
    backends = import_module("triton.backends.compiler")
    kernel = getattr(import_module(job.module), job.kernel)
    types = {name: kind.removesuffix(":16") for name, kind in job.signature}
    constants = {name: _constant(value) for name, value in job.constexprs}
    multiples = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, kind in job.signature
        if kind.endswith(":16")
    }
    # The compiler wants every argument in the kernel's own order.
    ordered = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source_of = import_module("triton.experimental.gluon._runtime").GluonASTSource if kernel.is_gluon() else None
    source = (source_of or compiler.ASTSource)(kernel, ordered, constexprs=constants, attrs=multiples)
    target = backends.GPUTarget(job.target.backend, job.target.arch, job.target.warp_size)
    built = triton.compile(source, target=target, options=dict(job.options))
    asm = built.asm["ptx" if job.target.backend == "cuda" else "amdgcn"]
    registers, spills = (
        _resources_of_cubin(built.asm["cubin"]) if job.target.backend == "cuda" else _resources_of_amdgcn(asm)
    )
    return Compiled(
        asm=asm,
        ttgir=built.asm["ttgir"],
        registers=registers,
        spills=spills,
        shared_bytes=built.metadata.shared,
        matrix_instructions=len(re.findall(job.target.matrix_instruction, asm)),
    )


def _constant(value: Constant) -> Any:
    """A constexpr for the compiler: dtypes are sent as text because Triton's cannot be pickled."""
    if isinstance(value, str) and value.startswith("tl."):
        return getattr(import_module("triton.language"), value.removeprefix("tl."))
    return value


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


def those_taken_first(launches: Mapping[str, GemmLaunch]) -> list[Any]:
    """Names of launches as parameters of a test; launches that are in no table are slow tests."""
    taken = [launch for by_size in GROUPED_GEMM["sm_90"].values() for _, launch in by_size]
    return [pytest.param(name, marks=() if launch in taken else pytest.mark.slow) for name, launch in launches.items()]
