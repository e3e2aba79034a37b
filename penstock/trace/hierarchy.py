"""All time on the device as leaves of one tree: step, pipeline action, layer, phase, pass, operator, shapes, kernel.

Flames, tables of any depth and comparisons add up the same leaves, so their sums agree. A level that an event does not
have is empty or None: an event without a launch in the trace has neither step nor operator.
"""

from typing import Any, NamedTuple

import numpy as np

from penstock.trace.events import NONE, Integers, Trace
from penstock.trace.kinds import function_of
from penstock.trace.operators import CallTable, calls_made
from penstock.trace.phases import PASSES, Phases, grouped


class Leaf(NamedTuple):
    """Kernels of one name from calls of one operator on the same shapes, at one place.

    Attributes:
        step: name of the step, or empty.
        action: of the pipeline, or empty.
        layer: its number, or None.
        phase: as in `penstock.trace.phases`.
        pass_: the same.
        operator: the innermost one, or empty.
        shapes: of its arguments.
        kernel: name of its function.
        events: how many.
        kernel_us: their durations added.
        exposed_us: busy time of the device that is charged to them.
    """

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


def hierarchy(trace: Trace, phases: Phases, calls: CallTable | None = None) -> list[Leaf]:
    """The leaves, longest first.

    Args:
        trace: of one rank.
        phases: of that trace.
        calls: of that trace, if they are there already.
    """
    placement = phases.placement
    calls = calls_made(trace, placement) if calls is None else calls
    event = phases.event
    groups, group = grouped(
        placement.step[event],
        _by_name(trace, placement.action)[event],
        phases.layer,
        phases.name_id * len(PASSES) + phases.pass_id,
        calls.call_of[event],
        trace.gpu.name_id[event],
    )
    counts = np.bincount(group, minlength=len(groups)).tolist()
    kernel_us = np.bincount(group, phases.kernel_us, len(groups)).tolist()
    exposed_us = np.bincount(group, phases.exposed_us, len(groups)).tolist()
    leaves = []
    for one, (step, action, layer, named, call, kernel) in enumerate(groups):
        leaves.append(
            Leaf(
                step="" if step == NONE else trace.host.name(step),
                action="" if action == NONE else trace.names[action],
                layer=None if layer == NONE else layer,
                phase=phases.names[named // len(PASSES)],
                pass_=PASSES[named % len(PASSES)],
                operator="" if call == NONE else calls.calls[call].name,
                shapes=() if call == NONE else calls.calls[call].shapes,
                kernel=function_of(trace.names[kernel]),
                events=counts[one],
                kernel_us=kernel_us[one],
                exposed_us=exposed_us[one],
            )
        )
    return sorted(leaves, key=lambda leaf: -leaf.kernel_us)


def _by_name(trace: Trace, rows: Integers) -> Integers:
    """Rows of the host as indices of their names."""
    return np.where(rows == NONE, NONE, np.append(trace.host.name_id, NONE)[rows])
