"""The promise kept on one rank that holds all experts: a sort by expert, and a gather and sum back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.operators import Operators
from penstock.kernels.reference import RowOrder, unpermute
from penstock.moe.balance import capacity
from penstock.moe.dispatch.contract import ExpertRows, Receipt
from penstock.moe.dispatch.gathers import reorder
from penstock.moe.routing import Routing


@dataclass(frozen=True)
class LocalDispatcher:
    """All experts are here; rows are read from where the tokens stand.

    Attributes:
        experts: E.
        operators: kernels to run on.
    """

    experts: int
    operators: Operators

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[ExpertRows, Receipt]:
        """See `Dispatcher.dispatch`."""
        order = self.operators.order_rows(routing.experts_TK, self.experts)
        tokens_R = order.slots_R // routing.experts_TK.shape[1]
        weights_R = reorder(routing.weights_TK.reshape(-1), order.slots_R, order.places_TK.reshape(-1))
        return ExpertRows(x_TD, tokens_R, weights_R, order.counts_E, order.places_TK), Receipt(order)

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        """See `Dispatcher.combine`."""
        return self.operators.unpermute(y_RD, receipt.order)


@dataclass(frozen=True)
class PaddedDispatcher:
    """All experts are here, and every one gets exactly its capacity of rows: static shapes, at the price of padding.

    Places that no slot fills read an extra source row of zeros. One place past the experts' rows takes the dropped
    slots.

    Attributes:
        experts: E.
        factor: capacity over the fair share.
        operators: kernels to run on.
    """

    experts: int
    factor: float
    operators: Operators

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[ExpertRows, Receipt]:
        """See `Dispatcher.dispatch`."""
        T, K = routing.experts_TK.shape
        limit = capacity(T, K, self.experts, self.factor)
        past = self.experts * limit
        order = self.operators.order_rows(routing.experts_TK, self.experts)

        # 1. The place of a slot: its expert's first place, and its rank among that expert's slots.
        firsts_E = order.counts_E.cumsum(0) - order.counts_E
        firsts_E1 = torch.cat((firsts_E, firsts_E.new_zeros(1)))
        rank_TK = order.places_TK - firsts_E1[routing.experts_TK]
        kept_TK = routing.experts_TK < self.experts
        places_TK = torch.where(kept_TK, routing.experts_TK * limit + rank_TK, past)

        # 2. What stands there: the slot's token and weight, or the row of zeros.
        tokens_TK = torch.arange(T, device=x_TD.device)[:, None].expand(T, K)
        index_R = torch.full((past + 1,), T, device=x_TD.device).index_put((places_TK,), tokens_TK)
        weights_R = routing.weights_TK.new_zeros(past + 1).index_put((places_TK,), routing.weights_TK)
        x_ND = torch.cat((x_TD, x_TD.new_zeros(1, x_TD.shape[1])))
        counts_e = torch.full_like(order.counts_E, limit)
        receipt = Receipt(RowOrder(index_R, places_TK, counts_e))
        return ExpertRows(x_ND, index_R, weights_R, counts_e), receipt

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        """See `Dispatcher.combine`. By the reference: our kernel takes places that are a permutation of the rows."""
        return unpermute(y_RD, receipt.order)
