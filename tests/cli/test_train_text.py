"""`penstock train` on text of every source: what it trains on, what it skips, and what it refuses with one line."""

import gzip
import json
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.config.load import dump_toml
from penstock.config.run import Data
from penstock.data.sources import SplitFilter
from tests.cli import answers
from tests.cli.test_train import metrics_of
from tests.train.tiny_run import tiny_run

MIXTURE = """
[data]
validation_share = 0.2
[data.mixture.web]
source = "jsonl"
files = "web/"
weight = 2.0

[data.mixture.code]
source = "parquet"
files = "code.parquet"
text_field = "content"
weight = 1.0
"""


@pytest.fixture(autouse=True)
def corpus(in_a_folder_of_its_own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with text of every kind, whole and damaged, and a small run in tiny.toml."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path.parent / f"{tmp_path.name}-hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # it was read before this test
    texts = [f"document {number} of a corpus " * 4 for number in range(60)]
    lines = [json.dumps({"text": text}) for text in texts]
    Path("web").mkdir()
    Path("web/a.jsonl").write_text("\n".join(lines[:30]))
    Path("web/b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[30:]).encode()))
    pq.write_table(pa.table({"content": texts}), "code.parquet", row_group_size=8)  # several row groups
    bad = next(f"no json {number}" for number in range(99) if SplitFilter("train", 0.2).document(f"no json {number}"))
    Path("bad.jsonl").write_text("\n".join([*lines[:4], bad, *lines[4:]]))
    Path("latin.jsonl").write_bytes(b"\n".join([*(line.encode() for line in lines), b'{"text": "caf\xe9"}']))
    Path("junk.parquet").write_bytes(b"no table")
    Path("cut.jsonl.gz").write_bytes(Path("web/b.jsonl.gz").read_bytes()[:-20])  # without its end
    Path("junk.bin").write_bytes(b"no pair")
    Path("junk.idx").write_bytes(b"no pair")
    Path("nothing").mkdir()
    run = tiny_run(Path("runs"))
    update = {"model": run.model.model_copy(update={"vocab_size": 257}), "data": Data(validation_share=0.2)}  # bytes
    Path("tiny.toml").write_text(dump_toml(run.model_copy(update=update)))
    text = Path("tiny.toml").read_text()
    start = text.index("[data]")
    Path("mixed.toml").write_text(text[:start] + text[text.index("[evaluation]") :] + MIXTURE)


printed = partial(answers.printed, "train")
refused = partial(answers.refused, "train", starts=True)


def everything() -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in Path().rglob("*")}


REFUSED = [
    (["data.source=jsonl", "data.files=latin.jsonl"], "latin.jsonl:61 is not UTF-8"),
    (["data.source=jsonl", "data.files=cut.jsonl.gz"], "data file cut.jsonl.gz cannot be decompressed"),
    (["data.source=parquet", "data.files=junk.parquet"], "data file junk.parquet is not a table"),
    (["data.source=packed", "data.files=junk"], "junk.idx"),
    (["data.source=huggingface", "data.dataset=gone"], "cannot open dataset gone"),
    (["data.source=huggingface", "data.dataset=nothing", "data.streaming=true"], "cannot open dataset nothing"),
    (["data.source=huggingface"], "data.dataset is empty"),
    (["data.fill_in_middle=0.5"], "data.fill_in_middle needs tokens before prefix, suffix and middle"),
    (["data.mixture.a.source=text", "data.mixture.a.files=gone.txt"], "data.mixture.a.weight is missing"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_read_is_refused_with_one_line_and_leaves_nothing_behind(
    overrides: list[str], message: str
) -> None:
    before = everything()
    assert message in refused("tiny.toml", *overrides)
    assert everything() == before


def test_a_mixture_trains_and_goes_on_to_the_same_losses() -> None:
    plan = printed("mixed.toml", "--dry-run")
    assert "documents of web, 60 documents of code" in plan
    printed("mixed.toml", "--name", "whole", "training.steps=6")
    printed("mixed.toml", "--name", "parts", "training.steps=6", "checkpoint.every=1")
    for newer in sorted(Path("runs/parts/checkpoints").iterdir())[3:]:  # as if it was killed after the third
        for file in newer.iterdir():
            file.unlink()
        newer.rmdir()
    printed("mixed.toml", "--name", "parts", "--resume", "training.steps=6", "checkpoint.every=1")
    assert [line["loss"] for line in metrics_of("runs/parts")] == [line["loss"] for line in metrics_of("runs/whole")]


def test_compressed_files_are_read_from_copies_beside_the_runs() -> None:
    printed("mixed.toml")
    (copy,) = Path("runs/cache").iterdir()
    assert copy.read_bytes() == gzip.decompress(Path("web/b.jsonl.gz").read_bytes())
    printed("mixed.toml", "data.cache=elsewhere")
    assert len(list(Path("elsewhere").iterdir())) == 1


@pytest.mark.slow
def test_skipped_records_are_named_and_counted() -> None:
    own = ("data.source=jsonl", "data.files=bad.jsonl", "training.sequence_length=100", "training.steps=20")
    text = printed("tiny.toml", *own, "data.corrupt=skip")
    assert "data: skipped a record: bad.jsonl:5 is not JSON" in text
    counts = [line["records_skipped"] for line in metrics_of("runs/tiny")]
    assert counts == sorted(counts)
    assert counts[-1] >= 1
    error = refused("tiny.toml", *own, "--name", "stopped")
    assert "bad.jsonl:5 is not JSON" in error
    resumed = printed("tiny.toml", *own, "--name", "stopped", "--resume", "data.corrupt=skip")
    assert "done: 20 steps" in resumed
    assert [line["loss"] for line in metrics_of("runs/stopped")] == [line["loss"] for line in metrics_of("runs/tiny")]


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_a_dataset_trains(streaming: str) -> None:
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"text": [f"document {number} of a dataset" for number in range(60)]})
    rows.save_to_disk("set", num_shards=3)
    own = ("data.source=huggingface", "data.dataset=set", f"data.streaming={streaming}")
    assert "done: 4 steps" in printed("tiny.toml", *own)
