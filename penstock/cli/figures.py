"""Numbers as people read them, and small pictures made of characters.

The pictures use Unicode's block elements, written here as escapes: U+2581 is an eighth of a cell high, U+2588 is full.
"""

from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""One cell, from an eighth to full."""

DOT = "\u00b7"
"""Stands between facts of one line."""


def count_text(number: float) -> str:
    """A count: `15.7 B`, `2.71 M`, `512`."""
    return _scaled(number, (" k", " M", " B", " T"), "")


def bytes_text(number: float) -> str:
    """Bytes in decimal units: `1.24 GB`."""
    return _scaled(number, (" kB", " MB", " GB", " TB"), " B")


def _scaled(number: float, suffixes: tuple[str, ...], plain: str) -> str:
    """A number by thousands: two decimals below 10, else one."""
    if number < 1000:
        return f"{number:.0f}{plain}"
    scaled, index = number / 1000, 0
    # 999.95 would be printed as 1000.0.
    while scaled >= 999.95 and index + 1 < len(suffixes):
        scaled, index = scaled / 1000, index + 1
    return f"{scaled:.{2 if scaled < 9.995 else 1}f}{suffixes[index]}"


def duration_text(seconds: float) -> str:
    """A duration: `0:42`, `1:02:07`, `3 d 04:10`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters: whole words, then dots where it was longer.

    A single word, such as a kernel's name, is cut, but no number in it is.
    """
    if len(text) <= most:
        return text
    words = text[: most - len(" ...") + 1].rpartition(" ")[0]
    if words:
        return f"{words} ..."
    start = text[: most - len("...")]
    if text[len(start)].isdigit():
        start = start.rstrip("0123456789.")
    return f"{start}..."


def spark_line(values: Sequence[float], width: int) -> str:
    """Values as a row of blocks, the lowest an eighth high and the highest full.

    Args:
        values: any number of them; if more than `width`, means of neighbours are drawn.
        width: most characters.
    """
    means = _bins(values, width)
    low, high = min(means, default=0.0), max(means, default=0.0)
    if high == low:
        return BLOCKS[0] * len(means)
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


def load_bars(slots: Sequence[int], width: int) -> str:
    """Load of each expert as a bar: half high is the mean, full is twice the mean or more.

    Args:
        slots: load of each expert.
        width: most characters; if there are more experts, a bar is the fullest of its neighbours.
    """
    mean = sum(slots) / len(slots) or 1.0
    group = -(-len(slots) // width)
    fullest = [max(slots[start : start + group]) for start in range(0, len(slots), group)]
    cell = 3 if len(fullest) * 3 <= width else 1
    half = len(BLOCKS) // 2
    bars = (BLOCKS[min(max(round(load / mean * half), 1), len(BLOCKS)) - 1] for load in fullest)
    return "".join(bar if cell == 1 else bar * 2 + " " for bar in bars).rstrip()


def _bins(values: Sequence[float], width: int) -> list[float]:
    """At most `width` means of neighbours, equally many in each but for rounding."""
    bins = min(len(values), width)
    edges = [round(index * len(values) / bins) for index in range(bins + 1)] if bins else []
    return [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]


class Trail:
    """A history of any length in bounded memory: when it is full, neighbours are joined into their mean.

    Args:
        capacity: most values that are kept; even.
    """

    def __init__(self, capacity: int = 512) -> None:
        self._capacity = capacity
        self._stride = 1
        self._pending: list[float] = []
        self._means: list[float] = []

    def add(self, value: float) -> None:
        """Append a value."""
        self._pending.append(value)
        if len(self._pending) == self._stride:
            self._means.append(sum(self._pending) / self._stride)
            self._pending = []
        if len(self._means) == self._capacity:
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._stride *= 2

    @property
    def values(self) -> list[float]:
        """What is kept, oldest first."""
        return [*self._means, *([sum(self._pending) / len(self._pending)] if self._pending else [])]
