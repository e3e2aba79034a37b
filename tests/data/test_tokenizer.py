"""What every tokenizer promises, on text that is hard; and which one a setting names."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from penstock.base.errors import DataError
from penstock.config.run import Data
from penstock.data.open import vocabulary_of
from penstock.data.packed import pack
from penstock.data.text import PlainText
from penstock.data.tokenizer import ByteTokenizer, open_tokenizer
from penstock.data.tokenizer_output import ExportedTokenizer, export_tokenizer
from penstock.data.tokenizer_rules import Tokenizer
from tests.data.vocabularies import HARD_TEXTS, RANKS, json_file, sentencepiece_model, tiktoken_file, tiktoken_lines

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(HARD_TEXTS)
KINDS = ("bytes", "json", "sentencepiece", "normalizing", "cl100k", "o200k", "llama3", "gpt2")
LOSSLESS = tuple(kind for kind in KINDS if kind != "normalizing")
SPECIAL = {"json": "<|endoftext|>", "sentencepiece": "</s>", "llama3": "<|end_of_text|>", "cl100k": "<|fim_prefix|>"}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What `data.tokenizer` is for each kind."""
    folder = tmp_path_factory.mktemp("vocabularies")
    ranks = tiktoken_file(folder / "ranks.tiktoken")
    return {
        "bytes": "bytes",
        "json": str(json_file(folder / "tokenizer.json")),
        "sentencepiece": str(sentencepiece_model(folder / "lossless.model")),
        "normalizing": str(sentencepiece_model(folder / "normalizing.model", lossless=False)),
        **{name: f"{ranks}:{name}" for name in ("cl100k", "o200k", "llama3", "gpt2")},
    }


@pytest.fixture(scope="module")
def tokenizers(names: dict[str, str]) -> dict[str, Tokenizer]:
    return {kind: open_tokenizer(name) for kind, name in names.items()}


@pytest.mark.parametrize("kind", LOSSLESS)
@given(text=TEXTS)
def test_text_goes_there_and_back(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    tokens = tokenizer.encode(text)
    assert tokens.ndim == 1
    assert np.issubdtype(tokens.dtype, np.integer)
    assert tokenizer.decode(np.append(tokens, tokenizer.end_of_document)) == text


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_the_bytes_of_tokens_sum_to_the_text(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    tokens, text_bytes = tokenizer.encode(text), tokenizer.bytes_per_token(text)
    assert len(text_bytes) == len(tokens)
    assert text_bytes.sum() == (len(text.encode()) if len(tokens) else 0)
    assert (text_bytes >= 0).all()


@pytest.mark.parametrize("kind", LOSSLESS)
@given(text=TEXTS)
def test_the_bytes_are_known_from_the_tokens_alone(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    tokens = tokenizer.encode(text)
    marked = np.concatenate([[tokenizer.end_of_document], tokens.astype(np.int64)])
    assert tokenizer.bytes_of(tokens).sum() == len(text.encode())
    assert tokenizer.bytes_of(marked).tolist() == [0, *tokenizer.bytes_of(tokens).tolist()]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_every_id_is_below_the_vocabulary_and_no_text_ends_a_document(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    tokens = tokenizer.encode(f"{text} {SPECIAL.get(kind, 'a')}")
    assert tokens.max() < tokenizer.vocab_size
    assert tokenizer.end_of_document < tokenizer.vocab_size
    assert tokenizer.end_of_document not in tokens


@pytest.mark.parametrize(("kind", "name"), SPECIAL.items())
def test_special_tokens_are_found_by_name_and_never_made_from_text(
    tokenizers: dict[str, Tokenizer], kind: str, name: str
) -> None:
    tokenizer = tokenizers[kind]
    number = tokenizer.token_id(name)
    assert number is not None
    assert number not in tokenizer.encode(f"a {name} b")
    assert tokenizer.decode(tokenizer.encode(f"a {name} b")) == f"a {name} b"
    assert tokenizer.token_id("<|no such token|>") is None


def test_fingerprints_identify_tokenizers(tokenizers: dict[str, Tokenizer], names: dict[str, str]) -> None:
    assert len({tokenizer.fingerprint for tokenizer in tokenizers.values()}) == len(tokenizers)
    for kind, tokenizer in tokenizers.items():
        assert open_tokenizer(names[kind]).fingerprint == tokenizer.fingerprint
    text = "\u00e9\U0001f600"
    assert ByteTokenizer().encode(text).tolist() == list(text.encode())


@pytest.mark.parametrize("kind", ["json", "sentencepiece", "cl100k"])
def test_other_threads_go_on_while_a_long_text_is_encoded(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    text = "the loss of a step falls, and the next one is the same\n" * 20_000
    begins, ends = threading.Event(), threading.Event()

    def encode() -> None:
        begins.set()
        tokenizers[kind].encode(text)
        ends.set()

    def goes_on() -> bool:
        """Whether this thread runs before the other one, which is encoding, has ended."""
        encoding = threading.Thread(target=encode)
        encoding.start()
        begins.wait()
        before = not ends.is_set()
        encoding.join()
        begins.clear(), ends.clear()
        return before

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # seconds: a thread keeps the interpreter until it gives it up by itself
    try:
        # A busy machine may not let this thread run in time, once.
        assert any(goes_on() for _ in range(20)), "the thread that feeds the GPU would wait"
    finally:
        sys.setswitchinterval(interval)


def test_a_folder_gives_what_is_in_it(tmp_path: Path, names: dict[str, str]) -> None:
    for kind, file in (("json", "tokenizer.json"), ("sentencepiece", "tokenizer.model")):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / file).write_bytes(Path(names[kind]).read_bytes())
        assert open_tokenizer(str(folder)).fingerprint == open_tokenizer(names[kind]).fingerprint
    (tmp_path / "json" / "tokenizer.model").write_bytes(b"not read beside a tokenizer.json")
    assert open_tokenizer(str(tmp_path / "json")).fingerprint == open_tokenizer(names["json"]).fingerprint


def test_a_folder_says_which_token_ends_a_document(tmp_path: Path) -> None:
    json_file(tmp_path / "tokenizer.json", special=["<|endoftext|>", "<|im_end|>"])
    assert open_tokenizer(str(tmp_path)).end_of_document == 0
    for stated in ("<|im_end|>", {"content": "<|im_end|>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": stated}))
        assert open_tokenizer(str(tmp_path)).end_of_document == 1
    assert open_tokenizer(str(tmp_path), "<|endoftext|>").end_of_document == 0
    assert open_tokenizer(str(tmp_path / "tokenizer.json")).end_of_document == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"eos_token": "<none>"}', r"no end-of-document token \(looked for '<none>'\)"),
        ('{"eos_token": 3}', "eos_token of .*tokenizer_config.json is no token; got 3"),
        ("{", "tokenizer_config.json is not a tokenizer: it is not JSON"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(tmp_path: Path, config: str, message: str) -> None:
    json_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(DataError, match=message):
        open_tokenizer(str(tmp_path))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder without a tokenizer; got none; allowed: tokenizer.json, or one"):
        open_tokenizer(str(tmp_path))
    for name in ("a.model", "b.tiktoken"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match="got a.model, b.tiktoken"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["none.json", "none.model", "none.tiktoken", "none.tiktoken:cl100k", "none"])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        DataError, match=r"cannot read data\.tokenizer .*none.*; got No such file or directory; fix: give"
    ):
        open_tokenizer(str(tmp_path / name))


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


def test_ids_are_the_same_in_every_text_unless_one_spells_a_special_token_of_a_tokenizer_json(tmp_path: Path) -> None:
    _same(Data(), HARD_TEXTS, tmp_path / "bytes")
    path = json_file(tmp_path / "tokenizer.json")
    plain = tuple(text for text in HARD_TEXTS if "<|endoftext|>" not in text)
    _same(Data(tokenizer=str(path)), plain, tmp_path / "json")


def test_tokens_that_training_did_not_add_are_not_added(tmp_path: Path) -> None:
    path = json_file(tmp_path / "tokenizer.json", special=("<s>", "</s>"))
    tokenizer = FastTokenizer.from_file(str(path))
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
