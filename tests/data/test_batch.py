"""Batches: cut into views, moved as a whole, and the rules of labels, positions and documents by example."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.evaluation import evaluation_batches
from penstock.data.loader import PADDING, Batch, pack
from penstock.data.stream import Rows, Stream
from penstock.data.tokenizer import ByteTokenizer
from penstock.kernels.reference import IGNORED_LABEL
from penstock.train.batch_contents import RowContents, row_of
from tests.data.in_memory import END, InMemory, loader_of, numbered, sources

NO = IGNORED_LABEL


def rows_of(source: InMemory, rows: int, sequence_length: int) -> Rows:
    stream = Stream(source, seed=0, shuffle=False, lanes=1)
    return stream.read(stream.start(), rows, sequence_length)[0]


def test_the_example_of_the_module() -> None:
    plain, masked = (pack(rows_of(numbered(3, 1, 3), 2, 4), document_mask=mask) for mask in (False, True))
    assert plain.tokens_BS.tolist() == masked.tokens_BS.tolist() == [[0, 1, 2, END], [3, END, 4, 5]]
    assert plain.labels_BS.tolist() == [[1, 2, END, 3], [END, 4, 5, 6]]
    assert masked.labels_BS.tolist() == [[1, 2, END, NO], [END, NO, 5, 6]]
    assert plain.positions_BS.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert masked.positions_BS.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert plain.documents_BS is None and masked.documents_BS is not None
    assert masked.documents_BS.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]


def test_padding_is_never_predicted() -> None:
    rows = Rows(np.array([[7, 8, END], [END, END, END]]), np.array([[0, 0, 0], [0, PADDING, PADDING]]))
    for document_mask in (False, True):
        batch = pack(rows, document_mask=document_mask)
        assert batch.labels_BS.tolist() == [[8, END], [NO, NO]]


@given(sources, st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_rows_hold_the_lane_and_labels_are_the_lane_one_on(
    source: InMemory, rows: int, sequence_length: int, document_mask: bool
) -> None:
    found = rows_of(source, rows, sequence_length)
    batch = pack(found, document_mask=document_mask)
    assert batch.tokens_BS.tolist() == found.tokens[:, :-1].tolist()
    assert batch.tokens_BS[1:, 0].tolist() == found.tokens[:-1, -1].tolist(), "a lane goes on where its row ended"
    counted = (batch.labels_BS != NO).numpy()
    assert batch.labels_BS.numpy()[counted].tolist() == found.tokens[:, 1:][counted].tolist()
    assert all(x is None or (x.dtype == torch.int64 and x.is_contiguous()) for x in vars(batch).values())
    if not document_mask:
        assert counted.all()


@given(sources, st.integers(1, 5), st.integers(1, 9))
def test_with_a_mask_positions_labels_and_documents_change_at_end_tokens_only(
    source: InMemory, rows: int, sequence_length: int
) -> None:
    batch = pack(rows_of(source, rows, sequence_length), document_mask=True)
    assert batch.documents_BS is not None
    columns = batch.tokens_BS, batch.labels_BS, batch.positions_BS, batch.documents_BS
    for tokens, labels, positions, documents in zip(*(x_BS.tolist() for x_BS in columns), strict=True):
        document, position = 0, 0
        for s, token in enumerate(tokens):
            assert (documents[s], positions[s]) == (document, position)
            assert (labels[s] == NO) == (token == END)  # its label is the first token of another document
            document, position = (document + 1, 0) if token == END else (document, position + 1)


def test_a_batch_shares_no_memory_with_the_stream() -> None:
    rows = rows_of(numbered(8), 2, 4)
    batch = pack(rows, document_mask=False)
    batch.tokens_BS.zero_()
    batch.positions_BS[0].zero_()
    assert rows.tokens[0].tolist() == [0, 1, 2, 3, 4]
    assert batch.labels_BS[0].tolist() == [1, 2, 3, 4]
    assert batch.positions_BS[1].tolist() == [0, 1, 2, 3]


def batch_of(rows: int, *, documents: bool) -> Batch:
    tokens_BS = torch.arange(rows * 3).reshape(rows, 3)
    return Batch(
        tokens_BS=tokens_BS,
        labels_BS=tokens_BS + 1,
        positions_BS=tokens_BS % 3,
        documents_BS=torch.zeros_like(tokens_BS) if documents else None,
    )


@pytest.mark.parametrize("documents", [False, True])
def test_micro_batches_are_views_of_the_rows_in_order(documents: bool) -> None:
    batch = batch_of(6, documents=documents)
    parts = batch.micro_batches(2)
    assert [part.rows for part in parts] == [2, 2, 2]
    for field in dataclasses.fields(Batch):
        whole = vars(batch)[field.name]
        pieces = [vars(part)[field.name] for part in parts]
        if whole is None:
            assert pieces == [None, None, None]
        else:
            assert torch.equal(torch.cat(pieces), whole)
            assert pieces[0].data_ptr() == whole.data_ptr()


BYTES = ByteTokenizer()


def contents_of(batch: Batch) -> list[RowContents]:
    return [row_of(batch, number, end_of_document=END, tokenizer=None) for number in range(batch.rows)]


@given(sources, st.booleans(), st.integers(2, 9))
def test_pieces_are_the_whole_row_and_training_rows_have_no_padding(source: InMemory, mask: bool, length: int) -> None:
    batch = loader_of(source, rows=3, sequence_length=length, document_mask=mask, shuffle=False).next_batch()
    for number, row in enumerate(contents_of(batch)):
        assert [token for piece in row.pieces for token in piece.ids] == batch.tokens_BS[number].tolist()
        assert row.padding == 0
        assert sum(len(piece.ignored) for piece in row.pieces) == row.ignored


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize(("tokens", "padding"), [(3, [1, 5]), (4, [0, 5]), (7, [0, 2]), (8, [0, 1])])
def test_what_only_fills_a_row_is_padding(mask: bool, tokens: int, padding: list[int]) -> None:
    source = numbered(tokens)
    judged = evaluation_batches(source, rows=2, sequence_length=5, limit_rows=9, document_mask=mask)
    rows = contents_of(judged.batches[0])
    assert [row.padding for row in rows] == padding
    assert [token for row in rows for piece in row.pieces for token in piece.ids] == [*range(tokens), END]
    assert sum(row.tokens - row.ignored for row in rows) == judged.tokens


def test_text_is_decoded_and_its_bytes_are_counted() -> None:
    text = "\u00e9a"
    source = InMemory((tuple(BYTES.encode(text).tolist()),), vocab_size=257, end_of_document=256)
    batch = loader_of(source, rows=1, sequence_length=6).next_batch()
    row = row_of(batch, 0, end_of_document=256, tokenizer=BYTES)
    assert [piece.text for piece in row.pieces] == [text, "\u00e9"]  # the document, and the begin of its second visit
    assert row.text_bytes == int((np.array(source.documents[0]) < 256).sum()) + 2
