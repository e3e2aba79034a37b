"""The kernels of `penstock.kernels.sparse_attention_launches`.

    sparse_forward_kernel         per query, some heads: o and logsumexp over the gathered rows of the latent
    sparse_score_backward_kernel  per query, some heads: probabilities and gradients of scores, which are written
    sparse_query_backward_kernel  per query, some columns: gradients of the query
    sparse_key_backward_kernel    per query, some columns: gradients of the gathered rows, added to those of all queries

All heads of a query read the same rows: C columns of the latent, which are the values too, and P rotary ones. A query
at position s of a document that starts at position d has min(K, s - d + 1) keys, which come first among its K numbers.
A place is row * S + position. Queries and outputs in columns of the latent are heads x places x C, as batched products
give them; the others have heads after places.
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
