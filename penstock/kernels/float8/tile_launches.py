"""How kernels that quantize tiles are launched, as data; see `penstock.kernels.tuning`.

A launch may name Hopper's own kernels for tiles that are also transposed (`penstock.kernels.gluon`). Runs take
what was fastest on an H200 (benchmarks/results/float8-swiglu-h200.json, float8-quantize-launches-h200.json).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from penstock.kernels.float8.recipes import ALIGNMENT
from penstock.kernels.tuning import GemmLaunch, KernelLaunch


@dataclass(frozen=True, kw_only=True)
class TileLaunch(KernelLaunch):
    """How quantization is cut.

    Attributes:
        registers: most of a thread on NVIDIA's chips; 0 leaves them to the compiler.
        engine: `triton`, or `gluon` for Hopper's own kernel; where that cannot, Triton's is launched as `TRANSPOSING`.
    """

    registers: int = 0
    engine: Literal["triton", "gluon"] = "triton"


TRANSPOSING = TileLaunch(block_rows=ALIGNMENT, block_columns=ALIGNMENT, warps=8, registers=128)
"""64 numbers a thread. Two such programs share a multiprocessor, so that one loads while the other computes; left alone
the compiler can take more than 128 registers, with which only one has room. At 128 it spills none."""

TURNING = replace(TRANSPOSING, warps=16)
"""Where pairs of columns are turned first, whose angles need registers too. The compiler takes fewer than 128, so as
many threads share a multiprocessor."""

ROWS_ONLY = TileLaunch(block_rows=32, block_columns=128, warps=4)
"""Where nothing is transposed: a block of depth 128, four loads of 16 bytes a thread. On an H200 as fast as a copy."""

TRANSPOSING_LAUNCHES: Mapping[str, TileLaunch] = MappingProxyType(
    {
        "triton": TRANSPOSING,
        # Five programs share a multiprocessor; four of more registers; four of twice as many threads.
        "gluon": replace(TRANSPOSING, engine="gluon", warps=4, registers=96),
        "gluon_128": replace(TRANSPOSING, engine="gluon", warps=4, registers=128),
        "gluon_8": replace(TRANSPOSING, engine="gluon", warps=8, registers=64),
    }
)
"""What `benchmarks.kernels.float8_quantize --launches` tries."""

TRANSPOSING_TAKEN = TRANSPOSING_LAUNCHES["gluon"]
"""What runs take."""

TURNING_TAKEN = TRANSPOSING_LAUNCHES["gluon_128"]
"""What they take where pairs of columns are turned first: with 96 registers some are spilled."""


@dataclass(frozen=True, kw_only=True)
class BackwardLaunch(GemmLaunch):
    """How the gradients of the experts' activation are cut: tiles of 128 x 128.

    Attributes:
        registers: as of `TileLaunch`.
        engine: `triton`, `gluon` for Hopper's own kernel (where that cannot, Triton's is launched as `BACKWARD`), or
            `passes`: in 16 bits, then quantized by passes of their own.
        step: rows that Triton's kernel holds at a time.
        ahead: whether Hopper's kernel loads a turn ahead.
    """

    block_rows: int = 128
    block_columns: int = 128
    warps: int = 8
    residency: int = 2
    registers: int = 128
    engine: Literal["triton", "gluon", "passes"] = "triton"
    step: int = 16
    ahead: bool = False


BACKWARD = BackwardLaunch()
"""Eight numbers a thread at a time. Two programs of 128 registers a thread share a multiprocessor; none is spilled.
Blocks of 32 take some more."""

_HOPPERS = BackwardLaunch(engine="gluon")
_HOPPERS_4 = replace(_HOPPERS, warps=4, registers=255)

BACKWARD_LAUNCHES: Mapping[str, BackwardLaunch] = MappingProxyType(
    {
        "triton": BACKWARD,
        "passes": BackwardLaunch(engine="passes"),
        "gluon": _HOPPERS,
        "gluon_ahead": replace(_HOPPERS, ahead=True),
        "gluon_4": _HOPPERS_4,
        "gluon_4_ahead": replace(_HOPPERS_4, ahead=True),
    }
)
"""What `benchmarks.kernels.float8_swiglu` tries."""

BACKWARD_TAKEN = BACKWARD_LAUNCHES["gluon_ahead"]
"""What runs take."""
