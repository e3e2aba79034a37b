"""Products of bfloat16 operands with float32 results.

A GPU multiplies bfloat16 many times as fast as float32, and sums the products in float32 all the same. Two results must
be float32 but can have bfloat16 operands:

    sum += dy^T x        a weight's gradient: the sum is the accumulator of the product, so no gradient is written,
                         rounded and added in a pass of its own
    logits = x w^T       the router's: x is bfloat16 already, and the float32 w is a sum of three bfloat16

        w = w1 + w2 + w3       8 + 8 + 8 bits of its 24: exact
        x w^T                  one product with [w1; w2; w3], whose three results are added
        dw = dlogits^T x       the same, dlogits in three parts [g2 g3 g1]
        dx = dlogits w         the six of nine pairs that count in float32: [g2 g3 g1 g1 g1 g2] [w1; w1; w1; w2; w3; w2]

Each row of six is written once and contains the rows of three as a slice.

cuBLAS would compute the router's products in float32 without tensor cores. No bit of an operand is lost, where TF32
would cut them to 11 bits. On a CPU the same bfloat16 values are multiplied as float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels.language import on_gpu, record_launch

PARTS = 3  # in bfloat16, of a float32 value, which has three times its bits
# Positions of the first, second and third part among the six of the left operand, and of the right one.
LEFT = (slice(2, 5), slice(0, 6, 5), slice(1, 2))
RIGHT = (slice(0, 3), slice(3, 6, 2), slice(4, 5))


@torch.no_grad()
def add_product(total: Tensor, left: Tensor, right: Tensor, *, overwrite: bool = False) -> None:
    """`total += left @ right` (= with `overwrite`), not rounded between; float32, or in the dtype of the operands."""
    beta = 0 if overwrite else 1
    if left.is_meta:
        # Torch finds the shape of this product in a tenth of the time that a search over layouts has.
        record_launch("addmm", total, left, right)
    elif on_gpu(left) and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=beta, out=total)


def float32_linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """`x @ weight^T` in float32, with neither operand rounded; differentiable. A bfloat16 x on a GPU is fast."""
    if on_gpu(x_TD) and x_TD.dtype == torch.bfloat16:
        return linear_in_parts(x_TD, weight_ED)
    return F.linear(x_TD.float(), weight_ED)


def linear_in_parts(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """`float32_linear` of a bfloat16 x, by bfloat16 products only."""
    return _LinearInParts.apply(x_TD, weight_ED)


def in_parts(values: Tensor, dim: int, places: Sequence[slice]) -> Tensor:
    """The three bfloat16 parts of a float32 tensor, stacked along `dim` and repeated for the six pairs of a product.

    `places` are the positions of the largest, the middle and the smallest part, `LEFT` or `RIGHT`. The sum of the parts
    is exact unless the last bits are below bfloat16's smallest number.
    """
    six = values.new_empty((*values.shape[:dim], 2 * PARTS, *values.shape[dim:]), dtype=torch.bfloat16)
    first, second, third = (six[(slice(None),) * dim + (position,)] for position in places)
    values = values.unsqueeze(dim)
    first.copy_(values)  # rounds to bfloat16
    rest = values - first.narrow(dim, 0, 1)  # exact in float32
    second.copy_(rest)
    torch.sub(rest, second.narrow(dim, 0, 1), out=third)
    return six


class _LinearInParts(torch.autograd.Function):
    """Saves its operands, which exist in any case; a pipeline holds many micro-batches between the two passes."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        E, D = weight_ED.shape
        w_6ED = in_parts(weight_ED, 0, RIGHT)
        ctx.save_for_backward(x_TD, weight_ED)
        return _float32_product(x_TD, w_6ED[2:5].view(-1, D).T).view(-1, PARTS, E).sum(1)  # w1, w2, w3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        (T, E), D = dlogits_TE.shape, x_TD.shape[1]
        g_T6E = in_parts(dlogits_TE, 1, LEFT).view(T, -1)  # [g2 g3 g1 g1 g1 g2], E columns each
        dx_TD = dweight_ED = None
        if ctx.needs_input_grad[0]:
            w_6ED = in_parts(weight_ED, 0, RIGHT)
            dx_TD = g_T6E @ w_6ED.view(-1, D)  # six pairs, summed in float32 by the matrix unit
        if ctx.needs_input_grad[1]:
            dweight_ED = _float32_product(g_T6E[:, : PARTS * E].T, x_TD).view(PARTS, E, D).sum(0)
        return dx_TD, dweight_ED


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    if on_gpu(left):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
