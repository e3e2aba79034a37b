"""Forward and backward passes that a rank does at once: of different micro-batches, without a longer bubble, never
blocked."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.actions import Kind, execution_order, pair_up
from penstock.layout.clock import even_costs, play
from penstock.layout.schedules import PAIRED_GRAMMARS, SCHEDULES, Schedule, problems, schedule
from tests.layout.schedule_sizes import bound, even, schedules


@st.composite
def paired(draw: st.DrawFn, names: tuple[str, ...] = tuple(PAIRED_GRAMMARS), *, even_rounds: bool = False) -> Schedule:
    """Any schedule with pairs; of an equal number of micro-batches for each rank, two or more."""
    name = draw(st.sampled_from(names))
    shape, ranks = SCHEDULES[name], draw(st.integers(1, 8))
    least = max(1, shape.micro_batches_per_rank * ranks)
    micro_batches = draw(st.integers(2, 5)) * ranks if even_rounds else draw(st.integers(least, least + 16))
    stages_per_rank = draw(st.integers(shape.fewest, shape.most or 4))
    return schedule(name, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches, pairs=True)


def _neighbours(one: Schedule, rank: int) -> int:
    """Forwards with a backward right behind them."""
    kinds = [action.kind for action in one.actions[rank]]
    return list(pairwise(kinds)).count((Kind.FORWARD, Kind.BACKWARD))


@given(paired())
def test_a_schedule_with_pairs_is_legal_and_pairs_are_a_forward_and_an_earlier_backward(one: Schedule) -> None:
    assert problems(one) == []
    for rank, actions in enumerate(one.actions):
        units = one.units(rank)
        assert tuple(action for unit in units for action in unit) == actions
        pairs = [unit for unit in units if len(unit) == 2]
        assert len(pairs) == len(one.pairs[rank])
        for forward, backward in pairs:
            assert (forward.kind, backward.kind) == (Kind.FORWARD, Kind.BACKWARD)
            assert backward.micro_batch < forward.micro_batch


@given(paired(even_rounds=True))
def test_in_even_rounds_all_neighbours_are_pairs(one: Schedule) -> None:
    assert [_neighbours(one, rank) for rank in range(one.ranks)] == [len(places) for places in one.pairs]


@given(paired(("interleaved",), even_rounds=True))
def test_in_even_rounds_one_more_forward_ahead_costs_no_time(one: Schedule) -> None:
    plain = even("interleaved", one.ranks, one.micro_batches, one.stages_per_rank)
    assert play(one, even_costs(one.stages)).span == play(plain, even_costs(plain.stages)).span


@given(paired(("interleaved",)))
def test_one_more_forward_ahead_costs_the_memory_of_one_stage(one: Schedule) -> None:
    peak = max(play(one, even_costs(one.stages)).peak_live)
    assert peak <= min(bound(one) + 1 / one.stages_per_rank, one.micro_batches)


@given(schedules())
def test_whatever_is_paired_up_never_blocks(one: Schedule) -> None:
    assert execution_order(pair_up(one)).blocked == {}


def test_where_another_rank_waits_for_the_forward_it_goes_first() -> None:
    """The last rank does its second forward with its first backward, whose gradient the first rank waits for."""
    one = pair_up(even("gpipe", 2, 2))
    assert one.pairs == (frozenset(), frozenset({1}))


@pytest.mark.parametrize("name", PAIRED_GRAMMARS)
def test_a_pair_has_one_start_and_one_end_and_takes_as_long_as_both(name: str) -> None:
    one = schedule(name, ranks=2, stages_per_rank=2, micro_batches=4, pairs=True)
    events = {(event.rank, event.action): event for event in play(one, even_costs(one.stages)).events}
    forward, backward = next(unit for unit in one.units(0) if len(unit) == 2)
    assert (events[0, forward].start, events[0, forward].end) == (events[0, backward].start, events[0, backward].end)
    assert events[0, forward].end - events[0, forward].start == 3
