"""The shown content of a batch is the input of training, for every step."""

import json
from pathlib import Path

import pytest

from penstock.config.run import Data, Evaluation, MixturePart, Run
from penstock.data.loader import Loader
from penstock.train import batch_contents
from penstock.train.batch_contents import BatchContents, held_out_contents, tokenizer_of, training_contents
from penstock.train.loop import open_store
from penstock.train.setup import open_split
from tests.train.test_loop import start
from tests.train.tiny_run import TRAINING, tiny_model, tiny_run


def text_run(folder: Path, **data: object) -> Run:
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name} {number} " * (number % 5)}) for number in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    settings = {"source": "jsonl", "files": (f"{folder}/a.jsonl",), **data}
    return tiny_run(folder, model=tiny_model(vocab_size=257), data=Data(**settings))


def ids_of(contents: BatchContents) -> list[list[int]]:
    return [[token for piece in row.pieces for token in piece.ids] for row in contents.rows]


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("step", [1, 3])
def test_rows_are_those_of_training(tmp_path: Path, step: int, mask: bool) -> None:
    run = text_run(tmp_path, document_mask=mask)
    text = open_split(run, "train")
    loader = Loader(text, rows=4, sequence_length=12, seed=run.seed, document_mask=mask)
    for _ in range(step):
        batch = loader.next_batch()
    contents = training_contents(run, text, step)
    assert ids_of(contents) == batch.tokens_BS.tolist()
    assert contents.summary()["ignored_share"] == (batch.labels_BS == -100).float().mean()
    assert contents.summary()["padding_share"] == 0
    assert contents.rows[0].pieces[0].text.startswith("a ")


def test_a_run_is_looked_into_from_its_newest_checkpoint_before_the_step(tmp_path: Path) -> None:
    run = text_run(tmp_path)
    _, folder = start(run)
    store = open_store(run, folder)
    assert store.steps() == [2, 4]
    text = open_split(run, "train")
    for step in (2, 3, 4, 6):
        assert training_contents(run, text, step, store) == training_contents(run, text, step)


def test_of_a_mixture_the_part_of_each_row_is_known(tmp_path: Path) -> None:
    parts = {
        name: MixturePart(source="jsonl", files=(f"{tmp_path}/{name}.jsonl",), weight=weight)
        for name, weight in (("a", 3.0), ("b", 1.0))
    }
    run = text_run(tmp_path, source="standard-library", files=(), mixture=parts)
    contents = training_contents(run, open_split(run, "train"), 2)
    assert contents.summary()["parts"] == {"a": {"weight": 3.0, "share": 0.75}, "b": {"weight": 1.0, "share": 0.25}}
    for row, part in zip(contents.rows, contents.parts, strict=True):
        text = "".join(piece.text for piece in row.pieces)
        assert {"a", "b"} & set(text) == {part}


def test_held_out_rows_are_those_of_the_evaluation(tmp_path: Path) -> None:
    run = text_run(tmp_path, validation_share=0.3).model_copy(update={"evaluation": Evaluation(rows=500)})
    contents = held_out_contents(run, open_split(run, "validation"))
    assert len(contents.rows) == contents.batch_rows > 1
    assert 0 < contents.summary()["padding_share"] < 1
    assert contents.summary()["bytes_per_token"] == pytest.approx(1, abs=0.2)


def test_corrupt_records_on_the_way_are_told(tmp_path: Path) -> None:
    run = text_run(tmp_path, corrupt="skip", shuffle=False)
    path = tmp_path / "a.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[1], "{}", *lines]))
    contents = training_contents(run, open_split(run, "train"), 1)
    assert contents.skipped == 1
    assert "a.jsonl:2 has no field 'text'" in contents.notices[0]


def test_of_a_huge_batch_the_first_rows_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = text_run(tmp_path).model_copy(update={"training": TRAINING.model_copy(update={"global_batch": 8})})
    text = open_split(run, "train")
    whole = training_contents(run, text, 2)
    monkeypatch.setattr(batch_contents, "MOST_ROWS", 3)
    some = training_contents(run, text, 2)
    assert (some.rows, some.batch_rows) == (whole.rows[:3], 8)


def test_the_tokenizer_is_that_of_the_run_and_tokens_without_one_have_no_text(tmp_path: Path) -> None:
    run = text_run(tmp_path)
    tokenizer = tokenizer_of(run, open_split(run, "train"))
    assert tokenizer is not None and tokenizer.vocab_size == 257
    contents = training_contents(tiny_run(tmp_path), open_split(tiny_run(tmp_path), "train"), 1)
    assert contents.summary()["bytes_per_token"] is None
    assert {piece.text for row in contents.rows for piece in row.pieces} == {None}
