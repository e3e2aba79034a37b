"""The experts' network in 8 bits against float32, on the definitions and on our kernels, and what it keeps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import reference
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.float8.expert_ffn import copy_experts, expert_ffn
from penstock.kernels.float8.operators import REFERENCE, Float8Operators, Float8Rule
from penstock.kernels.float8.quantized import (
    BLOCKWISE,
    BLOCKWISE_SQUARE,
    E4M3,
    E5M2,
    MXFP8,
    ROWWISE,
    TENSORWISE,
    Format,
    Quantized,
    Recipe,
    format_on,
)
from penstock.kernels.float8.triton_operators import TRITON
from penstock.kernels.reference import SWIGLU, ExpertRule
from penstock.kernels.tuning import target_of
from tests.closeness import decibels
from tests.kernels.expert_batch import Batch, assert_host_does_not_wait, draw_batch, refuse, saved_tensors

HIDDEN, WIDTH, EXPERTS = 128, 128, 3

# Least signal to noise by the format of gradients. One product has 25, or 20; here two stand behind each other.
BARS_DB = {"e4m3": 22.0, "e5m2": 17.0}

# With a limit that few numbers reach: at it gradients are there or not, and 8 bits decide for some.
GPT_OSS = ExpertRule(limit=5.0, alpha=1.702)
LLAMA4 = ExpertRule(weighs_input=True)

OPERATORS = {"reference": REFERENCE, "triton": TRITON}


ROUTINGS: dict[str, Callable[[], Tensor]] = {
    "one expert a token, skewed": lambda: torch.tensor([[0]] * 40 + [[2]] * 2),
    "two experts a token": lambda: torch.rand(25, EXPERTS).topk(2).indices,
    # Expert 3 does not exist: such slots were dropped and have no row.
    "dropped slots": lambda: torch.where(torch.rand(25, 2) < 0.4, EXPERTS, torch.rand(25, EXPERTS).topk(2).indices),
}


def draw(routing: str, device: torch.device) -> Batch:
    return draw_batch(ROUTINGS[routing](), EXPERTS, HIDDEN, WIDTH, device)


def rule_of(operators: Float8Operators, recipe: Recipe, device: torch.device, gradient: Format = E4M3) -> Float8Rule:
    forms = (format_on(name, target_of(device)) for name in ("e4m3", gradient.name))
    return Float8Rule(experts=recipe, forward=next(forms), gradient=next(forms), operators=operators)


def run(batch: Batch, ffn: Callable[..., Tensor], *, with_biases: bool = False, **options: Any) -> list[Tensor]:
    """Output and gradients: of x, of both matrices, of the weights, of the biases."""
    given = [batch.x_TD, batch.gate_up_eFD, batch.down_eDF, batch.weights_R, *(batch.biases if with_biases else ())]
    leaves = [one.detach().clone().requires_grad_() for one in given]
    if with_biases:
        options["biases"] = (leaves[4], leaves[5])
    y_RD = ffn(*leaves[:3], batch.order.counts_E, leaves[3], batch.index_R, **options)
    dy_RD = torch.randn(y_RD.shape, generator=torch.Generator().manual_seed(1)).to(y_RD)
    dy_RD[batch.used :] = 0
    found = [y_RD.detach(), *torch.autograd.grad(y_RD, leaves, dy_RD)]
    found[4] = found[4][: batch.used]
    return found


def run_exactly(batch: Batch, **options: Any) -> list[Tensor]:
    wide = replace(
        batch,
        x_TD=batch.x_TD.float(),
        gate_up_eFD=batch.gate_up_eFD.float(),
        down_eDF=batch.down_eDF.float(),
        biases=(batch.biases[0].float(), batch.biases[1].float()),
    )
    return run(wide, reference.expert_ffn, **options)


def assert_over(bar: float, found: list[Tensor], expected: list[Tensor]) -> None:
    ratios = [decibels(*pair) for pair in zip(found, expected, strict=True)]
    assert min(ratios) > bar, [round(ratio, 1) for ratio in ratios]


@pytest.mark.parametrize("gradient", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "recipe", [BLOCKWISE, BLOCKWISE_SQUARE, MXFP8, ROWWISE, TENSORWISE], ids=lambda recipe: recipe.name
)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_output_and_gradients_are_near_those_of_float32(
    routing: str, recipe: Recipe, gradient: Format, device: torch.device
) -> None:
    batch, float8 = draw(routing, device), rule_of(REFERENCE, recipe, device, gradient)
    found = run(batch, expert_ffn, float8=float8, places_TK=batch.order.places_TK)
    assert_over(BARS_DB[gradient.name], found, run_exactly(batch))


@pytest.mark.parametrize("rule", [SWIGLU, GPT_OSS, LLAMA4], ids=["swiglu", "clamped", "weights on the input"])
def test_biases_clamps_and_weights_on_the_input_have_gradients(rule: ExpertRule, device: torch.device) -> None:
    routing = "two experts a token" if rule is LLAMA4 else "dropped slots"
    batch, float8 = draw(routing, device), rule_of(REFERENCE, BLOCKWISE, device)
    options = {"with_biases": rule is not LLAMA4, "rule": rule}
    found = run(batch, expert_ffn, float8=float8, places_TK=batch.order.places_TK, **options)
    expected = run_exactly(batch, **options)
    if rule is LLAMA4:
        assert decibels(found.pop(), expected.pop()) > 17, "the weights' gradient is a sum whose terms cancel"
    assert_over(BARS_DB["e4m3"], found, expected)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [(MXFP8, {}), (BLOCKWISE_SQUARE, {"with_biases": True, "rule": GPT_OSS})],
    ids=["mxfp8", "squares and biases"],
)
def test_our_kernels_equal_the_definitions(recipe: Recipe, options: dict[str, Any], device: torch.device) -> None:
    """A number that rounds to its other neighbour moves a product by a 16th of one term, so not more than this."""
    batch = draw("dropped slots", device)
    options = {"places_TK": batch.order.places_TK, **options}
    found, expected = (
        run(batch, expert_ffn, float8=rule_of(operators, recipe, device), **options)
        for operators in (TRITON, REFERENCE)
    )
    assert_over(40.0, found, expected)


@pytest.mark.parametrize("operators", OPERATORS.values(), ids=OPERATORS)
def test_recomputation_from_packed_rows_has_the_same_bits(operators: Float8Operators, device: torch.device) -> None:
    """Rows in 8 bits replace our own, those in 16 bits are not read, and the first product can run again."""
    batch, float8 = draw("dropped slots", device), rule_of(operators, BLOCKWISE, device)
    own = run(batch, expert_ffn, float8=float8, places_TK=batch.order.places_TK)
    options = {"quantized": quantized_apart(batch.x_TD, float8), "recompute": True}
    nothing = replace(batch, x_TD=torch.full_like(batch.x_TD, torch.nan))
    found = run(nothing, expert_ffn, float8=float8, places_TK=batch.order.places_TK, **options)
    assert all(torch.equal(*pair) for pair in zip(found, own, strict=True))
    assert_over(BARS_DB["e4m3"], own, run_exactly(batch))


def test_rows_saved_in_a_buffer_give_the_same_bits(device: torch.device) -> None:
    """Between rows of other layers, which are NaN; of the tail only the last row is read and set to zero."""
    batch, float8 = draw("dropped slots", device), rule_of(TRITON, BLOCKWISE, device)
    places_TK, used = batch.order.places_TK, batch.used

    def keep(count: Tensor, room: int, like: Tensor) -> SavedRows:
        rows_SF = like.new_full((37 + room + 5, like.shape[1]), torch.nan)
        return SavedRows(rows_SF, torch.tensor([37], device=device), room)

    alone = run(batch, expert_ffn, float8=float8, places_TK=places_TK)
    last_TK = torch.where(places_TK < used, places_TK, len(batch.index_R) - 1)
    kept = run(batch, expert_ffn, float8=float8, places_TK=last_TK, keep=keep, only_last=True)
    recomputed = run(batch, expert_ffn, float8=float8, places_TK=places_TK, keep=refuse, recompute=True)
    for output, *gradients in (kept, recomputed):
        assert torch.equal(output[:used], alone[0][:used])
        assert all(torch.equal(*pair) for pair in zip(gradients, alone[1:], strict=True))


@pytest.mark.parametrize("recipe", [BLOCKWISE, TENSORWISE], ids=lambda recipe: recipe.name)
def test_rows_past_the_last_expert_poison_nothing(recipe: Recipe, device: torch.device) -> None:
    batch, float8 = draw("dropped slots", device), rule_of(REFERENCE, recipe, device)
    used = batch.used
    x_RD, weights_R = reference.permute(batch.x_TD, batch.order), batch.weights_R.clone()
    x_RD[used:] = weights_R[used:] = torch.nan
    leaves = [one.requires_grad_() for one in (x_RD, batch.gate_up_eFD, batch.down_eDF, weights_R)]
    y_RD = expert_ffn(*leaves[:3], batch.order.counts_E, weights_R, float8=float8)
    dy_RD = torch.ones_like(y_RD)
    dy_RD[used:] = torch.nan
    dx_RD, *others, dweights_R = torch.autograd.grad(y_RD, leaves, dy_RD)
    assert not y_RD[used:].any() and not dx_RD[used:].any()
    assert all(one.isfinite().all() for one in (y_RD, dx_RD, *others, dweights_R[:used]))


def test_squares_change_the_gradients_of_matrices_only(device: torch.device) -> None:
    batch = draw("dropped slots", device)
    # A column of x and one of h, so large that what shares their scales is lost.
    batch.x_TD[:, 7] *= 1e6
    batch.gate_up_eFD[:, :, 7] *= 1e-6
    batch.gate_up_eFD[:, [5, 5 + WIDTH]] *= 1e3
    found, expected = (
        run(batch, expert_ffn, float8=rule_of(REFERENCE, recipe, device)) for recipe in (BLOCKWISE_SQUARE, BLOCKWISE)
    )
    same = [torch.equal(*pair) for pair in zip(found, expected, strict=True)]
    assert same == [True, True, False, False, True], "output, x, gate and up, down, weights"


def test_copies_made_before_give_the_same_bits(device: torch.device) -> None:
    batch, float8 = draw("two experts a token", device), rule_of(REFERENCE, BLOCKWISE, device)
    copies = copy_experts(batch.gate_up_eFD, batch.down_eDF, float8)
    fresh = run(batch, expert_ffn, float8=float8)
    batch.gate_up_eFD.zero_()
    assert all(
        torch.equal(*pair) for pair in zip(run(batch, expert_ffn, float8=float8, copies=copies), fresh, strict=True)
    )


def quantized_apart(x_TD: Tensor, float8: Float8Rule) -> Quantized:
    """As rows travel: each followed by its scales."""
    rows = REFERENCE.quantize_rows(x_TD, float8.experts, float8.forward).rows
    scales = rows.scales.contiguous().view(torch.uint8)
    packed = torch.cat((rows.values.view(torch.uint8), scales, scales.new_zeros(len(scales), 28)), dim=1)
    values, behind = packed[:, :HIDDEN], packed[:, HIDDEN : HIDDEN + scales.shape[1]]
    return Quantized(values.view(rows.values.dtype), behind.view(torch.float32), rows.block)


@pytest.mark.parametrize("change", ["block", "format", "rows"])
def test_rows_that_are_quantized_otherwise_are_refused(change: str, device: torch.device) -> None:
    batch, float8 = draw("two experts a token", device), rule_of(REFERENCE, BLOCKWISE, device)
    rows = quantized_apart(batch.x_TD, float8)
    other = {
        "block": rows._replace(block=(1, 32)),
        "format": rows._replace(values=rows.values.view(torch.float8_e5m2)),
        "rows": rows._replace(values=rows.values[1:]),
    }[change]
    with pytest.raises(KernelError, match="rows in 8 bits"):
        run(batch, expert_ffn, float8=float8, quantized=other)


@pytest.mark.parametrize("recompute", [False, True])
def test_x_is_kept_in_8_bits_only(recompute: bool, device: torch.device) -> None:
    batch, float8 = draw("two experts a token", device), rule_of(REFERENCE, BLOCKWISE, device)
    copies = copy_experts(batch.gate_up_eFD, batch.down_eDF, float8)
    known = {one.data_ptr() for one in (*batch.rest, *batch.order)}
    leaves = [one.requires_grad_() for one in (batch.x_TD, batch.gate_up_eFD, batch.down_eDF)]
    with saved_tensors() as saved:
        expert_ffn(*leaves, *batch.rest, float8=float8, copies=copies, recompute=recompute)
    made = {tuple(one.shape): one.numel() * one.element_size() for one in saved if one.data_ptr() not in known}
    tokens, rows = len(batch.x_TD), len(batch.weights_R)
    expected = {(tokens, HIDDEN): tokens * HIDDEN, (tokens, HIDDEN // 128): tokens * HIDDEN // 128 * 4}
    if not recompute:
        expected[rows, 2 * WIDTH] = rows * 2 * WIDTH * batch.x_TD.element_size()
    assert made == expected, "one byte a number of x, its scales, and gate and up"


def test_gradients_are_added_to_float32_sums(device: torch.device) -> None:
    batch, float8 = draw("dropped slots", device), rule_of(REFERENCE, BLOCKWISE, device)
    held = [one.requires_grad_() for one in (batch.gate_up_eFD, batch.down_eDF, *batch.biases)]
    sums = tuple(torch.ones_like(one, dtype=torch.float32) for one in held)
    given = {"float8": float8, "biases": (held[2], held[3]), "rule": GPT_OSS}
    y_RD = expert_ffn(batch.x_TD, *held[:2], *batch.rest, **given)
    expected = torch.autograd.grad(y_RD, held, torch.ones_like(y_RD))
    y_RD = expert_ffn(batch.x_TD, *held[:2], *batch.rest, accumulate_into=sums, **given)
    y_RD.sum().backward()
    assert all(one.grad is None for one in held), "the sums take the gradients' place"
    for total, gradient in zip(sums, expected, strict=True):
        assert decibels(total - 1, gradient.float()) > (60.0 if gradient.dtype == torch.float32 else 40.0)


@pytest.mark.gpu
def test_nothing_waits_for_the_device(device: torch.device) -> None:
    batch, float8 = draw("dropped slots", device), rule_of(TRITON, BLOCKWISE, device)
    leaves = [one.requires_grad_() for one in (batch.x_TD, batch.gate_up_eFD, batch.down_eDF)]

    def step() -> None:
        expert_ffn(*leaves, *batch.rest, float8=float8, places_TK=batch.order.places_TK).sum().backward()

    assert_host_does_not_wait(step)
    assert all(leaf.grad is not None for leaf in leaves)


def test_a_rehearsed_pass_needs_no_memory() -> None:
    cpu = torch.device("cpu")
    batch, float8 = draw("two experts a token", cpu), rule_of(TRITON, BLOCKWISE, cpu)
    leaves = [one.to("meta").requires_grad_() for one in (batch.x_TD, batch.gate_up_eFD, batch.down_eDF)]
    *rest, places_TK = (one.to("meta") for one in (*batch.rest, batch.order.places_TK))
    y_RD = expert_ffn(*leaves, *rest, float8=float8, copies=copy_experts(*leaves[1:], float8), places_TK=places_TK)
    y_RD.sum().backward()
    assert y_RD.is_meta and all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)
