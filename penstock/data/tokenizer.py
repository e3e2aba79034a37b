"""Text to token ids: the tokenizer contract, plain bytes, and the choice by the setting `data.tokenizer`.

    bytes                       one token per byte, no file
    tokenizer.json              Hugging Face `tokenizers`, a file or a folder        tokenizer_files
    tokenizer.model             sentencepiece                                        tokenizer_files
    vocabulary.tiktoken:cl100k  tiktoken, also as Llama 3's `tokenizer.model`        tokenizer_tiktoken

No tokenizer adds tokens: the end-of-document token belongs to the stream. Text that happens to spell a special token
(`<|endoftext|>` on a page about tokenizers) is encoded as ordinary text.
"""

from pathlib import Path

import numpy as np

from penstock.base.errors import DataError
from penstock.data.sources import Tokens, fingerprint_of
from penstock.data.tokenizer_files import TOKENIZER_FILE, FileTokenizer, SentencePieceTokenizer
from penstock.data.tokenizer_rules import Tokenizer
from penstock.data.tokenizer_tiktoken import TiktokenTokenizer, holds_ranks

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
