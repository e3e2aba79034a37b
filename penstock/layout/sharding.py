"""Shards of parameters: cuts along dims, their slices of the whole parameter, and rectangles as checkpoints store them.

A cut divides one dim evenly. Some dims consist of several blocks that are cut separately: gate and up projection are
stacked into one matrix, and each rank holds a part of both. Rows of an 8-row matrix with 2 blocks, cut in two, go

    rank 0: 0 1 | 4 5        rank 1: 2 3 | 6 7

so rows that are contiguous on a rank need not be contiguous in the whole. `local_slices` lists the rectangles that are
contiguous in both. Data-parallel sharding then takes a range of the local rows, as one more cut (`rows`). A row is an
index of all dims but the last, so that ranks divide one expert, too: rows 3 to 8 of 2 experts with 5 rows each are

    expert 0, rows 3 4        expert 1, rows 0 1 2 3

A checkpoint of one layout saves the rectangles of its ranks, and another layout reads those that overlap with its own.
`[0:2, 4:8]` are rows 0 and 1, columns 4 to 7; a scalar is `[]`.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod


@dataclass(frozen=True)
class Cut:
    """One dim of a parameter, divided evenly."""

    dim: int
    index: int
    count: int  # number of parts; divides the size of every block
    blocks: int = 1  # equal blocks of the dim, each cut separately
    axis: str = "tensor"  # coordinate of the grid that counts the parts


@dataclass(frozen=True)
class LocalSlice:
    """A rectangle of the whole tensor, and its elements in the local one, which is contiguous; one number per dim."""

    offset: int  # of the first element in the local tensor, in elements
    strides: tuple[int, ...]  # in the local tensor
    whole: tuple[int, ...]  # offset in the whole tensor
    sizes: tuple[int, ...]


def local_shape(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[int, ...]:
    """Shape of a rank's part of a parameter."""
    sizes = list(shape)
    for cut in cuts:
        assert sizes[cut.dim] % (cut.count * cut.blocks) == 0, f"{shape} is not divided by {cut}"
        sizes[cut.dim] //= cut.count
    return tuple(sizes)


def global_shape(local: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[int, ...]:
    """The inverse of `local_shape`."""
    sizes = list(local)
    for cut in cuts:
        sizes[cut.dim] *= cut.count
    return tuple(sizes)


def row_width(shape: tuple[int, ...]) -> int:
    """Elements of a row: the last dim of matrices and stacks of them, one element of a vector or a scalar."""
    return shape[-1] if len(shape) > 1 else 1


def local_slices(
    shape: tuple[int, ...], cuts: tuple[Cut, ...], rows: tuple[int, int] | None = None
) -> tuple[LocalSlice, ...]:
    """The slices of a parameter on a rank; at most one cut for each dim.

    `rows` is (first, end) of a range of LOCAL rows, which the local tensor holds one after another; None for all.
    """
    assert len({cut.dim for cut in cuts}) == len(cuts), f"a dim is cut twice: {cuts}"
    by_dim = {cut.dim: cut for cut in cuts}
    ranges = [list(_ranges(size, by_dim.get(dim))) for dim, size in enumerate(shape)]
    local = local_shape(shape, cuts)
    by_row = max(1, len(local) - 1)  # dims of a row's index
    first, end = (0, prod(local[:by_row])) if rows is None else rows
    slices = []
    for start, box in _boxes(local[:by_row], first, end) if shape else [(0, ())]:
        box += tuple((0, size) for size in local[by_row:])
        strides = _strides(tuple(high - low for low, high in box))
        parts = (
            [part for piece in of_dim if (part := _within(piece, *limits))]
            for of_dim, limits in zip(ranges, box, strict=True)
        )
        for pieces in product(*parts):
            offset = (start - first) * row_width(local)  # of the box
            offset += sum(part[0] * stride for part, stride in zip(pieces, strides, strict=True))
            slices.append(LocalSlice(offset, strides, tuple(r[1] for r in pieces), tuple(r[2] for r in pieces)))
    return tuple(slices)


def _boxes(sizes: tuple[int, ...], first: int, end: int) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """Cut a range of rows into boxes of consecutive rows. Yields the first row and (low, high) on each dim."""
    inner = prod(sizes[1:])
    while first < end:
        index, begin = divmod(first, inner)
        if begin == 0 and (count := (end - first) // inner):
            yield first, ((index, index + count), *((0, size) for size in sizes[1:]))
            first += count * inner
        else:  # a part of one index of the first dim
            stop = min(end - index * inner, inner)
            for start, box in _boxes(sizes[1:], begin, stop):
                yield index * inner + start, ((index, index + 1), *box)
            first = index * inner + stop


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _ranges(size: int, cut: Cut | None) -> Iterator[tuple[int, int, int]]:
    """Yields (local offset, offset in the whole, length) of each block's part of one dim."""
    if cut is None:
        yield 0, 0, size
        return
    block = size // cut.blocks
    part = block // cut.count  # of each block
    for number in range(cut.blocks):
        yield number * part, number * block + cut.index * part, part


def _within(piece: tuple[int, int, int], first: int, end: int) -> tuple[int, int, int] | None:
    here, whole, length = piece
    low, high = max(here, first), min(here + length, end)
    return (low - first, whole + low - here, high - low) if low < high else None


def rows_of_shard(rows: int, index: int, count: int) -> tuple[int, int]:
    """(first, end) of the rows of one of `count` shards; sizes differ by at most a row, and larger ones come first."""
    size, rest = divmod(rows, count)
    first = index * size + min(index, rest)
    return first, first + size + (index < rest)


def rows_of_chunk(rows: int, index: int, count: int) -> tuple[int, int]:
    """`rows_of_shard` as FSDP2 divides dim 0 (torch.chunk): equal chunks, rounded up; the last ones may be empty."""
    chunk = -(-rows // count)
    return min(index * chunk, rows), min((index + 1) * chunk, rows)


@dataclass(frozen=True, order=True)
class Rectangle:
    """A range on each dim of a tensor."""

    begin: tuple[int, ...]  # offset in the whole tensor
    sizes: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """Offset behind its last element."""
        return tuple(begin + size for begin, size in zip(self.begin, self.sizes, strict=True))

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.sizes)

    def overlap(self, other: "Rectangle") -> "Rectangle | None":
        """The intersection of two rectangles; None if it is empty."""
        begin = tuple(map(max, self.begin, other.begin))
        sizes = tuple(end - start for start, end in zip(begin, map(min, self.end, other.end), strict=True))
        return Rectangle(begin, sizes) if all(size > 0 for size in sizes) else None

    def rows(self, dim: int, first: int, end: int) -> "Rectangle":
        """Its part from `first` to `end` on a dim."""
        begin = (*self.begin[:dim], self.begin[dim] + first, *self.begin[dim + 1 :])
        return Rectangle(begin, (*self.sizes[:dim], end - first, *self.sizes[dim + 1 :]))

    def within(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """The index of this rectangle in a tensor whose first element is at `origin` in the whole."""
        return tuple(
            slice(begin - start, end - start) for begin, end, start in zip(self.begin, self.end, origin, strict=True)
        )

    def __str__(self) -> str:
        ranges = ", ".join(f"{begin}:{end}" for begin, end in zip(self.begin, self.end, strict=True))
        return f"[{ranges}]"


@lru_cache(1 << 16)
def parse_rectangle(text: str) -> Rectangle:
    """Parse the text of a rectangle. Raises ValueError if it is malformed."""
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError(f"{text} is no rectangle")
    ranges = [part.split(":") for part in text[1:-1].split(", ")] if text != "[]" else []
    corners = [(int(begin), int(end)) for begin, end in ranges]
    return Rectangle(tuple(begin for begin, _ in corners), tuple(end - begin for begin, end in corners))


def not_the_whole(shape: tuple[int, ...], rectangles: Iterable[Rectangle]) -> str | None:
    """The reason why non-empty rectangles do not tile a tensor exactly: missing, overlapping, outside; None if they do.

    A tensor without elements has none.
    """
    ordered = sorted(rectangles)
    whole = Rectangle((0,) * len(shape), shape)
    open_: list[Rectangle] = []  # those that may overlap with a later one: rectangles are sorted by their first row
    for rectangle in ordered:
        if len(rectangle.sizes) != len(shape) or rectangle.overlap(whole) != rectangle:
            return f"{rectangle} does not lie in {list(shape)}"
        open_ = [other for other in open_ if not shape or other.end[0] > rectangle.begin[0]]
        twice = next((other for other in open_ if other.overlap(rectangle) is not None), None)
        if twice is not None:
            return f"{twice} and {rectangle} overlap"
        open_.append(rectangle)
    # Without overlaps, equal numbers of elements mean that nothing is missing.
    covered = sum(rectangle.elements for rectangle in ordered)
    return None if covered == whole.elements else f"{covered} of {whole.elements} elements are there"


@dataclass(frozen=True)
class Matrices:
    """The equal matrices of a parameter.

    A parameter holds one matrix, or a stack of them; rows of gate and up are two blocks, each a matrix:

        query (F, D)                            1 matrix      F x D
        gate_up of 4 experts (4, 2 F, D)        8 matrices    gate of expert 0, up of expert 0, gate of expert 1, ...

    Ranks hold rectangles of a matrix, and one of them, its owner, gathers it, orthogonalizes it whole and sends the
    parts back. Owners have about the same work (`owners_of`): matrices with few possible owners come first, larger ones
    before smaller ones, and each goes to the rank with the least work so far. With 8, 4, 4 and 2 on two ranks with
    parts of all:

        rank 0    8 2          rank 1    4 4
    """

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
