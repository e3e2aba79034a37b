"""Orders of documents: permutations, and those that read each block of a table once."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.data.order import BlockOrder, permutation

sizes = st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(any)


@given(sizes, st.integers(1, 5), st.integers(0, 5), st.integers(0, 3))
def test_every_document_comes_once_an_epoch(blocks: list[int], pool: int, seed: int, epoch: int) -> None:
    order = BlockOrder(np.array(blocks), pool, seed=seed, epoch=epoch)
    assert sorted(order[place] for place in range(sum(blocks))) == list(range(sum(blocks)))


@given(sizes, st.integers(1, 5), st.integers(0, 5), st.data())
def test_any_place_can_be_asked_for_at_any_time(blocks: list[int], pool: int, seed: int, data: st.DataObject) -> None:
    first, second = (BlockOrder(np.array(blocks), pool, seed=seed, epoch=1) for _ in range(2))
    forwards = [first[place] for place in range(sum(blocks))]
    for place in data.draw(st.lists(st.integers(0, sum(blocks) - 1), max_size=20)):
        assert second[place] == forwards[place]


@given(sizes, st.integers(1, 5))
def test_no_more_blocks_than_a_pool_are_needed_at_a_time(blocks: list[int], pool: int) -> None:
    order = BlockOrder(np.array(blocks), pool, seed=0, epoch=0)
    block_of = np.repeat(np.arange(len(blocks)), blocks)
    visited = [int(block_of[order[place]]) for place in range(sum(blocks))]
    spans = {block: (visited.index(block), len(visited) - visited[::-1].index(block)) for block in set(visited)}
    for place in range(len(visited)):
        assert sum(first <= place < last for first, last in spans.values()) <= pool


def test_the_pools_that_were_asked_for_last_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    order = BlockOrder(np.full(4, 3), 1, seed=0, epoch=0)
    made: list[int] = []

    def counted(count: int, key: Sequence[int]) -> NDArray[np.int64]:
        made.append(key[-1] - 1)
        return permutation(count, key)

    monkeypatch.setattr("penstock.data.order.permutation", counted)
    for pool in (2, 0, 1, 0, 1, 0, 3, 0, 1):
        _ = order[3 * pool]
    assert made == [2, 0, 1, 3, 1]


def test_one_pool_mixes_all_blocks_and_epochs_differ() -> None:
    orders = [BlockOrder(np.array([50, 50]), 2, seed=0, epoch=epoch) for epoch in range(2)]
    first, second = ([order[place] for place in range(100)] for order in orders)
    assert first != second
    assert 10 < sum(document < 50 for document in first[:50]) < 40
