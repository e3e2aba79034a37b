"""What a newcomer waits for: the two commands in a fresh clone, help of every verb, and a plan of a large cluster.

    python -m benchmarks.start --output benchmarks/results/start.json                         all, half an hour
    python -m benchmarks.start --output benchmarks/results/start.json --only help commands    seconds each

A part that is not measured keeps the figures that the file has. `train` clones the last commit and runs `make train`;
`test` runs `make test` in a clone, with the environment of the tests set up before. The machine must be idle. Seconds
of processors are those of a command and of all processes that it waited for.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import record
from penstock.cli.main import VERBS
from penstock.tune.kernels import commit_of_code
from tests.fresh_machine import ROOT, bare_environment

TIMES = 5  # how often what takes seconds is measured

COMMANDS = {
    "train_help": ("train", "--help"),
    "config_show": ("config", "show", "debug"),
    "plan": ("plan", "deepseek-v3", "--on", "1024xMI325X"),
}


class Seconds(NamedTuple):
    """Of a clock, and of processors in all processes together."""

    wall: float
    cpu: float


def seconds_of(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Seconds:
    """Seconds of a command that must succeed."""
    begin, cpu_before = time.perf_counter(), record.used_seconds()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds = Seconds(time.perf_counter() - begin, record.used_seconds() - cpu_before)
    record.show({"command": " ".join(command), **seconds._asdict()})
    if done.returncode:
        raise SystemExit(f"it failed with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return seconds


def medians_of(commands: Mapping[str, Sequence[str]]) -> dict[str, Seconds]:
    """Median seconds of commands of penstock, each time in a process of its own that begins in an empty folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    medians = {}
    for name, words in commands.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "penstock", *words]
            runs = [seconds_of(command, Path(folder), environment) for _ in range(TIMES)]
        medians[name] = Seconds(*map(statistics.median, zip(*runs, strict=True)))
    return medians


def in_a_clone(commands: Mapping[str, Sequence[str]]) -> dict[str, Seconds]:
    """Seconds of commands in a clone of the last commit, outside every virtual environment."""
    environment = bare_environment()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "penstock"
        seconds_of(["git", "clone", "--quiet", str(ROOT), str(clone)], Path(folder), environment)
        return {name: seconds_of(command, clone, environment) for name, command in commands.items()}


PARTS: Mapping[str, Callable[[], dict[str, Seconds]]] = {
    "help": lambda: medians_of({"penstock": ("--help",), **{verb.name: (verb.name, "--help") for verb in VERBS}}),
    "commands": lambda: medians_of(COMMANDS),
    # What comes before the training is what `make train` does if it only has to print help.
    "train": lambda: in_a_clone({"set_up": ("make", "train", "RUN=--help"), "training": ("make", "train")}),
    "test": lambda: in_a_clone({"set_up": ("make", "setup"), "tests": ("make", "test")}),
}


def main() -> None:
    """Measure the parts that are asked for."""
    options = record.parser(__doc__, only=[str]).parse_args()
    numbers = record.numbers_in(options.output)
    for part in options.only or PARTS:
        measured = PARTS[part]()
        numbers[part] = {
            "seconds": {name: seconds.wall for name, seconds in measured.items()},
            "cpu_seconds": {name: seconds.cpu for name, seconds in measured.items()},
            "commit": options.commit or commit_of_code(),
        }
    record.write(options, numbers, cores=os.cpu_count(), times=TIMES)


if __name__ == "__main__":
    main()
