"""Asynchronous dispatch: the transfers of an MoE layer run on a second stream while this one computes.

    route, start dispatch                 | first product of the shared expert
    wait, experts, start combine          | second product of the shared expert
    wait, sum

The layer yields after each line, so other work can run too; alone it goes straight on. Backward is the mirror image
(penstock/parallel/async_transfer.py): gradients of combine travel beside the second product's, those of dispatch beside
the first's. Dispatchers need no change.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from penstock.base.spans import Span
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.moe.dispatch.contract import Dispatcher, DispatchMetadata, ExpertRows
from penstock.moe.routing import Routing
from penstock.parallel.async_transfer import TransferStream
from penstock.parallel.spans import span


class SharedExpert(Protocol):
    """A dense FFN that every token passes, callable in two halves. Its input may be there in 8 bits already."""

    def __call__(self, x_TD: Tensor, ready: RowColQuantized | None = None) -> Tensor:
        """Both halves."""
        ...

    def widen(self, x_TD: Tensor, ready: RowColQuantized | None = None) -> Tensor:
        """The first product and the activation. Returns h_TF."""
        ...

    def narrow(self, h_TF: Tensor) -> Tensor:
        """The second product. Returns y_TD."""
        ...


@dataclass(frozen=True)
class AsyncDispatcher:
    """A dispatcher whose methods start a transfer and return a function that waits for it."""

    dispatcher: Dispatcher
    transfers: TransferStream

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Callable[[], tuple[ExpertRows, DispatchMetadata]]:
        """Start `Dispatcher.dispatch`."""

        def transfer(
            x_TD: Tensor, weights_TK: Tensor
        ) -> tuple[tuple[Tensor, Tensor], tuple[ExpertRows, DispatchMetadata]]:
            rows, metadata = self.dispatcher.dispatch(x_TD, Routing(weights_TK, routing.experts_TK))
            plain = replace(rows, x_ND=rows.x_ND.detach(), weights_R=rows.weights_R.detach())
            return (rows.x_ND, rows.weights_R), (plain, metadata)

        with span(Span.DISPATCH):
            handle = self.transfers.launch("dispatch", transfer, x_TD, routing.weights_TK)

        def wait() -> tuple[ExpertRows, DispatchMetadata]:
            with span(Span.DISPATCH):
                (x_ND, weights_R), (rows, metadata) = handle.wait()
            return replace(rows, x_ND=x_ND, weights_R=weights_R), metadata

        return wait

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Callable[[], Tensor]:
        """Start `Dispatcher.combine`."""

        def transfer(y_RD: Tensor) -> tuple[tuple[Tensor], None]:
            return (self.dispatcher.combine(y_RD, metadata),), None

        with span(Span.COMBINE):
            handle = self.transfers.launch("combine", transfer, y_RD)

        def wait() -> Tensor:
            with span(Span.COMBINE):
                (y_TD,), _ = handle.wait()
            return y_TD

        return wait
