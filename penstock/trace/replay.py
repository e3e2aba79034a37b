"""`penstock trace replay`: write a script that runs one recorded operator call again and times it.

The name is looked up as an operator, with its namespace or without (`aten::mm`, `mm`), then as a part of a kernel's
name, which selects the operator that launched it. Of its calls, the shape with the most time is taken, or the one that
`--shape` names. Collectives need other ranks, and autograd functions are not registered operators: both are refused.

torch.profiler records dims, strides and dtypes of every argument, and scalar values as text (`record_shapes=True`). It
lacks the following:

- Tensor values. Integers that index something are made in range of its size, and group offsets come from given counts,
  or from the nearest split of rows, or are even.
- Dtypes of tensors in lists. A list of optional tensors (the indices of `x[i, j]`) is missing entirely.
- None, a string, a generator and a device look alike; all become None, and the script takes the operator's default.
- A Python number passed for a tensor is a tensor without dims whose value is lost; it becomes 1.
- The overload. The script takes the first one that runs: a trace lists all arguments in the order of the schema.
"""

import ast
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Any

import msgspec
import numpy as np

from penstock.base.errors import TraceError, asked, nearest
from penstock.trace.compare import shape_text
from penstock.trace.events import NONE, Flags, HostKind, Integers, Trace, decoded_or
from penstock.trace.tree import build_tree

REPLAYABLE = "operators of PyTorch or of another library (NAMESPACE::NAME), among them aten::_grouped_mm"

DTYPES: dict[str, str] = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    **{f"c10::Float8_{one}": f"float8_{one}" for one in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
    "c10::Float4_e2m1fn_x2": "float4_e2m1fn_x2",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "bool": "bool",
    "unsigned char": "uint8",
    "signed char": "int8",
    **{
        f"{sign}{name}": f"{sign[:1]}{dtype}"
        for names, dtype in ((("short", "short int"), "int16"), (("int",), "int32"), (("long", "long int"), "int64"))
        for name in names
        for sign in ("", "unsigned ")
    },
}
"""PyTorch's dtype names for the C++ types in traces."""

_COLLECTIVES = ("c10d::", "nccl:", "record_param_comms", "gloo:", "_c10d_functional::")
_BETWEEN_RANKS = ("symm_mem::", "deep_ep::", "nvshmem::")
_LISTS_OF_INDICES = re.compile(r"aten::(index|index_put_?|_index_put_impl_|_unsafe_index)")
"""Operators, or beginnings of their names, that cannot run again in one process."""

_BY_DIM = re.compile(r"(index_(select|add|copy|fill|reduce)|gather|scatter(_add|_reduce)?)_?")
_INDEXES: dict[str, tuple[int, int, int]] = {
    "embedding": (1, 0, 0),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_forward"), (1, 0, 1)),
    "nll_loss_backward": (2, 1, 1),
}
"""Position of the index, of the indexed tensor, and the indexed dim; `_BY_DIM` has it as (source, dim, index)."""

GROUPED = {"aten::_grouped_mm": 2, "aten::_scaled_grouped_mm": 4}
"""Position of the group offsets."""

SPLIT = "aten::split_with_sizes"
"""Programs that split rows into one part per expert record the counts as the sizes of this operator."""

_MOST_GROUPS = 1 << 20  # calls with more experts are damaged
_SMALL = 1024  # integers that index nothing known are less than this, and less than any size in the call
_SIZES = msgspec.json.Decoder(list[int])


@dataclass(frozen=True, kw_only=True)
class TensorArgument:
    """A tensor."""

    dtype: str  # PyTorch's name, `bfloat16`
    size: tuple[int, ...]
    stride: tuple[int, ...]
    below: int | None = None  # integers are in [0, below); None for other dtypes
    values: tuple[int, ...] | None = None  # exact contents, if known
    is_number: bool = False  # it was a Python number


Argument = TensorArgument | tuple[TensorArgument, ...] | None | bool | int | float | str | list[Any]
"""A tensor, several tensors, None, or a plain value."""


@dataclass(frozen=True, kw_only=True)
class _RecordedCalls:
    """Calls with the same arguments: their rows in `Trace.host`, the time of each, and their kernels."""

    shape: str
    rows: tuple[int, ...]
    times_us: tuple[float, ...]
    kernels: tuple[str, ...]


def replay_script(trace: Trace, op: str, *, shape: str | None = None, counts: tuple[int, ...] | None = None) -> str:
    """The text of a script that runs one call of a trace again.

    `op` is the name of an operator, or a part of a kernel's name. `shape` has the sizes as `penstock trace diff` prints
    them, next to each other; None takes the shape with the most time. `counts` are the rows of each expert of a grouped
    product; None takes the sizes of the nearest split, or even counts.

    Raises:
        TraceError: the trace has no such operator, it cannot be replayed, or its arguments were not recorded.
    """
    host, launched = trace.host, ""
    kinds = np.isin(host.kind, (HostKind.OPERATOR, HostKind.SPAN, HostKind.SYNC))
    present = [trace.names[name] for name in np.unique(host.name_id[kinds])]
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
    seen.append(
        f"Seen {len(call.rows)} times; median time {'' if trace.is_host else 'on the GPU '}{typical_us:.1f} us."
    )
    seen += [] if trace.is_host else [f"Kernel: {kernel[:100]}" for kernel in call.kernels[:3]]
    if "TensorList" in _listed(args, "Input type"):
        seen.append(f"Dtypes of tensors in lists are not in a trace: {list_dtype} here, by the kernels' names.")
    if counts is None and (size := _grouped_size(name, args)) is not None:
        counts = _split_counts(trace, row, *size)
        source = "real, from the nearest split of rows" if counts else "even, because the trace does not have them"
        seen.append(f"Rows of each expert: {source} (--counts sets them).")
    arguments = recorded_arguments(name, args, list_dtype=list_dtype, counts=counts)
    device = '"cpu"' if trace.is_host else '"cuda" if torch.cuda.is_available() else "cpu"'
    values = "".join(f"        {literal(one)},\n" for one in arguments)
    told = "\n".join(seen)
    head = (
        f'"""{name} as a trace has it, with random values. Written by `penstock trace replay`; run it with `python`.\n'
    )
    return (
        f'{head}\n{told}\n"""\n\n{_SCRIPT.replace("@", device)}'
        f"\n\nrun = bind(\n    {name!r},\n    [\n{values}    ],\n)\n"
        f'print(f"{name}: {{median_us(run):.1f}} us on {{DEVICE}}, {typical_us:.1f} us in the trace")\n'
    )


# ------------------------------------------------------------------------------------------------- finding the call


def _operator_of_kernel(trace: Trace, op: str) -> tuple[str, str]:
    """The operator that spent the most time in kernels of a name, and the longest of these kernels."""
    gpu, host = trace.gpu, trace.host
    is_named = gpu.named(lambda name: op.lower() in name.lower())
    if trace.is_host or not is_named.any():
        names = [trace.names[name] for name in np.unique(host.name_id[host.kind == HostKind.OPERATOR])]
        near = nearest(op, names, most=3) or [name for name in names if op.lower() in name.lower()][:3]
        raise TraceError("no operator or kernel of this trace has this name", got=op, fix=asked(near))
    owner = _launchers(trace, host.kind == HostKind.OPERATOR)
    launched = np.flatnonzero(is_named & (owner != NONE))
    if not len(launched):
        kernel = gpu.name(int(np.flatnonzero(is_named)[0]))
        raise TraceError(f"{kernel[:100]} cannot be replayed: no operator that launched it is in this trace")
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
    """Calls of operators grouped by their arguments, those with the most time first."""
    host, gpu = trace.host, trace.gpu
    is_named = host.called(*names) & (host.kind == HostKind.OPERATOR)
    owner = _launchers(trace, is_named)
    times_us = np.bincount(owner[owner != NONE], gpu.duration_us[owner != NONE], len(host))  # by row of the host
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
    wanted = " ".join((shape or "").replace(",", " ").split())
    for call in calls:
        if shape is None or f" {wanted} " in f" {call.shape} ":  # whole sizes: `8x3` is not in `18x3`
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


# --------------------------------------------------------------------------------------------------- its arguments


def recorded_arguments(
    name: str, args: Mapping[str, Any], *, list_dtype: str = "float32", counts: Sequence[int] | None = None
) -> tuple[Argument, ...]:
    """The arguments of an operator call.

    `list_dtype` is that of tensors in lists, which profilers do not record. `counts` are the rows of each expert for
    grouped products; None makes them even.

    Raises:
        TraceError: the trace lacks something, or the counts do not fit.
    """
    if _LISTS_OF_INDICES.fullmatch(name):
        raise TraceError(f"{name} cannot be replayed: profilers do not record its list of indices")
    if name.startswith(_BETWEEN_RANKS):
        raise TraceError(f"{name} cannot be replayed: it needs memory of other ranks, which profilers do not record")
    kinds, dims = args.get("Input type"), args.get("Input Dims")
    if not isinstance(kinds, list) or not isinstance(dims, list):
        fix = "record it with shapes (torch.profiler: record_shapes=True)"
        raise TraceError(f"{name} has no shapes in this trace", fix=fix)
    strides = args.get("Input Strides") or [None] * len(kinds)  # without strides tensors are contiguous
    columns = (kinds, dims, strides, args.get("Concrete Inputs") or [""] * len(kinds))
    lists = all(isinstance(one, list) and len(one) == len(kinds) for one in columns)
    if not lists or not all(isinstance(one, str) for one in kinds) or not all(isinstance(one, list) for one in dims):
        raise TraceError(f"the arguments of {name} are damaged in this trace: its lists differ in length or type")
    found = [
        _argument(f"argument {position} of {name}", *recorded, list_dtype)
        for position, recorded in enumerate(zip(*columns, strict=True))
    ]
    tensors = [one for one in found if isinstance(one, tuple)]
    if tensors and not any(tensors):  # `TensorList` without sizes
        raise TraceError(f"{name} cannot be replayed: the sizes in its lists of tensors are not in this trace")
    return tuple(_with_offsets(name, _in_range(name.removeprefix("aten::"), found), counts))


def _argument(where: str, kind: str, dims: list[Any], stride: Any, text: Any, list_dtype: str) -> Argument:
    if kind == "TensorList":
        strides = stride if isinstance(stride, list) and len(stride) == len(dims) else [None] * len(dims)
        return tuple(_tensor(where, list_dtype, one, at) for one, at in zip(dims, strides, strict=True))
    if kind in DTYPES:
        tensor = _tensor(where, DTYPES[kind], dims, stride)
        return replace(tensor, is_number=kind in ("double", "long int") and not tensor.size)
    if kind == "":
        return None  # None, a string, a generator or a device
    if kind not in ("Scalar", "ScalarList"):
        raise TraceError(f"{where} has a type that replay does not know", got=kind)
    if text == "":
        raise TraceError(f"{where} is a number whose value is not in this trace")
    try:  # `1.` and `-inf` are as C++ prints them
        return float(text) if str(text).lstrip("+-") in ("inf", "nan") else ast.literal_eval(str(text))
    except (ValueError, SyntaxError, TypeError) as error:
        raise TraceError(f"{where} has a value that cannot be read", got=str(text)[:80]) from error


def _tensor(where: str, dtype: str, size: Any, stride: Any) -> TensorArgument:
    if not _are_sizes(size):
        raise TraceError(f"{where} is damaged in this trace", got=f"size {size}", allowed="whole numbers")
    if not _are_sizes(stride) or len(stride) != len(size):
        stride = [math.prod(max(1, one) for one in size[dim + 1 :]) for dim in range(len(size))]  # contiguous
    below = _SMALL if "int" in dtype or dtype == "bool" else None
    return TensorArgument(dtype=dtype, size=tuple(size), stride=tuple(stride), below=below)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(one, int) and one >= 0 for one in values)


def _in_range(name: str, found: Sequence[Argument]) -> list[Argument]:
    """Arguments with bounds: integers that index another argument fit its size, others fit any size in the call."""
    small = min([_SMALL, *(size for one in found if isinstance(one, TensorArgument) for size in one.size if size)])
    bounded = [
        replace(one, below=min(small, 2) if one.dtype == "bool" else small)
        if isinstance(one, TensorArgument) and one.below is not None
        else one
        for one in found
    ]
    place = _INDEXES.get(name)
    if _BY_DIM.fullmatch(name) and len(found) > 2 and isinstance(found[1], int):
        place = (2, 0, found[1])
    if place is None or place[0] >= len(found):
        return bounded
    index, source, dim = bounded[place[0]], bounded[place[1]], place[2]
    if isinstance(index, TensorArgument) and isinstance(source, TensorArgument):
        below = source.size[dim] if -len(source.size) <= dim < len(source.size) else small
        dtype = "int64" if index.below is None else index.dtype
        bounded[place[0]] = replace(index, dtype=dtype, below=max(1, below))
    return bounded


def _grouped_size(name: str, args: Mapping[str, Any]) -> tuple[int, int] | None:
    """Experts and rows of a grouped product; None for other operators or damaged arguments."""
    dims, place = args.get("Input Dims"), GROUPED.get(name)
    if place is None or not isinstance(dims, list) or len(dims) <= place:
        return None
    left, right, offsets = dims[0], dims[1], dims[place]
    if not all(map(_are_sizes, (left, right, offsets))) or len(left) != 2 or len(offsets) != 1:
        return None
    # Two matrices make a weight gradient: [D, T] @ [T, F], whose rows are the second dim of the first.
    return offsets[0], left[1 if len(right) == 2 else 0]


def _with_offsets(name: str, found: list[Argument], counts: Sequence[int] | None) -> list[Argument]:
    """Arguments with the end of each group of a grouped product as exact values."""
    position = GROUPED.get(name)
    offsets = found[position] if position is not None and position < len(found) else None
    if position is None or not isinstance(offsets, TensorArgument):
        if counts is not None:
            raise TraceError(f"{name} takes no rows of experts", fix="leave --counts out")
        return found
    dims = [list(one.size) if isinstance(one, TensorArgument) else None for one in found]
    size = _grouped_size(name, {"Input Dims": dims})
    if size is None:
        raise TraceError(f"{name} is replayed only with a matrix and one offset for each group")
    values = tuple(accumulate(_group_rows(*size, counts)))
    return [*found[:position], replace(offsets, dtype="int32", values=values), *found[position + 1 :]]


def _group_rows(groups: int, rows: int, counts: Sequence[int] | None) -> list[int]:
    """Rows of each expert: the given counts, or `rows` divided as evenly as possible."""
    if groups > _MOST_GROUPS:
        raise TraceError("the sizes of a grouped product are damaged in this trace", got=f"{groups:.3g} experts")
    if counts is None:
        share, more = divmod(rows, max(1, groups))
        return [share + (group < more) for group in range(groups)]
    if len(counts) != groups or min(counts, default=0) < 0 or sum(counts) > rows:
        raise TraceError(
            "--counts does not fit what was recorded",
            got=f"{len(counts)} experts with {sum(counts)} rows",
            allowed=f"{groups} experts with at most {rows} rows",
        )
    return list(counts)


def literal(argument: Argument) -> str:
    """An argument as a Python expression that uses `torch` and the script's `tensor`."""
    match argument:
        case TensorArgument(values=tuple(values), dtype=dtype):
            return f"torch.tensor({list(values)}, dtype=torch.{dtype}, device=DEVICE)"
        case TensorArgument(is_number=True, dtype=dtype):
            return f"torch.tensor(1, dtype=torch.{dtype})"
        case TensorArgument(dtype=dtype, size=size, stride=stride, below=below):
            return f"tensor(torch.{dtype}, {size}, {stride}{'' if below is None else f', below={below}'})"
        case tuple(tensors):
            return f"({''.join(f'{literal(one)}, ' for one in tensors)})"
        case float(number) if not math.isfinite(number):
            return f'float("{number}")'
    return repr(argument)


_SCRIPT = '''import statistics
import sys
import time

import torch

DEVICE = @


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


def bind(name, values):
    """The call of the first overload that runs with the values, in the order of its schema."""
    namespace, operator = name.split("::")
    packet, why = getattr(getattr(torch.ops, namespace), operator, None), ""
    if packet is None:
        sys.exit(f"this PyTorch has no {name}: import the library that brings it at the top of this file")
    for overload in sorted(map(packet.__getattr__, packet.overloads()), key=lambda one: len(one._schema.arguments)):
        slots = overload._schema.arguments
        taken = [slot.default_value if value is None else value for slot, value in zip(slots, values)]
        taken = [list(value) if isinstance(value, tuple) else value for value in taken]
        if not any(isinstance(value, torch.Tensor | tuple) for value in values):  # it makes a tensor
            taken = [DEVICE if str(slot.type) == "Optional[Device]" else value for slot, value in zip(slots, taken)]
        positional = [value for slot, value in zip(slots, taken) if not slot.kwarg_only]
        by_name = {slot.name: value for slot, value in zip(slots, taken) if slot.kwarg_only}
        try:
            if len(values) <= len(slots):
                overload(*positional, **by_name)
                return lambda: overload(*positional, **by_name)
        except (RuntimeError, TypeError, IndexError, NotImplementedError) as error:
            why = f": {str(error).splitlines()[0]}"
    sys.exit(f"no overload of {name} takes what the trace holds{why}; it has: " + ", ".join(packet.overloads()))


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
