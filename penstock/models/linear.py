"""Matrices and the embedding as modules that may hold a part of the whole.

`cuts` says for each parameter which part (penstock/layout/sharding.py); initial weights, checkpoints and gradient sums
read it there. A module without `cuts` holds its parameters whole.

Whoever owns the float32 sums of gradients may set `total` (penstock/models/parameters.py): backward then adds to it
what autograd would round to bfloat16, hand to a hook, and have added in another pass. Whoever changes weights may have
them quantized once for all passes that follow (`Linear.refresh_float8`); a matrix in 8 bits that has no copies
quantizes its weights in each pass.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from penstock.kernels.float8.gradient_side_channel import GradientSideChannel
from penstock.kernels.float8.quantized import RowColQuantized, WeightCopies
from penstock.kernels.float32_products import add_product
from penstock.kernels.launching import on_gpu
from penstock.layout.sharding import Cut, local_shape
from penstock.models.float8_linear import Float8Weight, fits, float8_linear, quantize_input, recipe_of
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import reduce_scatter
from penstock.parallel.float8_gather import Float8Shard
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.weight_grad_store import WeightGradStore, deferrable


class Linear(nn.Linear):
    """A product with a matrix of which this rank holds rows (of the output), columns (of the input), or all.

    Args:
        inputs: width of the whole input.
        outputs: width of the whole output.
        layer_context: ranks, whether weight gradients may come later, and whether it computes in 8 bits. Widths that
            8-bit products do not take stay in 16.
        split: `outputs` if tensor-parallel ranks divide the rows, `inputs` if the columns; None if each holds all.
        blocks: equal blocks that the output is made of, each divided by itself.
        bias: whether something is added to the product; with `inputs` behind the sum over the ranks, by `shifted`.

    Attributes:
        total: sum of the weight's gradients, for backward to add to; None leaves the gradient to autograd.
        float8: how it computes in 8 bits, or None.
        copies: of the weight in 8 bits, by `refresh_float8`.
        gathered: the weight as FSDP2 gathers it, if it does so in 8 bits (`penstock.models.build.gather_in_8_bits`).
    """

    total: Tensor | None = None
    copies: WeightCopies | None = None
    gathered: tuple[Float8Shard, ...] = ()

    def __init__(
        self,
        inputs: int,
        outputs: int,
        layer_context: LayerContext,
        *,
        split: str | None = None,
        blocks: int = 1,
        bias: bool = False,
    ) -> None:
        cuts = (
            ()
            if split is None
            else cut_over(layer_context.axes.tensor, dim=0 if split == "outputs" else 1, blocks=blocks)
        )
        rows, columns = local_shape((outputs, inputs), cuts)
        super().__init__(columns, rows, bias=bias)
        self.cuts = {"weight": cuts}
        if bias:
            self.cuts["bias"] = cuts if split == "outputs" else ()
        self.weight_grads = layer_context.weight_grads
        self.is_summed = split == "inputs"
        self.float8 = layer_context.float8 if layer_context.float8.dense is not None and fits(rows, columns) else None

    def forward(
        self, x_D: Tensor, ready: RowColQuantized | None = None, handed: GradientSideChannel | None = None
    ) -> Tensor:
        """Multiply the last dim, whatever stands before it, and add the bias unless the product is yet to be summed.

        Args:
            x_D: input.
            ready: the same in 8 bits, if it is there already; see `quantize_input`.
            handed: where the gradient of the product may come in 8 bits, if this one is in 8 bits.
        """
        bias = None if self.is_summed else self.bias
        if self.float8 is not None:
            return float8_linear(x_D, self.float8_weight(), bias, ready, handed)
        assert handed is None, "a product in 16 bits reads its gradient in 16 bits"
        if self.total is None or not torch.is_grad_enabled():
            return deferrable(
                F.linear, (x_D,), (self.weight,) if bias is None else (self.weight, bias), self.weight_grads
            )
        return linear_into(self.total, x_D, self.weight, self.weight_grads, bias)

    def quantize_input(self, x_D: Tensor) -> RowColQuantized | None:
        """An input in 8 bits, for this product and others that read it; None if this one is in 16 bits."""
        return None if self.float8 is None else quantize_input(x_D, self.float8)

    def float8_weight(self) -> Float8Weight:
        """The weight as products in 8 bits take it."""
        assert self.float8 is not None, "a matrix in 16 bits"
        return Float8Weight(
            parameter_FD=self.weight,
            kept=self.copies,
            total=self.total,
            weight_grads=self.weight_grads,
            rule=self.float8,
        )

    @torch.no_grad()
    def refresh_float8(self) -> None:
        """Quantize the weight for the passes that follow, into the same memory each time, because graphs read it.

        Weights that FSDP2 gathers are quantized when they are there.
        """
        if self.float8 is not None and not isinstance(self.weight, DTensor):
            quantize = self.float8.operators.quantize_weight
            self.copies = quantize(self.weight, recipe_of(self.float8), self.float8.forward, self.copies)

    def shifted(self, y_D: Tensor) -> Tensor:
        """The sum of the ranks' products, with the bias if there is one."""
        assert self.is_summed, "the bias is in the product already"
        return y_D if self.bias is None else y_D + self.bias


class Embedding(nn.Embedding):
    """Token embedding of which tensor-parallel ranks hold equal ranges of the vocabulary.

    Args:
        vocabulary: V.
        hidden_size: D.
        layer_context: ranks.

    Attributes:
        total: as of `Linear`; also for the product of a tied output projection.
    """

    total: Tensor | None = None

    def __init__(self, vocabulary: int, hidden_size: int, layer_context: LayerContext) -> None:
        axis = layer_context.axes.tensor
        cuts = cut_over(axis, dim=0)
        rows, columns = local_shape((vocabulary, hidden_size), cuts)
        super().__init__(rows, columns)
        self.cuts = {"weight": cuts}
        self.axis = axis

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Look up.

        Args:
            tokens_BS: int64 ids, the same on every tensor-parallel rank.

        Returns:
            This rank's positions (all of them if nobody shares them), B x s x D.
        """
        if self.axis.size == 1:
            # On a CPU, or where most rows are another rank's and count for row 0, autograd's way is the faster one.
            if self.total is not None and on_gpu(self.total) and torch.is_grad_enabled():
                return look_up_into(self.total, tokens_BS, self.weight)
            return F.embedding(tokens_BS, self.weight)
        first = self.axis.rank * self.num_embeddings
        local_BS = tokens_BS - first
        is_here_BS = (local_BS >= 0) & (local_BS < self.num_embeddings)
        x_BSD = F.embedding(torch.where(is_here_BS, local_BS, 0), self.weight)
        return reduce_scatter(torch.where(is_here_BS[..., None], x_BSD, 0), self.axis, dim=1)


def linear_into(
    total: Tensor, x_D: Tensor, weight: Tensor, weight_grads: WeightGradStore | None = None, bias: Tensor | None = None
) -> Tensor:
    """`F.linear(x, weight, bias)` whose backward adds the weight's gradient to `total` and gives autograd none.

    Args:
        total: in the shape of the weight, float32 or the weight's dtype.
        x_D: whatever stands before its last dim.
        weight: output x input.
        weight_grads: while it collects, the weight's gradient is a task of it.
        bias: its gradient goes to autograd.
    """
    y: Tensor = _LinearInto.apply(x_D, weight, bias, total, weight_grads)
    # Only now, behind the saves: a region that runs again to have them back ends with the last one, so it makes no
    # product that nobody reads (penstock/parallel/recompute.py).
    with torch.no_grad():
        if bias is None:
            torch.mm(x_D.flatten(0, -2), weight.T, out=y.flatten(0, -2))
        else:
            torch.addmm(bias, x_D.flatten(0, -2), weight.T, out=y.flatten(0, -2))
    return y


class _LinearInto(torch.autograd.Function):
    """Gives the room for the product; see `linear_into`."""

    @staticmethod
    def forward(
        ctx: Any, x_D: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor, weight_grads: WeightGradStore | None
    ) -> Tensor:
        ctx.save_for_backward(x_D, weight)
        ctx.total, ctx.weight_grads = total, weight_grads
        return x_D.new_empty(*x_D.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_D, weight = ctx.saved_tensors
        dx_D = dy @ weight if ctx.needs_input_grad[0] else None
        dbias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        add = partial(add_product, ctx.total, dy.flatten(0, -2).T, x_D.flatten(0, -2))
        if ctx.weight_grads is not None and ctx.weight_grads.is_collecting:
            ctx.weight_grads.add(add)
        else:
            add()
        return dx_D, None, dbias, None, None


def look_up_into(total_VD: Tensor, tokens: Tensor, weight_VD: Tensor) -> Tensor:
    """`F.embedding` whose backward adds to rows of `total` and makes no gradient of the whole vocabulary's size.

    On a GPU the order of the sum is fixed; on a CPU it is in one thread.

    Args:
        total_VD: float32 or the weight's dtype.
        tokens: int64, of any shape.
        weight_VD: one row for each token of the vocabulary.
    """
    rows: Tensor = _LookUpInto.apply(tokens, weight_VD, total_VD)
    return rows


class _LookUpInto(torch.autograd.Function):
    """See `look_up_into`."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight_VD: Tensor, total_VD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.total_VD = total_VD
        return F.embedding(tokens, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        ctx.total_VD.index_put_((tokens,), drows.to(ctx.total_VD.dtype), accumulate=True)
        return None, None, None


def cut_over(axis: Axis, *, dim: int, blocks: int = 1) -> tuple[Cut, ...]:
    """The cut of a dim over the ranks of an axis; none if there is one rank."""
    return () if axis.size == 1 else (Cut(dim, axis.rank, axis.size, blocks),)
