"""Gradients in 8 bits, handed from one backward function to the next beside autograd.

Autograd casts a gradient to the dtype of the tensor that it belongs to, so it cannot carry 8 bits. Where the function
that makes a gradient quantizes it, both functions share a `GradientSideChannel`, and autograd gets a carrier: a tensor
of the right shape and dtype with one element of memory, which must not be read.

    backward of the maker      channel.put(gradient); return carrier_of(dy)
    backward of the reader     gradient = channel.take(), and dy is not read unless that is None

A gradient handed over so has one reader, and its maker must be the only source of that gradient.
"""

from typing import NamedTuple

from torch import Tensor

from penstock.kernels.float8.quantized import RowColQuantized
from penstock.kernels.float8.recipes import BLOCKWISE, DEPTH, Recipe


class GradientSideChannel:
    """The place of one gradient in 8 bits between two backward functions.

    Both nodes of a graph must hold the same object, so it is no dataclass: a region that is recomputed would rebuild
    it. A recomputed region has a channel of its own, which stays empty.
    """

    def __init__(self) -> None:
        # The maker may put a gradient only if the reader announced in forward that it looks here, on all ranks.
        self.is_expected = False
        self._gradient: RowColQuantized | None = None

    def expect(self) -> None:
        """Announce in forward that backward will take the gradient from here."""
        self.is_expected = True

    def put(self, gradient: RowColQuantized) -> None:
        """Leave a gradient. One that was never taken, because its backward pass was aborted, is replaced."""
        self._gradient = gradient

    def take(self) -> RowColQuantized | None:
        """The gradient that was put, once; None if it comes through autograd."""
        gradient, self._gradient = self._gradient, None
        return gradient


class LatentHeadChannels(NamedTuple):
    """Side channels of the two products before latent attention's heads; None where 16 bits come by autograd."""

    q: GradientSideChannel | None = None  # tokens x (H N)
    kv: GradientSideChannel | None = None  # tokens x (H (qk_nope + M))


def carrier_of(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor of a shape with one element of memory, which autograd gets in place of a gradient."""
    return like.new_empty_strided(shape, (0,) * len(shape))


def latent_heads_obstacle(recipe: Recipe, heads: int, nope: int, rotary: int, value: int) -> str | None:
    """Why the gradients of heads of [nope | rotary] and `value` columns cannot be handed over in 8 bits, or None."""
    if (recipe.rows, recipe.scaling) != (BLOCKWISE.rows, BLOCKWISE.scaling):
        return f"gradients are quantized tile by tile in blocks of 1 x {DEPTH}, and {recipe.name} has others"
    if nope % DEPTH or value % DEPTH:
        return f"keys of {nope} and values of {value} columns share a tile of {DEPTH}"
    if heads * (nope + rotary) % DEPTH or nope % 2 or rotary % 2:
        return f"{heads} heads of {nope + rotary} columns do not fill tiles of {DEPTH}"
    return None
