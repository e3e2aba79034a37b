"""Launches of kernels as data: block sizes, warps and pipeline depth by chip and shape class, in `launches.toml`.

A `KernelLaunch` never changes the result of a kernel, only its speed. The data hold measured choices; nothing is tried
out inside a training step.

`DeviceFacts` is what the choice of kernels depends on; the device may be present or only known by name.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from penstock.base.devices import chip_named, chips
from penstock.base.errors import DeviceError, did_you_mean
from penstock.base.origin import version_of

INTERPRETER = "interpreter"  # target of kernels in Triton's interpreter on the CPU

# Products of a grouped GEMM that have launches of their own; gathered and accumulated counts as accumulated.
GemmProduct = Literal[
    "forward",
    "forward_gathered",
    "input_gradient",
    "weight_gradient",
    "weight_gradient_gathered",
    "weight_gradient_accumulated",
]


@dataclass(frozen=True, kw_only=True)
class KernelLaunch:
    """How one kernel is cut into programs."""

    block_rows: int  # of the output (or of the tensor) that one program holds at a time
    block_columns: int
    block_depth: int = 0  # elements of the contracted dimension in one step; 0 where nothing is contracted
    warps: int = 4  # warps (waves) of one program
    stages: int = 3  # depth of software pipelining of loads
    registers: int = 0  # most of a thread on NVIDIA's chips; 0 leaves them to the compiler
    # `gluon`: the kernel for Hopper, or one in Triton where it cannot run. A producer of such a matrix product fills a
    # ring of `stages` slots for consumers of `warps` warps each.
    engine: Literal["triton", "gluon"] = "triton"


@dataclass(frozen=True, kw_only=True)
class GemmLaunch(KernelLaunch):
    """How a persistent matrix product is cut and ordered."""

    group: int = 8  # output blocks walked down before the next column of blocks, for reuse in the L2 cache
    pieces: int = 1  # power of two of pieces in which an output block is written; a piece fits in shared memory
    descriptors: bool = True  # copy blocks by descriptors (NVIDIA's tensor memory accelerator) instead of pointers
    residency: int = 1  # programs that share a multiprocessor, so that one multiplies while the other writes
    idle_units: int = 0  # multiprocessors left to other kernels, such as communication
    copy_gathered: bool = False  # gather rows into a copy first, instead of while they are loaded

    @property
    def constants(self) -> dict[str, int]:
        """Constants of all kernels in Triton that multiply matrices."""
        tile = {"BLOCK_ROWS": self.block_rows, "BLOCK_COLUMNS": self.block_columns}
        return {**tile, "GROUP": self.group, "PIECES": self.pieces, "DESCRIPTORS": self.descriptors}


@cache
def target_of(device: torch.device) -> str:
    """The chip of a device as launch tables and `tests/kernels/ahead_of_time.py` name it: `sm_90`, `gfx942`, ...

    A CPU is `interpreter`: kernels can only be interpreted there.
    """
    if device.type != "cuda":
        return INTERPRETER
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def multiprocessors_of(device: torch.device) -> int:
    """Multiprocessors of a device; 3 in the interpreter, so that each program walks over several tiles there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


RESIDENCY = 16  # programs of four warps that a multiprocessor holds at a time


def capped_programs(blocks: int, device: torch.device) -> int:
    """Programs of four warps for blocks of which only the device knows how many are empty."""
    return min(blocks, RESIDENCY * multiprocessors_of(device))


def programs_of(launch: GemmLaunch, device: torch.device) -> int:
    """Programs that a persistent kernel starts."""
    return max(multiprocessors_of(device) - launch.idle_units, 1) * launch.residency


@cache
def launch_tables() -> Mapping[str, Mapping[str, Any]]:
    """Sections of launches by target, as `launches.toml` has them; `any` is no chip."""
    return MappingProxyType(tomllib.loads(Path(__file__).with_name("launches.toml").read_text(encoding="utf-8")))


@cache
def section(target: str, name: str) -> Mapping[str, Any]:
    """A chip's section, or that of the chip that it is like; empty if neither has it."""
    chip = launch_tables().get(target, {})
    mine: Mapping[str, Any] = chip.get(name) or launch_tables().get(chip.get("like", ""), {}).get(name, {})
    return mine


def section_or_any(target: str, name: str) -> Mapping[str, Any]:
    """The same, or what runs anywhere; chips of AMD that have no launches take those of one that has."""
    near = target if target in launch_tables() or not target.startswith("gfx") else "gfx942"
    return section(near, name) or section("any", name)


# Launches, each with the smallest matrix of an expert (width x depth elements) that it is for; ascending from 0.
LaunchBySize = tuple[tuple[int, GemmLaunch], ...]


def _sized(rows: Mapping[str, Mapping[str, Any]]) -> LaunchBySize:
    return tuple((int(least), GemmLaunch(**fields)) for least, fields in rows.items())


def _grouped_gemm(target: str) -> dict[GemmProduct, LaunchBySize]:
    rows = section(target, "grouped_gemm")
    return {product: _sized(rows.get(product) or rows["every"]) for product in get_args(GemmProduct)}


# By target and product; `LAUNCHES_FROM` says where they come from.
GROUPED_GEMM: dict[str, dict[GemmProduct, LaunchBySize]] = {
    target: _grouped_gemm(target) for target in launch_tables() if target != "any"
}

LAUNCHES_FROM: Mapping[str, str] = MappingProxyType(
    {target: launch_tables()[target]["source"] for target in GROUPED_GEMM}
)
"""Source of each target's launches, in the words of hardware files."""

_IN_TRITON = {name: _sized(rows) for name, rows in section("sm_90", "grouped_gemm_in_triton").items()}
_SMALL = GemmLaunch(block_rows=64, block_columns=64, block_depth=32, warps=4, stages=2, descriptors=False)


def in_triton(launch: GemmLaunch, product: GemmProduct, matrix: int = 0) -> GemmLaunch:
    """The launch itself, or its replacement in Triton on the same multiprocessors where it is a Hopper kernel's.

    `matrix` is the elements of one expert's matrix, where rows are multiplied with it.
    """
    if launch.engine == "triton":
        return launch
    launches = _IN_TRITON["weight_gradient" if product.startswith("weight_gradient") else "rows"]
    return replace(_by_size(launches, matrix), idle_units=launch.idle_units)


def grouped_gemm_launch(product: GemmProduct, device: torch.device, dtype: torch.dtype, matrix: int) -> GemmLaunch:
    """The table's launch for one product of a grouped GEMM.

    Float32, the interpreter and chips without a table take a small launch that runs anywhere.
    """
    launches = GROUPED_GEMM.get(target_of(device))
    if launches is None or dtype == torch.float32:
        return _SMALL
    return _by_size(launches[product], matrix)


def _by_size(launches: LaunchBySize, matrix: int) -> GemmLaunch:
    return [launch for least, launch in launches if matrix >= least][-1]


Dtype = Literal["bf16", "fp32"]  # compute dtype of a model, as in `training.precision`

TRITON_PACKAGE = "triton"  # Triton's package, which may be missing
PACKAGES: tuple[str, ...] = (TRITON_PACKAGE,)  # that some backend needs besides PyTorch
FLASH_4 = "flash-attn-4"  # optional package of attention kernels


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """A device and the packages installed for it."""

    kind: Literal["cuda", "cpu"]  # `cuda` for AMD's too
    name: str  # as the driver reports it; `CPU` for every CPU
    target: str  # the chip as launch tables name it
    packages: frozenset[str]  # those of `PACKAGES` that are installed, and `FLASH_4` if it is
    dtype: Dtype

    @property
    def has_triton(self) -> bool:
        return TRITON_PACKAGE in self.packages


def installed(packages: Iterable[str] = PACKAGES) -> frozenset[str]:
    """Those of the packages that can be imported; imports none."""
    return frozenset(package for package in packages if find_spec(package) is not None)


def extras() -> frozenset[str]:
    """`FLASH_4` if it is installed; imports nothing."""
    return frozenset() if version_of(FLASH_4) is None else frozenset({FLASH_4})


def device_facts(device: torch.device, dtype: Dtype) -> DeviceFacts:
    is_gpu = device.type == "cuda"
    return DeviceFacts(
        kind="cuda" if is_gpu else "cpu",
        name=torch.cuda.get_device_name(device) if is_gpu else "CPU",
        target=target_of(device),
        packages=installed() | extras(),
        dtype=dtype,
    )


def named_device(name: str, dtype: Dtype) -> DeviceFacts:
    """The facts of a GPU by name, with `PACKAGES` installed and no others; raises DeviceError for unknown names.

    The name is the driver's, or the part of it by which people know the chip: `H200`.
    """
    chip = chip_named(name)
    if chip is None:
        known = [chip.pattern for chip in chips()]
        raise DeviceError(
            "no device is known by this name",
            got=repr(name),
            allowed=f"auto, cpu, cuda, or {', '.join(known)}",
            fix=did_you_mean(name, ("auto", "cpu", "cuda", *known)),
        )
    return DeviceFacts(
        kind="cuda",
        name=chip.name if name.lower() == chip.pattern.lower() else name,
        target=chip.target,
        packages=frozenset(PACKAGES),
        dtype=dtype,
    )
