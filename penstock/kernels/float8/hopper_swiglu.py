"""Hopper's own kernel for the gradients of the experts' activation; see `hopper_tiles` for how a tile is written.

Each number is read and computed once. Two programs share a multiprocessor, so that one computes while the other waits
for its numbers or stores, and each walks over tiles. With AHEAD what a turn reads is loaded during the turn before,
that of a tile's first turn while the tile before is transposed, for more registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from penstock.kernels.float8.hopper_tiles import (
    TILE,
    TURNS,
    columns_of_tile,
    pack,
    places_of,
    room_for_words,
    store_columns,
    store_rows,
    unpack,
)


@gluon.jit(do_not_specialize=["R", "tiles"])
def swiglu_backward_float8_kernel(
    gate_up_ptr,
    first_ptr,
    weights_ptr,
    dh_ptr,
    tiles_ptr,
    d_rows_ptr,
    d_row_scales_ptr,
    d_columns_ptr,
    d_column_scales_ptr,
    h_columns_ptr,
    h_column_scales_ptr,
    products_ptr,
    R,
    rows_stride,
    columns_stride,
    F,
    tiles,
    LARGEST: gl.constexpr,
    H_LARGEST: gl.constexpr,
    WEIGHS_INPUT: gl.constexpr,
    AHEAD: gl.constexpr,
    SQUARE: gl.constexpr,
):
    """All five copies, and parts of the weights' gradient, as `penstock.kernels.float8.swiglu_kernels` makes them.

    F is a multiple of 128, and there are `tiles` blocks of 128 places, of which those without rows are passed over.
    Columns' pointers and their stride are in units of 8 bytes. With SQUARE scales of the transposed h are those of
    whole tiles. With `first_ptr` gate and up begin at the row that is said there.
    """
    if first_ptr is not None:
        gate_up_ptr += gl.load(first_ptr) * (2 * F)
    across = F // TILE
    rooms = (room_for_words(), room_for_words(), room_for_words())
    sources = (gate_up_ptr, dh_ptr, F)
    end = gl.load(tiles_ptr + 2 * tiles) * across
    start = gl.maximum(gl.minimum(gl.program_id(0), end - 1), 0)
    first, filled = _load_place(tiles_ptr, start // across)
    if AHEAD:
        ahead = _load_turn(sources, first, filled, start % across, 0)
    for tile in range(gl.program_id(0), end, gl.num_programs(0)):
        down, block = tile // across, tile % across
        # Past the last tile it is the last one again, whose numbers nobody uses.
        following = gl.minimum(tile + gl.num_programs(0), end - 1)
        next_first, next_filled = _load_place(tiles_ptr, following // across)
        weights = (weights_ptr, first, products_ptr, block * R + first)
        rows = d_rows_ptr + first.to(gl.int64) * rows_stride + block * TILE
        targets = (rows, d_row_scales_ptr + block * R + first, F, R, rows_stride)
        for turn in range(TURNS):
            if AHEAD:
                loaded = ahead
                is_last = turn + 1 == TURNS
                ahead = _load_turn(
                    sources,
                    gl.where(is_last, next_first, first),
                    gl.where(is_last, next_filled, filled),
                    gl.where(is_last, following % across, block),
                    gl.where(is_last, 0, turn + 1),
                )
            else:
                loaded = _load_turn(sources, first, filled, block, turn)
            _make_turn(loaded, turn, weights, targets, rooms, filled, LARGEST, WEIGHS_INPUT)
        column = block * TILE
        at = column.to(gl.int64) * columns_stride + down * (TILE // 8)
        below = F.to(gl.int64) * columns_stride
        scales = d_column_scales_ptr + 2 * down * F + column
        h_scales = h_column_scales_ptr + (tile if SQUARE else down * F + column)
        store_columns(h_columns_ptr + at, h_scales, rooms[0], columns_stride, H_LARGEST, SQUARE)
        store_columns(d_columns_ptr + at, scales, rooms[1], columns_stride, LARGEST, False)
        store_columns(d_columns_ptr + below + at, scales + F, rooms[2], columns_stride, LARGEST, False)
        first, filled = next_first, next_filled


@gluon.jit
def _load_place(tiles_ptr, down):
    """Load the first row of a block of places, and how many rows it has."""
    return gl.load(tiles_ptr + 2 * down), gl.load(tiles_ptr + 2 * down + 1)


@gluon.jit
def _load_turn(sources, first, filled, block, turn):
    """Load gate, up and dh of the pairs of a turn: three of their lower rows, three of their upper ones."""
    gate_up_ptr, dh_ptr, F = sources
    gate_ptr = gate_up_ptr + first.to(gl.int64) * (2 * F) + block * TILE
    dh_ptr += first.to(gl.int64) * F + block * TILE
    place = places_of(turn)
    column = columns_of_tile()
    wide = gl.expand_dims(place, 1) * (2 * F) + column
    narrow = gl.expand_dims(place, 1) * F + column
    is_lower, is_upper = gl.expand_dims(place < filled, 1), gl.expand_dims(place + 1 < filled, 1)
    return (
        gl.load(gate_ptr + wide, mask=is_lower, other=0.0),
        gl.load(gate_ptr + F + wide, mask=is_lower, other=0.0),
        gl.load(dh_ptr + narrow, mask=is_lower, other=0.0),
        gl.load(gate_ptr + 2 * F + wide, mask=is_upper, other=0.0),
        gl.load(gate_ptr + 3 * F + wide, mask=is_upper, other=0.0),
        gl.load(dh_ptr + F + narrow, mask=is_upper, other=0.0),
    )


@gluon.jit
def _make_turn(loaded, turn, weights, targets, rooms, filled, LARGEST: gl.constexpr, WEIGHS_INPUT: gl.constexpr):
    """Compute a turn's gradients, write their rows, and leave its words in shared memory."""
    rows_ptr, scales_ptr, F, R, stride = targets
    place = places_of(turn)
    h, dgate, dup = _gradients(loaded[:3], place, weights, filled, WEIGHS_INPUT)
    upper_h, upper_dgate, upper_dup = _gradients(loaded[3:], place + 1, weights, filled, WEIGHS_INPUT)
    h, dgate, dup = pack(h, upper_h), pack(dgate, upper_dgate), pack(dup, upper_dup)
    rooms[0].index(turn).store(h)
    rooms[1].index(turn).store(dgate)
    rooms[2].index(turn).store(dup)
    store_rows(rows_ptr, scales_ptr, dgate, turn, filled, stride, LARGEST)
    store_rows(rows_ptr + F, scales_ptr + F // TILE * R, dup, turn, filled, stride, LARGEST)


@gluon.jit
def _gradients(loaded, place, weights, filled, WEIGHS_INPUT: gl.constexpr):
    """As `penstock.kernels.swiglu.activation_gradients`, of some rows; writes its part of their weights' gradients."""
    weights_ptr, first, products_ptr, products = weights
    gate, up, dh = unpack(loaded[0]), unpack(loaded[1]), unpack(loaded[2])
    given_gate, given_up = gate, up
    is_row = place < filled
    if weights_ptr is not None:
        weight = gl.expand_dims(gl.load(weights_ptr + first + place, mask=is_row, other=0.0), 1)
        if WEIGHS_INPUT:
            gate *= weight
            up *= weight
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    h = silu * up
    product = dh * h
    if weights_ptr is not None:  # noqa: SIM102 (the compiler decides both)
        if not WEIGHS_INPUT:
            h *= weight
            dh *= weight
    dgate = dh * up * (sigmoid + silu * (1.0 - sigmoid))
    dup = dh * silu
    if weights_ptr is not None:
        if WEIGHS_INPUT:
            product = dgate * given_gate + dup * given_up
            dgate *= weight
            dup *= weight
        gl.store(products_ptr + products + place, gl.sum(product, 1), mask=is_row)
    return h, dgate, dup


@gluon.jit
def _sigmoid(x):
    """1 / (1 + 2**(-x log2 e)), in four instructions: no case is kept apart, infinities come out right."""
    asm: gl.constexpr = (
        "{.reg .f32 a; mul.f32 a, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 a, a; "
        "add.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 $0, a;}"
    )
    return gl.inline_asm_elementwise(asm, "=f,f", [x], gl.float32, True, 1)
