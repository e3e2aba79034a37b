"""The promise kept on one rank that holds all experts: a sort by expert, and a gather and sum back."""

from dataclasses import dataclass

from torch import Tensor

from penstock.base.spans import Span
from penstock.kernels.operators import Operators
from penstock.moe.dispatch.cargo import AS_THEY_ARE, Cargo, Packing
from penstock.moe.dispatch.contract import ExpertRows, Receipt
from penstock.moe.dispatch.gathers import reorder
from penstock.moe.routing import Routing, SortedSlots
from penstock.parallel.spans import span


@dataclass(frozen=True)
class LocalDispatcher:
    """All experts are here; rows are read from where the tokens stand.

    Attributes:
        experts: E.
        operators: kernels to run on.
        packing: in which form experts read the rows; nothing travels.
    """

    experts: int
    operators: Operators
    packing: Packing = AS_THEY_ARE

    def dispatch(self, x_TD: Tensor | Cargo, routing: Routing) -> tuple[ExpertRows, Receipt]:
        """See `Dispatcher.dispatch`."""
        slots = routing.sorted or self.sorted_slots(routing)
        order, tokens_R = slots.order, slots.order.slots_R // routing.experts_TK.shape[1]
        x_ND, quantized = self.packing.unload(self.packing.load(x_TD))
        rows = ExpertRows(x_ND, tokens_R, slots.weights_R, order.counts_E, order.places_TK, quantized)
        return rows, Receipt(order)

    def sorted_slots(self, routing: Routing) -> SortedSlots:
        """See `Sorting.sorted_slots`."""
        with span(Span.SORT):
            order = self.operators.order_rows(routing.experts_TK, self.experts)
            weights_R = reorder(routing.weights_TK.reshape(-1), order.slots_R, order.places_TK.reshape(-1))
            return SortedSlots(order, weights_R)

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        """See `Dispatcher.combine`."""
        return self.operators.unpermute(y_RD, receipt.order)
