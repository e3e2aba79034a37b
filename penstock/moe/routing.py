"""The router's decision for one micro-batch, as frozen values."""

from dataclasses import dataclass, field

from torch import Tensor

from penstock.kernels.reference import RowOrder


@dataclass(frozen=True)
class Scope:
    """Facts of a micro-batch that routers need."""

    sequences: int = 1  # the T tokens are so many sequences of equal length, one after the other (or our part of each)
    share: float = 1.0  # of the global batch, so that the losses of micro-batches sum to their mean
    tokens_T: Tensor | None = field(default=None, compare=False)  # int64 ids; None unless a layer chooses by them


@dataclass(frozen=True)
class SortedSlots:
    """Slots of this rank sorted by expert (or part of one), with their float32 routing weights, differentiable."""

    order: RowOrder  # dropped slots stand last
    weights_R: Tensor


@dataclass(frozen=True)
class Routing:
    """The experts of each token."""

    weights_TK: Tensor  # float32, differentiable; 0 for a dropped slot
    experts_TK: Tensor  # int64 expert ids; E (one past the last) for a dropped slot
    sorted: SortedSlots | None = None  # the slots sorted for the layer's dispatcher, if that has been done

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, for `Routing.of`."""
        tensors = (self.weights_TK, self.experts_TK)
        return tensors if self.sorted is None else (*tensors, *self.sorted.order, self.sorted.weights_R)

    @classmethod
    def of(cls, weights_TK: Tensor, experts_TK: Tensor, *rest: Tensor) -> "Routing":
        """The inverse of `tensors`."""
        if not rest:
            return cls(weights_TK, experts_TK)
        slots_R, places_TK, counts_E, weights_R = rest
        return cls(weights_TK, experts_TK, SortedSlots(RowOrder(slots_R, places_TK, counts_E), weights_R))
