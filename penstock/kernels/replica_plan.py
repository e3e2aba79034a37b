"""Plan of replicas: experts are copied to ranks with room, so that no rank computes more rows than a bound.

Each of W ranks knows how many of its slots chose each expert; the table of all ranks is gathered, and every rank makes
the same plan from it. A group is a rank with different experts (or the ranks that hold parts of the same ones); besides
its own experts it can hold replicas of others, in a few replica slots. Three steps:

    plan     which expert goes to which slot, and how many of its rows
    split    for one source rank, how many of its rows of each expert go to each group, its own group first
    assign   the physical expert of each slot: home expert or replica, numbered so that those of a group are consecutive

With experts 0 1 on group 0, 2 3 on group 1, one slot each and loads 6 2 1 1 the even share is 5. Group 0 gives 3 rows
of expert 0 away: its replica in the slot of group 1 is physical expert 5.

    physical     0    1    2        3    4    5
    expert       0    1    empty    2    3    replica of 0
    rows         3    2             1    1    3

The bound is hard: the even share and a tolerance, rounded up. Several attempts are made, and the first that needs no
more slots than there are is taken:

    1. Until no group is over the bound: the fullest group gives rows of its largest expert to the emptiest group.
    2. The same, but a group that takes rows is filled to the bound from one donor. So it needs replicas of one group's
       experts only, and as many slots as a group has experts always suffice.
    3. As 1, with a looser bound: ATTEMPTS from the bound to the fullest group, which is no copy at all.

Nothing is copied if the loads are within the bound, or within `ReplicaRule.idle`. Ties go to the lowest index, and all
numbers are integers: ranks and implementations agree to the bit. `penstock.kernels.replica_kernels` has the same
functions for GPUs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.language import record_wait
from penstock.kernels.reference import RowOrder

ATTEMPTS = 16  # with looser bounds
MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ReplicaRule:
    """Sizes and limits of the plans of a layer."""

    experts: int  # of the layer; consecutive ones share a group
    groups: int
    slots: int  # replicas that a group can hold
    tolerance: int = 0  # rows over the even share that a group may have, in millionths of that share
    idle: int = 0  # the same: up to so many rows nothing is copied; ignored if not above `tolerance`
    least_rows: int = 0  # of a replica, if its expert has them and its group has room

    @property
    def per_group(self) -> int:
        return self.experts // self.groups

    @property
    def places(self) -> int:
        """Physical experts of a group."""
        return self.per_group + self.slots

    def bound(self, rows: int, fullest: int) -> int:
        """Most rows of a group, if all groups have `rows` together and the fullest one that many at home."""
        bound, idle = (-(-rows * (MILLION + over) // (MILLION * self.groups)) for over in (self.tolerance, self.idle))
        return fullest if bound < fullest <= idle else bound


class PlanFact(IntEnum):
    """Places in `ReplicaPlan.facts`."""

    ROWS = 0  # of all groups
    BOUND = 1
    FULLEST_HOME = 2  # rows of the fullest group without replicas
    FULLEST = 3  # and with them
    REPLICAS = 4
    MOST_SLOTS = 5  # replicas of the group that holds most
    SLOTS_NEEDED = 6  # slots with which the bound holds: those used, or those of attempt 2
    PLANS = 7  # 1, so that a sum of facts counts plans


class ReplicaPlan(NamedTuple):
    """A plan, and what one source rank needs of it; all int32."""

    slot_experts_ZX: Tensor  # expert of each slot of each group; `experts` for an empty one
    slot_rows_ZX: Tensor  # rows that the replica takes over, of all sources
    targets_EZ: Tensor  # physical expert of each expert in each group; -1 where the group has none
    ends_EZ: Tensor  # places (of the source's slots sorted by expert) past those that go to each group, in order
    facts: Tensor  # by `PlanFact`


def plan_replicas(counts_WE: Tensor, rule: ReplicaRule, source: int, passes: Tensor | None = None) -> ReplicaPlan:
    """Plan for the slots of each rank on each expert, int32, as `source` sees it. The host reads the counts.

    Its facts are added to `passes`, int64 by `PlanFact`; SLOTS_NEEDED is the largest instead.
    """
    if counts_WE.is_meta:
        record_wait(counts_WE)
        return empty_plan(counts_WE, rule)
    counts: list[list[int]] = counts_WE.tolist()
    totals = [sum(column) for column in zip(*counts, strict=True)]
    placement, needed = place_replicas(totals, rule)
    fullest_home = max(group_loads(totals, rule))
    facts = [sum(totals), rule.bound(sum(totals), fullest_home), fullest_home, placement.fullest]
    facts += [sum(map(len, placement.replicas)), placement.most_slots, needed, 1]
    targets, ends, first = [], [], 0
    for expert in range(rule.experts):
        home, by_group = expert // rule.per_group, [0] * rule.groups
        places = [-1] * rule.groups
        for group, slot, rows in placement.of(expert):
            by_group[group], places[group] = rows, group * rule.places + rule.per_group + slot
        by_group[home], places[home] = totals[expert] - sum(by_group), home * rule.places + expert % rule.per_group
        targets.append(places)
        ends.append([first + end for end in _ends([row[expert] for row in counts], by_group, source)])
        first += counts[source][expert]
    padding = [(rule.experts, 0)]
    slots = [replicas + padding * (rule.slots - len(replicas)) for replicas in placement.replicas]
    plan = empty_plan(counts_WE, rule)
    slot_experts, slot_rows = ([[pair[part] for pair in replicas] for replicas in slots] for part in (0, 1))
    for table, values in zip(plan, (slot_experts, slot_rows, targets, ends, facts), strict=True):
        table.copy_(torch.tensor(values, dtype=torch.int32).view(table.shape))
    if passes is not None:
        needed = max(needed, int(passes[PlanFact.SLOTS_NEEDED]))
        passes += plan.facts
        passes[PlanFact.SLOTS_NEEDED] = needed
    return plan


def assign_replicas(experts_TK: Tensor, order: RowOrder, plan: ReplicaPlan, rule: ReplicaRule) -> Tensor:
    """Int64 physical expert of each slot of the plan's source; groups x places for a dropped one.

    `order` sorts the slots by expert. The first rows of an expert go to its first group, and so on.
    """
    known_TK = experts_TK.clamp(max=rule.experts - 1)
    group_TK = (order.places_TK[:, :, None] >= plan.ends_EZ[known_TK]).sum(2).clamp(max=rule.groups - 1)
    physical_TK = plan.targets_EZ[known_TK].gather(2, group_TK[:, :, None])[:, :, 0].long()
    return torch.where(experts_TK < rule.experts, physical_TK, rule.groups * rule.places)


def empty_plan(counts_WE: Tensor, rule: ReplicaRule) -> ReplicaPlan:
    """Memory of a plan, on the device of the counts."""

    def made(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=counts_WE.device)

    slots, by_group = (rule.groups, rule.slots), (rule.experts, rule.groups)
    return ReplicaPlan(made(*slots), made(*slots), made(*by_group), made(*by_group), made(len(PlanFact)))


@dataclass(frozen=True)
class PlacedReplicas:
    """Result of an attempt."""

    replicas: list[list[tuple[int, int]]]  # expert and rows of each slot of each group
    loads: list[int]  # rows of each group with them

    @property
    def fullest(self) -> int:
        return max(self.loads)

    @property
    def most_slots(self) -> int:
        """Replicas of the group that holds most."""
        return max(map(len, self.replicas))

    def of(self, expert: int) -> Iterator[tuple[int, int, int]]:
        """Group, slot and rows of each replica of an expert."""
        for group, held in enumerate(self.replicas):
            yield from ((group, slot, rows) for slot, (held_expert, rows) in enumerate(held) if held_expert == expert)


def group_loads(totals: Sequence[int], rule: ReplicaRule) -> list[int]:
    m = rule.per_group
    return [sum(totals[group * m : (group + 1) * m]) for group in range(rule.groups)]


def place_replicas(totals: Sequence[int], rule: ReplicaRule) -> tuple[PlacedReplicas, int]:
    """The first attempt that succeeds, and the slots with which the bound holds."""
    fullest = max(group_loads(totals, rule))
    bound = rule.bound(sum(totals), fullest)
    plain = _attempt(totals, rule, bound)
    if plain is not None:
        return plain, plain.most_slots
    filled = _attempt(totals, rule, bound, fills=True)
    assert filled is not None, "a group has rows to fill any other one"
    if filled.most_slots <= rule.slots:
        return filled, filled.most_slots
    over = fullest - bound
    looser = (_attempt(totals, rule, bound + over * step // ATTEMPTS) for step in range(1, ATTEMPTS + 1))
    return next(attempt for attempt in looser if attempt is not None), filled.most_slots


def _attempt(totals: Sequence[int], rule: ReplicaRule, bound: int, *, fills: bool = False) -> PlacedReplicas | None:
    """Give rows away until no group has more than `bound`; None if slots are missing. With `fills` slots are free."""
    home, loads = list(totals), group_loads(totals, rule)
    replicas: list[list[tuple[int, int]]] = [[] for _ in loads]
    donor = target = -1
    while (fullest := max(loads)) > bound:
        if not fills or target < 0 or loads[target] == bound:
            has_slot = [fills or len(held) < rule.slots for held in replicas]
            takers = [group for group, load in enumerate(loads) if load < bound and has_slot[group]]
            if not takers:
                return None
            donor, target = loads.index(fullest), min(takers, key=loads.__getitem__)  # the first of equal ones
        m = rule.per_group
        donor_rows = home[donor * m : (donor + 1) * m]
        expert = donor * m + donor_rows.index(max(donor_rows))
        rows = min(home[expert], bound - loads[target])
        if not fills:
            rows = min(rows, max(loads[donor] - bound, rule.least_rows))
        home[expert] -= rows
        loads[donor] -= rows
        loads[target] += rows
        replicas[target].append((expert, rows))
    return PlacedReplicas(replicas, loads)


def _ends(counts: Sequence[int], by_group: Sequence[int], source: int) -> list[int]:
    """Rows of one expert that `source` sends to the groups up to each one.

    A group's own ranks come first; what is left of all sources goes to what is left of all groups, in order. With 4 and
    6 rows of two sources, and 7 and 3 for their groups, source 0 sends 4 and 0 rows, source 1 sends 3 and 3.
    """
    parts = len(counts) // len(by_group)
    left, sent_home = list(by_group), []
    for rank, rows in enumerate(counts):
        sent_home.append(min(rows, left[rank // parts]))
        left[rank // parts] -= sent_home[-1]
    begin = sum(counts[:source]) - sum(sent_home[:source])
    end, first = begin + counts[source] - sent_home[source], 0
    ends: list[int] = []
    for group, room in enumerate(left):
        rows = max(0, min(end, first + room) - max(begin, first))
        rows += sent_home[source] if group == source // parts else 0
        ends.append((ends[-1] if ends else 0) + rows)
        first += room
    return ends
