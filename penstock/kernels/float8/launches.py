"""How products of 8-bit numbers are launched, as data; see `penstock.kernels.tuning`.

Blocks of depth are the recipe's 128. A tile's columns must lie in one block of a weight's scales, so there are 128 at
most.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

import torch

from penstock.kernels.float8.recipes import DEPTH
from penstock.kernels.tuning import GemmLaunch, target_of

Product = Literal["dense", "dense_gradient", "rows", "rows_gathered", "columns"]
"""What is computed, as far as launches differ: a dense product with a weight; one of two operands that have a scale for
each row, as gradients of dense weights are; experts' rows, in place or gathered; contracted over experts' rows."""


@dataclass(frozen=True, kw_only=True)
class ProductLaunch(GemmLaunch):
    """How a persistent product of 8-bit numbers is cut and ordered.

    Attributes:
        steps: blocks of depth in a turn of the loop, 1 or 2; with 2 a block's sum is scaled while the next one is made.
    """

    block_depth: int = DEPTH
    steps: int = 1


# One program fills a multiprocessor. Two blocks in a turn leave room for three turns and the result in shared memory.
_DOUBLE = ProductLaunch(block_rows=128, block_columns=128, warps=8, stages=3, steps=2)
_DOUBLE_GRADIENT = replace(_DOUBLE, pieces=2)
_SINGLE = ProductLaunch(block_rows=128, block_columns=128, warps=8, stages=5, pieces=2)
# Two programs share a multiprocessor: one scales its sums while the other multiplies.
_PAIR = ProductLaunch(block_rows=64, block_columns=128, warps=4, stages=3, pieces=2, residency=2)
_PAIR_DOUBLE = replace(_PAIR, stages=2, steps=2)
_TRIO = replace(_PAIR, stages=2, residency=3)
# Where no copy engine reads descriptors.
_POINTERS = ProductLaunch(block_rows=128, block_columns=128, warps=8, stages=2, descriptors=False)
_SMALL = replace(_POINTERS, block_rows=64, block_columns=64, warps=4)

PRODUCTS: Mapping[str, Mapping[Product, ProductLaunch]] = MappingProxyType(
    {
        "sm_90": {
            "dense": _DOUBLE,
            "dense_gradient": _DOUBLE_GRADIENT,
            "rows": _DOUBLE,
            "rows_gathered": _DOUBLE,
            "columns": _DOUBLE_GRADIENT,
        },
        "sm_100": dict.fromkeys(get_args(Product), replace(_SINGLE, stages=4)),
        "gfx942": dict.fromkeys(get_args(Product), _POINTERS),
        "gfx950": dict.fromkeys(get_args(Product), _POINTERS),
    }
)
"""By target and product. None is measured: they were chosen by what the compiler makes of them."""

CANDIDATES: Mapping[str, Mapping[str, ProductLaunch]] = MappingProxyType(
    {
        "sm_90": {
            "double": _DOUBLE_GRADIENT,
            "single": _SINGLE,
            "single_4": replace(_SINGLE, stages=4),
            "pair": _PAIR,
            "pair_4": replace(_PAIR, stages=4),
            "pair_double": _PAIR_DOUBLE,
            "trio": _TRIO,
            "double_group_4": replace(_DOUBLE_GRADIENT, group=4),
            "double_group_16": replace(_DOUBLE_GRADIENT, group=16),
        },
    }
)
"""What `benchmarks.kernels.float8_products --launches` tries, by target."""


def product_launch(product: Product, device: torch.device) -> ProductLaunch:
    """The launch for a product: the table's, or a small one that runs anywhere for chips without a table."""
    launches = PRODUCTS.get(target_of(device))
    return _SMALL if launches is None else launches[product]
