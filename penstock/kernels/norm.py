"""RMSNorm, alone or of a residual sum, in one pass over memory each way; and sums of three tensors in one pass.

With r = 1 / sqrt(mean(x**2) + epsilon) and n = x r, the output is n * weight (an offset included) and

    dx      = r (weight dy - n mean(weight dy n))
    dweight = sum over tokens of dy n

dx also includes the gradient of the second output: the residual sum, or x itself.

A program holds whole rows. In backward it walks over several tiles of rows with one running sum for the weight in
registers and writes it as one row of a small table, which a second kernel sums: no atomics, and the order of the sum
depends on the shape alone. `add_three` sums the residual stream, the routed experts and the shared expert; `fan_out`
gives the tokens of an MoE layer to router, dispatch and shared expert, and its gradient is such a sum. Two additions
would write and read the sum in between, and round twice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.language import start_kernel, tl, triton
from penstock.kernels.tuning import KernelLaunch

# Narrow rows (heads) share a tile of 2,048 elements by 4 warps; wide rows take a multiple of tile and warps.
LAUNCH = KernelLaunch(block_rows=1, block_columns=2048, warps=4)
# Backward loads tiles ahead of their use and needs more bytes in flight (docs/decisions/0111).
BACKWARD_LAUNCH = KernelLaunch(block_rows=4, block_columns=2048, warps=8, stages=3)

PROGRAMS = 256  # of backward before each walks a 17th tile: enough to fill the chip, few enough for a small table
LEAST_TILES = 16  # of a program of backward, so that its pipeline fills and its row of the table pays off
STAGED_BYTES = 96 * 1024  # shared memory for tiles loaded ahead: two programs fit on a multiprocessor of 227 KB
MOST_WARPS = 16  # 1,024 threads of 64-wide waves: the largest program


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """`penstock.kernels.reference.rms_norm` in one kernel, and two backward.

    `x_TD` may have any leading dims, and its rows may lie apart (a slice of a wider tensor), but each row must be
    contiguous. Raises KernelError if the weight does not fit.
    """
    check_weight(x_TD, weight_D)
    return _RmsNorm.apply(x_TD, None, weight_D, epsilon, offset, False)[0]


def rms_norm_beside(x_TD: Tensor, weight_D: Tensor, epsilon: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """`penstock.kernels.reference.rms_norm_beside`; backward adds both gradients of x. Arguments as in `rms_norm`."""
    check_weight(x_TD, weight_D)
    return _RmsNorm.apply(x_TD, None, weight_D, epsilon, offset, True)


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, epsilon: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`penstock.kernels.reference.add_rms_norm` of two tensors of one shape; other arguments as in `rms_norm`."""
    check_weight(x_TD, weight_D)
    if x_TD.shape != residual_TD.shape:
        got = f"{tuple(x_TD.shape)} and {tuple(residual_TD.shape)}"
        raise KernelError("add_rms_norm: x and residual must have one shape", got=got)
    return _RmsNorm.apply(x_TD, residual_TD, weight_D, epsilon, offset, False)


class _RmsNorm(torch.autograd.Function):
    """The second output is the residual sum; without a residual it is x if `beside`, else None."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        weight_D: Tensor,
        epsilon: float,
        offset: float,
        beside: bool,
    ) -> tuple[Tensor, Tensor | None]:
        normed_TD = x_TD.new_empty(x_TD.shape, dtype=normed_dtype(x_TD, residual_TD, weight_D))
        sum_TD, _ = normalize(ctx, x_TD, residual_TD, weight_D, epsilon, normed_TD, offset)
        # As an output of this node x gets its gradient here, where the kernel adds both.
        return normed_TD, x_TD.view_as(x_TD) if beside else sum_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dnormed_TD: Tensor | None, dsum_TD: Tensor | None) -> tuple[Tensor | None, ...]:
        return *normalized_gradients(ctx, dnormed_TD, dsum_TD), None, None, None


def normed_dtype(x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor) -> torch.dtype:
    summed = x_TD.dtype if residual_TD is None else torch.promote_types(x_TD.dtype, residual_TD.dtype)
    return torch.promote_types(summed, weight_D.dtype)


def normalize(
    ctx: Any,
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor,
    epsilon: float,
    normed_TD: Tensor | None,
    offset: float,
) -> tuple[Tensor | None, Tensor]:
    """Returns (x + residual or None, r of each row), and writes normed rows if wanted.

    Saves in `ctx` what `normalized_gradients` needs: the input of the norm and r.
    """
    x_rows, width = _rows(x_TD), x_TD.shape[-1]
    tokens = x_rows.shape[0]
    residual_rows, sum_TD = None, None
    if residual_TD is not None:
        residual_rows = _rows(residual_TD)
        sum_TD = x_TD.new_empty(x_TD.shape, dtype=torch.promote_types(x_TD.dtype, residual_TD.dtype))
    scale_T = x_TD.new_empty(tokens, dtype=torch.float32)
    block_rows, block_columns, warps = tile_of(width, LAUNCH)
    start_kernel(
        rms_norm_kernel, (triton.cdiv(tokens, block_rows),),
        x_rows, residual_rows, weight_D, normed_TD, sum_TD, scale_T, tokens, x_rows.stride(0),
        0 if residual_rows is None else residual_rows.stride(0), epsilon,
        D=width, OFFSET=offset, BLOCK_T=block_rows, BLOCK_D=block_columns, num_warps=warps,
    )  # fmt: skip
    ctx.save_for_backward(x_TD if sum_TD is None else sum_TD, weight_D, scale_T)
    ctx.offset = offset
    ctx.dtypes = (x_TD.dtype, None if residual_TD is None else residual_TD.dtype)
    ctx.set_materialize_grads(False)  # an output that is not used has no gradient of zeros to be read
    return sum_TD, scale_T


def normalized_gradients(
    ctx: Any, dnormed_TD: Tensor | None, dsum_TD: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, residual and weight, from those of the normed rows and of the sum (or x), which may be None."""
    x_TD, weight_D, scale_T = ctx.saved_tensors
    x_dtype, residual_dtype = ctx.dtypes
    dx_TD, dweight_D = dsum_TD, None
    if dnormed_TD is not None:
        dx_TD, dweight_D = _backward(x_TD, weight_D, scale_T, dnormed_TD, dsum_TD, ctx.offset)
    if dx_TD is None:
        return None, None, None
    return dx_TD.to(x_dtype), None if residual_dtype is None else dx_TD.to(residual_dtype), dweight_D


def _backward(
    x_TD: Tensor, weight_D: Tensor, scale_T: Tensor, dnormed_TD: Tensor, dsum_TD: Tensor | None, offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the norm's input (with that of the sum added) and of the weight."""
    x_rows, dnormed_rows = _rows(x_TD), _rows(dnormed_TD)
    dsum_rows = None if dsum_TD is None else _rows(dsum_TD)
    tokens, width = x_rows.shape
    block_rows, block_columns, warps = tile_of(width, BACKWARD_LAUNCH)
    tiles = max(LEAST_TILES, triton.cdiv(tokens, block_rows * PROGRAMS))
    programs = triton.cdiv(tokens, block_rows * tiles)
    dx_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    partial_PD = x_TD.new_empty(programs, width, dtype=torch.float32)  # a row of the weight's gradient by program
    start_kernel(
        rms_norm_backward_kernel, (programs,),
        x_rows, weight_D, scale_T, dnormed_rows, dsum_rows, dx_TD, partial_PD, tokens, tiles, x_rows.stride(0),
        dnormed_rows.stride(0), 0 if dsum_rows is None else dsum_rows.stride(0),
        D=width, OFFSET=offset, BLOCK_T=block_rows, BLOCK_D=block_columns,
        STAGES=stages_of(block_rows * block_columns * x_TD.element_size(), BACKWARD_LAUNCH), num_warps=warps,
    )  # fmt: skip
    dweight_D = torch.empty_like(weight_D)
    start_kernel(
        sum_table_kernel, (triton.cdiv(width, 16),), partial_PD, dweight_D, programs, D=width, BLOCK_P=256, BLOCK_D=16
    )
    return dx_TD, dweight_D


def tile_of(width: int, launch: KernelLaunch) -> tuple[int, int, int]:
    """Rows, columns and warps of the tile for rows of this width: (1, 2048, 4) makes (16, 128, 4) and (1, 8192, 16)."""
    columns = triton.next_power_of_2(width)
    elements = launch.block_rows * launch.block_columns
    warps = launch.warps * max(1, columns // elements)
    return max(1, elements // columns), columns, min(warps, MOST_WARPS)


def stages_of(tile_bytes: int, launch: KernelLaunch) -> int:
    """Pipeline depth of backward: one tile of each of its three inputs is staged for every stage past the first."""
    return min(launch.stages, 1 + STAGED_BYTES // (3 * tile_bytes))


def _rows(x_TD: Tensor) -> Tensor:
    """As a matrix with contiguous rows, without a copy where strides allow."""
    rows = x_TD.reshape(-1, x_TD.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def check_weight(x_TD: Tensor, weight_D: Tensor) -> None:
    """Raise KernelError if the weight does not fit."""
    if weight_D.shape != x_TD.shape[-1:] or not weight_D.is_contiguous():
        got = f"weight {tuple(weight_D.shape)} for x {tuple(x_TD.shape)}"
        raise KernelError("rms_norm: the weight must be contiguous, one for each column", got=got)


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, sum_ptr, scale_ptr,  # rows T x D; weight D; scale T
    tokens, x_stride, residual_stride, epsilon,  # strides of rows, in elements
    D: tl.constexpr, OFFSET: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Some rows; without `normed_ptr` only scales and sums. [3, 4] with weight [1, 1] is divided by sqrt(12.5)."""
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column_D = tl.arange(0, BLOCK_D)
    row_T1 = token_T.to(tl.int64)[:, None]
    column_1D = column_D[None, :]
    inside = (token_T < tokens)[:, None] & (column_1D < D)
    x_TD = tl.load(x_ptr + row_T1 * x_stride + column_1D, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual_TD = tl.load(residual_ptr + row_T1 * residual_stride + column_1D, mask=inside, other=0.0)
        # Rounded first, so that the norm is of the very sum that is passed on.
        x_TD = (x_TD.to(tl.float32) + residual_TD.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row_T1 * D + column_1D, x_TD, mask=inside)
    rounded_to = x_TD.dtype
    x_TD = x_TD.to(tl.float32)
    scale_T = tl.rsqrt(tl.sum(x_TD * x_TD, 1) / D + epsilon)  # r of the module's formulas
    tl.store(scale_ptr + token_T, scale_T, mask=token_T < tokens)
    if normed_ptr is not None:
        weight_D = tl.load(weight_ptr + column_D, mask=column_D < D, other=0.0).to(tl.float32)
        if OFFSET != 0.0:  # no instruction without an offset
            weight_D += OFFSET
        normed_TD = (x_TD * scale_T[:, None]).to(rounded_to).to(tl.float32) * weight_D[None, :]
        tl.store(normed_ptr + row_T1 * D + column_1D, normed_TD.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    x_ptr, weight_ptr, scale_ptr, dnormed_ptr, dsum_ptr, dx_ptr, partial_ptr,  # rows T x D; partial P x D
    tokens, tiles, x_stride, dnormed_stride, dsum_stride,  # tiles of one program
    D: tl.constexpr, OFFSET: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Input gradient of some neighbouring tiles, and their sum for the weight as one row of the partial table."""
    first = tl.program_id(0) * tiles * BLOCK_T
    column_D = tl.arange(0, BLOCK_D)
    column_1D = column_D[None, :]
    weight_1D = tl.load(weight_ptr + column_1D, mask=column_1D < D, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        weight_1D += OFFSET
    dweight_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        token_T = first + tile * BLOCK_T + tl.arange(0, BLOCK_T)
        row_T1 = token_T.to(tl.int64)[:, None]
        inside = (token_T < tokens)[:, None] & (column_1D < D)
        x_TD = tl.load(x_ptr + row_T1 * x_stride + column_1D, mask=inside, other=0.0).to(tl.float32)
        dnormed_TD = tl.load(dnormed_ptr + row_T1 * dnormed_stride + column_1D, mask=inside, other=0.0).to(tl.float32)
        scale_T1 = tl.load(scale_ptr + token_T, mask=token_T < tokens, other=0.0)[:, None]
        normed_TD = x_TD * scale_T1  # n of the module's formulas
        # The running sum stays in registers; its rows are summed once, after the loop.
        dweight_TD += dnormed_TD * normed_TD
        scaled_TD = dnormed_TD * weight_1D
        mean_T = tl.sum(scaled_TD * normed_TD, 1) / D
        dx_TD = (scaled_TD - normed_TD * mean_T[:, None]) * scale_T1
        if dsum_ptr is not None:
            dx_TD += tl.load(dsum_ptr + row_T1 * dsum_stride + column_1D, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row_T1 * D + column_1D, dx_TD.to(dx_ptr.dtype.element_ty), mask=inside)
    partial_ptrs = partial_ptr + tl.program_id(0).to(tl.int64) * D + column_D
    tl.store(partial_ptrs, tl.sum(dweight_TD, 0), mask=column_D < D)


@triton.jit
def sum_table_kernel(table_ptr, out_ptr, rows, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sum of a float32 table over its rows, for some columns."""
    column_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    sum_PD = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for start in range(0, rows, BLOCK_P):
        row_P = start + tl.arange(0, BLOCK_P)
        inside = (row_P < rows)[:, None] & (column_D < D)[None, :]
        sum_PD += tl.load(table_ptr + row_P[:, None] * D + column_D[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + column_D, tl.sum(sum_PD, 0).to(out_ptr.dtype.element_ty), mask=column_D < D)


SUM_BLOCK = 2048  # numbers of a program of 4 warps: 16 of a thread, two loads of 16 bytes from each 16-bit tensor


def add_three(x_TD: Tensor, y_TD: Tensor, z_TD: Tensor) -> Tensor:
    """`reference.add_three` in one kernel, and none backward; contiguous. Raises KernelError if shapes differ."""
    if not x_TD.shape == y_TD.shape == z_TD.shape:
        got = ", ".join(f"{tuple(tensor.shape)}" for tensor in (x_TD, y_TD, z_TD))
        raise KernelError("add_three: all must have one shape", got=got)
    return _AddThree.apply(x_TD, y_TD, z_TD)


def fan_out(x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`penstock.kernels.reference.fan_out` without a kernel forward; backward adds the gradients in one kernel."""
    return _FanOut.apply(x_TD)


class _AddThree(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, y_TD: Tensor, z_TD: Tensor) -> Tensor:
        ctx.dtypes = (x_TD.dtype, y_TD.dtype, z_TD.dtype)
        return _sum(x_TD, y_TD, z_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsum_TD: Tensor) -> tuple[Tensor, ...]:
        return tuple(dsum_TD.to(dtype) for dtype in ctx.dtypes)


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x_TD.view_as(x_TD) for _ in range(3))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        addends = [gradient for gradient in gradients if gradient is not None]
        if len(addends) == 3:
            return _sum(*addends)
        return sum(addends[1:], addends[0]) if addends else None  # two additions at most: torch's own


def _sum(x_TD: Tensor, y_TD: Tensor, z_TD: Tensor) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(x_TD.dtype, y_TD.dtype), z_TD.dtype)
    sum_TD = x_TD.new_empty(x_TD.shape, dtype=dtype)
    numbers = sum_TD.numel()
    addends = x_TD.contiguous(), y_TD.contiguous(), z_TD.contiguous()
    start_kernel(add_three_kernel, (triton.cdiv(numbers, SUM_BLOCK),), *addends, sum_TD, numbers, BLOCK=SUM_BLOCK)
    return sum_TD


@triton.jit
def add_three_kernel(x_ptr, y_ptr, z_ptr, sum_ptr, numbers, BLOCK: tl.constexpr):
    """A block of the sum. Example: [1, 2] + [10, 20] + [100, 200] = [111, 222]."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numbers
    x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + index, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(sum_ptr + index, (x + y + z).to(sum_ptr.dtype.element_ty), mask=inside)
