"""Building blocks: no collisions for any number of ranks, and the published memory."""

import pytest

from penstock.layout.schedules import SLOTS, STRIDES, Kind, building_block, repeat, squeeze

HELD = {"zb-v": lambda ranks: ranks, "v-half": lambda ranks: (ranks + 2) // 2, "v-min": lambda ranks: (ranks + 4) // 3}
"""Whole micro-batches that a rank holds, as published."""


@pytest.mark.parametrize("name", STRIDES)
def test_repeated_blocks_never_collide_and_hold_what_is_published(name: str):
    for ranks in (*range(1, 20), 31, 32, 64):
        block = building_block(name, ranks)
        assert all(sorted(slot % SLOTS for slot in row) == list(range(SLOTS)) for row in block.rows), ranks
        assert block.held == 2 * HELD[name](ranks), ranks


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


def test_a_rank_with_nothing_to_wait_for_never_waits():
    block = building_block("zb-v", 1)
    (actions,) = squeeze(repeat(block, 2), block.held)
    assert [action.kind for action in actions].count(Kind.FORWARD) == 4
