"""The router's decision for one micro-batch, as frozen values."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.reference import RowOrder


@dataclass(frozen=True)
class Scope:
    """Facts of a micro-batch that balance losses need.

    Attributes:
        sequences: rows B; the T tokens are B sequences of equal length, one after the other (or our part of each).
        share: the micro-batch's share of the global batch, so that the losses of micro-batches sum to their mean.
    """

    sequences: int = 1
    share: float = 1.0


@dataclass(frozen=True)
class SortedSlots:
    """Slots of this rank sorted by expert (or part of one), with their float32 routing weights, differentiable."""

    order: RowOrder
    weights_R: Tensor


@dataclass(frozen=True)
class Routing:
    """The experts of each token.

    Attributes:
        weights_TK: float32, differentiable; 0 for a dropped slot.
        experts_TK: int64 expert ids; E (one past the last) for a dropped slot.
        sorted: the slots sorted for the layer's dispatcher, if that has been done.
    """

    weights_TK: Tensor
    experts_TK: Tensor
    sorted: SortedSlots | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, for `Routing.of`."""
        own = (self.weights_TK, self.experts_TK)
        return own if self.sorted is None else (*own, *self.sorted.order, self.sorted.weights_R)

    @classmethod
    def of(cls, weights_TK: Tensor, experts_TK: Tensor, *rest: Tensor) -> "Routing":
        """The inverse of `tensors`."""
        if not rest:
            return cls(weights_TK, experts_TK)
        slots_R, places_TK, counts_E, weights_R = rest
        return cls(weights_TK, experts_TK, SortedSlots(RowOrder(slots_R, places_TK, counts_E), weights_R))
