"""Offload to pinned host memory: tensors that chosen modules save for backward, and sums of gradients.

    forward     a saved storage is copied out on one stream beside compute, and freed after the copy
    backward    when a module's backward opens its first tensor, copies of that call's tensors start on the other
                stream, and of the call before it too: they overlap with this call's compute

At most `IN_FLIGHT_BYTES` of device memory wait for their copy; beyond that compute waits for the oldest one. A tensor
that backward needs before it was freed is not copied back. A storage moves once, however many views of it are saved;
parameters and storages under `SMALLEST_BYTES` stay. Memory returns to its stream only after that stream has waited for
the copy: `record_stream` would return it when the host notices, so the peak would differ from step to step.

A recomputed region saves its inputs only, so a module that is both recomputed and offloaded has these on the host.

Copies of pinned memory run asynchronously, on a CUDA stream for each direction, and the two directions do not slow each
other. On a CPU copies are plain. The host waits only in `ChunkStream.finish`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.config.parallel import OFFLOADABLE, Offload
from penstock.parallel.recompute import Geometry, Saved, Saver, current, is_inside, is_parameter, saving

CHUNK_BYTES = 1 << 26
"""Device bytes of a chunk. At 50 GB/s it takes 1.3 ms, much longer than its launches; larger chunks only lengthen the
first copy in and the last copy out, which nothing hides."""

ALIGNMENT = 512  # bytes; the CUDA allocator's own, so that kernels find a chunk's tensors as aligned as any other


@dataclass(frozen=True)
class PendingCopy:
    """A copy that may still run. Its end is `event`, None on a CPU."""

    event: torch.cuda.Event | None = None

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let a stream (default: the current one) wait for the copy."""
        if self.event is not None:
            (torch.cuda.current_stream() if stream is None else stream).wait_event(self.event)

    def is_over(self) -> bool:
        """Whether the copy has run, without a wait."""
        return self.event is None or self.event.query()

    def wait_on_host(self) -> None:
        if self.event is not None:
            self.event.synchronize()


DONE = PendingCopy()  # a copy that has run


class CopyStream:
    """One direction between host and device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], *, after: PendingCopy = DONE) -> PendingCopy:
        """Copy each (source, target) after the current stream and another copy; the caller holds both until then."""
        if self._stream is None:
            for source, target in pairs:
                if not source.is_meta:
                    target.copy_(source)
            return DONE
        self.wait_for_current()  # sources are written there
        return self.copy_early(pairs, after=after)

    def wait_for_current(self) -> None:
        """Copies that follow come after the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy_early(self, pairs: Sequence[tuple[Tensor, Tensor]], *, after: PendingCopy) -> PendingCopy:
        """`copy` without waiting for the current stream: both ends are free once `after` is over."""
        if self._stream is None:
            return self.copy(pairs, after=after)
        after.wait(self._stream)
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            return PendingCopy(self._stream.record_event())


def host_empty(bytes_: int, device: torch.device) -> Tensor:
    """Host memory, pinned for a GPU: torch reuses no block while copies run. On meta it takes one byte."""
    if device.type == "meta":
        return torch.empty((), dtype=torch.uint8, device=device).expand(bytes_)
    return torch.empty(bytes_, dtype=torch.uint8, pin_memory=device.type == "cuda")


def host_tensors(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Contiguous host tensors, pinned for a GPU, uninitialized; meta tensors for the meta device.

    torch rounds pinned memory up to a power of two, on average a third more for large tensors. Here tensors share
    blocks of such sizes, large ones first, so that only the last blocks are not full.
    """
    if device.type == "meta":
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    sizes = [prod(shape) * dtype.itemsize for shape in shapes]
    left, tensors = sum(map(aligned, sizes)), dict[int, Tensor]()  # bytes without a place yet
    rests: list[Tensor] = []  # free bytes of each block, from an aligned address on
    for index in sorted(range(len(sizes)), key=lambda tensor_index: -sizes[tensor_index]):
        size = aligned(sizes[index])
        block = next((number for number, rest in enumerate(rests) if rest.numel() >= size), len(rests))
        if block == len(rests):
            usual = 1 << (max(left, 1).bit_length() - 1)  # at most what is left, so the last blocks are small
            rests.append(host_empty(max(usual, ALIGNMENT, 1 << (size - 1).bit_length()), device))
        tensors[index] = rests[block][: sizes[index]].view(dtype).view(shapes[index])
        rests[block] = rests[block][size:]
        left -= size
    return [tensors[index] for index in range(len(sizes))]


class ChunkStream:
    """Copies chunks of host memory to the device, works on them there and copies them back, two chunks at a time.

        buffer 0   in 0 | work 0, out 0 | in 2 | work 2, out 2
        buffer 1          in 1 | work 1, out 1 | in 3 ...

    Both directions are busy. Buffers are made at the first run, and again if a chunk is larger.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inward, self._outward = CopyStream(device), CopyStream(device)
        self._buffers: list[Tensor] = []  # two of equal size, uint8
        self._left = [DONE, DONE]  # the last copy out of each buffer

    def run(
        self,
        chunks: Sequence[Sequence[Tensor]],
        work: Callable[[int, list[Tensor]], None],
        *,
        returned: Sequence[int] | None = None,
    ) -> None:
        """Work on every chunk in order. The host does not wait: see `finish`.

        Chunks are contiguous host tensors, pinned for a GPU; no two share memory. `work` gets a chunk's index and its
        tensors on the device, and changes them in place on the current stream. Of each chunk the first `returned`
        tensors go back, all without it. Earlier copies of the current stream may still write the host tensors.
        """
        self._make_buffers(chunks)
        self._inward.wait_for_current()
        coming = [self._bring(index, chunk) for index, chunk in enumerate(chunks[:2])]
        for index, chunk in enumerate(chunks):
            tensors, arrival = coming.pop(0)
            arrival.wait()  # the compute stream waits, not the host
            work(index, tensors)
            count = len(chunk) if returned is None else returned[index]
            self._left[index % 2] = self._outward.copy(list(zip(tensors, chunk, strict=True))[:count])  # after `work`
            if index + 2 < len(chunks):
                coming.append(self._bring(index + 2, chunks[index + 2]))

    def finish(self) -> None:
        """Wait until the host tensors have the results."""
        for left in self._left:
            left.wait_on_host()

    def _make_buffers(self, chunks: Sequence[Sequence[Tensor]]) -> None:
        size = buffer_bytes(chunks)
        if not self._buffers or self._buffers[0].numel() < size:
            for left in self._left:
                left.wait()
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
            # A block that was freed on the current stream may still be in use there.
            stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
            fresh = DONE if stream is None else PendingCopy(stream.record_event())
            self._left = [fresh, fresh]

    def _bring(self, index: int, chunk: Sequence[Tensor]) -> tuple[list[Tensor], PendingCopy]:
        """Copy a chunk into its buffer after the chunk before it has left."""
        buffer, start, tensors = self._buffers[index % 2], 0, []
        for tensor in chunk:
            assert tensor.device.type != "cuda" and tensor.is_contiguous(), "chunks are contiguous, on the host"
            piece = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensors.append(piece)
            start += aligned(tensor.nbytes)
        return tensors, self._inward.copy_early(list(zip(chunk, tensors, strict=True)), after=self._left[index % 2])


def buffer_bytes(chunks: Sequence[Sequence[Tensor]]) -> int:
    """Device memory of each of the two buffers of a `ChunkStream` for these chunks."""
    return max((sum(aligned(tensor.nbytes) for tensor in chunk) for chunk in chunks), default=0)


def aligned(bytes_: int) -> int:
    return -(-bytes_ // ALIGNMENT) * ALIGNMENT


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


SLOTS = 3
EMBEDDING = -1  # number of the layer before the first one, which has no sums here

_ITEM = torch.float32.itemsize


def layer_of_sums(name: str) -> int | None:
    """Layer whose slot holds the sum of a parameter's gradients; None for those outside of decoder layers."""
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "blocks" else None


class GradientOffload:
    """Float32 sums of gradients of parameters that have a layer, by name.

    The device has three slots, each as large as the largest layer. Layers take them in turn, in the order of backward:

        backward   layer 3, slot 0 | layer 2, slot 1 | layer 1, slot 2 | layer 0, slot 0
        to host                    | slot 0          | slot 1          | slot 2
        from host                                    | slot 0: layer 0 | slot 1: ...

    A slot comes with the sums of the earlier micro-batches of the step, kernels and autograd add to it as to any other
    buffer, and it goes back. So sums are the same bits as on the device, and both directions of the link run beside
    compute. In the first micro-batch of a step slots are zeroed instead of fetched. The norm of each gradient is
    computed when its slot leaves.

    The decoder calls `reached` when backward reaches the output of a layer (`penstock.models.decoder`).

    `totals` are views of slots on the device, valid inside the backward pass of their layer; `host` has the sums after
    `finish`.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        by_layer: dict[int, list[str]] = defaultdict(list)
        for name in shapes:
            layer = layer_of_sums(name)
            assert layer is not None, f"{name} is outside of the layers"
            by_layer[layer].append(name)
        self._layers = dict(sorted(by_layer.items(), reverse=True))  # in the order of backward
        self._slot_of = {layer: position % SLOTS for position, layer in enumerate(self._layers)}
        sizes = {name: aligned(prod(shape) * _ITEM) // _ITEM for name, shape in shapes.items()}
        largest = max(sum(sizes[name] for name in names) for names in self._layers.values())
        slots = [torch.zeros(largest, device=device) for _ in range(min(SLOTS, len(self._layers)))]
        self.totals: dict[str, Tensor] = {}
        for layer, names in self._layers.items():
            start = 0
            for name in names:
                flat = slots[self._slot_of[layer]][start : start + prod(shapes[name])]
                self.totals[name] = flat.view(shapes[name])
                start += sizes[name]
        self.host = dict(zip(shapes, host_tensors(list(shapes.values()), torch.float32, device), strict=True))
        self.device_bytes = sum(slot.nbytes for slot in slots)
        self.host_bytes = sum(tensor.nbytes for tensor in self.host.values())
        self.outward, self.inward = CopyStream(device), CopyStream(device)
        self._norms: dict[str, Tensor] = {}
        self._has_sum: set[int] = set()  # layers of this step
        self._arrivals: dict[int, PendingCopy] = {}  # by layer: its slot is free, and filled if the layer has a sum
        self._leaving: list[PendingCopy] = []
        self._open: int | None = None

    def start_step(self) -> None:
        """Forget all sums: the next pass begins new ones."""
        self.finish()
        self._has_sum.clear()

    def have_sums(self) -> None:
        """Take all layers to have sums of earlier micro-batches, for a plan."""
        self._has_sum |= set(self._layers)

    def replay_backward(self) -> None:
        """Copy as in the backward pass of a micro-batch."""
        for layer in (*self._layers, EMBEDDING):
            self.reached(layer)

    @torch.no_grad()
    def reached(self, layer: int) -> None:
        """Backward begins with a layer, and has finished the one after it."""
        if self._open is not None:
            self._send(self._open)
        self._open = None if layer == EMBEDDING else layer
        if self._open is None:
            return
        self._arrivals.pop(layer, DONE).wait()
        if layer not in self._has_sum:
            torch._foreach_zero_([self.totals[name] for name in self._layers[layer]])

    def finish(self) -> None:
        """Let the current stream wait until all sums are on the host."""
        if self._open is not None:
            self.reached(EMBEDDING)
        for copy in self._leaving:
            copy.wait()
        self._leaving.clear()

    def norms(self) -> dict[str, Tensor]:
        """2-norm of each sum, a float32 scalar on the device; parameters of layers that no pass reached have none."""
        self.finish()
        return {name: norm for name, norm in self._norms.items() if layer_of_sums(name) in self._has_sum}

    def _send(self, layer: int) -> None:
        """Send the sums of a finished layer, and fetch those of the layer that takes its slot next."""
        names = self._layers[layer]
        totals = [self.totals[name] for name in names]
        self._norms |= dict(zip(names, torch._foreach_norm(totals), strict=True))
        left = self.outward.copy([(total, self.host[name]) for name, total in zip(names, totals, strict=True)])
        self._leaving = [*self._leaving[-SLOTS:], left]  # one stream: the last copy is the last to end
        self._has_sum.add(layer)
        order = list(self._layers)
        position = order.index(layer) + SLOTS
        following = order[position] if position < len(order) else order[self._slot_of[layer]]
        self._arrivals[following] = left
        if following in self._has_sum:
            pairs = [(self.host[name], self.totals[name]) for name in self._layers[following]]
            self._arrivals[following] = self.inward.copy_early(pairs, after=left)
