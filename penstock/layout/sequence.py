"""The positions of a row on each rank, under context parallelism and tensor parallelism inside it.

Causal attention costs more at later positions. With the "all-gather" method (of keys and values) every rank attends for
its own positions, so the row is cut into 2 x context chunks, and rank i takes the i-th from the front and the i-th from
the back: all ranks get equal work. With context 2:

    position  0 1 2 3 4 5 6 7        rank 0: 0 1 6 7        rank 1: 2 3 4 5

With "ulysses" ranks exchange positions for heads and attend over the whole row, so plain chunks are balanced: rank 0
has 0 1 2 3. Tensor parallelism cuts the positions of a context rank, in their local order, into `tensor` equal parts
(sequence parallelism).

Sources: Llama 3 (arXiv 2407.21783, section 3.3.2) for the chunks, arXiv 2309.14509 for Ulysses.
"""

from dataclasses import dataclass
from typing import Literal

Method = Literal["all-gather", "ulysses"]


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """The positions of a row over context x tensor ranks."""

    length: int
    context: int = 1
    tensor: int = 1
    method: Method = "all-gather"

    def __post_init__(self) -> None:
        assert self.length % multiple_of(self.context, self.tensor, self.method) == 0, f"{self} does not divide"

    def chunks(self, context_rank: int) -> tuple[range, ...]:
        """Positions of a context rank as contiguous ranges: one, or an early and a late one."""
        chunks = [context_rank]
        if self.method == "all-gather" and self.context > 1:
            chunks.append(2 * self.context - 1 - context_rank)
        size = self.length // (self.context * len(chunks))
        return tuple(range(chunk * size, (chunk + 1) * size) for chunk in chunks)

    def of_context(self, context_rank: int) -> tuple[int, ...]:
        """Positions of a context rank (all its tensor ranks), ascending."""
        return tuple(position for chunk in self.chunks(context_rank) for position in chunk)

    def of_rank(self, context_rank: int, tensor_rank: int) -> tuple[int, ...]:
        """Positions of one rank, ascending."""
        held = self.of_context(context_rank)
        size = len(held) // self.tensor
        return held[tensor_rank * size : (tensor_rank + 1) * size]


def multiple_of(context: int, tensor: int, method: Method) -> int:
    """The divisor of a row's length: every chunk needs an equal part for every tensor rank."""
    chunks = 2 if method == "all-gather" and context > 1 else 1
    return chunks * context * tensor
