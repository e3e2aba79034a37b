"""Positions of a row over context-parallel and tensor-parallel ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.sequence import Method, SequenceLayout, inverse, multiple_of


@st.composite
def layouts(draw: st.DrawFn, method: Method | None = None) -> SequenceLayout:
    """Rows of up to a few hundred positions."""
    context, tensor = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    method = method or draw(st.sampled_from(("all-gather", "ulysses")))
    length = multiple_of(context, tensor, method) * draw(st.integers(1, 5))
    return SequenceLayout(length=length, context=context, tensor=tensor, method=method)


@given(layout=layouts())
def test_ranks_divide_the_row_evenly_in_ascending_order(layout: SequenceLayout) -> None:
    held = []
    for context in range(layout.context):
        parts = [layout.of_rank(context, tensor) for tensor in range(layout.tensor)]
        assert {len(part) for part in parts} == {layout.length // (layout.context * layout.tensor)}
        joined = tuple(position for part in parts for position in part)
        assert joined == layout.of_context(context) == tuple(sorted(joined))
        held += joined
    assert sorted(held) == list(range(layout.length))


@given(layout=layouts("all-gather"))
def test_causal_work_is_equal_on_every_context_rank(layout: SequenceLayout) -> None:
    for rank in range(layout.context):
        held = set(layout.of_context(rank))
        assert {layout.length - 1 - position for position in held} == held, "an early chunk and its mirror image"


@given(layout=layouts("ulysses"))
def test_ulysses_cuts_the_row_plainly(layout: SequenceLayout) -> None:
    assert layout.gathered() == tuple(range(layout.length))


@given(layout=layouts())
def test_places_put_what_is_gathered_in_order_again(layout: SequenceLayout) -> None:
    gathered, places = layout.gathered(), layout.places()
    assert [gathered[place] for place in places] == list(range(layout.length))


@given(order=st.permutations(range(12)))
def test_an_inverse_undoes_a_permutation(order: list[int]) -> None:
    assert inverse(inverse(order)) == tuple(order)
    assert [inverse(order)[position] for position in order] == list(range(12))


def test_the_example_of_the_file() -> None:
    layout = SequenceLayout(length=8, context=2)
    assert [layout.of_context(rank) for rank in range(2)] == [(0, 1, 6, 7), (2, 3, 4, 5)]
    assert SequenceLayout(length=8, context=2, tensor=2).of_rank(0, 1) == (6, 7)
    assert SequenceLayout(length=8, context=2, method="ulysses").of_context(0) == (0, 1, 2, 3)


@pytest.mark.parametrize(("length", "method"), [(6, "all-gather"), (5, "ulysses")])
def test_a_length_that_does_not_divide_makes_no_layout(length: int, method: Method) -> None:
    with pytest.raises(AssertionError, match="does not divide"):
        SequenceLayout(length=length, context=2, method=method)
