"""The process that encodes texts (penstock/base/child.py); `packed` has several of them.

{"tokenizer": ..., "end_of_document": ..., "type": "<u2", "texts": [...]}
{"lengths": [...], "text_bytes": ..., "empty": ..., "faults": [[3, ...]]}, and the tokens
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.base.child import Answer, serve
from penstock.data.sources import RecordError, Tokens
from penstock.data.tokenizer import open_tokenizer
from penstock.data.tokenizer_rules import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """Tokens of a batch."""

    tokens: Tokens  # with end tokens
    lengths: NDArray[np.int64]  # of each document, its end token included
    text_bytes: int
    empty: int
    faults: dict[int, str]  # errors of texts that could not be encoded, by their index in the batch

    def answer(self) -> Answer:
        numbers = {"text_bytes": self.text_bytes, "empty": self.empty, "faults": list(self.faults.items())}
        return {"lengths": self.lengths.tolist(), **numbers}, self.tokens.tobytes()

    @classmethod
    def of(cls, head: dict[str, Any], tokens: bytes, type_name: str) -> "Encoded":
        """The inverse of `answer`."""
        lengths = np.array(head["lengths"], dtype=np.int64)
        return cls(np.frombuffer(tokens, type_name), lengths, head["text_bytes"], head["empty"], dict(head["faults"]))


def encode_texts(tokenizer: Tokenizer, type_name: str, texts: list[str]) -> Encoded:
    end = np.array([tokenizer.end_of_document], dtype=type_name)
    parts: list[Tokens] = []
    lengths, text_bytes, empty = [], 0, 0
    faults: dict[int, str] = {}
    for index, text in enumerate(texts):
        try:
            tokens = tokenizer.encode(text)
        except RecordError as error:
            faults[index] = str(error)
            continue
        if len(tokens) == 0:
            empty += 1
            continue
        parts += [tokens.astype(type_name), end]  # in the type of the file, so that less is sent back
        lengths.append(len(tokens) + 1)
        text_bytes += len(text.encode())
    whole = np.concatenate([np.zeros(0, dtype=type_name), *parts])
    return Encoded(whole, np.array(lengths, dtype=np.int64), text_bytes, empty, faults)


_opened = cache(open_tokenizer)
"""Opens a tokenizer once."""


def _answer(request: dict[str, Any]) -> Answer:
    tokenizer = _opened(request["tokenizer"], request["end_of_document"])
    return encode_texts(tokenizer, request["type"], request["texts"]).answer()


if __name__ == "__main__":
    serve(_answer)
