"""Numbers of 8 bits with their scales. Everywhere the contracted dim is the last one.

Matrix units of Hopper take 8-bit operands only so, and one rule for all chips is simpler than two. So a product is
always `a @ b^T` of a (M x K) and b (N x K), and what is contracted over its rows is held transposed.
"""

from typing import NamedTuple

from torch import Tensor

from penstock.kernels.float8.recipes import Block


class Quantized(NamedTuple):
    """A matrix, or a stack of them, in 8 bits.

    Attributes:
        values: float8, ... x outer x depth. The last dim is contiguous; rows may stand apart (a row that travelled is
            followed by its scales), by a multiple of 16 bytes.
        scales: what a block's values are multiplied with, ... x outer blocks x depth blocks, with any strides; float32,
            or float8_e8m0fnu for mxfp8. A last block may be smaller than the others.
        block: rows and columns of a block; 0 for all.
    """

    values: Tensor
    scales: Tensor
    block: Block


class RowColQuantized(NamedTuple):
    """A matrix as both of its products want it.

    Attributes:
        rows: x_RD as it is, contracted over D.
        columns: transposed, D x R, contracted over R; None if nobody asked for it.
    """

    rows: Quantized
    columns: Quantized | None


class WeightCopies(NamedTuple):
    """A weight, or a stack of experts' weights, quantized once an optimizer step.

    Attributes:
        forward: ... F x D, contracted over D.
        backward: ... D x F, contracted over F, for the gradient of the input.
    """

    forward: Quantized
    backward: Quantized
