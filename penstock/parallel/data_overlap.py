"""Sums of gradients beside the last backward pass of a step, and new weights gathered beside the next forward pass.

    last backward pass   head, layer 3 | layer 2          | layer 1 | layer 0 |
    sums                               | head and layer 3 | layer 2 | layer 1 | layer 0 and embedding |
                                                                                norm, update
    gathers              embedding, layer 0 | layer 1 | layer 2 | layer 3, head
    first forward pass                      | layer 0 | layer 1 | layer 2 | layer 3, loss

A bucket of gradients starts when the last backward pass of the step is through with every layer that it has tensors of;
with a pipeline each stage has a last pass of its own. Buckets start in one order on all ranks, that of backward. They
are the buckets of a run without overlap, so sums are the same bits. The norm that clips needs all sums, so no update
begins before the last one.

The decoder calls `reached` and `wait` (penstock/models/decoder.py). Gradients of layers that it does not tell of are
summed by `finish`. On a GPU buckets are packed, sent and unpacked on a stream of their own, for which compute waits in
`finish` and `wait` only. On a CPU the host waits for messages, so a bucket of weights starts when it is waited for.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from sys import maxsize

import torch

from penstock.base.spans import Span
from penstock.parallel.buckets import BucketTransfer, TransferQueue, run_transfers
from penstock.parallel.spans import span

BEFORE_LAYERS = -1  # the embedding, whose gradient is complete when the pass ends
BEHIND_LAYERS = maxsize  # final norm, output projection and prediction layers


def place_of(name: str) -> int:
    """Place of a parameter in the order of forward: number of its layer, or one of the places around the layers."""
    first, _, rest = name.partition(".")
    if first == "blocks":
        return int(rest.partition(".")[0])
    return BEHIND_LAYERS if first in ("norm", "head", "mtp") else BEFORE_LAYERS


class OverlappedSums:
    """The sums of a step by groups of ranks, which start in its last backward pass; `layers` of the whole model."""

    def __init__(self, sums: Iterable[Iterable[BucketTransfer]], layers: int, device: torch.device) -> None:
        # Groups of ranks take turns layer by layer; sorting keeps the order of each group.
        self._sums = sorted(chain.from_iterable(sums), key=lambda transfer: -transfer.layers[-1])
        self._layers = layers
        self._stream = _stream_of(device)
        self._queue = TransferQueue()
        self._left: deque[BucketTransfer] = deque()
        self._passes = 0
        self._calls: Counter[int] = Counter()
        self._complete: set[int] = set()

    def expect(self, passes: int) -> None:
        """A step begins, with so many backward passes of each stage; 0 leaves all sums to `finish`."""
        self._left, self._passes = deque(self._sums), passes
        self._calls.clear()
        self._complete.clear()

    def reached(self, layer: int) -> None:
        """A backward pass begins with a layer, so it is through with the one behind it."""
        self._calls[layer] += 1
        if self._calls[layer] != self._passes:
            return
        self._complete.add(BEHIND_LAYERS if layer + 1 == self._layers else layer + 1)
        self._start(lambda transfer: self._complete.issuperset(transfer.layers))

    def finish(self, meanwhile: Callable[[frozenset[int]], None] = lambda places: None) -> None:
        """Start the remaining sums; the current stream waits for all of them.

        Beside them it does `meanwhile`, which gets the places of parameters whose sums are not there.
        """
        self._passes, places = 0, frozenset(chain.from_iterable(transfer.layers for transfer in self._left))
        with _beside(self._stream):
            self._queue.end_all()
            early = None if self._stream is None else self._stream.record_event()
            self._start(lambda transfer: True)
            self._queue.end_all()
        if early is not None:
            early.wait()
        meanwhile(places)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _start(self, may_start: Callable[[BucketTransfer], bool]) -> None:
        if self._left and may_start(self._left[0]):
            with span(Span.REDUCE), _beside(self._stream):
                while self._left and may_start(self._left[0]):
                    self._queue.start(self._left.popleft())


class OverlappedGathers:
    """The gathers of new weights by groups of ranks; the first pass that reads weights waits for them."""

    def __init__(self, gathers: Iterable[Iterable[BucketTransfer]], device: torch.device) -> None:
        self._gathers = sorted(chain.from_iterable(gathers), key=lambda transfer: transfer.layers[0])
        self._stream = _stream_of(device)
        self._awaited: deque[tuple[BucketTransfer, torch.cuda.Event | None]] = deque()

    def start(self) -> None:
        """Gather behind what the current stream does now."""
        assert not self._awaited, "weights are gathered twice"
        if self._stream is None:
            self._awaited = deque((transfer, None) for transfer in self._gathers)
            return
        with _beside(self._stream):
            run_transfers(replace(transfer, start=partial(self._steps, transfer)) for transfer in self._gathers)

    def wait(self, layer: int) -> None:
        """Let the current stream wait for the weights of a layer and of all before it."""
        while self._awaited and self._awaited[0][0].layers[0] <= layer:
            transfer, arrival = self._awaited.popleft()
            if arrival is None:
                run_transfers((transfer,))
            else:
                torch.cuda.current_stream().wait_event(arrival)

    def finish(self) -> None:
        self.wait(BEHIND_LAYERS)

    def _steps(self, transfer: BucketTransfer) -> Iterator[None]:
        yield from transfer.start()
        assert self._stream is not None, "on a CPU weights come when they are waited for"
        self._awaited.append((transfer, self._stream.record_event()))


def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    # Copies into and out of messages are small, and messages wait for them: they go first.
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


@contextmanager
def _beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on a stream, after what the current one has been given; on a CPU at once."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
