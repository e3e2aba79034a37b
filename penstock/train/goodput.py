"""Where the wall clock of a run goes, over all its processes: goodput.jsonl, which the first rank writes.

    {"begin": 1764201600.0, "step": 0, "queued": 0.0, "boot": "7a...", "up": 940.2}    a process goes on from step 0
    {"end": 1764201612.4, "step": 1, "seconds": {"start": 11.9, "data": 0.1, "training": 0.4}}
    {"end": 1764201622.9, "step": 30, "seconds": {"training": 10.1, "other": 0.4}}

Each moment of a process has one kind, so the kinds of `KINDS` and the time between processes add up to the wall clock
since the begin of the first process. A line is an interval. It is written after each of the first `WARM_UP` steps of a
process, at a checkpoint, and when the last line is `EVERY` seconds old. So steps that the next process makes again are
whole lines, and their time becomes `lost`, as does the time after the last line of a killed process: each `BEAT`
seconds a step sets the time of the file. Steps of the warm-up count as `training` for as long as the mean of the later
steps, and as `compile` beyond.

The system's clock may be set while a run lives. A process counts on its monotonic clock; between two processes of the
same boot of a machine `up`, the seconds since that boot, counts. A process that begins before the end of the one before
shows that the clock was ahead, and the time before is shortened by as much.

Goodput is the share of `training`.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from penstock.base.errors import RunFolderError, system_errors
from penstock.base.files import open_file, parse_json

WARM_UP = 3
"""First steps of a process: kernels are compiled in the first, passes captured in the next ones."""

EVERY = 10.0
"""Seconds after which a line is written."""

BEAT = 1.0
"""Seconds after which a step sets the time of the file."""

Kind = Literal["start", "data", "training", "evaluation", "checkpoint", "other", "lost"]

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "training": "Steps that are kept.",
        "data": "Waits for rows.",
        "compile": "First steps of each process, beyond the time of later ones.",
        "evaluation": "Held-out loss.",
        "checkpoint": "Training stands still for a checkpoint.",
        "start": "From the begin of a process to its first step.",
        "other": "Records, and garbage between steps.",
        "lost": "Steps that were made again or not finished, and the time of a killed process since its last record.",
        "queued": "Between processes, before the job of the next one began (Slurm).",
        "down": "Between processes otherwise, and a hang that ended the process before.",
    }
)
"""Kinds of the wall clock, with their meaning."""


@dataclass
class _Interval:
    """A line: seconds by kind, up to a step."""

    end: float
    step: int
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def training(self) -> float:
        return self.seconds.get("training", 0.0)


@dataclass
class _Process:
    """One process of the run; times are seconds since 1970."""

    begin: float
    step: int  # that it went on from
    queued: float
    boot: str = ""  # of its machine; empty if unknown
    up: float = 0.0  # seconds since that boot when it began
    intervals: list[_Interval] = field(default_factory=list)

    @property
    def end(self) -> float:
        return self.intervals[-1].end if self.intervals else self.begin

    def add(self, interval: _Interval) -> None:
        """Add a line. Those after the warm-up are kept as one."""
        before = self.intervals[-2].step if len(self.intervals) > 1 else self.step
        if before - self.step < WARM_UP:
            self.intervals.append(interval)
            return
        last = self.intervals[-1]
        last.end, last.step, last.seconds = interval.end, interval.step, _sum(last.seconds, interval.seconds)


def process_begin() -> float:
    """When this process began, in seconds since 1970, to 10 ms; now, where the system does not tell."""
    now = time.time()
    with suppress(OSError, ValueError, IndexError):
        ticks = float(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        return now - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    return now


def _boot() -> str:
    """The name that the system gave to this boot of the machine; empty where it gives none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def wall_seconds(path: Path) -> dict[str, float]:
    """Seconds of each kind in a file, up to its last line; empty without one.

    Raises a RunFolderError if the file cannot be read.
    """
    return _added_up(_read(path))


def goodput(seconds: Mapping[str, float]) -> float | None:
    """The share of training in some seconds; None without any."""
    total = sum(seconds.values())
    return seconds.get("training", 0.0) / total if total else None


class GoodputLedger:
    """The ledger of this process. Without a path, as on all ranks but the first, it only keeps the time.

    Args:
        path: the file, which earlier processes of the run may have begun.
        step: the run goes on from it.
        job_begin: seconds since 1970 when the job of this process began; None if unknown.
        begin: the same for this process.
    """

    def __init__(
        self, path: Path | None, step: int, job_begin: float | None = None, begin: float | None = None
    ) -> None:
        self._path, self._beat = path, 0.0
        self._clock = time.time() - time.monotonic()  # of this process: steps of the system's clock do not matter
        earlier = self._earlier()
        begin = process_begin() if begin is None else begin
        now = time.time()
        if earlier and begin < earlier[-1].end <= now:  # one process may train twice
            begin = earlier[-1].end
        queued = 0.0 if job_begin is None or not earlier else max(0.0, job_begin - earlier[-1].end)
        up = time.clock_gettime(time.CLOCK_BOOTTIME) - (now - begin)
        process = _Process(begin, step, queued, _boot(), up)
        self._before = _added_up([*earlier, process])
        self._own = process
        self._kind: Kind = "start"
        self._since = begin
        self._open: dict[str, float] = {}  # seconds since the last line
        self._open_kept = 0.0  # of these, training of finished steps
        self._step = step
        self._write({"begin": begin, "step": step, "queued": queued, "boot": process.boot, "up": process.up})

    def enter(self, kind: Kind) -> None:
        """Begin a kind of time; the one before ends."""
        now = time.monotonic() + self._clock
        self._open[self._kind] = self._open.get(self._kind, 0.0) + max(0.0, now - self._since)
        self._kind, self._since = kind, now

    def stepped(self, step: int) -> None:
        self._step = step
        self._open_kept = self._open.get("training", 0.0)
        if step - self._own.step <= WARM_UP or self._since - self._own.end >= EVERY:
            self.flush()
        elif self._path is not None and self._since - self._beat >= BEAT:
            with suppress(OSError):
                os.utime(self._path, (self._since, self._since))
            self._beat = self._since

    def flush(self) -> None:
        """Write a line, so that the next step begins another. Raises a RunFolderError if that fails."""
        self.enter(self._kind)
        interval = _Interval(self._since, self._step, self._open)
        self._open, self._open_kept = {}, 0.0
        line = {"end": interval.end, "step": interval.step, "seconds": interval.seconds}
        self._write(line)
        self._own.add(interval)

    def close(self) -> None:
        """Write the last line; a step that is not finished is lost."""
        self.enter("other")
        unfinished = self._open.get("training", 0.0) - self._open_kept
        if unfinished > 0:
            self._open["training"] = self._open_kept
            self._open["lost"] = unfinished
        self.flush()

    def seconds(self) -> dict[str, float]:
        """Seconds of each kind since the first process of the run began, up to the last `enter`."""
        process = _Process(self._own.begin, self._own.step, 0.0, intervals=[*self._own.intervals])
        process.intervals.append(_Interval(self._since, self._step, dict(self._open)))
        return _sum(self._before, _added_up([process]))

    def _earlier(self) -> list[_Process]:
        """Earlier processes of the run. What the last one has not recorded of itself gets a line."""
        if self._path is None or not (processes := _read(self._path)):
            return []
        last = processes[-1]
        end = self._path.stat().st_mtime
        # The write of a line takes some time, too. A later time than the next line would have is that of a copy.
        if BEAT / 10 < end - last.end <= EVERY:
            lost = _Interval(end, last.intervals[-1].step if last.intervals else last.step, {"lost": end - last.end})
            last.intervals.append(lost)
            self._write({"end": lost.end, "step": lost.step, "seconds": lost.seconds})
        return processes

    def _write(self, line: Mapping[str, object]) -> None:
        if self._path is None:
            return
        with (
            system_errors(RunFolderError, f"cannot write {self._path}"),
            self._path.open("ab", buffering=0) as file,
        ):
            file.write((json.dumps(line) + "\n").encode())


def _read(path: Path) -> list[_Process]:
    lines: list[bytes] = []
    with system_errors(RunFolderError, f"cannot read {path}"), suppress(FileNotFoundError), open_file(path) as file:
        lines = file.readlines()
    processes: list[_Process] = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # a line that was cut off or damaged
            entry = parse_json(line)
            if "begin" in entry:
                boot, up = str(entry.get("boot", "")), float(entry.get("up", 0.0))
                processes.append(_Process(float(entry["begin"]), int(entry["step"]), float(entry["queued"]), boot, up))
            elif processes:
                seconds = {kind: float(value) for kind, value in entry["seconds"].items() if kind in KINDS}
                processes[-1].intervals.append(_Interval(float(entry["end"]), int(entry["step"]), seconds))
    return processes


def _added_up(processes: Sequence[_Process]) -> dict[str, float]:
    total: dict[str, float] = {}
    gaps = _gaps(processes)
    for index, process in enumerate(processes):
        kept_step = min((later.step for later in processes[index + 1 :]), default=None)
        total = _sum(total, _of_process(process, kept_step))
        if index:
            queued = min(process.queued, gaps[index - 1])
            total = _sum(total, {"queued": queued, "down": gaps[index - 1] - queued})
    return {kind: total[kind] for kind in KINDS if total.get(kind, 0.0) > 0}


def _gaps(processes: Sequence[_Process]) -> list[float]:
    gaps = [
        later.up - (earlier.up + earlier.end - earlier.begin)
        if earlier.boot and earlier.boot == later.boot
        else later.begin - earlier.end
        for earlier, later in pairwise(processes)
    ]
    ahead = 0.0  # of the clock of a process, as later ones show
    for index in reversed(range(len(gaps))):
        gap = gaps[index] - ahead
        gaps[index], ahead = max(0.0, gap), max(0.0, -gap)
    return gaps


def _of_process(process: _Process, kept_step: int | None) -> dict[str, float]:
    """Seconds of a process, whose steps after `kept_step` were made again."""
    begins = [process.step, *(interval.step for interval in process.intervals)]  # steps before each interval
    warm = process.step + WARM_UP
    later = [
        (interval, interval.step - before)
        for interval, before in zip(process.intervals, begins, strict=False)
        if before >= warm
    ]
    steps = sum(count for _, count in later)
    usual = sum(interval.training for interval, _ in later) / steps if steps else None
    total: dict[str, float] = {}
    for interval, before in zip(process.intervals, begins, strict=False):
        seconds, steps = dict(interval.seconds), interval.step - before
        if before < warm and usual is not None and steps:
            seconds["compile"] = max(0.0, interval.training - usual * steps)
            seconds["training"] = interval.training - seconds["compile"]
        if kept_step is not None and steps and interval.step > kept_step:
            share = min(1.0, (interval.step - kept_step) / steps)
            again = share * seconds.get("training", 0.0)
            seconds["training"] = seconds.get("training", 0.0) - again
            seconds["lost"] = seconds.get("lost", 0.0) + again
        total = _sum(total, seconds)
    return total


def _sum(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    return {kind: left.get(kind, 0.0) + right.get(kind, 0.0) for kind in {**left, **right}}
