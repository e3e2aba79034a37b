"""The algebra of intervals agrees with sets of moments."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trace.intervals import Intervals, union

MOMENTS = 40
Pairs = list[tuple[int, int]]

pairs = st.lists(st.tuples(st.integers(0, MOMENTS), st.integers(0, MOMENTS)), max_size=12)
"""Starts and ends as whole numbers, in any order: some end before they start."""


def made(some: Pairs) -> Intervals:
    start_us, end_us = np.array(some, dtype=np.float64).reshape(-1, 2).T
    return union(start_us, end_us)


def moments(some: Pairs) -> set[int]:
    """The definition: a moment `m` stands for the time from m to m + 1."""
    return {moment for start, end in some for moment in range(start, end)}


def moments_in(intervals: Intervals) -> set[int]:
    return moments([(int(a), int(b)) for a, b in zip(intervals.start_us, intervals.end_us, strict=True)])


def has_one_form(intervals: Intervals) -> bool:
    """Sorted, none empty, none touching the next."""
    return bool(
        (intervals.end_us > intervals.start_us).all() and (intervals.start_us[1:] > intervals.end_us[:-1]).all()
    )


@given(pairs)
def test_a_union_holds_the_moments_of_any_and_has_one_form(some: Pairs) -> None:
    assert moments_in(made(some)) == moments(some)
    assert has_one_form(made(some))
    assert made(some).length_us == len(moments(some))


@given(pairs, pairs)
def test_or_and_minus_are_those_of_sets(some: Pairs, others: Pairs) -> None:
    left, right = made(some), made(others)
    expected = {
        left | right: moments(some) | moments(others),
        left & right: moments(some) & moments(others),
        left - right: moments(some) - moments(others),
    }
    for intervals, truth in expected.items():
        assert moments_in(intervals) == truth
        assert has_one_form(intervals)


@given(pairs, pairs)
def test_covered_time_is_counted_for_each_query(some: Pairs, queries: Pairs) -> None:
    start_us, end_us = np.array(queries, dtype=np.float64).reshape(-1, 2).T
    truth = [len(moments(some) & moments([query])) for query in queries]
    assert made(some).covered_us(start_us, end_us).tolist() == truth


@given(pairs, st.integers(0, MOMENTS), st.integers(0, MOMENTS))
def test_within_holds_the_moments_between_two_times(some: Pairs, start: int, end: int) -> None:
    assert moments_in(made(some).within(start, end)) == moments(some) & set(range(start, end))


@given(pairs)
def test_gaps_are_the_missing_moments_between_the_first_and_the_last(some: Pairs) -> None:
    held = moments(some)
    between = set(range(min(held), max(held))) - held if held else set()
    assert moments_in(made(some).gaps()) == between


@given(pairs)
def test_a_set_and_its_complement_are_disjoint_and_cover_everything(some: Pairs) -> None:
    inside = made(some)
    assert len(inside & inside.outside()) == 0
    assert (inside | inside.outside()).start_us.tolist() == [-np.inf]


@pytest.mark.parametrize("origin_us", [0.0, 1.7e15])
def test_times_since_1970_lose_no_microsecond(origin_us: float) -> None:
    start_us = origin_us + np.arange(0.0, 100_000.0, 10.0)
    assert union(start_us, start_us + 4).length_us == 40_000
