"""Operator calls with their shapes, and the GPU time below them down to single kernels.

A call is an operator with the shapes and types of its arguments, and with its scalar arguments where they change the
work (a causal mask, the stride of a convolution). Thousands of events are a few hundred different calls, so results per
call (penstock.trace.work) are computed once. Calls are compared by their text in the file; one of each is decoded.

`hierarchy` gives all device time as leaves of one tree: step, pipeline action, layer, phase, pass, operator, shapes,
kernel. A level that an event does not have is empty or None: without a launch there is neither step nor operator.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.trace.events import DAMAGE, NONE, Integers, Trace, decoded_or
from penstock.trace.kernel_names import function_of
from penstock.trace.phases import PASSES, Phases, grouped
from penstock.trace.tree import Placement

WITH_ARGUMENTS = re.compile(r"attention|conv(?!ert)|aten::(sum|mean|cat|softmax|_softmax|_log_softmax)")
"""Operators whose scalar arguments change the work."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class OperatorCall:
    """An operator with the shapes of its arguments."""

    name: str
    # Of each argument: a shape, a tuple of shapes for a list of tensors, `()` for other arguments.
    shapes: tuple[Any, ...]
    types: tuple[str, ...]  # of each argument, in the profiler's words (`c10::BFloat16`, `Scalar`, `TensorList`)
    plain: tuple[str, ...] = ()  # scalar arguments as text; empty where they do not change the work
    made_by: "OperatorCall | None" = None  # for the backward of a Python autograd function, the forward call


@dataclass(frozen=True, kw_only=True, eq=False)
class CallTable:
    """The different calls of a trace."""

    calls: tuple[OperatorCall, ...]
    call_of: Integers  # index into `calls` for each row of `Trace.gpu`, or NONE
    row_of: Integers  # row in `Trace.host` of the operator for each row of `Trace.gpu`, or NONE


class _Args(msgspec.Struct, gc=False, frozen=True):
    """The `args` of an operator that are read, still as text."""

    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    plain: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Concrete Inputs")


_DECODER, _NOTHING = msgspec.json.Decoder(_Args), _Args()
_Key = tuple[int, bytes, bytes, bytes, int]


def calls_made(trace: Trace, placement: Placement) -> CallTable:
    """The call behind each GPU event."""
    host, row_of = trace.host, placement.operator
    rows, event = np.unique(row_of, return_inverse=True)  # distinct operators, and the index of each event's among them
    makers = np.full(len(rows), NONE)
    makers[event] = placement.maker
    known: dict[_Key, int] = {}  # key -> index into `calls`
    calls: list[OperatorCall] = []

    def index_of(row: int, maker: int) -> int:
        if row == NONE:
            return NONE
        name = trace.names[host.name_id[row]]
        args = decoded_or(_NOTHING, _DECODER, host.raw[row])
        plain = bytes(args.plain) if WITH_ARGUMENTS.search(name) else b""
        made_by = index_of(maker, NONE) if maker != NONE and "::" not in name and name.endswith("Backward") else NONE
        # Equal text is an equal call; only the first one is decoded.
        key = (int(host.name_id[row]), bytes(args.dims), bytes(args.types), plain, made_by)
        if key not in known:
            known[key] = len(calls)
            calls.append(
                OperatorCall(
                    name=name,
                    shapes=_frozen(_value(key[1])),
                    types=tuple(str(dtype) for dtype in _value(key[2])),
                    plain=tuple(str(argument) for argument in _value(plain)),
                    made_by=None if made_by == NONE else calls[made_by],
                )
            )
        return known[key]

    of_row = np.array([index_of(row, maker) for row, maker in zip(rows.tolist(), makers.tolist(), strict=True)])
    return CallTable(calls=tuple(calls), call_of=of_row.astype(np.int64)[event], row_of=row_of)


def _value(text: bytes) -> list[Any]:
    try:
        value = msgspec.json.decode(text) if text else []
    except DAMAGE:  # such as a number out of range
        return []
    return value if isinstance(value, list) else []


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------------------ hierarchy


class Leaf(NamedTuple):
    """Kernels of one name from calls of one operator on the same shapes, at one place: its name, events and time."""

    step: str
    action: str
    layer: int | None
    phase: str
    pass_: str
    operator: str
    shapes: tuple[Any, ...]
    kernel: str
    events: int
    kernel_us: float
    exposed_us: float


def hierarchy(trace: Trace, phases: Phases) -> list[Leaf]:
    """The leaves, longest first."""
    placement = phases.placement
    calls = calls_made(trace, placement)
    event = phases.event  # columns of the trace by entry of `phases`: an event that waited has two
    groups, group = grouped(
        placement.step[event],
        np.append(trace.host.name_id, NONE)[placement.action][event],  # micro-batches of one name are one action
        phases.layer,
        phases.name_id,
        phases.pass_id,
        calls.call_of[event],
        trace.gpu.name_id[event],
    )
    counts = np.bincount(group, minlength=len(groups)).tolist()
    kernel_us = np.bincount(group, phases.kernel_us, len(groups)).tolist()
    exposed_us = np.bincount(group, phases.exposed_us, len(groups)).tolist()
    leaves = [
        Leaf(
            step="" if step == NONE else trace.host.name(step),
            action="" if action == NONE else trace.names[action],
            layer=None if layer == NONE else layer,
            phase=phases.names[phase],
            pass_=PASSES[pass_],
            operator="" if call == NONE else calls.calls[call].name,
            shapes=() if call == NONE else calls.calls[call].shapes,
            kernel=function_of(trace.names[kernel]),
            events=counts[index],
            kernel_us=kernel_us[index],
            exposed_us=exposed_us[index],
        )
        for index, (step, action, layer, phase, pass_, call, kernel) in enumerate(groups)
    ]
    return sorted(leaves, key=lambda leaf: -leaf.kernel_us)
