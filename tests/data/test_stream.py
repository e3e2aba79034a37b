"""The endless rows of documents, lane by lane, and positions between them."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.order import BlockOrder, document_order, permutation
from penstock.data.sources import Tokens
from penstock.data.stream import Cursor, Position, Stream
from tests.data.in_memory import END, InMemory, numbered, sources


def stream_of(source: InMemory, *, lanes: int = 1, seed: int = 0, shuffle: bool = False) -> Stream:
    return Stream(source, seed=seed, shuffle=shuffle, lanes=min(lanes, len(source)))


def dealt(source: InMemory, seed: int, shuffle: bool) -> Iterator[list[int]]:
    """Documents with their end tokens, epoch after epoch."""
    epoch = 0
    while True:
        order = document_order(len(source), seed=seed, epoch=epoch).tolist() if shuffle else range(len(source))
        for index in order:
            yield [*source.documents[index], END] if source.documents[index] else []
        epoch += 1


def expected_rows(
    source: InMemory, sequence_lengths: list[int], *, lanes: int, seed: int, shuffle: bool
) -> list[list[int]]:
    """The same rows, written down the obvious way."""
    documents = dealt(source, seed, shuffle)
    left = [next(documents) for _ in range(min(lanes, len(source)))]
    rows = []
    for number, length in enumerate(sequence_lengths):
        lane = number % len(left)
        while len(left[lane]) < length + 1:
            left[lane] += next(documents)
        rows.append(left[lane][: length + 1])
        left[lane] = left[lane][length:]
    return rows


def times_read(source: InMemory, position: Position, seed: int) -> Counter[int]:
    """How often each token lies behind a position, if every document that was dealt is read once."""
    in_lanes = {cursor[:2]: cursor.offset for cursor in position.lanes}
    behind: Counter[int] = Counter()
    for epoch in range(position.next_unit.epoch + 1):
        for place, index in enumerate(document_order(len(source), seed=seed, epoch=epoch).tolist()):
            if (epoch, place) < position.next_unit[:2]:
                document = (*source.documents[index], END) if source.documents[index] else ()
                behind.update(document[: in_lanes.get((epoch, place), len(document))])
    return behind


@given(
    sources,
    st.integers(1, 8),
    st.integers(0, 5),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=6),
)
def test_lanes_take_turns_and_are_dealt_documents_in_order(
    source: InMemory, lanes: int, seed: int, shuffle: bool, reads: list[tuple[int, int]]
) -> None:
    stream = stream_of(source, lanes=lanes, seed=seed, shuffle=shuffle)
    position, got = stream.start(), []
    for rows, sequence_length in reads:
        found, position = stream.read(position, rows, sequence_length)
        got += found.tokens.tolist()
    lengths = [sequence_length for rows, sequence_length in reads for _ in range(rows)]
    assert got == expected_rows(source, lengths, lanes=lanes, seed=seed, shuffle=shuffle)
    assert position.rows == len(lengths)


@given(sources, st.integers(1, 8), st.integers(0, 5), st.integers(0, 120), st.integers(1, 7))
def test_each_document_is_read_exactly_once_an_epoch(
    source: InMemory, lanes: int, seed: int, rows: int, sequence_length: int
) -> None:
    stream = stream_of(source, lanes=lanes, seed=seed, shuffle=True)
    found, position = stream.read(stream.start(), rows, sequence_length)
    assert Counter(found.tokens[:, :-1].flatten().tolist()) == times_read(source, position, seed)


@given(sources, st.integers(1, 8), st.integers(0, 5), st.integers(0, 20), st.integers(0, 20), st.integers(1, 9))
def test_advancing_and_reading_come_to_the_same_position(
    source: InMemory, lanes: int, seed: int, first: int, second: int, sequence_length: int
) -> None:
    stream, other = (stream_of(source, lanes=lanes, seed=seed, shuffle=True) for _ in range(2))
    by_steps = stream.read(stream.advance(stream.start(), first, sequence_length), second, sequence_length)[1]
    assert by_steps == other.advance(other.start(), first + second, sequence_length)


def test_document_numbers_change_where_documents_end() -> None:
    stream = stream_of(numbered(2, 0, 1, 3))
    found, position = stream.read(stream.start(), 1, 7)
    assert found.tokens.tolist() == [[0, 1, END, 2, END, 3, 4, 5]]
    assert found.documents.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert position.lanes == (Cursor(epoch=0, place=3, offset=2),)
    again = stream_of(numbered(1), shuffle=True)
    found, _ = again.read(again.start(), 1, 3)
    assert found.tokens.tolist() == [[0, END, 0, END]]
    assert found.documents.tolist() == [[0, 0, 1, 1]], "two visits of one document are two documents"


def test_the_order_of_an_epoch_never_changes() -> None:
    orders = [document_order(50, seed=3, epoch=epoch).tolist() for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[1] != document_order(50, seed=4, epoch=1).tolist()
    assert document_order(6, seed=3, epoch=1).tolist() == [0, 2, 1, 3, 4, 5]
    assert document_order(8, seed=1, epoch=0).tolist() == [2, 4, 7, 5, 0, 6, 3, 1], (
        "old checkpoints would resume wrongly"
    )


def watched(source: InMemory) -> tuple[InMemory, list[int]]:
    """The same documents, and a list that grows by each one that is opened."""
    opened: list[int] = []

    class Watched(InMemory):
        def read(self, index: int) -> Tokens:
            opened.append(index)
            return super().read(index)

    return Watched(source.documents), opened


def test_a_read_opens_only_the_documents_that_it_needs() -> None:
    source, opened = watched(numbered(*[10] * 20))
    stream = stream_of(source)
    position = Position(next_unit=Cursor(5, 8), lanes=(Cursor(5, 7, 4),), rows=30)
    for _ in range(3):
        _, position = stream.read(position, 1, 9)
    assert opened == [7, 8, 9], "resuming must not read what lies before, and a document must be read once"


def test_every_lane_keeps_its_document() -> None:
    source, opened = watched(numbered(*[20] * 4))
    stream = stream_of(source, lanes=3)
    position = stream.start()
    for _ in range(12):
        _, position = stream.read(position, 1, 4)
    assert opened == [0, 1, 2], "a lane must not read its document anew at each turn"


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_source_without_any_token_is_an_error_and_not_a_hang(lanes: int) -> None:
    stream = stream_of(numbered(0, 0, 0), lanes=lanes, shuffle=True)
    with pytest.raises(DataError, match="every document is empty; got 3 documents"):
        stream.read(stream.start(), 1, 1)


@given(st.integers(0, 20), st.integers(1, 10))
def test_one_document_with_text_among_many_empty_ones_is_found(seed: int, lanes: int) -> None:
    stream = stream_of(InMemory(((),) * 9 + ((5,),)), lanes=lanes, seed=seed, shuffle=True)
    found, _ = stream.read(stream.start(), lanes, 5)
    assert found.tokens.tolist() == [[5, END] * 3] * lanes


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
