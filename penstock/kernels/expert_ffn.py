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

In 8 bits (`penstock.kernels.float8.expert_ffn`) the function is the same and its `ExpertKernels` are others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.expert_kernels import REFERENCE, TRITON, ExpertKernels
from penstock.kernels.expert_parts import (
    DOWN,
    GATE_UP,
    DeferGradient,
    ReplicaSlots,
    SavedRows,
    SaveRows,
    SlottedWeight,
    WeightedBias,
)
from penstock.kernels.float8.quantized import Quantized, WeightCopies
from penstock.kernels.language import on_gpu
from penstock.kernels.reference import SWIGLU, ExpertRule, RowOrder, check_biases
from penstock.kernels.tile_table import TileTable


def expert_ffn(
    x_ND: Tensor,
    gate_up_eFD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    weights_R: Tensor | None = None,
    index_R: Tensor | None = None,
    *,
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
    in_mxfp4: bool = False,
    kernels: ExpertKernels | None = None,
) -> Tensor:
    """`reference.expert_ffn` for every backend, differentiable in every floating-point argument.

    Args:
        quantized: x in 8 bits, only for kernels in 8 bits, which then read the shape and dtype of x alone.
        places_TK: only with `index_R`, whose inverse it is: the places that read each source row, T = N (as in
            `RowOrder`). With it the gradient of x is a sum in a fixed order; without it rows are added by atomics.
        accumulate_into: float32 sums to which backward adds the gradients of matrices and biases; it then returns none.
        put_off: receives the tasks of both matrices' gradients; None computes them in backward.
        recompute: save no pre-activation; each backward pass runs the first product again. Bit for bit the same.
        keep: gives the pre-activation a place in a buffer; None gives it a tensor of its own.
        only_last: of the rows past the last expert's, only the very last one is read, and set to zero in the result.
        replicas: brings the weights of the experts past those of the matrices, the last ones of `counts_e`.
        in_mxfp4: products read the matrices rounded to MXFP4, which each pass makes anew and nothing saves; gradients
            with respect to the rounded matrices are those of the matrices (straight-through).
        kernels: implementations; None takes `TRITON` on a GPU and `REFERENCE` on a CPU.

    Raises:
        KernelError: shapes do not fit, or biases are combined with weights on the input.
    """
    check_biases(biases is not None, rule)
    _check(x_ND, gate_up_eFD, down_eDF, index_R, places_TK, rule)
    kernels = kernels or (TRITON if on_gpu(x_ND) else REFERENCE)
    if in_mxfp4:
        kernels = _in_mxfp4(kernels)
    sums = accumulate_into or ()
    options = _Options(
        kernels=kernels,
        parameters=(gate_up_eFD, down_eDF),
        sums=(*sums, *[None] * (4 - len(sums))),
        places_TK=places_TK,
        put_off=put_off,
        recompute=recompute,
        keep=keep if kernels.saves_rows and not recompute else None,
        only_last=only_last,
        rule=rule,
        replicas=replicas,
    )
    function = _Float8ExpertFfn if kernels.in_8_bits else _ExpertFfn
    matrices, of_rows = (gate_up_eFD, down_eDF), (counts_e, weights_R, index_R)
    return function.apply(x_ND, *matrices, *of_rows, *(biases or (None, None)), quantized, options)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Arguments that autograd does not see."""

    kernels: ExpertKernels
    parameters: tuple[Tensor, Tensor]  # both matrices
    sums: tuple[Tensor | None, ...]  # float32, of the gradients of both matrices and both biases
    places_TK: Tensor | None
    put_off: DeferGradient | None
    recompute: bool
    keep: SaveRows | None
    only_last: bool
    rule: ExpertRule
    replicas: ReplicaSlots | None


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
        quantized: Quantized | None,
        options: _Options,
    ) -> Tensor:
        kernels = options.kernels
        x = kernels.source(x_ND, quantized, counts_e if index_R is None else None)
        rows = len(x_ND if index_R is None else index_R)
        tiles, destination = _prepare(counts_e, rows, x_ND, options)
        matrices, own_biases = (gate_up_eFD, down_eDF), (gate_up_bias_eF, down_bias_eD)
        (gate_up, down), (gate_up_bias, down_bias) = _fetch(matrices, own_biases, counts_e, options.replicas)
        given = {"bias_eF": gate_up_bias, "tiles": tiles} | ({} if destination is None else {"keep": destination})
        weight = kernels.copies(GATE_UP, gate_up).forward
        gate_up_RF = kernels.forward(x, weight, counts_e, index_R, **given)
        source = gate_up_RF if destination is None else destination
        h = kernels.swiglu(source, weights_R, options.rule, counts_e, tiles)
        saved_RF = None if options.recompute else gate_up_RF  # saved for backward: the whole buffer, if there is one
        first = None if destination is None else destination.first
        del gate_up_RF, source, weight  # freed before the second product if they are made again
        values, scales, ctx.block = x if isinstance(x, Quantized) else (x, None, None)
        # Copies of weights are no activations: hooks of saved tensors must not find them.
        read = matrices if kernels.reads_matrices else (None, None)
        ctx.save_for_backward(values, scales, *read, counts_e, weights_R, index_R, *own_biases, saved_RF, first)
        ctx.options, ctx.tiles = options, tiles
        weight = kernels.copies(DOWN, down).forward
        return kernels.forward(h, weight, counts_e, None, bias_eF=down_bias, weights_R=weights_R, tiles=tiles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor | None, ...]:
        values, scales, gate_up_eFD, down_eDF, counts_e, weights_R, index_R, *own_biases, saved_RF, first = (
            ctx.saved_tensors  # first: of the layer in the buffer, None for a tensor of its own
        )
        wants_x, wants_gate_up, wants_down, _, wants_weights, *_ = ctx.needs_input_grad
        options, tiles, dy_RD = ctx.options, ctx.tiles, dy_RD.contiguous()
        kernels = options.kernels
        x = values if scales is None else Quantized(values, scales, ctx.block)
        dx_ND = d_gate_up_eFD = d_down_eDF = None

        parameters = (gate_up_eFD, down_eDF) if kernels.reads_matrices else options.parameters
        (gate_up, down), biases = _fetch(parameters, tuple(own_biases), counts_e, options.replicas)
        gate_up = kernels.copies(GATE_UP, gate_up)
        if saved_RF is None:
            saved_RF = kernels.forward(x, gate_up.forward, counts_e, index_R, bias_eF=biases[GATE_UP], tiles=tiles)
        # 1. Back through the down projection and the activation; h is recomputed in the same pass.
        dy, dy_columns = kernels.quantize_gradient(dy_RD, counts_e, wants_down)
        dh_RF = kernels.input_gradient(dy, kernels.copies(DOWN, down).backward, counts_e, tiles=tiles)
        saved_RF = saved_RF if first is None else SavedRows(saved_RF, first, len(dy_RD))
        d_gate_up, d_gate_up_columns, h_columns, dweights_R, d_gate_up_RF = kernels.swiglu_backward(
            saved_RF, weights_R, dh_RF, counts_e, options.rule, tiles, recompute=wants_down
        )
        del dh_RF, saved_RF
        # 2. Gradients of the down projection and of the biases.
        if wants_down:
            product = partial(kernels.weight_gradient, dy_columns, h_columns, counts_e, None, tiles=tiles)
            d_down_eDF = _put_gradient(product, DOWN, options)
            del product  # which holds h
        del dy, dy_columns, h_columns
        d_biases = _bias_gradients(dy_RD, d_gate_up_RF, counts_e, (weights_R, dweights_R), biases, tiles, options)
        del d_gate_up_RF
        # 3. Gradient of the tokens: rows of each token are summed.
        if wants_x:
            dx_RD = kernels.input_gradient(d_gate_up, gate_up.backward, counts_e, tiles=tiles)
            dx_ND = _sum_over_places(dx_RD, len(values), counts_e, index_R, options)
            del dx_RD
        del d_gate_up, gate_up
        # 4. Last, because it is the largest result: all other buffers are free again here.
        if wants_gate_up:

            def gate_up_gradient(accumulate_into: Any) -> Any:
                columns = kernels.columns(x, counts_e, index_R)
                given = {"accumulate_into": accumulate_into, "tiles": tiles}
                return kernels.weight_gradient(d_gate_up_columns, columns, counts_e, index_R, **given)

            d_gate_up_eFD = _put_gradient(gate_up_gradient, GATE_UP, options)
        dweights_R = dweights_R if wants_weights else None
        return dx_ND, d_gate_up_eFD, d_down_eDF, None, dweights_R, None, *d_biases, None, None


class _Float8ExpertFfn(_ExpertFfn):
    """The same under the name by which traces know products in 8 bits."""


def _in_mxfp4(kernels: ExpertKernels) -> ExpertKernels:
    """The same; their products read matrices that are rounded when they ask for them."""

    def rounded(weight: Any) -> Any:
        if not isinstance(weight, SlottedWeight):
            return kernels.to_mxfp4(weight)
        own = kernels.to_mxfp4(weight.own)
        weight.wait()
        return SlottedWeight(own, kernels.to_mxfp4(weight.slots))

    def copies(index: int, weight: Any) -> WeightCopies:
        matrix = rounded(weight)
        return WeightCopies(matrix, matrix)

    return replace(kernels, copies=copies)


def _check(
    x_ND: Tensor,
    gate_up_eFD: Tensor,
    down_eDF: Tensor,
    index_R: Tensor | None,
    places_TK: Tensor | None,
    rule: ExpertRule,
) -> None:
    """Raise KernelError where the operands do not fit each other; each kernel checks its own."""
    experts, width, hidden = gate_up_eFD.shape
    if x_ND.shape[1] != hidden or down_eDF.shape != (experts, hidden, width // rule.projections):
        raise KernelError(
            "expert_ffn: x, gate_up and down must be N x D, experts x 2F x D and experts x D x F",
            got=f"{tuple(x_ND.shape)}, {tuple(gate_up_eFD.shape)}, {tuple(down_eDF.shape)}",
        )
    if places_TK is not None and (index_R is None or places_TK.shape[0] != x_ND.shape[0]):
        raise KernelError(
            "expert_ffn: places_TK must have one row for each source row, and index_R beside it",
            got=f"{len(places_TK)} rows for {len(x_ND)}, index_R {'missing' if index_R is None else 'given'}",
        )


def _prepare(counts_e: Tensor, rows: int, x_ND: Tensor, options: _Options) -> tuple[TileTable | None, SavedRows | None]:
    """Tile table of all products, and the pre-activation's place in the buffer of `keep`; None where not needed."""
    tiles = options.kernels.tile_table(counts_e, rows)
    if tiles is None:
        return None, None
    tiles = replace(tiles, only_last=options.only_last)
    if options.replicas is not None:
        tiles = tiles.in_parts(counts_e, rows, options.replicas.slots)
    if options.keep is None:
        return tiles, None
    return tiles, options.keep(tiles.used, rows, x_ND.new_empty(0, options.parameters[GATE_UP].shape[1]))


def _fetch(
    matrices: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    counts_e: Tensor,
    replicas: ReplicaSlots | None,
) -> tuple[list[Any], list[Tensor | None]]:
    """Matrices and biases as products read them: with those of replicas, which are sent now."""
    if replicas is None:
        return list(matrices), list(biases)
    given = [bias for bias in biases if bias is not None]
    (gate_up, down, *came), wait = replicas.fetch(*matrices, *given)
    if given:
        wait()
        is_empty_X1 = (counts_e[len(matrices[0]) :] == 0)[:, None]  # the bias of an empty slot may be NaN
        given = [torch.cat((bias, new.masked_fill(is_empty_X1, 0))) for bias, new in zip(given, came, strict=True)]
    slotted = [SlottedWeight(matrices[GATE_UP], gate_up, wait), SlottedWeight(matrices[DOWN], down, wait)]
    return slotted, [None if bias is None else given.pop(0) for bias in biases]


def _put_gradient(make: Callable[..., Any], index: int, options: _Options) -> Tensor | None:
    """Compute the gradient of a matrix now and return it for autograd, or defer it by `put_off`.

    `make` takes `accumulate_into`. If there is a float32 sum, the gradient is added to it and nothing is returned. A
    deferred gradient without a sum goes to the parameter's own `.grad`.
    """
    total, parameter, replicas = options.sums[index], options.parameters[index], options.replicas

    def now() -> Tensor:
        if replicas is None:
            gradient: Tensor = make(accumulate_into=total)
            return gradient
        result = make(accumulate_into=SlottedWeight(total, replicas.gradient_sums(index, parameter)))
        replicas.give_back(index, [result.slots], [result.own], aside=total is not None)
        local_gradient: Tensor = result.own
        return local_gradient

    def late() -> None:
        deferred_gradient = now()
        if total is None:  # Through the parameter's own hooks, as in any backward pass.
            parameter.view_as(parameter).backward(deferred_gradient)

    if options.put_off is not None and options.put_off(late):
        return None
    gradient = now()
    return gradient if total is None else None


def _bias_gradients(
    dy_RD: Tensor,
    d_gate_up_RF: Tensor | None,
    counts_e: Tensor,
    weights: tuple[Tensor | None, Tensor | None],  # and their gradient so far, to which the second bias adds its part
    biases: Sequence[Tensor | None],
    tiles: TileTable | None,
    options: _Options,
) -> list[Tensor | None]:
    """Gradients of both biases for autograd, None where there is a sum."""
    gradient, sums, replicas = partial(options.kernels.bias_gradient, tiles=tiles), options.sums[2:], options.replicas
    given = [
        total if replicas is None or bias is None else bias.new_zeros(bias.shape, dtype=torch.float32)
        for bias, total in zip(biases, sums, strict=True)
    ]
    gradients: list[Tensor | None] = [None, None]
    if biases[GATE_UP] is not None:
        gradients[GATE_UP] = gradient(d_gate_up_RF, counts_e, accumulate_into=given[GATE_UP])
    if (bias_eD := biases[DOWN]) is not None:
        weights_R, dweights_R = weights
        weighted = None if weights_R is None or dweights_R is None else WeightedBias(bias_eD, weights_R, dweights_R)
        gradients[DOWN] = gradient(dy_RD, counts_e, weighted, accumulate_into=given[DOWN])
    if replicas is not None and (there := [entry for entry in gradients if entry is not None]):
        count = len(counts_e) - replicas.slots
        replicas.give_back(len(biases), [entry[count:] for entry in there], [entry[:count] for entry in there])
        for index, bias in enumerate(biases):
            value, total = gradients[index], sums[index]
            if value is not None and bias is not None:
                gradients[index] = value[:count].to(bias.dtype) if total is None else total.add_(value[:count])
    return [None if total is not None else entry for entry, total in zip(gradients, sums, strict=True)]


def _sum_over_places(dx_RD: Tensor, rows: int, counts_e: Tensor, index_R: Tensor | None, options: _Options) -> Tensor:
    """Gradient of the N source rows: the sum of the gradients of the places that read each of them."""
    if index_R is None:  # the places are the rows
        return dx_RD
    if options.places_TK is not None:  # the inverse of the index: the sum has a fixed order
        return options.kernels.unpermute(dx_RD, RowOrder(index_R, options.places_TK, counts_e))
    # By atomics, in any order.
    sums_ND = dx_RD.new_zeros(rows, dx_RD.shape[1], dtype=torch.float32)
    return sums_ND.index_add_(0, index_R, dx_RD.float()).to(dx_RD.dtype)
