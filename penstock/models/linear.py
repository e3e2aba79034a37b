"""Linear and embedding modules that may hold one shard of the whole weight.

`cuts` says for each parameter which part this rank holds (penstock/layout/sharding.py); initial weights, checkpoints
and gradient buffers read it. A module without `cuts` holds its parameters whole.

The optimizer may set `main_grad`, a float32 buffer (penstock/models/parameters.py): backward then accumulates weight
gradients there directly instead of giving autograd a bfloat16 tensor for a hook to add. It may also quantize float8
weights once per step (`Linear.refresh_float8`); a float8 matrix without these copies quantizes its weight in each pass.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import (
    GatheredCopies,
    Quantized,
    Recipe,
    RowColQuantized,
    WeightCopies,
    copies_of,
)
from penstock.kernels.float32_products import add_product
from penstock.kernels.language import HAS_TRITON, on_gpu
from penstock.kernels.permute import add_runs
from penstock.kernels.reference import SWIGLU, ExpertRule, add_token_rows
from penstock.layout.sharding import Cut, local_shape
from penstock.parallel.async_transfer import WeightGradStore, deferrable
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import reduce_scatter
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.shard import Float8Shard, is_dtensor

# Dense float8 products: a linear layer, and a SwiGLU network as one autograd function.
#
#     y  = x w^T       x by rows, w as it is              x is quantized once, for all matrices that read it
#     dx = dy w        dy by rows, w transposed           dy is quantized once, for both of its products
#     dw = dy^T x      both by columns, transposed        of x, backward keeps only the columns: 1 byte a number
#
# The high-precision input only has its place in the autograd graph; it is not saved. Weights are quantized once per
# optimizer step (`Float8Weight.cached`), or in each pass where FSDP2 gathers them for it.
#
# In the network, the activation kernel writes its output in float8, and its backward kernel writes the gradient of gate
# and up in float8. Only gate and up are saved; backward recomputes the activation.
#
# Products run after the tensors are saved, as in `linear_into`: recomputation of a region stops before the last
# product.


MULTIPLE = 16
"""Both widths of a float8 matrix are multiples of this: matrix units and block copies require it."""


def fits(rows: int, columns: int) -> bool:
    """Whether float8 products support a matrix of this shape."""
    return rows % MULTIPLE == 0 and columns % MULTIPLE == 0


def recipe_of(rule: Float8Rule) -> Recipe:
    assert rule.dense is not None, "dense products are in 16 bits"
    return rule.dense


def quantize_input(x_D: Tensor, rule: Float8Rule) -> RowColQuantized:
    """Quantize the input of one or several products; its columns only if backward may run."""
    x_TD, recipe = x_D.detach().flatten(0, -2).contiguous(), recipe_of(rule)
    columns = recipe.columns if torch.is_grad_enabled() else None
    return rule.operators.quantize_rows(x_TD, recipe, rule.forward, columns=columns)


@dataclass(frozen=True, kw_only=True)
class Float8Weight:
    """A weight matrix with everything its float8 products need."""

    parameter_FD: Tensor  # bfloat16 or float32
    # Of its current values. None quantizes in forward and again in backward, unless FSDP2 gathers it in float8.
    cached: WeightCopies | None
    main_grad: Tensor | None  # float32 buffer that backward adds to; None gives the gradient to autograd
    weight_grads: WeightGradStore | None  # while it collects, the weight gradient is stored as a task
    rule: Float8Rule

    def copies(self, parameter_FD: Tensor) -> WeightCopies | GatheredCopies:
        """The cached copies, or new ones of the parameter; in backward, of what the saved tensor restores."""
        quantize = partial(self.rule.operators.quantize_weight, recipe=recipe_of(self.rule), form=self.rule.forward)
        return copies_of(parameter_FD, self.cached, quantize)

    def put_gradient(self, dy_FR: Quantized, x_DR: Quantized) -> Tensor | None:
        """Compute dw = dy^T x, now or deferred. Returns None if it goes to `main_grad` or is deferred."""
        if self.weight_grads is not None and self.weight_grads.is_collecting:
            self.weight_grads.add(partial(self._put_deferred, dy_FR, x_DR))
            return None
        return self._gradient(dy_FR, x_DR)

    def _gradient(self, dy_FR: Quantized, x_DR: Quantized) -> Tensor | None:
        multiply = self.rule.operators.multiply  # both operands are contracted over R, their last dim
        if self.main_grad is None:
            return multiply(dy_FR, x_DR, self.parameter_FD.dtype)
        multiply(dy_FR, x_DR, self.main_grad.dtype, accumulate_into=self.main_grad)
        return None

    def _put_deferred(self, dy_FR: Quantized, x_DR: Quantized) -> None:
        dw_FD = self._gradient(dy_FR, x_DR)
        if dw_FD is not None:  # a small backward pass, so that the parameter's hooks run
            self.parameter_FD.view_as(self.parameter_FD).backward(dw_FD)


def float8_linear(
    x_D: Tensor, weight: Float8Weight, bias: Tensor | None = None, x_float8: RowColQuantized | None = None
) -> Tensor:
    """`F.linear` with all three products in float8, in the dtype of x, which may have any leading dims.

    Without `x_float8`, its quantized copy, x is quantized here.
    """
    x_float8 = quantize_input(x_D, weight.rule) if x_float8 is None else x_float8
    y: Tensor = _Float8Linear.apply(x_D, weight.parameter_FD, bias, x_float8.columns, weight)
    with torch.no_grad():
        forward = weight.copies(weight.parameter_FD).forward
        weight.rule.operators.multiply(x_float8.rows, forward, y.dtype, out=y.flatten(0, -2))
        if bias is not None:
            y += bias
    return y


def float8_network(
    x_TD: Tensor,
    gate_up: Float8Weight,
    down: Float8Weight,
    x_float8: RowColQuantized | None = None,
    activation: ExpertRule = SWIGLU,
) -> Tensor:
    """down(silu(gate(x)) * up(x)) with all six products in float8; `x_float8` as in `float8_linear`."""
    rule = gate_up.rule
    operators = rule.operators
    x_float8 = quantize_input(x_TD, rule) if x_float8 is None else x_float8
    parameters = gate_up.parameter_FD, down.parameter_FD  # 2F x D, D x F
    with torch.no_grad():
        gate_up_T2F = operators.multiply(x_float8.rows, gate_up.copies(gate_up.parameter_FD).forward, x_TD.dtype)
    # Allocated here, filled below.
    y_TD: Tensor = _Float8Network.apply(x_TD, *parameters, x_float8.columns, gate_up_T2F, (gate_up, down), activation)
    with torch.no_grad():
        h_TF = operators.swiglu(gate_up_T2F, None, activation, recipe_of(rule), rule.forward).rows
        operators.multiply(h_TF, down.copies(down.parameter_FD).forward, y_TD.dtype, out=y_TD)
    return y_TD


class _Float8Linear(torch.autograd.Function):
    """Allocates the output; `float8_linear` fills it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_D: Tensor,
        parameter_FD: Tensor,
        bias: Tensor | None,
        columns: Quantized | None,
        weight: Float8Weight,
    ) -> Tensor:
        if columns is not None:
            # Only the columns of x are saved (1 byte a number), and the weight where no cached copy exists.
            of_weight = (parameter_FD,) if weight.cached is None else ()
            ctx.save_for_backward(columns.values, columns.scales, *of_weight)
            ctx.block = columns.block
        ctx.weight, ctx.shape = weight, x_D.shape
        return x_D.new_empty(*x_D.shape[:-1], len(parameter_FD))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight: Float8Weight = ctx.weight
        values, scales, *of_weight = ctx.saved_tensors
        dy = dy.contiguous()
        dy_float8 = _quantize_gradient(dy.flatten(0, -2), weight.rule)
        dx_D = dweight = None
        if ctx.needs_input_grad[0]:
            backward = weight.copies(*(of_weight or (weight.parameter_FD,))).backward  # D x F
            dx_D = weight.rule.operators.multiply(dy_float8.rows, backward, dy.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            assert dy_float8.columns is not None, "asked for"
            dweight = weight.put_gradient(dy_float8.columns, Quantized(values, scales, ctx.block))
        dbias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return dx_D, dweight, dbias, None, None


class _Float8Network(torch.autograd.Function):
    """Allocates the output; `float8_network` fills it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        gate_up_FD: Tensor,
        down_DF: Tensor,
        columns: Quantized | None,
        gate_up_T2F: Tensor,
        weights: tuple[Float8Weight, Float8Weight],
        activation: ExpertRule,
    ) -> Tensor:
        gate_up, down = weights
        if columns is not None:  # backward may run
            is_cached = gate_up.cached is not None and down.cached is not None
            of_weights = () if is_cached else (gate_up_FD, down_DF)
            ctx.save_for_backward(columns.values, columns.scales, gate_up_T2F, *of_weights)
            ctx.block = columns.block
        ctx.weights, ctx.activation = weights, activation
        return x_TD.new_empty(len(x_TD), len(down_DF))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, down = ctx.weights
        values, scales, gate_up_T2F, *of_weights = ctx.saved_tensors
        gate_up_FD, down_DF = of_weights or (gate_up.parameter_FD, down.parameter_FD)
        rule = gate_up.rule
        dy = _quantize_gradient(dy_TD.contiguous(), rule)
        dh_TF = rule.operators.multiply(dy.rows, down.copies(down_DF).backward, dy_TD.dtype)  # dy down
        # Recomputes the activation h from gate and up, for the weight gradient of `down`.
        activation = rule.operators.swiglu_backward(
            gate_up_T2F,
            None,
            dh_TF,
            torch.full((1,), len(dh_TF), dtype=torch.int32, device=dh_TF.device),  # one group holds all rows
            ctx.activation,
            recipe_of(rule),
            rule.forward,
            rule.gradient,
        )
        del dh_TF, gate_up_T2F  # their memory is free for the products below
        dx_TD = dgate_up = ddown = None
        if ctx.needs_input_grad[2]:
            assert dy.columns is not None, "asked for"
            ddown = down.put_gradient(dy.columns, _unaligned(activation.h_columns, len(dy_TD)))
        if ctx.needs_input_grad[1]:
            x_columns = Quantized(values, scales, ctx.block)
            dgate_up = gate_up.put_gradient(_unaligned(activation.d_gate_up_columns, len(dy_TD)), x_columns)
        if ctx.needs_input_grad[0]:
            backward = gate_up.copies(gate_up_FD).backward
            dx_TD = rule.operators.multiply(activation.d_gate_up, backward, dy_TD.dtype)
        return dx_TD, dgate_up, ddown, None, None, None, None


def _quantize_gradient(dy_TF: Tensor, rule: Float8Rule) -> RowColQuantized:
    recipe = recipe_of(rule)
    return rule.operators.quantize_rows(dy_TF, recipe, rule.gradient, columns=recipe.rows)


def _unaligned(columns: Quantized, rows: int) -> Quantized:
    """Drop the padding after the last row of a group's columns."""
    per_block = columns.block[1] or columns.values.shape[-1]
    blocks = -(-rows // per_block)
    return Quantized(columns.values[:, :rows], columns.scales[:, :blocks], columns.block)


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
        if self.float8 is not None and not is_dtensor(self.weight):
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

    def reset_parameters(self) -> None:
        """Keep what is there: a model is built without memory, where drawing would import PyTorch's compiler."""
        if not self.weight.is_meta:
            super().reset_parameters()

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
