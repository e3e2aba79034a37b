"""Orders of numbers in files that differ from ours, as pairs of inverse functions.

A family names a rearrangement by the function that makes it for a model's sizes (`RearrangementOf`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.config.model import Model


class Rearrangement(Protocol):
    """A permutation of the numbers of a tensor; `write` is the inverse of `read`."""

    def read(self, stored: Tensor) -> Tensor:
        """From the order of the file to ours."""

    def write(self, ours: Tensor) -> Tensor:
        """From our order to that of the file."""


RearrangementOf: TypeAlias = Callable[[Model], Rearrangement]
"""A rearrangement with the sizes of a model."""


@dataclass(frozen=True)
class GridTransposed:
    """A dim made of equal blocks, each a grid that is row-major in the file and column-major here.

    A head of 6 rows, for example, is stored as a0 a1 a2 b0 b1 b2 (2 rows, 3 columns) and read as a0 b0 a1 b1 a2 b2.
    """

    dim: int
    rows: int  # of the stored grid
    columns: int

    def read(self, stored: Tensor) -> Tensor:
        """From row-major to column-major."""
        return _transpose_grid(stored, self.dim, self.rows, self.columns)

    def write(self, ours: Tensor) -> Tensor:
        """From column-major to row-major."""
        return _transpose_grid(ours, self.dim, self.columns, self.rows)


@dataclass(frozen=True)
class FirstRows:
    """Dim 0 made of equal blocks, of which a rearrangement concerns the first rows; the others stay."""

    block: int  # rows of a block
    rows: int
    form: "Rearrangement"  # of these rows of all blocks together

    def read(self, stored: Tensor) -> Tensor:
        """Rearrange the first rows of each block."""
        return self._apply(stored, self.form.read)

    def write(self, ours: Tensor) -> Tensor:
        """And back."""
        return self._apply(ours, self.form.write)

    def _apply(self, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        blocks = tensor.unflatten(0, (-1, self.block))
        first = change(blocks[:, : self.rows].flatten(0, 1)).unflatten(0, (-1, self.rows))
        return torch.cat((first, blocks[:, self.rows :]), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Nested:
    """The file has one more dim, of size 1, in front."""

    def read(self, stored: Tensor) -> Tensor:
        """Leave it out."""
        return stored.squeeze(0)

    def write(self, ours: Tensor) -> Tensor:
        """Put it in front."""
        return ours.unsqueeze(0)


@dataclass(frozen=True)
class Transposed:
    """The last two dims are swapped."""

    def read(self, stored: Tensor) -> Tensor:
        """Swap them."""
        return stored.mT

    def write(self, ours: Tensor) -> Tensor:
        """Swap them back."""
        return ours.mT


def _transpose_grid(tensor: Tensor, dim: int, rows: int, columns: int) -> Tensor:
    return tensor.unflatten(dim, (-1, rows, columns)).transpose(dim + 1, dim + 2).flatten(dim, dim + 2)


def rotary_halves(config: Model) -> Rearrangement:
    """Dim 0: heads, stored as the first members of all rotary pairs, then the second members.

    Here the members of a pair are neighbours. Permuting the rows of query and key weights alike does not change scores,
    so one rotation kernel serves all families. With partial rotary embedding the rest of a head keeps its order.
    """
    width, rotary = config.attention.head_dim, config.attention.rotary_dim
    halves = GridTransposed(0, 2, rotary // 2)
    return halves if rotary == width else FirstRows(width, rotary, halves)


def nested(config: Model) -> Rearrangement:
    """A tensor with one more dim in the file."""
    return Nested()


def transposed(config: Model) -> Rearrangement:
    """A stack of matrices that the file has as inputs x outputs."""
    return Transposed()


def interleaved(config: Model) -> Rearrangement:
    """Dim 1: rows of gate and up projection alternate in the file."""
    assert config.moe is not None, "only experts are interleaved"
    return GridTransposed(1, config.moe.moe_intermediate_size, 2)
