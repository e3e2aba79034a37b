"""Longest paths through schedules bound their steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.actions import ActionCosts, even_costs, play
from penstock.layout.schedules import schedule
from penstock.plan import bounds
from tests.examples import examples


@examples(20)
@given(data=st.data())
def test_a_path_takes_no_longer_than_a_step_whatever_its_stages_take(data: st.DataObject) -> None:
    name, ranks = data.draw(st.sampled_from(bounds.WAITING_SCHEDULES)), data.draw(st.sampled_from([2, 4, 6]))
    micro_batches = data.draw(st.integers(2 * ranks, 6 * ranks))
    plan = schedule(name, ranks=ranks, stages_per_rank=2, micro_batches=micro_batches)
    longest_for = data.draw(st.tuples(st.just(4.0), st.integers(3, 12), st.integers(2, 6)))
    seconds = np.array(data.draw(st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=2 * ranks, max_size=2 * ranks)))
    forward, before, weight = map(tuple, seconds.T.tolist())
    both = tuple((seconds[:, 1] + seconds[:, 2]).tolist())
    step = play(plan, ActionCosts(forward=forward, backward=both, input=before, weight=weight)).span
    assert (bounds.path_counts(name, ranks, 2, micro_batches, longest_for) * seconds).sum() <= step


@pytest.mark.parametrize("name", bounds.WAITING_SCHEDULES)
@pytest.mark.parametrize("times", [(4.0, 4.0, 4.0), (4.0, 6.0, 4.0), (4.0, 9.0, 3.0)])
@pytest.mark.parametrize("micro_batches", [9, 12, 24, 48])
def test_of_equal_stages_the_longest_path_is_the_step(
    name: str, times: tuple[float, float, float], micro_batches: int
) -> None:
    plan = schedule(name, ranks=4, stages_per_rank=2, micro_batches=micro_batches)
    step = play(plan, even_costs(8, times)).span
    path = bounds.path_counts(name, 4, 2, micro_batches, times)
    assert (path * times).sum() == pytest.approx(step, rel=1e-12 if micro_batches <= bounds.ROUNDS * 4 else 0.01)
