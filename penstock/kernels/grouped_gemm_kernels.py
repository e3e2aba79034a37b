"""Device code of the grouped GEMM: two persistent kernels, one source for every chip.

`rows_kernel` makes an output that has the experts' rows (forward, input gradient); `weights_kernel` contracts over each
expert's rows (weight gradient). A program takes every P-th output tile, P programs in all. The loop over tiles and the loop
over the contracted dimension are flattened into one, so the pipeline of loads runs on across tiles: the next tile's first
blocks are on their way while the last tile is written.

Ragged ends cost no branch where the chip copies blocks by descriptor (`DESCRIPTORS`). A ragged descriptor, made by
`triton.tools.ragged_tma`, has two dimensions more, whose strides undo each other modulo 2**64: coordinates [2**30, end, 2**30 - count + row] lead to the row
`end - count + row`, and the bound of 2**30 rows stands exactly at the expert's end. So loads past an expert's last row give
zeros and stores past it are dropped. Elsewhere, and for gathered rows, the kernels use plain pointers with masks.

Inside, the words are those of a matrix product: an output of rows x columns, contracted over depth.
"""

import triton
import triton.language as tl


@triton.jit
def rows_kernel(
    x,
    w,
    y,
    y_ptr,
    index_ptr,
    starts_ptr,
    owners_ptr,
    block_count_ptr,
    rows,
    columns,
    depth,
    experts,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PIECES: tl.constexpr,
    FLATTEN: tl.constexpr,
    DEPTH_FIRST: tl.constexpr,
    GATHER: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """y = x @ w of the row's expert.

    `x` and `y` are rows x depth and rows x columns. `w` is experts x columns x depth, or experts x depth x columns if
    DEPTH_FIRST. With DESCRIPTORS, `w`, `y` and (without GATHER) `x` are descriptors of blocks, else pointers; `y_ptr` is
    always the pointer. Rows of the tail are set to zero.
    """
    tiles_across = tl.cdiv(columns, BLOCK_COLUMNS)
    tiles = tl.load(block_count_ptr) * tiles_across
    steps = tl.cdiv(depth, BLOCK_DEPTH)
    tl.assume(steps > 0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        expert, start, end, row, column = _locate_rows(owners_ptr, tile, tiles_across, BLOCK_ROWS, GROUP)
        column *= BLOCK_COLUMNS
        if GATHER or not DESCRIPTORS:
            place = start + row + tl.arange(0, BLOCK_ROWS)
            # Rows past the expert's last are read from a row that exists and are never written.
            source = tl.load(index_ptr + place, mask=place < end, other=0) if GATHER else tl.minimum(place, end - 1)
            x_rows = x + source.to(tl.int64)[:, None] * depth
        accumulator = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for step in tl.range(steps):
            first = step * BLOCK_DEPTH
            if DESCRIPTORS and not GATHER:
                x_block = x.load([start + row, first])
            else:
                depths = first + tl.arange(0, BLOCK_DEPTH)
                x_block = tl.load(x_rows + depths[None, :], mask=depths[None, :] < depth, other=0)
            w_block = _load_weights(
                w, expert, first, column, depth, columns, BLOCK_DEPTH, BLOCK_COLUMNS, DEPTH_FIRST, DESCRIPTORS
            )
            accumulator = tl.dot(x_block, w_block, accumulator, input_precision="ieee")
        result = accumulator.to(y_ptr.dtype.element_ty)
        WIDTH: tl.constexpr = BLOCK_COLUMNS // PIECES
        if PIECES == 1:
            _store_rows(y, start, end, row, column, columns, result, BLOCK_ROWS, WIDTH, DESCRIPTORS)
        else:
            left, right = result.reshape(BLOCK_ROWS, 2, WIDTH).permute(0, 2, 1).split()
            _store_rows(y, start, end, row, column, columns, left, BLOCK_ROWS, WIDTH, DESCRIPTORS)
            _store_rows(y, start, end, row, column + WIDTH, columns, right, BLOCK_ROWS, WIDTH, DESCRIPTORS)
    _zero_tail(y_ptr, tl.load(starts_ptr + experts), rows, columns)


@triton.jit
def weights_kernel(
    dy,
    x,
    dw,
    index_ptr,
    starts_ptr,
    rows,
    columns,
    experts,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PIECES: tl.constexpr,
    FLATTEN: tl.constexpr,
    GATHER: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """dw = transpose(dy) @ x over the rows of each expert; added to what `dw` holds if ACCUMULATE.

    `dy` has `rows` columns and `x` has `columns` (the words of the output, experts x rows x columns). With DESCRIPTORS,
    `dy`, `dw` and (without GATHER) `x` are descriptors of blocks, else pointers.
    """
    tiles_across = tl.cdiv(columns, BLOCK_COLUMNS)
    tiles_each = tl.cdiv(rows, BLOCK_ROWS) * tiles_across
    for tile in tl.range(tl.program_id(0), tiles_each * experts, tl.num_programs(0), flatten=FLATTEN):
        expert = tile // tiles_each
        row, column = _swizzle(tile % tiles_each, tl.cdiv(rows, BLOCK_ROWS), tiles_across, GROUP)
        row *= BLOCK_ROWS
        column *= BLOCK_COLUMNS
        start = tl.load(starts_ptr + expert)
        count = tl.load(starts_ptr + expert + 1) - start
        # An expert without rows takes one step over zeros, so that its gradient is written too.
        steps = tl.maximum(tl.cdiv(count, BLOCK_DEPTH), 1)
        tl.assume(steps > 0)
        accumulator = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        if GATHER:
            source = _load_index(index_ptr + start, 0, count, BLOCK_DEPTH)
        else:
            source = start
        for step in tl.range(steps):
            first = step * BLOCK_DEPTH
            dy_block = _load_depths(dy, start, start, count, first, row, rows, BLOCK_DEPTH, BLOCK_ROWS, False, DESCRIPTORS)
            x_block = _load_depths(x, source, start, count, first, column, columns, BLOCK_DEPTH, BLOCK_COLUMNS, GATHER, DESCRIPTORS)
            if GATHER:
                source = _load_index(index_ptr + start, first + BLOCK_DEPTH, count, BLOCK_DEPTH)
            accumulator = tl.dot(dy_block.T, x_block, accumulator, input_precision="ieee")
        WIDTH: tl.constexpr = BLOCK_COLUMNS // PIECES
        if PIECES == 1:
            _store_weights(
                dw, expert, row, column, rows, columns, accumulator, BLOCK_ROWS, WIDTH, ACCUMULATE, DESCRIPTORS
            )
        else:
            left, right = accumulator.reshape(BLOCK_ROWS, 2, WIDTH).permute(0, 2, 1).split()
            _store_weights(dw, expert, row, column, rows, columns, left, BLOCK_ROWS, WIDTH, ACCUMULATE, DESCRIPTORS)
            column += WIDTH
            _store_weights(dw, expert, row, column, rows, columns, right, BLOCK_ROWS, WIDTH, ACCUMULATE, DESCRIPTORS)


@triton.jit
def _locate_rows(owners_ptr, tile, tiles_across, BLOCK_ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Whose tile it is, the expert's first row and the row past its last, the tile's row in the expert, its column block.

    Tiles of one expert stand together, so `tile // tiles_across` is a block of the same expert, though the swizzle may
    then choose another one of its blocks.
    """
    owner_ptr = owners_ptr + tile // tiles_across * 4
    expert = tl.load(owner_ptr)
    start = tl.load(owner_ptr + 1)
    end = tl.load(owner_ptr + 2)
    first_tile = tl.load(owner_ptr + 3) * tiles_across
    row, column = _swizzle(tile - first_tile, tl.cdiv(end - start, BLOCK_ROWS), tiles_across, GROUP)
    return expert, start, end, row * BLOCK_ROWS, column


@triton.jit
def _swizzle(tile, tiles_down, tiles_across, GROUP: tl.constexpr):
    """Walk tiles down GROUP rows, then one column on: programs that run together share operands in the L2 cache."""
    group = tile // (GROUP * tiles_across)
    height = tl.minimum(tiles_down - group * GROUP, GROUP)
    within = tile % (GROUP * tiles_across)
    return group * GROUP + within % height, within // height


@triton.jit
def _load_weights(
    w,
    expert,
    first,
    column,
    depth,
    columns,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DEPTH_FIRST: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """One block of an expert's matrix, depth x columns; zeros outside the matrix."""
    if DESCRIPTORS and DEPTH_FIRST:
        return w.load([expert, first, column]).reshape(BLOCK_DEPTH, BLOCK_COLUMNS)
    elif DESCRIPTORS:
        return w.load([expert, column, first]).reshape(BLOCK_COLUMNS, BLOCK_DEPTH).T
    else:
        depths = first + tl.arange(0, BLOCK_DEPTH)
        across = column + tl.arange(0, BLOCK_COLUMNS)
        inside = (depths < depth)[:, None] & (across < columns)[None, :]
        matrix = w + expert.to(tl.int64) * depth * columns
        if DEPTH_FIRST:
            return tl.load(matrix + depths[:, None] * columns + across[None, :], mask=inside, other=0)
        else:
            return tl.load(matrix + across[None, :] * depth + depths[:, None], mask=inside, other=0)


@triton.jit
def _load_index(index_ptr, first, count, BLOCK_DEPTH: tl.constexpr):
    place = first + tl.arange(0, BLOCK_DEPTH)
    return tl.load(index_ptr + place, mask=place < count, other=0)


@triton.jit
def _load_depths(
    rows_in,
    source,
    start,
    count,
    first,
    column,
    columns,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GATHER: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Rows `first` and on of an expert whose rows are contracted over; zeros past its last."""
    if DESCRIPTORS and not GATHER:
        span, end, place = _ragged(start + count, count, first)
        return rows_in.load([span, end, place, column]).reshape(BLOCK_DEPTH, BLOCK_COLUMNS)
    else:
        place = first + tl.arange(0, BLOCK_DEPTH)
        across = column + tl.arange(0, BLOCK_COLUMNS)
        if not GATHER:
            source = start + place
        inside = (place < count)[:, None] & (across < columns)[None, :]
        return tl.load(rows_in + source.to(tl.int64)[:, None] * columns + across[None, :], mask=inside, other=0)


@triton.jit
def _store_rows(
    y,
    start,
    end,
    row,
    column,
    columns,
    result,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Write the rows of a tile that are the expert's own."""
    if DESCRIPTORS:
        span, end, place = _ragged(end, end - start, row)
        y.store([span, end, place, column], result.reshape(1, 1, BLOCK_ROWS, BLOCK_COLUMNS))
    else:
        place = start + row + tl.arange(0, BLOCK_ROWS)
        across = column + tl.arange(0, BLOCK_COLUMNS)
        inside = (place < end)[:, None] & (across < columns)[None, :]
        tl.store(y + place.to(tl.int64)[:, None] * columns + across[None, :], result, mask=inside)


@triton.jit
def _store_weights(
    dw,
    expert,
    row,
    column,
    rows,
    columns,
    result,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Write or add a tile of an expert's gradient. One program owns each element, so the sum has a fixed order."""
    if DESCRIPTORS:
        block = result.to(dw.dtype).reshape(1, BLOCK_ROWS, BLOCK_COLUMNS)
        if ACCUMULATE:
            dw.atomic_add([expert, row, column], block)
        else:
            dw.store([expert, row, column], block)
    else:
        down = row + tl.arange(0, BLOCK_ROWS)
        across = column + tl.arange(0, BLOCK_COLUMNS)
        inside = (down < rows)[:, None] & (across < columns)[None, :]
        dw_ptrs = dw + expert.to(tl.int64) * rows * columns + down[:, None] * columns + across[None, :]
        if ACCUMULATE:
            result += tl.load(dw_ptrs, mask=inside, other=0)
        tl.store(dw_ptrs, result.to(dw.dtype.element_ty), mask=inside)


@triton.jit
def _ragged(end, count, row):
    """Coordinates in a ragged descriptor of a row of an expert that has `count` rows, the last of them before `end`."""
    span = tl.full((), 2**30, tl.int32)
    return span, end, span - count + row


@triton.jit
def _zero_tail(y_ptr, tail, rows, columns):
    """Rows past the last expert's are zero; a row is one program's."""
    for row in range(tail + tl.program_id(0), rows, tl.num_programs(0)):
        for first in range(0, columns, 2048):
            across = first + tl.arange(0, 2048)
            row_ptr = y_ptr + row * columns.to(tl.int64)
            tl.store(row_ptr + across, tl.zeros((2048,), y_ptr.dtype.element_ty), mask=across < columns)
