"""RMSNorm as a module: alone, with a float8 copy of its output, or over a width that tensor-parallel ranks divide."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.base.spans import Span
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.kernels.operators import Operators
from penstock.layout.sharding import local_shape
from penstock.models.linear import cut_over, recipe_of
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather, reduce_scatter
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.spans import span


class Norm(nn.Module):
    """Weights of a root mean square norm (arXiv 1910.07467); `is_zero_centred` ones begin at 0 and are added to 1."""

    def __init__(self, size: int, epsilon: float, operators: Operators, *, is_zero_centred: bool = False) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.operators = operators
        self.offset = 1.0 if is_zero_centred else 0.0
        self.weight_D = nn.Parameter(torch.empty(size))


class RMSNorm(Norm):
    """Root mean square norm with a learned scale."""

    def forward(self, x_D: Tensor) -> Tensor:
        """Normalize the last dim of a tensor with any leading dims."""
        with span(Span.NORM):
            return self.operators.rms_norm(x_D, self.weight_D, self.epsilon, self.offset)


class LayerNorm(Norm):
    """Layer norm with a learned scale and bias (arXiv 1607.06450), for the keys of the indexer."""

    def __init__(self, size: int, epsilon: float, operators: Operators) -> None:
        super().__init__(size, epsilon, operators)
        self.bias_D = nn.Parameter(torch.empty(size))

    def forward(self, x_D: Tensor) -> Tensor:
        with span(Span.NORM):
            return F.layer_norm(x_D, self.weight_D.shape, self.weight_D, self.bias_D, self.epsilon)


class PreNorm(Norm):
    """The norm before attention or a feed-forward network; also quantizes its output if their products read float8.

    If only the quantized output is read (`keep_plain` is False), the other one is an empty placeholder in the autograd
    graph: it carries gradients and has no valid numbers.
    """

    def __init__(
        self,
        size: int,
        epsilon: float,
        operators: Operators,
        float8: Float8Rule | None = None,
        *,
        keep_plain: bool = True,
        is_zero_centred: bool = False,
    ) -> None:
        super().__init__(size, epsilon, operators, is_zero_centred=is_zero_centred)
        self.float8 = float8
        self.keep_plain = keep_plain

    def forward(self, x_D: Tensor, *, quantize: bool = True) -> tuple[Tensor, RowColQuantized | None]:
        """Normalize the last dim: returns (normed, its float8 copy, or None if the caller does not `quantize`)."""
        with span(Span.NORM):
            if self.float8 is None or not quantize:
                return self.operators.rms_norm(x_D, self.weight_D, self.epsilon, self.offset), None
            normed_D, _, normed_float8 = self._in_float8(self.float8, x_D, None)
            return normed_D, normed_float8

    def beside(self, x_D: Tensor) -> tuple[Tensor, Tensor, RowColQuantized | None]:
        """Normalize a residual stream: returns (normed, x, float8 copy of normed or None).

        Later layers must read the returned x: the norm's backward kernel then adds the gradient of the residual
        stream to its own, without a separate addition.
        """
        with span(Span.NORM):
            if self.float8 is None:
                return *self.operators.rms_norm_beside(x_D, self.weight_D, self.epsilon, self.offset), None
            return self._in_float8(self.float8, x_D, None)

    def add(
        self, x_D: Tensor, residual_D: Tensor, *, quantize: bool = True
    ) -> tuple[Tensor, Tensor, RowColQuantized | None]:
        """Add to the residual stream and normalize the sum: returns (normed, sum, float8 copy of normed or None)."""
        with span(Span.NORM):
            if self.float8 is None or not quantize:
                norm = self.operators.add_rms_norm
                return *norm(x_D, residual_D, self.weight_D, self.epsilon, self.offset), None
            return self._in_float8(self.float8, x_D, residual_D)

    def _in_float8(
        self, float8: Float8Rule, x_D: Tensor, residual_D: Tensor | None
    ) -> tuple[Tensor, Tensor, RowColQuantized]:
        normed_TD, sum_TD, normed_float8 = float8.operators.rms_norm(
            x_D.flatten(0, -2),
            None if residual_D is None else residual_D.flatten(0, -2),
            self.weight_D,
            self.epsilon,
            recipe_of(float8),
            float8.forward,
            columns=torch.is_grad_enabled(),  # backward contracts over rows
            keep_plain=self.keep_plain,
            offset=self.offset,
        )
        return normed_TD.view_as(x_D), sum_TD.view_as(x_D), normed_float8


class TensorParallelNorm(RMSNorm):
    """RMSNorm over a width that tensor-parallel ranks divide; each rank holds its part of the scale."""

    def __init__(
        self, size: int, epsilon: float, layer_context: LayerContext, *, is_zero_centred: bool = False
    ) -> None:
        cuts = cut_over(layer_context.axes.tensor, dim=0)
        (local_size,) = local_shape((size,), cuts)
        super().__init__(local_size, epsilon, layer_context.operators, is_zero_centred=is_zero_centred)
        self.cuts = {"weight_D": cuts}


def norm_together(pairs: tuple[tuple[TensorParallelNorm, Tensor], ...], axis: Axis) -> tuple[Tensor, ...]:
    """Apply several norms to the same positions, with one exchange of all sums of squares.

    The inputs are this rank's part of the last dim at every position of the ranks, B x S x D.
    """
    if axis.size == 1:
        return tuple(norm(x_BSD) for norm, x_BSD in pairs)
    with span(Span.NORM):
        squares = torch.cat([x_BSD.float().square().sum(-1, keepdim=True) for _, x_BSD in pairs], dim=-1)
        # Reduce-scatter plus all-gather is an all-reduce whose backward is an all-reduce too.
        sums = all_gather(reduce_scatter(squares, axis, dim=1), axis, dim=1)
        outputs = []
        # As `penstock.kernels.reference.rms_norm`, with the mean square of the whole width.
        for (norm, x_BSD), sum_BS1 in zip(pairs, sums.split(1, dim=-1), strict=True):
            mean_BS1 = sum_BS1 / (axis.size * x_BSD.shape[-1])  # D is the same on all ranks
            normed_BSD = x_BSD.float() * torch.rsqrt(mean_BS1 + norm.epsilon)
            weight_D = norm.weight_D + norm.offset if norm.offset else norm.weight_D
            outputs.append(weight_D * normed_BSD.to(x_BSD.dtype))
        return tuple(outputs)
