"""Rules that all tokenizers share: the end-of-document token, and the bytes of text of each token.

Bytes compare losses of different tokenizers. With the text, the tokenizer gives the end of each token in it, and
`bytes_between` counts. Packed files have no text: the bytes are known if each id always has the same ones, as in
byte-level vocabularies; otherwise `bytes_by_repeating` decodes and encodes the tokens again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import DataError, system_errors
from penstock.base.files import MOST_JSON_BYTES, read_bounded
from penstock.data.sources import RecordError, TokenIds, Tokens

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
"""Tokens that end a document for GPT-2, Llama 2, Llama 3 and DeepSeek, in order of preference."""


def find_end_of_document(token_id: Callable[[str], int | None], name: str | None, path: str | Path) -> int:
    """Returns the id of the token that ends a document: that of a name, else the first usual one that there is."""
    names = (name,) if name else END_OF_DOCUMENT_NAMES
    for candidate in names:
        token = token_id(candidate)
        if token is not None:
            return token
    looked_for = ", ".join(ascii(candidate) for candidate in names)
    raise DataError(
        f"data.tokenizer {path} has no end-of-document token (looked for {looked_for})",
        fix="set data.end_of_document to a token of this tokenizer",
    )


MOST_IDS = 2**24
"""Largest vocabulary that is read: tables have a place for each id."""


def check_ids(size: int, path: str | Path) -> None:
    """Raises DataError for a vocabulary that no model has."""
    if size > MOST_IDS:
        raise DataError(f"data.tokenizer {path} has ids that no model has", got=f"up to {size - 1}", allowed=MOST_IDS)


@contextmanager
def library_errors(as_error: Callable[[object], Exception]) -> Iterator[None]:
    """Turns what a library of tokenizers raises into an error of ours.

    These are bare exceptions, for which there is nothing narrower to catch, and panics, which are none.
    """
    try:
        yield
    except RecordError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise as_error(error) from error


def cannot_encode(path: str | Path) -> Callable[[object], RecordError]:
    return lambda error: RecordError(f"data.tokenizer {path} cannot encode a text: {error}")


def read_tokenizer(path: Path, fix: str) -> bytes:
    """Reads a tokenizer's file; `fix` says in errors what to give. Raises DataError if it cannot be read."""
    with system_errors(DataError, f"cannot read data.tokenizer {path}", fix):
        return read_bounded(path, MOST_JSON_BYTES)


class Tokenizer(TokenIds, Protocol):
    """Turns text into token ids and back."""

    def encode(self, text: str) -> Tokens:
        """Returns the ids of a text that UTF-8 can encode, or raises a DataError."""

    def decode(self, tokens: Tokens) -> str:
        """Returns the text of ids without special tokens; invalid UTF-8 becomes U+FFFD."""

    def bytes_per_token(self, text: str) -> Tokens:
        """Returns the bytes of UTF-8 text of each token of `encode(text)`; they sum to the text's bytes."""

    def bytes_of(self, tokens: Tokens) -> Tokens:
        """Returns the bytes of text of each token, without the text; 0 for special tokens.

        A tokenizer that normalizes text gives the bytes of the normalized text. Raises a DataError if they are unknown.
        """

    def token_id(self, name: str) -> int | None:
        """Returns the id of a token by its name, such as `<|fim_prefix|>`; None if there is none."""


def byte_offsets(text: str) -> NDArray[np.int64]:
    """Returns the UTF-8 offset of each character, and the number of bytes last."""
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + (code_points >= 0x80) + (code_points >= 0x800) + (code_points >= 0x10000)  # bytes in UTF-8
    return np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)


def bytes_between(ends: Sequence[int] | NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Returns the bytes of text of each token, given the byte of the text at which it ends, and the bytes of the text.

    A token has the bytes between the previous token's end and its own. If several tokens share a character, one of them
    has all its bytes. Uncovered text (spaces that the tokenizer strips) belongs to the next token, or to the last one.
    """
    if len(ends) == 0:
        return np.zeros(0, dtype=np.int64)
    reached = np.maximum.accumulate(np.asarray(ends, dtype=np.int64))  # tokens of one character end at one byte
    reached[-1] = length  # the last token has the uncovered rest
    return np.diff(reached, prepend=0)


def bytes_by_repeating(codec: Tokenizer, tokens: Tokens) -> Tokens:
    """Returns the bytes of text of each token by decoding and encoding the tokens again.

    Tokens without text (a begin-of-text token that another program added) have none. Raises a DataError if the decoded
    text is not encoded as these tokens.
    """
    text = codec.decode(tokens)
    again, sizes = codec.encode(text), codec.bytes_per_token(text)
    if np.array_equal(again, tokens):
        return sizes
    # Match both lists in order; tokens that are not encoded again must have no text.
    byte_counts = np.zeros(len(tokens), dtype=np.int64)
    matched = 0  # tokens of `again`
    for index in range(len(tokens)):
        if matched < len(again) and tokens[index] == again[matched]:
            byte_counts[index] = sizes[matched]
            matched += 1
        elif codec.decode(tokens[index : index + 1]):
            break
    else:
        if matched == len(again):
            return byte_counts
    raise DataError(
        "the bytes of packed tokens are unknown: their text is not encoded as these tokens",
        got=f"another token at {matched} of {len(tokens)}",
        fix="hold out documents as text (data.validation_files), or set evaluation.rows to 0",
    )
