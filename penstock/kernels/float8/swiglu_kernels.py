"""Triton: the activation of feed-forward networks, and its gradients, from a tile in registers to 8 bits.

Forward quantizes a tile of 128 places by 128 columns along both of its sides, rounded to 16 bits before, as the
definition does. In which order its rows are loaded, and where the experts' rows stand, is told in
`penstock.kernels.float8.quantize_kernels`.

Backward makes of a tile of gate, up and dh

    h          transposed                      for the weight of the second product
    dgate      as it is, and transposed        for the rows, and for the weight of the first product
    dup        likewise

which a program could not hold beside what it computes. So it walks the tile twice, a few rows at a time: first
it writes rows and finds the columns' largest magnitudes, then it computes all again, from lines that the caches still
have, and writes columns. Each number is rounded once, to 8 bits. The rows of four steps are neighbours, so the 8-bit
numbers of a column's four places are put together in a word, and words are transposed: a quarter of the traffic in
shared memory, and 8-bit tiles are never transposed, which Triton 3.6 gets wrong on sm_90.
"""

from penstock.kernels.float8.quantize_kernels import (
    largest_of_tile,
    quantize_tile,
    store_scales,
    tile_rows,
    transpose_tile,
)
from penstock.kernels.float8.scaling import exponent_of, magnitude_bits, scale_of, to_float8
from penstock.kernels.language import tl, triton
from penstock.kernels.swiglu import activated, activation_gradients


@triton.jit(do_not_specialize=["R"])
def swiglu_float8_kernel(
    gate_up_ptr,
    first_ptr,
    weights_ptr,
    counts_ptr,
    rows_ptr,
    row_scales_ptr,
    columns_ptr,
    column_scales_ptr,
    R,
    rows_stride,
    columns_stride,
    experts,
    F,
    COLUMNS_OUTER: tl.constexpr,
    DEPTH: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    RUN: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    WEIGHS_INPUT: tl.constexpr,
):
    """One tile of h, by rows, and transposed if there is a pointer to that. Rows past the counts are left alone.

    Blocks are 1 x DEPTH, of the transposed copy COLUMNS_OUTER x DEPTH, with 1 or all of a tile. With `first_ptr` gate
    and up begin at the row that is said there.
    """
    used = R
    if counts_ptr is not None:
        expert_E = tl.arange(0, BLOCK_E)
        used = tl.minimum(tl.sum(tl.load(counts_ptr + expert_E, mask=expert_E < experts, other=0), 0).to(tl.int32), R)
        if tl.program_id(1) * BLOCK_R >= used:
            return
    if first_ptr is not None:
        gate_up_ptr += tl.load(first_ptr) * (2 * F)
    row_R, is_row_R = tile_rows(None, used, BLOCK_R, RUN)
    column_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    is_column_F = column_F < F
    inside = is_row_R[:, None] & is_column_F[None, :]
    start_R1 = row_R.to(tl.int64)[:, None]
    gate_ptrs = gate_up_ptr + start_R1 * (2 * F) + column_F[None, :]
    gate_RF = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up_RF = tl.load(gate_ptrs + F, mask=inside, other=0.0).to(tl.float32)
    weight_R1 = None
    if weights_ptr is not None:
        weight_R1 = tl.load(weights_ptr + row_R, mask=is_row_R, other=0.0)[:, None]
    h_RF = activated(gate_RF, up_RF, weight_R1, LIMIT, ALPHA, WEIGHS_INPUT)
    # Where nothing was loaded gate is zero, and so is h.
    h_RF = h_RF.to(gate_up_ptr.dtype.element_ty)
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    values_RF, scale_RQ = quantize_tile(h_RF.to(tl.float32), None, dtype, DEPTH, LARGEST, POWER)
    tl.store(rows_ptr + start_R1 * rows_stride + column_F[None, :], values_RF, mask=inside)
    store_scales(row_scales_ptr, scale_RQ, 0, row_R, is_row_R, tl.program_id(0), R, F, 1, DEPTH, BLOCK_F)
    if columns_ptr is not None:
        store_columns(
            columns_ptr, column_scales_ptr, h_RF, column_F, is_column_F, R, F, columns_stride,
            COLUMNS_OUTER, DEPTH, LARGEST, POWER, BLOCK_R, RUN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
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
    words_stride,
    F,
    H_OUTER: tl.constexpr,
    DEPTH: tl.constexpr,
    LARGEST: tl.constexpr,
    H_LARGEST: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STEP: tl.constexpr,
    WEIGHS_INPUT: tl.constexpr,
):
    """One tile of all five copies, and its part of the weights' gradient, STEP rows at a time.

    `words_stride` is that of transposed copies, in words of four numbers. What the tile's rows do not fill is zero in
    them: gate, up and dh are zero there. A tile without rows is passed over. Blocks are 1 x DEPTH, of the transposed h
    H_OUTER x DEPTH, with 1 or all of a tile. `first_ptr` is as in forward.
    """
    if first_ptr is not None:
        gate_up_ptr += tl.load(first_ptr) * (2 * F)
    tile = tl.program_id(1)
    first, filled = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    if filled == 0:
        return
    column_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    d_type: tl.constexpr = d_columns_ptr.dtype.element_ty
    h_type: tl.constexpr = h_columns_ptr.dtype.element_ty
    # As many places as have scales of their own, and fill whole words.
    SPAN: tl.constexpr = max(DEPTH, 4 * STEP)
    for span in tl.range(BLOCK_R // SPAN):
        h_bits = tl.zeros([STEP, BLOCK_F], tl.int32)
        dgate_bits, dup_bits = h_bits, h_bits
        for step in tl.range(SPAN // STEP):
            row_R, is_row_R = _rows_of(first, filled, span * SPAN // STEP + step, STEP)
            h_RF, dgate_RF, dup_RF, product_RF = _gradients(
                gate_up_ptr, weights_ptr, dh_ptr, row_R, is_row_R, column_F, F, WEIGHS_INPUT
            )
            if weights_ptr is not None:
                tl.store(products_ptr + tl.program_id(0) * R + row_R, tl.sum(product_RF, 1), mask=is_row_R)
            h_bits = tl.maximum(h_bits, magnitude_bits(h_RF))
            dgate_bits = tl.maximum(dgate_bits, magnitude_bits(dgate_RF))
            dup_bits = tl.maximum(dup_bits, magnitude_bits(dup_RF))
            _store_rows(
                d_rows_ptr, d_row_scales_ptr, dgate_RF, row_R, is_row_R, column_F, R, F, rows_stride,
                DEPTH, LARGEST, POWER,
            )  # fmt: skip
            _store_rows(
                d_rows_ptr + F, d_row_scales_ptr + F // DEPTH * R, dup_RF, row_R, is_row_R, column_F, R, F,
                rows_stride, DEPTH, LARGEST, POWER,
            )  # fmt: skip
        place = tile * BLOCK_R + span * SPAN
        if H_OUTER == 1:
            h_scale = _column_scales(h_column_scales_ptr, h_bits, place, column_F, F, F, DEPTH, H_LARGEST, POWER)
        else:
            h_scale = scale_of(largest_of_tile(h_bits), H_LARGEST, POWER)
            store_scales(h_column_scales_ptr, h_scale, 0, tl.program_id(0), None, tile, F, R, H_OUTER, DEPTH, BLOCK_R)
        dgate_scale = _column_scales(d_column_scales_ptr, dgate_bits, place, column_F, F, 2 * F, DEPTH, LARGEST, POWER)
        dup_scale = _column_scales(d_column_scales_ptr + F, dup_bits, place, column_F, F, 2 * F, DEPTH, LARGEST, POWER)
        for part in tl.range(SPAN // STEP // 4):
            h_words = tl.zeros([STEP, BLOCK_F], tl.uint32)
            dgate_words, dup_words = h_words, h_words
            for byte in tl.range(4):
                row_R, is_row_R = _rows_of(first, filled, span * SPAN // STEP + 4 * part + byte, STEP)
                h_RF, dgate_RF, dup_RF, _ = _gradients(
                    gate_up_ptr, weights_ptr, dh_ptr, row_R, is_row_R, column_F, F, WEIGHS_INPUT
                )
                h_words = _push(h_words, to_float8(h_RF, h_scale, h_type, H_LARGEST, POWER))
                dgate_words = _push(dgate_words, to_float8(dgate_RF, dgate_scale, d_type, LARGEST, POWER))
                dup_words = _push(dup_words, to_float8(dup_RF, dup_scale, d_type, LARGEST, POWER))
            word = place // 4 + part * STEP
            _store_words(h_columns_ptr, h_words, word, column_F, column_F < F, words_stride)
            _store_words(d_columns_ptr, dgate_words, word, column_F, column_F < F, words_stride)
            _store_words(d_columns_ptr, dup_words, word, column_F + F, column_F < F, words_stride)


@triton.jit
def _rows_of(first, filled, step, STEP: tl.constexpr):
    """Rows of a step, 4 apart, and which of them there are; 4 steps take 4 * STEP rows."""
    place_R = 4 * (step // 4 * STEP + tl.arange(0, STEP)) + step % 4
    return first + place_R, place_R < filled


@triton.jit
def _gradients(gate_up_ptr, weights_ptr, dh_ptr, row_R, is_row_R, column_F, F, WEIGHS_INPUT: tl.constexpr):
    """`activation_gradients` of some rows."""
    inside = is_row_R[:, None] & (column_F < F)[None, :]
    narrow = row_R.to(tl.int64)[:, None] * F + column_F[None, :]
    wide = row_R.to(tl.int64)[:, None] * (2 * F) + column_F[None, :]
    gate_RF = tl.load(gate_up_ptr + wide, mask=inside, other=0.0).to(tl.float32)
    up_RF = tl.load(gate_up_ptr + F + wide, mask=inside, other=0.0).to(tl.float32)
    dh_RF = tl.load(dh_ptr + narrow, mask=inside, other=0.0).to(tl.float32)
    weight_R1 = None
    if weights_ptr is not None:
        weight_R1 = tl.load(weights_ptr + row_R, mask=is_row_R, other=0.0)[:, None]
    return activation_gradients(gate_RF, up_RF, dh_RF, weight_R1, None, 1.0, WEIGHS_INPUT)


@triton.jit
def _store_rows(
    rows_ptr,
    scales_ptr,
    x_RF,
    row_R,
    is_row_R,
    column_F,
    R,
    F,
    stride,
    DEPTH: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER: tl.constexpr,
):
    """Some rows of the tile, quantized along its columns."""
    RUNS: tl.constexpr = x_RF.shape[0]
    BLOCK_F: tl.constexpr = x_RF.shape[1]
    BLOCKS: tl.constexpr = BLOCK_F // DEPTH
    scale_RQ = scale_of(tl.max(tl.reshape(magnitude_bits(x_RF), [RUNS, BLOCKS, DEPTH]), 2), LARGEST, POWER)
    scale_RF = tl.reshape(tl.broadcast_to(scale_RQ[:, :, None], [RUNS, BLOCKS, DEPTH]), [RUNS, BLOCK_F])
    values_RF = to_float8(x_RF, scale_RF, rows_ptr.dtype.element_ty, LARGEST, POWER)
    inside = is_row_R[:, None] & (column_F < F)[None, :]
    tl.store(rows_ptr + row_R.to(tl.int64)[:, None] * stride + column_F[None, :], values_RF, mask=inside)
    store_scales(scales_ptr, scale_RQ, 0, row_R, is_row_R, tl.program_id(0), R, F, 1, DEPTH, BLOCK_F)


@triton.jit
def _column_scales(
    scales_ptr, bits_RF, place, column_F, F, width, DEPTH: tl.constexpr, LARGEST: tl.constexpr, POWER: tl.constexpr
):
    """The scale of each number for its column's block of places, of which `bits` are maxima; scales are written."""
    STEP: tl.constexpr = bits_RF.shape[0]
    BLOCK_F: tl.constexpr = bits_RF.shape[1]
    BLOCKS: tl.constexpr = max(4 * STEP // DEPTH, 1)
    scale_QF = scale_of(tl.max(tl.reshape(bits_RF, [BLOCKS, STEP // BLOCKS, BLOCK_F]), 1), LARGEST, POWER)
    values = scale_QF
    if scales_ptr.dtype.element_ty == tl.uint8:
        values = exponent_of(scale_QF)
    block_Q = place // DEPTH + tl.arange(0, BLOCKS)
    pointers = scales_ptr + block_Q[:, None] * width + column_F[None, :]
    tl.store(pointers, values, mask=(column_F < F)[None, :] & (block_Q >= 0)[:, None])
    return tl.reshape(tl.broadcast_to(scale_QF[:, None, :], [BLOCKS, STEP // BLOCKS, BLOCK_F]), [STEP, BLOCK_F])


@triton.jit
def _push(words, values):
    """Put a number of 8 bits into each word as its last byte; the first falls out. One instruction does it."""
    return (words >> 8) | (values.to(tl.uint8, bitcast=True).to(tl.uint32) << 24)


@triton.jit
def _store_words(columns_ptr, words_RF, word, column_F, is_column_F, stride):
    """Words of four neighbouring places, transposed, from number `word` of each column on."""
    words_ptr = columns_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    word_R = word + tl.arange(0, words_RF.shape[0])
    pointers = words_ptr + column_F.to(tl.int64)[:, None] * stride + word_R[None, :]
    tl.store(pointers, tl.trans(words_RF), mask=is_column_F[:, None])


@triton.jit
def store_columns(
    columns_ptr,
    scales_ptr,
    x_RF,
    column_F,
    is_column_F,
    places,
    width,
    stride,
    OUTER: tl.constexpr,
    DEPTH: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RUN: tl.constexpr,
):
    """The transposed copy of a tile, quantized along its places: `columns` is width x places."""
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
