"""Texts mixed by weight: shares of tokens, and a place in every part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.data.evaluation import evaluation_batches
from penstock.data.mixture import Text, TextPart
from tests.data.in_memory import InMemory, InShards, loader_of, numbered

WEB = InMemory(tuple((1,) * size for size in (400, 3, 50, 7)))
CODE = InMemory(tuple((2,) * size for size in (5, 6, 90)))
BOOKS = InMemory(((3,) * 2000,))


def mixed(*parts: tuple[InMemory, float]) -> Text:
    named = zip("abcdef", parts, strict=False)
    return Text(tuple(TextPart(documents=source, name=name, weight=weight) for name, (source, weight) in named))


weights = st.floats(0.01, 100.0)


@given(st.tuples(weights, weights, weights), st.integers(1, 40))
def test_shares_of_tokens_are_the_weights_whatever_the_documents_are(chosen: tuple[float, ...], batches: int) -> None:
    loader = loader_of(mixed(*zip((WEB, CODE, BOOKS), chosen, strict=True)), rows=1, sequence_length=8)
    for _ in range(batches):
        loader.next_batch()
    tokens = loader.state()["part_tokens"]
    assert sum(tokens) == 8 * batches
    for share, weight in zip(tokens, chosen, strict=True):
        assert abs(share - 8 * batches * weight / sum(chosen)) <= 8 * len(chosen), "within a row for each part"


def test_the_order_of_parts_is_even() -> None:
    loader = loader_of(mixed((BOOKS, 2.0), (WEB, 1.0)), rows=1, sequence_length=8)
    turns = [int(loader.next_batch().tokens_BS[0, 0] == 3) for _ in range(9)]
    assert turns == [1, 1, 0] * 3  # the part of weight 2 has two of three rows


def test_a_part_begins_anew_when_it_has_been_read_and_the_others_go_on() -> None:
    loader = loader_of(mixed((numbered(5), 1.0), (BOOKS, 1.0)), rows=2, sequence_length=8)
    for _ in range(20):
        loader.next_batch()
    parts = loader.state()["parts"]
    assert parts["a"]["lane_epochs"] > [10]
    assert parts["b"]["lane_epochs"] == [0]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (mixed((WEB, 1.0), (BOOKS, 1.0)), "documents of part b changed"),
        (mixed((WEB, 1.0), (CODE, 2.0)), "the weights of its mixture changed"),
        (mixed((WEB, 1.0), (CODE, 1.0), (BOOKS, 1.0)), "the parts of its mixture changed"),
    ],
)
def test_a_place_in_another_mixture_is_refused_and_says_what_changed(other: Text, message: str) -> None:
    state = loader_of(mixed((WEB, 1.0), (CODE, 1.0))).state()
    with pytest.raises(DataError, match=f"saved with other data: {message}; got source"):
        loader_of(other).restore(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"part_tokens": [8]}, r"part_tokens \[8\]"),
        ({"parts": {"a": {}}}, "other parts"),
        ({"parts": {"a": {}, "b": {}}}, "of part a something else"),
    ],
)
def test_a_damaged_place_is_refused(change: dict[str, object], message: str) -> None:
    loader = loader_of(mixed((WEB, 1.0), (CODE, 1.0)))
    with pytest.raises(DataError, match=f"saved position in the data is damaged; got {message}"):
        loader.restore(loader.state() | change)


def judged(text: Text, **sizes: int) -> list[list[int]]:
    batches = evaluation_batches(text, document_mask=False, **sizes).batches
    return [row for batch in batches for row in batch.tokens_BS.tolist()]


def test_held_out_rows_are_shared_by_weight_as_far_as_a_part_has_them() -> None:
    rows = judged(mixed((WEB, 3.0), (BOOKS, 1.0)), rows=4, sequence_length=8, limit_rows=12)
    assert [sum(part in row for row in rows) for part in (1, 3)] == [9, 3]
    rows = judged(mixed((numbered(6), 1.0), (BOOKS, 1.0)), rows=2, sequence_length=4, limit_rows=20)
    assert sum(3 in row for row in rows[2:]) == 10
    assert rows[:2] == [[0, 1, 2, 3], [4, 5, 99, 99]]
    assert str(mixed((WEB, 1.0), (CODE, 1.0))) == "4 documents of a, 3 documents of b"


def test_held_out_rows_of_shards_are_read_from_a_sample() -> None:
    text = Text((TextPart(documents=InShards([["abcdefgh"] * 9] * 3)),))
    evaluation = evaluation_batches(text, rows=2, sequence_length=4, limit_rows=4, document_mask=False)
    assert evaluation.tokens == 16
    assert 12 <= evaluation.text_bytes <= 16  # end tokens are counted labels and have no bytes
