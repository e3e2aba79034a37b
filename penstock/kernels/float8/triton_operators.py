"""Our Triton kernels as one set of float8 operators. Import this only where Triton is installed.

The recipe `nvfp4` has no kernels: its quantization is the definition's, and products of it are refused.
"""

from penstock.kernels.bias_gradient import bias_gradient
from penstock.kernels.float8.attention import attention
from penstock.kernels.float8.norm import add_rms_norm, rms_norm
from penstock.kernels.float8.operators import Float8Operators
from penstock.kernels.float8.pack import pack_rows, unpack_rows
from penstock.kernels.float8.products import multiply, multiply_columns, multiply_groups
from penstock.kernels.float8.quantize import quantize_groups, quantize_rows, quantize_weight
from penstock.kernels.float8.swiglu import swiglu, swiglu_backward
from penstock.kernels.float8.transpose import transpose_weight
from penstock.kernels.permute import unpermute
from penstock.kernels.tile_table import tile_table

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
    add_rms_norm=add_rms_norm,
    tile_table=tile_table,
    unpermute=unpermute,
    bias_gradient=bias_gradient,
    attention=attention,
)
