"""Triton kernels of products of 8-bit numbers: two persistent kernels, one source for every chip.

`float8_rows_kernel` makes an output that has the experts' rows; `float8_matrices_kernel` makes one matrix (dense
products), or one for each expert, contracted over the expert's columns (weight gradients). Both operands have their
contracted dim last, so blocks are loaded in the one order that Hopper's matrix units read. The loops over tiles and
over the contracted dim are flattened into one, as in `penstock.kernels.grouped_gemm_kernels`.

The contracted dim is walked in blocks of `DEPTH`, 128. The constant SCALING says when scales are applied:

    promoted   the sum of a block leaves the matrix unit, is multiplied by both scales and added in float32
    behind     sums of blocks are added in float32, scales are applied at the end
    inside     the matrix unit applies a scale to every 32 numbers (`tl.dot_scaled`)

Hopper's matrix unit keeps 14 bits of a sum, so sums leave it after each block even if no scale is waiting, and Triton
waits for a product wherever its sum is read. Another program on the same multiprocessor hides the multiplications:
tiles are small and scales are loaded one block AHEAD, so that one multiplication a number stands between a product and
the next one.
"""

from penstock.kernels.float8.recipes import DEPTH as RECIPE_DEPTH
from penstock.kernels.grouped_gemm_kernels import locate_matrix, locate_rows, store_matrix, store_rows, zero_tail
from penstock.kernels.language import tl, triton

DEPTH = tl.constexpr(RECIPE_DEPTH)
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

    x is rows x depth, w is experts x columns x depth, y is rows x columns. With DESCRIPTORS, w, y and (without GATHER)
    x are descriptors of blocks, else pointers; y_ptr is always the pointer. Strides are of values and scales. W_OUTER
    columns of w share a scale. WHOLE_DEPTH says that no load of x by pointers needs a mask. With `first_ptr` rows are
    written from that row of y on, and there is no tail.
    """
    tiles_across = tl.cdiv(columns, BLOCK_COLUMNS)
    tiles = tl.load(block_count_ptr) * tiles_across
    shift = 0 if first_ptr is None else tl.load(first_ptr).to(tl.int32)
    blocks = tl.cdiv(depth, DEPTH)
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
            first = block * DEPTH
            if DESCRIPTORS and not GATHER:
                x_block = x.load([start + row, first])
            else:
                deep = first + tl.arange(0, DEPTH)
                inside = None if WHOLE_DEPTH else deep[None, :] < depth
                x_row = source[:, None] * x_stride if GATHER else source.to(tl.int64)[:, None] * x_stride
                x_block = tl.load(x + (x_row + deep[None, :]), mask=inside, other=None if WHOLE_DEPTH else 0.0)
            if DESCRIPTORS:
                w_block = w.load([expert, column, first]).reshape(BLOCK_COLUMNS, DEPTH)
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

    a is rows x depth, b is columns x depth, c is experts x rows x columns. `starts_ptr` has the multiple of DEPTH at
    which each expert's columns begin, and the end of the last ones; without it there is one matrix, contracted over
    all. With DESCRIPTORS, a, b and c are descriptors of blocks, else pointers. B_OUTER rows of b share a scale. WHOLE
    says that tiles divide c, so that no load of scales needs a mask.
    """
    tiles_across = tl.cdiv(columns, BLOCK_COLUMNS)
    tiles_each = tl.cdiv(rows, BLOCK_ROWS) * tiles_across
    last = tl.cdiv(depth, DEPTH)
    for tile in tl.range(tl.program_id(0), tiles_each * experts, tl.num_programs(0), flatten=True):
        expert, row, column = locate_matrix(tile, tiles_each, rows, tiles_across, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
        if starts_ptr is not None:
            start = tl.load(starts_ptr + expert) // DEPTH
            end = tl.load(starts_ptr + expert + 1) // DEPTH
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
            first = tl.where(block < end, block, last) * DEPTH
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
    """Add a times the transpose of b: a and b are blocks of DEPTH columns, their scales those of the block.

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
    deep = first + tl.arange(0, DEPTH)
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
    parts = block * (DEPTH // MICRO) + tl.arange(0, DEPTH // MICRO)
    mask = inside[:, None] & (parts * MICRO < depth)[None, :]
    return tl.load(scales + places[:, None] * outer + parts[None, :] * deep, mask=mask, other=127)
