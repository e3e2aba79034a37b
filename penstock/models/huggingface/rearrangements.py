"""Orders of numbers in files that differ from ours, as pairs of inverse functions.

A family names a rearrangement by the function that makes it for a model's sizes (`RearrangementOf`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.config.model import LatentAttention, LinearAttention, Model


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
        return self._apply(stored, self.form.read)

    def write(self, ours: Tensor) -> Tensor:
        return self._apply(ours, self.form.write)

    def _apply(self, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        blocks = tensor.unflatten(0, (-1, self.block))
        first = change(blocks[:, : self.rows].flatten(0, 1)).unflatten(0, (-1, self.rows))
        return torch.cat((first, blocks[:, self.rows :]), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Nested:
    """The file has one more dim, of size 1."""

    dim: int

    def read(self, stored: Tensor) -> Tensor:
        return stored.squeeze(self.dim)

    def write(self, ours: Tensor) -> Tensor:
        return ours.unsqueeze(self.dim)


@dataclass(frozen=True)
class Transposed:
    """The last two dims are swapped."""

    def read(self, stored: Tensor) -> Tensor:
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
    return _halves(config, config.attention.head_dim)


def rotary_halves_of_queries(config: Model) -> Rearrangement:
    """The same where each head has its gate behind its query."""
    return _halves(config, 2 * config.attention.head_dim)


def rotary_halves_of_indexer(config: Model) -> Rearrangement:
    """The same for queries and the key of the indexer, whose first features are rotated."""
    attention = config.attention
    assert isinstance(attention, LatentAttention), "the family has an indexer"
    assert attention.indexer is not None, "the family has an indexer"
    return _halves(config, attention.indexer.index_head_dim)


def _halves(config: Model, block: int) -> Rearrangement:
    rotary = config.attention.rotary_dim
    if rotary < 2 or rotary % 2 or rotary > block:
        raise ConfigError(
            "head_dim, partial_rotary_factor, qk_rope_head_dim and index_head_dim leave no pairs of rotated features",
            got=f"{rotary} of {block}",
            allowed="an even number, at least 2",
        )
    halves = GridTransposed(0, 2, rotary // 2)
    return halves if rotary == block else FirstRows(block, rotary, halves)


def channels(config: Model) -> Rearrangement:
    """Weights of a convolution of single channels, which the file has with one input channel each."""
    return Nested(1)


def nested(config: Model) -> Rearrangement:
    """A tensor with one more dim in the file."""
    return Nested(0)


def nested_last(config: Model) -> Rearrangement:
    """A tensor with one more dim at its end in the file."""
    return Nested(-1)


def transposed(config: Model) -> Rearrangement:
    """A stack of matrices that the file has as inputs x outputs."""
    return Transposed()


def interleaved(config: Model) -> Rearrangement:
    """Dim 1: rows of gate and up projection alternate in the file."""
    assert config.moe is not None, "only experts are interleaved"
    return GridTransposed(1, config.moe.moe_intermediate_size, 2)


@dataclass(frozen=True)
class Division:
    """A tensor of a file that several of ours fill: dim 0 is equal blocks, and each block has rows for each of them.

    Of 2 blocks with widths (2, 1), for example, the first of ours has rows 0 1 3 4 and the second has rows 2 5.
    """

    blocks: int
    widths: tuple[int, ...]  # rows of a block by tensor, in the order of the file

    def take(self, stored: Tensor, index: int) -> Tensor:
        """The rows of one of ours."""
        begin = sum(self.widths[:index])
        return stored.unflatten(0, (self.blocks, -1))[:, begin : begin + self.widths[index]].flatten(0, 1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor of the file, from the rows of all of ours."""
        return torch.cat([part.unflatten(0, (self.blocks, -1)) for part in parts], dim=1).flatten(0, 1)

    @property
    def rows(self) -> int:
        """Rows of the file's tensor."""
        return self.blocks * sum(self.widths)


DivisionOf: TypeAlias = Callable[[Model], Division]
"""A division with the sizes of a model."""


def _linear(config: Model) -> LinearAttention:
    assert config.linear_attention is not None, "the family has linear attention"
    return config.linear_attention


def by_key_head(config: Model) -> Division:
    """Qwen3-Next: for each key head its query, its key, and the values and gates of its value heads."""
    linear = _linear(config)
    of_values = linear.value_heads // linear.key_heads * linear.value_head_dim
    return Division(linear.key_heads, (linear.key_head_dim, linear.key_head_dim, of_values, of_values))


def two_by_key_head(config: Model) -> Division:
    """Qwen3-Next: for each key head a number and another one of its value heads."""
    linear = _linear(config)
    return Division(linear.key_heads, (linear.value_heads // linear.key_heads,) * 2)


def all_at_once(config: Model) -> Division:
    """Queries of all heads, then keys, then values."""
    linear = _linear(config)
    keys, values = linear.key_heads * linear.key_head_dim, linear.value_heads * linear.value_head_dim
    return Division(1, (keys, keys, values))
