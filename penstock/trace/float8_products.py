"""Which function of ours a dense product in 8 bits belongs to, although it was launched outside of it.

penstock.models.float8_linear puts products behind the autograd function whose output they write, and the first one of a
network before it, so no operator with shapes stands around their launches in forward. Their order tells:

    _Float8Linear, product                              the product behind it
    product, _Float8Network, activation, product        that before it, and what is behind it up to the product

On a thread, under one parent, a product that the function before it did not take is the first of the network behind it.
Inside experts, and in backward, what was launched has a function for a parent, and none beside it.
"""

from collections import defaultdict

import numpy as np

from penstock.trace.events import NONE, HostKind, Integers, Trace
from penstock.trace.kernel_names import MATRICES

LINEAR, NETWORK = "_Float8Linear", "_Float8Network"
_ACTIVATION = "swiglu_float8_kernel"


def with_float8_products(trace: Trace, parent: Integers, operator: Integers) -> Integers:
    """The operators of GPU events, where those of dense products in 8 bits are the functions that asked for them.

    Args:
        trace: of one rank.
        parent: for each row of `Trace.host`, the row of what stands around it, or NONE.
        operator: for each row of `Trace.gpu`, the row of the innermost operator, or NONE.
    """
    host, gpu = trace.host, trace.gpu
    asked = np.flatnonzero(gpu.called(MATRICES, _ACTIVATION) & gpu.is_linked)
    functions = np.flatnonzero(host.called(LINEAR, NETWORK) & (host.kind == HostKind.OPERATOR))
    if not len(asked) or not len(functions):
        return operator
    found = operator.copy()
    by_place: dict[tuple[int, int], list[tuple[float, int, int]]] = defaultdict(list)
    for row in functions.tolist():
        by_place[int(host.thread[row]), int(parent[row])].append((float(host.start_us[row]), row, NONE))
    for event in asked.tolist():
        row = int(gpu.launch[event])
        by_place[int(host.thread[row]), int(parent[row])].append((float(host.start_us[row]), row, event))
    for met in by_place.values():
        for event, function in _claims(trace, sorted(met)):
            found[event] = function
    return found


def _claims(trace: Trace, met: list[tuple[float, int, int]]) -> list[tuple[int, int]]:
    """Events and their functions, from both in the order of time: start, row of the host, and event or NONE."""
    claims, before = list[tuple[int, int]](), NONE
    function, is_open = NONE, False
    for _, row, event in met:
        if event == NONE:
            is_network = trace.host.name(row) == NETWORK
            if is_network and before != NONE:
                claims.append((before, row))
            function, is_open, before = row, True, NONE
        elif trace.gpu.name(event) == MATRICES:
            if is_open:
                claims.append((event, function))
            before, is_open = (NONE if is_open else event), False
        elif is_open and trace.host.name(function) == NETWORK:
            claims.append((event, function))
    return claims
