"""Rows on their way to experts, in 16 bits or in 8, and what becomes of them at both ends.

    16 bits    the rows themselves; a move is differentiable
    8 bits     bytes, each row's values and scales (penstock/kernels/float8/quantized.py), and beside them a carrier

Bytes have no gradient, and autograd would cast a gradient to the dtype of what it belongs to. So the graph sees a
carrier instead: a tensor with the shape and dtype of the rows, and one number of memory. Bytes move forward; the
carrier's gradient moves back in 16 bits. Moves copy rows, so their transposes are what `combine` does with outputs, and
a dispatcher has both at hand. Gradients of outputs, which move as rows do, may be packed too: past the graph, in a box
(penstock/kernels/float8/gradient_side_channel.py).

Rows are quantized before they leave, once, and nobody quantizes them again where their experts read rows in the same
blocks. Where these do not, rows are dequantized as soon as they are there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels.float8.gradient_side_channel import carrier_of
from penstock.kernels.float8.operators import REFERENCE, Float8Operators, Float8Rule
from penstock.kernels.float8.quantized import Quantized, as_quantized
from penstock.kernels.float8.recipes import E4M3, Format, Recipe

Move = Callable[[Tensor], Tensor]
"""Rows to rows."""


@dataclass(frozen=True)
class DispatchPayload:
    """Rows.

    Attributes:
        x_ND: in 16 bits; or what takes the gradient of packed ones, which nobody reads.
        packed: uint8, N x the bytes of a row, or None.
    """

    x_ND: Tensor
    packed: Tensor | None = None

    def move(self, out: Move, back: Move) -> "DispatchPayload":
        """The same rows elsewhere.

        Args:
            out: copies rows of any dtype, or leaves them out, or makes some of zeros; differentiable.
            back: its transpose, on gradients in 16 bits. Asked only if bytes went out: else `out` knows its own.
        """
        if self.packed is None:
            return DispatchPayload(out(self.x_ND))
        # Who copies number by number then copies 8 bytes at a time.
        packed = out(self.packed.view(torch.int64)).view(torch.uint8)
        carrier_ND: Tensor = _MoveCarrier.apply(self.x_ND, packed.shape[0], back)
        return DispatchPayload(carrier_ND, packed)


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """How rows travel.

    Attributes:
        recipe: in whose blocks they are quantized; None sends them as they are.
        form: of the values.
        gradient: likewise, where the rows are gradients of outputs.
        operators: quantize and dequantize.
        dequantizes: where they arrive they are dequantized; else experts multiply them as they came.
    """

    recipe: Recipe | None = None
    form: Format = E4M3
    gradient: Format = E4M3
    operators: Float8Operators = REFERENCE
    dequantizes: bool = False

    def encode(self, x: Tensor | DispatchPayload) -> DispatchPayload:
        """Rows, ready to travel.

        Args:
            x: x_TD; or what has come part of the way, which goes on as it is.
        """
        if isinstance(x, DispatchPayload):
            return x
        return DispatchPayload(
            x, None if self.recipe is None else self.operators.pack_rows(x.detach(), self.recipe, self.form)
        )

    def decode(self, payload: DispatchPayload) -> tuple[Tensor, Quantized | None]:
        """Rows that arrived, as `ExpertRows` has them: x_ND, and what experts multiply instead of it."""
        if payload.packed is None:
            return payload.x_ND, None
        assert self.recipe is not None, "packed rows for somebody who knows no recipe"
        if self.dequantizes:
            opened_ND: Tensor = _Dequantize.apply(payload.x_ND, payload.packed, self)
            return opened_ND, None
        return payload.x_ND, as_quantized(payload.packed, payload.x_ND.shape[1], self.recipe, self.form)

    def encode_gradients(self, dy_TD: Tensor) -> Tensor:
        """Gradients of outputs, packed for experts that expect them so: uint8, T x the bytes of a row."""
        assert self.recipe is not None, "gradients are packed where rows are"
        return self.operators.pack_rows(dy_TD, self.recipe, self.gradient)

    def decode_gradients(self, packed: Tensor, width: int) -> Quantized:
        """Packed gradients that arrived, as experts multiply them.

        Args:
            packed: uint8, rows x the bytes of one.
            width: numbers of a row.
        """
        assert self.recipe is not None, "packed gradients for somebody who knows no recipe"
        return as_quantized(packed, width, self.recipe, self.gradient)


UNQUANTIZED = WireFormat()
"""16 bits."""


def wire_format_of(rule: Float8Rule) -> WireFormat:
    """How rows travel in a layer.

    Args:
        rule: of the layer.
    """
    dequantizes = _rows_by(rule.dispatch) != _rows_by(rule.experts)
    forms = {"form": rule.forward, "gradient": rule.gradient}
    return WireFormat(recipe=rule.dispatch, operators=rule.operators, dequantizes=dequantizes, **forms)


def _rows_by(recipe: Recipe | None) -> tuple[object, ...] | None:
    """What of a recipe a row shows; two that differ only in what they do along other dims make the same rows."""
    return None if recipe is None else (recipe.rows, recipe.scaling)


def carrier_like(x_TD: Tensor, rows: int) -> Tensor:
    """A tensor with as many rows, each like those of `x_TD`, and one number of memory; nobody reads it."""
    return carrier_of((rows, x_TD.shape[1]), x_TD)


class _MoveCarrier(torch.autograd.Function):
    """Carriers of rows that moved; the gradient moves back."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, rows: int, back: Move) -> Tensor:
        ctx.back = back
        return carrier_like(x_ND, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient_ND), None, None


class _Dequantize(torch.autograd.Function):
    """Packed rows in the dtype of their carrier, which takes their gradient."""

    @staticmethod
    def forward(ctx: Any, carrier_ND: Tensor, packed: Tensor, wire_format: WireFormat) -> Tensor:
        width, dtype = carrier_ND.shape[1], carrier_ND.dtype
        opened_ND: Tensor = wire_format.operators.unpack_rows(
            packed, width, wire_format.recipe, wire_format.form, dtype
        )
        return opened_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, None, None]:
        return gradient_ND, None, None
