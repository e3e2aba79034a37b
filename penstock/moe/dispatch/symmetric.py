"""The promise kept inside one node by kernels that write into the other GPUs' memory.

    dispatch   choices and weights pushed to all ranks; rows pushed once to each rank that holds an expert of theirs
               slots of all ranks' tokens ordered by OUR experts, while rows are still on their way
               rows copied out of the slot that they came in
    experts    read them through the index
    combine    for each row that came, the sum of what our experts gave for it pushed back; the ranks' sums added up

Backward is the same the other way: gradients of the outputs are pushed to the experts like rows (the choices are known
there by now), and those of the rows and weights are pushed back and added up. Shapes depend on nothing but the number
of tokens and the `Room`, the host reads nothing, and no collective is called.

It is not offered by any configuration yet, because it has run in simulation only and on no GPU.

Simpler than DeepEP: a row's place at the receiver is its token's number, so there are no queues, counts or handles; the
price is memory for all tokens of all ranks, and one copy of what arrived.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels.operators import Operators
from penstock.kernels.reference import RowOrder
from penstock.kernels.symmetric import (
    PUSH_LAUNCH,
    RETURN_LAUNCH,
    Homes,
    PersistentLaunch,
    Returned,
    gather_rows,
    push_metadata,
    push_rows,
    return_rows,
    sum_ranks,
)
from penstock.layout.experts import ExpertPlacement
from penstock.moe.dispatch.all_gather import first_rows
from penstock.moe.dispatch.contract import ExpertRows, Receipt
from penstock.moe.dispatch.gathers import pick_kept
from penstock.moe.dispatch.room import Room
from penstock.moe.routing import Routing
from penstock.parallel.activations.region import is_replaying
from penstock.parallel.symmetric import Channel, Lane, Section, SymmetricBuffers


@dataclass(frozen=True)
class Links:
    """What both directions need.

    Attributes:
        buffers: where rows travel through.
        homes: of the experts.
        push: how rows are sent to experts.
        back: how they are sent home.
    """

    buffers: SymmetricBuffers
    homes: Homes
    push: PersistentLaunch = PUSH_LAUNCH
    back: PersistentLaunch = RETURN_LAUNCH


@dataclass(frozen=True)
class Trip(Receipt):
    """A receipt for rows that were pushed. Its order is that of all ranks' slots, as our experts see them.

    Attributes:
        experts_TK: our own choices.
        index_R: the row that came, of each place.
    """

    experts_TK: Tensor
    index_R: Tensor


@dataclass(frozen=True)
class SymmetricDispatcher:
    """Pushes rows to experts and back; each rank of the axis has the same number of tokens.

    Attributes:
        placement: who holds which experts.
        links: the buffers, and how the kernels that use them are launched.
        operators: kernels to run on.
        room: says how many rows the experts have room for; None is the worst case.
    """

    placement: ExpertPlacement
    links: Links
    operators: Operators
    room: Room | None = None

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[ExpertRows, Receipt]:
        """See `Dispatcher.dispatch`. All ranks of the axis call it."""
        gathered = _Dispatch.apply(x_TD, routing.weights_TK, routing.experts_TK, self.links, self._order)
        x_ND, weights_NK, *order_tensors = gathered
        order = RowOrder(*order_tensors)
        index_R = order.slots_R // order.places_TK.shape[1]
        weights_R = pick_kept(weights_NK, order)
        rows = ExpertRows(x_ND, index_R, weights_R, order.counts_E, places_NK=order.places_TK)
        return rows, Trip(order, routing.experts_TK, index_R)

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        """See `Dispatcher.combine`. All ranks of the axis call it."""
        assert isinstance(receipt, Trip), f"not a receipt of this dispatcher: {receipt}"
        y_TD: Tensor = _Combine.apply(y_RD, receipt, self.links)
        return y_TD

    def _order(self, experts_NK: Tensor) -> RowOrder:
        """Places of all ranks' slots among our experts, as many as there is room for."""
        own = self.placement.experts_of(self.links.buffers.peers.rank)
        is_own_NK = (experts_NK >= own.start) & (experts_NK < own.stop)
        own_NK = torch.where(is_own_NK, experts_NK - own.start, len(own))
        order = self.operators.order_rows(own_NK, len(own))
        if self.room is None:
            return first_rows(order, experts_NK.shape[0] * min(experts_NK.shape[1], len(own)))
        rows = self.room.rows(*experts_NK.shape)
        if self.room.training and not is_replaying():
            self.room.left_out += (order.counts_E.sum() - rows).clamp(min=0)
        return first_rows(order, rows)


def links_of(placement: ExpertPlacement, buffers: SymmetricBuffers) -> Links:
    """Links of a layer with launches that were chosen beforehand.

    Args:
        placement: of the layer's experts; on as many ranks as the buffers.
        buffers: may be shared by all layers.
    """
    assert placement.places == buffers.peers.size, f"{placement} on {buffers.peers.size} ranks"
    return Links(buffers, Homes(per_rank=placement.per_place, parts=placement.expert_tensor))


def _push(x_TD: Tensor, experts_TK: Tensor, slot: int, links: Links) -> None:
    """Our rows into everybody's slot of the way out."""
    buffers = links.buffers
    offset = buffers.sizes.offset(Section.OUT_ROWS, slot)
    push_rows(x_TD, experts_TK, links.homes, buffers.peers, offset, launch=links.push)
    buffers.signal(Channel.ROWS)


def _arrived(like: Tensor, section: Section, slot: int, links: Links) -> Tensor:
    """Our slot, as rows of all ranks' tokens."""
    received = links.buffers.peers.size * like.shape[0]
    return links.buffers.view(section, slot, (received, like.shape[1]), like.dtype)


def _bring_back(returned: Returned, order: RowOrder, experts_TK: Tensor, links: Links) -> tuple[Tensor, Tensor | None]:
    """One row (and the scalars) back for each that came; what came back to us, summed."""
    buffers, sizes = links.buffers, links.buffers.sizes
    slot = buffers.take(Lane.BACK)
    rows_at, scalars_at = sizes.offset(Section.BACK_ROWS, slot), sizes.offset(Section.SCALARS, slot)
    return_rows(returned, order.places_TK, order.counts_E, buffers.peers, rows_at, scalars_at, launch=links.back)
    buffers.signal(Channel.BACK)
    buffers.wait(Channel.BACK)
    received = buffers.peers.size * experts_TK.shape[0]
    shape = (received, returned.rows.shape[1])
    parts_ND = buffers.view(Section.BACK_ROWS, slot, shape, returned.rows.dtype)
    scalars_NK = None
    if returned.scalars_NK is not None:
        scalars_NK = buffers.view(Section.SCALARS, slot, (received, experts_TK.shape[1]), torch.float32)
    return sum_ranks(parts_ND, experts_TK, links.homes, scalars_NK)


class _Dispatch(torch.autograd.Function):
    """Rows and weights of all ranks' tokens, and the order of ours; backward brings gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        links: Links,
        make_order: Callable[[Tensor], RowOrder],
    ) -> tuple[Tensor, ...]:
        buffers, sizes = links.buffers, links.buffers.sizes
        slot = buffers.take(Lane.OUT)
        ids_at, weights_at = sizes.offset(Section.IDS, slot), sizes.offset(Section.WEIGHTS, slot)
        push_metadata(experts_TK, weights_TK, buffers.peers, ids_at, weights_at)
        buffers.signal(Channel.META)
        _push(x_TD, experts_TK, slot, links)

        # Only the choices are needed here, so rows of other ranks may still be on their way.
        buffers.wait(Channel.META)
        order = make_order(_arrived(experts_TK.int(), Section.IDS, slot, links))
        weights_NK = _arrived(weights_TK, Section.WEIGHTS, slot, links).clone()

        buffers.wait(Channel.ROWS)
        x_ND = _arrived(x_TD, Section.OUT_ROWS, slot, links).clone()

        ctx.save_for_backward(experts_TK, *order)
        ctx.links = links
        ctx.mark_non_differentiable(*order)
        return x_ND, weights_NK, *order

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dx_ND: Tensor, dweights_NK: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        experts_TK, *order = ctx.saved_tensors
        returned = Returned(rows=dx_ND, is_summed=False, scalars_NK=dweights_NK)
        dx_TD, dweights_TK = _bring_back(returned, RowOrder(*order), experts_TK, ctx.links)
        return dx_TD, dweights_TK, None, None, None


class _Combine(torch.autograd.Function):
    """Outputs home and summed; backward pushes their gradients to the experts."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, trip: Trip, links: Links) -> Tensor:
        ctx.save_for_backward(trip.experts_TK, trip.index_R, trip.order.counts_E)
        ctx.links = links
        y_TD, _ = _bring_back(Returned(rows=y_RD, is_summed=True), trip.order, trip.experts_TK, links)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None]:
        experts_TK, index_R, counts_e = ctx.saved_tensors
        links, buffers = ctx.links, ctx.links.buffers
        slot = buffers.take(Lane.OUT)
        _push(dy_TD, experts_TK, slot, links)
        buffers.wait(Channel.ROWS)
        dy_RD = gather_rows(_arrived(dy_TD, Section.OUT_ROWS, slot, links), index_R, counts_e)
        return dy_RD, None, None
