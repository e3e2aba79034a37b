"""Gathers of rows whose gradient is a gather too, because the inverse index is known.

PyTorch's own gradient of a gather uses atomics or a sort: slow, and not deterministic on a GPU.
"""

import torch
from torch import Tensor

from penstock.kernels.operators import Operators
from penstock.kernels.reference import RowOrder
from penstock.parallel.collectives import with_transpose


def reorder(rows_R: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Permute dim 0 by index_R, int64 source row of each place; inverse_R is its inverse."""
    return with_transpose(rows_R, lambda rows: rows.index_select(0, index_R), _select, inverse_R)


def _select(gradient_R: Tensor, inverse_R: Tensor) -> Tensor:
    return gradient_R.index_select(0, inverse_R)


def pick_kept(values_TK: Tensor, order: RowOrder) -> Tensor:
    """values_R: the value of each place's slot, zero at empty places. The gradient is zero at dropped slots."""
    is_used_R = torch.arange(order.slots_R.numel(), device=order.slots_R.device) < order.counts_E.sum()

    def pick(values_TK: Tensor) -> Tensor:
        return torch.where(is_used_R, values_TK.reshape(-1).index_select(0, order.slots_R), 0)

    return with_transpose(values_TK, pick, _pick_back, order.places_TK, order.counts_E)


def _pick_back(gradient_R: Tensor, places_TK: Tensor, counts_E: Tensor) -> Tensor:
    picked_TK = gradient_R.index_select(0, places_TK.reshape(-1)).view_as(places_TK)
    return torch.where(places_TK < counts_E.sum(), picked_TK, 0)  # unused places may hold NaN


def spread(x_TD: Tensor, order: RowOrder, operators: Operators) -> Tensor:
    """x_RD: each token's row at the places of its slots, dropped ones too; the gradient sums over the kept places."""
    tokens_R = order.slots_R // order.places_TK.shape[1]

    def unpermute(dx_RD: Tensor, *saved: Tensor) -> Tensor:
        return operators.unpermute(dx_RD, RowOrder(*saved))

    return with_transpose(x_TD, lambda x: x.index_select(0, tokens_R), unpermute, *order)


def spread_padded(x_TD: Tensor, tokens_R: Tensor, places_TK: Tensor) -> Tensor:
    """x_RD: each token's row at its places (int64, R for none). tokens_R is T at empty places, which are zero."""
    return with_transpose(x_TD, lambda x: _rows_or_zero(x, tokens_R), _sum_at_places, places_TK)


def collect_padded(y_RD: Tensor, tokens_R: Tensor, places_TK: Tensor) -> Tensor:
    """Sum the rows at each token's places in float32, in the dtype of y: the transpose of `spread_padded`."""
    return with_transpose(y_RD, lambda y: _sum_at_places(y, places_TK), _rows_or_zero, tokens_R)


def _rows_or_zero(x_TD: Tensor, tokens_R: Tensor) -> Tensor:
    return torch.cat((x_TD, x_TD.new_zeros(1, x_TD.shape[1]))).index_select(0, tokens_R)  # past the last row: zeros


def _sum_at_places(y_RD: Tensor, places_TK: Tensor) -> Tensor:
    total_TD = y_RD.new_zeros(places_TK.shape[0], y_RD.shape[1], dtype=torch.float32)
    for places_T in places_TK.unbind(1):  # one choice at a time: all K rows of all tokens would need K times the memory
        total_TD += _rows_or_zero(y_RD, places_T)
    return total_TD.to(y_RD.dtype)
