"""Peer memory: buffers that the GPUs of a node write to directly, and the protocol that orders the writes.

Every rank allocates the same sections at the same offsets once, and maps those of all others:

    OUT     rows, ids and weights on their way to the experts
    BACK    rows and scalars on their way back

and, where the run has replicas of experts, these (penstock/parallel/replicas.py) and the loads that they are
planned by (`SymmetricBuffers.gather`).

Each direction has two slots, used in turn. Received rows are copied out or summed at once, so the size does not grow
with layers or micro-batches in flight. One transfer is, on every rank,

    send      one kernel writes to the slot of every rank, and sets a flag for each chunk of tokens
    read      beside it on a side stream, kernels wait for a chunk of all ranks and read it

or copy engines write all tokens as one chunk and a kernel sets the flag. Transfers follow each other on one stream. To
leave transfer n a rank has seen that all others have written n, and it writes n only after it has read n - 1. So a
writer of n + 1 may meet readers of n, but of nothing older. Hence the one rule: TWO CONSECUTIVE TRANSFERS USE DIFFERENT
SLOTS. `take` asserts it. A captured graph must not end with the direction that it begins with.

Flags only grow; their expected values are counted on the device, so graphs can be replayed. All ranks make the same
transfers in the same order, with equal numbers of tokens and sending programs. A waiting kernel comes after the kernels
of its rank that it waits for and never fills the chip, so these always run. `check` reports a wait that was given up.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from penstock.base.errors import DeviceError
from penstock.kernels import symmetric_kernels
from penstock.kernels.symmetric import (
    MOST_RANKS,
    ROW_MULTIPLE,
    ChannelWait,
    Peers,
    TokenChunks,
    gather_bytes,
    push_numbers,
    signal,
    take_numbers,
    wait,
)
from penstock.parallel.axes import Axis

MOST_CHUNKS: int = symmetric_kernels.MOST_CHUNKS.value  # that a channel has flags for
ALIGNMENT = 256  # bytes; every section begins at a multiple

CHUNK_BYTES = 2 << 20
"""Of a rank's tokens. Smaller chunks are read earlier, but a sender flushes its writes after each of them."""

LOOKS = 1 << 29
"""Polls of a flag before a wait is given up: some minutes, because another rank may compile a kernel or write a
checkpoint."""


class TransferDirection(IntEnum):
    """A direction with its own slots."""

    OUT = 0
    BACK = 1


class Channel(IntEnum):
    """Meaning of a flag."""

    CHOICES = 0
    ROWS = 1
    BACK = 2
    REPLICAS = 3  # both are of penstock/parallel/replicas.py
    GRADIENTS = 4
    NUMBERS = 5


class BufferSection(IntEnum):
    """A part of a slot. Both directions have the same number of slots."""

    OUT_ROWS = 0
    IDS = 1
    WEIGHTS = 2
    BACK_ROWS = 3
    SCALARS = 4


@dataclass(frozen=True, kw_only=True)
class BufferSizes:
    """Sizes of the sections in bytes; the same on all ranks."""

    tokens: int  # of one rank, at most
    top_k: int  # times expert_tensor
    row_bytes: int  # scales included; a multiple of 16
    ranks: int
    slots: int = 2  # with one, consecutive transfers must alternate directions
    numbers: int = 0  # of each rank in a gather; its section comes after all slots
    replica_bytes: int = 0  # of `penstock.parallel.replicas`, at the end

    def __post_init__(self) -> None:
        assert self.row_bytes % ROW_MULTIPLE == 0, f"rows of {self.row_bytes} bytes"
        assert 0 < self.ranks <= MOST_RANKS, f"{self.ranks} ranks"

    @cached_property
    def flag_bytes(self) -> int:
        """Of all flags, which come first."""
        return aligned(len(Channel) * self.channel_bytes)

    @cached_property
    def channel_bytes(self) -> int:
        return MOST_CHUNKS * self.ranks * 8

    @cached_property
    def section_bytes(self) -> tuple[int, ...]:
        """Of each `BufferSection` of one slot."""
        received = self.ranks * self.tokens  # every rank may send all its tokens here
        rows, numbers = received * self.row_bytes, received * self.top_k * 4  # ids, weights, scalars: 4 bytes each
        return tuple(aligned(size) for size in (rows, numbers, numbers, rows, numbers))

    @property
    def total_bytes(self) -> int:
        return self.replica_offset + self.replica_bytes

    @property
    def replica_offset(self) -> int:
        return self.numbers_offset + aligned(gather_bytes(self.numbers, self.ranks))

    @property
    def numbers_offset(self) -> int:
        return self.flag_bytes + self.slots * sum(self.section_bytes)

    def offset(self, section: BufferSection, slot: int) -> int:
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        return self.flag_bytes + slot * sum(self.section_bytes) + sum(self.section_bytes[:section])


def chunks_for(tokens: int, row_bytes: int) -> TokenChunks:
    return TokenChunks.cut(tokens, max(1, min(tokens * row_bytes // CHUNK_BYTES, MOST_CHUNKS)))


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class SymmetricBuffers:
    """This rank's memory, and its view of the others'. Made by `allocate`, and by hand for simulated ranks.

    `memory` is ours, zero before the first transfer; `addresses` are those of all ranks, `memories` the same as tensors
    for copy engines. `late` is an int32 scalar: 0, or one more than the channel whose wait was given up.
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
        # By channel: flags_CW, set by rank w for chunk c, and the values that a wait expects, counted on the device.
        flags = memory[: len(Channel) * sizes.channel_bytes].view(torch.int64)
        self._flags = flags.view(len(Channel), MOST_CHUNKS, sizes.ranks).unbind()
        self._expected = torch.zeros(len(Channel), MOST_CHUNKS, dtype=torch.int64, device=memory.device).unbind()
        self._left = torch.zeros(len(Channel), dtype=torch.int32, device=memory.device)
        self._looks = looks
        self._views: dict[tuple[BufferSection, int, tuple[int, int], torch.dtype], Tensor] = {}
        self._uses = dict.fromkeys(TransferDirection, 0)  # transfers so far, which choose the next slot
        self._last: tuple[TransferDirection, int] | None = None  # direction and slot of the last transfer
        self._recorded: list[tuple[TransferDirection, int]] | None = None  # not None while a graph is captured
        self._side_stream = torch.cuda.Stream(memory.device) if memory.is_cuda else None

    def take(self, lane: TransferDirection) -> int:
        """The number of the next transfer's slot, the same on all ranks."""
        slot = self._uses[lane] % self.sizes.slots
        self._uses[lane] += 1
        assert self._last != (lane, slot), f"two transfers in a row in slot {slot} of {lane.name}"
        self._last = lane, slot
        if self._recorded is not None:
            self._recorded.append(self._last)
        return slot

    @contextmanager
    def recording(self) -> Iterator[list[tuple[TransferDirection, int]]]:
        """Record the transfers of a graph that is captured; `take` forgets them until it is replayed."""
        assert self._recorded is None, "one graph is captured at a time"
        before = dict(self._uses), self._last
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None
            self._uses, self._last = before  # captured work has not run

    def replayed(self, transfers: Sequence[tuple[TransferDirection, int]]) -> None:
        """Count the transfers of a graph that is put on the stream."""
        if transfers:
            lane, slot = transfers[0]
            assert self._last != (lane, slot), (
                f"a graph begins with slot {slot} of {lane.name}, as what came before ended"
            )
            self._last = transfers[-1]

    def flags_at(self, channel: Channel) -> int:
        """First byte of a channel's flags."""
        return channel * self.sizes.channel_bytes

    @contextmanager
    def transfer(self, send: Callable[[TokenChunks], None], chunks: TokenChunks) -> Iterator[None]:
        """Launch `send`; the context's launches go to the side stream. The stream continues after both."""
        if self._side_stream is None:
            self._send(send, chunks)
            yield
            return
        stream = torch.cuda.current_stream(self._side_stream.device)
        self._side_stream.wait_stream(stream)  # fork: the transfer before this one is over on both
        self._send(send, chunks)
        with torch.cuda.stream(self._side_stream):
            yield
        stream.wait_stream(self._side_stream)  # join

    def wait(self, channel: Channel, signals: int, needed: Tensor | None = None) -> None:
        """Block the stream until all ranks have written the first chunk, each with `signals` programs.

        Nothing is waited for if `needed`, an int32 scalar that all ranks have, is zero.
        """
        wait(self._awaited(channel, signals), needed)

    def meet(self, channel: Channel, needed: Tensor | None = None) -> None:
        """Block the stream until all ranks are here on theirs, with all of their earlier work done; see `wait`."""
        signal(self.peers, self.flags_at(channel), needed)
        self.wait(channel, 1, needed)

    def gather(self, numbers_N: Tensor) -> Tensor:
        """The int32 numbers of all ranks (W x N), in two small kernels; all ranks call it in the same order."""
        sizes, channel = self.sizes, Channel.NUMBERS
        assert len(numbers_N) == sizes.numbers, f"{len(numbers_N)} numbers instead of {sizes.numbers}"
        push_numbers(numbers_N, self.peers, self._expected[channel], (sizes.numbers_offset, self.flags_at(channel)))
        section = self._memory[sizes.numbers_offset : sizes.replica_offset].view(torch.int32)
        found_WN = numbers_N.new_empty(sizes.ranks, sizes.numbers)
        self.read(lambda awaited, _: take_numbers(section, found_WN, awaited), channel, 1, TokenChunks.cut(1, 1))
        return found_WN

    def copy_to_others(
        self, section: BufferSection, slot: int, rows_of: Callable[[int], Tensor], channel: Channel
    ) -> None:
        """Write our rows (T x D, contiguous) to a section of all other ranks by copy engines, then set the flag."""
        rank, ranks = self.peers.rank, self.peers.size
        for peer in ((rank + step) % ranks for step in range(1, ranks)):  # ranks begin with different peers
            rows_TD = rows_of(peer)
            start = self.sizes.offset(section, slot) + rank * rows_TD.nbytes
            target = self.memories[peer][start : start + rows_TD.nbytes]
            target.copy_(rows_TD.view(torch.uint8).view(-1), non_blocking=True)
        signal(self.peers, self.flags_at(channel))  # on the same stream, so after the copies

    def hold(self, channel: Channel, signals: int) -> None:
        """`wait` for a channel that `read` comes to next."""
        wait(self._awaited(channel, signals), advances=False)

    def read(
        self, function: Callable[[ChannelWait, TokenChunks], None], channel: Channel, signals: int, chunks: TokenChunks
    ) -> None:
        """Launch a kernel that waits for chunks, which `signals` programs of each rank write, and reads them."""
        function(self._awaited(channel, signals), chunks)

    def _send(self, send: Callable[[TokenChunks], None], chunks: TokenChunks) -> None:
        send(chunks)  # simulated ranks (tests/parallel/symmetric_ranks.py) send chunk by chunk

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
        """Our own memory of a section, valid inside the transfer that fills it."""
        key = section, slot, shape, dtype
        if key not in self._views:
            rows, columns = shape
            size = rows * columns * dtype.itemsize
            assert size <= self.sizes.section_bytes[section], f"{shape} of {dtype} in {section.name}"
            start = self.sizes.offset(section, slot)
            self._views[key] = self._memory[start : start + size].view(dtype).view(rows, columns)
        return self._views[key]

    def replica_view(self, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Our own memory of replicas, from a byte of their section on."""
        start = self.sizes.replica_offset + first
        return self._memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def check(self) -> None:
        """Raise a DeviceError if a rank did not signal in time, so that later results are wrong. The host waits."""
        late = int(self.late)
        if late:
            raise DeviceError(
                f"rank {self.peers.rank} waited in vain for the other GPUs of the node",
                got=f"no signal {Channel(late - 1).name}",
                fix="look for the first rank that failed or hangs",
            )


def allocate(sizes: BufferSizes, axis: Axis, device: torch.device) -> SymmetricBuffers:
    """Memory that all ranks of an axis map. All of them call it, once; they are GPUs of one node."""
    assert axis.group is not None and axis.size == sizes.ranks, f"{sizes} for the axis {axis.name} of {axis.size}"
    memory = _symmetric_memory.empty(sizes.total_bytes, dtype=torch.uint8, device=device)
    mapped = _symmetric_memory.rendezvous(memory, axis.group.group_name)
    memory.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(axis.group)  # no rank sends before the flags of all are zero
    memories = [mapped.get_buffer(peer, (sizes.total_bytes,), torch.uint8) for peer in range(sizes.ranks)]
    return SymmetricBuffers(sizes, memory, list(mapped.buffer_ptrs), axis.rank, memories=memories)
