"""Orders of numbers in files that differ from ours, as pairs of inverse functions.

A family names a rearrangement by the function that makes it for a model's sizes (`RearrangementOf`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.config.model import LatentAttention, LinearAttention, Model

Change: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rearrangement:
    """A permutation of the numbers of a tensor."""

    read: Change  # from the order of the file to ours
    write: Change  # its inverse


RearrangementOf: TypeAlias = Callable[[Model], Rearrangement]  # a rearrangement with the sizes of a model


def grid_transposed(dim: int, rows: int, columns: int) -> Rearrangement:
    """A dim made of equal blocks, each a grid of rows x columns that is row-major in the file and column-major here.

    A head of 6 rows, for example, is stored as a0 a1 a2 b0 b1 b2 (2 rows, 3 columns) and read as a0 b0 a1 b1 a2 b2.
    """

    def transpose(tensor: Tensor, rows: int, columns: int) -> Tensor:
        return tensor.unflatten(dim, (-1, rows, columns)).transpose(dim + 1, dim + 2).flatten(dim, dim + 2)

    return Rearrangement(lambda stored: transpose(stored, rows, columns), lambda ours: transpose(ours, columns, rows))


def _of_first_rows(block: int, rows: int, form: Rearrangement) -> Rearrangement:
    """Dim 0 made of equal blocks, of which a rearrangement concerns the first rows of all together."""

    def apply(tensor: Tensor, change: Change) -> Tensor:
        blocks = tensor.unflatten(0, (-1, block))
        first = change(blocks[:, :rows].flatten(0, 1)).unflatten(0, (-1, rows))
        return torch.cat((first, blocks[:, rows:]), dim=1).flatten(0, 1)

    return Rearrangement(lambda stored: apply(stored, form.read), lambda ours: apply(ours, form.write))


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
    halves = grid_transposed(0, 2, rotary // 2)
    return halves if rotary == block else _of_first_rows(block, rotary, halves)


def nested(config: Model) -> Rearrangement:
    """The file has one more dim of size 1, the first."""
    return _nested(0)


def nested_last(config: Model) -> Rearrangement:
    """The file has one more dim of size 1, the last."""
    return _nested(-1)


def channels(config: Model) -> Rearrangement:
    """Weights of a convolution of single channels, which the file has with one input channel each."""
    return _nested(1)


def _nested(dim: int) -> Rearrangement:
    return Rearrangement(lambda stored: stored.squeeze(dim), lambda ours: ours.unsqueeze(dim))


def transposed(config: Model) -> Rearrangement:
    """A stack of matrices that the file has as inputs x outputs."""
    return Rearrangement(lambda stored: stored.mT, lambda ours: ours.mT)


def interleaved(config: Model) -> Rearrangement:
    """Dim 1: rows of gate and up projection alternate in the file."""
    assert config.moe is not None, "only experts are interleaved"
    return grid_transposed(1, config.moe.moe_intermediate_size, 2)


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


DivisionOf: TypeAlias = Callable[[Model], Division]  # a division with the sizes of a model


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
