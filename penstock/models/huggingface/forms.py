"""How the numbers of a tensor there stand in ours. A form moves numbers and never changes one, in both directions.

Rotary embedding turns pairs. Ours are neighbours; most families keep the first members of a head's pairs, then the
second ones, because their code turns halves. Permuting the rows of queries and keys, once, when weights are exchanged,
leaves one kernel for all: scores do not change if both are permuted alike.

A head of 6 rows (there a0 a1 a2 b0 b1 b2, a grid of 2 rows and 3 columns) is read column by column: a0 b0 a1 b1 a2 b2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from penstock.config.model import Model


class Rearrangement(Protocol):
    """One rearrangement; `write` undoes `read`."""

    def read(self, theirs: Tensor) -> Tensor:
        """From their order of numbers to ours."""

    def write(self, ours: Tensor) -> Tensor:
        """From our order to theirs."""


RearrangementOf: TypeAlias = Callable[[Model], Rearrangement]
"""A form whose sizes are those of a model."""


@dataclass(frozen=True)
class Turned:
    """A dim made of equal blocks, each a grid that stands there row by row and here column by column.

    Attributes:
        dim: of both tensors.
        rows: of the grid as it stands there.
        columns: of it; a block is `rows` x `columns` long.
    """

    dim: int
    rows: int
    columns: int

    def read(self, theirs: Tensor) -> Tensor:
        """From row by row to column by column."""
        return _turn(theirs, self.dim, self.rows, self.columns)

    def write(self, ours: Tensor) -> Tensor:
        """From column by column to row by row."""
        return _turn(ours, self.dim, self.columns, self.rows)


@dataclass(frozen=True)
class Transposed:
    """The last two dims change places."""

    def read(self, theirs: Tensor) -> Tensor:
        """Swap them."""
        return theirs.mT

    def write(self, ours: Tensor) -> Tensor:
        """Swap them back."""
        return ours.mT


def _turn(tensor: Tensor, dim: int, rows: int, columns: int) -> Tensor:
    return tensor.unflatten(dim, (-1, rows, columns)).transpose(dim + 1, dim + 2).flatten(dim, dim + 2)


def rotary_halves(config: Model) -> Rearrangement:
    """First dim: heads, each of them first and second members of its pairs."""
    return Turned(0, 2, config.attention.head_dim // 2)


def transposed(config: Model) -> Rearrangement:
    """A stack of matrices, input x output there."""
    return Transposed()


def interleaved(config: Model) -> Rearrangement:
    """Second dim: a row of the gate, then the same row of the up projection, and so on."""
    assert config.moe is not None, "only experts are interleaved"
    return Turned(1, config.moe.moe_intermediate_size, 2)
