"""Arguments that every module is built with besides its sizes, as one frozen value."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from penstock.config.parallel import OFFLOADABLE, Dispatch
from penstock.kernels.float8.operators import NO_FLOAT8, Float8Rule
from penstock.kernels.operators import REFERENCE, Operators
from penstock.layout.sequence import Method
from penstock.parallel.async_transfer import TransferStream
from penstock.parallel.axes import ALONE, Axes
from penstock.parallel.offload import OffloadRule
from penstock.parallel.recompute import RecomputeRule
from penstock.parallel.weight_grad_store import WeightGradStore

if TYPE_CHECKING:  # it imports Triton, which may be absent
    from penstock.parallel.symmetric import SymmetricBuffers

NOTHING_AGAIN = RecomputeRule()
NOTHING_AWAY = OffloadRule()
AUTO = Dispatch()

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """Kernels, process groups and activation memory of a layer.

    `weight_grads` is None if the schedule never defers, `buffers` if tokens use no peer memory, `transfers` if they do
    not overlap with compute.
    """

    operators: Operators = REFERENCE
    axes: Axes = ALONE
    weight_grads: WeightGradStore | None = None
    context_method: Method = "ulysses"
    dispatch: Dispatch = AUTO
    buffers: "SymmetricBuffers | None" = None
    transfers: TransferStream | None = None
    float8: Float8Rule = NO_FLOAT8
    recompute: RecomputeRule = NOTHING_AGAIN
    offload: OffloadRule = NOTHING_AWAY

    def run(self, kind: str, function: Callable[..., Result], *arguments: object) -> Result:
        """`function(*arguments)` as a part that may be recomputed or offloaded; see `penstock.parallel.recompute`."""
        if kind in OFFLOADABLE:
            return self.offload.run(kind, self.recompute.run, kind, function, *arguments)
        return self.recompute.run(kind, function, *arguments)
