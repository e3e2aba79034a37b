"""Every schedule is legal, ends, and holds no more than documented, for any sizes; wrong sizes get one line."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.config.parallel import Pipeline
from penstock.layout.actions import pair_up
from penstock.layout.clock import even_costs, play
from penstock.layout.schedules import (
    PAIRED_GRAMMARS,
    SCHEDULES,
    SLOTS,
    STRIDES,
    Action,
    Kind,
    Schedule,
    building_block,
    forward_only,
    problems,
    repeat,
    schedule,
    squeeze,
    text,
)
from tests.layout.schedule_sizes import bound, even, schedules

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
    assert [evaluation.stages_of(rank) for rank in range(one.ranks)] == [
        one.stages_of(rank) for rank in range(one.ranks)
    ]
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


def test_which_schedules_split_the_backward():
    split = [name for name in SCHEDULES if even(name, 4, 8).splits_backward]
    assert split == ["zb-1f1b", "zb-v", "v-half", "v-min", "dualpipe-v"]


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


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (replace(ONE_F_ONE_B, actions=ONE_F_ONE_B.actions[:1]), ["1 lists for 2 ranks"]),
        (
            changed(ZERO_BUBBLE, 0, [ZERO_BUBBLE.actions[0][place] for place in (0, 2, 1)]),
            ["rank 0 never starts 0W0: it needs 0I0"],
        ),
        (
            changed(ZERO_BUBBLE, 0, [*ZERO_BUBBLE.actions[0], Action(0, Kind.BACKWARD, 0)]),
            ["stage 0, micro-batch 0: does FBIW, not FB or FIW"],
        ),
        (
            changed(ONE_F_ONE_B, 0, list(reversed(ONE_F_ONE_B.actions[0]))),
            ["rank 0 never starts 0B0: it needs 0F0 and 1I0", "rank 1 never starts 1F0: it needs 0F0"],
        ),
        (
            replace(forward_only(even("1f1b", 1, 4), 1), trains=True),
            ["stage 0, micro-batch 0: does F, not FB or FIW"],
        ),
        (
            changed(GPIPE, 0, [*GPIPE.actions[0], Action(0, Kind.FORWARD, 1)]),
            ["stage 0, micro-batch 1: not of this schedule"],
        ),
    ],
    ids=["missing list", "order", "backward twice", "deadlock", "no backward", "foreign micro-batch"],
)
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
