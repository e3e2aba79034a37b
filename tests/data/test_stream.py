"""The endless rows of documents, lane by lane, and positions between them."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.data.documents import CorruptRecords
from penstock.data.evaluation import Sample
from penstock.data.shards import ShardStream
from penstock.data.sources import BlockOrder, Tokens, document_order, permutation
from penstock.data.stream import Cursor, Position, Stream
from tests.data.in_memory import END, InMemory, InShards, numbered, sources


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
        left[lane] = left[lane][length:]  # the last token of a row begins the next row
    return rows


def times_read(source: InMemory, position: Position, seed: int) -> Counter[int]:
    """How often each token lies behind a position, if every document that was dealt is read once."""
    in_lanes = {cursor[:2]: cursor.offset for cursor in position.lanes}  # documents that are read in part
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
    assert document_order(6, seed=3, epoch=1).tolist() == [0, 2, 1, 3, 4, 5], "old checkpoints would resume wrongly"
    assert document_order(8, seed=1, epoch=0).tolist() == [2, 4, 7, 5, 0, 6, 3, 1]


@dataclass(frozen=True)
class Watched(InMemory):
    """Documents, and the numbers of those that were opened."""

    opened: list[int] = field(default_factory=list)

    def read(self, index: int) -> Tokens:
        self.opened.append(index)
        return super().read(index)


def test_a_read_opens_only_the_documents_that_it_needs() -> None:
    source = Watched(numbered(*[10] * 20).documents)
    stream = stream_of(source)
    position = Position(next_unit=Cursor(5, 8), lanes=(Cursor(5, 7, 4),), rows=30)
    for _ in range(3):
        _, position = stream.read(position, 1, 9)
    assert source.opened == [7, 8, 9], "resuming must not read what lies before, and a document must be read once"


def test_every_lane_keeps_its_document() -> None:
    source = Watched(numbered(*[20] * 4).documents)
    stream = stream_of(source, lanes=3)
    position = stream.start()
    for _ in range(12):
        _, position = stream.read(position, 1, 4)
    assert source.opened == [0, 1, 2], "a lane must not read its document anew at each turn"


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
    block_of = np.repeat(np.arange(len(blocks)), blocks)  # block of each document
    visited = [int(block_of[order[place]]) for place in range(sum(blocks))]
    spans = {block: (visited.index(block), len(visited) - visited[::-1].index(block)) for block in set(visited)}
    for place in range(len(visited)):
        assert sum(first <= place < last for first, last in spans.values()) <= pool


def test_the_pools_that_were_asked_for_last_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    order = BlockOrder(np.full(4, 3), 1, seed=0, epoch=0)
    permuted = Mock(side_effect=permutation)
    monkeypatch.setattr("penstock.data.sources.permutation", permuted)
    for pool in (2, 0, 1, 0, 1, 0, 3, 0, 1):  # two pools are kept
        _ = order[3 * pool]
    assert [key[-1] - 1 for (_, key), _ in permuted.call_args_list] == [2, 0, 1, 3, 1]


BYTES_END = 256  # end of a document of the byte tokenizer
texts = st.text("abcdef", max_size=6)
shards = st.lists(st.lists(texts, max_size=7), min_size=1, max_size=6).filter(lambda all_: any(map(any, all_)))
blocks = st.integers(1, 4)


def shard_stream(source: InShards, *, lanes: int = 1, seed: int = 0, shuffle: bool = True) -> ShardStream:
    return ShardStream(source, seed=seed, shuffle=shuffle, lanes=min(lanes, len(source)))


def texts_of(stream: ShardStream, count: int) -> list[str]:
    """The next documents from the start, of a stream with one lane."""
    position = stream.start()
    found: list[int] = []
    while found.count(BYTES_END) < count:
        rows, position = stream.read(position, 1, 5)
        found += rows.tokens[0, :-1].tolist()
    return "".join("." if token == BYTES_END else chr(token) for token in found).split(".")[:count]


@given(shards, blocks, st.integers(0, 3), st.booleans())
def test_every_document_is_read_once_an_epoch(documents: list[list[str]], block: int, seed: int, shuffle: bool) -> None:
    filled = [text for shard in documents for text in shard if text]
    found = texts_of(shard_stream(InShards(documents, block=block), seed=seed, shuffle=shuffle), 2 * len(filled))
    for epoch in (found[: len(filled)], found[len(filled) :]):
        assert Counter(epoch) == Counter(filled)
        assert shuffle or epoch == filled


@given(shards, blocks, st.integers(1, 4), st.integers(0, 12), st.integers(1, 5))
def test_a_saved_place_is_found_again(
    documents: list[list[str]], block: int, lanes: int, rows: int, sequence_length: int
) -> None:
    stream = shard_stream(InShards(documents, block=block), lanes=lanes)
    position = stream.advance(stream.start(), rows, sequence_length)
    state = json.loads(json.dumps(stream.save(position)))
    resumed = shard_stream(InShards(documents, block=block), lanes=lanes)
    assert resumed.restore(state) == position
    expected, behind = stream.read(position, 6, sequence_length)
    got, there = resumed.read(resumed.restore(state), 6, sequence_length)
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert there == behind


def test_going_on_opens_a_shard_at_the_block_and_reads_nothing_before() -> None:
    source, fresh = (InShards([[f"document {number}" for number in range(100)]], block=8) for _ in range(2))
    stream = shard_stream(source)
    state = stream.save(stream.advance(stream.start(), 60, 10))
    resumed = shard_stream(fresh)
    resumed.read(resumed.restore(state), 1, 10)
    (document,) = state["lane_documents"]
    assert document > 16
    assert fresh.opened == [(0, document // 8)]  # blocks of 8 documents


def test_blocks_are_mixed_and_epochs_differ() -> None:
    documents = [[f"{shard}-{number:02}" for number in range(40)] for shard in range(3)]
    found = texts_of(shard_stream(InShards(documents, block=16)), 240)
    first, second = found[:120], found[120:]
    assert first != second
    assert [text[0] for text in first[:40]] == [first[0][0]] * 40, "a lane reads a shard to its end"
    assert [text[2:] for text in first[:16]] != sorted(text[2:] for text in first[:16])
    assert {text[2:] for text in first[:16]} == {f"{number:02}" for number in range(16)}


def test_lanes_read_shards_side_by_side() -> None:
    source = InShards([[str(shard) * 50] * 3 for shard in range(4)])
    stream = shard_stream(source, lanes=4)
    rows, _ = stream.read(stream.start(), 8, 10)
    assert sorted({row[0] for row in rows.tokens[:4].tolist()}) == [ord(str(shard)) for shard in range(4)]
    assert rows.tokens[4:, 0].tolist() == rows.tokens[:4, 0].tolist()


@pytest.mark.parametrize("documents", [[[]], [[""], []], [["", ""], [None]]])
def test_shards_without_text_are_an_error_and_not_a_hang(documents: list[list[object]]) -> None:
    stream = shard_stream(InShards(documents, corrupt=CorruptRecords("skip")))
    with pytest.raises(DataError, match=rf"every document is empty; got {len(documents)} shards"):
        stream.read(stream.start(), 1, 1)


def test_a_corrupt_document_stops_or_is_skipped_and_named() -> None:
    documents = [["one", None, "two"]]
    with pytest.raises(DataError, match="document 1 of shard 0 is not text; got NoneType"):
        texts_of(shard_stream(InShards(documents), shuffle=False), 2)
    corrupt = CorruptRecords("skip")
    assert texts_of(shard_stream(InShards(documents, corrupt=corrupt), shuffle=False), 2) == ["one", "two"]
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
    stream = shard_stream(InShards([["abc"] * 4] * 3), lanes=2)
    with pytest.raises(DataError, match=f"saved position in the data is damaged; got .*{message}"):
        stream.restore(stream.save(stream.start()) | change)
