"""Trials of `penstock tune` on this machine: `penstock train` in processes of its own, by a clock of ours.

A trial makes the first steps of the run (penstock/tune/trial.py), which all trials share with their rows; where a whole
step is too long, each of them has fewer rows (`ShortStep`). A trial is ended

    as a result     as soon as its steps surely take longer than the leader's, or their time is surely known, and at the
                    end of the budget
    as a hang       if the next step takes a few times as long as expected
    as too slow     if the budget ends before its second step
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

from penstock.base.numbers import counted
from penstock.train.run_folder import free_name
from penstock.tune.belief import CONFIDENT, TrialCandidate
from penstock.tune.search_loop import Kind, TrialLimits, TrialResult, median_error_of
from penstock.tune.trial import Failure, Trial, run_trial

FEWEST, SURE = 3, 5  # timed steps of a trial before it may be ended because it lost, and because its time is known

HANG, LEAST_LIMIT = 3.0, 90.0
"""A step hangs if it takes these seconds and this many times the expected or the longest time of a step."""

FIRST_LIMIT = 300.0  # the same of the start of the first trial, which may compile all kernels

OVERRUN = 1.25
"""A trial may take this many times the rest of the budget, because the loop begins none that would not end in it."""

_NOT_FINITE = re.compile(r"of step \d+ is -?(nan|inf)")
"""In the message that ends such a run (penstock/train/diagnose.py)."""


class _Watch:
    """Reads the metrics of a trial while it runs; `times` are those at which a step was first seen.

    `start` and `least` are seconds that the start and any step may take in any case.
    """

    def __init__(self, warm_up: int, limits: TrialLimits, start: float, least: float) -> None:
        self._warm_up, self._limits, self._least = warm_up, limits, least
        self._begin = self._seen = time.monotonic()
        self._longest = limits.expected_seconds  # of a step
        self._patience = max(start, least) + HANG * self._longest
        self.times: list[float] = []
        self.has_stopped = False
        self._is_known = False
        self.kind: Kind = "ran"

    def __call__(self, metrics: Path) -> str | None:
        """Whether the trial has lost, hangs or is too slow."""
        now, lines = time.monotonic(), metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        if len(lines) > len(self.times):
            gap, self._seen = now - self._seen, now
            self._longest = max(self._longest, gap) if self.times else self._longest  # the first step compiles
            self._patience = self._least + HANG * self._longest
            self.times += [now] * (len(lines) - len(self.times))
            steps = [json.loads(line)["step_seconds"] for line in lines]
            self.has_stopped = self._has_lost(steps) or len(steps) >= self._limits.most_steps
            timed = steps[self._warm_up :]
            self._is_known = len(timed) >= SURE and median_error_of(timed) < self._limits.sure_error
        elif now - self._seen > self._patience:
            made = counted(len(self.times), "step")
            self.kind = "hang"
            return f"no further step for {now - self._seen:.0f} s, after {made}"
        if now - self._begin > OVERRUN * self._limits.left_seconds and not self.has_stopped:
            if len(self.times) < 2:
                late = now - self._seen > self._least + HANG * self._limits.expected_seconds
                self.kind = "hang" if late else "too slow"
                return f"{counted(len(self.times), 'step')} in {now - self._begin:.0f} s, when the budget ended"
            self.has_stopped = True
        return "" if self.has_stopped or self._is_known else None

    def _has_lost(self, steps: list[float]) -> bool:
        """Whether the steps, by the trial's own clock, are surely longer than they may be."""
        limit, timed = self._limits.most_seconds, steps[self._warm_up :]
        if not math.isfinite(limit):
            return False
        if len(timed) < FEWEST:  # one that is far behind does not finish its warm-up
            return len(steps) > FEWEST and min(steps[1:]) > 2 * limit
        error = statistics.stdev(timed) / math.sqrt(len(timed))
        return statistics.fmean(timed) - 2 * CONFIDENT * error > limit < min(timed)

    @property
    def observed_seconds(self) -> float:
        """Mean of the timed steps by the clock of this process; 0 if too few were seen apart."""
        seen = self.times[max(0, self._warm_up - 1) :]
        if len(set(seen)) < FEWEST or seen[-1] - seen[0] < 0.5:  # a poll is as long as such steps
            return 0.0
        return (seen[-1] - seen[0]) / (len(seen) - 1)

    @property
    def start_seconds(self) -> float:
        """Until the first step was done; 0 if none was."""
        return self.times[0] - self._begin if self.times else 0.0


@dataclass
class RealTrials:
    """`Trials` of a run: `base` has its file, ranks, steps and folder."""

    base: Trial
    first_limit: float = FIRST_LIMIT
    least_limit: float = LEAST_LIMIT
    longest_start: float = 0.0
    count: int = 0

    def run(self, candidate: TrialCandidate, limits: TrialLimits) -> TrialResult:
        self.count += 1
        name = free_name(self.base.folder, f"trial-{self.count}")  # a killed search leaves the folder of a trial
        start = HANG * self.longest_start or self.first_limit
        watch = _Watch(self.base.warm_up, limits, start, self.least_limit)
        outcome = run_trial(replace(self.base, name=name, overrides=self.overrides_of(candidate)), watch)
        folder = f"{self.base.folder / name}"
        if isinstance(outcome, Failure):
            kind = kind_of(outcome) if watch.kind == "ran" else watch.kind
            return TrialResult(kind=kind, reason=outcome.reason, seconds=outcome.seconds, folder=folder)
        self.longest_start = max(self.longest_start, watch.start_seconds)
        return TrialResult(
            step_seconds=outcome.step_seconds,
            observed_seconds=watch.observed_seconds,
            losses=outcome.losses,
            peak_memory_bytes=outcome.peak_memory_bytes,
            seconds=outcome.seconds,
            was_stopped=watch.has_stopped,
            expert_load=outcome.expert_load_max_over_mean,
            folder=folder,
        )

    def overrides_of(self, candidate: TrialCandidate) -> tuple[str, ...]:
        """Of a trial of a candidate; the rows of a short step come last."""
        short = () if candidate.short is None else (f"training.global_batch={candidate.short.rows}",)
        return (*self.base.overrides, *candidate.overrides, *short)


def kind_of(failure: Failure) -> Kind:
    """What a trial that failed by itself is for the search."""
    if failure.lacks_memory:
        return "out of memory"
    if _NOT_FINITE.search(failure.reason):
        return "not finite"
    return "refused" if failure.kind == "refused" and not failure.had_begun else "crash"


def result_from(table: Mapping[str, Any]) -> TrialResult:
    """A result of a journal, as `asdict` wrote it."""
    lists: dict[str, Any] = {name: tuple(table[name]) for name in ("step_seconds", "losses")}
    return TrialResult(**{**table, **lists})
