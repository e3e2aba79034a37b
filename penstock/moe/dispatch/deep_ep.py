"""The promise kept by the DeepEP library where it is installed (github.com/deepseek-ai/DeepEP, deep_ep.Buffer).

    dispatch   each row, with its choices and weights, once to each rank that holds an expert of its token
               slots of the rows that came ordered by OUR experts; those of other ranks' experts come last
    experts    read the rows through an index
    combine    for each row that came the sum of what our experts gave for it sent back; the ranks' sums added up

Backward is the same the other way, by the handle of the dispatch: gradients of outputs go where the rows went, those of
rows and weights come back and are added up. The library's host code waits until it knows how many rows come.

Rows in 8 bits go as bytes under the name of bfloat16 numbers, half as many: a dispatch copies and never computes. The
library can take values and scales apart too, but in float32 or packed integers only.

The parts of an expert that several ranks share are virtual experts, as in all-to-all. The library has never run with
this file: tests put a simulation of its buffer in its place.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.kernels.operators import Operators
from penstock.layout.experts import ExpertPlacement
from penstock.moe.dispatch.all_gather import first_rows
from penstock.moe.dispatch.all_to_all import each_part
from penstock.moe.dispatch.contract import DispatchMetadata, ExpertRows
from penstock.moe.dispatch.gathers import pick_kept
from penstock.moe.dispatch.payload import UNQUANTIZED, DispatchPayload, WireFormat, carrier_like
from penstock.moe.routing import Routing
from penstock.parallel.deep_ep import DeepEpBuffer

NOWHERE = -1
"""The library's id of a slot that was dropped, or whose expert is elsewhere."""


@dataclass(frozen=True)
class Handled(DispatchMetadata):
    """A metadata for rows that the library moved.

    Attributes:
        handle: says where they came from; the library's own.
    """

    handle: Any


@dataclass(frozen=True)
class DeepEpDispatcher:
    """Leaves the moving to the library.

    Attributes:
        placement: who holds which experts.
        operators: kernels to run on.
        buffer: of the library, over the ranks of the placement; all layers may use the same.
        wire_format: in which form rows travel.
    """

    placement: ExpertPlacement
    operators: Operators
    buffer: DeepEpBuffer
    wire_format: WireFormat = UNQUANTIZED

    def dispatch(self, x_TD: Tensor | DispatchPayload, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        """See `Dispatcher.dispatch`. All ranks of the buffer call it."""
        parts, experts = each_part(routing, self.placement), self.placement.virtual_experts
        ids_TK = parts.experts_TK.masked_fill(parts.experts_TK == experts, NOWHERE)
        payload = self.wire_format.load(x_TD)
        x_ND, packed, weights_NK, ids_NK, counts, handle = _Dispatch.apply(
            payload.x_ND, payload.packed, parts.weights_TK, ids_TK, experts, self.buffer
        )
        own_NK = torch.where(ids_NK == NOWHERE, self.placement.per_place, ids_NK)
        order = first_rows(self.operators.order_rows(own_NK, self.placement.per_place), sum(counts))
        weights_R = pick_kept(weights_NK, order)
        index_R = order.slots_R // own_NK.shape[1]
        x_ND, quantized = self.wire_format.unload(DispatchPayload(x_ND, packed))
        rows = ExpertRows(x_ND, index_R, weights_R, order.counts_E, order.places_TK, quantized)
        return rows, Handled(order, handle)

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        """See `Dispatcher.combine`. All ranks of the buffer call it."""
        assert isinstance(metadata, Handled), f"not a metadata of this dispatcher: {metadata}"
        y_ND = self.operators.unpermute(y_RD, metadata.order)
        y_TD: Tensor = _Combine.apply(y_ND, metadata.handle, self.buffer)
        return y_TD


class _Dispatch(torch.autograd.Function):
    """Rows (if packed, a carrier and bytes), weights and local ids that came, rows of each expert, the handle."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        packed: Tensor | None,
        weights_TK: Tensor,
        ids_TK: Tensor,
        experts: int,
        buffer: DeepEpBuffer,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, list[int], Any]:
        by_rank, by_node, by_expert, is_sent_TW, _ = buffer.get_dispatch_layout(ids_TK, experts)
        own_T = (x_TD if packed is None else packed.view(torch.bfloat16)).contiguous()
        rows_N, ids_NK, weights_NK, counts, handle, _ = buffer.dispatch(
            own_T,
            topk_idx=ids_TK,
            topk_weights=weights_TK.contiguous(),
            num_tokens_per_rank=by_rank,
            num_tokens_per_rdma_rank=by_node,
            num_tokens_per_expert=by_expert,
            is_token_in_rank=is_sent_TW,
        )
        ctx.buffer, ctx.handle = buffer, handle
        if packed is None:
            ctx.mark_non_differentiable(ids_NK)
            return rows_N, None, weights_NK, ids_NK, counts, handle
        arrived = rows_N.view(torch.uint8)
        ctx.mark_non_differentiable(ids_NK, arrived)
        return carrier_like(x_TD, arrived.shape[0]), arrived, weights_NK, ids_NK, counts, handle

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dx_ND: Tensor, _packed: Tensor | None, dweights_NK: Tensor, *_: Any
    ) -> tuple[Tensor, None, Tensor | None, None, None, None]:
        dweights_NK = dweights_NK.contiguous()
        dx_TD, dweights_TK, _ = ctx.buffer.combine(dx_ND.contiguous(), ctx.handle, topk_weights=dweights_NK)
        return dx_TD, None, dweights_TK, None, None, None


class _Combine(torch.autograd.Function):
    """Outputs home and summed; backward sends their gradients to the experts by the same handle."""

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, handle: Any, buffer: DeepEpBuffer) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        y_TD, _, _ = buffer.combine(y_ND.contiguous(), handle)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None]:
        dy_ND, *_ = ctx.buffer.dispatch(dy_TD.contiguous(), handle=ctx.handle)
        return dy_ND, None, None
