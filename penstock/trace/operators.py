"""Operators with their shapes: which different calls a trace has, and which of them each GPU event belongs to.

A call is an operator with the shapes and types of its arguments, and with the plain arguments where they change the
work (a causal mask, the stride of a convolution). Thousands of events are a few hundred different calls, so what is
computed of a call (penstock.trace.roofline) is computed once. Calls are told apart by their text in the file; only one
of each is decoded.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from penstock.trace.events import NONE, Integers, Trace
from penstock.trace.tree import Placement

WITH_ARGUMENTS = re.compile(r"attention|conv(?!ert)|aten::(sum|mean|cat|softmax|_softmax|_log_softmax)")
"""Operators whose plain arguments change the work."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Call:
    """An operator on shapes.

    Attributes:
        name: of the operator.
        shapes: of each argument: a shape, a tuple of shapes for a list of tensors, `()` for what is no tensor.
        types: of each argument, as the profiler calls them (`c10::BFloat16`, `Scalar`, `TensorList`).
        plain: plain arguments as text, empty where they do not change the work.
        made_by: in backward, the call of the operator whose gradients it computes, if it is of Python.
    """

    name: str
    shapes: tuple[Any, ...]
    types: tuple[str, ...]
    plain: tuple[str, ...] = ()
    made_by: "Call | None" = None


@dataclass(frozen=True, kw_only=True, eq=False)
class CallTable:
    """The different calls of a trace.

    Attributes:
        calls: each once.
        call_of: index into `calls` for each row of `Trace.gpu`, or NONE.
        row_of: row in `Trace.host` of the operator, for each row of `Trace.gpu`, or NONE.
    """

    calls: tuple[Call, ...]
    call_of: Integers
    row_of: Integers


class _Args(msgspec.Struct, gc=False, frozen=True):
    """What is read of the `args` of an operator, still as text."""

    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    plain: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Concrete Inputs")


_DECODER = msgspec.json.Decoder(_Args)
_Key = tuple[int, bytes, bytes, bytes, int]


def calls_made(trace: Trace, placement: Placement) -> CallTable:
    """The call behind each GPU event."""
    host, row_of = trace.host, placement.operator
    rows, event = np.unique(row_of, return_inverse=True)
    makers = np.full(len(rows), NONE)
    makers[event.reshape(-1)] = placement.maker
    known: dict[_Key, int] = {}
    calls: list[Call] = []

    def index_of(row: int, maker: int) -> int:
        if row == NONE:
            return NONE
        name = trace.names[host.name_id[row]]
        args = _args_of(host.raw[row])
        plain = bytes(args.plain) if WITH_ARGUMENTS.search(name) else b""
        made_by = index_of(maker, NONE) if maker != NONE and "::" not in name and name.endswith("Backward") else NONE
        key = (int(host.name_id[row]), bytes(args.dims), bytes(args.types), plain, made_by)
        if key not in known:
            known[key] = len(calls)
            calls.append(
                Call(
                    name=name,
                    shapes=_frozen(_value(key[1])),
                    types=tuple(str(one) for one in _value(key[2])),
                    plain=tuple(str(one) for one in _value(plain)),
                    made_by=None if made_by == NONE else calls[made_by],
                )
            )
        return known[key]

    of_row = np.array([index_of(row, maker) for row, maker in zip(rows.tolist(), makers.tolist(), strict=True)])
    return CallTable(calls=tuple(calls), call_of=of_row.astype(np.int64)[event.reshape(-1)], row_of=row_of)


def _args_of(text: Any) -> _Args:
    try:
        return _DECODER.decode(text) if text else _Args()
    except msgspec.DecodeError:
        return _Args()


def _value(text: bytes) -> list[Any]:
    """A list from its text; empty if it is none."""
    if not text:
        return []
    found = msgspec.json.decode(text)
    return found if isinstance(found, list) else []


def _frozen(value: Any) -> Any:
    """Lists as tuples."""
    return tuple(_frozen(one) for one in value) if isinstance(value, list) else value
