"""Experts that compute in 8 bits: whose copies they read, and when weight gradients come."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.recipes import BLOCKWISE
from penstock.moe.dispatch.contract import ExpertRows
from penstock.moe.experts import GroupedExperts
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.weight_grad_store import DeferredWork, WeightGradStore
from tests.closeness import decibels

HIDDEN, WIDTH, EXPERTS = 32, 48, 3

IN_8_BITS = Float8Rule(experts=BLOCKWISE)


def make(layer_context: LayerContext) -> GroupedExperts:
    torch.manual_seed(3)
    experts = GroupedExperts(EXPERTS, HIDDEN, WIDTH, layer_context)
    with torch.no_grad():
        for one in experts.parameters():
            one.normal_(std=one.shape[-1] ** -0.5)
    return experts


def draw() -> ExpertRows:
    generator = torch.Generator().manual_seed(5)
    x_ND = torch.randn(20, HIDDEN, generator=generator, requires_grad=True)
    counts_e = torch.tensor([7, 0, 11], dtype=torch.int32)
    return ExpertRows(x_ND, None, torch.rand(20, generator=generator), counts_e)


def test_8_bits_are_near_16() -> None:
    assert decibels(make(LayerContext(float8=IN_8_BITS))(draw()), make(LayerContext())(draw())) > 22


def test_copies_are_filled_in_place_and_belong_to_nobody() -> None:
    experts = make(LayerContext(float8=IN_8_BITS))
    experts.refresh_float8()
    copies = experts.float8_copies
    assert copies is not None
    memory = [one.values.data_ptr() for copy in copies for one in copy]
    before = copies.down.backward.values.float()
    with torch.no_grad():
        experts.down_eDF.neg_()
    experts.refresh_float8()
    assert experts.float8_copies is not None
    assert memory == [one.values.data_ptr() for copy in experts.float8_copies for one in copy], (
        "captured graphs read it"
    )
    assert torch.equal(experts.float8_copies.down.backward.values.float(), -before)
    assert set(experts.state_dict()) == {"gate_up_eFD", "down_eDF"}


def test_copies_are_read_as_long_as_they_are_fresh() -> None:
    experts, rows = make(LayerContext(float8=IN_8_BITS)), draw()
    made_now = experts(rows)
    experts.refresh_float8()
    assert torch.equal(experts(rows), made_now)
    assert experts.float8_copies is not None
    experts.float8_copies.gate_up.forward.values.view(torch.uint8).zero_()
    assert not experts(rows).any(), "these are read"
    with torch.no_grad():
        experts.gate_up_eFD.mul_(1)
    assert torch.equal(experts(rows), made_now), "the matrices may have changed"


def test_without_8_bits_there_are_no_copies() -> None:
    experts = make(LayerContext())
    experts.refresh_float8()
    assert experts.float8_copies is None and not experts.is_one_function


@pytest.mark.parametrize("with_sums", [True, False], ids=["sums", "autograd"])
def test_a_split_backward_puts_weight_gradients_off(with_sums: bool) -> None:
    weight_grads = WeightGradStore()
    at_once, split = (
        make(LayerContext(float8=IN_8_BITS)),
        make(LayerContext(float8=IN_8_BITS, weight_grads=weight_grads)),
    )
    for experts in (at_once, split):
        experts.sums = tuple(torch.zeros_like(one) for one in experts.parameters()) if with_sums else None

    def gradients(experts: GroupedExperts) -> list[Tensor | None]:
        return list(experts.sums or [one.grad for one in experts.parameters()])

    rows, again = draw(), draw()
    at_once(rows).square().sum().backward()
    with weight_grads.collecting() as work:
        split(again).square().sum().backward()
    assert again.x_ND.grad is not None and rows.x_ND.grad is not None
    assert torch.equal(again.x_ND.grad, rows.x_ND.grad), "the rows' gradient does not wait"
    assert not any(one is not None and one.any() for one in gradients(split)) and len(work) == 2
    for task in work:
        task()
    for mine, right in zip(gradients(split), gradients(at_once), strict=True):
        assert mine is not None and right is not None and torch.equal(mine, right)


@pytest.mark.parametrize("lacks", ["nothing", "sums", "a gradient of the rows"])
def test_the_first_matrixs_gradient_is_left_aside_where_the_rows_gradients_travel_after_it(lacks: str) -> None:
    experts, deferred = make(LayerContext(float8=IN_8_BITS)), DeferredWork()
    totals = tuple(torch.zeros_like(one) for one in experts.parameters())
    experts.sums = None if lacks == "sums" else totals
    rows = replace(draw(), deferred=deferred)
    rows.x_ND.requires_grad_(lacks != "a gradient of the rows")
    experts(rows).square().sum().backward()
    gate_up, down = experts.sums or [one.grad for one in experts.parameters()]
    assert down is not None and down.any()
    assert deferred.is_empty == (lacks != "nothing") == (gate_up is not None and bool(gate_up.any()))
    deferred.do()
    assert gate_up is not None and gate_up.any() and deferred.is_empty
