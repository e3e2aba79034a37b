"""Layers in a list of kernel names: a stretch that repeats as often as the model has equal layers.

    embed  0  1 1 1 1  2 2 2 2  3 3 3 3  loss   3' 3' 3'  2' 2' 2'  1' 1' 1'  0'  embed
           `dense      `--- three times ---'    `---- three times ----'

A period of p names repeats where name i is name i + p, all along. Kernels at the ends of the stretch may go on with the
pattern by chance (the last norm looks like the first one of a layer), so where a layer begins is settled by what
kernels do: a layer begins with a norm; backward it ends with that norm's gradients and what adds these up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.trace.events import Integers
from penstock.trace.kernel_names import Part, general, is_gradient, telling

SHORTEST = 6
"""Kernels of a layer, at least."""

LONGEST = 4_096
"""Kernels of a layer that are looked for."""

_OF_A_LAYER = frozenset({Part.ATTENTION, Part.ROUTE, Part.GROUPED, Part.GROUPED_WEIGHTS})
_AFTER_A_NORM = frozenset({Part.ELEMENTWISE, Part.REDUCTION, Part.COPY, Part.LOOK_UP})


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of the list.

    Attributes:
        begin: of its first name.
        end: behind its last name.
        layer: its number, or None if it is in no layer.
        is_backward: gradients are computed.
    """

    begin: int
    end: int
    layer: int | None
    is_backward: bool


@dataclass(frozen=True)
class _Stretch:
    """Names from `begin` on that repeat every `period`; `slack` more go on with the pattern."""

    begin: int
    period: int
    slack: int


def layers_of(names: Sequence[str], *, layers: int, dense_layers: int) -> list[Region]:
    """Layers of a pass, or of both passes, that these kernels are; empty if they do not repeat so.

    Args:
        names: of kernels, in the order of time.
        layers: of the model.
        dense_layers: the first ones, which are not like the others.
    """
    times = layers - dense_layers
    if times < 2:
        return []
    codes = {name: number for number, name in enumerate(dict.fromkeys(names))}
    ids = np.array([codes[name] for name in names], dtype=np.int64)
    found = [one for one in _stretches(ids, times) if _is_layer(names[one.begin : one.begin + one.period])]
    passes = _passes(found, times, names)
    regions: list[Region] = []
    for stretch, is_backward in passes:
        begin = _backward_begin(stretch, names) if is_backward else _forward_begin(stretch, names)
        numbers = range(layers - 1, dense_layers - 1, -1) if is_backward else range(dense_layers, layers)
        for place, number in enumerate(numbers):
            low = begin + place * stretch.period
            regions.append(Region(begin=low, end=low + stretch.period, layer=number, is_backward=is_backward))
    return regions + _around(regions, names, has_one=dense_layers == 1)


def _stretches(ids: Integers, times: int) -> list[_Stretch]:
    """Where a period repeats just so often, the longest stretch first; of those that overlap, the longest."""
    found = []
    for period in range(SHORTEST, min(len(ids) // times, LONGEST) + 1):
        same = np.concatenate([[False], ids[:-period] == ids[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
        for begin, end in edges[edges[:, 1] - edges[:, 0] >= period * (times - 1)].tolist():
            slack = end - begin - period * (times - 1)
            if slack < period:
                found.append(_Stretch(begin, period, slack))
    found.sort(key=lambda one: (-one.period * times - one.slack, one.begin))
    kept: list[_Stretch] = []
    for one in found:
        high = one.begin + one.period * times + one.slack
        if all(high <= two.begin or two.begin + two.period * times + two.slack <= one.begin for two in kept):
            kept.append(one)
    return kept


def _is_layer(names: Sequence[str]) -> bool:
    """Whether there is something among these that layers have, and more than one kind of kernel."""
    return len(set(names)) > 2 and any(telling(name) in _OF_A_LAYER for name in names)


def _passes(found: Sequence[_Stretch], times: int, names: Sequence[str]) -> list[tuple[_Stretch, bool]]:
    """The longest two in the order of time are forward and backward; one alone is what its names say."""
    two = sorted(found[:2], key=lambda one: one.begin)
    if len(two) == 2:
        return [(two[0], False), (two[1], True)]
    return [(one, _is_backward(names[one.begin : one.begin + one.period])) for one in two]


def _is_backward(names: Sequence[str]) -> bool:
    return any(is_gradient(name) or telling(name) is Part.GROUPED_WEIGHTS for name in names)


def _forward_begin(stretch: _Stretch, names: Sequence[str]) -> int:
    """At the first norm that may be the first kernel of a layer."""
    could = range(stretch.begin, stretch.begin + stretch.slack + 1)
    return next((at for at in could if telling(names[at]) is Part.NORM), stretch.begin)


def _backward_begin(stretch: _Stretch, names: Sequence[str]) -> int:
    """Behind the last norm that may be the one before, and behind what adds up its gradients."""
    last = stretch.begin + stretch.slack
    norms = [at for at in range(stretch.begin, last) if telling(names[at]) is Part.NORM]
    return _added_up(norms[-1] + 1 if norms else stretch.begin, names, last)


def _around(regions: Sequence[Region], names: Sequence[str], *, has_one: bool) -> list[Region]:
    """What stands before all layers forward and behind them backward.

    If there is one layer more (`has_one`), it lies between the norms there.
    """
    found = []
    forward = [one.begin for one in regions if not one.is_backward]
    if forward:
        first = min(forward)
        norms = [at for at in range(first) if telling(names[at]) is Part.NORM] if has_one else []
        cut = norms[0] if norms else first
        found.append(Region(begin=0, end=cut, layer=None, is_backward=False))
        found.append(Region(begin=cut, end=first, layer=0, is_backward=False))
    backward = [one.end for one in regions if one.is_backward]
    if backward:
        last = max(backward)
        norms = [at for at in range(last, len(names)) if telling(names[at]) is Part.NORM] if has_one else []
        cut = norms[-1] + 1 + _behind_norm(regions, names) if norms else last
        found.append(Region(begin=last, end=cut, layer=0, is_backward=True))
        found.append(Region(begin=cut, end=len(names), layer=None, is_backward=True))
    return [one for one in found if one.begin < one.end]


def _behind_norm(regions: Sequence[Region], names: Sequence[str]) -> int:
    """How many kernels the other layers have behind the gradients of their first norm."""
    ends = [(one.begin, one.end) for one in regions if one.is_backward]
    begin, end = ends[-1]
    return end - 1 - max((at for at in range(begin, end) if telling(names[at]) is Part.NORM), default=end - 1)


def _added_up(begin: int, names: Sequence[str], end: int) -> int:
    """Behind what adds gradients up, from a place on."""
    at = begin
    while at < end and telling(names[at]) is None and general(names[at]) in _AFTER_A_NORM:
        at += 1
    return at
