"""The Triton kernels as one set of float8 operators. Import this only where Triton is installed.

`WITH_TORCH` takes torch's dense products where they are faster.
"""

from dataclasses import replace

import torch
from torch import Tensor

from penstock.kernels.expert_kernels import bias_gradient
from penstock.kernels.float8 import torch_products
from penstock.kernels.float8.logits_gradient import logits_gradient
from penstock.kernels.float8.norm import rms_norm
from penstock.kernels.float8.operators import Float8Operators
from penstock.kernels.float8.products import hopper_obstacle, multiply, multiply_columns, multiply_groups
from penstock.kernels.float8.quantize import (
    pack_rows,
    quantize_groups,
    quantize_rows,
    quantize_weight,
    transpose_weight,
    unpack_rows,
)
from penstock.kernels.float8.quantized import DEPTH, Quantized
from penstock.kernels.float8.swiglu import swiglu, swiglu_backward
from penstock.kernels.permute import unpermute
from penstock.kernels.tile_table import tile_table
from penstock.kernels.tuning import target_of

TRITON = Float8Operators(
    quantize_rows=quantize_rows,
    quantize_weight=quantize_weight,
    quantize_groups=quantize_groups,
    transpose_weight=transpose_weight,
    pack_rows=pack_rows,
    unpack_rows=unpack_rows,
    multiply=multiply,
    multiply_groups=multiply_groups,
    multiply_columns=multiply_columns,
    swiglu=swiglu,
    swiglu_backward=swiglu_backward,
    rms_norm=rms_norm,
    logits_gradient=logits_gradient,
    tile_table=tile_table,
    unpermute=unpermute,
    bias_gradient=bias_gradient,
    saves_rows=True,
)


def multiply_with_torch(
    a: Quantized, b: Quantized, dtype: torch.dtype, *, out: Tensor | None = None, accumulate_into: Tensor | None = None
) -> Tensor:
    """`products.multiply`, by torch's `scaled_mm` where it takes these sizes and no kernel of ours is as fast.

    Ours are: products with squares on one side on a Hopper with Gluon, and elsewhere those that are added to a sum,
    because ours add while they write, and torch would write and then add.
    """
    has_kernel = hopper_obstacle(a, b, target_of(a.values.device)) is None
    is_ours = b.block[0] == DEPTH and (has_kernel or accumulate_into is not None)
    chosen = multiply if is_ours or torch_products.shape_obstacle(a, b) else torch_products.multiply
    return chosen(a, b, dtype, out=out, accumulate_into=accumulate_into)


WITH_TORCH = replace(TRITON, multiply=multiply_with_torch)
