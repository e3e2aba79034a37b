"""A mixture of experts in pieces: its two transfers leave, something else is computed, they are waited for.

    route, dispatch leaves     | first product of the shared expert
    wait, experts, combine leaves | its last product
    wait, sum

A stop (`yield`) stands after each piece; a layer that runs alone goes straight on. Backward is the mirror image
(penstock/parallel/async_transfer.py): combine's gradients travel beside those of the shared expert's last product,
dispatch's beside those of its first.

Dispatchers know nothing of it, and neither does the contract.
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
    """A network that every token passes; it comes apart. Tokens may be ready in 8 bits."""

    def __call__(self, x_TD: Tensor, ready: RowColQuantized | None = None) -> Tensor:
        """All of it."""
        ...

    def widen(self, x_TD: Tensor, ready: RowColQuantized | None = None) -> Tensor:
        """Up to its width, activation included. Returns h_TF."""
        ...

    def narrow(self, h_TF: Tensor) -> Tensor:
        """The rest. Returns y_TD."""
        ...


@dataclass(frozen=True)
class AsyncDispatcher:
    """A dispatcher whose two halves leave when they are called, and give what is to be called for their result.

    Attributes:
        dispatcher: any.
        transfers: where they run.
    """

    dispatcher: Dispatcher
    transfers: TransferStream

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Callable[[], tuple[ExpertRows, DispatchMetadata]]:
        """`Dispatcher.dispatch`, to be waited for."""

        def transfer(
            x_TD: Tensor, weights_TK: Tensor
        ) -> tuple[tuple[Tensor, Tensor], tuple[ExpertRows, DispatchMetadata]]:
            rows, metadata = self.dispatcher.dispatch(x_TD, Routing(weights_TK, routing.experts_TK))
            plain = replace(rows, x_ND=rows.x_ND.detach(), weights_R=rows.weights_R.detach())
            return (rows.x_ND, rows.weights_R), (plain, metadata)

        with span(Span.DISPATCH):
            flight = self.transfers.launch("dispatch", transfer, x_TD, routing.weights_TK)

        def wait() -> tuple[ExpertRows, DispatchMetadata]:
            with span(Span.DISPATCH):
                (x_ND, weights_R), (rows, metadata) = flight.wait()
            return replace(rows, x_ND=x_ND, weights_R=weights_R), metadata

        return wait

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Callable[[], Tensor]:
        """`Dispatcher.combine`, to be waited for."""

        def transfer(y_RD: Tensor) -> tuple[tuple[Tensor], None]:
            return (self.dispatcher.combine(y_RD, metadata),), None

        with span(Span.COMBINE):
            flight = self.transfers.launch("combine", transfer, y_RD)

        def wait() -> Tensor:
            with span(Span.COMBINE):
                (y_TD,), _ = flight.wait()
            return y_TD

        return wait
