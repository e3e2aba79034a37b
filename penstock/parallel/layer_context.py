"""What every module is built with besides its own sizes, as one frozen value."""

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
    """Kernels to run on, ranks to share with, and what becomes of activations.

    Attributes:
        operators: kernels.
        axes: this rank's groups.
        weight_grads: puts off weight gradients; None where the schedule never does.
        context_method: how ranks that share a row attend.
        dispatch: how tokens reach their experts.
        buffers: memory that the node's GPUs write into, if tokens travel through it.
        transfers: where tokens travel while something else is computed; None if nothing is.
        float8: what the layer does in 8 bits.
        recompute: what the layer frees after forward and computes again.
        offload: what waits for backward in host memory.
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
        """`function(*arguments)`: a part of a layer whose activations may be computed again, or wait on the host.

        Args:
            kind: of the part, as `recompute.modules` and `offload.activations` name it.
            function: returns a tensor or a tuple with tensors; see `penstock.parallel.recompute`.
            arguments: of the function.
        """
        if kind in OFFLOADABLE:
            return self.offload.run(kind, self.recompute.run, kind, function, *arguments)
        return self.recompute.run(kind, function, *arguments)
