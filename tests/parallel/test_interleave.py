"""Generators take turns, in one order."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.parallel.async_transfer import Steps, drain, interleave, within


def _count(name: str, pieces: int, seen: list[str]) -> Steps[str]:
    for piece in range(pieces - 1):
        seen.append(f"{name}{piece}")
        yield
    seen.append(f"{name}{pieces - 1}")
    return name


def test_one_alone_goes_straight_on() -> None:
    seen: list[str] = []
    assert drain(_count("a", 3, seen)) == "a"
    assert seen == ["a0", "a1", "a2"]


def test_works_alternate_and_the_longer_one_ends_alone() -> None:
    seen: list[str] = []
    assert interleave([_count("a", 2, seen), _count("b", 4, seen)]) == ["a", "b"]
    assert seen == ["a0", "b0", "a1", "b1", "b2", "b3"]


def test_a_context_is_left_at_every_stop() -> None:
    seen: list[str] = []

    @contextmanager
    def bracket() -> Iterator[None]:
        seen.append("(")
        yield
        seen.append(")")

    works = [within(bracket, _count("a", 2, seen)), _count("b", 2, seen)]
    assert interleave(works) == ["a", "b"]
    assert "".join(seen) == "(a0)b0(a1)b1"
