"""The kernels of `penstock.kernels.delta_rule_launches`; formulas and names are those of `penstock.kernels.delta_rule`.

    delta_system_kernel          per chunk: c, T = (1 + A)^-1, u and w
    delta_state_kernel           chunk after chunk: the state before each chunk, and the written values d = u - w S
    delta_output_kernel          per chunk: o
    delta_local_backward_kernel  per chunk: gradients of d through o
    delta_state_backward_kernel  last chunk first: gradients of d in full, and of the state behind each chunk
    delta_read_backward_kernel   per chunk: gradients through o and through the next state
    delta_write_backward_kernel  per chunk: gradients through the triangular system

A program has one value head. Positions past the end of a row have keys, values and beta of 0 and decay nothing.
"""

from penstock.kernels.language import tl, triton


@triton.jit
def _place(documents_ptr, positions, J: tl.constexpr):
    """Of this program's chunk: positions, whether they exist, their documents, that before, and the last one."""
    row, chunk = tl.program_id(2), tl.program_id(0)
    return _place_of(documents_ptr, row, chunk, positions, J)


@triton.jit
def _place_of(documents_ptr, row, chunk, positions, J: tl.constexpr):
    position_J = chunk * J + tl.arange(0, J)
    document_J = tl.zeros([J], tl.int64)
    before = tl.full([], 0, tl.int64)
    last = tl.full([], 0, tl.int64)
    if documents_ptr is not None:
        documents_ptr += row.to(tl.int64) * positions
        document_J = tl.load(documents_ptr + tl.minimum(position_J, positions - 1))
        before = tl.load(documents_ptr + tl.maximum(chunk * J - 1, 0))
        last = tl.load(documents_ptr + tl.minimum(chunk * J + J, positions) - 1)
    return position_J, position_J < positions, document_J, before, last


@triton.jit
def _rows(ptr, heads, head, row, position_J, positions, WIDTH: tl.constexpr):
    """Pointers to the first element of a head at each position, J x 1; tensors are B x S x heads x WIDTH."""
    place_J = (row.to(tl.int64) * positions + position_J) * heads + head
    return ptr + place_J[:, None] * WIDTH


@triton.jit
def _numbers(ptr, heads, head, row, position_J, positions):
    """Pointers to a head's number at each position; tensors are B x S x heads."""
    return ptr + (row.to(tl.int64) * positions + position_J) * heads + head


@triton.jit
def _state(ptr, chunks, heads, row, chunk, head, N: tl.constexpr, M: tl.constexpr):
    """Pointer to a state; tensors are B x I x heads x N x M."""
    return ptr + ((row.to(tl.int64) * chunks + chunk) * heads + head) * (N * M)


@triton.jit
def _decays(c_J, document_J, J: tl.constexpr, STRICT: tl.constexpr):
    """exp(c_i - c_j) for positions j before i (or at it, unless STRICT) of one document, else 0: J x J."""
    place_J = tl.arange(0, J)
    is_pair = (place_J[:, None] > place_J[None, :]) if STRICT else (place_J[:, None] >= place_J[None, :])
    is_pair = is_pair & (document_J[:, None] == document_J[None, :])
    return tl.where(is_pair, tl.exp(tl.where(is_pair, c_J[:, None] - c_J[None, :], 0.0)), 0.0)


@triton.jit
def _carried(c_J, document_J, before):
    """Decay of the state before the chunk at each position; 0 where another document has begun."""
    return tl.where(document_J == before, tl.exp(c_J), 0.0)


@triton.jit
def _kept(c_J, c_last, document_J, last):
    """Decay from each position to the end of the chunk; 0 for positions of earlier documents."""
    return tl.where(document_J == last, tl.exp(c_last - c_J), 0.0)


@triton.jit
def _dot(a, b, DTYPE: tl.constexpr):
    """A product whose operands are rounded to the dtype of the tensors, with sums in float32."""
    return tl.dot(a.to(DTYPE), b.to(DTYPE), input_precision="ieee")


@triton.jit
def delta_system_kernel(
    k_ptr, v_ptr, g_ptr, beta_ptr, documents_ptr, c_ptr, t_ptr, u_ptr, w_ptr, positions,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One chunk of a head: the triangular system is inverted row by row in blocks, and blocks are joined in pairs.

    Row i of a block's inverse is -A[i] (1 + rows before it). With a lower left block B between two blocks of inverses S
    and T, that of both has -T B S there. Example: two equal keys of length 1 with beta 1 and no decay have
    A = [[0, 0], [1, 0]] and T = [[1, 0], [-1, 1]].
    """
    head, row = tl.program_id(1), tl.program_id(2)
    position_J, inside_J, document_J, before, _ = _place(documents_ptr, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    column_N, place_J = tl.arange(0, BLOCK_N), tl.arange(0, J)
    is_key = inside_J[:, None] & (column_N < N)[None, :]
    k_JN = tl.load(_rows(k_ptr, G, head // (H // G), row, position_J, positions, N) + column_N, mask=is_key, other=0.0)
    beta_J = tl.load(_numbers(beta_ptr, H, head, row, position_J, positions), mask=inside_J, other=0.0)
    g_J = tl.load(_numbers(g_ptr, H, head, row, position_J, positions), mask=inside_J, other=0.0)
    c_J = tl.cumsum(g_J, 0)
    tl.store(_numbers(c_ptr, H, head, row, position_J, positions), c_J, mask=inside_J)

    a_JJ = _dot(k_JN, tl.trans(k_JN), dtype) * _decays(c_J, document_J, J, True) * beta_J[:, None]
    t_JJ = tl.where(place_J[:, None] == place_J[None, :], 1.0, 0.0)
    SIDE: tl.constexpr = 8  # of a block; all of them are inverted at once
    is_block_JJ = place_J[:, None] // SIDE == place_J[None, :] // SIDE
    own_JJ = tl.where(is_block_JJ, a_JJ, 0.0)
    for i in range(1, SIDE):
        is_row_J = place_J % SIDE == i
        row_J = tl.sum(tl.where(is_row_J[:, None], own_JJ, 0.0), 0)  # a column has one block
        solved_J = tl.sum(t_JJ * row_J[:, None], 0)
        t_JJ -= tl.where(is_row_J[:, None] & is_block_JJ, solved_J[None, :], 0.0)
    for level in tl.static_range(8):
        if (SIDE << level) < J:
            block_J = place_J // (SIDE << level)
            is_left_JJ = (block_J[:, None] == block_J[None, :] + 1) & (block_J[:, None] % 2 == 1)
            # TF32 has more bits than the dtype to which the result is rounded; AMD multiplies float32.
            t_JJ -= tl.dot(t_JJ, tl.dot(tl.where(is_left_JJ, a_JJ, 0.0), t_JJ))
    t_ptrs = _rows(t_ptr, H, head, row, position_J, positions, J) + place_J[None, :]
    tl.store(t_ptrs, t_JJ.to(t_ptr.dtype.element_ty), mask=inside_J[:, None])

    w_JN = _dot(t_JJ, k_JN * (beta_J * _carried(c_J, document_J, before))[:, None], dtype)
    tl.store(_rows(w_ptr, H, head, row, position_J, positions, N) + column_N, w_JN.to(dtype), mask=is_key)
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        v_JM = tl.load(_rows(v_ptr, H, head, row, position_J, positions, M) + column_M, mask=is_value, other=0.0)
        u_JM = _dot(t_JJ, v_JM * beta_J[:, None], dtype)
        tl.store(_rows(u_ptr, H, head, row, position_J, positions, M) + column_M, u_JM.to(dtype), mask=is_value)


@triton.jit
def delta_state_kernel(
    k_ptr, c_ptr, u_ptr, w_ptr, documents_ptr, states_ptr, d_ptr, positions, chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Some value features of a head, over all chunks of a row. Example: with w = 0 the written values are u."""
    head, row = tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    column_N, column_M = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_state = (column_N < N)[:, None] & (column_M < M)[None, :]
    state_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in range(chunks):
        position_J, inside_J, document_J, before, last = _place_of(documents_ptr, row, chunk, positions, J)
        is_key = inside_J[:, None] & (column_N < N)[None, :]
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        state_ptrs = _state(states_ptr, chunks, H, row, chunk, head, N, M) + column_N[:, None] * M + column_M[None, :]
        tl.store(state_ptrs, state_NM.to(dtype), mask=is_state)
        key = _rows(k_ptr, G, head // (H // G), row, position_J, positions, N)
        k_JN = tl.load(key + column_N, mask=is_key, other=0.0)
        w_JN = tl.load(_rows(w_ptr, H, head, row, position_J, positions, N) + column_N, mask=is_key, other=0.0)
        u_JM = tl.load(_rows(u_ptr, H, head, row, position_J, positions, M) + column_M, mask=is_value, other=0.0)
        c_J = tl.load(_numbers(c_ptr, H, head, row, position_J, positions), mask=inside_J, other=0.0)
        c_last = tl.sum(tl.where(position_J == tl.minimum(chunk * J + J, positions) - 1, c_J, 0.0), 0)
        d_JM = u_JM.to(tl.float32) - _dot(w_JN, state_NM, dtype)
        tl.store(_rows(d_ptr, H, head, row, position_J, positions, M) + column_M, d_JM.to(dtype), mask=is_value)
        left_JN = k_JN * _kept(c_J, c_last, document_J, last)[:, None]
        state_NM = state_NM * tl.where(before == last, tl.exp(c_last), 0.0) + _dot(tl.trans(left_JN), d_JM, dtype)


@triton.jit
def delta_output_kernel(
    q_ptr, k_ptr, c_ptr, d_ptr, documents_ptr, states_ptr, o_ptr, positions, chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One chunk of a head. Example: with a state of zeros and one position, o = (q k) d."""
    head, row = tl.program_id(1), tl.program_id(2)
    position_J, inside_J, document_J, before, _ = _place(documents_ptr, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    column_N = tl.arange(0, BLOCK_N)
    is_key = inside_J[:, None] & (column_N < N)[None, :]
    key_head = head // (H // G)
    q_JN = tl.load(_rows(q_ptr, G, key_head, row, position_J, positions, N) + column_N, mask=is_key, other=0.0)
    k_JN = tl.load(_rows(k_ptr, G, key_head, row, position_J, positions, N) + column_N, mask=is_key, other=0.0)
    c_J = tl.load(_numbers(c_ptr, H, head, row, position_J, positions), mask=inside_J, other=0.0)
    p_JJ = _dot(q_JN, tl.trans(k_JN), dtype) * _decays(c_J, document_J, J, False)
    carried_JN = q_JN * _carried(c_J, document_J, before)[:, None]
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        is_state = (column_N < N)[:, None] & (column_M < M)[None, :]
        state_ptrs = _state(states_ptr, chunks, H, row, tl.program_id(0), head, N, M)
        state_NM = tl.load(state_ptrs + column_N[:, None] * M + column_M[None, :], mask=is_state, other=0.0)
        d_JM = tl.load(_rows(d_ptr, H, head, row, position_J, positions, M) + column_M, mask=is_value, other=0.0)
        o_JM = _dot(carried_JN, state_NM, dtype) + _dot(p_JJ, d_JM, dtype)
        tl.store(_rows(o_ptr, H, head, row, position_J, positions, M) + column_M, o_JM.to(dtype), mask=is_value)


@triton.jit
def delta_local_backward_kernel(
    q_ptr, k_ptr, c_ptr, documents_ptr, do_ptr, dd_ptr, positions,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One chunk of a head: gradients of written values through the outputs of their own chunk."""
    head, row = tl.program_id(1), tl.program_id(2)
    position_J, inside_J, document_J, _, _ = _place(documents_ptr, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    column_N = tl.arange(0, BLOCK_N)
    is_key = inside_J[:, None] & (column_N < N)[None, :]
    key_head = head // (H // G)
    q_JN = tl.load(_rows(q_ptr, G, key_head, row, position_J, positions, N) + column_N, mask=is_key, other=0.0)
    k_JN = tl.load(_rows(k_ptr, G, key_head, row, position_J, positions, N) + column_N, mask=is_key, other=0.0)
    c_J = tl.load(_numbers(c_ptr, H, head, row, position_J, positions), mask=inside_J, other=0.0)
    p_JJ = _dot(q_JN, tl.trans(k_JN), dtype) * _decays(c_J, document_J, J, False)
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        do_JM = tl.load(_rows(do_ptr, H, head, row, position_J, positions, M) + column_M, mask=is_value, other=0.0)
        dd_JM = _dot(tl.trans(p_JJ), do_JM, dtype)
        tl.store(_rows(dd_ptr, H, head, row, position_J, positions, M) + column_M, dd_JM.to(dtype), mask=is_value)


@triton.jit
def delta_state_backward_kernel(
    q_ptr, k_ptr, c_ptr, w_ptr, documents_ptr, do_ptr, dstates_ptr, dd_ptr, positions, chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Some value features of a head, from the last chunk of a row to the first.

    Gradients of written values through the state behind their chunk are added in place.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    column_N, column_M = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_state = (column_N < N)[:, None] & (column_M < M)[None, :]
    key_head = head // (H // G)
    dstate_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(chunks):
        chunk = chunks - 1 - step
        position_J, inside_J, document_J, before, last = _place_of(documents_ptr, row, chunk, positions, J)
        is_key = inside_J[:, None] & (column_N < N)[None, :]
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        dstate_ptrs = _state(dstates_ptr, chunks, H, row, chunk, head, N, M)
        tl.store(dstate_ptrs + column_N[:, None] * M + column_M[None, :], dstate_NM.to(dtype), mask=is_state)
        q_JN = tl.load(_rows(q_ptr, G, key_head, row, position_J, positions, N) + column_N, mask=is_key, other=0.0)
        k_JN = tl.load(_rows(k_ptr, G, key_head, row, position_J, positions, N) + column_N, mask=is_key, other=0.0)
        w_JN = tl.load(_rows(w_ptr, H, head, row, position_J, positions, N) + column_N, mask=is_key, other=0.0)
        do_JM = tl.load(_rows(do_ptr, H, head, row, position_J, positions, M) + column_M, mask=is_value, other=0.0)
        c_J = tl.load(_numbers(c_ptr, H, head, row, position_J, positions), mask=inside_J, other=0.0)
        c_last = tl.sum(tl.where(position_J == tl.minimum(chunk * J + J, positions) - 1, c_J, 0.0), 0)
        left_JN = k_JN * _kept(c_J, c_last, document_J, last)[:, None]
        dd_ptrs = _rows(dd_ptr, H, head, row, position_J, positions, M) + column_M
        dd_JM = tl.load(dd_ptrs, mask=is_value, other=0.0).to(tl.float32) + _dot(left_JN, dstate_NM, dtype)
        tl.store(dd_ptrs, dd_JM.to(dtype), mask=is_value)
        dstate_NM *= tl.where(before == last, tl.exp(c_last), 0.0)
        dstate_NM += _dot(tl.trans(q_JN * _carried(c_J, document_J, before)[:, None]), do_JM, dtype)
        dstate_NM -= _dot(tl.trans(w_JN), dd_JM, dtype)


@triton.jit
def delta_read_backward_kernel(
    q_ptr, k_ptr, c_ptr, d_ptr, documents_ptr, states_ptr, do_ptr, dstates_ptr, dq_ptr, dk_ptr, dc_ptr, positions,
    chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One chunk of a head: dq, and parts of dk and dc: those through o and through the state behind the chunk."""
    head, row = tl.program_id(1), tl.program_id(2)
    position_J, inside_J, document_J, before, last = _place(documents_ptr, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    column_N = tl.arange(0, BLOCK_N)
    is_key = inside_J[:, None] & (column_N < N)[None, :]
    key_head = head // (H // G)
    c_J = tl.load(_numbers(c_ptr, H, head, row, position_J, positions), mask=inside_J, other=0.0)
    is_last_J = position_J == tl.minimum(tl.program_id(0) * J + J, positions) - 1
    c_last = tl.sum(tl.where(is_last_J, c_J, 0.0), 0)
    dp_JJ = tl.zeros([J, J], tl.float32)
    dread_JN = tl.zeros([J, BLOCK_N], tl.float32)  # of the query times its decay
    dleft_JN = tl.zeros([J, BLOCK_N], tl.float32)  # of the key times its decay
    dkept = 0.0  # of the factor on the state
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        is_state = (column_N < N)[:, None] & (column_M < M)[None, :]
        place_NM = column_N[:, None] * M + column_M[None, :]
        state_ptrs = _state(states_ptr, chunks, H, row, tl.program_id(0), head, N, M) + place_NM
        dstate_ptrs = _state(dstates_ptr, chunks, H, row, tl.program_id(0), head, N, M) + place_NM
        state_NM = tl.load(state_ptrs, mask=is_state, other=0.0)
        dstate_NM = tl.load(dstate_ptrs, mask=is_state, other=0.0)
        do_JM = tl.load(_rows(do_ptr, H, head, row, position_J, positions, M) + column_M, mask=is_value, other=0.0)
        d_JM = tl.load(_rows(d_ptr, H, head, row, position_J, positions, M) + column_M, mask=is_value, other=0.0)
        dp_JJ += _dot(do_JM, tl.trans(d_JM), dtype)
        dread_JN += _dot(do_JM, tl.trans(state_NM), dtype)
        dleft_JN += _dot(d_JM, tl.trans(dstate_NM), dtype)
        dkept += tl.sum(tl.sum(state_NM.to(tl.float32) * dstate_NM.to(tl.float32), 1), 0)
    q_JN = tl.load(_rows(q_ptr, G, key_head, row, position_J, positions, N) + column_N, mask=is_key, other=0.0)
    k_JN = tl.load(_rows(k_ptr, G, key_head, row, position_J, positions, N) + column_N, mask=is_key, other=0.0)
    decays_JJ = _decays(c_J, document_J, J, False)
    dscores_JJ = dp_JJ * decays_JJ
    dread_JN *= _carried(c_J, document_J, before)[:, None]
    dleft_JN *= _kept(c_J, c_last, document_J, last)[:, None]
    left_J = tl.sum(dleft_JN * k_JN, 1)
    pairs_JJ = dscores_JJ * _dot(q_JN, tl.trans(k_JN), dtype)
    dc_J = tl.sum(pairs_JJ, 1) - tl.sum(pairs_JJ, 0) + tl.sum(dread_JN * q_JN, 1) - left_J
    dlast = tl.sum(left_J, 0) + dkept * tl.where(before == last, tl.exp(c_last), 0.0)
    dc_J += tl.where(is_last_J, dlast, 0.0)
    dq_JN = dread_JN + _dot(dscores_JJ, k_JN, dtype)
    dk_JN = dleft_JN + _dot(tl.trans(dscores_JJ), q_JN, dtype)
    tl.store(_rows(dq_ptr, H, head, row, position_J, positions, N) + column_N, dq_JN.to(dtype), mask=is_key)
    tl.store(_rows(dk_ptr, H, head, row, position_J, positions, N) + column_N, dk_JN, mask=is_key)
    tl.store(_numbers(dc_ptr, H, head, row, position_J, positions), dc_J, mask=inside_J)


@triton.jit
def delta_write_backward_kernel(
    k_ptr, v_ptr, beta_ptr, c_ptr, t_ptr, documents_ptr, states_ptr, dd_ptr, dk_ptr, dc_ptr, dv_ptr, dg_ptr, dbeta_ptr,
    positions, chunks,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One chunk of a head: dv, dbeta and dg, and the rest of dk, which is added in place.

    With y = T x the gradients are dx = T^T dy and dA = -T^T (dy x^T) T^T below the diagonal.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    position_J, inside_J, document_J, before, _ = _place(documents_ptr, positions, J)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    column_N, place_J = tl.arange(0, BLOCK_N), tl.arange(0, J)
    is_key = inside_J[:, None] & (column_N < N)[None, :]
    c_J = tl.load(_numbers(c_ptr, H, head, row, position_J, positions), mask=inside_J, other=0.0)
    beta_J = tl.load(_numbers(beta_ptr, H, head, row, position_J, positions), mask=inside_J, other=0.0)
    t_ptrs = _rows(t_ptr, H, head, row, position_J, positions, J) + place_J[None, :]
    t_JJ = tl.load(t_ptrs, mask=inside_J[:, None], other=0.0)
    dw_JN = tl.zeros([J, BLOCK_N], tl.float32)
    dt_JJ = tl.zeros([J, J], tl.float32)
    dbeta_J = tl.zeros([J], tl.float32)
    for start in range(0, M, BLOCK_M):
        column_M = start + tl.arange(0, BLOCK_M)
        is_value = inside_J[:, None] & (column_M < M)[None, :]
        is_state = (column_N < N)[:, None] & (column_M < M)[None, :]
        state_ptrs = _state(states_ptr, chunks, H, row, tl.program_id(0), head, N, M)
        state_NM = tl.load(state_ptrs + column_N[:, None] * M + column_M[None, :], mask=is_state, other=0.0)
        dd_JM = tl.load(_rows(dd_ptr, H, head, row, position_J, positions, M) + column_M, mask=is_value, other=0.0)
        v_JM = tl.load(_rows(v_ptr, H, head, row, position_J, positions, M) + column_M, mask=is_value, other=0.0)
        dw_JN -= _dot(dd_JM, tl.trans(state_NM), dtype)
        dt_JJ += _dot(dd_JM, tl.trans(v_JM * beta_J[:, None]), dtype)
        dweighted_JM = _dot(tl.trans(t_JJ), dd_JM, dtype)
        dbeta_J += tl.sum(dweighted_JM * v_JM, 1)
        dv_JM = dweighted_JM * beta_J[:, None]
        tl.store(_rows(dv_ptr, H, head, row, position_J, positions, M) + column_M, dv_JM.to(dtype), mask=is_value)
    key = _rows(k_ptr, G, head // (H // G), row, position_J, positions, N)
    k_JN = tl.load(key + column_N, mask=is_key, other=0.0)
    carried_J = _carried(c_J, document_J, before)
    dt_JJ += _dot(dw_JN, tl.trans(k_JN * (beta_J * carried_J)[:, None]), dtype)
    dkeys_JN = _dot(tl.trans(t_JJ), dw_JN, dtype) * carried_J[:, None]  # of the key times beta
    decays_JJ = _decays(c_J, document_J, J, True)
    da_JJ = -_dot(_dot(tl.trans(t_JJ), dt_JJ, dtype), tl.trans(t_JJ), dtype) * decays_JJ
    products_JJ = da_JJ * _dot(k_JN, tl.trans(k_JN), dtype)
    through_J = tl.sum(dkeys_JN * k_JN, 1)
    dbeta_J += through_J + tl.sum(products_JJ, 1)
    pairs_JJ = products_JJ * beta_J[:, None]
    dc_ptrs = _numbers(dc_ptr, H, head, row, position_J, positions)
    dc_J = tl.load(dc_ptrs, mask=inside_J, other=0.0)
    dc_J += through_J * beta_J + tl.sum(pairs_JJ, 1) - tl.sum(pairs_JJ, 0)
    dk_ptrs = _rows(dk_ptr, H, head, row, position_J, positions, N) + column_N
    dk_JN = tl.load(dk_ptrs, mask=is_key, other=0.0) + dkeys_JN * beta_J[:, None]
    dscores_JJ = da_JJ * beta_J[:, None]
    dk_JN += _dot(dscores_JJ, k_JN, dtype) + _dot(tl.trans(dscores_JJ), k_JN, dtype)
    tl.store(dk_ptrs, dk_JN, mask=is_key)
    # c is the sum of g up to a position, so dg is the sum of dc from there on.
    dg_J = tl.sum(dc_J, 0) - tl.cumsum(dc_J, 0) + dc_J
    tl.store(_numbers(dg_ptr, H, head, row, position_J, positions), dg_J, mask=inside_J)
    tl.store(_numbers(dbeta_ptr, H, head, row, position_J, positions), dbeta_J, mask=inside_J)
