"""What the experts' networks of 16 and of 8 bits share, without Triton.

The gradients of biases mean what `penstock.kernels.bias_gradient` says, whose kernels they are the truth of.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.language import tl, triton
from penstock.kernels.launching import counts_on_host, start_kernel
from penstock.kernels.operators import torch_add_bias
from penstock.kernels.reference import RowOrder

MATRICES, BIASES = 2, 2
"""Parameters of the experts: gate and up together, and down; with biases the same two once more."""


GATE_UP, DOWN = range(MATRICES)
"""Places of the matrices among the parameters."""

DeferGradient = Callable[[int, Callable[[], None]], bool]
"""Is offered the gradient of the matrix at a place, as a function that puts it where it belongs, and says whether it
will call it."""


@dataclass(frozen=True)
class SavedRows:
    """Where one layer's rows stand in a buffer of several layers (penstock/kernels/expert_parts.py).

    Attributes:
        rows_SF: the buffer, contiguous.
        first: int64 [1], on the device: the layer's first row.
        room: most rows that the layer can have.
    """

    rows_SF: Tensor
    first: Tensor
    room: int


SaveRows = Callable[[Tensor, int, Tensor], SavedRows]
"""(used, room, like) -> a place for at most `room` rows. `used`, int32, is their number on the device; `like` is of
their width, dtype and device."""


class WeightedBias(NamedTuple):
    """What belongs to a bias that stands in each row times the row's weight.

    Attributes:
        bias_eF: the bias.
        weights_R: float32 weight of each row.
        dweights_R: float32 gradient of the weights so far; the bias's part is added in place. Contiguous.
    """

    bias_eF: Tensor
    weights_R: Tensor
    dweights_R: Tensor


def bias_gradient_by_definition(
    dy_RF: Tensor,
    counts_e: Tensor,
    weighed: WeightedBias | None = None,
    *,
    accumulate_into: Tensor | None = None,
    tiles: object = None,
) -> Tensor:
    """`penstock.kernels.bias_gradient.bias_gradient` as it is defined; the counts come to the host."""
    counts = counts_on_host(counts_e, dy_RF.shape[0])
    rows_RF = dy_RF[: sum(counts)].float()
    if weighed is not None:
        bias_eF, weights_R, dweights_R = weighed
        pieces = zip(rows_RF.split(counts), bias_eF.float(), strict=True)
        dweights_R[: len(rows_RF)] += torch.cat([rows @ bias_F for rows, bias_F in pieces])
        rows_RF = rows_RF * weights_R[: len(rows_RF), None]
    sums_eF = torch.stack([rows.sum(0) for rows in rows_RF.split(counts)])
    return add_or_return(sums_eF.to(dy_RF.dtype) if accumulate_into is None else sums_eF, accumulate_into)


def bias_gradient_in_torch(
    dy_RF: Tensor,
    counts_e: Tensor,
    weighed: WeightedBias | None = None,
    *,
    accumulate_into: Tensor | None = None,
    tiles: object = None,
) -> Tensor:
    """The same by autograd through the sum with the bias; nothing comes to the host."""
    dy_RF = used(dy_RF, counts_e)
    bias_eF = dy_RF.new_zeros(counts_e.numel(), dy_RF.shape[1]) if weighed is None else weighed.bias_eF
    with torch.enable_grad():
        inputs = [bias_eF := bias_eF.detach().requires_grad_()]
        weights_R = None
        if weighed is not None:
            inputs.append(weights_R := weighed.weights_R.detach().requires_grad_())
        rows_RF = torch_add_bias(torch.zeros_like(dy_RF), bias_eF, counts_e, weights_R)
    dbias_eF, *rest = torch.autograd.grad(rows_RF, inputs, dy_RF)
    if weighed is not None:
        weighed.dweights_R.add_(rest[0])
    return add_or_return(dbias_eF, accumulate_into)


def used(rows_RD: Tensor, counts_e: Tensor) -> Tensor:
    """The same with the rows past the last expert's set to zero, whatever they held."""
    is_used_R = torch.arange(rows_RD.shape[0], device=rows_RD.device) < counts_e.sum()
    return torch.where(is_used_R[:, None], rows_RD, 0)


def add_or_return(dw_eFD: Tensor, accumulate_into: Tensor | None) -> Tensor:
    """A gradient, or the sum that it is added to if there is one."""
    return dw_eFD if accumulate_into is None else accumulate_into.add_(dw_eFD)


def put_gradient(
    make: Callable[[], Tensor], place: int, parameter: Tensor, total: Tensor | None, put_off: DeferGradient | None
) -> Tensor | None:
    """Make the gradient of a matrix, or leave that to somebody else.

    Args:
        make: gives it; if there is a sum, has added it there.
        place: of the matrix.
        parameter: the matrix.
        total: float32 sum; None for the parameter's own `.grad`.
        put_off: None has it made now.

    Returns:
        What is left to autograd.
    """

    def late() -> None:
        found = make()
        if total is None:  # Through the parameter's own hooks, as in any backward pass.
            parameter.view_as(parameter).backward(found)

    if put_off is not None and put_off(place, late):
        return None
    found = make()
    return found if total is None else None


def sum_over_places(
    dx_RD: Tensor,
    rows: int,
    counts_e: Tensor,
    index_R: Tensor | None,
    places_TK: Tensor | None,
    unpermute: Callable[[Tensor, RowOrder], Tensor],
) -> Tensor:
    """Gradient of the source rows from the gradients of the places that read them.

    Args:
        dx_RD: gradient of what each place read.
        rows: N, source rows.
        counts_e: rows of each expert.
        index_R: source row of each place; None if the places are the rows.
        places_TK: its inverse, if there is one; without it rows are added by atomics.
        unpermute: sums each source row's places.
    """
    if index_R is None:
        return dx_RD
    if places_TK is not None:
        return unpermute(dx_RD, RowOrder(index_R, places_TK, counts_e))
    sums_ND = dx_RD.new_zeros(rows, dx_RD.shape[1], dtype=torch.float32)
    return sums_ND.index_add_(0, index_R, dx_RD.float()).to(dx_RD.dtype)


def check_operands(
    x_ND: Tensor, gate_up_eFD: Tensor, down_eDF: Tensor, index_R: Tensor | None, places_TK: Tensor | None
) -> None:
    """Raise KernelError where they do not fit each other; each kernel looks at its own operands."""
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


def claim_rows(cursor: Tensor, used: Tensor, capacity: int, meter: Tensor) -> Tensor:
    """The first row of a layer's place in a buffer; moves the cursor on.

    Args:
        cursor: int64 [1]: rows that were taken so far, also of layers that did not fit.
        used: int32, one number: rows of the layer, at most `capacity`.
        capacity: S, rows of the buffer.
        meter: int64 [2]: rows that found no room are added to the first, the second becomes the most that were taken.

    Returns:
        int64 [1].
    """
    first = torch.empty_like(cursor)
    start_kernel(claim_rows_kernel, (1,), cursor, used, first, meter, capacity, num_warps=1)
    return first


@triton.jit(do_not_specialize=["capacity"])
def claim_rows_kernel(cursor_ptr, used_ptr, first_ptr, meter_ptr, capacity):
    """Example: cursor 5, 3 rows, capacity 7: cursor 8, the layer at row 0, and 1 row more that found no room."""
    begin = tl.load(cursor_ptr)
    end = begin + tl.load(used_ptr)
    tl.store(cursor_ptr, end)
    tl.store(first_ptr, tl.where(end <= capacity, begin, 0))
    missing = tl.maximum(end - tl.maximum(begin, capacity), 0)
    tl.store(meter_ptr, tl.load(meter_ptr) + missing)
    tl.store(meter_ptr + 1, tl.maximum(tl.load(meter_ptr + 1), end))
