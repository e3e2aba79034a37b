"""Graphs on a CPU: a replay does the work once more, and its results come where they were, as a device's would."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class SameAddresses:
    """Captures; `log` tells what happens to the graphs, by the number of their capture.

    Attributes:
        log: `capture 0`, `replay 0`, `release 0`.
        fails_at: number of the capture that finds no memory.
    """

    log: list[str] = field(default_factory=list)
    fails_at: int | None = None
    captures: int = 0

    def capture(self, work: Callable[[], Any]) -> "Graph":
        number, self.captures = self.captures, self.captures + 1
        self.log.append(f"capture {number}")
        if number == self.fails_at:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB. Of the allocated memory nothing is left")
        return Graph(number, work, self.log)

    def begin(self) -> "Callable[[Callable[[], Any]], Graph]":
        self.log.append("pool")
        return self.capture


@dataclass
class Graph:
    """One of them."""

    number: int
    work: Callable[[], tuple[Tensor, ...]]
    log: list[str]
    pool_bytes: int = 100_000_000
    seconds: float = 0.25
    results: tuple[Tensor, ...] = ()

    def replay(self) -> None:
        self.log.append(f"replay {self.number}")
        made = self.work()
        if not self.results:
            self.results = tuple(tensor.data for tensor in made)
            return
        for own, tensor in zip(self.results, made, strict=True):
            own.copy_(tensor.data)
            tensor.data = own

    def release(self) -> None:
        self.log.append(f"release {self.number}")
