"""The promise that every dispatcher keeps.

`dispatch` brings each token's row to the experts that it chose and says how many rows each expert got; `combine`
brings the experts' outputs back and sums them for each token. Between the two stands only the metadata, a frozen
value: a dispatcher has no state of its own that a forward pass changes, so two micro-batches or two layers may be in
flight at once.

Rows carry their routing weights to the expert, which applies them before its last (linear) product, or to its input, so
`combine` is a plain sum. An expert may live on several ranks and a rank may hold any experts: nothing here says which.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor
from torch.utils._pytree import register_dataclass

from penstock.config.dispatcher import DispatcherName
from penstock.kernels.float8.gradient_box import GradientBox
from penstock.kernels.float8.quantized import Quantized
from penstock.kernels.reference import RowOrder
from penstock.moe.dispatch.payload import DispatchPayload
from penstock.moe.routing import Routing, SortedSlots
from penstock.parallel.weight_grad_store import DeferredWork


@dataclass(frozen=True)
class ExpertRows:
    """What the experts of this rank work on.

    Attributes:
        x_ND: source rows in the compute dtype. With `quantized` nothing reads it: it has their shape and dtype, and
            takes their gradient.
        index_R: int64 source row of each place, or None if row i of `x_ND` is place i.
        weights_R: float32 routing weight of each place, differentiable; 0 at places that hold padding.
        counts_e: int32 places of each local expert, in order; may sum to less than R, and places past them hold
            nothing.
        places_NK: int64, the inverse of `index_R`: the places that read each source row. None if that is not one number
            of places for every row.
        quantized: the source rows in 8 bits, in the recipe of the experts, if they travelled so; rows stand apart, each
            with its scales behind it. Rows that no place reads may hold anything.
        only_last: of the places that hold nothing, nobody reads any but the very last one.
        aside: takes work of the experts' backward pass that is done while the gradients of the rows travel; None if
            nothing travels, or nothing is done meanwhile.
        gradients: where experts may find the gradients of their outputs in 8 bits, by the blocks of `quantized` and in
            the format of gradients, if they say in forward that they expect them; None where these come in 16 bits.
    """

    x_ND: Tensor
    index_R: Tensor | None
    weights_R: Tensor
    counts_e: Tensor
    places_NK: Tensor | None = None
    quantized: Quantized | None = None
    only_last: bool = False
    aside: DeferredWork | None = None
    gradients: GradientBox | None = None


# FSDP2 frees gathered experts once their inputs have gradients. Before torch 2.13 it finds these with `tree_flatten`
# alone, which does not look into a dataclass that it does not know: experts would stay gathered until backward ends.
register_dataclass(ExpertRows)


@dataclass(frozen=True)
class DispatchMetadata:
    """What `combine` must know of its `dispatch`.

    Attributes:
        order: places of the slots' rows among those that the experts give back. The place of a dropped slot's row lies
            past the last expert's, so it counts as zero.
    """

    order: RowOrder


class Dispatcher(Protocol):
    """Brings tokens to experts and back."""

    name: ClassVar[DispatcherName]

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """Bring rows to the experts.

        Args:
            x_TD: hidden states; or rows that another dispatcher has brought part of the way.
            routing: choices and weights; expert id E marks a dropped slot.

        Returns:
            Rows for the experts of this rank, and the metadata for `combine`.
        """
        ...

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        """Sum the experts' outputs for each token.

        Args:
            y_RD: outputs, already weighted, at the places of the rows that `dispatch` gave.
            metadata: what `dispatch` gave with those rows.

        Returns:
            y_TD; zero for a token all of whose slots were dropped.
        """
        ...


@runtime_checkable
class SlotSorter(Protocol):
    """A dispatcher that begins with a sort of our own slots; whoever has the routing may make it earlier."""

    def sorted_slots(self, routing: Routing) -> SortedSlots:
        """What `dispatch` makes first, and finds in `Routing.sorted` if it is there.

        Args:
            routing: as for `dispatch`. Nobody is asked for anything: neither another rank nor, with our kernels, the
                host.
        """
        ...
