"""The arguments of an operator call, as the profiler recorded them, in a form from which a script can be written.

torch.profiler records four lists: dims, strides and dtypes of every argument, and scalar values as text
(`record_shapes=True`). The missing information limits the replay:

- Tensor values are missing. Integers that index something are made in range of its size, and group offsets come from
  given counts, or are even.
- Tensors in lists have sizes but no dtype. A list of optional tensors (the indices of `x[i, j]`) is missing entirely.
- None, a string, a generator and a device look alike; all become None, and the script takes the operator's default.
- A Python number passed for a tensor is a tensor without dims whose value is lost; it becomes 1.
"""

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from penstock.base.errors import TraceError

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
    **dict.fromkeys(("short", "short int"), "int16"),
    "int": "int32",
    **dict.fromkeys(("long", "long int"), "int64"),
    **dict.fromkeys(("unsigned short", "unsigned short int"), "uint16"),
    "unsigned int": "uint32",
    **dict.fromkeys(("unsigned long", "unsigned long int"), "uint64"),
}
"""PyTorch's dtype names for the C++ types in traces."""

INTEGERS = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"})
"""Dtypes whose values are generated within a range."""

_LIST_OF_INDICES = frozenset(
    {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
)

_BETWEEN_RANKS = ("symm_mem::", "deep_ep::", "nvshmem::")
"""Beginnings of operators that communicate with other ranks without a collective."""

_BY_DIM = (
    "index_select gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_ "
    "index_copy index_copy_ index_fill index_fill_ index_reduce index_reduce_"
)
_INDEXES: dict[str, tuple[int, int, int]] = {
    "aten::embedding": (1, 0, 0),
    "aten::cross_entropy_loss": (1, 0, 1),
    "aten::nll_loss": (1, 0, 1),
    "aten::nll_loss_forward": (1, 0, 1),
    "aten::nll_loss_backward": (2, 1, 1),
}
"""Position of the index, of the indexed tensor, and the indexed dim."""

GROUPED = {"aten::_grouped_mm": 2, "aten::_scaled_grouped_mm": 4}
"""Position of the group offsets."""

_MOST_GROUPS = 1 << 20
"""Calls with more experts are damaged."""

_NUMBERS = ("double", "long int")
"""Types of the tensors without dims that Python numbers become."""

_SMALL = 1024
"""Other integers are less than this, and less than any size in the call."""


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


def recorded_arguments(
    name: str, args: Mapping[str, Any], *, list_dtype: str = "float32", counts: Sequence[int] | None = None
) -> tuple[Argument, ...]:
    """The arguments of an operator call.

    `list_dtype` is that of tensors in lists, which profilers do not record. `counts` are the rows of each expert for
    grouped products; None makes them even.

    Raises:
        TraceError: the trace lacks something, or the counts do not fit.
    """
    if name in _LIST_OF_INDICES:
        raise TraceError(f"{name} cannot be replayed: profilers do not record its list of indices")
    if name.startswith(_BETWEEN_RANKS):
        raise TraceError(f"{name} cannot be replayed: it needs memory of other ranks, which profilers do not record")
    found = [
        _argument(f"argument {position} of {name}", recorded, list_dtype)
        for position, recorded in enumerate(_columns(name, args))
    ]
    lists = [one for one in found if isinstance(one, tuple)]
    if lists and not any(lists):  # `TensorList` without sizes
        raise TraceError(f"{name} cannot be replayed: the sizes in its lists of tensors are not in this trace")
    return tuple(_with_offsets(name, _in_range(name, found), counts))


def _columns(name: str, args: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Type, dims, strides and text of each argument."""
    if not isinstance(args.get("Input type"), list) or not isinstance(args.get("Input Dims"), list):
        raise TraceError(
            f"{name} has no shapes in this trace", fix="record it with shapes (torch.profiler: record_shapes=True)"
        )
    kinds, dims = args["Input type"], args["Input Dims"]
    strides = args.get("Input Strides") or [None] * len(kinds)  # without strides tensors are contiguous
    texts = args.get("Concrete Inputs") or [""] * len(kinds)
    lists = all(isinstance(one, list) and len(one) == len(kinds) for one in (dims, strides, texts))
    if not lists or not all(isinstance(one, str) for one in kinds) or not all(isinstance(one, list) for one in dims):
        raise TraceError(f"the arguments of {name} are damaged in this trace: its lists differ in length or type")
    return list(zip(kinds, dims, strides, texts, strict=True))


def _argument(where: str, recorded: tuple[Any, ...], list_dtype: str) -> Argument:
    kind, dims, stride, text = recorded
    if kind == "TensorList":
        strides = stride if isinstance(stride, list) and len(stride) == len(dims) else [None] * len(dims)
        return tuple(_tensor(where, list_dtype, one, at) for one, at in zip(dims, strides, strict=True))
    if kind in DTYPES:
        tensor = _tensor(where, DTYPES[kind], dims, stride)
        return replace(tensor, is_number=kind in _NUMBERS and not tensor.size)
    if kind == "":
        return None  # None, a string, a generator or a device
    if kind in ("Scalar", "ScalarList"):
        return _plain(where, text)
    raise TraceError(f"{where} has a type that replay does not know", got=kind)


def _tensor(where: str, dtype: str, size: Any, stride: Any) -> TensorArgument:
    if not _are_sizes(size):
        raise TraceError(f"{where} is damaged in this trace", got=f"size {size}", allowed="whole numbers")
    if not _are_sizes(stride) or len(stride) != len(size):
        stride = [math.prod(max(1, one) for one in size[dim + 1 :]) for dim in range(len(size))]  # contiguous
    below = _SMALL if dtype in INTEGERS else None
    return TensorArgument(dtype=dtype, size=tuple(size), stride=tuple(stride), below=below)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(one, int) and one >= 0 for one in values)


def _plain(where: str, text: Any) -> Argument:
    """A number, a flag or a list of them; `1.` and `-inf` are as C++ prints them."""
    if text == "":
        raise TraceError(f"{where} is a number whose value is not in this trace")
    try:
        return float(text) if str(text).lstrip("+-") in ("inf", "nan") else ast.literal_eval(str(text))
    except (ValueError, SyntaxError, TypeError) as error:
        raise TraceError(f"{where} has a value that cannot be read", got=str(text)[:80]) from error


def _in_range(name: str, found: Sequence[Argument]) -> list[Argument]:
    """Arguments with bounds: integers that index another argument fit its size, others fit any size."""
    sizes = [size for one in found if isinstance(one, TensorArgument) for size in one.size if size]
    small = min([_SMALL, *sizes])  # a bound that is in range of any size in the call
    bounded = [_below(one, small) for one in found]
    place = _INDEXES.get(name)
    if name.removeprefix("aten::") in _BY_DIM.split() and len(found) > 2 and isinstance(found[1], int):
        place = (2, 0, found[1])  # (source, dim, index, ...)
    if place is None or place[0] >= len(found):
        return bounded
    index, source, dim = bounded[place[0]], bounded[place[1]], place[2]
    if isinstance(index, TensorArgument) and isinstance(source, TensorArgument):
        below = source.size[dim] if -len(source.size) <= dim < len(source.size) else small
        dtype = index.dtype if index.dtype in INTEGERS else "int64"
        bounded[place[0]] = replace(index, dtype=dtype, below=max(1, below))
    return bounded


def _below(one: Argument, bound: int) -> Argument:
    """An argument whose integers stay below a bound; flags are 0 or 1."""
    if not isinstance(one, TensorArgument) or one.below is None:
        return one
    return replace(one, below=min(bound, 2) if one.dtype == "bool" else bound)


def grouped_size(name: str, args: Mapping[str, Any]) -> tuple[int, int] | None:
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
    left, right = found[0], found[1]
    if not isinstance(left, TensorArgument) or len(left.size) != 2 or len(offsets.size) != 1:
        raise TraceError(f"{name} is replayed only with a matrix and one offset for each group")
    is_weight_gradient = isinstance(right, TensorArgument) and len(right.size) == 2
    values = tuple(accumulate(_group_rows(left.size[1 if is_weight_gradient else 0], offsets.size[0], counts)))
    return [*found[:position], replace(offsets, dtype="int32", values=values), *found[position + 1 :]]


def _group_rows(rows: int, groups: int, counts: Sequence[int] | None) -> list[int]:
    """Rows of each expert: the given counts, or `rows` divided as evenly as possible.

    Raises:
        TraceError: the counts are for another number of experts or for more rows, or the number of experts is absurd.
    """
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
