"""sentencepiece's models, which this test trains itself."""

import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import DataError
from penstock.data.tokenizer import open_tokenizer
from penstock.data.tokenizer_files import SentencePieceTokenizer
from tests.data.vocabularies import sentencepiece_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_model(tmp_path_factory.mktemp("model") / "tokenizer.model")


@pytest.fixture(scope="module")
def trained(model: Path) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(model)


def test_the_file_says_which_token_ends_a_document(trained: SentencePieceTokenizer) -> None:
    assert (trained.vocab_size, trained.end_of_document) == (300, 2)
    assert trained.token_id("</s>") == 2
    assert trained.decode(np.array([2, 1])) == ""


def test_another_control_symbol_can_be_named(model: Path) -> None:
    assert SentencePieceTokenizer(model, end_of_document="<s>").end_of_document == 1


def test_a_symbol_that_text_can_spell_does_not_end_documents(model: Path) -> None:
    assert SentencePieceTokenizer(model).token_id("<tool>") in SentencePieceTokenizer(model).encode("a <tool> b")
    with pytest.raises(DataError, match="makes its token <tool> from text that spells it.*; fix: set data.end_of"):
        SentencePieceTokenizer(model, end_of_document="<tool>")


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path / "tokenizer.model", end=False)
    with pytest.raises(DataError, match="no end-of-document token .*; fix: set data.end_of_document"):
        SentencePieceTokenizer(path)
    assert SentencePieceTokenizer(path, end_of_document="<s>").end_of_document == 1


def test_characters_that_were_split_into_bytes_keep_their_bytes_together(trained: SentencePieceTokenizer) -> None:
    sizes = trained.bytes_per_token("the \u4e16")
    assert sizes.sum() == len("the \u4e16".encode())
    assert sizes[-3:].tolist() == [0, 0, 3]


def test_text_that_is_changed_before_it_is_encoded_counts_as_it_was(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model(tmp_path / "t.model", lossless=False))
    text = "  the \uff54own  "
    assert tokenizer.decode(tokenizer.encode(text)) == "the town"
    assert tokenizer.bytes_per_token(text).sum() == len(text.encode())
    assert tokenizer.bytes_of(tokenizer.encode(text)).sum() == len("the town")


@pytest.mark.parametrize("content", [b"", b"no model", b"\n\x0c\n\x05<unk>"])
def test_a_file_that_is_no_model_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is not a tokenizer; allowed: a .model file of sentencepiece") as caught:
        open_tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_half_a_model_is_refused(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model.read_bytes()[:-50])
    with pytest.raises(DataError, match="is not a tokenizer"):
        open_tokenizer(str(path))


def test_pieces_that_are_no_text_are_refused(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model.read_bytes().replace(b"<tool>", b"<to\xffl>"))
    with pytest.raises(DataError, match="is not a tokenizer"):
        open_tokenizer(str(path))


def test_the_library_is_asked_for_where_it_is_missing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        DataError, match=r"needs the package sentencepiece, .*; fix: pip install 'penstock\[sentencepiece\]'"
    ):
        open_tokenizer(str(model))
