"""Memory that the GPUs of one node write into directly, and the rules that keep them from writing too early.

Every rank allocates the same sections at the same offsets, once, and maps those of all others:

    lane OUT     rows, ids and weights on their way to the experts
    lane BACK    rows and scalars on their way home

A lane has two slots, used in turn. They hold nothing for long: what arrived is copied out or summed at once, and what a
layer keeps for backward is ordinary memory; so their size does not grow with the layers and micro-batches in flight.
One transfer is, on every rank and in the order of one stream,

    push     write into everybody's slot
    signal   everything before is written
    wait     until all ranks have signalled: our slot is full
    read     before anything else is signalled

Ranks may be skewed, but none is more than one transfer ahead: to leave transfer n it needs all others to have signalled
n, and a rank signals n only after it has read what n - 1 brought. So whoever pushes n + 1 may meet readers of n, and of
nothing older. Hence the one rule: TWO TRANSFERS IN A ROW USE DIFFERENT SLOTS. `take` sees to it; a captured graph must
not end with the lane that it begins with, as a dispatch with its combine, or a whole step, never does.

Flags are counters that only grow; each has one writer. How often a channel was waited for is counted on the device too,
so graphs can be replayed. All ranks make the same transfers in the same order on one stream, with the same number of
tokens; another stream needs buffers of its own. A wait in vain ends after a while, and `check` says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from penstock.base.errors import DeviceError
from penstock.kernels.symmetric import MOST_RANKS, ROW_MULTIPLE, Peers, signal, wait
from penstock.parallel.axes import Axis

ALIGNMENT = 256
"""Bytes that every section begins at a multiple of."""

LOOKS = 1 << 26
"""Looks at the flags before a rank is given up; a look is an access to our own memory."""


class Lane(IntEnum):
    """A way with slots of its own."""

    OUT = 0
    BACK = 1


class Channel(IntEnum):
    """What a flag says."""

    META = 0
    ROWS = 1
    BACK = 2


class Section(IntEnum):
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

    @property
    def flag_bytes(self) -> int:
        """Flags stand first."""
        return _aligned(len(Channel) * self.ranks * 8)

    @property
    def section_bytes(self) -> tuple[int, ...]:
        """Of one slot, by `Section`."""
        received = self.ranks * self.tokens
        rows, numbers = received * self.row_bytes, received * self.top_k * 4
        return tuple(_aligned(size) for size in (rows, numbers, numbers, rows, numbers))

    @property
    def total_bytes(self) -> int:
        """Of one rank."""
        return self.flag_bytes + self.slots * sum(self.section_bytes)

    def offset(self, section: Section, slot: int) -> int:
        """Where a section of a slot begins, in bytes."""
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        return self.flag_bytes + slot * sum(self.section_bytes) + sum(self.section_bytes[:section])


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

    Attributes:
        late: int32 scalar; 0, or one more than the number of a channel that somebody did not signal in time.
    """

    def __init__(
        self, sizes: BufferSizes, memory: Tensor, addresses: Sequence[int], rank: int, looks: int = LOOKS
    ) -> None:
        assert memory.data_ptr() == addresses[rank], "our own address is not that of our memory"
        assert not any(address % ROW_MULTIPLE for address in addresses), f"addresses {addresses}"
        self.sizes = sizes
        self.peers = Peers(addresses_W=torch.tensor(addresses, dtype=torch.int64, device=memory.device), rank=rank)
        self.late = torch.zeros((), dtype=torch.int32, device=memory.device)
        self._memory = memory
        self._flags = memory[: len(Channel) * sizes.ranks * 8].view(torch.int64).view(len(Channel), sizes.ranks)
        self._expected = torch.zeros(len(Channel), dtype=torch.int64, device=memory.device)
        self._looks = looks
        self._turns = dict.fromkeys(Lane, 0)
        self._last: tuple[Lane, int] | None = None

    def take(self, lane: Lane) -> int:
        """The slot of the next transfer.

        Returns:
            Its number, the same on all ranks.
        """
        slot = self._turns[lane] % self.sizes.slots
        self._turns[lane] += 1
        assert self._last != (lane, slot), f"two transfers in a row in slot {slot} of {lane.name}"
        self._last = lane, slot
        return slot

    def signal(self, channel: Channel) -> None:
        """Say it to all ranks, after everything that this stream did before."""
        signal(self.peers, channel * self.sizes.ranks * 8)

    def wait(self, channel: Channel) -> None:
        """Hold the stream until all ranks have said it once more."""
        wait(self._flags, self._expected, self.late, int(channel), looks=self._looks)

    def view(self, section: Section, slot: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Our own memory of a section; to be read between `wait` and the next signal."""
        rows, columns = shape
        size = rows * columns * dtype.itemsize
        assert size <= self.sizes.section_bytes[section], f"{tuple(shape)} of {dtype} in {section.name}"
        start = self.sizes.offset(section, slot)
        return self._memory[start : start + size].view(dtype).view(rows, columns)

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
    return SymmetricBuffers(sizes, memory, list(mapped.buffer_ptrs), axis.rank)
