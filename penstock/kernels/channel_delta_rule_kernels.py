"""Kernels of the delta rule with a decay for each key feature; formulas and names are those of `delta_rule`.

    channel_pairs_kernel           per chunk: P, A, and queries and keys with their decays from and to the borders
    channel_system_kernel          per chunk: T = (1 + A)^-1, u and w
    delta_state_kernel             chunk after chunk, with keys that have their decays
    channel_output_kernel          per chunk: o = exp(c) q S + P d, where P are products of queries and keys
    channel_local_backward_kernel  per chunk: gradients of P, and of d through P
    delta_state_backward_kernel    last chunk first, with queries and keys that have their decays
    channel_write_backward_kernel  per chunk: gradients of values, A and w
    channel_query_backward_kernel  per chunk: gradients of queries and of written keys
    channel_key_backward_kernel    per chunk: gradients of keys and decays

A decay between two positions, exp(c_i - c_j), is no factor of their product: each feature has its own. So a pair meets
in the middle. A query decays from the middle of a block to its own position, and a key from its position to there. For
a query before the middle or a key behind it that is the inverse of a decay, which may overflow. Three ways follow, and
each program takes the first that it can for some features at a time:

    the whole chunk is a block        if no feature decays to less than 2^-60 (float16: 2^-8) from middle to end
    blocks of 16, and levels 4 and 5  if none does in such a block
    levels 0 to 5                     otherwise

At level l a chunk is cut into blocks of 2^(l+1) positions, of which only pairs of a query in the right half and a key
in the left half count, so that both factors are at most 1. One product of the whole chunk, of which the pairs between
blocks are thrown away, has all pairs of a level, or of all blocks. Each pair of different positions belongs to one
level. Example with four positions: level 1 has pairs (2, 0), (2, 1), (3, 0), (3, 1), level 0 has (1, 0) and (3, 2).

Logarithms of decays, to the base 2, are sums of g over neighbouring positions, and never differences of sums, which
would lose bits. A product of a table of zeros and ones with g gives those of all positions where matrix units leave
their results.
"""

from penstock.kernels.delta_rule_kernels import chunk_documents, dot, inverse, numbers_at, rows_at, state_at
from penstock.kernels.language import tl, triton

NEAR = tl.constexpr(3)  # the level of blocks of 16 positions
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _table(tables_ptr, number, J: tl.constexpr):
    """One of several J x J tables of zeros and ones."""
    place_J = tl.arange(0, J)
    return tl.load(tables_ptr + number * (J * J) + place_J[:, None] * J + place_J[None, :])


@triton.jit
def _transposed(tables_ptr, number, J: tl.constexpr):
    """The same, transposed, in the layout of gradients that are loaded so."""
    place_J = tl.arange(0, J)
    return tl.load(tables_ptr + number * (J * J) + place_J[:, None] + place_J[None, :] * J)


@triton.jit
def _sums_over(marks_JJ, rounded_JN):
    """For each position, the sum of g over the positions that its row marks."""
    return tl.dot(marks_JJ, rounded_JN, input_precision="ieee")


@triton.jit
def _are_bounded(sums_JN, DTYPE: tl.constexpr):
    """Whether powers of 2 of these sums and of their opposites are precise, and products of two of them finite."""
    return tl.min(sums_JN) > (-8.0 if tl.float16 == DTYPE else -60.0)


@triton.jit
def _near(rounded_JN, marks_ptr, LEVELS: tl.constexpr, J: tl.constexpr, DTYPE: tl.constexpr):
    """The level of the largest blocks of which one product has all pairs, which is that of the chunk or NEAR.

    Then c of each position minus c of the middle of its block, and whether they are bounded.
    """
    level = tl.full([], LEVELS - 1, tl.int32)
    sums_JN = _sums_over(_table(marks_ptr, LEVELS - 1, J), rounded_JN)
    are_bounded = _are_bounded(sums_JN, DTYPE)
    if are_bounded == 0:
        level += NEAR - (LEVELS - 1)
        sums_JN = _sums_over(_table(marks_ptr, NEAR, J), rounded_JN)
        are_bounded = _are_bounded(sums_JN, DTYPE)
    is_left_J = (tl.arange(0, J) >> level) % 2 == 0
    return level, tl.where(is_left_J[:, None], -sums_JN, sums_JN), are_bounded


@triton.jit
def _pairs_at(level, J: tl.constexpr):
    """Pairs of positions in different halves of one block of a level, J x J."""
    half_J = tl.arange(0, J) >> level
    return (half_J ^ 1)[:, None] == half_J[None, :]


@triton.jit
def _pairs_near(level, J: tl.constexpr):
    """Pairs of positions in one block of a level, J x J."""
    block_J = tl.arange(0, J) >> (level + 1)
    return block_J[:, None] == block_J[None, :]


@triton.jit
def _products(q_JN, k_JN, from_JN, to_JN, is_pair_JJ, DTYPE: tl.constexpr):
    """Products of keys and of queries, each times its decay from the middle, with keys times theirs to it: of pairs."""
    keys_NJ = tl.trans((k_JN * to_JN).to(DTYPE))
    of_keys_JJ = tl.where(is_pair_JJ, dot(k_JN * from_JN, keys_NJ, DTYPE), 0.0)
    return of_keys_JJ, tl.where(is_pair_JJ, dot(q_JN * from_JN, keys_NJ, DTYPE), 0.0)


@triton.jit
def channel_pairs_kernel(
    q_ptr, k_ptr, g_ptr, documents_ptr, rounded_ptr, p_ptr, a_ptr, carried_q_ptr, carried_k_ptr, kept_k_ptr,
    carried_ptr, marks_ptr, positions, chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One chunk of a head: P, and A without beta. Example: a chunk of one position has P = [[q k]] and A = [[0]]."""
    first, head, row = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    place_J, key_head = tl.arange(0, J), head // (H // G)
    inside_J = first + place_J < positions
    document_J, before, last = chunk_documents(documents_ptr, row, first, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    a_JJ = tl.zeros([J, J], tl.float32)
    p_JJ = tl.zeros([J, J], tl.float32)
    own_J = tl.zeros([J], tl.float32)
    for start in tl.range(0, N, BLOCK_N, disable_licm=True):
        column_N = start + tl.arange(0, BLOCK_N)
        is_key = inside_J[:, None] & (column_N < N)[None, :]
        place_JN = rows_at(0, H, head, row, first, positions, J, N) + column_N
        q_JN = tl.load(rows_at(q_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        k_JN = tl.load(rows_at(k_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        g_JN = tl.load(g_ptr + place_JN, mask=is_key, other=0.0)
        rounded_JN = tl.maximum(g_JN * LOG2_E, -60000.0).to(rounded_ptr.dtype.element_ty)  # finite in float16
        tl.store(rounded_ptr + place_JN, rounded_JN, mask=is_key)
        carried_JN = tl.exp2(_sums_over(_table(marks_ptr, LEVELS, J), rounded_JN))
        carried_JN = tl.where((document_J == before)[:, None], carried_JN, 0.0)
        kept_JN = tl.exp2(_sums_over(_table(marks_ptr, LEVELS + 1, J), rounded_JN))
        kept_JN = tl.where((document_J == last)[:, None], kept_JN, 0.0)
        tl.store(carried_q_ptr + place_JN, (q_JN * carried_JN).to(dtype), mask=is_key)
        tl.store(carried_k_ptr + place_JN, (k_JN * carried_JN).to(dtype), mask=is_key)
        tl.store(kept_k_ptr + place_JN, (k_JN * kept_JN).to(dtype), mask=is_key)
        whole_N = tl.where(before == last, tl.exp2(tl.sum(rounded_JN.to(tl.float32), 0)), 0.0)
        whole_ptr = carried_ptr + ((row.to(tl.int64) * chunks + tl.program_id(0)) * H + head) * N
        tl.store(whole_ptr + column_N, whole_N, mask=column_N < N)
        own_J += tl.sum(q_JN.to(tl.float32) * k_JN.to(tl.float32), 1)
        near, after_JN, are_bounded = _near(rounded_JN, marks_ptr, LEVELS, J, dtype)
        if are_bounded:
            a, p = _products(q_JN, k_JN, tl.exp2(after_JN), tl.exp2(-after_JN), _pairs_near(near, J), dtype)
            a_JJ += a
            p_JJ += p
        for level in range(tl.where(are_bounded, near + 1, 0), LEVELS):
            decay_JN = tl.exp2(_sums_over(_table(marks_ptr, level, J), rounded_JN))
            a, p = _products(q_JN, k_JN, decay_JN, decay_JN, _pairs_at(level, J), dtype)
            a_JJ += a
            p_JJ += p
    is_before_JJ = (place_J[:, None] > place_J[None, :]) & (document_J[:, None] == document_J[None, :])
    own_JJ = tl.where(place_J[:, None] == place_J[None, :], own_J[:, None], 0.0)
    place_JJ = rows_at(0, H, head, row, first, positions, J, J) + place_J
    tl.store(p_ptr + place_JJ, tl.where(is_before_JJ, p_JJ, own_JJ).to(dtype), mask=inside_J[:, None])
    tl.store(a_ptr + place_JJ, tl.where(is_before_JJ, a_JJ, 0.0), mask=inside_J[:, None])


@triton.jit
def channel_system_kernel(
    w_ptr, v_ptr, a_ptr, beta_ptr, t_ptr, u_ptr, positions,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """One chunk of a head. w takes the place of keys with their decays. Example: A = 0 gives T = 1 and u = beta v."""
    first, head, row = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    inside_J = first + tl.arange(0, J) < positions
    dtype: tl.constexpr = v_ptr.dtype.element_ty
    beta_J = tl.load(numbers_at(beta_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    place_JJ = rows_at(0, H, head, row, first, positions, J, J) + tl.arange(0, J)
    a_JJ = tl.load(a_ptr + place_JJ, mask=inside_J[:, None], other=0.0)
    t_JJ = inverse(a_JJ * beta_J[:, None], J, SIDE)
    tl.store(t_ptr + place_JJ, t_JJ.to(dtype), mask=inside_J[:, None])
    t_JJ *= beta_J[None, :]
    for start in tl.range(0, N, BLOCK_N, disable_licm=True):
        column_N = start + tl.arange(0, BLOCK_N)
        is_key = inside_J[:, None] & (column_N < N)[None, :]
        w_ptrs = rows_at(w_ptr, H, head, row, first, positions, J, N) + column_N
        carried_k_JN = tl.load(w_ptrs, mask=is_key, other=0.0)
        tl.store(w_ptrs, dot(t_JJ, carried_k_JN, dtype).to(dtype), mask=is_key)
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        v_JM = tl.load(rows_at(v_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
        u_ptrs = rows_at(u_ptr, H, head, row, first, positions, J, M) + column_M
        tl.store(u_ptrs, dot(t_JJ, v_JM, dtype).to(dtype), mask=is_value)


@triton.jit
def channel_output_kernel(
    carried_q_ptr, p_ptr, d_ptr, states_ptr, o_ptr, positions, chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One chunk of a head. Example: with a state of zeros and one position, o = P d."""
    first, head, row = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    inside_J = first + tl.arange(0, J) < positions
    dtype: tl.constexpr = d_ptr.dtype.element_ty
    column_N = tl.arange(0, BLOCK_N)
    is_key = inside_J[:, None] & (column_N < N)[None, :]
    q_JN = tl.load(rows_at(carried_q_ptr, H, head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
    p_ptrs = rows_at(p_ptr, H, head, row, first, positions, J, J) + tl.arange(0, J)
    p_JJ = tl.load(p_ptrs, mask=inside_J[:, None], other=0.0)
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        is_state = (column_N < N)[:, None] & (column_M < M)[None, :]
        state_ptrs = state_at(states_ptr, chunks, H, row, tl.program_id(0), head, N, M)
        state_NM = tl.load(state_ptrs + column_N[:, None] * M + column_M[None, :], mask=is_state, other=0.0)
        d_JM = tl.load(rows_at(d_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
        o_ptrs = rows_at(o_ptr, H, head, row, first, positions, J, M) + column_M
        tl.store(o_ptrs, (dot(q_JN, state_NM, dtype) + dot(p_JJ, d_JM, dtype)).to(dtype), mask=is_value)


@triton.jit
def channel_local_backward_kernel(
    p_ptr, d_ptr, documents_ptr, do_ptr, dp_ptr, dd_ptr, positions,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One chunk of a head: gradients through P d, which are dP = do d^T, and P^T do as the first part of dd."""
    first, head, row = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    place_J = tl.arange(0, J)
    inside_J = first + place_J < positions
    document_J, _, _ = chunk_documents(documents_ptr, row, first, positions, J)
    dtype: tl.constexpr = do_ptr.dtype.element_ty
    place_JJ = rows_at(0, H, head, row, first, positions, J, J) + place_J
    p_JJ = tl.load(p_ptr + place_JJ, mask=inside_J[:, None], other=0.0)
    dp_JJ = tl.zeros([J, J], tl.float32)
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        place_JM = rows_at(0, H, head, row, first, positions, J, M) + column_M
        do_JM = tl.load(do_ptr + place_JM, mask=is_value, other=0.0)
        d_JM = tl.load(d_ptr + place_JM, mask=is_value, other=0.0)
        dp_JJ += dot(do_JM, tl.trans(d_JM), dtype)
        tl.store(dd_ptr + place_JM, dot(tl.trans(p_JJ), do_JM, dtype).to(dtype), mask=is_value)
    is_pair_JJ = (place_J[:, None] >= place_J[None, :]) & (document_J[:, None] == document_J[None, :])
    tl.store(dp_ptr + place_JJ, tl.where(is_pair_JJ, dp_JJ, 0.0).to(dtype), mask=inside_J[:, None])


@triton.jit
def channel_write_backward_kernel(
    k_ptr, v_ptr, rounded_ptr, beta_ptr, t_ptr, documents_ptr, states_ptr, dd_ptr, dwritten_ptr, da_ptr, dv_ptr,
    dbeta_ptr, marks_ptr, positions, chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One chunk of a head: dA and dv, the part of dbeta that multiplies values, and gradients of beta k through w."""
    first, head, row = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    place_J, key_head = tl.arange(0, J), head // (H // G)
    inside_J = first + place_J < positions
    document_J, before, _ = chunk_documents(documents_ptr, row, first, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    beta_J = tl.load(numbers_at(beta_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    place_JJ = rows_at(0, H, head, row, first, positions, J, J) + place_J
    t_JJ = tl.load(t_ptr + place_JJ, mask=inside_J[:, None], other=0.0)
    dt_JJ = tl.zeros([J, J], tl.float32)
    dbeta_J = tl.zeros([J], tl.float32)
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        place_JM = rows_at(0, H, head, row, first, positions, J, M) + column_M
        dd_JM = tl.load(dd_ptr + place_JM, mask=is_value, other=0.0)
        v_JM = tl.load(v_ptr + place_JM, mask=is_value, other=0.0)
        dt_JJ += dot(dd_JM, tl.trans(v_JM), dtype)
        dweighted_JM = dot(tl.trans(t_JJ), dd_JM, dtype)
        dbeta_J += tl.sum(dweighted_JM * v_JM, 1)
        tl.store(dv_ptr + place_JM, (dweighted_JM * beta_J[:, None]).to(dtype), mask=is_value)
    state_ptr = state_at(states_ptr, chunks, H, row, tl.program_id(0), head, N, M)
    for start_N in tl.range(0, N, BLOCK_N, disable_licm=True):
        column_N = start_N + tl.arange(0, BLOCK_N)
        is_key = inside_J[:, None] & (column_N < N)[None, :]
        dw_JN = tl.zeros([J, BLOCK_N], tl.float32)
        for start in range(0, M, BLOCK_M):
            column_M = start + tl.arange(0, BLOCK_M)
            is_value = inside_J[:, None] & (column_M < M)[None, :]
            is_state = (column_N < N)[:, None] & (column_M < M)[None, :]
            state_NM = tl.load(state_ptr + column_N[:, None] * M + column_M[None, :], mask=is_state, other=0.0)
            dd_JM = tl.load(rows_at(dd_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
            dw_JN -= dot(dd_JM, tl.trans(state_NM), dtype)
        place_JN = rows_at(0, H, head, row, first, positions, J, N) + column_N
        k_JN = tl.load(rows_at(k_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        rounded_JN = tl.load(rounded_ptr + place_JN, mask=is_key, other=0.0)
        carried_JN = tl.exp2(_sums_over(_table(marks_ptr, LEVELS, J), rounded_JN))
        carried_JN = tl.where((document_J == before)[:, None], carried_JN, 0.0)
        dt_JJ += dot(dw_JN, tl.trans(k_JN * carried_JN), dtype)
        dwritten_JN = dot(tl.trans(t_JJ), dw_JN, dtype) * carried_JN
        tl.store(dwritten_ptr + place_JN, dwritten_JN.to(dtype), mask=is_key)
    da_JJ = -dot(dot(tl.trans(t_JJ), dt_JJ * beta_J[None, :], dtype), tl.trans(t_JJ), dtype)
    is_before_JJ = (place_J[:, None] > place_J[None, :]) & (document_J[:, None] == document_J[None, :])
    tl.store(da_ptr + place_JJ, tl.where(is_before_JJ, da_JJ, 0.0).to(dtype), mask=inside_J[:, None])
    tl.store(numbers_at(dbeta_ptr, H, head, row, first, positions, J), dbeta_J, mask=inside_J)


@triton.jit
def channel_query_backward_kernel(
    q_ptr, k_ptr, rounded_ptr, beta_ptr, documents_ptr, states_ptr, do_ptr, dp_ptr, da_ptr, dwritten_ptr, dq_ptr,
    dc_ptr, dbeta_ptr, marks_ptr, pairs_ptr, positions, chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One chunk of a head: dq, the rest of the gradients of beta k and of dbeta, and what dc gets from these."""
    first, head, row = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    place_J, key_head = tl.arange(0, J), head // (H // G)
    inside_J = first + place_J < positions
    document_J, before, _ = chunk_documents(documents_ptr, row, first, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    beta_J = tl.load(numbers_at(beta_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    dbeta_ptrs = numbers_at(dbeta_ptr, H, head, row, first, positions, J)
    dbeta_J = tl.load(dbeta_ptrs, mask=inside_J, other=0.0)
    place_JJ = rows_at(0, H, head, row, first, positions, J, J) + place_J
    own_ptrs = dp_ptr + rows_at(0, H, head, row, first, positions, J, J) + place_J[:, None]
    own_J1 = tl.load(own_ptrs, mask=inside_J[:, None], other=0.0).to(tl.float32)
    for start_N in tl.range(0, N, BLOCK_N, disable_licm=True):
        column_N = start_N + tl.arange(0, BLOCK_N)
        is_key = inside_J[:, None] & (column_N < N)[None, :]
        place_JN = rows_at(0, H, head, row, first, positions, J, N) + column_N
        rounded_JN = tl.load(rounded_ptr + place_JN, mask=is_key, other=0.0)
        dq_JN = tl.zeros([J, BLOCK_N], tl.float32)
        for start in range(0, M, BLOCK_M):
            column_M = start + tl.arange(0, BLOCK_M)
            is_state = (column_N < N)[:, None] & (column_M < M)[None, :]
            is_value = (inside_J & (document_J == before))[:, None] & (column_M < M)[None, :]
            state_ptrs = state_at(states_ptr, chunks, H, row, tl.program_id(0), head, N, M)
            state_NM = tl.load(state_ptrs + column_N[:, None] * M + column_M[None, :], mask=is_state, other=0.0)
            do_JM = tl.load(rows_at(do_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
            dq_JN += dot(do_JM, tl.trans(state_NM), dtype)
        dq_JN *= tl.exp2(_sums_over(_table(marks_ptr, LEVELS, J), rounded_JN))
        k_JN = tl.load(rows_at(k_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        dq_JN += k_JN * own_J1
        dwritten_JN = tl.load(dwritten_ptr + place_JN, mask=is_key, other=0.0).to(tl.float32)
        near, after_JN, are_bounded = _near(rounded_JN, marks_ptr, LEVELS, J, dtype)
        if are_bounded:
            decay_JN, keys_JN = tl.exp2(after_JN), k_JN * tl.exp2(-after_JN)
            pairs_JJ = _table(pairs_ptr, LEVELS + near, J)
            dp_JJ = tl.load(dp_ptr + place_JJ, mask=inside_J[:, None], other=0.0)
            dq_JN += dot(dp_JJ * pairs_JJ, keys_JN, dtype) * decay_JN
            da_JJ = tl.load(da_ptr + place_JJ, mask=inside_J[:, None], other=0.0)
            dwritten_JN += dot(da_JJ * pairs_JJ, keys_JN, dtype) * decay_JN
        for level in range(tl.where(are_bounded, near + 1, 0), LEVELS):
            decay_JN = tl.exp2(_sums_over(_table(marks_ptr, level, J), rounded_JN))
            keys_JN, pairs_JJ = k_JN * decay_JN, _table(pairs_ptr, level, J)
            dp_JJ = tl.load(dp_ptr + place_JJ, mask=inside_J[:, None], other=0.0)
            dq_JN += dot(dp_JJ * pairs_JJ, keys_JN, dtype) * decay_JN
            da_JJ = tl.load(da_ptr + place_JJ, mask=inside_J[:, None], other=0.0)
            dwritten_JN += dot(da_JJ * pairs_JJ, keys_JN, dtype) * decay_JN
        dbeta_J += tl.sum(dwritten_JN * k_JN, 1)
        dwritten_JN *= beta_J[:, None]
        tl.store(dq_ptr + place_JN, dq_JN.to(dtype), mask=is_key)
        tl.store(dwritten_ptr + place_JN, dwritten_JN.to(dtype), mask=is_key)
        # A decay multiplies products of queries and written keys, and divides those of keys that are read.
        q_JN = tl.load(rows_at(q_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        tl.store(dc_ptr + place_JN, q_JN * dq_JN + k_JN * dwritten_JN, mask=is_key)
    tl.store(dbeta_ptrs, dbeta_J, mask=inside_J)


@triton.jit
def channel_key_backward_kernel(
    q_ptr, k_ptr, rounded_ptr, beta_ptr, documents_ptr, states_ptr, d_ptr, dstates_ptr, dp_ptr, da_ptr, dwritten_ptr,
    carried_ptr, dk_ptr, dc_ptr, marks_ptr, pairs_ptr, positions, chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One chunk of a head: dk, and dg in the place of dc."""
    first, head, row = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    place_J, key_head = tl.arange(0, J), head // (H // G)
    inside_J = first + place_J < positions
    document_J, _, last = chunk_documents(documents_ptr, row, first, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    beta_J = tl.load(numbers_at(beta_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    place_JJ = tl.trans(rows_at(0, H, head, row, first, positions, J, J) + place_J)
    own_ptrs = dp_ptr + rows_at(0, H, head, row, first, positions, J, J) + place_J[:, None]
    own_J1 = tl.load(own_ptrs, mask=inside_J[:, None], other=0.0).to(tl.float32)
    for start_N in tl.range(0, N, BLOCK_N, disable_licm=True):
        column_N = start_N + tl.arange(0, BLOCK_N)
        is_key = inside_J[:, None] & (column_N < N)[None, :]
        place_JN = rows_at(0, H, head, row, first, positions, J, N) + column_N
        rounded_JN = tl.load(rounded_ptr + place_JN, mask=is_key, other=0.0)
        dk_JN = tl.zeros([J, BLOCK_N], tl.float32)
        dlast_N = tl.zeros([BLOCK_N], tl.float32)  # of the decay of the whole chunk
        for start in range(0, M, BLOCK_M):
            column_M = start + tl.arange(0, BLOCK_M)
            is_state = (column_N < N)[:, None] & (column_M < M)[None, :]
            is_value = (inside_J & (document_J == last))[:, None] & (column_M < M)[None, :]
            place_NM = column_N[:, None] * M + column_M[None, :]
            state_ptrs = state_at(states_ptr, chunks, H, row, tl.program_id(0), head, N, M) + place_NM
            dstate_ptrs = state_at(dstates_ptr, chunks, H, row, tl.program_id(0), head, N, M) + place_NM
            state_NM = tl.load(state_ptrs, mask=is_state, other=0.0)
            dstate_NM = tl.load(dstate_ptrs, mask=is_state, other=0.0)
            d_JM = tl.load(rows_at(d_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
            dk_JN += dot(d_JM, tl.trans(dstate_NM), dtype)
            dlast_N += tl.sum(state_NM.to(tl.float32) * dstate_NM.to(tl.float32), 1)
        dk_JN *= tl.exp2(_sums_over(_table(marks_ptr, LEVELS + 1, J), rounded_JN))
        q_JN = tl.load(rows_at(q_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        k_JN = tl.load(rows_at(k_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        carried_ptrs = carried_ptr + ((row.to(tl.int64) * chunks + tl.program_id(0)) * H + head) * N + column_N
        dlast_N *= tl.load(carried_ptrs, mask=column_N < N, other=0.0)
        dlast_N += tl.sum(k_JN * dk_JN, 0)
        dk_JN += q_JN * own_J1
        near, after_JN, are_bounded = _near(rounded_JN, marks_ptr, LEVELS, J, dtype)
        if are_bounded:
            decay_JN, pairs_JJ = tl.exp2(after_JN), _transposed(pairs_ptr, LEVELS + near, J)
            dp_JJ = tl.load(dp_ptr + place_JJ, mask=inside_J[None, :], other=0.0)
            found_JN = dot(dp_JJ * pairs_JJ, q_JN * decay_JN, dtype)
            da_JJ = tl.load(da_ptr + place_JJ, mask=inside_J[None, :], other=0.0)
            found_JN += dot(da_JJ * pairs_JJ, k_JN * (decay_JN * beta_J[:, None]), dtype)
            dk_JN += found_JN * tl.exp2(-after_JN)
        for level in range(tl.where(are_bounded, near + 1, 0), LEVELS):
            decay_JN = tl.exp2(_sums_over(_table(marks_ptr, level, J), rounded_JN))
            pairs_JJ = _transposed(pairs_ptr, level, J)
            dp_JJ = tl.load(dp_ptr + place_JJ, mask=inside_J[None, :], other=0.0)
            found_JN = dot(dp_JJ * pairs_JJ, q_JN * decay_JN, dtype)
            da_JJ = tl.load(da_ptr + place_JJ, mask=inside_J[None, :], other=0.0)
            found_JN += dot(da_JJ * pairs_JJ, k_JN * (decay_JN * beta_J[:, None]), dtype)
            dk_JN += found_JN * decay_JN
        dwritten_JN = tl.load(dwritten_ptr + place_JN, mask=is_key, other=0.0)
        tl.store(dk_ptr + place_JN, (dk_JN + dwritten_JN).to(dtype), mask=is_key)
        dc_JN = tl.load(dc_ptr + place_JN, mask=is_key, other=0.0) - k_JN * dk_JN
        # c is the sum of g up to a position, so dg is the sum of dc from there on: two products have the bits of one
        # with operands twice as wide.
        upper_JN, since_JJ = dc_JN.to(dtype), _table(pairs_ptr, 2 * LEVELS, J)
        dg_JN = dot(since_JJ, upper_JN, dtype) + dot(since_JJ, dc_JN - upper_JN, dtype) + dlast_N[None, :]
        tl.store(dc_ptr + place_JN, dg_JN, mask=is_key)
