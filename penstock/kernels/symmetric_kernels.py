"""Device code of `penstock.kernels.symmetric`: rows, choices and signals between the memories of one node's GPUs.

Every rank maps the memory of all others; `addresses_ptr` holds where each begins, as integers, our own among them. The
same offset means the same thing in each. A row of token t that came from rank r stands at r x tokens + t, whoever looks
at it, so no kernel needs a prefix sum or an atomic to know where to write.

Rows travel as 32-bit words, whatever their numbers are; rows that are summed are read and written as numbers. Programs
are few and walk over tiles of rows, and each begins at another peer, so that all links are busy at once.

What one kernel wrote is there for the next kernel of its stream, and a release of the next carries it to whoever
acquires: so writes, signal, wait and reads are kernels of their own, and only the signal and the wait have an order.
"""

import triton
import triton.language as tl


@triton.jit
def _peer(addresses_ptr, rank, offset, dtype: tl.constexpr):
    """Pointer into the memory of one rank. All sections begin at multiples of 16 bytes; only we know that."""
    address = tl.multiple_of(tl.load(addresses_ptr + rank), 16) + tl.multiple_of(offset, 16)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _ranks_of(ids_ptr, token_T, tokens, K: tl.constexpr, PER_RANK: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr):
    """Bit d of the result says that an expert of the token, or a part of one, lives on rank d.

    Dropped choices set no bit.
    """
    PARTS_OF_ONE: tl.constexpr = (1 << PARTS) - 1
    bits_T = tl.zeros(token_T.shape, tl.int32)
    for k in tl.static_range(K):
        id_T = tl.load(ids_ptr + token_T * K + k, mask=token_T < tokens, other=W * PER_RANK)
        rank_T = id_T.to(tl.int32) // PER_RANK * PARTS
        bits_T |= tl.where(rank_T < W, PARTS_OF_ONE << tl.minimum(rank_T, W), 0)
    return bits_T


@triton.jit(do_not_specialize=["rank"])
def push_rows_kernel(
    words_ptr,
    ids_ptr,
    addresses_ptr,
    offset,
    rank,
    tokens,
    WORDS: tl.constexpr,
    K: tl.constexpr,
    PER_RANK: tl.constexpr,
    PARTS: tl.constexpr,
    W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Our rows, read once, to every rank that holds an expert of theirs.

    Example: 2 experts on each of 2 ranks and ids [[0, 1], [1, 2], [4, 4]], where 4 marks a dropped choice: row 0 goes
    to rank 0 only, row 1 to both, row 2 nowhere.
    """
    for tile in range(tl.program_id(0), tl.cdiv(tokens, BLOCK_T), tl.num_programs(0)):
        token_T = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        bits_T = _ranks_of(ids_ptr, token_T, tokens, K, PER_RANK, PARTS, W)
        for start in range(0, WORDS, BLOCK_D):
            column_1D = start + tl.arange(0, BLOCK_D)[None, :]
            inside = (bits_T != 0)[:, None] & (column_1D < WORDS)
            words_TD = tl.load(words_ptr + token_T[:, None] * WORDS + column_1D, mask=inside, other=0)
            for step in tl.static_range(W):
                peer = (rank + 1 + step) % W
                rows_ptr = _peer(addresses_ptr, peer, offset, tl.int32)
                wanted = ((bits_T >> peer) & 1 != 0)[:, None] & (column_1D < WORDS)
                place_T1 = (rank.to(tl.int64) * tokens + token_T)[:, None]
                tl.store(rows_ptr + place_T1 * WORDS + column_1D, words_TD, mask=wanted)


@triton.jit(do_not_specialize=["rank"])
def push_metadata_kernel(
    ids_ptr, weights_ptr, addresses_ptr, ids_offset, weights_offset, rank, slots, W: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Our choices and their weights, to everybody."""
    slot_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside_R = slot_R < slots
    ids_R = tl.load(ids_ptr + slot_R, mask=inside_R, other=0).to(tl.int32)
    weights_R = tl.load(weights_ptr + slot_R, mask=inside_R, other=0.0)
    first = rank.to(tl.int64) * slots
    for step in tl.static_range(W):
        peer = (rank + 1 + step) % W
        tl.store(_peer(addresses_ptr, peer, ids_offset, tl.int32) + first + slot_R, ids_R, mask=inside_R)
        tl.store(_peer(addresses_ptr, peer, weights_offset, tl.float32) + first + slot_R, weights_R, mask=inside_R)


@triton.jit(do_not_specialize=["rank"])
def signal_kernel(addresses_ptr, offset, rank, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Count our flag up by one at every rank, after all that our stream wrote before. Nobody else counts our flags."""
    peer_W = tl.arange(0, BLOCK_W)
    address_W = tl.load(addresses_ptr + peer_W, mask=peer_W < W, other=0) + offset + rank * 8
    flags_ptr = address_W.to(tl.pointer_type(tl.int64))
    one_W = tl.full([BLOCK_W], 1, tl.int64)
    tl.atomic_add(flags_ptr, one_W, mask=peer_W < W, sem="release", scope="sys")


@triton.jit
def wait_kernel(flags_ptr, expected_ptr, late_ptr, channel, limit, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Expect one more signal of every rank, and spin until they are all there.

    After `limit` looks the channel's number, plus one, is left in `late`, and we never wait again: a wait in vain must
    end, and whoever reads `late` will not trust what was computed.
    """
    peer_W = tl.arange(0, BLOCK_W)
    expected = tl.load(expected_ptr + channel) + 1
    tl.store(expected_ptr + channel, expected)
    looks = tl.where(tl.load(late_ptr) == 0, limit, 1).to(tl.int64)
    here = tl.full([], 0, tl.int32)
    while (here == 0) & (looks > 0):
        # An addition of zero is Triton's only load that acquires.
        zero_W = tl.zeros([BLOCK_W], tl.int64)
        count_W = tl.atomic_add(flags_ptr + channel * W + peer_W, zero_W, mask=peer_W < W, sem="acquire", scope="sys")
        here = tl.min(tl.where(peer_W < W, count_W >= expected, True).to(tl.int32), 0)
        looks -= 1
    if here == 0:
        tl.store(late_ptr, channel + 1)


@triton.jit
def gather_rows_kernel(
    words_ptr,
    index_ptr,
    counts_ptr,
    out_ptr,
    rows,
    WORDS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Place r gets the row at index[r], for the places that hold one; the others are left as they are."""
    expert_E = tl.arange(0, BLOCK_E)
    used = tl.minimum(tl.sum(tl.load(counts_ptr + expert_E, mask=expert_E < EXPERTS, other=0), 0), rows)
    for tile in range(tl.program_id(0), tl.cdiv(used, BLOCK_T), tl.num_programs(0)):
        place_T = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        row_T1 = tl.load(index_ptr + place_T, mask=place_T < used, other=0)[:, None]
        for start in range(0, WORDS, BLOCK_D):
            column_1D = start + tl.arange(0, BLOCK_D)[None, :]
            inside = (place_T < used)[:, None] & (column_1D < WORDS)
            words_TD = tl.load(words_ptr + row_T1 * WORDS + column_1D, mask=inside, other=0)
            tl.store(out_ptr + place_T[:, None] * WORDS + column_1D, words_TD, mask=inside)


@triton.jit(do_not_specialize=["rank"])
def return_rows_kernel(
    rows_ptr,
    places_ptr,
    counts_ptr,
    scalars_ptr,
    addresses_ptr,
    offset,
    scalars_offset,
    rank,
    tokens,
    SUMMED: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    W: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """For every row that we were sent, one row back to where it came from.

    If SUMMED, that is the float32 sum over its places here, rounded once; else the row of the same number. With scalars
    also the row's K scalars. Example: 2 tokens a rank, row 3 has the places [0, 7], of which 5 are used: the row at
    place 0 goes to rank 1 as its token 1.
    """
    expert_E = tl.arange(0, BLOCK_E)
    used = tl.sum(tl.load(counts_ptr + expert_E, mask=expert_E < EXPERTS, other=0), 0).to(tl.int64)
    per_peer = tl.cdiv(tokens, BLOCK_T)
    for number in range(tl.program_id(0), W * per_peer, tl.num_programs(0)):
        # Neighbouring programs write to different peers.
        peer = (rank + 1 + number) % W
        token_T = (number // W * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        exists_T = token_T < tokens
        row_T = peer.to(tl.int64) * tokens + token_T
        place_T = rank.to(tl.int64) * tokens + token_T
        wanted_T = tl.zeros([BLOCK_T], tl.int1)
        for k in tl.static_range(K):
            source_T = tl.load(places_ptr + row_T * K + k, mask=exists_T, other=used)
            wanted_T |= source_T < used
            if scalars_ptr is not None:
                scalar_T = tl.load(scalars_ptr + row_T * K + k, mask=exists_T, other=0.0)
                back_ptr = _peer(addresses_ptr, peer, scalars_offset, tl.float32)
                tl.store(back_ptr + place_T * K + k, scalar_T, mask=exists_T)
        back_ptr = _peer(addresses_ptr, peer, offset, rows_ptr.dtype.element_ty)
        for start in range(0, D, BLOCK_D):
            column_1D = start + tl.arange(0, BLOCK_D)[None, :]
            inside = wanted_T[:, None] & (column_1D < D)
            if SUMMED:
                sum_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
                for k in tl.static_range(K):
                    source_T = tl.load(places_ptr + row_T * K + k, mask=exists_T, other=used)
                    kept = (source_T < used)[:, None] & (column_1D < D)
                    sum_TD += tl.load(rows_ptr + source_T[:, None] * D + column_1D, mask=kept, other=0.0).to(tl.float32)
                out_TD = sum_TD.to(rows_ptr.dtype.element_ty)
            else:
                out_TD = tl.load(rows_ptr + row_T[:, None] * D + column_1D, mask=inside, other=0.0)
            tl.store(back_ptr + place_T[:, None] * D + column_1D, out_TD, mask=inside)


@triton.jit
def sum_ranks_kernel(
    parts_ptr,
    scalars_ptr,
    ids_ptr,
    out_ptr,
    out_scalars_ptr,
    tokens,
    D: tl.constexpr,
    K: tl.constexpr,
    PER_RANK: tl.constexpr,
    PARTS: tl.constexpr,
    W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Each token's sum of the rows that came back from ranks that had it; and each choice's scalar from its rank."""
    for tile in range(tl.program_id(0), tl.cdiv(tokens, BLOCK_T), tl.num_programs(0)):
        token_T = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        exists_T = token_T < tokens
        bits_T = _ranks_of(ids_ptr, token_T, tokens, K, PER_RANK, PARTS, W)
        if scalars_ptr is not None:
            for k in tl.static_range(K):
                id_T = tl.load(ids_ptr + token_T * K + k, mask=exists_T, other=W * PER_RANK)
                rank_T = id_T.to(tl.int64) // PER_RANK * PARTS
                scalar_T = tl.zeros([BLOCK_T], tl.float32)
                for part in tl.static_range(PARTS):
                    from_ptr = scalars_ptr + ((rank_T + part) * tokens + token_T) * K + k
                    scalar_T += tl.load(from_ptr, mask=exists_T & (rank_T < W), other=0.0)
                tl.store(out_scalars_ptr + token_T * K + k, scalar_T, mask=exists_T)
        for start in range(0, D, BLOCK_D):
            column_1D = start + tl.arange(0, BLOCK_D)[None, :]
            sum_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
            for rank in tl.static_range(W):
                had = ((bits_T >> rank) & 1 != 0)[:, None] & (column_1D < D)
                row_T1 = (rank * tokens + token_T)[:, None]
                sum_TD += tl.load(parts_ptr + row_T1 * D + column_1D, mask=had, other=0.0).to(tl.float32)
            out_ptrs = out_ptr + token_T[:, None] * D + column_1D
            tl.store(out_ptrs, sum_TD.to(out_ptr.dtype.element_ty), mask=exists_T[:, None] & (column_1D < D))
