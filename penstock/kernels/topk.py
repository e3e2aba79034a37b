"""Router: scores, group limit, top-k, weights and the sums of balance losses, in one pass over the logits.

    route_kernel            scores, choice and weights of some rows; their counts, mass and z summed
    sum_parts_kernel        sum over the programs, for each sequence
    route_backward_kernel   gradients of weights, mass and z to the logits; recomputes the scores
    balance_loss_kernel     the auxiliary losses of a layer and their gradients

Counts, mass and z need no atomics, and the order of their sums depends on the number of tokens alone. Only the logits
and the choices are saved.

A tile is some rows of logits by all experts. The size of a group need not be a power of two: each group is padded, so a
tile has BLOCK_Q groups of BLOCK_G columns, and every column knows its expert.

The choice is made on integers. A float32 score becomes an int32 key of the same order; two marks below every key mean
"chosen" and "not eligible", and NaN has a place in the order, so K rounds give K different experts for any logits. Ties
go to the lowest expert id. Reasons for the order of the search: docs/decisions/0110.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.language import start_kernel, tl, triton
from penstock.kernels.operators import LinearLoss
from penstock.kernels.reference import Routed, RouterRule
from penstock.kernels.tuning import KernelLaunch

SCORES = {"softmax": 0, "sigmoid": 1, "sqrt-softplus": 2}  # values of SCORE

MOST_COLUMNS = tl.constexpr(1024)  # of a tile: a column's number is stored in the low bits of a key
CHOSEN = tl.constexpr(-(2**31))  # marks in place of a key
NOT_ELIGIBLE = tl.constexpr(-(2**31) + 1)
LOWEST_KEY = tl.constexpr(-(2**31) + 1024)  # above the marks with any low bits


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
def _root_of_softplus(x):
    """sqrt(log(1 + exp(x))) to a few units in the last place: log(1 + z) is log(u) z / (u - 1), u = 1 + z rounded."""
    z = tl.exp(-tl.abs(x))
    u = 1.0 + z
    return tl.sqrt(tl.maximum(x, 0.0) + tl.where(u == 1.0, z, tl.log(u) * z / tl.where(u == 1.0, 1.0, u - 1.0)))


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
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, AFTER: tl.constexpr, GROUPS: tl.constexpr,
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
        if SCORE == 0:
            scores_TE = powers_TE * (1.0 / total_T1)
        else:
            scores_TE = tl.sigmoid(logits_TE) if SCORE == 1 else _root_of_softplus(logits_TE)

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
        elif SCORE == 1:
            weights_TK = tl.sigmoid(chosen_TK)
        elif SCORE == 2:
            weights_TK = _root_of_softplus(chosen_TK)
        else:
            weights_TK = tl.exp(chosen_TK - largest_T1) * (1.0 / total_T1)
        if NORMALIZE:
            weights_TK *= 1.0 / (tl.sum(tl.where(choice_1K < K, weights_TK, 0.0), 1)[:, None] + 1e-20)
        slot_TK = token_T1 * K + choice_1K
        tl.store(weights_ptr + slot_TK, weights_TK * SCALE, mask=is_slot)
        tl.store(experts_ptr + slot_TK, experts_TK.to(tl.int64), mask=is_slot)

        # 4. Sums.
        share_T1 = tl.where(exists_T1, 1.0, 0.0)
        if SCORE > 0:
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
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, AFTER: tl.constexpr, NORMALIZE: tl.constexpr,
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
    scores_TE = softmax_TE
    if SCORE == 1:
        scores_TE = tl.sigmoid(logits_TE)
    if SCORE == 2:
        scores_TE = _root_of_softplus(logits_TE)
    dscores_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    dlogits_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)

    if dweights_ptr is not None:
        chosen_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.int1)
        dvalues_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
        for k in range(K):
            expert_T = tl.load(experts_ptr + token_T * K + k, mask=exists_T, other=0).to(tl.int32)
            dweight_T = tl.load(dweights_ptr + token_T * K + k, mask=exists_T, other=0.0)
            is_it_TE = expert_1E == expert_T[:, None]  # one True a row
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
        if SCORE > 0:
            sum_T1 = tl.sum(scores_TE, 1)[:, None] + 1e-20
            dscores_TE += (dmass_1E - tl.sum(scores_TE / sum_T1 * dmass_1E, 1)[:, None]) / sum_T1
        else:
            dscores_TE += dmass_1E

    if SCORE == 1:
        dlogits_TE += dscores_TE * scores_TE * (1.0 - scores_TE)
    elif SCORE == 2:
        # The derivative of softplus is the sigmoid; where the score underflows to 0, so does its gradient.
        slope_TE = tl.sigmoid(logits_TE) / tl.where(scores_TE > 0, 2.0 * scores_TE, 1.0)
        dlogits_TE += dscores_TE * slope_TE
    else:
        dlogits_TE += scores_TE * (dscores_TE - tl.sum(scores_TE * dscores_TE, 1)[:, None])
    if dz_ptr is not None:
        # z = logsumexp**2, and the gradient of logsumexp is the softmax.
        dlogits_TE += tl.load(dz_ptr + sequence) * 2.0 * (largest_T1 + tl.log(total_T1)) * softmax_TE
    dlogits_ptrs = dlogits_ptr + token_T[:, None] * E + expert_1E
    tl.store(dlogits_ptrs, dlogits_TE.to(dlogits_ptr.dtype.element_ty), mask=inside)


# A tile of 256 elements, eight for each thread of one warp: all values stay in registers and no warp waits.
LAUNCH = KernelLaunch(block_rows=4, block_columns=64, warps=1)
PROGRAMS = 2048  # of forward before each takes a second tile: more fill the chip, fewer make fewer partial sums


def route(logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule, sequences: int) -> Routed:
    """`penstock.kernels.reference.route`. Raises KernelError if the rule or the bias does not fit the logits."""
    _check(logits_TE, bias_E, rule, sequences)
    return Routed(*_Route.apply(logits_TE, bias_E, rule, sequences))


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule, sequences: int
    ) -> tuple[Tensor, ...]:
        logits_TE = logits_TE.contiguous()
        (tokens, experts), device = logits_TE.shape, logits_TE.device
        length = tokens // sequences
        constants = _constants(experts, rule)
        tiles = max(1, tokens // (PROGRAMS * constants["BLOCK_T"]))
        chunks = triton.cdiv(length, tiles * constants["BLOCK_T"])

        weights_TK = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=device)
        experts_TK = torch.empty(tokens, rule.top_k, dtype=torch.int64, device=device)
        parts = (  # of the sums, by program
            torch.empty(sequences, chunks, experts, dtype=torch.int32, device=device),  # counts
            torch.empty(sequences, chunks, experts, dtype=torch.float32, device=device),  # mass
            torch.empty(sequences, chunks, dtype=torch.float32, device=device),  # z
        )
        start_kernel(
            route_kernel, (chunks, sequences),
            logits_TE, bias_E, weights_TK, experts_TK, *parts, length, tiles, **constants, num_warps=LAUNCH.warps,
        )  # fmt: skip
        counts_BE = torch.empty(sequences, experts, dtype=torch.int64, device=device)
        mass_BE = torch.empty(sequences, experts, dtype=torch.float32, device=device)
        z_B = torch.empty(sequences, dtype=torch.float32, device=device)
        start_kernel(
            sum_parts_kernel, (triton.cdiv(experts, 8), sequences),
            *parts, counts_BE, mass_BE, z_B, chunks, E=experts, BLOCK_E=8, BLOCK_C=512, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(logits_TE, experts_TK)
        ctx.rule, ctx.sequences = rule, sequences
        ctx.mark_non_differentiable(experts_TK, counts_BE)
        ctx.set_materialize_grads(False)
        return weights_TK, experts_TK, counts_BE, mass_BE, z_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None]:
        dweights_TK, _, _, dmass_BE, dz_B = gradients
        logits_TE, experts_TK = ctx.saved_tensors
        tokens, experts = logits_TE.shape
        length = tokens // ctx.sequences
        constants = _backward_constants(experts, ctx.rule)
        incoming = (None if gradient is None else gradient.contiguous() for gradient in (dweights_TK, dmass_BE, dz_B))
        dlogits_TE = torch.empty_like(logits_TE)
        start_kernel(
            route_backward_kernel, (triton.cdiv(length, constants["BLOCK_T"]), ctx.sequences),
            logits_TE, experts_TK, *incoming, dlogits_TE, length, **constants, num_warps=LAUNCH.warps,
        )  # fmt: skip
        return dlogits_TE, None, None, None


def _constants(experts: int, rule: RouterRule) -> dict[str, Any]:
    """Constants of `route_kernel`: the rule, and a tile of BLOCK_T rows x BLOCK_Q groups x BLOCK_G columns."""
    groups, columns = triton.next_power_of_2(rule.groups), triton.next_power_of_2(experts // rule.groups)
    return {
        "E": experts,
        "K": rule.top_k,
        "SCORE": SCORES[rule.score],
        "AFTER": rule.softmax_after_top_k,
        "GROUPS": rule.groups,
        "GROUPS_KEPT": rule.topk_group,
        "TOP2": rule.group_score == "top2",
        "NORMALIZE": rule.normalize,
        "SCALE": rule.scale,
        "BLOCK_T": _rows_of_tile(groups * columns),
        "BLOCK_Q": groups,
        "BLOCK_G": columns,
        "BLOCK_K": triton.next_power_of_2(rule.top_k),
    }


def _backward_constants(experts: int, rule: RouterRule) -> dict[str, Any]:
    """Constants of `route_backward_kernel`, which ignores groups: a tile of BLOCK_T rows x BLOCK_E columns."""
    constants, width = _constants(experts, rule), triton.next_power_of_2(experts)
    kept = ("E", "K", "SCORE", "AFTER", "NORMALIZE", "SCALE")
    return {name: constants[name] for name in kept} | {"BLOCK_T": _rows_of_tile(width), "BLOCK_E": width}


def _rows_of_tile(width: int) -> int:
    return max(1, LAUNCH.block_rows * LAUNCH.block_columns // width)


def _check(logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule, sequences: int) -> None:
    tokens, experts = logits_TE.shape
    group = experts // rule.groups
    if experts % rule.groups or rule.top_k > rule.topk_group * group or rule.topk_group > rule.groups:
        got = f"{experts} experts in {rule.groups} groups, {rule.topk_group} kept, top {rule.top_k}"
        raise KernelError("route: the groups kept must hold top_k experts, and groups must divide the experts", got=got)
    if rule.groups > 1 and rule.group_score == "top2" and group < 2:
        raise KernelError("route: a group judged by its best two must have two", got=f"{group} expert in each group")
    if rule.softmax_after_top_k and rule.score != "softmax":
        raise KernelError("route: softmax_after_top_k needs the softmax score", got=rule.score)
    columns = triton.next_power_of_2(rule.groups) * triton.next_power_of_2(group)
    if columns > MOST_COLUMNS.value:
        raise KernelError("route: too many experts", got=f"{experts}", allowed=f"{MOST_COLUMNS.value} columns")
    if max(logits_TE.numel(), tokens * rule.top_k) >= 2**31:
        raise KernelError("route: logits are counted in 32 bits", got=f"{tokens} x {experts}", fix="cut the batch")
    if tokens % sequences:
        raise KernelError("route: tokens must fill the sequences", got=f"{tokens} tokens for {sequences} sequences")
    if bias_E is not None and (bias_E.shape != (experts,) or bias_E.dtype != torch.float32):
        raise KernelError("route: the bias must be float32, one for each expert", got=f"{bias_E.dtype} {bias_E.shape}")


def balance_loss(mass_BE: Tensor, z_B: Tensor, slots_BE: Tensor, factor: float, z_factor: float) -> LinearLoss:
    """`penstock.kernels.operators.reference_balance_loss` in one kernel of one program; sums in another order.

    The definition has some twenty operators on a few hundred numbers each; a GPU needs microseconds for each of them,
    and tokens wait for them in every layer.
    """
    sequences, experts = mass_BE.shape
    loss = LinearLoss(mass_BE.new_empty(()), mass_BE.new_empty(sequences, experts), z_B.new_empty(sequences))
    start_kernel(
        balance_loss_kernel, (1,),
        mass_BE.contiguous(), z_B.contiguous(), slots_BE.contiguous(), *loss, sequences,
        0 if len(slots_BE) == 1 else experts, experts, factor, z_factor,
        BLOCK_E=triton.next_power_of_2(experts), num_warps=1,
    )  # fmt: skip
    return loss


@triton.jit(do_not_specialize=["sequences", "slots_stride", "factor", "z_factor"])
def balance_loss_kernel(
    mass_ptr, z_ptr, slots_ptr, loss_ptr, dmass_ptr, dz_ptr,  # mass, slots, dmass B x E; z, dz B
    sequences, slots_stride, experts, factor, z_factor,  # stride 0: slots of all sequences
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """All sequences, one after the other. Example with 2 experts, a factor of 1 and slots [3, 1]: dmass [1.5, 0.5]."""
    expert_E = tl.arange(0, BLOCK_E)
    is_expert = expert_E < experts
    loss_E = tl.zeros([BLOCK_E], tl.float32)
    z_sum = 0.0
    for sequence in range(sequences):
        slots_E = tl.load(slots_ptr + sequence * slots_stride + expert_E, mask=is_expert, other=0).to(tl.float32)
        even = experts / tl.maximum(tl.sum(slots_E, 0), 1.0)  # 1 / an even share of the slots
        dmass_E = slots_E * (even * factor)
        place_E = sequence * experts + expert_E
        loss_E += dmass_E * tl.load(mass_ptr + place_E, mask=is_expert, other=0.0)
        tl.store(dmass_ptr + place_E, dmass_E, mask=is_expert)
        z_sum += tl.load(z_ptr + sequence)
        tl.store(dz_ptr + sequence, z_factor)
    tl.store(loss_ptr, tl.sum(loss_E, 0) + z_sum * z_factor)
