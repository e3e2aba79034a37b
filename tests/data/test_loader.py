"""Training batches: documents side by side, resuming, ranks, and the background thread."""

import gzip
import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.config.run import Data, MixturePart
from penstock.data.loader import Batch, Batches, Loader, Prefetch
from penstock.data.mixture import Text, TextPart
from penstock.data.open import open_text
from penstock.data.packed import pack
from penstock.data.sources import Source, Split, Tokens
from penstock.data.stream import LANES, LoaderState
from penstock.data.text import JsonLines
from penstock.data.tokenizer import ByteTokenizer
from tests.data.in_memory import END, InMemory, InShards, larger_sources, loader_of, numbered, sources
from tests.examples import examples


def listed(batch: Batch) -> list[list[list[int]]]:
    assert batch.documents_BS is not None
    return [x.tolist() for x in (batch.tokens_BS, batch.labels_BS, batch.positions_BS, batch.documents_BS)]


def take(batches: Batches, count: int) -> list[list[list[list[int]]]]:
    return [listed(batches.next_batch()) for _ in range(count)]


def each_lane(loader: Loader) -> list[list[int]]:
    """The next row of every lane, from a loader of one row a batch that stands before the first lane's turn."""
    return [loader.next_batch().tokens_BS[0].tolist() for _ in range(LANES)]


def up_to_the_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


@given(st.lists(st.integers(1, 12), min_size=2 * LANES, max_size=90), st.sampled_from([2, 8, LANES]), st.integers(1, 9))
def test_the_rows_of_a_batch_are_of_different_documents(sizes: list[int], rows: int, sequence_length: int) -> None:
    source = InMemory(tuple((number,) * size for number, size in enumerate(sizes)))
    loader = loader_of(source, rows=rows, sequence_length=sequence_length)
    while True:
        batch = loader.next_batch()
        if loader.state()["epoch"] > 0:
            break
        documents = [set(row) - {END} for row in batch.tokens_BS.tolist()]
        assert sum(map(len, documents)) == len(set().union(*documents)), "a document is in two rows"


@given(sources | larger_sources, st.integers(0, 20), st.integers(1, 7))
def test_a_resumed_loader_yields_the_same_batches(source: InMemory, steps: int, sequence_length: int) -> None:
    loader = loader_of(source, sequence_length=sequence_length)
    take(loader, steps)
    state = loader.state()
    resumed = loader_of(source, sequence_length=sequence_length)
    resumed.restore(json.loads(json.dumps(state)))
    assert resumed.state() == state
    assert take(resumed, 12) == take(loader, 12)
    assert resumed.state() == loader.state()


@given(sources | larger_sources, st.sampled_from([(2, 1), (4, 2), (6, 3), (8, 8), (8, 4)]), st.integers(1, 6))
def test_the_slices_of_all_ranks_are_the_global_batch(
    source: InMemory, rows_ranks: tuple[int, int], sequence_length: int
) -> None:
    rows, ranks = rows_ranks
    whole = loader_of(source, rows=rows, sequence_length=sequence_length)
    sizes = {"rows": rows, "sequence_length": sequence_length, "ranks": ranks}
    parts = [loader_of(source, rank=rank, **sizes) for rank in range(ranks)]
    for _ in range(6):
        expected = whole.next_batch()
        got = [part.next_batch() for part in parts]
        assert torch.equal(torch.cat([batch.tokens_BS for batch in got]), expected.tokens_BS)
        assert torch.equal(torch.cat([batch.labels_BS for batch in got]), expected.labels_BS)
        assert [row for batch in got for row in listed(batch)[3]] == listed(expected)[3]
        assert all(part.state() == whole.state() for part in parts), "any rank may save the state for all"


@given(larger_sources, st.integers(1, 20), st.integers(1, 9))
def test_another_sequence_length_continues_each_lane_with_its_next_token(
    source: InMemory, steps: int, sequence_length: int
) -> None:
    before = loader_of(source, rows=LANES)
    take(before, steps)
    state = before.state()
    same, other = (loader_of(source, rows=1, sequence_length=length) for length in (9, sequence_length))
    for loader in (same, other):
        loader.restore(state)
    for wanted, got in zip(each_lane(same), each_lane(other), strict=True):
        # Behind the end of a document a lane reads what is dealt next, and when that is depends on the length.
        assert up_to_the_end(got) == up_to_the_end(wanted)[:sequence_length]


def test_the_state_counts_tokens_of_all_ranks_and_is_plain_integers() -> None:
    loader = loader_of(numbered(30, 40), rows=4, sequence_length=5, rank=1, ranks=2)
    take(loader, 3)
    state = loader.state()
    assert (state["rows"], state["tokens"]) == (3 * 4, 3 * 4 * 5)
    values = [entry for value in state.values() for entry in (value if isinstance(value, list) else [value])]
    assert all(type(value) is int for value in values)
    assert all(0 <= value < 2**63 for value in values)


@given(larger_sources, st.integers(1, 4))
def test_without_shuffling_rows_follow_each_other_in_one_line(source: InMemory, rows: int) -> None:
    loader = loader_of(source, rows=rows, document_mask=False, shuffle=False)
    batches = [loader.next_batch() for _ in range(6)]
    tokens = torch.cat([batch.tokens_BS for batch in batches]).flatten().tolist()
    labels = torch.cat([batch.labels_BS for batch in batches]).flatten().tolist()
    epoch = [token for document in source.documents if document for token in (*document, END)]  # by number
    line = (epoch * (1 + (len(tokens) + 1) // len(epoch)))[: len(tokens) + 1]
    assert (tokens, labels) == (line[:-1], line[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": 1}, r"other data: its documents changed; got source \d+, was 1; fix: resume with the data"),
        ({"seed": 4}, "other data: its seed changed; got seed 3, was 4"),
        ({"shuffle": 0}, "other data: its shuffling changed; got shuffle 1, was 0"),
        ({"place": 2}, "saved position in the data is damaged; got places in more than 2 documents"),
        ({"lane_offsets": [3, -1]}, "damaged; got lane_offsets -1"),
        ({"lane_offsets": [3]}, r"damaged; got lane_offsets \[3\]"),
        ({"lane_epochs": 0}, "damaged; got lane_epochs 0"),
        ({"lane_places": [1, 1]}, "damaged; got one document in two lanes"),
        ({"rows": [3]}, r"damaged; got rows \[3\]"),
        ({"tokens": -1}, "damaged; got tokens -1"),
    ],
)
def test_a_state_of_other_data_is_refused_and_changes_nothing(change: LoaderState, message: str) -> None:
    loader = loader_of(numbered(30, 40))
    take(loader, 1)
    before = loader.state()
    with pytest.raises(DataError, match=message):
        loader.restore(before | change)
    assert loader.state() == before
    names = "epoch, place, lane_epochs, lane_places, lane_offsets, rows, tokens, skip"
    with pytest.raises(DataError, match=f"damaged; got epoch; allowed: {names}"):
        loader.restore({"epoch": 0})


@pytest.fixture
def prefetch() -> Iterator[Prefetch]:
    with closing(Prefetch(loader_of(numbered(30, 40, 7)))) as ahead:
        yield ahead


def test_a_prefetched_loader_gives_the_same_batches_and_states(prefetch: Prefetch) -> None:
    plain = loader_of(numbered(30, 40, 7))
    assert prefetch.state() == plain.state()
    for _ in range(8):
        assert take(prefetch, 1) == take(plain, 1)
        assert prefetch.state() == plain.state(), "the state is of what was handed out, not of what was fetched"


def test_a_prefetched_loader_resumes_and_refuses_a_state_without_a_change(prefetch: Prefetch) -> None:
    take(prefetch, 2)
    state = prefetch.state()
    expected = take(prefetch, 3)
    prefetch.restore(state)
    assert prefetch.state() == state
    with pytest.raises(DataError, match="seed changed"):
        prefetch.restore(state | {"seed": 8})
    assert take(prefetch, 3) == expected


class Flaky(InMemory):
    """Every second document cannot be read the first time."""

    def read(self, index: int) -> Tokens:
        fail_once(self, index)
        return super().read(index)


class FlakyShards(InShards):
    """Every second block cannot be read the first time."""

    def blocks(self, shard: int, first: int) -> Iterator[Sequence[object]]:
        for number, block in enumerate(super().blocks(shard, first), start=first):
            fail_once(self, (shard, number))
            yield block


def fail_once(source: object, key: object) -> None:
    """Raise a DataError for every second key that is new."""
    known = vars(source).setdefault("known", set())
    if key not in known:
        known.add(key)
        if len(known) % 2 == 0:
            raise DataError("the disk does not answer")


TEXTS = [[f"shard {shard}, document {number}" for number in range(7)] for shard in range(3)]


@pytest.mark.parametrize(
    ("flaky", "sound"),
    [
        (Flaky(numbered(30, 40, 7, 9).documents), numbered(30, 40, 7, 9)),
        (Text((TextPart(documents=FlakyShards(TEXTS)),)), Text((TextPart(documents=InShards(TEXTS)),))),
    ],
    ids=["documents", "shards"],
)
def test_after_an_error_in_the_thread_the_same_batch_can_be_asked_for_again(
    flaky: Source | Text, sound: Source | Text
) -> None:
    errors = 0
    with closing(Prefetch(loader_of(flaky))) as prefetch:
        plain = loader_of(sound)
        for _ in range(20):
            before = errors
            while True:
                try:
                    assert listed(prefetch.next_batch()) == take(plain, 1)[0]
                except DataError:
                    errors += 1
                    assert prefetch.state() == plain.state(), "an error moves nothing"
                    assert errors < before + 10, "the error stays"
                else:
                    break
    assert errors >= 2


def test_closing_ends_the_thread() -> None:
    prefetch = Prefetch(loader_of(numbered(30)))
    prefetch.next_batch()
    prefetch.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-data")]


SOURCES = ("text", "jsonl", "compressed", "corrupt", "parquet", "packed", "dataset", "stream", "mixture")


def _place(data: Data) -> dict[str, object]:
    return {field: value for field, value in data if field in MixturePart.model_fields}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def settings_of(folder: Path) -> dict[str, Data]:
    """Settings of each source, over some eighty short documents."""
    choose = random.Random(0)
    texts = [f"document {number} " + "x" * choose.randrange(40) for number in range(80)]
    lines = [json.dumps({"text": text}) for text in texts]
    for number, text in enumerate(texts):
        (folder / "plain").mkdir(exist_ok=True)
        (folder / "plain" / f"{number:02}.txt").write_text(text)
    (folder / "c.jsonl").write_text("\n".join(lines))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (folder / "bad.jsonl").write_text("\n".join([*lines[:30], "no json", *lines[30:], '{"text": 3}']))
    pq.write_table(pa.table({"text": texts}), folder / "c.parquet", row_group_size=9)  # blocks of 9 documents
    pack(JsonLines([folder / "c.jsonl"], ByteTokenizer()), folder / "packed", tokenizer="bytes")
    rows = datasets.Dataset.from_dict({"text": texts})
    rows.save_to_disk(str(folder / "set"), num_shards=5)  # a file for each shard of the stream
    files = {
        "text": Data(source="text", files=(str(folder / "plain"),)),
        "jsonl": Data(source="jsonl", files=(str(folder / "c.jsonl"),)),
        "compressed": Data(source="jsonl", files=(str(folder / "*.jsonl.gz"),)),
        "corrupt": Data(source="jsonl", files=(str(folder / "bad.jsonl"),), corrupt="skip"),
        "parquet": Data(source="parquet", files=(str(folder / "c.parquet"),)),
        "packed": Data(source="packed", files=(str(folder / "packed"),)),
        "dataset": Data(source="huggingface", dataset=str(folder / "set")),
        "stream": Data(source="huggingface", dataset=str(folder / "set"), streaming=True, shuffle_block=6),
    }
    files["mixture"] = Data(
        mixture={
            name: MixturePart(weight=weight, **_place(files[name]))
            for name, weight in (("jsonl", 2.0), ("parquet", 1.0), ("packed", 0.5), ("stream", 1.3))
        },
        shuffle_block=6,
    )
    return files


def open_split(data: Data, folder: Path, split: Split = "train", share: float = 0.2) -> Text:
    data = data.model_copy(update={"validation_share": share})
    return open_text(data, split, vocab_size=257, seed=5, cache=folder / "cache")


@pytest.fixture(scope="module")
def opened(settings_of: dict[str, Data], folder: Path) -> dict[str, Text]:
    return {name: open_split(data, folder) for name, data in settings_of.items()}


def readers_of(text: Text, rows: int, ranks: int, *, shuffle: bool) -> list[Loader]:
    sizes = {"rows": rows, "ranks": ranks, "sequence_length": 12, "shuffle": shuffle}
    return [loader_of(text, rank=rank, **sizes) for rank in range(ranks)]


def rows_of(readers: list[Loader], batches: int) -> list[tuple[list[int], ...]]:
    """Tokens, labels and positions of the next rows, of all ranks together."""
    taken = [reader.next_batch() for _ in range(batches) for reader in readers]
    columns = [(batch.tokens_BS, batch.labels_BS, batch.positions_BS) for batch in taken]
    return [row for column in columns for row in zip(*(x.tolist() for x in column), strict=True)]


@pytest.mark.parametrize("name", SOURCES)
@examples(12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shuffle=st.booleans(),
    before=st.sampled_from([(4, 1), (4, 2), (8, 8)]),
    after=st.sampled_from([(4, 1), (6, 3), (8, 4), (2, 2)]),
    steps=st.integers(0, 40),
)
def test_any_ranks_go_on_with_the_very_next_token(
    opened: dict[str, Text], name: str, shuffle: bool, before: tuple[int, int], after: tuple[int, int], steps: int
) -> None:
    first, second = (readers_of(opened[name], *rows_ranks, shuffle=shuffle) for rows_ranks in (before, after))
    rows_of(first, steps)
    states = [json.loads(json.dumps(reader.state())) for reader in first]
    assert all(state == states[0] for state in states), "any rank may save the place for all"
    for reader in second:
        reader.restore(states[0])
    assert rows_of(second, 24 // after[0]) == rows_of(first, 24 // before[0])


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_is_opened_again_has_the_same_fingerprint_and_rows(
    opened: dict[str, Text], settings_of: dict[str, Data], folder: Path, name: str
) -> None:
    again = open_split(settings_of[name], folder)
    one, other = (readers_of(text, 4, 1, shuffle=True) for text in (opened[name], again))
    rows_of(one, 7)
    other[0].restore(one[0].state())
    assert rows_of(other, 3) == rows_of(one, 3)


@pytest.mark.parametrize("name", ["jsonl", "compressed", "parquet", "dataset", "stream"])
def test_training_and_held_out_text_share_no_document_and_cover_all(
    settings_of: dict[str, Data], folder: Path, name: str
) -> None:
    found: list[set[str]] = []
    for split in ("train", "validation"):
        text = open_split(settings_of[name], folder, split, share=0.3)
        reader = loader_of(text, rows=1, sequence_length=4000, shuffle=False)
        documents = bytes(token if token < 256 else 0 for token in reader.next_batch().tokens_BS[0].tolist())
        found.append({text.decode() for text in documents.split(b"\0")[:-1]})
    train, held_out = found
    assert not train & held_out
    assert len(train | held_out) == 80
    assert 8 < len(held_out) < 50
