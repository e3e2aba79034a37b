"""Rows that travel, in 16 bits or in 8.

    16 bits    the rows themselves; an exchange is differentiable
    8 bits     bytes, each row's values and scales (penstock/kernels/float8/quantized.py), and a carrier

Autograd would cast a gradient to the dtype of its tensor, so it sees a carrier: a tensor with the shape and dtype of
the rows and one element of memory. Bytes move forward, the carrier's gradient moves back in 16 bits, by the transpose
of the exchange.

Rows are quantized once, before they leave. Experts that read rows in the same blocks multiply them as they came;
otherwise rows are dequantized on arrival.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.float8.operators import REFERENCE, Float8Operators, Float8Rule
from penstock.kernels.float8.quantized import Quantized, as_quantized
from penstock.kernels.float8.recipes import E4M3, Format, Recipe
from penstock.parallel.collectives import with_transpose

Move = Callable[[Tensor], Tensor]  # rows to rows


@dataclass(frozen=True)
class DispatchPayload:
    """Rows, in 16 bits or packed."""

    x_ND: Tensor  # the rows in 16 bits, or the carrier of `packed`
    packed: Tensor | None = None  # uint8, N x bytes of a row

    def move(self, out: Move, back: Move) -> "DispatchPayload":
        """The same rows elsewhere.

        `out` copies, omits or adds zero rows of any dtype, differentiably; `back` is its transpose, for packed rows.
        """
        if self.packed is None:
            return DispatchPayload(out(self.x_ND))
        # Copy as int64: index_select then moves 8 bytes per element.
        packed = out(self.packed.view(torch.int64)).view(torch.uint8)
        return DispatchPayload(with_transpose(self.x_ND, lambda x: carrier_like(x, packed.shape[0]), back), packed)


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """Format in which rows travel."""

    recipe: Recipe | None = None  # its blocks; None for 16 bits
    form: Format = E4M3  # of rows
    operators: Float8Operators = REFERENCE
    dequantizes: bool = False  # on arrival; else experts multiply rows as they came

    def encode(self, x: Tensor | DispatchPayload) -> DispatchPayload:
        """Quantize rows for the wire. A payload that came part of the way passes unchanged."""
        if isinstance(x, DispatchPayload):
            return x
        return DispatchPayload(
            x, None if self.recipe is None else self.operators.pack_rows(x.detach(), self.recipe, self.form)
        )

    def decode(self, payload: DispatchPayload) -> tuple[Tensor, Quantized | None]:
        """Arrived rows as `ExpertRows` has them: x_ND, and its quantized form if experts multiply that."""
        if payload.packed is None:
            return payload.x_ND, None
        assert self.recipe is not None, "packed rows need a recipe"
        if self.dequantizes:
            # The opened rows' gradient is that of their carrier.
            return with_transpose(payload.x_ND, partial(self._open, packed=payload.packed), lambda dx_ND: dx_ND), None
        return payload.x_ND, as_quantized(payload.packed, payload.x_ND.shape[1], self.recipe, self.form)

    def _open(self, carrier_ND: Tensor, packed: Tensor) -> Tensor:
        assert self.recipe is not None, "packed rows need a recipe"
        return self.operators.unpack_rows(packed, carrier_ND.shape[1], self.recipe, self.form, carrier_ND.dtype)


UNQUANTIZED = WireFormat()  # 16 bits


def wire_format_of(rule: Float8Rule) -> WireFormat:
    return WireFormat(
        recipe=rule.dispatch,
        form=rule.forward,
        operators=rule.operators,
        dequantizes=_rows_by(rule.dispatch) != _rows_by(rule.experts),
    )


def _rows_by(recipe: Recipe | None) -> tuple[object, ...] | None:
    """The part of a recipe that rows depend on; recipes with equal parts make the same rows."""
    return None if recipe is None else (recipe.rows, recipe.scaling)


def carrier_like(x_TD: Tensor, rows: int) -> Tensor:
    """A carrier for `rows` rows like those of `x_TD`: one element of memory, which must not be read."""
    return x_TD.new_empty_strided((rows, x_TD.shape[1]), (0, 0))
