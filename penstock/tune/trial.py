"""One configuration, trained for some steps in fresh processes of the product, and what its metrics say.

A trial is `penstock train` as a user would type it, so that what is measured is what is delivered: every rank is a new
process, and nothing of one trial is there in the next but caches on disk. What the ranks print goes to a file beside
the folder of the run; of a run that fails, one line of it is the reason.

The steps of a trial are the first ones of the run that it is cut from: its own warm-up as far as they reach, then the
peak rate, no decay. Nothing is evaluated or saved.

A trial ends with the process that asked for it, and after `most_seconds` in any case: ranks that wait for each other
would hold their GPUs for half an hour (`host.timeout_minutes`).
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

import numpy as np

from penstock.config.run import Run
from penstock.config.schema import as_toml
from penstock.train.run_folder import RunFolder

GRACE_SECONDS = 10.0
"""Time that processes have to end when they are asked to."""

MOST_LETTERS = 300
"""Of a reason."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is to be trained.

    Attributes:
        name: of the run and its folder.
        target: preset, TOML file or folder of a run.
        overrides: laid over it; those of `first_steps` among them.
        processes: ranks, all on this machine.
        warm_up: first steps that are not counted.
        folder: that gets the folder of the run, and what its ranks print.
        most_seconds: after which it is ended; 0 waits as long as it takes.
    """

    name: str
    target: str
    overrides: tuple[str, ...]
    processes: int
    warm_up: int
    folder: Path
    most_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a trial has shown; times and rates are those of the steps after warm-up.

    Attributes:
        tokens_per_second_per_device: median.
        step_seconds: of every step, in order.
        step_seconds_median: of them.
        step_seconds_p99: of them, between the two nearest.
        step_seconds_highest: of them.
        model_flops_utilization: median; None where the peak of the device is unknown.
        peak_memory_bytes: most of any rank, warm-up included.
        expert_load_max_over_mean: median; None for a dense model.
        repeated_steps: steps that were made twice because rows found no room (dispatch.row_capacity_factor).
        losses: of all steps, warm-up included.
        seconds: that the trial took, start and end of the processes included.
    """

    tokens_per_second_per_device: float
    step_seconds: tuple[float, ...]
    step_seconds_median: float
    step_seconds_p99: float
    step_seconds_highest: float
    model_flops_utilization: float | None
    peak_memory_bytes: int
    expert_load_max_over_mean: float | None
    repeated_steps: int
    losses: tuple[float, ...]
    seconds: float

    @property
    def jitter(self) -> float:
        """How much longer than usual a step in a hundred takes."""
        return self.step_seconds_p99 / self.step_seconds_median

    def flops_per_second(self, flops_per_token: float) -> float:
        """Achieved by each device, of a model that takes so many FLOPs for a token."""
        return self.tokens_per_second_per_device * flops_per_token


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A trial that did not come to its end.

    Attributes:
        kind: the product has refused it with a line for the user, or it failed.
        reason: one line.
        seconds: that it took.
        had_begun: it was about to make its first step, or had made some.
    """

    kind: Literal["refused", "failed"]
    reason: str
    seconds: float = 0.0
    had_begun: bool = True

    @property
    def is_mendable(self) -> bool:
        """Whether another configuration may do: this one was refused before the first step, or found no memory.

        A run that crashes, hangs, or ends because its loss is not finite must not hide behind one that does not.
        """
        return bool(_NO_MEMORY.search(self.reason)) or (self.kind == "refused" and not self.had_begun)


_NO_MEMORY = re.compile(r"out of memory|finds no memory|_ALLOC_FAILED", re.IGNORECASE)
"""As PyTorch, the drivers, the launcher of kernels and this product say it (graphs: penstock/train/captured.py)."""


def first_steps(run: Run, steps: int) -> tuple[str, ...]:
    """Overrides that cut a run down to its first steps, without anything that is not a step.

    Args:
        run: the whole run.
        steps: that are made of it.
    """
    peak, warmup = run.optimizer.learning_rate, run.schedule.warmup_steps
    if warmup > steps:
        peak, warmup = peak * steps / warmup, steps
    # Where the run itself would keep them: a copy in the folder of the trials would be made for each folder.
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


def run_trial(trial: Trial) -> Figures | Failure:
    """Train, and read what is left."""
    begin = time.perf_counter()
    trial.folder.mkdir(parents=True, exist_ok=True)
    log = trial.folder / f"{trial.name}.log"
    with log.open("wb") as output:
        code = _train(trial, output.fileno())
    seconds = time.perf_counter() - begin
    folder = RunFolder(trial.folder / trial.name)
    if code is None:
        # A run may have made all of them: to give back much pinned memory takes many seconds, too.
        made = len(folder.metrics.read_text(encoding="utf-8").splitlines()) if folder.metrics.exists() else 0
        reason = f"not done after {trial.most_seconds:.0f} s, in which it made {made} steps"
        return Failure(kind="failed", reason=reason, seconds=seconds)
    if code:
        # The folder is made last, before the first step: what is wrong with the configuration shows earlier.
        return failure_of(log.read_text(encoding="utf-8", errors="replace"), code, seconds, had_begun=folder.exists)
    lines = folder.metrics.read_text(encoding="utf-8").splitlines()
    return figures_of([json.loads(line) for line in lines], trial.warm_up, seconds)


def figures_of(lines: Sequence[dict[str, Any]], warm_up: int, seconds: float) -> Figures:
    """The figures of a run.

    Args:
        lines: of metrics.jsonl, one for each step.
        warm_up: first steps that are not counted.
        seconds: that the run took with all around it.
    """
    timed = lines[warm_up:]
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
    """None if the metrics have none."""
    values = [line[key] for line in lines]
    return None if None in values else statistics.median(values)


def failure_of(log: str, code: int, seconds: float, *, had_begun: bool = True) -> Failure:
    """Why a run has failed, from what its ranks have printed.

    A rank that loses another one says so, and may say it first: its line counts only if there is no other.

    Args:
        log: what they have printed.
        code: exit code of the product.
        seconds: that the run took.
        had_begun: it was about to make its first step, or had made some.
    """
    lines = [line.strip() for line in log.splitlines()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    causes = [line for line in told if not line.startswith(_LOST)]
    raised = [line for line in lines if _EXCEPTION.match(line) and _LOST not in line]
    if causes:
        return Failure(kind="refused", reason=_shortened(causes[0]), seconds=seconds, had_begun=had_begun)
    reasons = [*raised, *(line for line in lines if _ENDED.match(line)), *told]
    reason = reasons[0] if reasons else f"exit code {code}, and not a word about it"
    return Failure(kind="failed", reason=_shortened(reason), seconds=seconds, had_begun=had_begun)


_LOST = "another rank has ended"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)(: |$)")
_ENDED = re.compile(r"rank \d+ \(process \d+\)")


def _shortened(text: str) -> str:
    """Whole words, or the beginning of a single long one."""
    if len(text) <= MOST_LETTERS:
        return text
    beginning = text[:MOST_LETTERS]
    return f"{beginning.rpartition(' ')[0] or beginning} ..."


def _train(trial: Trial, output: int) -> int | None:
    """Exit code of the product; None if it was not done in time."""
    words = ["train", trial.target, *trial.overrides, f"record.folder={trial.folder}", "--name", trial.name]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *words, "--processes", str(trial.processes)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    with _ends_with_us(process):
        try:
            return process.wait(trial.most_seconds or None)
        except subprocess.TimeoutExpired:
            return None


@contextmanager
def _ends_with_us(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """While it is entered, what ends us ends the process and all that it has started."""
    previous = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                # The launcher leads a group of its own, in which the ranks are.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
