"""The contract of every token dispatcher, and its simplest form: one rank that holds all experts.

`dispatch` brings each token's row to the experts that it chose; `combine` brings the experts' outputs back and sums
them for each token. All that `combine` needs is in the metadata, a frozen value: a forward pass changes no state of the
dispatcher, so several micro-batches or layers may be in flight.

Rows carry their routing weights to the expert, which applies them before its second product or to its input, so
`combine` is a plain sum. An expert may be on several ranks, and a rank may hold any experts.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.utils._pytree import register_dataclass

from penstock.base.spans import Span
from penstock.config.dispatcher import DispatcherName
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.operators import Operators
from penstock.kernels.reference import RowOrder
from penstock.kernels.replica_slots import ReplicaSlots
from penstock.moe.dispatch.payload import UNQUANTIZED, DispatchPayload, WireFormat, reorder
from penstock.moe.routing import Routing, SortedSlots
from penstock.parallel.spans import span


@dataclass(frozen=True)
class ExpertRows:
    """Input of the experts of this rank: N source rows, and R places that read them."""

    x_ND: Tensor  # in the compute dtype; if there is `quantized`, it only has shape and dtype, and takes the gradient
    index_R: Tensor | None  # int64 source row of each place; None if row i is place i
    weights_R: Tensor  # float32 routing weight of each place, differentiable; 0 at padding
    counts_e: Tensor  # int32 places of each local expert, in order; places past their sum are empty
    places_NK: Tensor | None = None  # int64 inverse of `index_R`; None if rows have different numbers of places
    # Source rows in 8 bits, each with its scales behind it, in the recipe of the experts, if they travelled so. Rows
    # that no place reads may hold anything.
    quantized: Quantized | None = None
    only_last: bool = False  # the only empty place that may be read is the very last one
    # Weights of the last experts of `counts_e`, which are replicas of other ranks' experts; None if there are none.
    replicas: ReplicaSlots | None = None


# FSDP2 frees gathered experts once their inputs have gradients. Before torch 2.13 it finds these with `tree_flatten`
# alone, which does not look into a dataclass that it does not know: experts would stay gathered until backward ends.
register_dataclass(ExpertRows)


@dataclass(frozen=True)
class DispatchMetadata:
    """State that `combine` needs from its `dispatch`: places of the slots among the rows that the experts return.

    A dropped slot's place lies past the last expert's, so it counts as zero.
    """

    order: RowOrder


class Dispatcher(Protocol):
    """Exchanges rows between tokens and experts. All ranks that share the experts call both methods together."""

    @property
    def name(self) -> DispatcherName:
        """The way in which rows travel."""
        ...

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """Bring rows to the experts. Returns the rows of this rank's experts, and the metadata for `combine`."""
        ...

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        """Sum the experts' outputs for each token. Returns y_TD; zero for a token whose slots were all dropped."""
        ...


@runtime_checkable
class SlotSorter(Protocol):
    """A dispatcher that begins with a sort of this rank's slots, which the caller may run earlier."""

    def sorted_slots(self, routing: Routing) -> SortedSlots:
        """The sort: no collective, and no wait of the host with our kernels. `dispatch` prefers `Routing.sorted`."""
        ...


@dataclass(frozen=True)
class LocalDispatcher:
    """Sorts slots by expert; experts read rows from where the tokens are, in `wire_format`."""

    name: DispatcherName = field(default="local", init=False)

    experts: int
    operators: Operators
    wire_format: WireFormat = UNQUANTIZED

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        slots = routing.sorted or self.sorted_slots(routing)
        order, tokens_R = slots.order, slots.order.slots_R // routing.experts_TK.shape[1]  # slot -> its token
        x_ND, quantized = self.wire_format.decode(self.wire_format.encode(x_TD))
        rows = ExpertRows(x_ND, tokens_R, slots.weights_R, order.counts_E, order.places_TK, quantized)
        return rows, DispatchMetadata(order)

    def sorted_slots(self, routing: Routing) -> SortedSlots:
        return sort_slots(routing, self.experts, self.operators)

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        return self.operators.unpermute(y_RD, metadata.order)


def sort_slots(routing: Routing, experts: int, operators: Operators) -> SortedSlots:
    with span(Span.SORT):
        order = operators.order_rows(routing.experts_TK, experts)
        weights_R = reorder(routing.weights_TK.reshape(-1), order.slots_R, order.places_TK.reshape(-1))
        return SortedSlots(order, weights_R)
