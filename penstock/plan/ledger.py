"""Every byte that a piece of work holds, from the moment that it is allocated to the moment that it is free.

A mode of torch's dispatcher sees each operator's results, in forward and in backward. A storage that nobody has seen
counts from there on, until its last tensor is gone; so what autograd saves, what recomputation frees and what is there
for a moment need no rule here. Storages that were there before, such as parameters, do not count.

It works the same with memory and without (the meta device), which is how it is tested: both must give the same bytes.

What a kernel or a library allocates by itself, inside one operator, is not seen.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GRANULE = 512
"""Bytes that the allocator of a GPU hands out multiples of."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """What happened between two marks.

    Attributes:
        name: of the work.
        start: bytes that were held when it began.
        end: bytes that were held at its end.
        peak: the most in between.
        before: what was held when it began, by the name of who allocated it.
        held: the same at its end.
        at_peak: the same at the peak.
    """

    name: str
    start: int
    end: int
    peak: int
    before: Counter[str]
    held: Counter[str]
    at_peak: Counter[str]

    @property
    def passing(self) -> int:
        """The most over what was held when it began."""
        return self.peak - self.start


class Ledger(TorchDispatchMode):
    """Counts storages while it is entered.

    Attributes:
        live: bytes held at the moment.
        held: the same by the name of who allocated them.
        sections: what has been marked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.held: Counter[str] = Counter()
        self.sections: list[Section] = []
        self._names = [""]
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._start = 0
        self._peak, self._at_peak, self._before = 0, Counter[str](), Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator, and count what it returns; also for another mode that keeps this ledger."""
        for tensor in _tensors_in((args, *kwargs.values())):
            self._was_there(tensor)
        result = func(*args, **kwargs)
        for tensor in _tensors_in((result,)):
            self._count(tensor)
        return result

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """What is allocated inside is put down to `name`."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        """Begin what `leave` ends; see `named`."""
        self._names.append(name)

    def leave(self) -> None:
        """End the innermost name."""
        self._names.pop()

    def mark(self, name: str) -> Section:
        """End a section, which began at the mark before, and name it."""
        held = +self.held
        section = Section(
            name=name,
            start=self._start,
            end=self.live,
            peak=self._peak,
            before=self._before,
            held=held,
            at_peak=+self._at_peak,
        )
        self.sections.append(section)
        self._start = self._peak = self.live
        self._before, self._at_peak = held, Counter(held)
        return section

    def _was_there(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            key = storage._cdata
            self._seen[key] = weakref.ref(storage, lambda _: self._seen.pop(key, None))

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = -(-storage.nbytes() // GRANULE) * GRANULE
        name = self._names[-1]
        self.live += size
        self.held[name] += size
        if self.live > self._peak:
            self._peak = self.live
            self._at_peak = Counter(self.held)

        def is_free(_: object) -> None:
            self._seen.pop(key, None)
            self.live -= size
            self.held[name] -= size

        self._seen[key] = weakref.ref(storage, is_free)


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)
