"""`penstock trace replay`: finds an operator, collective or kernel in a trace and writes a script that runs it again.

What is asked for is looked for in this order, and the first that is found is meant:

1. an operator, with its namespace or without (`aten::mm`, `mm`), or one of our autograd functions (`_GroupedGemm`),
2. a collective, by the name in its metadata (`all_to_allv`),
3. a kernel, by any part of its name: then the operator or collective that launched it.

Of the calls that there are, the shape that took most of the GPU's time is taken, or the one that `--shape` names. The
time of a call is that of everything that it launched. A function's backward is run by running forward once; both are
joined by their sequence number.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from penstock.base.errors import TraceError
from penstock.base.meant import asked, nearest
from penstock.trace.events import NONE, HostKind, Trace
from penstock.trace.float8_products import with_float8_products
from penstock.trace.named_work import shape_text
from penstock.trace.recorded_call import recorded_arguments
from penstock.trace.replay_collective import Collective, call_of, collective_of, collective_script
from penstock.trace.replay_counts import loads_of
from penstock.trace.replay_kernels import BACKWARD, is_ours, kernel_script
from penstock.trace.replay_script import operator_script
from penstock.trace.tree import build_tree

COLLECTIVE_OPERATORS = ("c10d::", "nccl:", "record_param_comms", "gloo:", "_c10d_functional::")
"""Beginnings of operators that only pass a collective on."""

_COMMS = "record_param_comms"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What shall be replayed.

    Attributes:
        op: name of an operator, a collective or a kernel.
        shape: sizes as `penstock trace diff` prints them; the call must have them next to each other. Of a collective,
            its elements. None takes the shape with most GPU time.
        counts: rows of each expert; None takes what the trace says of them (penstock.trace.replay_counts).
    """

    op: str
    shape: str | None = None
    counts: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Calls with the same shapes: rows of the host, and the GPU time of each."""

    shape: str
    rows: tuple[int, ...]
    times_us: tuple[float, ...]
    kernels: tuple[str, ...]

    @property
    def typical_us(self) -> float:
        return median(self.times_us)

    def lines(self) -> list[str]:
        """For the docstring of a script."""
        found = [f"Seen {len(self.rows)} times; median GPU time {self.typical_us:.1f} us."]
        return found + [f"Kernel: {name[:100]}" for name in self.kernels[:3]]


def replay(traces: Mapping[int, Trace], question: Question) -> str:
    """The text of a script.

    Args:
        traces: by rank; operators are taken from the first, collectives also from the others.
        question: what to look for.

    Raises:
        TraceError: the trace has no such thing, or does not hold what a script needs.
    """
    rank, trace = next(iter(traces.items()))
    names = _operators(trace, question.op)
    if names and not _only_pass_on(names):
        return _of_operator(rank, trace, names, question)
    if wanted := _wanted(_met(trace, rank), question.op):
        return _of_collective(traces, wanted, question)
    if names:
        raise TraceError(f"{question.op} cannot be replayed: sizes of collectives are not in this trace")
    return _of_kernel(traces, question)


def _operators(trace: Trace, op: str) -> list[str]:
    """Names of operators that are asked for: in full, or without the namespace."""
    kinds = np.isin(trace.host.kind, (HostKind.OPERATOR, HostKind.SPAN))
    present = [trace.names[name] for name in np.unique(trace.host.name_id[kinds])]
    exact = [name for name in present if name == op]
    return exact or [name for name in present if "::" in name and name.rpartition("::")[2] == op]


def _only_pass_on(names: Sequence[str]) -> bool:
    return all(name.startswith(COLLECTIVE_OPERATORS) for name in names)


def _calls(trace: Trace, names: Sequence[str]) -> list[_Seen]:
    """Calls of operators by their shapes, those with most GPU time first."""
    host, gpu = trace.host, trace.gpu
    is_named = host.called(*names) & (host.kind == HostKind.OPERATOR)
    own = np.where(is_named, np.arange(len(host)), NONE)
    tree = build_tree(trace)
    owner = np.where(gpu.is_linked, tree.inherit(own)[gpu.launch], NONE)
    asked = with_float8_products(trace, tree.parent, owner)
    owner = np.where(np.append(is_named, False)[asked], asked, owner)
    times_us = np.bincount(owner[owner != NONE], weights=gpu.duration_us[owner != NONE], minlength=len(host))
    kernels: dict[int, dict[str, None]] = defaultdict(dict)
    for event in np.flatnonzero(owner != NONE).tolist():
        kernels[int(owner[event])][gpu.name(event)] = None
    by_shape: dict[str, list[int]] = defaultdict(list)
    for row in np.flatnonzero(is_named).tolist():
        args = host.args(row)
        kinds, plain = args.get("Input type"), args.get("Concrete Inputs")
        by_shape[f"{shape_text(_listed(args, 'Input Dims'))}|{kinds}|{plain}"].append(row)
    found = [
        _Seen(
            shape=key.partition("|")[0],
            rows=tuple(rows),
            times_us=tuple(times_us[rows].tolist()),
            kernels=tuple(dict.fromkeys(name for row in rows for name in kernels[row])),
        )
        for key, rows in by_shape.items()
    ]
    return sorted(found, key=lambda one: (-sum(one.times_us), -len(one.rows)))


def _listed(args: Mapping[str, Any], key: str) -> list[Any]:
    """A list of an event's arguments; empty if it is none."""
    found = args.get(key)
    return found if isinstance(found, list) else []


def _chosen(calls: Sequence[_Seen], op: str, shape: str | None) -> _Seen:
    if shape is None:
        return calls[0]
    wanted = " ".join(shape.replace(",", " ").split())
    for call in calls:
        if f" {wanted} " in f" {call.shape} ":
            return call
    there = list(dict.fromkeys(call.shape or "(none)" for call in calls))
    raise TraceError(f"{op} has no such shape in this trace", got=shape, allowed="; ".join(there[:8]))


def _of_operator(rank: int, trace: Trace, names: Sequence[str], question: Question, launched: str | None = None) -> str:
    """A script for an operator; `launched` is the kernel that was asked for, if it was one."""
    calls = _calls(trace, names)
    if not calls:
        raise TraceError(f"{names[0]} is a region and no operator", fix="name an operator inside it")
    call = _chosen(calls, question.op, question.shape)
    row, name = call.rows[0], trace.host.name(call.rows[0])
    seen = [*([] if launched is None else [f"It launched {launched[:100]}."]), *call.lines()]
    if is_ours(name):
        made = _forward(trace, row, name)
        forward = trace.host.name(made)
        arguments = recorded_arguments(forward, trace.host.args(made))
        loads = loads_of(rank, trace, made, question.counts)
        seen += filter(None, [loads.told])
        return kernel_script(
            name, arguments, counts=loads.counts, seen=seen, recorded_us=call.typical_us, header=trace.header
        )
    if "::" not in name:
        raise TraceError(
            f"{name} is a node of the backward graph and no operator",
            fix=f"name one of those inside it: {', '.join(_inside(trace, row)) or 'it has none'}",
        )
    list_dtype = _list_dtype(call.kernels)
    args = trace.host.args(row)
    if "TensorList" in _listed(args, "Input type"):
        seen.append(f"Dtypes of tensors in lists are not in a trace: {list_dtype} here, by the kernels' names.")
    loads = loads_of(rank, trace, row, question.counts)
    seen += filter(None, [loads.told])
    arguments = recorded_arguments(name, args, list_dtype=list_dtype, counts=loads.counts)
    return operator_script(name, arguments, seen=seen, recorded_us=call.typical_us)


def _forward(trace: Trace, row: int, name: str) -> int:
    """The row of the autograd function whose forward or backward a row is: forward has the arguments."""
    forward = name.removesuffix(BACKWARD)
    if forward == name:
        return row
    host = trace.host
    made = np.flatnonzero(host.called(forward) & (host.sequence == host.sequence[row]) & (host.sequence != NONE))
    before = made[host.start_us[made] <= host.start_us[row]]
    if not len(before):
        raise TraceError(f"the forward of {name} is not in this trace, and only it has the arguments")
    return int(before[-1])


def _inside(trace: Trace, row: int) -> list[str]:
    """Operators of PyTorch that ran during an event."""
    host = trace.host
    within = host.starting_in(host.start_us[row], host.end_us[row])
    inside = host.take(within)
    on_thread = inside.take((inside.thread == host.thread[row]) & (inside.kind == HostKind.OPERATOR))
    names = dict.fromkeys(on_thread.name(at) for at in range(len(on_thread)))
    return [name for name in names if "::" in name and ": " not in name][:6]


def _list_dtype(kernels: Sequence[str]) -> str:
    """The dtype that kernels were compiled for, as far as their names say."""
    text = " ".join(kernels)
    if "BFloat16" in text or "bf16" in text or "OpaqueType<2u>" in text:
        return "bfloat16"
    return "float16" if "Half" in text else "float32"


@dataclass(frozen=True, kw_only=True)
class _Met:
    """A collective in one trace: what it was, its kernel, how long that ran, and its number in its group."""

    kernel: str
    time_us: float
    group: str
    seq: int
    collective: Collective


def _met(trace: Trace, rank: int) -> list[_Met]:
    """Collectives whose metadata are at their kernels, or at the `record_param_comms` that launched them."""
    host, gpu = trace.host, trace.gpu
    asked = host.called(_COMMS)
    around = build_tree(trace).inherit(np.where(asked, np.arange(len(host)), NONE))
    found: list[tuple[dict[str, Any], str, float]] = []
    told = set()
    for event in np.flatnonzero(gpu.is_kernel).tolist():
        row = int(around[gpu.launch[event]]) if gpu.is_linked[event] else NONE
        is_told = b"Collective name" in bytes(gpu.raw[event])
        if is_told or row != NONE:
            told.add(row)
            found.append(
                (gpu.args(event) if is_told else host.args(row), gpu.name(event), float(gpu.duration_us[event]))
            )
    found += [(host.args(row), "", 0.0) for row in np.flatnonzero(asked).tolist() if row not in told]
    known = ((args, kernel, time_us, collective_of(args, rank)) for args, kernel, time_us in found)
    return [
        _Met(
            kernel=kernel,
            time_us=time_us,
            group=str(args.get("Process Group Name")),
            seq=seq if isinstance(seq := args.get("Seq"), int) else NONE,
            collective=collective,
        )
        for args, kernel, time_us, collective in known
        if collective is not None
    ]


def _wanted(met: Sequence[_Met], op: str) -> list[_Met]:
    """Collectives that a name stands for: their own name first, what they do second."""
    if op == _COMMS:
        return list(met)
    exact = [one for one in met if one.collective.name == op]
    call = call_of(op)
    return exact or [one for one in met if call is not None and one.collective.call == call]


def _of_collective(traces: Mapping[int, Trace], met: Sequence[_Met], question: Question) -> str:
    """A script for the slowest of some collectives of the first trace, with what the other ranks sent."""
    rank = next(iter(traces))
    if question.counts is not None:
        raise TraceError("a collective takes no rows of experts", fix="leave --counts out: its splits are recorded")
    sized = [
        one
        for one in met
        if question.shape is None or question.shape in (str(one.collective.sent), str(one.collective.got))
    ]
    if not sized:
        sizes = ", ".join(dict.fromkeys(str(one.collective.sent) for one in met))
        raise TraceError(f"{question.op} never had so many elements", got=question.shape, allowed=sizes)
    chosen = max(sized, key=lambda one: one.time_us)
    known = [chosen.collective]
    for other, trace in traces.items():
        if other != rank and (same := _same(_met(trace, other), chosen)) is not None:
            known.append(same.collective)
    seen = [
        f"The slowest of {len(sized)} on rank {rank}: {chosen.time_us:.1f} us, waiting for other ranks included.",
        f"{chosen.collective.sent} elements in, {chosen.collective.got} out.",
    ]
    if chosen.collective.sends:
        seen.append(f"Parts: real ones, as {len(known)} of {chosen.collective.ranks} ranks recorded them.")
    return collective_script(known, seen=seen, recorded_us=chosen.time_us)


def _same(met: Sequence[_Met], chosen: _Met) -> _Met | None:
    """The same collective in the trace of another rank: same group and number; without numbers none is the same."""
    if chosen.seq == NONE:
        return None
    key = (chosen.group, chosen.seq, chosen.collective.name)
    return next((one for one in met if (one.group, one.seq, one.collective.name) == key), None)


def _of_kernel(traces: Mapping[int, Trace], question: Question) -> str:
    """A script for what launched a kernel."""
    rank, trace = next(iter(traces.items()))
    gpu, host = trace.gpu, trace.host
    is_named = np.array([question.op.lower() in name.lower() for name in trace.names], dtype=bool)[gpu.name_id]
    if not is_named.any():
        raise _absent(trace, question.op)
    met = [one for one in _met(trace, rank) if question.op.lower() in one.kernel.lower()]
    if met:
        return _of_collective(traces, met, question)
    rows, tree = np.flatnonzero(is_named & gpu.is_linked), build_tree(trace)
    operator = tree.inherit(np.where(host.kind == HostKind.OPERATOR, np.arange(len(host)), NONE))
    owner = np.where(gpu.is_linked, operator[gpu.launch], NONE)
    around = with_float8_products(trace, tree.parent, owner)[rows]
    launched = rows[around != NONE]
    if not len(launched):
        kernel = gpu.name(int(np.flatnonzero(is_named)[0]))
        raise TraceError(f"{kernel[:100]} cannot be replayed: no operator that launched it is in this trace")
    spent = np.bincount(around[around != NONE], weights=gpu.duration_us[launched])
    name = host.name(int(spent.argmax()))
    if _only_pass_on([name]):
        raise TraceError(f"{question.op} cannot be replayed: sizes of collectives are not in this trace")
    kernel = gpu.name(int(launched[gpu.duration_us[launched].argmax()]))
    return _of_operator(rank, trace, [name], question, launched=kernel)


def _absent(trace: Trace, op: str) -> TraceError:
    used = np.unique(trace.host.name_id[trace.host.kind == HostKind.OPERATOR])
    names = [trace.names[name] for name in used]
    fix = asked(nearest(op, names, most=3) or [name for name in names if op.lower() in name.lower()][:3])
    return TraceError("no operator, collective or kernel of this trace has this name", got=op, fix=fix)
