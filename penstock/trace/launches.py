"""Whether the host kept up: short kernels, gaps on the device and their cause, waits of the host, the launch queue.

A gap is a time without any GPU event. The host caused it if the next event was launched after the gap had begun: the
queue was empty. Otherwise the work was queued, and the device waited for another stream or for its own start. A stall
is a long time without any GPU event although work was queued. No call of the host explains it: the device's power
state, another process or the driver does, or events that are missing from the trace.

The queue holds events that were launched and have not begun. Waits of the host are runtime calls that return after the
device has done something: known by name, or because they copied to host memory and returned after the copy, which is
how a program reads a number. Their place is the chain of operators and spans around them.
"""

import re
from dataclasses import dataclass

import numpy as np

from penstock.trace.events import GARBAGE, NONE, Flags, Floats, GpuEvents, GpuKind, HostKind, Integers, Trace
from penstock.trace.intervals import Intervals, union
from penstock.trace.tree import HostTree, tree_around

SHORT_US = 10.0  # kernels below this take about as long to launch as to run
GAP_US, LONG_GAP_US = 10.0, 100.0

LONG_COPY_US = 100.0
"""Time of the host in a call from which it waits for the copy. A call that only launches takes about 10 us."""

WAITS = re.compile(
    r"^(cuda|hip)(Device|Stream|Event)Synchronize|^(cu|hip)(Ctx|Stream|Event)Synchronize"
    r"|^(cuda|hip)Memcpy(DtoH)?$|^hipMemcpy(WithStream|HtoD|DtoD)$"
    r"|^(cuda|hip)(Free|Malloc)(Host)?$"
)
"""Calls that return after the device has done something. Allocations can, and cost host time in any case."""

COPIES = re.compile(r"^(cuda|cu|hip)Memcpy")
"""Calls that copy; those from memory that is not pinned return after the copy."""

ALLOCATIONS = re.compile(
    r"^(cuda|hip)(Malloc|Free|Host(Alloc|Free|Malloc|(Unr|R)egister))|^cuMem(Create|Map|Unmap|Release)"
)
"""Calls that reserve or return memory, which the allocator of PyTorch keeps for itself in a settled run."""

ON_DEVICE = re.compile(r"DtoD|DeviceToDevice|PtoP|PeerToPeer")  # copies that the host takes no part in
TO_HOST = re.compile(r"DtoH|DeviceToHost")  # copies that the host can wait for: it does if the memory is not pinned
_NAMED = 20  # longest gaps that are listed


@dataclass(frozen=True, kw_only=True)
class DeviceGap:
    """A time without work on the device."""

    start_us: float
    duration_us: float
    is_hosts: bool | None  # the next event was launched after the gap began; None if that launch is not in the trace
    before: str
    after: str
    host: str  # the outermost operator or span (except steps) around the launch after the gap; empty if none


@dataclass(frozen=True, kw_only=True)
class DeviceStall:
    """A time of `LONG_GAP_US` or more in which launched work did not start and the device ran nothing."""

    start_us: float
    duration_us: float
    queued: int  # events whose launch returned before its end, and that began after it
    after: str  # the first of them
    call: str  # the call that the host was in for the longest part of it; empty if none


@dataclass(frozen=True, kw_only=True)
class DeviceGaps:
    """All gaps of a trace."""

    count: int  # longer than 10 us
    long_count: int  # longer than 100 us
    total_us: float
    hosts_us: float  # of gaps that the host caused
    devices_us: float  # of gaps in which the work had been launched
    unknown_us: float  # of gaps before an event whose launch is not in the trace
    max_us: float
    longest: tuple[DeviceGap, ...]


@dataclass(frozen=True, kw_only=True)
class HostWait:
    """Calls of one kind from one place in which the host waited for the device."""

    call: str
    where: tuple[str, ...]  # operators and spans around it, from the outside in
    count: int
    total_us: float
    max_us: float


@dataclass(frozen=True, kw_only=True)
class LaunchQueue:
    """Work that was launched and had not begun."""

    mean: float  # depth over the time from the first launch to the last start
    max: int
    empty_share: float  # share of that time with an empty queue
    median_delay_us: float  # from the end of a launch to the start of its work


@dataclass(frozen=True, kw_only=True)
class LaunchSummary:
    """How the host drove the device."""

    short_count: int  # kernels below 10 us
    short_us: float
    kernel_count: int
    gaps: DeviceGaps
    waits: tuple[HostWait, ...]
    stalls: tuple[DeviceStall, ...]  # in the order of time
    queue: LaunchQueue | None  # None if no launch is in the trace


def find_launches(
    trace: Trace, within: tuple[float, float] | None = None, recorded: GpuEvents | None = None
) -> LaunchSummary:
    """Launches, gaps and waits of one rank, of waits only those that begin `within` two host times.

    `recorded` are all GPU events of the recording, if the trace has only those of some steps.
    """
    kernels = trace.gpu.duration_us[trace.gpu.is_kernel]
    is_short = kernels < SHORT_US
    return LaunchSummary(
        short_count=int(is_short.sum()),
        short_us=float(kernels[is_short].sum()),
        kernel_count=len(kernels),
        gaps=_gaps(trace),
        waits=_waits(trace, within),
        stalls=_stalls(trace, trace.gpu if recorded is None else recorded),
        queue=_queue(trace),
    )


def _gaps(trace: Trace) -> DeviceGaps:
    gpu = trace.gpu
    gaps, launch, is_hosts = _gaps_of(trace)
    lengths, is_known = gaps.end_us - gaps.start_us, launch != NONE
    stalled_us = _stalled(trace, gpu).covered_us(gaps.start_us[is_hosts], gaps.end_us[is_hosts]).sum()
    order = np.argsort(-lengths, kind="stable")[:_NAMED]
    by_end = np.argsort(gpu.end_us, kind="stable")
    # The event before a gap is the last one that ended by its start.
    before = by_end[np.searchsorted(gpu.end_us[by_end], gaps.start_us[order], side="right") - 1]
    tree = tree_around(trace.host, launch[order][is_known[order]])
    longest = tuple(
        DeviceGap(
            start_us=float(gaps.start_us[gap]),
            duration_us=float(lengths[gap]),
            is_hosts=bool(is_hosts[gap]) if is_known[gap] else None,
            before=gpu.name(int(last)),
            after=gpu.name(int(np.searchsorted(gpu.start_us, gaps.end_us[gap]))),
            host=next(iter(names_around(trace, tree, int(launch[gap]))), "") if is_known[gap] else "",
        )
        for gap, last in zip(order.tolist(), before.tolist(), strict=True)
    )
    return DeviceGaps(
        count=int((lengths > GAP_US).sum()),
        long_count=int((lengths > LONG_GAP_US).sum()),
        total_us=float(lengths.sum()),
        hosts_us=float(lengths[is_hosts].sum() - stalled_us),
        devices_us=float(lengths[is_known & ~is_hosts].sum() + stalled_us),
        unknown_us=float(lengths[~is_known].sum()),
        max_us=float(lengths.max(initial=0.0)),
        longest=longest,
    )


def _gaps_of(trace: Trace) -> tuple[Intervals, Integers, Flags]:
    """Gaps of the device; the launch after each, or NONE; whether that launch was made after the gap had begun."""
    gpu = trace.gpu
    gaps = union(gpu.start_us, gpu.end_us).gaps()
    # Find the event after a gap by its start: events of zero duration are not in the union.
    event = np.searchsorted(gpu.start_us, gaps.end_us)
    return gaps, gpu.launch[event], trace.launched_us[event] > gaps.start_us  # False for nan: launch unknown


def queued_work(trace: Trace) -> Intervals:
    """When work was launched that had not begun.

    The shortest delay of a kernel is taken off: every launch has it, or the clocks of host and device differ by it.
    """
    gpu, linked = trace.gpu, trace.gpu.is_linked
    returned_us = _returned_us(trace)
    delay_us = (gpu.start_us - returned_us)[linked & gpu.is_kernel]
    return union((returned_us + max(0.0, delay_us.min(initial=np.inf)))[linked], gpu.start_us[linked])


def _returned_us(trace: Trace) -> Floats:
    """When the launch of each GPU event had returned; nan if it is not in the trace."""
    return np.append(trace.host.end_us, np.nan)[trace.gpu.launch]  # NONE is -1 and reads the appended nan


def _stalled(trace: Trace, recorded: GpuEvents) -> Intervals:
    """Long times in which work was queued and nothing ran, also no event outside of the steps."""
    idle = union(trace.gpu.start_us, trace.gpu.end_us).gaps() - union(recorded.start_us, recorded.end_us)
    waited = idle & queued_work(trace)
    is_long = waited.end_us - waited.start_us >= LONG_GAP_US
    return Intervals(waited.start_us[is_long], waited.end_us[is_long])


def _stalls(trace: Trace, recorded: GpuEvents) -> tuple[DeviceStall, ...]:
    gpu, stalled = trace.gpu, _stalled(trace, recorded)
    stalls = []
    for start_us, end_us in zip(stalled.start_us.tolist(), stalled.end_us.tolist(), strict=True):
        after = int(np.searchsorted(gpu.start_us, end_us))
        stalls.append(
            DeviceStall(
                start_us=start_us,
                duration_us=end_us - start_us,
                queued=int((_returned_us(trace)[after:] < end_us).sum()),
                after=gpu.name(after),
                call=call_during(trace, start_us, end_us),
            )
        )
    return tuple(stalls)


def call_during(trace: Trace, start_us: float, end_us: float) -> str:
    """The call of the host that lasts longest between two times, if it takes half of it; else empty."""
    host = trace.host
    shared_us = np.minimum(host.end_us, end_us) - np.maximum(host.start_us, start_us)
    shared_us[host.kind != HostKind.RUNTIME] = 0.0
    row = int(shared_us.argmax()) if len(host) else NONE
    return host.name(row) if row != NONE and 2 * shared_us[row] >= end_us - start_us else ""


def idle_behind_waits(trace: Trace, inside: frozenset[str] | None = None) -> float:
    """Idle time of the device, in microseconds, that would vanish if the host had not waited for it.

    A late launch would have been earlier by the preceding waits, minus the idle time that these already explain. A host
    that launches too slowly is late without waiting as well. `inside` counts only waits in one of these spans; before
    other waits the device must finish anyway.
    """
    host, rows = trace.host, waiting_calls(trace)
    gaps, launch, is_hosts = _gaps_of(trace)
    if not is_hosts.any():
        return 0.0
    rows = rows[host.end_us[rows] > gaps.start_us[0]]  # earlier waits delayed no launch after a gap
    behind = np.searchsorted(host.start_us[rows], host.start_us[launch[is_hosts]]) - 1  # last wait before each launch
    stalled_us = _stalled(trace, trace.gpu).covered_us(gaps.start_us[is_hosts], gaps.end_us[is_hosts])
    lasts_us = (gaps.end_us - gaps.start_us)[is_hosts] - stalled_us
    idle_us = np.bincount(behind[behind >= 0], lasts_us[behind >= 0], len(rows))  # after each wait, until the next
    tree = tree_around(host, rows)
    ahead_us = spared_us = 0.0  # by how much launches would be earlier now; idle time that this saves so far
    for row, us in zip(rows.tolist(), idle_us.tolist(), strict=True):
        goes = inside is None or not inside.isdisjoint(names_around(trace, tree, row))
        ahead_us = ahead_us + float(host.duration_us[row]) if goes else 0.0  # at a wait that stays, the host is late
        spared = min(us, ahead_us)
        ahead_us, spared_us = ahead_us - spared, spared_us + spared
    return spared_us


@dataclass(frozen=True, kw_only=True)
class HostCalls:
    """Calls of one kind from one place in which the host stays: copies, reservations of memory, garbage collections."""

    call: str  # such as `hipMemcpyWithStream`
    where: str  # the innermost operators or spans around it
    count: int
    longest_us: float
    alone_us: float  # the device computes and sends nothing meanwhile
    bytes: int | None  # of all of them; None if unknown


def longest_calls(trace: Trace, idle: Intervals, within: tuple[float, float] | None) -> HostCalls | None:
    """The calls from one place in which the host stays longest while the device is `idle` and has nothing queued.

    Only calls that begin `within` two host times. Calls shorter than `LONG_COPY_US` only launch their copy, and the
    host takes no part in a copy on the device.
    """
    host, gpu = trace.host, trace.gpu
    is_call = host.named(COPIES.search) | host.named(ALLOCATIONS.search)
    stays = (host.kind == HostKind.RUNTIME) & is_call & (host.duration_us >= LONG_COPY_US)
    stays[gpu.launch[gpu.is_linked & gpu.named(ON_DEVICE.search)]] = False
    stays |= host.named(GARBAGE.__eq__)
    rows = _began(trace, np.flatnonzero(stays), within)
    alone_us = (idle - queued_work(trace)).covered_us(host.start_us[rows], host.end_us[rows])
    rows, alone_us = rows[alone_us > 0], alone_us[alone_us > 0]
    if not len(rows):
        return None
    (call, where), indices = max(_by_place(trace, rows).items(), key=lambda item: float(alone_us[item[1]].sum()))
    sizes = [gpu.args(int(row)).get("bytes") for row in np.flatnonzero(np.isin(gpu.launch, rows[indices]))]
    known = [size for size in sizes if isinstance(size, int)]
    return HostCalls(
        call=call,
        where=" > ".join(where[-2:]),
        count=len(indices),
        longest_us=float(host.duration_us[rows[indices]].max()),
        alone_us=float(alone_us[indices].sum()),
        bytes=sum(known) if known else None,
    )


def waiting_calls(trace: Trace) -> Integers:
    """Rows of `Trace.host` in which the host waited for the device, sorted by start."""
    host, gpu = trace.host, trace.gpu
    is_wait = (host.kind == HostKind.RUNTIME) & host.named(WAITS.search)
    copied = np.flatnonzero(gpu.is_linked & (gpu.kind == GpuKind.COPY) & gpu.named(TO_HOST.search))
    calls = gpu.launch[copied]
    is_wait[calls[host.end_us[calls] >= gpu.end_us[copied]]] = True  # the call returned after its copy had ended
    rows = np.flatnonzero(is_wait)
    return rows[np.argsort(host.start_us[rows], kind="stable")]


def _began(trace: Trace, rows: Integers, within: tuple[float, float] | None) -> Integers:
    """Those of some rows of the host that begin between two times."""
    low, high = within or (-np.inf, np.inf)
    return rows[(trace.host.start_us[rows] >= low) & (trace.host.start_us[rows] < high)]


def _by_place(trace: Trace, rows: Integers) -> dict[tuple[str, tuple[str, ...]], list[int]]:
    """Indices into some rows of the host, by their name and the names around them."""
    tree = tree_around(trace.host, rows)
    places: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for index, row in enumerate(rows.tolist()):
        places.setdefault((trace.host.name(row), names_around(trace, tree, row)), []).append(index)
    return places


def _waits(trace: Trace, within: tuple[float, float] | None) -> tuple[HostWait, ...]:
    rows = _began(trace, waiting_calls(trace), within)
    waits = [
        HostWait(call=call, where=where, count=len(times), total_us=sum(times), max_us=max(times))
        for (call, where), indices in _by_place(trace, rows).items()
        for times in [trace.host.duration_us[rows[indices]].tolist()]
    ]
    return tuple(sorted(waits, key=lambda wait: (-wait.total_us, wait.call, wait.where)))


def names_around(trace: Trace, tree: HostTree, row: int) -> tuple[str, ...]:
    """Names around a call, from the outside in, without the profiler's steps."""
    names = [trace.host.name(ancestor) for ancestor in tree.above(row)[1:]]
    return tuple(name for name in reversed(names) if not name.startswith("ProfilerStep#"))


def _queue(trace: Trace) -> LaunchQueue | None:
    gpu, host = trace.gpu, trace.host
    rows = np.flatnonzero(gpu.is_linked)
    if not len(rows):
        return None
    launched, returned, begun = host.start_us[gpu.launch[rows]], host.end_us[gpu.launch[rows]], gpu.start_us[rows]
    # The clocks of host and device differ slightly: clamp launches to the start of their event.
    times = np.concatenate([np.minimum(launched, begun), begun])
    steps = np.repeat([1, -1], len(rows))  # a launch makes the queue one longer, the start of its event one shorter
    order = np.argsort(times, kind="stable")  # stable: at equal times launches come first
    depth, lasts = np.cumsum(steps[order])[:-1], np.diff(times[order])  # between consecutive times: depth, duration
    total = float(lasts.sum())
    return LaunchQueue(
        mean=float((depth * lasts).sum() / total) if total else 0.0,
        max=int(depth.max(initial=0)),
        empty_share=float(lasts[depth == 0].sum() / total) if total else 0.0,
        median_delay_us=float(np.median(np.maximum(begun - returned, 0.0))),
    )
