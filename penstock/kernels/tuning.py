"""How kernels are launched, as data: block sizes, warps and pipeline depth by chip and shape class.

A `Launch` never changes what a kernel computes, only how fast. The tables are filled from measurements by hand or by
`penstock kernels tune`; nothing here is tried out inside a training step.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

import torch

INTERPRETER = "interpreter"
"""The target's name where kernels run in Triton's interpreter on the CPU."""

GemmProduct = Literal[
    "forward",
    "forward_gathered",
    "input_gradient",
    "weight_gradient",
    "weight_gradient_gathered",
    "weight_gradient_accumulated",
]
"""What a grouped GEMM computes, as far as launches differ; gathered and accumulated counts as accumulated."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one kernel is cut into programs.

    Attributes:
        block_rows: rows of the output (or of the tensor) that one program holds at a time.
        block_columns: columns of the same.
        block_depth: elements of the contracted dimension in one step; 0 where nothing is contracted.
        warps: warps (waves) of one program.
        stages: depth of software pipelining of loads.
    """

    block_rows: int
    block_columns: int
    block_depth: int = 0
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, kw_only=True)
class GemmLaunch(Launch):
    """How a persistent matrix product is cut and ordered.

    Attributes:
        group: output blocks that are walked down before the next column of blocks, for reuse in the L2 cache.
        pieces: power of two of pieces that an output block is written in; each has to find room in shared memory.
        descriptors: copy blocks by descriptors (NVIDIA's tensor memory accelerator) instead of pointers.
        residency: programs that share a multiprocessor, so that one multiplies while the other writes.
        idle_units: multiprocessors that are left to others, such as communication.
    """

    group: int = 8
    pieces: int = 1
    descriptors: bool = True
    residency: int = 1
    idle_units: int = 0


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


def programs_of(launch: GemmLaunch, device: torch.device) -> int:
    """Programs that a persistent kernel starts; a few in the interpreter, so that each sees several tiles there too."""
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
    return max(units - launch.idle_units, 1) * launch.residency


@dataclass(frozen=True, kw_only=True)
class GemmRule:
    """A launch and the shapes that it is for.

    Attributes:
        launch: how to cut the product.
        matrix_from: least elements (width x depth) of an expert's matrix.
        rows_from: least rows of an expert, on average over the buffer.
    """

    launch: GemmLaunch
    matrix_from: int = 0
    rows_from: int = 0


# Two programs halve a multiprocessor: while one writes its tile, the other multiplies. Or one program has all of it,
# with tiles twice as wide, which need less traffic.
_PAIR = GemmLaunch(block_rows=128, block_columns=128, block_depth=64, warps=4, stages=3, pieces=2, residency=2)
_WIDE = GemmLaunch(block_rows=128, block_columns=256, block_depth=64, warps=8, stages=4, pieces=2)
_PAIR_IN_FOUR = replace(_PAIR, pieces=4)
# A tile of float32 takes twice the room to write.
_WIDE_FLOAT32 = replace(_WIDE, stages=3)
_SQUARE_FLOAT32 = replace(_WIDE, block_columns=128)
# Where no copy engine reads descriptors. Twice as wide, the other products spill on one chip or another.
_POINTERS = GemmLaunch(block_rows=128, block_columns=128, block_depth=64, warps=8, stages=2, descriptors=False)
_POINTERS_WIDE = replace(_POINTERS, block_columns=256)
_SMALL = replace(_POINTERS, block_rows=64, block_columns=64, block_depth=32, warps=4)

_HOPPER = (GemmRule(launch=_WIDE, matrix_from=1 << 24), GemmRule(launch=_PAIR))
_BLACKWELL = (GemmRule(launch=_WIDE_FLOAT32),)
_AMD: dict[GemmProduct, tuple[GemmRule, ...]] = {
    "forward": (GemmRule(launch=_POINTERS_WIDE),),
    "forward_gathered": (GemmRule(launch=_POINTERS_WIDE),),
    "input_gradient": (GemmRule(launch=_POINTERS),),
    "weight_gradient": (GemmRule(launch=_POINTERS),),
    "weight_gradient_gathered": (GemmRule(launch=_POINTERS),),
    "weight_gradient_accumulated": (GemmRule(launch=_POINTERS),),
}

GROUPED_GEMM: dict[str, dict[GemmProduct, tuple[GemmRule, ...]]] = {
    "sm_90": {
        "forward": _HOPPER,
        "forward_gathered": (GemmRule(launch=_PAIR_IN_FOUR),),
        "input_gradient": _HOPPER,
        "weight_gradient": _HOPPER,
        "weight_gradient_gathered": (GemmRule(launch=_PAIR_IN_FOUR),),
        "weight_gradient_accumulated": (
            GemmRule(launch=_WIDE_FLOAT32, rows_from=2048),
            GemmRule(launch=_SQUARE_FLOAT32),
        ),
    },
    "sm_100": dict.fromkeys(get_args(GemmProduct), _BLACKWELL),
    "gfx942": _AMD,
    "gfx950": _AMD,
}
"""By target and product; the first rule that fits is taken, and the last fits all.

sm_90 is measured on one H200 (docs/decisions/0100). The others are not: they are the largest that do not spill.
"""


@dataclass(frozen=True)
class GemmShape:
    """What the host knows of a grouped product: everything but the counts.

    Attributes:
        rows: R, rows of the buffer.
        experts: e, matrices.
        matrix: elements of one of them.
        dtype: of the operands.
        device: where they are.
    """

    rows: int
    experts: int
    matrix: int
    dtype: torch.dtype
    device: torch.device


def grouped_gemm_launch(product: GemmProduct, shape: GemmShape) -> GemmLaunch:
    """The table's launch; a small one that runs anywhere for float32, the interpreter and chips without a table."""
    rules = GROUPED_GEMM.get(target_of(shape.device))
    if rules is None or shape.dtype == torch.float32:
        return _SMALL
    fitting = (
        rule.launch
        for rule in rules[product]
        if shape.matrix >= rule.matrix_from and shape.rows >= rule.rows_from * shape.experts
    )
    return next(fitting)
