"""Gathers of rows whose gradient is a gather too, because the inverse index is known.

PyTorch's own gradient of a gather uses atomics or a sort: slow, and not deterministic on a GPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels.operators import Operators
from penstock.kernels.reference import RowOrder


def reorder(rows_R: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Permute dim 0 by index_R, int64 source row of each place; inverse_R is its inverse."""
    reordered: Tensor = _Reorder.apply(rows_R, index_R, inverse_R)
    return reordered


def pick_kept(values_TK: Tensor, order: RowOrder) -> Tensor:
    """values_R: the value of each place's slot, zero at empty places. The gradient is zero at dropped slots."""
    values_R: Tensor = _PickKept.apply(values_TK, *order)
    return values_R


def spread(x_TD: Tensor, order: RowOrder, operators: Operators) -> Tensor:
    """x_RD: each token's row at the places of its slots, dropped ones too; the gradient sums over the kept places."""
    x_RD: Tensor = _Spread.apply(x_TD, order, operators)
    return x_RD


def spread_padded(x_TD: Tensor, tokens_R: Tensor, places_TK: Tensor) -> Tensor:
    """x_RD: each token's row at its places (int64, R for none). tokens_R is T at empty places, which are zero."""
    x_RD: Tensor = _SpreadPadded.apply(x_TD, tokens_R, places_TK)
    return x_RD


def collect_padded(y_RD: Tensor, tokens_R: Tensor, places_TK: Tensor) -> Tensor:
    """Sum the rows at each token's places in float32, in the dtype of y: the transpose of `spread_padded`."""
    y_TD: Tensor = _CollectPadded.apply(y_RD, tokens_R, places_TK)
    return y_TD


def _rows_or_zero(x_TD: Tensor, tokens_R: Tensor) -> Tensor:
    return torch.cat((x_TD, x_TD.new_zeros(1, x_TD.shape[1]))).index_select(0, tokens_R)


def _sum_at_places(y_RD: Tensor, places_TK: Tensor) -> Tensor:
    total_TD = y_RD.new_zeros(places_TK.shape[0], y_RD.shape[1], dtype=torch.float32)
    for places_T in places_TK.unbind(1):
        total_TD += _rows_or_zero(y_RD, places_T)
    return total_TD.to(y_RD.dtype)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_R: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_R.index_select(0, index_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return gradient_R.index_select(0, inverse_R), None, None


class _PickKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_TK: Tensor, slots_R: Tensor, places_TK: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(places_TK, counts_E)
        is_used_R = torch.arange(slots_R.numel(), device=slots_R.device) < counts_E.sum()
        return torch.where(is_used_R, values_TK.reshape(-1).index_select(0, slots_R), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor, None, None, None]:
        places_TK, counts_E = ctx.saved_tensors
        picked_TK = gradient_R.index_select(0, places_TK.reshape(-1)).view_as(places_TK)
        return torch.where(places_TK < counts_E.sum(), picked_TK, 0), None, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: RowOrder, operators: Operators) -> Tensor:
        ctx.save_for_backward(*order)
        ctx.operators = operators
        return x_TD.index_select(0, order.slots_R // order.places_TK.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_RD: Tensor) -> tuple[Tensor, None, None]:
        return ctx.operators.unpermute(dx_RD, RowOrder(*ctx.saved_tensors)), None, None


class _SpreadPadded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, tokens_R: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(places_TK)
        return _rows_or_zero(x_TD, tokens_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_RD: Tensor) -> tuple[Tensor, None, None]:
        (places_TK,) = ctx.saved_tensors
        return _sum_at_places(dx_RD, places_TK), None, None


class _CollectPadded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, tokens_R: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_R)
        return _sum_at_places(y_RD, places_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None]:
        (tokens_R,) = ctx.saved_tensors
        return _rows_or_zero(dy_TD, tokens_R), None, None
