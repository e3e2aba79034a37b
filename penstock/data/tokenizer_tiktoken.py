"""Tiktoken vocabularies: byte sequences with their ranks, in lines of base64 (GPT-4, Llama 3, Kimi).

Such a file has neither the pattern that splits text before encoding nor the special tokens; another pattern gives other
tokens from the same file. They are never guessed. They come, in this order, from

    cl100k.tiktoken:cl100k      a name of PATTERNS after the path
    own.tiktoken.json           a JSON file beside `own.tiktoken`: {"pattern": name or regular expression,
                                "special_tokens": {"<|endoftext|>": 50256}}
    its content                 the hash of a file that OpenAI or Meta published

The tiktoken library encodes: `tokenizers` can load the same vocabulary, but may choose differently between two merges
of one rank.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from penstock.base.errors import DataError
from penstock.base.files import open_file, read_json
from penstock.data.sources import RecordError, Tokens, fingerprint_of, require
from penstock.data.tokenizer_rules import cannot_encode, check_ids, find_end_of_document, library_errors, read_tokenizer

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n?")

_BESIDE = '{"pattern": a name or a regular expression, "special_tokens": {name: id}}'
_MOST_SPECIAL = 2**20  # ids after the ranks: a table has a place for each id


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """How text is split, and the ids after the ranks."""

    pattern: str  # regular expression; each match is encoded separately
    special_tokens: Mapping[str, int]  # id of each, counted from the first id after the ranks
    size: int  # number of ids after the ranks, unused ones included
    published: str  # SHA-256 of the published file; empty for others


_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = "<|endoftext|>"

PATTERNS = {
    "gpt2": Pattern(
        pattern=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        special_tokens={_END: 0},
        size=1,
        published="306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    ),
    "cl100k": Pattern(
        pattern=r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
        r"|\s*[\r\n]|\s+(?!\S)|\s",
        special_tokens={_END: 1, "<|fim_prefix|>": 2, "<|fim_middle|>": 3, "<|fim_suffix|>": 4, "<|endofprompt|>": 20},
        size=21,
        published="223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
    "o200k": Pattern(
        pattern=rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        special_tokens={_END: 1, "<|endofprompt|>": 20},
        size=21,
        published="446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
    "llama3": Pattern(
        pattern=rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        # The other ids have other names in Llama 3 and Llama 3.1.
        special_tokens={
            "<|begin_of_text|>": 0,
            "<|end_of_text|>": 1,
            "<|start_header_id|>": 6,
            "<|end_header_id|>": 7,
            "<|eot_id|>": 9,
        },
        size=256,
        published="82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
    ),
}


class TiktokenTokenizer:
    """The tokenizer of a file of ranks and its pattern, a name of PATTERNS.

    Without a pattern, the JSON file beside it is read, or a published file recognized. Raises a DataError if the
    library or the file is missing, the file is damaged, its pattern is unknown, or it has no such token.
    """

    def __init__(self, path: str | Path, *, pattern: str | None = None, end_of_document: str | None = None) -> None:
        library = require("tiktoken", extra="tiktoken", purpose=f"data.tokenizer {path}")
        path = Path(path)
        content = read_tokenizer(path, "give a .tiktoken file")
        ranks = _ranks(content, path)
        behind = max(ranks.values()) + 1  # the first id after the ranks
        check_ids(behind, path)
        chosen = _choose(path, pattern, content, behind)
        self._path = path
        self._special_tokens = {name: behind + index for name, index in chosen.special_tokens.items()}
        self._encoding = self._make_encoding(library, path, chosen.pattern, ranks)
        self.vocab_size = behind + chosen.size
        self.end_of_document = find_end_of_document(self.token_id, end_of_document, path)
        special = sorted(self._special_tokens.items())
        self.fingerprint = fingerprint_of("tiktoken", content, chosen.pattern, special, self.end_of_document)
        self._bytes_of_id = np.zeros(self.vocab_size, dtype=np.int64)  # 0 for special tokens and unused ids
        self._bytes_of_id[list(ranks.values())] = [len(token) for token in ranks]

    def _make_encoding(self, library: ModuleType, path: Path, pattern: str, ranks: dict[bytes, int]) -> Any:
        """Returns tiktoken's encoding, after a check for duplicate ids, for which the library would end the process."""
        special = self._special_tokens.values()
        taken = sorted(set(ranks.values()) & set(special))
        is_far = min(special) < 0 or max(special) > len(ranks) + _MOST_SPECIAL
        if taken or is_far or len(set(special)) < len(special):
            raise DataError(
                f"the special tokens of data.tokenizer {path} do not go with its ranks",
                got=f"id {taken[0]} for two tokens" if taken else "an id twice, or far from all others",
            )
        try:
            return library.Encoding(
                path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self._special_tokens
            )
        except (ValueError, TypeError) as error:
            raise DataError(
                f"the pattern of data.tokenizer {path} is no regular expression: {error}", got=ascii(pattern)
            ) from error

    def encode(self, text: str) -> Tokens:
        """Returns the ids, uint32, without added tokens.

        Raises a RecordError where the pattern cannot be matched: published ones fail only on a million spaces in a row.
        """
        with library_errors(cannot_encode(self._path)):
            try:
                # Nothing is disallowed: text that spells a special token is ordinary text.
                return np.asarray(self._encoding.encode_to_numpy(text, disallowed_special=()))
            except ValueError as error:
                raise RecordError(
                    f"tiktoken cannot split a text: {error}", fix="take the text out, or break it up"
                ) from error

    def decode(self, tokens: Tokens) -> str:
        known = tokens[tokens < self.vocab_size]
        content: bytes = self._encoding.decode_bytes(known[self._bytes_of_id[known] > 0].tolist())
        return content.decode(errors="replace")

    def bytes_per_token(self, text: str) -> Tokens:
        """Returns int64: each token's own bytes, which may be a part of a character."""
        return self._bytes_of_id[self.encode(text)]

    def bytes_of(self, tokens: Tokens) -> Tokens:
        """Returns int64: each token's own bytes, 0 for special tokens."""
        return self._bytes_of_id[tokens]

    def token_id(self, name: str) -> int | None:
        return self._special_tokens.get(name)


def holds_ranks(path: Path) -> bool:
    """Whether a file begins like a file of ranks; False if it cannot be read."""
    try:
        with open_file(path) as file:
            return _RANK_LINE.fullmatch(file.readline(4096)) is not None
    except OSError:
        return False


def _ranks(content: bytes, path: Path) -> dict[bytes, int]:
    """Returns the rank of each byte sequence. Every single byte must have one, so that any text can be encoded."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            what = f"data.tokenizer {path}:{number} is not a rank"
            raise DataError(what, got=ascii(line[:40]), allowed="base64, a space, a number") from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) < len(ranks) or min(ranks.values()) < 0:
        raise DataError(
            f"data.tokenizer {path} is damaged",
            got=f"no rank for byte {missing[0]}" if missing else "a rank twice, or below 0",
            allowed="a rank for each of the 256 bytes, and for what is merged from them",
        )
    return ranks


def _choose(path: Path, name: str | None, content: bytes, behind: int) -> Pattern:
    """Returns the pattern of a file: the named one, that of the JSON file beside it, or that of a published file."""
    if name is not None:
        if name not in PATTERNS:
            raise DataError(f"data.tokenizer {path}:{name}: unknown pattern", allowed=", ".join(PATTERNS))
        return PATTERNS[name]
    beside = path.with_name(f"{path.name}.json")
    if beside.exists():
        return _read_beside(beside, behind)
    hashed = sha256(content).hexdigest()
    for pattern in PATTERNS.values():
        if pattern.published == hashed:
            return pattern
    raise DataError(
        f"data.tokenizer {path} has no split pattern and is no published file",
        fix=f"name a pattern ({path}:cl100k, of {', '.join(PATTERNS)}), or write {beside.name} beside it",
    )


def _read_beside(path: Path, behind: int) -> Pattern:
    """Returns the pattern of a JSON file; `behind` is the first id after the ranks."""
    try:
        values = read_json(path)
        pattern = values["pattern"]
        known = PATTERNS.get(pattern)
        special = {str(token): int(number) - behind for token, number in values.get("special_tokens", {}).items()}
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise DataError(f"{path} does not describe a tokenizer: {error!r}", allowed=_BESIDE) from error
    if not special:
        if known is None:
            raise DataError(f"{path} has no special tokens, so nothing can end a document", allowed=_BESIDE)
        return known
    split = pattern if known is None else known.pattern
    return Pattern(pattern=split, special_tokens=special, size=max(0, *special.values()) + 1, published="")
