"""Device code of `penstock.kernels.topk`.

A tile is some rows of logits by all experts. The size of a group need not be a power of two: each group is padded, so a
tile has BLOCK_Q groups of BLOCK_G columns, and every column knows its expert.

The choice is made on integers. A float32 score becomes an int32 key of the same order; two marks below every key mean
"chosen" and "not eligible", and NaN has a place in the order, so K rounds give K different experts for any logits. Ties
go to the lowest expert id. Reasons for the order of the search: docs/decisions/0110.
"""

from penstock.kernels.language import tl, triton

MOST_COLUMNS = tl.constexpr(1024)
"""Of a tile: a column's number is stored in the low bits of a key."""

CHOSEN = tl.constexpr(-(2**31))
NOT_ELIGIBLE = tl.constexpr(-(2**31) + 1)
LOWEST_KEY = tl.constexpr(-(2**31) + 1024)
"""Marks in place of a key, and the lowest key, which is above the marks with any low bits."""


@triton.jit
def _sort_key(score):
    """An int32 with the order of the float32, at least LOWEST_KEY. The addition turns -0 into 0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST_KEY)


@triton.jit
def _best_columns(key_TE, eligible_TE, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns T x K of the K best eligible keys, best first, and the keys T x E with CHOSEN in their place.

    The first search stores each column's number in the low bits of its key, so one maximum finds key and column. That
    order is right unless two neighbours among the best K + 1 agree in all higher bits; then the tile is searched again
    with whole keys, for the lowest column that holds the maximum.
    """
    BLOCK_E: tl.constexpr = key_TE.shape[1]
    column_1E = tl.arange(0, BLOCK_E)[None, :]
    choice_1K = tl.arange(0, BLOCK_K)[None, :]
    columns_TK = tl.zeros([key_TE.shape[0], BLOCK_K], tl.int32)
    left_TE = tl.where(eligible_TE, (key_TE & -BLOCK_E) | (BLOCK_E - 1 - column_1E), NOT_ELIGIBLE)
    best_T = tl.max(left_TE, 1)
    is_doubtful_T = tl.zeros([key_TE.shape[0]], tl.int1)
    for k in range(K):
        columns_TK = tl.where(choice_1K == k, BLOCK_E - 1 - (best_T & (BLOCK_E - 1))[:, None], columns_TK)
        left_TE = tl.where(left_TE == best_T[:, None], CHOSEN, left_TE)
        next_T = tl.max(left_TE, 1)
        is_doubtful_T |= ((best_T ^ next_T) & -BLOCK_E) == 0
        best_T = next_T  # one reduction a round: the next maximum is also the neighbour to compare
    if tl.max(is_doubtful_T.to(tl.int32), 0) != 0:
        left_TE = tl.where(eligible_TE, key_TE, NOT_ELIGIBLE)
        for k in range(K):
            is_best_TE = left_TE == tl.max(left_TE, 1)[:, None]
            column_T1 = tl.min(tl.where(is_best_TE, column_1E, BLOCK_E), 1)[:, None]
            left_TE = tl.where(column_1E == column_T1, CHOSEN, left_TE)
            columns_TK = tl.where(choice_1K == k, column_T1, columns_TK)
    return columns_TK, left_TE


@triton.jit
def _two_best(best, second, other_best, other_second):
    """The two best of two pairs: the combine function of a reduction."""
    return tl.maximum(best, other_best), tl.maximum(tl.minimum(best, other_best), tl.maximum(second, other_second))


@triton.jit
def _is_in_best_groups(
    choice_TE,  # T x (BLOCK_Q * BLOCK_G)
    GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP2: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Boolean T x E: the expert's group is among the KEPT best. Padding columns hold -inf."""
    BLOCK_T: tl.constexpr = choice_TE.shape[0]
    choice_TQG = tl.reshape(choice_TE, [BLOCK_T, BLOCK_Q, BLOCK_G])
    if TOP2:
        lowest_TQG = tl.full([BLOCK_T, BLOCK_Q, BLOCK_G], float("-inf"), tl.float32)
        best_TQ, second_TQ = tl.reduce((choice_TQG, lowest_TQG), 2, _two_best)
        best_TQ += second_TQ  # DeepSeek-V3: the sum of a group's best two scores
    else:
        best_TQ = tl.max(choice_TQG, 2)
    is_group_TQ = tl.broadcast_to((tl.arange(0, BLOCK_Q) < GROUPS)[None, :], [BLOCK_T, BLOCK_Q])
    _, left_TQ = _best_columns(_sort_key(best_TQ), is_group_TQ, KEPT, BLOCK_Q)
    kept_TQG = tl.broadcast_to((left_TQ == CHOSEN)[:, :, None], [BLOCK_T, BLOCK_Q, BLOCK_G])
    return tl.reshape(kept_TQG, [BLOCK_T, BLOCK_Q * BLOCK_G])


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, part_counts_ptr, part_mass_ptr, part_z_ptr, length, tiles,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, AFTER: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr, TOP2: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some tiles of one sequence's tokens, and their sums.

    Example with softmax and K = 2: logits [0, ln 2, ln 5, 0] have scores [1, 2, 5, 1] / 9; the choice is experts [2, 1]
    with weights [5/9, 2/9], or [5/7, 2/7] normalized.
    """
    GROUP: tl.constexpr = E // GROUPS
    BLOCK_E: tl.constexpr = BLOCK_Q * BLOCK_G
    chunk, sequence = tl.program_id(0), tl.program_id(1)
    column_E = tl.arange(0, BLOCK_E)
    expert_E = column_E // BLOCK_G * GROUP + column_E % BLOCK_G
    exists_E = (column_E % BLOCK_G < GROUP) & (column_E < GROUPS * BLOCK_G)
    expert_1E, exists_1E = expert_E[None, :], exists_E[None, :]
    choice_1K = tl.arange(0, BLOCK_K)[None, :]
    counts_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.int32)
    mass_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    z_T = tl.zeros([BLOCK_T], tl.float32)

    for tile in range(tiles):
        position_T = (chunk * tiles + tile) * BLOCK_T + tl.arange(0, BLOCK_T)  # in the sequence
        exists_T1 = (position_T < length)[:, None]
        token_T1 = (sequence * length + position_T)[:, None]

        # 1. Scores. Rows past the end are made of zeros, columns past the last expert of -inf.
        logits_TE = tl.load(logits_ptr + token_T1 * E + expert_1E, mask=exists_T1 & exists_1E, other=0.0)
        logits_TE = tl.where(exists_1E, logits_TE.to(tl.float32), float("-inf"))
        largest_T1 = tl.max(logits_TE, 1)[:, None]
        powers_TE = tl.exp(logits_TE - largest_T1)
        total_T1 = tl.sum(powers_TE, 1)[:, None]
        scores_TE = tl.sigmoid(logits_TE) if SIGMOID else powers_TE * (1.0 / total_T1)

        # 2. Choice.
        choice_TE = logits_TE if AFTER else scores_TE
        if bias_ptr is not None:
            choice_TE += tl.load(bias_ptr + expert_E, mask=exists_E, other=0.0)[None, :]
        eligible_TE = tl.broadcast_to(exists_1E, [BLOCK_T, BLOCK_E])
        if GROUPS > 1:
            choice_TE = tl.where(exists_1E, choice_TE, float("-inf"))
            eligible_TE &= _is_in_best_groups(choice_TE, GROUPS, GROUPS_KEPT, TOP2, BLOCK_Q, BLOCK_G)
        columns_TK, left_TE = _best_columns(_sort_key(choice_TE), eligible_TE, K, BLOCK_K)
        experts_TK = columns_TK // BLOCK_G * GROUP + columns_TK % BLOCK_G

        # 3. Weights of the chosen, from their logits again: the cache has them, a search in registers costs more.
        is_slot = exists_T1 & (choice_1K < K)
        chosen_TK = tl.load(logits_ptr + token_T1 * E + experts_TK, mask=is_slot, other=0.0).to(tl.float32)
        if AFTER:
            chosen_TK = tl.where(choice_1K < K, chosen_TK, float("-inf"))
            weights_TK = tl.exp(chosen_TK - tl.max(chosen_TK, 1)[:, None])
            weights_TK *= 1.0 / tl.sum(weights_TK, 1)[:, None]
        elif SIGMOID:
            weights_TK = tl.sigmoid(chosen_TK)
        else:
            weights_TK = tl.exp(chosen_TK - largest_T1) * (1.0 / total_T1)
        if NORMALIZE:
            weights_TK *= 1.0 / (tl.sum(tl.where(choice_1K < K, weights_TK, 0.0), 1)[:, None] + 1e-20)
        slot_TK = token_T1 * K + choice_1K
        tl.store(weights_ptr + slot_TK, weights_TK * SCALE, mask=is_slot)
        tl.store(experts_ptr + slot_TK, experts_TK.to(tl.int64), mask=is_slot)

        # 4. Sums.
        share_T1 = tl.where(exists_T1, 1.0, 0.0)
        if SIGMOID:
            share_T1 /= tl.sum(scores_TE, 1)[:, None] + 1e-20
        mass_TE += scores_TE * share_T1
        counts_TE += (exists_T1 & (left_TE == CHOSEN)).to(tl.int32)
        logsumexp_T1 = tl.where(exists_T1, largest_T1 + tl.log(total_T1), 0.0)
        z_T += tl.sum(logsumexp_T1 * logsumexp_T1, 1)

    part = sequence * tl.num_programs(0) + chunk
    tl.store(part_counts_ptr + part * E + expert_E, tl.sum(counts_TE, 0), mask=exists_E)
    tl.store(part_mass_ptr + part * E + expert_E, tl.sum(mass_TE, 0), mask=exists_E)
    tl.store(part_z_ptr + part, tl.sum(z_T, 0))


@triton.jit
def sum_parts_kernel(
    part_counts_ptr, part_mass_ptr, part_z_ptr, counts_ptr, mass_ptr, z_ptr, chunks,  # parts B x C x E
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of one sequence over its chunks, for a block of experts; the first block also sums z."""
    block, sequence = tl.program_id(0), tl.program_id(1)
    expert_E = block * BLOCK_E + tl.arange(0, BLOCK_E)
    counts_CE = tl.zeros([BLOCK_C, BLOCK_E], tl.int32)
    mass_CE = tl.zeros([BLOCK_C, BLOCK_E], tl.float32)
    z_C = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, chunks, BLOCK_C):
        chunk_C = start + tl.arange(0, BLOCK_C)
        part_C = sequence * chunks + chunk_C
        offsets_CE = part_C[:, None] * E + expert_E[None, :]
        inside = (chunk_C < chunks)[:, None] & (expert_E < E)[None, :]
        counts_CE += tl.load(part_counts_ptr + offsets_CE, mask=inside, other=0)
        mass_CE += tl.load(part_mass_ptr + offsets_CE, mask=inside, other=0.0)
        z_C += tl.load(part_z_ptr + part_C, mask=chunk_C < chunks, other=0.0)
    out_E = sequence * E + expert_E
    tl.store(counts_ptr + out_E, tl.sum(counts_CE, 0).to(tl.int64), mask=expert_E < E)
    tl.store(mass_ptr + out_E, tl.sum(mass_CE, 0), mask=expert_E < E)
    if block == 0:
        tl.store(z_ptr + sequence, tl.sum(z_C, 0))


@triton.jit
def route_backward_kernel(
    logits_ptr, experts_ptr, dweights_ptr, dmass_ptr, dz_ptr, dlogits_ptr, length,  # logits T x E, experts T x K
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, AFTER: tl.constexpr, NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of logits, from those of weights, mass and z, each of which may be missing.

    The K gradients of the weights are first placed at their experts (0 where not chosen); the rest is elementwise with
    row sums. With p = softmax and w = v / sum(v): dlogits = p (dp - sum(p dp)), dv = (dw - sum(w dw)) / sum(v).
    """
    sequence = tl.program_id(1)
    position_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert_E = tl.arange(0, BLOCK_E)
    expert_1E, exists_1E = expert_E[None, :], (expert_E < E)[None, :]
    exists_T = position_T < length
    token_T = sequence * length + position_T
    inside = exists_T[:, None] & exists_1E
    logits_TE = tl.load(logits_ptr + token_T[:, None] * E + expert_1E, mask=inside, other=0.0)
    logits_TE = tl.where(exists_1E, logits_TE.to(tl.float32), float("-inf"))
    largest_T1 = tl.max(logits_TE, 1)[:, None]
    powers_TE = tl.exp(logits_TE - largest_T1)
    total_T1 = tl.sum(powers_TE, 1)[:, None]
    softmax_TE = powers_TE * (1.0 / total_T1)
    scores_TE = tl.sigmoid(logits_TE) if SIGMOID else softmax_TE
    dscores_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    dlogits_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)

    if dweights_ptr is not None:
        chosen_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.int1)
        dvalues_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
        for k in range(K):
            expert_T = tl.load(experts_ptr + token_T * K + k, mask=exists_T, other=0).to(tl.int32)
            dweight_T = tl.load(dweights_ptr + token_T * K + k, mask=exists_T, other=0.0)
            is_it_TE = expert_1E == expert_T[:, None]
            chosen_TE |= is_it_TE
            dvalues_TE = tl.where(is_it_TE, dweight_T[:, None] * SCALE, dvalues_TE)
        if AFTER:
            chosen_logits_TE = tl.where(chosen_TE, logits_TE, float("-inf"))
            values_TE = tl.exp(chosen_logits_TE - tl.max(chosen_logits_TE, 1)[:, None])
            values_TE /= tl.sum(values_TE, 1)[:, None]
        else:
            values_TE = tl.where(chosen_TE, scores_TE, 0.0)
        if NORMALIZE:
            sum_T1 = tl.sum(values_TE, 1)[:, None] + 1e-20
            mean_T1 = tl.sum(values_TE / sum_T1 * dvalues_TE, 1)[:, None]
            dvalues_TE = tl.where(chosen_TE, (dvalues_TE - mean_T1) / sum_T1, 0.0)
        if AFTER:
            dlogits_TE += values_TE * (dvalues_TE - tl.sum(values_TE * dvalues_TE, 1)[:, None])
        else:
            dscores_TE += dvalues_TE

    if dmass_ptr is not None:
        dmass_1E = tl.load(dmass_ptr + sequence * E + expert_E, mask=expert_E < E, other=0.0)[None, :]
        if SIGMOID:
            sum_T1 = tl.sum(scores_TE, 1)[:, None] + 1e-20
            dscores_TE += (dmass_1E - tl.sum(scores_TE / sum_T1 * dmass_1E, 1)[:, None]) / sum_T1
        else:
            dscores_TE += dmass_1E

    if SIGMOID:
        dlogits_TE += dscores_TE * scores_TE * (1.0 - scores_TE)
    else:
        dlogits_TE += scores_TE * (dscores_TE - tl.sum(scores_TE * dscores_TE, 1)[:, None])
    if dz_ptr is not None:
        dlogits_TE += tl.load(dz_ptr + sequence) * 2.0 * (largest_T1 + tl.log(total_T1)) * softmax_TE
    dlogits_ptrs = dlogits_ptr + token_T[:, None] * E + expert_1E
    tl.store(dlogits_ptrs, dlogits_TE.to(dlogits_ptr.dtype.element_ty), mask=inside)
