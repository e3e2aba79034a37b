"""Trains one configuration for some steps in fresh processes, and reads its metrics.

A trial is `penstock train` as a user would type it: every rank is a new process (penstock/tune/trial_ranks.py), so
trials share nothing but caches on disk. The ranks print to a file beside the folder of the run; if the run fails, one
line of that file is the reason.

A trial makes the first steps of the full run: its warm-up as far as they reach, then the peak rate without decay, and
no evaluation or checkpoint. It ends with the process that asked for it, and after `most_seconds` in any case, because
ranks that wait for each other would hold their GPUs for half an hour (`host.timeout_minutes`).

`RealTrials` are those of `penstock tune`, by a clock of ours. Where a whole step is too long, each of a trial's steps
has fewer rows (`ShortStep`). Such a trial is ended

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.base.numbers import counted
from penstock.config.run import Run
from penstock.config.schema import as_toml
from penstock.train.run_folder import RunFolder, free_name
from penstock.tune.belief import CONFIDENT, TrialCandidate
from penstock.tune.search_loop import Kind, TrialLimits, TrialResult, median_error_of
from penstock.tune.trial_ranks import HERE, StartRanks, run_ranks

MOST_LETTERS = 300  # maximum length of a reason


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A short run."""

    name: str  # of the run and its folder
    target: str  # preset, TOML file or folder of a run
    overrides: tuple[str, ...]  # including those of `first_steps`
    processes: int  # ranks, all on this machine
    warm_up: int  # first steps, which are not timed
    folder: Path  # parent of the run's folder and of its log
    most_seconds: float = 0.0  # time limit; 0 for none
    starter: StartRanks = HERE  # of the ranks


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Results of a trial; times and rates are of the steps after warm-up."""

    tokens_per_second_per_device: float
    step_seconds: tuple[float, ...]
    step_seconds_median: float
    step_seconds_p99: float
    step_seconds_highest: float
    model_flops_utilization: float | None  # median; None if the device's peak is unknown
    power_watts: float | None  # median of the first rank's GPU; None without readings
    peak_memory_bytes: int  # maximum over ranks, warm-up included
    expert_load_max_over_mean: float | None  # median; None for a dense model
    repeated_steps: int  # steps that ran twice because rows exceeded their buffers (dispatch.row_capacity_factor)
    losses: tuple[float, ...]  # of all steps, warm-up included
    seconds: float  # duration of the trial, start and end of the processes included

    @property
    def jitter(self) -> float:
        """The 99th percentile of the step time over its median."""
        return self.step_seconds_p99 / self.step_seconds_median

    def flops_per_second(self, flops_per_token: float) -> float:
        """FLOP/s of each device for a model with this number of FLOPs per token."""
        return self.tokens_per_second_per_device * flops_per_token

    def as_json(self, flops_per_token: float) -> dict[str, Any]:
        """All fields, the jitter and the FLOP/s."""
        rate = self.flops_per_second(flops_per_token)
        return asdict(self) | {"jitter": self.jitter, "flops_per_second_per_device": rate}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A trial that did not complete."""

    kind: Literal["refused", "failed"]  # `refused` if the run ended with an error message for the user
    reason: str
    seconds: float = 0.0
    had_begun: bool = True  # the run folder existed, so all checks before the first step had passed

    @property
    def lacks_memory(self) -> bool:
        return bool(_NO_MEMORY.search(self.reason))


_NO_MEMORY = re.compile(r"out of memory|finds no memory|_ALLOC_FAILED", re.IGNORECASE)
"""Messages of PyTorch, the drivers, Triton's launcher and Penstock (graphs: penstock/train/capture.py)."""


def first_steps(run: Run, steps: int) -> tuple[str, ...]:
    """Overrides that reduce a run to its first steps, without evaluation, checkpoints and other output."""
    peak, warmup = run.optimizer.learning_rate, run.schedule.warmup_steps
    if warmup > steps:  # the rates of the first steps are those of the full run
        peak, warmup = peak * steps / warmup, steps
    # The cache of the full run, so that the trials of other folders share it.
    cache = run.data.cache or str(Path(run.record.folder, "cache"))
    return (
        f"training.steps={steps}",
        f"optimizer.learning_rate={peak!r}",
        f"schedule.warmup_steps={warmup}",
        "schedule.decay=constant",
        "schedule.decay_steps=0",
        "evaluation.rows=0",
        "checkpoint.enabled=false",
        "record.every=1",
        "record.tensorboard=false",
        "record.wandb=off",
        "record.prometheus_port=0",
        "profile.start=0",
        f"data.cache={as_toml(cache)}",
    )


Watch = Callable[[Path], str | None]
"""Asked with the file of the metrics, again and again, whether a trial shall end at once.

None lets it go on. An empty text ends it with the figures of its steps so far, another text is why it has failed.
"""


def run_trial(trial: Trial, watch: Watch | None = None) -> Figures | Failure:
    """Train, and read the metrics; a trial that `watch` ends has the figures of its steps so far."""
    begin = time.perf_counter()
    trial.folder.mkdir(parents=True, exist_ok=True)
    log = trial.folder / f"{trial.name}.log"
    folder = RunFolder(trial.folder / trial.name)
    arguments = ["train", trial.target, *trial.overrides, f"record.folder={trial.folder}", "--name", trial.name]
    ask = (lambda: None) if watch is None else partial(watch, folder.metrics)
    code = run_ranks(trial.starter, arguments, trial.processes, log, seconds=trial.most_seconds, watch=ask)
    seconds = time.perf_counter() - begin
    if isinstance(code, str):
        return Failure(kind="failed", reason=code, seconds=seconds)
    if code is None:
        # The run may have made all steps: freeing much pinned memory takes many seconds, too.
        made = len(folder.metrics.read_text(encoding="utf-8").splitlines()) if folder.metrics.exists() else 0
        reason = f"not done after {trial.most_seconds:.0f} s, in which it made {made} steps"
        return Failure(kind="failed", reason=reason, seconds=seconds)
    if code:
        # The folder is made just before the first step, after all checks of the configuration.
        return failure_of(log.read_text(encoding="utf-8", errors="replace"), code, seconds, had_begun=folder.exists)
    lines = folder.metrics.read_text(encoding="utf-8").splitlines()
    return figures_of([json.loads(line) for line in lines], trial.warm_up, seconds)


def figures_of(lines: Sequence[dict[str, Any]], warm_up: int, seconds: float) -> Figures:
    """The figures of a run by its metrics, one line for each step, of which the first `warm_up` are not timed.

    A run that was ended during its warm-up has times too, those after its first step.
    """
    timed = lines[warm_up:] or lines[1:]
    times = tuple(float(line["step_seconds"]) for line in timed)
    return Figures(
        tokens_per_second_per_device=statistics.median(line["tokens_per_second_per_device"] for line in timed),
        step_seconds=times,
        step_seconds_median=statistics.median(times),
        step_seconds_p99=float(np.percentile(times, 99)),
        step_seconds_highest=max(times),
        model_flops_utilization=_median(timed, "model_flops_utilization"),
        power_watts=_median(timed, "power_watts"),
        peak_memory_bytes=max(line["peak_memory_bytes"] for line in lines),
        expert_load_max_over_mean=_median(timed, "expert_load_max_over_mean"),
        repeated_steps=sum(line["rows_left_out"] > 0 for line in timed),
        losses=tuple(line["loss"] for line in lines),
        seconds=seconds,
    )


def _median(lines: Sequence[dict[str, Any]], key: str) -> float | None:
    """None if the metrics have no value."""
    values = [line[key] for line in lines]
    return None if None in values else statistics.median(values)


def failure_of(log: str, code: int, seconds: float, *, had_begun: bool = True) -> Failure:
    """The reason of a failure, from the output of all its ranks."""
    # A rank that loses another rank reports that, possibly first, so its line counts only if there is no other.
    lines = [line.strip() for line in log.splitlines()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    causes = [line for line in errors if not line.startswith(_LOST)]
    raised = [line for line in lines if _EXCEPTION.match(line) and _LOST not in line]
    if causes:
        return Failure(kind="refused", reason=_shortened(causes[0]), seconds=seconds, had_begun=had_begun)
    reasons = [*raised, *(line for line in lines if _ENDED.match(line)), *errors]
    reason = reasons[0] if reasons else f"exit code {code} without a message"
    return Failure(kind="failed", reason=_shortened(reason), seconds=seconds, had_begun=had_begun)


_LOST = "another rank has ended"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)(: |$)")
_ENDED = re.compile(r"rank \d+ \(process \d+\)")


def _shortened(text: str) -> str:
    """Cut at a blank, or inside of a single long word."""
    if len(text) <= MOST_LETTERS:
        return text
    beginning = text[:MOST_LETTERS]
    return f"{beginning.rpartition(' ')[0] or beginning} ..."


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
            power_watts=outcome.power_watts,
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
