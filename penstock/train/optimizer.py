"""AdamW with float32 masters, and gradients that add up in float32, over any number of ranks.

Every trained parameter has a master (float32, what AdamW updates), a gradient (float32, one buffer for the whole run)
and two moments. A float32 parameter is its own master. A bfloat16 parameter is a rounded copy of its master:

    backward     a hook on the parameter adds its bfloat16 gradient to the float32 buffer and frees it
    reduce       once a step, gradients are summed over the ranks that saw other tokens
    step         AdamW clips gradients, updates the masters, and rounds them into the parameters

So a gradient that is summed over many micro-batches loses nothing, and neither does an update that is smaller than a
bfloat16 can tell. What makes weight gradients itself may add to the buffer (`gradient_of`) and leave the parameter's
own gradient alone, as matrices and experts do (penstock/models/parameters.py).

With `offload.optimizer`, moments, and masters that are not the parameters themselves, stay in host memory and pass
through the device during the step (`penstock/train/adamw.py`).

Ranks that hold the same parameter may divide its rows (`penstock/train/optimizer.py`): each then has masters and
moments of its own rows only, and after a step the new values are gathered.

A parameter that took no part in a step has a gradient of zeros, not none: its moments fade, and it decays. This is what
happens to it inside a larger tensor or a shard, so results do not depend on how parameters are laid out. Nothing here
waits for the device.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.config.parallel import Offload, Parallel
from penstock.config.training import Optimizer
from penstock.layout.sharding import rows_of_shard
from penstock.parallel.axes import ALONE, NO_AXIS, Axis
from penstock.parallel.buckets import BucketEntry, gather_rows, reduce_rows
from penstock.parallel.shard import ParamShard, ShardedTensor, local_rows, whole
from penstock.train.adamw import FusedAdamW, StreamedAdamW, is_own_master


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


_DEFAULTS = Parallel()
_ON_DEVICE = Offload()


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes that one rank holds from its first step to its last, on the device if nothing else is said.

    Attributes:
        weights: what is held of the parameters between steps.
        gradients: float32 sums.
        optimizer: moments, and masters where they are not the parameters themselves; or what these pass through.
        host: of the optimizer in host memory.
    """

    weights: int
    gradients: int
    optimizer: int
    host: int = 0


class MasterAdamW:
    """AdamW (arXiv 1711.05101) over the parameters of one rank, which all live on one device.

    Args:
        holdings: those that need no gradient are left out. No parameter and no name may come twice. Ranks that hold the
            same parameters make their optimizers together.
        settings: everything but the learning rate, which comes with each step.
        parallel: who divides what (`shard`), and the type in which gradients travel (`reduce`).
        world: all ranks, for the norm of the whole gradient.
        bucket_values: of a message; None for the usual size (penstock/parallel/buckets.py).
        offload: whether the optimizer lives in host memory.
    """

    def __init__(
        self,
        holdings: Sequence[ParamShard],
        settings: Optimizer,
        *,
        parallel: Parallel = _DEFAULTS,
        world: Axis = ALONE.world,
        bucket_values: int | None = None,
        offload: Offload = _ON_DEVICE,
    ) -> None:
        trained = [holding for holding in holdings if holding.parameter.requires_grad]
        assert trained, "an optimizer needs a parameter that is trained"
        # In the order of names, so that messages match even between ranks that hold different layers.
        self._shares = {
            one.name: optimizer_shard_of(one, parallel) for one in sorted(trained, key=lambda one: one.name)
        }
        assert len({id(one.parameter) for one in trained}) == len(self._shares) == len(trained), "one comes twice"
        self._world = world
        self._reduce_dtype = torch.float32 if parallel.reduce == "fp32" else torch.bfloat16
        self._bucket_values = bucket_values
        for share in self._shares.values():
            share.parameter.grad = share.attached
            if share.attached is None:
                share.parameter.register_post_accumulate_grad_hook(partial(_move_gradient, share.total))
        self._adamw = (StreamedAdamW if offload.optimizer else FusedAdamW)(
            {name: share.values for name, share in self._shares.items()},
            {name: share.gradient for name, share in self._shares.items()},
            settings,
        )

    def gradient_of(self, name: str) -> Tensor:
        """The float32 buffer that a parameter's gradients are added to; it stays the same tensor for good."""
        return self._shares[name].total

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Names of parameters and the gradients of the rows that this rank updates, which may be none.

        Complete after `reduce_gradients`.
        """
        for name, share in self._shares.items():
            yield name, share.gradient

    @torch.no_grad()
    def zero_gradients(self) -> None:
        """Begin a new sum. Use this instead of `model.zero_grad`, which would take the buffers away."""
        torch._foreach_zero_([share.total for share in self._shares.values()])

    def reduce_gradients(self) -> None:
        """Sum over all ranks that have a part of a gradient. Once a step, after the last backward pass."""
        # All ranks take axes in the order of their names: none waits for one that waits for it.
        by_axes: dict[tuple[str, str], list[OptimizerShard]] = defaultdict(list)
        for share in self._shares.values():
            by_axes[share.shard.name, share.replicate.name].append(share)
        for _, shares in sorted(by_axes.items()):
            cargo = [BucketEntry(whole=share.total, own=share.gradient) for share in shares]
            self._reduce(cargo, shares[0].shard, shares[0].replicate)
        for axis, shares in self._by_partial_axis():
            self._reduce([BucketEntry(whole=share.gradient, own=share.gradient) for share in shares], NO_AXIS, axis)

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """2-norm of the gradient of the whole model, over all ranks: float32 scalar on the device."""
        counted = [share.gradient for share in self._shares.values() if share.writes]
        norms = torch._foreach_norm(counted) if counted else [torch.zeros_like(self._adamw.step)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self._world.group is None:
            return norm
        square = norm.double().square()
        dist.all_reduce(square, group=self._world.group)
        return square.sqrt().float()

    @torch.no_grad()
    def step(self, learning_rate: float, divisor: float = 1.0) -> None:
        """Update every parameter from the gradients.

        Args:
            learning_rate: of this step.
            divisor: gradients are divided by it on the way, see `clip_divisor`; 1 leaves them as they are.
        """
        for name, share in self._shares.items():
            assert share.parameter.grad is share.attached, f"somebody took away the gradient buffer of {name}"
        self._adamw.update(learning_rate, divisor)
        self._gather_values()

    def parts(self) -> dict[str, ShardedTensor]:
        """All that a checkpoint needs of parameters and optimizer, in float32, by name; the very own tensors.

        `model.*` is the master, `moment1.*` and `moment2.*` go with it, `step` counts updates. Call `loaded` after
        filling them. Read or fill them before the next step; where they are on the host, this waits for the last one.
        """
        self._adamw.settle()
        kinds = {"model": self._adamw.masters, "moment1": self._adamw.moments1, "moment2": self._adamw.moments2}
        parts = {
            f"{kind}.{name}": self._shares[name].part(tensor)
            for kind, tensors in kinds.items()
            for name, tensor in tensors.items()
        }
        return {**parts, "step": whole(self._adamw.step, writes=self._world.rank == 0)}

    def memory(self) -> StateBytes:
        """What all this takes; also of parameters on the meta device."""
        shares = self._shares.values()
        weights = [share.values if isinstance(share.parameter, DTensor) else share.parameter for share in shares]
        return StateBytes(
            weights=_bytes(weights),
            gradients=_bytes(share.total for share in shares),
            optimizer=self._adamw.device_bytes,
            host=self._adamw.host_bytes,
        )

    def loaded(self) -> None:
        """Go on from the tensors of `parts`, which somebody has filled: parameters follow their masters."""
        self._adamw.loaded()
        self._gather_values()

    def _reduce(self, cargo: Sequence[BucketEntry], shard: Axis, replicate: Axis) -> None:
        reduce_rows(cargo, shard, replicate, self._reduce_dtype, self._bucket_values)

    def _by_partial_axis(self) -> list[tuple[Axis, list[OptimizerShard]]]:
        """Axes over which gradients are summed besides data, and the parameters that this is about."""
        axes = {axis.name: axis for share in self._shares.values() for axis in share.holding.partial}
        return [
            (axes[name], [share for share in self._shares.values() if axes[name] in share.holding.partial])
            for name in sorted(axes)
        ]

    def _gather_values(self) -> None:
        """Fetch the rows of parameters that other ranks have updated."""
        divided: dict[tuple[str, str], list[OptimizerShard]] = defaultdict(list)
        for share in self._shares.values():
            if share.shard.size > 1:
                divided[share.shard.name, str(share.parameter.dtype)].append(share)
        for _, shares in sorted(divided.items()):
            cargo = [BucketEntry(whole=share.parameter.detach(), own=share.values) for share in shares]
            gather_rows(cargo, shares[0].shard, self._bucket_values)


def clip_divisor(norm: float, limit: float) -> float:
    """What gradients are divided by so that their norm is at most `limit`; exactly 1 if it is so already.

    Args:
        norm: of the whole gradient.
        limit: 0 does not clip.
    """
    return max(1.0, (norm + 1e-6) / limit) if limit > 0.0 else 1.0


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _move_gradient(total: Tensor, parameter: Tensor) -> None:
    """Add the parameter's gradient, which one backward pass has just finished, to the float32 sum."""
    if parameter.grad is None:
        return  # A deferred weight gradient: autograd calls again when it is computed (parallel/weight_grad_store.py).
    total.add_(parameter.grad)
    parameter.grad = None
