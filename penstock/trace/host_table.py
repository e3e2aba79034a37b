"""The work of a CPU in a step, as a table: own time by operator and by phase.

The trace was made by `on_host` (penstock/trace/load.py): the own time of an operator is the time in which it is the
innermost operator of its thread. All figures are per step, the mean of the recorded steps.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.trace.analysis import RankAnalysis
from penstock.trace.events import NONE, Floats, Integers
from penstock.trace.phases import PASSES, grouped

COLLECTIVES = ("gloo:", "c10d::")
"""Begins of the names of collectives."""


@dataclass(frozen=True, kw_only=True)
class HostRow:
    """One operator, or one phase in one pass."""

    name: str
    pass_: str  # one of `PASSES`; empty in rows of operators
    calls: float
    own_us: float
    share: float


@dataclass(frozen=True, kw_only=True)
class HostTable:
    """The work of one rank's process."""

    rank: int
    steps: int  # recorded ones; 0 if none is marked, and then figures are of the whole recording
    step_us: float  # from the first operator of a step to its last
    outside_us: float  # time without an operator: Python, and waiting
    operators: tuple[HostRow, ...]
    phases: tuple[HostRow, ...]

    @property
    def outside(self) -> float:
        """Share of the step without an operator."""
        return self.outside_us / self.step_us if self.step_us else 0.0

    @property
    def span(self) -> str:
        """The scope of the figures, in words."""
        if self.steps < 2:
            return "per step, of one recorded step" if self.steps else "of all that was recorded"
        return f"per step, the mean of {self.steps} recorded steps"

    def as_json(self) -> dict[str, Any]:
        """Plain values; rows have the key `pass`, a keyword in Python."""
        table = asdict(self)
        for rows in ("operators", "phases"):
            table[rows] = [{key.rstrip("_"): value for key, value in row.items()} for row in table[rows]]
        return table


def host_table(one: RankAnalysis) -> HostTable:
    """The table of one rank, whose trace `on_host` made."""
    spent, events, phases = one.spent, one.trace.gpu, one.phases
    count, steps = len(events), max(1, len(one.steps))
    step_us = spent.total_us / steps

    def rows(texts: Sequence[str], name_id: Integers, pass_id: Integers) -> tuple[HostRow, ...]:
        groups, group = grouped(name_id, pass_id)
        own_us = (np.bincount(group, events.duration_us, len(groups)) / steps).tolist()
        # An operator that calls others has several stretches of own time but counts once.
        _, first = np.unique(np.stack((group, events.launch)), axis=1, return_index=True)
        calls = (np.bincount(group[first], minlength=len(groups)) / steps).tolist()
        found = [
            HostRow(
                name=texts[name],
                pass_="" if pass_ == NONE else PASSES[pass_],
                calls=calls[place],
                own_us=own_us[place],
                share=own_us[place] / step_us if step_us else 0.0,
            )
            for place, (name, pass_) in enumerate(groups)
        ]
        return tuple(sorted(found, key=lambda row: (-row.own_us, row.name, row.pass_)))

    return HostTable(
        rank=one.rank,
        steps=len(one.steps),
        step_us=step_us,
        outside_us=spent.idle_us / steps,
        operators=rows(events.names, events.name_id, np.full(count, NONE)),
        phases=rows(phases.names, phases.name_id[:count], phases.pass_id[:count]),  # without waiting parts of events
    )


def shared_collectives_us(ranks: Sequence[RankAnalysis]) -> float | None:
    """Time per step of the collectives of all ranks, without waits for late ranks.

    A rank that comes late to a collective spends the least time in it, so the least over the ranks counts. None for one
    rank, or if the ranks have not called equally many.
    """
    times = [_collective_times(one) for one in ranks]
    if len(times) < 2 or len({len(one) for one in times}) > 1:
        return None
    return float(np.stack(times).min(axis=0).sum()) / max(1, len(ranks[0].steps))


def _collective_times(one: RankAnalysis) -> Floats:
    """Own time of each call of a collective, in order."""
    events = one.trace.gpu
    rows = events.named(lambda name: name.startswith(COLLECTIVES))
    calls, call = np.unique(events.launch[rows], return_inverse=True)
    times: Floats = np.bincount(call, events.duration_us[rows], len(calls)).astype(np.float64)
    return times
