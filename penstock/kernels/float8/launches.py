"""How 8-bit kernels are launched, as data; see `penstock.kernels.tuning`.

The columns of a tile must lie in one block of a weight's scales, so a tile has at most 128. Launches of quantization
are the fastest ones on an H200 (benchmarks/results/float8-swiglu-h200.json, float8-quantize-launches-h200.json).
`benchmarks.kernels.launches_tried` has the alternatives.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

import torch

from penstock.kernels.float8.recipes import ALIGNMENT, DEPTH
from penstock.kernels.tuning import GemmLaunch, KernelLaunch, chips, programs_of, section, target_of

# Kinds of products whose launches differ.
Product = Literal[
    "dense",  # with a weight
    "dense_gradient",  # of a dense weight: both operands have a scale for each row
    "dense_square",  # the same, added to a sum, where one operand has scales for squares
    "rows",  # of experts, in place
    "rows_gathered",
    "columns",  # contracted over experts' rows: both operands have a scale for each row
    "columns_square",  # or one has scales for squares
]


@dataclass(frozen=True, kw_only=True)
class ProductLaunch(GemmLaunch):
    """Tiles and order of a persistent product of 8-bit numbers."""

    block_depth: int = DEPTH
    steps: int = 1  # blocks in a turn of a Hopper kernel; with 2 a block's sum is scaled while the next is made
    ahead: bool = False  # Triton's kernels load scales of blocks of 128 one block ahead


def _by_product(target: str) -> dict[Product, ProductLaunch]:
    rows = section(target, "float8_products")
    return {product: ProductLaunch(**(rows.get(product) or rows["every"])) for product in get_args(Product)}


# By target and product.
PRODUCTS: Mapping[str, Mapping[Product, ProductLaunch]] = MappingProxyType(
    {target: _by_product(target) for target in chips() if section(target, "float8_products")}
)
_SMALL = ProductLaunch(block_rows=64, block_columns=64, warps=4, stages=2, descriptors=False)

# Launches with tiles of 128 rows that replace those with tiles of 192.
_SMALLER: Mapping[ProductLaunch, ProductLaunch] = MappingProxyType(
    {
        launch: ProductLaunch(**section("sm_90", "float8_smaller_products")[product])
        for product, launch in PRODUCTS["sm_90"].items()
        if product in section("sm_90", "float8_smaller_products")
    }
)
TALLER_TILES_GAIN = 1.03  # speed of tiles of 192 rows over tiles of 128, where both fill the multiprocessors alike


def in_triton(launch: ProductLaunch) -> ProductLaunch:
    """The launch itself if it is Triton's, else one of Triton's on the same multiprocessors."""
    return launch if launch.engine == "triton" else replace(PRODUCTS["sm_90"]["columns"], idle_units=launch.idle_units)


def dense_launch(product: Product, rows: int, columns: int, device: torch.device) -> ProductLaunch:
    """The launch for a dense result: the table's, or one with smaller tiles if few tiles leave multiprocessors idle."""
    launch = product_launch(product, device)
    smaller = _SMALLER.get(launch)
    if smaller is None:
        return launch

    def rounds(candidate: ProductLaunch) -> int:
        """Rows of tiles that the busiest multiprocessor makes."""
        tiles = -(-rows // candidate.block_rows) * -(-columns // candidate.block_columns)
        return -(-tiles // programs_of(candidate, device)) * candidate.block_rows

    return launch if rounds(launch) <= rounds(smaller) * TALLER_TILES_GAIN else smaller


def product_launch(product: Product, device: torch.device) -> ProductLaunch:
    """The launch for a product: the table's, or a small one for chips without a table."""
    launches = PRODUCTS.get(target_of(device))
    return _SMALL if launches is None else launches[product]


# Of quantization: 64 numbers a thread. Two such programs share a multiprocessor, so that one loads while the other
# computes. Without a limit the compiler can take more than 128 registers, which leaves room for only one.
TRANSPOSING = KernelLaunch(block_rows=ALIGNMENT, block_columns=ALIGNMENT, warps=8, registers=128)
# Where numbers are computed first, from angles of pairs of columns or labels of rows, which need registers too. The
# compiler takes fewer than 128, so as many threads share a multiprocessor.
FUSED = replace(TRANSPOSING, warps=16)
# Where nothing is transposed: a block of depth 128, four loads of 16 bytes a thread. On an H200 as fast as a copy.
ROWS_ONLY = KernelLaunch(block_rows=32, block_columns=128, warps=4)
# The launch of runs: five programs share a multiprocessor.
TRANSPOSING_DEFAULT = replace(TRANSPOSING, engine="gluon", warps=4, registers=96)
# The launch of runs where numbers are computed first: with 96 registers some are spilled.
FUSED_DEFAULT = replace(TRANSPOSING_DEFAULT, registers=128)


@dataclass(frozen=True, kw_only=True)
class BackwardLaunch(GemmLaunch):
    """Tiles of 128 x 128 of the gradients of the experts' activation."""

    block_rows: int = 128
    block_columns: int = 128
    warps: int = 8
    residency: int = 2
    registers: int = 128
    in_passes: bool = False  # make 16 bits and quantize them in passes of their own
    step: int = 16  # rows that Triton's kernel holds at a time


# Eight numbers a thread at a time. Two programs of 128 registers a thread share a multiprocessor; none is spilled, but
# some are with blocks of 32.
BACKWARD = BackwardLaunch()
BACKWARD_DEFAULT = BackwardLaunch(engine="gluon")  # the launch of runs
