"""Rows taken apart: what is told of them is what they hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.batch import Batch
from penstock.data.contents import RowContents, row_of
from penstock.data.evaluation import evaluation_batches
from penstock.data.loader import Loader
from penstock.data.tokenizer import ByteTokenizer
from tests.data.in_memory import END, InMemory, numbered, sources

BYTES = ByteTokenizer()


def rows_of(batch: Batch, end: int = END) -> list[RowContents]:
    return [row_of(batch, number, end_of_document=end, tokenizer=None) for number in range(batch.rows)]


def batch_of(source: InMemory, *, mask: bool, rows: int = 2, length: int = 4) -> Batch:
    loader = Loader(source, rows=rows, sequence_length=length, seed=0, document_mask=mask, shuffle=False)
    return loader.next_batch()


def test_the_example_of_packing_is_taken_apart_as_it_says() -> None:
    first, second = rows_of(batch_of(numbered(3, 1, 3), mask=True))
    assert [piece.ids for piece in first.pieces] == [(0, 1, 2, END)]
    assert [piece.ids for piece in second.pieces] == [(3, END), (4, 5)]
    assert [piece.positions for piece in second.pieces] == [(0, 1), (0, 1)]
    assert [piece.ends for piece in second.pieces] == [True, False]
    assert ([piece.ignored for piece in first.pieces], first.ignored) == ([(3,)], 1)
    whole = rows_of(batch_of(numbered(3, 1, 3), mask=False))
    assert [piece.positions for piece in whole[1].pieces] == [(0, 1), (2, 3)]
    assert [row.ignored for row in whole] == [0, 0]


@given(sources, st.booleans(), st.integers(2, 9))
def test_pieces_are_the_whole_row_and_training_rows_have_no_padding(source: InMemory, mask: bool, length: int) -> None:
    batch = batch_of(source, mask=mask, rows=3, length=length)
    for number, row in enumerate(rows_of(batch)):
        assert [token for piece in row.pieces for token in piece.ids] == batch.tokens_BS[number].tolist()
        assert row.padding == 0
        assert sum(len(piece.ignored) for piece in row.pieces) == row.ignored


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize(("tokens", "padding"), [(3, [1, 5]), (4, [0, 5]), (7, [0, 2]), (8, [0, 1])])
def test_what_only_fills_a_row_is_padding(mask: bool, tokens: int, padding: list[int]) -> None:
    source = numbered(tokens)
    judged = evaluation_batches(source, rows=2, sequence_length=5, limit_rows=9, document_mask=mask)
    rows = rows_of(judged.batches[0])
    assert [row.padding for row in rows] == padding
    assert [token for row in rows for piece in row.pieces for token in piece.ids] == [*range(tokens), END]
    assert sum(row.tokens - row.ignored for row in rows) == judged.tokens


def test_text_is_decoded_and_its_bytes_are_counted() -> None:
    text = "\u00e9a"
    source = InMemory((tuple(BYTES.encode(text).tolist()),), vocab_size=257, end_of_document=256)
    row = row_of(batch_of(source, mask=True, length=6), 0, end_of_document=256, tokenizer=BYTES)
    assert [piece.text for piece in row.pieces] == [text, "\u00e9"]
    assert row.text_bytes == int((np.array(source.documents[0]) < 256).sum()) + 2
