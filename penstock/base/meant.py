"""What a mistyped word most likely means. Every error that knows the right names says it in these words."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


def nearest(got: object, names: Iterable[str], most: int = 1) -> list[str]:
    """Names that a word resembles, the best first; letters' case does not count.

    Args:
        got: what was typed.
        names: what there is.
        most: how many.
    """
    known = {name.lower(): name for name in names}
    return [known[word] for word in get_close_matches(f"{got}".lower(), known, n=most)]


def did_you_mean(got: object, names: Iterable[str], most: int = 1) -> str | None:
    """`did you mean train or trace?`, as the fix of an error; None if no name resembles the word.

    Args:
        got: what was typed.
        names: what there is.
        most: how many names may be proposed.
    """
    return asked(nearest(got, names, most))


def did_you_mean_path(got: Path) -> str | None:
    """The same for a file or folder that is not there: names beside it in its folder."""
    try:
        beside = [path.name for path in got.parent.iterdir() if not path.name.startswith(".")]
    except OSError:
        return None
    return asked([str(got.with_name(name)) for name in nearest(got.name, beside)])


def asked(names: Iterable[str]) -> str | None:
    """The question about names that are known to be near."""
    names = list(names)
    return f"did you mean {' or '.join(names)}?" if names else None
