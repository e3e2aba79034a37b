"""Hopper's own kernel for the gradients of latent attention's heads, in 8 bits by rows and transposed; `hopper_tiles`.

It is `hopper_quantize`'s, but for where a tile's columns come from and go to, and for the rotation. A thread has eight
neighbouring columns of two rows, so both numbers of a pair that is turned; words of two rows are taken apart for it and
packed again, which rounds as the kernel does that only turns.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from penstock.kernels.float8.hopper_tiles import (
    PAIRS,
    TILE,
    TURNS,
    columns_of_tile,
    maker_of,
    pack,
    pair,
    places_of,
    room_for_words,
    store_columns,
    store_rows,
)


@constexpr_function
def turner_of(warps: int) -> gl.BlockedLayout:
    """Who has which pairs of neighbouring columns, of the rows of a turn: half of what `maker_of` says."""
    return gl.BlockedLayout([1, 4], [16 // warps, 2 * warps], [warps, 1], [1, 0])


@gluon.jit
def latent_heads_backward_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    rows_ptr,
    row_scales_ptr,
    columns_ptr,
    column_scales_ptr,
    R,
    positions,
    x_batch,
    x_position,
    x_head,
    cos_batch,
    cos_position,
    rows_stride,
    columns_stride,
    D,
    WIDTH: gl.constexpr,
    APART: gl.constexpr,
    FIRST: gl.constexpr,
    PLAIN: gl.constexpr,
    LARGEST: gl.constexpr,
):
    """One tile, as `penstock.kernels.float8.latent_heads_kernels.latent_heads_backward_kernel` makes it.

    `positions`, and so R, are multiples of 128. The pointer of columns, and their stride, are in units of 8 bytes.
    """
    start, first = gl.program_id(0) * TILE, gl.program_id(1) * TILE
    batch, position = (first // positions).to(gl.int64), (first % positions).to(gl.int64)
    column = start + columns_of_tile()
    x_ptr += batch * x_batch + position * x_position
    column = column // WIDTH * x_head + column % WIDTH
    # All of a tile is on its way before any of it is looked at.
    loaded = (
        _load_words(x_ptr, column, x_position, 0),
        _load_words(x_ptr, column, x_position, 1),
        _load_words(x_ptr, column, x_position, 2),
        _load_words(x_ptr, column, x_position, 3),
    )
    out = gl.program_id(0)
    if APART != WIDTH:
        # By tiles, so that compilers see that it is a multiple of their width.
        out = out // (WIDTH // TILE) * (APART // TILE) + out % (WIDTH // TILE) + FIRST // TILE
    out *= TILE
    room = room_for_words()
    rows = rows_ptr + first.to(gl.int64) * rows_stride + out
    row_scales = row_scales_ptr + out // TILE * R + first
    for turn in gl.static_range(TURNS):
        words = loaded[turn]
        if cos_ptr is not None:  # noqa: SIM102 (the compiler decides this one)
            if start % WIDTH + TILE > PLAIN:
                angle = batch * cos_batch + position * cos_position
                angles = (cos_ptr + angle, sin_ptr + angle, cos_position)
                words = _turned_back(words, angles, start, turn, WIDTH, PLAIN)
        room.index(turn).store(words)
        store_rows(rows, row_scales, words, turn, TILE, rows_stride, LARGEST)
    at = out.to(gl.int64) * columns_stride + first // 8
    scales = column_scales_ptr + first // TILE * D + out
    store_columns(columns_ptr + at, scales, room, columns_stride, LARGEST, False)


@gluon.jit
def _load_words(x_ptr, column, stride, turn):
    """Load the pairs of a turn."""
    offset = gl.expand_dims(places_of(turn).to(gl.int64) * stride, 1) + column
    return pair(gl.load(x_ptr + offset), gl.load(x_ptr + stride + offset))


@gluon.jit
def _turned_back(words, angles, start, turn, WIDTH: gl.constexpr, PLAIN: gl.constexpr):
    """The pairs of a turn, whose columns from PLAIN of a head on are turned back by the angles of their tokens."""
    cos_ptr, sin_ptr, stride = angles
    turner: gl.constexpr = turner_of(gl.num_warps())
    even, odd = gl.split(gl.reshape(words, [PAIRS, TILE // 2, 2]))
    even, odd = gl.convert_layout(even, turner), gl.convert_layout(odd, turner)
    place = turn * 2 + gl.arange(0, PAIRS, gl.SliceLayout(1, turner)) * (2 * TURNS)
    column = start // 2 + gl.expand_dims(gl.arange(0, TILE // 2, gl.SliceLayout(0, turner)), 0)
    column = column % (WIDTH // 2) - PLAIN // 2
    offset = gl.expand_dims(place, 1) * stride + column
    is_turned = column >= 0
    lower_even, lower_odd = _turned(_lower(even), _lower(odd), cos_ptr, sin_ptr, offset, is_turned)
    upper_even, upper_odd = _turned(_upper(even), _upper(odd), cos_ptr, sin_ptr, offset + stride, is_turned)
    even = gl.where(is_turned, pack(lower_even, upper_even), even)
    odd = gl.where(is_turned, pack(lower_odd, upper_odd), odd)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [PAIRS, TILE]), maker_of(gl.num_warps()))


@gluon.jit
def _turned(even, odd, cos_ptr, sin_ptr, offset, is_turned):
    """As `penstock.kernels.rope.rotate_pairs`."""
    cos = gl.load(cos_ptr + offset, mask=is_turned, other=0.0)
    sin = -gl.load(sin_ptr + offset, mask=is_turned, other=0.0)
    return even * cos - odd * sin, even * sin + odd * cos


@gluon.jit
def _lower(words):
    """Numbers in the lower halves, as float32."""
    return (words << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _upper(words):
    """Those in the upper ones."""
    return (words & -65536).to(gl.float32, bitcast=True)
