"""Work that stops where it would wait, so that other work can be done meanwhile: generators that take turns.

    def steps(x):                       # Steps[Tensor]
        flight = launch(first(x))
        yield  # a transfer is under way
        return second(flight.wait())

    drain(steps(x))                     one alone: nothing happens at a stop
    interleave([steps(a), steps(b)])    first(a), first(b), second(a), second(b)

No threads: whoever drives decides what comes when, so the order is the same on all ranks and in every run.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

Result = TypeVar("Result")

Steps = Generator[None, None, Result]
"""Work in pieces; a piece ends where something is under way that the next one waits for."""


def drain(steps: Steps[Result]) -> Result:
    """Do all pieces, one after the other."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def interleave(works: Sequence[Steps[Result]]) -> list[Result]:
    """Do a piece of each in turn until all are done; their results in the order given."""
    results: dict[int, Result] = {}
    while len(results) < len(works):
        for number, steps in enumerate(works):
            if number not in results:
                try:
                    next(steps)
                except StopIteration as end:
                    results[number] = end.value
    return [results[number] for number in range(len(works))]


def within(context: Callable[[], AbstractContextManager[object]], steps: Steps[Result]) -> Steps[Result]:
    """The same pieces, each inside a context of its own: what a context sets must not last over a stop."""
    while True:
        with context():
            try:
                next(steps)
            except StopIteration as end:
                result: Result = end.value
                return result
        yield
