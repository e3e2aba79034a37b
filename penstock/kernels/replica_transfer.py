"""Weights and gradients of replicas between the memories of one node's GPUs, by a plan that stays on the device.

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
from penstock.kernels.language import power_of_two, tl, triton
from penstock.kernels.launching import start_kernel
from penstock.kernels.replica_plan import ReplicaPlan, ReplicaRule
from penstock.kernels.symmetric import Peers
from penstock.kernels.symmetric_kernels import peer_pointer

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
