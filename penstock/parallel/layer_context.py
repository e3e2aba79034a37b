"""Arguments that every module is built with besides its sizes, as one frozen value."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.config.parallel import OFFLOADABLE, Dispatch
from penstock.kernels.float8.operators import NO_FLOAT8, Float8Rule
from penstock.kernels.operators import REFERENCE, Operators
from penstock.layout.sequence import Method
from penstock.parallel.async_transfer import TransferStream
from penstock.parallel.axes import ALONE, Axes
from penstock.parallel.offload import OffloadRule
from penstock.parallel.recompute import RecomputeRule
from penstock.parallel.replicas import ReplicaMemory
from penstock.parallel.symmetric import SymmetricBuffers
from penstock.parallel.weight_grad_store import WeightGradStore

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """Kernels, process groups and activation memory of a layer."""

    operators: Operators = REFERENCE
    axes: Axes = ALONE
    weight_grads: WeightGradStore | None = None  # None if the schedule never defers them
    context_method: Method = "ulysses"
    dispatch: Dispatch = field(default_factory=Dispatch)
    buffers: SymmetricBuffers | None = None  # None if tokens use no peer memory
    replicas: ReplicaMemory | None = None  # None if there are none, or they travel by collectives
    transfers: TransferStream | None = None  # None if transfers do not overlap with compute
    float8: Float8Rule = NO_FLOAT8
    recompute: RecomputeRule = field(default_factory=RecomputeRule)
    offload: OffloadRule = field(default_factory=OffloadRule)

    def run(self, kind: str, function: Callable[..., Result], *arguments: object) -> Result:
        """`function(*arguments)` as a part that may be recomputed or offloaded."""
        if self.offload.store is not None and kind in OFFLOADABLE:
            return self.offload.run(kind, self.recompute.run, kind, function, *arguments)
        return self.recompute.run(kind, function, *arguments)
