"""Rows quantized straight into the message that they travel as, and back: one kernel each.

    pack_rows      reads 16 bits, writes 8 and the scales behind them
    unpack_rows    the other way, for experts that multiply 16 bits

A program has some blocks of numbers, each with the scale that it finds for itself, so it does not matter how wide a row
is. What the bytes mean is in `penstock.kernels.float8.packed_rows`; both kernels give exactly what the definitions
there give. Bytes between the values and the scales, and behind those, are not written.
"""

import torch
from torch import Tensor

from penstock.kernels.float8.formats import Format
from penstock.kernels.float8.packed_rows import blocks_of, row_bytes, scales_at
from penstock.kernels.float8.recipes import Recipe
from penstock.kernels.float8.scaling import exponent_of, magnitude_bits, power_of, scale_of, to_float8, to_float32
from penstock.kernels.language import tl, triton
from penstock.kernels.launching import start_kernel
from penstock.kernels.tuning import KernelLaunch

LAUNCH = KernelLaunch(block_rows=32, block_columns=128, warps=4)
"""Blocks of 128 numbers at a time; of smaller ones as many more. Not measured yet."""


def pack_rows(x_TD: Tensor, recipe: Recipe, form: Format, *, launch: KernelLaunch = LAUNCH) -> Tensor:
    """`penstock.kernels.float8.packed_rows.pack_rows` in one kernel.

    Args:
        x_TD: rows.
        recipe: whose blocks lie in one row.
        form: of the values.
        launch: blocks of 128 numbers of a program, and warps.

    Returns:
        uint8, T x `row_bytes`.
    """
    x_TD = x_TD.contiguous()
    packed = x_TD.new_empty(x_TD.shape[0], row_bytes(x_TD.shape[1], recipe), dtype=torch.uint8)
    options = {"LARGEST": form.largest, "POWER": recipe.scaling != "float32"}
    _start(pack_rows_kernel, x_TD, packed, recipe, form, launch, **options)
    return packed


def unpack_rows(
    packed: Tensor, width: int, recipe: Recipe, form: Format, dtype: torch.dtype, *, launch: KernelLaunch = LAUNCH
) -> Tensor:
    """`penstock.kernels.float8.packed_rows.unpack_rows` in one kernel.

    Args:
        packed: uint8, rows x `row_bytes`.
        width: D.
        recipe: by which they were packed.
        form: likewise.
        dtype: of the result.
        launch: as in `pack_rows`.

    Returns:
        rows x D.
    """
    packed = packed.contiguous()
    x_ND = packed.new_empty(packed.shape[0], width, dtype=dtype)
    _start(unpack_rows_kernel, x_ND, packed, recipe, form, launch)
    return x_ND


def _start(
    kernel: triton.JITFunction,
    x_TD: Tensor,
    packed: Tensor,
    recipe: Recipe,
    form: Format,
    launch: KernelLaunch,
    **options: float,
) -> None:
    rows, width = x_TD.shape
    blocks, depth = blocks_of(width, recipe), recipe.rows[1]
    at_a_time = launch.block_rows * launch.block_columns // depth
    if rows == 0:
        return
    start_kernel(
        kernel,
        (triton.cdiv(rows * blocks, at_a_time),),
        x_TD,
        packed.view(form.dtype),
        rows,
        D=width,
        BLOCKS=blocks,
        BYTES=packed.shape[1],
        SCALES_AT=scales_at(width),
        E8M0=recipe.scaling == "e8m0",
        BLOCK_R=at_a_time,
        DEPTH=depth,
        num_warps=launch.warps,
        **options,
    )


@triton.jit
def _places(rows, D: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_R: tl.constexpr, DEPTH: tl.constexpr):
    """Row and number in it of each block of this program; its columns; and which of both there are."""
    block_R = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_R, number_R = block_R // BLOCKS, block_R % BLOCKS
    column_RD = number_R[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    exists_R = row_R < rows
    return row_R, number_R, column_RD, exists_R, exists_R[:, None] & (column_RD < D)


@triton.jit(do_not_specialize=["rows"])
def pack_rows_kernel(
    x_ptr,
    packed_ptr,
    rows,
    D: tl.constexpr,
    BLOCKS: tl.constexpr,
    BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr,
    E8M0: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Blocks of rows to values and scales.

    Example in E4M3 with D = 4 and DEPTH = 2: the row 448, 0, 1, -2 becomes the values 448, 0, 128, -256 in 4 bytes, and
    at SCALES_AT the scales 1 and 1 / 128, the least power of two that is not less than 2 / 448.
    """
    row_R, number_R, column_RD, exists_R, exists_RD = _places(rows, D, BLOCKS, BLOCK_R, DEPTH)
    x_RD = tl.load(x_ptr + row_R[:, None] * D + column_RD, mask=exists_RD, other=0.0).to(tl.float32)
    scale_R = scale_of(tl.max(magnitude_bits(x_RD), 1), LARGEST, POWER)
    values_RD = to_float8(x_RD, scale_R[:, None], packed_ptr.dtype.element_ty, LARGEST, POWER)
    tl.store(packed_ptr + row_R[:, None] * BYTES + column_RD, values_RD, mask=exists_RD)
    first_ptr = packed_ptr + row_R * BYTES + SCALES_AT
    if E8M0:
        tl.store(first_ptr.to(tl.pointer_type(tl.uint8)) + number_R, exponent_of(scale_R), mask=exists_R)
    else:
        tl.store(first_ptr.to(tl.pointer_type(tl.float32)) + number_R, scale_R, mask=exists_R)


@triton.jit(do_not_specialize=["rows"])
def unpack_rows_kernel(
    x_ptr,
    packed_ptr,
    rows,
    D: tl.constexpr,
    BLOCKS: tl.constexpr,
    BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr,
    E8M0: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The inverse of `pack_rows_kernel`, but for what was rounded."""
    row_R, number_R, column_RD, exists_R, exists_RD = _places(rows, D, BLOCKS, BLOCK_R, DEPTH)
    first_ptr = packed_ptr + row_R * BYTES + SCALES_AT
    if E8M0:
        scale_R = power_of(tl.load(first_ptr.to(tl.pointer_type(tl.uint8)) + number_R, mask=exists_R, other=0))
    else:
        scale_R = tl.load(first_ptr.to(tl.pointer_type(tl.float32)) + number_R, mask=exists_R, other=0.0)
    bytes_ptr = (packed_ptr + row_R[:, None] * BYTES).to(tl.pointer_type(tl.uint8))
    bytes_RD = tl.load(bytes_ptr + column_RD, mask=exists_RD, other=0)
    values_RD = bytes_RD.to(packed_ptr.dtype.element_ty, bitcast=True)
    x_RD = to_float32(values_RD, packed_ptr.dtype.element_ty) * scale_R[:, None]
    tl.store(x_ptr + row_R[:, None] * D + column_RD, x_RD.to(x_ptr.dtype.element_ty), mask=exists_RD)
