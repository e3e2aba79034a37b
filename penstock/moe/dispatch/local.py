"""The promise kept on one rank that holds all experts: a sort by expert, and a gather and sum back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.reference import RowOrder, order_rows
from penstock.moe.balance import capacity
from penstock.moe.dispatch.contract import ExpertRows, Receipt
from penstock.moe.routing import Routing


@dataclass(frozen=True)
class LocalDispatcher:
    """All experts are here.

    Attributes:
        experts: E.
        may_drop: slots may carry the id E.
        pad_factor: give every expert exactly its capacity by this factor; 0 for rows as they come.
    """

    experts: int
    may_drop: bool = False
    pad_factor: float = 0.0

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[ExpertRows, Receipt]:
        """See `Dispatcher.dispatch`."""
        order = order_rows(routing.experts_TK, self.experts)
        kept_TK = routing.experts_TK < self.experts if self.may_drop else None
        if self.pad_factor:
            return self._padded(x_TD, routing, order)
        top_k = routing.experts_TK.shape[1]
        weights_R = routing.weights_TK.reshape(-1)[order.slots_R]
        rows = ExpertRows(x_TD, order.slots_R // top_k, weights_R, order.counts_E)
        return rows, Receipt(order.places_TK, kept_TK)

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        """See `Dispatcher.combine`."""
        y_TKD = y_RD[receipt.places_TK].float()
        if receipt.kept_TK is not None:
            y_TKD = torch.where(receipt.kept_TK[:, :, None], y_TKD, 0)
        return y_TKD.sum(1).to(y_RD.dtype)

    def _padded(self, x_TD: Tensor, routing: Routing, order: RowOrder) -> tuple[ExpertRows, Receipt]:
        """Every expert gets `limit` places; those that no slot fills read an extra row of zeros.

        Dropped slots are written to one place past the end, which is cut off.
        """
        T, K = routing.experts_TK.shape
        limit = capacity(T, K, self.experts, self.pad_factor)
        kept_TK = routing.experts_TK < self.experts
        firsts_E = order.counts_E.cumsum(0) - order.counts_E
        firsts_E1 = torch.cat((firsts_E, firsts_E.new_zeros(1)))
        rank_TK = order.places_TK - firsts_E1[routing.experts_TK]
        past = self.experts * limit
        places_TK = torch.where(kept_TK, routing.experts_TK * limit + rank_TK, past)
        tokens_TK = torch.arange(T, device=x_TD.device)[:, None].expand(T, K)
        index_R = torch.full((past + 1,), T, device=x_TD.device).index_put((places_TK,), tokens_TK)[:past]
        empty_R = routing.weights_TK.new_zeros(past + 1)
        weights_R = empty_R.index_put((places_TK,), routing.weights_TK)[:past]
        x_ND = torch.cat((x_TD, x_TD.new_zeros(1, x_TD.shape[1])))
        counts_e = torch.full_like(order.counts_E, limit)
        return ExpertRows(x_ND, index_R, weights_R, counts_e), Receipt(places_TK.clamp(max=past - 1), kept_TK)
