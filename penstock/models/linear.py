"""Matrices and the embedding as modules that may hold a part of the whole.

`cuts` says for each parameter which part (penstock/layout/pieces.py); initial weights, checkpoints and gradient sums
read it there. A module without `cuts` holds its parameters whole.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.layout.pieces import Cut, local_shape
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import reduce_scatter
from penstock.parallel.kit import Kit
from penstock.parallel.later import deferrable


class Linear(nn.Linear):
    """A product with a matrix of which this rank holds rows (of the output), columns (of the input), or all.

    Args:
        inputs: width of the whole input.
        outputs: width of the whole output.
        kit: ranks, and whether weight gradients may come later.
        split: `outputs` if tensor-parallel ranks divide the rows, `inputs` if the columns; None if each holds all.
        blocks: equal blocks that the output is made of, each divided by itself.
    """

    def __init__(self, inputs: int, outputs: int, kit: Kit, *, split: str | None = None, blocks: int = 1) -> None:
        cuts = () if split is None else cut_over(kit.axes.tensor, dim=0 if split == "outputs" else 1, blocks=blocks)
        rows, columns = local_shape((outputs, inputs), cuts)
        super().__init__(columns, rows, bias=False)
        self.cuts = {"weight": cuts}
        self.later = kit.later

    def forward(self, x_D: Tensor) -> Tensor:
        """Multiply the last dim, whatever stands before it."""
        return deferrable(F.linear, (x_D,), (self.weight,), self.later)


class Embedding(nn.Embedding):
    """Token embedding of which tensor-parallel ranks hold equal ranges of the vocabulary.

    Args:
        vocabulary: V.
        hidden_size: D.
        kit: ranks.
    """

    def __init__(self, vocabulary: int, hidden_size: int, kit: Kit) -> None:
        axis = kit.axes.tensor
        cuts = cut_over(axis, dim=0)
        rows, columns = local_shape((vocabulary, hidden_size), cuts)
        super().__init__(rows, columns)
        self.cuts = {"weight": cuts}
        self.axis = axis

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Look up.

        Args:
            tokens_BS: int64 ids, the same on every tensor-parallel rank.

        Returns:
            This rank's positions (all of them if nobody shares them), B x s x D.
        """
        if self.axis.size == 1:
            return F.embedding(tokens_BS, self.weight)
        first = self.axis.rank * self.num_embeddings
        local_BS = tokens_BS - first
        is_here_BS = (local_BS >= 0) & (local_BS < self.num_embeddings)
        x_BSD = F.embedding(torch.where(is_here_BS, local_BS, 0), self.weight)
        return reduce_scatter(torch.where(is_here_BS[..., None], x_BSD, 0), self.axis, dim=1)


def cut_over(axis: Axis, *, dim: int, blocks: int = 1) -> tuple[Cut, ...]:
    """The cut of a dim over the ranks of an axis; none if there is one rank."""
    return () if axis.size == 1 else (Cut(dim, axis.rank, axis.size, blocks),)
