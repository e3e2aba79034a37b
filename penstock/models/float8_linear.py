"""Dense products in 8 bits: a matrix alone, and a SwiGLU network as one function.

    y  = x w^T       x by rows, w as it is              x is quantized once, for all matrices that read it
    dx = dy w        dy by rows, w transposed           dy is quantized once, for both of its products
    dw = dy^T x      both by columns, transposed        the columns of x are all that is kept of it: 1 byte a number

The input in 16 bits is a place in autograd's graph and nothing more; whoever else reads it keeps it. Weights are
quantized once an optimizer step (`Float8Weight.kept`), or in each pass where they are gathered for it.

In a network the activation comes out of its kernel in 8 bits, and so does the gradient of what it reads: no more than
gate and up is kept, from which backward makes the rest.

Products stand behind the saves, as in `linear_into`: a region that runs again to have them back ends before the last.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels.float8.gathered import GatheredCopies, copies_of
from penstock.kernels.float8.gradient_side_channel import GradientSideChannel
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import Quantized, RowColQuantized, WeightCopies
from penstock.kernels.float8.recipes import Recipe
from penstock.kernels.reference import SWIGLU
from penstock.parallel.weight_grad_store import WeightGradStore

MULTIPLE = 16
"""Of both widths of a matrix in 8 bits: matrix units and copies of blocks take no others."""


def fits(rows: int, columns: int) -> bool:
    """Whether a matrix of this shape can be multiplied in 8 bits."""
    return rows % MULTIPLE == 0 and columns % MULTIPLE == 0


def recipe_of(rule: Float8Rule) -> Recipe:
    """That of dense products."""
    assert rule.dense is not None, "dense products are in 16 bits"
    return rule.dense


def quantize_input(x_D: Tensor, rule: Float8Rule) -> RowColQuantized:
    """The input of one product or several, whatever stands before its last dim; columns only if backward may come."""
    x_TD, recipe = x_D.detach().flatten(0, -2).contiguous(), recipe_of(rule)
    columns = recipe.columns if torch.is_grad_enabled() else None
    return rule.operators.quantize_rows(x_TD, recipe, rule.forward, columns=columns)


@dataclass(frozen=True, kw_only=True)
class Float8Weight:
    """A matrix, and what becomes of its gradient.

    Attributes:
        parameter_FD: in 16 bits, or float32.
        kept: copies of its values now; None quantizes it here, and once more in backward, if it is not gathered so.
        total: float32 sums, for backward to add to; None gives the gradient to autograd.
        weight_grads: while it collects, the gradient is a task of it.
        rule: recipe, formats and kernels.
    """

    parameter_FD: Tensor
    kept: WeightCopies | None
    total: Tensor | None
    weight_grads: WeightGradStore | None
    rule: Float8Rule

    def copies(self, parameter_FD: Tensor) -> WeightCopies | GatheredCopies:
        """Those that there are, or new ones.

        Args:
            parameter_FD: as it is now, or as backward has it again.
        """
        quantize = partial(self.rule.operators.quantize_weight, recipe=recipe_of(self.rule), form=self.rule.forward)
        return copies_of(parameter_FD, self.kept, quantize)

    def put_gradient(self, dy: Quantized, x: Quantized) -> Tensor | None:
        """The gradient, where it belongs and when.

        Args:
            dy: F x R.
            x: D x R.

        Returns:
            What is left to autograd.
        """
        if self.weight_grads is not None and self.weight_grads.is_collecting:
            self.weight_grads.add(partial(self._put_late, dy, x))
            return None
        return self._gradient(dy, x)

    def _gradient(self, dy: Quantized, x: Quantized) -> Tensor | None:
        multiply = self.rule.operators.multiply
        if self.total is None:
            return multiply(dy, x, self.parameter_FD.dtype)
        multiply(dy, x, self.total.dtype, accumulate_into=self.total)
        return None

    def _put_late(self, dy: Quantized, x: Quantized) -> None:
        found = self._gradient(dy, x)
        if found is not None:  # Through the parameter's own hooks, as in any backward pass.
            self.parameter_FD.view_as(self.parameter_FD).backward(found)


def float8_linear(
    x_D: Tensor,
    weight: Float8Weight,
    bias: Tensor | None = None,
    ready: RowColQuantized | None = None,
    handed: GradientSideChannel | None = None,
) -> Tensor:
    """`F.linear` with all three products in 8 bits.

    Args:
        x_D: whatever stands before its last dim.
        weight: output x input.
        bias: added to the product; its gradient goes to autograd.
        ready: x, quantized by somebody else; None quantizes it here.
        handed: where the gradient of the product may come in 8 bits; then there is no bias.

    Returns:
        In the dtype of x.
    """
    assert handed is None or bias is None, "the gradient of a bias is a sum of 16 bits"
    ready = quantize_input(x_D, weight.rule) if ready is None else ready
    y: Tensor = _Float8Linear.apply(x_D, weight.parameter_FD, bias, ready.columns, weight, handed)
    with torch.no_grad():
        forward = weight.copies(weight.parameter_FD).forward
        weight.rule.operators.multiply(ready.rows, forward, y.dtype, out=y.flatten(0, -2))
        if bias is not None:
            y += bias
    return y


def float8_swiglu_network(
    x_TD: Tensor, gate_up: Float8Weight, down: Float8Weight, ready: RowColQuantized | None = None
) -> Tensor:
    """down(silu(gate(x)) * up(x)) with all six products in 8 bits.

    Args:
        x_TD: tokens.
        gate_up: 2F x D.
        down: D x F.
        ready: as in `float8_linear`.

    Returns:
        y_TD in the dtype of x.
    """
    rule = gate_up.rule
    operators = rule.operators
    ready = quantize_input(x_TD, rule) if ready is None else ready
    with torch.no_grad():
        gate_up_T2F = operators.multiply(ready.rows, gate_up.copies(gate_up.parameter_FD).forward, x_TD.dtype)
    parameters = gate_up.parameter_FD, down.parameter_FD
    y_TD: Tensor = _Float8Network.apply(x_TD, *parameters, ready.columns, gate_up_T2F, gate_up, down)
    with torch.no_grad():
        h_TF = operators.swiglu(gate_up_T2F, None, SWIGLU, recipe_of(rule), rule.forward).rows
        operators.multiply(h_TF, down.copies(down.parameter_FD).forward, y_TD.dtype, out=y_TD)
    return y_TD


class _Float8Linear(torch.autograd.Function):
    """Gives the room for the product; see `float8_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_D: Tensor,
        parameter_FD: Tensor,
        bias: Tensor | None,
        columns: Quantized | None,
        weight: Float8Weight,
        handed: GradientSideChannel | None,
    ) -> Tensor:
        if columns is not None:
            of_weight = (parameter_FD,) if weight.kept is None else ()
            ctx.save_for_backward(columns.values, columns.scales, *of_weight)
            ctx.block = columns.block
        ctx.weight, ctx.shape, ctx.handed = weight, x_D.shape, handed
        return x_D.new_empty(*x_D.shape[:-1], len(parameter_FD))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight: Float8Weight = ctx.weight
        values, scales, *of_weight = ctx.saved_tensors
        both = None if ctx.handed is None else ctx.handed.take()
        if both is None:
            dy = dy.contiguous()
            both = _gradient_in_8_bits(dy.flatten(0, -2), weight.rule)
        dx_D = dweight = None
        if ctx.needs_input_grad[0]:
            backward = weight.copies(*(of_weight or (weight.parameter_FD,))).backward
            dx_D = weight.rule.operators.multiply(both.rows, backward, dy.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            assert both.columns is not None, "asked for"
            dweight = weight.put_gradient(both.columns, Quantized(values, scales, ctx.block))
        dbias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return dx_D, dweight, dbias, None, None, None


class _Float8Network(torch.autograd.Function):
    """Gives the room for the last product; see `float8_swiglu_network`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        gate_up_FD: Tensor,
        down_DF: Tensor,
        columns: Quantized | None,
        gate_up_T2F: Tensor,
        gate_up: Float8Weight,
        down: Float8Weight,
    ) -> Tensor:
        if columns is not None:
            have_copies = gate_up.kept is not None and down.kept is not None
            of_weights = () if have_copies else (gate_up_FD, down_DF)
            ctx.save_for_backward(columns.values, columns.scales, gate_up_T2F, *of_weights)
            ctx.block = columns.block
        ctx.gate_up, ctx.down = gate_up, down
        return x_TD.new_empty(len(x_TD), len(down_DF))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, down = ctx.gate_up, ctx.down
        values, scales, gate_up_T2F, *of_weights = ctx.saved_tensors
        gate_up_FD, down_DF = of_weights or (gate_up.parameter_FD, down.parameter_FD)
        rule = gate_up.rule
        dy = _gradient_in_8_bits(dy_TD.contiguous(), rule)
        dh_TF = rule.operators.multiply(dy.rows, down.copies(down_DF).backward, dy_TD.dtype)
        found = rule.operators.swiglu_backward(
            gate_up_T2F,
            None,
            dh_TF,
            torch.full((1,), len(dh_TF), dtype=torch.int32, device=dh_TF.device),
            SWIGLU,
            recipe_of(rule),
            rule.forward,
            rule.gradient,
        )
        del dh_TF, gate_up_T2F
        dx_TD = dgate_up = ddown = None
        if ctx.needs_input_grad[2]:
            assert dy.columns is not None, "asked for"
            ddown = down.put_gradient(dy.columns, _unaligned(found.h_columns, len(dy_TD)))
        if ctx.needs_input_grad[1]:
            x_columns = Quantized(values, scales, ctx.block)
            dgate_up = gate_up.put_gradient(_unaligned(found.d_gate_up_columns, len(dy_TD)), x_columns)
        if ctx.needs_input_grad[0]:
            backward = gate_up.copies(gate_up_FD).backward
            dx_TD = rule.operators.multiply(found.d_gate_up, backward, dy_TD.dtype)
        return dx_TD, dgate_up, ddown, None, None, None, None


def _gradient_in_8_bits(dy_TF: Tensor, rule: Float8Rule) -> RowColQuantized:
    recipe = recipe_of(rule)
    return rule.operators.quantize_rows(dy_TF, recipe, rule.gradient, columns=recipe.rows)


def _unaligned(columns: Quantized, rows: int) -> Quantized:
    """Columns of one group without the places behind its last row."""
    per_block = columns.block[1] or columns.values.shape[-1]
    blocks = -(-rows // per_block)
    return Quantized(columns.values[:, :rows], columns.scales[:, :blocks], columns.block)
