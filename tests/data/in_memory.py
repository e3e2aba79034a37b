"""A source for tests: documents in a list, and strategies that make such sources."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from penstock.data.sources import Tokens, fingerprint_of

END = 99


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


def numbered(*sizes: int) -> InMemory:
    """Documents of these sizes whose tokens count on: (0, 1, 2), (3,), ..."""
    starts = np.cumsum([0, *sizes]).tolist()
    return InMemory(tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)))
