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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.expert_parts import (
    DOWN,
    GATE_UP,
    DeferGradient,
    ExpertOptions,
    SavedRows,
    SaveRows,
    bias_gradients,
    check_operands,
    put_gradient,
    sum_over_places,
)
from penstock.kernels.float8.operators import Float8Operators, Float8Rule
from penstock.kernels.float8.quantized import GatheredCopies, Quantized, WeightCopies, copies_of
from penstock.kernels.float8.recipes import Recipe
from penstock.kernels.operators import torch_add_bias
from penstock.kernels.reference import SWIGLU, ExpertRule, check_biases
from penstock.kernels.replica_slots import ReplicaSlots, SlottedWeight
from penstock.kernels.tile_table import TileTable


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
    quantized: Quantized | None = None,
    biases: tuple[Tensor, Tensor | None] | None = None,
    rule: ExpertRule = SWIGLU,
    places_TK: Tensor | None = None,
    accumulate_into: tuple[Tensor, ...] | None = None,
    put_off: DeferGradient | None = None,
    recompute: bool = False,
    keep: SaveRows | None = None,
    only_last: bool = False,
    replicas: ReplicaSlots | None = None,
) -> Tensor:
    """`penstock.kernels.expert_ffn.expert_ffn` in 8 bits; arguments not described here are those of that function.

    `x_ND` is not saved; with `quantized`, x_ND by the rows' blocks of the recipe in the format of forward, only its
    shape and dtype are read. With `copies` (of `copy_experts`) the matrices are not read; without them each pass
    quantizes the matrices, which may be `GatheredWeight`s. Biases are added, and their gradients summed, in 16 bits,
    and a pre-activation with a bias is never written into the buffer of `keep`. Weights of replicas come in 16 bits,
    which are read then even with `copies`, and are quantized on arrival. Raises KernelError where shapes, recipe or
    format do not fit.
    """
    extras = _Extras(
        float8=float8,
        copies=copies,
        places_TK=places_TK,
        parameters=(gate_up_eFD, down_eDF),
        given_sums=accumulate_into or (),
        put_off=put_off,
        recompute=recompute,
        keep=keep if float8.operators.saves_rows and not recompute and biases is None else None,
        only_last=only_last,
        rule=rule,
        replicas=replicas,
    )
    matrices, of_rows = (gate_up_eFD, down_eDF), (counts_e, weights_R, index_R)
    return _Float8ExpertFfn.apply(x_ND, *matrices, *of_rows, *(biases or (None, None)), quantized, extras)


@dataclass(frozen=True, kw_only=True)
class _Extras(ExpertOptions):
    float8: Float8Rule
    copies: ExpertCopies | None

    @property
    def operators(self) -> Float8Operators:
        return self.float8.operators

    @property
    def recipe(self) -> Recipe:
        return _recipe_of(self.float8)

    def copies_of(self, index: int, w_eFD: Tensor | SlottedWeight) -> "WeightCopies | GatheredCopies | _SlottedCopies":
        """Copies of a product's weight: kept, gathered, or made now; those of replicas are made now."""
        quantize = partial(self.operators.quantize_weight, recipe=self.recipe, form=self.float8.forward)
        kept = None if self.copies is None else self.copies[index]
        if isinstance(w_eFD, SlottedWeight):
            local_copies = copies_of(w_eFD.own, kept, quantize)
            w_eFD.wait()
            return _SlottedCopies(local_copies, quantize(w_eFD.slots))
        return copies_of(w_eFD, kept, quantize)


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


class _Float8ExpertFfn(torch.autograd.Function):
    """Saves x in 8 bits, its index and, unless that is recomputed, the pre-activation."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        gate_up_eFD: Tensor,
        down_eDF: Tensor,
        counts_e: Tensor,
        weights_R: Tensor | None,
        index_R: Tensor | None,
        gate_up_bias_eF: Tensor | None,
        down_bias_eD: Tensor | None,
        rows: Quantized | None,
        extras: _Extras,
    ) -> Tensor:
        check_biases(gate_up_bias_eF is not None, extras.rule)
        check_operands(x_ND, gate_up_eFD, down_eDF, index_R, extras.places_TK, extras.rule)
        operators, recipe, form = extras.operators, extras.recipe, extras.float8.forward
        rows = _source_rows(x_ND, rows, counts_e if index_R is None else None, extras.float8)
        places = len(x_ND if index_R is None else index_R)
        tiles, kept = extras.prepare(operators.tile_table, counts_e, places, x_ND)
        weights, own_biases = (gate_up_eFD, down_eDF), (gate_up_bias_eF, down_bias_eD)
        (gate_up, down), (gate_up_bias, down_bias) = extras.fetch(weights, own_biases, counts_e)
        weight, options = extras.copies_of(GATE_UP, gate_up).forward, {"dtype": x_ND.dtype, "tiles": tiles}
        gate_up_RF = _pre_activation(rows, weight, counts_e, index_R, gate_up_bias, operators, options, kept)
        source = gate_up_RF if kept is None else kept
        h = operators.swiglu(source, weights_R, extras.rule, recipe, form, counts_e=counts_e).rows
        of_kept = (None if extras.recompute else gate_up_RF, None if kept is None else kept.first)
        del gate_up_RF, source, kept, weight
        # Copies of weights are no activations: hooks of saved tensors must not find them.
        matrices = weights if extras.copies is None else (None, None)
        of_rows = (counts_e, weights_R, index_R)
        ctx.save_for_backward(rows.values, rows.scales, *matrices, *of_rows, *own_biases, *of_kept)
        ctx.extras, ctx.block, ctx.tiles = extras, rows.block, tiles
        y_RD = operators.multiply_groups(h, extras.copies_of(DOWN, down).forward, counts_e, **options)
        return y_RD if down_bias is None else torch_add_bias(y_RD, down_bias, counts_e, weights_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor | None, ...]:
        values, scales, gate_up_eFD, down_eDF, counts_e, weights_R, index_R, *rest = ctx.saved_tensors
        *own_biases, kept_RF, first = rest
        wants_x, wants_gate_up, wants_down, _, wants_weights, *_ = ctx.needs_input_grad
        extras, rows = ctx.extras, Quantized(values, scales, ctx.block)
        options = {"dtype": dy_RD.dtype, "tiles": ctx.tiles}
        operators, recipe, float8 = extras.operators, extras.recipe, extras.float8
        dx_ND = d_gate_up_eFD = d_down_eDF = None

        parameters = (gate_up_eFD, down_eDF) if extras.copies is None else extras.parameters
        (gate_up_weight, down), biases = extras.fetch(parameters, tuple(own_biases), counts_e)
        gate_up = extras.copies_of(GATE_UP, gate_up_weight)
        if kept_RF is None:
            kept_RF = _pre_activation(rows, gate_up.forward, counts_e, index_R, biases[0], operators, options)
        # 1. Back through the down projection and the activation; h is recomputed in the same pass.
        dy_RD = dy_RD.contiguous()
        block = recipe.rows if wants_down else None
        dy = operators.quantize_rows(dy_RD, recipe, float8.gradient, columns=block, counts_e=counts_e)
        dh_RF = operators.multiply_groups(dy.rows, extras.copies_of(DOWN, down).backward, counts_e, **options)
        formats, keep_plain = (float8.forward, float8.gradient), biases[0] is not None
        kept_RF = kept_RF if first is None else SavedRows(kept_RF, first, len(dy_RD))
        d_gate_up, d_gate_up_columns, h_columns, dweights_R, d_gate_up_RF = operators.swiglu_backward(
            kept_RF, weights_R, dh_RF, counts_e, extras.rule, recipe, *formats, keep_plain=keep_plain
        )
        del dh_RF, kept_RF, rest
        # 2. Gradients of the down projection and of the biases.
        if dy.columns is not None:
            d_down_eDF = _weight_gradient(DOWN, dy.columns, h_columns, counts_e, ctx.tiles, extras)
        del dy, h_columns
        of_bias, weights = operators.bias_gradient, (weights_R, dweights_R)
        d_biases = bias_gradients(of_bias, dy_RD, d_gate_up_RF, counts_e, weights, biases, extras)
        del d_gate_up_RF
        # 3. Gradient of the tokens: rows of each token are summed.
        if wants_x:
            dx_RD = operators.multiply_groups(d_gate_up, gate_up.backward, counts_e, **options)
            dx_ND = sum_over_places(dx_RD, len(values), counts_e, index_R, extras.places_TK, operators.unpermute)
            del dx_RD
        del d_gate_up, gate_up
        # 4. Last, because it is the largest: all tensors above are freed by now.
        if wants_gate_up:
            x = partial(operators.quantize_groups, rows, counts_e, recipe, float8.forward, index_R)
            d_gate_up_eFD = _weight_gradient(GATE_UP, d_gate_up_columns, x, counts_e, ctx.tiles, extras)
        dweights_R = dweights_R if wants_weights else None
        return dx_ND, d_gate_up_eFD, d_down_eDF, None, dweights_R, None, *d_biases, None, None


def _pre_activation(
    rows: Quantized,
    weight: Quantized | SlottedWeight,
    counts_e: Tensor,
    index_R: Tensor | None,
    bias_eF: Tensor | None,
    operators: Float8Operators,
    options: dict[str, Any],
    keep: SavedRows | None = None,
) -> Tensor:
    """The first product, in 16 bits; with `keep` the whole buffer. Options are the product's."""
    options = options if keep is None else options | {"keep": keep}
    gate_up_RF: Tensor = operators.multiply_groups(rows, weight, counts_e, index_R, **options)
    return gate_up_RF if bias_eF is None else torch_add_bias(gate_up_RF, bias_eF, counts_e)


def _weight_gradient(
    index: int,
    dy: Quantized,
    x: Quantized | Callable[[], Quantized],
    counts_e: Tensor,
    tiles: TileTable | None,
    extras: _Extras,
) -> Tensor | None:
    """The gradient of a matrix, added to its sum or returned for autograd, now or later."""
    options = {"dtype": extras.parameters[index].dtype, "tiles": tiles}

    def make(accumulate_into: Any) -> Any:
        columns = x if isinstance(x, Quantized) else x()
        return extras.operators.multiply_columns(dy, columns, counts_e, accumulate_into=accumulate_into, **options)

    return put_gradient(make, index, extras)


def _recipe_of(float8: Float8Rule) -> Recipe:
    assert float8.experts is not None, "the experts of this layer compute in 16 bits"
    return float8.experts


def _source_rows(x_ND: Tensor, quantized: Quantized | None, counts_e: Tensor | None, float8: Float8Rule) -> Quantized:
    """The source rows in 8 bits: those that were received, or quantized now; without counts all rows are real."""
    recipe, form = _recipe_of(float8), float8.forward
    if quantized is None:
        made: Quantized = float8.operators.quantize_rows(x_ND, recipe, form, counts_e=counts_e).rows
        return made
    expected = (x_ND.shape, recipe.rows, form.dtype)
    got = (quantized.values.shape, quantized.block, quantized.values.dtype)
    if got != expected:
        raise KernelError(
            "expert_ffn: rows in 8 bits must be those of x, in the blocks and the format of ours",
            got=f"{tuple(got[0])} by blocks of {got[1]} in {got[2]}",
            allowed=f"{tuple(expected[0])} by blocks of {expected[1]} in {expected[2]}",
        )
    return quantized
