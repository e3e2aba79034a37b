"""RMSNorm as a module, whole or over a width that tensor-parallel ranks divide."""

import torch
from torch import Tensor, nn

from penstock.base.spans import Span
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.kernels.operators import Operators
from penstock.layout.sharding import local_shape
from penstock.models.float8_linear import recipe_of
from penstock.models.linear import cut_over
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.spans import span


class Norm(nn.Module):
    """Weights of a root mean square norm (arXiv 1910.07467).

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


class RMSNorm(Norm):
    """Root mean square norm with a learned scale."""

    def forward(self, x_D: Tensor) -> Tensor:
        """Normalize the last dim, whatever stands before it."""
        with span(Span.NORM):
            return self.operators.rms_norm(x_D, self.weight_D, self.epsilon)


class PreNorm(Norm):
    """The norm before a part of a layer, which gives its rows in 8 bits too if products of the part read them so.

    Args:
        size: width of the last dim.
        epsilon: added to the mean square.
        operators: kernels to run on.
        float8: how rows are quantized; None if nobody reads them in 8 bits.
        keep_plain: whether somebody reads them in 16 bits as well. Else the rows that come with those in 8 bits take
            gradients and have no numbers.
    """

    def __init__(
        self,
        size: int,
        epsilon: float,
        operators: Operators,
        float8: Float8Rule | None = None,
        *,
        keep_plain: bool = True,
    ) -> None:
        super().__init__(size, epsilon, operators)
        self.float8 = float8
        self.keep_plain = keep_plain

    def forward(self, x_D: Tensor, *, ready: bool = True) -> tuple[Tensor, RowColQuantized | None]:
        """Normalize the last dim, whatever stands before it.

        Args:
            x_D: rows.
            ready: whether somebody is there to read them in 8 bits.

        Returns:
            The rows, and the same in 8 bits or None.
        """
        with span(Span.NORM):
            if self.float8 is None or not ready:
                return self.operators.rms_norm(x_D, self.weight_D, self.epsilon), None
            normed_TD, _, both = self._in_8_bits(self.float8, x_D, None)
            return normed_TD, both

    def beside(self, x_D: Tensor, *, ready: bool = True) -> tuple[Tensor, Tensor, RowColQuantized | None]:
        """Normalize a residual stream that goes on: returns (normed, x, normed in 8 bits or None).

        Whoever reads on takes this x. Its gradient then goes into the norm's, and nobody adds the two.
        """
        with span(Span.NORM):
            if self.float8 is None or not ready:
                return *self.operators.rms_norm_beside(x_D, self.weight_D, self.epsilon), None
            return self._in_8_bits(self.float8, x_D, None)

    def add(
        self, x_D: Tensor, residual_D: Tensor, *, ready: bool = True
    ) -> tuple[Tensor, Tensor, RowColQuantized | None]:
        """Add to the residual stream and normalize the sum: returns (normed, sum, normed in 8 bits or None)."""
        with span(Span.NORM):
            if self.float8 is None or not ready:
                return *self.operators.add_rms_norm(x_D, residual_D, self.weight_D, self.epsilon), None
            return self._in_8_bits(self.float8, x_D, residual_D)

    def _in_8_bits(
        self, float8: Float8Rule, x_D: Tensor, residual_D: Tensor | None
    ) -> tuple[Tensor, Tensor, RowColQuantized]:
        normed_TD, sum_TD, both = float8.operators.rms_norm(
            x_D.flatten(0, -2),
            None if residual_D is None else residual_D.flatten(0, -2),
            self.weight_D,
            self.epsilon,
            recipe_of(float8),
            float8.forward,
            columns=torch.is_grad_enabled(),
            keep_plain=self.keep_plain,
        )
        return normed_TD.view_as(x_D), sum_TD.view_as(x_D), both


class TensorParallelNorm(RMSNorm):
    """RMSNorm over a width of which each tensor-parallel rank has a part, with its part of the scale.

    Args:
        size: the whole width.
        epsilon: added to the mean square.
        layer_context: kernels and ranks.
    """

    def __init__(self, size: int, epsilon: float, layer_context: LayerContext) -> None:
        cuts = cut_over(layer_context.axes.tensor, dim=0)
        (own,) = local_shape((size,), cuts)
        super().__init__(own, epsilon, layer_context.operators)
        self.cuts = {"weight_D": cuts}


def norm_together(pairs: tuple[tuple[TensorParallelNorm, Tensor], ...], axis: Axis) -> tuple[Tensor, ...]:
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


def _scaled(norm: TensorParallelNorm, x_BSD: Tensor, mean_BS1: Tensor) -> Tensor:
    """As `penstock.kernels.reference.rms_norm`, with the mean square of the whole width."""
    normed_BSD = x_BSD.float() * torch.rsqrt(mean_BS1 + norm.epsilon)
    return norm.weight_D * normed_BSD.to(x_BSD.dtype)
