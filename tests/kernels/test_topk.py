"""The router's kernels against the reference, and compiled for every chip."""

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import reference
from penstock.kernels.operators import LinearLoss, reference_balance_loss
from penstock.kernels.reference import RouterRule
from penstock.kernels.topk import balance_loss, route
from penstock.kernels.tuning import KernelLaunch
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta
from tests.kernels.parity import assert_parity

SMALL_TILES = {"topk.LAUNCH": KernelLaunch(block_rows=16, block_columns=8, warps=1)}

RULES = {
    "V2-Lite": RouterRule(top_k=6),
    "Mixtral": RouterRule(top_k=2, softmax_after_top_k=True),
    "Qwen3": RouterRule(top_k=4, normalize=True),
    "V2": RouterRule(top_k=3, groups=4, topk_group=2, scale=16.0),
    "V3": RouterRule(top_k=4, score="sigmoid", groups=4, topk_group=2, group_score="top2", normalize=True, scale=2.5),
    "sigmoid": RouterRule(top_k=1, score="sigmoid"),
    "V4": RouterRule(top_k=4, score="sqrt-softplus", normalize=True, scale=1.5),
    "after, normalized": RouterRule(top_k=3, softmax_after_top_k=True, normalize=True, scale=2.0),
}


def _check(logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule, sequences: int) -> None:
    assert_parity(
        lambda logits: route(logits, bias_E, rule, sequences),
        lambda logits: reference.route(logits, bias_E, rule, sequences),
        [logits_TE],
    )


@pytest.mark.parametrize(("experts", "biased"), [(12, False), (20, True)])
@pytest.mark.parametrize("name", RULES)
def test_routing_and_its_gradients_equal_the_reference(
    name: str, experts: int, biased: bool, device: torch.device
) -> None:
    logits_TE = torch.randn(2 * 9, experts, device=device)
    _check(logits_TE, torch.randn(experts, device=device) * 0.1 if biased else None, RULES[name], sequences=2)


@pytest.mark.parametrize("name", RULES)
def test_bfloat16_logits_are_routed_in_float32(name: str, device: torch.device) -> None:
    # Distinct in bfloat16, so that there are no ties.
    logits_TE = (torch.rand(8, 40).argsort(-1)[:, :20] / 8).bfloat16().to(device)
    _check(logits_TE, None, RULES[name], sequences=1)


def test_the_root_of_softplus_is_exact_far_from_zero(device: torch.device) -> None:
    logits_TE = torch.tensor([[-60.0, -20.0, -8.0, -0.5, 0.5, 8.0, 20.0, 60.0]], device=device)
    weights_TK = route(logits_TE, None, RouterRule(top_k=8, score="sqrt-softplus"), 1).weights_TK
    exact_TE = torch.nn.functional.softplus(logits_TE.double(), threshold=1e3).sqrt().flip(-1)
    assert_close(weights_TK / exact_TE.float(), torch.ones_like(weights_TK), tolerance=1e-6)


@pytest.mark.parametrize(("tokens", "experts", "sequences"), [(1, 7, 1), (67, 9, 1), (3, 300, 3), (0, 8, 2)])
def test_odd_sizes_and_all_experts_are_routed(tokens: int, experts: int, sequences: int, device: torch.device) -> None:
    _check(torch.randn(tokens, experts, device=device), None, RouterRule(top_k=3), sequences)
    _check(torch.randn(5, 6, device=device), None, RouterRule(top_k=6, groups=2, topk_group=2), sequences=1)


@pytest.mark.parametrize("choice", [0, 3, 4])
def test_each_output_alone_may_be_used(choice: int, device: torch.device) -> None:
    for name in ("V3", "V2-Lite", "Mixtral"):
        assert_parity(
            lambda logits, rule=RULES[name]: route(logits, None, rule, 2)[choice],
            lambda logits, rule=RULES[name]: reference.route(logits, None, rule, 2)[choice],
            [torch.randn(6, 12, device=device)],
        )


def test_ties_go_to_the_lowest_expert(device: torch.device) -> None:
    routed = route(torch.zeros(3, 10, device=device), None, RouterRule(top_k=4), 1)
    assert routed.experts_TK.tolist() == [[0, 1, 2, 3]] * 3
    signed = torch.tensor([[-0.0, 0.0, -1.0, 0.0]], device=device)
    rule = RouterRule(top_k=3, softmax_after_top_k=True)
    assert route(signed, None, rule, 1).experts_TK.tolist() == [[0, 1, 3]], "-0 equals 0"
    grouped = RouterRule(top_k=2, groups=4, topk_group=1, group_score="top2")
    assert route(torch.zeros(1, 12, device=device), None, grouped, 1).experts_TK.tolist() == [[0, 1]]


@pytest.mark.parametrize("experts", [12, 300])
def test_equal_and_almost_equal_scores_are_told_apart(experts: int, device: torch.device) -> None:
    steps_TE = torch.randint(-2, 3, (12, experts), dtype=torch.int32)
    # Neighbours in float32, far closer than the bits that are left where a key carries its column's number.
    logits_TE = (torch.tensor(1.0).view(torch.int32) + steps_TE).view(torch.float32)
    logits_TE[::2] = steps_TE[::2].float()  # many equal ones
    expected_TK = logits_TE.argsort(dim=1, descending=True, stable=True)[:, :5]
    rule = RouterRule(top_k=5, softmax_after_top_k=True)
    assert torch.equal(route(logits_TE.to(device), None, rule, 1).experts_TK.cpu(), expected_TK)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_choices_stay_valid_for_any_logits(value: float, device: torch.device) -> None:
    logits_TE = torch.randn(3, 12, device=device)
    logits_TE[1] = value
    routed = route(logits_TE, None, RULES["V2"], 1)
    for chosen in routed.experts_TK.tolist():
        assert len(set(chosen)) == 3 and all(0 <= expert < 12 for expert in chosen), f"not three experts: {chosen}"
    assert int(routed.counts_BE.sum()) == 9, "every slot is counted once"


def test_a_saturated_router_keeps_finite_gradients(device: torch.device) -> None:
    logits_TE = torch.full((2, 8), -100.0, device=device)  # a softmax or sigmoid of them underflows
    logits_TE[:, 3] = 100.0
    for name in ("Qwen3", "V3", "V4"):
        leaf_TE = (logits_TE + torch.arange(8, device=device)).requires_grad_()
        routed = route(leaf_TE, None, RULES[name], 1)
        (routed.weights_TK.sum() + routed.mass_BE.square().sum() + routed.z_B.sum()).backward()
        assert leaf_TE.grad is not None and leaf_TE.grad.isfinite().all(), name


@pytest.mark.parametrize(
    ("rule", "sequences", "words"),
    [
        (RouterRule(top_k=2, groups=3), 1, "groups"),
        (RouterRule(top_k=5, groups=4, topk_group=2), 1, "groups kept"),
        (RouterRule(top_k=1, groups=8, topk_group=2, group_score="top2"), 1, "best two"),
        (RouterRule(top_k=1, score="sigmoid", softmax_after_top_k=True), 1, "softmax"),
        (RouterRule(top_k=1), 4, "sequences"),
    ],
)
def test_misfits_are_refused(rule: RouterRule, sequences: int, words: str) -> None:
    with pytest.raises(KernelError, match=words):
        route(torch.zeros(6, 8), None, rule, sequences)


@pytest.mark.often("64-*-gfx942", "256-rule2-sm_90")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("experts", "rule"),
    [
        (64, RouterRule(top_k=6)),
        (64, RouterRule(top_k=6, score="sqrt-softplus")),
        (256, RouterRule(top_k=8, score="sigmoid", groups=8, topk_group=4, group_score="top2", normalize=True)),
    ],
)
def test_the_kernels_compile_without_spills(experts: int, rule: RouterRule, target: str) -> None:
    logits_TE, bias_E = (on_meta(*shape, dtype=torch.float32) for shape in ((8192, experts), (experts,)))

    def both_passes() -> None:
        routed = route(logits_TE.requires_grad_(), bias_E, rule, 2)
        torch.autograd.backward([one.sum() for one in (routed.weights_TK, routed.mass_BE, routed.z_B)])

    assert len(compile_without_spills(target, both_passes)) == 3


def _draw_losses(sequences: int, experts: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    slots_BE = torch.randint(0, 2000, (sequences, experts))
    slots_BE[0, : experts // 2] = 0  # experts that a sequence never chose
    return tuple(one.to(device) for one in (torch.rand(sequences, experts), 9 * torch.rand(sequences), slots_BE))


def _compare_losses(found: LinearLoss, wanted: LinearLoss) -> None:
    for mine, right in zip(found, wanted, strict=True):
        assert mine.shape == right.shape and mine.dtype == torch.float32
        assert_close(mine, right, tolerance=1e-5)


@pytest.mark.parametrize(("sequences", "experts"), [(1, 6), (4, 64), (3, 100)])
@pytest.mark.parametrize("together", [False, True], ids=["of each sequence", "of all"])
def test_losses_and_their_gradients_equal_the_definition(
    sequences: int, experts: int, together: bool, device: torch.device
) -> None:
    mass_BE, z_B, slots_BE = _draw_losses(sequences, experts, device)
    slots_BE = slots_BE.sum(0, keepdim=True) if together else slots_BE
    for factors in ((0.5, 0.25), (0.0, 0.25), (1e-4, 0.0)):  # of the balance loss, of the z-loss
        given = mass_BE, z_B, slots_BE, *factors
        _compare_losses(balance_loss(*given), reference_balance_loss(*given))


def test_the_definitions_gradients_are_its_gradients() -> None:
    mass_BE, z_B, slots_BE = (one.double() for one in _draw_losses(3, 8, torch.device("cpu")))

    def loss(mass_BE: Tensor, z_B: Tensor) -> Tensor:
        return reference_balance_loss(mass_BE, z_B, slots_BE, 0.5, 0.1).loss

    found = reference_balance_loss(mass_BE, z_B, slots_BE, 0.5, 0.1)
    known = torch.autograd.functional.jacobian(loss, (mass_BE, z_B))
    assert_close(known, (found.dmass_BE, found.dz_B))


def test_a_sequence_that_chose_nothing_has_no_loss(device: torch.device) -> None:
    mass_BE, z_B, slots_BE = torch.rand(2, 5, device=device), torch.zeros(2, device=device), torch.zeros(2, 5).long()
    found = balance_loss(mass_BE, z_B, slots_BE.to(device), 1.0, 1.0)
    assert found.loss.item() == 0 and not found.dmass_BE.any()


@pytest.mark.often("gfx942")
@pytest.mark.parametrize("target", TARGETS)
def test_the_balance_loss_compiles_without_spills(target: str) -> None:
    mass_BE, z_B, slots_BE = _draw_losses(4, 256, torch.device("cpu"))
    given = mass_BE.to("meta"), z_B.to("meta"), slots_BE.to("meta"), 0.5, 0.25
    compile_without_spills(target, lambda: balance_loss(*given))
