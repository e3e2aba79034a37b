"""Hopper's own kernel for rows with a transposed copy, in blocks of 128 or squares of them; see `hopper_tiles`.

Rows in 16 bits give both copies. Rows in 8 bits, which have the one along themselves already, give the transposed one,
gathered if wanted: a number of 8 bits times a power of two is one of bfloat16 exactly, unless it is smaller than the
normal ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from penstock.kernels.float8.hopper_tiles import (
    TILE,
    TURNS,
    columns_of_tile,
    pack,
    pair,
    places_of,
    room_for_words,
    store_columns,
    store_rows,
)


@gluon.jit(do_not_specialize=["R", "x_scales_depth"])
def quantize_kernel(
    x_ptr,
    x_scales_ptr,
    x_scales_outer,
    x_scales_depth,
    index_ptr,
    tiles_ptr,
    rows_ptr,
    row_scales_ptr,
    columns_ptr,
    column_scales_ptr,
    R,
    x_stride,
    rows_stride,
    columns_stride,
    D,
    LARGEST: gl.constexpr,
    SQUARE: gl.constexpr,
):
    """One tile, as `penstock.kernels.float8.quantize_kernels.quantize_kernel` makes it; D is a multiple of 128.

    Without `tiles_ptr` R is one, too. The pointer of columns, and their stride, are in units of 8 bytes. With SQUARE
    their scales are those of whole tiles. A tile without rows is passed over.
    """
    block, down = gl.program_id(0), gl.program_id(1)
    first, filled = down * TILE, TILE
    if tiles_ptr is not None:
        first, filled = gl.load(tiles_ptr + 2 * down), gl.load(tiles_ptr + 2 * down + 1)
        if filled == 0:
            return
    source = (x_ptr, x_stride, x_scales_ptr, x_scales_outer, x_scales_depth, index_ptr)
    # All of a tile is on its way before any of it is looked at.
    loaded = (
        _load_words(source, first, filled, block, 0),
        _load_words(source, first, filled, block, 1),
        _load_words(source, first, filled, block, 2),
        _load_words(source, first, filled, block, 3),
    )
    room = room_for_words()
    for turn in gl.static_range(TURNS):
        room.index(turn).store(loaded[turn])
        if rows_ptr is not None:
            rows = rows_ptr + first.to(gl.int64) * rows_stride + block * TILE
            store_rows(rows, row_scales_ptr + block * R + first, loaded[turn], turn, filled, rows_stride, LARGEST)
    at = block.to(gl.int64) * TILE * columns_stride + down * (TILE // 8)
    scale = down * (D // TILE) + block if SQUARE else down * D + block * TILE
    store_columns(columns_ptr + at, column_scales_ptr + scale, room, columns_stride, LARGEST, SQUARE)


@gluon.jit
def _load_words(source, first, filled, block, turn):
    """Load the pairs of a turn, of 16 or of 8 bits."""
    lower = _load_rows(source, first, filled, block, places_of(turn))
    upper = _load_rows(source, first, filled, block, places_of(turn) + 1)
    return pair(lower, upper) if source[2] is None else pack(lower, upper)


@gluon.jit
def _load_rows(source, first, filled, block, place):
    """Load some rows of a tile, as they are, or those of 8 bits as float32; zero where the tile has none."""
    x_ptr, x_stride, scales_ptr, scales_outer, scales_depth, index_ptr = source
    is_row = place < filled
    row = first + place
    if index_ptr is not None:
        row = gl.load(index_ptr + row, mask=is_row, other=0)
    x_ptrs = x_ptr + block * TILE + gl.expand_dims(row.to(gl.int64) * x_stride, 1) + columns_of_tile()
    x = gl.load(x_ptrs, mask=gl.expand_dims(is_row, 1), other=0.0)
    if scales_ptr is not None:
        scale = gl.load(scales_ptr + row.to(gl.int64) * scales_outer + block * scales_depth, mask=is_row, other=0.0)
        x = x.to(gl.float32) * gl.expand_dims(scale, 1)
    return x
