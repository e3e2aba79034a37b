"""RMSNorm as a module."""

import torch
from torch import Tensor, nn

from penstock.base.spans import Span
from penstock.kernels.operators import Operators
from penstock.parallel.spans import span


class RMSNorm(nn.Module):
    """Root mean square norm with a learned scale (arXiv 1910.07467).

    Args:
        size: width of the last dim.
        epsilon: added to the mean square.
        operators: kernels to run on.
    """

    def __init__(self, size: int, epsilon: float, operators: Operators) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.operators = operators
        self.weight_D = nn.Parameter(torch.empty(size))

    def forward(self, x_D: Tensor) -> Tensor:
        """Normalize the last dim, whatever stands before it."""
        with span(Span.NORM):
            return self.operators.rms_norm(x_D, self.weight_D, self.epsilon)

    def add(self, x_D: Tensor, residual_D: Tensor) -> tuple[Tensor, Tensor]:
        """Add to the residual stream and normalize the sum: returns (normed, sum)."""
        with span(Span.NORM):
            return self.operators.add_rms_norm(x_D, residual_D, self.weight_D, self.epsilon)
