"""The GPU's events of one trace under names that another trace can share: phase and pass, operator, shape.

An event without an operator goes by the name of its kernel's function. Layers are not told apart: what one layer gains
and the next loses is noise to who compares, and shapes tell layers of different kinds apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.trace.events import NONE, Floats, Integers, Trace
from penstock.trace.kinds import function_of
from penstock.trace.operators import calls_made
from penstock.trace.phases import PASSES, find_phases, grouped


class Key(NamedTuple):
    """What events are matched by; `shape` and `span` may be empty."""

    span: str
    operator: str
    shape: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """Events of one trace; a column has a row for each.

    Attributes:
        keys: names, of which several may be equal.
        key_of: index into `keys`.
        start_us: when the event started.
        duration_us: how long it ran.
        step_of: which step it belongs to, from 0 in order of time; NONE if to none.
        steps: how many there are, 0 if the trace marks none.
    """

    keys: Sequence[Key]
    key_of: Integers
    start_us: Floats
    duration_us: Floats
    step_of: Integers
    steps: int


def work_of(trace: Trace) -> Work:
    """Name the events of a trace."""
    phases = find_phases(trace)
    made = calls_made(trace, phases.placement)
    kernel = np.where(made.call_of == NONE, trace.gpu.name_id, NONE)
    groups, key_of = grouped(phases.name_id, phases.pass_id, made.call_of, kernel)
    keys = []
    for phase, pass_, call, name in groups:
        span = f"{phases.names[phase]} {PASSES[pass_]}".strip()
        if call == NONE:
            keys.append(Key(span, function_of(trace.names[name]), ""))
        else:
            keys.append(Key(span, made.calls[call].name, shape_text(made.calls[call].shapes)))
    steps, step_of = np.unique(phases.placement.step, return_inverse=True)
    has_strays = bool(len(steps)) and int(steps[0]) == NONE
    return Work(
        keys=keys,
        key_of=key_of,
        start_us=trace.gpu.start_us,
        duration_us=trace.gpu.duration_us,
        step_of=step_of.reshape(-1).astype(np.int64) - has_strays,
        steps=len(steps) - has_strays,
    )


def shape_text(shapes: Sequence[Any]) -> str:
    """Sizes of tensors: `888x2880 2880x640`, lists in brackets; what has no dims is left out.

    Args:
        shapes: sizes of each argument, a list of sizes for a list of tensors.
    """
    return " ".join(filter(None, map(_size_text, shapes)))


def _size_text(size: Any) -> str:
    if not isinstance(size, Sequence) or isinstance(size, str) or not size:
        return ""
    if isinstance(size[0], Sequence):
        return f"[{shape_text(size)}]"
    return "x".join(map(str, size))
