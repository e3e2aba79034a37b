"""What stands between the marks of a rehearsed pass: pieces of a stage, and the stage that they make.

A piece has its operators, and three numbers of bytes:

    kept        from its forward until its backward
    forward     the most in its forward, over what was held before it
    backward    the most in its backward, over what was held before its forward

Layers of one kind have the same. So of a stage with all of its layers a pass holds, in piece i, what the pieces before
i keep and the most of piece i; nothing is estimated. penstock/plan/activations.py finds pieces.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.plan.tape import Work

PUT_OFF = "put off"
"""Name of what waits for weight gradients."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a stage: what stands before its layers, a layer, or what stands behind them. All in bytes.

    Attributes:
        name: `embed`, a layer's kind, or `head`.
        kept: from forward to backward, by the name of the module that allocated it.
        forward: see the top of the file.
        backward: likewise.
        at_forward: what the ledger held at the peak of forward, less what was held before.
        at_backward: the same of backward.
        left: what waits for weight gradients after a backward pass that puts them off.
        forward_work: operators of its forward.
        backward_work: of its backward, but for weight gradients that are put off.
        weight_work: those of the weight gradients that are.
    """

    name: str
    kept: Mapping[str, int]
    forward: int
    backward: int
    at_forward: Mapping[str, int]
    at_backward: Mapping[str, int]
    left: int = 0
    forward_work: Work = ()
    backward_work: Work = ()
    weight_work: Work = ()

    @property
    def kept_bytes(self) -> int:
        """All that is kept."""
        return sum(self.kept.values())


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that a pass holds, over what was held before its micro-batch began.

    Attributes:
        bytes: all.
        terms: by name of who allocated them; together all.
    """

    bytes: int
    terms: Counter[str]


@dataclass(frozen=True, kw_only=True)
class StageActivations:
    """One stage of a rank.

    Attributes:
        number: of the stage.
        pieces: first to last; one for each layer.
        weight: the most that put-off weight gradients take, over what waits for them.
    """

    number: int
    pieces: tuple[Piece, ...]
    weight: int = 0

    @property
    def kept(self) -> Counter[str]:
        """From a micro-batch's forward to its backward."""
        total: Counter[str] = Counter()
        for piece in self.pieces:
            total.update(piece.kept)
        return total

    @property
    def kept_bytes(self) -> int:
        """All of `kept`."""
        return sum(piece.kept_bytes for piece in self.pieces)

    @property
    def left(self) -> int:
        """From the gradient of a micro-batch's input to its weight gradients."""
        return sum(piece.left for piece in self.pieces)

    @property
    def forward(self) -> Peak:
        """Of a forward pass."""
        return self._peak([piece.forward for piece in self.pieces], [piece.at_forward for piece in self.pieces])

    @property
    def backward(self) -> Peak:
        """Of a backward pass."""
        lefts = [sum(piece.left for piece in self.pieces[place + 1 :]) for place in range(len(self.pieces))]
        sizes = [piece.backward + left for piece, left in zip(self.pieces, lefts, strict=True)]
        return self._peak(sizes, [piece.at_backward for piece in self.pieces])

    def _peak(self, sizes: Sequence[int], terms: Sequence[Mapping[str, int]]) -> Peak:
        bases = list(accumulate((piece.kept_bytes for piece in self.pieces), initial=0))
        place = max(range(len(sizes)), key=lambda place: bases[place] + sizes[place])
        found = Counter(terms[place])
        for piece in self.pieces[:place]:
            found.update(piece.kept)
        found[PUT_OFF] = bases[place] + sizes[place] - sum(found.values())
        return Peak(
            bytes=bases[place] + sizes[place], terms=Counter({name: size for name, size in found.items() if size})
        )
