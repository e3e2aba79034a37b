"""Linear and embedding modules that may hold one shard of the whole weight.

`cuts` says for each parameter which part this rank holds (penstock/layout/sharding.py); initial weights, checkpoints
and gradient buffers read it. A module without `cuts` holds its parameters whole.

The optimizer may set `main_grad`, a float32 buffer (penstock/models/parameters.py): backward then accumulates weight
gradients there directly instead of giving autograd a bfloat16 tensor for a hook to add. It may also quantize float8
weights once per step (`Linear.refresh_float8`); a float8 matrix without these copies quantizes its weight in each pass.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from penstock.kernels.float8.quantized import RowColQuantized, WeightCopies
from penstock.kernels.float32_products import add_product
from penstock.kernels.language import HAS_TRITON, on_gpu
from penstock.kernels.permute import add_runs
from penstock.kernels.reference import add_token_rows
from penstock.layout.sharding import Cut, local_shape
from penstock.models.float8_linear import Float8Weight, fits, float8_linear, quantize_input, recipe_of
from penstock.parallel.async_transfer import WeightGradStore, deferrable
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import reduce_scatter
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.shard import Float8Shard


class Linear(nn.Linear):
    """A product with a matrix of which this rank holds some rows (outputs), some columns (inputs), or all.

    Widths that float8 kernels do not support stay in high precision.
    """

    main_grad: Tensor | None = None  # backward adds the weight gradient to it; None leaves the gradient to autograd
    copies: WeightCopies | None = None  # quantized weight, see `refresh_float8`
    gathered: tuple[Float8Shard, ...] = ()  # for FSDP2's float8 all-gather (penstock.models.build.gather_in_float8)

    def __init__(
        self,
        inputs: int,
        outputs: int,
        layer_context: LayerContext,
        *,
        split: str | None = None,  # outputs (column-parallel), inputs (row-parallel); None replicates the matrix
        blocks: int = 1,  # equal blocks of the output that are sharded separately, such as gate and up
        bias: bool = False,  # a row-parallel product needs `shifted` to add it after the reduction
    ) -> None:
        dim = 0 if split == "outputs" else 1
        cuts = () if split is None else cut_over(layer_context.axes.tensor, dim=dim, blocks=blocks)
        rows, columns = local_shape((outputs, inputs), cuts)
        super().__init__(columns, rows, bias=bias)
        self.cuts = {"weight": cuts}
        self.blocks = blocks
        if bias:
            self.cuts["bias"] = cuts if split == "outputs" else ()
        self.weight_grads = layer_context.weight_grads  # deferred weight gradients
        self.is_summed = split == "inputs"  # outputs of the ranks are partial sums
        self.float8 = layer_context.float8 if layer_context.float8.dense is not None and fits(rows, columns) else None

    def reset_parameters(self) -> None:
        """Weights of the meta device have no values."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, x_D: Tensor, x_float8: RowColQuantized | None = None) -> Tensor:
        """Multiply the last dim; add the bias, except to partial sums. `x_float8` is a copy of x (`quantize_input`)."""
        bias = None if self.is_summed else self.bias
        if self.float8 is not None:
            return float8_linear(x_D, self.float8_weight(), bias, x_float8)
        if self.main_grad is None or not torch.is_grad_enabled():
            weights = (self.weight,) if bias is None else (self.weight, bias)
            return deferrable(F.linear, (x_D,), weights, self.weight_grads)
        return linear_into(self.main_grad, x_D, self.weight, self.weight_grads, bias)

    def quantize_input(self, x_D: Tensor) -> RowColQuantized | None:
        """The float8 copy of an input, for this product and others that read it; None in high precision."""
        return None if self.float8 is None else quantize_input(x_D, self.float8)

    def float8_weight(self) -> Float8Weight:
        """The weight as the float8 functions take it."""
        assert self.float8 is not None, "a matrix in 16 bits"
        return Float8Weight(
            parameter_FD=self.weight,
            cached=self.copies,
            main_grad=self.main_grad,
            weight_grads=self.weight_grads,
            rule=self.float8,
        )

    @torch.no_grad()
    def refresh_float8(self) -> None:
        """Quantize the weight for the passes that follow.

        Copies keep their addresses, because captured graphs read them. FSDP2 weights are quantized after the gather.
        """
        if self.float8 is not None and not isinstance(self.weight, DTensor):
            quantize = self.float8.operators.quantize_weight
            self.copies = quantize(self.weight, recipe_of(self.float8), self.float8.forward, self.copies)

    def shifted(self, y_D: Tensor) -> Tensor:
        """Add the bias, if any, to the reduced output of a row-parallel product."""
        assert self.is_summed, "the bias is in the product already"
        return y_D if self.bias is None else y_D + self.bias


class Embedding(nn.Embedding):
    """Token embedding; tensor-parallel ranks hold equal ranges of the vocabulary."""

    main_grad: Tensor | None = None  # as in `Linear`; a tied output projection adds its gradient there too

    def __init__(self, vocab_size: int, hidden_size: int, layer_context: LayerContext) -> None:
        axis = layer_context.axes.tensor
        cuts = cut_over(axis, dim=0)
        rows, columns = local_shape((vocab_size, hidden_size), cuts)
        super().__init__(rows, columns)
        self.cuts = {"weight": cuts}
        self.axis = axis

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Look up ids (int64), which all tensor-parallel ranks share. Returns B x S / ranks x D of our positions."""
        if self.axis.size == 1:
            # Autograd's dense gradient is faster on a CPU, and where most tokens belong to other ranks (row 0 here).
            if self.main_grad is not None and on_gpu(self.main_grad) and torch.is_grad_enabled():
                return look_up_into(self.main_grad, tokens_BS, self.weight)
            return F.embedding(tokens_BS, self.weight)
        # Rank r holds rows r V / n .. (r + 1) V / n - 1. Other tokens read row 0 and are zeroed before the sum.
        local_BS = tokens_BS - self.axis.rank * self.num_embeddings
        is_here_BS = (local_BS >= 0) & (local_BS < self.num_embeddings)
        x_BSD = F.embedding(torch.where(is_here_BS, local_BS, 0), self.weight)
        return reduce_scatter(torch.where(is_here_BS[..., None], x_BSD, 0), self.axis, dim=1)


def linear_into(
    main_grad: Tensor,
    x_D: Tensor,
    weight: Tensor,
    weight_grads: WeightGradStore | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`F.linear(x, weight, bias)` whose backward adds the weight gradient to a buffer and gives autograd none.

    `main_grad` has the shape of the weight, in float32 or the weight's dtype. While `weight_grads` collects, the weight
    gradient is stored as a task.
    """
    y: Tensor = _LinearInto.apply(x_D, weight, bias, main_grad, weight_grads)
    # Multiply after the tensors are saved: recomputation of a region stops at the last saved tensor, so it skips a
    # product whose result no backward reads.
    with torch.no_grad():
        if bias is None:
            torch.mm(x_D.flatten(0, -2), weight.T, out=y.flatten(0, -2))
        else:
            torch.addmm(bias, x_D.flatten(0, -2), weight.T, out=y.flatten(0, -2))
    return y


class _LinearInto(torch.autograd.Function):
    """Allocates the output; `linear_into` fills it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_D: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        main_grad: Tensor,
        weight_grads: WeightGradStore | None,
    ) -> Tensor:
        ctx.save_for_backward(x_D, weight)
        ctx.main_grad, ctx.weight_grads = main_grad, weight_grads
        return x_D.new_empty(*x_D.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_D, weight = ctx.saved_tensors
        dx_D = dy @ weight if ctx.needs_input_grad[0] else None  # (.., F) x (F, D)
        dbias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        # main_grad += dy^T x: (F, T) x (T, D), accumulated in float32
        add = partial(add_product, ctx.main_grad, dy.flatten(0, -2).T, x_D.flatten(0, -2))
        if ctx.weight_grads is not None and ctx.weight_grads.is_collecting:
            ctx.weight_grads.add(add)
        else:
            add()
        return dx_D, None, dbias, None, None


def look_up_into(main_grad_VD: Tensor, tokens: Tensor, weight_VD: Tensor) -> Tensor:
    """`F.embedding` whose backward adds to rows of a buffer (`add_token_rows`), in float32 or the weight's dtype."""
    rows: Tensor = _LookUpInto.apply(tokens, weight_VD, main_grad_VD)
    return rows


class _LookUpInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight_VD: Tensor, main_grad_VD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.main_grad_VD = main_grad_VD
        return F.embedding(tokens, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        has_kernel = drows.is_meta or (drows.is_cuda and HAS_TRITON)
        (add_runs if has_kernel else add_token_rows)(ctx.main_grad_VD, tokens, drows)
        return None, None, None


def cut_over(axis: Axis, *, dim: int, blocks: int = 1) -> tuple[Cut, ...]:
    """Shard a dim over the ranks of an axis; no cut if there is one rank."""
    return () if axis.size == 1 else (Cut(dim, axis.rank, axis.size, blocks),)
