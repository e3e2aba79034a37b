"""Implementations of the parts of the experts' networks, by backend: products, activation, biases.

`penstock.kernels.expert_ffn` combines them in one autograd function; nothing here knows autograd. `REFERENCE` follows
the definitions and copies the counts to the host, `TORCH` leaves them on the device, `TRITON` has the Triton kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import reference
from penstock.kernels.expert_parts import (
    SlottedWeight,
    WeightedBias,
    add_or_return,
    bias_gradient_by_definition,
    bias_gradient_in_torch,
    joined,
    no_tile_table,
    used,
)
from penstock.kernels.float8.quantized import WeightCopies
from penstock.kernels.grouped_gemm import (
    grouped_gemm_forward,
    grouped_gemm_input_gradient,
    grouped_gemm_weight_gradient,
)
from penstock.kernels.language import counts_on_host, start_kernel, tl, triton
from penstock.kernels.mxfp4 import to_mxfp4, to_mxfp4_triton
from penstock.kernels.operators import aligned, grouped_mm, torch_add_bias
from penstock.kernels.permute import unpermute
from penstock.kernels.reference import ExpertRule, RowOrder
from penstock.kernels.swiglu import swiglu_backward, swiglu_forward
from penstock.kernels.tile_table import BLOCK_SIZES, TileTable, tile_table

BLOCK_ROWS = BLOCK_SIZES[0]  # of a block: the first of the tile table's sizes
BLOCK_COLUMNS = 64  # that a program holds at a time: a tile of 32 elements for each of 128 threads
WALKED_COLUMNS = 512  # of a program where no dot products of whole rows are needed
BLOCK_PARTS = 32  # sums of blocks that the second kernel holds at a time


def bias_gradient(
    dy_RF: Tensor,
    counts_e: Tensor,
    weighted: WeightedBias | None = None,
    *,
    accumulate_into: Tensor | None = None,
    tiles: TileTable | None = None,
) -> Tensor:
    """The sum of each expert's rows, without autograd, in the dtype of dy; or `accumulate_into`, to which it is added.

        bias_parts_kernel     sums blocks of 64 rows of one expert, as the tile table cuts them
        bias_sums_kernel      adds up each expert's blocks, first to last

    The order of a sum depends on the counts alone, and one expert with nearly all rows keeps as many programs busy as
    even loads do. The sums of blocks are small: one float32 row for each block.

    The bias of the last product is added times the row's routing weight. Then rows are multiplied by their weights
    before the sum, and a weight's gradient gains the dot product of its row with the bias: both from the same read.

    Rows of `dy_RF` past the last expert's may hold anything. `weighted` has the weights that multiplied the bias, and
    their gradient to add to. Raises KernelError if a part of it, or the float32 sum, does not fit.
    """
    (rows, width), experts = dy_RF.shape, counts_e.numel()
    _check(dy_RF, experts, weighted, accumulate_into)
    tiles = tiles or tile_table(counts_e, rows)
    parts_PF = _parts(dy_RF.contiguous(), weighted, tiles)
    dbias_eF = dy_RF.new_empty(experts, width) if accumulate_into is None else accumulate_into
    start_kernel(
        bias_sums_kernel, (experts, triton.cdiv(width, BLOCK_COLUMNS)),
        parts_PF, dbias_eF, tiles.starts_e, experts,
        F=width, BLOCK_R=BLOCK_ROWS, BLOCK_P=BLOCK_PARTS, BLOCK_F=BLOCK_COLUMNS,
        BLOCK_E=triton.next_power_of_2(experts), ACCUMULATE=accumulate_into is not None, num_warps=4,
    )  # fmt: skip
    return dbias_eF


def _parts(dy_RF: Tensor, weighted: WeightedBias | None, tiles: TileTable) -> Tensor:
    """Sums of blocks of rows, float32; rows past the last block hold anything."""
    width, blocks = dy_RF.shape[1], tiles.owners.shape[1]
    parts_PF = torch.empty(blocks, width, dtype=torch.float32, device=dy_RF.device)
    walked = width if weighted is not None else WALKED_COLUMNS  # a dot product is made in one program, without atomics
    bias_eF, weights_R, dweights_R = weighted or (None, None, None)
    start_kernel(
        bias_parts_kernel, (blocks, triton.cdiv(width, walked)),
        dy_RF, None if bias_eF is None else bias_eF.contiguous(),
        None if weights_R is None else weights_R.contiguous(), dweights_R,
        parts_PF, tiles.owners[0], tiles.block_counts,
        F=width, WALKED=walked, BLOCK_R=BLOCK_ROWS, BLOCK_F=BLOCK_COLUMNS, num_warps=4,
    )  # fmt: skip
    return parts_PF


def _check(dy_RF: Tensor, experts: int, weighted: WeightedBias | None, accumulate_into: Tensor | None) -> None:
    rows, width = dy_RF.shape
    sums: list[tuple[str, Tensor, tuple[int, ...]]] = []
    if accumulate_into is not None:
        sums.append(("accumulate_into", accumulate_into, (experts, width)))
    if weighted is not None:
        sums.append(("dweights_R", weighted.dweights_R, (rows,)))
        sums.append(("weights_R", weighted.weights_R.contiguous(), (rows,)))
        if weighted.bias_eF.shape != (experts, width):
            got = tuple(weighted.bias_eF.shape)
            raise KernelError("bias gradient: bias_eF does not fit", got=got, allowed=(experts, width))
    for name, tensor, shape in sums:
        if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            text = f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}"
            raise KernelError(f"bias gradient: {name} does not fit", got=text, allowed=f"contiguous float32 {shape}")


@triton.jit
def bias_parts_kernel(
    dy_ptr, bias_ptr, weights_ptr, dots_ptr, parts_ptr, owners_ptr, block_count_ptr,  # dy R x F, parts P x F
    F: tl.constexpr, WALKED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One block of an expert's rows: their sum, and with dots_ptr their dot products with the expert's bias.

    Example: rows [1, 2] and [3, 4] with weights [0.5, 1] and bias [10, 20] sum to [3.5, 5] and add [50, 110] to dots.
    """
    block = tl.program_id(0).to(tl.int64)
    if block >= tl.load(block_count_ptr):
        return
    expert = tl.load(owners_ptr + block * 4).to(tl.int64)
    end = tl.load(owners_ptr + block * 4 + 2)  # fields of an owner: see `tile_table.OWNER_FIELDS`
    first_row = tl.load(owners_ptr + block * 4 + 1) + (block - tl.load(owners_ptr + block * 4 + 3)) * BLOCK_R
    row_R = first_row + tl.arange(0, BLOCK_R)
    is_own_R = row_R < end
    if dots_ptr is not None:
        weight_R = tl.load(weights_ptr + row_R, mask=is_own_R, other=0.0)
        dots_R = tl.load(dots_ptr + row_R, mask=is_own_R, other=0.0)
    for start in range(0, WALKED, BLOCK_F):
        column_F = tl.program_id(1) * WALKED + start + tl.arange(0, BLOCK_F)
        inside = is_own_R[:, None] & (column_F < F)[None, :]
        dy_RF = tl.load(dy_ptr + row_R[:, None] * F + column_F[None, :], mask=inside, other=0.0).to(tl.float32)
        if dots_ptr is not None:
            bias_F = tl.load(bias_ptr + expert * F + column_F, mask=column_F < F, other=0.0).to(tl.float32)
            dots_R += tl.sum(dy_RF * bias_F[None, :], 1)
            dy_RF *= weight_R[:, None]
        tl.store(parts_ptr + block * F + column_F, tl.sum(dy_RF, 0), mask=column_F < F)
    if dots_ptr is not None:
        tl.store(dots_ptr + row_R, dots_R, mask=is_own_R)


@triton.jit
def bias_sums_kernel(
    parts_ptr, sums_ptr, starts_ptr, experts,  # parts P x F, sums e x F, starts e + 1
    F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Add up the blocks of one expert, for some columns.

    Blocks are numbered as in the tile table: experts with 100, 0 and 3 rows have blocks 0 and 1, none, and 2.
    """
    expert = tl.program_id(0)
    column_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    expert_E = tl.arange(0, BLOCK_E)
    start_E = tl.load(starts_ptr + expert_E, mask=expert_E < experts, other=0)
    end_E = tl.load(starts_ptr + expert_E + 1, mask=expert_E < experts, other=0)
    blocks_E = (end_E - start_E + BLOCK_R - 1) // BLOCK_R  # as the tile table counts them
    first = tl.sum(tl.where(expert_E < expert, blocks_E, 0))
    past = first + tl.sum(tl.where(expert_E == expert, blocks_E, 0))
    sums_PF = tl.zeros([BLOCK_P, BLOCK_F], tl.float32)
    for block in range(first, past, BLOCK_P):
        part_P = block + tl.arange(0, BLOCK_P)
        inside = (part_P < past)[:, None] & (column_F < F)[None, :]
        sums_PF += tl.load(parts_ptr + part_P.to(tl.int64)[:, None] * F + column_F[None, :], mask=inside, other=0.0)
    sum_F = tl.sum(sums_PF, 0)
    sums_ptrs = sums_ptr + expert * F + column_F
    if ACCUMULATE:
        sum_F += tl.load(sums_ptrs, mask=column_F < F, other=0.0)
    tl.store(sums_ptrs, sum_F.to(sums_ptr.dtype.element_ty), mask=column_F < F)


# As fields of `float8.operators.SwigluForBackward`, in 16 or in 8 bits.
ActivationGradients = tuple[Any, Any, Any, Tensor | None, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class ExpertKernels:
    """The parts of `expert_ffn`; replace one with `dataclasses.replace`.

    The three products have the signatures of `penstock.kernels.grouped_gemm` without `launch`, and read and write
    `SlottedWeight`s as these do. Rows past the last expert's are zero in their results and unread in their operands.
    Backends other than Triton ignore `tiles`.
    """

    # (x_RD, w_eFD, counts_e, index_R, *, bias_eF, weights_R, tiles) -> y_RF; the weights multiply the bias.
    forward: Callable[..., Tensor]  # with `saves_rows` it also takes `keep`
    input_gradient: Callable[..., Tensor]  # (dy_RF, w_eFD, counts_e, *, tiles) -> dx_RD
    weight_gradient: Callable[..., Any]  # (dy_RF, x_RD, counts_e, index_R, *, accumulate_into, tiles) -> dw_eFD
    swiglu: Callable[..., Any]  # (gate_up_RF, weights_R, rule, counts_e, tiles) -> h_RF; unused rows hold anything
    # (gate_up_RF, weights_R, dh_RF, counts_e, rule, tiles, *, recompute); gradients of unused rows' weights are zero.
    swiglu_backward: Callable[..., ActivationGradients]
    bias_gradient: Callable[..., Tensor]  # (dy_RF, counts_e, weighted, *, accumulate_into, tiles) -> dbias_eF
    unpermute: Callable[[Tensor, RowOrder], Tensor]  # the sum over each token's places
    tile_table: Callable[[Tensor, int], TileTable | None]  # of all products of both passes; None where they need none
    to_mxfp4: Callable[[Tensor], Tensor] = to_mxfp4
    saves_rows: bool = False  # the pre-activation may be in a buffer whose first row only the device knows

    # In 8 bits operands are quantized before they are multiplied (`penstock.kernels.float8.expert_ffn`).
    in_8_bits: bool = False
    reads_matrices: bool = True  # given to the function; False if only copies of them are read
    source: Callable[..., Any] = lambda x_ND, quantized, counts_e: x_ND  # rows that `forward` and `columns` read
    copies: Callable[[int, Any], Any] = lambda index, weight: WeightCopies(weight, weight)  # of a matrix
    quantize_gradient: Callable[..., tuple[Any, Any]] = lambda dy_RD, counts_e, both: (dy_RD, dy_RD)  # rows, columns
    columns: Callable[..., Any] = lambda x, counts_e, index_R: x  # of the source, as `weight_gradient` reads them


def _gradients(d_gate_up_RF: Tensor, dweights_R: Tensor | None, h_RF: Tensor | None) -> ActivationGradients:
    """In 16 bits rows and columns are read from one tensor."""
    return d_gate_up_RF, d_gate_up_RF, h_RF, dweights_R, d_gate_up_RF


def _swiglu(gate_up_RF: Any, weights_R: Tensor | None, rule: ExpertRule, counts_e: Tensor, tiles: TileTable) -> Tensor:
    return swiglu_forward(gate_up_RF, weights_R, rule, used=tiles.used)


def _swiglu_backward(
    gate_up_RF: Any, weights_R: Any, dh_RF: Tensor, counts_e: Tensor, rule: ExpertRule, tiles: Any, *, recompute: bool
) -> ActivationGradients:
    return _gradients(*swiglu_backward(gate_up_RF, weights_R, dh_RF, rule, recompute=recompute, used=tiles.used))


def _swiglu_in_torch(gate_up_RF: Tensor, weights_R: Tensor | None, rule: ExpertRule, *unused: object) -> Tensor:
    return reference.swiglu(gate_up_RF, weights_R, rule)


def _swiglu_backward_in_torch(
    gate_up_RF: Any, weights_R: Any, dh_RF: Tensor, counts_e: Tensor, rule: ExpertRule, tiles: Any, *, recompute: bool
) -> ActivationGradients:
    d_gate_up_RF, dweights_R, h_RF = reference.swiglu_gradients(gate_up_RF, weights_R, dh_RF, rule)
    return _gradients(d_gate_up_RF, dweights_R, h_RF if recompute else None)


def _in_torch(
    multiply: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],  # as `reference.grouped_gemm`
    multiply_columns: Callable[[Tensor, Tensor, Tensor], Tensor],  # (dy_RF, x_RD, counts_e) -> dw_eFD
    add_bias: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    bias_gradient: Callable[..., Tensor],
) -> ExpertKernels:
    def forward(
        x_RD: Tensor,
        w_eFD: Tensor | SlottedWeight,
        counts_e: Tensor,
        index_R: Tensor | None = None,
        *,
        bias_eF: Tensor | None = None,
        weights_R: Tensor | None = None,
        tiles: TileTable | None = None,
    ) -> Tensor:
        y_RF = multiply(x_RD, joined(w_eFD), counts_e, index_R)
        return y_RF if bias_eF is None else add_bias(y_RF, bias_eF, counts_e, weights_R)

    def input_gradient(
        dy_RF: Tensor, w_eFD: Tensor | SlottedWeight, counts_e: Tensor, *, tiles: TileTable | None = None
    ) -> Tensor:
        return multiply(dy_RF, joined(w_eFD).transpose(1, 2), counts_e, None)  # e x F x D -> e x D x F

    def weight_gradient(
        dy_RF: Tensor,
        x_RD: Tensor,
        counts_e: Tensor,
        index_R: Tensor | None = None,
        *,
        accumulate_into: Tensor | SlottedWeight | None = None,
        tiles: TileTable | None = None,
    ) -> Any:
        rows_RD = x_RD if index_R is None else x_RD.index_select(0, index_R)
        return add_or_return(multiply_columns(dy_RF, rows_RD, counts_e), accumulate_into)

    return ExpertKernels(
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        swiglu=_swiglu_in_torch,
        swiglu_backward=_swiglu_backward_in_torch,
        bias_gradient=bias_gradient,
        unpermute=reference.unpermute,
        tile_table=no_tile_table,
    )


def _columns_by_definition(dy_RF: Tensor, x_RD: Tensor, counts_e: Tensor) -> Tensor:
    counts = counts_on_host(counts_e, len(dy_RF))
    sizes = [*counts, len(dy_RF) - sum(counts)]
    pieces = list(zip(dy_RF.split(sizes), x_RD.split(sizes), strict=True))[:-1]  # the last piece is the tail
    return torch.stack([dy.T @ rows for dy, rows in pieces])


def _grouped_mm(x_RD: Tensor, w_eFD: Tensor, counts_e: Tensor, index_R: Tensor | None) -> Tensor:
    rows_RD = x_RD if index_R is None else x_RD.index_select(0, index_R)
    if not len(rows_RD):  # grouped_mm refuses the strides of an expanded tensor without rows
        return rows_RD.new_zeros(0, w_eFD.shape[1])
    return used(grouped_mm(rows_RD, w_eFD, counts_e.cumsum(0, dtype=torch.int32)), counts_e)


def _columns_by_grouped_mm(dy_RF: Tensor, x_RD: Tensor, counts_e: Tensor) -> Tensor:
    if not len(x_RD):  # as above
        return dy_RF.new_zeros(len(counts_e), dy_RF.shape[1], x_RD.shape[1])
    dw_eFD = F.grouped_mm(aligned(dy_RF).T, aligned(x_RD), offs=counts_e.cumsum(0, dtype=torch.int32))
    shape = dw_eFD.shape[0], dy_RF.shape[1], x_RD.shape[1]
    return dw_eFD if dw_eFD.shape == shape else dw_eFD[:, : shape[1], : shape[2]]


REFERENCE = _in_torch(reference.grouped_gemm, _columns_by_definition, reference.add_bias, bias_gradient_by_definition)
TORCH = _in_torch(_grouped_mm, _columns_by_grouped_mm, torch_add_bias, bias_gradient_in_torch)  # bfloat16 on a GPU
TRITON = ExpertKernels(
    forward=grouped_gemm_forward,
    input_gradient=grouped_gemm_input_gradient,
    weight_gradient=grouped_gemm_weight_gradient,
    swiglu=_swiglu,
    swiglu_backward=_swiglu_backward,
    bias_gradient=bias_gradient,
    unpermute=unpermute,
    tile_table=tile_table,
    to_mxfp4=to_mxfp4_triton,
    saves_rows=True,
)
