"""The clock: times by hand on small schedules, and the published figures of the schedules on large ones."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.layout.actions import Action, Kind, Schedule
from penstock.layout.clock import ActionCosts, DeadlockError, even_costs, play
from penstock.layout.schedules import forward_only
from tests.layout.schedule_sizes import even, schedules


def bubble(one: Schedule) -> float:
    """In percent, where forward, input gradient and weight gradient take equally long."""
    return round(100 * play(one, even_costs(one.stages)).bubble, 2)


def peak(one: Schedule) -> float:
    return max(play(one, even_costs(one.stages)).peak_live)


@pytest.mark.parametrize(("chunks", "published"), [(1, 48.39), (3, 23.81), (6, 13.51)])
def test_interleaving_on_16_ranks_with_16_micro_batches_has_the_published_bubble(chunks: int, published: float):
    name = "interleaved" if chunks > 1 else "1f1b"
    assert bubble(even(name, 16, 16, chunks)) == published
    assert published == round(100 * 15 / (15 + 16 * chunks), 2)


@pytest.mark.parametrize(
    ("name", "published_bubble", "published_peak"),
    [("1f1b", 17.95, 8), ("zb-1f1b", 6.80, 8), ("interleaved", 9.86, 11.5), ("v-half", 8.13, 5), ("v-min", 11.93, 4)],
)
def test_8_ranks_with_32_micro_batches_have_the_published_bubble_and_memory(
    name: str, published_bubble: float, published_peak: float
):
    one = even(name, 8, 32)
    assert bubble(one) == published_bubble or (name == "v-min" and bubble(one) < published_bubble)
    assert peak(one) == published_peak


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 18])
def test_zb_v_and_dualpipe_wait_for_nothing_but_the_first_forward(name: str, ranks: int):
    for micro_batches in (2 * ranks, 3 * ranks + 1, 5 * ranks):
        one = even(name, ranks, micro_batches)
        assert play(one, even_costs(one.stages)).span == 6 * micro_batches + ranks - 1


@given(schedules(largest=8))
def test_no_schedule_is_faster_than_its_work_and_the_way_to_the_last_rank(one: Schedule):
    playback = play(one, even_costs(one.stages))
    work = 3 * one.micro_batches * one.stages_per_rank
    assert playback.busy == (work,) * one.ranks
    assert playback.span >= work + one.ranks - 1
    assert playback.bubble == pytest.approx(1 - work / playback.span)


@given(schedules(largest=6), st.floats(0, 3), st.randoms(use_true_random=False))
def test_every_action_starts_after_what_it_needs_and_a_rank_does_one_at_a_time(one: Schedule, send: float, random):
    times = [tuple(random.uniform(0.1, 2) for _ in range(one.stages)) for _ in range(4)]
    costs = ActionCosts(forward=times[0], backward=times[1], input=times[2], weight=times[3], send=send)
    playback = play(one, costs)
    given_by = {event.action.output: event for event in playback.events}
    for event in playback.events:
        assert event.end - event.start == pytest.approx(costs.of(event.action))
        for need in event.action.needs(one.stages):
            source = given_by[need]
            assert event.start >= source.end + send * (source.rank != event.rank)
    for rank, actions in enumerate(one.actions):
        events = [event for event in playback.events if event.rank == rank]
        assert tuple(event.action for event in events) == actions
        assert all(before.end <= after.start for before, after in pairwise(events))
    assert playback.span == max(event.end for event in playback.events)


def test_a_message_delays_only_what_another_rank_waits_for():
    one = even("gpipe", 2, 1)
    costs = replace(even_costs(2, (1.0, 1.0, 1.0)), send=0.5)
    times = [(str(event.action), event.start, event.end) for event in play(one, costs).events]
    assert times == [("0F0", 0, 1), ("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5), ("0B0", 5, 7)]


def test_what_the_input_gradient_frees_is_not_held_until_the_weight_gradient():
    one = even("zb-1f1b", 4, 12)
    assert play(one, even_costs(4)).peak_live == (4, 4, 4, 4)
    freed = play(one, replace(even_costs(4), freed_by_input=1.0)).peak_live
    assert freed == (4, 3, 2, 1)
    half = play(one, replace(even_costs(4), freed_by_input=0.5)).peak_live
    assert half == (4, 3.5, 3, 2.5)


@pytest.mark.parametrize(("name", "ramps"), [("1f1b", 3), ("interleaved", 3), ("zb-v", 6)])
def test_evaluation_waits_only_for_the_way_to_the_last_stage(name: str, ramps: int):
    """On a v that way comes back to the first rank, so the last micro-batch makes a ramp too."""
    one = forward_only(even(name, 4, 8), 12)
    assert play(one, even_costs(one.stages)).span == 12 * one.stages_per_rank + ramps


def test_a_deadlock_names_the_actions_that_wait():
    one = even("1f1b", 2, 1)
    turned = replace(one, actions=(one.actions[0][::-1], one.actions[1]))
    with pytest.raises(DeadlockError, match=r"rank 0 at 0B0 \(needs 0F0 and 1I0\), rank 1 at 1F0 \(needs 0F0\)"):
        play(turned, even_costs(2))
    missing = replace(one, actions=((Action(0, Kind.WEIGHT, 0),), one.actions[1]))
    with pytest.raises(DeadlockError, match="1F0"):
        play(missing, even_costs(2))


def test_a_schedule_of_nothing_takes_no_time():
    nothing = Schedule(name="none", ranks=2, stages_per_rank=1, placement="loop", micro_batches=1, actions=((), ()))
    playback = play(nothing, even_costs(2))
    assert (playback.span, playback.bubble, playback.busy, playback.peak_live) == (0, 0, (0, 0), (0, 0))


@given(schedules(largest=6))
def test_each_step_of_a_passage_stands_behind_the_steps_of_other_ranks_that_it_needs(one: Schedule):
    steps = one.execution_order.done
    assert sorted(action for step in steps for action in step.unit) == sorted(
        action for actions in one.actions for action in actions
    )
    for place, step in enumerate(steps):
        given = {action.output for source in step.after for action in steps[source].unit}
        own = {action.output for earlier in steps[:place] if earlier.rank == step.rank for action in earlier.unit}
        assert all(source < place and steps[source].rank != step.rank for source in step.after)
        assert all(need in given | own for action in step.unit for need in action.needs(one.stages))


def test_a_schedule_is_run_through_once_for_all_costs():
    one = even("zb-1f1b", 4, 8)
    slow, fast = play(one, even_costs(4)), play(one, even_costs(4, (0.5, 0.5, 0.5)))
    assert slow.schedule.execution_order is fast.schedule.execution_order
    assert slow.span == 2 * fast.span
