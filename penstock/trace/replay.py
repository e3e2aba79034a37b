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
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.base.errors import TraceError, asked, nearest
from penstock.trace.compare import shape_text
from penstock.trace.events import NONE, Flags, HostKind, Integers, Trace, decoded_or
from penstock.trace.tree import build_tree

REPLAYABLE = "operators of PyTorch or of another library (NAMESPACE::NAME), among them aten::_grouped_mm"

# PyTorch's dtype names for the C++ types in traces.
DTYPES: dict[str, str] = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16", "bool": "bool",
    "unsigned char": "uint8", "signed char": "int8", "int": "int32", "unsigned int": "uint32",
    **{f"{sign}{name}{end}": f"{sign[:1]}int{bits}" for sign in ("", "unsigned ") for end in ("", " int")
       for name, bits in (("short", 16), ("long", 64))},
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
    **{f"c10::Float8_{kind}": f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
    "c10::Float4_e2m1fn_x2": "float4_e2m1fn_x2",
}  # fmt: skip

_COLLECTIVES = ("c10d::", "nccl:", "record_param_comms", "gloo:", "_c10d_functional::")
_BETWEEN_RANKS = ("symm_mem::", "deep_ep::", "nvshmem::")
_LISTS_OF_INDICES = re.compile(r"aten::(index|index_put_?|_index_put_impl_|_unsafe_index)")

# Arguments of which one indexes another: position of the index, of the indexed tensor, and the indexed dim. Operators
# of `_BY_DIM` have them as (source, dim, index).
_BY_DIM = re.compile(r"(index_(select|add|copy|fill|reduce)|gather|scatter(_add|_reduce)?)_?")
_INDEXES: dict[str, tuple[int, int, int]] = {
    "embedding": (1, 0, 0),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_forward"), (1, 0, 1)),
    "nll_loss_backward": (2, 1, 1),
}

GROUPED = {"aten::_grouped_mm": 2, "aten::_scaled_grouped_mm": 4}  # position of the group offsets

SPLIT = "aten::split_with_sizes"
"""Programs that split rows into one part per expert record the counts as the sizes of this operator."""

_MOST_GROUPS = 1 << 20  # calls with more experts are damaged
_SMALL = 1024  # integers that index nothing known are less than this, and less than any size in the call
_SIZES = msgspec.json.Decoder(list[int])
_COLUMNS = tuple[list[str], list[list[Any]], list[Any], list[Any]]  # types, sizes, strides and texts of arguments


class _RecordedCalls(NamedTuple):
    """Calls with the same arguments: their rows in `Trace.host`, the time of each, and their kernels."""

    shape: str
    rows: list[int]
    times_us: list[float]
    kernels: list[str]


def replay_script(trace: Trace, op: str, *, shape: str | None = None, counts: tuple[int, ...] | None = None) -> str:
    """The text of a script that runs one call of a trace again; a TraceError if that cannot be.

    `op` is the name of an operator, or a part of a kernel's name. `shape` has the sizes as `penstock trace diff` prints
    them; None takes the shape with the most time. `counts` are the rows of each expert of a grouped product; None takes
    the sizes of the nearest split, or even counts.
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
    list_dtype = _list_dtype(" ".join(call.kernels))
    where = "" if trace.is_host else "on the GPU "
    facts = [f"It launched {launched[:100]}."] if launched else []
    facts.append(f"Seen {len(call.rows)} times; median time {where}{typical_us:.1f} us.")
    facts += [] if trace.is_host else [f"Kernel: {kernel[:100]}" for kernel in call.kernels[:3]]
    if "TensorList" in _listed(args, "Input type"):
        facts.append(f"Dtypes of tensors in lists are not in a trace: {list_dtype} here, by the kernels' names.")
    if counts is None and (size := _grouped_size(name, _listed(args, "Input Dims"))) is not None:
        counts = _split_counts(trace, row, *size)
        source = "real, from the nearest split of rows" if counts else "even, because the trace does not have them"
        facts.append(f"Rows of each expert: {source} (--counts sets them).")
    arguments = recorded_arguments(name, args, list_dtype=list_dtype, counts=counts)
    device = '"cpu"' if trace.is_host else '"cuda" if torch.cuda.is_available() else "cpu"'
    head = (
        f'"""{name} as a trace has it, with random values. Written by `penstock trace replay`; run it with `python`.\n'
    )
    values = "".join(f"        {argument},\n" for argument in arguments)
    return (
        "\n".join([head, *facts, '"""', "", _SCRIPT.replace("@", device)])
        + f"\n\nrun = bind(\n    {name!r},\n    [\n{values}    ],\n)\n"
        + 'seconds = Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=0.2).median\n'
        + f'print(f"{name}: {{1e6 * seconds:.1f}} us on {{DEVICE}}, {typical_us:.1f} us in the trace")\n'
    )


# ------------------------------------------------------------------------------------------------- finding the call


def _operator_of_kernel(trace: Trace, op: str) -> tuple[str, str]:
    """The operator that spent the most time in kernels of a name, and the longest of these kernels."""
    gpu, host = trace.gpu, trace.host
    is_named = gpu.named(lambda name: op.lower() in name.lower())
    if trace.is_host or not is_named.any():
        names = [trace.names[name] for name in np.unique(host.name_id[host.kind == HostKind.OPERATOR])]
        near = nearest(op, names, limit=3) or [name for name in names if op.lower() in name.lower()][:3]
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
    names = [inner for inner in nested if "::" in inner and ": " not in inner][:6]
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
    calls = [
        _RecordedCalls(
            shape, rows, times_us[rows].tolist(), list(dict.fromkeys(k for row in rows for k in kernels[row]))
        )
        for (shape, *_), rows in by_arguments.items()
    ]
    return sorted(calls, key=lambda call: (-sum(call.times_us), -len(call.rows)))


def _listed(args: Mapping[str, Any], key: str) -> list[Any]:
    """An entry of an event's arguments that is a list; else an empty list."""
    value = args.get(key)
    return value if isinstance(value, list) else []


def _chosen(calls: Sequence[_RecordedCalls], op: str, shape: str | None) -> _RecordedCalls:
    wanted = " ".join((shape or "").replace(",", " ").split())
    for call in calls:
        if shape is None or f" {wanted} " in f" {call.shape} ":  # whole sizes: `8x3` is not in `18x3`
            return call
    present = list(dict.fromkeys(call.shape or "(none)" for call in calls))
    raise TraceError(f"{op} has no such shape in this trace", got=shape, allowed="; ".join(present[:8]))


def _list_dtype(kernels: str) -> str:
    """The dtype that kernels were compiled for, according to their names."""
    if "BFloat16" in kernels or "bf16" in kernels or "OpaqueType<2u>" in kernels:
        return "bfloat16"
    return "float16" if "Half" in kernels else "float32"


def _split_counts(trace: Trace, row: int, groups: int, rows: int) -> tuple[int, ...] | None:
    """Rows of each expert in a product (a row of the host), by the nearest split on its thread into as many parts."""
    host = trace.host
    splits = np.flatnonzero(host.called(SPLIT) & (host.thread == host.thread[row]) & (host.kind == HostKind.OPERATOR))
    for split in splits[np.argsort(np.abs(host.start_us[splits] - host.start_us[row]), kind="stable")].tolist():
        texts = _listed(host.args(split), "Concrete Inputs")
        sizes = texts[1] if len(texts) > 1 and isinstance(texts[1], str) else ""
        counts = decoded_or([], _SIZES, sizes.encode(errors="replace"))
        if len(counts) == groups and 0 < sum(counts) <= rows and min(counts) >= 0:
            return tuple(counts)
    return None


# --------------------------------------------------------------------------------------------------- its arguments


def recorded_arguments(
    name: str, args: Mapping[str, Any], *, list_dtype: str = "float32", counts: Sequence[int] | None = None
) -> list[str]:
    """The arguments of a call as Python expressions, which use `torch` and the script's `tensor`.

    `list_dtype` is that of tensors in lists, which profilers do not record. Raises a TraceError if the trace lacks
    something, or the counts do not fit.
    """
    if _LISTS_OF_INDICES.fullmatch(name):
        raise TraceError(f"{name} cannot be replayed: profilers do not record its list of indices")
    if name.startswith(_BETWEEN_RANKS):
        raise TraceError(f"{name} cannot be replayed: it needs memory of other ranks, which profilers do not record")
    columns = kinds, dims, _, texts = _columns(name, args)
    below = _bounds(name.removeprefix("aten::"), kinds, dims, texts)
    arguments = [
        _expression(f"argument {position} of {name}", *recorded, list_dtype, below.get(position))
        for position, recorded in enumerate(zip(*columns, strict=True))
    ]
    position = GROUPED.get(name, len(kinds))
    if position < len(kinds) and kinds[position] in DTYPES:
        size = _grouped_size(name, dims)
        if size is None:
            raise TraceError(f"{name} is replayed only with a matrix and one offset for each group")
        ends = list(accumulate(_group_rows(*size, counts)))
        arguments[position] = f"torch.tensor({ends}, dtype=torch.int32, device=DEVICE)"
    elif counts is not None:
        raise TraceError(f"{name} takes no rows of experts", fix="leave --counts out")
    return arguments


def _columns(name: str, args: Mapping[str, Any]) -> _COLUMNS:
    """The columns of the arguments; single strides and texts may be damaged."""
    kinds, dims = args.get("Input type"), args.get("Input Dims")
    if not isinstance(kinds, list) or not isinstance(dims, list):
        fix = "record it with shapes (torch.profiler: record_shapes=True)"
        raise TraceError(f"{name} has no shapes in this trace", fix=fix)
    strides = args.get("Input Strides") or [None] * len(kinds)  # without strides tensors are contiguous
    texts = args.get("Concrete Inputs") or [""] * len(kinds)
    columns = kinds, dims, strides, texts
    try:
        msgspec.convert(columns, _COLUMNS)
        is_whole = len({*map(len, columns)}) == 1
    except msgspec.ValidationError:
        is_whole = False
    if not is_whole:
        raise TraceError(f"the arguments of {name} are damaged in this trace: its lists differ in length or type")
    if "TensorList" in kinds and not any(size for kind, size in zip(kinds, dims, strict=True) if kind == "TensorList"):
        raise TraceError(f"{name} cannot be replayed: the sizes in its lists of tensors are not in this trace")
    return columns


def _expression(
    where: str, kind: str, dims: list[Any], stride: Any, text: Any, list_dtype: str, below: int | None
) -> str:
    if kind == "TensorList":
        strides = stride if isinstance(stride, list) and len(stride) == len(dims) else [None] * len(dims)
        tensors = (_tensor(where, list_dtype, *recorded) for recorded in zip(dims, strides, strict=True))
        return f"({''.join(f'{tensor}, ' for tensor in tensors)})"
    if kind in DTYPES:
        is_number = kind in ("double", "long int") and not dims
        return (
            f"torch.tensor(1, dtype=torch.{DTYPES[kind]})"
            if is_number
            else _tensor(where, DTYPES[kind], dims, stride, below)
        )
    if kind == "":
        return "None"  # None, a string, a generator or a device
    if kind not in ("Scalar", "ScalarList"):
        raise TraceError(f"{where} has a type that replay does not know", got=kind)
    if text == "":
        raise TraceError(f"{where} is a number whose value is not in this trace")
    if str(text).lstrip("+-") in ("inf", "nan"):  # as C++ prints them, like `1.`
        return f'float("{text}")'
    try:
        return repr(ast.literal_eval(str(text)))
    except (ValueError, SyntaxError, TypeError) as error:
        raise TraceError(f"{where} has a value that cannot be read", got=str(text)[:80]) from error


def _tensor(where: str, dtype: str, size: Any, stride: Any, below: int | None = None) -> str:
    if not _are_sizes(size):
        raise TraceError(f"{where} is damaged in this trace", got=f"size {size}", allowed="whole numbers")
    if not _are_sizes(stride) or len(stride) != len(size):
        stride = [math.prod(max(1, length) for length in size[dim + 1 :]) for dim in range(len(size))]  # contiguous
    if below is None and ("int" in dtype or dtype == "bool"):
        below = _SMALL
    return f"tensor(torch.{dtype}, {tuple(size)}, {tuple(stride)}{'' if below is None else f', below={below}'})"


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(size, int) and size >= 0 for size in values)


def _bounds(name: str, kinds: list[str], dims: list[Any], texts: list[Any]) -> dict[int, int]:
    """By position, the bound of an integer tensor: the size that it indexes, else less than any size in the call."""
    tensors = {position: dims[position] for position, kind in enumerate(kinds) if kind in DTYPES}
    small = min([_SMALL, *(size for sizes in tensors.values() if _are_sizes(sizes) for size in sizes if size)])
    below = {
        position: min(small, 2) if kinds[position] == "bool" else small
        for position in tensors
        if "int" in DTYPES[kinds[position]] or kinds[position] == "bool"
    }
    index, source, dim = _INDEXES.get(name, (0, 0, 0))
    if _BY_DIM.fullmatch(name) and len(kinds) > 2 and re.fullmatch(r"-?\d{1,3}", str(texts[1])):
        index, source, dim = 2, 0, int(texts[1])
    indexed = tensors.get(source)
    if index and index in below and indexed and _are_sizes(indexed) and -len(indexed) <= dim < len(indexed):
        below[index] = max(1, indexed[dim])
    return below


def _grouped_size(name: str, dims: list[Any]) -> tuple[int, int] | None:
    """Experts and rows of a grouped product; None for other operators or damaged arguments."""
    position = GROUPED.get(name)
    if position is None or len(dims) <= position:
        return None
    left, right, offsets = dims[0], dims[1], dims[position]
    if not all(map(_are_sizes, (left, right, offsets))) or len(left) != 2 or len(offsets) != 1:
        return None
    # Two matrices make a weight gradient: [D, T] @ [T, F], whose rows are the second dim of the first.
    return offsets[0], left[1 if len(right) == 2 else 0]


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


_SCRIPT = '''import sys

import torch
from torch.utils.benchmark import Timer

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
    for overload in sorted(map(packet.__getattr__, packet.overloads()), key=lambda it: len(it._schema.arguments)):
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
'''
