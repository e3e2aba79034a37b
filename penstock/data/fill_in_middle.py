"""Fill-in-the-middle: some training documents are cut in three, with the middle at the end (arXiv 2207.14255).

A document is cut at two random characters, and each part is encoded separately. Half of these documents, or the share
`data.fill_in_middle_spm`, have the second order, in which prefix and middle are adjacent:

    PSM    <prefix> PREFIX <suffix> SUFFIX <middle> MIDDLE
    SPM    <prefix> <suffix> SUFFIX <middle> PREFIX MIDDLE

The end-of-document token follows as always. Documents are cut before they are packed into rows ("document level" in the
paper). The seed, the epoch and the document alone decide the cut. Held-out text is never cut.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.random import PCG64

from penstock.base.errors import DataError
from penstock.data.sources import Tokens, fingerprint_of
from penstock.data.tokenizer_rules import Tokenizer

USUAL_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
"""Prefix, suffix and middle tokens of GPT-4 and Qwen, StarCoder, DeepSeek, Code Llama."""

_TAG = 0xF1
"""Separates these random numbers from those of the order of documents."""


class FimTokens(NamedTuple):
    """Ids of the tokens before each part of a document."""

    prefix: int
    suffix: int
    middle: int


class FillInMiddle:
    """Encodes training documents: the share `rate` of them is cut, and the share `spm` of these has the order SPM."""

    def __init__(self, tokenizer: Tokenizer, marks: FimTokens, *, rate: float, spm: float, seed: int) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._rate = rate
        self._spm = spm
        self._seed = seed
        self.fingerprint = fingerprint_of(tuple(marks), rate, spm)

    def encode(self, text: str, document: Sequence[int]) -> Tokens:
        """Returns the tokens of a text; whole numbers identify the document: epoch and number."""
        draws = PCG64([self._seed, *document, _TAG]).random_raw(4)
        chances = draws[:2] / 2.0**64  # uniform in [0, 1): whether to cut, and the order
        if chances[0] >= self._rate:
            return self._tokenizer.encode(text)
        first, second = sorted(int(draw) % (len(text) + 1) for draw in draws[2:])  # characters
        prefix, middle, suffix = text[:first], text[first:second], text[second:]
        marks = self._marks
        if chances[1] < self._spm:
            return self._joined(marks.prefix, marks.suffix, suffix, marks.middle, prefix, middle)
        return self._joined(marks.prefix, prefix, marks.suffix, suffix, marks.middle, middle)

    def _joined(self, *parts: int | str) -> Tokens:
        wanted = [part for part in parts if part != ""]  # an empty part has its mark, and no tokens
        encode = self._tokenizer.encode
        return np.concatenate([np.array([part]) if isinstance(part, int) else encode(part) for part in wanted])


def find_marks(tokenizer: Tokenizer, name: str, names: Sequence[str] = ()) -> FimTokens:
    """Returns the tokens before prefix, suffix and middle, by `names` or USUAL_NAMES; a DataError if there are none."""
    for candidates in (tuple(names),) if names else USUAL_NAMES:
        ids = [tokenizer.token_id(candidate) for candidate in candidates]
        marks = [token for token in ids if token is not None]
        if len(marks) == len(ids):
            return FimTokens(*marks)
        if names:
            missing = ", ".join(candidate for candidate, number in zip(candidates, ids, strict=True) if number is None)
            raise DataError(f"data.tokenizer {name} has no token {missing}", fix="correct data.fill_in_middle_tokens")
    raise DataError(
        f"data.tokenizer {name} has no tokens for fill-in-the-middle",
        got="none of " + ", ".join(candidates[0] for candidates in USUAL_NAMES),
        fix="set data.fill_in_middle_tokens to its names, or data.fill_in_middle to 0",
    )
