"""Shards of parameters: the rectangles of a parameter that a rank holds, and FSDP2 (`shard = full`).

A parameter of the whole model reaches a rank in three steps:

    cuts      tensor and expert parallelism give the rank a part of it (penstock/layout/sharding.py)
    data      ranks on this axis hold the same part and see different tokens; they may divide its rows (FSDP, ZeRO-1)
    partial   ranks on these axes hold the same part too, and each has a part of its gradient: a norm's weight under
              tensor parallelism, an embedding that two pipeline stages use

The gradient of the global batch is the sum over `data` and over every axis of `partial`.

With FSDP2 a rank holds rows of every parameter in float32, the masters. A unit (one decoder block) is gathered around
forward and backward in the compute dtype, or in 8 bits (penstock/parallel/float8_gather.py), and its gradients are
reduce-scattered: summed, never averaged, because ranks' losses are parts of one mean. Experts are sharded over the
ranks that hold the same experts, as one matrix with the rows of all of them: so ranks divide single experts too, and
evenly, without the copies that FSDP2 makes where it divides another dim. With hybrid sharding (`Axis.inner`) a copy is
sharded inside a block of ranks.
Ignored parameters (routers), and those with one rank to shard over, stay whole for the optimizer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from penstock.config.parallel import Parallel
from penstock.layout.matrices import Matrices
from penstock.layout.sharding import Cut, LocalSlice, local_shape, local_slices, row_width, rows_of_chunk
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import reduce_flat


@dataclass(frozen=True, kw_only=True)
class ParamShard:
    """One trained parameter, as this rank holds it."""

    name: str  # in the whole model; the same on every rank and layout
    parameter: nn.Parameter  # the local part as a plain tensor, or FSDP2's DTensor over `data`
    shape: tuple[int, ...]  # of the whole
    cuts: tuple[Cut, ...]  # our part of it, before `data` divides it
    data: Axis  # ranks that hold the same part and see different tokens
    partial: tuple[Axis, ...] = ()  # further axes over which the gradient is summed
    matrices: Matrices | None = None  # that Muon orthogonalizes; None for vectors, embeddings, head and routers

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Before `data` divides it."""
        return local_shape(self.shape, self.cuts)

    def pieces(self, rows: tuple[int, int] | None = None) -> tuple[LocalSlice, ...]:
        """Rectangles of our part, or of some of its rows, in the whole."""
        return local_slices(self.shape, self.cuts, rows)


@dataclass(frozen=True)
class StateCodec:
    """A tensor that a rank holds as others: `decode` returns its float32 values, `encode` what is held for them."""

    decode: Callable[[Sequence[Tensor]], Tensor]
    encode: Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """A tensor of a checkpoint, as this rank holds it; with a `codec` the checkpoint has the decoded values."""

    tensor: Tensor  # plain, no DTensor
    shape: tuple[int, ...]  # of the whole
    pieces: tuple[LocalSlice, ...]  # rectangles of the whole that `tensor` holds
    writes: bool = True  # one of the ranks with equal values writes; all of them load
    more: tuple[Tensor, ...] = ()  # other tensors of a codec
    codec: StateCodec | None = None

    @property
    def held(self) -> tuple[Tensor, ...]:
        return self.tensor, *self.more

    @property
    def dtype(self) -> torch.dtype:
        """Of the values in a checkpoint."""
        return self.tensor.dtype if self.codec is None else torch.float32

    def decoded(self) -> "ShardedTensor":
        """The part in plain values: itself, or a copy in host memory, because a device may have no room."""
        if self.codec is None:
            return self
        return self._plain(self.codec.decode([tensor.detach().cpu() for tensor in self.held]))

    def room(self, device: torch.device | None = None) -> "ShardedTensor":
        """A part to fill with values, which `fill` takes: itself, or undefined memory.

        `device` defaults to that of the codec's last tensor. The values, and what `fill` encodes there, take up to
        three times the memory of the float32 part.
        """
        if self.codec is None:
            return self
        where = self.held[-1].device if device is None else device
        return self._plain(torch.empty(self.tensor.shape, dtype=torch.float32, device=where))

    @torch.no_grad()
    def fill(self, values: Tensor) -> None:
        """Take over the values of `room`."""
        if self.codec is not None:
            for held, new in zip(self.held, self.codec.encode(values), strict=True):
                held.copy_(new)

    def views(self) -> list[tuple[LocalSlice, Tensor]]:
        """The rectangles, each with its elements of `tensor`."""
        assert self.codec is None, "only plain values have rectangles"
        tensor = self.tensor.detach()
        if len(self.pieces) == 1 and self.pieces[0].sizes == tuple(tensor.shape):
            return [(self.pieces[0], tensor)]
        assert tensor.is_contiguous(), "rectangles lie in a contiguous tensor"
        start = tensor.storage_offset()
        return [(piece, tensor.as_strided(piece.sizes, piece.strides, start + piece.offset)) for piece in self.pieces]

    def _plain(self, tensor: Tensor) -> "ShardedTensor":
        return replace(self, tensor=tensor, more=(), codec=None)


def whole(tensor: Tensor, *, writes: bool = True) -> ShardedTensor:
    shape = tuple(tensor.shape)
    return ShardedTensor(tensor=tensor, shape=shape, pieces=local_slices(shape, ()), writes=writes)


def by_rows(tensor: Tensor) -> Tensor:
    """A view in which dim 0 counts rows (`row_width`): stacks of matrices become one matrix."""
    return tensor.flatten(0, -2) if tensor.ndim > 2 else tensor


def shard_fully(
    units: Sequence[nn.Module],
    root: nn.Module,
    axis: Axis,
    settings: Parallel,
    device: torch.device,
    compute_dtype: torch.dtype,
    ignored: set[nn.Parameter],
    inner: Mapping[nn.Module, Axis],
) -> None:
    """Shard the parameters of a model by FSDP2, in place.

    They become DTensors, so `ParamShard`s, `to_empty` of `root` and filling the local rows come after this. `units` are
    in the order of forward, none inside another; modules of `inner` have their own axis, and their stacks of matrices
    become matrices (`by_rows`). `root` holds the units and the modules of none (embedding, head), which stay gathered
    from forward to backward; parameters that two roots of a rank share must be ignored by both.
    """
    # Modules with one rank to shard over stay whole, also where the root around them is sharded.
    ignored = ignored | {
        parameter for module, sub_axis in inner.items() if sub_axis.shard.size == 1 for parameter in module.parameters()
    }
    divided = [name for name, value in root.named_parameters() if isinstance(value, DTensor) and value not in ignored]
    assert not divided, f"{divided[0]} belongs to another root already"
    for module, sub_axis in inner.items():  # first, because FSDP2 takes the parameters that no module inside has taken
        if sub_axis.shard.size > 1:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim > 2:
                    matrix = nn.Parameter(by_rows(parameter.detach()), requires_grad=parameter.requires_grad)
                    module.register_parameter(name, matrix)
        _divide(module, sub_axis, settings, device, compute_dtype, ignored)
    if axis.shard.size == 1:
        return
    for unit in units:
        _divide(unit, axis, settings, device, compute_dtype, ignored)
    _divide(root, axis, settings, device, compute_dtype, ignored)
    assert isinstance(root, FSDPModule), "it has just been made one"
    root.set_reshard_after_forward(False, recurse=False)
    _set_prefetch(root, units, settings.prefetch)


def local_rows(parameter: Tensor) -> tuple[int, int]:
    """First and last + 1 of the rows that this rank holds of a parameter that FSDP2 has sharded."""
    assert isinstance(parameter, DTensor), "FSDP2 has not divided this parameter"
    assert parameter.placements[-1] == Shard(0), f"divided as {parameter.placements}"
    mesh, dim = parameter.device_mesh, parameter.device_mesh.ndim - 1  # with hybrid sharding dim 0 replicates
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank holds nothing of the parameter"
    return rows_of_chunk(parameter.shape[0], coordinate[dim], mesh.size(dim))


def own_rows(tensor: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """This rank's part of a parameter, sharded or not: the plain tensor, and first and last + 1 of its rows."""
    if isinstance(tensor, DTensor):
        return tensor.to_local(), local_rows(tensor)
    return tensor, (0, tensor.numel() // row_width(tuple(tensor.shape)))


class _ReduceInBf16:
    """Reduces gradients as bfloat16, while those of micro-batches add up in float32; over copies they stay float32.

    FSDP2's own `reduce_dtype` would add up micro-batches in bfloat16 too.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert not async_op, "FSDP2 reduces in a stream of its own"
        received = torch.empty_like(output_tensor, dtype=torch.bfloat16)
        reduce_flat(received, input_tensor.bfloat16(), op=op, group=group)
        output_tensor.copy_(received)


def _divide(
    module: nn.Module,
    axis: Axis,
    settings: Parallel,
    device: torch.device,
    compute_dtype: torch.dtype,
    ignored: set[nn.Parameter],
) -> None:
    if axis.shard.size == 1:
        return
    fully_shard(
        module,
        mesh=_mesh(axis, device),
        reshard_after_forward=settings.reshard == "forward",
        # Modules choose the types of their inputs themselves: router probabilities stay float32.
        mp_policy=MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        ignored_params=ignored,
    )
    assert isinstance(module, FSDPModule), "fully_shard makes it one"
    module.set_gradient_divide_factor(1.0)
    # Else FSDP2 multiplies by 1 inside the reduction, which gloo cannot.
    module.set_force_sum_reduction_for_comms(True)
    if settings.reduce == "bf16":
        module.set_custom_reduce_scatter(_ReduceInBf16())  # type: ignore[arg-type] # its base has no public name


def _mesh(axis: Axis, device: torch.device) -> DeviceMesh:
    shard, replicate = axis.shard, axis.replicate
    assert shard.group is not None, f"{shard} divides nothing"
    if replicate.group is None:
        return DeviceMesh.from_group(shard.group, device.type)
    ranks = torch.tensor(axis.ranks, device="cpu").view(replicate.size, shard.size)  # blocks of neighbours are rows
    groups = [replicate.group, shard.group]
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=("replicate", "shard"))


def _set_prefetch(root: FSDPModule, units: Sequence[nn.Module], count: int) -> None:
    """Gather `count` units ahead, with the modules inside them that are sharded by themselves."""
    if count == 0:
        return
    divided = [[part for part in unit.modules() if isinstance(part, FSDPModule)] for unit in units]  # the unit first
    root.set_modules_to_forward_prefetch([part for parts in divided[:count] for part in parts])
    for index, (module, *_) in enumerate(divided):
        following = divided[index + 1 : index + 1 + count]
        before = divided[max(0, index - count) : index][::-1]  # the nearest first, as backward needs them
        module.set_modules_to_forward_prefetch([part for parts in following for part in parts])
        module.set_modules_to_backward_prefetch([part for parts in before for part in parts])
