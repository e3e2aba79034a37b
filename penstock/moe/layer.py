"""The mixture-of-experts layer.

    x_TD ---+--- router         weights_TK, experts_TK    each of T tokens chooses K of E experts
            +--- dispatch       x_ND, index_R, counts_e   rows go to the ranks that hold their experts
            |    experts        y_RD                      each expert's FFN on its rows, times the routing weight
            |    combine        y_TD                      rows go back; the K rows of each token are summed
            +--- shared expert  shared_TD                 a dense FFN that every token passes

    returns (y_TD, shared_TD), which the caller adds to the residual stream

With one rank, dispatch is a sort and combine is a sum. With several, `penstock.moe.dispatch` has four ways to exchange
rows; this file is the same for all of them. Dispatch and combine are begun, and waited for later; without
`dispatch.overlap` they are done at once. The layer yields while tokens travel, so that with it the shared expert, and a
pass of another micro-batch, compute:

    route, start dispatch                 | first product of the shared expert
    wait, experts, start combine          | second product of the shared expert
    wait, sum

Backward is the mirror image (penstock/parallel/async_transfer.py).
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.base.spans import Span
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.moe.balance import LayerLoad, Routing, Scope
from penstock.moe.dispatch.balanced import BalancedDispatcher
from penstock.moe.dispatch.collective import PaddedAllToAllDispatcher
from penstock.moe.dispatch.contract import Dispatcher, DispatchMetadata, ExpertRows, SlotSorter
from penstock.moe.dispatch.row_capacity import ActivationArena, RowCapacity
from penstock.moe.experts import GroupedExperts
from penstock.moe.router import TopKRouter
from penstock.parallel.layer_context import LayerContext, Steps, drain
from penstock.parallel.spans import span

Terms = tuple[Tensor, ...]
"""Summands for the residual stream, each T x D: the routed experts' output, and the shared expert's if there is one."""


class SharedExpert(Protocol):
    """A dense FFN that every token passes. `widen` is its first half, with the activation, and `narrow` the second."""

    def __call__(self, x_TD: Tensor, x_float8: RowColQuantized | None = None) -> Tensor: ...
    def widen(self, x_TD: Tensor, x_float8: RowColQuantized | None = None) -> Tensor: ...
    def narrow(self, h_TF: Tensor) -> Tensor: ...


class MoE(nn.Module):
    """A mixture-of-experts feed-forward network.

    `row_capacity` and the meter of replicas are registered here so that the trainer finds them; several layers may
    share an `arena` for their pre-activations.
    """

    def __init__(
        self,
        router: TopKRouter,
        dispatcher: Dispatcher,
        experts: GroupedExperts,
        shared: SharedExpert | None,
        layer_context: LayerContext,
        row_capacity: RowCapacity | None = None,
        arena: ActivationArena | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        if isinstance(dispatcher, BalancedDispatcher) and layer_context.transfers is None:
            # Where transfers run beside other work, other experts may fetch before these do.
            dispatcher = replace(dispatcher, resident_weights=experts.resident_weights)
        self.dispatcher = dispatcher
        self.experts = experts
        self.shared = shared
        self.layer_context = layer_context
        self.row_capacity = row_capacity
        self.arena = arena
        self.replica_meter = dispatcher.meter if isinstance(dispatcher, BalancedDispatcher) else None
        if arena is not None:
            arena.join()  # the arena is as large as its layers together

    @property
    def active_share(self) -> float:
        """Fraction of the routed experts that one token activates, K / E."""
        return self.router.top_k / self.router.experts

    def forward(self, x_TD: Tensor, scope: Scope, ready: RowColQuantized | None = None) -> Terms:
        """Route every token, and return the summands of its output."""
        return drain(self.steps(x_TD, scope, ready))

    def steps(self, x_TD: Tensor, scope: Scope, ready: RowColQuantized | None = None) -> Steps[Terms]:
        """`forward` as a generator that yields while rows travel."""
        # One copy of x_TD for each reader, so that a single kernel sums their three gradients.
        routed_TD, x_TD, shared_TD = self.layer_context.operators.fan_out(x_TD)
        return (yield from self.after_routing(x_TD, shared_TD, self.route(routed_TD, scope), ready))

    def route(self, x_TD: Tensor, scope: Scope) -> Routing:
        """Choose experts, and sort the slots by expert if the dispatcher begins with that sort."""
        with span(Span.ROUTE):
            routing: Routing = self.router(x_TD, scope)
            # With overlap the dispatcher sorts on its own stream instead.
            dispatcher = self._dispatcher_of_mode()
            if self.layer_context.transfers is None and isinstance(dispatcher, SlotSorter):
                return replace(routing, sorted=dispatcher.sorted_slots(routing))
            return routing

    def _dispatcher_of_mode(self) -> Dispatcher:
        if not self.training and isinstance(self.dispatcher, PaddedAllToAllDispatcher):
            return self.dispatcher.dropless
        return self.dispatcher

    def after_routing(
        self, x_TD: Tensor, shared_TD: Tensor, routing: Routing, ready: RowColQuantized | None = None
    ) -> Steps[Terms]:
        """The part of `steps` after `fan_out` and `route`, for callers that have called these themselves."""
        begin, transfers = self.layer_context.begin, self.layer_context.transfers
        dispatcher = self._dispatcher_of_mode()

        def dispatch(
            x_TD: Tensor, weights_TK: Tensor
        ) -> tuple[tuple[Tensor, Tensor], tuple[ExpertRows, DispatchMetadata]]:
            rows, metadata = dispatcher.dispatch(x_TD, replace(routing, weights_TK=weights_TK))
            outputs = rows.x_ND, rows.weights_R
            if transfers is not None:
                # The graph of the transfer is its own: what leaves beside its outputs must not hold it.
                rows = replace(rows, x_ND=rows.x_ND.detach(), weights_R=rows.weights_R.detach())
            return outputs, (rows, metadata)

        def combine(y_RD: Tensor) -> tuple[tuple[Tensor], None]:
            return (dispatcher.combine(y_RD, metadata),), None

        with span(Span.DISPATCH):
            dispatched = begin("dispatch", dispatch, x_TD, routing.weights_TK)  # the two with gradients
        # Beside transfers the shared expert is cut in two; otherwise it is whole, which may be one kernel in 8 bits.
        cut = None if transfers is None else self.shared
        if cut is not None:
            with span(Span.SHARED):
                h_TF = self.layer_context.run("shared-expert", cut.widen, shared_TD, ready)
        yield  # rows are on their way to the experts

        with span(Span.DISPATCH):
            (x_ND, weights_R), (rows, metadata) = dispatched.wait()  # index_R sorts x_ND by expert
        y_RD = self._run_experts(replace(rows, x_ND=x_ND, weights_R=weights_R))  # one row for each slot of our experts
        with span(Span.COMBINE):
            combined = begin("combine", combine, y_RD)
            del y_RD  # the transfer holds it as long as it reads it
        shared: Terms = ()
        if cut is not None:
            with span(Span.SHARED):
                shared = (cut.narrow(h_TF),)
        yield  # outputs are on their way back

        with span(Span.COMBINE):
            (y_TD,), _ = combined.wait()
        if self.shared is not None and cut is None:
            with span(Span.SHARED):
                shared = (self.layer_context.run("shared-expert", self.shared, shared_TD, ready),)
        return y_TD, *shared

    def _run_experts(self, rows: ExpertRows) -> Tensor:
        with span(Span.EXPERTS):
            if not self.experts.is_one_function:
                # A recomputed region runs both products again.
                return self.layer_context.run("expert-activation", self.experts, rows)
            # A fused network recomputes by itself, and runs only the first product again.
            recompute, keep = self.layer_context.recomputes("expert-activation"), None
            if self.arena is not None and self.row_capacity is not None and self.training and torch.is_grad_enabled():
                keep = partial(self.arena.place, even_share=self.row_capacity.even_share)
            y_RD: Tensor = self.experts(rows, recompute=recompute, keep=keep)  # called, so that FSDP2's hooks run
            return y_RD


def moe_loads(modules: Iterable[nn.Module]) -> list[LayerLoad]:
    """This rank's load of every MoE layer in the step."""
    layers = (module for model in modules for module in model.modules() if isinstance(module, MoE))
    return [layer.router.load(None if (meter := layer.replica_meter) is None else meter.facts) for layer in layers]
