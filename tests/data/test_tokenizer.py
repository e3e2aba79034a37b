"""Bytes, and a tokenizer file that the test trains itself."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from penstock.base.errors import DataError
from penstock.data.tokenizer import END_OF_DOCUMENT_NAMES, ByteTokenizer, FileTokenizer, open_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def train(path: Path, *, special: str = "<|endoftext|>", strip: bool = False) -> Path:
    tokenizer = Tokenizer(models.BPE())
    if strip:
        tokenizer.normalizer = normalizers.Strip()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=[special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the penstock feeds the turbine, the turbine feeds the town"] * 4, trainer)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return FileTokenizer(train(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


@given(TEXTS)
def test_bytes_go_there_and_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(np.append(tokens, tokenizer.end_of_document)) == text
    assert tokenizer.bytes_per_token(text).sum() == len(text.encode())


@given(text=TEXTS)
def test_a_tokenizer_file_goes_there_and_back(trained: FileTokenizer, text: str) -> None:
    tokens = trained.encode(text)
    assert tokens.dtype == np.int64
    assert trained.decode(tokens) == text


@given(text=TEXTS)
def test_the_bytes_of_tokens_sum_to_the_text(trained: FileTokenizer, text: str) -> None:
    text_bytes = trained.bytes_per_token(text)
    assert len(text_bytes) == len(trained.encode(text))
    assert text_bytes.sum() == len(text.encode())
    assert (text_bytes >= 0).all()


def test_each_token_has_its_own_bytes(trained: FileTokenizer) -> None:
    text = "the \u00e9\U0001f600 turbine"
    tokens = trained.encode(text)
    spelled = [trained.decode(tokens[place : place + 1]) for place in range(len(tokens))]
    for piece, size in zip(spelled, trained.bytes_per_token(text).tolist(), strict=True):
        if "\ufffd" not in piece:
            assert size == len(piece.encode()), f"{piece!r} was given {size} bytes"


def test_what_a_tokenizer_strips_still_counts_as_text(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(train(tmp_path / "tokenizer.json", strip=True))
    assert tokenizer.bytes_per_token("  the town  ").sum() == len("  the town  ")
    assert tokenizer.bytes_per_token("   ").tolist() == []


def test_text_that_spells_a_special_token_is_text(trained: FileTokenizer) -> None:
    tokens = trained.encode("a <|endoftext|> b")
    assert trained.end_of_document not in tokens
    assert trained.decode(tokens) == "a <|endoftext|> b"


def test_a_truncation_in_the_file_does_not_cut_documents(trained: FileTokenizer) -> None:
    assert len(trained.encode("turbine " * 100)) >= 100


def test_other_threads_go_on_while_a_long_text_is_encoded(trained: FileTokenizer) -> None:
    text = "the loss of a step falls, and the next one is the same\n" * 20_000
    encoding = threading.Thread(target=trained.encode, args=(text,))
    encoding.start()
    turns = 0
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20, "whoever feeds a GPU waits for the thread that encodes"


def test_the_vocabulary_reaches_past_the_largest_id(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"turbine": 0, "</s>": 7}, unk_token="turbine")).save(str(path))
    tokenizer = FileTokenizer(path)
    assert (tokenizer.vocabulary_size, tokenizer.end_of_document) == (8, 7)


@pytest.mark.parametrize("name", END_OF_DOCUMENT_NAMES)
def test_the_usual_end_tokens_are_found(tmp_path: Path, name: str) -> None:
    assert FileTokenizer(train(tmp_path / "tokenizer.json", special=name)).end_of_document == 0


def test_the_end_token_can_be_named(tmp_path: Path) -> None:
    path = train(tmp_path / "tokenizer.json", special="<stop>")
    assert open_tokenizer(str(path), "<stop>").end_of_document == 0
    with pytest.raises(
        DataError, match=r"no end-of-document token \(looked for '<\|endoftext\|>', '</s>'.*; fix: set data"
    ):
        open_tokenizer(str(path), "")
    with pytest.raises(DataError, match=r"no end-of-document token \(looked for '<end>'\)"):
        open_tokenizer(str(path), "<end>")


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path, trained: FileTokenizer) -> None:
    other = FileTokenizer(train(tmp_path / "tokenizer.json", strip=True))
    assert len({other.fingerprint, trained.fingerprint, ByteTokenizer().fingerprint}) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", r"is not a tokenizer: it is not JSON \(Expecting value"),
        (b"\xff\xfe", "is not a tokenizer: it is not JSON .*utf-8"),
        (b"", "is not a tokenizer: it is not JSON"),
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


def test_a_missing_tokenizer_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"cannot read data\.tokenizer .*none\.json: No such file or directory; fix: give"
    ):
        open_tokenizer(str(tmp_path / "none.json"))
    with pytest.raises(DataError, match=r"Is a directory"):
        open_tokenizer(str(tmp_path))
