"""Matrices of parameters and the ranks that orthogonalize them (Muon), integers only.

A parameter holds one matrix, or a stack of them; rows of gate and up are two blocks, each a matrix:

    query (F, D)                            1 matrix      F x D
    gate_up of 4 experts (4, 2 F, D)        8 matrices    gate of expert 0, up of expert 0, gate of expert 1, ...

Ranks hold rectangles of a matrix, and one of them, its owner, gathers it, orthogonalizes it whole and sends the parts
back. Owners have about the same work (`owners_of`): matrices with few possible owners come first, larger ones before
smaller ones, and each goes to the rank with the least work so far. With 8, 4, 4 and 2 on two ranks with parts of all:

    rank 0    8 2          rank 1    4 4
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from penstock.layout.sharding import Rectangle


@dataclass(frozen=True)
class Matrices:
    """The equal matrices of a parameter."""

    shape: tuple[int, ...]  # of the whole parameter
    blocks: int = 1  # equal blocks of rows in each member of the stack

    def __post_init__(self) -> None:
        assert len(self.shape) in (2, 3), f"no matrix and no stack of them: {self.shape}"
        assert self.shape[-2] % self.blocks == 0, f"{self.shape} has no {self.blocks} equal blocks of rows"

    @property
    def rows(self) -> int:
        return self.shape[-2] // self.blocks

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def count(self) -> int:
        return prod(self.shape[:-2]) * self.blocks

    def meets(self, box: Rectangle) -> Iterator[tuple[int, Rectangle]]:
        """Numbers of the matrices that a rectangle of the parameter meets, and the common rectangles."""
        stack = range(box.begin[0], box.end[0]) if len(self.shape) == 3 else range(1)
        for member in stack:
            for block in range(box.begin[-2] // self.rows, -(-box.end[-2] // self.rows)):
                common = box.overlap(self.box(member * self.blocks + block))
                if common is not None:
                    yield member * self.blocks + block, common

    def box(self, number: int) -> Rectangle:
        member, block = divmod(number, self.blocks)
        begin, sizes = (block * self.rows, 0), (self.rows, self.columns)
        return Rectangle((member, *begin), (1, *sizes)) if len(self.shape) == 3 else Rectangle(begin, sizes)


@dataclass(frozen=True)
class MatrixPart:
    """A rectangle of a parameter inside one matrix, and the ranks that hold it, ascending."""

    box: Rectangle
    holders: tuple[int, ...]


def parts_of(matrices: Matrices, held: Sequence[tuple[Rectangle, ...]]) -> list[tuple[MatrixPart, ...]]:
    """The parts of each matrix. `held` has each rank's rectangles; those of two ranks are equal or disjoint."""
    alike: dict[tuple[Rectangle, ...], list[int]] = defaultdict(list)
    for rank, boxes in enumerate(held):
        alike[boxes].append(rank)
    by_matrix: list[list[MatrixPart]] = [[] for _ in range(matrices.count)]
    for boxes, ranks in alike.items():
        for box in boxes:
            for number, common in matrices.meets(box):
                by_matrix[number].append(MatrixPart(common, tuple(ranks)))
    for number, parts in enumerate(by_matrix):
        covered = sum(part.box.elements for part in parts)
        assert covered == matrices.rows * matrices.columns, f"matrix {number} of {matrices} is not whole on these ranks"
    return [tuple(sorted(parts, key=lambda part: part.box)) for parts in by_matrix]


def owners_of(costs: Sequence[int], candidates: Sequence[Collection[int]], ranks: int) -> list[int]:
    """An owner for each matrix among its candidates, so that the sums of `costs` are about equal."""
    loads = [0] * ranks
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda index: (len(candidates[index]), -costs[index], index)):
        owner = min(candidates[number], key=lambda rank: (loads[rank], rank))
        owners[number] = owner
        loads[owner] += costs[number]
    return owners


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """FLOPs of orthogonalizing a matrix: three products in each step (penstock/kernels/gram.py)."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)
