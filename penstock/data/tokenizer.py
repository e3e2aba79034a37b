"""Text to token ids: plain bytes, or a Hugging Face `tokenizers` file.

Neither adds a token of its own: the end-of-document token belongs to the stream. Text that happens to spell a special
token (`<|endoftext|>` in a page about tokenizers) is encoded as ordinary text.
"""

import json
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.sources import Tokens, fingerprint_of

BYTES = "bytes"
"""The name under which `open_tokenizer` gives the ByteTokenizer."""

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
"""Tokens that end a document for GPT-2, Llama 2, Llama 3 and DeepSeek; the first that a tokenizer has is taken."""


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
        """Returns the ids of a text that can be written as UTF-8."""

    def decode(self, tokens: Tokens) -> str:
        """Returns the text of ids; what is not text shows as U+FFFD, special tokens not at all."""

    def bytes_per_token(self, text: str) -> Tokens:
        """Returns the bytes of UTF-8 that each token of `encode(text)` stands for; they sum to the text's bytes."""


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


class FileTokenizer:
    """The tokenizer that a Hugging Face `tokenizer.json` describes."""

    def __init__(self, path: str | Path, *, end_of_document: str | None = None) -> None:
        """Reads the file.

        Args:
            path: a `tokenizer.json`.
            end_of_document: the text of the token that ends a document; None or empty looks for END_OF_DOCUMENT_NAMES.

        Raises:
            DataError: the file is missing, is not a tokenizer, or has no such token.
        """
        content = _read_json_text(Path(path))
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # The library raises the bare Exception class: there is nothing narrower to catch.
            raise DataError(
                f"data.tokenizer {path} is not a tokenizer: {error}",
                allowed="a tokenizer.json of Hugging Face tokenizers",
            ) from error
        self._tokenizer.encode_special_tokens = True
        # A stored truncation or padding would silently cut documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary_size = max(vocabulary.values(), default=-1) + 1
        self.end_of_document = _find_end_of_document(vocabulary, end_of_document, path)
        self.fingerprint = fingerprint_of(content, self.end_of_document)

    def encode(self, text: str) -> Tokens:
        """Returns the ids, int64, with no token added before or after."""
        # `encode` holds Python's lock, for up to 0.1 s a document: the thread that feeds the GPU would wait meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int64)

    def decode(self, tokens: Tokens) -> str:
        """Returns the text of the ids; special tokens are left out."""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def bytes_per_token(self, text: str) -> Tokens:
        """Returns int64; a token stands for the bytes from where the token before it ended to where it ends.

        Several tokens may share one character: all its bytes belong to the first. What no token covers (spaces that the
        tokenizer strips) belongs to the next token, or at the end of the text to the last one.
        """
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        offsets = encoding.offsets
        if not offsets:
            return np.zeros(0, dtype=np.int64)
        ends = np.maximum.accumulate(np.array([end for _, end in offsets], dtype=np.int64))
        ends[-1] = len(text)
        return np.diff(_byte_offsets(text)[ends], prepend=0)


def open_tokenizer(tokenizer: str, end_of_document: str | None = None) -> Tokenizer:
    """Returns the ByteTokenizer for "bytes", else the tokenizer in the file of that name.

    Raises:
        DataError: the file is missing, is not a tokenizer, or has no end-of-document token.
    """
    return ByteTokenizer() if tokenizer == BYTES else FileTokenizer(tokenizer, end_of_document=end_of_document)


def _read_json_text(path: Path) -> str:
    try:
        content = path.read_text(encoding="utf-8")
        json.loads(content)
    except OSError as error:
        raise DataError(
            f"cannot read data.tokenizer {path}: {error.strerror}", fix=f'give a tokenizer.json, or "{BYTES}"'
        ) from error
    except ValueError as error:
        raise DataError(
            f"data.tokenizer {path} is not a tokenizer: it is not JSON ({error})",
            allowed="a tokenizer.json of Hugging Face tokenizers",
        ) from error
    return content


def _find_end_of_document(vocabulary: dict[str, int], name: str | None, path: str | Path) -> int:
    names = (name,) if name else END_OF_DOCUMENT_NAMES
    for candidate in names:
        if candidate in vocabulary:
            return vocabulary[candidate]
    looked_for = ", ".join(ascii(candidate) for candidate in names)
    raise DataError(
        f"data.tokenizer {path} has no end-of-document token (looked for {looked_for})",
        fix="set data.end_of_document to a token of this tokenizer",
    )


def _byte_offsets(text: str) -> NDArray[np.int64]:
    """Returns where each character starts in the UTF-8 of the text, and the number of bytes last."""
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + (code_points >= 0x80) + (code_points >= 0x800) + (code_points >= 0x10000)
    return np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
