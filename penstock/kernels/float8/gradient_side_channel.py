"""Gradients in 8 bits on their way from one backward to the next.

Autograd passes on tensors of the dtype of what they are gradients of. Where the kernel that makes a gradient can
quantize it, the product that reads it gets it by a `GradientSideChannel` that both functions know, and autograd gets a
carrier: a tensor of the right shape and dtype with one number of memory, which nobody may read.

    backward of who makes it       handed.put(both); return carrier_of(dy)
    backward of the product        both = handed.take(), and dy is not looked at if there is one

So what is handed over has one reader, and its maker is the only one who gives it a gradient.
"""

from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from penstock.kernels.float8.quantized import RowColQuantized
from penstock.kernels.float8.recipes import BLOCKWISE, DEPTH, Recipe

Gradient = TypeVar("Gradient")
"""By rows, or by rows and transposed."""


class SideChannelHandover(Generic[Gradient]):
    """The place of one gradient. No dataclass: who rebuilds one, as a region that runs again, would make another."""

    def __init__(self) -> None:
        self._gradient: Gradient | None = None

    def put(self, gradient: Gradient) -> None:
        """Leave a gradient; one that nobody took was that of a walk that ended in the middle."""
        self._gradient = gradient

    def take(self) -> Gradient | None:
        """What was left, once; None if the gradient comes through autograd."""
        gradient, self._gradient = self._gradient, None
        return gradient


class GradientSideChannel(SideChannelHandover[RowColQuantized]):
    """The gradient of a product, for both of the products that read it."""


class HandedHeads(NamedTuple):
    """Those of the products behind which latent attention's heads are assembled; None where 16 bits come by autograd.

    Attributes:
        q: tokens x (H N).
        kv: tokens x (H (plain + M)).
    """

    q: GradientSideChannel | None = None
    kv: GradientSideChannel | None = None


def carrier_of(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """What autograd is given for a gradient that is handed over.

    Args:
        shape: its own.
        like: of its dtype and device.
    """
    return like.new_empty_strided(shape, (0,) * len(shape))


def obstacle(recipe: Recipe, heads: int, plain: int, rotary: int, value: int) -> str | None:
    """Why latent attention's heads cannot hand their gradients over, or None.

    Args:
        recipe: of the products that read them.
        heads: of this rank.
        plain: width of a head of queries and keys without its rotary part.
        rotary: width of that.
        value: width of a head of values.
    """
    if (recipe.rows, recipe.scaling) != (BLOCKWISE.rows, BLOCKWISE.scaling):
        return f"gradients are quantized tile by tile in blocks of 1 x {DEPTH}, and {recipe.name} has others"
    if plain % DEPTH or value % DEPTH:
        return f"keys of {plain} and values of {value} columns share a tile of {DEPTH}"
    if heads * (plain + rotary) % DEPTH or plain % 2 or rotary % 2:
        return f"{heads} heads of {plain + rotary} columns do not fill tiles of {DEPTH}"
    return None
