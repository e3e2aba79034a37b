"""Rows of each expert for a script that runs a grouped product again: the real ones where a trace has them.

In this order: what the user gave; a list of numbers by which rows were split, right beside the product; the number of
rows that held tokens (by the all-to-all before, or by the configuration), evenly; all rows, evenly. The script says
which it was, because a product of uneven groups takes longer than one of even groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.trace.calls import calls_of
from penstock.trace.events import Trace
from penstock.trace.expert_rows import SPLIT, configured_rows, rows_are_exact, rows_before, split_counts
from penstock.trace.recorded_call import GROUPED, rows_of_groups
from penstock.trace.replay_kernels import RECIPES

_EVEN = "even among experts, which a trace does not have (--counts gives them)"


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Rows of each expert, and where they come from.

    Attributes:
        counts: of each expert, or None if a script shall divide all rows evenly.
        told: a line for the script; empty if the operator has no rows of experts.
    """

    counts: tuple[int, ...] | None
    told: str


@dataclass(frozen=True, kw_only=True)
class _Size:
    """Of a grouped product: experts, rows that there is room for, and whether all of them must be in use."""

    groups: int
    rows: int
    is_full: bool


def loads_of(rank: int, trace: Trace, row: int, given: tuple[int, ...] | None) -> Loads:
    """Rows of each expert of one call.

    Args:
        rank: of the trace.
        trace: with the call.
        row: of the operator in `Trace.host`; of the forward of an autograd function.
        given: by the user, or None.
    """
    args = trace.host.args(row)
    size = _size(trace.host.name(row), args)
    if given is not None or size is None:
        return Loads(counts=given, told="")
    found = split_counts(trace, row, size.groups, size.rows)
    if found is not None and (sum(found) == size.rows or not size.is_full):
        return Loads(counts=found, told=f"Rows of each expert: real ones, of the {SPLIT} nearest to it.")
    if size.is_full:
        return Loads(counts=None, told=f"Rows: {_EVEN}.")
    used, source = _used(rank, trace, row)
    if used is None or not 0 < used <= size.rows:
        return Loads(counts=None, told=f"Rows: all {size.rows:,} that there was room for, {_EVEN}.")
    counts = tuple(rows_of_groups(used, size.groups, None))
    return Loads(counts=counts, told=f"Rows: {used:,} of {size.rows:,} held tokens, by {source}; {_EVEN}.")


def _used(rank: int, trace: Trace, row: int) -> tuple[int | None, str]:
    """Rows that held tokens, and what says so; None if nothing does, or all that there was room for held one."""
    if rows_are_exact(trace.header):
        return None, ""
    came = rows_before(trace, calls_of({rank: trace}), row)
    if came is not None:
        return came, "the all-to-all before it"
    configured = configured_rows(trace.header)
    return None if configured is None else round(configured), "the configuration (a rank's mean)"


def _size(name: str, args: Mapping[str, Any]) -> _Size | None:
    """What a call's shapes say; None if it has no rows of experts, or does not say how many."""
    dims = args.get("Input Dims")
    if not isinstance(dims, list):
        return None
    if name in GROUPED:
        left, right, offsets = (_shape(dims, place) for place in (0, 1, GROUPED[name]))
        if len(left) != 2 or len(offsets) != 1:
            return None
        return _Size(groups=offsets[0], rows=left[1 if len(right) == 2 else 0], is_full=False)
    recipe = RECIPES.get(name)
    if recipe is None or recipe.counts is None:
        return None
    counted = _shape(dims, recipe.counts)
    sources = [shape for place in recipe.rows if (shape := _shape(dims, place))]
    if len(counted) != 1 or not sources:
        return None
    is_order = "order" in recipe.call
    if is_order and len(sources[-1]) != 2:
        return None
    rows = sources[-1][0] * sources[-1][1] if is_order else sources[-1][0]
    return _Size(groups=counted[0], rows=rows, is_full=is_order)


def _shape(dims: Sequence[Any], place: int) -> tuple[int, ...]:
    """Of a tensor argument; empty if it is none."""
    shape = dims[place] if place < len(dims) else None
    is_shape = isinstance(shape, list) and all(isinstance(one, int) and one >= 0 for one in shape)
    return tuple(shape) if is_shape and shape else ()
