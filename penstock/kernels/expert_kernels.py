"""Implementations of the parts of the experts' networks, by backend: products, activation, biases.

`penstock.kernels.expert_ffn` combines them in one autograd function; nothing here knows autograd. `REFERENCE` follows
the definitions and copies the counts to the host, `TORCH` leaves them on the device, `TRITON` has the Triton kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels import reference
from penstock.kernels.bias_gradient import bias_gradient
from penstock.kernels.expert_parts import (
    add_or_return,
    bias_gradient_by_definition,
    bias_gradient_in_torch,
    no_tile_table,
    used,
)
from penstock.kernels.float8.quantized import WeightCopies
from penstock.kernels.grouped_gemm import (
    grouped_gemm_forward,
    grouped_gemm_input_gradient,
    grouped_gemm_weight_gradient,
)
from penstock.kernels.launching import counts_on_host
from penstock.kernels.operators import aligned, grouped_mm, torch_add_bias
from penstock.kernels.permute import unpermute
from penstock.kernels.reference import ExpertRule, RowOrder
from penstock.kernels.replica_slots import SlottedWeight, joined
from penstock.kernels.swiglu import swiglu_backward, swiglu_forward
from penstock.kernels.tile_table import TileTable, tile_table

# As fields of `float8.operators.SwigluForBackward`, in 16 or in 8 bits.
ActivationGradients = tuple[Any, Any, Any, Tensor | None, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class ExpertKernels:
    """The parts of `expert_ffn`; replace one with `dataclasses.replace`.

    The three products have the signatures of `penstock.kernels.grouped_gemm` without `launch`, and read and write
    `SlottedWeight`s as these do. Rows past the last expert's are zero in their results and unread in their operands.
    Backends other than Triton ignore `tiles`.
    """

    # (x_RD, w_eFD, counts_e, index_R, *, bias_eF, weights_R, tiles) -> y_RF; the weights multiply the bias.
    forward: Callable[..., Tensor]  # with `saves_rows` it also takes `keep`
    input_gradient: Callable[..., Tensor]  # (dy_RF, w_eFD, counts_e, *, tiles) -> dx_RD
    weight_gradient: Callable[..., Any]  # (dy_RF, x_RD, counts_e, index_R, *, accumulate_into, tiles) -> dw_eFD
    swiglu: Callable[..., Any]  # (gate_up_RF, weights_R, rule, counts_e, tiles) -> h_RF; unused rows hold anything
    # (gate_up_RF, weights_R, dh_RF, counts_e, rule, tiles, *, recompute); gradients of unused rows' weights are zero.
    swiglu_backward: Callable[..., ActivationGradients]
    bias_gradient: Callable[..., Tensor]  # (dy_RF, counts_e, weighted, *, accumulate_into, tiles) -> dbias_eF
    unpermute: Callable[[Tensor, RowOrder], Tensor]  # the sum over each token's places
    tile_table: Callable[[Tensor, int], TileTable | None]  # of all products of both passes; None where they need none
    saves_rows: bool = False  # the pre-activation may be in a buffer whose first row only the device knows

    # In 8 bits operands are quantized before they are multiplied (`penstock.kernels.float8.expert_ffn`).
    in_8_bits: bool = False
    reads_matrices: bool = True  # given to the function; False if only copies of them are read
    source: Callable[..., Any] = lambda x_ND, quantized, counts_e: x_ND  # rows that `forward` and `columns` read
    copies: Callable[[int, Any], Any] = lambda index, weight: WeightCopies(weight, weight)  # of a matrix
    quantize_gradient: Callable[..., tuple[Any, Any]] = lambda dy_RD, counts_e, both: (dy_RD, dy_RD)  # rows, columns
    columns: Callable[..., Any] = lambda x, counts_e, index_R: x  # of the source, as `weight_gradient` reads them


def _gradients(d_gate_up_RF: Tensor, dweights_R: Tensor | None, h_RF: Tensor | None) -> ActivationGradients:
    """In 16 bits rows and columns are read from one tensor."""
    return d_gate_up_RF, d_gate_up_RF, h_RF, dweights_R, d_gate_up_RF


def _swiglu(gate_up_RF: Any, weights_R: Tensor | None, rule: ExpertRule, counts_e: Tensor, tiles: TileTable) -> Tensor:
    return swiglu_forward(gate_up_RF, weights_R, rule, used=tiles.used)


def _swiglu_backward(
    gate_up_RF: Any, weights_R: Any, dh_RF: Tensor, counts_e: Tensor, rule: ExpertRule, tiles: Any, *, recompute: bool
) -> ActivationGradients:
    return _gradients(*swiglu_backward(gate_up_RF, weights_R, dh_RF, rule, recompute=recompute, used=tiles.used))


def _swiglu_in_torch(gate_up_RF: Tensor, weights_R: Tensor | None, rule: ExpertRule, *unused: object) -> Tensor:
    return reference.swiglu(gate_up_RF, weights_R, rule)


def _swiglu_backward_in_torch(
    gate_up_RF: Any, weights_R: Any, dh_RF: Tensor, counts_e: Tensor, rule: ExpertRule, tiles: Any, *, recompute: bool
) -> ActivationGradients:
    d_gate_up_RF, dweights_R, h_RF = reference.swiglu_gradients(gate_up_RF, weights_R, dh_RF, rule)
    return _gradients(d_gate_up_RF, dweights_R, h_RF if recompute else None)


def _in_torch(
    multiply: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],  # as `reference.grouped_gemm`
    multiply_columns: Callable[[Tensor, Tensor, Tensor], Tensor],  # (dy_RF, x_RD, counts_e) -> dw_eFD
    add_bias: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    bias_gradient: Callable[..., Tensor],
) -> ExpertKernels:
    def forward(
        x_RD: Tensor,
        w_eFD: Tensor | SlottedWeight,
        counts_e: Tensor,
        index_R: Tensor | None = None,
        *,
        bias_eF: Tensor | None = None,
        weights_R: Tensor | None = None,
        tiles: TileTable | None = None,
    ) -> Tensor:
        y_RF = multiply(x_RD, joined(w_eFD), counts_e, index_R)
        return y_RF if bias_eF is None else add_bias(y_RF, bias_eF, counts_e, weights_R)

    def input_gradient(
        dy_RF: Tensor, w_eFD: Tensor | SlottedWeight, counts_e: Tensor, *, tiles: TileTable | None = None
    ) -> Tensor:
        return multiply(dy_RF, joined(w_eFD).transpose(1, 2), counts_e, None)  # e x F x D -> e x D x F

    def weight_gradient(
        dy_RF: Tensor,
        x_RD: Tensor,
        counts_e: Tensor,
        index_R: Tensor | None = None,
        *,
        accumulate_into: Tensor | SlottedWeight | None = None,
        tiles: TileTable | None = None,
    ) -> Any:
        rows_RD = x_RD if index_R is None else x_RD.index_select(0, index_R)
        return add_or_return(multiply_columns(dy_RF, rows_RD, counts_e), accumulate_into)

    return ExpertKernels(
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        swiglu=_swiglu_in_torch,
        swiglu_backward=_swiglu_backward_in_torch,
        bias_gradient=bias_gradient,
        unpermute=reference.unpermute,
        tile_table=no_tile_table,
    )


def _columns_by_definition(dy_RF: Tensor, x_RD: Tensor, counts_e: Tensor) -> Tensor:
    counts = counts_on_host(counts_e, len(dy_RF))
    sizes = [*counts, len(dy_RF) - sum(counts)]
    pieces = list(zip(dy_RF.split(sizes), x_RD.split(sizes), strict=True))[:-1]  # the last piece is the tail
    return torch.stack([dy.T @ rows for dy, rows in pieces])


def _grouped_mm(x_RD: Tensor, w_eFD: Tensor, counts_e: Tensor, index_R: Tensor | None) -> Tensor:
    rows_RD = x_RD if index_R is None else x_RD.index_select(0, index_R)
    if not len(rows_RD):  # grouped_mm refuses the strides of an expanded tensor without rows
        return rows_RD.new_zeros(0, w_eFD.shape[1])
    return used(grouped_mm(rows_RD, w_eFD, counts_e.cumsum(0, dtype=torch.int32)), counts_e)


def _columns_by_grouped_mm(dy_RF: Tensor, x_RD: Tensor, counts_e: Tensor) -> Tensor:
    if not len(x_RD):  # as above
        return dy_RF.new_zeros(len(counts_e), dy_RF.shape[1], x_RD.shape[1])
    dw_eFD = F.grouped_mm(aligned(dy_RF).T, aligned(x_RD), offs=counts_e.cumsum(0, dtype=torch.int32))
    shape = dw_eFD.shape[0], dy_RF.shape[1], x_RD.shape[1]
    return dw_eFD if dw_eFD.shape == shape else dw_eFD[:, : shape[1], : shape[2]]


REFERENCE = _in_torch(reference.grouped_gemm, _columns_by_definition, reference.add_bias, bias_gradient_by_definition)
TORCH = _in_torch(_grouped_mm, _columns_by_grouped_mm, torch_add_bias, bias_gradient_in_torch)  # bfloat16 on a GPU
TRITON = ExpertKernels(
    forward=grouped_gemm_forward,
    input_gradient=grouped_gemm_input_gradient,
    weight_gradient=grouped_gemm_weight_gradient,
    swiglu=_swiglu,
    swiglu_backward=_swiglu_backward,
    bias_gradient=bias_gradient,
    unpermute=unpermute,
    tile_table=tile_table,
    saves_rows=True,
)
