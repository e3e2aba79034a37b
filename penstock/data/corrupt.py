"""What becomes of records that cannot be read: they end the run, or are skipped, counted and named.

A skipped record is a document without tokens. It yields nothing, on every rank alike, so that places in the data stay
what they are. The same record is skipped, and counts, again in the next epoch.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from penstock.data.sources import RecordError, Tokens

Policy: TypeAlias = Literal["stop", "skip"]
Value = TypeVar("Value")

NAMED = 5
"""Skipped records that are told by name; of the others every tenth, hundredth, ... is told as a number."""

NOTHING: Tokens = np.zeros(0, dtype=np.int64)
"""The tokens of a skipped record."""


class CorruptRecords:
    """Meets records that cannot be read.

    Attributes:
        skipped: how many were skipped; whoever goes on with a saved place sets it.
    """

    def __init__(self, policy: Policy = "stop") -> None:
        """Takes what to do with them."""
        self.skips = policy == "skip"
        self.skipped = 0
        self._named = 0
        self._notices: list[str] = []

    def survived(self, read: Callable[[], Value], otherwise: Value) -> Value:
        """Returns what `read` makes of a record; something else if it cannot be read and is skipped.

        Raises:
            RecordError: it cannot be read, and the run shall stop.
        """
        try:
            return read()
        except RecordError as error:
            if not self.skips:
                raise
            self._count(error)
            return otherwise

    def _count(self, error: RecordError) -> None:
        self.skipped += 1
        self._named += 1
        if self._named <= NAMED:
            self._notices.append(f"data: skipped a record: {' '.join(error.what.split())}")
        elif self.skipped == 10 ** (len(str(self.skipped)) - 1):
            self._notices.append(f"data: {self.skipped:,} records were skipped so far")

    def take_notices(self) -> tuple[str, ...]:
        """Returns what there is to tell since the last call."""
        notices, self._notices = tuple(self._notices), []
        return notices
