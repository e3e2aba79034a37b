"""Play a list of operators as a host and a device would, and add up how the device spends its time.

The host launches operators one after the other, each in `host.launch_seconds`, collectives in twice that time, and runs
ahead of the device as far as it can. The device starts an operator when it is launched and the one before is done:

    device-bound     the host is ahead; the time is the sum of the operators
    host-bound       the device waits for launches; the time is the host's
    a wait           the host stops until the device has caught up, then the device waits for the host

A second stream carries transfers between `fork` and `join`, hidden behind the compute of the first. Both slow each
other down: only `OVERLAP_GAIN` of the hidden time is gained. Copies to and from host memory have a stream for each
direction (penstock/parallel/offload.py) and slow nothing down; compute waits for room where too many bytes are on
their way out, and for a storage that backward opens before it is back. A slot for sums of gradients
(penstock/parallel/offload.py) needs no room, and is filled again once it has left; slots and storages share
the link. Captured work takes no time of the host.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.parallel.offload import IN_FLIGHT_BYTES, SLOTS
from penstock.plan.costs import HOST_LINK, OpCost
from penstock.plan.op_recorder import (
    ARRIVE,
    COPIES,
    END,
    FORK,
    FROM_HOST,
    JOIN,
    PUT_OFF,
    SLOT_FROM_HOST,
    SLOT_TO_HOST,
    WAIT,
    RecordedOp,
    RecordedOps,
)

OVERLAP_GAIN = 0.25
"""Share of the time of a transfer beside compute that is gained by the overlap; fitted to one run with FSDP2 on two
H200.
"""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time of some work among other work of its kind, in seconds."""

    seconds: float = 0.0  # from the end of the work before it to its own end
    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0  # part of `seconds` with transfers only
    idle: float = 0.0  # part of `seconds` with nothing
    host_link: float = 0.0  # part of `seconds` with nothing but copies to or from host memory
    terms: Mapping[str, float] = field(default_factory=dict)  # `seconds` by term


class HostCopies:
    """Copies between a device and its host's memory, in seconds on the device's clock; storages have a number.

    `room` are bytes that may be on their way out.
    """

    def __init__(self, room: int = IN_FLIGHT_BYTES) -> None:
        self._room = room
        self._out = self._back = 0.0
        self._leaving: dict[str, tuple[float, int]] = {}
        self._left: dict[str, float] = {}  # slots
        # Slots are filled before the first pass.
        self._came: dict[str, float] = {f"{-1 - slot}": 0.0 for slot in range(SLOTS)}

    def leave(self, number: str, size: int, seconds: float, *, launched: float, done: float) -> float:
        """A storage of `size` bytes starts its copy to the host; an earlier storage with this number is gone.

        The host starts it at `launched`, and compute has caught up at `done`. Returns until when compute waits for
        room.
        """
        self._leaving.pop(number, None)
        while self._leaving:
            oldest, (end, _) = next(iter(self._leaving.items()))
            has_room = sum(other for _, other in self._leaving.values()) + size <= self._room
            # A copy that ended gives its room back; else compute waits for the oldest.
            if has_room and end > launched:
                break
            del self._leaving[oldest]
            done = max(done, end)
        self._out = max(self._out, done, launched) + seconds
        self._leaving[number] = self._out, size
        return done

    def come_back(self, number: str, seconds: float, *, launched: float, done: float) -> None:
        """A storage starts its copy back; if its copy out was not finished, it is still on the device."""
        if self._leaving.pop(number, None) is not None:
            self._came[number] = done
            return
        self._back = self._came[number] = max(self._back, done, launched) + seconds

    def send_slot(self, number: str, seconds: float, *, launched: float, done: float) -> None:
        """A slot starts its copy to the host."""
        self._out = self._left[number] = max(self._out, done, launched) + seconds

    def fetch_slot(self, number: str, seconds: float, *, launched: float) -> None:
        """A slot is filled from the host, after its copy out."""
        self._back = self._came[number] = max(self._back, self._left.pop(number), launched) + seconds

    def arrival(self, number: str) -> float:
        """When a storage or a slot is back on the device."""
        return self._came[number]


_MARKS = frozenset((WAIT, PUT_OFF, FORK, END, JOIN, ARRIVE, *COPIES))  # what does not run on the device


class Streams:
    """A host and a device.

    The host takes `launch_seconds` for each operator (0 if the work is captured) and `put_off_seconds` for each weight
    gradient that is put off; the device takes `gap_seconds` between two operators.
    """

    def __init__(
        self,
        cost_of: Callable[[RecordedOp], OpCost],
        launch_seconds: float,
        gap_seconds: float = 0.0,
        put_off_seconds: float = 0.0,
        copies: HostCopies | None = None,
    ) -> None:
        self._cost_of = cost_of
        self._launch = launch_seconds
        self._gap = gap_seconds
        self._put_off = put_off_seconds
        self._copies = copies or HostCopies()
        self._host = self._main = self._side = 0.0
        self._ends: dict[str, float] = {}
        self._hidden = 0.0
        self._compute = self._communication = self._exposed = self._idle = self._host_link = 0.0
        self._terms: dict[str, float] = defaultdict(float)

    @property
    def timing(self) -> Timing:
        """Time of all work so far."""
        return Timing(
            seconds=self._main,
            compute=self._compute,
            communication=self._communication,
            exposed=self._exposed,
            idle=self._idle,
            host_link=self._host_link,
            terms=dict(self._terms),
        )

    def prepare(self, seconds: float) -> None:
        """The host works without launching anything."""
        self._host += seconds

    def play(self, work: RecordedOps) -> None:
        is_side = False
        for operator in work:
            if operator.name not in _MARKS:
                (self._run_aside if is_side else self._run)(self._cost_of(operator))
            elif operator.name == WAIT:
                self._host = max(self._host, self._main)
            elif operator.name == PUT_OFF:
                self._host += self._put_off
            elif operator.name == FORK:
                # The second stream starts after all work of the first so far.
                self._side, is_side = max(self._side, self._main), True
            elif operator.name == END:
                self._ends[operator.switches[0]], is_side = self._side, False
            elif operator.name == JOIN:
                self._join(operator.switches[0])
            elif operator.name == ARRIVE:
                self._wait_for_copies(self._copies.arrival(operator.switches[0]))
            else:
                self._copy(operator)

    def _run(self, cost: OpCost) -> None:
        # The host needs twice the time for a collective (docs/projection.md).
        self._host += self._launch * (cost.launches + cost.is_communication)
        wait = max(self._gap, self._host - self._main)
        self._main += wait + cost.seconds
        self._idle += wait
        self._terms["host"] += wait
        self._terms[cost.term] += cost.seconds
        if cost.is_communication:
            self._communication += cost.seconds
            self._exposed += cost.seconds
        else:
            self._compute += cost.seconds

    def _run_aside(self, cost: OpCost) -> None:
        self._host += 2 * self._launch
        self._side = max(self._side, self._host) + cost.seconds
        self._hidden += cost.seconds
        self._communication += cost.seconds

    def _copy(self, operator: RecordedOp) -> None:
        self._host += self._launch
        number, seconds = operator.switches[0], self._cost_of(operator).seconds
        if operator.name == SLOT_TO_HOST:
            self._copies.send_slot(number, seconds, launched=self._host, done=self._main)
        elif operator.name == SLOT_FROM_HOST:
            self._copies.fetch_slot(number, seconds, launched=self._host)
        elif operator.name == FROM_HOST:
            self._copies.come_back(number, seconds, launched=self._host, done=self._main)
        else:
            room = self._copies.leave(number, operator.moved_bytes, seconds, launched=self._host, done=self._main)
            self._wait_for_copies(room)

    def _wait_for_copies(self, until: float) -> None:
        late = max(0.0, until - self._main)
        self._main += late
        self._host_link += late
        self._terms[HOST_LINK] += late

    def _join(self, number: str) -> None:
        """The first stream waits for the second, and pays for the overlap."""
        late = max(0.0, self._ends.pop(number) - self._main)
        # Hidden: transfers of the second stream since the last join, less the part that is waited for.
        lost = (1 - OVERLAP_GAIN) * max(0.0, self._hidden - late)
        self._hidden = 0.0
        self._main += late + lost
        self._exposed += late + lost
        self._terms["dispatch"] += late + lost


def steady_state(parts: Sequence[Sequence[RecordedOps]], streams: Streams, prepared: float = 0.0) -> list[Timing]:
    """Time of each part, a list of works, when the parts repeat; the host prepares each for `prepared` seconds.

    The second round counts, because the host is ahead by then.
    """
    timings: list[Timing] = []
    for _ in range(2):
        timings = []
        for works in parts:
            before = streams.timing
            streams.prepare(prepared if any(works) else 0.0)
            for work in works:
                streams.play(work)
            timings.append(add_timing(streams.timing, before, times=-1))
    return timings


def add_timing(timing: Timing, other: Timing, times: float = 1) -> Timing:
    """`timing` and `times` times `other`."""
    sums = {name: value + times * vars(other)[name] for name, value in vars(timing).items() if name != "terms"}
    terms = dict(timing.terms)
    for name, seconds in other.terms.items():
        terms[name] = terms.get(name, 0.0) + seconds * times
    return Timing(**sums, terms=terms)
