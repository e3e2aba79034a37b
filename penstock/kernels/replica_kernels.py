"""`penstock.kernels.replica_plan` on the device, equal to it bit for bit; the host reads nothing.

plan     one warp for each attempt, all at once; each keeps loads and rows in registers
split    one program for each expert takes the first attempt that succeeded, and the source's row of the split
assign   chunks of slots look up their group and physical expert

Weights and gradients of replicas between the memories of one node's GPUs, by a plan that stays on the device.

    push_replicas     this rank's experts to the slots of the ranks that hold replicas of them
    clear_slots       zeros where the gradients of this rank's replicas are summed
    pull_gradients    gradients of this rank's experts from those slots, added in the order of ranks and slots

Every rank has the same section at the same offset: one expert-sized piece for each slot. `penstock.parallel.replicas`
owns the memory and decides when a section may be written or read; nothing here waits. With expert tensor parallelism a
rank exchanges its part of an expert with the same part of the other groups.
"""

import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.language import ceil_div, power_of_two, start_kernel, tl, triton
from penstock.kernels.reference import RowOrder
from penstock.kernels.replica_plan import ATTEMPTS, MILLION, ReplicaPlan, ReplicaRule, empty_plan
from penstock.kernels.symmetric import Peers
from penstock.kernels.symmetric_kernels import peer_pointer

_FEASIBLE = tl.constexpr(0)  # words of an attempt's outcome
_FULLEST = tl.constexpr(1)
_REPLICAS = tl.constexpr(2)
_MOST_SLOTS = tl.constexpr(3)
_WORDS = tl.constexpr(4)
FIRST_LOOSER = 2  # attempts 0 and 1 keep the bound


def plan_replicas(counts_WE: Tensor, rule: ReplicaRule, source: int, passes: Tensor | None = None) -> ReplicaPlan:
    """`penstock.kernels.replica_plan.plan_replicas` in two launches; `counts_WE` is int32 and contiguous."""
    ranks, device = len(counts_WE), counts_WE.device
    attempts, slots = FIRST_LOOSER + ATTEMPTS, max(1, rule.groups * rule.slots)
    # Pairs of expert and rows, group by group, of each attempt; and its outcome.
    replicas = torch.empty(attempts, 2, slots, dtype=torch.int32, device=device)
    outcomes = torch.empty(attempts, _WORDS.value, dtype=torch.int32, device=device)
    plan = empty_plan(counts_WE, rule)
    sizes = {"E": rule.experts, "Z": rule.groups, "X": rule.slots, "PER_GROUP": rule.per_group}
    sizes |= {"BLOCK_E": power_of_two(rule.experts), "BLOCK_Z": power_of_two(rule.groups)}
    start_kernel(
        attempt_kernel, (attempts,), counts_WE, replicas, outcomes, ranks, rule.tolerance, rule.idle, rule.least_rows,
        SLOTS=slots, BLOCK_X=power_of_two(slots), ATTEMPTS=ATTEMPTS, MILLION=MILLION, **sizes, num_warps=1,
    )  # fmt: skip
    start_kernel(
        split_kernel, (rule.experts,),
        counts_WE, replicas, outcomes, *plan, passes, source, rule.tolerance, rule.idle,
        SLOTS=slots, TRIES=attempts, W=ranks, BLOCK_W=power_of_two(ranks),
        BLOCK_X=power_of_two(max(1, rule.slots)), BLOCK_T=power_of_two(attempts), MILLION=MILLION, **sizes,
        num_warps=1 if ranks <= 16 else 4,
    )  # fmt: skip
    return plan


def assign_replicas(experts_TK: Tensor, order: RowOrder, plan: ReplicaPlan, rule: ReplicaRule) -> Tensor:
    """`penstock.kernels.replica_plan.assign_replicas` in one launch."""
    experts_TK = experts_TK.contiguous()
    physical_TK = torch.empty_like(experts_TK, dtype=torch.int64)
    slots, block = experts_TK.numel(), 256
    start_kernel(
        assign_kernel, (max(1, ceil_div(slots, block)),), experts_TK, order.places_TK.contiguous(), plan.targets_EZ,
        plan.ends_EZ, physical_TK, slots, E=rule.experts, Z=rule.groups, PLACES=rule.places, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return physical_TK


@triton.jit
def _bound(rows, fullest, tolerance, idle, Z: tl.constexpr, MILLION: tl.constexpr):
    """`ReplicaRule.bound`."""
    bound = _share(rows, tolerance, Z, MILLION)
    return tl.where((fullest > bound) & (fullest <= _share(rows, idle, Z, MILLION)), fullest, bound)


@triton.jit
def _share(rows, over, Z: tl.constexpr, MILLION: tl.constexpr):
    """The even share of a group and `over` millionths of it, rounded up."""
    parts = tl.full([], MILLION, tl.int64) * Z
    return ((rows.to(tl.int64) * (MILLION + over) + parts - 1) // parts).to(tl.int32)


@triton.jit
def _loads(
    total_E, E: tl.constexpr, Z: tl.constexpr, PER_GROUP: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Z: tl.constexpr
):
    """Rows of each group's own experts."""
    group_E = tl.arange(0, BLOCK_E) // PER_GROUP
    group_Z = tl.arange(0, BLOCK_Z)
    load_Z = tl.zeros([BLOCK_Z], tl.int32)
    for group in range(Z):
        load_Z = tl.where(group_Z == group, tl.sum(tl.where(group_E == group, total_E, 0), 0), load_Z)
    return load_Z


@triton.jit(do_not_specialize=["tolerance", "idle", "least"])
def attempt_kernel(
    counts_ptr, replicas_ptr, outcomes_ptr, ranks, tolerance, idle, least,
    E: tl.constexpr, Z: tl.constexpr, X: tl.constexpr, PER_GROUP: tl.constexpr, SLOTS: tl.constexpr,
    ATTEMPTS: tl.constexpr, MILLION: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Z: tl.constexpr,
    BLOCK_X: tl.constexpr,
):  # fmt: skip
    """One attempt: 0 gives rows to the emptiest group, 1 fills groups from one donor each, the others as 0.

    With loads 6 2 | 1 1 and a bound of 5, attempt 0 writes the pair (0, 3) for slot 0 of group 1, and the outcome
    feasible, 5 rows, 1 replica, 1 slot.
    """
    attempt = tl.program_id(0)
    expert_E = tl.arange(0, BLOCK_E)
    group_Z = tl.arange(0, BLOCK_Z)
    is_group_Z = group_Z < Z
    home_E = tl.zeros([BLOCK_E], tl.int32)
    for rank in range(ranks):
        home_E += tl.load(counts_ptr + rank * E + expert_E, mask=expert_E < E, other=0)
    load_Z = _loads(home_E, E, Z, PER_GROUP, BLOCK_E, BLOCK_Z)
    fullest = tl.max(load_Z, 0)
    bound = _bound(tl.sum(home_E, 0), fullest, tolerance, idle, Z, MILLION)
    step = tl.maximum(attempt - 1, 0)
    over = tl.maximum(fullest - bound, 0).to(tl.int64) * step // ATTEMPTS
    bound += over.to(tl.int32)
    fills = attempt == 1

    pair_X = tl.arange(0, BLOCK_X)
    first_ptr = replicas_ptr + attempt * 2 * SLOTS
    tl.store(first_ptr + pair_X, tl.full([BLOCK_X], E, tl.int32), mask=pair_X < SLOTS)
    tl.store(first_ptr + SLOTS + pair_X, tl.zeros([BLOCK_X], tl.int32), mask=pair_X < SLOTS)
    # Other threads write pairs than those that emptied them.
    tl.debug_barrier()

    used_Z = tl.zeros([BLOCK_Z], tl.int32)
    donor = tl.full([], 0, tl.int32)
    target = tl.full([], 0, tl.int32)
    room = tl.full([], 0, tl.int32)  # of the target
    stuck = tl.full([], 0, tl.int32)
    while (fullest > bound) & (stuck == 0):
        if (room == 0) | (attempt != 1):
            takes_Z = is_group_Z & (load_Z < bound) & ((used_Z < X) | fills)
            # Rows are far fewer than the key of a group that takes none.
            key_Z = tl.where(takes_Z, load_Z, 0x7FFFFFFF)
            donor = tl.argmax(load_Z, 0).to(tl.int32)
            target = tl.argmin(key_Z, 0).to(tl.int32)
            room = tl.maximum(bound - tl.min(key_Z, 0), 0)
            stuck = (room == 0).to(tl.int32)
        if stuck == 0:
            own_E = tl.where((expert_E // PER_GROUP == donor) & (expert_E < E), home_E, -1)
            expert = tl.argmax(own_E, 0).to(tl.int32)
            rows = tl.minimum(tl.max(own_E, 0), room)
            surplus = tl.maximum(fullest - bound, least)
            rows = tl.where(fills, rows, tl.minimum(rows, surplus))
            slot = tl.sum(tl.where(group_Z == target, used_Z, 0), 0)
            tl.store(first_ptr + target * X + slot, expert, mask=slot < X)
            tl.store(first_ptr + SLOTS + target * X + slot, rows, mask=slot < X)
            home_E -= tl.where(expert_E == expert, rows, 0)
            load_Z += tl.where(group_Z == target, rows, 0) - tl.where(group_Z == donor, rows, 0)
            used_Z += (group_Z == target).to(tl.int32)
            room -= rows
            fullest = tl.max(load_Z, 0)
    largest = tl.max(used_Z, 0)
    outcome_ptr = outcomes_ptr + attempt * _WORDS
    tl.store(outcome_ptr + _FEASIBLE, ((stuck == 0) & ((largest <= X) | (attempt != 1))).to(tl.int32))
    tl.store(outcome_ptr + _FULLEST, fullest)
    tl.store(outcome_ptr + _REPLICAS, tl.sum(used_Z, 0))
    tl.store(outcome_ptr + _MOST_SLOTS, largest)


@triton.jit(do_not_specialize=["source", "tolerance", "idle"])
def split_kernel(
    counts_ptr, replicas_ptr, outcomes_ptr, slot_experts_ptr, slot_rows_ptr, targets_ptr, ends_ptr, facts_ptr,
    passes_ptr, source, tolerance, idle,
    E: tl.constexpr, Z: tl.constexpr, X: tl.constexpr, PER_GROUP: tl.constexpr, SLOTS: tl.constexpr,
    TRIES: tl.constexpr, W: tl.constexpr, MILLION: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_Z: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Copy one expert's part of the chosen attempt, and find how the source's rows of it are divided by group.

    With 4 and 6 rows of two sources, and 7 and 3 for their groups, the ends of source 0 are 4 4, those of source 1 3 6,
    each after the source's rows of smaller experts.
    """
    expert = tl.program_id(0)
    try_T = tl.arange(0, BLOCK_T)
    feasible_T = tl.load(outcomes_ptr + try_T * _WORDS + _FEASIBLE, mask=try_T < TRIES, other=0)
    chosen = tl.min(tl.where(feasible_T != 0, try_T, TRIES - 1), 0)  # the last attempt always succeeds
    from_ptr = replicas_ptr + chosen * 2 * SLOTS

    # 1. Rows and physical expert in each group.
    group_Z = tl.arange(0, BLOCK_Z)
    slot_X = tl.arange(0, BLOCK_X)
    pair_ZX = group_Z[:, None] * X + slot_X[None, :]
    exists_ZX = (group_Z < Z)[:, None] & (slot_X < X)[None, :]
    of_ZX = tl.load(from_ptr + pair_ZX, mask=exists_ZX, other=E)
    rows_ZX = tl.load(from_ptr + SLOTS + pair_ZX, mask=exists_ZX, other=0)
    mine_ZX = of_ZX == expert
    rows_Z = tl.sum(tl.where(mine_ZX, rows_ZX, 0), 1)
    target_Z = tl.max(tl.where(mine_ZX, group_Z[:, None] * (PER_GROUP + X) + PER_GROUP + slot_X[None, :], -1), 1)
    home = expert // PER_GROUP
    rank_W = tl.arange(0, BLOCK_W)
    count_W = tl.load(counts_ptr + rank_W * E + expert, mask=rank_W < W, other=0)
    total = tl.sum(count_W, 0)
    rows_Z = tl.where(group_Z == home, total - tl.sum(rows_Z, 0), rows_Z)
    target_Z = tl.where(group_Z == home, home * (PER_GROUP + X) + expert - home * PER_GROUP, target_Z)

    # 2. A group's own ranks first.
    PARTS: tl.constexpr = W // Z
    group_W = tl.where(rank_W < W, rank_W // PARTS, -1)
    of_WZ = group_W[:, None] == group_Z[None, :]
    is_before_WW = (group_W[:, None] == group_W[None, :]) & (rank_W[:, None] > rank_W[None, :])
    before_W = tl.sum(tl.where(is_before_WW, count_W[None, :], 0), 1)
    room_W = tl.sum(tl.where(of_WZ, rows_Z[None, :], 0), 1)
    at_home_W = tl.maximum(tl.minimum(room_W - before_W, count_W), 0)

    # 3. Rows that are left, in the order of the sources, to groups with rows left, in order.
    left_Z = rows_Z - tl.sum(tl.where(of_WZ, at_home_W[:, None], 0), 0)
    begin = tl.sum(tl.where(rank_W < source, count_W - at_home_W, 0), 0)
    end = begin + tl.sum(tl.where(rank_W == source, count_W - at_home_W, 0), 0)
    room_end_Z = tl.cumsum(left_Z, 0)
    sent_Z = tl.maximum(tl.minimum(end, room_end_Z) - tl.maximum(begin, room_end_Z - left_Z), 0)
    sent_Z += tl.where(group_Z == source // PARTS, tl.sum(tl.where(rank_W == source, at_home_W, 0), 0), 0)
    expert_E = tl.arange(0, BLOCK_E)
    own_E = tl.load(counts_ptr + source * E + expert_E, mask=expert_E < E, other=0)
    first = tl.sum(tl.where(expert_E < expert, own_E, 0), 0)
    tl.store(targets_ptr + expert * Z + group_Z, target_Z, mask=group_Z < Z)
    tl.store(ends_ptr + expert * Z + group_Z, first + tl.cumsum(sent_Z, 0), mask=group_Z < Z)

    if expert == 0:
        tl.store(slot_experts_ptr + pair_ZX, of_ZX, mask=exists_ZX)
        tl.store(slot_rows_ptr + pair_ZX, rows_ZX, mask=exists_ZX)
        total_E = tl.zeros([BLOCK_E], tl.int32)
        for rank in range(W):
            total_E += tl.load(counts_ptr + rank * E + expert_E, mask=expert_E < E, other=0)
        rows = tl.sum(total_E, 0)
        found_ptr = outcomes_ptr + chosen * _WORDS
        largest = tl.load(found_ptr + _MOST_SLOTS)
        filled = tl.load(outcomes_ptr + _WORDS + _MOST_SLOTS)
        fullest_home = tl.max(_loads(total_E, E, Z, PER_GROUP, BLOCK_E, BLOCK_Z), 0)
        needed = tl.where(chosen == 0, largest, filled)
        _note(facts_ptr, passes_ptr, 0, rows)
        _note(facts_ptr, passes_ptr, 1, _bound(rows, fullest_home, tolerance, idle, Z, MILLION))
        _note(facts_ptr, passes_ptr, 2, fullest_home)
        _note(facts_ptr, passes_ptr, 3, tl.load(found_ptr + _FULLEST))
        _note(facts_ptr, passes_ptr, 4, tl.load(found_ptr + _REPLICAS))
        _note(facts_ptr, passes_ptr, 5, largest)
        tl.store(facts_ptr + 6, needed)
        if passes_ptr is not None:
            tl.store(passes_ptr + 6, tl.maximum(tl.load(passes_ptr + 6), needed.to(tl.int64)))
        _note(facts_ptr, passes_ptr, 7, tl.full([], 1, tl.int32))


@triton.jit
def _note(facts_ptr, passes_ptr, index: tl.constexpr, fact):
    """Store a fact, and add it to the sums over passes, if they are given."""
    tl.store(facts_ptr + index, fact)
    if passes_ptr is not None:
        tl.store(passes_ptr + index, tl.load(passes_ptr + index) + fact.to(tl.int64))


@triton.jit
def assign_kernel(
    experts_ptr, places_ptr, targets_ptr, ends_ptr, physical_ptr, slots,
    E: tl.constexpr, Z: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The group of a slot is the number of ends that are not past its place; a dropped slot keeps no expert."""
    slot_R = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert_R = tl.load(experts_ptr + slot_R, mask=slot_R < slots, other=E).to(tl.int32)
    place_R = tl.load(places_ptr + slot_R, mask=slot_R < slots, other=0).to(tl.int32)
    kept_R = expert_R < E
    group_R = tl.zeros([BLOCK], tl.int32)
    for group in tl.static_range(Z - 1):
        end_R = tl.load(ends_ptr + expert_R * Z + group, mask=kept_R, other=0)
        group_R += (place_R >= end_R).to(tl.int32)
    physical_R = tl.load(targets_ptr + expert_R * Z + group_R, mask=kept_R, other=Z * PLACES)
    tl.store(physical_ptr + slot_R, physical_R.to(tl.int64), mask=slot_R < slots)


PUSH_PROGRAMS = 32  # enough to fill the links, beside products that get the other multiprocessors
PULL_PROGRAMS = 264  # where nothing runs beside
BLOCK = 4096  # words of a tile


def push_replicas(weight_e: Tensor, plan: ReplicaPlan, rule: ReplicaRule, peers: Peers, offset: int) -> None:
    """Write each of this rank's experts (contiguous, of any dtype) to its replicas' slots; `offset` is in bytes."""
    words_e = words_of(weight_e)
    start_kernel(
        push_replicas_kernel, (PUSH_PROGRAMS,), words_e, plan.slot_experts_ZX, peers.addresses_W, offset, peers.rank,
        WORDS=words_e.shape[1], **_sizes(rule, peers), BLOCK=min(BLOCK, power_of_two(words_e.shape[1])), num_warps=8,
    )  # fmt: skip


def clear_slots(sums_X: Tensor, plan: ReplicaPlan, rule: ReplicaRule, peers: Peers) -> None:
    """Set the slots of this rank that hold a replica to zero; others keep what they have."""
    words_X, group = words_of(sums_X), peers.rank * rule.groups // peers.size
    width = words_X.shape[1]
    start_kernel(
        clear_slots_kernel, (PULL_PROGRAMS,), words_X, plan.slot_experts_ZX, group, WORDS=width, E=rule.experts,
        X=rule.slots, BLOCK=min(BLOCK, power_of_two(width)), num_warps=8,
    )  # fmt: skip


def pull_gradients(
    total_e: Tensor, plan: ReplicaPlan, rule: ReplicaRule, peers: Peers, offset: int, programs: int = PULL_PROGRAMS
) -> None:
    """Add the float32 gradients of all replicas of this rank's experts, rounded once if the totals have 16 bits."""
    total_eN = total_e.view(len(total_e), -1)
    numbers = total_eN.shape[1]
    start_kernel(
        pull_gradients_kernel, (programs,), total_eN, plan.slot_experts_ZX, peers.addresses_W, offset, peers.rank,
        NUMBERS=numbers, **_sizes(rule, peers), BLOCK_S=power_of_two(rule.groups * rule.slots),
        BLOCK=min(BLOCK, power_of_two(numbers)), num_warps=8,
    )  # fmt: skip


def words_of(weight_e: Tensor) -> Tensor:
    """Experts as rows of 32-bit words."""
    rows = weight_e.reshape(len(weight_e), -1)
    if rows.shape[1] * rows.element_size() % 4:
        raise KernelError("an expert's weights must be whole 32-bit words", got=f"{rows.shape[1]} x {rows.dtype}")
    return rows.view(torch.int32)


def _sizes(rule: ReplicaRule, peers: Peers) -> dict[str, int]:
    sizes = {"E": rule.experts, "Z": rule.groups, "X": rule.slots, "PER_GROUP": rule.per_group}
    return sizes | {"PARTS": peers.size // rule.groups}


@triton.jit(do_not_specialize=["rank"])
def push_replicas_kernel(
    words_ptr, slot_experts_ptr, addresses_ptr, offset, rank,
    WORDS: tl.constexpr, E: tl.constexpr, Z: tl.constexpr, X: tl.constexpr, PER_GROUP: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All programs share each expert. With slots [[4, 4], [0, 1]] of 4 experts, group 0 sends both of its own."""
    group = rank // PARTS
    for step in range(Z * X):
        target = (group + 1 + step // X) % Z  # groups begin with different targets
        slot = step % X
        expert = tl.load(slot_experts_ptr + target * X + slot)
        if (expert < E) & (expert // PER_GROUP == group):
            from_ptr = words_ptr + (expert % PER_GROUP).to(tl.int64) * WORDS
            to_ptr = peer_pointer(addresses_ptr, target * PARTS + rank % PARTS, offset, tl.int32)
            to_ptr += tl.full([], slot, tl.int64) * WORDS
            for tile in range(tl.program_id(0), tl.cdiv(WORDS, BLOCK), tl.num_programs(0)):
                word = tile * BLOCK + tl.arange(0, BLOCK)
                tl.store(to_ptr + word, tl.load(from_ptr + word, mask=word < WORDS), mask=word < WORDS)


@triton.jit(do_not_specialize=["group"])
def clear_slots_kernel(
    words_ptr, slot_experts_ptr, group, WORDS: tl.constexpr, E: tl.constexpr, X: tl.constexpr, BLOCK: tl.constexpr
):
    """With experts [4, 1] in the slots, of 4, the second slot is cleared."""
    for slot in range(X):
        if tl.load(slot_experts_ptr + group * X + slot) < E:
            slot_ptr = words_ptr + tl.full([], slot, tl.int64) * WORDS
            for tile in range(tl.program_id(0), tl.cdiv(WORDS, BLOCK), tl.num_programs(0)):
                word = tile * BLOCK + tl.arange(0, BLOCK)
                tl.store(slot_ptr + word, tl.zeros([BLOCK], tl.int32), mask=word < WORDS)


@triton.jit(do_not_specialize=["rank"])
def pull_gradients_kernel(
    totals_ptr, slot_experts_ptr, addresses_ptr, offset, rank,
    NUMBERS: tl.constexpr, E: tl.constexpr, Z: tl.constexpr, X: tl.constexpr, PER_GROUP: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With slots [[4, 4], [0, 4], [1, 0]] of 6 experts, expert 0 gains slot 0 of group 1, then slot 1 of group 2."""
    group = rank // PARTS
    slot_S = tl.arange(0, BLOCK_S)  # slots of all groups
    expert_S = tl.load(slot_experts_ptr + slot_S, mask=slot_S < Z * X, other=E)
    copies_of_all = tl.sum((expert_S // PER_GROUP == group).to(tl.int32), 0)
    for expert in range(tl.where(copies_of_all > 0, PER_GROUP, 0)):  # without replicas there is nothing to look for
        is_copy_S = expert_S == group * PER_GROUP + expert
        copies = tl.sum(is_copy_S.to(tl.int32), 0)
        if copies > 0:
            total_ptr = totals_ptr + tl.full([], expert, tl.int64) * NUMBERS
            for tile in range(tl.program_id(0), tl.cdiv(NUMBERS, BLOCK), tl.num_programs(0)):
                number = tile * BLOCK + tl.arange(0, BLOCK)
                total = tl.load(total_ptr + number, mask=number < NUMBERS, other=0.0).to(tl.float32)
                slot = tl.full([], -1, tl.int32)
                for _ in range(copies):
                    slot = tl.min(tl.where(is_copy_S & (slot_S > slot), slot_S, BLOCK_S), 0)
                    their_ptr = peer_pointer(addresses_ptr, slot // X * PARTS + rank % PARTS, offset, tl.float32)
                    their_ptr += (slot % X).to(tl.int64) * NUMBERS
                    total += tl.load(their_ptr + number, mask=number < NUMBERS, other=0.0)
                tl.store(total_ptr + number, total.to(totals_ptr.dtype.element_ty), mask=number < NUMBERS)
