"""Device code of attention in 8 bits: quantize, flash attention forward, and backward in two kernels.

Every tile is read with its contracted dim last, as matrix units of Hopper want it. So values are multiplied with
probabilities from a transposed copy (width x positions), and gradients of queries and keys from transposed copies of
keys and queries. Positions of all copies are padded by zeros to whole blocks of `BLOCK`, so tiles are read without
masks; a block has one scale for each head, and both copies of a matrix hold the same numbers.

    attention_queries_kernel    a program has one tile of queries and walks keys up to its diagonal: output, or dQ
    attention_keys_kernel       a program has one tile of keys and walks queries from its diagonal on: dK and dV

Backward computes scores and dP twice, and nothing is added up by atomics: two runs give the same bits. Heads of 192
columns are two products, of 128 (`WIDE`) and 64 (`REST`), because tiles are powers of two.

Scores are in units of log2. A row's largest one is rounded up to an integer, so rescaling is by powers of two and the
8-bit probabilities of a tile do not depend on which tiles came before. Products leave the matrix unit's accumulator
after at most 128 positions and are added in float32.
"""

from penstock.kernels.float8.scaling import magnitude_bits, scale_of, to_float8, to_float32
from penstock.kernels.language import tl, triton

LEAST_UNIT = tl.constexpr(2.0**-126)


@triton.jit
def quantize_heads_kernel(
    x_ptr,
    rows_ptr,
    columns_ptr,
    scales_ptr,
    positions,
    heads,
    stride_batch,
    stride_position,
    stride_head,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of positions of one head: as it is, transposed too if COLUMNS, and its scale.

    A head of 192 has WIDTH 192, WIDE 128, REST 64.
    """
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    padded = tl.num_programs(0) * BLOCK
    place = block * BLOCK + tl.arange(0, BLOCK)
    source_ptr = x_ptr + head // heads * stride_batch + head % heads * stride_head
    source_ptrs = source_ptr + place.to(tl.int64)[:, None] * stride_position
    inside = (place < positions)[:, None]
    wide = tl.load(source_ptrs + tl.arange(0, WIDE)[None, :], mask=inside, other=0.0)
    amax_bits = tl.max(magnitude_bits(wide))
    if REST:
        rest = tl.load(source_ptrs + WIDE + tl.arange(0, REST)[None, :], mask=inside, other=0.0)
        amax_bits = tl.maximum(amax_bits, tl.max(magnitude_bits(rest)))
    scale = scale_of(tl.full([1, 1], 0, tl.int32) + amax_bits, LARGEST, True)
    tl.store(scales_ptr + head * tl.num_programs(0) + block, tl.max(scale))
    rows_ptr += head * padded * WIDTH
    columns_ptr += head * padded * WIDTH
    _store_both(wide, scale, rows_ptr, columns_ptr, place, 0, padded, WIDTH, WIDE, COLUMNS, LARGEST)
    if REST:
        _store_both(rest, scale, rows_ptr, columns_ptr, place, WIDE, padded, WIDTH, REST, COLUMNS, LARGEST)


@triton.jit
def quantize_output_gradient_kernel(
    do_ptr,
    o_ptr,
    rows_ptr,
    columns_ptr,
    scales_ptr,
    delta_ptr,
    positions,
    heads,
    stride_batch,
    stride_position,
    stride_head,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same for the gradient of the output, both copies, and of each row its product with the output.

    The product takes what was quantized: see `attention_reference`. The output is contiguous.
    """
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    padded = tl.num_programs(0) * BLOCK
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = (place < positions)[:, None]
    across = tl.arange(0, WIDTH)[None, :]
    do_ptr += head // heads * stride_batch + head % heads * stride_head
    do = tl.load(do_ptr + place.to(tl.int64)[:, None] * stride_position + across, mask=inside, other=0.0)
    o_ptr += (head // heads * positions * heads + head % heads) * WIDTH
    o = tl.load(o_ptr + place.to(tl.int64)[:, None] * heads * WIDTH + across, mask=inside, other=0.0)
    scale = scale_of(tl.full([1, 1], 0, tl.int32) + tl.max(magnitude_bits(do)), LARGEST, True)
    tl.store(scales_ptr + head * tl.num_programs(0) + block, tl.max(scale))
    rows_ptr += head * padded * WIDTH
    columns_ptr += head * padded * WIDTH
    values = _store_both(do, scale, rows_ptr, columns_ptr, place, 0, padded, WIDTH, WIDTH, True, LARGEST)
    product = tl.sum(to_float32(values, rows_ptr.dtype.element_ty) * scale * o.to(tl.float32), 1)
    tl.store(delta_ptr + head * padded + place, product)


@triton.jit
def attention_queries_kernel(
    q_ptr,
    k_ptr,
    k_columns_ptr,
    v_ptr,
    do_ptr,
    q_scales_ptr,
    k_scales_ptr,
    v_scales_ptr,
    do_scales_ptr,
    out_ptr,
    log_sums_ptr,
    delta_ptr,
    positions,
    padded,
    heads,
    factor,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    SHARE: tl.constexpr,
    BACKWARD: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Forward: the output of a tile of queries and the logs of its rows' sums. BACKWARD: the queries' gradient.

    SHARE heads of queries have one of keys. `factor` is that of the scores times log2(e). LARGEST is that of what is
    quantized here: probabilities forward, dS backward. The copy of v is transposed forward, and not backward.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # Those with the most keys begin first.
    head = tl.program_id(1).to(tl.int64)
    key_head = head // SHARE
    start = tile * BLOCK_QUERIES
    blocks = padded // BLOCK
    query = start + tl.arange(0, BLOCK_QUERIES)
    q_ptr += (head * padded + start) * (WIDE + REST)
    q_wide = _tile(q_ptr, WIDE + REST, BLOCK_QUERIES, WIDE)
    if REST:
        q_rest = _tile(q_ptr + WIDE, WIDE + REST, BLOCK_QUERIES, REST)
    in_block = head * blocks + start // BLOCK
    score_scale = factor * tl.load(q_scales_ptr + in_block)
    if BACKWARD:
        do = _tile(do_ptr + (head * padded + start) * VALUE, VALUE, BLOCK_QUERIES, VALUE)
        do_scale = tl.load(do_scales_ptr + in_block)
        log_sums = tl.load(log_sums_ptr + head * padded + query)
        delta = tl.load(delta_ptr + head * padded + query)
        wide = tl.zeros((BLOCK_QUERIES, WIDE), tl.float32)
        if REST:
            rest = tl.zeros((BLOCK_QUERIES, REST), tl.float32)
    else:
        SHIFT: tl.constexpr = 7 + (LARGEST >= 256)
        top = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_QUERIES,), tl.float32)
        rounded_sums = tl.zeros((BLOCK_QUERIES,), tl.float32)
        wide = tl.zeros((BLOCK_QUERIES, VALUE), tl.float32)
    k_ptr += key_head * padded * (WIDE + REST)
    k_columns_ptr += key_head * padded * (WIDE + REST)
    v_ptr += key_head * padded * VALUE
    for first in tl.range(0, start + BLOCK_QUERIES, BLOCK_KEYS):
        k_wide = _tile(k_ptr + first * (WIDE + REST), WIDE + REST, BLOCK_KEYS, WIDE)
        if REST:
            k_rest = _tile(k_ptr + first * (WIDE + REST) + WIDE, WIDE + REST, BLOCK_KEYS, REST)
        scores = tl.dot(q_wide, k_wide.T)
        if REST:
            scores = tl.dot(q_rest, k_rest.T, scores)
        key_block = key_head * blocks + first // BLOCK
        k_scale = tl.load(k_scales_ptr + key_block)
        v_scale = tl.load(v_scales_ptr + key_block)
        # Above zero: what is hidden is minus infinity times this.
        unit = tl.maximum(score_scale * k_scale, LEAST_UNIT, tl.PropagateNan.ALL)
        if first + BLOCK_KEYS > start:
            scores = tl.where(query[:, None] >= first + tl.arange(0, BLOCK_KEYS)[None, :], scores, float("-inf"))
        if BACKWARD:
            dp = tl.dot(do, _tile(v_ptr + first * VALUE, VALUE, BLOCK_KEYS, VALUE).T)
            ds = tl.exp2(scores * unit - log_sums[:, None]) * (dp * (do_scale * v_scale) - delta[:, None])
            ds, scale = _quantize_rows(ds, do_ptr.dtype.element_ty, LARGEST)
            scale *= k_scale
            wide += tl.dot(ds, _tile(k_columns_ptr + first, padded, WIDE, BLOCK_KEYS).T) * scale
            if REST:
                rest_ptr = k_columns_ptr + tl.cast(WIDE, tl.int64) * padded + first
                rest += tl.dot(ds, _tile(rest_ptr, padded, REST, BLOCK_KEYS).T) * scale
        else:
            new_top = tl.maximum(top, tl.ceil(tl.max(scores, 1) * unit))
            # Between 0 and 2**SHIFT, which divides out at the end.
            p = tl.exp2(scores * unit - (new_top - SHIFT)[:, None])
            shrink = tl.exp2(top - new_top)
            top = new_top
            one = tl.full([1, 1], 1.0, tl.float32)
            values = to_float8(p, one, v_ptr.dtype.element_ty, LARGEST, True)
            sums = sums * shrink + tl.sum(p, 1)
            rounded_sums = rounded_sums * shrink + tl.sum(to_float32(values, v_ptr.dtype.element_ty), 1)
            part = tl.dot(values, _tile(v_ptr + first, padded, VALUE, BLOCK_KEYS).T)
            wide = wide * shrink[:, None] + part * v_scale
    if BACKWARD:
        scale = factor * 0.6931471805599453  # ln 2: the factor of the scores again.
        _store_heads(out_ptr, head, heads, positions, query, wide * scale, WIDE + REST, WIDE)
        if REST:
            _store_heads(out_ptr + WIDE, head, heads, positions, query, rest * scale, WIDE + REST, REST)
    else:
        # Rows of the padding get no probability in backward.
        log_sums = tl.where(query < positions, tl.log2(sums) + top - SHIFT, float("inf"))
        tl.store(log_sums_ptr + head * padded + query, log_sums)
        _store_heads(out_ptr, head, heads, positions, query, wide / rounded_sums[:, None], VALUE, VALUE)


@triton.jit
def attention_keys_kernel(
    k_ptr,
    q_ptr,
    q_columns_ptr,
    v_ptr,
    do_ptr,
    do_columns_ptr,
    q_scales_ptr,
    k_scales_ptr,
    v_scales_ptr,
    do_scales_ptr,
    dk_ptr,
    dv_ptr,
    log_sums_ptr,
    delta_ptr,
    positions,
    padded,
    heads,
    factor,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    SHARE: tl.constexpr,
    LARGEST: tl.constexpr,
    LARGEST_GRADIENT: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of a tile of keys and of its values: the sum over the queries of SHARE heads that see them.

    `heads` are those of keys. Scores stand transposed, keys x queries, as both products contract over queries.
    """
    key_head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * BLOCK_KEYS
    blocks = padded // BLOCK
    key = start + tl.arange(0, BLOCK_KEYS)
    k_ptr += (key_head * padded + start) * (WIDE + REST)
    k_wide = _tile(k_ptr, WIDE + REST, BLOCK_KEYS, WIDE)
    v = _tile(v_ptr + (key_head * padded + start) * VALUE, VALUE, BLOCK_KEYS, VALUE)
    score_scale = factor * tl.load(k_scales_ptr + key_head * blocks + start // BLOCK)
    v_scale = tl.load(v_scales_ptr + key_head * blocks + start // BLOCK)
    dk_wide = tl.zeros((BLOCK_KEYS, WIDE), tl.float32)
    dv = tl.zeros((BLOCK_KEYS, VALUE), tl.float32)
    if REST:
        k_rest = _tile(k_ptr + WIDE, WIDE + REST, BLOCK_KEYS, REST)
        dk_rest = tl.zeros((BLOCK_KEYS, REST), tl.float32)
    for head in range(key_head * SHARE, key_head * SHARE + SHARE):
        begin = head * padded
        for first in tl.range(start // BLOCK_QUERIES * BLOCK_QUERIES, positions, BLOCK_QUERIES):
            query = first + tl.arange(0, BLOCK_QUERIES)
            q_rows_ptr = q_ptr + (begin + first) * (WIDE + REST)
            q_wide = _tile(q_rows_ptr, WIDE + REST, BLOCK_QUERIES, WIDE)
            if REST:
                q_rest = _tile(q_rows_ptr + WIDE, WIDE + REST, BLOCK_QUERIES, REST)
            scores = tl.dot(k_wide, q_wide.T)
            if REST:
                scores = tl.dot(k_rest, q_rest.T, scores)
            in_block = head * blocks + first // BLOCK
            q_scale = tl.load(q_scales_ptr + in_block)
            do_scale = tl.load(do_scales_ptr + in_block)
            if first < start + BLOCK_KEYS:
                scores = tl.where(key[:, None] <= query[None, :], scores, float("-inf"))
            unit = tl.maximum(score_scale * q_scale, LEAST_UNIT, tl.PropagateNan.ALL)
            p = tl.exp2(scores * unit - tl.load(log_sums_ptr + begin + query)[None, :])
            values, scale = _quantize_rows(p, k_ptr.dtype.element_ty, LARGEST)
            do_rows_ptr = do_columns_ptr + begin * VALUE + first
            dv += tl.dot(values, _tile(do_rows_ptr, padded, VALUE, BLOCK_QUERIES).T) * (scale * do_scale)
            dp = tl.dot(v, _tile(do_ptr + (begin + first) * VALUE, VALUE, BLOCK_QUERIES, VALUE).T)
            ds = p * (dp * (do_scale * v_scale) - tl.load(delta_ptr + begin + query)[None, :])
            values, scale = _quantize_rows(ds, do_ptr.dtype.element_ty, LARGEST_GRADIENT)
            scale *= q_scale
            q_rows_ptr = q_columns_ptr + begin * (WIDE + REST) + first
            dk_wide += tl.dot(values, _tile(q_rows_ptr, padded, WIDE, BLOCK_QUERIES).T) * scale
            if REST:
                q_rows_ptr += tl.cast(WIDE, tl.int64) * padded
                dk_rest += tl.dot(values, _tile(q_rows_ptr, padded, REST, BLOCK_QUERIES).T) * scale
    scale = factor * 0.6931471805599453
    _store_heads(dv_ptr, key_head, heads, positions, key, dv, VALUE, VALUE)
    _store_heads(dk_ptr, key_head, heads, positions, key, dk_wide * scale, WIDE + REST, WIDE)
    if REST:
        _store_heads(dk_ptr + WIDE, key_head, heads, positions, key, dk_rest * scale, WIDE + REST, REST)


@triton.jit
def _tile(ptr, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the tile whose first element `ptr` points to; rows lie `stride` apart."""
    rows = tl.arange(0, ROWS)[:, None] * stride
    return tl.load(ptr + rows + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def _quantize_rows(x, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Values of a tile in 8 bits and a scale for each of its rows, as a column."""
    scale = scale_of(tl.max(magnitude_bits(x), 1)[:, None], LARGEST, True)
    return to_float8(x, scale, dtype, LARGEST, True), scale


@triton.jit
def _store_both(
    x,
    scale,
    rows_ptr,
    columns_ptr,
    place,
    column,
    padded,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Write columns from `column` on of a block, and their transpose; return their values."""
    values = to_float8(x.to(tl.float32), scale, rows_ptr.dtype.element_ty, LARGEST, True)
    across = column + tl.arange(0, PART)
    tl.store(rows_ptr + place.to(tl.int64)[:, None] * WIDTH + across[None, :], values)
    if COLUMNS:
        tl.store(columns_ptr + across.to(tl.int64)[:, None] * padded + place[None, :], values.T)
    return values


@triton.jit
def _store_heads(ptr, head, heads, positions, place, x, WIDTH: tl.constexpr, PART: tl.constexpr):
    """Write rows of one head into a contiguous B x S x heads x WIDTH."""
    row = (head // heads * positions + place) * heads + head % heads
    ptrs = ptr + row[:, None] * WIDTH + tl.arange(0, PART)[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=(place < positions)[:, None])
