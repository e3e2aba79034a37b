"""transformers encodes any text as the run did, by the files that an export writes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from penstock.config.data import Data
from penstock.data.open import vocabulary_of
from penstock.data.packed import pack
from penstock.data.text import PlainText
from penstock.data.tokenizer import open_tokenizer
from penstock.data.tokenizer_output import ExportedTokenizer, export_tokenizer
from tests.data.vocabularies import HARD_TEXTS, RANKS, json_file, sentencepiece_model, tiktoken_lines


def _theirs(exported: ExportedTokenizer, folder: Path) -> Any:
    """What transformers makes of the files."""
    transformers = pytest.importorskip("transformers")
    folder.mkdir()
    for name, text in exported.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "deepseek_v3"}')
    return transformers.AutoTokenizer.from_pretrained(folder)


def _same(data: Data, texts: tuple[str, ...], folder: Path) -> None:
    ours, exported = vocabulary_of(data), export_tokenizer(data, 128)
    theirs = _theirs(exported, folder)
    assert exported.why_not == ""
    assert theirs.eos_token_id == exported.end_of_document == ours.end_of_document
    assert theirs.model_max_length == 128
    for text in texts:
        ids = ours.tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ids.tolist(), text
        assert theirs.decode(ids.tolist(), skip_special_tokens=True) == ours.tokenizer.decode(np.asarray(ids)), text


def test_bytes_have_the_same_ids_in_every_text(tmp_path: Path) -> None:
    _same(Data(), HARD_TEXTS, tmp_path / "out")


def test_a_tokenizer_json_has_the_same_ids_unless_a_text_spells_a_special_token(tmp_path: Path) -> None:
    path = json_file(tmp_path / "tokenizer.json")
    plain = tuple(text for text in HARD_TEXTS if "<|endoftext|>" not in text)
    _same(Data(tokenizer=str(path)), plain, tmp_path / "out")


def test_tokens_that_training_did_not_add_are_not_added(tmp_path: Path) -> None:
    path = json_file(tmp_path / "tokenizer.json", special=("<s>", "</s>"))
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    _same(Data(tokenizer=str(tmp_path)), ("the turbine", "a\n b"), tmp_path / "out")


def test_packed_tokens_lead_to_the_tokenizer_that_packed_them(tmp_path: Path) -> None:
    path = json_file(tmp_path / "tokenizer.json")
    (tmp_path / "text.txt").write_text("the penstock feeds the turbine")
    texts = PlainText([tmp_path / "text.txt"], open_tokenizer(str(path)))
    pack(texts, tmp_path / "packed", tokenizer=str(path))
    data = Data(source="packed", files=(str(tmp_path / "packed"),))
    assert export_tokenizer(data, 8).files == export_tokenizer(Data(tokenizer=str(path)), 8).files


def test_a_tokenizer_that_is_not_exported_says_why(tmp_path: Path) -> None:
    pieces = sentencepiece_model(tmp_path / "tokenizer.model")
    (tmp_path / "own.tiktoken").write_text(tiktoken_lines(RANKS))
    settings = {
        str(pieces): f"transformers would give other ids for some texts; encode with {pieces} itself",
        f"{tmp_path}/own.tiktoken:cl100k": "transformers would give other ids for some texts; encode with",
        str(tmp_path / "gone.json"): "cannot read data.tokenizer",
    }
    for setting, why in settings.items():
        exported = export_tokenizer(Data(tokenizer=setting), 8)
        assert (exported.files, exported.why_not.startswith(why)) == ({}, True), exported.why_not
    assert export_tokenizer(Data(tokenizer=str(pieces)), 8).end_of_document == 2
    assert "stand for no text" in export_tokenizer(Data(source="synthetic-random"), 8).why_not
