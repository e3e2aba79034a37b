"""One table of the communication kernels of all ranks, with the metadata that the profiler recorded.

The `args` of a kernel hold the collective's group, sequence number and sizes. If they do not, the `record_param_comms`
that launched the kernel does; it is found by `External id`, or as the operator that was open on the launching thread at
that moment. Kernels of other libraries, graph replays and old profilers record nothing: their group is NONE, and
`matching` uses order and time.

Gloo records only the sizes of what a rank sends. Its collectives have a group if all groups of the process have the
same ranks.

The `SyncKind` of a kernel says what its end means. Ranks leave an all-reduce together, so its end is one moment on all
clocks. The root of a broadcast leaves early, and kernels that write into other devices' memory do not wait at all.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.base.numbers import printable
from penstock.trace.events import NONE, Flags, Floats, GpuEvents, GpuKind, HostEvents, Integers, Trace, decoded_or
from penstock.trace.kernel_names import function_of, library_of
from penstock.trace.on_host import CALLS, GLOO


class SyncKind(IntEnum):
    """How ranks wait for each other in a kernel.

    `TOGETHER`: no rank leaves before the last has come, and all leave at once. `UNEVEN`: the same, but a rank with less
    to transfer can leave earlier (all-to-all of unequal parts, or an NCCL kernel without metadata). `ROOTED`: only some
    ranks wait (broadcast, reduce). `PAIR`: send and receive. `DEVICE`: waits for flags of other devices, without a
    number. `ALONE`: writes to other devices and waits for no rank.
    """

    TOGETHER = 0
    UNEVEN = 1
    ROOTED = 2
    PAIR = 3
    DEVICE = 4
    ALONE = 5

    @property
    def is_met(self) -> bool:
        """All ranks of the group are inside at one moment."""
        return self <= SyncKind.UNEVEN


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """A process group."""

    name: str  # as PyTorch has it; groups of disjoint ranks can share one
    members: tuple[int, ...]  # global ranks; empty if unknown
    size: int  # number of members; 0 if unknown


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectiveCalls:
    """One row for each communication kernel; the rows of a rank are contiguous and sorted by start."""

    ranks: tuple[int, ...]
    groups: tuple[ProcessGroup, ...]
    names: tuple[str, ...]  # of collectives (`all_to_allv`) or kernels, indexed by `name_id`
    rank: Integers  # index into `ranks`
    start_us: Floats  # on the clock of the rank
    end_us: Floats
    group: Integers  # index into `groups`, or NONE
    seq: Integers  # PyTorch's number of the collective in its group, or NONE
    name_id: Integers
    sync: NDArray[np.int8]
    stream: Integers
    sent_bytes: Floats  # nan if unknown
    received_bytes: Floats  # nan if unknown
    item_bytes: Floats  # bytes per element; nan if unknown
    sent_rows: Integers  # sum of the split sizes of an all-to-all if these count rows; else NONE
    received_rows: Integers
    gpu_row: Integers  # row in `Trace.gpu` of its rank
    clock: tuple[int, ...]  # of each rank; equal numbers: these CPUs share a clock

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def is_exchange(self) -> Flags:
        is_named = [("all_to_all" in name or "alltoall" in name) for name in self.names]
        return np.array(is_named, dtype=bool)[self.name_id]

    @property
    def duration_us(self) -> Floats:
        return self.end_us - self.start_us

    def name(self, row: int) -> str:
        return self.names[self.name_id[row]]

    def take(self, rows: Any) -> Self:
        """The table with only these rows."""
        return replace(
            self, **{name: column[rows] for name, column in vars(self).items() if isinstance(column, np.ndarray)}
        )


_GroupKey = tuple[str, bytes, int, int]


def calls_of(traces: Mapping[int, Trace]) -> CollectiveCalls:
    groups: dict[_GroupKey, ProcessGroup] = {}
    names: dict[str, int] = {}
    parts = [_columns_of(number, traces[rank], groups, names) for number, rank in enumerate(sorted(traces))]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    clocks: dict[Any, int] = {}
    clock = tuple(clocks.setdefault(_clock(rank, traces[rank]), len(clocks)) for rank in sorted(traces))
    ranks = tuple(sorted(traces))
    return CollectiveCalls(ranks=ranks, groups=tuple(groups.values()), names=tuple(names), clock=clock, **columns)


def _clock(rank: int, trace: Trace) -> tuple[Any, ...]:
    """Equal for processes of one machine, whose times are the machine's; the times of a device are converted."""
    machine = (trace.header.get("host_name"), trace.header.get("baseTimeNanoseconds"))
    return machine if trace.is_host and machine[0] else (rank,)


_Count = Annotated[int, msgspec.Meta(ge=NONE, le=2**40)]  # larger numbers are damage
_MOST_RANKS = 2**20  # a larger group is damage


class _About(msgspec.Struct, gc=False):
    """The profiler's metadata of a collective. Sizes are numbers of elements."""

    name: str = msgspec.field(name="Collective name", default="")
    group: str = msgspec.field(name="Process Group Name", default="")
    ranks: msgspec.Raw = msgspec.field(name="Process Group Ranks", default=msgspec.Raw())
    size: _Count = msgspec.field(name="Group size", default=0)
    first: _Count = msgspec.field(name="Global rank start", default=NONE)
    stride: _Count = msgspec.field(name="Global rank stride", default=NONE)
    seq: _Count = msgspec.field(name="Seq", default=NONE)
    sent: _Count = msgspec.field(name="In msg nelems", default=NONE)
    received: _Count = msgspec.field(name="Out msg nelems", default=NONE)
    dtype: str = ""
    sent_parts: msgspec.Raw = msgspec.field(name="In split size", default=msgspec.Raw())
    received_parts: msgspec.Raw = msgspec.field(name="Out split size", default=msgspec.Raw())


_ABOUT = msgspec.json.Decoder(_About, strict=False)
_LIST = msgspec.json.Decoder(list[_Count])
_UNKNOWN = _About()

_BYTES = {"byte": 1, "char": 1, "bool": 1, "half": 2, "bfloat16": 2, "short": 2, "float": 4, "int": 4}
_BYTES |= {"double": 8, "long": 8, "long int": 8, "complexfloat": 8, "complexdouble": 16}

_SYNC_KINDS: tuple[tuple[SyncKind, str], ...] = (  # the first match decides: `all_reduce` is not `reduce`
    (SyncKind.UNEVEN, r"all_?to_?all_?v|sendrecv|generic"),
    (SyncKind.TOGETHER, r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier"),
    (SyncKind.PAIR, r"send|recv|p2p"),
    (SyncKind.ROOTED, r"broadcast|reduce|gather|scatter"),
)
_ALONE = ("push_rows_kernel", "return_rows_kernel")


@lru_cache(maxsize=4096)
def _sync_of(name: str) -> SyncKind:
    return next((sync for sync, pattern in _SYNC_KINDS if re.search(pattern, name, re.IGNORECASE)), SyncKind.UNEVEN)


@lru_cache(maxsize=4096)
def _sync_of_kernel(kernel: str) -> SyncKind:
    function = function_of(kernel)
    if function in _ALONE:
        return SyncKind.ALONE
    return _sync_of(function) if library_of(kernel) == "nccl" else SyncKind.DEVICE


def _columns_of(
    number: int, trace: Trace, groups: dict[_GroupKey, ProcessGroup], names: dict[str, int]
) -> dict[str, NDArray[Any]]:
    """The columns of one rank; new groups and names are added to those of the ranks before."""
    rows = np.flatnonzero((trace.gpu.kind == GpuKind.COMMUNICATION) & ~_only_starts(trace))
    kernels = trace.gpu.take(rows)
    if trace.is_host:
        members = _only_group(trace)
        about = [_of_gloo(kernels.name(i), kernels.args(i), members) for i in range(len(rows))]
    else:
        about = _joined(trace, kernels, [_decoded(kernels.raw[i]) for i in range(len(rows))])
    for name_id in np.unique(kernels.name_id).tolist():
        names.setdefault(function_of(kernels.names[name_id]), len(names))
    # Without metadata, the name and the synchronization come from the kernel's function.
    texts = [printable(call.name) or function_of(kernels.name(i)) for i, call in enumerate(about)]
    sync = [_sync_of(call.name) if call.name else _sync_of_kernel(kernels.name(i)) for i, call in enumerate(about)]
    item_bytes = np.array([_width(call.dtype) for call in about], dtype=np.float64)
    sent, received = (
        np.array([count if call.name and count >= 0 else np.nan for call, count in zip(about, counts, strict=True)])
        for counts in ([call.sent for call in about], [call.received for call in about])  # NONE: not recorded
    )
    integers: dict[str, list[int]] = {
        "group": [_group(call, groups) for call in about],
        "seq": [call.seq for call in about],
        "name_id": [names.setdefault(text, len(names)) for text in texts],
        "sent_rows": [_rows(call.sent_parts, call.sent) for call in about],
        "received_rows": [_rows(call.received_parts, call.received) for call in about],
    }
    return {
        "rank": np.full(len(rows), number),
        "start_us": kernels.start_us,
        "end_us": kernels.end_us,
        "sync": np.array(sync, dtype=np.int8),
        "stream": kernels.stream,
        "sent_bytes": sent.astype(np.float64) * item_bytes,
        "received_bytes": received.astype(np.float64) * item_bytes,
        "item_bytes": item_bytes,
        "gpu_row": rows,
        **{name: np.array(values, dtype=np.int64) for name, values in integers.items()},
    }


def _only_starts(trace: Trace) -> Flags:
    """Mask of the operators of a CPU whose transfer is an event of its own."""
    gpu = trace.gpu
    is_transfer = gpu.named(lambda name: name.startswith(GLOO))
    return np.isin(gpu.launch, gpu.launch[is_transfer]) & ~is_transfer


def _only_group(trace: Trace) -> msgspec.Raw:
    """The ranks of all process groups of more than one rank if they are the same, as JSON; else no text."""
    config = trace.distributed.get("pg_config")
    groups = [entry.get("ranks") for entry in config if isinstance(entry, dict)] if isinstance(config, list) else []
    several = {str(ranks) for ranks in groups if isinstance(ranks, list) and len(ranks) > 1}
    return msgspec.Raw(several.pop().encode() if len(several) == 1 else b"")


def _of_gloo(name: str, args: Mapping[str, Any], members: msgspec.Raw) -> _About:
    """The metadata of a transfer. What a gather or a scatter receives is not recorded, so it has no size."""
    kind = name.removeprefix(GLOO).removeprefix(CALLS)
    match args.get("Input Dims"), args.get("Input type"):
        case [[*size]], [str(dtype)] if all(isinstance(dim, int) for dim in size) and "gather" not in kind:
            about = _About(name=kind, sent=math.prod(size), dtype=dtype)
        case _:
            about = _About(name=kind)
    return about if not members else msgspec.structs.replace(about, group="all", ranks=members)


def _group(about: _About, groups: dict[_GroupKey, ProcessGroup]) -> int:
    if not about.name or not about.group:
        return NONE
    key = (about.group, bytes(about.ranks), about.first, about.stride)
    if key not in groups:
        members: Sequence[int] = _listed(about.ranks)
        # The list of a large group is cut short; then first rank and stride give the members.
        if not members and about.first >= 0 and about.stride > 0 and about.size <= _MOST_RANKS:
            members = range(about.first, about.first + about.size * about.stride, about.stride)
        groups[key] = ProcessGroup(name=printable(about.group), members=tuple(members), size=about.size or len(members))
    return list(groups).index(key)


def is_point_to_point(text: bytes) -> bool:
    """The `args` of a kernel say that it is a send or a receive, whose NCCL kernel has the name of an all-to-all."""
    return _decoded(text).name.startswith(("send", "recv"))


def _decoded(text: bytes) -> _About:
    """The metadata in the `args` of a kernel or operator; empty if they are missing or damaged."""
    return decoded_or(_UNKNOWN, _ABOUT, text) if b"Collective name" in text else _UNKNOWN


def _joined(trace: Trace, kernels: GpuEvents, about: list[_About]) -> list[_About]:
    """Completes missing metadata from the `record_param_comms` operators."""
    blank = [i for i, call in enumerate(about) if not call.name and library_of(kernels.name(i)) == "nccl"]
    comms = trace.host.take(trace.host.called("record_param_comms"))
    if not blank or not len(comms):
        return about
    by_id = {int(comms.external_id[i]): i for i in range(len(comms)) if comms.external_id[i] != NONE}
    by_thread = {int(thread): np.flatnonzero(comms.thread == thread) for thread in np.unique(comms.thread)}
    calls = list(about)
    for i in blank:
        launch = int(kernels.launch[i])
        ids = [int(kernels.external_id[i])] + ([] if launch == NONE else [int(trace.host.external_id[launch])])
        row = next((by_id[number] for number in ids if number in by_id), None)
        if row is None and launch != NONE:
            row = _around(comms, by_thread.get(int(trace.host.thread[launch])), trace.host.start_us[launch])
        if row is not None:
            calls[i] = _decoded(comms.raw[row])
    return calls


def _around(comms: HostEvents, rows: Integers | None, moment_us: float) -> int | None:
    """The last of these operators that began before a moment, if it was still open."""
    if rows is None:
        return None
    last = int(np.searchsorted(comms.start_us[rows], moment_us, side="right")) - 1
    return int(rows[last]) if last >= 0 and moment_us < comms.end_us[rows[last]] else None


def _width(dtype: str) -> float:
    """Bytes per element; nan if the dtype is unknown."""
    name = dtype.removeprefix("c10::").lower()
    return 1.0 if name.startswith("float8") else float(_BYTES.get(name, np.nan))


def _listed(raw: msgspec.Raw) -> list[int]:
    """A list of integers, or its text; empty if it is neither or cut short."""
    return decoded_or([], _LIST, bytes(raw).strip(b'"'))


def _rows(parts: msgspec.Raw, elements: int) -> int:
    """Sum of the split sizes of an all-to-all, unless they count elements like the message itself."""
    total = sum(_listed(parts))
    return total if total and total != elements else NONE
