"""SwiGLU with routing weights against its reference, and compiled for every chip."""

import math

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import reference
from penstock.kernels.reference import SWIGLU, ExpertRule
from penstock.kernels.swiglu import swiglu, swiglu_backward, swiglu_forward
from penstock.kernels.tuning import KernelLaunch
from tests.closeness import assert_close, assert_equal
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta
from tests.kernels.parity import assert_near, assert_parity

SMALL = KernelLaunch(block_rows=4, block_columns=16, warps=1)
RULES = {
    "swiglu": SWIGLU,
    "weighted inputs": ExpertRule(weighs_input=True),
    "clamped": ExpertRule(limit=0.7, alpha=1.702),
    "clamped, weighted inputs": ExpertRule(limit=0.4, alpha=0.5, weighs_input=True),
    "clamped, no offset": ExpertRule(limit=0.7, up_offset=0.0),
    "gelu": ExpertRule(is_gelu=True),
    "gelu of weighted inputs": ExpertRule(is_gelu=True, weighs_input=True),
    "squares": ExpertRule(is_gated=False),
    "squares of weighted inputs": ExpertRule(is_gated=False, weighs_input=True),
}


def _fast(gate_up_RF: Tensor, weights_R: Tensor | None = None, rule: ExpertRule = SWIGLU) -> Tensor:
    return swiglu(gate_up_RF, weights_R, rule, launch=SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(9, 40), (2, 16), (4, 3)])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_activations_and_their_gradients_equal_the_reference(
    rule: ExpertRule, rows: int, width: int, weighted: bool, dtype: torch.dtype, device: torch.device
) -> None:
    gate_up_RF = torch.randn(rows, rule.projections * width, device=device, dtype=dtype)
    if rule.limit is not None:
        gate_up_RF[0], gate_up_RF[1] = rule.limit, -rule.limit
    weights_R = torch.rand(rows, device=device) if weighted else None
    assert_parity(
        lambda *inputs: _fast(*inputs, rule), lambda *inputs: reference.swiglu(*inputs, rule), [gate_up_RF, weights_R]
    )


def test_a_clamp_keeps_numbers_within_bounds_and_hides_no_nan(device: torch.device) -> None:
    rule = ExpertRule(limit=7.0, alpha=1.702)
    gate_up_RF = torch.tensor([[1e4, -1e4, 2.0, torch.nan, 1e4, -1e4, 1.0, 1.0]], device=device)
    expected_F = [8 * 7.0 / (1 + math.exp(-1.702 * 7)), 0.0, 2 * 2 / (1 + math.exp(-1.702 * 2))]
    for h_RF in (_fast(gate_up_RF, None, rule), reference.swiglu(gate_up_RF, None, rule)):
        assert_close(h_RF[0, :3], torch.tensor(expected_F))
        assert h_RF[0, 3].isnan()


def test_a_value_at_its_limit_has_no_gradient_whatever_pytorch_gives_a_clamp_there(device: torch.device) -> None:
    rule = ExpertRule(limit=7.0, alpha=1.702)
    gate_up_RF = torch.tensor([[7.0, 6.9, -7.0, 7.1, 7.0, -7.0, 6.9, 1.0]], device=device)
    for activation in (_fast, reference.swiglu):
        leaf_RF = gate_up_RF.clone().requires_grad_()
        activation(leaf_RF, None, rule).sum().backward()
        assert leaf_RF.grad is not None
        assert (leaf_RF.grad == 0).tolist() == [[True, False, False, True, True, True, False, False]]


def test_a_square_hides_no_nan_and_may_be_of_an_odd_width(device: torch.device) -> None:
    rule = ExpertRule(is_gated=False)
    x_RF = torch.tensor([[-3.0, 0.0, 2.0, torch.nan, 3.0]], device=device)
    for h_RF in (_fast(x_RF, None, rule), reference.swiglu(x_RF, None, rule)):
        assert_equal(h_RF[0, [0, 1, 2, 4]].cpu(), torch.tensor([0.0, 0.0, 4.0, 9.0]))
        assert h_RF[0, 3].isnan()


def test_a_weight_of_zero_on_the_input_has_a_gradient(device: torch.device) -> None:
    """The activation of its row is zero, but the derivative by the weight is not."""
    rule = ExpertRule(limit=7.0, alpha=1.702, weighs_input=True)
    assert_parity(
        lambda *inputs: _fast(*inputs, rule),
        lambda *inputs: reference.swiglu(*inputs, rule),
        [torch.randn(3, 16, device=device), torch.tensor([0.0, 1.0, 0.0], device=device)],
    )


def test_swiglu_takes_leading_dims_transposed_memory_and_large_gates(device: torch.device) -> None:
    gate_up = torch.randn(2, 12, 3, device=device).transpose(1, 2)
    assert_parity(_fast, reference.swiglu, [gate_up])
    assert_parity(_fast, reference.swiglu, [gate_up, torch.rand(2, 3, device=device)])
    large_RF = torch.tensor([[-1e4, 1e4, -80.0, 2.0, 3.0, 1.0]], device=device)
    assert_parity(_fast, reference.swiglu, [large_RF, torch.ones(1, device=device)])


def test_no_rows_give_no_rows(device: torch.device) -> None:
    gate_up_RF = torch.randn(0, 8, device=device, requires_grad=True)
    h_RF = _fast(gate_up_RF)
    h_RF.sum().backward()
    assert h_RF.shape == (0, 4), "an empty input has an empty output"
    assert gate_up_RF.grad is not None and gate_up_RF.grad.shape == (0, 8), "and an empty gradient"


def test_backward_gives_the_weighted_activation_again_if_asked(device: torch.device) -> None:
    gate_up_RF, weights_R = torch.randn(5, 24, device=device), torch.rand(5, device=device)
    dh_RF = torch.randn(5, 12, device=device)
    gradients = swiglu_backward(gate_up_RF, weights_R, dh_RF, recompute=True, launch=SMALL)
    assert_near(gradients.h_RF, reference.swiglu(gate_up_RF, weights_R), "recomputed h")
    assert swiglu_backward(gate_up_RF, None, dh_RF, launch=SMALL).dweights_R is None
    assert swiglu_backward(gate_up_RF, None, dh_RF, launch=SMALL).h_RF is None


@pytest.mark.parametrize("used", [0, 3, 5, 7])
def test_rows_past_the_used_ones_are_neither_read_nor_given_a_weight(used: int, device: torch.device) -> None:
    gate_up_RF, weights_R, dh_RF = torch.randn(5, 24), torch.rand(5), torch.randn(5, 12)
    gate_up_RF[used:], dh_RF[used:], weights_R[used:] = float("nan"), float("nan"), float("nan")
    given = gate_up_RF.to(device), weights_R.to(device)
    count = torch.tensor([used], dtype=torch.int32, device=device)
    gradients = swiglu_backward(*given, dh_RF.to(device), recompute=True, used=count, launch=SMALL)
    whole = swiglu_backward(given[0][:used], given[1][:used], dh_RF.to(device)[:used], recompute=True, launch=SMALL)
    assert_near(swiglu_forward(*given, used=count, launch=SMALL)[:used], whole.h_RF, "h")
    assert_near(gradients.h_RF[:used], whole.h_RF, "h once more")
    assert_near(gradients.d_gate_up_RF[:used], whole.d_gate_up_RF, "gradient")
    assert_near(gradients.dweights_R[:used], whole.dweights_R, "gradient of the weights")
    assert gradients.dweights_R[used:].eq(0).all()


@pytest.mark.parametrize(("shape", "weights"), [((2, 7), None), ((2, 8), (3,))])
def test_misfits_are_refused(shape: tuple[int, int], weights: tuple[int] | None) -> None:
    with pytest.raises(KernelError, match="swiglu"):
        swiglu(torch.zeros(shape), None if weights is None else torch.zeros(weights))


@pytest.mark.often("sm_90-weighted inputs", "gfx942-clamped")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_without_spills(target: str, rule: ExpertRule) -> None:
    used = on_meta(1, dtype=torch.int32)
    gate_up_RF, dh_RF = on_meta(8192, rule.projections * 1408), on_meta(8192, 1408)
    weights_R = on_meta(8192, dtype=torch.float32)
    compile_without_spills(target, lambda: swiglu_forward(gate_up_RF, weights_R, rule, used=used))
    given = gate_up_RF, weights_R, dh_RF, rule
    compile_without_spills(target, lambda: swiglu_backward(*given, recompute=True, used=used))
