"""The data of a run: one text or a weighted mixture, and the stream of rows over it.

The next row of a mixture comes from the part with the fewest tokens over weight, counting this row's tokens. So at any
time each part's share of all tokens equals its share of the weights, up to one row, for documents of any length. Each
part is a stream of its own, with its own lanes, order and epochs. A row belongs to one part.

Example: with weights 2 and 1 the parts come as `a a b a a b ...`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.data.documents import CorruptRecords, FillInMiddle
from penstock.data.shards import Shards, ShardStream
from penstock.data.sources import Source, Tokens, fingerprint_of
from penstock.data.stream import LANES, LoaderState, RowStream, Stream, damaged, read_count, read_counts


class MixedPosition(NamedTuple):
    """A place between two rows of a mixture."""

    parts: tuple[Any, ...]  # position in the stream of each part
    tokens: tuple[int, ...]  # of each part so far
    rows: int


@dataclass(frozen=True, kw_only=True)
class Component:
    """The stream of one part of a mixture."""

    name: str
    weight: float
    stream: RowStream[Any]


class Mixture(RowStream[MixedPosition]):
    """Rows of several streams, mixed by weight."""

    def __init__(self, components: Sequence[Component]) -> None:
        assert len({component.name for component in components}) == len(components) > 0, "parts have names"
        self._components = tuple(components)
        self.vocab_size = max(component.stream.vocab_size for component in components)
        self.fingerprint = fingerprint_of(
            [(component.name, component.weight, component.stream.fingerprint) for component in components]
        )

    def start(self) -> MixedPosition:
        starts = tuple(component.stream.start() for component in self._components)
        return MixedPosition(starts, (0,) * len(starts), 0)

    def next_row(self, position: MixedPosition, sequence_length: int) -> tuple[Sequence[Tokens], MixedPosition]:
        """Returns the next row of the part whose turn it is, and the position after it."""
        turn = min(  # the first of equals, so the order is the same on all ranks
            range(len(self._components)),
            key=lambda part: (position.tokens[part] + sequence_length) / self._components[part].weight,
        )
        row, after = self._components[turn].stream.next_row(position.parts[turn], sequence_length)
        parts, tokens = list(position.parts), list(position.tokens)
        parts[turn] = after
        tokens[turn] += sequence_length
        return row, MixedPosition(tuple(parts), tuple(tokens), position.rows + 1)

    def save(self, position: MixedPosition) -> LoaderState:
        parts: LoaderState = {
            component.name: component.stream.save(part) | {"source": component.stream.fingerprint}
            for component, part in zip(self._components, position.parts, strict=True)
        }
        return {"parts": parts, "part_tokens": list(position.tokens), "rows": position.rows}

    def restore(self, state: LoaderState) -> MixedPosition:
        """Returns the position of a state; raises DataError if no mixture of these parts has it."""
        parts = self._saved_parts(state)
        if parts is None:
            raise damaged("other parts")
        positions = []
        for component in self._components:
            part = parts[component.name]
            expected = component.stream.save(component.stream.start()) | {"source": 0}  # for its names
            if not isinstance(part, dict) or part.keys() != expected.keys():
                raise damaged(f"of part {component.name} something else")
            positions.append(component.stream.restore(part))
        tokens = tuple(read_counts(state, "part_tokens", len(positions)))
        return MixedPosition(tuple(positions), tokens, read_count(state, "rows"))

    def changed(self, state: LoaderState) -> str:
        parts = self._saved_parts(state)
        if parts is None:
            return "the parts of its mixture"
        for component in self._components:
            part = parts[component.name]
            if not isinstance(part, dict) or part.get("source") != component.stream.fingerprint:
                return f"documents of part {component.name}"
        return "the weights of its mixture"

    def _saved_parts(self, state: LoaderState) -> "LoaderState | None":
        """The parts of a state; None if it has other ones."""
        parts = state["parts"]
        is_same = isinstance(parts, dict) and list(parts) == [component.name for component in self._components]
        return parts if isinstance(parts, dict) and is_same else None


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """Documents and how they are read."""

    documents: Source | Shards
    name: str = ""  # in the mixture
    weight: float = 1.0
    middle: FillInMiddle | None = None  # the encoder of fill-in-the-middle


@dataclass(frozen=True)
class Text:
    """All documents of one split."""

    parts: tuple[TextPart, ...]  # a single one is no mixture
    corrupt: CorruptRecords = field(default_factory=CorruptRecords)  # counts the records that sources skip

    def __str__(self) -> str:
        """The number of documents, in words."""
        counts = []
        for part in self.parts:
            kind = "shards" if isinstance(part.documents, Shards) else "documents"
            counts.append(f"{len(part.documents):,} {kind}" + (f" of {part.name}" if part.name else ""))
        return ", ".join(counts)


def stream_of(text: Text, *, seed: int, shuffle: bool) -> RowStream[Any]:
    """Returns the rows of a text; without `shuffle` documents come by number, in one lane."""
    components = []
    for part in text.parts:
        lanes = min(LANES, len(part.documents)) if shuffle else 1
        kind: type[Any] = ShardStream if isinstance(part.documents, Shards) else Stream
        stream = kind(part.documents, seed=seed, shuffle=shuffle, lanes=lanes, middle=part.middle)
        components.append(Component(name=part.name, weight=part.weight, stream=stream))
    return components[0].stream if len(components) == 1 else Mixture(components)
