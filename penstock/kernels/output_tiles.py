"""Where a tile of a persistent product lies, and how it is written: device code that all our matrix products share.

A program takes every P-th output tile, P programs in all. `locate_rows` says whose tile it is where the output has the
experts' rows, `swizzle` orders tiles for the L2 cache. Tiles are written in pieces, by descriptor where the chip has a
copy engine, else through pointers with masks.

A ragged descriptor, made by `triton.tools.ragged_tma`, has two dimensions more, whose strides undo each other modulo
2**64: the coordinates [2**30, end, 2**30 - count + row] lead to the row `end - count + row`, and the bound of 2**30
rows stands exactly at the expert's end. So loads past an expert's last row give zeros and stores past it are dropped.
"""

from penstock.kernels.language import tl, triton


@triton.jit
def locate_rows(owners_ptr, tile, tiles_across, BLOCK_ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Say whose tile it is: expert, its first row, the row past its last, the tile's row in it, the column block.

    Tiles of one expert stand together, so `tile // tiles_across` is a block of the same expert, though the swizzle may
    then choose another one of its blocks.
    """
    owner_ptr = owners_ptr + tile // tiles_across * 4
    expert = tl.load(owner_ptr)
    start = tl.load(owner_ptr + 1)
    end = tl.load(owner_ptr + 2)
    first_tile = tl.load(owner_ptr + 3) * tiles_across
    row, column = swizzle(tile - first_tile, tl.cdiv(end - start, BLOCK_ROWS), tiles_across, GROUP)
    return expert, start, end, row * BLOCK_ROWS, column


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
    y,
    start,
    end,
    row,
    column,
    columns,
    result,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Write the rows of a tile that are the expert's own, half by half until there are PIECES of them."""
    HALF: tl.constexpr = BLOCK_COLUMNS // 2
    if PIECES > 1:
        left, right = halves(result)
        store_rows(y, start, end, row, column, columns, left, BLOCK_ROWS, HALF, PIECES // 2, DESCRIPTORS)
        store_rows(y, start, end, row, column + HALF, columns, right, BLOCK_ROWS, HALF, PIECES // 2, DESCRIPTORS)
    elif DESCRIPTORS:
        span, end, place = ragged(end, end - start, row)
        y.store([span, end, place, column], result.reshape(1, 1, BLOCK_ROWS, BLOCK_COLUMNS))
    else:
        place = start + row + tl.arange(0, BLOCK_ROWS)
        across = column + tl.arange(0, BLOCK_COLUMNS)
        inside = (place < end)[:, None] & (across < columns)[None, :]
        tl.store(y + place.to(tl.int64)[:, None] * columns + across[None, :], result, mask=inside)


@triton.jit
def store_matrix(
    dw,
    expert,
    row,
    column,
    rows,
    columns,
    result,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Write or add a tile of an expert's gradient, in PIECES. One program owns each element, so a sum has one order."""
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
def ragged(end, count, row):
    """Coordinates in a ragged descriptor of a row of an expert that has `count` rows, the last of them before `end`."""
    span = tl.full((), 2**30, tl.int32)
    return span, end, span - count + row


@triton.jit
def zero_tail(y_ptr, tail, rows, columns):
    """Set the rows past the last expert's to zero; programs take turns, a row at a time."""
    for row in range(tail + tl.program_id(0), rows, tl.num_programs(0)):
        row_ptr = y_ptr + row * columns.to(tl.int64)
        for first in range(0, columns, 2048):
            across = first + tl.arange(0, 2048)
            tl.store(row_ptr + across, tl.zeros((2048,), y_ptr.dtype.element_ty), mask=across < columns)
