"""Numbers and names as text: one form of each for the terminal, the report and the documents."""

import re

_COUNT_SUFFIXES = (" k", " M", " B", " T")
_AMOUNT = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\d+)?) ?([kKMBT]?)")
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "\u00b5s"))


def count_text(number: float) -> str:
    """A count: `15.7 B`, `2.71 M`, `512`."""
    return _by_thousands(number, _COUNT_SUFFIXES, "")


def amount(text: str) -> float | None:
    """The number of a text such as `500M`, `14.8T` or `4_096`; None for any other text."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        return None
    number, unit = match.groups()
    return float(number.replace("_", "").replace(",", "")) * 1000 ** " kMBT".index(unit.replace("K", "k") or " ")


def bytes_text(number: float) -> str:
    """Bytes in decimal units: `1.24 GB`, `141.0 GB`, `7 B`."""
    return _by_thousands(number, tuple(f" {name}" for _, name in reversed(BYTE_UNITS)), " B")


def flops_text(number: float) -> str:
    """Floating-point operations: `16.4 GFLOP`."""
    return _by_thousands(number, tuple(f" {prefix}FLOP" for prefix in "kMGTPEZY"), " FLOP")


def _by_thousands(number: float, suffixes: tuple[str, ...], plain: str) -> str:
    if number < 1000:
        return f"{number:.0f}{plain}"
    scaled, index = number / 1000, 0
    # 999.95 would be printed as 1000.0.
    while scaled >= 999.95 and index + 1 < len(suffixes):
        scaled, index = scaled / 1000, index + 1
    return f"{scaled:.{2 if scaled < 9.995 else 1}f}{suffixes[index]}"  # three digits; 9.995 would be printed as 10.00


def gigabytes(size: float) -> str:
    """Bytes in units of 1e9: `45.7 GB`."""
    return f"{size / 1e9:.1f} GB"


def three_digits(value: float) -> str:
    """A number with at least three digits: `28.0`, `326`, `8,421`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def rounded(value: float, digits: int = 6) -> float:
    """A number with so many significant digits; more digits only make a page larger."""
    return float(f"{value:.{digits}g}")


def time_unit(seconds: float) -> tuple[float, str]:
    """Seconds of a unit and its name: the largest unit in which a time is at least 1, or the smallest unit."""
    return next((unit for unit in TIME_UNITS if abs(seconds) >= unit[0]), TIME_UNITS[-1])


def time_text(seconds: float) -> str:
    """A time with three digits: `1.24 s`, `38.2 ms`, `0 s`."""
    size, name = time_unit(seconds)
    return f"{three_digits(seconds / size)} {name}" if seconds else "0 s"


def duration_text(seconds: float) -> str:
    """A duration: `0:42`, `1:02:07`, `3 d 04:10`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def share_text(share: float) -> str:
    """A share with one decimal, `28.3%`; a share that would round to 0 is `<0.1%`."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def counted(number: int, thing: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


# C0 and C1 controls, line and paragraph separators, and marks that change the direction of text.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""A text from a file, safe for a terminal and a page: control and direction characters are escaped (`\x1b`)."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shortened(text: str, limit: int) -> str:
    """A text of at most `limit` characters: whole words, then dots if it was longer.

    A single word, such as a kernel's name, is cut, but never inside a number.
    """
    if len(text) <= limit:
        return text
    whole_words = text[: limit - len(" ...") + 1].rpartition(" ")[0]
    if whole_words:
        return f"{whole_words} ..."
    start = text[: limit - len("...")]
    if text[len(start)].isdigit():  # a number would be cut: leave it out
        start = start.rstrip("0123456789.")
    return f"{start}..."
