"""Device code of `penstock.kernels.symmetric`: rows, choices and flags between the memories of one node's GPUs.

Every rank maps the memory of all others; `addresses_ptr` holds where each begins, as integers, our own among them. The
same offset means the same thing in each. A row of token t that came from rank r stands at r x tokens + t, whoever looks
at it, so no kernel needs a prefix sum or an atomic to know where to write.

Rows travel as 32-bit words, whatever their numbers are; rows that are summed are read and written as numbers. Programs
are few and walk over tiles of rows, and each begins at another peer, so that all links are busy at once.

Tokens are cut into chunks (penstock/kernels/symmetric_kernels.py). `first` and `last` bound those of a launch: all of
them, but in simulations.
"""

from penstock.kernels.language import tl, triton

MOST_CHUNKS = tl.constexpr(16)
"""Chunks that a channel has flags for."""


@triton.jit
def peer_pointer(addresses_ptr, rank, offset, dtype: tl.constexpr):
    """Pointer into the memory of one rank. All sections begin at multiples of 16 bytes; only we know that."""
    address = tl.multiple_of(tl.load(addresses_ptr + rank), 16) + tl.multiple_of(offset, 16)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def signal(addresses_ptr, flags_offset, rank, chunk, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Count our flag of a chunk up by one at every rank, after all that this program wrote before."""
    tl.debug_barrier()
    peer_W = tl.arange(0, BLOCK_W)
    address_W = tl.load(addresses_ptr + peer_W, mask=peer_W < W, other=0) + flags_offset + (chunk * W + rank) * 8
    flags_ptr = address_W.to(tl.pointer_type(tl.int64))
    one_W = tl.full([BLOCK_W], 1, tl.int64)
    tl.atomic_add(flags_ptr, one_W, mask=peer_W < W, sem="release", scope="sys")


@triton.jit
def await_chunk(flags_ptr, wanted, late_ptr, channel, limit, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Spin until the flags of all ranks have grown to `wanted`.

    After `limit` looks the channel's number, plus one, is left in `late`, and nobody waits again: a wait in vain must
    end, and whoever reads `late` will not trust what was computed.
    """
    peer_W = tl.arange(0, BLOCK_W)
    looks = tl.where(tl.load(late_ptr) == 0, limit, 1).to(tl.int64)
    here = tl.full([], 0, tl.int32)
    while (here == 0) & (looks > 0):
        # An addition of zero is Triton's only load that acquires.
        zero_W = tl.zeros([BLOCK_W], tl.int64)
        count_W = tl.atomic_add(flags_ptr + peer_W, zero_W, mask=peer_W < W, sem="acquire", scope="sys")
        here = tl.min(tl.where(peer_W < W, count_W >= wanted, True).to(tl.int32), 0)
        looks -= 1
    if here == 0:
        tl.store(late_ptr, channel + 1)
    tl.debug_barrier()


@triton.jit
def leave(expected_ptr, left_ptr, channel, signals, chunks):
    """The last program of a launch leaves behind what flags had grown to; the others still read the old numbers."""
    tl.debug_barrier()
    before = tl.atomic_add(left_ptr + channel, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.store(left_ptr + channel, 0)
        chunk_C = tl.arange(0, MOST_CHUNKS)
        expected_C = tl.load(expected_ptr + chunk_C, mask=chunk_C < chunks, other=0)
        tl.store(expected_ptr + chunk_C, expected_C + signals, mask=chunk_C < chunks)


@triton.jit
def first_tile(chunk, tiles):
    """Of the tiles of a chunk, the first one of this program, if tiles of all chunks go round among the programs."""
    programs = tl.num_programs(0)
    return (tl.program_id(0) + programs - chunk * tiles % programs) % programs


@triton.jit
def _ranks_of(
    ids_ptr, token_T, exists_T, K: tl.constexpr, PER_RANK: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr
):
    """Bit d of the result says that an expert of the token, or a part of one, lives on rank d.

    Dropped choices set no bit.
    """
    PARTS_OF_ONE: tl.constexpr = (1 << PARTS) - 1
    bits_T = tl.zeros(token_T.shape, tl.int32)
    for k in tl.static_range(K):
        id_T = tl.load(ids_ptr + token_T * K + k, mask=exists_T, other=W * PER_RANK)
        rank_T = id_T.to(tl.int32) // PER_RANK * PARTS
        bits_T |= tl.where(rank_T < W, PARTS_OF_ONE << tl.minimum(rank_T, W), 0)
    return bits_T


@triton.jit(do_not_specialize=["rank", "first", "last"])
def push_rows_kernel(
    words_ptr, ids_ptr, weights_ptr, addresses_ptr,
    offset, ids_offset, weights_offset, flags_offset, choice_flags_offset, rank, tokens, chunk_rows, first, last,
    WORDS: tl.constexpr, K: tl.constexpr, PER_RANK: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Our choices and weights, if there are weights, to everybody; then our rows to all others that hold their experts.

    Each row is read once. Example: 2 experts on each of 2 ranks, we are rank 1, and ids [[0, 1], [1, 2], [4, 4]], where
    4 marks a dropped choice: rows 0 and 1 go to rank 0, once each, and row 2 nowhere.
    """
    # Not one condition: the first is known to the compiler, the second is not.
    if weights_ptr is not None:  # noqa: SIM102
        if first == 0:
            slots = tokens * K
            for block in range(tl.program_id(0), tl.cdiv(slots, BLOCK_R), tl.num_programs(0)):
                slot_R = block * BLOCK_R + tl.arange(0, BLOCK_R)
                ids_R = tl.load(ids_ptr + slot_R, mask=slot_R < slots, other=0).to(tl.int32)
                weights_R = tl.load(weights_ptr + slot_R, mask=slot_R < slots, other=0.0)
                place_R = rank.to(tl.int64) * slots + slot_R
                for step in tl.static_range(W):
                    peer = (rank + 1 + step) % W
                    tl.store(
                        peer_pointer(addresses_ptr, peer, ids_offset, tl.int32) + place_R, ids_R, mask=slot_R < slots
                    )
                    their_ptr = peer_pointer(addresses_ptr, peer, weights_offset, tl.float32)
                    tl.store(their_ptr + place_R, weights_R, mask=slot_R < slots)
            signal(addresses_ptr, choice_flags_offset, rank, 0, W, BLOCK_W)
    for chunk in range(first, last):
        start_token = chunk * chunk_rows
        stop_token = tl.minimum(start_token + chunk_rows, tokens)
        tiles = tl.cdiv(chunk_rows, BLOCK_T)
        for tile in range(first_tile(chunk, tiles), tiles, tl.num_programs(0)):
            token_T = (start_token + tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
            bits_T = _ranks_of(ids_ptr, token_T, token_T < stop_token, K, PER_RANK, PARTS, W)
            others_T = bits_T & ~(1 << rank)
            for start in range(0, WORDS, BLOCK_D):
                column_1D = start + tl.arange(0, BLOCK_D)[None, :]
                inside = (others_T != 0)[:, None] & (column_1D < WORDS)
                words_TD = tl.load(words_ptr + token_T[:, None] * WORDS + column_1D, mask=inside, other=0)
                for step in tl.static_range(W - 1):
                    peer = (rank + 1 + step) % W
                    rows_ptr = peer_pointer(addresses_ptr, peer, offset, tl.int32)
                    wanted = ((bits_T >> peer) & 1 != 0)[:, None] & (column_1D < WORDS)
                    place_T1 = (rank.to(tl.int64) * tokens + token_T)[:, None]
                    tl.store(rows_ptr + place_T1 * WORDS + column_1D, words_TD, mask=wanted)
        signal(addresses_ptr, flags_offset, rank, chunk, W, BLOCK_W)


@triton.jit(do_not_specialize=["channel"])
def wait_kernel(
    flags_ptr, expected_ptr, left_ptr, late_ptr, channel, signals, limit, W: tl.constexpr, BLOCK_W: tl.constexpr
):
    """One program that waits for the first chunk of a channel, for kernels that come after it."""
    await_chunk(flags_ptr, tl.load(expected_ptr) + signals, late_ptr, channel, limit, W, BLOCK_W)
    leave(expected_ptr, left_ptr, channel, signals, 1)


@triton.jit
def _take_tile(
    from_ptr, row_T, out_ptr, out_row_T, exists_T, places_ptr, used,
    WORDS: tl.constexpr, K: tl.constexpr, SPREAD: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows that have a place here, to their places if SPREAD, else to the row of the same number."""
    has_place_T = tl.zeros(row_T.shape, tl.int1)
    for k in tl.static_range(K):
        has_place_T |= tl.load(places_ptr + out_row_T * K + k, mask=exists_T, other=used) < used
    for start in range(0, WORDS, BLOCK_D):
        column_1D = start + tl.arange(0, BLOCK_D)[None, :]
        inside = has_place_T[:, None] & (column_1D < WORDS)
        words_TD = tl.load(from_ptr + row_T[:, None] * WORDS + column_1D, mask=inside, other=0)
        if SPREAD:
            for k in tl.static_range(K):
                place_T = tl.load(places_ptr + out_row_T * K + k, mask=exists_T, other=used)
                kept = (place_T < used)[:, None] & (column_1D < WORDS)
                tl.store(out_ptr + place_T[:, None] * WORDS + column_1D, words_TD, mask=kept)
        else:
            tl.store(out_ptr + out_row_T[:, None] * WORDS + column_1D, words_TD, mask=inside)


@triton.jit(do_not_specialize=["rank", "channel", "first", "last"])
def take_rows_kernel(
    words_ptr, own_ptr, places_ptr, counts_ptr, out_ptr, flags_ptr, expected_ptr, left_ptr, late_ptr,
    channel, signals, limit, rank, tokens, chunk_rows, chunks, first, last,
    WORDS: tl.constexpr, K: tl.constexpr, SPREAD: tl.constexpr, EXPERTS: tl.constexpr, W: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Our own rows first, then chunk by chunk those of the others as they come; only those that have a place here.

    If SPREAD, a row goes to each of its places, else to the row of its number. Example: 2 tokens a rank, row 3 has the
    places [0, 7], of which 5 are used: it is token 1 of rank 1, and goes to place 0, or to row 3.
    """
    expert_E = tl.arange(0, BLOCK_E)
    used = tl.sum(tl.load(counts_ptr + expert_E, mask=expert_E < EXPERTS, other=0), 0).to(tl.int64)
    OTHERS: tl.constexpr = W - 1 if W > 1 else 1
    if first == 0:
        for tile in range(tl.program_id(0), tl.cdiv(tokens, BLOCK_T), tl.num_programs(0)):
            token_T = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
            row_T = rank.to(tl.int64) * tokens + token_T
            _take_tile(own_ptr, token_T, out_ptr, row_T, token_T < tokens, places_ptr, used, WORDS, K, SPREAD, BLOCK_D)
    for chunk in range(first, last):
        wanted = tl.load(expected_ptr + chunk) + signals
        await_chunk(flags_ptr + chunk * W, wanted, late_ptr, channel, limit, W, BLOCK_W)
        start_token = chunk * chunk_rows
        stop_token = tl.minimum(start_token + chunk_rows, tokens)
        tiles = tl.cdiv(chunk_rows, BLOCK_T) * (W - 1)
        for tile in range(first_tile(chunk, tiles), tiles, tl.num_programs(0)):
            peer = (rank + 1 + tile % OTHERS) % W
            token_T = (start_token + tile // OTHERS * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
            row_T = peer.to(tl.int64) * tokens + token_T
            exists_T = token_T < stop_token
            _take_tile(words_ptr, row_T, out_ptr, row_T, exists_T, places_ptr, used, WORDS, K, SPREAD, BLOCK_D)
    if last == chunks:
        leave(expected_ptr, left_ptr, channel, signals, chunks)


@triton.jit
def _place(places_ptr, row_T, exists_T, used, k: tl.constexpr, K: tl.constexpr):
    """Of one choice of each row; `used` if there is no such choice."""
    return tl.load(places_ptr + row_T * K + k, mask=exists_T & (k < K), other=used)


@triton.jit
def _row(rows_ptr, place_T, used, column_1D, D: tl.constexpr):
    """What stands at a place; zeros if it is not ours."""
    kept = (place_T < used)[:, None] & (column_1D < D)
    return tl.load(rows_ptr + place_T[:, None] * D + column_1D, mask=kept, other=0.0)


@triton.jit(do_not_specialize=["rank", "first", "last"])
def return_rows_kernel(
    rows_ptr, places_ptr, counts_ptr, scalars_ptr, staged_ptr, addresses_ptr,
    offset, scalars_offset, flags_offset, rank, tokens, chunk_rows, first, last,
    ROWS: tl.constexpr, SUMMED: tl.constexpr, D: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr,
    W: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """For every row that we were sent, one row back to where it came from.

    If SUMMED, that is the float32 sum over its places here, rounded once; else the row of the same number. With scalars
    also the K scalars at the row's places, 0 for places elsewhere. Example: 2 tokens a rank, row 3 has the places
    [0, 7], of which 5 are used: the row at place 0 goes to rank 1 as its token 1, and so do the scalars of place 0, and
    a zero.

    Where copy engines send, rows stay here, at their numbers in `staged_ptr`, or are left alone without ROWS, and
    nobody is told.
    """
    expert_E = tl.arange(0, BLOCK_E)
    used = tl.sum(tl.load(counts_ptr + expert_E, mask=expert_E < EXPERTS, other=0), 0).to(tl.int64)
    for chunk in range(first, last):
        start_token = chunk * chunk_rows
        stop_token = tl.minimum(start_token + chunk_rows, tokens)
        tiles = tl.cdiv(chunk_rows, BLOCK_T) * W
        for tile in range(first_tile(chunk, tiles), tiles, tl.num_programs(0)):
            # Neighbouring programs write to different peers.
            peer = (rank + 1 + tile) % W
            token_T = (start_token + tile // W * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
            exists_T = token_T < stop_token
            row_T = peer.to(tl.int64) * tokens + token_T
            home_T = rank.to(tl.int64) * tokens + token_T
            if scalars_ptr is not None:
                k_1K = tl.arange(0, BLOCK_K)[None, :]
                is_slot = exists_T[:, None] & (k_1K < K)
                place_TK = tl.load(places_ptr + row_T[:, None] * K + k_1K, mask=is_slot, other=used)
                scalar_TK = tl.load(scalars_ptr + place_TK, mask=place_TK < used, other=0.0)
                their_ptr = peer_pointer(addresses_ptr, peer, scalars_offset, tl.float32)
                tl.store(their_ptr + home_T[:, None] * K + k_1K, scalar_TK, mask=is_slot)
            if staged_ptr is None:
                back_ptr = peer_pointer(addresses_ptr, peer, offset, rows_ptr.dtype.element_ty)
            else:
                back_ptr = staged_ptr
                home_T = row_T
            for start in range(0, D if ROWS else 0, BLOCK_D):
                column_1D = start + tl.arange(0, BLOCK_D)[None, :]
                has_place_T = tl.zeros([BLOCK_T], tl.int1)
                sum_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
                for k in tl.static_range(0, K, 4):
                    place0_T = _place(places_ptr, row_T, exists_T, used, k, K)
                    place1_T = _place(places_ptr, row_T, exists_T, used, k + 1, K)
                    place2_T = _place(places_ptr, row_T, exists_T, used, k + 2, K)
                    place3_T = _place(places_ptr, row_T, exists_T, used, k + 3, K)
                    has_place_T |= tl.minimum(tl.minimum(place0_T, place1_T), tl.minimum(place2_T, place3_T)) < used
                    if SUMMED:
                        # Four are on their way before the first is added.
                        y0_TD = _row(rows_ptr, place0_T, used, column_1D, D)
                        y1_TD = _row(rows_ptr, place1_T, used, column_1D, D)
                        y2_TD = _row(rows_ptr, place2_T, used, column_1D, D)
                        y3_TD = _row(rows_ptr, place3_T, used, column_1D, D)
                        sum_TD += y0_TD.to(tl.float32) + y1_TD.to(tl.float32)
                        sum_TD += y2_TD.to(tl.float32) + y3_TD.to(tl.float32)
                inside = has_place_T[:, None] & (column_1D < D)
                if SUMMED:
                    out_TD = sum_TD.to(rows_ptr.dtype.element_ty)
                else:
                    out_TD = tl.load(rows_ptr + row_T[:, None] * D + column_1D, mask=inside, other=0.0)
                tl.store(back_ptr + home_T[:, None] * D + column_1D, out_TD, mask=inside)
        if staged_ptr is None and ROWS:
            signal(addresses_ptr, flags_offset, rank, chunk, W, BLOCK_W)


@triton.jit(do_not_specialize=["rank"])
def signal_kernel(addresses_ptr, flags_offset, rank, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """One program that says that the first chunk of a channel is written, after all that its stream was given."""
    signal(addresses_ptr, flags_offset, rank, 0, W, BLOCK_W)


@triton.jit(do_not_specialize=["channel"])
def hold_kernel(flags_ptr, expected_ptr, late_ptr, channel, signals, limit, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """One program that waits for the first chunk of a channel, for kernels that come after it and leave for both."""
    await_chunk(flags_ptr, tl.load(expected_ptr) + signals, late_ptr, channel, limit, W, BLOCK_W)


@triton.jit(do_not_specialize=["own_rank", "channel", "first", "last"])
def sum_ranks_kernel(
    parts_ptr, own_ptr, own_rank,
    scalars_ptr, ids_ptr, out_ptr, out_scalars_ptr, flags_ptr, expected_ptr, left_ptr, late_ptr,
    channel, signals, limit, tokens, chunk_rows, chunks, first, last,
    D: tl.constexpr, K: tl.constexpr, PER_RANK: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Chunk by chunk, each token's sum of the rows that came back from ranks that had it; each choice's scalar too.

    With `own_ptr` the rows of rank `own_rank` stand there.
    """
    for chunk in range(first, last):
        wanted = tl.load(expected_ptr + chunk) + signals
        await_chunk(flags_ptr + chunk * W, wanted, late_ptr, channel, limit, W, BLOCK_W)
        start_token = chunk * chunk_rows
        stop_token = tl.minimum(start_token + chunk_rows, tokens)
        tiles = tl.cdiv(chunk_rows, BLOCK_T)
        for tile in range(first_tile(chunk, tiles), tiles, tl.num_programs(0)):
            token_T = (start_token + tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
            exists_T = token_T < stop_token
            bits_T = _ranks_of(ids_ptr, token_T, exists_T, K, PER_RANK, PARTS, W)
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
                    part_ptr = parts_ptr + rank * tokens.to(tl.int64) * D
                    if own_ptr is not None:
                        part_ptr = tl.where(own_rank == rank, own_ptr, part_ptr)
                    part_ptrs = part_ptr + token_T[:, None] * D + column_1D
                    sum_TD += tl.load(part_ptrs, mask=had, other=0.0).to(tl.float32)
                out_ptrs = out_ptr + token_T[:, None] * D + column_1D
                tl.store(out_ptrs, sum_TD.to(out_ptr.dtype.element_ty), mask=exists_T[:, None] & (column_1D < D))
    if last == chunks:
        leave(expected_ptr, left_ptr, channel, signals, chunks)
