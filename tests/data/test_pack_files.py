"""Packing texts: the same files for any number of processes, corrupt texts by name, nothing half-written."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import DataError
from penstock.data import packed as packed_data
from penstock.data.indexed_dataset import IndexedDataset
from penstock.data.packed import PackProgress, PackResult, open_packed, pack
from penstock.data.sources import RecordError, SplitFilter
from penstock.data.tokenizer import open_tokenizer
from tests.data.vocabularies import HARD_TEXTS, json_file, tiktoken_file

TEXTS = [*HARD_TEXTS, *(f"document {number} " * (number % 7) for number in range(60))]


@dataclass(frozen=True)
class InMemory:
    """Texts in a list; None stands for one that cannot be read."""

    texts: tuple[str | None, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def record(self, index: int) -> str:
        text = self.texts[index]
        if text is None:
            raise RecordError(f"corpus.jsonl:{index + 1} is not JSON")
        return text


def packed(folder: Path, *texts: str | None, **settings: object) -> PackResult:
    return pack(InMemory(texts), folder / "a", **{"tokenizer": "bytes", **settings})


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_data, "BATCH_CHARACTERS", 100)


def test_what_was_packed_is_what_the_tokenizer_gives(tmp_path: Path) -> None:
    tokenizer = str(json_file(tmp_path / "tokenizer.json"))
    done = packed(tmp_path, *TEXTS, tokenizer=tokenizer)
    source = open_packed([tmp_path / "a"], keep=SplitFilter(), vocab_size=500)
    encode = open_tokenizer(tokenizer).encode
    wanted = [encode(text).tolist() for text in TEXTS if text]
    assert [source.read(number).tolist() for number in range(len(source))] == wanted
    assert [source.bytes_per_token(number).sum() for number in range(len(source))] == [
        len(text.encode()) for text in TEXTS if text
    ]
    origin = IndexedDataset(tmp_path / "a").origin()
    assert origin == done.origin
    assert (origin.documents, done.empty) == (len(wanted), TEXTS.count(""))
    assert origin.tokens == sum(map(len, wanted)) + len(wanted)
    assert origin.text_bytes == sum(len(text.encode()) for text in TEXTS)


def test_a_token_that_was_named_to_end_documents_need_not_be_named_again(tmp_path: Path) -> None:
    tokenizer = str(json_file(tmp_path / "tokenizer.json", special=["<|endoftext|>", "<stop>"]))
    packed(tmp_path, "the town", tokenizer=tokenizer, end_of_document="<stop>")
    for settings in ({}, {"tokenizer": tokenizer}, {"tokenizer": tokenizer, "end_of_document": "<stop>"}):
        source = open_packed([tmp_path / "a"], keep=SplitFilter(), vocab_size=500, **settings)
        assert (source.end_of_document, source.bytes_per_token(0).sum()) == (1, len("the town"))
    with pytest.raises(DataError, match="packed with another tokenizer, or another end of a document"):
        open_packed(
            [tmp_path / "a"],
            keep=SplitFilter(),
            vocab_size=500,
            tokenizer=tokenizer,
            end_of_document="<|endoftext|>",
        )


@pytest.mark.usefixtures("small_batches")
def test_the_files_are_the_same_for_any_number_of_processes(tmp_path: Path) -> None:
    tokenizer = str(json_file(tmp_path / "tokenizer.json"))
    texts = [*TEXTS[:9], None, *TEXTS[9:], None]
    for processes in (1, 3):
        packed(tmp_path / f"{processes}", *texts, tokenizer=tokenizer, processes=processes, skip_corrupt=True)
    for suffix in (".bin", ".idx", ".packed.json"):
        assert (tmp_path / f"1/a{suffix}").read_bytes() == (tmp_path / f"3/a{suffix}").read_bytes()


@pytest.mark.usefixtures("small_batches")
def test_progress_adds_up(tmp_path: Path) -> None:
    reports: list[PackProgress] = []
    done = packed(tmp_path, *TEXTS, report=reports.append)
    assert len(reports) > 3
    assert np.sum(reports, axis=0).tolist() == [len(TEXTS), done.origin.tokens, done.origin.text_bytes]


def test_a_corrupt_text_stops_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus\.jsonl:2 is not JSON"):
        packed(tmp_path, "a", None, "b")
    assert list(tmp_path.iterdir()) == []


def test_corrupt_texts_are_left_out_and_named(tmp_path: Path) -> None:
    done = packed(tmp_path, "a", None, "b", None, skip_corrupt=True)
    assert done.origin.left_out == ("corpus.jsonl:2 is not JSON", "corpus.jsonl:4 is not JSON")
    assert (done.origin.documents, done.empty) == (2, 0)


def test_a_text_that_cannot_be_encoded_is_corrupt(tmp_path: Path) -> None:
    tokenizer = f"{tiktoken_file(tmp_path / 'r.tiktoken')}:llama3"
    texts = ["a", None, " " * 2_000_000 + "a", "b"]
    done = packed(tmp_path, *texts, tokenizer=tokenizer, skip_corrupt=True)
    assert [fault.split(":")[0] for fault in done.origin.left_out] == ["corpus.jsonl", "document 2"]
    with pytest.raises(DataError, match="document 1: tiktoken cannot split a text"):
        packed(tmp_path / "b", texts[0], texts[2], tokenizer=tokenizer)


@pytest.mark.parametrize("texts", [(), ("", ""), (None,)])
def test_nothing_to_pack_is_an_error(tmp_path: Path, texts: tuple[str | None, ...]) -> None:
    with pytest.raises(DataError, match=r"there is nothing to pack; got \d empty and \d corrupt documents"):
        packed(tmp_path, *texts, skip_corrupt=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("processes", [1, 2])
def test_an_interruption_leaves_nothing_and_no_process(tmp_path: Path, processes: int) -> None:
    def interrupt(done: PackProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(tmp_path, *TEXTS, processes=processes, report=interrupt)
    assert list(tmp_path.iterdir()) == []
