"""FSDP2 all-gathers in 8 bits, half the bytes; the masters stay each rank's float32 rows.

    once a step     block maxima of our rows -> all-reduce -> scales of the whole weight
                    our rows, rounded to the compute dtype, over these scales -> 8 bits, kept until the next step
    each gather     8-bit rows travel as bytes and arrive as a weight for products (`GatheredWeight`)

So a rank's rows may begin and end inside a 128 x 128 block, and the gathered weight is bit for bit the quantized whole
weight. Every rank has the scales of the whole weight (4 bytes for 16,384 values), so a gather computes and sends none.
FSDP2 asks a tensor what to send and how to use what arrives (`fsdp_pre_all_gather`, `fsdp_post_all_gather`); both are
attached to the plain float32 tensor of local rows, so optimizer and checkpoints see nothing new.

Call `refresh` after every change of the masters; a gather asserts it.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.base.errors import KernelError
from penstock.kernels.float8 import reference
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import GatheredCopies, GatheredWeight, Quantized
from penstock.kernels.float8.recipes import Recipe
from penstock.parallel.axes import Axis
from penstock.parallel.shard import local_rows


class Float8Shard:
    """This rank's rows of a weight in 8 bits, and the scales of the whole.

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
        assert isinstance(parameter, DTensor), "FSDP2 has not divided this parameter"
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
