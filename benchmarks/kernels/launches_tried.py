"""Launches that benchmarks time and tests check: those of the tables on Hopper, and the alternatives."""

from dataclasses import replace

from penstock.kernels.float8.quantize import (
    BACKWARD,
    BACKWARD_DEFAULT,
    FUSED_DEFAULT,
    PRODUCTS,
    TRANSPOSING,
    TRANSPOSING_DEFAULT,
    BackwardLaunch,
    Product,
    ProductLaunch,
)
from penstock.kernels.tuning import GROUPED_GEMM, GemmLaunch, KernelLaunch

((_, _RING), (_, _RING_5)) = GROUPED_GEMM["sm_90"]["weight_gradient_accumulated"]
((_, _ROWS_RING),) = GROUPED_GEMM["sm_90"]["forward"]

RINGS: dict[str, GemmLaunch] = {
    "ring": _RING,
    "ring_5": _RING_5,
    "ring_deep": replace(_RING, block_depth=128, stages=3),
    "ring_group_16": replace(_RING, group=16),
}
"""Of weight gradients in 16 bits."""

ROWS_RINGS: dict[str, GemmLaunch] = {
    "ring": _ROWS_RING,
    "ring_5": replace(_ROWS_RING, stages=5, pieces=2),
    "ring_deep": replace(_ROWS_RING, block_depth=128, stages=3),
}
"""Of experts' rows in 16 bits."""

_THREE, _THREE_SUM = PRODUCTS["sm_90"]["rows"], PRODUCTS["sm_90"]["dense_square"]
_PAIR, _ONE = PRODUCTS["sm_90"]["columns"], replace(_THREE, block_rows=128, stages=6, pieces=4)
_SUM = replace(_ONE, stages=5)
_HOPPERS = {"gluon": _ONE, "gluon_double": replace(_ONE, steps=2), "gluon_three": _THREE}
_OF_WEIGHTS = {"pair": _PAIR, **_HOPPERS}
_OF_GRADIENTS = {"pair": _PAIR, "gluon": _SUM}
_OF_SQUARES = _OF_GRADIENTS | {"gluon_double": replace(_SUM, steps=2), "gluon_three": _THREE_SUM}

CANDIDATES: dict[str, dict[Product, dict[str, ProductLaunch]]] = {
    "sm_90": {
        "dense": _OF_WEIGHTS,
        "dense_gradient": _OF_GRADIENTS,
        "dense_square": _OF_SQUARES,
        "rows": _OF_WEIGHTS,
        "rows_gathered": {
            "pair": _PAIR,
            **{name: replace(launch, copy_gathered=True) for name, launch in _HOPPERS.items()},
        },
        "columns": _OF_GRADIENTS,
        "columns_square": _OF_SQUARES,
    },
}
"""Products in 8 bits, by target and product."""

TRANSPOSING_LAUNCHES: dict[str, KernelLaunch] = {
    "triton": TRANSPOSING,
    # Five programs share a multiprocessor; or four with more registers; or four with twice as many threads.
    "gluon": TRANSPOSING_DEFAULT,
    "gluon_128": FUSED_DEFAULT,
    "gluon_8": replace(TRANSPOSING_DEFAULT, warps=8, registers=64),
}
"""Quantization along both sides of a tile."""

BACKWARD_LAUNCHES: dict[str, BackwardLaunch] = {
    "triton": BACKWARD,
    "passes": BackwardLaunch(in_passes=True),
    "gluon": BACKWARD_DEFAULT,
}
"""Gradients of the experts' activation."""
