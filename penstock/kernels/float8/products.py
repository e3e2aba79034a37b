"""Matrix products of 8-bit numbers in Triton, dense and grouped by expert; counts stay on the device.

Every product is a @ b^T of operands whose contracted dim is the last one:

    multiply           M x K, N x K -> M x N      a dense product, or the gradient of a dense weight added to its sum
    multiply_groups    R x K, e x N x K -> R x N  experts' rows, gathered while they are loaded if there is an index
    multiply_columns   M x R, N x R -> e x M x N  gradients of experts' weights, each over its expert's columns

They equal those of the same name in `reference` but for the order of float32 sums. Recipes are recognized by the depth
of their blocks. A launch may name the Hopper kernels for the recipe blockwise (`penstock.kernels.gluon`).
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.expert_parts import SavedRows, SlottedWeight, gradient_in_parts, weight_parts
from penstock.kernels.float8.quantize import Product, ProductLaunch, dense_launch, in_triton, product_launch
from penstock.kernels.float8.quantized import BLOCKWISE, DEPTH, Quantized, scales_in_bytes
from penstock.kernels.gluon import support
from penstock.kernels.gluon.support import HAS_GLUON, PIECE_ROWS, REGISTERS, blocks_of, ragged_blocks_of
from penstock.kernels.grouped_gemm import GATHER_LIMIT, check_groups
from penstock.kernels.grouped_gemm_kernels import locate_matrix, locate_rows, store_matrix, store_rows, zero_tail
from penstock.kernels.language import TensorDescriptor, create_ragged_descriptor, start_kernel, tl, triton
from penstock.kernels.permute import gather_columns, gather_rows
from penstock.kernels.tile_table import BLOCK_SIZES, TileTable, tile_table
from penstock.kernels.tuning import programs_of, target_of

BLOCK_DEPTH = tl.constexpr(DEPTH)
MICRO = tl.constexpr(32)  # numbers under one scale of `inside`


@triton.jit(do_not_specialize=["rows", "x_scale_depth"])
def float8_rows_kernel(
    x, w, y,  # descriptors of blocks, or pointers
    y_ptr, x_scales, w_scales, index_ptr, starts_ptr, owners_ptr, block_count_ptr, first_ptr,
    rows, columns, depth, experts, x_stride, w_expert, w_stride,  # sizes of the product; strides of values
    x_scale_outer, x_scale_depth, w_scale_expert, w_scale_outer, w_scale_depth,  # strides of scales
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, AHEAD: tl.constexpr, SCALING: tl.constexpr,
    W_OUTER: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, GATHER: tl.constexpr, WHOLE_DEPTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr, ONLY_LAST: tl.constexpr,
):  # fmt: skip
    """Multiply each row of x by the matrix of its expert; set rows of the tail to zero, or with ONLY_LAST the last one.

    `float8_rows_kernel` makes an output that has the experts' rows; `float8_matrices_kernel` makes one matrix (dense
    products), or one for each expert, contracted over the expert's columns (weight gradients). Both operands have their
    contracted dim last, so blocks are loaded in the one order that Hopper's matrix units read. The loops over tiles and
    over the contracted dim are flattened into one, as in `penstock.kernels.grouped_gemm_kernels`.

    The contracted dim is walked in blocks of `BLOCK_DEPTH`, 128. The constant SCALING says when scales are applied:

        promoted   the sum of a block leaves the matrix unit, is multiplied by both scales and added in float32
        behind     sums of blocks are added in float32, scales are applied at the end
        inside     the matrix unit applies a scale to every 32 numbers (`tl.dot_scaled`)

    Hopper's matrix unit keeps 14 bits of a sum, so sums leave it after each block even if no scale is waiting, and
    Triton waits for a product wherever its sum is read. Another program on the same multiprocessor hides the
    multiplications: tiles are small and scales are loaded one block AHEAD, so that one multiplication a number stands
    between a product and the next one.

    x is rows x depth, w is experts x columns x depth, y is rows x columns. With DESCRIPTORS, w, y and (without GATHER)
    x are descriptors of blocks, else pointers; y_ptr is always the pointer. Strides are of values and scales. W_OUTER
    columns of w share a scale. WHOLE_DEPTH says that no load of x by pointers needs a mask. With `first_ptr` rows are
    written from that row of y on, and there is no tail.
    """
    tiles_across = tl.cdiv(columns, BLOCK_COLUMNS)
    tiles = tl.load(block_count_ptr) * tiles_across
    shift = 0 if first_ptr is None else tl.load(first_ptr).to(tl.int32)
    blocks = tl.cdiv(depth, BLOCK_DEPTH)
    tl.assume(blocks > 0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        expert, start, end, row, column = locate_rows(owners_ptr, tile, tiles_across, BLOCK_ROWS, GROUP)
        column *= BLOCK_COLUMNS
        position = start + row + tl.arange(0, BLOCK_ROWS)
        # Past the expert's last row any row will do, as it is not written: the one a block before, to spread reads.
        position = tl.where(position < end, position, tl.maximum(position - BLOCK_ROWS, 0))
        source = tl.load(index_ptr + position).to(tl.int32) if GATHER else position
        w_places = w_scales + expert * w_scale_expert
        if AHEAD:
            x_next = _scales_of_rows(x_scales, source, x_scale_outer, x_scale_depth, 0, depth, SCALING)
            w_next = _scales_of_columns(
                w_places, column, columns, w_scale_outer, w_scale_depth, 0, depth, BLOCK_COLUMNS, W_OUTER, SCALING,
                False,
            )  # fmt: skip
        accumulator = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for block in tl.range(blocks):
            first = block * BLOCK_DEPTH
            if DESCRIPTORS and not GATHER:
                x_block = x.load([start + row, first])
            else:
                deep = first + tl.arange(0, BLOCK_DEPTH)
                inside = None if WHOLE_DEPTH else deep[None, :] < depth
                x_row = source[:, None] * x_stride if GATHER else source.to(tl.int64)[:, None] * x_stride
                x_block = tl.load(x + (x_row + deep[None, :]), mask=inside, other=None if WHOLE_DEPTH else 0.0)
            if DESCRIPTORS:
                w_block = w.load([expert, column, first]).reshape(BLOCK_COLUMNS, BLOCK_DEPTH)
            else:
                matrix = w + expert.to(tl.int64) * w_expert
                w_block = _load_block(matrix, column, columns, w_stride, first, depth, BLOCK_COLUMNS)
            if AHEAD:
                x_scale, w_scale = x_next, w_next
            # Past the last block there are zeros, with any scale.
            scaled = tl.minimum(block + AHEAD, blocks - 1)
            x_found = _scales_of_rows(x_scales, source, x_scale_outer, x_scale_depth, scaled, depth, SCALING)
            w_found = _scales_of_columns(
                w_places, column, columns, w_scale_outer, w_scale_depth, scaled, depth, BLOCK_COLUMNS, W_OUTER,
                SCALING, False,
            )  # fmt: skip
            if AHEAD:
                x_next, w_next = x_found, w_found
            else:
                x_scale, w_scale = x_found, w_found
            accumulator = _add_product(accumulator, x_block, x_scale, w_block, w_scale, W_OUTER, SCALING, AHEAD)
        if SCALING == "behind":
            across = column + tl.arange(0, BLOCK_COLUMNS)
            w_place = w_places + across * w_scale_outer
            accumulator *= tl.load(x_scales + source * x_scale_outer)[:, None]
            accumulator *= tl.load(w_place, mask=across < columns, other=0)[None, :]
        result = accumulator.to(y_ptr.dtype.element_ty)
        store_rows(
            y, start + shift, end + shift, row, column, columns, result, BLOCK_ROWS, BLOCK_COLUMNS, PIECES, DESCRIPTORS
        )
    zero_tail(y_ptr, first_ptr, starts_ptr + experts, rows, columns, ONLY_LAST)


@triton.jit
def float8_matrices_kernel(
    a, b, c,  # descriptors of blocks, or pointers
    a_scales, b_scales, starts_ptr,
    rows, columns, depth, experts, a_stride, b_stride,  # sizes of the product; strides of values
    a_scale_outer, a_scale_depth, b_scale_outer, b_scale_depth,  # strides of scales
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, AHEAD: tl.constexpr, SCALING: tl.constexpr,
    B_OUTER: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, WHOLE: tl.constexpr, ACCUMULATE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Multiply a by the transpose of b, contracted over each expert's columns; add to c if ACCUMULATE.

    a is rows x depth, b is columns x depth, c is experts x rows x columns. `starts_ptr` has the multiple of BLOCK_DEPTH
    at which each expert's columns begin, and the end of the last ones; without it there is one matrix, contracted over
    all. With DESCRIPTORS, a, b and c are descriptors of blocks, else pointers. B_OUTER rows of b share a scale. WHOLE
    says that tiles divide c, so that no load of scales needs a mask.
    """
    tiles_across = tl.cdiv(columns, BLOCK_COLUMNS)
    tiles_each = tl.cdiv(rows, BLOCK_ROWS) * tiles_across
    last = tl.cdiv(depth, BLOCK_DEPTH)
    for tile in tl.range(tl.program_id(0), tiles_each * experts, tl.num_programs(0), flatten=True):
        expert, row, column = locate_matrix(tile, tiles_each, rows, tiles_across, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
        if starts_ptr is not None:
            start = tl.load(starts_ptr + expert) // BLOCK_DEPTH
            end = tl.load(starts_ptr + expert + 1) // BLOCK_DEPTH
        else:
            start = 0
            end = last
        # An expert without rows takes one turn over zeros, so that its gradient is written too.
        turns = tl.maximum(end - start, 1)
        tl.assume(turns > 0)
        if AHEAD:
            a_next, b_next = _scales_of_tile(
                a_scales, b_scales, row, column, rows, columns, a_scale_outer, a_scale_depth, b_scale_outer,
                b_scale_depth, start, end, depth, BLOCK_ROWS, BLOCK_COLUMNS, B_OUTER, SCALING, WHOLE,
            )  # fmt: skip
        accumulator = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for turn in tl.range(turns):
            block = start + turn
            # Past the expert's end are another expert's numbers; past the end of all are zeros.
            first = tl.where(block < end, block, last) * BLOCK_DEPTH
            if DESCRIPTORS:
                a_block = a.load([row, first])
                b_block = b.load([column, first])
            else:
                a_block = _load_block(a, row, rows, a_stride, first, depth, BLOCK_ROWS)
                b_block = _load_block(b, column, columns, b_stride, first, depth, BLOCK_COLUMNS)
            if AHEAD:
                a_scale, b_scale = a_next, b_next
            tile_scales = _scales_of_tile(
                a_scales, b_scales, row, column, rows, columns, a_scale_outer, a_scale_depth, b_scale_outer,
                b_scale_depth, block + AHEAD, end, depth, BLOCK_ROWS, BLOCK_COLUMNS, B_OUTER, SCALING, WHOLE,
            )  # fmt: skip
            if AHEAD:
                a_next, b_next = tile_scales
            else:
                a_scale, b_scale = tile_scales
            accumulator = _add_product(accumulator, a_block, a_scale, b_block, b_scale, B_OUTER, SCALING, AHEAD)
        if SCALING == "behind":
            across = column + tl.arange(0, BLOCK_COLUMNS)
            down = tl.minimum(row + tl.arange(0, BLOCK_ROWS), rows - 1)
            accumulator *= tl.load(a_scales + down * a_scale_outer)[:, None]
            accumulator *= tl.load(b_scales + across * b_scale_outer, mask=across < columns, other=0)[None, :]
        elif starts_ptr is not None:
            # Scales of no rows may be NaN.
            accumulator = tl.where(end > start, accumulator, 0.0)
        store_matrix(
            c, expert, row, column, rows, columns, accumulator, BLOCK_ROWS, BLOCK_COLUMNS, PIECES, ACCUMULATE,
            DESCRIPTORS,
        )  # fmt: skip


@triton.jit
def _add_product(
    accumulator, a, a_scale, b, b_scale, B_OUTER: tl.constexpr, SCALING: tl.constexpr, AHEAD: tl.constexpr
):
    """Add a times the transpose of b: a and b are blocks of BLOCK_DEPTH columns, their scales those of the block.

    Scales that were loaded AHEAD are multiplied with each other before the wait for the product, others behind it.
    """
    if SCALING == "inside":
        a_format: tl.constexpr = "e5m2" if a.dtype == tl.float8e5 else "e4m3"
        b_format: tl.constexpr = "e5m2" if b.dtype == tl.float8e5 else "e4m3"
        accumulator = tl.dot_scaled(a, a_scale, a_format, b.T, b_scale, b_format, accumulator)
    elif SCALING == "behind":
        accumulator += tl.dot(a, b.T)
    elif B_OUTER > 1:
        scale = (a_scale * b_scale)[:, None]
        accumulator += tl.dot(a, b.T) * scale
    elif AHEAD:
        scale = b_scale[None, :] * a_scale[:, None]
        accumulator += tl.dot(a, b.T) * scale
    else:
        accumulator += tl.dot(a, b.T) * b_scale[None, :] * a_scale[:, None]
    return accumulator


@triton.jit
def _load_block(x, row, rows, stride, first, depth, BLOCK_ROWS: tl.constexpr):
    """Load the numbers of some rows from column `first` on; zeros outside the matrix."""
    down = row + tl.arange(0, BLOCK_ROWS)
    deep = first + tl.arange(0, BLOCK_DEPTH)
    inside = (down < rows)[:, None] & (deep < depth)[None, :]
    return tl.load(x + down.to(tl.int64)[:, None] * stride + deep[None, :], mask=inside, other=0.0)


@triton.jit
def _scales_of_tile(
    a_scales, b_scales, row, column, rows, columns, a_outer, a_deep, b_outer, b_deep, block, end, depth,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, B_OUTER: tl.constexpr, SCALING: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Load both operands' scales of a block. Zeros past the last block may have any finite scale."""
    block = tl.maximum(tl.minimum(block, end - 1), 0)
    if B_OUTER > 1:
        down = tl.minimum(row + tl.arange(0, BLOCK_ROWS), rows - 1)
        a_scale = _scales_of_rows(a_scales, down, a_outer, a_deep, block, depth, SCALING)
    else:
        a_scale = _scales_of_columns(a_scales, row, rows, a_outer, a_deep, block, depth, BLOCK_ROWS, 1, SCALING, WHOLE)
    b_scale = _scales_of_columns(
        b_scales, column, columns, b_outer, b_deep, block, depth, BLOCK_COLUMNS, B_OUTER, SCALING, WHOLE
    )
    return a_scale, b_scale


@triton.jit
def _scales_of_rows(scales, source, outer, deep, block, depth, SCALING: tl.constexpr):
    """Load the scales of a block of the rows `source`; `outer` and `deep` are strides. 1 if they are applied behind.

    No mask, so that the compiler scales the first block's sum while the second block is multiplied.
    """
    factors = 1.0
    if SCALING == "promoted":
        factors = tl.load(scales + block * deep + source * outer)
    elif SCALING == "inside":
        factors = _micro_scales(scales, source, source >= 0, outer, deep, block, depth)
    return factors


@triton.jit
def _scales_of_columns(
    scales, column, columns, outer, deep, block, depth,
    BLOCK_COLUMNS: tl.constexpr, OUTER: tl.constexpr, SCALING: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Load the scales of a block of neighbouring columns: one for all if OUTER of them share it, else one for each.

    Places are computed here and not once for a tile, so that the compiler sees that they are neighbours and loads
    several at once. WHOLE says that all of them are columns.
    """
    factors = 1.0
    across = tl.multiple_of(column, BLOCK_COLUMNS) + tl.arange(0, BLOCK_COLUMNS)
    if SCALING == "inside":
        factors = _micro_scales(scales, across, across < columns, outer, deep, block, depth)
    elif SCALING == "promoted" and OUTER > 1:
        tl.static_assert(BLOCK_COLUMNS <= OUTER, "a tile must not be wider than a block of the weight's scales")
        factors = tl.load(scales + block * deep + column // OUTER * outer)
    elif SCALING == "promoted" and WHOLE:
        factors = tl.load(scales + block * deep + across * outer)
    elif SCALING == "promoted":
        factors = tl.load(scales + block * deep + across * outer, mask=across < columns, other=0.0)
    return factors


@triton.jit
def _micro_scales(scales, places, inside, outer, deep, block, depth):
    """Load the exponents of the scales of some rows; 127, which is 1, outside."""
    parts = block * (BLOCK_DEPTH // MICRO) + tl.arange(0, BLOCK_DEPTH // MICRO)
    mask = inside[:, None] & (parts * MICRO < depth)[None, :]
    return tl.load(scales + places[:, None] * outer + parts[None, :] * deep, mask=mask, other=127)


if HAS_GLUON:
    from penstock.kernels.gluon import float8_gemm_kernels as hopper

WIDTH = 128  # columns of a Hopper tile
TRIOS_REGISTERS = 128  # as `REGISTERS`, for sixteen warps, where there are three consumers

Scaling = Literal["promoted", "behind", "inside"]  # when scales are applied; see `float8_rows_kernel`
_SCALING: dict[int, Scaling] = {DEPTH: "promoted", 0: "behind", 32: "inside"}  # by the columns of a block


def multiply(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    accumulate_into: Tensor | None = None,
    launch: ProductLaunch | None = None,
) -> Tensor:
    """`reference.multiply` of a weight or of rows; `launch` replaces the table's choice.

    This function and both below raise KernelError for operands that no launch accepts.
    """
    rows, depth = a.values.shape
    columns = len(b.values)
    scaling = _check("dense", a=(a, (rows, depth)), b=(b, (columns, depth)))
    result = accumulate_into if accumulate_into is not None else out
    if result is None:
        result = a.values.new_empty(rows, columns, dtype=dtype)
    expected = torch.float32 if accumulate_into is not None else dtype
    _check_result("dense", result, (rows, columns), expected)
    if result.numel():
        of_squares: Product = "dense" if accumulate_into is None else "dense_square"
        which: Product = "dense_gradient" if b.block[0] == 1 else of_squares
        launch = launch or dense_launch(which, rows, columns, a.values.device)
        _launch_matrices(a, b, result[None], None, launch, scaling, accumulate=accumulate_into is not None)
    return result


def multiply_groups(
    x: Quantized,
    w: Quantized | SlottedWeight,
    counts_e: Tensor,
    index_R: Tensor | None = None,
    *,
    dtype: torch.dtype,
    tiles: TileTable | None = None,
    keep: SavedRows | None = None,
    launch: ProductLaunch | None = None,
) -> Tensor:
    """`reference.multiply_groups`; with `keep` the rows are written into its buffer, which is returned.

    Rows past the last expert's are zero, or the last one is (`TileTable.only_last`).
    """
    stacks: tuple[Quantized, ...] = (w.own, w.slots) if isinstance(w, SlottedWeight) else (w,)
    experts, (_, columns, depth) = sum(len(stack.values) for stack in stacks), stacks[0].values.shape
    rows = len(x.values if index_R is None else index_R)
    for stack in stacks:
        scaling = _check("grouped", x=(x, (len(x.values), depth)), w=(stack, (len(stack.values), columns, depth)))
    check_groups("float8 product", counts_e, experts, index_R)
    y_RN = x.values.new_empty(rows, columns, dtype=dtype) if keep is None else keep.rows_SF
    _check_result("grouped", y_RN, (len(y_RN), columns), dtype)
    if rows and columns:
        launch = launch or product_launch("rows" if index_R is None else "rows_gathered", x.values.device)
        launch = launch if _is_hoppers(x, stacks[0], launch) else in_triton(launch)
        tiles = tiles or tile_table(counts_e, rows)
        x, index_R = _gather(x, index_R, tiles, launch)
        first = None if keep is None else keep.first
        for part in weight_parts(w, tiles):
            _launch_rows(x, part.weight, y_RN, index_R, part.tiles, launch, scaling, first)
    return y_RN


def multiply_columns(
    dy: Quantized,
    x: Quantized,
    counts_e: Tensor,
    *,
    dtype: torch.dtype,
    accumulate_into: Tensor | SlottedWeight | None = None,
    tiles: TileTable | None = None,
    launch: ProductLaunch | None = None,
) -> Any:
    """`reference.multiply_columns`; x may have a scale for 128 x 128 numbers."""
    (rows, depth), columns, experts = dy.values.shape, len(x.values), counts_e.numel()
    scaling = _check("gradient", dy=(dy, (rows, depth)), x=(x, (columns, depth)))
    check_groups("float8 product", counts_e, experts, None)
    if isinstance(accumulate_into, SlottedWeight):
        gradient = partial(multiply_columns, dy, x, dtype=dtype, launch=launch)
        return gradient_in_parts(gradient, counts_e, accumulate_into, tiles)
    shape = (experts, rows, columns)
    result = dy.values.new_empty(shape, dtype=dtype) if accumulate_into is None else accumulate_into
    _check_result("gradient", result, shape, dtype if accumulate_into is None else torch.float32)
    if result.numel():
        launch = launch or product_launch("columns_square" if x.block[0] == DEPTH else "columns", dy.values.device)
        starts_e = (tiles or tile_table(counts_e, depth)).aligned_e
        _launch_matrices(dy, x, result, starts_e, launch, scaling, accumulate=accumulate_into is not None)
    return result


def _gather(
    x: Quantized, index_R: Tensor | None, tiles: TileTable, launch: ProductLaunch
) -> tuple[Quantized, Tensor | None]:
    """Rows and index for the kernel: unchanged, or the rows copied first, also where 32 bits cannot count them."""
    if index_R is None:
        if x.scales.stride(0) * len(x.values) < GATHER_LIMIT:
            return x, None
        # Scales far apart, as in packed rows, are copied where 32 bits cannot count them.
        return x._replace(scales=scales_in_bytes(x.scales).T.contiguous().T.view(x.scales.dtype)), None
    if not launch.copy_gathered and len(x.values) * x.values.stride(0) < GATHER_LIMIT:
        return x, index_R
    # Two numbers at a time where there are as many: half as many words to move.
    units, scales = x.values.view(torch.int16 if x.values.shape[1] % 2 == 0 else torch.int8), x.scales
    values = gather_rows(units, index_R, tiles.used, multiple=16 // units.itemsize).view(x.values.dtype)
    if x.block[0]:  # else all rows share a scale
        memory = scales_in_bytes(scales).T.contiguous()
        scales = gather_columns(memory, index_R, tiles.used).T.view(scales.dtype)
    return Quantized(values, scales, x.block), None


def _check(product: str, **operands: tuple[Quantized, tuple[int, ...]]) -> Scaling:
    """Refuse operands that no launch accepts, each given with its expected shape; return how they are scaled."""
    depths = {operand.block[1] for operand, _ in operands.values()}
    first, second = (operand.block for operand, _ in operands.values())
    if len(depths) != 1 or first[1] not in _SCALING or first[0] > 1 or (first[1] and second[0] not in (1, DEPTH)):
        raise KernelError(
            f"float8 product ({product}): blocks do not fit",
            got=f"{first} and {second}",
            allowed="both operands quantized by one of the recipes tensorwise, rowwise, blockwise, mxfp8",
        )
    for name, (operand, shape) in operands.items():
        values = operand.values
        if values.shape != shape or values.itemsize != 1 or not values.is_floating_point():
            got = f"{values.dtype} {tuple(values.shape)}"
            raise KernelError(f"float8 product ({product}): {name} does not fit", got=got, allowed=f"float8 {shape}")
        apart = [stride for size, stride in zip(shape[:-1], values.stride()[:-1], strict=True) if size > 1]
        if values.stride(-1) != 1 or any(stride % 16 for stride in apart) or values.data_ptr() % 16:
            raise KernelError(
                f"float8 product ({product}): {name} cannot be copied in blocks",
                got=f"shape {tuple(values.shape)}, strides {values.stride()}",
                allowed="rows that are contiguous and lie a multiple of 16 bytes apart",
                fix="quantize it with penstock.kernels.float8.quantize, which leaves room behind each row",
            )
    return _SCALING[first[1]]


def _check_result(product: str, result: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if result.shape != shape or result.dtype != dtype or dtype not in (torch.bfloat16, torch.float32):
        got, allowed = f"{result.dtype} {tuple(result.shape)}", f"{dtype} {shape}, bfloat16 or float32"
        raise KernelError(f"float8 product ({product}): the result does not fit", got=got, allowed=allowed)
    if not result.is_contiguous() or shape[-1] * result.itemsize % 16 or result.data_ptr() % 16:
        raise KernelError(
            f"float8 product ({product}): the result cannot be written in blocks",
            got=f"shape {shape}, strides {result.stride()}",
            allowed="contiguous, rows that are multiples of 16 bytes",
            fix="pad the width of the layer to a multiple of 8",
        )


def _launch_rows(
    x: Quantized,
    w: Quantized,
    y: Tensor,
    index: Tensor | None,
    tiles: TileTable,
    launch: ProductLaunch,
    scaling: Scaling,
    first: Tensor | None,
) -> None:
    """Run `float8_rows_kernel` of Triton or of Hopper. `first` is the first row of y to write."""
    if index is None and _is_hoppers(x, w, launch):
        launch_hopper_rows(x, w, y, tiles, launch, first)
        return
    (rows, columns), (experts, _, depth) = y.shape, w.values.shape
    size = BLOCK_SIZES.index(launch.block_rows)
    x_source, w_source, y_target = x.values, w.values, y
    if launch.descriptors:
        w_source = TensorDescriptor.from_tensor(w.values, [1, launch.block_columns, DEPTH])
        y_target = create_ragged_descriptor(y, [launch.block_rows, launch.block_columns // launch.pieces])
        if index is None:
            x_source = TensorDescriptor.from_tensor(x.values, [launch.block_rows, DEPTH])
    start_kernel(
        float8_rows_kernel, (programs_of(launch, y.device),),
        x_source, w_source, y_target, y, scales_in_bytes(x.scales), scales_in_bytes(w.scales), index, tiles.tails,
        tiles.owners[size], tiles.block_counts[size:], first, rows, columns, depth, experts, x.values.stride(0),
        w.values.stride(0), w.values.stride(1), *_strides(x), w.scales.stride(0), *_strides(w),
        W_OUTER=w.block[0] if scaling == "promoted" else 1, GATHER=index is not None, WHOLE_DEPTH=depth % DEPTH == 0,
        ONLY_LAST=tiles.only_last, **_constants(launch, scaling),
    )  # fmt: skip


def _launch_matrices(
    a: Quantized,
    b: Quantized,
    c: Tensor,
    starts: Tensor | None,
    launch: ProductLaunch,
    scaling: Scaling,
    *,
    accumulate: bool,
) -> None:
    """Run `float8_matrices_kernel` of Triton or of Hopper; c is experts x rows x columns, one expert without starts."""
    if _is_hoppers(a, b, launch):
        if b.block[0] == DEPTH and starts is None and not accumulate:
            launch_hopper_rows(a, b, c[0], None, launch)
        else:
            _launch_hopper_matrices(a, b, c, starts, launch, accumulate=accumulate)
        return
    launch = in_triton(launch)
    experts, rows, columns = c.shape
    a_source, b_source, c_target = a.values, b.values, c
    if launch.descriptors:
        a_source = TensorDescriptor.from_tensor(a.values, [launch.block_rows, DEPTH])
        b_source = TensorDescriptor.from_tensor(b.values, [launch.block_columns, DEPTH])
        c_target = TensorDescriptor.from_tensor(c, [1, launch.block_rows, launch.block_columns // launch.pieces])
    start_kernel(
        float8_matrices_kernel, (programs_of(launch, c.device),),
        a_source, b_source, c_target, scales_in_bytes(a.scales), scales_in_bytes(b.scales), starts, rows, columns,
        a.values.shape[1], experts, a.values.stride(0), b.values.stride(0), *_strides(a), *_strides(b),
        B_OUTER=b.block[0] if scaling == "promoted" else 1,
        WHOLE=rows % launch.block_rows == 0 and columns % launch.block_columns == 0, ACCUMULATE=accumulate,
        **_constants(launch, scaling),
    )  # fmt: skip


def hopper_obstacle(a: Quantized, b: Quantized, target: str) -> str | None:
    """Why the Hopper kernels cannot multiply rows by rows or weights (b) that fit each other, or None."""
    if (reason := support.obstacle(target)) is not None:
        return reason
    if a.block != BLOCKWISE.rows or b.block not in (BLOCKWISE.rows, BLOCKWISE.weights):
        return f"scales of {a.block} and {b.block} are not those of the recipe {BLOCKWISE.name}"
    return None if a.values.shape[-1] else "nothing is contracted"


def _is_hoppers(a: Quantized, b: Quantized, launch: ProductLaunch) -> bool:
    return launch.engine == "gluon" and hopper_obstacle(a, b, target_of(a.values.device)) is None


def launch_hopper_rows(
    x: Quantized, w: Quantized, y: Tensor, tiles: TileTable | None, launch: ProductLaunch, first: Tensor | None = None
) -> None:
    """`_launch_rows` by the Hopper kernel; without `tiles` w is one matrix (N x K) for all rows."""
    (rows, depth), columns = x.values.shape, y.shape[1]
    values = w.values if tiles is not None else w.values[None]
    size = BLOCK_SIZES.index(launch.block_rows)
    table = (None,) * 3 if tiles is None else (tiles.tails, tiles.owners[size], tiles.block_counts[size:])
    # Results in float32 are written through pointers.
    pieces = ragged_blocks_of(y, PIECE_ROWS, WIDTH // launch.pieces) if y.dtype == torch.bfloat16 else None
    start_kernel(
        hopper.float8_rows_kernel, (programs_of(launch, y.device),),
        blocks_of(x.values, PIECE_ROWS, DEPTH), blocks_of(values, 1, WIDTH, DEPTH), pieces, y, x.scales, w.scales,
        *table, first, rows, columns, depth, len(values), *x.scales.stride(),
        w.scales.stride(0) if tiles is not None else 0, *w.scales.stride()[-2:],
        STAGES=launch.stages, STEPS=launch.steps, GROUP=launch.group, CONSUMERS=launch.block_rows // PIECE_ROWS,
        ONLY_LAST=tiles is not None and tiles.only_last, **_warps_of(launch),
    )  # fmt: skip


def _launch_hopper_matrices(
    a: Quantized, b: Quantized, c: Tensor, starts: Tensor | None, launch: ProductLaunch, *, accumulate: bool
) -> None:
    experts, rows, columns = c.shape
    is_square = b.block[0] == WIDTH
    start_kernel(
        hopper.float8_matrices_kernel, (programs_of(launch, c.device),),
        blocks_of(a.values, PIECE_ROWS, DEPTH), blocks_of(b.values, WIDTH, DEPTH),
        blocks_of(c, 1, PIECE_ROWS, WIDTH // launch.pieces) if accumulate else None, c, a.scales, b.scales, starts,
        rows, columns, a.values.shape[1], experts, *a.scales.stride(), *b.scales.stride(),
        STAGES=launch.stages, STEPS=launch.steps if is_square else 1, GROUP=launch.group,
        CONSUMERS=launch.block_rows // PIECE_ROWS, SQUARE=is_square,
        WHOLE=rows % launch.block_rows == 0 and columns % WIDTH == 0, **_warps_of(launch),
    )  # fmt: skip


def _warps_of(launch: ProductLaunch) -> dict[str, int]:
    """Warps of a consumer, and registers of a thread before warps exchange them."""
    return {"num_warps": launch.warps, "maxnreg": REGISTERS if launch.block_rows == 2 * PIECE_ROWS else TRIOS_REGISTERS}


def _strides(operand: Quantized) -> tuple[int, int]:
    """Strides of the scales along outer and depth; 0 along outer where all rows share one."""
    outer, depth = operand.scales.stride()[-2:]
    return (0 if operand.block[0] == 0 else outer), depth


def _constants(launch: ProductLaunch, scaling: Scaling) -> dict[str, Any]:
    scales = {"AHEAD": launch.ahead and scaling == "promoted", "SCALING": scaling}
    return {**launch.constants, **scales, "num_warps": launch.warps, "num_stages": launch.stages}
