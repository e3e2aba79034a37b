"""What the router decides about one micro-batch, and what it must know about it."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.reference import RowOrder


@dataclass(frozen=True)
class Scope:
    """What balance losses must know about a micro-batch.

    Attributes:
        sequences: rows B; the T tokens are B sequences of equal length, one after the other (or our part of each).
        share: part of the global batch that this micro-batch is, so that losses of micro-batches sum to their mean.
    """

    sequences: int = 1
    share: float = 1.0


@dataclass(frozen=True)
class SortedSlots:
    """Our slots in the order of the experts.

    Attributes:
        order: of the slots, by expert or by part of an expert.
        weights_R: float32 routing weights in this order, differentiable.
    """

    order: RowOrder
    weights_R: Tensor


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to.

    Attributes:
        weights_TK: float32, differentiable; 0 where the slot was dropped.
        experts_TK: int64 expert ids; E (one past the last) where the slot was dropped.
        sorted: the same as the layer's dispatcher will want it, if it begins with a sort and that has been made.
    """

    weights_TK: Tensor
    experts_TK: Tensor
    sorted: SortedSlots | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        own = (self.weights_TK, self.experts_TK)
        return own if self.sorted is None else (*own, *self.sorted.order, self.sorted.weights_R)

    @classmethod
    def of(cls, weights_TK: Tensor, experts_TK: Tensor, *rest: Tensor) -> "Routing":
        """From what `tensors` gave."""
        if not rest:
            return cls(weights_TK, experts_TK)
        slots_R, places_TK, counts_E, weights_R = rest
        return cls(weights_TK, experts_TK, SortedSlots(RowOrder(slots_R, places_TK, counts_E), weights_R))
