"""Experts and parts of experts over the places of the expert axis."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.experts import ExpertPlacement


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    """Up to 30 experts over up to 24 places."""
    expert, expert_tensor, per_place = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return ExpertPlacement(experts=expert * per_place, expert=expert, expert_tensor=expert_tensor)


@given(placement=placements())
def test_every_expert_has_a_place_for_each_of_its_parts(placement: ExpertPlacement) -> None:
    held = Counter(expert for place in range(placement.places) for expert in placement.experts_of(place))
    assert held == dict.fromkeys(range(placement.experts), placement.expert_tensor)


def test_the_example_of_the_file() -> None:
    placement = ExpertPlacement(experts=8, expert=2, expert_tensor=2)
    assert [tuple(placement.experts_of(place)) for place in range(4)] == [(0, 1, 2, 3)] * 2 + [(4, 5, 6, 7)] * 2


def test_experts_that_do_not_divide_have_no_placement() -> None:
    with pytest.raises(AssertionError, match="does not divide"):
        ExpertPlacement(experts=8, expert=3)
