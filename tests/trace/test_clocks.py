"""Clocks of ranks, aligned by what they saw together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trace.calls import SyncKind
from penstock.trace.events import NONE
from penstock.trace.matching import ClockOffsets, match_collectives
from tests.trace.made_calls import Call, table


def clocks_after(groups: list[tuple[int, ...]], ahead_us: list[float], *, meetings: int = 3) -> ClockOffsets:
    """Clocks of ranks that are so far ahead, after some collectives in each of these groups."""
    calls = []
    for number, group in enumerate(groups):
        for seq in range(meetings):
            end = 1000.0 * (seq * len(groups) + number) + 500.0
            calls += [Call(r, end - 100.0 - r + ahead_us[r], end + ahead_us[r], group, seq) for r in group]
    return match_collectives(table(*calls)).clocks


@given(st.lists(st.integers(-(10**9), 10**9), min_size=4, max_size=4))
def test_groups_that_share_ranks_tell_the_clocks_of_all(apart: list[int]) -> None:
    ahead_us = [one / 16 for one in apart]
    clocks = clocks_after([(0, 1), (2, 3), (1, 3)], ahead_us)
    assert len(set(clocks.island)) == 1
    assert clocks.ahead_us - clocks.ahead_us[0] == pytest.approx(np.array(ahead_us) - ahead_us[0], abs=1e-4)


def test_the_median_clock_is_the_reference() -> None:
    assert clocks_after([(0, 1, 2)], [40.0, -5.0, 700.0]).ahead_us == pytest.approx([0.0, -45.0, 660.0])


def test_ranks_that_nothing_joins_stay_apart() -> None:
    clocks = clocks_after([(0, 1), (2, 3)], [0.0, 9.0, 5000.0, 5004.0])
    assert clocks.island[0] == clocks.island[1] != clocks.island[2] == clocks.island[3]
    assert clocks.ahead_us == pytest.approx([-4.5, 4.5, -2.0, 2.0])
    both = np.array([[True, True, False, False], [True, False, True, False]])
    assert clocks.is_joined(both).tolist() == [True, False]


def test_a_few_uneven_ends_move_no_clock() -> None:
    calls = [Call(rank, 1000.0 * i, 1000.0 * i + 90.0, (0, 1, 2), i) for i in range(9) for rank in range(3)]
    odd = [Call(rank, 20_000.0, 20_090.0 + 33.0 * rank, (0, 1, 2), 9) for rank in range(3)]
    clocks = match_collectives(table(*calls, *odd)).clocks
    assert clocks.ahead_us == pytest.approx([0.0, 0.0, 0.0])
    assert clocks.spread_us == pytest.approx([0.0, 0.0, 0.0])
    assert clocks.shared.tolist() == [10, 10, 10]


def test_ends_that_scatter_more_than_clocks_differ_move_no_clock() -> None:
    late_us = [40.0, -300.0, 12.0, 200.0]
    calls = [
        Call(rank, 1000.0 * i, 1000.0 * i + 600.0 + rank * late, (0, 1), i)
        for i, late in enumerate(late_us)
        for rank in (0, 1)
    ]
    clocks = match_collectives(table(*calls)).clocks
    assert clocks.ahead_us.tolist() == [0.0, 0.0]
    assert (clocks.spread_us > 10.0).all()


def test_strict_collectives_are_believed_before_uneven_ones() -> None:
    strict = [Call(rank, 10.0, 100.0 + 7.0 * rank, (0, 1), 0) for rank in (0, 1)]
    uneven = [
        Call(rank, 200.0 * i, 200.0 * i + 99.0 + 30.0 * rank, (0, 1), i, "all_to_allv", SyncKind.UNEVEN)
        for i in range(1, 8)
        for rank in (0, 1)
    ]
    ahead_us = match_collectives(table(*strict, *uneven)).clocks.ahead_us
    assert ahead_us[1] - ahead_us[0] == pytest.approx(7.0)


@pytest.mark.parametrize("sync", [SyncKind.DEVICE, SyncKind.ALONE, SyncKind.ROOTED])
def test_kernels_whose_ends_mean_nothing_tell_no_clock(sync: SyncKind) -> None:
    calls = [Call(rank, 5.0, 100.0 + rank, (0, 1), 0, "kernel", sync) for rank in (0, 1)]
    clocks = match_collectives(table(*calls)).clocks
    assert clocks.shared.tolist() == [0, 0]
    assert clocks.island[0] != clocks.island[1]


def test_a_meeting_of_one_rank_alone_tells_no_clock() -> None:
    meetings = match_collectives(table(Call(0, 0.0, 5.0, (0,), 0), Call(1, 0.0, 9.0, (1,), 0)))
    assert (meetings.met != NONE).sum(axis=1).tolist() == [1, 1]
    assert meetings.clocks.ahead_us.tolist() == [0.0, 0.0]
