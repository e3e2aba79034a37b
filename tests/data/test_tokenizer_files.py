"""Tokenizers in files: Hugging Face's and sentencepiece's."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.base.errors import DataError
from penstock.data.tokenizer import open_tokenizer
from penstock.data.tokenizer_files import FileTokenizer, SentencePieceTokenizer
from penstock.data.tokenizer_rules import END_OF_DOCUMENT_NAMES
from tests.data.vocabularies import json_file, sentencepiece_model


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
    with pytest.raises(DataError, match="are unknown: their text is not encoded as these tokens; got another token"):
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_model(tmp_path_factory.mktemp("model") / "tokenizer.model")


@pytest.fixture(scope="module")
def pieces(model: Path) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(model)


def test_the_file_says_which_token_ends_a_document(pieces: SentencePieceTokenizer) -> None:
    assert (pieces.vocab_size, pieces.end_of_document) == (300, 2)
    assert pieces.token_id("</s>") == 2
    assert pieces.decode(np.array([2, 1])) == ""


def test_a_symbol_that_text_can_spell_does_not_end_documents(model: Path) -> None:
    assert SentencePieceTokenizer(model).token_id("<tool>") in SentencePieceTokenizer(model).encode("a <tool> b")
    with pytest.raises(DataError, match="encodes text as its token <tool>.*; fix: set data.end_of"):
        SentencePieceTokenizer(model, end_of_document="<tool>")


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path / "tokenizer.model", end=False)
    with pytest.raises(DataError, match="no end-of-document token .*; fix: set data.end_of_document"):
        SentencePieceTokenizer(path)
    assert SentencePieceTokenizer(path, end_of_document="<s>").end_of_document == 1


def test_characters_that_were_split_into_bytes_keep_their_bytes_together(pieces: SentencePieceTokenizer) -> None:
    sizes = pieces.bytes_per_token("the \u4e16")
    assert sizes.sum() == len("the \u4e16".encode())
    assert sizes[-3:].tolist() == [0, 0, 3]


def test_text_that_is_changed_before_it_is_encoded_counts_as_it_was(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model(tmp_path / "t.model", lossless=False))
    text = "  the \uff54own  "
    assert tokenizer.decode(tokenizer.encode(text)) == "the town"
    assert tokenizer.bytes_per_token(text).sum() == len(text.encode())
    assert tokenizer.bytes_of(tokenizer.encode(text)).sum() == len("the town")


def test_a_file_that_is_no_sentencepiece_model_is_refused_in_one_line(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "tokenizer.model"
    whole = model.read_bytes()
    damaged = whole[:-50], whole.replace(b"<tool>", b"<to\xffl>")
    for content in (b"", b"no model", b"\n\x0c\n\x05<unk>", *damaged):
        path.write_bytes(content)
        with pytest.raises(DataError, match="is not a tokenizer; allowed: a .model file of sentencepiece") as caught:
            open_tokenizer(str(path))
        assert "\n" not in str(caught.value)


def test_the_library_is_asked_for_where_it_is_missing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        DataError, match=r"needs the package sentencepiece, .*; fix: pip install 'penstock\[sentencepiece\]'"
    ):
        open_tokenizer(str(model))
