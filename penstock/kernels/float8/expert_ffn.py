"""The experts' feed-forward networks in 8 bits, as one autograd function that also saves its rows in 8 bits.

It is `penstock.kernels.expert_ffn` with all products in 8 bits; ^q marks quantized tensors:

    x_ND^q           quantized once, source rows and not places; or received in 8 bits      saved
    gate_up_RF     = x_ND^q[index_R] @ gate_up^q            saved, 16 bits; with `keep` in a buffer of several layers
    h_RF^q         = swiglu(gate_up_RF) * weight         never written in 16 bits           freed
    y_RD           = h_RF^q @ down^q                                                        the output

A product contracts the last dim of both operands, so each weight has a copy for forward and one for backward, made once
an optimizer step (`ExpertCopies`). Operands of the weight gradients are quantized along the rows, transposed, with the
rows of each expert from a multiple of 128 on; only the device knows where.

    dy_RD^q, dy_DR^q                          <-  dy_RD                            one pass, both directions
    dh_RF          = dy_RD^q @ down^q
    d_gate_up_RF^q, d_gate_up_FR^q, h_FR^q    <-  gate_up_RF, weights_R, dh_RF     one pass
    d_down         = dy_DR^q @ h_FR^q                                              added to float32 sums
    dx_ND          = d_gate_up_RF^q @ gate_up^q, rows of each token summed
    x_DR^q         <-  x_ND^q[index_R]        8 bits in, 8 bits out
    d_gate_up      = d_gate_up_FR^q @ x_DR^q                                       added to float32 sums

For DeepSeek-V2-Lite (D 2,048, F 1,408, 6 experts a token) it saves 36 kB a token and layer instead of 38; with
`recompute` 2.1 instead of 4.1. The pre-activation has 16 bits because its error would reach the output and both
gradients. Without copies (FSDP gathers the weights for each pass) each pass quantizes the weights.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import expert_ffn as networks
from penstock.kernels.expert_kernels import ExpertKernels
from penstock.kernels.expert_parts import SlottedWeight
from penstock.kernels.float8.operators import Float8Rule, SwigluForBackward
from penstock.kernels.float8.quantized import (
    GatheredCopies,
    Quantized,
    Recipe,
    RowColQuantized,
    WeightCopies,
    copies_of,
)
from penstock.kernels.operators import torch_add_bias
from penstock.kernels.reference import ExpertRule


class ExpertCopies(NamedTuple):
    """Both matrices of the experts in 8 bits."""

    gate_up: WeightCopies
    down: WeightCopies


def copy_experts(
    gate_up_eFD: Tensor, down_eDF: Tensor, float8: Float8Rule, into: ExpertCopies | None = None
) -> ExpertCopies:
    """Quantize the experts' matrices for both passes; `into` is filled in place, because captured graphs read it."""
    recipe, quantize = _recipe_of(float8), float8.operators.quantize_weight
    old = into or (None, None)
    return ExpertCopies(
        quantize(gate_up_eFD, recipe, float8.forward, into=old[0]),
        quantize(down_eDF, recipe, float8.forward, into=old[1]),
    )


def expert_ffn(
    x_ND: Tensor,
    gate_up_eFD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    weights_R: Tensor | None = None,
    index_R: Tensor | None = None,
    *,
    float8: Float8Rule,
    copies: ExpertCopies | None = None,
    biases: tuple[Tensor, Tensor | None] | None = None,
    **options: Any,
) -> Tensor:
    """`penstock.kernels.expert_ffn.expert_ffn` in 8 bits; `options` are those of that function.

    `quantized` among them is x_ND by the rows' blocks of the recipe in the format of forward. With `copies` (of
    `copy_experts`) the matrices are not read; without them each pass quantizes the matrices, which may be
    `GatheredWeight`s. Biases are added, and their gradients summed, in 16 bits, and a pre-activation with a bias is
    never written into the buffer of `keep`. Weights of replicas come in 16 bits, which are read then even with
    `copies`, and are quantized on arrival. Raises KernelError where shapes, recipe or format do not fit.
    """
    kernels = _kernels_of(float8, copies, x_ND.dtype, gate_up_eFD.dtype, has_biases=biases is not None)
    operands = x_ND, gate_up_eFD, down_eDF, counts_e, weights_R, index_R
    return networks.expert_ffn(*operands, biases=biases, kernels=kernels, **options)


class _SlottedCopies(NamedTuple):
    """Copies of own experts' weights, and of replicas."""

    own: WeightCopies | GatheredCopies
    slots: WeightCopies

    @property
    def forward(self) -> SlottedWeight:
        return SlottedWeight(self.own.forward, self.slots.forward)

    @property
    def backward(self) -> SlottedWeight:
        return SlottedWeight(self.own.backward, self.slots.backward)


def _kernels_of(
    float8: Float8Rule, kept: ExpertCopies | None, dtype: torch.dtype, weight_dtype: torch.dtype, *, has_biases: bool
) -> ExpertKernels:
    """The parts of the network; results and the gradients of rows have `dtype`."""
    operators, recipe, form = float8.operators, _recipe_of(float8), float8.forward
    quantize_weight = partial(operators.quantize_weight, recipe=recipe, form=form)

    def copies(index: int, w_eFD: Tensor | SlottedWeight) -> WeightCopies | GatheredCopies | _SlottedCopies:
        """Copies of a product's weight: kept, gathered, or made now; those of replicas are made now."""
        held = None if kept is None else kept[index]
        if isinstance(w_eFD, SlottedWeight):
            local_copies = copies_of(w_eFD.own, held, quantize_weight)
            w_eFD.wait()
            return _SlottedCopies(local_copies, quantize_weight(w_eFD.slots))
        return copies_of(w_eFD, held, quantize_weight)

    def forward(
        x: Quantized,
        w: Quantized | SlottedWeight,
        counts_e: Tensor,
        index_R: Tensor | None,
        *,
        bias_eF: Tensor | None = None,
        weights_R: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        y_RF = operators.multiply_groups(x, w, counts_e, index_R, dtype=dtype, **options)
        return y_RF if bias_eF is None else torch_add_bias(y_RF, bias_eF, counts_e, weights_R)

    def weight_gradient(dy: Quantized, x: Quantized, counts_e: Tensor, index_R: object, **options: Any) -> Any:
        return operators.multiply_columns(dy, x, counts_e, dtype=weight_dtype, **options)

    def swiglu(
        gate_up_RF: Any, weights_R: Tensor | None, rule: ExpertRule, counts_e: Tensor, tiles: object
    ) -> Quantized:
        return operators.swiglu(gate_up_RF, weights_R, rule, recipe, form, counts_e=counts_e).rows

    def swiglu_backward(
        gate_up_RF: Any, weights_R: Any, dh_RF: Tensor, counts_e: Tensor, rule: ExpertRule, tiles: Any, **unused: bool
    ) -> SwigluForBackward:
        given = gate_up_RF, weights_R, dh_RF, counts_e, rule, recipe, form, float8.gradient
        return operators.swiglu_backward(*given, keep_plain=has_biases)

    def quantize_gradient(dy_RD: Tensor, counts_e: Tensor, both: bool) -> RowColQuantized:
        columns = recipe.rows if both else None
        return operators.quantize_rows(dy_RD, recipe, float8.gradient, columns=columns, counts_e=counts_e)

    return ExpertKernels(
        in_8_bits=True,
        reads_matrices=kept is None,
        saves_rows=operators.saves_rows and not has_biases,
        source=partial(_source, float8=float8),
        copies=copies,
        quantize_gradient=quantize_gradient,
        columns=lambda x, counts_e, index_R: operators.quantize_groups(x, counts_e, recipe, form, index_R),
        forward=forward,
        input_gradient=partial(operators.multiply_groups, dtype=dtype),
        weight_gradient=weight_gradient,
        swiglu=swiglu,
        swiglu_backward=swiglu_backward,
        bias_gradient=operators.bias_gradient,
        unpermute=operators.unpermute,
        tile_table=operators.tile_table,
    )


def _recipe_of(float8: Float8Rule) -> Recipe:
    assert float8.experts is not None, "the experts of this layer compute in 16 bits"
    return float8.experts


def _source(x_ND: Tensor, quantized: Quantized | None, counts_e: Tensor | None, float8: Float8Rule) -> Quantized:
    """The source rows in 8 bits: those that were received, or quantized now; without counts all rows are real."""
    recipe, form = _recipe_of(float8), float8.forward
    if quantized is None:
        return float8.operators.quantize_rows(x_ND, recipe, form, counts_e=counts_e).rows
    expected = (x_ND.shape, recipe.rows, form.dtype)
    got = (quantized.values.shape, quantized.block, quantized.values.dtype)
    if got != expected:
        raise KernelError(
            "expert_ffn: rows in 8 bits must be those of x, in the blocks and the format of ours",
            got=f"{tuple(got[0])} by blocks of {got[1]} in {got[2]}",
            allowed=f"{tuple(expected[0])} by blocks of {expected[1]} in {expected[2]}",
        )
    return quantized
