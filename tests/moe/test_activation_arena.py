"""Layers that keep their rows in one buffer: room for their sum, boards that come and go, the same gradients."""

from functools import partial

import pytest
import torch
from torch import Tensor

from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.expert_kernels import TRITON
from penstock.kernels.expert_parts import SavedRows
from penstock.moe.dispatch.row_capacity import ActivationArena, forget_left_out, make_room, rows_left_out, widenings
from tests.closeness import assert_close

LIKE = torch.empty(0, 4)


def arena_of(layers: int, bound: float) -> ActivationArena:
    arena = ActivationArena(bound)
    for _ in range(layers):
        arena.join()
    return arena


def put(arena: ActivationArena, rows: int, row_capacity: int = 20, share: float = 10.0) -> SavedRows:
    return arena.place(torch.tensor([rows], dtype=torch.int32), row_capacity, LIKE, even_share=share)


def test_a_layer_may_have_twice_its_share_as_long_as_all_of_them_have_not() -> None:
    arena = arena_of(3, 1.2)
    places = [put(arena, rows) for rows in (20, 4, 12)]
    assert [int(place.first) for place in places] == [0, 20, 24]
    assert all(place.rows_SF is places[0].rows_SF for place in places)
    assert len(places[0].rows_SF) == 36
    assert int(arena.left_out) == 0


def test_each_pass_has_a_board_of_its_own() -> None:
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
    assert int(rows_left_out([arena], torch.device("cpu"))) == 7
    make_room([arena])
    forget_left_out([arena])
    places = [put(arena, rows) for rows in (15, 12)]
    assert len(places[0].rows_SF) == 30, "27 and a tenth"
    assert int(arena.left_out) == 0
    assert widenings([arena]) == 1


def test_a_board_has_room_for_one_layer_in_any_case() -> None:
    assert len(put(arena_of(2, 1.0), 1, row_capacity=35).rows_SF) == 35


def test_a_planned_layer_has_its_share_for_itself() -> None:
    arena, like = arena_of(5, 1.5), torch.empty(0, 4, device="meta")
    place = arena.place(torch.empty(1, dtype=torch.int32, device="meta"), 40, like, even_share=10.0)
    assert place.rows_SF.shape == (15, 4) and place.room == 40


@pytest.mark.parametrize("counts", [((5, 0, 6), (9, 3, 1)), ((0, 0, 0), (4, 4, 4))])
def test_experts_that_share_a_shelf_give_what_they_give_alone(counts: tuple[tuple[int, ...], ...]) -> None:
    arena, row_capacity = arena_of(2, 1.6), 20
    matrices = torch.randn(2, 3, 32, 16), torch.randn(2, 3, 16, 16)
    x_ND, dy_RD = torch.randn(7, 16), torch.randn(2, row_capacity, 16)
    index_R, weights_R = torch.randint(7, (2, row_capacity)), torch.rand(2, row_capacity)

    def run(*, shelved: bool) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (x_ND, *matrices)]
        x, gate_up, down = leaves
        arena.begin()
        outputs = []
        for layer, of_layer in enumerate(counts):
            counts_e = torch.tensor(of_layer, dtype=torch.int32)
            keep = partial(arena.place, even_share=10.0) if shelved else None
            given = counts_e, weights_R[layer], index_R[layer]
            outputs.append(expert_ffn(x, gate_up[layer], down[layer], *given, keep=keep, kernels=TRITON))
        torch.autograd.backward(outputs, list(dy_RD))
        return [*outputs, *(leaf.grad for leaf in leaves)]

    for own, kept in zip(run(shelved=False), run(shelved=True), strict=True):
        assert_close(own, kept, tolerance=1e-6, what="but for sums by atomics, which differ in their order,")
    assert arena.meter.tolist() == [0, sum(map(sum, counts))]
