"""The part of a parameter that one rank updates, in three kinds.

    whole      rank holds and updates everything that it computes with        data axis of one rank, or shard = none
    divided    holds everything, updates its rows, gathers the others' (ZeRO-1) shard = optimizer
    sharded    holds and updates its rows only (FSDP2 gathers and reduces)    shard = full

Backward adds to `total`, a float32 buffer for the whole run. After the sum over ranks, `gradient` is that of the global
batch for the rows of `values`. It is a part of `total`, or all of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.config.parallel import Parallel
from penstock.layout.sharding import rows_of_shard
from penstock.parallel.axes import NO_AXIS, Axis
from penstock.parallel.shard import ParamShard, ShardedTensor, local_rows
from penstock.train.adamw import is_own_master


@dataclass(frozen=True, kw_only=True)
class OptimizerShard:
    """What one rank updates of one parameter.

    Attributes:
        holding: the parameter.
        rows: first and last + 1 of the rows of our part that we update; None for all.
        total: float32 sum of the gradients of our backward passes, of the shape of what the rank holds.
        gradient: the rows of `total` that we update.
        values: these rows of the parameter itself; their own master if they are float32 (`penstock.train.adamw`).
        attached: what `parameter.grad` is outside of backward: autograd adds to it, or a hook takes it away (None).
        shard: ranks that divide the rows, if reducing the gradient is left to us.
        replicate: ranks that update the same rows; the gradient is summed over them too, if that is left to us.
        writes: this rank saves the rows; of those that update the same ones, one does.
    """

    holding: ParamShard
    rows: tuple[int, int] | None
    total: Tensor
    gradient: Tensor
    values: Tensor
    attached: Tensor | None
    shard: Axis
    replicate: Axis
    writes: bool

    @property
    def parameter(self) -> nn.Parameter:
        """What modules compute with."""
        return self.holding.parameter

    def part(self, tensor: Tensor) -> ShardedTensor:
        """A tensor of the rows that we update, as a part of a checkpoint."""
        holding = self.holding
        return ShardedTensor(tensor=tensor, shape=holding.shape, pieces=holding.pieces(self.rows), writes=self.writes)


@torch.no_grad()
def optimizer_shard_of(holding: ParamShard, parallel: Parallel) -> OptimizerShard:
    """Decide what this rank updates of a parameter, and make its gradient."""
    parameter, data = holding.parameter, holding.data
    is_precise = is_own_master(parameter)
    rows: tuple[int, int] | None = None
    shard, replicate = NO_AXIS, data
    attached: Tensor | None = None
    if isinstance(parameter, DTensor):
        assert is_precise, f"{holding.name} is sharded, so it must be its own float32 master"
        rows, writer = local_rows(parameter), data.replicate.rank == 0
        attached = torch.zeros_like(parameter)
        assert isinstance(attached, DTensor), "zeros like a DTensor are one"
        total = gradient = attached.to_local()
        values = parameter.to_local().detach()
        replicate = NO_AXIS
    else:
        total = torch.zeros_like(parameter, dtype=parameter.dtype if is_precise else torch.float32)
        attached = total if is_precise else None
        gradient, values, writer = total, parameter.detach(), data.rank == 0
        if parallel.shard in ("auto", "optimizer") and data.shard.size > 1 and parameter.ndim:
            shard, replicate, writer = data.shard, data.replicate, data.replicate.rank == 0
            rows = rows_of_shard(parameter.shape[0], shard.rank, shard.size)
            gradient, values = total[slice(*rows)], values[slice(*rows)]
    return OptimizerShard(
        holding=holding,
        rows=rows,
        total=total,
        gradient=gradient,
        values=values,
        attached=attached,
        shard=shard,
        replicate=replicate,
        writes=writer and all(axis.rank == 0 for axis in holding.partial) and values.numel() > 0,
    )
