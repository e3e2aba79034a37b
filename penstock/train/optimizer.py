"""AdamW or Muon with float32 masters and float32 gradient sums, over any number of ranks; and the rate of a step.

Every trained parameter has a master (float32), a gradient (float32, one buffer for the whole run) and two moments, or
one with Muon (`penstock.train.muon`). A float32 parameter is its own master. A bfloat16 parameter is a rounded copy of
its master:

    backward     a hook adds the parameter's bfloat16 gradient to the float32 buffer and frees it
    reduce       once a step, gradients are summed over the ranks that saw other tokens
    step         gradients are clipped, masters updated, and rounded into the parameters

So neither sums over many micro-batches nor small updates lose precision. Kernels that produce weight gradients may
accumulate into the buffer (`gradient_of`) instead (penstock/models/parameters.py). State may be stored in fewer bits,
or in host memory (penstock/train/adamw.py).

A rank updates a parameter in one of three ways (`OptimizerShard`):

    whole      holds and updates all of it                                     data axis of one rank, or shard = none
    divided    holds all of it, updates its rows, gathers the others (ZeRO-1)  shard = optimizer
    sharded    holds and updates its rows only (FSDP2 gathers and reduces)     shard = full

A row is an index of all dims but the last: where a rank holds one expert, data-parallel ranks divide its matrices.

A parameter that took no part in a step has a zero gradient: its moments fade and it decays, as it does inside of a
larger tensor or a shard, so results do not depend on the layout. Nothing here waits for the device.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.config.parallel import Offload, Parallel
from penstock.config.run import LearningRateSchedule, Optimizer
from penstock.kernels.adamw import StateTensor, master_of, store_master
from penstock.layout.sharding import row_width, rows_of_shard
from penstock.parallel.axes import ALONE, NO_AXIS, Axes, Axis
from penstock.parallel.buckets import BucketEntry, gather_rows, reduce_rows
from penstock.parallel.matrix_exchange import MatrixShard, RowDivision
from penstock.parallel.offload import GradientOffload, layer_of_sums
from penstock.parallel.shard import ParamShard, ShardedTensor, StateCodec, by_rows, is_dtensor, local_rows, whole
from penstock.train.adamw import ROUNDED, FusedAdamW, StreamedAdamW, is_own_master, stored_parts
from penstock.train.muon import ShardedMuon


def learning_rate(step: int, steps: int, peak: float, schedule: LearningRateSchedule) -> float:
    """Learning rate of one optimizer step, counted from 0. Steps past the end have the rate of the last one.

    It rises linearly from 0 to the peak, then falls by the shape of the decay to `final_ratio` of the peak. Four steps
    of warm-up out of twelve, in tenths of the peak, final ratio 0.2:

        step       0    1    2    3    4    5    6    7    8    9   10   11
        linear   2.5    5  7.5   10    9    8    7    6    5    4    3    2
        wsd      2.5    5  7.5   10   10   10   10   10   10 7.33 4.67    2    (decay_steps 3)

    wsd: warm-up, stable, decay (MiniCPM, arXiv 2404.06395).
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    height = _decay_height(step, steps, schedule)
    # At heights 1 and 0 this is exactly `peak` and `peak * final_ratio`.
    return peak * (height + schedule.final_ratio * (1.0 - height))


def _decay_height(step: int, steps: int, schedule: LearningRateSchedule) -> float:
    """Height of the decay: 1 at the peak, 0 at the last step."""
    last = steps - 1
    top = max(schedule.warmup_steps - 1, 0)  # the step that has the peak
    match schedule.decay:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - _decay_progress(step, top, last)
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * _decay_progress(step, top, last)))
        case "wsd":
            decay_steps = schedule.decay_steps or max(1, steps // 10)
            return 1.0 - _decay_progress(step, max(top, last - decay_steps), last)


def _decay_progress(step: int, first: int, last: int) -> float:
    """Share of the way from step `first` to step `last`, from 0 to 1; 0 for an empty way."""
    if last <= first:
        return 0.0
    return min(max(step - first, 0) / (last - first), 1.0)


@dataclass(frozen=True, kw_only=True)
class OptimizerShard:
    """The part of one parameter that this rank updates."""

    param: ParamShard
    rows: tuple[int, int] | None  # first and last + 1 of the updated rows; None for all
    total: Tensor  # float32 sum of the gradients of all backward passes, in the shape of the parameter on this rank
    gradient: Tensor  # the updated rows of `total`, a view (`by_rows`); of the global batch after the reduction
    values: Tensor  # the updated rows of the parameter, a view (`by_rows`)
    attached: Tensor | None  # `parameter.grad` outside of backward: a buffer that autograd adds to, or None with a hook
    shard_axis: Axis  # ranks that divide the rows and reduce the gradient here, not in FSDP2
    replicate_axis: Axis  # ranks that update the same rows and sum the gradient here
    writes: bool  # this rank saves the rows

    def part(self, held: Sequence[Tensor], codec: StateCodec | None) -> ShardedTensor:
        """Tensors of the updated rows, as a part of a checkpoint."""
        tensor, *more = held
        shape, pieces = self.param.shape, self.param.pieces(self.rows)
        return ShardedTensor(
            tensor=tensor, shape=shape, pieces=pieces, writes=self.writes, more=tuple(more), codec=codec
        )

    def matrices(self) -> MatrixShard:
        """The gradients of the updated rows, as matrices that are orthogonalized."""
        param, axis = self.param, self.param.data
        assert param.matrices is not None, f"{param.name} has no matrices"
        is_chunked = is_dtensor(param.parameter)
        return MatrixShard(
            matrices=param.matrices,
            cuts=param.cuts,
            division=RowDivision(axis.name, 1 if self.rows is None else axis.shard.size, is_chunked),
            part=self.part((self.gradient,), None),
        )

    @property
    def start(self) -> int:
        """Place of the first updated value in the parameter of this rank."""
        return 0 if self.rows is None else self.rows[0] * row_width(self.param.local_shape)

    @property
    def others(self) -> tuple[Tensor, ...]:
        """Rows of `total` that other ranks update."""
        if self.shard_axis is NO_AXIS or self.rows is None:
            return ()
        first, end = self.rows
        rows = by_rows(self.total)
        return tuple(part for part in (rows[:first], rows[end:]) if part.numel())


@torch.no_grad()
def optimizer_shard_of(
    param: ParamShard, parallel: Parallel, gradients: GradientOffload | None = None
) -> OptimizerShard:
    """Decide which rows of a parameter this rank updates, and create the gradient, unless `gradients` has it."""
    parameter, data = param.parameter, param.data
    is_precise = is_own_master(parameter)
    rows: tuple[int, int] | None = None
    shard, replicate = NO_AXIS, data
    attached: Tensor | None = None
    if is_dtensor(parameter):  # sharded by FSDP2, which has reduced the gradient when backward ends
        assert is_precise, f"{param.name} is sharded, so it must be its own float32 master"
        rows, writer = local_rows(parameter), data.replicate.rank == 0
        attached = torch.zeros_like(parameter)
        assert is_dtensor(attached), "zeros like a DTensor are one"
        total = gradient = attached.to_local()
        values = parameter.to_local().detach()
        replicate = NO_AXIS
    elif gradients is not None and param.name in gradients.totals:
        assert data.size == 1 and not param.partial, f"{param.name}: gradients of one rank only are on the host"
        total, gradient = gradients.totals[param.name], gradients.host[param.name]
        attached, values, writer = total if is_precise else None, parameter.detach(), True
    else:
        total = parameter.new_zeros(parameter.shape, dtype=parameter.dtype if is_precise else torch.float32)
        attached = total if is_precise else None
        gradient, values, writer = total, parameter.detach(), data.rank == 0
        if _is_divided(param, parallel):
            shard, replicate, writer = data.shard, data.replicate, data.replicate.rank == 0
            gradient, values = by_rows(total), by_rows(values)
            rows = rows_of_shard(len(values), shard.rank, shard.size)
            gradient, values = gradient[slice(*rows)], values[slice(*rows)]
    return OptimizerShard(
        param=param,
        rows=rows,
        total=total,
        gradient=gradient,
        values=values,
        attached=attached,
        shard_axis=shard,
        replicate_axis=replicate,
        writes=writer and all(axis.rank == 0 for axis in param.partial) and values.numel() > 0,
    )


def _is_divided(param: ParamShard, parallel: Parallel) -> bool:
    """Whether ranks update parts of a parameter that each holds whole."""
    return parallel.shard in ("auto", "optimizer") and param.data.shard.size > 1 and param.parameter.ndim > 0


NO_FACTORS: Mapping[str, Tensor] = MappingProxyType({})

_DEFAULTS = Parallel()
_ON_DEVICE = Offload()


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes that one rank holds for the whole run, on the device unless noted."""

    weights: int
    gradients: int  # float32 sums, or the slots that they pass through
    optimizer: int  # moments and separate masters, or the buffers that they pass through
    moments: int  # of `optimizer`; all of it with buffers
    host: int = 0  # of the optimizer and the gradients in host memory


class MasterAdamW:
    """AdamW (arXiv 1711.05101) over the parameters of one rank, all on one device; frozen ones are saved only.

    Ranks with the same parameters create their optimizers together. `bucket_values` is the size of a message; None for
    the default (penstock/parallel/buckets.py).
    """

    def __init__(
        self,
        params: Sequence[ParamShard],
        settings: Optimizer,
        *,
        parallel: Parallel = _DEFAULTS,
        axes: Axes = ALONE,
        bucket_values: int | None = None,
        offload: Offload = _ON_DEVICE,
    ) -> None:
        trained = [param for param in params if param.parameter.requires_grad]
        self._frozen = [param for param in params if not param.parameter.requires_grad]
        assert trained, "an optimizer needs a parameter that is trained"
        # In the order of names, so that messages match even between ranks that hold different layers.
        trained = sorted(trained, key=lambda param: param.name)
        self.gradient_offload = _offload_of(trained) if offload.gradients else None
        self._shards = {param.name: optimizer_shard_of(param, parallel, self.gradient_offload) for param in trained}
        assert len({id(param.parameter) for param in trained}) == len(self._shards) == len(trained), "one comes twice"
        self._world = axes.world
        self._sums = list(_sums_over_ranks(self._shards.values(), parallel, bucket_values))
        self._gathers = list(_gathers(self._shards.values(), bucket_values))
        for shard in self._shards.values():
            _attach(shard)
        on_host = frozenset(() if self.gradient_offload is None else self.gradient_offload.totals)
        self._on_device = [shard for name, shard in self._shards.items() if name not in on_host]  # their gradients
        self._has_zeros = True  # in the updated rows
        of_muon, rest = _by_method(self._shards, settings)
        values = {name: shard.values for name, shard in rest.items()}
        gradients = {name: shard.gradient for name, shard in rest.items()}
        starts = {name: shard.start for name, shard in self._shards.items()}
        self._adamw: FusedAdamW | StreamedAdamW
        if offload.optimizer:
            assert not of_muon, "a rule refuses Muon with its state in host memory"
            self._adamw = StreamedAdamW(values, gradients, settings, starts=starts, host_gradients=on_host)
        else:
            self._adamw = FusedAdamW(values, gradients, settings, starts=starts)
        self._muon = (
            _muon_of(of_muon, settings, axes, self._adamw.step, bucket_values) if settings.method == "muon" else None
        )
        self._tensors: dict[str, StateTensor] = {**self._adamw.tensors}
        if self._muon is not None:
            self._tensors |= self._muon.tensors

    def gradient_of(self, name: str) -> Tensor:
        """The float32 buffer of a parameter's gradients; the same tensor for the whole run."""
        return self._shards[name].total

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Names, and gradients of the rows that this rank updates; complete after `reduce_gradients`."""
        for name, shard in self._shards.items():
            yield name, shard.gradient

    @torch.no_grad()
    def zero_gradients(self, *, before_passes: bool = False) -> None:
        """Zero the buffers. `model.zero_grad` would detach them.

        `before_passes`: if `step` was the last call, no pass has run since then, so only rows of other ranks are left.
        """
        if self.gradient_offload is not None:
            self.gradient_offload.start_step()
        shards, is_rest = self._on_device, before_passes and self._has_zeros
        left = [rows for shard in shards for rows in shard.others] if is_rest else [shard.total for shard in shards]
        self._has_zeros = False
        if left:
            torch._foreach_zero_(left)

    def reduce_gradients(self) -> None:
        """Sum the gradients over ranks, once a step after the last backward pass."""
        if self.gradient_offload is not None:
            self.gradient_offload.finish()
        for reduce in self._sums:
            reduce()

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """2-norm of the gradient of the whole model, over all ranks: float32 scalar on the device."""
        counted = {shard.param.name: shard.gradient for shard in self._on_device if shard.writes}  # each row once
        norms = dict(zip(counted, torch._foreach_norm(list(counted.values())), strict=True)) if counted else {}
        if self.gradient_offload is not None:
            norms |= self.gradient_offload.norms()
        ordered = [norms[name] for name in self._shards if name in norms] or [torch.zeros_like(self._adamw.step)]
        norm = torch.linalg.vector_norm(torch.stack(ordered))
        if self._world.group is None:
            return norm
        square = norm.double().square()  # float64, whose range squares of float32 cannot leave
        dist.all_reduce(square, group=self._world.group)
        return square.sqrt().float()

    @torch.no_grad()
    def step(self, learning_rate: float, divisor: float = 1.0, row_factors: Mapping[str, Tensor] = NO_FACTORS) -> None:
        """Update every parameter from the gradients, which are divided by `divisor` first (`clip_divisor`).

        Then multiply rows of parameters by factors (QK-clip), one for each row on this rank. Afterwards the gradients
        of the updated rows are zero.
        """
        for name, shard in self._shards.items():
            assert shard.param.parameter.grad is shard.attached, f"the gradient buffer of {name} was detached"
        if self.gradient_offload is not None:
            self.gradient_offload.finish()
        self._adamw.update(learning_rate, divisor)
        if self._muon is not None:
            self._muon.update(learning_rate, divisor)
        for name, factors in row_factors.items():
            tensor, rows = self._tensors[name], self._shards[name].rows
            rank_factors = factors if rows is None else factors[rows[0] : rows[1]]
            store_master(tensor, master_of(tensor) * rank_factors.view(-1, *(1,) * (tensor.value.ndim - 1)))
        self._has_zeros = True
        for gather in self._gathers:
            gather()

    def parts(self) -> dict[str, ShardedTensor]:
        """All state for a checkpoint, by name, float32 in any format; the live tensors.

        `model.*` is the master, with `moment1.*` and, of AdamW, `moment2.*`; `step` counts updates. Call `loaded` after
        filling them. Read or fill them before the next step; for host tensors this waits for the last one.
        """
        self._adamw.settle()
        stored = {name: stored_parts(self._tensors[name]) for name in self._shards}
        parts = {
            f"{kind}.{name}": self._shards[name].part(*kinds[kind])
            for kind in ("model", "moment1", "moment2")
            for name, kinds in stored.items()
            if kind in kinds
        }
        frozen = {f"model.{param.name}": _frozen_part(param) for param in self._frozen}
        return {**parts, **frozen, "step": whole(self._adamw.step, writes=self._world.rank == 0)}

    def memory(self) -> StateBytes:
        """Memory of this optimizer; works on the meta device."""
        shards = self._shards.values()
        weights = [shard.values if is_dtensor(shard.param.parameter) else shard.param.parameter for shard in shards]
        frozen = (param.parameter for param in self._frozen)
        weights += [weight.to_local() if is_dtensor(weight) else weight for weight in frozen]
        there = self.gradient_offload
        return StateBytes(
            weights=_bytes(weights),
            gradients=_bytes(shard.total for shard in self._on_device) + (0 if there is None else there.device_bytes),
            optimizer=self._adamw.device_bytes + (0 if self._muon is None else self._muon.device_bytes),
            moments=self._adamw.moment_bytes + (0 if self._muon is None else self._muon.moment_bytes),
            host=self._adamw.host_bytes + (0 if there is None else there.host_bytes),
        )

    def loaded(self) -> None:
        """Continue from filled tensors of `parts`: parameters follow their masters."""
        self._adamw.loaded()
        if self._muon is not None:
            self._muon.loaded()
        for gather in self._gathers:
            gather()


def _by_method(
    shards: Mapping[str, OptimizerShard], settings: Optimizer
) -> tuple[dict[str, OptimizerShard], dict[str, OptimizerShard]]:
    """Parameters that Muon updates, and those that AdamW does."""
    has_muon = settings.method == "muon"
    of_muon = {name: shard for name, shard in shards.items() if has_muon and shard.param.matrices is not None}
    return of_muon, {name: shard for name, shard in shards.items() if name not in of_muon}


def _muon_of(
    shards: Mapping[str, OptimizerShard], settings: Optimizer, axes: Axes, step: Tensor, bucket_values: int | None
) -> ShardedMuon:
    """Muon over the matrices of hidden layers."""
    return ShardedMuon(
        {name: shard.values for name, shard in shards.items()},
        {name: shard.matrices() for name, shard in shards.items()},
        settings,
        axes,
        starts={name: shard.start for name, shard in shards.items()},
        step=step,
        values_per_round=bucket_values,
    )


def _sums_over_ranks(
    shards: Collection[OptimizerShard], parallel: Parallel, bucket_values: int | None
) -> Iterator[Callable[[], None]]:
    """The reductions of a step's gradients, none on one rank. All ranks take the axes in the order of their names."""
    dtype = torch.float32 if parallel.reduce == "fp32" else torch.bfloat16
    by_axes: dict[tuple[str, str], list[OptimizerShard]] = defaultdict(list)
    for shard in shards:
        by_axes[shard.shard_axis.name, shard.replicate_axis.name].append(shard)
    for _, same in sorted(by_axes.items()):
        axis, replicate = same[0].shard_axis, same[0].replicate_axis
        if axis.group is not None or replicate.group is not None:
            entries = [BucketEntry(whole=shard.total, own=shard.gradient) for shard in same]
            yield partial(reduce_rows, entries, axis, replicate, dtype, bucket_values)
    # Axes besides data over which gradients are summed, such as tensor for the weight of a norm that each rank
    # applies to its positions. Only the rows that this rank updates are summed.
    axes = {axis.name: axis for shard in shards for axis in shard.param.partial}
    for axis in (axes[name] for name in sorted(axes)):
        partial_sums = [shard.gradient for shard in shards if axis in shard.param.partial]
        entries = [BucketEntry(whole=rows, own=rows) for rows in partial_sums]
        yield partial(reduce_rows, entries, NO_AXIS, axis, dtype, bucket_values)


def _gathers(shards: Iterable[OptimizerShard], bucket_values: int | None) -> Iterator[Callable[[], None]]:
    """The gathers of the parameters that ranks update by parts."""
    divided: dict[tuple[str, str], list[OptimizerShard]] = defaultdict(list)
    for shard in shards:
        if shard.shard_axis.size > 1:
            divided[shard.shard_axis.name, str(shard.param.parameter.dtype)].append(shard)
    for _, same in sorted(divided.items()):
        entries = [BucketEntry(whole=shard.param.parameter.detach(), own=shard.values) for shard in same]
        yield partial(gather_rows, entries, same[0].shard_axis, bucket_values)


def _offload_of(params: Sequence[ParamShard]) -> GradientOffload:
    shapes = {param.name: tuple(param.parameter.shape) for param in params if layer_of_sums(param.name) is not None}
    return GradientOffload(shapes, params[0].parameter.device)


def clip_divisor(norm: float, limit: float) -> float:
    """Divisor that limits a gradient norm to `limit`; exactly 1 below it, or with limit 0."""
    return max(1.0, (norm + 1e-6) / limit) if limit > 0.0 else 1.0


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _frozen_part(param: ParamShard) -> ShardedTensor:
    """A parameter that is not trained, as a part of a checkpoint: it has no master, and is saved as float32."""
    parameter = param.parameter
    rows = local_rows(parameter) if is_dtensor(parameter) else None
    held = parameter.to_local() if is_dtensor(parameter) else parameter
    rank = param.data.replicate.rank if is_dtensor(parameter) else param.data.rank
    return ShardedTensor(
        tensor=held.detach(),
        shape=param.shape,
        pieces=param.pieces(rows),
        writes=rank == 0 and all(axis.rank == 0 for axis in param.partial) and held.numel() > 0,
        codec=None if is_own_master(held) else ROUNDED,
    )


def _attach(shard: OptimizerShard) -> None:
    """Let backward passes add to the sum of a parameter's gradients, directly or by a hook."""
    shard.param.parameter.grad = shard.attached
    if shard.attached is None:
        shard.param.parameter.register_post_accumulate_grad_hook(partial(_move_gradient, shard.total))


def _move_gradient(total: Tensor, parameter: Tensor) -> None:
    """Add the gradient of a finished backward pass to the float32 sum."""
    if parameter.grad is None:
        return  # A deferred weight gradient: autograd calls again when it is computed (parallel/async_transfer.py).
    total.add_(parameter.grad)
    parameter.grad = None
