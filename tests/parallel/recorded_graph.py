"""Graphs of a CPU as close to a device's as Python comes: work runs once, when it is captured, and never again.

    capture    every operator is written down with its tensors; what it has changed is put back, so nothing was run
    replay     the same operators on the same tensors; what each allocates comes where its first result was

What autograd has recorded during capture, and every number that Python has computed, is part of the graph. Once a
backward graph has been replayed, what its forward graph has made is overwritten, as a pool does that others use.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Operation:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    made: tuple[Tensor, ...]


class Recorder(TorchDispatchMode):
    """Writes down what runs below it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.known: set[int] = set()  # memory that was allocated during the capture
        self.before: list[tuple[Tensor, Tensor]] = []  # older tensors that an operator changes, and what was in them

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        schema = function._schema
        if schema.is_mutable:
            values = [*args, *(options.get(argument.name) for argument in schema.arguments[len(args) :])]
            for argument, value in zip(schema.arguments, values, strict=True):
                self._save_argument(argument, value)
        result = function(*args, **options)
        given = {pointer(tensor) for tensor in tensors_in((args, options))}
        made = tuple(tensor for tensor in tensors_in(result) if pointer(tensor) not in given)
        self.known |= {pointer(tensor) for tensor in made}
        # Plain tensors of the same memory: autograd has nothing to do with a replay.
        self.operations.append(Operation(function, plain(args), plain(options), tuple(one.data for one in made)))
        return result

    def _save_argument(self, argument: Any, value: Any) -> None:
        if argument.alias_info is None or not argument.alias_info.is_write:
            return
        for tensor in tensors_in(value):
            if pointer(tensor) not in self.known:
                self.before.append((tensor.data, tensor.data.clone()))


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return {name: plain(one) for name, one in value.items()} if isinstance(value, dict) else value


def pointer(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class Graphs:
    """Captures forward and backward graphs; those that come in pairs are told apart by their number."""

    parts: int
    graphs: "list[Recording]" = field(default_factory=list)

    def capture(self, work: Callable[[], object]) -> "Recording":
        recorder = Recorder()
        with recorder:
            work()
        for tensor, value in reversed(recorder.before):
            tensor.copy_(value)
        number = len(self.graphs)
        # Forward graphs come first, in order, and backward graphs in reverse order.
        mirror = self.graphs[2 * self.parts - 1 - number] if number >= self.parts else None
        self.graphs.append(Recording(recorder.operations, mirror))
        return self.graphs[-1]

    @property
    def captures(self) -> int:
        return len(self.graphs)

    def begin(self) -> "Callable[[Callable[[], object]], Recording]":
        return self.capture


@dataclass
class Recording:
    operations: list[Operation]
    forward: "Recording | None"
    pool_bytes: int = 1
    seconds: float = 0.0

    @torch.no_grad()
    def replay(self) -> None:
        for one in self.operations:
            given = {pointer(tensor) for tensor in tensors_in((one.arguments, one.options))}
            result = one.function(*one.arguments, **one.options)
            made = [tensor for tensor in tensors_in(result) if pointer(tensor) not in given]
            for own, tensor in zip(one.made, made, strict=True):
                own.copy_(tensor)  # later operators read the first results
        # Another allocation takes the memory that the forward graph has freed.
        for own in (own for one in (self.forward.operations if self.forward else ()) for own in one.made):
            own.fill_(float("nan") if own.is_floating_point() else 1)

    def release(self) -> None:
        self.operations = []


@dataclass
class SameAddresses:
    """Graphs that run their work at every replay, and copy what it gives to where the first results were."""

    log: list[str] = field(default_factory=list)  # `capture 0`, `replay 0`, `release 0`: by number of the capture
    fails_at: int | None = None  # number of the capture that finds no memory
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
            tensor.data = own  # autograd has saved it: backward reads the fixed address

    def release(self) -> None:
        self.log.append(f"release {self.number}")
