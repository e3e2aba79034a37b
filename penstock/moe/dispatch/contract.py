"""The promise that every dispatcher keeps.

`dispatch` brings each token's row to the experts that it chose and says how many rows each expert got; `combine` brings the
experts' outputs back and sums them for each token. Between the two stands only the receipt, a frozen value: a dispatcher
has no state of its own that a forward pass changes, so two micro-batches or two layers may be in flight at once.

Rows carry their routing weights to the expert, which applies them before its last (linear) product, so `combine` is a plain
sum. An expert may live on several ranks and a rank may hold any experts: nothing here says which.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.moe.routing import Routing


@dataclass(frozen=True)
class ExpertRows:
    """What the experts of this rank work on.

    Attributes:
        x_ND: source rows in the compute dtype.
        index_R: int64 source row of each place, or None if row i of `x_ND` is place i.
        weights_R: float32 routing weight of each place, differentiable; 0 at places that hold padding.
        counts_e: int32 places of each local expert, in order; may sum to less than R, and places past them hold nothing.
    """

    x_ND: Tensor
    index_R: Tensor | None
    weights_R: Tensor
    counts_e: Tensor


@dataclass(frozen=True)
class Receipt:
    """What `combine` must know of its `dispatch`.

    Attributes:
        places_TK: int64 place of each slot's row in the experts' output.
        kept_TK: boolean, False where the slot was dropped; None if none was.
    """

    places_TK: Tensor
    kept_TK: Tensor | None


class Dispatcher(Protocol):
    """Brings tokens to experts and back."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[ExpertRows, Receipt]:
        """Bring rows to the experts.

        Args:
            x_TD: hidden states.
            routing: choices and weights; expert id E marks a dropped slot.

        Returns:
            Rows for the experts of this rank, and the receipt for `combine`.
        """
        ...

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        """Sum the experts' outputs for each token.

        Args:
            y_RD: outputs, already weighted, at the places of the rows that `dispatch` gave.
            receipt: what `dispatch` gave with those rows.

        Returns:
            y_TD; zero for a token all of whose slots were dropped.
        """
        ...
