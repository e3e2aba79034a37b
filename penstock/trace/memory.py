"""Memory of a device during a recording: the allocator's curve, its peak, and the purpose of each block.

The profiler writes an event for each allocation and free, with size, address and the total afterwards. An event is
placed like a kernel (penstock.trace.tree): by the operators and spans around it, in backward by the operator that made
the node. The lifetime of a block gives its component:

    before       allocated before the recording: weights, gradients and moments that outlive a step
    activations  allocated in forward or recompute, alive while backward works
    gradients    allocated in backward, alive while the update works, or until the end
    optimizer    allocated in the update, alive after it
    kept         allocated in forward, alive while the update works
    temporary    all others: freed in the pass that allocated them

Without addresses there are no blocks, only the curve, its peak, and the place of the peak. The host allocates and runs
ahead of the device, so all times are the host's. A graph replay allocates nothing; its memory was allocated at capture,
and is `before`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from penstock.trace.events import NONE, Flags, Floats, HostKind, Integers, Trace, decoded_or
from penstock.trace.phases import PASSES, Phases, find_phases, grouped, plain_row
from penstock.trace.timeline import RecordedStep
from penstock.trace.tree import as_launches, build_tree, place

COMPONENTS = ("before", "activations", "gradients", "optimizer", "kept", "temporary")
"""Components of memory; `before` are all bytes without a recorded block."""

POINTS = 256  # points of a curve in JSON
_BEFORE, _ACTIVATIONS, _GRADIENTS, _OPTIMIZER, _KEPT, _TEMPORARY = range(len(COMPONENTS))
_FORWARD, _BACKWARD, _RECOMPUTE, _UPDATE = (
    PASSES.index(name) for name in ("forward", "backward", "recompute", "update")
)


@dataclass(frozen=True, kw_only=True, eq=False)
class AllocatedBlocks:
    """Blocks that were allocated during the recording."""

    size: Integers
    born: Integers  # row of the allocation
    died: Integers  # row of the free, or NONE
    component: Integers  # index into `COMPONENTS`

    def alive(self, row: int) -> Flags:
        """Mask of the blocks that are alive after a change."""
        return (self.born <= row) & ((self.died == NONE) | (self.died > row))


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Memory of one phase, over the whole recording."""

    name: str
    pass_: str
    layer: int | None
    handed_out_bytes: int
    kept_bytes: int  # allocated in it minus freed in it, whichever phase allocated the freed blocks
    most_bytes: int  # largest total while it worked
    at_peak_bytes: int | None  # of its blocks that are alive at the peak; None without blocks


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """The moment with the most allocated memory."""

    time_us: float
    allocated_bytes: int
    reserved_bytes: int
    phase: str
    pass_: str
    layer: int | None
    spans: tuple[str, ...]  # open around it, from the outside in
    components: Mapping[str, int]  # bytes by component, the largest first; empty without blocks


@dataclass(frozen=True, kw_only=True, eq=False)
class AllocatorHistory:
    """The allocator of one device; arrays have one entry for each change."""

    device: int
    time_us: Floats
    allocated: Integers  # total bytes after it
    reserved: Integers  # bytes that the allocator holds after it
    changed: Integers  # bytes allocated, or negative bytes freed
    phases: Phases  # phase of the host at each change
    blocks: AllocatedBlocks | None  # None if the trace has no addresses
    spans: tuple[str, ...]

    @property
    def peak_row(self) -> int:
        """The first change after which the most is allocated."""
        return int(self.allocated.argmax())

    @property
    def peak(self) -> MemoryPeak:
        return self.at(self.peak_row, self.spans)

    def at(self, row: int, spans: tuple[str, ...] = ()) -> MemoryPeak:
        """The moment after a change."""
        layer = int(self.phases.layer[row])
        return MemoryPeak(
            time_us=float(self.time_us[row]),
            allocated_bytes=int(self.allocated[row]),
            reserved_bytes=int(self.reserved[row]),
            phase=self.phases.names[self.phases.name_id[row]],
            pass_=PASSES[self.phases.pass_id[row]],
            layer=None if layer == NONE else layer,
            spans=spans,
            components=self.components(row),
        )

    def components(self, row: int) -> dict[str, int]:
        """Bytes by component after a change, the largest first; they add up to the allocated total."""
        if self.blocks is None:
            return {}
        alive = self.blocks.alive(row)
        sizes = np.bincount(self.blocks.component[alive], self.blocks.size[alive], len(COMPONENTS)).astype(np.int64)
        sizes[_BEFORE] = self.allocated[row] - sizes.sum()  # bytes without a recorded allocation
        return {
            COMPONENTS[component]: int(sizes[component])
            for component in np.argsort(-sizes, kind="stable").tolist()
            if sizes[component]
        }

    def rows(self, *, by_layer: bool = False) -> list[MemoryRow]:
        """Memory of each phase, in the order of their first change."""
        layer = self.phases.layer if by_layer else np.full(len(self.time_us), NONE)
        groups, group = grouped(self.phases.name_id, self.phases.pass_id, layer)
        handed_out = np.bincount(group, np.maximum(self.changed, 0), len(groups))
        kept = np.bincount(group, self.changed, len(groups))
        peaks = np.zeros(len(groups), dtype=np.int64)
        np.maximum.at(peaks, group, self.allocated)
        _, first = np.unique(group, return_index=True)  # the first change of each group
        there = None
        if self.blocks is not None:
            alive = self.blocks.alive(self.peak_row)
            there = np.bincount(group[self.blocks.born[alive]], self.blocks.size[alive], len(groups))
        return [
            MemoryRow(
                name=self.phases.names[name],
                pass_=PASSES[pass_],
                layer=None if number == NONE else number,
                handed_out_bytes=int(handed_out[index]),
                kept_bytes=int(kept[index]),
                most_bytes=int(peaks[index]),
                at_peak_bytes=None if there is None else int(there[index]),
            )
            for index in np.argsort(first, kind="stable").tolist()
            for name, pass_, number in [groups[index]]
        ]

    def curve(self, points: int = POINTS) -> list[tuple[float, int, int]]:
        """Time, allocated and reserved bytes: all changes, or the fullest moment of each of equal parts of time."""
        rows = np.arange(len(self.time_us))
        if len(rows) > points:
            span_us = self.time_us[-1] - self.time_us[0]
            part = ((self.time_us - self.time_us[0]) / max(span_us, 1e-9) * (points - 1)).astype(np.int64)
            by_part = np.lexsort((-self.allocated, part))  # the fullest change of each part first
            rows = by_part[np.append(True, np.diff(part[by_part]) > 0)]
        return list(
            zip(self.time_us[rows].tolist(), self.allocated[rows].tolist(), self.reserved[rows].tolist(), strict=True)
        )


_Bytes = Annotated[int, msgspec.Meta(ge=-(2**50), le=2**50)]  # larger numbers are damage
_Address = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Args(msgspec.Struct, gc=False):
    """The profiler's record of a change; the host has a device number below 0."""

    device: int = msgspec.field(name="Device Id", default=NONE)
    changed: _Bytes | None = msgspec.field(name="Bytes", default=None)
    allocated: _Bytes | None = msgspec.field(name="Total Allocated", default=None)
    reserved: _Bytes | None = msgspec.field(name="Total Reserved", default=None)
    address: _Address | None = msgspec.field(name="Addr", default=None)


_DECODER, _NOTHING = msgspec.json.Decoder(_Args), _Args()


def find_memory(trace: Trace) -> tuple[AllocatorHistory, ...]:
    """The allocator history of each GPU; empty if memory was not recorded."""
    host = trace.host
    rows = np.flatnonzero((host.kind == HostKind.INSTANT) & host.called("[memory]"))
    changes: dict[int, list[tuple[int, _Args]]] = {}
    for row in rows.tolist():
        args = decoded_or(_NOTHING, _DECODER, host.raw[row])
        if args.device >= 0 and args.allocated is not None and args.reserved is not None:
            changes.setdefault(args.device, []).append((row, args))
    return tuple(_memory(trace, device, records) for device, records in sorted(changes.items()))


def _memory(trace: Trace, device: int, records: Sequence[tuple[int, _Args]]) -> AllocatorHistory:
    rows = np.array([row for row, _ in records])
    allocated = np.array([args.allocated for _, args in records], dtype=np.int64)
    changed = np.array([args.changed or 0 for _, args in records], dtype=np.int64)
    placed = as_launches(trace, rows)  # so that changes get phases as kernels do
    tree = build_tree(placed)
    phases = find_phases(placed, place(placed, tree))
    has_blocks = all(args.address is not None and args.changed is not None for _, args in records)
    addresses = np.array([args.address or 0 for _, args in records], dtype=np.int64)
    around = tree.above(int(rows[allocated.argmax()]))[:0:-1]  # of the peak, from the outside in, without itself
    return AllocatorHistory(
        device=device,
        time_us=trace.host.start_us[rows],
        allocated=allocated,
        reserved=np.array([args.reserved for _, args in records], dtype=np.int64),
        changed=changed,
        phases=phases,
        blocks=_blocks(addresses, changed, phases) if has_blocks else None,
        spans=tuple(trace.host.name(row) for row in around if trace.host.kind[row] == HostKind.SPAN),
    )


def _blocks(addresses: Integers, changed: Integers, phases: Phases) -> AllocatedBlocks:
    """Blocks from each allocation to the next change at its address, if that is a free."""
    # Changes of one address in the order of time: an allocation is followed by its free.
    order = np.argsort(addresses, kind="stable")
    is_next = np.append(np.diff(addresses[order]) == 0, False)  # the next change in this order is at the same address
    after = np.append(order[1:], NONE)
    is_taken = is_next & (np.append(changed[order][1:], 0) < 0)
    is_born = changed[order] > 0
    born, died = order[is_born], np.where(is_taken, after, NONE)[is_born]
    return AllocatedBlocks(size=changed[born], born=born, died=died, component=_components(born, died, phases.pass_id))


def _components(born: Integers, died: Integers, pass_id: Integers) -> Integers:
    """Component of each block, by the passes that work while it is alive."""

    def sees(pass_: int) -> Flags:
        """Whether a change of this pass lies between birth and death, both included but for the birth."""
        seen = np.cumsum(pass_id == pass_)  # changes of this pass up to and with each change
        last = np.where(died == NONE, len(pass_id) - 1, died)
        met: Flags = seen[last] > seen[born]
        return met

    begins = pass_id[born]
    in_forward = np.isin(begins, (_FORWARD, _RECOMPUTE))
    return np.select(
        [
            in_forward & sees(_UPDATE),
            in_forward & sees(_BACKWARD),
            (begins == _BACKWARD) & (sees(_UPDATE) | (died == NONE)),
            (begins == _UPDATE) & (sees(_FORWARD) | (died == NONE)),
        ],
        [_KEPT, _ACTIVATIONS, _GRADIENTS, _OPTIMIZER],
        _TEMPORARY,
    )


# -------------------------------------------------------------------------------------------------------------- JSON


def memory_json(memory: AllocatorHistory, steps: Sequence[RecordedStep]) -> dict[str, Any]:
    """A device's memory as plain values."""
    return {
        "device": memory.device,
        "changes": len(memory.time_us),
        "most_allocated_bytes": int(memory.allocated.max()),
        "most_reserved_bytes": int(memory.reserved.max()),
        "peak": _peak_json(memory.peak),
        "steps": [_step_json(memory, step) for step in steps],
        "phases": [plain_row(row) for row in memory.rows(by_layer=True)],
        "curve": memory.curve(),
    }


def _peak_json(peak: MemoryPeak) -> dict[str, Any]:
    return plain_row(peak) | {"components": dict(peak.components) or None, "spans": list(peak.spans)}


def _step_json(memory: AllocatorHistory, step: RecordedStep) -> dict[str, Any]:
    """First, last and fullest moment of the host's part of a step; null without a change in it."""
    low, high = np.searchsorted(memory.time_us, [step.start_us, step.start_us + step.duration_us]).tolist()
    entry: dict[str, Any] = {"name": step.name, "number": step.number, "begin_bytes": None, "end_bytes": None}
    if low == high:
        return entry | {"peak": None}
    fullest = low + int(memory.allocated[low:high].argmax())
    begin = int(memory.allocated[low] - memory.changed[low])
    return entry | {
        "begin_bytes": begin,
        "end_bytes": int(memory.allocated[high - 1]),
        "peak": _peak_json(memory.at(fullest)),
    }
