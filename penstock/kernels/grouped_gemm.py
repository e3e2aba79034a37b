"""Grouped GEMM: every expert's rows times the expert's matrix, one launch for all experts, counts never on the host.

Three products make forward and backward; `w` is stored as in the model, F x D for each expert, and nothing is copied or
transposed in memory:

    forward           y_RF  = x_RD  @ w_eFD^T        contracts over D
    input gradient    dx_RD = dy_RF @ w_eFD          contracts over F
    weight gradient   dw_eFD = dy_RF^T @ x_RD        contracts over each expert's rows

`index_R` fuses a gather of rows into the loads of x (forward, weight gradient), so that no copy of the tokens in expert
order is saved. Forward adds a bias while it writes; penstock/kernels/expert_kernels.py has its gradient.
`accumulate_into` adds a weight gradient to a float32 buffer, for gradient accumulation.

Each product has its own launch (`penstock.kernels.tuning`), and all share one `TileTable`. Inputs are bfloat16 or
float16 (or float32, slowly), sums are float32. Device code is in `penstock.kernels.grouped_gemm_kernels`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.expert_parts import SavedRows, SlottedWeight, gradient_in_parts, weight_parts
from penstock.kernels.gluon.support import HAS_GLUON, PIECE_ROWS, REGISTERS, blocks_of, obstacle, ragged_blocks_of
from penstock.kernels.grouped_gemm_kernels import rows_kernel, weights_kernel
from penstock.kernels.language import TensorDescriptor, create_ragged_descriptor, start_kernel
from penstock.kernels.permute import gather_rows
from penstock.kernels.tile_table import BLOCK_SIZES, TileTable, tile_table
from penstock.kernels.tuning import (
    GemmLaunch,
    GemmProduct,
    grouped_gemm_launch,
    in_triton,
    programs_of,
    target_of,
)

if HAS_GLUON:
    from penstock.kernels.gluon import grouped_gemm_kernels as hopper

GATHER_LIMIT = 2**31  # elements of the largest source of a fused gather: the kernels index it with 32 bits


def grouped_gemm(x_RD: Tensor, w_eFD: Tensor, counts_e: Tensor, index_R: Tensor | None = None) -> Tensor:
    """`reference.grouped_gemm`, differentiable in x and w. Raises KernelError if no launch accepts shapes or dtypes."""
    return _GroupedGemm.apply(x_RD, w_eFD, counts_e, index_R)


class _GroupedGemm(torch.autograd.Function):
    """Saves its inputs; gradients of gathered rows are summed into their sources in float32."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, w_eFD: Tensor, counts_e: Tensor, index_R: Tensor | None) -> Tensor:
        tiles = tile_table(counts_e, len(x_RD if index_R is None else index_R))
        ctx.save_for_backward(x_RD, w_eFD, counts_e, index_R)
        ctx.tiles = tiles
        return grouped_gemm_forward(x_RD, w_eFD, counts_e, index_R, tiles=tiles)

    @staticmethod
    def backward(ctx: Any, dy_RF: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_RD, w_eFD, counts_e, index_R = ctx.saved_tensors
        dy_RF = dy_RF.contiguous()
        dx_RD = dw_eFD = None
        if ctx.needs_input_grad[0]:
            dx_RD = grouped_gemm_input_gradient(dy_RF, w_eFD, counts_e, tiles=ctx.tiles)
            if index_R is not None:
                sums_RD = torch.zeros_like(x_RD, dtype=torch.float32)
                dx_RD = sums_RD.index_add_(0, index_R, dx_RD.float()).to(x_RD.dtype)
        if ctx.needs_input_grad[1]:
            dw_eFD = grouped_gemm_weight_gradient(dy_RF, x_RD, counts_e, index_R, tiles=ctx.tiles)
        return dx_RD, dw_eFD, None, None


def grouped_gemm_forward(
    x_RD: Tensor,
    w_eFD: Tensor | SlottedWeight,
    counts_e: Tensor,
    index_R: Tensor | None = None,
    *,
    bias_eF: Tensor | None = None,
    weights_R: Tensor | None = None,
    tiles: TileTable | None = None,
    keep: SavedRows | None = None,
    launch: GemmLaunch | None = None,
) -> Tensor:
    """y_RF = x_RD @ w_eFD^T, without autograd, of contiguous operands, in the dtype of x.

    Rows past the last expert's are zero, or the last one is (`TileTable.only_last`).

    Args:
        bias_eF: added to each row of its expert in float32, times the row's weight (float32) if there are `weights_R`.
        tiles: `tile_table(counts_e, R)`, if the caller has it already.
        keep: place of the rows in a buffer, which is returned whole, instead of a tensor of their own.
        launch: instead of the table's choice.
    """
    experts, width, depth = w_eFD.shape
    rows = len(x_RD if index_R is None else index_R)
    _check("forward", counts_e, index_R, x_RD=(x_RD, (len(x_RD), depth)), w_eFD=(w_eFD, (experts, width, depth)))
    _check_bias(bias_eF, weights_R, (experts, width), rows)
    y_RF = x_RD.new_empty(rows, width) if keep is None else keep.rows_SF
    if rows:
        product: GemmProduct = "forward" if index_R is None else "forward_gathered"
        launch = launch or grouped_gemm_launch(product, x_RD.device, x_RD.dtype, width * depth)
        launch = _rows_launch(launch, x_RD, w_eFD, y_RF, bias_eF, index_R)
        tiles, bias = tiles or tile_table(counts_e, rows), (bias_eF, weights_R)
        # After the launch is known: it decides between a fused gather and a copy.
        x_RD, index_R = _gather(x_RD, index_R, tiles, launch)
        first = None if keep is None else keep.first
        _launch_rows(x_RD, w_eFD, y_RF, index_R, tiles, launch, depth_first=False, bias=bias, first=first)
    return y_RF


def grouped_gemm_input_gradient(
    dy_RF: Tensor,
    w_eFD: Tensor | SlottedWeight,
    counts_e: Tensor,
    *,
    tiles: TileTable | None = None,
    launch: GemmLaunch | None = None,
) -> Tensor:
    """dx_RD = dy_RF @ w_eFD in the order of the experts' rows (a gather is not undone), without autograd.

    `dy_RF` is contiguous, and its rows past the last expert's may hold anything; see `grouped_gemm_forward`.
    """
    experts, depth, width = w_eFD.shape
    rows = len(dy_RF)
    _check("input gradient", counts_e, None, dy_RF=(dy_RF, (rows, depth)), w_eFD=(w_eFD, (experts, depth, width)))
    dx_RD = dy_RF.new_empty(rows, width)
    if rows:
        launch = launch or grouped_gemm_launch("input_gradient", dy_RF.device, dy_RF.dtype, width * depth)
        launch = _rows_launch(launch, dy_RF, w_eFD, dx_RD)
        _launch_rows(dy_RF, w_eFD, dx_RD, None, tiles or tile_table(counts_e, rows), launch, depth_first=True)
    return dx_RD


def grouped_gemm_weight_gradient(
    dy_RF: Tensor,
    x_RD: Tensor,
    counts_e: Tensor,
    index_R: Tensor | None = None,
    *,
    accumulate_into: Tensor | SlottedWeight | None = None,
    tiles: TileTable | None = None,
    launch: GemmLaunch | None = None,
) -> Any:
    """dw_eFD = dy_RF^T @ x_RD over each expert's rows, without autograd; see `grouped_gemm_forward`.

    `dy_RF` is contiguous, and its rows past the last expert's may hold anything. Returns dw_eFD in the dtype of x, zero
    for experts without rows; or `accumulate_into`, contiguous float32 e x F x D to which the gradient is added.
    """
    rows, width = dy_RF.shape
    source_rows, depth = x_RD.shape
    shape = (counts_e.numel(), width, depth)
    dy, x = (dy_RF, (rows, width)), (x_RD, (source_rows, depth))
    _check("weight gradient", counts_e, index_R, dy_RF=dy, x_RD=x)
    if isinstance(accumulate_into, SlottedWeight):
        if index_R is not None and tiles is not None:  # the rows are copied once for both
            x_RD = gather_rows(x_RD, index_R, tiles.used)
        return gradient_in_parts(partial(grouped_gemm_weight_gradient, dy_RF, x_RD), counts_e, accumulate_into, tiles)
    if accumulate_into is not None:
        _check("weight gradient's sum", counts_e, None, torch.float32, accumulate_into=(accumulate_into, shape))
        dw_eFD = accumulate_into
    else:
        dw_eFD = x_RD.new_empty(shape) if rows else x_RD.new_zeros(shape)
    if rows:
        product: GemmProduct = "weight_gradient" if index_R is None else "weight_gradient_gathered"
        product = product if accumulate_into is None else "weight_gradient_accumulated"
        launch = launch or grouped_gemm_launch(product, x_RD.device, x_RD.dtype, width * depth)
        tiles = tiles or tile_table(counts_e, rows)
        x_RD, index_R = _gather(x_RD, index_R, tiles, launch)
        _launch_weights(dy_RF, x_RD, dw_eFD, index_R, tiles, launch, accumulate=accumulate_into is not None)
    return dw_eFD


def _gather(x_RD: Tensor, index_R: Tensor | None, tiles: TileTable, launch: GemmLaunch) -> tuple[Tensor, Tensor | None]:
    """Rows and index for the kernel, or a gathered copy where that is faster or needed."""
    if index_R is not None and (launch.copy_gathered or x_RD.numel() >= GATHER_LIMIT):
        return gather_rows(x_RD, index_R, tiles.used), None
    return x_RD, index_R


def _check(
    product: str,
    counts_e: Tensor,
    index_R: Tensor | None,
    dtype: torch.dtype | None = None,
    **operands: tuple[Any, tuple[int, ...]],
) -> None:
    dtype = dtype or next(iter(operands.values()))[0].dtype
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise KernelError(f"grouped GEMM ({product})", got=dtype, allowed="bfloat16, float16 or float32")
    for name, (operand, shape) in operands.items():
        for part in operand[:2] if isinstance(operand, SlottedWeight) else (operand,):
            if part.shape[1:] != shape[1:] or operand.shape[0] != shape[0] or part.dtype != dtype:
                got = f"{part.dtype} {tuple(part.shape)}"
                raise KernelError(f"grouped GEMM ({product}): {name} does not fit", got=got, allowed=f"{dtype} {shape}")
            _check_blocks(f"grouped GEMM ({product}): {name}", part)
    experts = operands["w_eFD"][1][0] if "w_eFD" in operands else counts_e.numel()
    check_groups(f"grouped GEMM ({product})", counts_e, experts, index_R)


def check_groups(product: str, counts_e: Tensor, experts: int, index_R: Tensor | None) -> None:
    """Raise KernelError unless there is one count for each expert, and the index is a vector of integers."""
    if counts_e.shape != (experts,):
        raise KernelError(f"{product}: counts_e", got=tuple(counts_e.shape), allowed=(experts,))
    if index_R is not None and (index_R.ndim != 1 or index_R.dtype not in (torch.int32, torch.int64)):
        got = f"{index_R.dtype} {tuple(index_R.shape)}"
        raise KernelError(f"{product}: index_R", got=got, allowed="int32 or int64, one dim")


def _check_blocks(what: str, operand: Tensor) -> None:
    """Raise KernelError unless the operand can be copied in blocks of 16 bytes."""
    if not operand.is_contiguous() or operand.shape[-1] * operand.itemsize % 16 or operand.data_ptr() % 16:
        raise KernelError(
            f"{what} cannot be copied in blocks",
            got=f"shape {tuple(operand.shape)}, strides {operand.stride()}",
            allowed="contiguous tensors whose rows are multiples of 16 bytes, and so is their address",
            fix="call .contiguous(), pad the width, or use penstock.kernels.reference.grouped_gemm",
        )


def _check_bias(bias_eF: Tensor | None, weights_R: Tensor | None, shape: tuple[int, int], rows: int) -> None:
    if bias_eF is not None and (bias_eF.shape != shape or not bias_eF.is_contiguous()):
        got = f"shape {tuple(bias_eF.shape)}, strides {bias_eF.stride()}"
        raise KernelError("grouped GEMM (forward): bias_eF does not fit", got=got, allowed=f"contiguous {shape}")
    if weights_R is not None and (weights_R.shape != (rows,) or weights_R.dtype != torch.float32):
        got = f"{weights_R.dtype} {tuple(weights_R.shape)}"
        raise KernelError("grouped GEMM (forward): weights_R does not fit", got=got, allowed=f"float32 ({rows},)")


def _rows_launch(
    launch: GemmLaunch,
    x: Tensor,
    w: Tensor | SlottedWeight,
    y: Tensor,
    bias: Tensor | None = None,
    index: Tensor | None = None,
) -> GemmLaunch:
    """The launch, or its replacement in Triton where the Hopper kernel cannot run."""
    if launch.engine == "triton":
        return launch
    w = w.own if isinstance(w, SlottedWeight) else w
    gathered = None if launch.copy_gathered else index
    problem = hopper_obstacle(x, gathered, target_of(x.device), y=y, bias=bias)
    return launch if problem is None else in_triton(launch, "forward", w[0].numel())


def hopper_obstacle(
    x: Tensor, index: Tensor | None, target: str, *, y: Tensor | None = None, bias: Tensor | None = None
) -> str | None:
    """Why the Hopper kernels cannot multiply rows into y, or None; `index` gathers them while they are loaded."""
    if (reason := obstacle(target)) is not None:
        return reason
    if x.dtype != torch.bfloat16:
        return f"operands are {x.dtype}, not bfloat16"
    if index is not None:
        return "rows are gathered while they are loaded"
    if y is not None and y.dtype != x.dtype:
        return f"the result is {y.dtype}, not bfloat16"
    return None if bias is None else "a bias is added"


def _launch_rows(
    x: Tensor,
    w: Tensor | SlottedWeight,
    y: Tensor,
    index: Tensor | None,
    tiles: TileTable,
    launch: GemmLaunch,
    *,
    depth_first: bool,
    bias: tuple[Tensor | None, Tensor | None] = (None, None),
    first: Tensor | None = None,
) -> None:
    """Run `rows_kernel` or the Hopper kernel; `w` is experts x depth x columns if depth_first, else columns x depth.

    `first` is the first row of y to write.
    """
    if isinstance(w, SlottedWeight):
        for part in weight_parts(w, tiles):
            own_bias = (None if bias[0] is None else bias[0][part.experts], bias[1])
            operands = (x, part.weight, y, index, part.tiles)
            _launch_rows(*operands, launch, depth_first=depth_first, bias=own_bias, first=first)
        return
    (rows, columns), (experts, depth) = y.shape, (len(w), x.shape[1])
    size = BLOCK_SIZES.index(launch.block_rows)  # owner table for blocks of this size
    w_block = (launch.block_depth, launch.block_columns) if depth_first else (launch.block_columns, launch.block_depth)
    if launch.engine == "gluon":
        piece_columns = launch.block_rows * launch.block_columns // launch.pieces // PIECE_ROWS
        start_kernel(
            hopper.expert_rows_kernel, (programs_of(launch, y.device),),
            blocks_of(x, launch.block_rows, launch.block_depth), blocks_of(w, 1, *w_block),
            ragged_blocks_of(y, PIECE_ROWS, piece_columns), y, tiles.tails, tiles.owners[size],
            tiles.block_counts[size:], first, rows, columns, depth, experts,
            DEPTH_FIRST=depth_first, STAGES=launch.stages, GROUP=launch.group, ONLY_LAST=tiles.only_last,
            num_warps=launch.warps, maxnreg=REGISTERS,
        )  # fmt: skip
        return
    bias_eF, weights_R = bias
    x_source, w_source, y_target = x, w, y
    if launch.descriptors:
        w_source = TensorDescriptor.from_tensor(w, [1, *w_block])
        y_target = create_ragged_descriptor(y, [launch.block_rows, launch.block_columns // launch.pieces])
        if index is None:
            x_source = TensorDescriptor.from_tensor(x, [launch.block_rows, launch.block_depth])
    start_kernel(
        rows_kernel, (programs_of(launch, x.device),),
        x_source, w_source, y_target, y, index, tiles.tails, tiles.owners[size], tiles.block_counts[size:],
        bias_eF, None if bias_eF is None or weights_R is None else weights_R.contiguous(), first, rows, columns,
        depth, experts,
        DEPTH_FIRST=depth_first, GATHER=index is not None, WHOLE_DEPTH=depth % launch.block_depth == 0,
        ONLY_LAST=tiles.only_last, BLOCK_DEPTH=launch.block_depth, **launch.constants, num_warps=launch.warps,
        num_stages=launch.stages,
    )  # fmt: skip


def _launch_weights(
    dy: Tensor, x: Tensor, dw: Tensor, index: Tensor | None, tiles: TileTable, launch: GemmLaunch, *, accumulate: bool
) -> None:
    experts, rows, columns = dw.shape
    if launch.engine == "gluon" and hopper_obstacle(dy, index, target_of(dy.device)) is None:
        # Pieces of a 16-bit result are twice as wide, so they have as many bytes.
        piece_columns = launch.block_rows * launch.block_columns // launch.pieces // PIECE_ROWS * 4 // dw.itemsize
        start_kernel(
            hopper.weight_gradient_kernel, (programs_of(launch, dw.device),),
            ragged_blocks_of(dy, launch.block_depth, launch.block_rows),
            ragged_blocks_of(x, launch.block_depth, launch.block_columns),
            blocks_of(dw, 1, PIECE_ROWS, piece_columns), tiles.starts_e, rows, columns, experts,
            STAGES=launch.stages, GROUP=launch.group, ACCUMULATE=accumulate, num_warps=launch.warps, maxnreg=REGISTERS,
        )  # fmt: skip
        return
    launch = in_triton(launch, "weight_gradient")
    dy_source, x_source, dw_target = dy, x, dw
    if launch.descriptors:
        dy_source = create_ragged_descriptor(dy, [launch.block_depth, launch.block_rows])
        dw_target = TensorDescriptor.from_tensor(dw, [1, launch.block_rows, launch.block_columns // launch.pieces])
        if index is None:
            x_source = create_ragged_descriptor(x, [launch.block_depth, launch.block_columns])
    start_kernel(
        weights_kernel, (programs_of(launch, x.device),),
        dy_source, x_source, dw_target, index, tiles.starts_e, rows, columns, experts,
        GATHER=index is not None, ACCUMULATE=accumulate, BLOCK_DEPTH=launch.block_depth, **launch.constants,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
