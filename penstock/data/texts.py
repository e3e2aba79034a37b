"""What a run trains on: one text or several, each with a weight, and how each becomes a stream of rows."""

from dataclasses import dataclass, field
from typing import Any

from penstock.data.corrupt import CorruptRecords
from penstock.data.fill_in_middle import FillInMiddle
from penstock.data.mixture import Component, Mixture
from penstock.data.rows import LANES, RowStream
from penstock.data.shards import Shards, ShardStream
from penstock.data.sources import Source
from penstock.data.stream import Stream


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """Documents and how they are read.

    Attributes:
        documents: with numbers, or in shards.
        name: in the mixture; empty if there is no mixture.
        weight: in the mixture.
        middle: cuts some of the documents; None leaves them as they are.
    """

    documents: Source | Shards
    name: str = ""
    weight: float = 1.0
    middle: FillInMiddle | None = None


@dataclass(frozen=True)
class Text:
    """All that a run trains on.

    Attributes:
        parts: of the mixture; one part is no mixture.
        corrupt: counts the records that their sources skip.
    """

    parts: tuple[TextPart, ...]
    corrupt: CorruptRecords = field(default_factory=CorruptRecords)

    def __str__(self) -> str:
        """How much there is, in words."""
        counts = []
        for part in self.parts:
            kind = "shards" if isinstance(part.documents, Shards) else "documents"
            counts.append(f"{len(part.documents):,} {kind}" + (f" of {part.name}" if part.name else ""))
        return ", ".join(counts)


def stream_of(text: Text, *, seed: int, shuffle: bool) -> RowStream[Any]:
    """Returns the rows of a text.

    Args:
        text: all documents.
        seed: of their order, >= 0.
        shuffle: give each epoch another order and read LANES documents side by side; else they come by number.
    """
    streams = [_stream_of(part, seed, shuffle) for part in text.parts]
    if len(streams) == 1:
        return streams[0]
    components = [
        Component(name=part.name, weight=part.weight, stream=stream)
        for part, stream in zip(text.parts, streams, strict=True)
    ]
    return Mixture(components)


def _stream_of(part: TextPart, seed: int, shuffle: bool) -> RowStream[Any]:
    lanes = min(LANES, len(part.documents)) if shuffle else 1
    if isinstance(part.documents, Shards):
        return ShardStream(part.documents, seed=seed, shuffle=shuffle, lanes=lanes, middle=part.middle)
    return Stream(part.documents, seed=seed, shuffle=shuffle, lanes=lanes, middle=part.middle)
