"""Every schedule is legal, ends, and holds no more than documented, for any sizes; wrong sizes get one line."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.config.parallel import Pipeline
from penstock.layout.actions import (
    Action,
    ActionCosts,
    DeadlockError,
    Kind,
    Schedule,
    even_costs,
    execution_order,
    pair_up,
    play,
    problems,
    text,
)
from penstock.layout.schedules import (
    PAIRED_GRAMMARS,
    SCHEDULES,
    SLOTS,
    STRIDES,
    building_block,
    forward_only,
    repeat,
    schedule,
    squeeze,
)


def even(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> Schedule:
    """A schedule with the fewest stages that it takes, unless they are said."""
    stages_per_rank = stages_per_rank or SCHEDULES[name].fewest
    return schedule(name, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)


NAMES = tuple(SCHEDULES)


@st.composite
def schedules(
    draw: st.DrawFn, largest: int = 9, names: Sequence[str] = NAMES, *, pairs: bool = False, rounds: bool = False
) -> Schedule:
    """Any schedule of sizes that it takes; of `rounds`, two or more micro-batches for each rank, else any number."""
    name = draw(st.sampled_from(names))
    shape, ranks = SCHEDULES[name], draw(st.integers(1, largest))
    least = max(1, shape.micro_batches_per_rank * ranks)
    micro_batches = draw(st.integers(2, 5)) * ranks if rounds else draw(st.integers(least, least + 2 * largest))
    stages_per_rank = draw(st.integers(shape.fewest, shape.most or 4))
    return schedule(name, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches, pairs=pairs)


paired = partial(schedules, largest=8, names=tuple(PAIRED_GRAMMARS), pairs=True)


def bound(one: Schedule) -> float:
    """The most that a rank holds at a time, in micro-batches of all its stages: the column of docs/schedules.md."""
    ranks, chunks, micro_batches = one.ranks, one.stages_per_rank, one.micro_batches
    group = -(-micro_batches // max(1, micro_batches // ranks))
    return {
        "gpipe": micro_batches,
        "1f1b": ranks,
        "interleaved": ((chunks - 1) * group + 2 * ranks - 1) / chunks,
        "zb-1f1b": ranks,
        "zb-v": ranks,
        "v-half": (ranks + 2) // 2,
        "v-min": (ranks + 4) // 3,
        "dualpipe-v": ranks + 1 / 2,
    }[one.name]


PAGE = Path(__file__).resolve().parents[2] / "docs/schedules.md"

AT_MOST = {
    "gpipe": "m",
    "1f1b": "p",
    "interleaved": "((v - 1) g + 2 p - 1) / v",
    "zb-1f1b": "p",
    "zb-v": "p",
    "v-half": "p / 2 + 1",
    "v-min": "p / 3 + 4 / 3",
    "dualpipe-v": "p + 1 / 2",
}


def rows() -> list[str]:
    """The table of the page: 8 ranks, 32 micro-batches."""
    lines = [(name, SCHEDULES[name].fewest) for name in SCHEDULES]
    lines.insert(1 + lines.index(("interleaved", 2)), ("interleaved", 4))
    return [row(name, stages) for name, stages in lines]


def row(name: str, stages_per_rank: int) -> str:
    one = even(name, 8, 32, stages_per_rank)
    fast = play(one, even_costs(one.stages))
    slow = play(one, even_costs(one.stages, send=0.1 * stages_per_rank))
    bubbles = f"{100 * fast.bubble:.2f} % | {100 * slow.bubble:.2f} %"
    return f"| `{name}` | {stages_per_rank} | {bubbles} | {max(fast.peak_live):.4g} | {AT_MOST[name]} |"


def test_the_table_is_what_the_clock_says():
    table = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.endswith(" |") and " % |" in line]
    assert table == rows()


@pytest.mark.parametrize("name", STRIDES)
def test_repeated_blocks_never_collide_and_hold_what_is_published(name: str):
    for ranks in (*range(1, 20), 31, 32, 64):
        block = building_block(name, ranks)
        assert all(sorted(slot % SLOTS for slot in row) == list(range(SLOTS)) for row in block.rows), ranks
        published = {"zb-v": ranks, "v-half": (ranks + 2) // 2, "v-min": (ranks + 4) // 3}[name]
        assert block.held == 2 * published, ranks


def test_the_picture_of_the_docstring_is_the_block():
    rows = building_block("v-min", 3).rows
    assert rows == ((0, 5, 8, 13, 9, 16), (1, 4, 9, 12, 11, 14), (2, 3, 10, 11, 12, 13))


@pytest.mark.parametrize("name", STRIDES)
def test_squeezing_changes_the_order_in_the_ramps_only(name: str):
    ranks, micro_batches = 5, 20
    block = building_block(name, ranks)
    plans = repeat(block, micro_batches)
    for rank, (plan, actions) in enumerate(zip(plans, squeeze(plans, block.held), strict=True)):
        assert sorted(plan) == sorted(actions)
        middle = [action for action in actions if action.stage == rank and 8 <= action.micro_batch < 12]
        assert middle == [action for action in plan if action.stage == rank and 8 <= action.micro_batch < 12]


@given(schedules())
def test_every_schedule_is_legal_never_blocks_and_holds_no_more_than_it_may(one: Schedule):
    assert problems(one) == []
    assert max(play(one, even_costs(one.stages)).peak_live) <= min(bound(one), one.micro_batches)


@given(schedules(), st.integers(1, 40))
def test_evaluation_is_legal_on_the_same_stages_with_any_number_of_micro_batches(one: Schedule, micro_batches: int):
    evaluation = forward_only(one, micro_batches)
    assert problems(evaluation) == []
    assert {action.kind for actions in evaluation.actions for action in actions} == {Kind.FORWARD}
    assert all(evaluation.stages_of(rank) == one.stages_of(rank) for rank in range(one.ranks))
    assert sum(map(len, evaluation.actions)) == one.stages * micro_batches


@given(schedules())
def test_a_stage_takes_micro_batches_in_order_so_that_none_overtakes_another_on_its_way(one: Schedule):
    for actions in one.actions:
        for stage in {action.stage for action in actions}:
            for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT):
                order = [action.micro_batch for action in actions if action.output[:2] == (stage, kind)]
                assert order == sorted(order)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 40])
def test_every_small_number_of_micro_batches_works(name: str, ranks: int):
    least = max(1, SCHEDULES[name].micro_batches_per_rank * ranks)
    for micro_batches in (83,) if ranks == 40 else range(least, least + 2 * ranks + 2):
        one = even(name, ranks, micro_batches)
        assert problems(one) == []
        assert max(play(one, even_costs(one.stages)).peak_live) <= bound(one)


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("gpipe", 3), ("interleaved", 2), ("interleaved", 5)]
)
def test_1f1b_has_the_ideal_bubble_for_micro_batches_that_do_not_divide_too(name: str, chunks: int):
    for ranks in (2, 3, 4, 7):
        for micro_batches in range(ranks, 4 * ranks):
            one = even(name, ranks, micro_batches, chunks)
            ideal = 3 * (ranks - 1 + micro_batches * chunks)
            assert play(one, even_costs(one.stages)).span == ideal, (ranks, micro_batches)


def test_stages_lie_in_a_loop_or_in_a_v():
    loop, v = even("interleaved", 4, 4), even("zb-v", 4, 4)
    assert [loop.stages_of(rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [v.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    for one in (loop, v):
        assert all(stage in one.stages_of(one.rank_of(stage)) for stage in range(one.stages))


@pytest.mark.parametrize(
    ("name", "ranks", "rank", "actions"),
    [
        ("1f1b", 4, 1, "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3"),
        ("zb-1f1b", 3, 0, "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"),
        ("zb-1f1b", 3, 2, "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"),
        ("dualpipe-v", 2, 0, "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3"),
    ],
)
def test_schedules_of_4_micro_batches(name: str, ranks: int, rank: int, actions: str):
    assert text(even(name, ranks, 4), rank) == actions


def test_the_configuration_and_the_schedules_have_the_same_names():
    assert get_args(Pipeline.model_fields["schedule"].annotation) == tuple(SCHEDULES)


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("zigzag", (4, 1, 8), ("pipeline.schedule", "zigzag", "dualpipe-v")),
        ("1f1b", (4, 2, 8), ("pipeline.stages_per_rank", "got 2", "allowed: 1", "pipeline.schedule=interleaved")),
        ("zb-1f1b", (4, 3, 8), ("pipeline.stages_per_rank", "got 3")),
        ("interleaved", (4, 1, 8), ("pipeline.stages_per_rank", "allowed: 2 or more", "pipeline.schedule=1f1b")),
        ("zb-v", (4, 1, 8), ("pipeline.stages_per_rank", "allowed: 2;")),
        ("v-half", (4, 3, 8), ("pipeline.stages_per_rank", "pipeline.stages_per_rank=2")),
        ("gpipe", (4, 0, 8), ("pipeline.stages_per_rank", "got 0")),
        ("dualpipe-v", (4, 2, 7), ("micro-batches", "got 7", "8 or more", "training.global_batch")),
        ("1f1b", (4, 1, 0), ("micro-batches", "got 0", "1 or more")),
        ("1f1b", (0, 1, 8), ("parallel.pipeline", "got 0")),
    ],
)
def test_impossible_sizes_say_what_is_wrong_and_how_to_mend_it(
    name: str, sizes: tuple[int, ...], words: tuple[str, ...]
):
    ranks, stages_per_rank, micro_batches = sizes
    with pytest.raises(ConfigError) as error:
        schedule(name, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def changed(one: Schedule, rank: int, actions: list[Action]) -> Schedule:
    """The schedule with another list for one rank."""
    return replace(one, actions=(*one.actions[:rank], tuple(actions), *one.actions[rank + 1 :]))


ONE_F_ONE_B, ZERO_BUBBLE, GPIPE = even("1f1b", 2, 1), even("zb-1f1b", 1, 1), even("gpipe", 1, 1)


VIOLATIONS = {
    "missing list": (replace(ONE_F_ONE_B, actions=ONE_F_ONE_B.actions[:1]), ["1 lists for 2 ranks"]),
    "order": (
        changed(ZERO_BUBBLE, 0, [ZERO_BUBBLE.actions[0][place] for place in (0, 2, 1)]),
        ["rank 0 never starts 0W0: it needs 0I0"],
    ),
    "backward twice": (
        changed(ZERO_BUBBLE, 0, [*ZERO_BUBBLE.actions[0], Action(0, Kind.BACKWARD, 0)]),
        ["stage 0, micro-batch 0: does FBIW, not FB or FIW"],
    ),
    "deadlock": (
        changed(ONE_F_ONE_B, 0, list(reversed(ONE_F_ONE_B.actions[0]))),
        ["rank 0 never starts 0B0: it needs 0F0 and 1I0", "rank 1 never starts 1F0: it needs 0F0"],
    ),
    "no backward": (
        replace(forward_only(even("1f1b", 1, 4), 1), trains=True),
        ["stage 0, micro-batch 0: does F, not FB or FIW"],
    ),
    "foreign micro-batch": (
        changed(GPIPE, 0, [*GPIPE.actions[0], Action(0, Kind.FORWARD, 1)]),
        ["stage 0, micro-batch 1: not of this schedule"],
    ),
}


@pytest.mark.parametrize(("one", "expected"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_violations_are_named(one: Schedule, expected: list[str]):
    assert problems(one) == expected
    turned = replace(ONE_F_ONE_B, actions=ONE_F_ONE_B.actions[::-1])
    assert any("rank 0 does stage 1" in line for line in problems(turned))


@given(schedules(largest=4), st.data())
def test_an_action_left_out_or_done_twice_is_a_problem(one: Schedule, data: st.DataObject):
    rank = data.draw(st.integers(0, one.ranks - 1))
    actions = list(one.actions[rank])
    place = data.draw(st.integers(0, len(actions) - 1))
    assert problems(changed(one, rank, [*actions[:place], *actions[place + 1 :]]))
    assert problems(changed(one, rank, [*actions, actions[place]]))


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


@given(paired(rounds=True))
def test_in_even_rounds_all_neighbours_are_pairs(one: Schedule) -> None:
    assert [_neighbours(one, rank) for rank in range(one.ranks)] == [len(places) for places in one.pairs]


@given(paired(names=("interleaved",), rounds=True))
def test_in_even_rounds_one_more_forward_ahead_costs_no_time(one: Schedule) -> None:
    plain = even("interleaved", one.ranks, one.micro_batches, one.stages_per_rank)
    assert play(one, even_costs(one.stages)).span == play(plain, even_costs(plain.stages)).span


@given(paired(names=("interleaved",)))
def test_one_more_forward_ahead_costs_the_memory_of_one_stage(one: Schedule) -> None:
    peak = max(play(one, even_costs(one.stages)).peak_live)
    assert peak <= min(bound(one) + 1 / one.stages_per_rank, one.micro_batches)


@given(schedules())
def test_a_schedule_that_is_paired_up_never_blocks(one: Schedule) -> None:
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


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "chunks", "bubble", "peak"),
    [
        ("1f1b", 16, 16, 1, 48.39, None),
        ("interleaved", 16, 16, 3, 23.81, None),
        ("interleaved", 16, 16, 6, 13.51, None),
        ("1f1b", 8, 32, 1, 17.95, 8),
        ("zb-1f1b", 8, 32, 1, 6.80, 8),
        ("interleaved", 8, 32, 2, 9.86, 11.5),
        ("v-half", 8, 32, 2, 8.13, 5),
        ("v-min", 8, 32, 2, 11.93, 4),
    ],
)
def test_bubble_and_memory_are_the_published_ones(
    name: str, ranks: int, micro_batches: int, chunks: int, bubble: float, peak: float | None
):
    """Bubbles in percent, where forward, input gradient and weight gradient take equally long."""
    one = even(name, ranks, micro_batches, chunks)
    playback = play(one, even_costs(one.stages))
    found = round(100 * playback.bubble, 2)
    assert found < bubble if name == "v-min" else found == bubble
    assert peak in (None, max(playback.peak_live))


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


def test_stages_that_differ_are_timed_and_weighed_one_by_one():
    one = even("1f1b", 2, 2)
    times = {"forward": (1.0, 3.0), "backward": (2.0, 6.0), "input": (1.0, 3.0), "weight": (1.0, 3.0)}
    playback = play(one, ActionCosts(**times, activation=(10.0, 7.0)))
    assert playback.busy == (6, 18)
    assert playback.span == 1 + 18 + 2
    assert playback.peak_live == (20, 7)


def test_what_the_input_gradient_frees_is_not_held_until_the_weight_gradient():
    one = even("zb-1f1b", 4, 12)
    for freed, peaks in ((0.0, (4, 4, 4, 4)), (0.5, (4, 3.5, 3, 2.5)), (1.0, (4, 3, 2, 1))):
        assert play(one, replace(even_costs(4), freed_by_input=freed)).peak_live == peaks


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
