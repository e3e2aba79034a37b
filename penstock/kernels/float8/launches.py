"""How products of 8-bit numbers are launched, as data; see `penstock.kernels.tuning`.

Blocks of depth are the recipe's 128. A tile's columns must lie in one block of a weight's scales, so there are 128 at
most.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

import torch

from penstock.kernels.float8.recipes import ALIGNMENT, DEPTH
from penstock.kernels.tuning import GemmLaunch, KernelLaunch, programs_of, target_of

Product = Literal["dense", "dense_gradient", "dense_square", "rows", "rows_gathered", "columns", "columns_square"]
"""What is computed, as far as launches differ: a dense product with a weight; one of two operands that have a scale for
each row, as gradients of dense weights are; one that is added to a sum, of an operand that has scales for squares;
experts' rows, in place or gathered; contracted over experts' rows, both with a scale for each row, or one for squares.
"""


@dataclass(frozen=True, kw_only=True)
class ProductLaunch(GemmLaunch):
    """How a persistent product of 8-bit numbers is cut and ordered.

    Attributes:
        engine: `triton`, or `gluon` for Hopper's own kernels; where those cannot, `in_triton` says what is taken.
        steps: blocks of depth in a turn of the loop, 1 or 2; with 2 a block's sum is scaled while the next one is made.
        ahead: whether scales of blocks of 128 are loaded one block ahead.
        registers: most of a thread on NVIDIA's chips; 0 leaves them to the compiler.
    """

    block_depth: int = DEPTH
    engine: Literal["triton", "gluon"] = "triton"
    steps: int = 1
    ahead: bool = False
    registers: int = 0


# One program fills a multiprocessor. Two blocks in a turn leave room for three turns and the result in shared memory.
_DOUBLE = ProductLaunch(block_rows=128, block_columns=128, warps=8, stages=3, steps=2)
_SINGLE = ProductLaunch(block_rows=128, block_columns=128, warps=8, stages=5, pieces=2)
# Two programs share a multiprocessor: one scales its sums, or writes its tile, while the other multiplies.
_PAIR = ProductLaunch(block_rows=64, block_columns=128, warps=4, stages=4, pieces=2, residency=2, ahead=True)
_PAIR_3 = replace(_PAIR, stages=3)
# Three, each of a third of the registers.
_TRIO_AHEAD = replace(_PAIR, stages=2, residency=3, registers=168)
# A loader, and for 64 rows of a tile a multiplier of four warps, two or three; warps and pieces are one multiplier's.
_TRADES = ProductLaunch(engine="gluon", block_rows=128, block_columns=128, warps=4, stages=6, pieces=4)
_TRADES_DOUBLE = replace(_TRADES, steps=2)
_TRADES_THREE = replace(_TRADES, block_rows=192, stages=4, pieces=2)
# Pieces of float32 that the copy engine adds take the room of a slot.
_TRADES_SUM = replace(_TRADES, stages=5)
_TRADES_SUM_DOUBLE = replace(_TRADES_DOUBLE, stages=5)
_TRADES_SUM_THREE = replace(_TRADES_THREE, pieces=4)
# Where no copy engine reads descriptors.
_POINTERS = ProductLaunch(block_rows=128, block_columns=128, warps=8, stages=2, descriptors=False)
_SMALL = replace(_POINTERS, block_rows=64, block_columns=64, warps=4)

PRODUCTS: Mapping[str, Mapping[Product, ProductLaunch]] = MappingProxyType(
    {
        "sm_90": (
            dict.fromkeys(get_args(Product), _PAIR_3)
            | dict.fromkeys(("dense", "rows"), _TRADES_THREE)
            | {"rows_gathered": replace(_TRADES_THREE, copy_gathered=True)}
            | dict.fromkeys(("dense_square", "columns_square"), _TRADES_SUM_THREE)
        ),
        "sm_100": dict.fromkeys(get_args(Product), replace(_SINGLE, stages=4)),
        "gfx942": dict.fromkeys(get_args(Product), _POINTERS),
        "gfx950": dict.fromkeys(get_args(Product), _POINTERS),
    }
)
"""By target and product. On sm_90 what was fastest on an H200 for layers of DeepSeek-V3 and V2-Lite: with squares on
one side see docs/decisions/0152-scales-in-slots.md, without benchmarks/results/float8-launches-h200-*.json. Rows that
are gathered are copied first. Triton's `double` was faster for wide dense layers, but a run of V2-Lite did not get
through its first step with it, and nobody knows why yet. The others were chosen by what the compiler makes of them."""

_IN_PAIRS: Mapping[ProductLaunch, ProductLaunch] = MappingProxyType(
    {_TRADES_THREE: _TRADES_DOUBLE, _TRADES_SUM_THREE: _TRADES_SUM_DOUBLE}
)
"""Tiles of 128 rows, for launches with tiles of 192."""

TALLER_TILES_GAIN = 1.03
"""What tiles of 192 rows gain, beside tiles of 128, where both fill the multiprocessors alike."""

_OF_WEIGHTS = {
    "pair_3": _PAIR_3,
    "trio_ahead": _TRIO_AHEAD,
    "trio_ahead_group_16": replace(_TRIO_AHEAD, group=16),
    "double": _DOUBLE,
}
_HOPPERS_OF_WEIGHTS = {"gluon": _TRADES, "gluon_double": _TRADES_DOUBLE, "gluon_three": _TRADES_THREE}
_OF_GRADIENTS = {"pair": _PAIR, "pair_3": _PAIR_3, "pair_group_16": replace(_PAIR, group=16)}
_HOPPERS_OF_GRADIENTS = {"gluon": _TRADES_SUM, "gluon_4": replace(_TRADES, stages=4)}
_OF_SQUARES = _OF_GRADIENTS | {
    "gluon": _TRADES_SUM,
    "gluon_double": _TRADES_SUM_DOUBLE,
    "gluon_double_4": replace(_TRADES_DOUBLE, stages=4),
    "gluon_double_group_16": replace(_TRADES_SUM_DOUBLE, group=16),
    "gluon_three": _TRADES_SUM_THREE,
}

CANDIDATES: Mapping[str, Mapping[Product, Mapping[str, ProductLaunch]]] = MappingProxyType(
    {
        "sm_90": {
            "dense": _OF_WEIGHTS | _HOPPERS_OF_WEIGHTS,
            "dense_gradient": _OF_GRADIENTS | _HOPPERS_OF_GRADIENTS,
            "dense_square": _OF_SQUARES,
            "rows": _OF_WEIGHTS | _HOPPERS_OF_WEIGHTS,
            "rows_gathered": _OF_WEIGHTS
            | {name: replace(launch, copy_gathered=True) for name, launch in _HOPPERS_OF_WEIGHTS.items()},
            "columns": _OF_GRADIENTS | _HOPPERS_OF_GRADIENTS,
            "columns_square": _OF_SQUARES,
        },
    }
)
"""What `benchmarks.kernels.float8_launches` tries, by target and product: what was fastest for some layer so far."""


def in_triton(launch: ProductLaunch) -> ProductLaunch:
    """The launch itself, or where its kernels cannot be had one of Triton's on the same multiprocessors."""
    return launch if launch.engine == "triton" else replace(_PAIR_3, idle_units=launch.idle_units)


def dense_launch(product: Product, rows: int, columns: int, device: torch.device) -> ProductLaunch:
    """The launch for a dense result: the table's, or its like with smaller tiles where few tiles leave some units idle.

    Args:
        product: what is computed.
        rows: of the result.
        columns: of the result.
        device: where.
    """
    launch = product_launch(product, device)
    smaller = _IN_PAIRS.get(launch)
    if smaller is None:
        return launch

    def rounds(one: ProductLaunch) -> int:
        """Rows of tiles that the busiest multiprocessor makes."""
        tiles = -(-rows // one.block_rows) * -(-columns // one.block_columns)
        return -(-tiles // programs_of(one, device)) * one.block_rows

    return launch if rounds(launch) <= rounds(smaller) * TALLER_TILES_GAIN else smaller


def product_launch(product: Product, device: torch.device) -> ProductLaunch:
    """The launch for a product: the table's, or a small one that runs anywhere for chips without a table."""
    launches = PRODUCTS.get(target_of(device))
    return _SMALL if launches is None else launches[product]


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
