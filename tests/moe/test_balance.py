"""Balance losses equal their formulas, travel without plumbing, and the bias evens the load."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.config.model import Balance, Moe, Router
from penstock.kernels.operators import REFERENCE, LinearLoss
from penstock.kernels.reference import Routed, RouterRule, route
from penstock.layout.grid import Grid
from penstock.moe import router as router_module
from penstock.moe.balance import (
    LoadMeter,
    SlotCounts,
    attach,
    auxiliary_loss,
    capacity,
    drop_over_capacity,
    layer_loads,
    reset_loads,
    slot_counts,
    spread_evenly,
    update_expert_bias,
)
from penstock.moe.routing import Routing, Scope
from penstock.parallel.axes import make_axes
from tests.closeness import assert_close
from tests.distributed.pool import Pool

E, K = 6, 2


def _logits(tokens: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(tokens, E, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def _switch_loss(logits_TE: Tensor) -> Tensor:
    scores_TE = logits_TE.softmax(-1)
    chosen_TE = torch.zeros_like(scores_TE).scatter_(1, scores_TE.topk(K).indices, 1)
    return E * (chosen_TE.sum(0) / chosen_TE.sum() * scores_TE.mean(0)).sum()


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
    slots_E = seen_E + torch.bincount(scores_TE.topk(K).indices.flatten(), minlength=E)
    expected = E * (slots_E / slots_E.sum() * scores_TE.mean(0)).sum()
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


def _router(rate: float = 0.1) -> router_module.TopKRouter:
    rule = Router(scoring_func="sigmoid", expert_bias=True, expert_bias_rate=rate)
    router = router_module.TopKRouter(
        Moe(experts=E, top_k=K, moe_intermediate_size=4, router=rule), hidden_size=8, layer=2, operators=REFERENCE
    )
    nn.init.normal_(router.weight_ED, std=0.5, generator=torch.Generator().manual_seed(1))
    return router


def test_the_bias_moves_one_step_against_the_load() -> None:
    router = _router()
    router.meter.slots_E.copy_(torch.tensor([9, 1, 5, 5, 10, 0]))
    update_expert_bias([nn.Sequential(router)], layer_loads([router]))
    assert_close(router.expert_bias_E, torch.tensor([-0.1, 0.1, 0.0, 0.0, -0.1, 0.1]))


def test_the_bias_evens_a_skewed_load() -> None:
    router = _router(rate=0.01)
    x_TD = torch.randn(256, 8, generator=torch.Generator().manual_seed(2)) + 1.0
    uneven = []
    for _ in range(100):
        reset_loads([router])
        router(x_TD, Scope())
        (load,) = layer_loads([router])
        slots_E = load.slots_E.float()
        uneven.append((slots_E.max() / slots_E.mean()).item())
        update_expert_bias([router], [load])
    assert uneven[0] > 1.5 and uneven[-1] < 1.15, f"from {uneven[0]:.2f} to {uneven[-1]:.2f}"


def test_loads_name_their_layer_and_start_anew() -> None:
    router = _router()
    router(torch.randn(10, 8), Scope())
    (load,) = layer_loads([router])
    assert load.layer == 2 and load.slots_E.sum().item() == 20
    reset_loads([router])
    assert layer_loads([router])[0].slots_E.sum().item() == 0


def _whole_routing() -> Routing:
    generator = torch.Generator().manual_seed(5)
    experts_TK = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(12)])
    return Routing(torch.rand(12, K, generator=generator), experts_TK)


def _dropped_among_ranks(limit: int) -> tuple[Tensor, Tensor]:
    size = dist.get_world_size()
    whole, axis = _whole_routing(), make_axes(Grid(world=size, context=size)).sequence
    own = Routing(*(part.chunk(axis.size)[axis.rank] for part in (whole.weights_TK, whole.experts_TK)))
    kept = drop_over_capacity(own, E, limit, axis)
    return kept.weights_TK, kept.experts_TK


def test_tokens_of_ranks_that_share_a_row_compete_for_the_same_slots(ranks: Pool) -> None:
    expected = drop_over_capacity(_whole_routing(), E, limit=2)
    assert (expected.experts_TK == E).any(), "this case must drop something"
    weights, experts = zip(*ranks.run(2, _dropped_among_ranks, 2), strict=True)
    assert torch.equal(torch.cat(weights), expected.weights_TK)
    assert torch.equal(torch.cat(experts), expected.experts_TK)


def _loss_among_ranks(balance: Balance) -> tuple[Tensor, Tensor]:
    """Loss of our tokens of each of three sequences, and its gradient."""
    size = dist.get_world_size()
    axes = make_axes(Grid(world=size, context=size))
    logits_BSE = _logits().detach().unflatten(0, (3, -1)).chunk(size, dim=1)[axes.rank]
    logits_TE = logits_BSE.flatten(0, 1).requires_grad_()
    routed = route(logits_TE, None, RouterRule(top_k=K), 3)
    meter = LoadMeter(E)
    meter.slots_E += routed.counts_BE.sum(0)
    load = slot_counts(routed.counts_BE, meter, balance, axes)
    scope = Scope(sequences=3, share=0.5)
    loss = _differentiable(routed, auxiliary_loss(routed, size * len(logits_TE), balance, scope, load, REFERENCE))
    loss.backward()
    assert logits_TE.grad is not None
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
    assert [capacity(12, K, E, factor) for factor in (1.0, 1.25, 0.01)] == [4, 5, 1]


@pytest.mark.parametrize(("experts", "top_k"), [(64, 6), (256, 8), (128, 8), (8, 2), (160, 6), (7, 3)])
def test_forced_balance_is_even_for_every_model(experts: int, top_k: int) -> None:
    tokens = experts * 4
    empty = Routing(torch.ones(tokens, top_k), torch.zeros(tokens, top_k, dtype=torch.int64))
    forced = spread_evenly(empty, experts)
    assert torch.bincount(forced.experts_TK.flatten(), minlength=experts).unique().numel() == 1
    assert all(len(set(row)) == top_k for row in forced.experts_TK.tolist()), "a token's experts differ"
