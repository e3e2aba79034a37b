"""What a newcomer waits for: the two commands in a fresh clone, help of every verb, and a plan of a large cluster.

python -m benchmarks.start --output benchmarks/results/start.json                         all, half an hour
python -m benchmarks.start --output benchmarks/results/start.json --parts help commands   seconds each

A part that is not measured keeps the figures that the file has. `train` clones the last commit and runs `make train`;
`test` runs `make test` in a clone as well, with the environment of the tests set up before. The machine must be idle.

Beside the seconds of a clock stand those of processors, of the command and of all processes that it waited for: they
depend less on the number of cores and on what else runs.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import record
from penstock.cli.main import VERBS
from penstock.tune.result_file import commit_of_code
from tests.fresh_machine import ROOT, bare_environment

TIMES = 5
"""How often what takes seconds is measured."""

COMMANDS = {
    "train_help": ("train", "--help"),
    "config_show": ("config", "show", "debug"),
    "plan": ("plan", "deepseek-v3", "--on", "1024xMI325X"),
}


class Seconds(NamedTuple):
    """Of a clock, and of processors in all processes together."""

    wall: float
    cpu: float


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds_of(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Seconds:
    """Seconds of a command that must succeed."""
    begin, cpu_before = time.perf_counter(), _children_cpu()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds = Seconds(time.perf_counter() - begin, _children_cpu() - cpu_before)
    print(f"{seconds.wall:8.2f} s, {seconds.cpu:8.2f} s of processors  {' '.join(command)}", flush=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return seconds


def median_of(words: Sequence[str], times: int) -> Seconds:
    """Median seconds of a command of penstock, each time in a process of its own that ends with an empty folder."""
    command, environment = [sys.executable, "-m", "penstock", *words], {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        runs = [seconds_of(command, Path(folder), environment) for _ in range(times)]
    return Seconds(*map(statistics.median, zip(*runs, strict=True)))


def in_a_clone(work: Callable[[Path, dict[str, str]], dict[str, Seconds]]) -> dict[str, Seconds]:
    """Clone the last commit into a temporary folder, and measure there, outside every virtual environment."""
    environment = bare_environment()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "penstock"
        seconds_of(["git", "clone", "--quiet", str(ROOT), str(clone)], Path(folder), environment)
        return work(clone, environment)


def train(times: int) -> dict[str, Seconds]:
    """`make train`: what comes before the training is what it does if it only has to print help."""
    del times

    def work(clone: Path, environment: dict[str, str]) -> dict[str, Seconds]:
        set_up = seconds_of(["make", "train", "RUN=--help"], clone, environment)
        return {"set_up": set_up, "training": seconds_of(["make", "train"], clone, environment)}

    return in_a_clone(work)


def test(times: int) -> dict[str, Seconds]:
    """`make test`, and before it the environment that it needs."""
    del times

    def work(clone: Path, environment: dict[str, str]) -> dict[str, Seconds]:
        set_up = seconds_of(["make", "setup"], clone, environment)
        return {"set_up": set_up, "tests": seconds_of(["make", "test"], clone, environment)}

    return in_a_clone(work)


def verbs_help(times: int) -> dict[str, Seconds]:
    """`--help` of the program and of each verb."""
    words = {"penstock": ("--help",), **{verb.name: (verb.name, "--help") for verb in VERBS}}
    return {name: median_of(each, times) for name, each in words.items()}


def commands(times: int) -> dict[str, Seconds]:
    """What should answer at once, and a plan."""
    return {name: median_of(words, times) for name, words in COMMANDS.items()}


PARTS: Mapping[str, Callable[[int], dict[str, Seconds]]] = {
    "help": verbs_help,
    "commands": commands,
    "train": train,
    "test": test,
}


def known(path: Path | None) -> dict[str, Any]:
    """Figures that the file has."""
    if path is None or not path.is_file():
        return {}
    numbers: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["numbers"]
    return numbers


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--times", type=int, default=TIMES, help="how often what takes seconds is measured")
    record.add_arguments(parser)
    options = parser.parse_args()
    numbers = known(options.output)
    for part in options.parts:
        measured = PARTS[part](options.times)
        numbers[part] = {
            "seconds": {name: seconds.wall for name, seconds in measured.items()},
            "cpu_seconds": {name: seconds.cpu for name, seconds in measured.items()},
            "commit": options.commit or commit_of_code(),
        }
    print(json.dumps(numbers, indent=1))
    record.write(options, numbers, cores=os.cpu_count(), times=options.times)


if __name__ == "__main__":
    main()
