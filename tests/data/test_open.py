"""From the settings of a run to a source, and what is refused on the way."""

import json
from pathlib import Path

import pytest

from penstock.base.errors import DataError
from penstock.data.open import SourceName, open_source
from penstock.data.sources import Source, Split


def open_files(
    source: SourceName, split: Split, files: list[str], *, validation_files: tuple[str, ...] = (), share: float = 0.3
) -> Source:
    return open_source(
        source=source,
        split=split,
        vocabulary_size=257,
        seed=0,
        files=files,
        validation_files=validation_files,
        validation_share=share,
    )


def contents(source: Source) -> list[bytes]:
    return [bytes(source.read(index).tolist()) for index in range(len(source))]


@pytest.fixture
def lines(tmp_path: Path) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"document {number}"}) for number in range(40)))
    return str(path)


@pytest.fixture
def plain(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{number}.txt" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_text(f"text {number}")
    return [str(path) for path in paths]


@pytest.mark.parametrize("source", ["standard-library", "synthetic-random", "synthetic-learnable"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_sources_that_need_no_files_open(source: SourceName, split: Split) -> None:
    opened = open_source(source=source, split=split, vocabulary_size=300, seed=0)
    assert len(opened) > 0
    assert opened.read(0).max() < opened.vocabulary_size <= 300


def test_lines_are_split_by_content_whatever_their_order(lines: str) -> None:
    train, validation = (contents(open_files("jsonl", split, [lines])) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(f"document {number}".encode() for number in range(40))
    assert 4 <= len(validation) <= 20
    path = Path(lines)
    path.write_text("\n".join(reversed(path.read_text().split("\n"))))
    assert contents(open_files("jsonl", "validation", [lines])) == validation[::-1]


def test_plain_files_are_split_by_content(plain: list[str]) -> None:
    train, validation = (contents(open_files("text", split, plain)) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(f"text {number}".encode() for number in range(40))
    assert validation


def test_validation_files_of_its_own_leave_all_files_to_training(plain: list[str]) -> None:
    own = tuple(plain[30:])
    assert len(open_files("text", "train", plain[:30], validation_files=own)) == 30
    assert len(open_files("text", "validation", plain[:30], validation_files=own)) == 10


def test_a_file_in_both_splits_is_refused(plain: list[str]) -> None:
    again = plain[0].replace("0.txt", "./0.txt")
    with pytest.raises(DataError, match=r"0\.txt is in data\.files and in data\.validation_files; fix: take it out"):
        open_files("text", "train", plain, validation_files=(again,))


def test_no_files_are_refused() -> None:
    with pytest.raises(DataError, match=r"data\.files is empty; fix: set data\.files"):
        open_files("text", "train", [])


def test_a_split_without_a_document_is_refused(plain: list[str]) -> None:
    with pytest.raises(
        DataError, match=r"the validation split holds no document; got data\.validation_share 0; fix: set"
    ):
        open_files("text", "validation", plain, share=0.0)


def test_ids_outside_the_vocabulary_of_the_model_are_refused() -> None:
    with pytest.raises(
        DataError,
        match=r"data\.tokenizer bytes has token ids outside the model's vocabulary; "
        r"got ids up to 256 and a vocabulary of 256; fix: give the model a vocabulary of 257 or more",
    ):
        open_source(source="standard-library", split="train", vocabulary_size=256, seed=0)


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.source is unknown; got web; allowed: standard-library, text, jsonl"):
        open_source(source="web", split="train", vocabulary_size=257, seed=0)  # type: ignore[arg-type]


def test_a_tokenizer_that_is_not_there_is_refused_before_any_file_is_read(lines: str) -> None:
    with pytest.raises(DataError, match=r"cannot read data\.tokenizer missing\.json"):
        open_source(source="jsonl", split="train", vocabulary_size=257, seed=0, files=[lines], tokenizer="missing.json")
