"""Whether the host kept up: short kernels, gaps on the device and whose they are, waits of the host, the queue.

A gap is a time in which no event of the GPU runs. It is the host's if the event behind it was launched after it had
begun: the queue was empty. Otherwise the work was there and the device waited, for another stream or for its own start.

The queue is what has been launched and has not begun. Waits of the host are calls of the runtime that return when the
device has done something: by their name, or because they copied to memory of the host and came back behind the copy,
which is how a program reads a number. Where they come from is the chain of operators and spans around them.
"""

import re
from dataclasses import dataclass

import numpy as np

from penstock.trace.events import NONE, Flags, GpuKind, HostKind, Integers, Trace
from penstock.trace.intervals import Intervals, union
from penstock.trace.tree import HostTree, nest

SHORT_US = 10.0
"""Kernels below this take about as long to launch as to run."""

GAP_US = 10.0
LONG_GAP_US = 100.0

WAITS = re.compile(
    r"^(cuda|hip)(Device|Stream|Event)Synchronize|^(cu|hip)(Ctx|Stream|Event)Synchronize|^(cuda|hip)Memcpy(DtoH)?$"
    r"|^(cuda|hip)(Free|Malloc)(Host)?$"
)
"""Calls that return when the device has done something. Allocations may, and cost the host time in any case."""

TO_HOST = re.compile(r"DtoH|DeviceToHost")
"""Copies that the host may wait for, whatever the call is named: it does if the memory is not pinned."""

_NAMED = 20


@dataclass(frozen=True, kw_only=True)
class DeviceGap:
    """A time without work on the device.

    Attributes:
        start_us: on the clock of the trace.
        duration_us: of the gap.
        is_hosts: whether the event behind it was launched after it had begun; None if that launch is not in the trace.
        before: name of the event that ended at its start.
        after: name of the event that ended it.
        host: the outermost operator or span, but for steps, in which the launch behind the gap was made; empty if none.
    """

    start_us: float
    duration_us: float
    is_hosts: bool | None
    before: str
    after: str
    host: str


@dataclass(frozen=True, kw_only=True)
class DeviceGaps:
    """All gaps of a trace.

    Attributes:
        count: above 10 us.
        long_count: above 100 us.
        total_us: of all gaps, the short ones too.
        hosts_us: of those that are the host's.
        devices_us: of those in which the work had been launched.
        unknown_us: of those before an event whose launch is not in the trace.
        max_us: the longest.
        longest: the longest ones, longest first.
    """

    count: int
    long_count: int
    total_us: float
    hosts_us: float
    devices_us: float
    unknown_us: float
    max_us: float
    longest: tuple[DeviceGap, ...]


@dataclass(frozen=True, kw_only=True)
class HostWait:
    """Calls of one kind from one place that let the host wait.

    Attributes:
        call: of the runtime.
        where: operators and spans around it, from the outside in.
        count: calls.
        total_us: that the host spent in them.
        max_us: in one.
    """

    call: str
    where: tuple[str, ...]
    count: int
    total_us: float
    max_us: float


@dataclass(frozen=True, kw_only=True)
class LaunchQueue:
    """Work that was launched and had not begun.

    Attributes:
        mean: over the time from the first launch to the last start.
        max: at once.
        empty_share: of that time, when there was none.
        median_delay_us: from the end of a launch to the start of its work.
    """

    mean: float
    max: int
    empty_share: float
    median_delay_us: float


@dataclass(frozen=True, kw_only=True)
class LaunchSummary:
    """How the host drove the device.

    Attributes:
        short_count: kernels below 10 us.
        short_us: their durations added.
        kernel_count: all kernels.
        gaps: on the device.
        waits: of the host, longest first.
        queue: or None if no launch is in the trace.
    """

    short_count: int
    short_us: float
    kernel_count: int
    gaps: DeviceGaps
    waits: tuple[HostWait, ...]
    queue: LaunchQueue | None


def find_launches(trace: Trace, within: tuple[float, float] | None = None) -> LaunchSummary:
    """Look at launches, gaps and waits of one rank.

    Args:
        trace: of it.
        within: only waits that begin between these times of the host; None for all.
    """
    kernels = trace.gpu.duration_us[trace.gpu.is_kernel]
    is_short = kernels < SHORT_US
    return LaunchSummary(
        short_count=int(is_short.sum()),
        short_us=float(kernels[is_short].sum()),
        kernel_count=len(kernels),
        gaps=_gaps(trace),
        waits=_waits(trace, within),
        queue=_queue(trace),
    )


def _gaps(trace: Trace) -> DeviceGaps:
    gpu = trace.gpu
    gaps, launch, is_hosts = _gaps_of(trace)
    lengths, is_known = gaps.end_us - gaps.start_us, launch != NONE
    order = np.argsort(-lengths, kind="stable")[:_NAMED]
    by_end = np.argsort(gpu.end_us, kind="stable")
    before = by_end[np.searchsorted(gpu.end_us[by_end], gaps.start_us[order], side="right") - 1]
    tree = _tree(trace, launch[order][is_known[order]])
    longest = tuple(
        DeviceGap(
            start_us=float(gaps.start_us[one]),
            duration_us=float(lengths[one]),
            is_hosts=bool(is_hosts[one]) if is_known[one] else None,
            before=gpu.name(int(last)),
            after=gpu.name(int(np.searchsorted(gpu.start_us, gaps.end_us[one]))),
            host=next(iter(_around(trace, tree, int(launch[one]))), "") if is_known[one] else "",
        )
        for one, last in zip(order.tolist(), before.tolist(), strict=True)
    )
    return DeviceGaps(
        count=int((lengths > GAP_US).sum()),
        long_count=int((lengths > LONG_GAP_US).sum()),
        total_us=float(lengths.sum()),
        hosts_us=float(lengths[is_hosts].sum()),
        devices_us=float(lengths[is_known & ~is_hosts].sum()),
        unknown_us=float(lengths[~is_known].sum()),
        max_us=float(lengths.max(initial=0.0)),
        longest=longest,
    )


def _gaps_of(trace: Trace) -> tuple[Intervals, Integers, Flags]:
    """Gaps of the device; the launch behind each, or NONE; whether that was made after the gap had begun."""
    gpu = trace.gpu
    gaps = union(gpu.start_us, gpu.end_us).gaps()
    # An event of no duration starts no interval of the union, so the one behind a gap is looked for by its start.
    launch = gpu.launch[np.searchsorted(gpu.start_us, gaps.end_us)]
    launched_us = np.append(trace.host.start_us, np.nan)[np.where(launch == NONE, len(trace.host), launch)]
    return gaps, launch, launched_us > gaps.start_us


def idle_behind_waits(trace: Trace, inside: frozenset[str] | None = None) -> float:
    """Idle time of the device that would not be there had the host not waited for it, in microseconds.

    A launch that was late would have been earlier by as long as the host had waited before, less what that spared
    already: the device would have been earlier too. A host that launches too slowly is late without waiting as well.

    Args:
        trace: of one rank.
        inside: only waits in one of these spans would not have been; before any other all work must be done, whatever
            the host waited for earlier. None: no wait would have been.
    """
    host, rows = trace.host, waiting_calls(trace)
    gaps, launch, is_hosts = _gaps_of(trace)
    if not is_hosts.any():
        return 0.0
    rows = rows[host.end_us[rows] > gaps.start_us[0]]
    behind = np.searchsorted(host.start_us[rows], host.start_us[launch[is_hosts]]) - 1
    lasts_us = (gaps.end_us - gaps.start_us)[is_hosts]
    idle_us = np.bincount(behind[behind >= 0], lasts_us[behind >= 0], len(rows))
    tree = _tree(trace, rows)
    ahead_us = spared_us = 0.0
    for row, us in zip(rows.tolist(), idle_us.tolist(), strict=True):
        goes = inside is None or not inside.isdisjoint(_around(trace, tree, row))
        ahead_us = ahead_us + float(host.duration_us[row]) if goes else 0.0
        spared = min(us, ahead_us)
        ahead_us, spared_us = ahead_us - spared, spared_us + spared
    return spared_us


def waiting_calls(trace: Trace) -> Integers:
    """Rows of `Trace.host` in which the host waited for the device, in the order of their start."""
    host, gpu = trace.host, trace.gpu
    waits, copies = (
        np.fromiter((bool(pattern.search(name)) for name in trace.names), dtype=bool, count=len(trace.names))
        for pattern in (WAITS, TO_HOST)
    )
    is_wait = (host.kind == HostKind.RUNTIME) & waits[host.name_id]
    copied = np.flatnonzero(gpu.is_linked & (gpu.kind == GpuKind.COPY) & copies[gpu.name_id])
    calls = gpu.launch[copied]
    is_wait[calls[host.end_us[calls] >= gpu.end_us[copied]]] = True
    rows = np.flatnonzero(is_wait)
    return rows[np.argsort(host.start_us[rows], kind="stable")]


def _waits(trace: Trace, within: tuple[float, float] | None) -> tuple[HostWait, ...]:
    host, rows = trace.host, waiting_calls(trace)
    if within is not None:
        rows = rows[(host.start_us[rows] >= within[0]) & (host.start_us[rows] < within[1])]
    tree = _tree(trace, rows)
    places: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for row in rows.tolist():
        places.setdefault((host.name(row), _around(trace, tree, row)), []).append(float(host.duration_us[row]))
    found = [
        HostWait(call=call, where=where, count=len(times), total_us=sum(times), max_us=max(times))
        for (call, where), times in places.items()
    ]
    return tuple(sorted(found, key=lambda wait: (-wait.total_us, wait.call, wait.where)))


def _tree(trace: Trace, rows: Integers) -> HostTree:
    """What is around these calls, functions of Python too, if they were loaded."""
    host = trace.host
    is_node: Flags = np.isin(host.kind, [HostKind.OPERATOR, HostKind.SPAN, HostKind.PYTHON])
    is_node[rows] = True
    return nest(host, np.flatnonzero(is_node))


def _around(trace: Trace, tree: HostTree, row: int) -> tuple[str, ...]:
    """Names around a call, from the outside in, without the profiler's steps."""
    names = [trace.host.name(one) for one in tree.above(row)[1:]]
    return tuple(name for name in reversed(names) if not name.startswith("ProfilerStep#"))


def _queue(trace: Trace) -> LaunchQueue | None:
    gpu, host = trace.gpu, trace.host
    rows = np.flatnonzero(gpu.is_linked)
    if not len(rows):
        return None
    launched, returned, begun = host.start_us[gpu.launch[rows]], host.end_us[gpu.launch[rows]], gpu.start_us[rows]
    # Clocks of host and device differ a little: nothing begins before it is launched.
    launched = np.minimum(launched, begun)
    times = np.concatenate([launched, begun])
    steps = np.concatenate([np.ones(len(rows), dtype=np.int64), np.full(len(rows), -1)])
    order = np.argsort(times, kind="stable")
    depth, lasts = np.cumsum(steps[order])[:-1], np.diff(times[order])
    total = float(lasts.sum())
    return LaunchQueue(
        mean=float((depth * lasts).sum() / total) if total else 0.0,
        max=int(depth.max(initial=0)),
        empty_share=float(lasts[depth == 0].sum() / total) if total else 0.0,
        median_delay_us=float(np.median(np.maximum(begun - returned, 0.0))),
    )
