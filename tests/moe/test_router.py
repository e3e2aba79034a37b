"""Choices of experts equal a loop over tokens, balance losses equal their formulas, and the bias evens the load."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.config.model import Balance, Moe, Router
from penstock.kernels.operators import REFERENCE, LinearLoss
from penstock.kernels.reference import Routed, RouterRule, route
from penstock.layout.grid import Grid, Method, SequenceLayout
from penstock.moe.balance import (
    BINS,
    HIGHEST,
    SIDE,
    LoadMeter,
    Routing,
    Scope,
    SlotCounts,
    attach,
    auxiliary_loss,
    capacity,
    drop_over_capacity,
    margin_counts,
    quantile_shift,
    reset_meters,
    slot_counts,
    spread_evenly,
)
from penstock.moe.router import TopKRouter, hash_table, update_expert_bias
from penstock.parallel.axes import make_axes
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import recomputed
from tests.closeness import assert_close, assert_equal
from tests.distributed.pool import Pool

GROUPS = {"groups": 4, "topk_group": 2}
RULES = {
    "softmax": RouterRule(top_k=3),
    "softmax after top-k": RouterRule(top_k=3, softmax_after_top_k=True),
    "softmax normalized and scaled": RouterRule(top_k=2, normalize=True, scale=2.5),
    "softmax groups by max": RouterRule(top_k=3, **GROUPS, group_score="max", scale=16.0),
    "sigmoid groups by best two": RouterRule(
        top_k=4, score="sigmoid", **GROUPS, group_score="top2", normalize=True, scale=2.5
    ),
    "one expert": RouterRule(top_k=1, score="sigmoid"),
    "all experts": RouterRule(top_k=12),
}
E = 12


def _by_hand(logits: list[float], bias: list[float], rule: RouterRule) -> dict[int, float]:
    if rule.score == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    judged = [(x if rule.softmax_after_top_k else s) + b for x, s, b in zip(logits, scores, bias, strict=True)]
    size = len(logits) // rule.groups
    groups = [sorted(judged[g * size : (g + 1) * size], reverse=True) for g in range(rule.groups)]
    merit = [sum(group[: 1 if rule.group_score == "max" else 2]) for group in groups]
    kept = sorted(range(rule.groups), key=lambda g: -merit[g])[: rule.topk_group] if rule.groups > 1 else [0]
    allowed = [e for e in range(len(logits)) if e // size in kept]
    chosen = sorted(allowed, key=lambda e: -judged[e])[: rule.top_k]
    if rule.softmax_after_top_k:
        total = sum(math.exp(logits[e]) for e in chosen)
        weights = {e: math.exp(logits[e]) / total for e in chosen}
    else:
        weights = {e: scores[e] for e in chosen}
    total = sum(weights.values()) if rule.normalize else 1.0
    return {e: rule.scale * w / total for e, w in weights.items()}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_choice_and_weights_equal_a_loop_over_tokens(name: str, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    logits_TE = torch.randn(20, E, generator=generator)
    bias_E = 0.3 * torch.randn(E, generator=generator) if with_bias else None
    routed = route(logits_TE, bias_E, RULES[name], sequences=2)
    bias = [0.0] * E if bias_E is None else bias_E.tolist()
    counts_BE = torch.zeros(2, E, dtype=torch.int64)
    for token, logits in enumerate(logits_TE.tolist()):
        expected = _by_hand(logits, bias, RULES[name])
        got = dict(zip(routed.experts_TK[token].tolist(), routed.weights_TK[token].tolist(), strict=True))
        assert_close(got, expected, tolerance=1e-5, what=f"token {token}")
        counts_BE[token // 10, list(expected)] += 1
    assert torch.equal(routed.counts_BE, counts_BE)


def test_mass_and_z_are_sums_over_each_sequence() -> None:
    logits_TE = torch.randn(8, E, generator=torch.Generator().manual_seed(2))
    routed = route(logits_TE, None, RULES["softmax"], sequences=2)
    assert_close(routed.mass_BE[1], logits_TE[4:].softmax(-1).sum(0))
    assert_close(routed.z_B[0], logits_TE[:4].exp().sum(-1).log().square().sum())


def _router(balance: Balance, experts: int = E, rate: float = 0.001, *recompute: str) -> TopKRouter:
    router = Router(scoring_func="sigmoid", expert_bias=True, norm_topk_prob=True, expert_bias_rate=rate)
    moe = Moe(experts=experts, top_k=3, moe_intermediate_size=8, router=router, balance=balance)
    module = TopKRouter(moe, hidden_size=16, layer=1, layer_context=LayerContext(recompute=frozenset(recompute)))
    nn.init.normal_(module.weight_ED, std=0.5, generator=torch.Generator().manual_seed(3))
    module.meter.reset()
    return module


def _x(tokens: int = 24) -> Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(4))


def test_token_ids_choose_the_experts_of_a_hashed_layer_and_scores_their_weights() -> None:
    table_VK = hash_table(50, E, 3, torch.Generator().manual_seed(1))
    assert all(len(set(row)) == 3 for row in table_VK.tolist())
    rule = Router(scoring_func="sqrt-softplus", expert_bias=True)
    balance = Balance(aux_loss="sequence", aux_loss_coef=1.0, z_loss_coef=0.1)
    moe = Moe(experts=E, top_k=3, moe_intermediate_size=8, router=rule, balance=balance)
    router = TopKRouter(moe, hidden_size=16, layer=0, layer_context=LayerContext(), hashed_ids=50)
    assert router.expert_bias_E is None
    nn.init.normal_(router.weight_ED, std=0.5)
    router.table_VK.copy_(table_VK)
    router.meter.reset()
    tokens_T, x_TD = torch.arange(24) % 50, _x()
    routing = router(x_TD, Scope(tokens_T=tokens_T))
    assert_equal(routing.experts_TK, table_VK[tokens_T].long())
    scores_TE = torch.nn.functional.softplus(x_TD @ router.weight_ED.T).sqrt()
    assert_close(routing.weights_TK, scores_TE.gather(1, routing.experts_TK))
    # Only the z-loss: no weight can change the load.
    logits_TE = x_TD @ router.weight_ED.T
    assert_close(router.meter.auxiliary_loss, 0.1 * logits_TE.logsumexp(-1).square().mean())
    assert_equal(router.meter.slots_E.sum(), torch.tensor(72))


def test_the_router_decides_in_float32_whatever_its_input_is() -> None:
    routing = _router(Balance())(_x().bfloat16(), Scope())
    assert routing.weights_TK.dtype == torch.float32


def test_over_capacity_the_smallest_weights_of_an_expert_are_dropped() -> None:
    free = _router(Balance())(_x(), Scope())
    router = _router(Balance(capacity_factor=0.5))
    routing = router(_x(), Scope())
    dropped = 0
    for expert in range(E):
        asked = free.weights_TK[free.experts_TK == expert]
        kept = routing.weights_TK[routing.experts_TK == expert]
        assert len(kept) == min(3, len(asked))  # 24 tokens x 3 choices / 12 experts x 0.5
        assert_close(kept.sort().values, asked.sort().values[len(asked) - len(kept) :])
        dropped += len(asked) - len(kept)
    assert dropped > 0, "this case must drop something"
    assert router.meter.dropped.item() == dropped == (routing.experts_TK == E).sum().item()
    assert (routing.weights_TK[routing.experts_TK == E] == 0).all()


def test_load_is_measured_in_training_only() -> None:
    router = _router(Balance())
    router(_x(), Scope())
    assert router.meter.slots_E.sum().item() == 24 * 3
    router.eval()(_x(), Scope())
    with torch.no_grad():
        router.train()(_x(), Scope())
    assert router.meter.slots_E.sum().item() == 24 * 3


def test_the_balance_loss_reaches_the_weights_of_the_router() -> None:
    """Through the weights of the choice, whatever the main loss makes of them; held against differences of the loss."""
    router = _router(Balance(aux_loss="sequence", aux_loss_coef=0.1))

    def routed() -> Tensor:
        router.meter.reset()
        return router(_x(), Scope()).weights_TK

    (gradient_ED,) = torch.autograd.grad((routed() * 0).sum(), router.weight_ED)
    step_ED, losses = 1e-2 * gradient_ED / gradient_ED.norm(), []
    for sign in (1, -2):
        with torch.no_grad():
            router.weight_ED += sign * step_ED
        routed()
        losses.append(float(router.meter.auxiliary_loss))
    assert_close((losses[0] - losses[1]) / 2e-2, float(gradient_ED.norm()), tolerance=0.02)


def _trained(auxiliary: str, capacity_factor: float, *, recompute: bool) -> list[Tensor]:
    """Two micro-batches forward, then both backward: gradients and what the meter says."""
    balance = Balance.model_validate({"aux_loss": auxiliary, "aux_loss_coef": 0.7, "z_loss_coef": 0.1})
    router = _router(balance.model_copy(update={"capacity_factor": capacity_factor}), E, 0.001, *["moe"] * recompute)

    def mix(x_TD: Tensor) -> Tensor:
        return router(x_TD, Scope(sequences=2, share=0.5)).weights_TK.sum(1, keepdim=True) * x_TD

    inputs = [_x().requires_grad_(), (_x() + 0.1).requires_grad_()]
    losses = [(recomputed(mix, x) if recompute else mix(x)).square().sum() for x in inputs]
    for loss in losses:
        loss.backward()
    meter = router.meter
    return [*(x.grad for x in inputs), router.weight_ED.grad, meter.slots_E, meter.dropped, meter.auxiliary_loss]


@pytest.mark.parametrize("capacity_factor", [0.0, 0.8])
@pytest.mark.parametrize("auxiliary", ["sequence", "global-batch"])
def test_a_replay_of_a_router_counts_nothing_and_changes_no_gradient(auxiliary: str, capacity_factor: float) -> None:
    expected, found = (_trained(auxiliary, capacity_factor, recompute=recompute) for recompute in (False, True))
    assert_equal(found, expected)
    assert expected[3].sum() == 2 * 24 * 3 and (expected[4] > 0) == (capacity_factor > 0)


FEW, K = 6, 2


def _logits(tokens: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(tokens, FEW, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def _switch_loss(logits_TE: Tensor) -> Tensor:
    scores_TE = logits_TE.softmax(-1)
    chosen_TE = torch.zeros_like(scores_TE).scatter_(1, scores_TE.topk(K).indices, 1)
    return FEW * (chosen_TE.sum(0) / chosen_TE.sum() * scores_TE.mean(0)).sum()


def _loss(logits_TE: Tensor, balance: Balance, scope: Scope, seen_E: Tensor | None = None) -> Tensor:
    routed = route(logits_TE, None, RouterRule(top_k=K), scope.sequences)
    slots_E = routed.counts_BE.sum(0) if seen_E is None else seen_E + routed.counts_BE.sum(0)
    load = SlotCounts(counts_BE=routed.counts_BE, step_slots_E=slots_E)
    return _differentiable(routed, auxiliary_loss(routed, logits_TE.shape[0], balance, scope, load, REFERENCE))


def _differentiable(routed: Routed, found: LinearLoss) -> Tensor:
    """The loss, with the gradients that it says that it has."""
    mass_BE, z_B = routed.mass_BE - routed.mass_BE.detach(), routed.z_B - routed.z_B.detach()
    return found.loss + (mass_BE * found.dmass_BE).sum() + (z_B * found.dz_B).sum()


def test_losses_equal_their_formulas() -> None:
    logits_TE = _logits()
    micro_batch = Balance(aux_loss="micro-batch", aux_loss_coef=0.5)
    assert_close(_loss(logits_TE, micro_batch, Scope(share=0.25)), 0.125 * _switch_loss(logits_TE))
    sequence, z = Balance(aux_loss="sequence", aux_loss_coef=1.0), Balance(z_loss_coef=0.1)
    expected = torch.stack([_switch_loss(rows) for rows in logits_TE.chunk(3)]).mean()
    assert_close(_loss(logits_TE, sequence, Scope(sequences=3)), expected)
    assert_close(_loss(logits_TE, z, Scope()), 0.1 * logits_TE.logsumexp(-1).square().mean())


def test_the_global_loss_counts_load_over_the_step_so_far() -> None:
    logits_TE, seen_E = _logits(), torch.tensor([5, 0, 3, 1, 0, 7])
    balance = Balance(aux_loss="global-batch", aux_loss_coef=1.0)
    scores_TE = logits_TE.softmax(-1)
    slots_E = seen_E + torch.bincount(scores_TE.topk(K).indices.flatten(), minlength=FEW)
    expected = FEW * (slots_E / slots_E.sum() * scores_TE.mean(0)).sum()
    assert_close(_loss(logits_TE, balance, Scope(), seen_E), expected)


def test_an_attached_loss_changes_gradients_and_nothing_else() -> None:
    logits_TE, balance = _logits(), Balance(aux_loss="sequence", aux_loss_coef=0.5, z_loss_coef=0.1)
    routed = route(logits_TE, None, RouterRule(top_k=K), 3)
    load = SlotCounts(counts_BE=routed.counts_BE, step_slots_E=routed.counts_BE.sum(0))
    found = auxiliary_loss(routed, len(logits_TE), balance, Scope(sequences=3), load, REFERENCE)
    expected = routed.weights_TK.sum() + _differentiable(routed, found)
    (wanted,) = torch.autograd.grad(expected, logits_TE, retain_graph=True)
    attached = attach(routed.weights_TK, routed, found)
    assert torch.equal(attached, routed.weights_TK)
    (got,) = torch.autograd.grad(attached.sum(), logits_TE)
    assert_close(got, wanted)


def test_the_bias_moves_one_step_against_the_load() -> None:
    router = _router(Balance(), experts=FEW, rate=0.1)
    router.meter.slots_E.copy_(torch.tensor([9, 1, 5, 5, 10, 0]))
    update_expert_bias([nn.Sequential(router)], [router.load()])
    assert_close(router.expert_bias_E, torch.tensor([-0.1, 0.1, 0.0, 0.0, -0.1, 0.1]))


def test_the_bias_evens_a_skewed_load() -> None:
    router = _router(Balance(), experts=FEW, rate=0.01)
    x_TD = torch.randn(256, 16, generator=torch.Generator().manual_seed(2)) + 1.0
    uneven = []
    for _ in range(100):
        reset_meters([router])
        router(x_TD, Scope())
        load = router.load()
        slots_E = load.slots_E.float()
        uneven.append((slots_E.max() / slots_E.mean()).item())
        update_expert_bias([router], [load])
    assert uneven[0] > 1.5 and uneven[-1] < 1.15, f"from {uneven[0]:.2f} to {uneven[-1]:.2f}"


@pytest.mark.parametrize("kind", ["sigmoid", "softmax", "logits"])
def test_quantiles_even_a_skewed_load_in_few_steps(kind: str) -> None:
    scoring = "softmax" if kind == "logits" else kind
    how = Router(scoring_func=scoring, expert_bias=True, softmax_after_top_k=kind == "logits")
    balance = Balance(bias_rule="quantile")
    moe = Moe(experts=32, top_k=3, moe_intermediate_size=8, router=how, balance=balance)
    router = TopKRouter(moe, hidden_size=16, layer=1, layer_context=LayerContext())
    nn.init.normal_(router.weight_ED, std=0.5, generator=torch.Generator().manual_seed(3))
    x_TD = torch.randn(1024, 16, generator=torch.Generator().manual_seed(2)) + 1.0
    uneven = []
    for _ in range(6):
        reset_meters([router])
        for half_TD in x_TD.chunk(2):  # counts of micro-batches add up
            router(half_TD, Scope())
        slots_E = router.meter.slots_E.float()
        margins_EU = router.meter.margins_EU
        assert margins_EU is not None
        assert torch.equal(margins_EU[:, SIDE:].sum(1), router.meter.slots_E), "a choice has a margin above 0"
        uneven.append((slots_E.max() / slots_E.mean()).item())
        update_expert_bias([router], [router.load()])
    assert uneven[0] > 3 and uneven[2] < 1.5 and uneven[-1] < 1.1, uneven


def test_a_quantile_is_exceeded_by_the_even_share() -> None:
    """An expert whose bias moves alone has its share, but for the width of a bin."""
    generator = torch.Generator().manual_seed(5)
    logits_TE, bias_E = 2 * torch.randn(4000, E, generator=generator), 0.1 * torch.randn(E, generator=generator)
    rule = RouterRule(top_k=K, score="sigmoid")
    choice_TE = logits_TE.sigmoid() + bias_E
    margins_EU, even = margin_counts(logits_TE, bias_E, rule), K * 4000 / E
    shift_E = quantile_shift(margins_EU, K)
    chosen = [(choice_TE - shift_E * torch.eye(E)[e]).topk(K, dim=-1).indices == e for e in range(E)]
    chosen_E = torch.stack([is_chosen_T.sum() for is_chosen_T in chosen])
    above_EU = margins_EU.flip(1).cumsum(1).flip(1)  # margins in a bin and in those above it
    bin_E1 = (above_EU >= even).sum(1, keepdim=True) - 1
    assert ((chosen_E - even).abs() <= margins_EU.gather(1, bin_E1)[:, 0]).all(), "off by more than the bin holds"


def test_no_tokens_move_no_quantile_and_margins_beyond_the_bins_move_it_to_their_end() -> None:
    assert not quantile_shift(torch.zeros(E, BINS, dtype=torch.int64), K).any()
    logits_TE = torch.zeros(100, E)
    logits_TE[:, 0] = 1000.0  # logits, as of softmax after top-k
    rule = RouterRule(top_k=1, softmax_after_top_k=True)
    shift_E = quantile_shift(margin_counts(logits_TE, torch.zeros(E), rule), 1)
    assert 2**3 < shift_E[0] <= 2**HIGHEST and bool((-shift_E[1:] > 2**3).all())


def test_loads_name_their_layer_and_start_anew() -> None:
    router = _router(Balance(), experts=FEW, rate=0.1)
    router(torch.randn(10, 16), Scope())
    load = router.load()
    assert load.layer == 1 and load.slots_E.sum().item() == 10 * 3
    reset_meters([router])
    assert router.load().slots_E.sum().item() == 0


def _whole_routing(tokens_are_equal: bool) -> Routing:
    """Of two rows of 16 tokens."""
    generator = torch.Generator().manual_seed(5)
    experts_TK = torch.stack([torch.randperm(FEW, generator=generator)[:K] for _ in range(32)])
    weights_TK = torch.rand(32, K, generator=generator)
    if tokens_are_equal:
        experts_TK, weights_TK = experts_TK[:1].expand(32, K).clone(), weights_TK[:1].expand(32, K).clone()
    return Routing(weights_TK, experts_TK)


def _dropped_among_ranks(
    tokens_are_equal: bool, context: int, tensor: int, method: Method
) -> tuple[list[int], list[Tensor]]:
    """Positions of this rank, and its slots in each of the two rows."""
    axes = make_axes(Grid(world=context * tensor, context=context, tensor=tensor))
    layout = SequenceLayout(length=16, context=context, tensor=tensor, method=method)
    positions = list(layout.of_rank(axes.context.rank, axes.tensor.rank))
    parts = (
        part.unflatten(0, (2, 16))[:, positions].flatten(0, 1) for part in _whole_routing(tokens_are_equal).tensors()
    )
    dropped = drop_over_capacity(Routing(*parts), FEW, 3, 2, axes, method)
    return positions, [part.unflatten(0, (2, -1)) for part in dropped.tensors()]


@pytest.mark.parametrize("tokens_are_equal", [False, True])
@pytest.mark.parametrize(
    ("context", "tensor", "method"), [(2, 1, "ulysses"), (2, 1, "all-gather"), (1, 2, "ulysses"), (2, 2, "all-gather")]
)
def test_tokens_of_ranks_that_share_rows_compete_for_the_same_slots(
    context: int, tensor: int, method: Method, tokens_are_equal: bool, ranks: Pool
) -> None:
    expected = drop_over_capacity(_whole_routing(tokens_are_equal), FEW, 3, sequences=2)
    assert (expected.experts_TK == FEW).any(), "this case must drop something"
    found = ranks.run(context * tensor, _dropped_among_ranks, tokens_are_equal, context, tensor, method)
    order = torch.tensor([position for positions, _ in found for position in positions]).argsort()
    whole = (
        torch.cat(parts, dim=1)[:, order].flatten(0, 1) for parts in zip(*(parts for _, parts in found), strict=True)
    )
    assert_equal(list(whole), expected.tensors())
    if tokens_are_equal:
        assert (expected.experts_TK < FEW).any(1).tolist() == [True] * 3 + [False] * 29, "the first ones stay"


def _loss_among_ranks(balance: Balance) -> tuple[Tensor, Tensor]:
    """Loss of our tokens of each of three sequences, and its gradient."""
    size = dist.get_world_size()
    axes = make_axes(Grid(world=size, context=size))
    logits_BSE = _logits().detach().unflatten(0, (3, -1)).chunk(size, dim=1)[axes.rank]
    logits_TE = logits_BSE.flatten(0, 1).requires_grad_()
    routed = route(logits_TE, None, RouterRule(top_k=K), 3)
    meter = LoadMeter(FEW)
    meter.slots_E += routed.counts_BE.sum(0)
    load = slot_counts(routed.counts_BE, meter, balance, axes)
    scope = Scope(sequences=3, share=0.5)
    loss = _differentiable(routed, auxiliary_loss(routed, size * len(logits_TE), balance, scope, load, REFERENCE))
    loss.backward()
    return loss.detach(), logits_TE.grad.unflatten(0, (3, -1))


@pytest.mark.parametrize("auxiliary", ["micro-batch", "sequence", "global-batch"])
def test_losses_of_ranks_that_share_rows_add_up_to_those_of_whole_rows(auxiliary: str, ranks: Pool) -> None:
    balance = Balance.model_validate({"aux_loss": auxiliary, "aux_loss_coef": 0.5, "z_loss_coef": 0.1})
    logits_TE = _logits()
    expected = _loss(logits_TE, balance, Scope(sequences=3, share=0.5))
    expected.backward()
    losses, gradients = zip(*ranks.run(2, _loss_among_ranks, balance), strict=True)
    assert_close(sum(losses), expected.detach())
    assert_close(torch.cat(gradients, dim=1).flatten(0, 1), logits_TE.grad)


def test_a_dropped_slot_stays_dropped_and_capacity_is_rounded_up() -> None:
    routing = Routing(torch.tensor([[0.5, 0.0], [0.4, 0.3]]), torch.tensor([[0, 2], [0, 1]]))
    kept = drop_over_capacity(routing, experts=2, limit=1)
    assert kept.experts_TK.tolist() == [[0, 2], [2, 1]]
    assert_close(kept.weights_TK, torch.tensor([[0.5, 0.0], [0.0, 0.3]]))
    assert [capacity(12, K, FEW, factor) for factor in (1.0, 1.25, 0.01)] == [4, 5, 1]


@pytest.mark.parametrize(("experts", "top_k"), [(64, 6), (256, 8), (128, 8), (8, 2), (160, 6), (7, 3)])
def test_forced_balance_is_even_for_every_model(experts: int, top_k: int) -> None:
    tokens = experts * 4
    empty = Routing(torch.ones(tokens, top_k), torch.zeros(tokens, top_k, dtype=torch.int64))
    forced = spread_evenly(empty, experts)
    assert torch.bincount(forced.experts_TK.flatten(), minlength=experts).unique().numel() == 1
    assert all(len(set(row)) == top_k for row in forced.experts_TK.tolist()), "a token's experts differ"
