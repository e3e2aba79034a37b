"""Text in shards: every document once an epoch, and places that are found again."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.data.documents import CorruptRecords
from penstock.data.evaluation import Sample
from penstock.data.shards import ShardStream
from tests.data.in_memory import InShards

END = 256
texts = st.text("abcdef", max_size=6)
shards = st.lists(st.lists(texts, max_size=7), min_size=1, max_size=6).filter(lambda all_: any(map(any, all_)))
blocks = st.integers(1, 4)


def stream_of(source: InShards, *, lanes: int = 1, seed: int = 0, shuffle: bool = True) -> ShardStream:
    return ShardStream(source, seed=seed, shuffle=shuffle, lanes=min(lanes, len(source)))


def texts_of(stream: ShardStream, count: int) -> list[str]:
    """The next documents from the start, of a stream with one lane."""
    position = stream.start()
    found: list[int] = []
    while found.count(END) < count:
        rows, position = stream.read(position, 1, 5)
        found += rows.tokens[0, :-1].tolist()
    return "".join("." if token == END else chr(token) for token in found).split(".")[:count]


@given(shards, blocks, st.integers(0, 3), st.booleans())
def test_every_document_is_read_once_an_epoch(documents: list[list[str]], block: int, seed: int, shuffle: bool) -> None:
    filled = [text for shard in documents for text in shard if text]
    found = texts_of(stream_of(InShards(documents, block=block), seed=seed, shuffle=shuffle), 2 * len(filled))
    for epoch in (found[: len(filled)], found[len(filled) :]):
        assert Counter(epoch) == Counter(filled)
        assert shuffle or epoch == filled


@given(shards, blocks, st.integers(1, 4), st.integers(0, 12), st.integers(1, 5))
def test_a_saved_place_is_found_again(
    documents: list[list[str]], block: int, lanes: int, rows: int, sequence_length: int
) -> None:
    stream = stream_of(InShards(documents, block=block), lanes=lanes)
    position = stream.advance(stream.start(), rows, sequence_length)
    state = json.loads(json.dumps(stream.save(position)))
    resumed = stream_of(InShards(documents, block=block), lanes=lanes)
    assert resumed.restore(state) == position
    expected, behind = stream.read(position, 6, sequence_length)
    got, there = resumed.read(resumed.restore(state), 6, sequence_length)
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert there == behind


def test_going_on_opens_a_shard_at_the_block_and_reads_nothing_before() -> None:
    source = InShards([[f"document {number}" for number in range(100)]], block=8)
    stream = stream_of(source)
    state = stream.save(stream.advance(stream.start(), 60, 10))
    fresh = InShards([[f"document {number}" for number in range(100)]], block=8)
    resumed = stream_of(fresh)
    resumed.read(resumed.restore(state), 1, 10)
    (document,) = state["lane_documents"]
    assert document > 16
    assert fresh.opened == [(0, document // 8)]


def test_blocks_are_mixed_and_epochs_differ() -> None:
    documents = [[f"{shard}-{number:02}" for number in range(40)] for shard in range(3)]
    found = texts_of(stream_of(InShards(documents, block=16)), 240)
    first, second = found[:120], found[120:]
    assert first != second
    assert [text[0] for text in first[:40]] == [first[0][0]] * 40, "a lane reads a shard to its end"
    assert [text[2:] for text in first[:16]] != sorted(text[2:] for text in first[:16])
    assert {text[2:] for text in first[:16]} == {f"{number:02}" for number in range(16)}


def test_lanes_read_shards_side_by_side() -> None:
    source = InShards([[str(shard) * 50] * 3 for shard in range(4)])
    stream = stream_of(source, lanes=4)
    rows, _ = stream.read(stream.start(), 8, 10)
    assert sorted({row[0] for row in rows.tokens[:4].tolist()}) == [ord(str(shard)) for shard in range(4)]
    assert rows.tokens[4:, 0].tolist() == rows.tokens[:4, 0].tolist()


@pytest.mark.parametrize("documents", [[[]], [[""], []], [["", ""], [None]]])
def test_shards_without_text_are_an_error_and_not_a_hang(documents: list[list[object]]) -> None:
    stream = stream_of(InShards(documents, corrupt=CorruptRecords("skip")))
    with pytest.raises(DataError, match=rf"every document is empty; got {len(documents)} shards"):
        stream.read(stream.start(), 1, 1)


def test_a_corrupt_document_stops_or_is_skipped_and_named() -> None:
    documents = [["one", None, "two"]]
    with pytest.raises(DataError, match="document 1 of shard 0 is not text; got NoneType"):
        texts_of(stream_of(InShards(documents), shuffle=False), 2)
    corrupt = CorruptRecords("skip")
    assert texts_of(stream_of(InShards(documents, corrupt=corrupt), shuffle=False), 2) == ["one", "two"]
    assert corrupt.skipped == 1
    assert corrupt.take_notices() == ("data: skipped a record: document 1 of shard 0 is not text",)


def test_a_sample_takes_of_all_shards_and_stops_when_it_has_enough() -> None:
    source = InShards([[f"{shard}{number:03}" for number in range(100)] for shard in range(8)], block=5)
    sample = Sample(source, documents=60, tokens=100, most_tokens=10**6)
    assert len(sample) == 60
    assert len({chr(sample.read(index)[0]) for index in range(60)}) == 8
    assert len(Sample(source, documents=60, tokens=10, most_tokens=10)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"place": 3}, "places in more than 3 shards"),
        ({"lane_documents": [-1, 0]}, "lane_documents -1"),
        ({"lane_documents": [0]}, "lane_documents"),
        ({"lane_places": [1, 1]}, "one document in two lanes"),
    ],
)
def test_a_damaged_place_is_refused(change: dict[str, object], message: str) -> None:
    stream = stream_of(InShards([["abc"] * 4] * 3), lanes=2)
    with pytest.raises(DataError, match=f"saved position in the data is damaged; got .*{message}"):
        stream.restore(stream.save(stream.start()) | change)
