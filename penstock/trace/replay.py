"""`penstock trace replay`: write a script that runs one recorded operator call again and times it.

Any operator of the form `NAMESPACE::NAME` can be replayed, among them the grouped product `aten::_grouped_mm`.
Collectives need other ranks, and autograd functions are not registered operators: both are refused.

The name is looked up in this order:

1. an operator, with its namespace or without (`aten::mm`, `mm`),
2. a kernel, by any part of its name: then the operator that launched it.

Among the calls of that operator, the shape with the most GPU time is taken, or the one that `--shape` names.

A script has four parts: a function that makes tensors of a size, stride and dtype; one that finds the overload of the
operator (a trace lists all arguments in order, PyTorch wants keyword-only ones by name); the call; and the clock. Only
PyTorch knows the schema, so the overload is found when the script runs.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec
import numpy as np

from penstock.base.errors import TraceError, asked, nearest
from penstock.trace.compare import shape_text
from penstock.trace.events import NONE, Flags, HostKind, Integers, Trace, decoded_or
from penstock.trace.recorded_call import Argument, TensorArgument, grouped_size, recorded_arguments
from penstock.trace.tree import build_tree

REPLAYABLE = "operators of PyTorch or of another library (NAMESPACE::NAME), among them aten::_grouped_mm"

SPLIT = "aten::split_with_sizes"
"""Programs that split rows into one part per expert record the counts as the sizes of this operator."""

_SIZES = msgspec.json.Decoder(list[int])
_COLLECTIVES = ("c10d::", "nccl:", "record_param_comms", "gloo:", "_c10d_functional::")
"""Beginnings of operators that run a collective."""


@dataclass(frozen=True, kw_only=True)
class _RecordedCalls:
    """Calls with the same arguments: their rows in `Trace.host`, the GPU time of each, and their kernels."""

    shape: str
    rows: tuple[int, ...]
    times_us: tuple[float, ...]
    kernels: tuple[str, ...]


def replay_script(trace: Trace, op: str, *, shape: str | None = None, counts: tuple[int, ...] | None = None) -> str:
    """The text of a script that runs one call of a trace again.

    `op` is the name of an operator, or a part of a kernel's name. `shape` has the sizes as `penstock trace diff` prints
    them, next to each other; None takes the shape with the most GPU time. `counts` are the rows of each expert of a
    grouped product; None takes the sizes of the nearest split, or even counts.

    Raises:
        TraceError: the trace has no such operator, it cannot be replayed, or its arguments were not recorded.
    """
    host, launched = trace.host, ""
    kinds = np.isin(host.kind, (HostKind.OPERATOR, HostKind.SPAN))
    present = [trace.names[name] for name in np.unique(host.name_id[kinds])]
    # The operators that match: in full, without the namespace, or as the launcher of a kernel.
    names = [op] if op in present else [name for name in present if "::" in name and name.rpartition("::")[2] == op]
    if not names:
        name, launched = _operator_of_kernel(trace, op)
        names = [name]
    _check_replayable(trace, names[0])
    call = _chosen(_calls(trace, names), op, shape)
    row, typical_us = call.rows[0], median(call.times_us)
    name, args = host.name(row), host.args(row)
    list_dtype = _list_dtype(call.kernels)
    seen = [f"It launched {launched[:100]}."] if launched else []
    seen.append(f"Seen {len(call.rows)} times; median GPU time {typical_us:.1f} us.")
    seen += [f"Kernel: {kernel[:100]}" for kernel in call.kernels[:3]]
    if "TensorList" in _listed(args, "Input type"):
        seen.append(f"Dtypes of tensors in lists are not in a trace: {list_dtype} here, by the kernels' names.")
    if counts is None and (size := grouped_size(name, args)) is not None:
        counts = _split_counts(trace, row, *size)
        source = "real, from the nearest split of rows" if counts else "even, because the trace does not have them"
        seen.append(f"Rows of each expert: {source} (--counts sets them).")
    arguments = recorded_arguments(name, args, list_dtype=list_dtype, counts=counts)
    return _script(name, arguments, seen, typical_us)


# ------------------------------------------------------------------------------------------------- finding the call


def _operator_of_kernel(trace: Trace, op: str) -> tuple[str, str]:
    """The operator that spent the most time in kernels of a name, and the longest of these kernels."""
    gpu, host = trace.gpu, trace.host
    is_named = gpu.named(lambda name: op.lower() in name.lower())
    if not is_named.any():
        used = np.unique(host.name_id[host.kind == HostKind.OPERATOR])
        names = [trace.names[name] for name in used]
        near = nearest(op, names, most=3) or [name for name in names if op.lower() in name.lower()][:3]
        raise TraceError("no operator or kernel of this trace has this name", got=op, fix=asked(near))
    owner = _launchers(trace, host.kind == HostKind.OPERATOR)
    launched = np.flatnonzero(is_named & (owner != NONE))
    if not len(launched):
        kernel = gpu.name(int(np.flatnonzero(is_named)[0]))
        raise TraceError(f"{kernel[:100]} cannot be replayed: no operator that launched it is in this trace")
    # The operator (row of the host) with the most time in these kernels.
    name = host.name(int(np.bincount(owner[launched], weights=gpu.duration_us[launched]).argmax()))
    return name, gpu.name(int(launched[gpu.duration_us[launched].argmax()]))


def _launchers(trace: Trace, candidates: Flags) -> Integers:
    """For each GPU event the innermost of some rows of the host (a mask) around its launch, or NONE."""
    operator = build_tree(trace).inherit(np.where(candidates, np.arange(len(trace.host)), NONE))
    return np.append(operator, NONE)[trace.gpu.launch]


def _check_replayable(trace: Trace, name: str) -> None:
    if name.startswith(_COLLECTIVES):
        raise TraceError(f"{name} is a collective and cannot be replayed", allowed=REPLAYABLE)
    if "::" in name:
        return
    host = trace.host
    row = int(np.flatnonzero(host.called(name))[0])  # its first call
    inside = host.take(host.starting_in(host.start_us[row], host.end_us[row]))
    inside = inside.take((inside.thread == host.thread[row]) & (inside.kind == HostKind.OPERATOR))
    nested = dict.fromkeys(inside.name(at) for at in range(len(inside)))
    names = [one for one in nested if "::" in one and ": " not in one][:6]
    fix = f"name an operator inside it: {', '.join(names)}" if names else None
    raise TraceError(f"{name} is a region or an autograd function and cannot be replayed", allowed=REPLAYABLE, fix=fix)


def _calls(trace: Trace, names: Sequence[str]) -> list[_RecordedCalls]:
    """Calls of operators grouped by their arguments, those with the most GPU time first."""
    host, gpu = trace.host, trace.gpu
    is_named = host.called(*names) & (host.kind == HostKind.OPERATOR)
    owner = _launchers(trace, is_named)
    # Time on the GPU by row of the host.
    times_us = np.bincount(owner[owner != NONE], weights=gpu.duration_us[owner != NONE], minlength=len(host))
    kernels: dict[int, dict[str, None]] = defaultdict(dict)  # by row of the operator: names in the order of first use
    for event in np.flatnonzero(owner != NONE).tolist():
        kernels[int(owner[event])][gpu.name(event)] = None
    by_arguments: dict[tuple[str, ...], list[int]] = defaultdict(list)  # rows of the host
    for row in np.flatnonzero(is_named).tolist():
        args = host.args(row)
        shape = shape_text(_listed(args, "Input Dims"))
        by_arguments[shape, str(args.get("Input type")), str(args.get("Concrete Inputs"))].append(row)
    found = [
        _RecordedCalls(
            shape=shape,
            rows=tuple(rows),
            times_us=tuple(times_us[rows].tolist()),
            kernels=tuple(dict.fromkeys(name for row in rows for name in kernels[row])),
        )
        for (shape, *_), rows in by_arguments.items()
    ]
    return sorted(found, key=lambda one: (-sum(one.times_us), -len(one.rows)))


def _listed(args: Mapping[str, Any], key: str) -> list[Any]:
    """An entry of an event's arguments that is a list; else an empty list."""
    found = args.get(key)
    return found if isinstance(found, list) else []


def _chosen(calls: Sequence[_RecordedCalls], op: str, shape: str | None) -> _RecordedCalls:
    if shape is None:
        return calls[0]
    wanted = " ".join(shape.replace(",", " ").split())
    for call in calls:
        if f" {wanted} " in f" {call.shape} ":  # whole sizes: `8x3` is not in `18x3`
            return call
    present = list(dict.fromkeys(call.shape or "(none)" for call in calls))
    raise TraceError(f"{op} has no such shape in this trace", got=shape, allowed="; ".join(present[:8]))


def _list_dtype(kernels: Sequence[str]) -> str:
    """The dtype that kernels were compiled for, according to their names."""
    text = " ".join(kernels)
    if "BFloat16" in text or "bf16" in text or "OpaqueType<2u>" in text:
        return "bfloat16"
    return "float16" if "Half" in text else "float32"


def _split_counts(trace: Trace, row: int, groups: int, most: int) -> tuple[int, ...] | None:
    """Rows of each expert in one product, by the nearest split on its thread into as many parts; None without one.

    `row` is that of the product in `Trace.host`; `most` is the number of rows of its buffer.
    """
    host = trace.host
    splits = np.flatnonzero(host.called(SPLIT) & (host.thread == host.thread[row]) & (host.kind == HostKind.OPERATOR))
    for one in splits[np.argsort(np.abs(host.start_us[splits] - host.start_us[row]), kind="stable")].tolist():
        match _listed(host.args(one), "Concrete Inputs"):
            case [_, str(sizes), *_]:
                counts = decoded_or([], _SIZES, sizes.encode(errors="replace"))
            case _:
                continue
        if len(counts) == groups and 0 < sum(counts) <= most and min(counts) >= 0:
            return tuple(counts)
    return None


# ----------------------------------------------------------------------------------------------- writing the script

_TENSORS = '''
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensor(dtype, size, stride, below=None, device=DEVICE):
    """Random values; integers are at least 0 and less than `below`."""
    elements = 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride))
    if below is not None:
        values = torch.randint(below, (elements,), device=device).to(dtype)
    elif "float4" in str(dtype) or "e8m0" in str(dtype):
        values = torch.randint(120, 130, (elements,), dtype=torch.uint8, device=device).view(dtype)
    else:
        values = torch.randn(elements, device=device).to(dtype)
    return values.as_strided(size, stride)
'''

_CLOCK = '''
def median_us(run, warm_up=10, times=50):
    """Median time of a call, in microseconds: on the GPU's clock if there is one."""
    for _ in range(warm_up):
        run()
    samples = []
    for _ in range(times):
        if DEVICE == "cpu":
            start = time.perf_counter()
            run()
            samples.append((time.perf_counter() - start) * 1e6)
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3)
    return statistics.median(samples)
'''

_OVERLOAD = '''
def fits(slot, value):
    """Whether a parameter of a schema takes a recorded value; None can also be a value that was not recorded."""
    kind = str(slot.type)
    if value is None:
        return slot.has_default_value() or kind.startswith("Optional")
    if isinstance(value, torch.Tensor):
        return kind in ("Tensor", "Optional[Tensor]")
    if isinstance(value, tuple):
        return kind in ("List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]")
    if "Tensor" in kind:
        return False
    if isinstance(value, list):
        return "List" in kind and not (kind.endswith("List[int]") and any(isinstance(one, float) for one in value))
    if isinstance(value, bool):
        return "bool" in kind or "number" in kind
    if isinstance(value, float):
        return "float" in kind or "number" in kind
    return "List" not in kind and "str" not in kind


def bind(name, values):
    """The call of the first overload that takes the values, in the order of the schema."""
    namespace, operator = name.split("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is None:
        sys.exit(f"this PyTorch has no {name}: import the library that brings it at the top of this file")
    overloads = [getattr(packet, one) for one in packet.overloads()]
    for overload in sorted(overloads, key=lambda one: len(one._schema.arguments)):
        slots = overload._schema.arguments
        rest = slots[len(values):]
        if len(values) > len(slots) or not all(map(fits, slots, values)) or not all(fits(slot, None) for slot in rest):
            continue
        taken = [slot.default_value if value is None else value for slot, value in zip(slots, values)]
        taken = [list(value) if isinstance(value, tuple) else value for value in taken]
        if not any(isinstance(value, torch.Tensor | tuple) for value in values):
            taken = [DEVICE if str(slot.type) == "Optional[Device]" else value for slot, value in zip(slots, taken)]
        positional = [value for slot, value in zip(slots, taken) if not slot.kwarg_only]
        by_name = {slot.name: value for slot, value in zip(slots, taken) if slot.kwarg_only}
        return lambda: overload(*positional, **by_name)
    sys.exit(f"no overload of {name} takes what the trace holds; it has: " + ", ".join(packet.overloads()))
'''


def _script(name: str, arguments: Sequence[Argument], seen: Sequence[str], recorded_us: float) -> str:
    """The script for an operator.

    `seen` are lines for the script's docstring; `recorded_us` is the median GPU time of a call in the trace.
    """
    lines, values = "\n".join(seen), ",\n".join(f"        {literal(one)}" for one in arguments)
    return (
        f'"""{name} as a trace has it, with random values. Written by `penstock trace replay`; run it with `python`.\n'
        f'\n{lines}\n"""\n\nimport statistics\nimport sys\nimport time\n\nimport torch\n'
        f"{_TENSORS}\n{_OVERLOAD}\n{_CLOCK}"
        f"\n\nrun = bind(\n    {name!r},\n    [\n{values},\n    ],\n)\n"
        f'print(f"{name}: {{median_us(run):.1f}} us on {{DEVICE}}, {recorded_us:.1f} us in the trace")\n'
    )


def literal(argument: Argument) -> str:
    """An argument as a Python expression that uses `torch` and the script's `tensor`."""
    if isinstance(argument, TensorArgument):
        return _tensor_literal(argument)
    if isinstance(argument, tuple):
        return f"({', '.join(map(_tensor_literal, argument))}{',' if len(argument) == 1 else ''})"
    if isinstance(argument, float) and (argument != argument or abs(argument) == float("inf")):
        return f'float("{argument}")'
    return repr(argument)


def _tensor_literal(argument: TensorArgument) -> str:
    if argument.values is not None:
        return f"torch.tensor({list(argument.values)}, dtype=torch.{argument.dtype}, device=DEVICE)"
    if argument.is_number:
        return f"torch.tensor(1, dtype=torch.{argument.dtype})"
    below = "" if argument.below is None else f", below={argument.below}"
    return f"tensor(torch.{argument.dtype}, {argument.size}, {argument.stride}{below})"
