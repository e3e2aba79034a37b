"""Which positions of a row each rank holds, under context parallelism and under tensor parallelism inside it.

Under causal attention a late position has more to do than an early one. Where every rank attends for its own positions
("all-gather": of keys and values), the row is cut into 2 x context chunks and rank i takes the i-th from the front and
the i-th from the back, so that all do the same. With context 2:

    position  0 1 2 3 4 5 6 7        rank 0: 0 1 6 7        rank 1: 2 3 4 5

Where ranks exchange positions for heads ("ulysses"), each of them attends for the whole row, and a plain cut will do:
rank 0: 0 1 2 3. Tensor parallelism then cuts what a context rank holds into `tensor` parts that lie together, in the
order in which the rank holds it (sequence parallelism).

Sources: Llama 3 (arXiv 2407.21783, section 3.3.2) for the chunks, arXiv 2309.14509 for Ulysses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Method = Literal["all-gather", "ulysses"]


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """The positions of a row over context x tensor ranks.

    Attributes:
        length: positions of a row.
        context: context-parallel ranks.
        tensor: tensor-parallel ranks of each of them.
        method: how context-parallel ranks attend.
    """

    length: int
    context: int = 1
    tensor: int = 1
    method: Method = "all-gather"

    def __post_init__(self) -> None:
        assert self.length % self.multiple_of == 0, f"{self} does not divide"

    @property
    def multiple_of(self) -> int:
        """What divides a length that can be laid out so."""
        return multiple_of(self.context, self.tensor, self.method)

    def chunks(self, context_rank: int) -> tuple[range, ...]:
        """Positions of a context rank as ranges that lie together: one, or one near and one far."""
        chunks = [context_rank]
        if self.method == "all-gather" and self.context > 1:
            chunks.append(2 * self.context - 1 - context_rank)
        size = self.length // (self.context * len(chunks))
        return tuple(range(chunk * size, (chunk + 1) * size) for chunk in chunks)

    def of_context(self, context_rank: int) -> tuple[int, ...]:
        """Positions of all tensor ranks of a context rank, in the order in which they are held; ascending."""
        return tuple(position for chunk in self.chunks(context_rank) for position in chunk)

    def of_rank(self, context_rank: int, tensor_rank: int) -> tuple[int, ...]:
        """Positions of one rank, ascending."""
        held = self.of_context(context_rank)
        size = len(held) // self.tensor
        return held[tensor_rank * size : (tensor_rank + 1) * size]

    def gathered(self) -> tuple[int, ...]:
        """Positions in the order in which they lie when all ranks' parts are put behind one another.

        The tensor rank counts fastest. `gathered()[place]` is the position that stands at a place.
        """
        return tuple(position for rank in range(self.context) for position in self.of_context(rank))

    def places(self) -> tuple[int, ...]:
        """Where each position lies in what is gathered: the inverse of `gathered`, which puts a row in order again."""
        return inverse(self.gathered())


def multiple_of(context: int, tensor: int, method: Method) -> int:
    """What a row's length must be a multiple of, so that every chunk has an equal part for every tensor rank."""
    chunks = 2 if method == "all-gather" and context > 1 else 1
    return chunks * context * tensor


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes another one."""
    places = [0] * len(order)
    for place, position in enumerate(order):
        places[position] = place
    return tuple(places)
