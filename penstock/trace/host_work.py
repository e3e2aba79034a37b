"""A trace of a CPU, read as if the CPU were the device: what operators do themselves stands where kernels would.

    host      |- aten::linear ------------------|            |- gloo:all_reduce ---|   (a thread of its own)
              |      |- aten::addmm ------|     |
    device    |linear|      addmm         |linear|           |   communication     |

Every moment of a thread belongs to its innermost operator, so nothing counts twice and what no operator does (Python,
waiting) is idle. An event is "launched" by its own operator, and so phases, layers and steps are found in the same way
as those of a GPU (`penstock.trace.tree`).
"""

from dataclasses import replace

import numpy as np

from penstock.trace.events import NONE, Floats, GpuEvents, GpuKind, HostKind, Integers, Trace

COMMUNICATION = ("gloo:", "c10d::")
"""What the names of spans and operators begin with that talk to other ranks."""


def on_host(trace: Trace) -> Trace:
    """The trace with work of the host as work of the device.

    Args:
        trace: without any event on a GPU.
    """
    assert not len(trace.gpu), "a trace with a GPU has a device of its own"
    host, names = trace.host, trace.names
    talks = np.array([name.startswith(COMMUNICATION) for name in names], dtype=bool)[host.name_id]
    works = (host.kind == HostKind.OPERATOR) | ((host.kind == HostKind.SPAN) & talks)
    row, start_us, end_us = _innermost(host.thread, host.start_us, host.end_us, np.flatnonzero(works))
    order = np.argsort(start_us, kind="stable")
    row = row[order]
    events = GpuEvents(
        names=names,
        name_id=host.name_id[row],
        start_us=start_us[order],
        duration_us=(end_us - start_us)[order],
        correlation=np.full(len(row), NONE),
        external_id=host.external_id[row],
        raw=host.raw.take(row),
        kind=np.where(talks[row], GpuKind.COMMUNICATION, GpuKind.COMPUTE).astype(np.int8),
        device=np.zeros(len(row), dtype=np.int64),
        stream=host.thread[row],
        launch=row,
    )
    return replace(trace, gpu=events)


def _innermost(thread: Integers, start_us: Floats, end_us: Floats, rows: Integers) -> tuple[Integers, Floats, Floats]:
    """Stretches of time in which each row is the innermost of its thread: row, start, end."""
    found: list[tuple[int, float, float]] = []
    for one in np.unique(thread[rows]):
        _stretches(found, rows[thread[rows] == one], start_us, end_us)
    table = np.array(found, dtype=np.float64).reshape(-1, 3)
    return table[:, 0].astype(np.int64), table[:, 1], table[:, 2]


def _stretches(found: list[tuple[int, float, float]], rows: Integers, start_us: Floats, end_us: Floats) -> None:
    """Those of one thread, whose rows are sorted by start and, of equal ones, the longer first."""
    open_: list[tuple[int, float]] = []
    now = -np.inf

    def until(time_us: float) -> None:
        nonlocal now
        while open_ and open_[-1][1] <= time_us:
            row, end = open_.pop()
            if end > now:
                found.append((row, now, end))
                now = end
        if open_ and time_us > now:
            found.append((open_[-1][0], now, time_us))
        now = max(now, time_us)

    for row, start, end in zip(rows.tolist(), start_us[rows].tolist(), end_us[rows].tolist(), strict=True):
        until(start)
        # What ends behind the operator around it (clocks are rounded) ends with it.
        open_.append((row, min(end, open_[-1][1]) if open_ else end))
    until(np.inf)
