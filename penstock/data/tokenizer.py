"""Text to token ids: the tokenizer contract, plain bytes, and the choice by the setting `data.tokenizer`.

    bytes                       one token per byte, no file
    tokenizer.json              Hugging Face `tokenizers`, a file or a folder
    tokenizer.model             sentencepiece (Llama 2, Mistral 7B, T5)
    vocabulary.tiktoken:cl100k  tiktoken, also as Llama 3's `tokenizer.model`: `tokenizer_tiktoken`

No tokenizer adds tokens: the end-of-document token belongs to the stream. Text that happens to spell a special token
(`<|endoftext|>` on a page about tokenizers) is encoded as ordinary text.

A Hugging Face folder names the token that ends a document: `eos_token` of its `tokenizer_config.json`. For a single
file, the usual names are tried.

Sentencepiece encodes with the file's own settings for normalization, a leading space, and unknown characters. Text that
spells a control symbol (`</s>`) never becomes that symbol. Text that spells a user-defined symbol always does: that is
their purpose, so they cannot end documents.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.base.files import parse_json
from penstock.data.sources import Tokens, fingerprint_of, require
from penstock.data.tokenizer_rules import (
    Tokenizer,
    byte_offsets,
    bytes_between,
    bytes_by_repeating,
    cannot_encode,
    check_ids,
    find_end_of_document,
    library_errors,
    read_tokenizer,
)
from penstock.data.tokenizer_tiktoken import TiktokenTokenizer, holds_ranks

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"


class FileTokenizer:
    """The tokenizer of a Hugging Face `tokenizer.json`, or of a folder with one.

    Without a name for the token that ends a document, the folder's is taken, or END_OF_DOCUMENT_NAMES are tried. Raises
    a DataError if the file is missing, is not a tokenizer, or has no such token.
    """

    def __init__(self, path: str | Path, *, end_of_document: str | None = None) -> None:
        path = Path(path)
        if path.is_dir():
            end_of_document = end_of_document or _stated_end(path / CONFIG_FILE)
            path = path / TOKENIZER_FILE
        content = _read_json_text(path)
        if _has_empty_prepend(json.loads(content)):  # with which the library panics
            raise _no_tokenizer(path, "it puts an empty text before each text")
        with library_errors(partial(_no_tokenizer, path)):
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        self._path = path
        self._tokenizer.encode_special_tokens = True  # text that spells one is encoded as ordinary text
        # A stored truncation or padding would silently cut documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        check_ids(self.vocab_size, path)
        self.end_of_document = find_end_of_document(self.token_id, end_of_document, path)
        self.fingerprint = fingerprint_of(content, self.end_of_document)
        self._bytes_of_id = self._known_bytes(json.loads(content).get("decoder"))

    def encode(self, text: str) -> Tokens:
        """Returns the ids, int64, without added tokens."""
        # `encode` holds Python's lock, for up to 0.1 s a document: the thread that feeds the GPU would wait meanwhile.
        encoding = self._encoded(self._tokenizer.encode_batch_fast, text)
        return np.array(encoding.ids, dtype=np.int64)

    def _encoded(self, encode: Callable[..., list[Any]], text: str) -> Any:
        with library_errors(cannot_encode(self._path)):
            (encoding,) = encode([text], add_special_tokens=False)
        return encoding

    def decode(self, tokens: Tokens) -> str:
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def bytes_per_token(self, text: str) -> Tokens:
        """Returns int64; of several tokens that share a character, the first has its bytes (see `bytes_between`)."""
        encoding = self._encoded(self._tokenizer.encode_batch, text)
        offsets = byte_offsets(text)
        return bytes_between(offsets[[end for _, end in encoding.offsets]], int(offsets[-1]))

    def bytes_of(self, tokens: Tokens) -> Tokens:
        """Returns int64: for a byte-level vocabulary each token's own bytes, else as `bytes_by_repeating`."""
        return bytes_by_repeating(self, tokens) if self._bytes_of_id is None else self._bytes_of_id[tokens]

    def token_id(self, name: str) -> int | None:
        is_text = not any("\ud800" <= letter <= "\udfff" for letter in name)  # JSON can hold half of a surrogate pair
        return self._tokenizer.token_to_id(name) if is_text else None

    def _known_bytes(self, decoder: dict[str, Any] | None) -> NDArray[np.int64] | None:
        """Returns the bytes of each id of a byte-level vocabulary, where one character is one byte; None for others."""
        if decoder is None or decoder["type"] != "ByteLevel":
            return None
        known = np.zeros(self.vocab_size, dtype=np.int64)  # 0 for ids without a token
        for token, number in self._tokenizer.get_vocab(with_added_tokens=False).items():
            known[number] = len(token)
        for number, added in self._tokenizer.get_added_tokens_decoder().items():
            known[number] = 0 if added.special else len(added.content.encode())
        return known


def _has_empty_prepend(value: Any) -> bool:
    """Whether a part of a `tokenizer.json` is a normalizer that puts an empty text before each text."""
    if isinstance(value, dict):
        return (value.get("type"), value.get("prepend")) == ("Prepend", "") or any(
            map(_has_empty_prepend, value.values())
        )
    return isinstance(value, list) and any(map(_has_empty_prepend, value))


def _stated_end(config: Path) -> str | None:
    """Returns `eos_token` of a `tokenizer_config.json`, None if there is none."""
    if not config.exists():
        return None
    values = json.loads(_read_json_text(config))
    stated = values.get("eos_token") if isinstance(values, dict) else None
    # Older files hold the token with its settings.
    stated = stated.get("content") if isinstance(stated, dict) else stated
    if stated is not None and not isinstance(stated, str):
        raise DataError(f"eos_token of {config} is no token", got=stated, allowed="a text, or an object with `content`")
    return stated


def _read_json_text(path: Path) -> str:
    raw = read_tokenizer(path, f'give a {TOKENIZER_FILE}, or "bytes"')
    try:
        content = raw.decode()
        parse_json(content)
    except ValueError as error:
        raise _no_tokenizer(path, f"it is not JSON ({error})") from error
    return content


def _no_tokenizer(path: Path, why: object) -> DataError:
    return DataError(
        f"data.tokenizer {path} is not a tokenizer: {why}", allowed="a tokenizer.json of Hugging Face tokenizers"
    )


class SentencePieceTokenizer:
    """The tokenizer of a sentencepiece `.model` file; a control symbol, else its end of sentence, ends a document.

    Raises a DataError if the library or the file is missing, the file is not such a model, or it has no such symbol.
    """

    def __init__(self, path: str | Path, *, end_of_document: str | None = None) -> None:
        library = require("sentencepiece", extra="sentencepiece", purpose=f"data.tokenizer {path}")
        content = read_tokenizer(Path(path), "give a .model file")
        if not content:
            raise _no_model(path)
        try:
            self._processor = library.SentencePieceProcessor(model_proto=content)
            self.vocab_size = self._processor.piece_size()
            # A damaged file may be a model all the same, with pieces that are no text.
            self._processor.id_to_piece(list(range(self.vocab_size)))
        except (RuntimeError, UnicodeDecodeError) as error:
            raise _no_model(path) from error
        self.end_of_document = self._find_end(end_of_document, path)
        self.fingerprint = fingerprint_of("sentencepiece", content, self.end_of_document)

    def encode(self, text: str) -> Tokens:
        """Returns the ids, int32, without added tokens."""
        return np.asarray(self._processor.encode(text.encode(), return_type="numpy"))

    def decode(self, tokens: Tokens) -> str:
        """Returns the text of the ids without control symbols; the file decides how unknown characters look."""
        known = tokens[tokens < self.vocab_size]
        return str(self._processor.decode(known.tolist()))

    def bytes_per_token(self, text: str) -> Tokens:
        """Returns int64; of several tokens that share a character, the last has its bytes (see `bytes_between`)."""
        content = text.encode()  # bytes in, so that offsets are in bytes
        encoding = self._processor.encode(content, return_type="offset_mapping", return_bytes=True)
        return bytes_between([end for _, end in encoding["offsets"]], len(content))

    def bytes_of(self, tokens: Tokens) -> Tokens:
        return bytes_by_repeating(self, tokens)

    def token_id(self, name: str) -> int | None:
        token = int(self._processor.piece_to_id(name))
        return None if token == self._processor.unk_id() else token

    def _find_end(self, name: str | None, path: str | Path) -> int:
        stated = int(self._processor.eos_id())
        if not name and stated >= 0:
            return stated
        token = find_end_of_document(self.token_id, name, path)
        if not self._processor.is_control(token):
            raise DataError(
                f"data.tokenizer {path} encodes text as its token {self._processor.id_to_piece(token)}, "
                "which cannot end documents",
                fix="set data.end_of_document to a control symbol",
            )
        return token


def _no_model(path: str | Path) -> DataError:
    return DataError(f"data.tokenizer {path} is not a tokenizer", allowed="a .model file of sentencepiece")


BYTES = "bytes"
"""The setting for the ByteTokenizer."""


class ByteTokenizer:
    """One token per byte of UTF-8 (ids 0..255), and 256 for the end of a document."""

    vocab_size = 257
    end_of_document = 256
    fingerprint = fingerprint_of(BYTES)

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens: Tokens) -> str:
        return tokens[tokens < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def bytes_per_token(self, text: str) -> Tokens:
        return np.ones(len(text.encode()), dtype=np.int64)

    def bytes_of(self, tokens: Tokens) -> Tokens:
        return (tokens < 256).astype(np.int64)

    def token_id(self, name: str) -> int | None:
        return None  # bytes have no names


def open_tokenizer(tokenizer: str, end_of_document: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a setting: "bytes", or the path of a file or its folder, for tiktoken with `:pattern`.

    `end_of_document` names the token that ends a document; None or empty takes the tokenizer's own. Raises a DataError
    if the file is missing, is not a tokenizer, or has no such token, or its library is missing.
    """
    if tokenizer == BYTES:
        if end_of_document:
            raise DataError(
                f"data.tokenizer {BYTES} has its own token that ends a document",
                got=f"{end_of_document!r:.80}",
                fix="leave data.end_of_document (--end-of-document) out",
            )
        return ByteTokenizer()
    path, pattern = Path(tokenizer), None
    if not path.exists() and ":" in tokenizer:  # a name may have a colon of its own
        name, _, pattern = tokenizer.rpartition(":")
        path = Path(name)
    if path.is_dir():
        path = _tokenizer_in(path)
    if pattern is not None or path.suffix == ".tiktoken" or (path.suffix == ".model" and holds_ranks(path)):
        return TiktokenTokenizer(path, pattern=pattern, end_of_document=end_of_document)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path, end_of_document=end_of_document)
    return FileTokenizer(path, end_of_document=end_of_document)


def _tokenizer_in(folder: Path) -> Path:
    """Returns the folder itself if it has a tokenizer.json, else its only file of another kind."""
    if (folder / TOKENIZER_FILE).exists():
        return folder
    models = sorted([*folder.glob("*.model"), *folder.glob("*.tiktoken")])
    if len(models) != 1:
        raise DataError(
            f"data.tokenizer {folder} is a folder without a tokenizer",
            got=", ".join(path.name for path in models) or "none",
            allowed=f"{TOKENIZER_FILE}, or one .model or .tiktoken file",
        )
    return models[0]
