"""Functions of the kernels of linear attention: where chunks of a head lie, and the inverse of a triangular system."""

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
