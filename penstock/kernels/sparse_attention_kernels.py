"""The kernels of `penstock.kernels.sparse_attention_launches`.

    sparse_forward_kernel         per query, some heads: o and logsumexp over the gathered rows of the latent
    sparse_score_backward_kernel  per query, some heads: probabilities and gradients of scores, which are written
    sparse_query_backward_kernel  per query, some columns: gradients of the query
    sparse_key_backward_kernel    per query, some columns: gradients of the gathered rows, added to those of all queries

All heads of a query read the same rows: C columns of the latent, which are the values too, and P rotary ones. A query
at position s of a document that starts at position d has min(K, s - d + 1) keys, which come first among its K numbers.
A place is row * S + position. Queries and outputs in columns of the latent are heads x places x C, as batched products
give them; the others have heads after places.

Those of the lightning indexer, whose definitions are in `penstock.kernels.sparse_attention`:

    index_scores_kernel    some queries and keys: scores of the keys that a query sees, and of some that it does not
    choose_keys_kernel     per query: the keys with the highest scores
    index_backward_kernel  per query: gradients of the loss over its chosen keys

A query at position s sees the keys from the first position of its document to s.
"""

from penstock.kernels.language import tl, triton


@triton.jit
def _columns(heads: tl.constexpr, BLOCK_H: tl.constexpr):
    """Of this program: place of the query, and heads."""
    blocks = (heads + BLOCK_H - 1) // BLOCK_H
    position = (tl.program_id(0) // blocks).to(tl.int64)
    return position, (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)


@triton.jit
def _part(heads: tl.constexpr, columns: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr):
    """Of this program: number of the query in the chunk, first column, and heads.

    A query's programs follow each other, so that all but the first find its probabilities in the L2 cache.
    """
    across: tl.constexpr = (columns + BLOCK_C - 1) // BLOCK_C
    down: tl.constexpr = (heads + BLOCK_H - 1) // BLOCK_H
    part = tl.program_id(0) % (across * down)
    local = (tl.program_id(0) // (across * down)).to(tl.int64)
    return local, part % across * BLOCK_C, part // across * BLOCK_H + tl.arange(0, BLOCK_H)


@triton.jit
def _seen(firsts_ptr, position, positions, K: tl.constexpr):
    """Number of keys of a query."""
    return tl.minimum(K, position % positions - tl.load(firsts_ptr + position) + 1).to(tl.int32)


@triton.jit
def sparse_forward_kernel(
    q_ptr, q_rope_ptr, latent_ptr, rope_ptr, keys_ptr, firsts_ptr, o_ptr, log_sums_ptr, places, positions, scale,
    H: tl.constexpr, C: tl.constexpr, P: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax attention of some heads of a query, with running maximum and sum."""
    position, head_H = _columns(H, BLOCK_H)
    count = _seen(firsts_ptr, position, positions, K)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    column_C, column_P, slot_K = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    is_C, is_P, is_H = column_C < C, column_P < P, head_H < H
    row_H1 = (head_H.to(tl.int64) * places + position)[:, None]
    q_HC = tl.load(q_ptr + row_H1 * C + column_C, mask=is_H[:, None] & is_C[None, :], other=0.0)
    q_HP = tl.load(
        q_rope_ptr + (position * H + head_H)[:, None] * P + column_P, mask=is_H[:, None] & is_P[None, :], other=0.0
    )
    row = position // positions
    latent_ptr += row * positions * C
    rope_ptr += row * positions * P
    keys_ptr += position * K
    factor = scale * 1.4426950408889634
    most_H = tl.full([BLOCK_H], float("-inf"), tl.float32)
    sum_H = tl.zeros([BLOCK_H], tl.float32)
    o_HC = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    key_K = tl.load(keys_ptr + slot_K, mask=slot_K < count, other=0)
    for first in tl.range(0, count, BLOCK_K, num_stages=STAGES):
        k_KC = tl.load(latent_ptr + key_K[:, None] * C + column_C[None, :], mask=is_C[None, :], other=0.0)
        k_KP = tl.load(rope_ptr + key_K[:, None] * P + column_P[None, :], mask=is_P[None, :], other=0.0)
        after_K = first + BLOCK_K + slot_K
        key_K = tl.load(keys_ptr + after_K, mask=after_K < count, other=0)
        s_HK = tl.dot(q_HC, tl.trans(k_KC), input_precision="ieee")
        s_HK = tl.dot(q_HP, tl.trans(k_KP), s_HK, input_precision="ieee")
        s_HK = tl.where((first + slot_K < count)[None, :], s_HK * factor, float("-inf"))
        next_H = tl.maximum(most_H, tl.max(s_HK, 1))
        p_HK = tl.exp2(s_HK - next_H[:, None])
        kept_H = tl.exp2(most_H - next_H)
        sum_H = sum_H * kept_H + tl.sum(p_HK, 1)
        o_HC = tl.dot(p_HK.to(dtype), k_KC, o_HC * kept_H[:, None], input_precision="ieee")
        most_H = next_H
    o_HC = o_HC / sum_H[:, None]
    tl.store(o_ptr + row_H1 * C + column_C, o_HC.to(dtype), mask=is_H[:, None] & is_C[None, :])
    tl.store(log_sums_ptr + position * H + head_H, (most_H + tl.log2(sum_H)) / 1.4426950408889634, mask=is_H)


@triton.jit
def sparse_score_backward_kernel(
    q_ptr, q_rope_ptr, latent_ptr, rope_ptr, keys_ptr, firsts_ptr, o_ptr, log_sums_ptr, do_ptr, p_ptr, ds_ptr, mass_ptr,
    places, positions, first_place, scale,
    H: tl.constexpr, C: tl.constexpr, P: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Probabilities and gradients of the scores of some heads of a query, H x K for queries from `first_place` on.

    The mass is the sum of probabilities over the program's heads: queries x programs of a query x K.
    """
    local, head_H = _columns(H, BLOCK_H)
    position = local + first_place
    count = _seen(firsts_ptr, position, positions, K)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    column_C, column_P, slot_K = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    is_C, is_P, is_H = column_C < C, column_P < P, head_H < H
    row_H1 = (head_H.to(tl.int64) * places + position)[:, None]
    delta_H = tl.zeros([BLOCK_H], tl.float32)
    for first in range(0, BLOCK_C, BLOCK_P):
        is_part = is_H[:, None] & (first + column_P < C)[None, :]
        o_HP = tl.load(o_ptr + row_H1 * C + first + column_P, mask=is_part, other=0.0)
        do_HP = tl.load(do_ptr + row_H1 * C + first + column_P, mask=is_part, other=0.0)
        delta_H += tl.sum(o_HP.to(tl.float32) * do_HP.to(tl.float32), 1)
    is_HC = is_H[:, None] & is_C[None, :]
    do_HC = tl.load(do_ptr + row_H1 * C + column_C, mask=is_HC, other=0.0)
    q_HC = tl.load(q_ptr + row_H1 * C + column_C, mask=is_HC, other=0.0)
    q_HP = tl.load(
        q_rope_ptr + (position * H + head_H)[:, None] * P + column_P, mask=is_H[:, None] & is_P[None, :], other=0.0
    )
    log_H = tl.load(log_sums_ptr + position * H + head_H, mask=is_H, other=0.0) * 1.4426950408889634
    row = position // positions
    latent_ptr += row * positions * C
    rope_ptr += row * positions * P
    keys_ptr += position * K
    mass_ptr += tl.program_id(0).to(tl.int64) * K
    p_ptr += local * H * K
    ds_ptr += local * H * K
    tile_HK = head_H[:, None] * K + slot_K[None, :]
    factor = scale * 1.4426950408889634
    key_K = tl.load(keys_ptr + slot_K, mask=slot_K < count, other=0)
    for first in tl.range(0, count, BLOCK_K, num_stages=STAGES):
        k_KC = tl.load(latent_ptr + key_K[:, None] * C + column_C[None, :], mask=is_C[None, :], other=0.0)
        k_KP = tl.load(rope_ptr + key_K[:, None] * P + column_P[None, :], mask=is_P[None, :], other=0.0)
        after_K = first + BLOCK_K + slot_K
        key_K = tl.load(keys_ptr + after_K, mask=after_K < count, other=0)
        s_HK = tl.dot(q_HP, tl.trans(k_KP), input_precision="ieee")
        s_HK = tl.dot(q_HC, tl.trans(k_KC), s_HK, input_precision="ieee")
        dp_HK = tl.dot(do_HC, tl.trans(k_KC), input_precision="ieee")
        is_HK = is_H[:, None] & (first + slot_K < count)[None, :]
        p_HK = tl.where(is_HK, tl.exp2(s_HK * factor - log_H[:, None]), 0.0)
        tl.store(mass_ptr + first + slot_K, tl.sum(p_HK, 0), mask=first + slot_K < K)
        ds_HK = p_HK * (dp_HK - delta_H[:, None]) * scale
        is_tile = is_H[:, None] & (first + slot_K < K)[None, :]
        tl.store(p_ptr + tile_HK + first, p_HK.to(dtype), mask=is_tile)
        tl.store(ds_ptr + tile_HK + first, ds_HK.to(dtype), mask=is_tile)


@triton.jit
def sparse_query_backward_kernel(
    ds_ptr, latent_ptr, keys_ptr, firsts_ptr, dq_ptr, place_step, head_step, positions, first_place,
    H: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some columns of the gradients of some heads of a query: ds k. The steps are those of rows of C columns of dq."""
    local, first_column, head_H = _part(H, C, BLOCK_H, BLOCK_C)
    position = local + first_place
    count = _seen(firsts_ptr, position, positions, K)
    written = (count + 15) // 16 * 16  # with zeros at the end; a multiple, so that rows are copied 16 bytes at a time
    column_C, slot_K = first_column + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    is_C, is_H = column_C < C, head_H < H
    latent_ptr += position // positions * positions * C
    keys_ptr += position * K
    ds_ptr += local * H * K
    tile_HK = head_H[:, None] * K + slot_K[None, :]
    dq_HC = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    key_K = tl.load(keys_ptr + slot_K, mask=slot_K < count, other=0)
    for first in tl.range(0, count, BLOCK_K, num_stages=STAGES):
        k_KC = tl.load(latent_ptr + key_K[:, None] * C + column_C[None, :], mask=is_C[None, :], other=0.0)
        is_tile = is_H[:, None] & ((first + slot_K < written) & (first + slot_K < K))[None, :]
        ds_HK = tl.load(ds_ptr + tile_HK + first, mask=is_tile, other=0.0)
        after_K = first + BLOCK_K + slot_K
        key_K = tl.load(keys_ptr + after_K, mask=after_K < count, other=0)
        dq_HC = tl.dot(ds_HK, k_KC, dq_HC, input_precision="ieee")
    dq_ptrs = dq_ptr + (position * place_step + head_H.to(tl.int64) * head_step)[:, None] * C + column_C
    tl.store(dq_ptrs, dq_HC.to(dq_ptr.dtype.element_ty), mask=is_H[:, None] & is_C[None, :])


@triton.jit
def sparse_key_backward_kernel(
    q_ptr, do_ptr, keys_ptr, firsts_ptr, p_ptr, ds_ptr, dk_ptr, place_step, head_step, positions, first_place,
    H: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some columns of gradients of a query's keys, over some heads: ds^T q, and p^T do where columns are values."""
    local, first_column, head_H = _part(H, C, BLOCK_H, BLOCK_C)
    position = local + first_place
    count = _seen(firsts_ptr, position, positions, K)
    written = (count + 15) // 16 * 16  # with zeros at the end; a multiple, so that rows are copied 16 bytes at a time
    column_C, slot_K = first_column + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    is_C, is_H = column_C < C, head_H < H
    is_HC = is_H[:, None] & is_C[None, :]
    row_H1 = (position * place_step + head_H.to(tl.int64) * head_step)[:, None]
    q_HC = tl.load(q_ptr + row_H1 * C + column_C, mask=is_HC, other=0.0)
    if do_ptr is not None:
        do_HC = tl.load(do_ptr + row_H1 * C + column_C, mask=is_HC, other=0.0)
    dk_ptr += position // positions * positions * C
    keys_ptr += position * K
    p_ptr += local * H * K
    ds_ptr += local * H * K
    tile_HK = head_H[:, None] * K + slot_K[None, :]
    for first in tl.range(0, count, BLOCK_K, num_stages=STAGES):
        inside_K = first + slot_K < count
        is_tile = is_H[:, None] & ((first + slot_K < written) & (first + slot_K < K))[None, :]
        ds_HK = tl.load(ds_ptr + tile_HK + first, mask=is_tile, other=0.0)
        dk_KC = tl.dot(tl.trans(ds_HK), q_HC, input_precision="ieee")
        if do_ptr is not None:
            p_HK = tl.load(p_ptr + tile_HK + first, mask=is_tile, other=0.0)
            dk_KC = tl.dot(tl.trans(p_HK), do_HC, dk_KC, input_precision="ieee")
        key_K = tl.load(keys_ptr + first + slot_K, mask=inside_K, other=0)
        tl.atomic_add(
            dk_ptr + key_K[:, None] * C + column_C[None, :], dk_KC, mask=inside_K[:, None] & is_C[None, :],
            sem="relaxed",
        )  # fmt: skip


@triton.jit
def index_scores_kernel(
    q_ptr, k_ptr, weights_ptr, firsts_ptr, scores_ptr, positions, first_query, queries, keys,
    G: tl.constexpr, N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scores of QUERIES queries from `first_query` on, for BLOCKS blocks of keys: rows x `queries` x `keys`.

    Those of blocks that no query of the program sees are not written.
    """
    row = tl.program_id(2).to(tl.int64)
    local_Q = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    is_Q = local_Q < queries
    column_N, slot_K = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    place_R = tl.arange(0, QUERIES * BLOCK_G)  # queries and their heads
    query_R, head_R = tl.program_id(0) * QUERIES + place_R // BLOCK_G, place_R % BLOCK_G
    is_R = (query_R < queries) & (head_R < G)
    number_R = (row * positions + first_query + query_R) * G + head_R
    q_RN = tl.load(q_ptr + number_R[:, None] * N + column_N, mask=is_R[:, None] & (column_N < N)[None, :], other=0.0)
    weight_R = tl.load(weights_ptr + number_R, mask=is_R, other=0.0)
    first_Q = tl.load(firsts_ptr + row * positions + first_query + local_Q, mask=is_Q, other=positions)
    k_ptr += row * positions * N
    scores_ptr += row * queries * keys
    begin = tl.maximum(tl.program_id(1) * BLOCKS, tl.min(first_Q, 0) // BLOCK_K)
    last = first_query + tl.minimum((tl.program_id(0) + 1) * QUERIES, queries) - 1
    for block in tl.range(begin, tl.minimum((tl.program_id(1) + 1) * BLOCKS, last // BLOCK_K + 1), num_stages=STAGES):
        key_K = block * BLOCK_K + slot_K
        is_KN = (key_K < keys)[:, None] & (column_N < N)[None, :]
        k_KN = tl.load(k_ptr + key_K[:, None] * N + column_N, mask=is_KN, other=0.0)
        s_KR = tl.dot(k_KN, tl.trans(q_RN), input_precision="ieee")
        s_KR = tl.maximum(s_KR, 0.0) * weight_R[None, :]
        score_KQ = tl.sum(tl.reshape(s_KR, (BLOCK_K, QUERIES, BLOCK_G)), 2)
        score_ptrs = scores_ptr + local_Q[None, :].to(tl.int64) * keys + key_K[:, None]
        tl.store(score_ptrs, score_KQ, mask=is_Q[None, :] & (key_K < keys)[:, None])


@triton.jit
def _ordered(score):
    """Integers in the order of float32 numbers: those of negative ones have all bits but the sign inverted."""
    # One that is not a number would be above infinity, where the search has no integer left, or below all others.
    score = tl.where(score == score, score, -3.4028234663852886e38)
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _middle(low, high):
    """The integer below the mean, `low` if they are neighbours; their sum may not fit into 32 bits."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def choose_keys_kernel(
    scores_ptr, firsts_ptr, keys_ptr, positions, first_query, queries, keys,
    K: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Numbers of the K best keys of a query in ascending order, or of all that it sees; -1 after the last one.

    The K-th highest score is found by halving an interval of integers in the order of scores, and counting those above
    its middle: the first BLOCK keys in registers, the others, PART at a time, in memory. Of equal scores the first
    keys are chosen. Scores [3, 1, 3, 2, 3] and K = 2 choose keys 0 and 2.
    """
    row, local = tl.program_id(1).to(tl.int64), tl.program_id(0)
    query = first_query + local
    first = tl.load(firsts_ptr + row * positions + query)
    count = query - first + 1
    scores_ptr += (row * queries + local) * keys + first
    keys_ptr += (row * positions + query) * K
    slot_P = tl.arange(0, PART)
    if count <= K:
        for start in range(0, K, PART):
            number_P = tl.where(start + slot_P < count, first + start + slot_P, -1)
            tl.store(keys_ptr + start + slot_P, number_P, mask=start + slot_P < K)
    else:
        slot_B = tl.arange(0, BLOCK)
        held_B = _ordered(tl.load(scores_ptr + slot_B, mask=slot_B < count, other=float("-inf")))
        high = tl.max(held_B, 0)
        for start in range(BLOCK, count, PART):
            score_P = tl.load(scores_ptr + start + slot_P, mask=start + slot_P < count, other=float("-inf"))
            high = tl.maximum(high, tl.max(_ordered(score_P), 0))
        # At least K are low or above, fewer than K are high or above.
        low, high = tl.full([], -2139095040, tl.int32), high + 1  # low is next to that of -inf
        at_low, at_high = count, tl.full([], 0, tl.int32)
        middle = _middle(low, high)
        while (middle != low) & (at_low != K):
            at_middle = tl.sum((held_B >= middle).to(tl.int32), 0)
            for start in range(BLOCK, count, PART):
                score_P = tl.load(scores_ptr + start + slot_P, mask=start + slot_P < count, other=float("-inf"))
                at_middle += tl.sum((_ordered(score_P) >= middle).to(tl.int32), 0)
            is_low = at_middle >= K
            low, high = tl.where(is_low, middle, low), tl.where(is_low, high, middle)
            at_low, at_high = tl.where(is_low, at_middle, at_low), tl.where(is_low, at_high, at_middle)
            middle = _middle(low, high)
        equals = tl.where(at_low == K, count, K - at_high)  # how many of those equal to low are chosen
        before, equals_before = 0, 0
        for start in range(0, count, PART):
            score_P = tl.load(scores_ptr + start + slot_P, mask=start + slot_P < count, other=float("-inf"))
            number_P = _ordered(score_P)
            is_equal_P = (number_P == low).to(tl.int32)
            is_best_P = (number_P > low) | ((is_equal_P > 0) & (equals_before + tl.cumsum(is_equal_P, 0) <= equals))
            place_P = before + tl.cumsum(is_best_P.to(tl.int32), 0) - 1
            tl.store(keys_ptr + place_P, first + start + slot_P, mask=is_best_P)
            before += tl.sum(is_best_P.to(tl.int32), 0)
            equals_before += tl.sum(is_equal_P, 0)


@triton.jit
def index_backward_kernel(
    q_ptr, k_ptr, weights_ptr, keys_ptr, firsts_ptr, mass_ptr, scores_ptr, dq_ptr, dk_ptr, dweights_ptr, positions,
    first_place, factor,
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of `factor` times the divergence of a query; those of keys are added in float32.

    `mass` has PARTS rows of a query x K, whose sum is the attention of all heads; `scores` is memory for each query's.
    With chosen scores [0, 0] and a mass of [3, 1] of 4 heads the gradients of the scores are [-1/4, 1/4].
    """
    local = tl.program_id(0).to(tl.int64)
    position = local + first_place
    count = tl.minimum(K, position % positions - tl.load(firsts_ptr + position) + 1).to(tl.int32)
    column_N, slot_K, head_G = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_G)
    is_N, is_G = column_N < N, head_G < G
    is_GN = is_G[:, None] & is_N[None, :]
    q_GN = tl.load(q_ptr + (position * G + head_G)[:, None] * N + column_N, mask=is_GN, other=0.0)
    weight_G = tl.load(weights_ptr + position * G + head_G, mask=is_G, other=0.0)
    k_ptr += position // positions * positions * N
    dk_ptr += position // positions * positions * N
    keys_ptr += position * K
    mass_ptr += local * PARTS * K
    scores_ptr += local * K
    most_K = tl.full([BLOCK_K], float("-inf"), tl.float32)
    whole_K = tl.zeros([BLOCK_K], tl.float32)
    key_K = tl.load(keys_ptr + slot_K, mask=slot_K < count, other=0)
    for first in tl.range(0, count, BLOCK_K, num_stages=STAGES):
        k_KN = tl.load(k_ptr + key_K[:, None] * N + column_N, mask=is_N[None, :], other=0.0)
        after_K = first + BLOCK_K + slot_K
        key_K = tl.load(keys_ptr + after_K, mask=after_K < count, other=0)
        s_GK = tl.maximum(tl.dot(q_GN, tl.trans(k_KN), input_precision="ieee"), 0.0)
        inside_K = first + slot_K < count
        score_K = tl.where(inside_K, tl.sum(s_GK * weight_G[:, None], 0), float("-inf"))
        tl.store(scores_ptr + first + slot_K, score_K, mask=inside_K)
        most_K = tl.maximum(most_K, score_K)
        for part in tl.static_range(PARTS):
            whole_K += tl.load(mass_ptr + part * K + first + slot_K, mask=inside_K, other=0.0)
    peak, whole = tl.max(most_K, 0), tl.sum(whole_K, 0)
    tl.debug_barrier()  # scores are read by other threads
    sum_K = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, count, BLOCK_K):
        score_K = tl.load(scores_ptr + first + slot_K, mask=first + slot_K < count, other=float("-inf"))
        sum_K += tl.exp(score_K - peak)
    log_sum = peak + tl.log(tl.sum(sum_K, 0))
    dq_GN = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    dweight_G = tl.zeros([BLOCK_G], tl.float32)
    key_K = tl.load(keys_ptr + slot_K, mask=slot_K < count, other=0)
    for first in tl.range(0, count, BLOCK_K, num_stages=STAGES):
        inside_K = first + slot_K < count
        k_KN = tl.load(k_ptr + key_K[:, None] * N + column_N, mask=is_N[None, :], other=0.0)
        dk_ptrs = dk_ptr + key_K[:, None] * N + column_N
        after_K = first + BLOCK_K + slot_K
        key_K = tl.load(keys_ptr + after_K, mask=after_K < count, other=0)
        mass_K = tl.zeros([BLOCK_K], tl.float32)
        for part in tl.static_range(PARTS):
            mass_K += tl.load(mass_ptr + part * K + first + slot_K, mask=inside_K, other=0.0)
        score_K = tl.load(scores_ptr + first + slot_K, mask=inside_K, other=float("-inf"))
        ds_K = factor * (tl.exp(score_K - log_sum) - mass_K / whole)
        s_GK = tl.dot(q_GN, tl.trans(k_KN), input_precision="ieee")
        dweight_G += tl.sum(tl.maximum(s_GK, 0.0) * ds_K[None, :], 1)
        ds_GK = tl.where(s_GK > 0.0, ds_K[None, :] * weight_G[:, None], 0.0)
        dq_GN = tl.dot(ds_GK.to(q_GN.dtype), k_KN, dq_GN, input_precision="ieee")
        dk_KN = tl.dot(tl.trans(ds_GK.to(q_GN.dtype)), q_GN, input_precision="ieee")
        tl.atomic_add(dk_ptrs, dk_KN, mask=inside_K[:, None] & is_N[None, :], sem="relaxed")
    dq_ptrs = dq_ptr + (position * G + head_G)[:, None] * N + column_N
    tl.store(dq_ptrs, dq_GN.to(dq_ptr.dtype.element_ty), mask=is_GN)
    tl.store(dweights_ptr + position * G + head_G, dweight_G, mask=is_G)
