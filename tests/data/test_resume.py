"""Every source, opened by the settings of a run, goes on at the very token: on any number of ranks, from any place."""

import gzip
import json
import random
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from penstock.config.data import Data, MixturePart
from penstock.data.loader import Loader
from penstock.data.mixture import Text
from penstock.data.open import open_text
from penstock.data.packed import pack
from penstock.data.text import JsonLines
from penstock.data.tokenizer import ByteTokenizer
from tests.examples import examples

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
    pq.write_table(pa.table({"text": texts}), folder / "c.parquet", row_group_size=9)
    pack(JsonLines([folder / "c.jsonl"], ByteTokenizer()), folder / "packed", tokenizer="bytes")
    rows = datasets.Dataset.from_dict({"text": texts})
    rows.save_to_disk(str(folder / "set"), num_shards=5)
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


@pytest.fixture(scope="module")
def opened(settings_of: dict[str, Data], folder: Path) -> dict[str, Text]:
    return {
        name: open_text(
            data.model_copy(update={"validation_share": 0.2}),
            "train",
            vocab_size=257,
            seed=5,
            cache=folder / "cache",
        )
        for name, data in settings_of.items()
    }


def loader_of(
    text: Text, *, shuffle: bool, rows: int, rank: int = 0, ranks: int = 1, sequence_length: int = 12
) -> Loader:
    return Loader(
        text,
        rows=rows,
        sequence_length=sequence_length,
        seed=5,
        document_mask=True,
        shuffle=shuffle,
        rank=rank,
        ranks=ranks,
    )


def rows_of(readers: list[Loader], batches: int) -> list[list[list[int]]]:
    """Tokens, labels and positions of the next rows, of all ranks together."""
    found = []
    for _ in range(batches):
        for reader in readers:
            batch = reader.next_batch()
            found += [
                list(row)
                for row in zip(
                    *(x.tolist() for x in (batch.tokens_BS, batch.labels_BS, batch.positions_BS)), strict=True
                )
            ]
    return found


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
    text = opened[name]
    rows, ranks = before
    first = [loader_of(text, shuffle=shuffle, rows=rows, rank=rank, ranks=ranks) for rank in range(ranks)]
    rows_of(first, steps)
    states = [json.loads(json.dumps(reader.state())) for reader in first]
    assert all(state == states[0] for state in states), "any rank may save the place for all"
    rows, ranks = after
    second = [loader_of(text, shuffle=shuffle, rows=rows, rank=rank, ranks=ranks) for rank in range(ranks)]
    for reader in second:
        reader.restore(states[0])
    batches = 24 // rows
    assert rows_of(second, batches) == rows_of(first, 24 // before[0])


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_is_opened_again_has_the_same_fingerprint_and_rows(
    opened: dict[str, Text], settings_of: dict[str, Data], folder: Path, name: str
) -> None:
    data = settings_of[name].model_copy(update={"validation_share": 0.2})
    again = open_text(data, "train", vocab_size=257, seed=5, cache=folder / "cache")
    one, other = (loader_of(text, shuffle=True, rows=4) for text in (opened[name], again))
    rows_of([one], 7)
    other.restore(one.state())
    assert rows_of([other], 3) == rows_of([one], 3)


@pytest.mark.parametrize("name", ["jsonl", "compressed", "parquet", "dataset", "stream"])
def test_training_and_held_out_text_share_no_document_and_cover_all(
    settings_of: dict[str, Data], folder: Path, name: str
) -> None:
    data = settings_of[name].model_copy(update={"validation_share": 0.3})
    found: list[set[str]] = []
    for split in ("train", "validation"):
        (part,) = open_text(data, split, vocab_size=257, seed=5, cache=folder / "cache").parts
        reader = Loader(Text((part,)), rows=1, sequence_length=4000, seed=5, document_mask=False, shuffle=False)
        documents = bytes(token if token < 256 else 0 for token in reader.next_batch().tokens_BS[0].tolist())
        found.append({text.decode() for text in documents.split(b"\0")[:-1]})
    train, held_out = found
    assert not train & held_out
    assert len(train | held_out) == 80
    assert 8 < len(held_out) < 50
