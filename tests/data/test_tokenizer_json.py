"""Hugging Face's tokenizer files."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.base.errors import DataError
from penstock.data.tokenizer import open_tokenizer
from penstock.data.tokenizer_files import FileTokenizer
from penstock.data.tokenizer_rules import END_OF_DOCUMENT_NAMES
from tests.data.vocabularies import json_file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return FileTokenizer(json_file(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


def test_each_token_has_its_own_bytes(trained: FileTokenizer) -> None:
    text = "the \u00e9\U0001f600 turbine"
    tokens = trained.encode(text)
    spelled = [trained.decode(tokens[place : place + 1]) for place in range(len(tokens))]
    for piece, size in zip(spelled, trained.bytes_per_token(text).tolist(), strict=True):
        if "\ufffd" not in piece:
            assert size == len(piece.encode()), f"{piece!r} was given {size} bytes"


def test_what_a_tokenizer_strips_still_counts_as_text(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(json_file(tmp_path / "tokenizer.json", strip=True))
    assert tokenizer.bytes_per_token("  the town  ").sum() == len("  the town  ")
    assert tokenizer.bytes_per_token("   ").tolist() == []


def test_a_truncation_in_the_file_does_not_cut_documents(trained: FileTokenizer) -> None:
    assert len(trained.encode("turbine " * 100)) >= 100


def test_the_vocabulary_reaches_past_the_largest_id(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"turbine": 0, "</s>": 7}, unk_token="turbine")).save(str(path))
    tokenizer = FileTokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (8, 7)


@pytest.mark.parametrize("name", END_OF_DOCUMENT_NAMES)
def test_the_usual_end_tokens_are_found(tmp_path: Path, name: str) -> None:
    assert FileTokenizer(json_file(tmp_path / "tokenizer.json", special=[name])).end_of_document == 0


def test_the_end_token_can_be_named(tmp_path: Path) -> None:
    path = json_file(tmp_path / "tokenizer.json", special=["<stop>"])
    assert open_tokenizer(str(path), "<stop>").end_of_document == 0
    with pytest.raises(
        DataError, match=r"no end-of-document token \(looked for '<\|endoftext\|>', '</s>'.*; fix: set data"
    ):
        open_tokenizer(str(path), "")
    with pytest.raises(DataError, match=r"no end-of-document token \(looked for '<end>'\)"):
        open_tokenizer(str(path), "<end>")


def test_a_token_that_was_added_by_hand_has_the_bytes_of_its_text(tmp_path: Path) -> None:
    path = json_file(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["\u4e16\u754c"])
    tokenizer.save(str(path))
    opened = FileTokenizer(path)
    tokens = opened.encode("the \u4e16\u754c")
    assert opened.bytes_of(tokens).tolist() == opened.bytes_per_token("the \u4e16\u754c").tolist()


def test_a_vocabulary_of_words_tells_bytes_by_encoding_again(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "town": 1, "</s>": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(path))
    with pytest.raises(DataError, match="cannot be told: their text is not encoded as these tokens; got another token"):
        FileTokenizer(path).bytes_of(FileTokenizer(path).encode("the unknown"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", r"is not a tokenizer: it is not JSON \(Expecting value"),
        (b"\xff\xfe", "is not a tokenizer: it is not JSON .*utf-8"),
        (b"", "is not a tokenizer: it is not JSON"),
        (b"[" * 100_000, "is not a tokenizer: it is not JSON"),
        (json.dumps({"model": "x"}).encode(), r"tokenizer\.json is not a tokenizer: .*; allowed: a tokenizer\.json"),
        (b"[]", "is not a tokenizer"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        open_tokenizer(str(path))
    assert "\n" not in str(caught.value)
