"""Memory that the GPUs of one node write into directly, and the rules that keep them from writing too early.

Every rank allocates the same sections at the same offsets, once, and maps those of all others:

    lane OUT     rows, ids and weights on their way to the experts
    lane BACK    rows and scalars on their way home

A lane has two slots, used in turn. They hold nothing for long: what arrived is copied out or summed at once, and what a
layer keeps for backward is ordinary memory; so their size does not grow with the layers and micro-batches in flight.
One transfer is, on every rank,

    send      one kernel writes into everybody's slot, and says of each chunk of tokens that it is written
    read      beside it, on a stream of our own, kernels that wait for a chunk of all ranks and read it

(or copy engines write, all tokens in one chunk, and a kernel says so behind them)

and it ends when both have. Transfers follow each other on one stream. Ranks may be skewed, but none is more than one
transfer ahead: to leave transfer n it has seen all others say that all of n is written, and a rank begins to write n
only after it has read what n - 1 brought. So whoever writes n + 1 may meet readers of n, and of nothing older. Hence
the one rule: TWO TRANSFERS IN A ROW USE DIFFERENT SLOTS. `take` sees to it; a captured graph must not end with the lane
that it begins with, as a dispatch with its combine, or a whole step, never does.

Flags are counters that only grow, one for each channel, chunk and writer. What they must have grown to is counted on
the device too, so graphs can be replayed. All ranks make the same transfers in the same order, with the same number of
tokens and as many programs that send; another stream needs buffers of its own. A kernel that waits is launched after
the kernels of its own rank that it waits for and never fills the chip, so these always run. A wait in vain ends after a
while, and `check` says so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from penstock.base.errors import DeviceError
from penstock.kernels import symmetric_kernels
from penstock.kernels.symmetric import MOST_RANKS, ROW_MULTIPLE, ChannelWait, Peers, TokenChunks, hold, signal, wait
from penstock.parallel.axes import Axis

MOST_CHUNKS: int = symmetric_kernels.MOST_CHUNKS.value
"""Chunks that a channel has flags for."""

ALIGNMENT = 256
"""Bytes that every section begins at a multiple of."""

CHUNK_BYTES = 2 << 20
"""Of a rank's tokens. Less would be read earlier, but after each chunk those who send wait until it is really there."""

LOOKS = 1 << 29
"""Looks at the flags before a rank is given up; a look is an access to our own memory, so that is some minutes: another
rank may still compile a kernel, or write a checkpoint."""


class TransferDirection(IntEnum):
    """A way with slots of its own."""

    OUT = 0
    BACK = 1


class Channel(IntEnum):
    """What a flag says."""

    CHOICES = 0
    ROWS = 1
    BACK = 2


class BufferSection(IntEnum):
    """What a slot has memory for; those of both lanes have the same number of slots."""

    OUT_ROWS = 0
    IDS = 1
    WEIGHTS = 2
    BACK_ROWS = 3
    SCALARS = 4


@dataclass(frozen=True, kw_only=True)
class BufferSizes:
    """What the sections must hold; the same on all ranks.

    Attributes:
        tokens: most tokens of a rank, T.
        top_k: most choices of a token, K; with experts that are shared by ranks, times the parts of one.
        row_bytes: of a row, scales included; a multiple of 16.
        ranks: W.
        slots: of each lane; with one, two transfers in a row must be of different lanes.
    """

    tokens: int
    top_k: int
    row_bytes: int
    ranks: int
    slots: int = 2

    def __post_init__(self) -> None:
        assert self.row_bytes % ROW_MULTIPLE == 0, f"rows of {self.row_bytes} bytes"
        assert 0 < self.ranks <= MOST_RANKS, f"{self.ranks} ranks"

    @cached_property
    def flag_bytes(self) -> int:
        """Flags stand first."""
        return _aligned(len(Channel) * self.channel_bytes)

    @cached_property
    def channel_bytes(self) -> int:
        """Flags of one channel."""
        return MOST_CHUNKS * self.ranks * 8

    @cached_property
    def section_bytes(self) -> tuple[int, ...]:
        """Of one slot, by `BufferSection`."""
        received = self.ranks * self.tokens
        rows, numbers = received * self.row_bytes, received * self.top_k * 4
        return tuple(_aligned(size) for size in (rows, numbers, numbers, rows, numbers))

    @property
    def total_bytes(self) -> int:
        """Of one rank."""
        return self.flag_bytes + self.slots * sum(self.section_bytes)

    def offset(self, section: BufferSection, slot: int) -> int:
        """Where a section of a slot begins, in bytes."""
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        return self.flag_bytes + slot * sum(self.section_bytes) + sum(self.section_bytes[:section])


def chunks_for(tokens: int, row_bytes: int) -> TokenChunks:
    """How tokens are cut.

    Args:
        tokens: of a rank.
        row_bytes: of one of them.
    """
    return TokenChunks.cut(tokens, max(1, min(tokens * row_bytes // CHUNK_BYTES, MOST_CHUNKS)))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class SymmetricBuffers:
    """One rank's memory, and its view of the others'. Made by `allocate`; by hand where ranks are simulated.

    Args:
        sizes: the same on all ranks.
        memory: our own, uint8, `sizes.total_bytes`; zero on all ranks before any of them begins.
        addresses: where each rank's memory begins, as this process sees it.
        rank: our place.
        looks: see `LOOKS`.
        memories: of all ranks, as tensors of ours, for copy engines; empty if nobody asks for these.

    Attributes:
        late: int32 scalar; 0, or one more than the number of a channel that somebody did not signal in time.
    """

    def __init__(
        self,
        sizes: BufferSizes,
        memory: Tensor,
        addresses: Sequence[int],
        rank: int,
        looks: int = LOOKS,
        memories: Sequence[Tensor] = (),
    ) -> None:
        assert memory.data_ptr() == addresses[rank], "our own address is not that of our memory"
        assert not any(address % ROW_MULTIPLE for address in addresses), f"addresses {addresses}"
        self.sizes = sizes
        self.memories = tuple(memories)
        self.peers = Peers(addresses_W=torch.tensor(addresses, dtype=torch.int64, device=memory.device), rank=rank)
        self.late = torch.zeros((), dtype=torch.int32, device=memory.device)
        self._memory = memory
        flags = memory[: len(Channel) * sizes.channel_bytes].view(torch.int64)
        self._flags = flags.view(len(Channel), MOST_CHUNKS, sizes.ranks).unbind()
        self._expected = torch.zeros(len(Channel), MOST_CHUNKS, dtype=torch.int64, device=memory.device).unbind()
        self._left = torch.zeros(len(Channel), dtype=torch.int32, device=memory.device)
        self._looks = looks
        self._views: dict[tuple[BufferSection, int, tuple[int, int], torch.dtype], Tensor] = {}
        self._uses = dict.fromkeys(TransferDirection, 0)
        self._last: tuple[TransferDirection, int] | None = None
        self._recorded: list[tuple[TransferDirection, int]] | None = None
        self._side_stream = torch.cuda.Stream(memory.device) if memory.is_cuda else None

    def take(self, lane: TransferDirection) -> int:
        """The slot of the next transfer.

        Returns:
            Its number, the same on all ranks.
        """
        slot = self._uses[lane] % self.sizes.slots
        self._uses[lane] += 1
        assert self._last != (lane, slot), f"two transfers in a row in slot {slot} of {lane.name}"
        self._last = lane, slot
        if self._recorded is not None:
            self._recorded.append(self._last)
        return slot

    @contextmanager
    def recording(self) -> Iterator[list[tuple[TransferDirection, int]]]:
        """What is taken inside belongs to a graph that is captured: nothing moves until it is replayed.

        Returns:
            The graph's transfers, complete at the end; `take` has then forgotten them.
        """
        assert self._recorded is None, "one graph is captured at a time"
        before = dict(self._uses), self._last
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None
            self._uses, self._last = before

    def replayed(self, transfers: Sequence[tuple[TransferDirection, int]]) -> None:
        """Take what a captured graph takes, whenever it is put on the stream.

        Args:
            transfers: of the graph, in order.
        """
        if transfers:
            lane, slot = transfers[0]
            assert self._last != (lane, slot), (
                f"a graph begins with slot {slot} of {lane.name}, as what came before ended"
            )
            self._last = transfers[-1]

    def flags_at(self, channel: Channel) -> int:
        """Where the flags of a channel begin, in bytes."""
        return channel * self.sizes.channel_bytes

    @contextmanager
    def transfer(self, send: Callable[[TokenChunks], None], chunks: TokenChunks) -> Iterator[None]:
        """Launch `send`; what is launched inside runs beside it, after everything before it. Both are done after it.

        Args:
            send: launches a kernel that writes to all ranks.
            chunks: of the tokens.
        """
        if self._side_stream is None:
            self._send(send, chunks)
            yield
            return
        stream = torch.cuda.current_stream(self._side_stream.device)
        before = stream.record_event()
        self._send(send, chunks)
        self._side_stream.wait_event(before)
        with torch.cuda.stream(self._side_stream):
            yield
        stream.wait_stream(self._side_stream)

    @contextmanager
    def overlapped_send(self, send: Callable[[TokenChunks], None], chunks: TokenChunks) -> Iterator[None]:
        """Launch `send`, and what is launched inside beside it; who reads what arrives is launched afterwards.

        Args:
            send: as in `transfer`.
            chunks: likewise.
        """
        if self._side_stream is None:
            self._send(send, chunks)
            yield
            return
        stream = torch.cuda.current_stream(self._side_stream.device)
        self._side_stream.wait_stream(stream)
        with torch.cuda.stream(self._side_stream):
            self._send(send, chunks)
        yield
        stream.wait_stream(self._side_stream)

    def wait(self, channel: Channel, signals: int) -> None:
        """Hold the stream until all ranks have written the first chunk.

        Args:
            channel: to wait for.
            signals: programs of each rank that write it.
        """
        wait(self._awaited(channel, signals))

    def copy_to_others(
        self, section: BufferSection, slot: int, rows_of: Callable[[int], Tensor], channel: Channel
    ) -> None:
        """Have the GPU's copy engines write our block of a section at all other ranks, then say that it is written.

        Args:
            section: of rows.
            slot: of the transfer.
            rows_of: the rows for a rank, T x D, contiguous.
            channel: of the section.
        """
        rank, ranks = self.peers.rank, self.peers.size
        for peer in ((rank + step) % ranks for step in range(1, ranks)):
            rows_TD = rows_of(peer)
            start = self.sizes.offset(section, slot) + rank * rows_TD.nbytes
            target = self.memories[peer][start : start + rows_TD.nbytes]
            target.copy_(rows_TD.view(torch.uint8).view(-1), non_blocking=True)
        signal(self.peers, self.flags_at(channel))

    def hold(self, channel: Channel, signals: int) -> None:
        """Hold the stream until all ranks have written the first chunk of a channel that `read` comes to next."""
        hold(self._awaited(channel, signals))

    def read(
        self, function: Callable[[ChannelWait, TokenChunks], None], channel: Channel, signals: int, chunks: TokenChunks
    ) -> None:
        """Launch a kernel that waits for chunks and reads them.

        Args:
            function: launches it.
            channel: to wait for.
            signals: programs of each rank that write.
            chunks: of each rank's tokens.
        """
        function(self._awaited(channel, signals), chunks)

    def _send(self, send: Callable[[TokenChunks], None], chunks: TokenChunks) -> None:
        send(chunks)

    def _awaited(self, channel: Channel, signals: int) -> ChannelWait:
        return ChannelWait(
            flags_CW=self._flags[channel],
            expected=self._expected[channel],
            left=self._left,
            late=self.late,
            channel=int(channel),
            signals=signals,
            looks=self._looks,
        )

    def view(self, section: BufferSection, slot: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Our own memory of a section; to be read inside the transfer that fills it."""
        key = section, slot, shape, dtype
        if key not in self._views:
            rows, columns = shape
            size = rows * columns * dtype.itemsize
            assert size <= self.sizes.section_bytes[section], f"{shape} of {dtype} in {section.name}"
            start = self.sizes.offset(section, slot)
            self._views[key] = self._memory[start : start + size].view(dtype).view(rows, columns)
        return self._views[key]

    def check(self) -> None:
        """Look whether every wait ended as it should; the host waits for the device.

        Raises:
            DeviceError: a rank did not signal in time, so what was computed since is wrong.
        """
        late = int(self.late)
        if late:
            raise DeviceError(
                f"rank {self.peers.rank} waited in vain for the other GPUs of the node",
                got=f"no signal {Channel(late - 1).name}",
                fix="look for the first rank that failed or hangs",
            )


def allocate(sizes: BufferSizes, axis: Axis, device: torch.device) -> SymmetricBuffers:
    """Memory that all ranks of an axis map. All of them call it, once; they must be GPUs of one node.

    Args:
        sizes: of the sections.
        axis: who shares; more than one rank.
        device: our GPU.
    """
    assert axis.group is not None and axis.size == sizes.ranks, f"{sizes} for the axis {axis.name} of {axis.size}"
    memory = _symmetric_memory.empty(sizes.total_bytes, dtype=torch.uint8, device=device)
    mapped = _symmetric_memory.rendezvous(memory, axis.group.group_name)
    memory.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(axis.group)
    memories = [mapped.get_buffer(peer, (sizes.total_bytes,), torch.uint8) for peer in range(sizes.ranks)]
    return SymmetricBuffers(sizes, memory, list(mapped.buffer_ptrs), axis.rank, memories=memories)
