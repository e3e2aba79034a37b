"""A trace of a CPU as if the CPU were the device: the own work of operators takes the place of kernels.

    main thread     |- aten::linear ------------------|  |- c10d::allreduce_ -|   Python    |- aten::mul -|
                    |      |- aten::addmm ------|     |
    gloo's thread                                             |- gloo:all_reduce --------|
    device          |linear|      addmm         |linear|      |     communication        |  |    mul     |

Each moment of a thread belongs to its innermost operator, and time outside of operators (Python, waiting) is idle. An
event is "launched" by its own operator, so phases, layers and steps are found as for a GPU.

Gloo transfers on threads of its own. The operator that started a transfer is the first one before it, of the same
kind, that no earlier transfer has: a group runs its collectives in the order of the calls. This operator communicates
too, but it is no collective of its own. A send ends for the profiler when the program waits for it, long after its data
have left, so only the operator counts; a receive that is waited for has come. A function of autograd in Python waits
for its transfer, so what it does beside operators while one is under way belongs to the transfer.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from penstock.base.errors import TraceError
from penstock.trace.events import NONE, Flags, GpuKind, HostKind, Integers, Trace, as_gpu_events
from penstock.trace.intervals import Intervals, union
from penstock.trace.tree import Stretch, stretches

GLOO, CALLS = "gloo:", "c10d::"  # beginnings of the names of transfers, and of the operators that start them
FUNCTION = re.compile(r"(?!.*::).*[^0-9]")  # functions of autograd in Python. Those in C++ (`MulBackward0`) never wait

LAUNCHES = re.compile(r"(cuda|cu|hip)\w*Launch")  # calls that start kernels

_POSTED = ("gloo:send", "gloo:recv")
"""Transfers that are recorded on the thread of the caller, over the operators that it runs meanwhile."""

_IN_SUMS = "reducescatter"  # a collective that gloo runs as an all-reduce


def on_host(trace: Trace) -> Trace:
    """The trace with the host's work in place of GPU events. Raises a TraceError if it has no operator."""
    host = trace.host
    is_span = host.kind == HostKind.SPAN
    transfers = np.flatnonzero(is_span & host.named(lambda name: name.startswith(GLOO)))
    calls = np.flatnonzero((host.kind == HostKind.OPERATOR) & host.named(lambda name: name.startswith(CALLS)))
    started_by = _started_by(trace, transfers, calls)
    came = ~host.take(transfers).named(lambda name: name.startswith(_POSTED[0]))
    transfers, started_by = transfers[came], started_by[came]
    # Own time of operators: row, start, end. Copies of a transfer on gloo's thread belong to the transfer.
    operators = np.flatnonzero((host.kind == HostKind.OPERATOR) & ~_inside(trace, transfers))
    intervals = [
        stretches(host, operators[host.thread[operators] == thread]) for thread in np.unique(host.thread[operators])
    ]
    waited_for = union(host.start_us[transfers], host.end_us[transfers])
    functions = np.flatnonzero(host.named(FUNCTION.fullmatch))
    table = np.array(list(_without(chain(*intervals), functions, waited_for)), dtype=np.float64).reshape(-1, 3)
    row = np.append(table[:, 0].astype(np.int64), transfers)  # float64 holds row numbers exactly
    if not len(row):
        raise TraceError(
            f"{trace.path} has neither an event on a GPU nor an operator",
            fix="profile it with the activities CPU and, on a GPU, CUDA",
        )
    start_us = np.append(table[:, 1], host.start_us[transfers])
    end_us = np.append(table[:, 2], host.end_us[transfers])
    order = np.argsort(start_us, kind="stable")
    talks = np.isin(row, np.append(calls, transfers))
    kind = host.kind.copy()
    kind[is_span & host.named(lambda name: name.startswith(GLOO))] = HostKind.SYNC  # they enclose nothing
    host = replace(host, kind=kind)
    launch = np.append(table[:, 0].astype(np.int64), np.where(started_by == NONE, transfers, started_by))
    events = as_gpu_events(
        host,
        row[order],
        start_us=start_us[order],
        duration_us=(end_us - start_us)[order],
        kind=np.where(talks[order], GpuKind.COMMUNICATION, GpuKind.COMPUTE).astype(np.int8),
        device=np.zeros(len(row), dtype=np.int64),
        stream=np.append(host.thread[row[: len(table)]], np.full(len(transfers), len(trace.threads)))[order],
        launch=launch[order],
    )
    count = int(host.named(LAUNCHES.match).sum())
    what = f"{count:,} calls launched work on a device, of which there is no event: operators count instead"
    return replace(trace, gpu=events, host=host, is_host=True, notes=(*trace.notes, what) if count else trace.notes)


def _started_by(trace: Trace, transfers: Integers, calls: Integers) -> Integers:
    """For each transfer the row of the operator that started it, or NONE."""
    host = trace.host
    waiting: deque[tuple[str, int]] = deque()  # kind and row of calls without a transfer, in the order of time
    operators, at = np.full(len(transfers), NONE), 0
    for index, row in enumerate(transfers.tolist()):
        while at < len(calls) and host.start_us[calls[at]] <= host.start_us[row]:
            waiting.append((_letters(host.name(int(calls[at])).removeprefix(CALLS)), int(calls[at])))
            at += 1
        kind = _letters(host.name(row).removeprefix(GLOO))
        for call in waiting:
            if call[0].startswith(kind) or (kind == "allreduce" and call[0].startswith(_IN_SUMS)):
                operators[index] = call[1]
                waiting.remove(call)
                break
    return operators


def _without(parts: Iterable[Stretch], rows: Integers, times: Intervals) -> Iterator[Stretch]:
    """The parts of the host's time, those of some rows without these times."""
    some = set(rows.tolist())
    for row, start_us, end_us in parts:
        if row in some and len(times):
            left = union(np.array([start_us]), np.array([end_us])) - times
            yield from ((row, start, end) for start, end in zip(left.start_us, left.end_us, strict=True))
        else:
            yield row, start_us, end_us


def _letters(name: str) -> str:
    """`_allgather_base_` and `all_gather` begin with the same letters."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _inside(trace: Trace, transfers: Integers) -> Flags:
    """Mask of the host's rows that begin within a transfer on gloo's thread."""
    host = trace.host
    rows = transfers[~host.take(transfers).named(lambda name: name.startswith(_POSTED))]
    inside = np.zeros(len(host), dtype=bool)
    for thread in np.unique(host.thread[rows]):
        mine, of_thread = rows[host.thread[rows] == thread], np.flatnonzero(host.thread == thread)
        last = np.searchsorted(host.start_us[mine], host.start_us[of_thread], side="right") - 1
        inside[of_thread] = (last >= 0) & (host.start_us[of_thread] < host.end_us[mine][last])
    return inside
