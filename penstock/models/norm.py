"""RMSNorm as a module, whole or over a width that tensor-parallel ranks divide."""

import torch
from torch import Tensor, nn

from penstock.base.spans import Span
from penstock.kernels.operators import Operators
from penstock.layout.pieces import local_shape
from penstock.models.linear import cut_over
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.kit import Kit
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


class SplitNorm(RMSNorm):
    """RMSNorm over a width of which each tensor-parallel rank has a part, with its part of the scale.

    Args:
        size: the whole width.
        epsilon: added to the mean square.
        kit: kernels and ranks.
    """

    def __init__(self, size: int, epsilon: float, kit: Kit) -> None:
        cuts = cut_over(kit.axes.tensor, dim=0)
        (own,) = local_shape((size,), cuts)
        super().__init__(own, epsilon, kit.operators)
        self.cuts = {"weight_D": cuts}


def norm_together(pairs: tuple[tuple[SplitNorm, Tensor], ...], axis: Axis) -> tuple[Tensor, ...]:
    """Several norms of the same positions; the ranks exchange all their sums of squares at once.

    Args:
        pairs: norms, and what each normalizes: our part of the last dim, at every position of the ranks, B x S x D.
        axis: tensor-parallel ranks.
    """
    if axis.size == 1:
        return tuple(norm(x_BSD) for norm, x_BSD in pairs)
    with span(Span.NORM):
        squares = torch.cat([x_BSD.float().square().sum(-1, keepdim=True) for _, x_BSD in pairs], dim=-1)
        # Scattered and gathered again: a sum over the ranks whose gradient is one too.
        sums = all_gather(reduce_scatter(squares, axis, dim=1), axis, dim=1)
        return tuple(
            _scaled(norm, x_BSD, sums_BS1 / (axis.size * x_BSD.shape[-1]))
            for (norm, x_BSD), sums_BS1 in zip(pairs, sums.split(1, dim=-1), strict=True)
        )


def _scaled(norm: SplitNorm, x_BSD: Tensor, mean_BS1: Tensor) -> Tensor:
    """As `penstock.kernels.reference.rms_norm`, with the mean square of the whole width."""
    normed_BSD = x_BSD.float() * torch.rsqrt(mean_BS1 + norm.epsilon)
    return norm.weight_D * normed_BSD.to(x_BSD.dtype)
