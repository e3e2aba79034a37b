"""What a run trains on: one text or several, each with a weight, and how each becomes a stream of rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.data.documents import CorruptRecords
from penstock.data.fill_in_middle import FillInMiddle
from penstock.data.shards import Shards, ShardStream
from penstock.data.sources import Source, Tokens, fingerprint_of
from penstock.data.stream import LANES, LoaderState, RowStream, Stream, damaged, number, numbers


class MixedPosition(NamedTuple):
    """A place between two rows.

    Attributes:
        parts: the place in each part, a position of its stream.
        tokens: how many tokens lie behind, of each part.
        rows: how many rows lie behind, of all.
    """

    parts: tuple[Any, ...]
    tokens: tuple[int, ...]
    rows: int


@dataclass(frozen=True, kw_only=True)
class Component:
    """A part of a mixture.

    Attributes:
        name: as the user calls it.
        weight: above 0.
        stream: its rows.
    """

    name: str
    weight: float
    stream: RowStream[Any]


class Mixture(RowStream[MixedPosition]):
    """Reads the rows of all parts."""

    def __init__(self, components: Sequence[Component]) -> None:
        """Takes the parts, at least one, with different names."""
        assert len({component.name for component in components}) == len(components) > 0, "parts have names"
        self._components = tuple(components)
        self.vocabulary_size = max(component.stream.vocabulary_size for component in components)
        self.fingerprint = fingerprint_of([self._identity(component) for component in components])

    def start(self) -> MixedPosition:
        """Returns the position before the first row."""
        starts = tuple(component.stream.start() for component in self._components)
        return MixedPosition(starts, (0,) * len(starts), 0)

    def next_row(self, position: MixedPosition, sequence_length: int) -> tuple[Sequence[Tokens], MixedPosition]:
        """Returns the next row of the part whose turn it is."""
        turn = min(
            range(len(self._components)),
            key=lambda part: (position.tokens[part] + sequence_length) / self._components[part].weight,
        )
        row, behind = self._components[turn].stream.next_row(position.parts[turn], sequence_length)
        parts, tokens = list(position.parts), list(position.tokens)
        parts[turn] = behind
        tokens[turn] += sequence_length
        return row, MixedPosition(tuple(parts), tuple(tokens), position.rows + 1)

    def save(self, position: MixedPosition) -> LoaderState:
        """Returns the place in every part by its name, and how many tokens each has given."""
        parts: LoaderState = {
            component.name: component.stream.save(place) | {"source": component.stream.fingerprint}
            for component, place in zip(self._components, position.parts, strict=True)
        }
        return {"parts": parts, "part_tokens": list(position.tokens), "rows": position.rows}

    def restore(self, state: LoaderState) -> MixedPosition:
        """Returns the position in a state; an error if no mixture of these parts can be there."""
        parts = state["parts"]
        if not isinstance(parts, dict) or list(parts) != [component.name for component in self._components]:
            raise damaged("other parts")
        places = []
        for component in self._components:
            part = parts[component.name]
            expected = component.stream.save(component.stream.start()) | {"source": 0}
            if not isinstance(part, dict) or part.keys() != expected.keys():
                raise damaged(f"of part {component.name} something else")
            places.append(component.stream.restore(part))
        tokens = tuple(numbers(state, "part_tokens", len(places)))
        return MixedPosition(tuple(places), tokens, number(state, "rows"))

    def changed(self, state: LoaderState) -> str:
        """Returns which part is another text."""
        parts = state["parts"]
        if not isinstance(parts, dict) or list(parts) != [component.name for component in self._components]:
            return "the parts of its mixture"
        for component in self._components:
            part = parts[component.name]
            if not isinstance(part, dict) or part.get("source") != component.stream.fingerprint:
                return f"documents of part {component.name}"
        return "the weights of its mixture"

    @staticmethod
    def _identity(component: Component) -> tuple[str, float, int]:
        return component.name, component.weight, component.stream.fingerprint


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
