"""Activation offload: tensors that chosen modules save for backward wait in pinned host memory.

    forward     a saved storage is copied out on one stream beside compute, and freed after the copy
    backward    when a module's backward opens its first tensor, copies of that call's tensors start on the other
                stream, and of the call before it too: they overlap with this call's compute

At most `IN_FLIGHT_BYTES` of device memory wait for their copy; beyond that compute waits for the oldest one. A tensor
that backward needs before it was freed is not copied back. A storage moves once, however many views of it are saved;
parameters and storages under `SMALLEST_BYTES` stay. Memory returns to its stream only after that stream has waited for
the copy: `record_stream` would return it when the host notices, so the peak would differ from step to step.

A recomputed region saves its inputs only, so a module that is both recomputed and offloaded has these on the host.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.config.parallel import OFFLOADABLE, Offload
from penstock.parallel.copies import DONE, CopyStream, host_empty
from penstock.parallel.recompute import Geometry, Saved, Saver, current, is_inside, is_parameter, saving

SMALLEST_BYTES = 1 << 20
"""Of a storage that moves. 1 MiB takes 20 us at 50 GB/s, less than the host needs to launch its two copies."""

IN_FLIGHT_BYTES = 1 << 30
"""Of device memory that waits for its copy: about the saved tensors of one module; 20 ms at 50 GB/s."""

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class OffloadRule:
    """Modules (`kinds`) whose saved activations go to the host. One `store` serves all layers."""

    kinds: frozenset[str] = frozenset()
    store: HostStore | None = None

    def __post_init__(self) -> None:
        assert self.kinds <= {*OFFLOADABLE}, f"{sorted(self.kinds)} are not all of {OFFLOADABLE}"

    def run(self, kind: str, function: Callable[..., Result], *arguments: object) -> Result:
        """`function(*arguments)`, with its saved tensors on the host if the rule names the kind."""
        assert kind in OFFLOADABLE, f"{kind} is not one of {OFFLOADABLE}"
        if self.store is None or kind not in self.kinds or is_inside() or not torch.is_grad_enabled():
            return function(*arguments)
        with saving(self.store.call().keep):
            return function(*arguments)


def rule_for(config: Offload, device: torch.device) -> OffloadRule:
    store = HostStore(device) if config.activations else None
    return OffloadRule(kinds=frozenset(config.activations), store=store)


class HostStore:
    """Copies storages of at least `smallest` bytes to the host and back; `in_flight` bytes may wait for their copy."""

    def __init__(
        self, device: torch.device, *, smallest: int = SMALLEST_BYTES, in_flight: int = IN_FLIGHT_BYTES
    ) -> None:
        self.device = device
        self.smallest = smallest
        self.in_flight = in_flight
        self.outward, self.inward = CopyStream(device), CopyStream(device)
        self.leaving_bytes = 0  # device memory that waited for its copy at the last check
        self._leaving: deque[tuple[weakref.ref[_OffloadedStorage], int]] = deque()  # the oldest copy first
        self._moved: dict[StorageWeakRef, weakref.ref[_OffloadedStorage]] = {}
        self._last_call: weakref.ref[_ModuleCall] | None = None

    def call(self) -> _ModuleCall:
        self._moved = {storage: moved for storage, moved in self._moved.items() if moved() is not None}
        call = _ModuleCall(self, current(), self._last_call)
        self._last_call = weakref.ref(call)
        return call

    def takes(self, tensor: Tensor) -> bool:
        is_plain = tensor.layout is torch.strided and tensor.device.type == self.device.type
        return is_plain and tensor.untyped_storage().nbytes() >= self.smallest and not is_parameter(tensor)

    def send(self, tensor: Tensor) -> _OffloadedStorage:
        """Start the copy of a storage, or find it if it has started."""
        key = StorageWeakRef(tensor.untyped_storage())
        reference = self._moved.get(key)
        moved = None if reference is None else reference()
        if moved is not None and moved.version == tensor._version:  # an older version has other values
            return moved
        size = tensor.untyped_storage().nbytes()
        self._make_room(size)
        moved = _OffloadedStorage(self, tensor.detach())
        self._moved[key] = weakref.ref(moved)
        self._leaving.append((weakref.ref(moved), size))
        self.leaving_bytes += size
        return moved

    def _make_room(self, incoming: int) -> None:
        """Free storages that have left; if that is too little, free more and let the compute stream wait."""
        while self._leaving:
            moved, size = self._leaving[0][0](), self._leaving[0][1]
            if moved is not None and not moved.left.is_over() and self.leaving_bytes + incoming <= self.in_flight:
                return
            self._leaving.popleft()
            self.leaving_bytes -= size
            if moved is not None:  # else its graph is gone, and the memory with it
                moved.leave()


class _OffloadedStorage:
    """One storage on the host, freed with the last slot of the graph that uses a part of it."""

    def __init__(self, store: HostStore, saved: Tensor) -> None:
        self.version = saved._version
        self._store = store
        self._saved: Tensor | None = saved
        self._stream = torch.cuda.current_stream(saved.device) if saved.is_cuda else None
        source = torch.empty(0, dtype=torch.uint8, device=saved.device).set_(saved.untyped_storage())
        self._host = host_empty(source.nbytes, saved.device)
        self.left = store.outward.copy([(source, self._host)])
        self._back: Tensor | None = None
        self._came = DONE

    def leave(self) -> None:
        self._check_version()
        self.left.wait(self._stream)  # the stream that owns the block reuses it only after the copy has read it
        self._saved = None

    def start_back(self) -> None:
        """Start the copy back, if it is needed."""
        if self._saved is None and self._back is None:
            # Made on the stream that will use it, so it is that stream's to free; the lane waits for that stream.
            device = self._store.device
            self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            self._back = torch.empty_like(self._host, device=device)
            self._came = self._store.inward.copy([(self._host, self._back)], after=self.left)

    def storage(self) -> torch.UntypedStorage:
        """The bytes on the device, ready for the current stream."""
        self._check_version()
        self.start_back()
        self._came.wait()
        here = self._saved if self._saved is not None else self._back
        assert here is not None, "a storage is neither on its way nor back"
        if here.is_cuda and torch.cuda.current_stream(here.device) != self._stream:  # backward on another stream
            here.record_stream(torch.cuda.current_stream(here.device))
        return here.untyped_storage()

    def _check_version(self) -> None:
        # A later change does no harm: the copy has been made.
        changed = self._saved is not None and self._saved._version != self.version
        assert not changed, "a tensor that waits for backward was changed in place"

    def __del__(self) -> None:
        # A graph may be thrown away while copies run: what gets the memory next must come after them.
        if self._stream is not None:
            self.left.wait(self._stream)
            self._came.wait(self._stream)


@dataclass(frozen=True, eq=False, slots=True)
class _OffloadedTensor:
    """Stands in the graph for a tensor whose storage is on the host."""

    moved: _OffloadedStorage
    geometry: Geometry
    call: _ModuleCall

    def bring(self) -> Tensor:
        self.call.open()
        return self.geometry.on(self.moved.storage())


@dataclass(eq=False)
class _ModuleCall:
    """The saver of one call of a module. `outer` is asked first; the backward pass of `previous` comes next."""

    store: HostStore
    outer: Saver
    previous: weakref.ref[_ModuleCall] | None
    moved: list[weakref.ref[_OffloadedStorage]] = field(default_factory=list)
    is_open: bool = False

    def keep(self, tensor: Tensor) -> Tensor | Saved:
        saved = self.outer(tensor)
        if not isinstance(saved, Tensor) or not self.store.takes(tensor):
            return saved
        moved = self.store.send(tensor)
        self.moved.append(weakref.ref(moved))
        return _OffloadedTensor(moved, Geometry.of(tensor), self)

    def open(self) -> None:
        """Backward has reached this call: copy its storages back, and start those of the call before it."""
        if self.is_open:
            return
        self.is_open = True
        self.start_back()
        previous = None if self.previous is None else self.previous()
        if previous is not None:
            previous.start_back()

    def start_back(self) -> None:
        # What was saved last is needed first.
        for reference in reversed(self.moved):
            moved = reference()
            if moved is not None:
                moved.start_back()
