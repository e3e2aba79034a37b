"""What a layer is built with, and how its parts run: at once, recomputed, offloaded, beside transfers, in steps.

    context.run("moe", network, x_TD)           a part that backward may run again, or whose saved tensors may leave
    handle = context.begin("dispatch", send, x_TD)      a transfer, which ends at once without overlap
    (rows,), rest = handle.wait()

Steps are generators that yield where a transfer is under way; a pipeline runs another pass there. `drain` runs them
alone: nothing happens at a yield.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from penstock.config.parallel import RECOMPUTABLE, Dispatch
from penstock.kernels.float8.operators import NO_FLOAT8, Float8Rule
from penstock.kernels.operators import REFERENCE, Operators
from penstock.layout.grid import Method
from penstock.parallel.async_transfer import Rest, Transfer, TransferStream, WeightGradStore
from penstock.parallel.axes import ALONE, Axes
from penstock.parallel.offload import OffloadRule
from penstock.parallel.recompute import discarding, discarding_in_pieces, is_inside, recomputed
from penstock.parallel.replicas import ReplicaMemory
from penstock.parallel.symmetric import SymmetricBuffers

Rest_co = TypeVar("Rest_co", covariant=True)
Result = TypeVar("Result")


class Handle(Protocol[Rest_co]):
    """A transfer that was begun."""

    def wait(self) -> tuple[tuple[Tensor, ...], Rest_co]:
        """Join. Returns the function's result; called once."""
        ...


@dataclass(frozen=True)
class Finished(Generic[Rest]):
    """A transfer that ended when it began."""

    result: tuple[tuple[Tensor, ...], Rest]

    def wait(self) -> tuple[tuple[Tensor, ...], Rest]:
        return self.result


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """Kernels, process groups and activation memory of a layer.

    Parts that a layer may recompute (`recompute`), around each of which models call `run`:

        norm                a norm before a projection; its input is the residual stream, which lives anyway
        latent-up           latent attention's up projections and the assembly of its heads
        attention           core attention, without projections
        expert-activation   output of the experts' first product; fused experts recompute it by themselves
        shared-expert, dense, moe, layer    a whole network, mixture or block
    """

    operators: Operators = REFERENCE
    axes: Axes = ALONE
    weight_grads: WeightGradStore | None = None  # None if the schedule never defers them
    context_method: Method = "ulysses"
    dispatch: Dispatch = field(default_factory=Dispatch)
    buffers: SymmetricBuffers | None = None  # None if tokens use no peer memory
    replicas: ReplicaMemory | None = None  # None if there are none, or they travel by collectives
    transfers: TransferStream | None = None  # None if transfers do not overlap with compute
    float8: Float8Rule = NO_FLOAT8
    experts_in_mxfp4: bool = False
    recompute: frozenset[str] = frozenset()
    offload: OffloadRule = field(default_factory=OffloadRule)

    def __post_init__(self) -> None:
        assert self.recompute <= {*RECOMPUTABLE}, f"{sorted(self.recompute)} are not all of {RECOMPUTABLE}"

    def run(self, kind: str, function: Callable[..., Result], *arguments: object) -> Result:
        """`function(*arguments)` as a part that may be recomputed or offloaded."""
        assert kind in RECOMPUTABLE, f"{kind} is not one of {RECOMPUTABLE}"
        if kind in self.recompute:
            function = partial(recomputed, function)
        if kind in self.offload.kinds:
            return self.offload.run(kind, function, *arguments)
        return function(*arguments)

    def recomputes(self, kind: str) -> bool:
        """Whether backward runs a part again by itself: it is named, and not inside another such part."""
        return kind in self.recompute and not is_inside()

    def discarding(self) -> AbstractContextManager[None]:
        """`recompute.discarding` around a layer's forward, if the layer recomputes a part of itself."""
        return discarding() if self.recompute else nullcontext()

    def discarding_in_pieces(self) -> AbstractContextManager[Callable[[], AbstractContextManager[None]]]:
        """The same for a layer that runs in steps."""
        return discarding_in_pieces() if self.recompute else nullcontext(nullcontext)

    def begin(self, name: str, function: Transfer[Rest], *inputs: Tensor) -> Handle[Rest]:
        """Start a transfer on its stream, or make it at once without one."""
        return Finished(function(*inputs)) if self.transfers is None else self.transfers.launch(name, function, *inputs)


Steps = Generator[None, None, Result]
"""Work in steps; each ends where something is under way that the next one waits for."""


def drain(steps: Steps[Result]) -> Result:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def within(context: Callable[[], AbstractContextManager[object]], steps: Steps[Result]) -> Steps[Result]:
    """The same steps, each in a context of its own: a context must not last over a yield."""
    while True:
        with context():
            try:
                next(steps)
            except StopIteration as end:
                result: Result = end.value
                return result
        yield
