"""Shards of parameters: the rectangles of a parameter that a rank holds, and FSDP2 (`shard = full`).

A parameter of the whole model reaches a rank in three steps:

    cuts      tensor and expert parallelism give the rank a part of it (penstock/layout/sharding.py)
    data      ranks on this axis hold the same part and see different tokens; they may divide its rows (FSDP, ZeRO-1)
    partial   ranks on these axes hold the same part too, and each has a part of its gradient: a norm's weight under
              tensor parallelism, an embedding that two pipeline stages use

The gradient of the global batch is the sum over `data` and over every axis of `partial`.

With FSDP2 a rank holds rows of every parameter in float32, the masters. A unit (one decoder block) is gathered around
forward and backward in the compute dtype, or in 8 bits (`Float8Shard`), and its gradients are
reduce-scattered: summed, never averaged, because ranks' losses are parts of one mean. Experts are sharded over the
ranks that hold the same experts, as one matrix with the rows of all of them: so ranks divide single experts too, and
evenly, without the copies that FSDP2 makes where it divides another dim. With hybrid sharding (`Axis.inner`) a copy is
sharded inside a block of ranks.
Ignored parameters (routers), and those with one rank to shard over, stay whole for the optimizer.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.base.errors import KernelError
from penstock.config.parallel import Parallel
from penstock.kernels.float8 import reference
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import GatheredCopies, GatheredWeight, Quantized, Recipe
from penstock.layout.sharding import Cut, LocalSlice, Matrices, local_shape, local_slices, row_width, rows_of_chunk
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import reduce_flat

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Whether FSDP2 has sharded a parameter; nothing is a DTensor before someone has imported it."""
    # Sympy comes with the import, which would cost every process that shards nothing a good part of its start.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


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
    divided = [name for name, value in root.named_parameters() if is_dtensor(value) and value not in ignored]
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
    fsdp_root = cast("FSDPModule", root)  # which `_divide` has made it
    fsdp_root.set_reshard_after_forward(False, recurse=False)
    _set_prefetch(fsdp_root, units, settings.prefetch)


def local_rows(parameter: Tensor) -> tuple[int, int]:
    """First and last + 1 of the rows that this rank holds of a parameter that FSDP2 has sharded."""
    assert is_dtensor(parameter), "FSDP2 has not divided this parameter"
    assert parameter.placements[-1].is_shard(0), f"divided as {parameter.placements}"
    mesh, dim = parameter.device_mesh, parameter.device_mesh.ndim - 1  # with hybrid sharding dim 0 replicates
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank holds nothing of the parameter"
    return rows_of_chunk(parameter.shape[0], coordinate[dim], mesh.size(dim))


def own_rows(tensor: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """This rank's part of a parameter, sharded or not: the plain tensor, and first and last + 1 of its rows."""
    if is_dtensor(tensor):
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
    fsdp = import_module("torch.distributed.fsdp")
    divided: FSDPModule = fsdp.fully_shard(
        module,
        mesh=_mesh(axis, device),
        reshard_after_forward=settings.reshard == "forward",
        # Modules choose the types of their inputs themselves: router probabilities stay float32.
        mp_policy=fsdp.MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        ignored_params=ignored,
    )
    divided.set_gradient_divide_factor(1.0)
    # Else FSDP2 multiplies by 1 inside the reduction, which gloo cannot.
    divided.set_force_sum_reduction_for_comms(True)
    if settings.reduce == "bf16":
        divided.set_custom_reduce_scatter(_ReduceInBf16())  # type: ignore[arg-type] # its base has no public name


def _mesh(axis: Axis, device: torch.device) -> DeviceMesh:
    shard, replicate = axis.shard, axis.replicate
    assert shard.group is not None, f"{shard} divides nothing"
    if replicate.group is None:
        return DeviceMesh.from_group(shard.group, device.type)
    ranks = torch.tensor(axis.ranks, device="cpu").view(replicate.size, shard.size)  # blocks of neighbours are rows
    groups = [replicate.group, shard.group]
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=("replicate", "shard"))


def _set_prefetch(root: "FSDPModule", units: Sequence[nn.Module], count: int) -> None:
    """Gather `count` units ahead, with the modules inside them that are sharded by themselves."""
    if count == 0:
        return
    kind = import_module("torch.distributed.fsdp").FSDPModule
    divided = [[part for part in unit.modules() if isinstance(part, kind)] for unit in units]  # the unit first
    root.set_modules_to_forward_prefetch([part for parts in divided[:count] for part in parts])
    for index, (module, *_) in enumerate(divided):
        following = divided[index + 1 : index + 1 + count]
        before = divided[max(0, index - count) : index][::-1]  # the nearest first, as backward needs them
        module.set_modules_to_forward_prefetch([part for parts in following for part in parts])
        module.set_modules_to_backward_prefetch([part for parts in before for part in parts])


class Float8Shard:
    """This rank's rows of a weight in 8 bits, and the scales of the whole.

        once a step     block maxima of our rows -> all-reduce -> scales of the whole weight
                        our rows, rounded to the compute dtype, over these scales -> 8 bits, kept until the next step
        each gather     8-bit rows travel as bytes and arrive as a weight for products (`GatheredWeight`)

    So a rank's rows may begin and end inside a 128 x 128 block, and the gathered weight is bit for bit the quantized
    whole weight. Every rank has the scales of the whole weight (4 bytes for 16,384 values), so a gather computes and
    sends none. FSDP2 asks a tensor what to send and how to use what arrives (`fsdp_pre_all_gather`,
    `fsdp_post_all_gather`); both are attached to the plain float32 tensor of local rows, so optimizer and checkpoints
    see nothing new.

    Call `refresh` after every change of the masters; a gather asserts it.

    `parameter` is F x D, or e F x D for a stack of e = `matrices`, in float32, sharded by FSDP2 over dim 0 and
    `axis.shard`. Its values are rounded to `compute_dtype` first. Raises a KernelError for a recipe that quantizes a
    weight and its transpose apart, so that both would have to travel.
    """

    def __init__(
        self,
        parameter: Tensor,
        axis: Axis,
        recipe: Recipe,
        rule: Float8Rule,
        compute_dtype: torch.dtype,
        matrices: int | None = None,
    ) -> None:
        if recipe.weights[0] != recipe.weights[1]:
            raise KernelError(
                f"weights of recipe {recipe.name} cannot be gathered in 8 bits",
                got="one copy for the output and another for the input's gradient, together as many bytes as 16 bits",
                allowed="blockwise, blockwise-square, tensorwise",
                fix="set float8.gather=false, or the recipe to blockwise",
            )
        assert is_dtensor(parameter), "FSDP2 has not divided this parameter"
        # Its very own tensor: `to_local` gives an alias, at which FSDP2 does not look.
        self.master: Tensor = parameter._local_tensor
        self.axis, self.recipe, self.compute_dtype = axis.shard, recipe, compute_dtype
        self.form, self.operators = rule.forward, rule.operators
        rows, columns = parameter.shape
        self.shape = (rows, columns) if matrices is None else (matrices, rows // matrices, columns)
        height = self.shape[-2]  # rows of a matrix
        self.block = recipe.weights[0] or max(height, columns)  # side of a block; 0 means one block for a matrix
        blocks = -(-height // self.block)  # of a matrix, by rows
        self.scales = self.master.new_empty(*self.shape[:-2], blocks, -(-columns // self.block))
        # Blocks of our rows, counted over all matrices, and the places of our rows in them.
        indices = torch.arange(*local_rows(parameter), device="cpu")
        block_of_row = indices // height * blocks + indices % height // self.block
        first, last = block_of_row[[0, -1]].tolist() if len(indices) else (0, -1)
        self.own_blocks = slice(first, last + 1)
        self.block_of_row = block_of_row.to(self.master.device)
        self.place_of_row = ((block_of_row - first) * self.block + indices % height % self.block).to(self.master.device)
        # What a rank lacks in rows is sent too: all send the same number of bytes.
        sent = -(-rows // self.axis.size)
        self.values = self.master.new_zeros(sent, columns, dtype=torch.uint8).view(self.form.dtype)
        self.version = -1  # of the master that `values` were made from
        self.master.fsdp_pre_all_gather = self.fsdp_pre_all_gather  # type: ignore[attr-defined] # FSDP2 looks for them
        self.master.fsdp_post_all_gather = self.fsdp_post_all_gather  # type: ignore[attr-defined]

    def maxima(self) -> Tensor:
        """Block maxima of this rank's values; flat float32."""
        whole = torch.zeros_like(self.scales)
        if len(self.master):  # with fewer rows than ranks, some ranks hold none
            of_rows = torch.linalg.vector_norm(self._blocks_of_rows(), ord=torch.inf, dim=-1).float()
            maxima = whole.flatten(0, -2)[self.own_blocks]
            padded = maxima.new_zeros(len(maxima) * self.block, maxima.shape[1])  # rows that other ranks hold stay zero
            maxima.copy_(padded.index_copy_(0, self.place_of_row, of_rows).unflatten(0, (-1, self.block)).amax(1))
        return whole.view(-1)

    def quantize(self, scales: Tensor) -> None:
        """Quantize our rows over the flat scales of the whole weight."""
        self.version = self.master._version
        self.scales.view(-1).copy_(scales)
        if len(self.master):
            divided = self._blocks_of_rows() / self.scales.flatten(0, -2)[self.block_of_row][..., None]
            numbers = divided.clamp_(-self.form.largest, self.form.largest).flatten(-2)
            self.values[: len(self.master)].copy_(numbers[..., : self.shape[-1]])

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """Bytes to send: not every backend knows 8-bit values."""
        assert self.version == self.master._version, "a master changed without a refresh of its 8-bit rows"
        return (self.values.view(torch.uint8),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[GatheredWeight, tuple[Tensor]] | None:
        """The gathered weight, and memory behind it that FSDP2 frees and restores."""
        if out is not None:  # All memory is the old one, filled again.
            assert isinstance(out, GatheredWeight), "FSDP2 gives back what it got at first"
            out.copies.renewed()
            return None
        rows, columns = prod(self.shape[:-1]), self.shape[-1]
        values = outputs[0][:rows].view(self.form.dtype).view(self.shape)
        backward = torch.empty_like(values.transpose(-1, -2), memory_format=torch.contiguous_format)
        copies = GatheredCopies(
            Quantized(values, self.scales, self.recipe.weights),
            Quantized(backward, self.scales.transpose(-1, -2), self.recipe.weights),
            self.operators.transpose_weight,
        )
        return GatheredWeight(copies, param_dtype, (rows, columns)), (backward,)

    def _blocks_of_rows(self) -> Tensor:
        """Our rows in the compute dtype, the last dim in blocks."""
        rounded = self.master.to(self.compute_dtype)
        missing = -self.shape[-1] % self.block
        return (F.pad(rounded, (0, missing)) if missing else rounded).unflatten(-1, (-1, self.block))


@torch.no_grad()
def refresh(weights: Sequence[Float8Shard]) -> None:
    """Quantize the masters, in the same order on all ranks (collective). An axis has one recipe and format."""
    by_axis: dict[str, list[Float8Shard]] = defaultdict(list)
    for weight in weights:
        by_axis[weight.axis.name].append(weight)
    for _, together in sorted(by_axis.items()):  # one all-reduce for each axis, in one order on all ranks
        first = together[0]
        assert len({(part.recipe, part.form) for part in together}) == 1, f"several recipes on {first.axis.name}"
        maxima = torch.cat([weight.maxima() for weight in together])
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=first.axis.group)
        # The scale of a block is that of its largest number alone.
        scales = reference.quantize(maxima[None], (1, 1), first.form, first.recipe.scaling).scales[0]
        for weight, factors in zip(together, scales.split([weight.scales.numel() for weight in together]), strict=True):
            weight.quantize(factors)
