"""Tokenizers in files: Hugging Face's and sentencepiece's."""

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken_ext import openai_public
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from penstock.base.errors import DataError
from penstock.data import tokenizer_tiktoken
from penstock.data.sources import RecordError
from penstock.data.tokenizer import FileTokenizer, SentencePieceTokenizer, open_tokenizer
from penstock.data.tokenizer_rules import END_OF_DOCUMENT_NAMES
from penstock.data.tokenizer_tiktoken import PATTERNS, TiktokenTokenizer
from tests.data.vocabularies import HARD_TEXTS, RANKS, json_file, sentencepiece_model, tiktoken_file, tiktoken_lines


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
    looked_for = r"\(looked for '<\|endoftext\|>', '</s>'.*; fix: set data"
    with pytest.raises(DataError, match=f"no end-of-document token {looked_for}"):
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
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_tokenizer(str(path))


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
    assert sizes[-3:].tolist() == [0, 0, 3]  # the last token of the character has its three bytes


def test_text_that_is_changed_before_it_is_encoded_counts_as_it_was(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model(tmp_path / "t.model", lossless=False))
    text = "  the \uff54own  "
    assert tokenizer.decode(tokenizer.encode(text)) == "the town"
    assert tokenizer.bytes_per_token(text).sum() == len(text.encode())
    assert tokenizer.bytes_of(tokenizer.encode(text)).sum() == len("the town")


def test_a_file_that_is_no_sentencepiece_model_is_refused(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "tokenizer.model"
    whole = model.read_bytes()
    damaged = whole[:-50], whole.replace(b"<tool>", b"<to\xffl>")
    for content in (b"", b"no model", b"\n\x0c\n\x05<unk>", *damaged):
        path.write_bytes(content)
        with pytest.raises(DataError, match="is not a tokenizer; allowed: a .model file of sentencepiece"):
            open_tokenizer(str(path))


OWN = {"pattern": r"\p{L}+|\P{L}", "special_tokens": {"<|endoftext|>": 300, "<|fim_prefix|>": 299}}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiktoken_file(tmp_path_factory.mktemp("ranks") / "ranks.tiktoken")


@pytest.mark.parametrize(
    ("name", "published"), [("gpt2", "r50k_base"), ("cl100k", "cl100k_base"), ("o200k", "o200k_base")]
)
def test_patterns_and_hashes_are_the_published_ones(name: str, published: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"gpt2": 50256, "cl100k": 100256, "o200k": 199998}  # ranks of the published files
    asked = {}
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda url, expected_hash: asked.update(hash=expected_hash))
    theirs = openai_public.ENCODING_CONSTRUCTORS[published]()
    ours = PATTERNS[name]
    assert ours.pattern == theirs["pat_str"]
    assert ours.published == asked["hash"]
    assert {token: sizes[name] + place for token, place in ours.special_tokens.items()} == theirs["special_tokens"]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(HARD_TEXTS))
def test_llama_3_cuts_as_cl100k_does(text: str) -> None:
    text = text.encode(errors="replace").decode()
    by_name = {
        name: tiktoken.Encoding(name, pat_str=PATTERNS[name].pattern, mergeable_ranks=RANKS, special_tokens={})
        for name in ("llama3", "cl100k")
    }
    assert by_name["llama3"].encode_ordinary(text) == by_name["cl100k"].encode_ordinary(text)


def test_a_pattern_is_named_behind_the_path(ranks: Path) -> None:
    tokenizer = open_tokenizer(f"{ranks}:llama3")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (len(RANKS) + 256, len(RANKS) + 1)
    assert open_tokenizer(f"{ranks}:llama3", "<|eot_id|>").end_of_document == len(RANKS) + 9


def test_patterns_cut_differently(ranks: Path) -> None:
    tokens = {name: open_tokenizer(f"{ranks}:{name}").encode("1212  the").tolist() for name in ("gpt2", "cl100k")}
    assert tokens["gpt2"] != tokens["cl100k"]


def test_a_json_file_beside_it_describes_a_vocabulary(tmp_path: Path) -> None:
    path = tiktoken_file(tmp_path / "own.tiktoken")
    beside = tmp_path / "own.tiktoken.json"
    beside.write_text(json.dumps(OWN))
    tokenizer = open_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (301, 300)
    assert tokenizer.token_id("<|fim_prefix|>") == 299
    assert tokenizer.decode(np.array([104, 270, 300, 299, 105])) == "hi", "ids without a token are no text"
    beside.write_text(json.dumps({"pattern": "cl100k"}))
    assert open_tokenizer(str(path)).fingerprint == open_tokenizer(f"{path}:cl100k").fingerprint


def test_a_llama_3_model_is_told_from_sentencepiece_by_its_content(tmp_path: Path) -> None:
    path = tiktoken_file(tmp_path / "tokenizer.model")
    with pytest.raises(DataError, match="has no split pattern and is no published file; fix: name a pattern"):
        open_tokenizer(str(path))
    (tmp_path / "tokenizer.model.json").write_text('{"pattern": "llama3"}')
    assert open_tokenizer(str(tmp_path)).end_of_document == len(RANKS) + 1


def test_a_published_file_is_known_by_its_hash(ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = Mock(hexdigest=lambda: PATTERNS["o200k"].published)
    monkeypatch.setattr(tokenizer_tiktoken, "sha256", lambda content: published)
    assert TiktokenTokenizer(ranks).fingerprint == TiktokenTokenizer(ranks, pattern="o200k").fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is damaged; got no rank for byte 0"),
        ("IQ== 0\n!! 1\n", r":2 is not a rank; got b'!! 1'; allowed: base64, a space, a number"),
        ("IQ== 0 0\n", ":1 is not a rank"),
        ("IQ== first\n", ":1 is not a rank"),
        ("IQ== 0\n", "is damaged; got no rank for byte 0; allowed: a rank for each of the 256 bytes"),
        (tiktoken_lines(RANKS).replace(" 255\n", " 254\n"), "is damaged; got a rank twice"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "own.tiktoken"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        open_tokenizer(f"{path}:cl100k")


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ("{", "own.tiktoken.json does not describe a tokenizer"),
        ("[]", "own.tiktoken.json does not describe a tokenizer"),
        ("{}", "own.tiktoken.json does not describe a tokenizer: KeyError"),
        (json.dumps({**OWN, "special_tokens": []}), "own.tiktoken.json does not describe a tokenizer"),
        (json.dumps({**OWN, "special_tokens": {}}), "has no special tokens, so nothing can end a document"),
        (json.dumps({**OWN, "special_tokens": {"<|endoftext|>": 7}}), "do not go with its ranks; got id 7 for two"),
        (json.dumps({**OWN, "special_tokens": {"a": 270, "b": 270}}), "do not go with its ranks; got an id twice"),
        (json.dumps({**OWN, "special_tokens": {"a": 2**40}}), "do not go with its ranks; got .* far from all others"),
        (json.dumps({**OWN, "special_tokens": {"a": -1}}), "do not go with its ranks; got .* far from all others"),
        (json.dumps({**OWN, "pattern": "("}), "is no regular expression"),
        (json.dumps({**OWN, "pattern": 5}), "is no regular expression"),
        (json.dumps({**OWN, "special_tokens": {"<x>": 270}}), r"no end-of-document token \(looked for"),
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, beside: str, message: str) -> None:
    path = tiktoken_file(tmp_path / "own.tiktoken")
    (tmp_path / "own.tiktoken.json").write_text(beside)
    with pytest.raises(DataError, match=message):
        open_tokenizer(str(path))


def test_an_unknown_pattern_is_refused(ranks: Path) -> None:
    with pytest.raises(DataError, match="unknown pattern; allowed: gpt2, cl100k, o200k, llama3"):
        open_tokenizer(f"{ranks}:gpt9")


def test_a_text_that_the_pattern_cannot_cut_is_an_error_of_that_text(ranks: Path) -> None:
    tokenizer = open_tokenizer(f"{ranks}:llama3")
    assert len(tokenizer.encode(" " * 100_000 + "a")) > 0
    with pytest.raises(DataError, match="tiktoken cannot split a text: .*; fix: take the text out"):
        tokenizer.encode(" " * 2_000_000 + "a")


def test_a_text_that_a_tokenizer_cannot_encode_is_an_error_of_that_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="[UNK]"))  # which it has not
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = FileTokenizer(tmp_path / "tokenizer.json")
    assert opened.encode("a").tolist() == [1]
    for read in (opened.encode, opened.bytes_per_token):
        with pytest.raises(RecordError, match=r"tokenizer\.json cannot encode a text: .*Missing \[UNK\]"):
            read("b")


def test_an_empty_text_before_each_text_is_refused(tmp_path: Path) -> None:
    """With which the library panics."""
    tokenizer = Tokenizer(models.BPE(vocab={"</s>": 0, "a": 1}, merges=[]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("")])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"is not a tokenizer: it puts an empty text before each text"):
        FileTokenizer(tmp_path / "tokenizer.json")


def test_ids_that_no_model_has_are_refused(tmp_path: Path) -> None:
    """Tables have a place for each id."""
    text = Tokenizer(models.BPE(vocab={"</s>": 0, "a": 1}, merges=[])).to_str()
    (tmp_path / "tokenizer.json").write_text(text.replace('"a":1', '"a":4294967295'))
    (tmp_path / "a.tiktoken").write_text(tiktoken_lines({**RANKS, b"the": 2**40}))
    for name in ("tokenizer.json", "a.tiktoken:cl100k"):
        with pytest.raises(DataError, match="has ids that no model has; got up to "):
            open_tokenizer(str(tmp_path / name))
