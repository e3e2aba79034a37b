"""Parts that the experts' networks in 16 and in 8 bits share, and rows that several layers save in one buffer.

A layer saves as many rows for backward as tokens came to its experts. Layers differ: the fullest of 26 may have twice
the even share, while all together hardly have more than it. With one buffer for all layers, the buffer needs space for
the sum instead of the worst case of each. The first row of a layer is a number on the device, which the kernels that
write or read saved rows load (`SavedRows`):

    buffer   | layer 0 | layer 1 .... | layer 2 | free
    first    0         cursor after 0            cursor now

A layer that does not fit is counted and overwrites the first layers: the pass is invalid then and has to be repeated
with a larger buffer (penstock/moe/dispatch/row_capacity.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.language import tl, triton
from penstock.kernels.launching import counts_on_host, start_kernel
from penstock.kernels.operators import torch_add_bias
from penstock.kernels.reference import SWIGLU, ExpertRule, RowOrder
from penstock.kernels.replica_slots import ReplicaSlots, SlottedWeight
from penstock.kernels.tile_table import TileTable

GATE_UP, DOWN = range(2)  # indices of the matrices among the parameters

# Takes a task, which computes the gradient of a matrix, to be run later; False if it must run now.
DeferGradient = Callable[[Callable[[], None]], bool]


@dataclass(frozen=True)
class SavedRows:
    """Rows of one layer in a buffer of several layers."""

    rows_SF: Tensor  # the buffer, contiguous
    first: Tensor  # int64 [1], on the device: the layer's first row
    room: int  # most rows that the layer can have


# (used, room, like) -> place for at most `room` rows with width, dtype and device of `like`; `used` (int32) exist.
SaveRows = Callable[[Tensor, int, Tensor], SavedRows]


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Arguments of the experts' networks that autograd does not see (`penstock.kernels.expert_ffn.expert_ffn`)."""

    parameters: tuple[Tensor, Tensor]  # both matrices
    given_sums: tuple[Tensor, ...]  # float32, of the gradients of matrices and biases, as many as there are
    places_TK: Tensor | None
    put_off: DeferGradient | None
    recompute: bool
    keep: SaveRows | None
    only_last: bool
    rule: ExpertRule
    replicas: ReplicaSlots | None = None

    @property
    def sums(self) -> tuple[Tensor | None, ...]:
        """Of both matrices and both biases, None where there is none."""
        return (*self.given_sums, *[None] * (4 - len(self.given_sums)))

    def sum_of(self, index: int) -> Tensor | SlottedWeight | None:
        """The sum that the gradient of a matrix is added to; with replicas also zeros for theirs."""
        total = self.sums[index]
        if self.replicas is None:
            return total
        return SlottedWeight(total, self.replicas.gradient_sums(index, self.parameters[index]))

    def fetch(
        self, matrices: tuple[Tensor, Tensor], biases: tuple[Tensor | None, Tensor | None], counts_e: Tensor
    ) -> tuple[list[Any], list[Tensor | None]]:
        """Matrices and biases as products read them: with those of replicas, which are sent now."""
        if self.replicas is None:
            return list(matrices), list(biases)
        given = [bias for bias in biases if bias is not None]
        (gate_up, down, *came), wait = self.replicas.fetch(*matrices, *given)
        if given:
            wait()
            is_empty_X1 = (counts_e[len(matrices[0]) :] == 0)[:, None]  # the bias of an empty slot may be NaN
            given = [torch.cat((bias, new.masked_fill(is_empty_X1, 0))) for bias, new in zip(given, came, strict=True)]
        slotted = [SlottedWeight(matrices[GATE_UP], gate_up, wait), SlottedWeight(matrices[DOWN], down, wait)]
        return slotted, [None if bias is None else given.pop(0) for bias in biases]

    def prepare(
        self, tile_table: Callable[[Tensor, int], TileTable | None], counts_e: Tensor, rows: int, x_ND: Tensor
    ) -> tuple[TileTable | None, SavedRows | None]:
        """Tile table of all products, and the pre-activation's place in the buffer of `keep`; None where not needed."""
        tiles = tile_table(counts_e, rows)
        if tiles is None:
            return None, None
        tiles = replace(tiles, only_last=self.only_last)
        if self.replicas is not None:
            tiles = tiles.in_parts(counts_e, rows, self.replicas.slots)
        if self.keep is None:
            return tiles, None
        return tiles, self.keep(tiles.used, rows, x_ND.new_empty(0, self.parameters[GATE_UP].shape[1]))


class WeightedBias(NamedTuple):
    """A bias that is added to each row times the row's weight."""

    bias_eF: Tensor
    weights_R: Tensor  # float32
    dweights_R: Tensor  # float32 gradient of the weights so far, contiguous; the bias's part is added in place


def bias_gradient_by_definition(
    dy_RF: Tensor,
    counts_e: Tensor,
    weighted: WeightedBias | None = None,
    *,
    accumulate_into: Tensor | None = None,
    tiles: object = None,
) -> Tensor:
    """Definition of `penstock.kernels.bias_gradient.bias_gradient`; the counts are copied to the host."""
    counts = counts_on_host(counts_e, dy_RF.shape[0])
    rows_RF = dy_RF[: sum(counts)].float()
    if weighted is not None:
        bias_eF, weights_R, dweights_R = weighted
        pieces = zip(rows_RF.split(counts), bias_eF.float(), strict=True)
        dweights_R[: len(rows_RF)] += torch.cat([rows @ bias_F for rows, bias_F in pieces])
        rows_RF = rows_RF * weights_R[: len(rows_RF), None]
    sums_eF = torch.stack([rows.sum(0) for rows in rows_RF.split(counts)])
    return add_or_return(sums_eF.to(dy_RF.dtype) if accumulate_into is None else sums_eF, accumulate_into)


def bias_gradient_in_torch(
    dy_RF: Tensor,
    counts_e: Tensor,
    weighted: WeightedBias | None = None,
    *,
    accumulate_into: Tensor | None = None,
    tiles: object = None,
) -> Tensor:
    """`bias_gradient_by_definition` by autograd through the addition of the bias; the counts stay on the device."""
    dy_RF = used(dy_RF, counts_e)
    bias_eF = dy_RF.new_zeros(counts_e.numel(), dy_RF.shape[1]) if weighted is None else weighted.bias_eF
    with torch.enable_grad():
        inputs = [bias_eF := bias_eF.detach().requires_grad_()]
        weights_R = None
        if weighted is not None:
            inputs.append(weights_R := weighted.weights_R.detach().requires_grad_())
        rows_RF = torch_add_bias(torch.zeros_like(dy_RF), bias_eF, counts_e, weights_R)
    dbias_eF, *rest = torch.autograd.grad(rows_RF, inputs, dy_RF)
    if weighted is not None:
        weighted.dweights_R.add_(rest[0])
    return add_or_return(dbias_eF, accumulate_into)


def used(rows_RD: Tensor, counts_e: Tensor) -> Tensor:
    """The rows with those past the last expert's set to zero."""
    is_used_R = torch.arange(rows_RD.shape[0], device=rows_RD.device) < counts_e.sum()
    return torch.where(is_used_R[:, None], rows_RD, 0)


def add_or_return(dw_eFD: Tensor, accumulate_into: Tensor | SlottedWeight | None) -> Any:
    """The gradient, or the sum to which it was added."""
    if isinstance(accumulate_into, SlottedWeight):
        own_eFD, slots_XFD = dw_eFD.split((len(dw_eFD) - len(accumulate_into.slots), len(accumulate_into.slots)))
        return SlottedWeight(add_or_return(own_eFD, accumulate_into.own), accumulate_into.slots.add_(slots_XFD))
    return dw_eFD if accumulate_into is None else accumulate_into.add_(dw_eFD)


def bias_gradients(
    gradient: Callable[..., Tensor],
    dy_RD: Tensor,
    d_gate_up_RF: Tensor | None,
    counts_e: Tensor,
    weights: tuple[Tensor | None, Tensor | None],  # and their gradient so far, to which the second bias adds its part
    biases: Sequence[Tensor | None],
    options: ExpertOptions,
) -> list[Tensor | None]:
    """Gradients of both biases for autograd, None where there is a sum."""
    sums, replicas = options.sums[2:], options.replicas
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
        gradients[DOWN] = gradient(dy_RD.contiguous(), counts_e, weighted, accumulate_into=given[DOWN])
    if replicas is not None and (there := [entry for entry in gradients if entry is not None]):
        count = len(counts_e) - replicas.slots
        replicas.give_back(len(biases), [entry[count:] for entry in there], [entry[:count] for entry in there])
        for index, bias in enumerate(biases):
            value, total = gradients[index], sums[index]
            if value is not None and bias is not None:
                gradients[index] = value[:count].to(bias.dtype) if total is None else total.add_(value[:count])
    return [None if total is not None else entry for entry, total in zip(gradients, sums, strict=True)]


def no_tile_table(counts_e: Tensor, rows: int) -> None:
    """Stand-in for `tile_table`: only Triton's products share one."""


def put_gradient(make: Callable[..., Any], index: int, options: ExpertOptions) -> Tensor | None:
    """Compute the gradient of a matrix now and return it for autograd, or defer it by `options.put_off`.

    `make` takes `accumulate_into`. If there is a float32 sum, the gradient is added to it and nothing is returned. A
    deferred gradient without a sum goes to the parameter's own `.grad`.
    """
    total, parameter, replicas = options.sums[index], options.parameters[index], options.replicas

    def now() -> Tensor:
        result = make(accumulate_into=options.sum_of(index))
        if replicas is None:
            whole: Tensor = result
            return whole
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


def sum_over_places(
    dx_RD: Tensor,
    rows: int,
    counts_e: Tensor,
    index_R: Tensor | None,
    places_TK: Tensor | None,
    unpermute: Callable[[Tensor, RowOrder], Tensor],
) -> Tensor:
    """Gradient of the N source rows: the sum of the gradients of the places that read each of them."""
    if index_R is None:  # the places are the rows
        return dx_RD
    if places_TK is not None:  # the inverse of the index: the sum has a fixed order
        return unpermute(dx_RD, RowOrder(index_R, places_TK, counts_e))
    # By atomics, in any order.
    sums_ND = dx_RD.new_zeros(rows, dx_RD.shape[1], dtype=torch.float32)
    return sums_ND.index_add_(0, index_R, dx_RD.float()).to(dx_RD.dtype)


def check_operands(
    x_ND: Tensor,
    gate_up_eFD: Tensor,
    down_eDF: Tensor,
    index_R: Tensor | None,
    places_TK: Tensor | None,
    rule: ExpertRule = SWIGLU,
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


def claim_rows(cursor: Tensor, used: Tensor, capacity: int, meter: Tensor) -> Tensor:
    """Reserve a layer's rows in the buffer and return the first one, int64 [1].

    `cursor`, int64 [1], has the rows reserved so far, also by layers that did not fit; `used`, int32 [1], the layer's,
    at most `capacity`, the S rows of the buffer. Of `meter`, int64 [2], rows that did not fit are added to the first,
    and the second becomes the most rows reserved.
    """
    first = torch.empty_like(cursor)
    # One program: layers claim their rows one after the other, in the order of the stream.
    start_kernel(claim_rows_kernel, (1,), cursor, used, first, meter, capacity, num_warps=1)
    return first


@triton.jit(do_not_specialize=["capacity"])
def claim_rows_kernel(cursor_ptr, used_ptr, first_ptr, meter_ptr, capacity):
    """Example: cursor 5, 3 rows, capacity 7 give cursor 8, first row 0, and 1 row that did not fit."""
    begin = tl.load(cursor_ptr)
    end = begin + tl.load(used_ptr)
    tl.store(cursor_ptr, end)
    tl.store(first_ptr, tl.where(end <= capacity, begin, 0))  # overwrites the first layers if it does not fit
    missing = tl.maximum(end - tl.maximum(begin, capacity), 0)
    tl.store(meter_ptr, tl.load(meter_ptr) + missing)
    tl.store(meter_ptr + 1, tl.maximum(tl.load(meter_ptr + 1), end))
