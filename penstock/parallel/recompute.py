"""Activation recomputation: the saved tensors of a region are dropped after forward, and it runs again in backward.

    h = recomputed(norm, x)      norm's saved tensors become slots; x is saved by the surrounding saver
    y = linear(h)                under `discarding`, linear's saved h becomes a slot of the region too

A slot stands in the autograd graph for a tensor and lives as long as it would. The first slot that backward opens runs
the region again, once, from its inputs and up to the last tensor that is needed, and fills all slots that are left.
`discarding` spans one layer and recognises outputs, and views of them, by their storage; an output that leaves the
layer is saved, or each layer would recompute all layers before it. A region inside a region is a part of the outer one.

The function must save the same tensors in the same order when it runs again: no random numbers, and counters only
`if not is_recomputing()`, under `saved_as_is`. Tensors that it needs come as arguments. The host never waits here.

autograd shows each saved tensor only to the innermost pair of hooks, but recomputation and offload may both want it. So
each is a saver: a function from a tensor to itself or to a `Saved`, which passes tensors that it does not want to the
saver around it (`current`). A saver lives as long as any tensor that passed it: it holds none.

`torch.utils.checkpoint` saves the region's output too, runs again for every backward pass over a retained graph, and
keeps random state. Discarding outputs is Megatron-Core's idea (`CheckpointWithoutOutput`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, auto
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.base.spans import Span
from penstock.config.parallel import Recompute
from penstock.parallel.spans import span


@runtime_checkable
class Saved(Protocol):
    """Stands in the graph for a tensor that is not there."""

    def bring(self) -> Tensor:
        """The tensor, ready for the current stream. Called from autograd's threads, any number of times."""
        ...


Saver = Callable[[Tensor], Tensor | Saved]
Result = TypeVar("Result")


def save_plainly(tensor: Tensor) -> Tensor:
    """The outermost saver. Detaches the tensor, or its graph would hold itself."""
    return tensor.detach()


_saver: ContextVar[Saver] = ContextVar("saver", default=save_plainly)


def current() -> Saver:
    return _saver.get()


def bring(saved: Tensor | Saved) -> Tensor:
    """The tensor that a saver took."""
    return saved if isinstance(saved, Tensor) else saved.bring()


@contextmanager
def _set(variable: ContextVar[Result], value: Result) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def saving(saver: Saver) -> Iterator[None]:
    """Show tensors that are saved for backward to `saver`."""
    with _set(_saver, saver), saved_tensors_hooks(saver, bring):
        yield


@dataclass(frozen=True)
class Geometry:
    """Shape, strides and offset of a tensor, to rebuild it on another storage with the same bytes."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class _Phase(Enum):
    """State of this thread."""

    OUTSIDE = auto()
    RECORDING = auto()
    REPLAYING = auto()


# autograd's threads begin with the default, and a replay runs whole in the thread that asked for it.
_phase: ContextVar[_Phase] = ContextVar("phase", default=_Phase.OUTSIDE)
_discarded: ContextVar[_Discarded | None] = ContextVar("discarded", default=None)
_memory: ContextVar[Callable[[Callable[[], object]], object]] = ContextVar("memory", default=lambda make: make())


def is_recomputing() -> bool:
    """Whether a region runs for the second time, so that counters and losses must not count again."""
    return _phase.get() is _Phase.REPLAYING


def is_inside() -> bool:
    """Whether a region runs, for the first or the second time."""
    return _phase.get() is not _Phase.OUTSIDE


def saved_as_is() -> AbstractContextManager[None]:
    """Inside a region: small tensors that are saved here stay and are not recomputed."""
    return saving(save_plainly) if is_inside() else nullcontext()


def remembered(make: Callable[[], Result]) -> Result:
    """`make()`, a small value without gradients, such as a plan, which a region keeps for its second run."""
    result: Result = _memory.get()(make)  # type: ignore[assignment] # the memory returns what `make` returned
    return result


def recomputed(function: Callable[..., Result], *arguments: object) -> Result:
    """Run a function whose saved tensors are dropped and recomputed in backward.

    It returns a tensor or a (nested) tuple with tensors; the top of the file has its restrictions. Tensors among the
    arguments, also in dataclasses, are saved by the surrounding saver; anything else is held.
    """
    if is_inside() or not torch.is_grad_enabled():
        return function(*arguments)
    device = next((tensor.device for tensor in _tensors_in(arguments) if tensor.is_cuda), None)
    stream = None if device is None else torch.cuda.current_stream(device)  # a replay runs on it too
    region = _Region(function, tuple(_save_argument(argument) for argument in arguments), stream)
    with _set(_phase, _Phase.RECORDING), _set(_memory, region.remember), saving(region.drop):
        result = function(*arguments)
    discarded = _discarded.get()
    if discarded is not None:
        discarded.add(region, arguments, result)
    return result


@contextmanager
def discarding() -> Iterator[None]:
    """Around a layer: outputs of its regions are recomputed, not saved."""
    with discarding_in_pieces() as piece, piece():
        yield


@contextmanager
def discarding_in_pieces() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """`discarding` around a layer that runs in steps between others; yields the context of each step."""
    if is_inside() or not torch.is_grad_enabled():
        yield nullcontext
        return
    discarded = _Discarded(current())

    @contextmanager
    def piece() -> Iterator[None]:
        with _set(_discarded, discarded), saving(discarded.keep):
            yield

    try:
        yield piece
    finally:
        discarded.results.clear()


def _save_argument(argument: object) -> Callable[[], object]:
    if isinstance(argument, Tensor):
        return _SavedInput.of(argument).again
    if is_dataclass(argument) and not isinstance(argument, type):
        kind = type(argument)
        parts = {part.name: _save_argument(getattr(argument, part.name)) for part in fields(argument)}
        return lambda: kind(**{name: again() for name, again in parts.items()})
    return lambda: argument


def _tensors_in(arguments: Iterable[object]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif is_dataclass(argument):
            yield from _tensors_in(getattr(argument, part.name) for part in fields(argument))


@dataclass(frozen=True)
class _SavedInput:
    saved: Tensor | Saved
    requires_grad: bool
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _SavedInput:
        return cls(current()(tensor), tensor.requires_grad, tensor._version)

    def again(self) -> Tensor:
        tensor = bring(self.saved)
        changed = isinstance(self.saved, Tensor) and tensor._version != self.version
        assert not changed, "an input of a recomputed region was changed in place"
        return tensor.detach().requires_grad_(self.requires_grad)


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Slot:
    """Stands in the graph for a tensor of a region; `value` is there after it has run again."""

    region: _Region
    value: Tensor | None = None
    stream: torch.cuda.Stream | None = None

    def fill(self, value: Tensor) -> None:
        self.value = value
        self.stream = torch.cuda.current_stream(value.device) if value.is_cuda else None

    def bring(self) -> Tensor:
        if self.value is None:
            self.region.replay()
        assert self.value is not None, "a replay did not give what it was asked for"
        if self.stream is not None:
            now = torch.cuda.current_stream(self.value.device)
            if now != self.stream:  # wait for the recomputation
                now.wait_event(self.region.events[self.stream])
                self.value.record_stream(now)
        return self.value


@dataclass(frozen=True, eq=False, slots=True)
class _OutputView:
    """Stands in the graph for a view of a region's output that a consumer saved."""

    slot: _Slot
    geometry: Geometry

    def bring(self) -> Tensor:
        return self.geometry.on(self.slot.bring().untyped_storage())


@dataclass(frozen=True)
class _Save:
    slot: weakref.ref[_Slot]
    size: torch.Size  # shape and dtype show whether the second run saves the same
    dtype: torch.dtype


@dataclass
class _Output:
    slot: weakref.ref[_Slot]
    geometry: Geometry


@dataclass(eq=False)
class _Region:
    """One call of a recomputed function. The graph holds it through slots; it holds slots weakly."""

    function: Callable[..., object]
    arguments: tuple[Callable[[], object], ...]  # each returns an argument again
    stream: torch.cuda.Stream | None  # of the first run; None without CUDA
    saves: list[_Save] = field(default_factory=list)  # in the order of the first run
    outputs: dict[int, _Output] = field(default_factory=dict)  # those that a consumer saved
    events: dict[torch.cuda.Stream, torch.cuda.Event] = field(default_factory=dict)  # ends of the replay, by stream
    remembered: list[object] = field(default_factory=list)  # in the order of the first run

    def remember(self, make: Callable[[], object]) -> object:
        self.remembered.append(make())
        return self.remembered[-1]

    def drop(self, tensor: Tensor) -> _Slot:
        slot = _Slot(self)
        self.saves.append(_Save(weakref.ref(slot), tensor.shape, tensor.dtype))
        return slot

    def output_slot(self, index: int, geometry: Geometry) -> _Slot:
        """The slot of an output, shared by all consumers."""
        slot = self.outputs[index].slot() if index in self.outputs else None
        if slot is None:
            slot = _Slot(self)
            self.outputs[index] = _Output(weakref.ref(slot), geometry)
        return slot

    def replay(self) -> None:
        """Run again and fill all slots that are left."""
        waiting = {index: slot for index, output in self.outputs.items() if (slot := output.slot()) is not None}
        replay = _Replay(self.saves, ends_early=not waiting)  # outputs exist only after the last operator
        with span(Span.RECOMPUTE), torch.enable_grad(), torch.cuda.stream(self.stream), _set(_phase, _Phase.REPLAYING):
            arguments, known = [again() for again in self.arguments], iter(self.remembered)
            with _set(_memory, lambda make: next(known)), saving(replay.take), suppress(_Enough):
                results = _tensors_of(self.function(*arguments))
                seen = replay.next
                assert seen == len(self.saves), f"a region saved {len(self.saves)} tensors, and {seen} when run again"
                for index, slot in waiting.items():
                    assert Geometry.of(results[index]) == self.outputs[index].geometry, "an output has another shape"
                    slot.fill(results[index].detach())
        slots = [*waiting.values(), *(slot for save in self.saves if (slot := save.slot()) is not None)]
        self.events = {stream: stream.record_event() for slot in slots if (stream := slot.stream) is not None}


class _Enough(Exception):
    """Ends a recomputation that has filled all slots."""


class _Replay:
    """The saver of the second run: fills the slots in the order of the first run."""

    def __init__(self, saves: list[_Save], *, ends_early: bool) -> None:
        self.saves = saves
        self.next = 0
        living = [index for index, save in enumerate(saves) if save.slot() is not None]
        self.last = living[-1] if living and ends_early else None  # after it nothing is needed

    def take(self, tensor: Tensor) -> Tensor:
        index, self.next = self.next, self.next + 1  # the n-th saved tensor is that of the first run
        assert index < len(self.saves), f"a region that saved {len(self.saves)} tensors saves more when it runs again"
        save, value = self.saves[index], tensor.detach()
        assert (value.shape, value.dtype) == (save.size, save.dtype), (
            f"tensor {index} of a region was {save.dtype} {tuple(save.size)} and is {value.dtype} {tuple(value.shape)}"
        )
        slot = save.slot()
        if slot is not None:
            slot.fill(value)
        if index == self.last:
            raise _Enough
        return value


@dataclass(frozen=True)
class _Result:
    """An output of a region, which recomputation gives unless it was changed in place (`version`)."""

    region: _Region
    index: int
    geometry: Geometry
    version: int


class _Discarded:
    """The saver of a layer: knows the outputs of its regions while their storages live."""

    def __init__(self, outer: Saver) -> None:
        self.outer = outer
        # A weak reference keeps a storage's address from being used again, so it cannot name another one.
        self.results: dict[StorageWeakRef, _Result] = {}

    def add(self, region: _Region, arguments: tuple[object, ...], result: object) -> None:
        """Register a region's outputs, except views of its inputs or parameters, which live anyway."""
        inputs = {_storage(tensor) for tensor in _tensors_in(arguments)}
        for index, tensor in _tensors_of(result).items():
            if _storage(tensor) not in inputs and not is_parameter(tensor):
                entry = _Result(region, index, Geometry.of(tensor), tensor._version)
                self.results[_storage(tensor)] = entry

    def keep(self, tensor: Tensor) -> Tensor | Saved:
        result = self.results.get(_storage(tensor))
        if result is None or result.version != tensor._version:
            return self.outer(tensor)
        return _OutputView(result.region.output_slot(result.index, result.geometry), Geometry.of(tensor))


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _tensors_of(result: object) -> dict[int, Tensor]:
    return {index: tensor for index, tensor in enumerate(_leaves(result)) if isinstance(tensor, Tensor)}


def _leaves(result: object) -> Iterator[object]:
    if isinstance(result, tuple):
        for item in result:
            yield from _leaves(item)
    else:
        yield result


def is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def recomputed_kinds(config: Recompute, layer: int, stage: int) -> frozenset[str]:
    """The recomputed parts of one layer of one stage; multi-token prediction layers count on after the last layer."""
    is_here = (not config.layers or layer in config.layers) and (not config.stages or stage in config.stages)
    return frozenset(config.modules) if is_here else frozenset()
