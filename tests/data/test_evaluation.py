"""The rows that a model is judged by, and their bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.data.evaluation import EvaluationRows, evaluation_batches
from penstock.data.sources import document_order
from penstock.kernels.reference import IGNORED_LABEL
from tests.data.in_memory import END, InMemory, numbered, sources

NINETY = InMemory(tuple((number,) * 29 for number in range(90)))
"""Documents of 30 tokens with their end, which is the only token that is not the document's number."""


def evaluate(source: InMemory, *, limit_rows: int = 1000, document_mask: bool = False, **other: int) -> EvaluationRows:
    sizes = {"rows": 2, "sequence_length": 4} | other
    return evaluation_batches(source, limit_rows=limit_rows, document_mask=document_mask, **sizes)


def counted_labels(evaluation: EvaluationRows) -> list[int]:
    labels = torch.cat([batch.labels_BS.flatten() for batch in evaluation.batches])
    return labels[labels != IGNORED_LABEL].tolist()


def documents_in(evaluation: EvaluationRows) -> set[int]:
    return set(torch.cat([batch.tokens_BS.flatten() for batch in evaluation.batches]).tolist()) - {END}


def first_documents(count: int) -> set[int]:
    return set(document_order(90, seed=0, epoch=0)[:count].tolist())


@given(sources, st.integers(1, 7), st.integers(1, 4))
def test_without_a_limit_every_token_but_the_first_is_predicted(
    source: InMemory, sequence_length: int, rows: int
) -> None:
    evaluation = evaluate(source, sequence_length=sequence_length, rows=rows)
    order = [index for index in document_order(len(source), seed=0, epoch=0).tolist() if source.documents[index]]
    line = [token for index in order for token in (*source.documents[index], END)]
    assert counted_labels(evaluation) == line[1:]
    assert evaluation.tokens == len(line) - 1
    assert evaluation.text_bytes == sum(token % 4 for token in line[1:] if token != END)
    assert all(batch.tokens_BS.shape == (rows, sequence_length) for batch in evaluation.batches)


@given(sources, st.integers(1, 7))
def test_with_a_mask_every_token_but_the_first_of_each_document_is_predicted(
    source: InMemory, sequence_length: int
) -> None:
    evaluation = evaluate(source, sequence_length=sequence_length, document_mask=True)
    full = [document for document in source.documents if document]
    assert evaluation.tokens == sum(len(document) for document in full)
    assert evaluation.text_bytes == sum(token % 4 for document in full for token in document[1:])


@given(sources, st.integers(1, 5), st.booleans())
def test_bytes_and_tokens_are_those_of_the_counted_labels(source: InMemory, limit: int, document_mask: bool) -> None:
    evaluation = evaluate(source, limit_rows=limit, document_mask=document_mask)
    labels = np.array(counted_labels(evaluation), dtype=np.int64)
    assert evaluation.tokens == len(labels)
    assert evaluation.text_bytes == (labels[labels != END] % 4).sum()


def test_a_small_split_is_covered_whole_however_few_rows_are_wanted() -> None:
    (batch,) = evaluate(NINETY, limit_rows=30, rows=30, sequence_length=2).batches
    assert batch.tokens_BS[:, 0].tolist() == document_order(90, seed=0, epoch=0)[::3].tolist()


def test_enough_documents_or_tokens_end_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("penstock.data.evaluation._DOCUMENTS", 4)
        assert documents_in(evaluate(NINETY, limit_rows=8, sequence_length=1)) == first_documents(4)
        wanted = 8 * 60 * 2 + 1  # eight times the tokens of the wanted rows, and a last label
        assert documents_in(evaluate(NINETY, limit_rows=60, sequence_length=2)) == first_documents(-(-wanted // 30))
    monkeypatch.setattr("penstock.data.evaluation._ENOUGH_TOKENS", 100)
    assert documents_in(evaluate(NINETY, limit_rows=8, sequence_length=1)) == first_documents(4)


@given(sources, st.integers(1, 5), st.integers(1, 5))
def test_rows_are_windows_of_the_line_at_even_distances(source: InMemory, limit: int, sequence_length: int) -> None:
    order = [index for index in document_order(len(source), seed=0, epoch=0).tolist() if source.documents[index]]
    line = [token for index in order for token in (*source.documents[index], END)]
    whole = -(-(len(line) - 1) // sequence_length)  # rows of the line, rounded up
    taken = min(limit, whole)
    starts = [number * whole // taken * sequence_length for number in range(taken)]
    labels = [label for start in starts for label in line[start + 1 : start + 1 + sequence_length]]
    assert counted_labels(evaluate(source, limit_rows=limit, sequence_length=sequence_length)) == labels


def test_the_last_batch_is_padded_to_full_size() -> None:
    evaluation = evaluate(numbered(9), rows=2, sequence_length=3)
    first, last = evaluation.batches
    assert first.tokens_BS.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert last.tokens_BS.tolist() == [[6, 7, 8], [END, END, END]]
    assert last.labels_BS.tolist() == [[7, 8, END], [IGNORED_LABEL] * 3]
    assert evaluation.tokens == 9


@given(sources, st.sampled_from([2, 4]), st.booleans())
def test_ranks_share_each_batch_and_agree_on_the_counts(source: InMemory, ranks: int, document_mask: bool) -> None:
    whole = evaluate(source, rows=4, document_mask=document_mask)
    parts = [evaluate(source, rows=4, document_mask=document_mask, rank=rank, ranks=ranks) for rank in range(ranks)]
    for number, batch in enumerate(whole.batches):
        assert torch.equal(torch.cat([part.batches[number].labels_BS for part in parts]), batch.labels_BS)
    assert {(part.tokens, part.text_bytes) for part in parts} == {(whole.tokens, whole.text_bytes)}


def test_text_that_is_all_empty_is_an_error() -> None:
    with pytest.raises(DataError, match="validation data hold no text: every document is empty; got 2 documents"):
        evaluate(numbered(0, 0))
