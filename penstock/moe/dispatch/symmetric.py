"""Symmetric dispatch inside one node: our kernels write rows straight into the memory of the other GPUs.

    dispatch   push choices and weights to all ranks; push each row once to each rank that holds one of its experts
               beside it: sort the slots of all ranks' tokens by OUR experts once the choices are here;
               copy rows out of the receive buffer, chunk by chunk
    experts    read rows through the index
    combine    for each row that came, push the sum of our experts' outputs back
               beside it: add up the ranks' sums, chunk by chunk

Backward mirrors this: gradients of outputs are pushed straight to their places, because the choices are known by now.
Gradients of rows and weights are pushed back and added up. Rows may travel in 8 bits; all else has 16 bits. Shapes
depend only on the number of tokens and the `RowCapacity`, and the host reads nothing; without a capacity it reads how
many rows arrived. There is no collective.

Simpler than DeepEP: a row's place at the receiver is its token's number, so there are no queues, counts or handles. The
price is memory for all tokens of all ranks, and one copy of the arrived rows, made while others are still on their way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.config.dispatcher import DispatcherName
from penstock.kernels.permute import LocalOrder, order_local_rows
from penstock.kernels.reference import RowOrder
from penstock.kernels.symmetric import (
    PUSH_LAUNCH,
    RETURN_LAUNCH,
    SUM_ALL_LAUNCH,
    SUM_LAUNCH,
    TAKE_ALL_LAUNCH,
    TAKE_LAUNCH,
    ChannelWait,
    CombineBuffers,
    ExpertRanks,
    LocalPlaces,
    PersistentLaunch,
    ReturnPayload,
    RoutingPayload,
    TokenChunks,
    push_rows,
    return_rows,
    sum_ranks,
    take_rows,
)
from penstock.layout.grid import ExpertPlacement
from penstock.moe.balance import Routing
from penstock.moe.dispatch.contract import (
    UNQUANTIZED,
    DispatchMetadata,
    DispatchPayload,
    ExpertRows,
    WireFormat,
    carrier_like,
)
from penstock.moe.dispatch.row_capacity import READ, RowCapacity, SplitSizes
from penstock.parallel.recompute import is_recomputing
from penstock.parallel.symmetric import BufferSection, Channel, SymmetricBuffers, TransferDirection, chunks_for


@dataclass(frozen=True)
class SymmetricTransport:
    """Buffers and kernel launches of both directions."""

    buffers: SymmetricBuffers
    homes: ExpertRanks
    push: PersistentLaunch = PUSH_LAUNCH  # sends rows to experts
    take: PersistentLaunch = TAKE_LAUNCH  # copies rows out as they come
    take_all: PersistentLaunch = TAKE_ALL_LAUNCH  # the same once all are there
    back: PersistentLaunch = RETURN_LAUNCH  # sends outputs back
    sum: PersistentLaunch = SUM_LAUNCH  # adds outputs up as they come
    sum_all: PersistentLaunch = SUM_ALL_LAUNCH  # the same once all are there
    chunks: int = 0  # of a rank's tokens; 0 asks `chunks_for`
    by_engines: bool = False  # copy engines send all rows to all ranks, in one chunk

    def cut(self, rows_T: Tensor) -> TokenChunks:
        tokens, width = rows_T.shape
        count = 1 if self.by_engines else self.chunks
        return TokenChunks.cut(tokens, count) if count else chunks_for(tokens, width * rows_T.element_size())

    def signals(self, launch: PersistentLaunch, rows: int) -> int:
        """Increase of a flag when rows have been written."""
        return 1 if self.by_engines else launch.programs_for(rows)


@dataclass(frozen=True)
class SymmetricMetadata(DispatchMetadata):
    """Its order is that of all ranks' slots, as our experts see them."""

    experts_TK: Tensor

    @property
    def places(self) -> LocalPlaces:
        return LocalPlaces(places_NK=self.order.places_TK, counts_e=self.order.counts_E)


@dataclass(frozen=True)
class SymmetricDispatcher:
    """Pushes rows to experts and back; each rank of the axis has the same number of tokens."""

    name: DispatcherName = field(default="symmetric", init=False)

    placement: ExpertPlacement
    transport: SymmetricTransport
    row_capacity: RowCapacity | None = None  # None: the host reads the row count
    counts: SplitSizes = READ
    wire_format: WireFormat = UNQUANTIZED

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """See `Dispatcher.dispatch`. All ranks of the axis call it."""
        payload, choices = self.wire_format.encode(x_TD), (routing.weights_TK, routing.experts_TK)
        x_ND, packed, *arrived = _Dispatch.apply(payload.x_ND, payload.packed, *choices, self.transport, self._order)
        arrivals = LocalOrder(*arrived)
        order = RowOrder(arrivals.slots_R, arrivals.places_NK, arrivals.counts_e)
        x_ND, quantized = self.wire_format.decode(DispatchPayload(x_ND, packed))
        placed = (arrivals.index_R, arrivals.weights_R, arrivals.counts_e, arrivals.places_NK)
        rows = ExpertRows(x_ND, *placed, quantized, only_last=True)
        return rows, SymmetricMetadata(order, routing.experts_TK)

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        """See `Dispatcher.combine`. All ranks of the axis call it."""
        assert isinstance(metadata, SymmetricMetadata), f"not a metadata of this dispatcher: {metadata}"
        y_TD: Tensor = _Combine.apply(y_RD, metadata, self.transport)
        return y_TD

    def _order(self, experts_NK: Tensor, weights_NK: Tensor) -> LocalOrder:
        """Places of all ranks' slots among our experts, up to the capacity."""
        local_experts, (tokens, top_k) = self.placement.experts_of(self.transport.buffers.peers.rank), experts_NK.shape
        if self.row_capacity is None:
            arrivals = order_local_rows(experts_NK, weights_NK, local_experts, tokens * min(top_k, len(local_experts)))
            share = tokens * top_k / self.placement.expert
            rows = self.counts.total(arrivals.counts_e, share, tokens * top_k)
            slots_R, index_R, weights_R = (values_R[: rows + 1] for values_R in arrivals[:3])  # + 1: dropped slots
            return LocalOrder(slots_R, index_R, weights_R, arrivals.places_NK.clamp(max=rows), arrivals.counts_e)
        is_counted = self.row_capacity.training and not is_recomputing()
        meter = self.row_capacity.meter if is_counted else None
        return order_local_rows(experts_NK, weights_NK, local_experts, self.row_capacity.rows(tokens, top_k), meter)


def transport_of(
    placement: ExpertPlacement, buffers: SymmetricBuffers, programs: int = 0, *, by_engines: bool = False
) -> SymmetricTransport:
    """The transport of a layer, with the measured launches; all layers may share the buffers.

    All ranks take the same number of `programs`: 0 is the fastest, fewer leave multiprocessors to compute. A plan's
    buffers have no mapped tensors, so there kernels are counted even with `by_engines`.
    """
    assert placement.places == buffers.peers.size, f"{placement} on {buffers.peers.size} ranks"
    homes = ExpertRanks(per_rank=placement.per_place, parts=placement.expert_tensor)
    transport = SymmetricTransport(buffers, homes, by_engines=by_engines and bool(buffers.memories))
    if not programs:
        return transport
    names = ("push", "take", "take_all", "back", "sum", "sum_all")
    return replace(transport, **{name: replace(getattr(transport, name), programs=programs) for name in names})


def _arrived(
    shape: tuple[int, int], dtype: torch.dtype, section: BufferSection, slot: int, transport: SymmetricTransport
) -> Tensor:
    return transport.buffers.view(section, slot, (transport.buffers.peers.size * shape[0], shape[1]), dtype)


def _pusher(
    rows_T: Tensor, experts_TK: Tensor, slot: int, transport: SymmetricTransport, choices: RoutingPayload | None = None
) -> Callable[[TokenChunks], None]:
    """Launches the kernel that writes our rows into the receive slots of all ranks, choices first."""
    buffers = transport.buffers
    offsets = buffers.sizes.offset(BufferSection.OUT_ROWS, slot), buffers.flags_at(Channel.ROWS)

    def send(chunks: TokenChunks) -> None:
        push_rows(rows_T, experts_TK, transport.homes, buffers.peers, offsets, chunks, choices, launch=transport.push)

    return send


def _copier(rows_T: Tensor, slot: int, transport: SymmetricTransport) -> Callable[[TokenChunks], None]:
    def send(chunks: TokenChunks) -> None:
        transport.buffers.copy_to_others(BufferSection.OUT_ROWS, slot, lambda peer: rows_T, Channel.ROWS)

    return send


def _take(
    own_T: Tensor, slot: int, places: LocalPlaces, out: Tensor, transport: SymmetricTransport, *, is_spread: bool
) -> None:
    """Copy the rows of all ranks out of the slot; `own_T` are our own."""
    buffers, tokens = transport.buffers, own_T.shape[0]
    rows_N = _arrived((tokens, own_T.shape[1]), own_T.dtype, BufferSection.OUT_ROWS, slot, transport)

    def take(awaited: ChannelWait, chunks: TokenChunks) -> None:
        rank, launch = buffers.peers.rank, transport.take_all if transport.by_engines else transport.take
        take_rows(rows_N, own_T, places, out, awaited, chunks, rank=rank, is_spread=is_spread, launch=launch)

    signals = transport.signals(transport.push, tokens)
    if transport.by_engines:  # the stream waits, so that `take_all` starts when all rows are there
        buffers.hold(Channel.ROWS, signals)
    buffers.read(take, Channel.ROWS, signals, transport.cut(own_T))


def _return_rows(
    returned: ReturnPayload, places: LocalPlaces, experts_TK: Tensor, transport: SymmetricTransport
) -> CombineBuffers:
    """Send one row (and the scalars) back for each that came, and sum those for our tokens."""
    buffers, tokens = transport.buffers, len(experts_TK)
    slot = buffers.take(TransferDirection.BACK)
    sizes, home = buffers.sizes, _home(returned, experts_TK, slot, transport)
    flags_at = buffers.flags_at(Channel.BACK)
    offsets = sizes.offset(BufferSection.BACK_ROWS, slot), sizes.offset(BufferSection.SCALARS, slot), flags_at
    chunks, signals = transport.cut(home.y_TD), transport.signals(transport.back, buffers.peers.size * tokens)
    staged_ND = None  # rows in the order of all ranks' tokens, from which engines copy
    if transport.by_engines:
        rows = returned.rows.contiguous()
        staged_ND = rows.new_empty(buffers.peers.size * tokens, rows.shape[1]) if returned.is_summed else rows
        home = replace(home, own_TD=staged_ND.split(tokens)[buffers.peers.rank], rank=buffers.peers.rank)

    def send(chunks: TokenChunks) -> None:
        if staged_ND is None or returned.is_summed or returned.scalars_R is not None:
            return_rows(returned, places, buffers.peers, offsets, chunks, staged_ND=staged_ND, launch=transport.back)
        if staged_ND is not None:
            buffers.copy_to_others(BufferSection.BACK_ROWS, slot, staged_ND.split(tokens).__getitem__, Channel.BACK)

    def add(awaited: ChannelWait, chunks: TokenChunks) -> None:
        launch = transport.sum_all if transport.by_engines else transport.sum
        sum_ranks(home, experts_TK, transport.homes, awaited, chunks, launch=launch)

    with buffers.transfer(send, chunks):
        if transport.by_engines:
            buffers.hold(Channel.BACK, signals)
        buffers.read(add, Channel.BACK, signals, chunks)
    return home


def _home(returned: ReturnPayload, experts_TK: Tensor, slot: int, transport: SymmetricTransport) -> CombineBuffers:
    tokens, width = len(experts_TK), returned.rows.shape[1]
    y_TD = returned.rows.new_empty(tokens, width)
    parts_ND = _arrived((tokens, width), y_TD.dtype, BufferSection.BACK_ROWS, slot, transport)
    if returned.scalars_R is None:
        return CombineBuffers(parts_ND=parts_ND, y_TD=y_TD)
    scalars_NK = _arrived((tokens, experts_TK.shape[1]), torch.float32, BufferSection.SCALARS, slot, transport)
    scalars_TK = returned.scalars_R.new_empty(experts_TK.shape)
    return CombineBuffers(parts_ND=parts_ND, y_TD=y_TD, scalars_NK=scalars_NK, scalars_TK=scalars_TK)


class _Dispatch(torch.autograd.Function):
    """Rows of all ranks' tokens, with order and weights of our slots. Backward returns row gradients in 16 bits.

    Packed rows come as bytes beside their carrier (penstock/moe/dispatch/contract.py).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        packed: Tensor | None,
        weights_TK: Tensor,
        experts_TK: Tensor,
        transport: SymmetricTransport,
        make_order: Callable[[Tensor, Tensor], LocalOrder],
    ) -> tuple[Tensor | None, ...]:
        buffers, sizes, shape = transport.buffers, transport.buffers.sizes, (experts_TK.shape[0], experts_TK.shape[1])
        slot = buffers.take(TransferDirection.OUT)
        own_T = (x_TD if packed is None else packed).contiguous()
        rows_N = own_T.new_empty(buffers.peers.size * shape[0], own_T.shape[1])
        choices = RoutingPayload(
            weights_TK=weights_TK,
            ids_offset=sizes.offset(BufferSection.IDS, slot),
            weights_offset=sizes.offset(BufferSection.WEIGHTS, slot),
            flags_offset=buffers.flags_at(Channel.CHOICES),
        )
        push, chunks = _pusher(own_T, experts_TK, slot, transport, choices), transport.cut(own_T)
        with buffers.transfer(_copier(own_T, slot, transport) if transport.by_engines else push, chunks):
            if transport.by_engines:
                # Not before the rows: engines need no multiprocessor, and may be done before one is free for this.
                push(chunks._replace(last=chunks.first))
            buffers.wait(Channel.CHOICES, transport.push.programs_for(shape[0]))
            arrivals = make_order(
                _arrived(shape, torch.int32, BufferSection.IDS, slot, transport),
                _arrived(shape, torch.float32, BufferSection.WEIGHTS, slot, transport),
            )
            places = LocalPlaces(places_NK=arrivals.places_NK, counts_e=arrivals.counts_e)
            _take(own_T, slot, places, rows_N, transport, is_spread=False)

        ctx.save_for_backward(experts_TK, arrivals.places_NK, arrivals.counts_e)
        ctx.transport = transport
        # Else autograd fills a gradient of zeros for everything that has none, packed rows too.
        ctx.set_materialize_grads(False)
        integers = (arrivals.slots_R, arrivals.index_R, arrivals.places_NK, arrivals.counts_e)
        if packed is None:
            ctx.mark_non_differentiable(*integers)
            return rows_N, None, *arrivals
        ctx.mark_non_differentiable(*integers, rows_N)
        return carrier_like(x_TD, rows_N.shape[0]), rows_N, *arrivals

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dx_ND: Tensor | None, _packed: None, _slots: None, _index: None, dweights_R: Tensor | None, *_: None
    ) -> tuple[Tensor, None, Tensor | None, None, None, None]:
        experts_TK, places_NK, counts_e = ctx.saved_tensors
        assert dx_ND is not None, "experts give their rows a gradient"
        returned = ReturnPayload(rows=dx_ND, is_summed=False, scalars_R=dweights_R)
        places = LocalPlaces(places_NK=places_NK, counts_e=counts_e)
        home = _return_rows(returned, places, experts_TK, ctx.transport)
        return home.y_TD, None, home.scalars_TK, None, None, None


class _Combine(torch.autograd.Function):
    """Sums of outputs for our tokens; backward pushes output gradients to the experts."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, metadata: SymmetricMetadata, transport: SymmetricTransport) -> Tensor:
        ctx.save_for_backward(metadata.experts_TK, metadata.places.places_NK, metadata.places.counts_e)
        ctx.transport, ctx.rows = transport, y_RD.shape[0]
        returned = ReturnPayload(rows=y_RD, is_summed=True)
        return _return_rows(returned, metadata.places, metadata.experts_TK, transport).y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None]:
        experts_TK, places_NK, counts_e = ctx.saved_tensors
        transport, own_T = ctx.transport, dy_TD.contiguous()
        slot = transport.buffers.take(TransferDirection.OUT)
        rows_R = own_T.new_empty(ctx.rows, own_T.shape[1])
        by_kernels, by_engines = _pusher(own_T, experts_TK, slot, transport), _copier(own_T, slot, transport)
        with transport.buffers.transfer(by_engines if transport.by_engines else by_kernels, transport.cut(own_T)):
            places = LocalPlaces(places_NK=places_NK, counts_e=counts_e)
            _take(own_T, slot, places, rows_R, transport, is_spread=True)  # one copy at each place of its token
        return rows_R, None, None
