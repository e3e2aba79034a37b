"""Runs the measurements of a file on the GPUs of this machine, side by side, until all are done or the time is over.

    python -m benchmarks.side_by_side benchmarks/jobs/tune.toml --folder measured --seconds 3000
    python -m benchmarks.side_by_side benchmarks/jobs/*.toml --only "one-*-8" "test-*" --folder measured

A job is a table of a file:

    [[jobs]]
    each = ["qwen3", "mixtral"]                     # a job for each, which {each} stands for; without it, one job
    name = "confirm-{each}"                         # of its log in the folder
    command = "python -m benchmarks.tune_sweep --case {each} --confirm --until {until} --folder {folder}/{each}"
    gpus = 1                                        # how many it has for itself
    beside = "tune-{each}"                          # on the GPU of this job, for figures that are compared
    after = ["sweep-{each}"]                        # jobs that must have ended, with any code
    seconds = 420                                   # after which it is ended

Jobs begin in the order of the files, or of the patterns of `--only`, each as soon as its GPUs are free. `{folder}` is
`--folder`, `{gpu}` the number of its first GPU, `{until}` the time, in seconds since 1970, from which it shall begin
nothing new. What a job leaves running is ended with it.
"""

import argparse
import os
import signal
import subprocess
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

LAST = 40.0
"""Seconds before the end after which a job shall begin nothing new."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command and what it needs."""

    name: str
    command: str
    gpus: int = 1
    beside: str = ""
    after: tuple[str, ...] = ()
    seconds: float = float("inf")


class _Running(NamedTuple):
    job: Job
    gpus: tuple[int, ...]
    process: subprocess.Popen[bytes]
    log: TextIO
    begun: float


@dataclass(kw_only=True)
class Queue:
    """Jobs that wait, and those that run on the GPUs that they were given."""

    waiting: list[Job]
    gpus: int
    folder: Path
    end: float  # seconds since 1970
    running: dict[str, _Running] = field(default_factory=dict)
    first_gpu: dict[str, int] = field(default_factory=dict)  # of jobs that have begun
    codes: dict[str, int] = field(default_factory=dict)  # of jobs that have ended

    def turn(self) -> None:
        """End what is over, then begin what can be; without anything running, what waits can never begin."""
        for each in [*self.running.values()]:
            if each.process.poll() is not None or time.time() > min(each.begun + each.job.seconds, self.end):
                self._close(each)
        for job in self._ready() if time.time() < self.end else ():
            if (gpus := self._free_for(job)) is not None:
                self.waiting.remove(job)
                self._begin(job, gpus)

    def _ready(self) -> list[Job]:
        return [job for job in self.waiting if set(job.after) <= self.codes.keys()]

    def stop(self) -> None:
        """End everything."""
        for each in [*self.running.values()]:
            self._close(each)

    def _free_for(self, job: Job) -> tuple[int, ...] | None:
        taken = {gpu for each in self.running.values() for gpu in each.gpus}
        if job.beside:
            gpu = self.first_gpu.get(job.beside)
            return None if gpu is None or gpu in taken else (gpu,)
        promised = {self.first_gpu.get(other.beside) for other in self._ready()}  # to those that can have no other
        free = [gpu for gpu in range(self.gpus) if gpu not in taken | promised]
        return tuple(free[: job.gpus]) if len(free) >= job.gpus else None

    def _begin(self, job: Job, gpus: tuple[int, ...]) -> None:
        self.first_gpu[job.name] = gpus[0]
        mine = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")  # of which the numbers here count
        visible = [mine[gpu] if gpu < len(mine) and mine[gpu] else f"{gpu}" for gpu in gpus]
        command = job.command.replace("{folder}", f"{self.folder}").replace("{gpu}", f"{gpus[0]}")
        log = (self.folder / f"{job.name}.log").open("a", encoding="utf-8")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible)}
        how = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True, "env": environment}
        process = subprocess.Popen(command.replace("{until}", f"{self.end - LAST:.0f}"), shell=True, **how)
        self.running[job.name] = _Running(job, gpus, process, log, time.time())
        print(f"{job.name} on {gpus}", flush=True)

    def _close(self, ended: _Running) -> None:
        del self.running[ended.job.name]
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(ended.process.pid, number)
            except ProcessLookupError:
                break
            try:
                ended.process.wait(2)
            except subprocess.TimeoutExpired:
                continue
        self.codes[ended.job.name] = ended.process.wait()
        ended.log.close()
        print(f"{ended.job.name}: code {ended.process.returncode} after {time.time() - ended.begun:.0f} s", flush=True)


def jobs_in(paths: Sequence[Path]) -> list[Job]:
    """The jobs of files, in their order."""
    jobs = list[Job]()
    for table in (table for path in paths for table in tomllib.loads(path.read_text(encoding="utf-8"))["jobs"]):
        for each in table.pop("each", ("",)):
            named = {key: _with_each(value, each) for key, value in table.items()}
            jobs.append(Job(**named | {"after": tuple(named.get("after", ()))}))
    names = [job.name for job in jobs]
    if wrong := [name for name in names if "/" in name or names.count(name) > 1]:
        files = ", ".join(map(str, paths))
        raise ValueError(f"{files}: jobs need names of their own without a slash; got {', '.join(wrong)}")
    if wrong := [job.name for job in jobs if job.gpus < 1 or (job.beside and job.gpus > 1)]:
        raise ValueError(f"{', '.join(wrong)}: a job has one GPU or more, and beside another one; fix: gpus")
    return jobs


def chosen(jobs: Sequence[Job], patterns: Sequence[str]) -> list[Job]:
    """The jobs whose names match, pattern by pattern; none waits for a job that is left out."""
    kept = {job.name: job for pattern in patterns for job in jobs if fnmatchcase(job.name, pattern)}
    if lost := [pattern for pattern in patterns if not any(fnmatchcase(job.name, pattern) for job in jobs)]:
        raise ValueError(f"--only: no job is named {', '.join(lost)}; allowed: {', '.join(job.name for job in jobs)}")
    if lost := [job.beside for job in kept.values() if job.beside and job.beside not in kept]:
        raise ValueError(f"--only: others run on the GPU of {', '.join(lost)}; fix: name them too")
    left_out = {job.name for job in jobs} - kept.keys()
    return [replace(job, after=tuple(name for name in job.after if name not in left_out)) for job in kept.values()]


def _with_each(value: Any, each: str) -> Any:
    if isinstance(value, list):
        return [_with_each(item, each) for item in value]
    return value.replace("{each}", each) if isinstance(value, str) else value


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path, nargs="+", metavar="FILE", help="TOML files")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="of the names of jobs")
    parser.add_argument("--folder", type=Path, required=True, help="of logs and results")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which everything is ended")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    waiting = chosen(jobs_in(options.jobs), options.only)
    queue = Queue(waiting=waiting, gpus=options.gpus, folder=options.folder, end=time.time() + options.seconds)
    try:
        queue.turn()
        while queue.running:
            time.sleep(0.2)
            queue.turn()
    finally:
        queue.stop()
    print("not begun: " + (", ".join(job.name for job in queue.waiting) or "none"), flush=True)


if __name__ == "__main__":
    main()
