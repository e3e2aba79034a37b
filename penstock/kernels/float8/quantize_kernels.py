"""Triton kernels of quantization: a tile is read once, and written by rows and transposed, each with its own scales.

`quantize_tile` scales rows; the transposed copy comes from the same code applied to the transposed tile. A block of
several rows is a whole tile, or a whole matrix. Rows are loaded in an order that makes transposing cheap: of a tile of
128 x 128 a thread has 16 numbers, which it stores at once, of each of RUN = 4 rows, and these rows are neighbours:

    row of the tile        0  1  2 ...  32  33  34 ...     of 128, in 32 runs
    row of the matrix      0  4  8 ...   1   5   9 ...

So a thread has 4 neighbours of each column, which go to shared memory as one word.

Experts' rows are aligned in the transposed copy, so a tile of 128 places holds rows of one expert, by a table
(`group_tiles_kernel`). With tiles of 4 it would be

    counts_e   [5, 0, 2]        tiles   (0, 4) (4, 1) (5, 2) (7, 0)        first row and number of rows

followed by (3, 0), the number of tiles that have rows. The last of the four is tail. Places of a tile without a row are
zero; tiles of the tail are skipped, because no product reads them.

Scales of a whole row or matrix need a pass before (`measure_kernel`): bits of magnitudes are integers, and atomics find
their maxima in any order.
"""

from penstock.kernels.language import tl, triton

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.constexpr_function
def bits_of(number: float) -> int:
    """Bits of a number >= 1 as float32, as a constant of the compiler."""
    exponent = 127
    while number >= 2:
        number, exponent = number / 2, exponent + 1
    return (exponent << 23) + int((number - 1) * 2**23)


@triton.jit
def magnitude_bits(x):
    """Bits of |x| as a float32, int32."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax_bits, LARGEST: tl.constexpr, POWER: tl.constexpr):
    """Float32 scale of blocks from the bits of their largest magnitudes.

    LARGEST is the format's largest number; POWER rounds up to a power of two. Example with LARGEST 448: the largest
    magnitude 900 gives 900 / 448 = 2.009, and 4 with POWER.
    """
    if POWER:
        CARRY: tl.constexpr = 0x7FFFFF - (bits_of(LARGEST) & 0x7FFFFF)
        # 127 << 23 is the bits of 1, 1 << 23 those of the least scale.
        DOWN: tl.constexpr = (bits_of(LARGEST) & 0x7F800000) - (127 << 23)
        bits = tl.maximum(((amax_bits + CARRY) & 0x7F800000) - DOWN, 1 << 23)
        scale = tl.where(amax_bits >= 0x7F800000, amax_bits, bits).to(tl.float32, bitcast=True)
    else:
        ratio = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), tl.full(amax_bits.shape, LARGEST, tl.float32))
        scale = tl.where(ratio < 2.0**-126, 2.0**-126, ratio)
    return scale


@triton.jit
def to_float8(x, scale, dtype: tl.constexpr, LARGEST: tl.constexpr, POWER: tl.constexpr):
    """X / scale in 8 bits, to the nearest, halves to even; NaN stays NaN.

    A kernel reduces the `magnitude_bits` of its numbers with `tl.max`, gives the result to `scale_of`, and both to
    `to_float8`:

        amax_R1 = tl.max(magnitude_bits(x_RD), 1, keep_dims=True)
        scale_R1 = scale_of(amax_R1, LARGEST, POWER)
        tl.store(values_ptrs, to_float8(x_RD, scale_R1, values_ptr.dtype.element_ty, LARGEST, POWER))

    Magnitudes are compared as integers, which orders them as numbers do and puts NaN above all, so it is never lost.
    The power of two that is not less than amax / LARGEST comes from an addition to the bits, which carries into the
    exponent if the mantissa of amax is larger than that of LARGEST. Dividing by a power of two is multiplying by
    another one, so neither rounds.

    Triton's interpreter truncates 8-bit numbers where chips round them, and knows no NaN in them. Under the interpreter
    they are made and read by integer arithmetic, so that tests can ask for equality.
    """
    if POWER:
        divided = x * inverse_of(scale)
    else:
        # A quotient that is wrong at most in its last bit, and a correction: as exact as a division (Markstein 1990,
        # IBM J. Res. Dev. 34) of numbers above 2**-100, which takes ten times the instructions. The signs keep -0.
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        nearly = x * inverse
        excess = tl.fma(nearly, tl.where(inverse == 0.0, 0.0, scale), -x)
        divided = tl.fma(excess, -inverse, nearly)
    if INTERPRETED:
        return _encode(divided, dtype)
    return divided.to(dtype)


@triton.jit
def inverse_of(scale):
    """1 / a scale that is a power of two; 0 for infinity, NaN for NaN."""
    bits = scale.to(tl.int32, bitcast=True)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, inverse, tl.where(bits == 0x7F800000, 0.0, scale))


@triton.jit
def to_float32(values, dtype: tl.constexpr):
    """8-bit numbers as float32; other dtypes are cast."""
    if INTERPRETED and dtype.primitive_bitwidth == 8:
        return _decode(values, dtype)
    return values.to(tl.float32)


@triton.jit
def exponent_of(scale):
    """A power of two as E8M0; what is not finite becomes its NaN, 255."""
    return (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def power_of(exponent):
    """E8M0 as float32: 2**(exponent - 127), which is subnormal for 0; 255 is NaN."""
    bits = exponent.to(tl.int32) << 23
    bits = tl.where(exponent == 0, 0x00400000, tl.where(exponent == 255, 0x7FC00000, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _encode(x, dtype: tl.constexpr):
    """The interpreter's cast to 8 bits. FNUZ, whose bias is larger by one, has no -0, and 0x80 for NaN."""
    MANTISSA: tl.constexpr = dtype.fp_mantissa_width
    BIAS: tl.constexpr = dtype.exponent_bias
    FNUZ: tl.constexpr = BIAS == 2 ** (6 - MANTISSA)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Adding 1.5 * 2**(23 - MANTISSA) times the number's own power of two rounds to MANTISSA bits behind the first.
    power = tl.maximum(size & 0x7F800000, (128 - BIAS) << 23)
    magic = ((power + ((23 - MANTISSA) << 23)) | 0x400000).to(tl.float32, bitcast=True)
    rounded = ((size.to(tl.float32, bitcast=True) + magic) - magic).to(tl.int32, bitcast=True)
    normal = (rounded >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    small = rounded.to(tl.float32, bitcast=True) * 2.0 ** (BIAS + MANTISSA - 1)
    is_normal = rounded >= ((128 - BIAS) << 23)
    code = tl.where(is_normal, normal, tl.where(is_normal, 0.0, small).to(tl.int32))
    sign = (bits >> 24) & 0x80
    if FNUZ:
        code = tl.where(size > 0x7F800000, 0x80, tl.where(code == 0, 0, code | sign))
    else:
        code = tl.where(size > 0x7F800000, 0x7F, code) | sign
    return code.to(tl.uint8).to(dtype, bitcast=True)


@triton.jit
def _decode(values, dtype: tl.constexpr):
    """The interpreter's cast from 8 bits."""
    MANTISSA: tl.constexpr = dtype.fp_mantissa_width
    BIAS: tl.constexpr = dtype.exponent_bias
    FNUZ: tl.constexpr = BIAS == 2 ** (6 - MANTISSA)
    code = values.to(tl.uint8, bitcast=True).to(tl.int32)
    size = code & 0x7F
    normal = ((size << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 2**MANTISSA, size.to(tl.float32) * 2.0 ** (1 - BIAS - MANTISSA), normal)
    if FNUZ:
        number = tl.where(code == 0x80, float("nan"), number)
    elif MANTISSA == 3:
        number = tl.where(size == 0x7F, float("nan"), number)
    else:
        number = tl.where(size > 0x7C, float("nan"), tl.where(size == 0x7C, float("inf"), number))
    return tl.where(code >= 0x80, -number, number)


@triton.jit(do_not_specialize=["R", "x_scales_depth"])
def quantize_kernel(
    x_ptr, x_scales_ptr, x_scales_outer, x_scales_depth, index_ptr, tiles_ptr, rows_ptr, row_scales_ptr, row_amax_ptr,
    columns_ptr, column_scales_ptr, column_amax_ptr,
    R, D, places, x_stride, rows_stride, columns_stride,
    X_OUTER: tl.constexpr, X_DEPTH: tl.constexpr, OUTER: tl.constexpr, COLUMNS_OUTER: tl.constexpr, DEPTH: tl.constexpr,
    LARGEST: tl.constexpr, POWER: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Quantize one tile into the row-wise and the transposed copy, as far as there are pointers to them.

    OUTER x DEPTH is the block of the row-wise copy: 1 x a divisor of the tile's sides, the whole tile (then of both
    copies), or 0 where magnitudes come from `measure_kernel`; COLUMNS_OUTER x DEPTH is that of the transposed copy.
    Copies of a stack of matrices, and scales (depth blocks x outer), lie one after another.
    """
    if tiles_ptr is not None:  # noqa: SIM102 (the compiler decides both)
        # The first tile writes scales that reach further, even if it has no rows.
        if DEPTH != 0:  # noqa: SIM102 (here, too)
            if tl.load(tiles_ptr + 2 * tl.program_id(1) + 1) == 0:
                return
    matrix = tl.program_id(2).to(tl.int64)
    column_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_column_D = column_D < D
    row_R, is_row_R = tile_rows(tiles_ptr, R, BLOCK_R, RUN)
    x_RD = load_tile(x_ptr + matrix * R * x_stride, x_stride, index_ptr, row_R, is_row_R, column_D, D)
    if x_scales_ptr is not None:
        x_RD = dequantize_tile(
            x_RD, x_scales_ptr, x_scales_outer, x_scales_depth, index_ptr, row_R, is_row_R, D, X_OUTER, X_DEPTH
        )
    tile_amax_11 = None
    if columns_ptr is not None:
        x_DR = pair_neighbours(transpose_tile(x_RD, RUN))
        if COLUMNS_OUTER != 1 and DEPTH != 0:
            tile_amax_11 = largest_of_tile(magnitude_bits(x_DR))
    if rows_ptr is not None:
        row_amax = tile_amax_11 if OUTER != 1 else None
        if DEPTH == 0:
            row_amax = measured(row_amax_ptr, matrix, row_R, is_row_R, R, OUTER)
        values_RD, scale_RQ = quantize_tile(x_RD, row_amax, rows_ptr.dtype.element_ty, DEPTH, LARGEST, POWER, OUTER)
        write_ptrs = rows_ptr + (matrix * R + row_R.to(tl.int64))[:, None] * rows_stride + column_D[None, :]
        tl.store(write_ptrs, values_RD, mask=is_row_R[:, None] & is_column_D[None, :])
        outer = row_R if OUTER == 1 else tl.program_id(1)
        tile = tl.program_id(0)
        store_scales(row_scales_ptr, scale_RQ, matrix, outer, is_row_R, tile, R, D, OUTER, DEPTH, BLOCK_D)
    if columns_ptr is not None:
        column_amax = tile_amax_11
        if DEPTH == 0:
            column_amax = measured(column_amax_ptr, matrix, column_D, is_column_D, D, COLUMNS_OUTER)
        dtype: tl.constexpr = columns_ptr.dtype.element_ty
        values_DR, scale_DQ = quantize_tile(x_DR, column_amax, dtype, DEPTH, LARGEST, POWER, COLUMNS_OUTER)
        place_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        write_ptrs = columns_ptr + (matrix * D + column_D)[:, None] * columns_stride + place_R[None, :]
        tl.store(write_ptrs, values_DR, mask=is_column_D[:, None] & (place_R < places)[None, :])
        outer = column_D if COLUMNS_OUTER == 1 else tl.program_id(0)
        tile = tl.program_id(1)
        store_scales(
            column_scales_ptr, scale_DQ, matrix, outer, is_column_D, tile, D, places, COLUMNS_OUTER, DEPTH, BLOCK_R
        )


@triton.jit(do_not_specialize=["R", "x_scales_depth"])
def measure_kernel(
    x_ptr, x_scales_ptr, x_scales_outer, x_scales_depth, index_ptr, tiles_ptr, row_amax_ptr, column_amax_ptr,
    whole_amax_ptr,
    R, D, x_stride,
    X_OUTER: tl.constexpr, X_DEPTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Bits of the largest magnitude of each row, column or matrix, as far as there are pointers to zeros."""
    matrix = tl.program_id(2).to(tl.int64)
    column_D = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_column_D = column_D < D
    row_R, is_row_R = tile_rows(tiles_ptr, R, BLOCK_R, 1)
    x_RD = load_tile(x_ptr + matrix * R * x_stride, x_stride, index_ptr, row_R, is_row_R, column_D, D)
    if x_scales_ptr is not None:
        x_RD = dequantize_tile(
            x_RD, x_scales_ptr, x_scales_outer, x_scales_depth, index_ptr, row_R, is_row_R, D, X_OUTER, X_DEPTH
        )
    bits_RD = magnitude_bits(x_RD)
    # Maxima of integers are the same in any order, so atomics need none.
    if row_amax_ptr is not None:
        tl.atomic_max(row_amax_ptr + matrix * R + row_R, tl.max(bits_RD, 1), mask=is_row_R, sem="relaxed")
    if column_amax_ptr is not None:
        tl.atomic_max(column_amax_ptr + matrix * D + column_D, tl.max(bits_RD, 0), mask=is_column_D, sem="relaxed")
    if whole_amax_ptr is not None:
        tl.atomic_max(whole_amax_ptr + matrix, tl.max(tl.max(bits_RD, 1), 0), sem="relaxed")


@triton.jit(do_not_specialize=["tiles", "rows"])
def group_tiles_kernel(
    counts_ptr, tiles_ptr,
    tiles, rows,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """First row and number of rows of tiles of BLOCK_R aligned places; behind all, the tiles that have rows."""
    expert_E = tl.arange(0, BLOCK_E)
    count_E = tl.load(counts_ptr + expert_E, mask=expert_E < EXPERTS, other=0).to(tl.int32)
    end_E = tl.minimum(tl.cumsum(count_E, 0), rows)
    first_E = tl.minimum(tl.cumsum(count_E, 0) - count_E, rows)
    tiles_E = (end_E - first_E + BLOCK_R - 1) // BLOCK_R
    last_E = tl.cumsum(tiles_E, 0)
    tile_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    before_TE = tile_T[:, None] - (last_E - tiles_E)[None, :]  # number of the tile among those of each expert
    is_mine_TE = (before_TE >= 0) & (before_TE < tiles_E[None, :])
    row_TE = first_E[None, :] + before_TE * BLOCK_R
    # A tile without an expert begins behind the last row.
    row_T = tl.sum(tl.where(is_mine_TE, row_TE, 0), 1)
    filled_T = tl.sum(tl.where(is_mine_TE, tl.minimum(end_E[None, :] - row_TE, BLOCK_R), 0), 1)
    behind = tl.where(tile_T == tiles, tl.sum(tiles_E, 0), rows)
    tl.store(tiles_ptr + 2 * tile_T, tl.where(filled_T == 0, behind, row_T), mask=tile_T <= tiles)
    tl.store(tiles_ptr + 2 * tile_T + 1, filled_T, mask=tile_T <= tiles)


@triton.jit
def tile_rows(tiles_ptr, R, BLOCK_R: tl.constexpr, RUN: tl.constexpr):
    """Rows of this program's tile in the order in which they are loaded, and which of them exist."""
    lane_R = tl.arange(0, BLOCK_R)
    RUNS: tl.constexpr = BLOCK_R // RUN
    place_R = (lane_R % RUNS) * RUN + lane_R // RUNS  # 0 4 8 ... 1 5 9 ... with a RUN of 4
    tile = tl.program_id(1)
    if tiles_ptr is None:
        row_R = tile * BLOCK_R + place_R
        is_row_R = row_R < R
    else:
        row_R = tl.load(tiles_ptr + 2 * tile) + place_R
        is_row_R = place_R < tl.load(tiles_ptr + 2 * tile + 1)
    return row_R, is_row_R


@triton.jit
def load_tile(x_ptr, x_stride, index_ptr, row_R, is_row_R, column_D, D):
    """Numbers of a tile as float32, zero where there are none."""
    source_R = source_rows(index_ptr, row_R, is_row_R)
    inside = is_row_R[:, None] & (column_D < D)[None, :]
    x_RD = tl.load(x_ptr + source_R[:, None] * x_stride + column_D[None, :], mask=inside, other=0.0)
    return to_float32(x_RD, x_ptr.dtype.element_ty)


@triton.jit
def dequantize_tile(
    x_RD, scales_ptr, outer_stride, depth_stride, index_ptr,
    row_R, is_row_R, D,
    OUTER: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of 8-bit numbers times their scales, of blocks OUTER x DEPTH; 0 for the whole dim.

    Places without a row stay zero, because their scale is taken to be zero.
    """
    ROWS: tl.constexpr = x_RD.shape[0]
    COLUMNS: tl.constexpr = x_RD.shape[1]
    SHARE: tl.constexpr = COLUMNS if DEPTH == 0 or DEPTH > COLUMNS else DEPTH  # columns of the tile under one scale
    outer_R = source_rows(index_ptr, row_R, is_row_R)
    outer_R = outer_R * 0 if OUTER == 0 else outer_R // OUTER
    first_Q = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS // SHARE) * SHARE
    depth_Q = first_Q * 0 if DEPTH == 0 else first_Q // DEPTH
    scale_ptrs = scales_ptr + outer_R[:, None] * outer_stride + depth_Q[None, :] * depth_stride
    scale_RQ = tl.load(scale_ptrs, mask=is_row_R[:, None] & (first_Q < D)[None, :], other=0)
    if scales_ptr.dtype.element_ty == tl.uint8:
        scale_RQ = power_of(scale_RQ)
    return tl.reshape(tl.reshape(x_RD, [ROWS, COLUMNS // SHARE, SHARE]) * scale_RQ[:, :, None], [ROWS, COLUMNS])


@triton.jit
def source_rows(index_ptr, row_R, is_row_R):
    """Source row of each row, int64."""
    if index_ptr is None:
        source_R = row_R.to(tl.int64)
    else:
        source_R = tl.load(index_ptr + row_R, mask=is_row_R, other=0).to(tl.int64)
    return source_R


@triton.jit
def transpose_tile(x_RD, RUN: tl.constexpr):
    """Columns of a tile, whose rows return to their order in the matrix."""
    ROWS: tl.constexpr = x_RD.shape[0]
    COLUMNS: tl.constexpr = x_RD.shape[1]
    x_DR = tl.permute(tl.reshape(x_RD, [RUN, ROWS // RUN, COLUMNS]), [2, 1, 0])  # columns x runs x rows of a run
    return tl.reshape(x_DR, [COLUMNS, ROWS])


@triton.jit
def pair_neighbours(x_DR):
    """The same float32 numbers, with two neighbours of a row next to each other in a thread's registers.

    So one instruction casts both of them to 8 bits. Without this a copy and its transpose that have the same scales are
    made by the same instructions, each used as it is and in bytes, and NVIDIA's assembler (ptxas 12.8 and 12.9, with
    which Triton 3.6 comes) loses some: of two that it merges into a word (F2FP.PACK_AB_MERGE_C) it keeps no register
    for the first, and takes its bytes from an undefined one.
    """
    ROWS: tl.constexpr = x_DR.shape[0]
    COLUMNS: tl.constexpr = x_DR.shape[1]
    even_DR, odd_DR = tl.split(tl.reshape(x_DR.to(tl.int32, bitcast=True), [ROWS, COLUMNS // 2, 2]))
    # As another type, because Triton 3.9 removes a split followed by a join.
    paired = tl.join(even_DR.to(tl.float32, bitcast=True), odd_DR.to(tl.float32, bitcast=True))
    return tl.reshape(paired, [ROWS, COLUMNS])


@triton.jit
def largest_of_tile(bits_DR):
    """The largest of a tile's magnitudes, 1 x 1; over columns first, where a transposed tile's thread has most."""
    return tl.max(tl.max(bits_DR, 0, keep_dims=True), 1, keep_dims=True)


@triton.jit
def measured(amax_ptr, matrix, outer_R, is_outer_R, outer_size, OUTER: tl.constexpr):
    """Bits of the largest magnitude of each row, or with OUTER 0 of the matrix, found by `measure_kernel`."""
    if OUTER == 0:
        amax = tl.load(amax_ptr + matrix + tl.zeros([1, 1], tl.int32))
    else:
        amax = tl.load(amax_ptr + matrix * outer_size + outer_R, mask=is_outer_R, other=0)[:, None]
    return amax


@triton.jit
def quantize_tile(
    x_RD, amax_R1,
    dtype: tl.constexpr, DEPTH: tl.constexpr, LARGEST: tl.constexpr, POWER: tl.constexpr, OUTER: tl.constexpr = 1,
):  # fmt: skip
    """Values and scales of rows: for each DEPTH columns, or by magnitudes that were measured before.

    A tile has at most one block of several rows, whose magnitude is given (1 x 1), and one scale for it.
    """
    if OUTER != 1:
        scale_RQ = scale_of(amax_R1, LARGEST, POWER)
        values_RD = to_float8(x_RD, scale_RQ, dtype, LARGEST, POWER)
    else:
        SHARE: tl.constexpr = x_RD.shape[1] if amax_R1 is not None else DEPTH
        ROWS: tl.constexpr = x_RD.shape[0]
        x_RQD = tl.reshape(x_RD, [ROWS, x_RD.shape[1] // SHARE, SHARE])
        if amax_R1 is None:
            amax_RQ1 = tl.max(magnitude_bits(x_RQD), 2, keep_dims=True)
        else:
            amax_RQ1 = amax_R1[:, :, None]
        scale_RQ1 = scale_of(amax_RQ1, LARGEST, POWER)
        values_RD = tl.reshape(to_float8(x_RQD, scale_RQ1, dtype, LARGEST, POWER), x_RD.shape)
        scale_RQ = tl.reshape(scale_RQ1, [ROWS, x_RD.shape[1] // SHARE])
    return values_RD, scale_RQ


@triton.jit
def store_scales(
    scales_ptr,
    scale_RQ, matrix, outer_R, is_outer_R, tile, outer_size, depth_size,
    OUTER: tl.constexpr, DEPTH: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    """Store the scales of the tile with number `tile` along the depth, into depth blocks x outer.

    A block of several rows is a whole tile: then `outer_R` is its number along the rows.
    """
    values = scale_RQ
    if scales_ptr.dtype.element_ty == tl.uint8:
        values = exponent_of(scale_RQ)
    if OUTER == 0:
        tl.store(scales_ptr + matrix + tl.zeros([1, 1], tl.int32), values)
    elif OUTER != 1:
        block = matrix * tl.cdiv(depth_size, DEPTH) + tile
        tl.store(scales_ptr + block * tl.cdiv(outer_size, OUTER) + outer_R + tl.zeros([1, 1], tl.int32), values)
    elif DEPTH == 0:
        if tile == 0:
            tl.store(scales_ptr + (matrix * outer_size + outer_R)[:, None], values, mask=is_outer_R[:, None])
    else:
        QUOTIENT: tl.constexpr = BLOCK_DEPTH // DEPTH
        depths = tl.cdiv(depth_size, DEPTH)
        depth_Q = tile * QUOTIENT + tl.arange(0, QUOTIENT)
        pointers = scales_ptr + (matrix * depths + depth_Q)[None, :] * outer_size + outer_R[:, None]
        tl.store(pointers, values, mask=is_outer_R[:, None] & (depth_Q < depths)[None, :])


@triton.jit
def store_columns(
    columns_ptr, scales_ptr,
    x_RF, column_F, is_column_F, places, width, stride,
    OUTER: tl.constexpr, DEPTH: tl.constexpr, LARGEST: tl.constexpr, POWER: tl.constexpr, BLOCK_R: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Store the transposed copy of a tile, quantized along its places: `columns` is width x places."""
    dtype: tl.constexpr = columns_ptr.dtype.element_ty
    x_FR = transpose_tile(x_RF, RUN).to(tl.float32)
    amax_11 = None
    if OUTER != 1:
        amax_11 = largest_of_tile(magnitude_bits(x_FR))
    values_FR, scale_FQ = quantize_tile(x_FR, amax_11, dtype, DEPTH, LARGEST, POWER, OUTER)
    place_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    pointers = columns_ptr + column_F.to(tl.int64)[:, None] * stride + place_R[None, :]
    tl.store(pointers, values_FR, mask=is_column_F[:, None] & (place_R < places)[None, :])
    outer = column_F if OUTER == 1 else tl.program_id(0)
    store_scales(scales_ptr, scale_FQ, 0, outer, is_column_F, tl.program_id(1), width, places, OUTER, DEPTH, BLOCK_R)


@triton.jit
def _places(rows, D: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_R: tl.constexpr, DEPTH: tl.constexpr):
    """Row and number of each block of this program, its columns, and which blocks and columns exist."""
    block_R = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_R, number_R = block_R // BLOCKS, block_R % BLOCKS
    column_RD = number_R[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    exists_R = row_R < rows
    return row_R, number_R, column_RD, exists_R, exists_R[:, None] & (column_RD < D)


@triton.jit(do_not_specialize=["rows"])
def pack_rows_kernel(
    x_ptr, packed_ptr,
    rows,
    D: tl.constexpr, BLOCKS: tl.constexpr, BYTES: tl.constexpr, SCALES_AT: tl.constexpr, E8M0: tl.constexpr,
    LARGEST: tl.constexpr, POWER: tl.constexpr, BLOCK_R: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Quantize blocks of rows into values and scales of a message.

    Example in E4M3 with D = 4 and DEPTH = 2: the row 448, 0, 1, -2 becomes the values 448, 0, 128, -256 in 4 bytes, and
    at SCALES_AT the scales 1 and 1 / 128, the least power of two that is not less than 2 / 448.
    """
    row_R, number_R, column_RD, exists_R, exists_RD = _places(rows, D, BLOCKS, BLOCK_R, DEPTH)
    x_RD = tl.load(x_ptr + row_R[:, None] * D + column_RD, mask=exists_RD, other=0.0).to(tl.float32)
    scale_R = scale_of(tl.max(magnitude_bits(x_RD), 1), LARGEST, POWER)
    values_RD = to_float8(x_RD, scale_R[:, None], packed_ptr.dtype.element_ty, LARGEST, POWER)
    tl.store(packed_ptr + row_R[:, None] * BYTES + column_RD, values_RD, mask=exists_RD)
    first_ptr = packed_ptr + row_R * BYTES + SCALES_AT
    if E8M0:
        tl.store(first_ptr.to(tl.pointer_type(tl.uint8)) + number_R, exponent_of(scale_R), mask=exists_R)
    else:
        tl.store(first_ptr.to(tl.pointer_type(tl.float32)) + number_R, scale_R, mask=exists_R)


@triton.jit(do_not_specialize=["rows"])
def unpack_rows_kernel(
    x_ptr, packed_ptr,
    rows,
    D: tl.constexpr, BLOCKS: tl.constexpr, BYTES: tl.constexpr, SCALES_AT: tl.constexpr, E8M0: tl.constexpr,
    BLOCK_R: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The inverse of `pack_rows_kernel`, up to rounding."""
    row_R, number_R, column_RD, exists_R, exists_RD = _places(rows, D, BLOCKS, BLOCK_R, DEPTH)
    first_ptr = packed_ptr + row_R * BYTES + SCALES_AT
    if E8M0:
        scale_R = power_of(tl.load(first_ptr.to(tl.pointer_type(tl.uint8)) + number_R, mask=exists_R, other=0))
    else:
        scale_R = tl.load(first_ptr.to(tl.pointer_type(tl.float32)) + number_R, mask=exists_R, other=0.0)
    bytes_ptr = (packed_ptr + row_R[:, None] * BYTES).to(tl.pointer_type(tl.uint8))
    bytes_RD = tl.load(bytes_ptr + column_RD, mask=exists_RD, other=0)
    values_RD = bytes_RD.to(packed_ptr.dtype.element_ty, bitcast=True)
    x_RD = to_float32(values_RD, packed_ptr.dtype.element_ty) * scale_R[:, None]
    tl.store(x_ptr + row_R[:, None] * D + column_RD, x_RD.to(x_ptr.dtype.element_ty), mask=exists_RD)


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    """Transpose one tile of one matrix: x is rows x columns, out is columns x rows."""
    row_R = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column_C = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    is_row_R, is_column_C = row_R < rows, column_C < columns
    x_RC = tl.load(
        x_ptr + matrix + row_R[:, None] * columns + column_C[None, :], mask=is_row_R[:, None] & is_column_C[None, :]
    )
    tl.store(
        out_ptr + matrix + column_C[:, None] * rows + row_R[None, :],
        tl.trans(x_RC),
        mask=is_column_C[:, None] & is_row_R[None, :],
    )
