"""Hopper kernels that quantize tiles of 128 x 128 numbers along both sides.

`quantize_kernel` reads rows in 16 bits and writes both copies, or rows that are already in 8 bits and writes their
transposed copy, gathered if wanted: an 8-bit number times a power of two is exact in bfloat16, unless it is subnormal.

`swiglu_backward_float8_kernel` makes the gradients of the experts' activation. Two programs share a multiprocessor, so
that one computes while the other waits for its loads or stores, and each walks over tiles. A turn's numbers are loaded
during the turn before, and those of a tile's first turn while the tile before is transposed.

`logits_gradient_kernel` makes the gradient of the loss' logits, in the same way.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from penstock.kernels.float8.quantize_kernels import inverse_of, scale_of

# Tiles of 128 x 128 numbers of 16 bits, quantized along both of their sides, for `float8_quantize_kernels`.
#
# Two rows of a tile are held together, in words of two numbers of a column: pair p is row 2p in the lower halves of 128
# words, and row 2p + 1 in the upper ones. A tile has 64 pairs.
#
# One instruction compares, or multiplies, the numbers of both rows (`larger`, `times`), so finding the scales of a row
# or of a column takes half an instruction for each number. Scales are powers of two, with which bfloat16 multiplies
# exactly. In the transposed copy both numbers of a word are neighbours, so tiles are transposed by words.
#
# A program makes a tile in TURNS turns of 16 pairs, a thread 8 neighbouring columns of a pair, writes their rows
# (`store_rows`), and leaves the words in shared memory. After the last turn a thread takes 16 rows of 4 columns from
# there (`store_columns`), eight threads all 128, so that a column's scale needs no memory; the scale of a whole tile
# needs a few words. Turn t has the pairs t, t + 4, t + 8 ..., so the four words that a thread has of four turns become
# 8 neighbouring bytes.

TILE = gl.constexpr(128)
TURNS = gl.constexpr(4)
PAIRS = gl.constexpr(16)  # of rows, of a turn
# Places of a turn's words in shared memory: four columns together, and so that neither eight threads that store
# neighbouring columns nor eight that load neighbouring pairs meet in a bank.
WORDS = gl.constexpr(
    gl.SharedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 36], [0, 72], [1, 0], [2, 4], [4, 8], [8, 16]])
)


@constexpr_function
def row_layout(warps: int) -> gl.BlockedLayout:
    """Threads that make the words of a turn, pairs by columns: 8 words of a pair in 8 warps, or 16 in 4 warps."""
    return gl.BlockedLayout([1, 8], [16 // warps, 2 * warps], [warps, 1], [1, 0])


@constexpr_function
def column_layout(warps: int) -> gl.BlockedLayout:
    """Threads that take the words of a turn for the transposed copy."""
    return gl.BlockedLayout([2, 4], [8, 4], [1, warps], [0, 1])


# E4M3 or E5M2, from the lower halves of two or four words, then from the upper ones. The first operand is the higher.
_ROWS_ASM = """{{
.reg .b32 a, b, c, d;
.reg .b16 p, q;
shl.b32 a, $2, 16; shl.b32 b, $3, 16; shl.b32 c, $4, 16; shl.b32 d, $5, 16;
cvt.rn.satfinite.{0}x2.f32 p, b, a; cvt.rn.satfinite.{0}x2.f32 q, d, c; mov.b32 $0, {{p, q}};
and.b32 a, $2, 0xffff0000; and.b32 b, $3, 0xffff0000; and.b32 c, $4, 0xffff0000; and.b32 d, $5, 0xffff0000;
cvt.rn.satfinite.{0}x2.f32 p, b, a; cvt.rn.satfinite.{0}x2.f32 q, d, c; mov.b32 $1, {{p, q}};
}}"""
_COLUMN_ASM = """{{
.reg .b32 a, b, c, d, x, y;
.reg .b16 p, q;
shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; shl.b32 c, $2, 16; and.b32 d, $2, 0xffff0000;
cvt.rn.satfinite.{0}x2.f32 p, b, a; cvt.rn.satfinite.{0}x2.f32 q, d, c; mov.b32 x, {{p, q}};
shl.b32 a, $3, 16; and.b32 b, $3, 0xffff0000; shl.b32 c, $4, 16; and.b32 d, $4, 0xffff0000;
cvt.rn.satfinite.{0}x2.f32 p, b, a; cvt.rn.satfinite.{0}x2.f32 q, d, c; mov.b32 y, {{p, q}};
mov.b64 $0, {{x, y}};
}}"""
ROWS_ASM_E4M3 = gl.constexpr(_ROWS_ASM.format("e4m3"))
ROWS_ASM_E5M2 = gl.constexpr(_ROWS_ASM.format("e5m2"))
COLUMN_ASM_E4M3 = gl.constexpr(_COLUMN_ASM.format("e4m3"))
COLUMN_ASM_E5M2 = gl.constexpr(_COLUMN_ASM.format("e5m2"))
E5M2_LARGEST = gl.constexpr(57344.0)


@gluon.jit
def pack(lower, upper):
    """Words of float32 numbers, rounded to bfloat16."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [lower, upper], gl.int32, True, 1)


@gluon.jit
def pair(lower, upper):
    """Words of numbers in bfloat16."""
    asm: gl.constexpr = "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;"
    return gl.inline_asm_elementwise(asm, "=r,=r,r,r", [lower, upper], gl.int32, True, 2)


@gluon.jit
def unpack(x):
    """Numbers in bfloat16 as float32, one instruction for each."""
    asm: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return gl.inline_asm_elementwise(asm, "=r,=r,r", [x], gl.float32, True, 2)


@gluon.jit
def larger(value, other):
    """The larger magnitudes of both halves, with some sign; NaN is the largest."""
    asm: gl.constexpr = "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [value, other], gl.int32, True, 1)


@gluon.jit
def times(value, other):
    """Products of both halves."""
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [value, other], gl.int32, True, 1)


@gluon.jit
def rows_in_8_bits(pairs, LARGEST: gl.constexpr):
    """Bytes of the rows of the lower halves, and of the upper halves."""
    asm: gl.constexpr = ROWS_ASM_E5M2 if LARGEST == E5M2_LARGEST else ROWS_ASM_E4M3
    return gl.inline_asm_elementwise(asm, "=r,=r,r,r,r,r", [pairs], (gl.int8, gl.int8), True, 4)


@gluon.jit
def column_in_8_bits(first, second, third, fourth, LARGEST: gl.constexpr):
    """Eight bytes of four words of a column."""
    asm: gl.constexpr = COLUMN_ASM_E5M2 if LARGEST == E5M2_LARGEST else COLUMN_ASM_E4M3
    return gl.inline_asm_elementwise(asm, "=l,r,r,r,r", [first, second, third, fourth], gl.int64, True, 1)


@gluon.jit
def lower_bits(pairs):
    """Bits of the magnitudes in the lower halves, as float32."""
    return (pairs & 0x7FFF) << 16


@gluon.jit
def upper_bits(pairs):
    """Bits of the magnitudes in the upper halves, as float32."""
    return pairs & 0x7FFF0000


@gluon.jit
def places_of(turn):
    """Rows of the lower halves of a turn's pairs, by their place in the tile."""
    return turn * 2 + gl.arange(0, PAIRS, gl.SliceLayout(1, row_layout(gl.num_warps()))) * (2 * TURNS)


@gluon.jit
def columns_of_tile():
    """Columns of a tile in the threads of `row_layout`: 1 x 128."""
    return gl.expand_dims(gl.arange(0, TILE, gl.SliceLayout(0, row_layout(gl.num_warps()))), 0)


@gluon.jit
def allocate_words():
    """Shared memory for a tile: turns x pairs x columns."""
    kind: gl.constexpr = gl.shared_memory_descriptor_type(gl.int32, [PAIRS, TILE], WORDS, [TURNS, PAIRS, TILE])
    rows_layout: gl.constexpr = gl.distributed_type(gl.int32, [PAIRS, TILE], row_layout(gl.num_warps()))
    columns_layout: gl.constexpr = gl.distributed_type(gl.int32, [PAIRS, TILE], column_layout(gl.num_warps()))
    gl.static_assert(gl.bank_conflicts(rows_layout, kind) + gl.bank_conflicts(columns_layout, kind) == 0)
    return gl.allocate_shared_memory(gl.int32, [TURNS, PAIRS, TILE], WORDS)


@gluon.jit
def store_rows(rows_ptr, scales_ptr, pairs, turn, filled, stride, LARGEST: gl.constexpr):
    """Store a turn's rows, as far as the tile has them, and their scales; both pointers are at the tile's first row."""
    amax = gl.reduce(pairs, 1, larger)
    lower_scale = scale_of(lower_bits(amax), LARGEST, True)
    upper_scale = scale_of(upper_bits(amax), LARGEST, True)
    lower_inverse = inverse_of(lower_scale).to(gl.int32, bitcast=True)
    upper_inverse = inverse_of(upper_scale).to(gl.int32, bitcast=True)
    # The lower halves of the bits of powers of two, zero and NaN are zero.
    inverse = (lower_inverse >> 16) | upper_inverse
    lower, upper = rows_in_8_bits(times(pairs, gl.expand_dims(inverse, 1)), LARGEST)
    position = places_of(turn)
    offset = gl.expand_dims(position, 1) * stride + columns_of_tile()
    gl.store(rows_ptr + offset, lower, mask=gl.expand_dims(position < filled, 1))
    gl.store(rows_ptr + stride + offset, upper, mask=gl.expand_dims(position + 1 < filled, 1))
    gl.store(scales_ptr + position, lower_scale, mask=position < filled)
    gl.store(scales_ptr + position + 1, upper_scale, mask=position + 1 < filled)


@gluon.jit
def store_columns(columns_ptr, scales_ptr, buffer, stride, LARGEST: gl.constexpr, SQUARE: gl.constexpr):
    """Store the transposed copy of a tile and the scale of each column, or with SQUARE of the tile.

    `columns_ptr` and `stride` count 8 bytes.
    """
    columns_layout: gl.constexpr = column_layout(gl.num_warps())
    first, second = buffer.index(0).load(columns_layout), buffer.index(1).load(columns_layout)
    third, fourth = buffer.index(2).load(columns_layout), buffer.index(3).load(columns_layout)
    amax = gl.reduce(larger(larger(first, second), larger(third, fourth)), 0, larger)
    if SQUARE:
        # Each warp loads the maxima of all columns: one wait, where a reduction over all threads has two.
        all_of_a_warp: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        amax = gl.reduce(gl.convert_layout(amax, all_of_a_warp), 0, larger)
    scale = scale_of(gl.maximum(lower_bits(amax), upper_bits(amax)), LARGEST, True)
    across = gl.arange(0, TILE, gl.SliceLayout(0, columns_layout))
    inverse = inverse_of(scale).to(gl.int32, bitcast=True)
    inverse = (inverse >> 16) | inverse
    if SQUARE:
        gl.store(scales_ptr, scale)
    else:
        gl.store(scales_ptr + across, scale)
        inverse = gl.expand_dims(inverse, 0)
    eights = column_in_8_bits(
        times(first, inverse), times(second, inverse), times(third, inverse), times(fourth, inverse), LARGEST
    )
    down = gl.arange(0, PAIRS, gl.SliceLayout(1, columns_layout))
    gl.store(columns_ptr + gl.expand_dims(across, 0) * stride + gl.expand_dims(down, 1), eights)


LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit(do_not_specialize=["R", "x_scales_depth"])
def quantize_kernel(
    x_ptr, x_scales_ptr, x_scales_outer, x_scales_depth, index_ptr, tiles_ptr, rows_ptr, row_scales_ptr, columns_ptr,
    column_scales_ptr,
    R, x_stride, rows_stride, columns_stride, D,
    LARGEST: gl.constexpr, SQUARE: gl.constexpr,
):  # fmt: skip
    """Quantize one tile, as `penstock.kernels.float8.quantize_kernels.quantize_kernel`; D is a multiple of 128.

    Without `tiles_ptr` R is one, too. The pointer of columns, and their stride, count 8 bytes. With SQUARE their scales
    are those of whole tiles. A tile without rows is skipped.
    """
    block, down = gl.program_id(0), gl.program_id(1)
    first, filled = down * TILE, TILE
    if tiles_ptr is not None:
        first, filled = gl.load(tiles_ptr + 2 * down), gl.load(tiles_ptr + 2 * down + 1)
        if filled == 0:
            return
    source = (x_ptr, x_stride, x_scales_ptr, x_scales_outer, x_scales_depth, index_ptr)
    # All loads of a tile are issued before the first use.
    loaded = (
        _load_words(source, first, filled, block, 0),
        _load_words(source, first, filled, block, 1),
        _load_words(source, first, filled, block, 2),
        _load_words(source, first, filled, block, 3),
    )
    buffer = allocate_words()
    for turn in gl.static_range(TURNS):
        buffer.index(turn).store(loaded[turn])
        if rows_ptr is not None:
            rows = rows_ptr + first.to(gl.int64) * rows_stride + block * TILE
            store_rows(rows, row_scales_ptr + block * R + first, loaded[turn], turn, filled, rows_stride, LARGEST)
    at = block.to(gl.int64) * TILE * columns_stride + down * (TILE // 8)
    scale = down * (D // TILE) + block if SQUARE else down * D + block * TILE
    store_columns(columns_ptr + at, column_scales_ptr + scale, buffer, columns_stride, LARGEST, SQUARE)


@gluon.jit
def _load_words(source, first, filled, block, turn):
    """Load the pairs of a turn, of 16 or of 8 bits."""
    lower = _load_rows(source, first, filled, block, places_of(turn))
    upper = _load_rows(source, first, filled, block, places_of(turn) + 1)
    return pair(lower, upper) if source[2] is None else pack(lower, upper)


@gluon.jit
def _load_rows(source, first, filled, block, position):
    """Load some rows of a tile unchanged, or those of 8 bits as float32; zero where the tile has none."""
    x_ptr, x_stride, scales_ptr, scales_outer, scales_depth, index_ptr = source
    is_row = position < filled
    row = first + position
    if index_ptr is not None:
        row = gl.load(index_ptr + row, mask=is_row, other=0)
    x_ptrs = x_ptr + block * TILE + gl.expand_dims(row.to(gl.int64) * x_stride, 1) + columns_of_tile()
    x = gl.load(x_ptrs, mask=gl.expand_dims(is_row, 1), other=0.0)
    if scales_ptr is not None:
        scale = gl.load(scales_ptr + row.to(gl.int64) * scales_outer + block * scales_depth, mask=is_row, other=0.0)
        x = x.to(gl.float32) * gl.expand_dims(scale, 1)
    return x


@gluon.jit(do_not_specialize=["R", "tiles"])
def swiglu_backward_float8_kernel(
    gate_up_ptr, first_ptr, weights_ptr, dh_ptr, tiles_ptr, d_rows_ptr, d_row_scales_ptr, d_columns_ptr,
    d_column_scales_ptr, h_columns_ptr, h_column_scales_ptr, products_ptr,
    R, rows_stride, columns_stride, F, tiles,
    LARGEST: gl.constexpr, H_LARGEST: gl.constexpr, WEIGHS_INPUT: gl.constexpr, SQUARE: gl.constexpr,
):  # fmt: skip
    """Make all five copies, and parts of the weights' gradient, as the kernel of `penstock.kernels.float8.swiglu`.

    F is a multiple of 128, and there are `tiles` blocks of 128 places, of which those without rows are skipped.
    Pointers of columns and their stride count 8 bytes. With SQUARE scales of the transposed h are those of whole tiles.
    With `first_ptr` gate and up begin at the row stored there.
    """
    if first_ptr is not None:
        gate_up_ptr += gl.load(first_ptr) * (2 * F)
    across = F // TILE
    buffers = (allocate_words(), allocate_words(), allocate_words())
    sources = (gate_up_ptr, dh_ptr, F)
    end = gl.load(tiles_ptr + 2 * tiles) * across
    start = gl.maximum(gl.minimum(gl.program_id(0), end - 1), 0)
    first, filled = _load_place(tiles_ptr, start // across)
    ahead = _load_turn(sources, first, filled, start % across, 0)
    for tile in range(gl.program_id(0), end, gl.num_programs(0)):
        down, block = tile // across, tile % across
        # Past the last tile the last one is loaded again, and not used.
        following = gl.minimum(tile + gl.num_programs(0), end - 1)
        next_first, next_filled = _load_place(tiles_ptr, following // across)
        weights = (weights_ptr, first, products_ptr, block * R + first)
        rows = d_rows_ptr + first.to(gl.int64) * rows_stride + block * TILE
        targets = (rows, d_row_scales_ptr + block * R + first, F, R, rows_stride)
        for turn in range(TURNS):
            loaded = ahead
            is_last = turn + 1 == TURNS
            ahead = _load_turn(
                sources, gl.where(is_last, next_first, first), gl.where(is_last, next_filled, filled),
                gl.where(is_last, following % across, block), gl.where(is_last, 0, turn + 1),
            )  # fmt: skip
            _make_turn(loaded, turn, weights, targets, buffers, filled, LARGEST, WEIGHS_INPUT)
        column = block * TILE
        at = column.to(gl.int64) * columns_stride + down * (TILE // 8)
        below = F.to(gl.int64) * columns_stride
        scales = d_column_scales_ptr + 2 * down * F + column
        h_scales = h_column_scales_ptr + (tile if SQUARE else down * F + column)
        store_columns(h_columns_ptr + at, h_scales, buffers[0], columns_stride, H_LARGEST, SQUARE)
        store_columns(d_columns_ptr + at, scales, buffers[1], columns_stride, LARGEST, False)
        store_columns(d_columns_ptr + below + at, scales + F, buffers[2], columns_stride, LARGEST, False)
        first, filled = next_first, next_filled


@gluon.jit
def _load_place(tiles_ptr, down):
    """Load the first row of a block of places, and its number of rows."""
    return gl.load(tiles_ptr + 2 * down), gl.load(tiles_ptr + 2 * down + 1)


@gluon.jit
def _load_turn(sources, first, filled, block, turn):
    """Load gate, up and dh of the pairs of a turn: three of their lower rows, three of their upper ones."""
    gate_up_ptr, dh_ptr, F = sources
    gate_ptr = gate_up_ptr + first.to(gl.int64) * (2 * F) + block * TILE
    dh_ptr += first.to(gl.int64) * F + block * TILE
    position = places_of(turn)
    column = columns_of_tile()
    wide = gl.expand_dims(position, 1) * (2 * F) + column
    narrow = gl.expand_dims(position, 1) * F + column
    is_lower, is_upper = gl.expand_dims(position < filled, 1), gl.expand_dims(position + 1 < filled, 1)
    return (
        gl.load(gate_ptr + wide, mask=is_lower, other=0.0),
        gl.load(gate_ptr + F + wide, mask=is_lower, other=0.0),
        gl.load(dh_ptr + narrow, mask=is_lower, other=0.0),
        gl.load(gate_ptr + 2 * F + wide, mask=is_upper, other=0.0),
        gl.load(gate_ptr + 3 * F + wide, mask=is_upper, other=0.0),
        gl.load(dh_ptr + F + narrow, mask=is_upper, other=0.0),
    )


@gluon.jit
def _make_turn(loaded, turn, weights, targets, buffers, filled, LARGEST: gl.constexpr, WEIGHS_INPUT: gl.constexpr):
    """Compute a turn's gradients, write their rows, and leave its words in shared memory."""
    rows_ptr, scales_ptr, F, R, stride = targets
    position = places_of(turn)
    h, dgate, dup = _gradients(loaded[:3], position, weights, filled, WEIGHS_INPUT)
    upper_h, upper_dgate, upper_dup = _gradients(loaded[3:], position + 1, weights, filled, WEIGHS_INPUT)
    h, dgate, dup = pack(h, upper_h), pack(dgate, upper_dgate), pack(dup, upper_dup)
    buffers[0].index(turn).store(h)
    buffers[1].index(turn).store(dgate)
    buffers[2].index(turn).store(dup)
    store_rows(rows_ptr, scales_ptr, dgate, turn, filled, stride, LARGEST)
    store_rows(rows_ptr + F, scales_ptr + F // TILE * R, dup, turn, filled, stride, LARGEST)


@gluon.jit
def _gradients(loaded, position, weights, filled, WEIGHS_INPUT: gl.constexpr):
    """`penstock.kernels.swiglu.activation_gradients` of some rows; writes its part of their weights' gradients."""
    weights_ptr, first, products_ptr, products = weights
    gate, up, dh = unpack(loaded[0]), unpack(loaded[1]), unpack(loaded[2])
    given_gate, given_up = gate, up
    is_row = position < filled
    if weights_ptr is not None:
        weight = gl.expand_dims(gl.load(weights_ptr + first + position, mask=is_row, other=0.0), 1)
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
        gl.store(products_ptr + products + position, gl.sum(product, 1), mask=is_row)
    return h, dgate, dup


@gluon.jit
def _sigmoid(x):
    """1 / (1 + 2**(-x log2 e)), in four instructions; infinities need no special case."""
    asm: gl.constexpr = (
        "{.reg .f32 a; mul.f32 a, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 a, a; "
        "add.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 $0, a;}"
    )
    return gl.inline_asm_elementwise(asm, "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def logits_gradient_kernel(
    logits_ptr, labels_ptr, logsumexp_ptr, rows_ptr, row_scales_ptr, columns_ptr, column_scales_ptr,
    R, V, first_label, z_weight, rows_stride, columns_stride,
    IGNORED: gl.constexpr, LARGEST: gl.constexpr,
):  # fmt: skip
    """Quantize one tile, as `penstock.kernels.float8.logits_gradient.logits_gradient_kernel`.

    R and V are multiples of 128. The pointer of columns, and their stride, count 8 bytes.
    """
    block, down = gl.program_id(0), gl.program_id(1)
    start, first = block * TILE, down * TILE
    source = (logits_ptr + first.to(gl.int64) * V + start, V, labels_ptr + first)
    # All loads of a tile are issued before the first use.
    loaded = (
        _load_counted(source, IGNORED, 0),
        _load_counted(source, IGNORED, 1),
        _load_counted(source, IGNORED, 2),
        _load_counted(source, IGNORED, 3),
    )
    buffer = allocate_words()
    rows = rows_ptr + first.to(gl.int64) * rows_stride + start
    row_scales = row_scales_ptr + block * R + first
    row_facts = (labels_ptr + first, logsumexp_ptr + first, first_label + start, z_weight)
    for turn in gl.static_range(TURNS):
        position = places_of(turn)
        lower = _slopes(_lower(loaded[turn]), row_facts, position, IGNORED)
        upper = _slopes(_upper(loaded[turn]), row_facts, position + 1, IGNORED)
        pairs = pack(lower, upper)
        buffer.index(turn).store(pairs)
        store_rows(rows, row_scales, pairs, turn, TILE, rows_stride, LARGEST)
    at = start.to(gl.int64) * columns_stride + down * (TILE // 8)
    store_columns(columns_ptr + at, column_scales_ptr + down * V + start, buffer, columns_stride, LARGEST, False)


@gluon.jit
def _load_counted(source, IGNORED: gl.constexpr, turn):
    """Load the pairs of a turn; rows that are not counted are zero and not read."""
    x_ptr, stride, labels_ptr = source
    position = places_of(turn)
    lower = gl.expand_dims(gl.load(labels_ptr + position) != IGNORED, 1)
    upper = gl.expand_dims(gl.load(labels_ptr + position + 1) != IGNORED, 1)
    x_ptrs = x_ptr + gl.expand_dims(position, 1).to(gl.int64) * stride + columns_of_tile()
    return pair(gl.load(x_ptrs, mask=lower, other=0.0), gl.load(x_ptrs + stride, mask=upper, other=0.0))


@gluon.jit
def _slopes(x, row_facts, position, IGNORED: gl.constexpr):
    """As `penstock.kernels.linear_cross_entropy.logit_slopes`; zero in rows that are not counted, whose x is zero."""
    labels_ptr, logsumexp_ptr, first_label, z_weight = row_facts
    label = gl.load(labels_ptr + position)
    is_counted = label != IGNORED
    logsumexp = gl.load(logsumexp_ptr + position, mask=is_counted, other=0.0)
    factor = gl.where(is_counted, 1.0 + 2.0 * z_weight * logsumexp, 0.0)
    column = label - first_label
    column = gl.where((column >= 0) & (column < TILE), column, -1).to(gl.int32)
    slopes = gl.exp2(x * LOG2_E - gl.expand_dims(logsumexp * LOG2_E, 1)) * gl.expand_dims(factor, 1)
    return gl.where(gl.expand_dims(column, 1) == columns_of_tile(), slopes - 1.0, slopes)


@gluon.jit
def _lower(pairs):
    """Numbers in the lower halves, as float32."""
    return (pairs << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _upper(pairs):
    """Numbers in the upper halves, as float32."""
    return (pairs & -65536).to(gl.float32, bitcast=True)
