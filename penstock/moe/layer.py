"""The mixture-of-experts layer: route, dispatch, experts, combine, and the shared expert beside them."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from penstock.base.spans import Span
from penstock.kernels.expert_parts import SaveRows
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.moe.dispatch.contract import Dispatcher, ExpertRows, SlotSorter
from penstock.moe.dispatch.row_capacity import ActivationArena, RowCapacity
from penstock.moe.experts import GroupedExperts
from penstock.moe.overlap import AsyncDispatcher, SharedExpert
from penstock.moe.router import TopKRouter
from penstock.moe.routing import Routing, Scope
from penstock.parallel.async_transfer import Steps, drain
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.spans import span

Terms = tuple[Tensor, ...]
"""What a network adds to the residual stream, T x D: of the routed experts, and of the shared expert if there is one.
Who owns the stream adds all at once."""


class MoE(nn.Module):
    """A mixture-of-experts feed-forward network.

    Args:
        router: chooses experts.
        dispatcher: brings tokens to them and back.
        experts: those of this rank.
        shared: network that every token passes, or None.
        layer_context: what becomes of activations, and what runs beside what.
        room: what the dispatcher asks for its number of rows, so that the layer's owner finds it; None if nothing.
        arena: where the experts keep their pre-activations together with other layers'; None if each keeps its own.
    """

    def __init__(
        self,
        router: TopKRouter,
        dispatcher: Dispatcher,
        experts: GroupedExperts,
        shared: SharedExpert | None,
        layer_context: LayerContext,
        room: RowCapacity | None = None,
        arena: ActivationArena | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.dispatcher = dispatcher
        self.experts = experts
        self.shared = shared
        self.layer_context = layer_context
        self.room = room
        self.arena = arena
        if arena is not None:
            arena.join()

    @property
    def active_share(self) -> float:
        """Part of the layer's routed experts that one token meets."""
        return self.router.top_k / self.router.experts

    def forward(self, x_TD: Tensor, scope: Scope, ready: RowColQuantized | None = None) -> Terms:
        """Mix the chosen experts for every token.

        Args:
            x_TD: tokens.
            scope: where they come from.
            ready: the same in 8 bits for the shared expert, if they are there.
        """
        if self.layer_context.transfers is not None:
            return drain(self.steps(x_TD, scope, ready))
        routed_TD, x_TD, shared_TD = self.layer_context.operators.fan_out(x_TD)
        return self._mix(x_TD, shared_TD, self.route(routed_TD, scope), ready)

    def steps(self, x_TD: Tensor, scope: Scope, ready: RowColQuantized | None = None) -> Steps[Terms]:
        """`forward` with its transfers beside the shared expert; stops where they are under way."""
        routed_TD, x_TD, shared_TD = self.layer_context.operators.fan_out(x_TD)
        return (yield from self._mix_in_steps(x_TD, shared_TD, self.route(routed_TD, scope), ready))

    def route(self, x_TD: Tensor, scope: Scope) -> Routing:
        """Choose experts, and sort the slots if dispatch would begin with that in any case.

        A dispatch that leaves on a stream of its own sorts there.
        """
        with span(Span.ROUTE):
            routing: Routing = self.router(x_TD, scope)
            if self.layer_context.transfers is None and isinstance(self.dispatcher, SlotSorter):
                return replace(routing, sorted=self.dispatcher.sorted_slots(routing))
            return routing

    def mix(self, x_TD: Tensor, shared_TD: Tensor, routing: Routing) -> Terms:
        """`forward` behind a `fan_out` and a `route` that somebody else has called.

        Args:
            x_TD: tokens, for dispatch.
            shared_TD: the same, for the shared expert.
            routing: what `route` gave.
        """
        if self.layer_context.transfers is not None:
            return drain(self._mix_in_steps(x_TD, shared_TD, routing, None))
        return self._mix(x_TD, shared_TD, routing, None)

    def _mix(self, x_TD: Tensor, shared_TD: Tensor, routing: Routing, ready: RowColQuantized | None) -> Terms:
        with span(Span.DISPATCH):
            rows, metadata = self.dispatcher.dispatch(x_TD, routing)
        y_RD = self._run_experts(rows)
        with span(Span.COMBINE):
            y_TD = self.dispatcher.combine(y_RD, metadata)
        if self.shared is None:
            return (y_TD,)
        with span(Span.SHARED):
            return y_TD, self.layer_context.run("shared-expert", self.shared, shared_TD, ready)

    def _mix_in_steps(
        self, x_TD: Tensor, shared_TD: Tensor, routing: Routing, ready: RowColQuantized | None
    ) -> Steps[Terms]:
        assert self.layer_context.transfers is not None, "nothing here leaves"
        leaving, h_TF, beside_TD = AsyncDispatcher(self.dispatcher, self.layer_context.transfers), None, None
        wait_for_rows = leaving.dispatch(x_TD, routing)
        if self.shared is not None:
            with span(Span.SHARED):
                h_TF = self.layer_context.run("shared-expert", self.shared.widen, shared_TD, ready)
        yield
        rows, metadata = wait_for_rows()
        wait_for_sums = leaving.combine(self._run_experts(rows), metadata)
        if self.shared is not None and h_TF is not None:
            with span(Span.SHARED):
                beside_TD = self.shared.narrow(h_TF)
        yield
        y_TD = wait_for_sums()
        return (y_TD,) if beside_TD is None else (y_TD, beside_TD)

    def _run_experts(self, rows: ExpertRows) -> Tensor:
        """A recomputed region repeats both products; a network that recomputes by itself repeats only the first."""
        with span(Span.EXPERTS):
            if not self.experts.is_one_function:
                return self.layer_context.run("expert-activation", self.experts, rows)
            recompute = self.layer_context.recompute.recomputes("expert-activation")
            y_RD: Tensor = self.experts(rows, recompute=recompute, keep=self._keep())
            return y_RD

    def _keep(self) -> SaveRows | None:
        """Where this pass keeps its pre-activation; None for a tensor of its own."""
        if self.arena is None or self.room is None or not self.training or not torch.is_grad_enabled():
            return None
        return partial(self.arena.place, share=self.room.share)
