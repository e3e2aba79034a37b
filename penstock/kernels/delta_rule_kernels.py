"""The kernels of `penstock.kernels.delta_rule`, whose formulas and names they have.

    delta_system_kernel          per chunk: c, the decays from and to the chunk's borders, T = (1 + A)^-1, u and w
    delta_state_kernel           chunk after chunk: the state before each chunk, and the written values d = u - w S
    delta_output_kernel          per chunk: o
    delta_local_backward_kernel  per chunk: gradients of d through o
    delta_state_backward_kernel  last chunk first: gradients of d in full, and of the state behind each chunk
    delta_read_backward_kernel   per chunk: gradients through o and through the next state
    delta_write_backward_kernel  per chunk: gradients through the triangular system

A program has one value head. Positions past the end of a row have keys, values and beta of 0 and decay nothing.
Documents matter in decays only: those between positions, `carried` from the state before the chunk to a position, and
`kept` from a position to the end of the chunk are 0 across documents. Decays of positions multiply the narrower side of
a product, or its result. The state kernels serve decays of single features too (`channel_delta_rule_kernels`).
"""

from penstock.kernels.language import tl, triton


@triton.jit
def chunk_documents(documents_ptr, row, first, positions, J: tl.constexpr):
    """Of the chunk that begins at `first`: the document of each position, that before the chunk, and the last one."""
    document_J = tl.zeros([J], tl.int64)
    before = tl.full([], 0, tl.int64)
    last = tl.full([], 0, tl.int64)
    if documents_ptr is not None:
        documents_ptr += row.to(tl.int64) * positions
        document_J = tl.load(documents_ptr + tl.minimum(first + tl.arange(0, J), positions - 1))
        before = tl.load(documents_ptr + tl.maximum(first - 1, 0))
        last = tl.load(documents_ptr + tl.minimum(first + J, positions) - 1)
    return document_J, before, last


@triton.jit
def rows_at(ptr, heads: tl.constexpr, head, row, first, positions, J: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers (offsets if `ptr` is 0) to a head's row at each position, J x 1; tensors are B x S x heads x WIDTH."""
    start = (row.to(tl.int64) * positions + first) * heads + head
    return ptr + start * WIDTH + tl.arange(0, J)[:, None] * (heads * WIDTH)


@triton.jit
def numbers_at(ptr, heads: tl.constexpr, head, row, first, positions, J: tl.constexpr):
    """Pointers to a head's number at each position; tensors are B x S x heads."""
    return ptr + (row.to(tl.int64) * positions + first) * heads + head + tl.arange(0, J) * heads


@triton.jit
def state_at(ptr, chunks, heads, row, chunk, head, N: tl.constexpr, M: tl.constexpr):
    """Pointer to a state; tensors are B x I x heads x N x M."""
    return ptr + ((row.to(tl.int64) * chunks + chunk) * heads + head) * (N * M)


@triton.jit
def carried_over(
    carried_ptr, BY_CHANNEL: tl.constexpr, heads: tl.constexpr, head, row, chunk, chunks, positions, N: tl.constexpr,
    J: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The decay of a state over a chunk: that of the chunk's last position, or a column with one for each feature."""
    if BY_CHANNEL:
        column_N = tl.arange(0, BLOCK_N)
        start = ((row.to(tl.int64) * chunks + chunk) * heads + head) * N
        carried = tl.load(carried_ptr + start + column_N, mask=column_N < N, other=0.0)[:, None]
    else:
        end = tl.minimum((chunk + 1) * J, positions) - 1
        carried = tl.load(carried_ptr + (row.to(tl.int64) * positions + end) * heads + head)
    return carried


@triton.jit
def decays(c_J, document_J, J: tl.constexpr, STRICT: tl.constexpr):
    """exp(c_i - c_j) for positions j before i (or at it, unless STRICT) of one document, else 0: J x J."""
    place_J = tl.arange(0, J)
    is_pair = (place_J[:, None] > place_J[None, :]) if STRICT else (place_J[:, None] >= place_J[None, :])
    is_pair = is_pair & (document_J[:, None] == document_J[None, :])
    return tl.where(is_pair, tl.exp(tl.where(is_pair, c_J[:, None] - c_J[None, :], 0.0)), 0.0)


@triton.jit
def dot(a, b, DTYPE: tl.constexpr):
    """A product whose operands are rounded to the dtype of the tensors, with sums in float32."""
    return tl.dot(a.to(DTYPE), b.to(DTYPE), input_precision="ieee")


@triton.jit
def inverse(a_JJ, J: tl.constexpr, SIDE: tl.constexpr):
    """(1 + A)^-1 of an A below the diagonal: row by row in blocks of SIDE, and blocks are joined in pairs.

    Row i of a block's inverse is -A[i] (1 + rows before it). With a lower left block B between two blocks of inverses S
    and T, that of both has -T B S there.
    """
    place_J = tl.arange(0, J)
    BLOCKS: tl.constexpr = J // SIDE
    block_Q, place_P = tl.arange(0, BLOCKS), tl.arange(0, SIDE)
    is_own = block_Q[:, None, None, None] == block_Q[None, None, :, None]
    own_QPP = tl.sum(tl.where(is_own, tl.reshape(a_JJ, [BLOCKS, SIDE, BLOCKS, SIDE]), 0.0), 2)
    t_QPP = tl.where(place_P[:, None] == place_P[None, :], 1.0, 0.0)[None] + tl.zeros_like(own_QPP)
    for i in range(1, SIDE):  # all blocks at once
        is_row_P1 = (place_P == i)[None, :, None]
        row_QP = tl.sum(tl.where(is_row_P1, own_QPP, 0.0), 1)
        solved_QP = tl.sum(t_QPP * row_QP[:, :, None], 1)
        t_QPP -= tl.where(is_row_P1, solved_QP[:, None, :], 0.0)
    t_JJ = tl.reshape(tl.where(is_own, t_QPP[:, :, None, :], 0.0), [J, J])
    for level in tl.static_range(8):
        if (SIDE << level) < J:
            block_J = place_J // (SIDE << level)
            is_left_JJ = (block_J[:, None] == block_J[None, :] + 1) & (block_J[:, None] % 2 == 1)
            # TF32 has more bits than the dtype to which the result is rounded; AMD multiplies float32.
            t_JJ -= tl.dot(t_JJ, tl.dot(tl.where(is_left_JJ, a_JJ, 0.0), t_JJ))
    return t_JJ


@triton.jit
def delta_system_kernel(
    k_ptr, v_ptr, g_ptr, beta_ptr, documents_ptr, c_ptr, carried_ptr, kept_ptr, t_ptr, u_ptr, w_ptr, positions,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """One chunk of a head.

    Example: two equal keys of length 1 with beta 1 and no decay have A = [[0, 0], [1, 0]] and T = [[1, 0], [-1, 1]].
    """
    first, head, row = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    inside_J = first + tl.arange(0, J) < positions
    document_J, before, last = chunk_documents(documents_ptr, row, first, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    column_N = tl.arange(0, BLOCK_N)
    is_key = inside_J[:, None] & (column_N < N)[None, :]
    k_ptrs = rows_at(k_ptr, G, head // (H // G), row, first, positions, J, N) + column_N
    k_JN = tl.load(k_ptrs, mask=is_key, other=0.0)
    beta_J = tl.load(numbers_at(beta_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    g_J = tl.load(numbers_at(g_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    c_J, c_last = tl.cumsum(g_J, 0), tl.sum(g_J, 0)
    carried_J = tl.where(document_J == before, tl.exp(c_J), 0.0)
    kept_J = tl.where(document_J == last, tl.exp(tl.minimum(c_last - c_J, 0.0)), 0.0)  # sums differ in rounding
    tl.store(numbers_at(c_ptr, H, head, row, first, positions, J), c_J, mask=inside_J)
    tl.store(numbers_at(carried_ptr, H, head, row, first, positions, J), carried_J, mask=inside_J)
    tl.store(numbers_at(kept_ptr, H, head, row, first, positions, J), kept_J, mask=inside_J)

    a_JJ = dot(k_JN, tl.trans(k_JN), dtype) * decays(c_J, document_J, J, True) * beta_J[:, None]
    t_JJ = inverse(a_JJ, J, SIDE)
    t_ptrs = rows_at(t_ptr, H, head, row, first, positions, J, J) + tl.arange(0, J)
    tl.store(t_ptrs, t_JJ.to(t_ptr.dtype.element_ty), mask=inside_J[:, None])

    w_JN = dot(t_JJ * (beta_J * carried_J)[None, :], k_JN, dtype)
    tl.store(rows_at(w_ptr, H, head, row, first, positions, J, N) + column_N, w_JN.to(dtype), mask=is_key)
    t_JJ *= beta_J[None, :]
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        v_JM = tl.load(rows_at(v_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
        u_ptrs = rows_at(u_ptr, H, head, row, first, positions, J, M) + column_M
        tl.store(u_ptrs, dot(t_JJ, v_JM, dtype).to(dtype), mask=is_value)


@triton.jit
def delta_state_kernel(
    k_ptr, carried_ptr, kept_ptr, u_ptr, w_ptr, states_ptr, d_ptr, positions, chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Some value features of a head, over all chunks of a row. Example: with w = 0 the written values are u.

    Without `kept`, keys have the decay of each feature to the end of their chunk, and `carried` is that of the whole
    chunk, B x I x H x N.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    column_N, column_M = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_state = (column_N < N)[:, None] & (column_M < M)[None, :]
    place_NM = column_N[:, None] * M + column_M[None, :]
    state_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in range(chunks):
        first = chunk * J
        inside_J = first + tl.arange(0, J) < positions
        is_key = inside_J[:, None] & (column_N < N)[None, :]
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        rounded_NM = state_NM.to(dtype)
        tl.store(state_at(states_ptr, chunks, H, row, chunk, head, N, M) + place_NM, rounded_NM, mask=is_state)
        w_JN = tl.load(rows_at(w_ptr, H, head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        u_JM = tl.load(rows_at(u_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
        k_ptrs = rows_at(k_ptr, G, head // (H // G), row, first, positions, J, N) + column_N
        k_JN = tl.load(k_ptrs, mask=is_key, other=0.0)
        if kept_ptr is not None:
            kept_J = tl.load(numbers_at(kept_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
        state_NM *= carried_over(carried_ptr, kept_ptr is None, H, head, row, chunk, chunks, positions, N, J, BLOCK_N)
        d_JM = u_JM.to(tl.float32) - dot(w_JN, rounded_NM, dtype)
        tl.store(rows_at(d_ptr, H, head, row, first, positions, J, M) + column_M, d_JM.to(dtype), mask=is_value)
        if kept_ptr is not None:
            d_JM *= kept_J[:, None]
        state_NM += dot(tl.trans(k_JN), d_JM, dtype)


@triton.jit
def delta_output_kernel(
    q_ptr, k_ptr, c_ptr, carried_ptr, d_ptr, documents_ptr, states_ptr, o_ptr, positions, chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One chunk of a head. Example: with a state of zeros and one position, o = (q k) d."""
    first, head, row = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    inside_J = first + tl.arange(0, J) < positions
    document_J, _, _ = chunk_documents(documents_ptr, row, first, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    column_N, key_head = tl.arange(0, BLOCK_N), head // (H // G)
    is_key = inside_J[:, None] & (column_N < N)[None, :]
    q_JN = tl.load(rows_at(q_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
    k_JN = tl.load(rows_at(k_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
    c_J = tl.load(numbers_at(c_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    carried_J = tl.load(numbers_at(carried_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    p_JJ = (dot(q_JN, tl.trans(k_JN), dtype) * decays(c_J, document_J, J, False)).to(dtype)
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        is_state = (column_N < N)[:, None] & (column_M < M)[None, :]
        state_ptrs = state_at(states_ptr, chunks, H, row, tl.program_id(0), head, N, M)
        state_NM = tl.load(state_ptrs + column_N[:, None] * M + column_M[None, :], mask=is_state, other=0.0)
        d_JM = tl.load(rows_at(d_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
        o_JM = dot(q_JN, state_NM, dtype) * carried_J[:, None] + dot(p_JJ, d_JM, dtype)
        tl.store(rows_at(o_ptr, H, head, row, first, positions, J, M) + column_M, o_JM.to(dtype), mask=is_value)


@triton.jit
def delta_local_backward_kernel(
    q_ptr, k_ptr, c_ptr, documents_ptr, do_ptr, dd_ptr, positions,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One chunk of a head: gradients of written values through the outputs of their own chunk."""
    first, head, row = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    inside_J = first + tl.arange(0, J) < positions
    document_J, _, _ = chunk_documents(documents_ptr, row, first, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    column_N, key_head = tl.arange(0, BLOCK_N), head // (H // G)
    is_key = inside_J[:, None] & (column_N < N)[None, :]
    q_JN = tl.load(rows_at(q_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
    k_JN = tl.load(rows_at(k_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
    c_J = tl.load(numbers_at(c_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    p_JJ = (dot(q_JN, tl.trans(k_JN), dtype) * decays(c_J, document_J, J, False)).to(dtype)
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        do_JM = tl.load(rows_at(do_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
        dd_ptrs = rows_at(dd_ptr, H, head, row, first, positions, J, M) + column_M
        tl.store(dd_ptrs, dot(tl.trans(p_JJ), do_JM, dtype).to(dtype), mask=is_value)


@triton.jit
def delta_state_backward_kernel(
    q_ptr, k_ptr, carried_ptr, kept_ptr, w_ptr, do_ptr, dstates_ptr, dd_ptr, positions, chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Some value features of a head, from the last chunk of a row to the first.

    Gradients of written values through the state behind their chunk are added in place. Without `kept`, queries too
    have their decays, from the start of the chunk.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    column_N, column_M = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_state = (column_N < N)[:, None] & (column_M < M)[None, :]
    place_NM, key_head = column_N[:, None] * M + column_M[None, :], head // (H // G)
    dstate_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(chunks):
        chunk = chunks - 1 - step
        first = chunk * J
        inside_J = first + tl.arange(0, J) < positions
        is_key = inside_J[:, None] & (column_N < N)[None, :]
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        rounded_NM = dstate_NM.to(dtype)
        tl.store(state_at(dstates_ptr, chunks, H, row, chunk, head, N, M) + place_NM, rounded_NM, mask=is_state)
        k_JN = tl.load(rows_at(k_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        q_JN = tl.load(rows_at(q_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        w_JN = tl.load(rows_at(w_ptr, H, head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        do_JM = tl.load(rows_at(do_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
        if kept_ptr is not None:
            carried_ptrs = numbers_at(carried_ptr, H, head, row, first, positions, J)
            kept_ptrs = numbers_at(kept_ptr, H, head, row, first, positions, J)
            carried_J = tl.load(carried_ptrs, mask=inside_J, other=0.0)
            kept_J = tl.load(kept_ptrs, mask=inside_J, other=0.0)
        dstate_NM *= carried_over(carried_ptr, kept_ptr is None, H, head, row, chunk, chunks, positions, N, J, BLOCK_N)
        dd_ptrs = rows_at(dd_ptr, H, head, row, first, positions, J, M) + column_M
        local_JM = tl.load(dd_ptrs, mask=is_value, other=0.0)
        dd_JM = dot(k_JN, rounded_NM, dtype)
        if kept_ptr is not None:
            dd_JM *= kept_J[:, None]
            do_JM = do_JM * carried_J[:, None]
        dd_JM += local_JM
        tl.store(dd_ptrs, dd_JM.to(dtype), mask=is_value)
        dstate_NM += dot(tl.trans(q_JN), do_JM, dtype)
        dstate_NM -= dot(tl.trans(w_JN), dd_JM, dtype)


@triton.jit
def delta_read_backward_kernel(
    q_ptr, k_ptr, c_ptr, carried_ptr, kept_ptr, documents_ptr, states_ptr, d_ptr, do_ptr, dstates_ptr, dd_ptr, dq_ptr,
    dk_ptr, dw_ptr, dc_ptr, positions, chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One chunk of a head: dq, dw, and parts of dk and dc: those through o and through the state behind the chunk."""
    first, head, row = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    place_J, key_head = tl.arange(0, J), head // (H // G)
    inside_J = first + place_J < positions
    document_J, _, _ = chunk_documents(documents_ptr, row, first, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    is_end_J = first + place_J == tl.minimum(first + J, positions) - 1
    c_J = tl.load(numbers_at(c_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    carried_J = tl.load(numbers_at(carried_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    kept_J = tl.load(numbers_at(kept_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    dp_JJ = tl.zeros([J, J], tl.float32)
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        do_JM = tl.load(rows_at(do_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
        d_JM = tl.load(rows_at(d_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
        dp_JJ += dot(do_JM, tl.trans(d_JM), dtype)
    dscores_JJ = (dp_JJ * decays(c_J, document_J, J, False)).to(dtype)  # of the products of queries and keys
    dc_J = tl.zeros([J], tl.float32)
    dlast_J = tl.zeros([J], tl.float32)  # its sum is the gradient of the decay of the whole chunk
    factor = tl.sum(tl.where(is_end_J, carried_J, 0.0), 0)
    for start_N in range(0, N, BLOCK_N):
        column_N = start_N + tl.arange(0, BLOCK_N)
        is_key = inside_J[:, None] & (column_N < N)[None, :]
        dq_JN = tl.zeros([J, BLOCK_N], tl.float32)
        dk_JN = tl.zeros([J, BLOCK_N], tl.float32)
        dw_JN = tl.zeros([J, BLOCK_N], tl.float32)
        dkept_N = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, M, BLOCK_M):
            column_M = start + tl.arange(0, BLOCK_M)
            is_value = inside_J[:, None] & (column_M < M)[None, :]
            is_state = (column_N < N)[:, None] & (column_M < M)[None, :]
            place_NM = column_N[:, None] * M + column_M[None, :]
            state_ptrs = state_at(states_ptr, chunks, H, row, tl.program_id(0), head, N, M) + place_NM
            dstate_ptrs = state_at(dstates_ptr, chunks, H, row, tl.program_id(0), head, N, M) + place_NM
            state_NM = tl.load(state_ptrs, mask=is_state, other=0.0)
            dstate_NM = tl.load(dstate_ptrs, mask=is_state, other=0.0)
            do_JM = tl.load(rows_at(do_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
            d_JM = tl.load(rows_at(d_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
            dd_JM = tl.load(rows_at(dd_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
            dq_JN += dot(do_JM, tl.trans(state_NM), dtype)
            dk_JN += dot(d_JM, tl.trans(dstate_NM), dtype)
            dw_JN += dot(dd_JM, tl.trans(state_NM), dtype)
            dkept_N += tl.sum(state_NM.to(tl.float32) * dstate_NM.to(tl.float32), 1)
        tl.store(rows_at(dw_ptr, H, head, row, first, positions, J, N) + column_N, (-dw_JN).to(dtype), mask=is_key)
        q_JN = tl.load(rows_at(q_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        k_JN = tl.load(rows_at(k_ptr, G, key_head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        dk_JN *= kept_J[:, None]
        dlast_J += tl.sum(dk_JN * k_JN, 1) + tl.where(is_end_J, tl.sum(dkept_N, 0) * factor, 0.0)
        dq_JN = dq_JN * carried_J[:, None] + dot(dscores_JJ, k_JN, dtype)
        dk_JN += dot(tl.trans(dscores_JJ), q_JN, dtype)
        # A decay multiplies a query's products and divides a key's.
        dc_J += tl.sum(dq_JN * q_JN, 1) - tl.sum(dk_JN * k_JN, 1)
        tl.store(rows_at(dq_ptr, H, head, row, first, positions, J, N) + column_N, dq_JN.to(dtype), mask=is_key)
        tl.store(rows_at(dk_ptr, H, head, row, first, positions, J, N) + column_N, dk_JN.to(dtype), mask=is_key)
    dc_J += tl.where(is_end_J, tl.sum(dlast_J, 0), 0.0)
    tl.store(numbers_at(dc_ptr, H, head, row, first, positions, J), dc_J, mask=inside_J)


@triton.jit
def delta_write_backward_kernel(
    k_ptr, v_ptr, beta_ptr, c_ptr, carried_ptr, t_ptr, documents_ptr, dd_ptr, dw_ptr, dk_ptr, dc_ptr, dv_ptr, dg_ptr,
    dbeta_ptr, positions,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One chunk of a head: dv, dbeta, dg, and dk added in place. y = T x has dx = T^T dy, dA = -T^T (dy x^T) T^T."""
    first, head, row = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    place_J = tl.arange(0, J)
    inside_J = first + place_J < positions
    document_J, _, _ = chunk_documents(documents_ptr, row, first, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    beta_J = tl.load(numbers_at(beta_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    carried_J = tl.load(numbers_at(carried_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    t_ptrs = rows_at(t_ptr, H, head, row, first, positions, J, J) + place_J
    t_JJ = tl.load(t_ptrs, mask=inside_J[:, None], other=0.0)
    dt_JJ = tl.zeros([J, J], tl.float32)
    dbeta_J = tl.zeros([J], tl.float32)
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        dd_JM = tl.load(rows_at(dd_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
        v_JM = tl.load(rows_at(v_ptr, H, head, row, first, positions, J, M) + column_M, mask=is_value, other=0.0)
        dt_JJ += dot(dd_JM, tl.trans(v_JM), dtype)
        dweighted_JM = dot(tl.trans(t_JJ), dd_JM, dtype)
        dbeta_J += tl.sum(dweighted_JM * v_JM, 1)
        dv_ptrs = rows_at(dv_ptr, H, head, row, first, positions, J, M) + column_M
        tl.store(dv_ptrs, (dweighted_JM * beta_J[:, None]).to(dtype), mask=is_value)
    for start in range(0, N, BLOCK_N):
        column_N = start + tl.arange(0, BLOCK_N)
        is_key = inside_J[:, None] & (column_N < N)[None, :]
        k_ptrs = rows_at(k_ptr, G, head // (H // G), row, first, positions, J, N) + column_N
        k_JN = tl.load(k_ptrs, mask=is_key, other=0.0)
        dw_JN = tl.load(rows_at(dw_ptr, H, head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        dt_JJ += dot(dw_JN, tl.trans(k_JN * carried_J[:, None]), dtype)
    da_JJ = -dot(dot(tl.trans(t_JJ), dt_JJ * beta_J[None, :], dtype), tl.trans(t_JJ), dtype)
    c_J = tl.load(numbers_at(c_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    da_JJ = (da_JJ * decays(c_J, document_J, J, True)).to(dtype)
    of_beta_J = tl.zeros([J], tl.float32)
    dc_J = tl.load(numbers_at(dc_ptr, H, head, row, first, positions, J), mask=inside_J, other=0.0)
    for start in range(0, N, BLOCK_N):
        column_N = start + tl.arange(0, BLOCK_N)
        is_key = inside_J[:, None] & (column_N < N)[None, :]
        k_ptrs = rows_at(k_ptr, G, head // (H // G), row, first, positions, J, N) + column_N
        k_JN = tl.load(k_ptrs, mask=is_key, other=0.0)
        dw_JN = tl.load(rows_at(dw_ptr, H, head, row, first, positions, J, N) + column_N, mask=is_key, other=0.0)
        # Of the key times beta, as the side of A and of w that beta multiplies.
        dkeys_JN = dot(tl.trans(t_JJ), dw_JN, dtype) * carried_J[:, None] + dot(da_JJ, k_JN, dtype)
        of_beta_J += tl.sum(dkeys_JN * k_JN, 1)
        dk_JN = dot(tl.trans(da_JJ), k_JN * beta_J[:, None], dtype)
        dc_J -= tl.sum(dk_JN * k_JN, 1)
        dk_ptrs = rows_at(dk_ptr, H, head, row, first, positions, J, N) + column_N
        dk_JN += dkeys_JN * beta_J[:, None] + tl.load(dk_ptrs, mask=is_key, other=0.0)
        tl.store(dk_ptrs, dk_JN.to(dtype), mask=is_key)
    dc_J += of_beta_J * beta_J
    # c is the sum of g up to a position, so dg is the sum of dc from there on.
    dg_J = tl.sum(dc_J, 0) - tl.cumsum(dc_J, 0) + dc_J
    tl.store(numbers_at(dg_ptr, H, head, row, first, positions, J), dg_J, mask=inside_J)
    tl.store(numbers_at(dbeta_ptr, H, head, row, first, positions, J), dbeta_J + of_beta_J, mask=inside_J)
