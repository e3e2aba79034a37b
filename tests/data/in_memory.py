"""A source for tests: documents in a list, strategies that make such sources, and a loader of a small batch."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.data.documents import CorruptRecords
from penstock.data.loader import Loader
from penstock.data.mixture import Text
from penstock.data.shards import Shards
from penstock.data.sources import Source, SplitFilter, Tokens, fingerprint_of
from penstock.data.tokenizer import ByteTokenizer, open_tokenizer
from penstock.data.tokenizer_rules import Tokenizer

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def letters(folder: Path) -> Tokenizer:
    """A tokenizer with a token for each printable character of ASCII, MARKS and an end of a document."""
    names = ["<|endoftext|>", *MARKS, *map(chr, range(32, 127))]
    model = {"type": "BPE", "vocab": {name: number for number, name in enumerate(names)}, "merges": []}
    added = [
        {"id": number, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for number, name in enumerate(names[:4])
    ]  # fmt: skip
    (folder / "letters.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": added}))
    return open_tokenizer(str(folder / "letters.json"))


class InShards(Shards):
    """Documents in lists, a list for each shard. What is not a text is a corrupt record."""

    def __init__(
        self,
        shards: Sequence[Sequence[object]],
        *,
        block: int = 2,
        corrupt: CorruptRecords | None = None,
        keep: SplitFilter | None = None,
    ) -> None:
        corrupt, keep = corrupt or CorruptRecords(), keep or SplitFilter()
        super().__init__(ByteTokenizer(), fingerprint_of(shards), block=block, corrupt=corrupt, keep=keep)
        self._shards = shards
        self.opened: list[tuple[int, int]] = []  # (shard, first block) of each reader

    def __len__(self) -> int:
        return len(self._shards)

    def blocks(self, shard: int, first: int) -> Iterator[Sequence[object]]:
        self.opened.append((shard, first))
        documents = self._shards[shard]
        for start in range(first * self.block, len(documents), self.block):  # the last block may be shorter
            yield documents[start : start + self.block]

    def place(self, shard: int, document: int) -> str:
        return f"document {document} of shard {shard}"


END = 99  # id of the end of a document; tokens are below it


@dataclass(frozen=True)
class InMemory:
    """Documents as lists of token ids below END. A token's id tells its bytes: the id modulo 4."""

    documents: tuple[tuple[int, ...], ...]
    vocab_size: int = END + 1
    end_of_document: int = END

    @property
    def fingerprint(self) -> int:
        return fingerprint_of(self.documents)

    def __len__(self) -> int:
        return len(self.documents)

    def read(self, index: int) -> Tokens:
        return np.array(self.documents[index], dtype=np.int64)

    def bytes_per_token(self, index: int) -> Tokens:
        return self.read(index) % 4


documents = st.lists(st.integers(0, END - 1), max_size=12).map(tuple)

sources = st.lists(documents, min_size=1, max_size=8).filter(any).map(lambda chosen: InMemory(tuple(chosen)))
"""Sources with empty documents among others, and at least one that is not."""

larger_sources = st.lists(documents, min_size=35, max_size=50).filter(any).map(lambda chosen: InMemory(tuple(chosen)))
"""Sources with more documents than a loader has lanes."""


def loader_of(text: Source | Text, **changes: Any) -> Loader:
    sizes: dict[str, Any] = {"rows": 4, "sequence_length": 5, "seed": 3, "document_mask": True}
    return Loader(text, **(sizes | changes))


def numbered(*sizes: int) -> InMemory:
    """Documents of these sizes whose tokens count on: (0, 1, 2), (3,), ..."""
    starts = np.cumsum([0, *sizes]).tolist()  # first token of each document
    return InMemory(tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)))
