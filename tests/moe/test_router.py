"""Every way to choose experts equals a loop over tokens, written out."""

import math

import pytest
import torch
from torch import Tensor

from penstock.config.model import Balance, Moe, Router
from penstock.kernels.operators import REFERENCE
from penstock.kernels.reference import RouterRule, route
from penstock.moe import router as router_module
from penstock.moe.routing import Scope
from penstock.parallel.recompute import recomputed
from tests.closeness import assert_close

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
        assert got.keys() == expected.keys(), f"token {token}"
        assert_close(got, expected, tolerance=1e-5, what=f"token {token}")
        for expert in expected:
            counts_BE[token // 10, expert] += 1
    assert torch.equal(routed.counts_BE, counts_BE)


def test_mass_and_z_are_sums_over_each_sequence() -> None:
    logits_TE = torch.randn(8, E, generator=torch.Generator().manual_seed(2))
    routed = route(logits_TE, None, RULES["softmax"], sequences=2)
    assert_close(routed.mass_BE[1], logits_TE[4:].softmax(-1).sum(0))
    assert_close(routed.z_B[0], logits_TE[:4].exp().sum(-1).log().square().sum())


def _router(balance: Balance, **changes: object) -> router_module.TopKRouter:
    router = Router(scoring_func="sigmoid", expert_bias=True, norm_topk_prob=True)
    moe = Moe(experts=E, top_k=3, moe_intermediate_size=8, router=router, balance=balance)
    module = router_module.TopKRouter(moe.model_copy(update=changes), hidden_size=16, layer=1, operators=REFERENCE)
    torch.nn.init.normal_(module.weight_ED, generator=torch.Generator().manual_seed(3))
    assert module.expert_bias_E is not None, "this router has a bias"
    module.meter.reset()
    return module


def _x(tokens: int = 24) -> Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(4))


def test_the_router_decides_in_float32_whatever_its_input_is() -> None:
    routing = _router(Balance())(_x().bfloat16(), Scope())
    assert routing.weights_TK.dtype == torch.float32


def test_over_capacity_the_smallest_weights_of_an_expert_are_dropped() -> None:
    free = _router(Balance())(_x(), Scope())
    router = _router(Balance(capacity_factor=0.5))
    routing = router(_x(), Scope())
    limit = 3  # 24 tokens x 3 choices / 12 experts x 0.5
    dropped = 0
    for expert in range(E):
        asked = free.weights_TK[free.experts_TK == expert]
        kept = routing.weights_TK[routing.experts_TK == expert]
        assert len(kept) == min(limit, len(asked))
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
    router = _router(balance.model_copy(update={"capacity_factor": capacity_factor}))

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
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert expected[3].sum() == 2 * 24 * 3 and (expected[4] > 0) == (capacity_factor > 0)
