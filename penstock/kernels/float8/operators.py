"""The float8 operators of a model as one frozen value, and which parts of a model use them.

`REFERENCE` is the definitions (`reference` and the functions here), `penstock.kernels.float8.triton_operators.TRITON`
the kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels import reference as plain
from penstock.kernels.expert_parts import bias_gradient_by_definition, no_tile_table
from penstock.kernels.float8 import reference
from penstock.kernels.float8.quantized import E4M3, Format, Quantized, Recipe, RowColQuantized, WeightCopies
from penstock.kernels.reference import ExpertRule, RowOrder
from penstock.kernels.tile_table import TileTable


class SwigluForBackward(NamedTuple):
    """Results of the backward pass of the experts' activation, each in the form that a product reads."""

    d_gate_up: Quantized  # R x 2F, contracted over 2F, for the gradient of the rows
    d_gate_up_columns: Quantized  # 2F x aligned R, for the gradient of gate and up, in a recipe's blocks `rows`
    h_columns: Quantized  # F x aligned R, for the gradient of down, in a recipe's blocks `columns`
    dweights_R: Tensor | None  # float32
    plain_d_gate_up_RF: Tensor | None  # in the dtype of `gate_up`, if asked for: biases sum it


def swiglu(
    gate_up_RF: Tensor,
    weights_R: Tensor | None,
    rule: ExpertRule,
    recipe: Recipe,
    form: Format,
    *,
    columns: bool = False,
    counts_e: Tensor | None = None,
) -> RowColQuantized:
    """`penstock.kernels.reference.swiglu`, quantized; kernels never write it in 16 bits.

    `columns` is for a dense network. Rows past those of `counts_e` are not read and hold anything in the result.
    """
    h_RF, block = plain.swiglu(gate_up_RF, weights_R, rule), recipe.columns if columns else None
    return reference.quantize_rows(h_RF, recipe, form, columns=block, counts_e=counts_e)


def swiglu_backward(
    gate_up_RF: Tensor,
    weights_R: Tensor | None,
    dh_RF: Tensor,
    counts_e: Tensor,
    rule: ExpertRule,
    recipe: Recipe,
    forward: Format,
    gradient: Format,
    *,
    keep_plain: bool = False,
) -> SwigluForBackward:
    """Gradients by autograd through the reference, quantized; `keep_plain` also returns that in 16 bits."""
    d_gate_up_RF, dweights_R, h_RF = plain.swiglu_gradients(gate_up_RF, weights_R, dh_RF, rule)
    return SwigluForBackward(
        d_gate_up=reference.quantize_rows(d_gate_up_RF, recipe, gradient, counts_e=counts_e).rows,
        d_gate_up_columns=reference.quantize_groups(d_gate_up_RF, counts_e, recipe, gradient, block=recipe.rows),
        h_columns=reference.quantize_groups(h_RF, counts_e, recipe, forward),
        dweights_R=dweights_R,
        plain_d_gate_up_RF=d_gate_up_RF if keep_plain else None,
    )


def rms_norm(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    epsilon: float,
    recipe: Recipe,
    form: Format,
    *,
    columns: bool,
    keep_plain: bool = True,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, RowColQuantized]:
    """`penstock.kernels.reference.add_rms_norm` (or `rms_norm_beside` without a residual), and the norm quantized.

    Without `keep_plain` the norm is a carrier of gradients with one element of memory, which must not be read.
    """
    if residual_TD is None:
        # The norm reads a view of x, so that its own gradients are summed first, as in the kernel.
        normed_TD, sum_TD = plain.rms_norm(x_TD.view_as(x_TD), weight_D, epsilon, offset), x_TD
    else:
        normed_TD, sum_TD = plain.add_rms_norm(x_TD, residual_TD, weight_D, epsilon, offset)
    both = reference.quantize_rows(normed_TD.detach(), recipe, form, columns=recipe.columns if columns else None)
    return normed_TD if keep_plain else _Carrier.apply(normed_TD), sum_TD, both


def logits_gradient(
    logits_TV: Tensor,
    labels_T: Tensor,
    logsumexp_T: Tensor,
    recipe: Recipe,
    form: Format,
    *,
    first_label: int = 0,
    z_weight: float = 0.0,
) -> RowColQuantized:
    """`penstock.kernels.reference.logits_gradient`, quantized by rows and transposed; kernels write only these copies.

    Blocks of `recipe.rows` must lie in tiles: kernels have not seen a whole row when they write a part of it.
    """
    dlogits_TV = plain.logits_gradient(logits_TV, labels_T, logsumexp_T, first_label, z_weight)
    return reference.quantize_rows(dlogits_TV, recipe, form, columns=recipe.rows)


class _Carrier(torch.autograd.Function):
    """Passes gradients on, and outputs NaN, so that a read of the carrier shows."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor) -> Tensor:
        return x_TD.new_full((), torch.nan).expand(x_TD.shape)

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> Tensor:
        return dx_TD


@dataclass(frozen=True, kw_only=True)
class Float8Operators:
    """Operators with the signatures of `penstock.kernels.float8.reference` and of the functions above, the defaults.

    Only where `saves_rows` does `multiply_groups` take `keep`, and do `swiglu` and `swiglu_backward` take `SavedRows`.
    """

    quantize_rows: Callable[..., RowColQuantized] = reference.quantize_rows
    quantize_weight: Callable[..., WeightCopies] = reference.quantize_weight
    quantize_groups: Callable[..., Quantized] = reference.quantize_groups
    transpose_weight: Callable[[Quantized, Quantized], None] = reference.transpose_weight
    pack_rows: Callable[[Tensor, Recipe, Format], Tensor] = reference.pack_rows
    unpack_rows: Callable[..., Tensor] = reference.unpack_rows
    multiply: Callable[..., Tensor] = reference.multiply
    multiply_groups: Callable[..., Tensor] = reference.multiply_groups
    multiply_columns: Callable[..., Any] = reference.multiply_columns
    swiglu: Callable[..., RowColQuantized] = swiglu
    swiglu_backward: Callable[..., SwigluForBackward] = swiglu_backward
    rms_norm: Callable[..., tuple[Tensor, Tensor, RowColQuantized]] = rms_norm
    logits_gradient: Callable[..., RowColQuantized] = logits_gradient
    tile_table: Callable[[Tensor, int], TileTable | None] = no_tile_table  # of all grouped products of a layer
    unpermute: Callable[[Tensor, RowOrder], Tensor] = plain.unpermute  # in 16 bits, like the next one
    bias_gradient: Callable[..., Tensor] = bias_gradient_by_definition
    saves_rows: bool = False  # into a buffer, from a row on that only the device knows


REFERENCE = Float8Operators()


@dataclass(frozen=True, kw_only=True)
class Float8Rule:
    """Which parts of a layer are computed in 8 bits, and how; parts without a recipe stay in 16 bits."""

    dense: Recipe | None = None  # products of attention, dense networks and shared experts
    experts: Recipe | None = None  # products of the routed experts
    head: Recipe | None = None  # products of the output projection in the loss
    dispatch: Recipe | None = None  # rows that travel to their experts
    forward: Format = E4M3  # of activations and weights
    gradient: Format = E4M3  # of the gradients of outputs
    operators: Float8Operators = REFERENCE


NO_FLOAT8 = Float8Rule()  # everything in 16 bits
