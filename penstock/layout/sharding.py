"""Rectangles of a whole tensor: their text, where two of them overlap, and whether some of them are exactly the whole.

Ranks of one layout save the rectangles that they hold, ranks of another read what overlaps with theirs. `[0:2, 4:8]`
are rows 0 and 1, columns 4 to 7; a scalar is `[]`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True)
class Cut:
    """One dim of a parameter, divided evenly.

    Attributes:
        dim: which.
        index: the part that is ours.
        count: number of parts; divides the size of every block.
        blocks: equal blocks that the dim is made of, each cut by itself.
    """

    dim: int
    index: int
    count: int
    blocks: int = 1


@dataclass(frozen=True)
class LocalSlice:
    """A rectangle that lies together both here and in the whole.

    Attributes:
        here: offset of its first element in the local tensor, one number a dim.
        whole: offset of its first element in the whole tensor.
        sizes: its size.
    """

    here: tuple[int, ...]
    whole: tuple[int, ...]
    sizes: tuple[int, ...]


def local_shape(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[int, ...]:
    """Shape of what a rank holds of a parameter of `shape`."""
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


def local_slices(
    shape: tuple[int, ...], cuts: tuple[Cut, ...], rows: tuple[int, int] | None = None
) -> tuple[LocalSlice, ...]:
    """The rectangles of the whole that a rank holds.

    Args:
        shape: of the whole parameter.
        cuts: at most one for each dim.
        rows: first and last + 1 of the LOCAL rows (dim 0) that are meant; None for all. Offsets in `LocalSlice.here`
            count from the first of them.
    """
    assert len({cut.dim for cut in cuts}) == len(cuts), f"a dim is cut twice: {cuts}"
    own = {cut.dim: cut for cut in cuts}
    ranges = [list(_ranges(size, own.get(dim))) for dim, size in enumerate(shape)]
    if rows is not None and shape:
        ranges[0] = [part for one in ranges[0] if (part := _within(one, *rows)) is not None]
    return tuple(
        LocalSlice(tuple(r[0] for r in one), tuple(r[1] for r in one), tuple(r[2] for r in one))
        for one in product(*ranges)
    )


def _ranges(size: int, cut: Cut | None) -> Iterator[tuple[int, int, int]]:
    """(offset here, offset in the whole, length) of each block's part of one dim."""
    if cut is None:
        yield 0, 0, size
        return
    block = size // cut.blocks
    part = block // cut.count
    for number in range(cut.blocks):
        yield number * part, number * block + cut.index * part, part


def _within(one: tuple[int, int, int], first: int, end: int) -> tuple[int, int, int] | None:
    here, whole, length = one
    low, high = max(here, first), min(here + length, end)
    return (low - first, whole + low - here, high - low) if low < high else None


def rows_of_shard(rows: int, index: int, count: int) -> tuple[int, int]:
    """First and last + 1 of the rows that one of `count` shards holds: equal chunks, rounded up; the last may be short.

    This is how FSDP2 divides dim 0 (torch.chunk); both may be `rows` where nothing is left.
    """
    chunk = -(-rows // count)
    return min(index * chunk, rows), min((index + 1) * chunk, rows)


@dataclass(frozen=True, order=True)
class Rectangle:
    """A part of a tensor that is a range on each dim.

    Attributes:
        begin: offset of its first element in the whole tensor, one number a dim.
        sizes: its size.
    """

    begin: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """Offset behind its last element."""
        return tuple(begin + size for begin, size in zip(self.begin, self.sizes, strict=True))

    @property
    def elements(self) -> int:
        """How many it has; a scalar has one."""
        return prod(self.sizes)

    def overlap(self, other: "Rectangle") -> "Rectangle | None":
        """What two rectangles share, if that is anything."""
        begin = tuple(map(max, self.begin, other.begin))
        sizes = tuple(end - start for start, end in zip(begin, map(min, self.end, other.end), strict=True))
        return Rectangle(begin, sizes) if all(size > 0 for size in sizes) else None

    def within(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """The index of this rectangle in a tensor whose first element is at `origin` in the whole."""
        return tuple(
            slice(begin - start, end - start) for begin, end, start in zip(self.begin, self.end, origin, strict=True)
        )

    def __str__(self) -> str:
        ranges = ", ".join(f"{begin}:{end}" for begin, end in zip(self.begin, self.end, strict=True))
        return f"[{ranges}]"


def parse_rectangle(text: str) -> Rectangle:
    """The rectangle of a text. Raises ValueError if it is none."""
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError(f"{text} is no rectangle")
    ranges = [part.split(":") for part in text[1:-1].split(", ")] if text != "[]" else []
    corners = [(int(begin), int(end)) for begin, end in ranges]
    return Rectangle(tuple(begin for begin, _ in corners), tuple(end - begin for begin, end in corners))


def not_the_whole(shape: tuple[int, ...], rectangles: Iterable[Rectangle]) -> str | None:
    """Why some rectangles are not exactly the whole of a tensor: too few, too many, or outside; None if they are.

    Args:
        shape: of the whole.
        rectangles: in any order, none of them empty. A tensor without elements has none.
    """
    ordered = sorted(rectangles)
    whole = Rectangle((0,) * len(shape), shape)
    # Sorted by where they begin: those that end before the next one begins cannot meet any later one.
    open_: list[Rectangle] = []
    for one in ordered:
        if len(one.sizes) != len(shape) or one.overlap(whole) != one:
            return f"{one} does not lie in {list(shape)}"
        open_ = [other for other in open_ if not shape or other.end[0] > one.begin[0]]
        twice = next((other for other in open_ if other.overlap(one) is not None), None)
        if twice is not None:
            return f"{twice} and {one} overlap"
        open_.append(one)
    covered = sum(one.elements for one in ordered)
    return None if covered == whole.elements else f"{covered} of {whole.elements} elements are there"
