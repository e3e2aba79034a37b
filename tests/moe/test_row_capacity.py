"""How many rows there is room for, and what becomes of an order of rows that has less."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels import expert_kernels as networks
from penstock.kernels.backends import TRITON
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.expert_parts import SavedRows
from penstock.kernels.operators import REFERENCE, TORCH
from penstock.layout.grid import ExpertPlacement
from penstock.moe.balance import Routing, reset_meters
from penstock.moe.dispatch.collective import first_rows
from penstock.moe.dispatch.contract import pick_kept
from penstock.moe.dispatch.row_capacity import ActivationArena, RowCapacity, make_room, rows_left_out, widenings
from tests.closeness import assert_close
from tests.examples import examples
from tests.moe.mixture import D, random_routing, token_by_token, weights_of


def test_a_layer_that_is_not_trained_has_room_for_all() -> None:
    row_capacity = RowCapacity(ExpertPlacement(experts=64, expert=8), 1.0)
    assert row_capacity.rows(1000, 6) == 751  # 6,000 / 8 and the row of dropped slots, in sixteens
    assert row_capacity.eval().rows(1000, 6) == 6000


def test_layers_that_were_too_small_keep_a_tenth_more_than_came_and_others_stay_as_they_are() -> None:
    small, large = row_capacities = [RowCapacity(ExpertPlacement(experts=64, expert=8), bound) for bound in (1.0, 1.5)]
    for arriving in (900, 1000, 700):
        for row_capacity in row_capacities:
            row_capacity.count(torch.tensor(arriving), row_capacity.rows(1000, 6))
    assert [int(row_capacity.left_out) for row_capacity in row_capacities] == [900 - 751 + 1000 - 751, 0]
    make_room(row_capacities)
    assert small.rows(1000, 6) == 1103  # 1,100 and the row of dropped slots, in sixteens
    assert large.rows(1000, 6) == 1135
    assert widenings(row_capacities) == 1, "of both: large enough ranks capture their graphs anew with the others"
    reset_meters(row_capacities)
    assert small.meter.tolist() == [0, 0]
    make_room(row_capacities)
    assert small.rows(1000, 6) == 1103, "room is never taken back"


def test_more_than_the_worst_case_is_never_asked_for() -> None:
    row_capacity = RowCapacity(ExpertPlacement(experts=4, expert=2), 1.0)
    row_capacity.rows(10, 2)
    row_capacity.widen(20)
    assert row_capacity.rows(10, 2) == 20
    # A rank never needs more rows of a token than it has experts.
    assert RowCapacity(ExpertPlacement(experts=256, expert=64), math.inf).rows(1000, 8) == 4000


@examples(25, deadline=None)
@given(
    tokens=st.integers(1, 9),
    experts=st.integers(1, 4),
    top_k=st.integers(1, 3),
    rows=st.integers(0, 27),
    dropped=st.sampled_from([0.0, 0.5]),
    kernels=st.sampled_from([(REFERENCE, networks.REFERENCE), (TORCH, networks.TORCH), (TRITON, networks.TRITON)]),
    seed=st.integers(0, 1000),
)
def test_an_order_of_fewer_rows_keeps_the_first_and_drops_the_rest(
    tokens: int, experts: int, top_k: int, rows: int, dropped: float, kernels: tuple[Any, Any], seed: int
) -> None:
    operators, network = kernels
    routing = random_routing(tokens, experts, min(top_k, experts), seed, dropped)
    whole = operators.order_rows(routing.experts_TK, experts)
    order = first_rows(whole, rows)
    kept_TK = (whole.places_TK < rows) & (routing.experts_TK < experts)
    x_TD = torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    leaves = (x_TD, routing.weights_TK, *weights_of(experts))
    rest = order.counts_E, pick_kept(routing.weights_TK, order), order.slots_R // kept_TK.shape[1]
    y_RD = expert_ffn(x_TD, *leaves[2:], *rest, places_TK=order.places_TK, kernels=network)
    got_TD = operators.unpermute(y_RD, order)
    kept = Routing(routing.weights_TK, routing.experts_TK.masked_fill(~kept_TK, experts))
    expected_TD = token_by_token(x_TD, kept, *leaves[2:])
    assert_close(got_TD, expected_TD, tolerance=1e-4)
    got = torch.autograd.grad(got_TD.sum(), leaves)
    expected = torch.autograd.grad(expected_TD.sum(), leaves, allow_unused=True, materialize_grads=True)
    assert_close(got, expected, tolerance=1e-4, what="gradients of x, weights, gate_up, down")


def test_what_comes_back_at_places_of_dropped_slots_never_reaches_their_weights() -> None:
    values_TK = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    order = first_rows(REFERENCE.order_rows(torch.tensor([[1, 0], [1, 2]]), 2), 2)
    picked_R = pick_kept(values_TK, order)
    assert picked_R.tolist() == [2.0, 1.0, 0.0]
    (gradient_TK,) = torch.autograd.grad(picked_R, values_TK, torch.tensor([5.0, 6.0, math.nan]))
    assert gradient_TK.tolist() == [[6.0, 5.0], [0.0, 0.0]]


LIKE = torch.empty(0, 4)


def arena_of(layers: int, bound: float) -> ActivationArena:
    arena = ActivationArena(bound)
    for _ in range(layers):
        arena.join()
    return arena


def put(arena: ActivationArena, rows: int, row_capacity: int = 20, share: float = 10.0) -> SavedRows:
    return arena.place(torch.tensor([rows], dtype=torch.int32), row_capacity, LIKE, even_share=share)


def test_a_layer_may_take_twice_its_share_of_an_arena_if_others_take_less() -> None:
    arena = arena_of(3, 1.2)
    places = [put(arena, rows) for rows in (20, 4, 12)]
    assert [int(place.first) for place in places] == [0, 20, 24]
    assert all(place.rows_SF is places[0].rows_SF for place in places)
    assert len(places[0].rows_SF) == 36
    assert int(arena.left_out) == 0


def test_each_pass_has_an_arena_buffer_of_its_own() -> None:
    arena = arena_of(2, 1.5)
    first, _, second = put(arena, 5), put(arena, 5), put(arena, 5)
    assert second.rows_SF is not first.rows_SF and int(second.first) == 0
    arena.begin()
    third = put(arena, 5)
    assert third.rows_SF is not second.rows_SF, "a pass that was given up leaves nothing behind"


def test_rows_without_room_are_counted_and_the_next_pass_has_room_for_them() -> None:
    arena = arena_of(2, 1.0)
    for rows in (15, 12):
        put(arena, rows)
    assert int(rows_left_out([arena])) == 7
    make_room([arena])
    arena.reset()
    places = [put(arena, rows) for rows in (15, 12)]
    assert len(places[0].rows_SF) == 30, "27 and a tenth"
    assert int(arena.left_out) == 0
    assert widenings([arena]) == 1


def test_an_arena_has_capacity_for_any_single_layer_and_a_planned_layer_counts_its_own_share() -> None:
    assert len(put(arena_of(2, 1.0), 1, row_capacity=35).rows_SF) == 35
    arena, like = arena_of(5, 1.5), torch.empty(0, 4, device="meta")
    place = arena.place(torch.empty(1, dtype=torch.int32, device="meta"), 40, like, even_share=10.0)
    assert place.rows_SF.shape == (15, 4) and place.room == 40


@pytest.mark.parametrize("counts", [((5, 0, 6), (9, 3, 1)), ((0, 0, 0), (4, 4, 4))])
def test_experts_that_share_an_arena_give_the_results_of_separate_buffers(counts: tuple[tuple[int, ...], ...]) -> None:
    arena, row_capacity = arena_of(2, 1.6), 20
    matrices = torch.randn(2, 3, 32, 16), torch.randn(2, 3, 16, 16)
    x_ND, dy_RD = torch.randn(7, 16), torch.randn(2, row_capacity, 16)
    index_R, weights_R = torch.randint(7, (2, row_capacity)), torch.rand(2, row_capacity)

    def run(*, in_arena: bool) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (x_ND, *matrices)]
        x, gate_up, down = leaves
        arena.begin()
        outputs = []
        for layer, of_layer in enumerate(counts):
            counts_e = torch.tensor(of_layer, dtype=torch.int32)
            keep = partial(arena.place, even_share=10.0) if in_arena else None
            given = counts_e, weights_R[layer], index_R[layer]
            outputs.append(expert_ffn(x, gate_up[layer], down[layer], *given, keep=keep, kernels=networks.TRITON))
        torch.autograd.backward(outputs, list(dy_RD))
        return [*outputs, *(leaf.grad for leaf in leaves)]

    # Sums by atomics differ in their order.
    assert_close(run(in_arena=False), run(in_arena=True), tolerance=1e-6)
    assert arena.meter.tolist() == [0, sum(map(sum, counts))]
