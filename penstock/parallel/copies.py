"""Copies between host and device that overlap with compute: a CUDA stream for each direction, and a stream of chunks.

Copies of pinned memory run asynchronously, and the two directions do not slow each other. On a CPU copies are plain.
The host waits only in `ChunkStream.finish`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

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
