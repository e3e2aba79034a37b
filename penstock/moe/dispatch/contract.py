"""The contract of every token dispatcher, and its simplest form: one rank that holds all experts.

`dispatch` brings each token's row to the experts that it chose; `combine` brings the experts' outputs back and sums
them for each token. All that `combine` needs is in the metadata, a frozen value: a forward pass changes no state of the
dispatcher, so several micro-batches or layers may be in flight.

Rows carry their routing weights to the expert, which applies them before its second product or to its input, so
`combine` is a plain sum. An expert may be on several ranks, and a rank may hold any experts.

Rows on their way (`DispatchPayload`) are in one of two formats:

    16 bits    the rows themselves; an exchange is differentiable
    8 bits     bytes, each row's values and scales (penstock/kernels/float8/quantized.py), and a carrier

Autograd would cast a gradient to the dtype of its tensor, so it sees a carrier: a tensor with the shape and dtype of
the rows and one element of memory. Bytes move forward, the carrier's gradient moves back in 16 bits, by the transpose
of the exchange.

Rows are quantized once, before they leave. Experts that read rows in the same blocks multiply them as they came;
otherwise rows are dequantized on arrival.

The gradient of each gather is a gather too, because the inverse index is known. PyTorch's own uses atomics or a sort:
slow, and not deterministic on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from penstock.base.spans import Span
from penstock.config.dispatcher import DispatcherName
from penstock.kernels.expert_parts import ReplicaSlots
from penstock.kernels.float8.operators import REFERENCE, Float8Operators, Float8Rule
from penstock.kernels.float8.quantized import E4M3, Format, Quantized, Recipe, as_quantized
from penstock.kernels.operators import Operators
from penstock.kernels.reference import RowOrder
from penstock.moe.balance import Routing, SortedSlots
from penstock.parallel.collectives import with_transpose
from penstock.parallel.spans import span

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


def reorder(rows_R: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Permute dim 0 by index_R, int64 source row of each place; inverse_R is its inverse."""
    return with_transpose(rows_R, lambda rows: rows.index_select(0, index_R), _select, inverse_R)


def _select(gradient_R: Tensor, inverse_R: Tensor) -> Tensor:
    return gradient_R.index_select(0, inverse_R)


def pick_kept(values_TK: Tensor, order: RowOrder) -> Tensor:
    """values_R: the value of each place's slot, zero at empty places. The gradient is zero at dropped slots."""
    is_used_R = torch.arange(order.slots_R.numel(), device=order.slots_R.device) < order.counts_E.sum()

    def pick(values_TK: Tensor) -> Tensor:
        return torch.where(is_used_R, values_TK.reshape(-1).index_select(0, order.slots_R), 0)

    return with_transpose(values_TK, pick, _pick_back, order.places_TK, order.counts_E)


def _pick_back(gradient_R: Tensor, places_TK: Tensor, counts_E: Tensor) -> Tensor:
    picked_TK = gradient_R.index_select(0, places_TK.reshape(-1)).view_as(places_TK)
    return torch.where(places_TK < counts_E.sum(), picked_TK, 0)  # unused places may hold NaN


def spread(x_TD: Tensor, order: RowOrder, operators: Operators) -> Tensor:
    """x_RD: each token's row at the places of its slots, dropped ones too; the gradient sums over the kept places."""
    tokens_R = order.slots_R // order.places_TK.shape[1]

    def unpermute(dx_RD: Tensor, *saved: Tensor) -> Tensor:
        return operators.unpermute(dx_RD, RowOrder(*saved))

    return with_transpose(x_TD, lambda x: x.index_select(0, tokens_R), unpermute, *order)


def spread_padded(x_TD: Tensor, tokens_R: Tensor, places_TK: Tensor) -> Tensor:
    """x_RD: each token's row at its places (int64, R for none). tokens_R is T at empty places, which are zero."""
    return with_transpose(x_TD, lambda x: _rows_or_zero(x, tokens_R), _sum_at_places, places_TK)


def collect_padded(y_RD: Tensor, tokens_R: Tensor, places_TK: Tensor) -> Tensor:
    """Sum the rows at each token's places in float32, in the dtype of y: the transpose of `spread_padded`."""
    return with_transpose(y_RD, lambda y: _sum_at_places(y, places_TK), _rows_or_zero, tokens_R)


def _rows_or_zero(x_TD: Tensor, tokens_R: Tensor) -> Tensor:
    return torch.cat((x_TD, x_TD.new_zeros(1, x_TD.shape[1]))).index_select(0, tokens_R)  # past the last row: zeros


def _sum_at_places(y_RD: Tensor, places_TK: Tensor) -> Tensor:
    total_TD = y_RD.new_zeros(places_TK.shape[0], y_RD.shape[1], dtype=torch.float32)
    for places_T in places_TK.unbind(1):  # one choice at a time: all K rows of all tokens would need K times the memory
        total_TD += _rows_or_zero(y_RD, places_T)
    return total_TD.to(y_RD.dtype)


@dataclass(frozen=True)
class ExpertRows:
    """Input of the experts of this rank: N source rows, and R places that read them."""

    x_ND: Tensor  # in the compute dtype; if there is `quantized`, it only has shape and dtype, and takes the gradient
    index_R: Tensor | None  # int64 source row of each place; None if row i is place i
    weights_R: Tensor  # float32 routing weight of each place, differentiable; 0 at padding
    counts_e: Tensor  # int32 places of each local expert, in order; places past their sum are empty
    places_NK: Tensor | None = None  # int64 inverse of `index_R`; None if rows have different numbers of places
    # Source rows in 8 bits, each with its scales behind it, in the recipe of the experts, if they travelled so. Rows
    # that no place reads may hold anything.
    quantized: Quantized | None = None
    only_last: bool = False  # the only empty place that may be read is the very last one
    # Weights of the last experts of `counts_e`, which are replicas of other ranks' experts; None if there are none.
    replicas: ReplicaSlots | None = None


# FSDP2 frees gathered experts once their inputs have gradients. Before torch 2.13 it finds these with `tree_flatten`
# alone, which does not look into a dataclass that it does not know: experts would stay gathered until backward ends.
register_dataclass(ExpertRows)


@dataclass(frozen=True)
class DispatchMetadata:
    """State that `combine` needs from its `dispatch`: places of the slots among the rows that the experts return.

    A dropped slot's place lies past the last expert's, so it counts as zero.
    """

    order: RowOrder


class Dispatcher(Protocol):
    """Exchanges rows between tokens and experts. All ranks that share the experts call both methods together."""

    @property
    def name(self) -> DispatcherName:
        """The way in which rows travel."""
        ...

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """Bring rows to the experts. Returns the rows of this rank's experts, and the metadata for `combine`."""
        ...

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        """Sum the experts' outputs for each token. Returns y_TD; zero for a token whose slots were all dropped."""
        ...


@runtime_checkable
class SlotSorter(Protocol):
    """A dispatcher that begins with a sort of this rank's slots, which the caller may run earlier."""

    def sorted_slots(self, routing: Routing) -> SortedSlots:
        """The sort: no collective, and no wait of the host with our kernels. `dispatch` prefers `Routing.sorted`."""
        ...


@dataclass(frozen=True)
class LocalDispatcher:
    """Sorts slots by expert; experts read rows from where the tokens are, in `wire_format`."""

    name: DispatcherName = field(default="local", init=False)

    experts: int
    operators: Operators
    wire_format: WireFormat = UNQUANTIZED

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        slots = routing.sorted or self.sorted_slots(routing)
        order, tokens_R = slots.order, slots.order.slots_R // routing.experts_TK.shape[1]  # slot -> its token
        x_ND, quantized = self.wire_format.decode(self.wire_format.encode(x_TD))
        rows = ExpertRows(x_ND, tokens_R, slots.weights_R, order.counts_E, order.places_TK, quantized)
        return rows, DispatchMetadata(order)

    def sorted_slots(self, routing: Routing) -> SortedSlots:
        return sort_slots(routing, self.experts, self.operators)

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        return self.operators.unpermute(y_RD, metadata.order)


def sort_slots(routing: Routing, experts: int, operators: Operators) -> SortedSlots:
    with span(Span.SORT):
        order = operators.order_rows(routing.experts_TK, experts)
        weights_R = reorder(routing.weights_TK.reshape(-1), order.slots_R, order.places_TK.reshape(-1))
        return SortedSlots(order, weights_R)
