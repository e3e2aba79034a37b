"""Ranks that share symmetric memory, simulated: threads of one process, of which one runs at a time.

Their memories are ordinary tensors, and the table of addresses points at them, so interpreted kernels read and write
"the others' memory" as they would on a node. A rank gives up its turn before and after whatever the others can see, and
the next one is drawn at random: each seed is another skew of the ranks. A rank whose wait is not over yet passes its
turn on; if all wait, no rank can go on, and the simulation fails instead of hanging.

What it cannot show: kernels of different ranks never run at the same time here, and memory has no caches.
"""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.symmetric import ChannelWait, TokenChunks
from penstock.parallel.symmetric import BufferSizes, Channel, SymmetricBuffers, TransferDirection


class StuckError(AssertionError):
    """All ranks wait for each other."""


class Turns:
    """Hands one baton round among threads."""

    def __init__(self, ranks: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._running = set(range(ranks))
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._changed = threading.Condition()
        self._holder: int | None = None
        self.error: BaseException | None = None

    def begin(self, rank: int) -> None:
        with self._changed:
            if self._holder is None:  # the first thread to come gives the baton to rank 0
                self._holder = 0
            self._until_turn(rank)

    def pass_on(self, rank: int, ready: Callable[[], bool] = lambda: True) -> None:
        """Let another run; come back when drawn and `ready`."""
        with self._changed:
            self._waiting[rank] = ready
            self._draw()
            self._until_turn(rank)
            del self._waiting[rank]

    def end(self, rank: int, error: BaseException | None = None) -> None:
        with self._changed:
            self._running.discard(rank)
            self.error = self.error or error
            self._draw()

    def _draw(self) -> None:
        able = [rank for rank in sorted(self._running) if self._waiting.get(rank, lambda: True)()]
        if self._running and not able:
            self.error = self.error or StuckError(f"ranks {sorted(self._running)} all wait")
        self._holder = self._random.choice(able) if able else None
        self._changed.notify_all()

    def _until_turn(self, rank: int) -> None:
        # However long the other rank computes: on a busy machine a limit would end before it does.
        self._changed.wait_for(lambda: self._holder == rank or self.error is not None)
        if self.error is not None:
            raise StuckError(f"rank {rank} cannot go on: {self.error}")


class SimulatedBuffers(SymmetricBuffers):
    """Symmetric memory of one simulated rank; see the top of the file."""

    def __init__(self, sizes: BufferSizes, memories: list[Tensor], rank: int, turns: Turns, careless: bool) -> None:
        # One look is all that a wait may need once it is its turn.
        addresses = [memory.data_ptr() for memory in memories]
        super().__init__(sizes, memories[rank], addresses, rank, looks=1, memories=memories)
        self._baton, self._careless = turns, careless
        self.aside: Callable[[], None] = lambda: None  # work of another stream, which runs before the next `wait`

    def take(self, lane: TransferDirection) -> int:
        return 0 if self._careless else super().take(lane)

    def wait(self, channel: Channel, signals: int, needed: Tensor | None = None) -> None:
        aside, self.aside = self.aside, lambda: None
        aside()
        if needed is None or int(needed):
            self._pass_on(self._is_written(channel, signals, 0))
        super().wait(channel, signals, needed)
        self._pass_on()

    def read(
        self, function: Callable[[ChannelWait, TokenChunks], None], channel: Channel, signals: int, chunks: TokenChunks
    ) -> None:
        for one in _one_by_one(chunks):
            self._pass_on(self._is_written(channel, signals, one.first))
            super().read(function, channel, signals, one)
        self._pass_on()

    def hold(self, channel: Channel, signals: int) -> None:
        self._pass_on(self._is_written(channel, signals, 0))
        super().hold(channel, signals)
        self._pass_on()

    def unawaited(self, channel: Channel) -> int:
        """Signals of this rank for chunk 0 beyond those that it has waited for: later waits would pass too early."""
        return int(self._flags[channel][0, self.peers.rank] - self._expected[channel][0])

    def _send(self, send: Callable[[TokenChunks], None], chunks: TokenChunks) -> None:
        for one in _one_by_one(chunks):
            self._pass_on()
            super()._send(send, one)
        self._pass_on()

    def _is_written(self, channel: Channel, signals: int, chunk: int) -> Callable[[], bool]:
        flags_W, wanted = self._flags[channel][chunk], int(self._expected[channel][chunk]) + signals
        return lambda: bool((flags_W >= wanted).all())

    def _pass_on(self, ready: Callable[[], bool] = lambda: True) -> None:
        self._baton.pass_on(self.peers.rank, ready)


def _one_by_one(chunks: TokenChunks) -> Iterator[TokenChunks]:
    """A launch for each chunk, so that others see some of them written and others not."""
    return (chunks._replace(first=chunk, last=chunk + 1) for chunk in range(chunks.first, chunks.last))


def run_ranks(
    function: Callable[..., Any], sizes: BufferSizes, *args: Any, seed: int = 0, careless: bool = False
) -> list[Any]:
    """`function(buffers, *args)` on every simulated rank; what each returned. The seed decides the order of turns.

    `careless` ranks use one slot for all transfers, to see that the simulation notices.
    """
    memories = [torch.zeros(sizes.total_bytes + 256, dtype=torch.uint8) for _ in range(sizes.ranks)]
    memories = [memory[-memory.data_ptr() % 256 :][: sizes.total_bytes] for memory in memories]  # aligned as a GPU's
    turns, results = Turns(sizes.ranks, seed), [None] * sizes.ranks

    def work(rank: int) -> None:
        try:
            turns.begin(rank)
            buffers = SimulatedBuffers(sizes, memories, rank, turns, careless)
            results[rank] = function(buffers, *args)
            buffers.check()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            turns.end(rank, error)
        else:
            turns.end(rank)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(sizes.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # two threads must never launch kernels at once: the interpreter replaces functions of Triton
    if turns.error is not None:
        raise turns.error
    return results
