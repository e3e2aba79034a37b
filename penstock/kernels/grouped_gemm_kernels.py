"""Device code of the grouped GEMM, one source for every chip, and the tile functions that all matrix products share.

`rows_kernel` computes an output with the experts' rows (forward, input gradient); `weights_kernel` contracts over each
expert's rows (weight gradient). Both are persistent: of P programs, each takes every P-th output tile. The loop over
tiles and the loop over the contracted dimension are flattened into one, so the next tile's first blocks are loaded
while the last tile is written.

With DESCRIPTORS (chips with a copy engine) blocks are copied by descriptor and ragged ends need no branch. Elsewhere,
and to gather rows, the kernels use pointers and masks. A load past the last row whose value does not matter reads some
other row instead and needs no mask.

A ragged descriptor (`triton.tools.ragged_tma`) has two more dimensions, whose strides cancel modulo 2**64: the
coordinates [2**30, end, 2**30 - count + row] address the row `end - count + row`, and the bound of 2**30 rows is
exactly the expert's end. So loads past an expert's last row give zeros and stores past it are dropped.

The names are those of a matrix product: an output of rows x columns, contracted over depth.
"""

from penstock.kernels.language import tl, triton


@triton.jit
def locate_rows(owners_ptr, tile, tiles_across, BLOCK_ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Expert of a tile: expert, its first row, the row past its last, the tile's row in it, the column block.

    Tiles of one expert are consecutive, so `tile // tiles_across` is a block of the same expert, though the swizzle may
    then choose another one of its blocks.
    """
    owner_ptr = owners_ptr + tile // tiles_across * 4  # four words: see `tile_table.OWNER_FIELDS`
    expert = tl.load(owner_ptr)
    start = tl.load(owner_ptr + 1)
    end = tl.load(owner_ptr + 2)
    first_tile = tl.load(owner_ptr + 3) * tiles_across
    row, column = swizzle(tile - first_tile, tl.cdiv(end - start, BLOCK_ROWS), tiles_across, GROUP)
    return expert, start, end, row * BLOCK_ROWS, column


@triton.jit
def locate_matrix(
    tile, tiles_each, rows, tiles_across, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GROUP: tl.constexpr
):
    """Expert, row and column of a tile of the experts' matrices, each of which has `rows` rows."""
    expert = tile // tiles_each
    row, column = swizzle(tile % tiles_each, tl.cdiv(rows, BLOCK_ROWS), tiles_across, GROUP)
    return expert, row * BLOCK_ROWS, column * BLOCK_COLUMNS


@triton.jit
def swizzle(tile, tiles_down, tiles_across, GROUP: tl.constexpr):
    """Walk tiles down GROUP rows, then one column on: programs that run together share operands in the L2 cache.

    With 3 tiles down, 2 across and GROUP = 2, tiles 0 to 5 are (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1).
    """
    group = tile // (GROUP * tiles_across)
    height = tl.minimum(tiles_down - group * GROUP, GROUP)
    within = tile % (GROUP * tiles_across)
    return group * GROUP + within % height, within // height


@triton.jit
def halves(block):
    """Split a block into its left and its right columns."""
    rows: tl.constexpr = block.shape[0]
    columns: tl.constexpr = block.shape[1]
    return block.reshape(rows, 2, columns // 2).permute(0, 2, 1).split()


@triton.jit
def store_rows(
    y, start, end, row, column, columns, result,  # row is relative to start
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, PIECES: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Write the rows of a tile that belong to the expert, in PIECES column blocks."""
    HALF: tl.constexpr = BLOCK_COLUMNS // 2
    if PIECES > 1:
        left, right = halves(result)
        store_rows(y, start, end, row, column, columns, left, BLOCK_ROWS, HALF, PIECES // 2, DESCRIPTORS)
        store_rows(y, start, end, row, column + HALF, columns, right, BLOCK_ROWS, HALF, PIECES // 2, DESCRIPTORS)
    elif DESCRIPTORS:
        span, end, position = ragged(end, end - start, row)
        y.store([span, end, position, column], result.reshape(1, 1, BLOCK_ROWS, BLOCK_COLUMNS))
    else:
        position = start + row + tl.arange(0, BLOCK_ROWS)
        across = column + tl.arange(0, BLOCK_COLUMNS)
        inside = (position < end)[:, None] & (across < columns)[None, :]
        tl.store(y + position.to(tl.int64)[:, None] * columns + across[None, :], result, mask=inside)


@triton.jit
def store_matrix(
    dw, expert, row, column, rows, columns, result,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, PIECES: tl.constexpr, ACCUMULATE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Write or add a tile of an expert's gradient, in PIECES.

    One program owns each element, so sums are deterministic.
    """
    HALF: tl.constexpr = BLOCK_COLUMNS // 2
    if PIECES > 1:
        left, right = halves(result)
        store_matrix(
            dw, expert, row, column, rows, columns, left, BLOCK_ROWS, HALF, PIECES // 2, ACCUMULATE, DESCRIPTORS
        )
        column += HALF
        store_matrix(
            dw, expert, row, column, rows, columns, right, BLOCK_ROWS, HALF, PIECES // 2, ACCUMULATE, DESCRIPTORS
        )
    elif DESCRIPTORS:
        block = result.to(dw.dtype).reshape(1, BLOCK_ROWS, BLOCK_COLUMNS)
        if ACCUMULATE:
            dw.atomic_add([expert, row, column], block)  # the copy engine adds in memory
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
def ragged(end, count, row):
    """Coordinates in a ragged descriptor of row `row` of an expert with `count` rows that end before `end`."""
    span = tl.full((), 2**30, tl.int32)  # the descriptor's bound, see the module
    return span, end, span - count + row


@triton.jit
def zero_tail(y_ptr, first_ptr, tail_ptr, rows, columns, ONLY_LAST: tl.constexpr):
    """Set the rows past the last expert's to zero, or the last one; none of a buffer. Programs take rows in turn."""
    if first_ptr is None:
        tail = tl.load(tail_ptr)
        tail = tl.maximum(tail, rows - 1) if ONLY_LAST else tail
        for row in range(tail + tl.program_id(0), rows, tl.num_programs(0)):
            row_ptr = y_ptr + row * columns.to(tl.int64)
            for first in range(0, columns, 2048):
                across = first + tl.arange(0, 2048)
                tl.store(row_ptr + across, tl.zeros((2048,), y_ptr.dtype.element_ty), mask=across < columns)


@triton.jit(do_not_specialize=["rows"])
def rows_kernel(
    x, w, y,  # descriptors of blocks, or pointers
    y_ptr, index_ptr, starts_ptr, owners_ptr, block_count_ptr, bias_ptr, weights_ptr, first_ptr,
    rows, columns, depth, experts,  # sizes of the product, and experts
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, GROUP: tl.constexpr,
    PIECES: tl.constexpr, DEPTH_FIRST: tl.constexpr, GATHER: tl.constexpr, WHOLE_DEPTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr, ONLY_LAST: tl.constexpr,
):  # fmt: skip
    """Multiply each row of x by the matrix of the row's expert; zero the tail rows, or the last one with ONLY_LAST.

    x is rows x depth, y is rows x columns, w is experts x columns x depth, or experts x depth x columns if DEPTH_FIRST.
    With DESCRIPTORS, w, y and (without GATHER) x are descriptors of blocks, else pointers; y_ptr is always the pointer.
    With WHOLE_DEPTH, BLOCK_DEPTH divides depth and loads of x by pointers need no mask. With GATHER, x has fewer than
    2**31 elements: 64-bit indices make a gather slower (docs/decisions/0102). A bias, experts x columns, is added to
    each row of its expert, times the row's weight if there are weights. With `first_ptr`, rows are written from the row
    loaded there on, and there is no tail.
    """
    tiles_across = tl.cdiv(columns, BLOCK_COLUMNS)
    tiles = tl.load(block_count_ptr) * tiles_across
    shift = 0 if first_ptr is None else tl.load(first_ptr).to(tl.int32)  # from rows of x to rows of y
    steps = tl.cdiv(depth, BLOCK_DEPTH)
    tl.assume(steps > 0)  # lets the compiler flatten both loops
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        expert, start, end, row, column = locate_rows(owners_ptr, tile, tiles_across, BLOCK_ROWS, GROUP)
        column *= BLOCK_COLUMNS
        if GATHER or not DESCRIPTORS:
            position = start + row + tl.arange(0, BLOCK_ROWS)
            # Past the expert's last row any row does: its product is never written. Each takes the one a block before,
            # since one row for all made two programs that gather skewed loads a fifth slower (docs/decisions/0102).
            position = tl.where(position < end, position, tl.maximum(position - BLOCK_ROWS, 0))
            source = tl.load(index_ptr + position).to(tl.int32) if GATHER else position.to(tl.int64)
            x_rows = source[:, None] * depth
        accumulator = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for step in tl.range(steps):
            first = step * BLOCK_DEPTH
            if DESCRIPTORS and not GATHER:
                x_block = x.load([start + row, first])
            else:
                deep = first + tl.arange(0, BLOCK_DEPTH)
                inside = None if WHOLE_DEPTH else deep[None, :] < depth
                x_block = tl.load(x + (x_rows + deep[None, :]), mask=inside, other=None if WHOLE_DEPTH else 0)
            w_block = _load_matrix(
                w, expert, first, column, depth, columns, BLOCK_DEPTH, BLOCK_COLUMNS, DEPTH_FIRST, DESCRIPTORS
            )
            accumulator = tl.dot(x_block, w_block, accumulator, input_precision="ieee")
        if bias_ptr is not None:
            accumulator += _load_bias(
                bias_ptr, weights_ptr, expert, start + row, end, column, columns, BLOCK_ROWS, BLOCK_COLUMNS
            )
        result = accumulator.to(y_ptr.dtype.element_ty)
        store_rows(
            y, start + shift, end + shift, row, column, columns, result, BLOCK_ROWS, BLOCK_COLUMNS, PIECES, DESCRIPTORS
        )
    zero_tail(y_ptr, first_ptr, starts_ptr + experts, rows, columns, ONLY_LAST)


@triton.jit(do_not_specialize=["rows"])
def weights_kernel(
    dy, x, dw, index_ptr, starts_ptr,
    rows, columns, experts,  # of an expert's gradient
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, GROUP: tl.constexpr,
    PIECES: tl.constexpr, GATHER: tl.constexpr, ACCUMULATE: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Multiply the transpose of each expert's rows of dy by its rows of x; add to dw if ACCUMULATE.

    dw is experts x rows x columns, so dy has `rows` columns and x has `columns`. With DESCRIPTORS, dy, dw and (without
    GATHER) x are descriptors of blocks, else pointers. With GATHER, x has fewer than 2**31 elements.
    """
    tiles_across = tl.cdiv(columns, BLOCK_COLUMNS)
    tiles_each = tl.cdiv(rows, BLOCK_ROWS) * tiles_across
    for tile in tl.range(tl.program_id(0), tiles_each * experts, tl.num_programs(0), flatten=True):
        expert, row, column = locate_matrix(tile, tiles_each, rows, tiles_across, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
        start = tl.load(starts_ptr + expert)
        count = tl.load(starts_ptr + expert + 1) - start
        # An expert without rows takes one step over zeros, so that its gradient is written too.
        steps = tl.maximum(tl.cdiv(count, BLOCK_DEPTH), 1)
        tl.assume(steps > 0)
        if GATHER:
            # An expert without rows reads none: zero times a row that nothing wrote may be NaN.
            read_columns = tl.where(count > 0, columns, 0)
            source = _load_index(index_ptr, start, count, 0, BLOCK_DEPTH)
            next_source = _load_index(index_ptr, start, count, BLOCK_DEPTH, BLOCK_DEPTH)
        accumulator = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for step in tl.range(steps):
            first = step * BLOCK_DEPTH
            dy_block = _load_depths(dy, start, count, first, row, rows, BLOCK_DEPTH, BLOCK_ROWS, DESCRIPTORS)
            if GATHER:
                across = column + tl.arange(0, BLOCK_COLUMNS)
                # No mask of rows: past the expert's last, dy is zero and x is a row of its own again.
                x_rows = source.to(tl.int32)[:, None] * columns
                x_block = tl.load(x + (x_rows + across[None, :]), mask=across[None, :] < read_columns, other=0)
                # The index runs two steps ahead in registers; loaded where it is used, it halves the pipeline's depth.
                source = next_source
                next_source = _load_index(index_ptr, start, count, first + 2 * BLOCK_DEPTH, BLOCK_DEPTH)
            else:
                x_block = _load_depths(x, start, count, first, column, columns, BLOCK_DEPTH, BLOCK_COLUMNS, DESCRIPTORS)
            accumulator = tl.dot(dy_block.T, x_block, accumulator, input_precision="ieee")
        store_matrix(
            dw, expert, row, column, rows, columns, accumulator, BLOCK_ROWS, BLOCK_COLUMNS, PIECES, ACCUMULATE,
            DESCRIPTORS,
        )  # fmt: skip


@triton.jit
def _load_matrix(
    w, expert, first, column, depth, columns,
    BLOCK_DEPTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, DEPTH_FIRST: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Load one block of an expert's matrix, depth x columns; zeros outside the matrix."""
    if DESCRIPTORS and DEPTH_FIRST:
        block = w.load([expert, first, column]).reshape(BLOCK_DEPTH, BLOCK_COLUMNS)
    elif DESCRIPTORS:
        block = w.load([expert, column, first]).reshape(BLOCK_COLUMNS, BLOCK_DEPTH).T
    else:
        deep = first + tl.arange(0, BLOCK_DEPTH)
        across = column + tl.arange(0, BLOCK_COLUMNS)
        inside = (deep < depth)[:, None] & (across < columns)[None, :]
        matrix = w + expert.to(tl.int64) * depth * columns
        if DEPTH_FIRST:
            block = tl.load(matrix + deep[:, None] * columns + across[None, :], mask=inside, other=0)
        else:
            block = tl.load(matrix + across[None, :] * depth + deep[:, None], mask=inside, other=0)
    return block


@triton.jit
def _load_bias(
    bias_ptr, weights_ptr, expert, row, end, column, columns,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load an expert's bias for some columns, times the weights of the rows before `end` if there are weights."""
    across = column + tl.arange(0, BLOCK_COLUMNS)
    bias = tl.load(bias_ptr + expert * columns + across, mask=across < columns, other=0).to(tl.float32)[None, :]
    if weights_ptr is not None:
        position = row + tl.arange(0, BLOCK_ROWS)
        bias = bias * tl.load(weights_ptr + position, mask=position < end, other=0)[:, None]
    return bias


@triton.jit
def _load_depths(
    x, start, count, first, column, columns,
    BLOCK_DEPTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Load an expert's rows from `first` on, which are contracted over; zeros past its last."""
    if DESCRIPTORS:
        span, end, position = ragged(start + count, count, first)
        block = x.load([span, end, position, column]).reshape(BLOCK_DEPTH, BLOCK_COLUMNS)
    else:
        source = start + first + tl.arange(0, BLOCK_DEPTH)
        block = _load_rows(x, source, count - first, column, columns, BLOCK_DEPTH, BLOCK_COLUMNS)
    return block


@triton.jit
def _load_rows(x, source, count, column, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Load the rows `source`, of which `count` are real; zeros for the others."""
    across = column + tl.arange(0, BLOCK_COLUMNS)
    inside = (tl.arange(0, BLOCK_ROWS) < count)[:, None] & (across < columns)[None, :]
    return tl.load(x + source.to(tl.int64)[:, None] * columns + across[None, :], mask=inside, other=0)


@triton.jit
def _load_index(index_ptr, start, count, first, BLOCK_DEPTH: tl.constexpr):
    """Source of an expert's rows from `first` on; past its last row that of the last; 0 for an expert without rows."""
    position = tl.minimum(first + tl.arange(0, BLOCK_DEPTH), count - 1)
    return tl.load(index_ptr + start + position, mask=position >= 0, other=0).to(tl.uint32)
