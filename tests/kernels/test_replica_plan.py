"""Plans of replicas: their bound, their economy, and the kernels, which give the same plan bit for bit."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels import reference, replica_kernels
from penstock.kernels.reference import RowOrder
from penstock.kernels.replica_plan import PlanFact, ReplicaPlan, ReplicaRule, assign_replicas, plan_replicas
from tests.examples import examples
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta

EXAMPLE = ReplicaRule(experts=4, groups=2, slots=1)


def _counts(totals: Sequence[int], sources: int, draw: random.Random) -> Tensor:
    """Loads of all experts, divided among the sources at random."""
    rows = [[0] * len(totals) for _ in range(sources)]
    for expert, total in enumerate(totals):
        cuts = sorted(draw.randint(0, total) for _ in range(sources - 1))
        for source, (begin, end) in enumerate(zip([0, *cuts], [*cuts, total], strict=True)):
            rows[source][expert] = end - begin
    return torch.tensor(rows, dtype=torch.int32)


def _drawn(seed: int) -> tuple[ReplicaRule, Tensor, random.Random]:
    """A rule, and loads of a random kind: even, skewed, with a hot group, with groups that have none."""
    draw = random.Random(seed)
    groups, per_group = draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 2, 3, 8])
    rule = ReplicaRule(
        experts=groups * per_group,
        groups=groups,
        slots=draw.choice([0, 1, 2, 4, per_group]),
        tolerance=draw.choice([0, 20_000, 50_000]),
        idle=draw.choice([0, 100_000]),
        least_rows=draw.choice([0, 7]),
    )
    skew, hot, empty = draw.choice([0, 1, 4]), draw.randrange(groups), draw.choice([-1, draw.randrange(groups)])
    weights = [draw.random() ** skew for _ in range(rule.experts)]
    for expert in range(rule.experts):
        weights[expert] *= 0 if expert // per_group == empty else 5 if expert // per_group == hot and skew else 1
    totals = [int(200 * weight) for weight in weights]
    return rule, _counts(totals, groups * draw.choice([1, 1, 2]), draw), draw


def _rows(plan: ReplicaPlan, counts_WE: Tensor, rule: ReplicaRule) -> tuple[list[int], list[list[int]]]:
    """Rows left to each expert at home, and rows of each replica by group."""
    home = counts_WE.sum(0).tolist()
    by_group: list[list[int]] = [[] for _ in range(rule.groups)]
    for group, (experts, rows) in enumerate(
        zip(plan.slot_experts_ZX.tolist(), plan.slot_rows_ZX.tolist(), strict=True)
    ):
        for expert, taken in zip(experts, rows, strict=True):
            assert (expert < rule.experts) == (taken > 0), "a slot is empty or has rows"
            if taken:
                assert expert // rule.per_group != group, "a group needs no replica of its own expert"
                home[expert] -= taken
                by_group[group].append(taken)
    return home, by_group


def _check(rule: ReplicaRule, counts_WE: Tensor) -> None:
    plan = plan_replicas(counts_WE, rule, 0)
    facts, m = plan.facts.tolist(), rule.per_group
    home, by_group = _rows(plan, counts_WE, rule)
    loads = [sum(home[group * m : (group + 1) * m]) + sum(rows) for group, rows in enumerate(by_group)]
    fullest_home = int(counts_WE.sum(0).view(rule.groups, m).sum(1).max())
    bound = rule.bound(int(counts_WE.sum()), fullest_home)

    assert min(home) >= 0
    assert sum(loads) == facts[PlanFact.ROWS] == int(counts_WE.sum())
    assert max(loads) == facts[PlanFact.FULLEST] <= fullest_home == facts[PlanFact.FULLEST_HOME]
    assert sum(map(len, by_group)) == facts[PlanFact.REPLICAS]
    assert facts[PlanFact.BOUND] == bound and facts[PlanFact.SLOTS_NEEDED] <= max(m, rule.slots)
    if fullest_home <= bound:
        assert facts[PlanFact.REPLICAS] == 0, "loads within the bound stay as they are"
    if rule.slots >= facts[PlanFact.SLOTS_NEEDED]:
        assert max(loads) <= bound
    else:  # the plan says with how many slots the bound would hold
        more = ReplicaRule(**{**vars(rule), "slots": facts[PlanFact.SLOTS_NEEDED]})
        assert plan_replicas(counts_WE, more, 0).facts[PlanFact.FULLEST] <= bound


@examples(200, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_a_plan_keeps_its_bound_and_its_rows(seed: int) -> None:
    for vector in range(50):  # 10,000 load vectors
        _check(*_drawn(seed * 50 + vector)[:2])


@examples(60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_all_sources_make_one_plan_and_their_slots_fill_it(seed: int) -> None:
    rule, counts_WE, draw = _drawn(seed)
    plans = [plan_replicas(counts_WE, rule, source) for source in range(len(counts_WE))]
    physical: list[Tensor] = []
    for counts_E, plan in zip(counts_WE, plans, strict=True):
        for field in ("slot_experts_ZX", "slot_rows_ZX", "targets_EZ", "facts"):
            assert torch.equal(getattr(plan, field), getattr(plans[0], field)), field
        ids = [expert for expert, rows in enumerate(counts_E.tolist()) for _ in range(rows)] + [rule.experts] * 3
        draw.shuffle(ids)
        experts_TK = torch.tensor(ids)[:, None]
        order = reference.order_rows(experts_TK, rule.experts)
        physical_TK = assign_replicas(experts_TK, order, plan, rule)
        assert (physical_TK[experts_TK == rule.experts] == rule.groups * rule.places).all()
        kept = experts_TK < rule.experts
        assert torch.equal(_expert_of(physical_TK[kept], plan, rule), experts_TK[kept])
        physical.append(physical_TK.flatten())
    counted = torch.cat(physical).bincount(minlength=rule.groups * rule.places + 1)[:-1].view(rule.groups, rule.places)
    assert torch.equal(counted[:, rule.per_group :].int(), plans[0].slot_rows_ZX)
    assert counted.sum(1).max() == plans[0].facts[PlanFact.FULLEST]


def _expert_of(physical: Tensor, plan: ReplicaPlan, rule: ReplicaRule) -> Tensor:
    group, place = physical // rule.places, physical % rule.places
    is_home, m = place < rule.per_group, rule.per_group
    if not rule.slots:
        return group * m + place
    return torch.where(is_home, group * m + place, plan.slot_experts_ZX[group, (place - m).clamp(min=0)].long())


def test_the_example_of_the_file_holds() -> None:
    plan = plan_replicas(torch.tensor([[4, 1, 0, 0], [2, 1, 1, 1]], dtype=torch.int32), EXAMPLE, 0)
    assert plan.slot_experts_ZX.tolist() == [[4], [0]] and plan.slot_rows_ZX.tolist() == [[0], [3]]
    assert plan.targets_EZ.tolist() == [[0, 5], [1, -1], [-1, 3], [-1, 4]]
    assert plan.facts.tolist() == [10, 5, 8, 5, 1, 1, 1, 1]
    assert plan.ends_EZ[0].tolist() == [3, 4]  # 3 of the 4 rows stay in the source's own group


def test_groups_are_filled_from_one_donor_each_where_slots_are_scarce() -> None:
    rule = ReplicaRule(experts=4, groups=4, slots=1)
    # Loads 44 44 44 28. Group 3 would need rows of three groups; filled by group 0, which group 1 refills, and so on.
    plan = plan_replicas(torch.tensor([[11, 11, 11, 7]] * 4, dtype=torch.int32), rule, 0)
    assert plan.facts[PlanFact.FULLEST] == 40 and plan.facts[PlanFact.BOUND] == 40
    assert plan.slot_rows_ZX.flatten().tolist() == [8, 4, 0, 12]
    assert plan.slot_experts_ZX.flatten().tolist() == [1, 2, 4, 0]


def test_a_replica_takes_its_least_rows_where_there_are_so_many() -> None:
    counts_WE = torch.tensor([[30, 25, 23, 22]] * 2, dtype=torch.int32)
    for least, rows in ((0, 5), (9, 9), (100, 15)):  # 5 rows over the bound, and room for 15
        rule = ReplicaRule(experts=4, groups=2, slots=1, tolerance=50_000, least_rows=least)
        plan = plan_replicas(counts_WE, rule, 0)
        assert plan.facts[PlanFact.BOUND] == 105
        assert plan.slot_rows_ZX.flatten().tolist() == [0, rows]


def test_all_rows_on_one_expert_are_shared_by_all_groups() -> None:
    counts_WE = torch.zeros(8, 16, dtype=torch.int32)
    counts_WE[:, 3] = 64
    plan = plan_replicas(counts_WE, ReplicaRule(experts=16, groups=8, slots=1), 5)
    assert plan.facts[PlanFact.FULLEST] == 64 and plan.facts[PlanFact.REPLICAS] == 7
    # The first ranks keep their own rows, home included: nothing travels.
    assert plan.ends_EZ[3].tolist() == [0, 0, 0, 0, 0, 64, 64, 64]


def _parity(seed: int, device: torch.device) -> None:
    rule, counts_WE, draw = _drawn(seed)
    source = draw.randrange(len(counts_WE))
    totals = torch.arange(len(PlanFact))
    totals_there = totals.to(device)
    expected = plan_replicas(counts_WE, rule, source, totals)
    got = replica_kernels.plan_replicas(counts_WE.to(device), rule, source, totals_there)
    assert torch.equal(totals_there.cpu(), totals)
    for name, ours, theirs in zip(ReplicaPlan._fields, got, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs), name
    ids = [expert for expert, rows in enumerate(counts_WE[source].tolist()) for _ in range(rows)] + [rule.experts] * 3
    draw.shuffle(ids)
    experts_TK = torch.tensor(ids)[:, None]
    order = reference.order_rows(experts_TK, rule.experts)
    placed = RowOrder(*(tensor.to(device) for tensor in order))
    physical_TK = replica_kernels.assign_replicas(experts_TK.to(device), placed, got, rule)
    assert torch.equal(physical_TK.cpu(), assign_replicas(experts_TK, order, expected, rule))


@pytest.mark.parametrize("seed", range(6))
def test_kernels_give_the_plan_of_the_definition(seed: int, device: torch.device) -> None:
    _parity(seed, device)


@pytest.mark.slow
@examples(100, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_kernels_give_the_plan_of_the_definition_for_any_loads(seed: int, device: torch.device) -> None:
    _parity(seed, device)


@pytest.mark.parametrize(("hot", "replicas"), [(110, 0), (111, 1)])
def test_with_an_idle_range_nothing_is_copied_until_the_fullest_group_is_over_it(hot: int, replicas: int) -> None:
    rule = ReplicaRule(experts=4, groups=2, slots=1, tolerance=50_000, idle=100_000)
    plan = plan_replicas(torch.tensor([[hot, 0, 0, 0], [0, 0, 200 - hot, 0]], dtype=torch.int32), rule, 0)
    assert plan.facts[PlanFact.REPLICAS] == replicas
    assert plan.facts[PlanFact.FULLEST] == plan.facts[PlanFact.BOUND] == (105 if replicas else 110)


@pytest.mark.often("*gfx942*")
@pytest.mark.parametrize("target", TARGETS)
def test_plans_compile_without_spills(target: str) -> None:
    rule = ReplicaRule(experts=256, groups=8, slots=4, tolerance=50_000, least_rows=1024)
    counts_WE, experts_TK = on_meta(8, 256, dtype=torch.int32), on_meta(8192, 8, dtype=torch.int64)

    def plan() -> Any:
        found = replica_kernels.plan_replicas(counts_WE, rule, 3, on_meta(len(PlanFact), dtype=torch.int64))
        order = RowOrder(experts_TK.view(-1), experts_TK, counts_WE[0])
        return replica_kernels.assign_replicas(experts_TK, order, found, rule)

    assert len(compile_without_spills(target, plan)) == 3
