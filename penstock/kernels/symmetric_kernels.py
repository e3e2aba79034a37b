"""Device code of `penstock.kernels.symmetric`: rows, choices and flags between the memories of one node's GPUs.

Memory: every rank maps the buffers of all ranks. `addresses_ptr` holds the base address of each buffer, and one offset
names the same section in all of them. Token t of rank r has row r * tokens + t in every section, so no kernel needs a
prefix sum or an atomic to find a destination. Copied rows are 32-bit words; summed rows have their own dtype.

Flags: the tokens of a rank are cut into chunks. A receiver holds one int64 counter for each chunk and sender. A sending
kernel runs P programs; each program stores its rows of a chunk and then adds 1 to the counter at every receiver. The
addition has release semantics at system scope, so the rows are visible before it. A chunk is complete when its counter
has grown by P, which the receiver calls `signals`. A reading program polls with acquire semantics until the counters of
all senders have arrived.

Counters are never reset, so a captured graph can be replayed. `expected` holds the value that the counters had after
the previous transfer; the last program of a reading kernel adds `signals` to it (`leave`):

    W = 2, P = 3: expected[0] = 6; poll until flags[0] >= [9, 9]; read rows; the last program sets expected[0] = 9

A launch has few programs, which walk over tiles of rows and start at different peers, so that all links are busy.
`first` and `last` are the chunks of a launch: all of them, except in simulations of several ranks on one device.
"""

from penstock.kernels.language import tl, triton

MOST_CHUNKS = tl.constexpr(16)  # flags of a channel for each sender: the largest number of chunks


@triton.jit
def peer_pointer(addresses_ptr, rank, offset, dtype: tl.constexpr):
    """Pointer into the buffer of one rank."""
    # The compiler cannot know that addresses and offsets are multiples of 16 bytes.
    address = tl.multiple_of(tl.load(addresses_ptr + rank), 16) + tl.multiple_of(offset, 16)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def signal(addresses_ptr, flags_offset, rank, chunk, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Add 1 to this rank's flag of a chunk at every rank, after all stores that this program issued before."""
    # All threads of the program have issued their stores before one thread releases them.
    tl.debug_barrier()
    peer_W = tl.arange(0, BLOCK_W)
    address_W = tl.load(addresses_ptr + peer_W, mask=peer_W < W, other=0) + flags_offset + (chunk * W + rank) * 8
    flags_ptr = address_W.to(tl.pointer_type(tl.int64))
    one_W = tl.full([BLOCK_W], 1, tl.int64)
    tl.atomic_add(flags_ptr, one_W, mask=peer_W < W, sem="release", scope="sys")


@triton.jit
def await_chunk(flags_ptr, wanted, late_ptr, channel, limit, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Poll until the flags of all ranks are at least `wanted`.

    After `limit` polls without success, `channel + 1` is stored in `late` and the program continues with incomplete
    data. Every later wait then polls once only, so a missing rank does not hang the GPU. The host checks `late` before
    it uses any result.
    """
    peer_W = tl.arange(0, BLOCK_W)
    looks = tl.where(tl.load(late_ptr) == 0, limit, 1).to(tl.int64)
    here = tl.full([], 0, tl.int32)
    while (here == 0) & (looks > 0):
        # Triton has no acquire load; an atomic addition of zero is one.
        zero_W = tl.zeros([BLOCK_W], tl.int64)
        count_W = tl.atomic_add(flags_ptr + peer_W, zero_W, mask=peer_W < W, sem="acquire", scope="sys")
        here = tl.min(tl.where(peer_W < W, count_W >= wanted, True).to(tl.int32), 0)
        looks -= 1
    if here == 0:
        tl.store(late_ptr, channel + 1)
    # No thread reads rows before the polling threads have acquired the flags.
    tl.debug_barrier()


@triton.jit
def leave(expected_ptr, left_ptr, channel, signals, chunks):
    """Count a finished program; the last one of the launch adds `signals` to `expected` for the next transfer."""
    # Every thread of this program has read `expected` when the program is counted.
    tl.debug_barrier()
    before = tl.atomic_add(left_ptr + channel, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.store(left_ptr + channel, 0)
        chunk_C = tl.arange(0, MOST_CHUNKS)
        expected_C = tl.load(expected_ptr + chunk_C, mask=chunk_C < chunks, other=0)
        tl.store(expected_ptr + chunk_C, expected_C + signals, mask=chunk_C < chunks)


@triton.jit
def first_tile(chunk, tiles):
    """First tile of this program in a chunk when the tiles of all chunks are dealt to the programs in turn.

    With 3 tiles in a chunk and 2 programs, program 0 has tiles 0 and 2 of chunk 0 and tile 1 of chunk 1.
    """
    programs = tl.num_programs(0)
    return (tl.program_id(0) + programs - chunk * tiles % programs) % programs


@triton.jit
def _ranks_of(
    ids_ptr, token_T, exists_T, K: tl.constexpr, PER_RANK: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr
):
    """Bit mask of the ranks that hold an expert of the token, or a part of one. Dropped choices set no bit."""
    PARTS_OF_ONE: tl.constexpr = (1 << PARTS) - 1
    bits_T = tl.zeros(token_T.shape, tl.int32)
    for k in tl.static_range(K):
        id_T = tl.load(ids_ptr + token_T * K + k, mask=exists_T, other=W * PER_RANK)
        rank_T = id_T.to(tl.int32) // PER_RANK * PARTS
        bits_T |= tl.where(rank_T < W, PARTS_OF_ONE << tl.minimum(rank_T, W), 0)
    return bits_T


@triton.jit(do_not_specialize=["rank", "first", "last"])
def push_rows_kernel(
    words_ptr, ids_ptr, weights_ptr, addresses_ptr,  # words T x WORDS, ids and weights T x K
    offset, ids_offset, weights_offset, flags_offset, choice_flags_offset, rank, tokens, chunk_rows, first, last,
    WORDS: tl.constexpr, K: tl.constexpr, PER_RANK: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Send choices and weights (if given) to all ranks, then each row to every other rank with one of its experts.

    Each row is read once. Example: 2 experts on each of 2 ranks, this rank is 1 and ids are [[0, 1], [1, 2], [4, 4]],
    where 4 marks a dropped choice. Rows 0 and 1 go to rank 0, once each; row 2 is not sent.
    """
    # Two conditions: the compiler knows the first one, the second one is known at run time.
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
            # This rank's own rows stay where they are: `take_rows_kernel` reads them from there.
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
        # Also programs without a tile in this chunk signal: receivers count programs, not tiles.
        signal(addresses_ptr, flags_offset, rank, chunk, W, BLOCK_W)


@triton.jit(do_not_specialize=["channel"])
def wait_kernel(
    flags_ptr, expected_ptr, left_ptr, late_ptr, channel, signals, limit, needed_ptr,
    W: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Wait for chunk 0 of a channel in one program; later kernels of the stream may read.

    With zero at `needed` nothing is done. Without `left` the kernel that reads advances `expected`.
    """
    if _is_needed(needed_ptr):
        await_chunk(flags_ptr, tl.load(expected_ptr) + signals, late_ptr, channel, limit, W, BLOCK_W)
        if left_ptr is not None:
            leave(expected_ptr, left_ptr, channel, signals, 1)


@triton.jit
def _is_needed(needed_ptr):
    """Whether an optional number is not zero, or not given."""
    needed = tl.full([], 1, tl.int32)
    if needed_ptr is not None:
        needed = tl.load(needed_ptr)
    return needed != 0


@triton.jit
def _take_tile(
    from_ptr, row_T, out_ptr, out_row_T, exists_T, places_ptr, used,  # rows of `from` and of `out`
    WORDS: tl.constexpr, K: tl.constexpr, SPREAD: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy the rows that have a place here: to their places if SPREAD, else to the row of the same number."""
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
    channel, signals, limit, rank, tokens, chunk_rows, chunks, first, last,  # chunks `first` to `last` - 1
    WORDS: tl.constexpr, K: tl.constexpr, SPREAD: tl.constexpr, EXPERTS: tl.constexpr, W: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy this rank's own rows, then those of other ranks as their chunks arrive; skip rows without a place here.

    With SPREAD, a row is copied to each of its places, else to the row of its number. Example: 2 tokens a rank; row 3
    (token 1 of rank 1) has places [0, 7], of which 5 are used. It is copied to place 0 with SPREAD, else to row 3.
    """
    expert_E = tl.arange(0, BLOCK_E)
    used = tl.sum(tl.load(counts_ptr + expert_E, mask=expert_E < EXPERTS, other=0), 0).to(tl.int64)
    OTHERS: tl.constexpr = W - 1 if W > 1 else 1
    # Own rows need no flag and are copied while the first chunk of the others is under way.
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
        tiles = tl.cdiv(chunk_rows, BLOCK_T) * (W - 1)  # of all other ranks
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
    """Place of choice k of each row; `used` if the row has no choice k."""
    return tl.load(places_ptr + row_T * K + k, mask=exists_T & (k < K), other=used)


@triton.jit
def _row(rows_ptr, place_T, used, column_1D, D: tl.constexpr):
    """Rows at these places; zeros for places outside this rank."""
    kept = (place_T < used)[:, None] & (column_1D < D)
    return tl.load(rows_ptr + place_T[:, None] * D + column_1D, mask=kept, other=0.0)


@triton.jit(do_not_specialize=["rank", "first", "last"])
def return_rows_kernel(
    rows_ptr, places_ptr, counts_ptr, scalars_ptr, staged_ptr, addresses_ptr,  # places W*T x K
    offset, scalars_offset, flags_offset, rank, tokens, chunk_rows, first, last,  # offsets in bytes
    ROWS: tl.constexpr, SUMMED: tl.constexpr, D: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr,
    W: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Send one row back for every row that this rank received.

    With SUMMED that row is the float32 sum over the places of the received row, rounded once; else the row of the same
    number. With scalars, the K scalars at the row's places are sent too, 0 for places on other ranks. Example: 2 tokens
    a rank; row 3 has places [0, 7], of which 5 are used. The row at place 0 becomes row 1 of rank 1's section; its
    scalars are the scalar of place 0 and a zero. For copy engines rows are written to `staged_ptr`, without flags.
    """
    expert_E = tl.arange(0, BLOCK_E)
    used = tl.sum(tl.load(counts_ptr + expert_E, mask=expert_E < EXPERTS, other=0), 0).to(tl.int64)
    for chunk in range(first, last):
        start_token = chunk * chunk_rows
        stop_token = tl.minimum(start_token + chunk_rows, tokens)
        tiles = tl.cdiv(chunk_rows, BLOCK_T) * W
        for tile in range(first_tile(chunk, tiles), tiles, tl.num_programs(0)):
            # Neighbouring programs write to different peers, so all links are busy.
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
                        # Four loads are in flight before the first addition.
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
def signal_kernel(addresses_ptr, flags_offset, rank, needed_ptr, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Set the flag of chunk 0 of a channel in one program, after all earlier work of its stream."""
    if _is_needed(needed_ptr):
        signal(addresses_ptr, flags_offset, rank, 0, W, BLOCK_W)


@triton.jit
def _half(expected, NUMBERS: tl.constexpr, W: tl.constexpr):
    """First word of the half that a gather writes: the halves take turns, and begin at multiples of 16 bytes."""
    return (expected & 1) * ((W * NUMBERS + 3) // 4 * 4)


@triton.jit(do_not_specialize=["rank"])
def push_numbers_kernel(
    numbers_ptr, expected_ptr, addresses_ptr, offset, flags_offset, rank,
    NUMBERS: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write this rank's int32 numbers to row `rank` of every rank's section, in one program, and set the flag."""
    number_N = tl.arange(0, BLOCK_N)
    value_N = tl.load(numbers_ptr + number_N, mask=number_N < NUMBERS, other=0)
    place_N = _half(tl.load(expected_ptr), NUMBERS, W) + rank * NUMBERS + number_N
    for step in tl.static_range(W):
        their_ptr = peer_pointer(addresses_ptr, (rank + 1 + step) % W, offset, tl.int32)
        tl.store(their_ptr + place_N, value_N, mask=number_N < NUMBERS)
    signal(addresses_ptr, flags_offset, rank, 0, W, BLOCK_W)


@triton.jit(do_not_specialize=["channel"])
def take_numbers_kernel(
    section_ptr, out_ptr, flags_ptr, expected_ptr, left_ptr, late_ptr, channel, signals, limit,
    NUMBERS: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Wait for the numbers of all ranks in one program, and copy them out."""
    expected = tl.load(expected_ptr)
    await_chunk(flags_ptr, expected + signals, late_ptr, channel, limit, W, BLOCK_W)
    place_WN = tl.arange(0, BLOCK_W)[:, None] * NUMBERS + tl.arange(0, BLOCK_N)[None, :]
    exists_WN = (tl.arange(0, BLOCK_W) < W)[:, None] & (tl.arange(0, BLOCK_N) < NUMBERS)[None, :]
    value_WN = tl.load(section_ptr + _half(expected, NUMBERS, W) + place_WN, mask=exists_WN, other=0)
    tl.store(out_ptr + place_WN, value_WN, mask=exists_WN)
    leave(expected_ptr, left_ptr, channel, signals, 1)


@triton.jit(do_not_specialize=["own_rank", "channel", "first", "last"])
def sum_ranks_kernel(
    parts_ptr, own_ptr, own_rank,  # parts W*T x D, own T x D
    scalars_ptr, ids_ptr, out_ptr, out_scalars_ptr, flags_ptr, expected_ptr, left_ptr, late_ptr,
    channel, signals, limit, tokens, chunk_rows, chunks, first, last,
    D: tl.constexpr, K: tl.constexpr, PER_RANK: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Chunk by chunk, sum the rows that came back for each token, and the scalars of each choice.

    The order of the sum is the order of the ranks. With `own_ptr`, the rows of rank `own_rank` are read from there.
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
                for rank in tl.static_range(W):  # always in this order, so the sum has the same bits
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
