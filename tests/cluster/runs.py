"""Small runs on the hosts of a cluster, and what they have computed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.cli.main import main
from tests.campaign.runs import FIGURES

ROOT = Path(__file__).parents[2]
BIN = str(Path(sys.executable).parent)  # of torchrun and penstock

STEPS, EVERY = 40, 5
RUN = (
    *("debug", "device=cpu", "training.micro_batch=1", "training.sequence_length=64", f"training.steps={STEPS}"),
    *("schedule.decay=constant", f"checkpoint.every={EVERY}", "evaluation.every=0"),
)
"""On four ranks, each with one row of the batch."""

ENDLESS = (*RUN, "training.steps=100000")
"""The same steps, and more: no machine is too fast to be disturbed."""

WAIT_SECONDS = 300.0

VARIABLES = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
"""Environment of a command on a host: the tests' own Python and sources."""


def print_script(path: Path, *options: str, run: tuple[str, ...] = RUN) -> Path:
    """Write the script that `penstock launch slurm` prints for two machines with two ranks each."""
    words = ["launch", "slurm", *run, "--nodes", "2", "--gpus-per-node", "2", *options, "--output", str(path)]
    assert main(words) == 0
    return path


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; the last may be half written."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def figures_of(run: Path) -> list[dict[str, Any]]:
    """Figures of each step that are the same however often the run was stopped."""
    names = [name for name in FIGURES if not name.startswith("evaluation")]  # only the last step has these
    return [{name: line.get(name) for name in names} for line in lines_of(run)]


def losses_of(run: Path) -> list[float]:
    """The loss curve."""
    return [line["loss"] for line in lines_of(run)]


def begins_of(run: Path) -> list[int]:
    """The step from which each process of a run began, by its ledger."""
    lines = map(json.loads, (run / "goodput.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "begin" in line]


def saved_steps(run: Path) -> list[int]:
    """Steps with a checkpoint."""
    return sorted(int(path.name.partition("-")[2]) for path in (run / "checkpoints").glob("step-??????"))


def train_here(folder: Path, steps: int, processes: int, *more: str) -> Path:
    """Train without a cluster, in a folder; returns the folder of the run."""
    words = [*RUN, f"training.steps={steps}", *more, "--processes", str(processes)]
    command, environment = [sys.executable, "-m", "penstock", "train", *words], {**os.environ, **VARIABLES}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs/debug"


def until(happens: Callable[[], bool], what: str, report: Callable[[], str], seconds: float = WAIT_SECONDS) -> float:
    """Wait for something; returns the seconds that it took. Fails with a report if it takes too long."""
    begin = time.monotonic()
    while not happens():
        assert time.monotonic() - begin < seconds, f"not within {seconds:.0f} s: {what}\n{report()}"
        time.sleep(0.25)
    return time.monotonic() - begin
