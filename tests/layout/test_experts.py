"""Experts and parts of experts over the places of the expert axis."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.experts import ExpertPlacement


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    """Up to 30 experts over up to 24 places."""
    expert, expert_tensor, per_place = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return ExpertPlacement(experts=expert * per_place, expert=expert, expert_tensor=expert_tensor)


def parts(placement: ExpertPlacement) -> list[tuple[int, int]]:
    """(expert, part) of all."""
    return list(product(range(placement.experts), range(placement.expert_tensor)))


@given(placement=placements())
def test_every_part_of_every_expert_has_one_place(placement: ExpertPlacement) -> None:
    held = [
        (expert, placement.part_of(place))
        for place in range(placement.places)
        for expert in placement.experts_of(place)
    ]
    assert sorted(held) == parts(placement)


@given(placement=placements())
def test_a_place_holds_what_it_is_the_place_of(placement: ExpertPlacement) -> None:
    for expert, part in parts(placement):
        place = placement.place_of(expert, part)
        assert expert in placement.experts_of(place)
        assert placement.part_of(place) == part


@given(placement=placements())
def test_virtual_experts_are_numbered_without_gap(placement: ExpertPlacement) -> None:
    numbers = [placement.virtual(*one) for one in parts(placement)]
    assert sorted(numbers) == list(range(placement.virtual_experts))


@given(placement=placements())
def test_virtual_experts_of_a_place_are_consecutive_and_in_the_order_of_its_experts(placement: ExpertPlacement) -> None:
    for place in range(placement.places):
        own = [placement.virtual(expert, placement.part_of(place)) for expert in placement.experts_of(place)]
        assert own == list(range(place * placement.per_place, (place + 1) * placement.per_place))


@given(placement=placements())
def test_a_virtual_number_follows_the_formula(placement: ExpertPlacement) -> None:
    e = placement.experts // placement.expert
    for x, j in parts(placement):
        assert placement.virtual(x, j) == ((x // e) * placement.expert_tensor + j) * e + x % e


def test_whole_experts_keep_their_numbers() -> None:
    placement = ExpertPlacement(experts=8, expert=4)
    assert [placement.virtual(expert, 0) for expert in range(8)] == list(range(8))


def test_the_example_of_the_file() -> None:
    placement = ExpertPlacement(experts=8, expert=2, expert_tensor=2)
    assert [tuple(placement.experts_of(place)) for place in range(4)] == [(0, 1, 2, 3)] * 2 + [(4, 5, 6, 7)] * 2
    assert [placement.part_of(place) for place in range(4)] == [0, 1, 0, 1]
    assert [placement.virtual(5, part) for part in range(2)] == [9, 13]


def test_experts_that_do_not_divide_have_no_placement() -> None:
    with pytest.raises(AssertionError, match="does not divide"):
        ExpertPlacement(experts=8, expert=3)
