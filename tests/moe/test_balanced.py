"""Balanced dispatch in whole numbers: outputs and all gradients equal those of one process, bit for bit.

Gates are at least 17, where silu(g) is g and its derivative 1 in float32. So experts are polynomials of whole numbers,
no sum is rounded, and right means equal, wherever a row was computed and in whatever order gradients were added. In 8
bits numbers have at most four bits beside their power of two, which E4M3 holds, so nothing is rounded there either.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.balanced_cases import NAMES, all_choices, imbalance, tokens_of
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.float8.expert_ffn import expert_ffn as float8_expert_ffn
from penstock.kernels.float8.operators import NO_FLOAT8, Float8Rule
from penstock.kernels.float8.quantized import BLOCKWISE, BLOCKWISE_SQUARE, MXFP8, Recipe
from penstock.kernels.operators import REFERENCE
from penstock.kernels.replica_plan import PlanFact, ReplicaRule
from penstock.layout.grid import ExpertPlacement, Grid
from penstock.moe.balance import Routing
from penstock.moe.dispatch.balanced import BalancedDispatcher, ReplicaMeter
from penstock.moe.dispatch.collective import AllGatherDispatcher, AllToAllDispatcher
from penstock.moe.dispatch.contract import Dispatcher, LocalDispatcher, wire_format_of
from penstock.moe.dispatch.row_capacity import RowCapacity
from penstock.parallel.axes import Axes, make_axes
from penstock.parallel.recompute import recomputed
from penstock.parallel.replicas import exchanged_counts, exchanged_slots
from tests.closeness import assert_equal
from tests.distributed.pool import Pool
from tests.moe.mixture import parts_of

D, F, K = 8, 4, 3


@dataclass(frozen=True)
class Whole:
    """A layer's problem of all ranks."""

    ids_TK: Tensor
    x_TD: Tensor
    weights_TK: Tensor
    direction_TD: Tensor
    sizes: tuple[int, ...]  # tokens of each rank
    experts: int
    float8: Float8Rule = NO_FLOAT8
    seed: int = 7  # of the parameters

    @staticmethod
    def draw(ids_TK: Tensor, sizes: Sequence[int], experts: int) -> "Whole":
        generator, tokens = torch.Generator().manual_seed(5), len(ids_TK)
        whole = partial(torch.randint, generator=generator)
        x_TD = whole(-1, 2, (tokens, D)).float()
        x_TD[:, 0] = 1
        weights_TK = whole(1, 3, ids_TK.shape).float().masked_fill(ids_TK == experts, 0)
        return Whole(ids_TK, x_TD, weights_TK, whole(-1, 2, (tokens, D)).float(), tuple(sizes), experts)

    def of(self, rank: int) -> "Whole":
        tensors = (self.ids_TK, self.x_TD, self.weights_TK, self.direction_TD)
        return Whole(
            *(one.split(self.sizes)[rank] for one in tensors), self.sizes, self.experts, self.float8, self.seed
        )

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Both matrices and both biases of all experts; in 8 bits no biases, and numbers of few bits."""
        whole = partial(torch.randint, generator=torch.Generator().manual_seed(self.seed))
        gate_up_eFD = whole(-1, 2, (self.experts, 2 * F, D)).float()
        if self.float8.experts is not None:
            gate_up_eFD[:, :F] = 0
            gate_up_eFD[:, :F, 0] = 32  # gates are 32
            # A column of down has one number, so the gradient of h is 0, 1 or 2 without sign.
            return gate_up_eFD, whole(-1, 2, (self.experts, D, 1)).float() * torch.eye(D, F)
        gate_up_eFD[:, :F, 0] = 32  # x_0 is 1: gates are 24 to 40
        sizes = ((-2, 3, (self.experts, D, F)), (-1, 2, (self.experts, 2 * F)), (-1, 2, (self.experts, D)))
        return gate_up_eFD, *(whole(*size).float() for size in sizes)


def mix(dispatcher: Dispatcher, own: Whole, parameters: Sequence[Tensor], *, sums: bool) -> list[Tensor]:
    """Output, gradients of x and of the weights, and those of the parameters, which are added to `sums` if asked."""
    return mixed(dispatcher, own, parameters, sums=sums)()


def mixed(
    dispatcher: Dispatcher, own: Whole, parameters: Sequence[Tensor], *, sums: bool, recompute: bool = False
) -> Callable[[], list[Tensor]]:
    """The forward pass of `mix`; returns its backward pass."""
    leaves = [leaf.clone().requires_grad_() for leaf in (own.x_TD, own.weights_TK, *parameters)]
    gate_up_eFD, down_eDF, *biases = leaves[2:]
    totals = tuple(torch.full_like(parameter, 3.0).float() for parameter in parameters) if sums else None

    def layer(x_TD: Tensor, weights_TK: Tensor) -> Tensor:
        rows, metadata = dispatcher.dispatch(x_TD, Routing(weights_TK, own.ids_TK))
        given = (rows.x_ND, gate_up_eFD, down_eDF, rows.counts_e, rows.weights_R, rows.index_R)
        options = {"places_TK": rows.places_NK, "accumulate_into": totals, "replicas": rows.replicas}
        if own.float8.experts is None:
            y_RD = expert_ffn(*given, biases=(biases[0], biases[1] if len(biases) > 1 else None), **options)
        else:
            in_8_bits = {"float8": own.float8, "quantized": rows.quantized}
            y_RD = float8_expert_ffn(*given, **in_8_bits, **options)
        return dispatcher.combine(y_RD, metadata)

    y_TD = recomputed(layer, *leaves[:2]) if recompute else layer(*leaves[:2])

    def backward() -> list[Tensor]:
        found = torch.autograd.grad(y_TD, leaves[:2] if totals else leaves, own.direction_TD)
        return [y_TD.detach(), *found, *(total - 3 for total in totals or ())]

    return backward


def balanced(
    axes: Axes, rule: ReplicaRule, way: str, meter: ReplicaMeter, float8: Float8Rule = NO_FLOAT8
) -> BalancedDispatcher:
    placement = ExpertPlacement(
        experts=rule.groups * rule.places, expert=rule.groups, expert_tensor=axes.grid.expert_tensor
    )
    wire_format = wire_format_of(float8)
    if way == "gathered":
        capacity = RowCapacity(placement, 1 + rule.tolerance / 1e6)
        inner: Dispatcher = AllGatherDispatcher(placement, axes.expert, REFERENCE, capacity, wire_format=wire_format)
    else:
        inner = AllToAllDispatcher(placement, axes.expert, REFERENCE, wire_format=wire_format)
    slots_of = partial(exchanged_slots, rule=rule, axis=axes.expert)
    counts_of = partial(exchanged_counts, axis=axes.expert)
    return BalancedDispatcher(rule, axes.expert.rank, inner, REFERENCE, counts_of, slots_of, meter)


Job = tuple[Whole, ReplicaRule, str]


def _solve(jobs: Sequence[Job], expert_tensor: int, sums: bool) -> list[tuple[list[Tensor], list[int], int]]:
    """On a rank: results of each job, facts of its plan, and rows that found no room; memory starts as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills memory that was not written
    world = torch.distributed.get_world_size()
    axes = make_axes(Grid(world=world, expert=world // expert_tensor, expert_tensor=expert_tensor))
    results = []
    for whole, rule, way in jobs:
        meter, own = ReplicaMeter(), whole.of(axes.expert.rank)
        placement = ExpertPlacement(experts=whole.experts, expert=rule.groups, expert_tensor=expert_tensor)
        parameters = parts_of(whole.parameters, axes.expert.rank, placement)
        dispatcher = balanced(axes, rule, way, meter, whole.float8)
        found = mix(dispatcher, own, parameters, sums=sums)
        left_out = dispatcher.inner.row_capacity.left_out if isinstance(dispatcher.inner, AllGatherDispatcher) else 0
        results.append((found, meter.facts.tolist(), int(left_out)))
    torch.use_deterministic_algorithms(False)
    return results


def check(
    ranks: Pool, count: int, jobs: Sequence[Job], expert_tensor: int = 1, *, sums: bool = False
) -> list[list[int]]:
    """Facts of the plans, if all results are exact."""
    by_rank = ranks.run(count, _solve, jobs, expert_tensor, sums)
    facts = []
    for number, (whole, rule, way) in enumerate(jobs):
        alone = LocalDispatcher(whole.experts, REFERENCE, wire_format_of(whole.float8))
        y_TD, dx_TD, dweights_TK, *gradients = mix(alone, whole, whole.parameters, sums=sums)
        kept_TK = whole.ids_TK < whole.experts
        found = [results[number][0] for results in by_rank]
        assert all(results[number][1:] == by_rank[0][number][1:] for results in by_rank), "ranks plan differently"
        for index, expected in enumerate((y_TD, dx_TD)):
            assert_equal(torch.cat([one[index] for one in found]), expected, what=f"{number} {way}")
        assert_equal(torch.cat([one[2] for one in found])[kept_TK], dweights_TK[kept_TK])
        placement = ExpertPlacement(experts=whole.experts, expert=rule.groups, expert_tensor=expert_tensor)
        for rank, one in enumerate(found):
            own = parts_of(gradients, rank, placement)
            assert_equal(one[3:], own, what=f"{number} {way}, parameters of rank {rank}")
        facts.append([*by_rank[0][number][1], by_rank[0][number][2]])
    return facts


def workload(name: str, count: int, tokens: int = 24, step: int = 0) -> Whole:
    experts = max(16, 4 * count)
    ids_TK = all_choices(name, step, tokens * count, experts, K, count)
    return Whole.draw(ids_TK, tokens_of(name, step, tokens * count, count), experts)


EXACT, TIGHT, USUAL = {}, {"slots": 1}, {"tolerance": 50_000, "least_rows": 8}
"""Enough slots, too few, and a tolerance."""


def rule_of(whole: Whole, groups: int, **changes: int) -> ReplicaRule:
    return replace(ReplicaRule(experts=whole.experts, groups=groups, slots=whole.experts // groups), **changes)


@pytest.mark.parametrize("count", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_workload_is_exact_and_within_its_bound(ranks: Pool, count: int) -> None:
    jobs: list[Job] = []
    for name in NAMES:
        whole = workload(name, count)
        jobs += [(whole, rule_of(whole, count, **changes), "sent") for changes in (EXACT, TIGHT, USUAL)]
        if name != "W4":  # all-gather needs equally many tokens, and has room for the bound only
            jobs += [(whole, rule_of(whole, count, **changes), "gathered") for changes in (EXACT, USUAL)]
    facts = check(ranks, count, jobs)
    for (whole, rule, _), one in zip(jobs, facts, strict=True):
        if rule.slots == rule.per_group:
            bound = rule.bound(whole.ids_TK.numel(), one[PlanFact.FULLEST_HOME])
            assert one[PlanFact.FULLEST] <= one[PlanFact.BOUND] == bound
            assert one[-1] == 0, "no row is left out"
        if imbalance(whole.ids_TK, whole.experts, count) <= 1 + rule.tolerance / 1e6:
            assert one[PlanFact.REPLICAS] == 0
    assert sum(one[PlanFact.REPLICAS] for one in facts) > len(jobs), "the workloads need replicas"


def test_sums_of_gradients_gain_each_replica_once(ranks: Pool) -> None:
    wholes = [workload(name, 4) for name in ("W1", "W2", "W5", "W8")]
    facts = check(ranks, 4, [(whole, rule_of(whole, 4), "sent") for whole in wholes], sums=True)
    assert min(one[PlanFact.REPLICAS] for one in facts) > 1


@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE, MXFP8], ids=lambda recipe: recipe.name)
def test_experts_in_8_bits_are_exact_whether_rows_travel_in_8_or_16(ranks: Pool, recipe: Recipe) -> None:
    jobs: list[Job] = []
    for name, dispatch in (("W2", None), ("W5", recipe), ("W8", MXFP8)):
        row_recipe = BLOCKWISE if dispatch is BLOCKWISE_SQUARE else dispatch
        whole = replace(workload(name, 4), float8=Float8Rule(experts=recipe, dispatch=row_recipe))
        jobs += [(whole, rule_of(whole, 4, **changes), way) for changes, way in ((EXACT, "sent"), (USUAL, "gathered"))]
        in_16_bits = mix(LocalDispatcher(whole.experts, REFERENCE), whole, whole.parameters, sums=False)
        plain = replace(whole, float8=NO_FLOAT8)
        unbiased = [*whole.parameters, torch.zeros(whole.experts, 2 * F)]
        assert_equal(in_16_bits, mix(LocalDispatcher(whole.experts, REFERENCE), plain, unbiased, sums=False)[:-1])
    facts = check(ranks, 4, jobs)
    assert min(one[PlanFact.REPLICAS] for one in facts) > 1
    facts = check(ranks, 4, jobs[:1], sums=True)
    assert facts[0][PlanFact.REPLICAS] > 1


def test_groups_of_ranks_that_share_experts_hold_parts_of_replicas(ranks: Pool) -> None:
    jobs: list[Job] = []
    for name in ("W0", "W2", "W8"):
        whole = replace(workload(name, 2), sizes=(12,) * 4)
        jobs += [(whole, rule_of(whole, 2, **changes), "sent") for changes in (EXACT, TIGHT)]
        jobs.append((whole, rule_of(whole, 2), "gathered"))
    facts = check(ranks, 4, jobs, expert_tensor=2)
    assert max(one[PlanFact.REPLICAS] for one in facts) > 1


def test_all_rows_of_one_expert_no_rows_and_a_rank_without_tokens_are_exact(ranks: Pool) -> None:
    usual = workload("W8", 4)
    one_expert = usual.ids_TK.fill_(16).clone()
    one_expert[:, 0] = 5
    alone = Whole.draw(one_expert, usual.sizes, 16)
    nothing = Whole.draw(torch.full((96, K), 16), usual.sizes, 16)
    ragged = replace(workload("W8", 4), sizes=(0, 50, 46, 0))
    jobs: list[Job] = [(whole, rule_of(whole, 4), "sent") for whole in (alone, nothing, ragged)]
    facts = check(ranks, 4, jobs)
    assert facts[0][PlanFact.FULLEST] == 24 and facts[0][PlanFact.REPLICAS] == 3  # 96 rows, of one expert
    assert facts[1][PlanFact.REPLICAS] == 0 and facts[2][PlanFact.FULLEST] == 72


def test_a_hot_rank_that_changes_each_step_gets_a_new_plan(ranks: Pool) -> None:
    wholes = [workload("W6", 4, step=step) for step in range(4)]
    facts = check(ranks, 4, [(whole, rule_of(whole, 4), "gathered") for whole in wholes])
    assert all(one[PlanFact.FULLEST_HOME] > 1.9 * one[PlanFact.FULLEST] for one in facts)


def test_too_few_slots_leave_rows_out_and_the_plan_says_how_many_would_do(ranks: Pool) -> None:
    whole = workload("W5", 4)
    few = rule_of(whole, 4, slots=1)
    results = [one for (one,) in ranks.run(4, _solve, [(whole, few, "gathered")], 1, False)]
    facts = results[0][1]
    assert facts[PlanFact.FULLEST] > facts[PlanFact.BOUND] and facts[PlanFact.SLOTS_NEEDED] > 1
    assert max(left_out for _, _, left_out in results) == facts[PlanFact.FULLEST] - facts[PlanFact.BOUND] - 7
    (enough,) = check(ranks, 4, [(whole, rule_of(whole, 4, slots=facts[PlanFact.SLOTS_NEEDED]), "gathered")])
    assert enough[PlanFact.FULLEST] <= enough[PlanFact.BOUND] and not enough[-1]
