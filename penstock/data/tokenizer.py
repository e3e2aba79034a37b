"""Text to token ids: what a tokenizer promises, plain bytes, and the choice by the setting `data.tokenizer`.

    bytes                       one token a byte, no file
    tokenizer.json              Hugging Face `tokenizers`, a file or a folder        tokenizer_json
    tokenizer.model             sentencepiece                                        tokenizer_sentencepiece
    vocabulary.tiktoken:cl100k  tiktoken, also as Llama 3's `tokenizer.model`        tokenizer_tiktoken

None of them adds a token of its own: the end-of-document token belongs to the stream. Text that happens to spell a
special token (`<|endoftext|>` in a page about tokenizers) is encoded as ordinary text.
"""

from pathlib import Path
from typing import Protocol

import numpy as np

from penstock.base.errors import DataError
from penstock.data.sources import Tokens, fingerprint_of
from penstock.data.tokenizer_files import TOKENIZER_FILE, FileTokenizer, SentencePieceTokenizer
from penstock.data.tokenizer_tiktoken import TiktokenTokenizer, holds_ranks

BYTES = "bytes"
"""The name under which `open_tokenizer` gives the ByteTokenizer."""


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest id."""

    @property
    def end_of_document(self) -> int:
        """Id of the token that ends a document."""

    @property
    def fingerprint(self) -> int:
        """A number of 56 bits that changes when any text may be encoded otherwise."""

    def encode(self, text: str) -> Tokens:
        """Returns the ids of a text that can be written as UTF-8.

        Raises:
            DataError: the text is of a kind that this tokenizer cannot encode.
        """

    def decode(self, tokens: Tokens) -> str:
        """Returns the text of ids; what is not text shows as U+FFFD, special tokens not at all."""

    def bytes_per_token(self, text: str) -> Tokens:
        """Returns the bytes of UTF-8 that each token of `encode(text)` stands for; they sum to the text's bytes."""

    def bytes_of(self, tokens: Tokens) -> Tokens:
        """Returns the bytes that each of these tokens stands for, where the text is not at hand.

        Special tokens stand for none. A tokenizer that changes text before it encodes it gives the bytes of the
        changed text.

        Raises:
            DataError: they cannot be told; see `token_bytes`.
        """

    def token_id(self, name: str) -> int | None:
        """Returns the id of a token by its name, such as `<|fim_prefix|>`; None if there is no such token."""


class ByteTokenizer:
    """One token a byte of UTF-8 (ids 0..255), and 256 for the end of a document."""

    vocabulary_size = 257
    end_of_document = 256
    fingerprint = fingerprint_of(BYTES)

    def encode(self, text: str) -> Tokens:
        """Returns the UTF-8 bytes, uint8."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens: Tokens) -> str:
        """Returns the text of the bytes; end-of-document tokens are left out."""
        return tokens[tokens < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def bytes_per_token(self, text: str) -> Tokens:
        """Returns a one for each byte."""
        return np.ones(len(text.encode()), dtype=np.int64)

    def bytes_of(self, tokens: Tokens) -> Tokens:
        """Returns a one for each byte, and a zero for each end-of-document token."""
        return (tokens < 256).astype(np.int64)

    def token_id(self, name: str) -> int | None:
        """Returns None: no token has a name."""
        return None


def open_tokenizer(tokenizer: str, end_of_document: str | None = None) -> Tokenizer:
    """Returns the tokenizer that a setting names.

    Args:
        tokenizer: "bytes"; the path of a tokenizer's file, or of a folder that holds it; for tiktoken with
            `:pattern` behind it.
        end_of_document: name of the token that ends a document; None or empty takes what the tokenizer says.

    Raises:
        DataError: the file is missing, is not a tokenizer, or has no end-of-document token; the library that reads it
            is missing.
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
    if not path.exists() and ":" in tokenizer:
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
    """Returns the folder itself if it has a tokenizer.json, else its one file of another kind."""
    if (folder / TOKENIZER_FILE).exists():
        return folder
    found = sorted([*folder.glob("*.model"), *folder.glob("*.tiktoken")])
    if len(found) != 1:
        raise DataError(
            f"data.tokenizer {folder} is a folder without a tokenizer",
            got=", ".join(path.name for path in found) or "none",
            allowed=f"{TOKENIZER_FILE}, or one .model or .tiktoken file",
        )
    return found[0]
