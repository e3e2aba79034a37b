"""The experts' feed-forward networks as one autograd function that keeps almost nothing for backward.

Forward is two grouped GEMMs with SwiGLU between. The first gathers its rows from the tokens, so they are never copied:

    gate_up_RF = x_ND[index_R] @ gate_up^T      saved
    h_RF       = swiglu(gate_up_RF) * weight    freed
    y_RD       = h_RF @ down^T                  the output

Only the tokens (which the layer's input keeps alive anyhow) and the pre-activation are saved. Backward needs no more,
because the routing weight stands before the linear down projection (SonicMoE, arXiv 2512.14080): its gradient is a dot
product of two rows of width F that are at hand, and not of the outputs, and h costs one more write to have again.

    dh_RF      = dy_RD @ down
    d_gate_up_RF, dweights_R, h_RF  <-  gate_up_RF, weights_R, dh_RF        one elementwise pass
    d_down     = dy_RD^T @ h_RF
    dx_ND      = d_gate_up_RF @ gate_up, rows of each token summed
    d_gate_up  = d_gate_up_RF^T @ x_ND[index_R]

For DeepSeek-V2-Lite (D 2,048, F 1,408, 6 experts a token) this keeps 38 kB a token and layer; keeping the rows, both
halves of the activation, h and the outputs as well would keep 104 kB. With `recompute` the pre-activation is freed too
and backward begins with the first product; 4 kB are left.

Each product chooses its backend by itself: an `ExpertKernels` holds the callables that are used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels import reference
from penstock.kernels.grouped_gemm import (
    grouped_gemm_forward,
    grouped_gemm_input_gradient,
    grouped_gemm_weight_gradient,
)
from penstock.kernels.launching import counts_on_host, on_gpu
from penstock.kernels.permute import unpermute
from penstock.kernels.reference import RowOrder
from penstock.kernels.swiglu import SwigluGradients, swiglu, swiglu_backward
from penstock.kernels.tile_table import TileTable, tile_table


@dataclass(frozen=True, kw_only=True)
class ExpertKernels:
    """The parts that `expert_ffn` is built from; replace one with `dataclasses.replace`.

    The three products have the signatures of `penstock.kernels.grouped_gemm` without `launch`; all take `tiles`, which
    those of other backends have no use for. Rows past the last expert's are zero in what they give and unread in what
    they take.

    Attributes:
        forward: (x_RD, w_eFD, counts_e, index_R, *, tiles) -> y_RF.
        input_gradient: (dy_RF, w_eFD, counts_e, *, tiles) -> dx_RD.
        weight_gradient: (dy_RF, x_RD, counts_e, index_R, *, accumulate_into, tiles) -> dw_eFD.
        swiglu: (gate_up_RF, weights_R) -> h_RF.
        swiglu_backward: (gate_up_RF, weights_R, dh_RF, *, recompute) -> SwigluGradients.
        unpermute: (y_RD, order) -> y_TD, the sum over each token's places.
        tile_table: (counts_e, rows) -> what the products of both passes share, None if they share nothing.
    """

    forward: Callable[..., Tensor]
    input_gradient: Callable[..., Tensor]
    weight_gradient: Callable[..., Tensor]
    swiglu: Callable[[Tensor, Tensor | None], Tensor]
    swiglu_backward: Callable[..., SwigluGradients]
    unpermute: Callable[[Tensor, RowOrder], Tensor]
    tile_table: Callable[[Tensor, int], TileTable | None]


def expert_ffn(
    x_ND: Tensor,
    gate_up_eFD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    weights_R: Tensor | None = None,
    index_R: Tensor | None = None,
    *,
    places_TK: Tensor | None = None,
    accumulate_into: tuple[Tensor, Tensor] | None = None,
    recompute: bool = False,
    kernels: ExpertKernels | None = None,
) -> Tensor:
    """The whole feed-forward network of each expert over its rows; differentiable in x, both matrices and the weights.

    Args:
        x_ND: source rows (see `reference.grouped_gemm` for `index_R`).
        gate_up_eFD: gate and up projections stacked, so 2 F x D for each expert.
        down_eDF: down projection.
        counts_e: int32 rows of each expert, on the device; may sum to less than R.
        weights_R: float32 routing weight of each row, or None for 1.
        index_R: source row of each place, or None if x stands in the experts' order already.
        places_TK: only with `index_R`, whose inverse it is: the places that read each source row, T = N (as in
            `RowOrder`). With it the gradient of x is a sum in a fixed order; without it rows are added by atomics.
        accumulate_into: float32 sums in the shapes of gate_up and down; backward adds the matrices' gradients to them
            and returns none.
        recompute: keep no pre-activation; each backward pass runs the first product again. Bit for bit the same.
        kernels: what to build it from; None takes `TRITON` on a GPU and `REFERENCE` on a CPU.

    Returns:
        y_RD; rows past the last expert's are zero.

    Raises:
        KernelError: shapes do not fit.
    """
    _check(x_ND, gate_up_eFD, down_eDF, index_R, places_TK)
    if kernels is None:
        kernels = TRITON if on_gpu(x_ND) else REFERENCE
    extras = _Extras(places_TK=places_TK, accumulate_into=accumulate_into, recompute=recompute, kernels=kernels)
    return _ExpertFfn.apply(x_ND, gate_up_eFD, down_eDF, counts_e, weights_R, index_R, extras)


@dataclass(frozen=True, kw_only=True)
class _Extras:
    """What a call needs besides the tensors of its definition; fields as in `expert_ffn`."""

    places_TK: Tensor | None
    accumulate_into: tuple[Tensor, Tensor] | None
    recompute: bool
    kernels: ExpertKernels


class _ExpertFfn(torch.autograd.Function):
    """Saves x, its index and, unless that is recomputed, the pre-activation."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        gate_up_eFD: Tensor,
        down_eDF: Tensor,
        counts_e: Tensor,
        weights_R: Tensor | None,
        index_R: Tensor | None,
        extras: _Extras,
    ) -> Tensor:
        kernels = extras.kernels
        tiles = kernels.tile_table(counts_e, x_ND.shape[0] if index_R is None else index_R.shape[0])
        gate_up_RF = kernels.forward(x_ND, gate_up_eFD, counts_e, index_R, tiles=tiles)
        h_RF = kernels.swiglu(gate_up_RF, weights_R)
        kept_RF = None if extras.recompute else gate_up_RF
        del gate_up_RF
        ctx.save_for_backward(x_ND, gate_up_eFD, down_eDF, counts_e, weights_R, index_R, kept_RF)
        ctx.extras, ctx.tiles = extras, tiles
        return kernels.forward(h_RF, down_eDF, counts_e, None, tiles=tiles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, gate_up_eFD, down_eDF, counts_e, weights_R, index_R, gate_up_RF = ctx.saved_tensors
        wants_x, wants_gate_up, wants_down, _, wants_weights, *_ = ctx.needs_input_grad
        kernels, tiles = ctx.extras.kernels, ctx.tiles
        gate_up_sum, down_sum = ctx.extras.accumulate_into or (None, None)
        dy_RD = dy_RD.contiguous()
        dx_ND = d_gate_up_eFD = d_down_eDF = None

        if gate_up_RF is None:
            gate_up_RF = kernels.forward(x_ND, gate_up_eFD, counts_e, index_R, tiles=tiles)
        dh_RF = kernels.input_gradient(dy_RD, down_eDF, counts_e, tiles=tiles)
        d_gate_up_RF, dweights_R, h_RF = kernels.swiglu_backward(gate_up_RF, weights_R, dh_RF, recompute=wants_down)
        del dh_RF, gate_up_RF
        if wants_down:
            d_down_eDF = kernels.weight_gradient(dy_RD, h_RF, counts_e, None, accumulate_into=down_sum, tiles=tiles)
        del h_RF
        if wants_x:
            dx_RD = kernels.input_gradient(d_gate_up_RF, gate_up_eFD, counts_e, tiles=tiles)
            dx_ND = _sum_over_places(dx_RD, x_ND, counts_e, index_R, ctx.extras)
            del dx_RD
        # Last, because it is the largest: everything above is free again by now.
        if wants_gate_up:
            d_gate_up_eFD = kernels.weight_gradient(
                d_gate_up_RF, x_ND, counts_e, index_R, accumulate_into=gate_up_sum, tiles=tiles
            )
        return (
            dx_ND,
            None if gate_up_sum is not None else d_gate_up_eFD,
            None if down_sum is not None else d_down_eDF,
            None,
            dweights_R if wants_weights else None,
            None,
            None,
        )


def _sum_over_places(dx_RD: Tensor, x_ND: Tensor, counts_e: Tensor, index_R: Tensor | None, extras: _Extras) -> Tensor:
    """Gradient of the source rows from the gradients of the places that read them."""
    if index_R is None:
        return dx_RD
    if extras.places_TK is not None:
        return extras.kernels.unpermute(dx_RD, RowOrder(index_R, extras.places_TK, counts_e))
    sums_ND = torch.zeros_like(x_ND, dtype=torch.float32)
    return sums_ND.index_add_(0, index_R, dx_RD.float()).to(x_ND.dtype)


def _check(
    x_ND: Tensor, gate_up_eFD: Tensor, down_eDF: Tensor, index_R: Tensor | None, places_TK: Tensor | None
) -> None:
    """Raise KernelError where the parts do not fit each other; each kernel looks at its own operands."""
    experts, width, hidden = gate_up_eFD.shape
    if x_ND.shape[1] != hidden or down_eDF.shape != (experts, hidden, width // 2):
        raise KernelError(
            "expert_ffn: x, gate_up and down must be N x D, experts x 2F x D and experts x D x F",
            got=f"{tuple(x_ND.shape)}, {tuple(gate_up_eFD.shape)}, {tuple(down_eDF.shape)}",
        )
    if places_TK is not None and (index_R is None or places_TK.shape[0] != x_ND.shape[0]):
        raise KernelError(
            "expert_ffn: places_TK must have one row for each source row, and index_R beside it",
            got=f"{len(places_TK)} rows for {len(x_ND)}, index_R {'missing' if index_R is None else 'given'}",
        )


# The backends. The two below are eager: `REFERENCE` is written from the definitions and brings the counts to the host,
# `TORCH` leaves them on the device.


def _no_tile_table(counts_e: Tensor, rows: int) -> None:
    """Only Triton's products share one."""


def _used(rows_RD: Tensor, counts_e: Tensor) -> Tensor:
    """The same with the rows past the last expert's set to zero, whatever they held."""
    is_used_R = torch.arange(rows_RD.shape[0], device=rows_RD.device) < counts_e.sum()
    return torch.where(is_used_R[:, None], rows_RD, 0)


def _add_or_return(dw_eFD: Tensor, accumulate_into: Tensor | None) -> Tensor:
    return dw_eFD if accumulate_into is None else accumulate_into.add_(dw_eFD)


def _swiglu_backward_in_torch(
    gate_up_RF: Tensor, weights_R: Tensor | None, dh_RF: Tensor, *, recompute: bool
) -> SwigluGradients:
    """By autograd through the reference."""
    with torch.enable_grad():
        inputs = [gate_up_RF.detach().requires_grad_()]
        if weights_R is not None:
            inputs.append(weights_R.detach().requires_grad_())
        h_RF = reference.swiglu(*inputs)
    d_gate_up_RF, *rest = torch.autograd.grad(h_RF, inputs, dh_RF)
    return SwigluGradients(d_gate_up_RF, rest[0] if rest else None, h_RF.detach() if recompute else None)


def _forward_by_definition(
    x_RD: Tensor, w_eFD: Tensor, counts_e: Tensor, index_R: Tensor | None = None, *, tiles: None = None
) -> Tensor:
    return reference.grouped_gemm(x_RD, w_eFD, counts_e, index_R)


def _input_gradient_by_definition(dy_RF: Tensor, w_eFD: Tensor, counts_e: Tensor, *, tiles: None = None) -> Tensor:
    return reference.grouped_gemm(dy_RF, w_eFD.transpose(1, 2), counts_e)


def _weight_gradient_by_definition(
    dy_RF: Tensor,
    x_RD: Tensor,
    counts_e: Tensor,
    index_R: Tensor | None = None,
    *,
    accumulate_into: Tensor | None = None,
    tiles: None = None,
) -> Tensor:
    rows_RD = x_RD if index_R is None else x_RD[index_R]
    counts = counts_on_host(counts_e, dy_RF.shape[0])
    sizes = [*counts, dy_RF.shape[0] - sum(counts)]
    pieces = list(zip(dy_RF.split(sizes), rows_RD.split(sizes), strict=True))[:-1]
    return _add_or_return(torch.stack([dy.T @ rows for dy, rows in pieces]), accumulate_into)


def _forward_by_grouped_mm(
    x_RD: Tensor, w_eFD: Tensor, counts_e: Tensor, index_R: Tensor | None = None, *, tiles: TileTable | None = None
) -> Tensor:
    rows_RD = x_RD if index_R is None else x_RD.index_select(0, index_R)
    ends_e = counts_e.cumsum(0, dtype=torch.int32)
    return _used(F.grouped_mm(rows_RD, w_eFD.transpose(1, 2), offs=ends_e), counts_e)


def _input_gradient_by_grouped_mm(
    dy_RF: Tensor, w_eFD: Tensor, counts_e: Tensor, *, tiles: TileTable | None = None
) -> Tensor:
    if not len(dy_RF):  # grouped_mm refuses the strides of an expanded tensor without rows
        return dy_RF.new_zeros(0, w_eFD.shape[2])
    return _used(F.grouped_mm(dy_RF, w_eFD, offs=counts_e.cumsum(0, dtype=torch.int32)), counts_e)


def _weight_gradient_by_grouped_mm(
    dy_RF: Tensor,
    x_RD: Tensor,
    counts_e: Tensor,
    index_R: Tensor | None = None,
    *,
    accumulate_into: Tensor | None = None,
    tiles: TileTable | None = None,
) -> Tensor:
    rows_RD = x_RD if index_R is None else x_RD.index_select(0, index_R)
    if not len(rows_RD):  # as above
        nothing_eFD = dy_RF.new_zeros(len(counts_e), dy_RF.shape[1], rows_RD.shape[1])
        return _add_or_return(nothing_eFD, accumulate_into)
    ends_e = counts_e.cumsum(0, dtype=torch.int32)
    return _add_or_return(F.grouped_mm(dy_RF.T, rows_RD, offs=ends_e), accumulate_into)


REFERENCE = ExpertKernels(
    forward=_forward_by_definition,
    input_gradient=_input_gradient_by_definition,
    weight_gradient=_weight_gradient_by_definition,
    swiglu=reference.swiglu,
    swiglu_backward=_swiglu_backward_in_torch,
    unpermute=reference.unpermute,
    tile_table=_no_tile_table,
)
"""Written from the definitions; for CPUs and tests."""

TORCH = ExpertKernels(
    forward=_forward_by_grouped_mm,
    input_gradient=_input_gradient_by_grouped_mm,
    weight_gradient=_weight_gradient_by_grouped_mm,
    swiglu=reference.swiglu,
    swiglu_backward=_swiglu_backward_in_torch,
    unpermute=reference.unpermute,
    tile_table=_no_tile_table,
)
"""torch's grouped_mm; bfloat16 on a GPU."""

TRITON = ExpertKernels(
    forward=grouped_gemm_forward,
    input_gradient=grouped_gemm_input_gradient,
    weight_gradient=grouped_gemm_weight_gradient,
    swiglu=swiglu,
    swiglu_backward=swiglu_backward,
    unpermute=unpermute,
    tile_table=tile_table,
)
"""Our kernels."""
