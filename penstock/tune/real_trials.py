"""Trials of `penstock tune` on this machine: `penstock train` in processes of its own, by a clock of ours.

A trial makes the first steps of the run (penstock/tune/trial.py), which all trials share with their rows. It is ended
as soon as its steps surely take longer than the leader's, and after a few times the longest trial so far, which is a
hang.
"""

import json
import math
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.tune.belief import CONFIDENT, TrialCandidate
from penstock.tune.search_loop import Kind, TrialResult
from penstock.tune.trial import Failure, Trial, run_trial

FEWEST = 3
"""Timed steps of a trial before it may be ended."""

HANG, LEAST_LIMIT = 3.0, 90.0
"""A trial hangs after this many times the longest one, and at least these seconds."""


_NOT_FINITE = re.compile(r"of step \d+ is -?(nan|inf)")
"""In the message that ends such a run (penstock/train/diagnose.py)."""


class _Watch:
    """Reads the metrics of a trial while it runs; `times` are those at which a step was first seen."""

    def __init__(self, warm_up: int, most_seconds: float) -> None:
        self._warm_up, self._most = warm_up, most_seconds
        self.times: list[float] = []
        self.has_stopped = False

    def __call__(self, metrics: Path) -> bool:
        """Whether the trial cannot win any more."""
        if not metrics.exists():
            return False
        lines = metrics.read_text(encoding="utf-8").splitlines()
        if len(lines) == len(self.times):
            return False
        self.times += [time.monotonic()] * (len(lines) - len(self.times))
        steps = [json.loads(line)["step_seconds"] for line in lines[self._warm_up :]]
        if len(steps) >= FEWEST and math.isfinite(self._most):
            error = statistics.stdev(steps) / math.sqrt(len(steps))
            self.has_stopped = statistics.fmean(steps) - 2 * CONFIDENT * error > self._most < min(steps)
        return self.has_stopped

    @property
    def observed_seconds(self) -> float:
        """Mean of the timed steps by the clock of this process; 0 if too few were seen apart."""
        seen = self.times[max(0, self._warm_up - 1) :]
        if len(set(seen)) < FEWEST or seen[-1] - seen[0] < 0.5:  # a poll is as long as such steps
            return 0.0
        return (seen[-1] - seen[0]) / (len(seen) - 1)


@dataclass
class RealTrials:
    """`Trials` of a run: `base` has its file, ranks, steps and folder."""

    base: Trial
    first_limit: float  # seconds of the first trial, which may compile
    longest: float = 0.0
    count: int = 0

    def run(self, candidate: TrialCandidate, most_seconds: float) -> TrialResult:
        """Train with the overrides of a candidate."""
        self.count += 1
        limit = self.first_limit if not self.longest else max(LEAST_LIMIT, HANG * self.longest)
        name = f"trial-{self.count}"
        watch = _Watch(self.base.warm_up, most_seconds)
        overrides = (*self.base.overrides, *candidate.overrides)
        found = run_trial(replace(self.base, name=name, overrides=overrides, most_seconds=limit), watch)
        folder = f"{self.base.folder / name}"
        if isinstance(found, Failure):
            return TrialResult(kind=kind_of(found), reason=found.reason, seconds=found.seconds, folder=folder)
        self.longest = max(self.longest, found.seconds)
        return TrialResult(
            step_seconds=found.step_seconds,
            observed_seconds=watch.observed_seconds,
            losses=found.losses,
            peak_memory_bytes=found.peak_memory_bytes,
            seconds=found.seconds,
            was_stopped=watch.has_stopped,
            expert_load=found.expert_load_max_over_mean,
            folder=folder,
        )


def kind_of(failure: Failure) -> Kind:
    """What a failed trial is for the search."""
    if failure.lacks_memory:
        return "out of memory"
    if "not done after" in failure.reason:
        return "hang"
    if _NOT_FINITE.search(failure.reason):
        return "not finite"
    return "refused" if failure.kind == "refused" and not failure.had_begun else "crash"


def result_from(table: Mapping[str, Any]) -> TrialResult:
    """A result of a journal, as `asdict` wrote it."""
    lists = {name: tuple(table[name]) for name in ("step_seconds", "losses")}
    return TrialResult(**{**table, **lists})
