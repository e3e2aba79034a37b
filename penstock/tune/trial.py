"""Trains one configuration for some steps in fresh processes, and reads its metrics.

A trial is `penstock train` as a user would type it: every rank is a new process (penstock/tune/trial_ranks.py), so
trials share nothing but caches on disk. The ranks print to a file beside the folder of the run; if the run fails, one
line of that file is the reason.

A trial makes the first steps of the full run: its warm-up as far as they reach, then the peak rate without decay, and
no evaluation or checkpoint. It ends with the process that asked for it, and after `most_seconds` in any case, because
ranks that wait for each other would hold their GPUs for half an hour (`host.timeout_minutes`).
"""

import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.config.run import Run
from penstock.config.schema import as_toml
from penstock.train.run_folder import RunFolder
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
