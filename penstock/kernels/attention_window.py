"""Attention windows. No torch: the config imports this file.

window of 3    a position sees itself and the 2 before it
chunk of 3     a position sees those of its own chunk up to itself: 0 1 2 | 3 4 5 | 6 7
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AttentionWindow:
    """A query sees the last `size` positions, its own too, or its chunk of `size` since the start of its document."""

    kind: Literal["window", "chunk"]
    size: int  # positions that a query sees at most

    def pairs(self, length: int) -> float:
        """Pairs of query and key in a row of this length; the pair of a position with itself counts half."""
        if self.kind == "window":
            seen = min(self.size, length)
            return seen**2 / 2 + (length - seen) * (seen - 0.5)  # the triangle at the beginning, and full windows
        chunks, rest = divmod(length, self.size)
        return chunks * self.size**2 / 2 + rest**2 / 2
