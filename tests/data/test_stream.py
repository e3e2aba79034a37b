"""The endless line of tokens and its cursors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.data.stream import Cursor, Stream, document_order
from tests.data.in_memory import END, InMemory, numbered, sources


def expected_line(source: InMemory, seed: int, shuffle: bool, count: int) -> list[int]:
    """The same line, written down the obvious way."""
    line: list[int] = []
    epoch = 0
    while len(line) < count:
        order = document_order(len(source), seed=seed, epoch=epoch).tolist() if shuffle else range(len(source))
        for index in order:
            if source.documents[index]:
                line += [*source.documents[index], END]
        epoch += 1
    return line[:count]


@given(sources, st.integers(0, 5), st.booleans(), st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_reading_in_pieces_gives_documents_and_end_tokens_in_order(
    source: InMemory, seed: int, shuffle: bool, counts: list[int]
) -> None:
    stream, cursor, line = Stream(source, seed=seed, shuffle=shuffle), Cursor(), []
    for count in counts:
        span, cursor = stream.read(cursor, count)
        assert len(span.tokens) == count + 1
        line += span.tokens[:count].tolist()
        look_ahead = span.tokens[count]
    assert [*line, look_ahead] == expected_line(source, seed, shuffle, sum(counts) + 1)


@given(sources, st.integers(0, 5), st.integers(0, 60), st.integers(1, 60))
def test_advancing_and_reading_come_to_the_same_cursor(source: InMemory, seed: int, first: int, second: int) -> None:
    stream = Stream(source, seed=seed, shuffle=True)
    by_steps = stream.read(stream.advance(Cursor(), first), second)[1]
    at_once = Stream(source, seed=seed, shuffle=True).advance(Cursor(), first + second)
    assert by_steps == at_once


def test_document_numbers_change_where_documents_end() -> None:
    span, cursor = Stream(numbered(2, 0, 1, 3), seed=0, shuffle=False).read(Cursor(), 7)
    assert span.tokens.tolist() == [0, 1, END, 2, END, 3, 4, 5]
    assert span.documents.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert cursor == Cursor(epoch=0, place=3, offset=2)


def test_two_visits_of_one_document_are_two_documents() -> None:
    span, _ = Stream(numbered(1), seed=0, shuffle=True).read(Cursor(), 3)
    assert span.tokens.tolist() == [0, END, 0, END]
    assert span.documents.tolist() == [0, 0, 1, 1]


def test_each_epoch_has_every_document_in_another_order() -> None:
    orders = [document_order(50, seed=3, epoch=epoch).tolist() for epoch in range(4)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert orders[1] == document_order(50, seed=3, epoch=1).tolist()
    assert orders[1] != document_order(50, seed=4, epoch=1).tolist()


def test_the_order_is_the_same_forever() -> None:
    assert document_order(8, seed=1, epoch=0).tolist() == [2, 4, 7, 5, 0, 6, 3, 1], (
        "old checkpoints would resume wrongly"
    )


def test_a_read_opens_only_the_documents_that_it_needs() -> None:
    opened: list[int] = []

    class Watched(InMemory):
        def read(self, index: int) -> np.ndarray:
            opened.append(index)
            return super().read(index)

    source = Watched(numbered(*[10] * 20).documents)
    stream = Stream(source, seed=0, shuffle=False)
    cursor = Cursor(epoch=5, place=7, offset=4)
    for _ in range(3):
        _, cursor = stream.read(cursor, 9)
    assert opened == [7, 8, 9], "resuming must not read what lies before, and a document must be read once"


def test_a_source_without_any_token_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(DataError, match="every document is empty; got 3 documents"):
        Stream(numbered(0, 0, 0), seed=0, shuffle=True).read(Cursor(), 1)


@given(st.integers(0, 20))
def test_one_document_with_text_among_many_empty_ones_is_found(seed: int) -> None:
    source = InMemory(((),) * 9 + ((5,),))
    span, _ = Stream(source, seed=seed, shuffle=True).read(Cursor(), 5)
    assert span.tokens.tolist() == [5, END] * 3
