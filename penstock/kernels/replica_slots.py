"""Replicas of experts as the experts' networks see them: weights that come from other ranks, gradients that go back.

The rows of a rank are those of its own experts, then those of its replicas; `counts_e` counts both. Slots hold the
weights of replicas for one call of the network. Nothing of them is saved for backward, which fetches them again by the
same plan:

    forward     fetch, products of own experts, products of replicas
    backward    fetch, input gradients; weight gradients, of which those of replicas go home in float32

A fetch may begin earlier, while rows travel to the experts, or gradients of their outputs.

Kernels read a `SlottedWeight` as two stacks of matrices, one launch for each (`penstock.kernels.tile_table`), and write
gradients so; backends of torch join them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.kernels.tile_table import TileTable


class ReplicaSlots(Protocol):
    """The replicas of one micro-batch in one layer. All ranks of the axis make the same calls in the same order."""

    @property
    def slots(self) -> int:
        """Replicas that a rank can hold; also the last entries of `counts_e`."""
        ...

    def begin(self, *parameters: Tensor) -> None:
        """Begin the next `fetch`, of the same parameters, beside what follows.

        If other slots begin or fetch before it, as in recomputation, that fetch sends the weights again.
        """
        ...

    def fetch(self, *parameters: Tensor) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        """Send own experts' parameters to the ranks with replicas of them; returns those of our slots.

        `parameters` are matrices, then biases (e x ...), results X x ..., valid until the next call. A slot without a
        replica holds anything. Also returns a function that makes the current stream wait until all are here.
        """
        ...

    def gradient_sums(self, index: int, weight_e: Tensor) -> Tensor:
        """Float32 sums for the gradient of our slots, X x the shape of one expert's `weight_e`.

        `index` is that of the parameter among those of `fetch`. Slots with a replica are zero, others hold anything.
        """
        ...

    def give_back(
        self, index: int, gradients: Sequence[Tensor], totals: Sequence[Tensor], *, aside: bool = False
    ) -> None:
        """Send float32 gradients of our slots home, and add those of our experts' replicas to the totals (e x ...).

        They are those of the parameters from `index` on, and are added in the order of ranks and slots, and rounded
        once if a total has 16 bits. With `aside` nothing reads the totals before the layer's backward pass is over.
        """
        ...


def already_here() -> None:
    """What `ReplicaSlots.fetch` returns if the weights are there in the order of the stream."""


class SlottedWeight(NamedTuple):
    """A weight, or its gradient, in two places: that of own experts, and that of replicas. Tensors, or quantized."""

    own: Any  # of a gradient's sum: None if the gradient is not added to one
    slots: Any
    wait: Callable[[], None] = already_here  # to be called before the slots are read

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of both as one stack."""
        return (len(self.own) + len(self.slots), *self.own.shape[1:])


@dataclass(frozen=True)
class WeightPart:
    """One launch of a product: the weight, the table of its experts, and which of all experts they are."""

    weight: Any
    tiles: TileTable
    experts: slice


def weight_parts(weight: Any, tiles: TileTable) -> Iterator[WeightPart]:
    """The launches of a product: one, or one for each part of a `SlottedWeight`, which waits for its slots between.

    A dry run has the first launch only, whose rows are all.
    """
    if not isinstance(weight, SlottedWeight):
        yield WeightPart(weight, tiles, slice(None))
        return
    assert tiles.parts is not None, "a weight in two places needs tables of both"
    local_experts = tiles.parts[0].starts_e.numel() - 1
    yield WeightPart(weight.own, tiles.parts[0], slice(local_experts))
    if tiles.starts_e.is_meta:
        return
    weight.wait()
    yield WeightPart(weight.slots, tiles.parts[1], slice(local_experts, None))


def joined(weight: Tensor | SlottedWeight) -> Tensor:
    if not isinstance(weight, SlottedWeight):
        return weight
    weight.wait()
    return torch.cat((weight.own, weight.slots))
