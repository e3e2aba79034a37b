"""Tiles of 128 x 128 numbers of 16 bits, quantized along both of their sides, for `float8_quantize_kernels`.

Two rows of a tile are held together, in words of two numbers of a column: pair p is row 2p in the lower halves of 128
words, and row 2p + 1 in the upper ones. A tile has 64 pairs.

One instruction compares, or multiplies, the numbers of both rows (`larger`, `times`), so finding the scales of a row or
of a column takes half an instruction for each number. Scales are powers of two, with which bfloat16 multiplies exactly.
In the transposed copy both numbers of a word are neighbours, so tiles are transposed by words.

A program makes a tile in TURNS turns of 16 pairs, a thread 8 neighbouring columns of a pair, writes their rows
(`store_rows`), and leaves the words in shared memory. After the last turn a thread takes 16 rows of 4 columns from
there (`store_columns`), eight threads all 128, so that a column's scale needs no memory; the scale of a whole tile
needs a few words. Turn t has the pairs t, t + 4, t + 8 ..., so the four words that a thread has of four turns become 8
neighbouring bytes.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from penstock.kernels.float8.scaling import inverse_of, scale_of

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
