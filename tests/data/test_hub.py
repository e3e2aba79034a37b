"""Datasets of Hugging Face, in folders that `datasets` has written: on disk and streamed."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import huggingface_hub
import pytest

from penstock.base.errors import DataError
from penstock.data import hub
from penstock.data.documents import CorruptRecords
from penstock.data.hub import DatasetName, DatasetOnDisk, StreamedDataset
from penstock.data.mixture import Text, TextPart
from penstock.data.sources import SplitFilter
from penstock.data.tokenizer import ByteTokenizer
from tests.data.in_memory import loader_of

BYTES = ByteTokenizer()
DOCUMENTS = [f"document {number:03}" for number in range(120)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def parquet(folder: Path, texts: list[str | None]) -> None:
    rows = datasets.Dataset.from_dict({"id": list(range(len(texts))), "text": texts})
    folder.mkdir()
    for shard in range(4):
        rows.shard(4, shard).to_parquet(str(folder / f"train-{shard:05}-of-00004.parquet"))
    rows.select(range(10)).to_parquet(str(folder / "validation-00000-of-00001.parquet"))


def lines(folder: Path, texts: list[str | None]) -> None:
    folder.mkdir()
    rows = [json.dumps({"id": number, "text": text}) for number, text in enumerate(texts)]
    for shard in range(4):
        own = slice(shard * len(rows) // 4, (shard + 1) * len(rows) // 4)
        (folder / f"train-{shard}.jsonl").write_text("\n".join(rows[own]))
    (folder / "validation.jsonl").write_text("\n".join(rows[:10]))


def saved(folder: Path, texts: list[str | None]) -> None:
    rows = datasets.Dataset.from_dict({"id": list(range(len(texts))), "text": texts})
    splits = datasets.DatasetDict({"train": rows, "validation": rows.select(range(10))})
    splits.save_to_disk(str(folder), num_shards={"train": 4, "validation": 1})


KINDS = pytest.mark.parametrize("write", [parquet, lines, saved])
Write = Callable[[Path, list[str | None]], None]


def name_of(folder: Path, *, split: str = "train", config: str = "") -> DatasetName:
    return DatasetName(str(folder), config, split, "")


def on_disk(name: DatasetName, **changes: Any) -> DatasetOnDisk:
    settings = {"text_field": "text", "keep": SplitFilter(), "corrupt": CorruptRecords()}
    return DatasetOnDisk(name, BYTES, **(settings | changes))


def streamed(name: DatasetName, **changes: Any) -> StreamedDataset:
    settings = {"text_field": "text", "keep": SplitFilter(), "corrupt": CorruptRecords(), "block": 7}  # documents
    return StreamedDataset(name, BYTES, **(settings | changes))


@KINDS
def test_a_dataset_on_disk_is_read_in_any_order(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "set", list(DOCUMENTS))
    source = on_disk(name_of(tmp_path / "set"))
    assert len(source) == 120
    assert [source.record(index) for index in (119, 0, 60)] == ["document 119", "document 000", "document 060"]
    assert len(on_disk(name_of(tmp_path / "set", split="validation"))) == 10
    assert on_disk(name_of(tmp_path / "set")).fingerprint == source.fingerprint


def test_the_fingerprint_of_a_dataset_follows_its_documents(tmp_path: Path) -> None:
    prints = []
    for number, texts in enumerate([DOCUMENTS, DOCUMENTS[1:], [*DOCUMENTS[:-1], "other"]]):
        saved(tmp_path / f"{number}", list(texts))
        prints.append(on_disk(name_of(tmp_path / f"{number}")).fingerprint)
    assert len(set(prints)) == 3


@KINDS
def test_a_stream_has_every_document_once_an_epoch(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "set", list(DOCUMENTS))
    source = streamed(name_of(tmp_path / "set"))
    assert len(source) == 4
    found = [text for shard in range(4) for block in source.blocks(shard, 0) for text in block]
    assert Counter(found) == Counter(DOCUMENTS)
    for shard in range(4):
        whole = list(source.blocks(shard, 0))
        assert all(len(block) == 7 for block in whole[:-1]), "only the last block is short"
        assert list(source.blocks(shard, 2)) == whole[2:], "going on passes over blocks"


@pytest.mark.parametrize("open_it", [on_disk, streamed])
def test_a_row_without_text_stops_or_is_skipped(tmp_path: Path, open_it: Callable[..., object]) -> None:
    parquet(tmp_path / "set", ["a", None, *DOCUMENTS])
    name = name_of(tmp_path / "set")
    for corrupt in (CorruptRecords("skip"), CorruptRecords("stop")):
        text = Text((TextPart(documents=open_it(name, corrupt=corrupt)),), corrupt)
        loader = loader_of(text, rows=1, sequence_length=40, shuffle=False)
        if corrupt.skips:
            loader.next_batch()
            assert loader.skipped() == 1
            assert "is not text" in loader.take_notices()[0]
            continue
        with pytest.raises(DataError, match=r"dataset .*set, train: .* '?text'? is not text; got NoneType"):
            loader.next_batch()


@pytest.mark.parametrize("open_it", [on_disk, streamed])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "gone"}, "cannot open dataset gone: .*; fix: correct data.dataset"),
        ({"split": "test"}, "cannot open dataset .*set: .*test.*; fix: correct data.dataset"),
        ({"config": "en"}, r"cannot open dataset .*set \(en\): BuilderConfig 'en' not found.*; fix"),
        ({"dataset": "saved", "split": "test"}, "dataset saved has no split test; allowed: train, validation"),
        ({"dataset": "empty"}, "cannot open dataset empty: .*; fix: correct data.dataset"),
    ],
)
def test_a_dataset_that_is_not_there_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    open_it: Callable[..., object],
    change: dict[str, str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    parquet(Path("set"), list(DOCUMENTS))
    saved(Path("saved"), list(DOCUMENTS))
    Path("empty").mkdir()
    with pytest.raises(DataError, match=message) as caught:
        open_it(name_of(tmp_path / "set")._replace(**change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("open_it", [on_disk, streamed])
def test_a_dataset_without_the_column_is_refused(tmp_path: Path, open_it: Callable[..., object]) -> None:
    parquet(tmp_path / "set", list(DOCUMENTS))
    told = r"dataset .*set has no column 'body'; got 'id', 'text'; fix: set data\.text_field to the column"
    with pytest.raises(DataError, match=told):
        open_it(name_of(tmp_path / "set"), text_field="body")


def test_a_hub_that_does_not_answer_is_said_without_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub.socket, "create_connection", Mock(side_effect=OSError("no network")))
    with pytest.raises(DataError, match="the hub cannot be reached, and this machine has no copy"):
        on_disk(name_of(Path("nobody/nothing")))


def test_a_folder_of_weights_is_fetched_by_its_name_without_code_and_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    asked = list[str]()

    def fetch(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        files = ["config.json", "model-00001.safetensors", "tokenizer.model", "consolidated.safetensors", "code.py"]
        files += ["pytorch_model.bin", "original/a.safetensors", "README.md", "tokenizer.json"]
        asked.append(name)
        kept = huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert list(kept) == ["config.json", "model-00001.safetensors", "tokenizer.model", "tokenizer.json"]
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(hub, "_hub_answers", lambda: True)
    assert hub.weights_of(Path("org/name-1.5B")) == tmp_path / "cache"
    for path in ("here", "here/nothing", "nothing", "/org/name", "../name", "a/b/c"):
        assert hub.weights_of(Path(path)) == Path(path)
    assert asked == ["org/name-1.5B"]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (False, r"cannot fetch org/name: .* the hub cannot be reached; got \w.*; fix: give a folder, or try again"),
        (True, r"cannot fetch org/name: .* the hub does not give it; got 404.*; fix: correct ORG/NAME"),
    ],
)
def test_weights_that_cannot_be_fetched_are_one_line(
    answers: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "getproxies", dict)
    if answers:
        monkeypatch.setattr(hub, "_hub_answers", lambda: True)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=OSError("404\nmore")))
    monkeypatch.setattr(hub.socket, "create_connection", Mock(side_effect=OSError("no network")))
    with pytest.raises(DataError, match=message) as caught:
        hub.weights_of(Path("org/name"))
    assert "\n" not in str(caught.value)


def test_a_download_without_the_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"org/name is no folder here, and its download needs .*; fix: pip install"):
        hub.weights_of(Path("org/name"))
