"""Launches of kernels as data: block sizes, warps and pipeline depth by chip and shape class.

A `KernelLaunch` never changes the result of a kernel, only its speed. The tables hold measured choices; nothing is
tried out inside a training step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Literal, get_args

import torch

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


@dataclass(frozen=True, kw_only=True)
class RingLaunch(GemmLaunch):
    """How the weight-gradient kernel for Hopper (`penstock.kernels.gluon.grouped_gemm`) is cut.

    A producer fills a ring of `stages` slots for two consumers of four warps, `warps`, which take tiles in turn.
    `in_triton` gives the launch to use where this kernel is not available.
    """

    copy_gathered: bool = True


@dataclass(frozen=True, kw_only=True)
class RowsRingLaunch(GemmLaunch):
    """Like `RingLaunch`, for the Hopper kernel of experts' rows (forward and input gradient)."""

    copy_gathered: bool = True


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


# Launches, each with the smallest matrix of an expert (width x depth elements) that it is for; ascending from 0.
LaunchBySize = tuple[tuple[int, GemmLaunch], ...]

# Two programs halve a multiprocessor: while one writes its tile, the other multiplies. Or one program has all of it,
# with tiles twice as wide, which need less traffic.
_PAIR = GemmLaunch(block_rows=128, block_columns=128, block_depth=64, warps=4, stages=3, pieces=2, residency=2)
_WIDE = GemmLaunch(block_rows=128, block_columns=256, block_depth=64, warps=8, stages=4, pieces=2)
# A tile of float32 takes twice the room to write.
_WIDE_FLOAT32 = replace(_WIDE, pieces=4)
# Where no copy engine reads descriptors. Twice as wide, the other products spill on one chip or another.
_POINTERS = GemmLaunch(block_rows=128, block_columns=128, block_depth=64, warps=8, stages=2, descriptors=False)
_POINTERS_WIDE = replace(_POINTERS, block_columns=256)
_SMALL = replace(_POINTERS, block_rows=64, block_columns=64, block_depth=32, warps=4)

# More slots, or all of a tile of 16 bits and half of one of 32 bits in shared memory while it is written.
_RING = RingLaunch(block_rows=128, block_columns=128, block_depth=64, stages=6, pieces=8)
_RING_5 = replace(_RING, stages=5, pieces=4)
_ROWS_RING = RowsRingLaunch(block_rows=128, block_columns=128, block_depth=64, stages=6, pieces=4)

_BLACKWELL: dict[GemmProduct, LaunchBySize] = dict.fromkeys(
    get_args(GemmProduct), ((0, replace(_WIDE_FLOAT32, stages=3)),)
)
_HOPPER: LaunchBySize = ((0, _PAIR), (1 << 24, _WIDE))
_AMPERE: dict[GemmProduct, LaunchBySize] = dict.fromkeys(get_args(GemmProduct), ((0, _POINTERS),))
_AMD: dict[GemmProduct, LaunchBySize] = {
    **_AMPERE,
    "forward": ((0, _POINTERS_WIDE),),
    "forward_gathered": ((0, _POINTERS_WIDE),),
}

# By target and product; `LAUNCHES_FROM` says where they come from.
GROUPED_GEMM: dict[str, dict[GemmProduct, LaunchBySize]] = {
    "sm_90": {
        "forward": ((0, _ROWS_RING),),
        "forward_gathered": ((0, _PAIR),),
        "input_gradient": ((0, _ROWS_RING),),
        "weight_gradient": ((0, _RING),),
        "weight_gradient_gathered": ((0, _RING),),
        "weight_gradient_accumulated": ((0, _RING), (1 << 23, _RING_5)),
    },
    "sm_80": _AMPERE,
    "sm_100": _BLACKWELL,
    "sm_103": _BLACKWELL,
    "gfx942": _AMD,
    "gfx950": _AMD,
}

_UNSPILLED = "assumed: the largest tiles that the compiler does not spill"
# Source of each target's launches, in the words of hardware files.
LAUNCHES_FROM: Mapping[str, str] = MappingProxyType(
    {
        "sm_80": f"{_UNSPILLED}, without the copy engine's descriptors",
        "sm_90": "measured: one H200, docs/decisions/0100 to 0104",
        "sm_100": _UNSPILLED,
        "sm_103": "assumed: as on sm_100, its nearest relative",
        "gfx942": _UNSPILLED,
        "gfx950": "assumed: as on gfx942, its nearest relative",
    }
)


def in_triton(launch: GemmLaunch, matrix: int = 0) -> GemmLaunch:
    """The launch itself, or its replacement in Triton on the same multiprocessors where it is a Hopper kernel's.

    `matrix` is the elements of one expert's matrix, where rows are multiplied with it.
    """
    if isinstance(launch, RowsRingLaunch):
        return replace(_by_size(_HOPPER, matrix), idle_units=launch.idle_units)
    if not isinstance(launch, RingLaunch):
        return launch
    return replace(_WIDE_FLOAT32, idle_units=launch.idle_units, copy_gathered=launch.copy_gathered)


def grouped_gemm_launch(product: GemmProduct, device: torch.device, dtype: torch.dtype, matrix: int) -> GemmLaunch:
    """The table's launch for one product of a grouped GEMM.

    Float32, the interpreter and chips without a table take a small launch that runs anywhere.
    """
    launches = GROUPED_GEMM.get(target_of(device))
    if launches is None or dtype == torch.float32:
        return _SMALL
    return _by_size(launches[product], matrix)


def _by_size(launches: LaunchBySize, matrix: int) -> GemmLaunch:
    """The launch for matrices of so many elements."""
    return [launch for least, launch in launches if matrix >= least][-1]
