"""The experts' feed-forward networks as one autograd function that saves little for backward.

Forward is two grouped GEMMs with SwiGLU between. The first gathers its rows from the tokens, so they are never copied:

    gate_up_RF = x_ND[index_R] @ gate_up^T      saved
    h_RF       = swiglu(gate_up_RF) * weight    freed
    y_RD       = h_RF @ down^T                  the output

Only the tokens and the pre-activation are saved, because the routing weight is applied before the linear down
projection (SonicMoE, arXiv 2512.14080): its gradient is a dot product of two rows of width F in registers, not of the
outputs, and recomputing h costs one write.

    dh_RF      = dy_RD @ down
    d_gate_up_RF, dweights_R, h_RF  <-  gate_up_RF, weights_R, dh_RF        one elementwise pass
    d_down     = dy_RD^T @ h_RF
    dx_ND      = d_gate_up_RF @ gate_up, rows of each token summed
    d_gate_up  = d_gate_up_RF^T @ x_ND[index_R]

For DeepSeek-V2-Lite (D 2,048, F 1,408, 6 experts a token) this saves 38 kB a token and layer, not 104. With
`recompute` the pre-activation is freed too and backward begins with the first product; 4 kB are left. With `keep`, many
layers save into one buffer (`penstock.kernels.expert_parts.SavedRows`). The products add biases while they write, the
second one times the routing weight.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels.expert_kernels import REFERENCE, TRITON, ExpertKernels
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
from penstock.kernels.launching import on_gpu
from penstock.kernels.reference import SWIGLU, ExpertRule, check_biases
from penstock.kernels.replica_slots import ReplicaSlots


def expert_ffn(
    x_ND: Tensor,
    gate_up_eFD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    weights_R: Tensor | None = None,
    index_R: Tensor | None = None,
    *,
    biases: tuple[Tensor, Tensor | None] | None = None,
    rule: ExpertRule = SWIGLU,
    places_TK: Tensor | None = None,
    accumulate_into: tuple[Tensor, ...] | None = None,
    put_off: DeferGradient | None = None,
    recompute: bool = False,
    keep: SaveRows | None = None,
    only_last: bool = False,
    replicas: ReplicaSlots | None = None,
    kernels: ExpertKernels | None = None,
) -> Tensor:
    """`reference.expert_ffn` for every backend, differentiable in every floating-point argument.

    Args:
        places_TK: only with `index_R`, whose inverse it is: the places that read each source row, T = N (as in
            `RowOrder`). With it the gradient of x is a sum in a fixed order; without it rows are added by atomics.
        accumulate_into: float32 sums to which backward adds the gradients of matrices and biases; it then returns none.
        put_off: receives the tasks of both matrices' gradients; None computes them in backward.
        recompute: save no pre-activation; each backward pass runs the first product again. Bit for bit the same.
        keep: gives the pre-activation a place in a buffer; None gives it a tensor of its own.
        only_last: of the rows past the last expert's, only the very last one is read, and set to zero in the result.
        replicas: brings the weights of the experts past those of the matrices, the last ones of `counts_e`.
        kernels: implementations; None takes `TRITON` on a GPU and `REFERENCE` on a CPU.

    Raises:
        KernelError: shapes do not fit, or biases are combined with weights on the input.
    """
    check_operands(x_ND, gate_up_eFD, down_eDF, index_R, places_TK, rule)
    check_biases(biases is not None, rule)
    kernels = kernels or (TRITON if on_gpu(x_ND) else REFERENCE)
    extras = _Extras(
        places_TK=places_TK,
        given_sums=accumulate_into or (),
        parameters=(gate_up_eFD, down_eDF),
        put_off=put_off,
        recompute=recompute,
        keep=keep if kernels.saves_rows and not recompute else None,
        only_last=only_last,
        rule=rule,
        replicas=replicas,
        kernels=kernels,
    )
    of_biases = biases or (None, None)
    return _ExpertFfn.apply(x_ND, gate_up_eFD, down_eDF, counts_e, weights_R, index_R, *of_biases, extras)


@dataclass(frozen=True, kw_only=True)
class _Extras(ExpertOptions):
    kernels: ExpertKernels


class _ExpertFfn(torch.autograd.Function):
    """Saves x, its index and, unless it is recomputed, the pre-activation."""

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
        extras: _Extras,
    ) -> Tensor:
        kernels = extras.kernels
        rows = len(x_ND if index_R is None else index_R)
        tiles, destination = extras.prepare(kernels.tile_table, counts_e, rows, x_ND)
        matrices, biases = (gate_up_eFD, down_eDF), (gate_up_bias_eF, down_bias_eD)
        (gate_up, down), (gate_up_bias, down_bias) = extras.fetch(matrices, biases, counts_e)
        options = {"bias_eF": gate_up_bias, "tiles": tiles} | ({} if destination is None else {"keep": destination})
        gate_up_RF = kernels.forward(x_ND, gate_up, counts_e, index_R, **options)
        used = None if tiles is None else tiles.used
        h_RF = kernels.swiglu(gate_up_RF if destination is None else destination, weights_R, extras.rule, used=used)
        saved_RF = None if extras.recompute else gate_up_RF  # saved for backward: the whole buffer, if there is one
        del gate_up_RF  # freed before the second product if it is recomputed
        first = None if destination is None else destination.first
        ctx.save_for_backward(x_ND, *matrices, counts_e, weights_R, index_R, *biases, saved_RF, first)
        ctx.extras, ctx.tiles = extras, tiles
        return kernels.forward(h_RF, down, counts_e, None, bias_eF=down_bias, weights_R=weights_R, tiles=tiles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, gate_up_eFD, down_eDF, counts_e, weights_R, index_R, *saved = ctx.saved_tensors
        wants_x, wants_gate_up, wants_down, _, wants_weights, *_ = ctx.needs_input_grad
        extras, tiles, dy_RD = ctx.extras, ctx.tiles, dy_RD.contiguous()
        kernels = extras.kernels
        *own_biases, saved_RF, first = saved  # first: of the layer in the buffer, None for a tensor of its own
        product = partial(kernels.weight_gradient, tiles=tiles)
        dx_ND = d_gate_up_eFD = d_down_eDF = None

        (gate_up, down), biases = extras.fetch((gate_up_eFD, down_eDF), tuple(own_biases), counts_e)
        if saved_RF is None:
            saved_RF = kernels.forward(x_ND, gate_up, counts_e, index_R, bias_eF=biases[0], tiles=tiles)
        # 1. Back through the down projection and the activation; h is recomputed in the same pass.
        dh_RF = kernels.input_gradient(dy_RD, down, counts_e, tiles=tiles)
        saved_RF = saved_RF if first is None else SavedRows(saved_RF, first, len(dy_RD))
        d_gate_up_RF, dweights_R, h_RF = kernels.swiglu_backward(
            saved_RF, weights_R, dh_RF, extras.rule, recompute=wants_down, used=None if tiles is None else tiles.used
        )
        del dh_RF, saved_RF, saved
        # 2. Gradients of the down projection and of the biases.
        if wants_down:
            make = partial(product, dy_RD, h_RF, counts_e, None)
            d_down_eDF = put_gradient(make, DOWN, extras)
            del make  # which holds h
        del h_RF
        of_bias, weights = partial(kernels.bias_gradient, tiles=tiles), (weights_R, dweights_R)
        d_biases = bias_gradients(of_bias, dy_RD, d_gate_up_RF, counts_e, weights, biases, extras)
        # 3. Gradient of the tokens: rows of each token are summed.
        if wants_x:
            dx_RD = kernels.input_gradient(d_gate_up_RF, gate_up, counts_e, tiles=tiles)
            dx_ND = sum_over_places(dx_RD, len(x_ND), counts_e, index_R, extras.places_TK, kernels.unpermute)
            del dx_RD
        # 4. Last, because it is the largest result: all other buffers are free again here.
        if wants_gate_up:
            make = partial(product, d_gate_up_RF, x_ND, counts_e, index_R)
            d_gate_up_eFD = put_gradient(make, GATE_UP, extras)
        dweights_R = dweights_R if wants_weights else None
        return dx_ND, d_gate_up_eFD, d_down_eDF, None, dweights_R, None, *d_biases, None
