"""Rectangles of a whole tensor: their text, where two of them overlap, and whether some of them are exactly the whole.

Ranks of one layout save the rectangles that they hold, ranks of another read what overlaps with theirs. `[0:2, 4:8]`
are rows 0 and 1, columns 4 to 7; a scalar is `[]`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod


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
