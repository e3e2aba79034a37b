"""What the router decides about one micro-batch, and what it must know about it."""

from dataclasses import dataclass

from torch import Tensor


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
class Routing:
    """Which experts each token goes to.

    Attributes:
        weights_TK: float32, differentiable; 0 where the slot was dropped.
        experts_TK: int64 expert ids; E (one past the last) where the slot was dropped.
    """

    weights_TK: Tensor
    experts_TK: Tensor
