"""Plays a list of operators as a host and a device would: who waits for whom, and what the device spends its time on.

The host launches operators one after the other, each in `host.launch_seconds`, collectives in twice as long, and runs
ahead of the device as far as it can. The device has two streams: operators of one run in order, each when it was
launched and the one before is done.

    device-bound     the host is ahead; the time is the sum of the operators
    host-bound       the device waits for launches; the time is that of the host
    a wait           the host stops until the device has done all so far, and the device then waits for the host

Copies to the host's memory and back run on lanes of their own (penstock/plan/streams.py), and slow nothing down.
A second stream carries transfers between `fork` and `join`; what the first one computes meanwhile hides them. Each
slows the other down while both run: of what is hidden only `OVERLAP_GAIN` is gained. Work that was captured as a graph
takes no time of the host.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.parallel.offload import IN_FLIGHT_BYTES
from penstock.plan.costs import HOST_LINK, OpCost
from penstock.plan.op_recorder import (
    ARRIVE,
    END,
    FORK,
    FROM_HOST,
    JOIN,
    PUT_OFF,
    TO_HOST,
    WAIT,
    RecordedOp,
    RecordedOps,
)

OVERLAP_GAIN = 0.25
"""Of the time that a transfer and computation run side by side, what is gained by it; fitted to one run with FSDP2 on
two H200."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A piece of work among others of its kind, in seconds.

    Attributes:
        seconds: from the end of what was before it to its own end.
        compute: that the device computes.
        communication: that transfers take.
        exposed: of `seconds`, what only transfers go on in.
        idle: of `seconds`, what nothing goes on in.
        host_link: of `seconds`, what only copies between the device and its host's memory go on in.
        terms: `seconds` by what is done.
    """

    seconds: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    idle: float = 0.0
    host_link: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)


class HostLanes:
    """Both lanes of one device. Times are seconds on its clock; storages have a number.

    Args:
        room: bytes that may be on their way out.
    """

    def __init__(self, room: int = IN_FLIGHT_BYTES) -> None:
        self._room = room
        self._out = self._back = 0.0
        self._leaving: dict[str, tuple[float, int]] = {}
        self._came: dict[str, float] = {}

    def leave(self, number: str, size: int, seconds: float, *, launched: float, done: float) -> float:
        """A storage begins its way out.

        Args:
            number: of the storage; one that had the same before is gone.
            size: its bytes.
            seconds: that the copy takes.
            launched: when the host starts it.
            done: when compute has done all so far.

        Returns:
            Until when compute waits for room.
        """
        self._leaving.pop(number, None)
        while self._leaving:
            oldest, (end, _) = next(iter(self._leaving.items()))
            has_room = sum(other for _, other in self._leaving.values()) + size <= self._room
            if has_room and end > launched:
                break
            del self._leaving[oldest]
            done = max(done, end)
        self._out = max(self._out, done, launched) + seconds
        self._leaving[number] = self._out, size
        return done

    def come_back(self, number: str, seconds: float, *, launched: float, done: float) -> None:
        """A storage begins its way back; arguments as of `leave`."""
        if self._leaving.pop(number, None) is not None:
            self._came[number] = done
            return
        self._back = self._came[number] = max(self._back, done, launched) + seconds

    def arrival(self, number: str) -> float:
        """When a storage is on the device that has begun its way back."""
        return self._came[number]


class Streams:
    """A host and a device.

    Args:
        cost_of: an operator's cost.
        launch_seconds: of the host for each operator; 0 if the work is captured.
        gap_seconds: of the device between two operators.
        put_off_seconds: of the host for each weight gradient that is put off.
        lanes: to the host's memory and back; None for the usual ones, with nothing on them.
    """

    def __init__(
        self,
        cost_of: Callable[[RecordedOp], OpCost],
        launch_seconds: float,
        gap_seconds: float = 0.0,
        put_off_seconds: float = 0.0,
        lanes: HostLanes | None = None,
    ) -> None:
        self._cost_of = cost_of
        self._launch = launch_seconds
        self._gap = gap_seconds
        self._put_off = put_off_seconds
        self._lanes = lanes or HostLanes()
        self._host = self._main = self._side = 0.0
        self._ends: dict[str, float] = {}
        self._hidden = 0.0
        self._compute = self._communication = self._exposed = self._idle = self._host_link = 0.0
        self._terms: dict[str, float] = defaultdict(float)

    @property
    def timing(self) -> Timing:
        """Of all so far."""
        return Timing(
            seconds=self._main,
            compute=self._compute,
            communication=self._communication,
            exposed=self._exposed,
            idle=self._idle,
            host_link=self._host_link,
            terms=dict(self._terms),
        )

    def play(self, work: RecordedOps) -> None:
        """Go on with more work."""
        is_side = False
        for operator in work:
            if operator.name == WAIT:
                self._host = max(self._host, self._main)
            elif operator.name == PUT_OFF:
                self._host += self._put_off
            elif operator.name == FORK:
                self._side, is_side = max(self._side, self._main), True
            elif operator.name == END:
                self._ends[operator.switches[0]], is_side = self._side, False
            elif operator.name == JOIN:
                self._join(operator.switches[0])
            elif operator.name in (TO_HOST, FROM_HOST):
                self._copy(operator)
            elif operator.name == ARRIVE:
                self._wait_for_copies(self._lanes.arrival(operator.switches[0]))
            elif is_side:
                self._travel(self._cost_of(operator))
            else:
                self._run(self._cost_of(operator))

    def _run(self, cost: OpCost) -> None:
        """One operator of the first stream."""
        self._host += self._launch * (1 + cost.is_communication)
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

    def _travel(self, cost: OpCost) -> None:
        """One of the second."""
        self._host += 2 * self._launch
        self._side = max(self._side, self._host) + cost.seconds
        self._hidden += cost.seconds
        self._communication += cost.seconds

    def _copy(self, operator: RecordedOp) -> None:
        """A storage begins its way to the host, or back."""
        self._host += self._launch
        number, seconds = operator.switches[0], self._cost_of(operator).seconds
        if operator.name == FROM_HOST:
            self._lanes.come_back(number, seconds, launched=self._host, done=self._main)
            return
        size = operator.moved_bytes
        self._wait_for_copies(self._lanes.leave(number, size, seconds, launched=self._host, done=self._main))

    def _wait_for_copies(self, until: float) -> None:
        """The first stream waits for a copy."""
        late = max(0.0, until - self._main)
        self._main += late
        self._host_link += late
        self._terms[HOST_LINK] += late

    def _join(self, number: str) -> None:
        """The first stream waits for the second, and pays for what it has hidden."""
        late = max(0.0, self._ends.pop(number) - self._main)
        lost = (1 - OVERLAP_GAIN) * max(0.0, self._hidden - late)
        self._hidden = 0.0
        self._main += late + lost
        self._exposed += late + lost
        self._terms["dispatch"] += late + lost


def steady_state(parts: Sequence[Sequence[RecordedOps]], streams: Streams) -> list[Timing]:
    """Time of some parts in their order, after the same parts: the host is as far ahead as it gets.

    Args:
        parts: each of some works; one after the other, again and again.
        streams: that nothing was played on.
    """
    found: list[Timing] = []
    for _ in range(2):
        found = []
        for works in parts:
            before = streams.timing
            for work in works:
                streams.play(work)
            found.append(add_timing(streams.timing, before, times=-1))
    return found


def add_timing(one: Timing, other: Timing, times: float = 1) -> Timing:
    """One timing and so many of another."""
    terms = dict(one.terms)
    for name, seconds in other.terms.items():
        terms[name] = terms.get(name, 0.0) + seconds * times
    return Timing(
        seconds=one.seconds + times * other.seconds,
        compute=one.compute + times * other.compute,
        communication=one.communication + times * other.communication,
        exposed=one.exposed + times * other.exposed,
        idle=one.idle + times * other.idle,
        host_link=one.host_link + times * other.host_link,
        terms=terms,
    )
