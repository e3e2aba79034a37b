"""A table of calls, written by hand."""

from typing import NamedTuple

import numpy as np

from penstock.trace.calls import CollectiveCalls, ProcessGroup, SyncKind
from penstock.trace.events import NONE


class Call(NamedTuple):
    """One kernel: `group` is a tuple of members, or None for a kernel that says nothing."""

    rank: int
    start_us: float
    end_us: float
    group: tuple[int, ...] | None = None
    seq: int = NONE
    name: str = "allreduce"
    sync: SyncKind = SyncKind.TOGETHER
    stream: int = 16


def table(*calls: Call) -> CollectiveCalls:
    """Columns of these kernels. All groups have one name, as groups of disjoint ranks may."""
    rows = sorted(calls, key=lambda one: (one.rank, one.start_us))
    ranks = tuple(sorted({one.rank for one in rows}))
    groups = sorted({one.group for one in rows if one.group is not None})
    names = sorted({one.name for one in rows})
    unknown = np.full(len(rows), np.nan)
    return CollectiveCalls(
        ranks=ranks,
        groups=tuple(ProcessGroup(name="g", members=members, size=len(members)) for members in groups),
        names=tuple(names),
        rank=np.array([ranks.index(one.rank) for one in rows]),
        start_us=np.array([one.start_us for one in rows]),
        end_us=np.array([one.end_us for one in rows]),
        group=np.array([NONE if one.group is None else groups.index(one.group) for one in rows]),
        seq=np.array([one.seq for one in rows]),
        name_id=np.array([names.index(one.name) for one in rows]),
        sync=np.array([one.sync for one in rows], dtype=np.int8),
        stream=np.array([one.stream for one in rows]),
        sent_bytes=unknown,
        received_bytes=unknown,
        item_bytes=unknown,
        sent_rows=np.full(len(rows), NONE),
        received_rows=np.full(len(rows), NONE),
        gpu_row=np.arange(len(rows)),
    )
