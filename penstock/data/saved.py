"""Places in the data as a checkpoint has them: plain integers by name, and what makes one unusable."""

from typing import TypeAlias

from penstock.base.errors import DataError

LoaderState: TypeAlias = "dict[str, int | list[int] | LoaderState]"
"""A place in the data, and what it is a place in, as a checkpoint stores it. Of a mixture, places are by part."""


def number(state: LoaderState, name: str) -> int:
    """Returns a whole number >= 0 of a state.

    Raises:
        DataError: it is something else.
    """
    value = state[name]
    if not isinstance(value, int) or value < 0:
        raise damaged(f"{name} {value}")
    return value


def numbers(state: LoaderState, name: str, count: int) -> list[int]:
    """Returns `count` whole numbers >= 0 of a state.

    Raises:
        DataError: it is something else.
    """
    values = state[name]
    if not isinstance(values, list) or len(values) != count:
        raise damaged(f"{name} {values}")
    return [number({name: value}, name) for value in values]


def check_names(state: LoaderState, expected: LoaderState) -> None:
    """Refuses a state that has other names than one that was just taken.

    Raises:
        DataError: as said.
    """
    if state.keys() != expected.keys():
        raise damaged(", ".join(state) or "nothing", allowed=", ".join(expected))


def damaged(got: str, *, allowed: str | None = None) -> DataError:
    """Returns the error for a state that nobody can have saved."""
    return DataError("the saved place in the data is damaged", got=got, allowed=allowed)
