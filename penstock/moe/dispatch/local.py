"""Local dispatch: one rank holds all experts, so dispatch is a sort by expert and combine is a sum."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from penstock.base.spans import Span
from penstock.config.dispatcher import DispatcherName
from penstock.kernels.operators import Operators
from penstock.moe.dispatch.contract import DispatchMetadata, ExpertRows
from penstock.moe.dispatch.gathers import reorder
from penstock.moe.dispatch.payload import UNQUANTIZED, DispatchPayload, WireFormat
from penstock.moe.routing import Routing, SortedSlots
from penstock.parallel.spans import span


@dataclass(frozen=True)
class LocalDispatcher:
    """Sorts slots by expert; experts read rows from where the tokens are.

    Attributes:
        wire_format: format in which the experts read the rows; nothing travels.
    """

    name: ClassVar[DispatcherName] = "local"

    experts: int
    operators: Operators
    wire_format: WireFormat = UNQUANTIZED

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """See `Dispatcher.dispatch`."""
        slots = routing.sorted or self.sorted_slots(routing)
        order, tokens_R = slots.order, slots.order.slots_R // routing.experts_TK.shape[1]
        x_ND, quantized = self.wire_format.decode(self.wire_format.encode(x_TD))
        rows = ExpertRows(x_ND, tokens_R, slots.weights_R, order.counts_E, order.places_TK, quantized)
        return rows, DispatchMetadata(order)

    def sorted_slots(self, routing: Routing) -> SortedSlots:
        """See `Sorting.sorted_slots`."""
        with span(Span.SORT):
            order = self.operators.order_rows(routing.experts_TK, self.experts)
            weights_R = reorder(routing.weights_TK.reshape(-1), order.slots_R, order.places_TK.reshape(-1))
            return SortedSlots(order, weights_R)

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        """See `Dispatcher.combine`."""
        return self.operators.unpermute(y_RD, metadata.order)
